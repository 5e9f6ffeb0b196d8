"""Frames on the pipe between a node and a subtask process: a length, then msgpack.

Used at both ends. What must never happen here: a frame that is taken for whole because its rest is late.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from millstream_schema.connectors import LOCK_TIMEOUT

_LENGTH = struct.Struct("<I")
MAX = 256 << 20
AT_ONCE = 1 << 16
"""Bytes read at a time where many frames come together."""


class FrameTooLong(OSError):
    """A frame above the bound: at the sender a message of ours is too large, at the receiver the pipe is out of step and of no more use."""


class Boot(msgspec.Struct, frozen=True):
    """First frame to a subtask process: what does not belong on a command line. ``pipelines``: ``module:attribute``.

    ``idle_in_transaction_ms``: the installation's bound for a lock and an idle transaction at a database.
    """

    pipelines: str
    transport: str
    checkpoints: str
    prefix: str
    channel_expiry_ms: int
    idle_in_transaction_ms: int = round(LOCK_TIMEOUT * 1000)


def pack(data: bytes) -> bytes:
    """A frame. Raises FrameTooLong."""
    if len(data) > MAX:
        raise FrameTooLong(f"a message of {len(data)} bytes is too large for the pipe between node and subtask, which takes {MAX}")
    return _LENGTH.pack(len(data)) + data


class Unpacked:
    """Frames out of what arrives in pieces, many at a time. A large frame costs its length, in however many pieces it comes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted = 0
        """Bytes with which there is more to say about what has begun to arrive."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are whole now. Raises FrameTooLong."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data = bytes(self._rest)
            self._rest.clear()
        at, self._wanted = 0, _LENGTH.size
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX:
                raise FrameTooLong(_out_of_step(length))
            end = at + _LENGTH.size + length
            if end > len(data):
                self._wanted = end - at
                break
            yield data[at + _LENGTH.size : end]
            at = end
        self._rest += data[at:]


class Unsent:
    """Frames on their way into a socket that does not wait. They cost their length, in however many pieces it takes them."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __bool__(self) -> bool:
        return bool(self._data)

    def add(self, data: bytes) -> None:
        self._data += data

    def push(self, sock: socket.socket) -> None:
        """Send what the socket takes now. Raises OSError for one that is gone."""
        while self._data:
            try:
                with memoryview(self._data) as view:
                    sent = sock.send(view)
            except BlockingIOError:
                return
            del self._data[:sent]  # no copy: the buffer begins later

    def clear(self) -> None:
        self._data.clear()


def _out_of_step(length: int) -> str:
    return f"the pipe announces a frame of {length} bytes, at most {MAX} are sent: it is out of step"


def receive(sock: socket.socket) -> bytes | None:
    """Next frame; None at end of file. Raises TimeoutError when the socket has a timeout and nothing has begun to arrive, FrameTooLong for one that is no end of file."""
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX:
        raise FrameTooLong(_out_of_step(length))
    return _exactly(sock, length, begun=True)


def _exactly(sock: socket.socket, count: int, *, begun: bool = False) -> bytes | None:
    parts: list[bytes] = []
    while count:
        try:
            part = sock.recv(min(count, 1 << 20))
        except (TimeoutError, BlockingIOError):  # the second where SO_RCVTIMEO ran out
            if begun or parts:
                continue  # a frame has begun: its rest is on the way
            raise
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
