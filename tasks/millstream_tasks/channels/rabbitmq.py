"""Channels between machines over RabbitMQ's classic queues.

Called by nodes that were given a RabbitMQ URL for their streams. A channel is a durable classic queue ``{name}`` whose
messages are frames, and a second one ``{name}.r`` of at most one message, the number processed (drop-head). Publishing is
mandatory over the default exchange with pipelined confirms; consuming has one AMQP channel, and so one prefetch window, per
channel. Messages are transient (delivery mode 1; persistent ones halve the rate of 64 KiB frames): a restart of the broker,
or of the node that holds the queue, ends the connections or consumers of both ends anyway, the job recovers into new
channels, and no frame of the old ones is ever read again. So a lost tail is never lost quietly.

What must never happen here: quorum queues (their delivery limit drops frames), ``reject-publish`` or a length limit on
frames, a shared prefetch window, or a reconnect. The first failure of either connection ends all channels of the transport
with :class:`ChannelLost`; the job recovers. A memory alarm is no failure: publishing stalls, consuming goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any
from urllib.parse import quote

from millstream_schema.channels import ChannelId
from millstream_schema.errors import ChannelLost, ChannelMissing, ConfigurationError

from .rabbitmq_ends import RabbitReader, RabbitWriter
from .rabbitmq_io import Consumer, Publisher, Shared
from .rabbitmq_link import TRANSIENT, AccessRefused, AMQPError, AmqpLink, NotFound, connection_options

HOUR_MS = 3_600_000
FLUSH_SECONDS = 5.0
MAX_PREFETCH = 65535
MAX_NAME = 253


class RabbitTransport:
    """All RabbitMQ channels of one subtask; see :class:`millstream_schema.channels.Transport`.

    ``url``: ``amqp://`` or ``amqps://``. ``prefix``: first part of every queue's name. ``expire_ms``: queues that nobody
    uses for so long go away, at least one hour. ``heartbeat``, ``connect_timeout``, ``io_timeout``, ``write_timeout``:
    seconds. ``tls``: options for py-amqp's ``ssl`` (``ca_certs``, ``certfile``, …) with ``amqps``.
    Raises :class:`ConfigurationError` for a wrong URL or setting, :class:`ChannelLost` when RabbitMQ cannot be reached.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "millstream",
        *,
        expire_ms: int = 2 * HOUR_MS,
        heartbeat: float = 20.0,
        connect_timeout: float = 5.0,
        io_timeout: float = 10.0,
        write_timeout: float = 20.0,
        tls: Mapping[str, Any] | None = None,
    ) -> None:
        if expire_ms < HOUR_MS:
            raise ConfigurationError(
                f"expire_ms is {expire_ms}: channels must outlive the longest epoch, give {HOUR_MS} (one hour) or more"
            )
        options = connection_options(url)
        if tls is not None:
            options["ssl"] = {**(options["ssl"] or {}), **tls}
        self._secret = str(options["password"])
        self._prefix = prefix
        self._expire_ms = expire_ms
        self._io_timeout = io_timeout
        self._closed = False
        self._shared = Shared()
        timing = {"heartbeat": heartbeat, "connect_timeout": connect_timeout, "io_timeout": io_timeout}
        outgoing = AmqpLink(options, on_delivery=_nothing, **timing)
        incoming = AmqpLink(options, on_delivery=self._on_delivery, **timing)
        try:
            outgoing.connect()
            incoming.connect()
            self._publisher = Publisher(self._shared, outgoing, self._describe, write_timeout, delivery_mode=TRANSIENT)
            self._consumer = Consumer(self._shared, incoming, self._describe, write_timeout)
        except (AMQPError, OSError) as exc:
            outgoing.break_off()
            incoming.break_off()
            raise ChannelLost(f"RabbitMQ at {options['host']} cannot be reached: {self._describe(exc)}") from None
        self._publisher.start()
        self._consumer.start()

    def create(self, channel: ChannelId, capacity: int) -> RabbitReader:
        name = self._name(channel)
        if not 0 < capacity <= MAX_PREFETCH:
            raise ConfigurationError(f"capacity is {capacity}: RabbitMQ takes prefetch windows from 1 to {MAX_PREFETCH}")
        self._shared.retire(name, FLUSH_SECONDS)
        return self._consumer.call(lambda: self._create(name, capacity), 2 * self._io_timeout)

    def connect(self, channel: ChannelId, capacity: int) -> RabbitWriter:
        name = self._name(channel)
        return self._consumer.call(lambda: self._connect(name), 2 * self._io_timeout)

    def wait(self, timeout: float) -> None:
        self._shared.wait(timeout)

    def wake(self) -> None:
        self._shared.arrived.set()

    def delete(self, channels: Iterable[ChannelId]) -> None:
        queues = [queue for channel in channels for queue in (self._name(channel), self._name(channel) + ".r")]
        if queues:
            self._consumer.call(lambda: self._delete(queues), 2 * self._io_timeout + len(queues))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = monotonic() + FLUSH_SECONDS
        self._shared.close(deadline)
        for lane in (self._publisher, self._consumer):
            lane.stop()
        for lane in (self._publisher, self._consumer):
            lane.join()

    # ------------------------------------------------------------------ on the consuming thread

    def _create(self, name: str, capacity: int) -> RabbitReader:
        channel = self._consumer.link.channel()
        for queue in (name, name + ".r"):
            channel.queue_delete(queue)
        common = {"x-queue-type": "classic", "x-expires": self._expire_ms}
        reports = {**common, "x-max-length": 1, "x-overflow": "drop-head"}
        channel.queue_declare(name, durable=True, auto_delete=False, arguments=common)
        channel.queue_declare(name + ".r", durable=True, auto_delete=False, arguments=reports)
        channel.basic_qos(0, capacity, False)
        reader = RabbitReader(name, capacity, channel.channel_id, self._poke)
        self._adopt(channel, reader, name, no_ack=False)
        return reader

    def _connect(self, name: str) -> RabbitWriter:
        channel = self._consumer.link.channel()
        try:
            for queue in (name, name + ".r"):
                channel.queue_declare(queue, passive=True)
            head = self._publisher.head(name)
            writer = RabbitWriter(name, channel.channel_id, head, self._publisher.poke, self._shared.answers, FLUSH_SECONDS)
            self._adopt(channel, writer, name + ".r", no_ack=True)
        except NotFound:
            channel.close()
            raise ChannelMissing(f"channel {name} does not exist: its consumer has to create it first") from None
        except AccessRefused as exc:
            self._consumer.ends.pop(channel.channel_id, None)
            channel.close()
            raise ChannelLost(f"channel {name} refused this producer, it has another one: {self._describe(exc)}") from None
        return writer

    def _adopt(self, channel: Any, end: RabbitReader | RabbitWriter, queue: str, *, no_ack: bool) -> None:
        """Consume ``queue`` for ``end``. Exclusively: a second consumer would take away half of the frames."""

        def cancelled(consumer_tag: str) -> None:
            if isinstance(end, RabbitWriter):
                text = f"channel {end.name} was deleted; a newer generation of the job may exist"
                self._shared.fail_one(end, ChannelMissing(text))
            elif not end.closing:
                self._shared.fail_one(end, ChannelLost(f"channel {end.name} was deleted under its reader"))

        self._consumer.ends[channel.channel_id] = end
        channel.basic_consume(queue, no_ack=no_ack, exclusive=True, on_cancel=cancelled)
        self._shared.add(end)

    def _delete(self, queues: list[str]) -> None:
        channel = self._consumer.link.channel()
        for queue in queues:
            channel.queue_delete(queue)  # RabbitMQ answers alike when there is none
        channel.close()

    # ------------------------------------------------------------------ small things

    def _poke(self) -> None:
        self._consumer.poke()
        self._publisher.poke()

    def _on_delivery(self, amqp_channel: int, tag: int, number: int, data: bytes) -> None:
        self._consumer.on_delivery(amqp_channel, tag, number, data)

    def _name(self, channel: ChannelId) -> str:
        name = channel.name(self._prefix)
        if len(name.encode()) > MAX_NAME:
            raise ConfigurationError(f"the queue name {name} is longer than {MAX_NAME} bytes: shorten the job's or the edge's name")
        return name

    def _describe(self, exc: BaseException) -> str:
        text = f"{type(exc).__name__}: {exc}"
        # A guest's password is no secret, and replacing the word would spoil every text about the user.
        return text if self._secret == "guest" else text.replace(self._secret, "***").replace(quote(self._secret, safe=""), "***")


def _nothing(amqp_channel: int, tag: int, number: int, data: bytes) -> None:
    """Nothing arrives here: the publishing connection does not consume."""
