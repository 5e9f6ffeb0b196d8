"""Channels between processes of one machine: one AF_UNIX stream socket per channel, no threads, no broker.

Called by nodes that run their subtasks as processes (``millstream dev --nodes N``, or a worker that has both ends). The
consumer listens, the producer connects and says which channel it means; sockets are non-blocking and are driven by the
caller's own thread inside ``wait``, ``take`` and ``put``. The socket is the channel: it goes when its consumer closes.

::

    producer -> consumer   hello (once), then frames: number u64, length u32, data; length 0xFFFFFFFF is "bye"
    consumer -> producer   u64: highest number processed; the two largest values mean "refused" and "channel is gone"

What must never happen here: a frame handed out that came from a producer which did not name this very channel and
generation, or reading on while ``capacity`` frames are unprocessed (a held channel must push back through the socket).
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterable
from time import monotonic

from millstream_schema.channels import ChannelId
from millstream_schema.errors import ChannelLost, ChannelMissing, ConfigurationError

from .unix_reader import UnixReader
from .unix_wire import HELLO_DELETE, HELLO_PRODUCE, MAX_PATH, WakePipe, hello, socket_name
from .unix_writer import UnixWriter

FLUSH_SECONDS = 5.0
REPORT_AGAIN_SECONDS = 0.05


class UnixTransport:
    """All AF_UNIX channels of one subtask; see :class:`millstream_schema.channels.Transport`.

    ``runtime_dir``: directory of the sockets, made with mode 0700 when it is missing; both ends need the same one.
    ``max_frame``: largest frame in bytes that is sent or accepted. Raises :class:`ConfigurationError` when the directory's
    path is too long for a socket address or belongs to somebody else.
    """

    def __init__(self, runtime_dir: str | os.PathLike[str], max_frame: int = 16 * 1024 * 1024) -> None:
        self._dir = os.path.abspath(os.fspath(runtime_dir))
        longest = len(os.fsencode(os.path.join(self._dir, socket_name("x"))))
        if longest > MAX_PATH:
            raise ConfigurationError(
                f"runtime_dir {self._dir} is too long for socket addresses ({longest} bytes with the file name, {MAX_PATH} "
                "allowed): choose a shorter one, for instance below /run or /tmp"
            )
        if not 0 < max_frame < 0xFFFFFFFF:
            raise ConfigurationError(f"max_frame is {max_frame}: give a number of bytes from 1 to 4294967294")
        os.makedirs(self._dir, mode=0o700, exist_ok=True)
        if os.stat(self._dir).st_uid != os.geteuid():
            raise ConfigurationError(f"runtime_dir {self._dir} belongs to another user: give each user an own directory")
        self._max_frame = max_frame
        self._selector = selectors.DefaultSelector()
        self._wake = WakePipe(self._selector)
        self._readers: dict[str, UnixReader] = {}
        self._writers: list[UnixWriter] = []
        self._closed = False

    def create(self, channel: ChannelId, capacity: int) -> UnixReader:
        """See the port. Raises :class:`ChannelLost` when a living process already consumes this channel."""
        self._check_open()
        name = channel.name()
        old = self._readers.pop(name, None)
        if old is not None:
            old.close()
        listener = self._listen(name, self._path(name))
        reader = UnixReader(name, channel.generation, capacity, self._max_frame, listener, self._path(name), self._selector)
        self._readers[name] = reader
        return reader

    def connect(self, channel: ChannelId, capacity: int) -> UnixWriter:
        self._check_open()
        name = channel.name()
        peer = self._dial(self._path(name))
        if peer is None:
            raise ChannelMissing(f"channel {name} does not exist: nothing listens on {self._path(name)}")
        greeting = hello(HELLO_PRODUCE, channel.generation, name)
        self._writers = [writer for writer in self._writers if not writer.closed]
        writer = UnixWriter(name, capacity, self._max_frame, peer, greeting, self._selector, monotonic, FLUSH_SECONDS)
        self._writers.append(writer)
        return writer

    def wait(self, timeout: float) -> None:
        self._check_open()
        deadline = monotonic() + timeout
        noteworthy = False
        while True:
            remaining = max(0.0, deadline - monotonic())
            for reader in self._readers.values():
                noteworthy |= reader.prepare_wait()
                if reader.owes_report:  # the producer's buffer is full of reports: offer this one again soon
                    remaining = min(remaining, REPORT_AGAIN_SECONDS)
            for key, mask in self._selector.select(0.0 if noteworthy else remaining):
                noteworthy |= key.data(mask)
            if noteworthy or monotonic() >= deadline:
                return

    def wake(self) -> None:
        self._wake.wake()

    def delete(self, channels: Iterable[ChannelId]) -> None:
        for channel in channels:
            name = channel.name()
            own = self._readers.pop(name, None)
            if own is not None:
                own.deleted()
                continue
            peer = self._dial(self._path(name))
            if peer is None:
                _unlink(self._path(name))
                continue
            # Its consumer lives in another process (or transport): it is told, and the name is free at once.
            with peer:
                try:
                    peer.send(hello(HELLO_DELETE, channel.generation, name))
                except OSError:  # it died meanwhile, and took the channel along
                    pass
            _unlink(self._path(name))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = monotonic() + FLUSH_SECONDS
        for writer in self._writers:
            writer.close_by(deadline)
        for reader in self._readers.values():
            reader.close()
        self._wake.close()
        self._selector.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelLost("the unix transport is closed")

    def _path(self, name: str) -> str:
        return os.path.join(self._dir, socket_name(name))

    def _listen(self, name: str, path: str) -> socket.socket:
        peer = self._dial(path)
        if peer is not None:
            peer.close()
            raise ChannelLost(f"channel {name} already has a living consumer on {path}; a second one is refused")
        _unlink(path)  # what a dead process left behind
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(path)
            listener.listen(16)
        except OSError as exc:
            listener.close()
            raise ChannelLost(f"channel {name} cannot listen on {path}: {exc.strerror}") from exc
        return listener

    @staticmethod
    def _dial(path: str) -> socket.socket | None:
        """A connected non-blocking socket, or None when nobody listens there."""
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.setblocking(False)
            peer.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):  # refused: a dead process left the file
            peer.close()
            return None
        except OSError as exc:
            peer.close()
            raise ChannelLost(f"cannot connect to {path}: {exc.strerror}") from exc
        return peer


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
