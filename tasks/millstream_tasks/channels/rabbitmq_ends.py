"""Both ends of a channel that is a RabbitMQ queue, and what their two I/O threads share with the subtask's thread.

Made by :class:`millstream_tasks.channels.rabbitmq.RabbitTransport`. What must never happen here: an AMQP method called by
the subtask's thread, or a delivery tag used after its AMQP channel is gone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from millstream_schema.channels import Frame
from millstream_schema.errors import ChannelError, ChannelLost


class RabbitReader:
    """See :class:`millstream_schema.channels.ChannelReader`.

    ``frames`` and ``unacknowledged`` are filled by the consuming thread, which alone uses the latter; ``done`` and
    ``closing`` are the subtask thread's, ``told`` the publishing thread's: one writer each, so no lock is needed.
    """

    def __init__(self, name: str, capacity: int, amqp_channel: int, poke: Callable[[], None]) -> None:
        self.name = name
        self.capacity = capacity
        self.amqp_channel = amqp_channel
        self.frames: deque[Frame] = deque()
        self.unacknowledged: deque[tuple[int, int]] = deque()
        self.done = 0
        self.told = 0
        self.closing = False
        self.failure: ChannelError | None = None
        self._step = max(1, capacity // 2)
        self._poke = poke

    def take(self) -> Frame | None:
        if self.failure is not None:  # what is buffered died with the connection
            raise self.failure
        if self.frames:
            return self.frames.popleft()
        if self.closing:
            raise ChannelLost(f"the reader of channel {self.name} is closed")
        self.report()
        return None

    def processed(self, number: int) -> None:
        if number > self.done:
            self.done = number
            if number - self.told >= self._step:
                self._poke()

    def report(self) -> None:
        """Let the I/O threads acknowledge and report what is not yet."""
        if self.done > self.told:
            self._poke()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.frames.clear()
            self._poke()

    def acknowledge(self) -> int:
        """Delivery tag up to which everything is processed now; 0 when there is nothing new. Consuming thread only.

        A prefix of the deliveries in their order, as one ack covers all before it; repeats count with their number.
        """
        done, tag = self.done, 0
        unacknowledged = self.unacknowledged
        while unacknowledged and unacknowledged[0][0] <= done:
            tag = unacknowledged.popleft()[1]
        return tag


class RabbitWriter:
    """See :class:`millstream_schema.channels.ChannelWriter`.

    ``pending`` is filled by the subtask's thread and emptied by the publishing one, which also counts ``confirmed``;
    ``progress`` is the consuming thread's.
    """

    def __init__(
        self, name: str, amqp_channel: int, head: bytes, poke: Callable[[], None], answers: threading.Condition, flush_seconds: float
    ) -> None:
        self.name = name
        self.amqp_channel = amqp_channel
        self.head = head
        self.pending: deque[Frame] = deque()
        self.put_count = 0
        self.confirmed = 0
        self.progress = 0
        self.failure: ChannelError | None = None
        self.closed = False
        self._poke = poke
        self._answers = answers
        self._flush_seconds = flush_seconds

    def put(self, frame: Frame) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise ChannelLost(f"the writer of channel {self.name} is closed")
        self.put_count += 1
        self.pending.append(frame)
        self._poke()

    @property
    def reported(self) -> int:
        if self.failure is not None:
            raise self.failure
        return self.progress

    def close(self) -> None:
        if not self.closed:
            self.close_by(monotonic() + self._flush_seconds)

    def close_by(self, deadline: float) -> None:
        """Wait until RabbitMQ confirmed every frame, at most until ``deadline`` (monotonic seconds), and close."""
        self.closed = True
        self._poke()
        with self._answers:
            self._answers.wait_for(lambda: self.confirmed >= self.put_count or self.failure is not None, max(0.0, deadline - monotonic()))
        self.failure = self.failure or ChannelLost(f"the writer of channel {self.name} is closed")
        self.pending.clear()
        self._poke()
