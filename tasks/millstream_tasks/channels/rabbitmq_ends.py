"""Both ends of a channel that is a RabbitMQ queue, and what their two I/O threads share with the subtask's thread.

Made by :class:`millstream_tasks.channels.rabbitmq.RabbitTransport`. What must never happen here: an AMQP method called by
the subtask's thread, or a delivery tag used after its AMQP channel is gone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .broker_ends import BrokerReader, BrokerWriter


class RabbitReader(BrokerReader):
    """The consuming thread receives, the publishing one sends the reports. ``unacknowledged`` is the consuming thread's alone."""

    def __init__(self, name: str, capacity: int, amqp_channel: int, poke: Callable[[], None]) -> None:
        super().__init__(name, capacity, poke)
        self.amqp_channel = amqp_channel
        self.unacknowledged: deque[tuple[int, int]] = deque()

    def acknowledge(self) -> int:
        """Delivery tag up to which everything is processed now; 0 when there is nothing new. Consuming thread only.

        A prefix of the deliveries in their order, as one ack covers all before it; repeats count with their number.
        """
        done, tag = self.done, 0
        unacknowledged = self.unacknowledged
        while unacknowledged and unacknowledged[0][0] <= done:
            tag = unacknowledged.popleft()[1]
        return tag


class RabbitWriter(BrokerWriter):
    """The publishing thread sends and counts confirms, the consuming one receives the reports. ``head``: the frame head of each publish."""

    def __init__(
        self, name: str, amqp_channel: int, head: bytes, poke: Callable[[], None], answers: threading.Condition, flush_seconds: float
    ) -> None:
        super().__init__(name, poke, answers, flush_seconds)
        self.amqp_channel = amqp_channel
        self.head = head
