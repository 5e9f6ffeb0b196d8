"""Channels between machines over Redis streams.

Called by nodes that were given a Redis URL for their streams. A channel is a stream ``{name}`` whose entry ids are
``{generation}-{number}`` (Redis itself refuses repeats) and a second one ``{name}.r`` of at most one entry whose id is the
number processed. Each transport has one thread that sends (frames, reports, trims, renewals; everything pending in one
pipeline) and one that waits in a single blocking XREAD over all channels that have room, all reports, and a private wake-up
key; ``create``, ``connect`` and ``delete`` run on the caller's thread over a third connection.

What must never happen here: consumer groups, retries, reconnects, a MAXLEN on frames, or a stream made by a producer. The
first failure of any connection ends all channels of the transport with :class:`ChannelLost`; the job recovers.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from millstream_schema.channels import ChannelId
from millstream_schema.errors import ChannelLost, ChannelMissing, ConfigurationError

from .redis_ends import RedisReader, RedisWriter
from .redis_io import Incoming, Outgoing, Shared
from .redis_link import RedisLink, check_server, command

HOUR_MS = 3_600_000
FLUSH_SECONDS = 5.0


class RedisTransport:
    """All Redis channels of one subtask; see :class:`millstream_schema.channels.Transport`.

    ``url``: ``redis://``, ``rediss://`` or ``unix://``. ``prefix``: first part of every key. ``expire_ms``: channels that
    nobody renewed for so long go away, at least one hour. ``connect_timeout``, ``io_timeout``: seconds.
    Raises :class:`ConfigurationError` when the server is older than 6.2, evicts, or is a cluster; :class:`ChannelLost`
    when it cannot be reached.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "millstream",
        *,
        expire_ms: int = 2 * HOUR_MS,
        connect_timeout: float = 5.0,
        io_timeout: float = 10.0,
    ) -> None:
        if expire_ms < HOUR_MS:
            raise ConfigurationError(
                f"expire_ms is {expire_ms}: a channel must outlive the longest epoch, give at least {HOUR_MS} (one hour)"
            )
        self._prefix = prefix
        self._expire = b"%d" % expire_ms
        self._closed = False
        links: list[RedisLink] = []
        try:
            for role in ("control", "outgoing", "incoming"):
                links.append(RedisLink(url, f"{prefix}.{role}", connect_timeout, io_timeout))
            self._control, self._out_link, self._in_link = links
            check_server(self._control)
            # Unique as long as this connection lives, which is as long as the key is used.
            (client,) = self._control.check([command(b"CLIENT", b"ID")])
            self._wake_key = f"{prefix}.wake.{int(client)}".encode()
            self._control.check([command(b"DEL", self._wake_key)])
        except BaseException:
            for link in links:
                link.break_off()
            raise
        self._shared = Shared(self._wake_key, io_timeout / 2)
        self._outgoing = Outgoing(self._shared, self._out_link, self._expire, expire_ms / 4000)
        self._incoming = Incoming(self._shared, self._in_link)
        self._outgoing.start()
        self._incoming.start()

    def create(self, channel: ChannelId, capacity: int) -> RedisReader:
        name = channel.name(self._prefix)
        key, progress = name.encode(), f"{name}.r".encode()
        self._shared.check()
        self._shared.retire(name, FLUSH_SECONDS)
        commands = [command(b"MULTI"), command(b"DEL", key, progress)]
        for stream in (key, progress):
            # The only way to an empty stream whose last id is 0-0; the group goes at once.
            commands.append(command(b"XGROUP", b"CREATE", stream, b"g", b"0", b"MKSTREAM"))
            commands.append(command(b"XGROUP", b"DESTROY", stream, b"g"))
            commands.append(command(b"PEXPIRE", stream, self._expire))
        self._control.check([*commands, command(b"EXEC")])
        reader = RedisReader(name, channel.generation, capacity, self._shared.poke)
        self._shared.add_reader(reader)
        return reader

    def connect(self, channel: ChannelId, capacity: int) -> RedisWriter:
        name = channel.name(self._prefix)
        self._shared.check()
        (exists,) = self._control.check([command(b"EXISTS", name.encode())])
        if not exists:
            raise ChannelMissing(f"channel {name} does not exist: its consumer has to create it first")
        writer = RedisWriter(name, channel.generation, self._shared.poke, self._shared.answers, FLUSH_SECONDS)
        self._shared.add_writer(writer)
        return writer

    def wait(self, timeout: float) -> None:
        self._shared.wait(timeout)

    def wake(self) -> None:
        self._shared.arrived.set()

    def delete(self, channels: Iterable[ChannelId]) -> None:
        names = [channel.name(self._prefix) for channel in channels]
        keys = [key.encode() for name in names for key in (name, f"{name}.r")]
        if keys:
            self._control.check([command(b"UNLINK", *keys)])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = monotonic() + FLUSH_SECONDS
        self._shared.close(deadline)
        self._shared.stop()
        if self._shared.failure is None:  # else the wake-up that ends the blocking read may never come
            self._outgoing.join(max(0.1, deadline - monotonic()))
            self._incoming.join(max(0.1, deadline - monotonic()))
        self._out_link.break_off()
        self._in_link.break_off()
        self._outgoing.join()
        self._incoming.join()
        try:
            self._control.run([command(b"DEL", self._wake_key)])
        except ChannelLost:  # it expires by itself
            pass
        self._control.break_off()
