"""Deliveries to queues of the Celery broker: small messages, published after their lease is committed. A second door to kombu, beside ``messages``.

Used by the coordinator's sweep, which is never kept waiting: a thread of its own sends. A message is a hint: what is lost is published again when its lease is over. What must
never
happen here: a delivery counted as tried that never left, when that can be known.
"""

from __future__ import annotations

from collections import deque

import structlog
from celery import Celery
from kombu import Connection, Producer

from millstream_coordinator.delivery_sweep import Message

from .messages import Carrier

log = structlog.get_logger(__name__)
ROOM = 500
"""Messages that wait for the thread at most."""
CONFIRM_SECONDS = 10.0


class Publications(Carrier):
    """Publishes over the broker of a Celery application. Its thread starts with the first question for room."""

    def __init__(self, app: Celery, prefix: str) -> None:
        super().__init__(app, prefix)
        self._leaving: deque[Message] = deque()
        self._back: deque[Message] = deque()
        self._connected = False

    def room(self) -> int:
        """How many messages it takes now; 0 while the broker cannot be reached."""
        if not self._threads:
            self._spawn("publish", self._publish_all)
        return max(0, ROOM - len(self._leaving)) if self._connected else 0

    def publish(self, messages: list[Message]) -> None:
        """Take them over; never waits."""
        self._leaving.extend(messages)
        self._ready.set()

    def unsent(self) -> list[Message]:
        """Those the broker did not take, since the last call."""
        return [self._back.popleft() for _ in range(len(self._back))]

    def _connection(self) -> Connection:
        """With confirmations: a message on a channel that is closed already would be lost without a word."""
        return self._app.connection_for_write(connect_timeout=5, transport_options={"confirm_publish": True})

    def _publish_all(self) -> None:
        try:
            with self._connection() as connection, connection.channel() as channel:
                producer = Producer(channel, serializer="json")
                self._connected = True
                while not self._closed:
                    self._ready.wait(1.0)
                    self._ready.clear()
                    while self._leaving:
                        if not self._sent(connection, producer, self._leaving[0]):
                            self._back.append(self._leaving.popleft())
                            return  # its failure may have closed the channel: a new one for the rest
                        self._leaving.popleft()
        finally:
            self._connected = False
            while self._leaving:
                self._back.append(self._leaving.popleft())

    def _sent(self, connection: Connection, producer: Producer, message: Message) -> bool:
        """Whether the broker took it. What cannot be published at all (a queue that is declared otherwise, or not to be made) holds up no other."""
        try:
            self._send(producer, message)
        except (*connection.connection_errors, OSError):
            raise
        except Exception as exc:  # whatever Celery and the transports raise about one message
            log.warning(
                "a delivery could not be published", target=message.target, task=message.event, error=f"{type(exc).__name__}: {exc}"
            )
            return False
        return True

    def _send(self, producer: Producer, message: Message) -> None:
        if message.celery_task:
            self._app.send_task(
                message.celery_task, args=[message.body], queue=message.target, producer=producer, expires=message.expires_s, ignore_result=True, retry=False,
                confirm_timeout=CONFIRM_SECONDS,
            )  # fmt: skip
            return
        queue = self._app.amqp.queues[message.target]
        producer.publish(
            message.body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], delivery_mode=2, expiration=message.expires_s, retry=False,
            confirm_timeout=CONFIRM_SECONDS,
        )  # fmt: skip
