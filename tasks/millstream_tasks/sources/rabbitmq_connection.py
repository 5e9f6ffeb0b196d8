"""One consuming connection to one RabbitMQ queue, for one thread, that never waits for a message longer than it is told.

Called by the queue reader. What must never happen here: a second consumer on the queue (the consumer is exclusive, so a reader that was replaced
and still lives keeps its successor waiting instead of sharing the queue with it), or an acknowledgement on a connection other than the delivery's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import SplitResult, unquote

from millstream_schema.errors import ConfigurationError, SourceError

TICK_SECONDS = 1.0
SOCKET_SECONDS = 5


class Lost(Exception):
    """The connection is gone or cannot be had now; its delivery tags are void. Caught by the queue reader."""


class QueueConnection:
    """Consumes ``queue`` with a prefetch window; each message goes to ``on_message`` (an ``amqp.Message``, body in bytes)."""

    def __init__(self, url: SplitResult, queue: str, prefetch: int, heartbeat: int, on_message: Callable[[Any], None]) -> None:
        try:
            import amqp
        except ImportError as error:
            raise ConfigurationError("RabbitMQ queues need a client: pip install 'millstream[rabbitmq]'") from error
        self._queue = queue
        self._errors: tuple[type[BaseException], ...] = (amqp.AMQPError, OSError)
        self._on_message = on_message
        self._cancelled = False
        self._ticked = time.monotonic()
        self._connection: Any = amqp.Connection(
            host=f"{url.hostname or 'localhost'}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}",
            userid=unquote(url.username or "guest"),
            password=unquote(url.password or "guest"),
            virtual_host=unquote(url.path[1:]) or "/",
            ssl=url.scheme == "amqps",
            connect_timeout=SOCKET_SECONDS,
            read_timeout=SOCKET_SECONDS,
            write_timeout=SOCKET_SECONDS,
            heartbeat=heartbeat,
        )
        self._consume(amqp, prefetch)

    def _consume(self, amqp: Any, prefetch: int) -> None:
        """Connect and consume. Raises :class:`Lost` for what may pass, SourceError for what will not; then everything is closed."""
        queue = self._queue
        try:
            self._connection.connect()
            # A body stays bytes whatever its content encoding says: decoding is the source's, under its poison policy.
            self._channel: Any = amqp.Channel(self._connection, auto_decode=False)
            self._channel.open()
            self._channel.queue_declare(queue, passive=True)
            self._channel.basic_qos(0, prefetch, False)
            self._channel.basic_consume(queue, no_ack=False, exclusive=True, callback=self._on_message, on_cancel=self._on_cancel)
        except amqp.AccessRefused as error:
            self.close()
            if "exclusive" in str(error):
                raise Lost(f"queue {queue} has another consumer: {error}") from error
            raise SourceError(f"RabbitMQ refuses access to queue {queue}: {error}") from error
        except amqp.NotFound as error:
            self.close()
            raise SourceError(f"RabbitMQ has no queue {queue}: {error}. Declare it before the job starts.") from error
        except self._errors as error:
            self.close()
            raise Lost(str(error) or type(error).__name__) from error
        except BaseException:
            self.close()
            raise

    def drain(self, timeout: float) -> bool:
        """Take in what the broker sent, at most one message, waiting up to ``timeout`` seconds. False when nothing came. Raises :class:`Lost`."""
        try:
            self._connection.drain_events(timeout=timeout)
        except TimeoutError:
            return False
        except self._errors as error:
            raise Lost(str(error) or type(error).__name__) from error
        if self._cancelled:
            raise Lost(f"the broker ended the consumer of queue {self._queue}")
        return True

    def tick(self) -> None:
        """Send a heartbeat when one is due, notice a peer that sends none. Raises :class:`Lost`."""
        now = time.monotonic()
        if now - self._ticked < TICK_SECONDS:
            return
        self._ticked = now
        try:
            self._connection.heartbeat_tick()
        except self._errors as error:
            raise Lost(str(error) or type(error).__name__) from error

    def acknowledge(self, acks: Sequence[tuple[int, bool]]) -> None:
        """Send acknowledgements as (tag, multiple). Raises :class:`Lost`; the broker then delivers again what it did not take."""
        try:
            for tag, multiple in acks:
                self._channel.basic_ack(tag, multiple=multiple)
        except self._errors as error:
            raise Lost(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Close; unacknowledged messages go back to the queue. Errors are of no interest any more."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.close()
        except self._errors:
            pass
        except (AttributeError, TypeError, RuntimeError):
            pass  # what py-amqp raises from a connection that was only half opened
        finally:
            connection.collect()

    def _on_cancel(self, consumer_tag: str) -> None:
        self._cancelled = True
