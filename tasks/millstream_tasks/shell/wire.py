"""Frames on the pipe between a node and a subtask process: a length, then msgpack.

Used at both ends. What must never happen here: a frame that is taken for whole because its rest is late.
"""

from __future__ import annotations

import socket
import struct

import msgspec

_LENGTH = struct.Struct("<I")
MAX = 256 << 20


class Boot(msgspec.Struct, frozen=True):
    """First frame to a subtask process: what does not belong on a command line. ``pipelines``: ``module:attribute``."""

    pipelines: str
    transport: str
    checkpoints: str
    prefix: str
    channel_expiry_ms: int


def pack(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def receive(sock: socket.socket) -> bytes | None:
    """Next frame; None at end of file. Raises TimeoutError when the socket has a timeout and nothing has begun to arrive."""
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX:
        return None
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
