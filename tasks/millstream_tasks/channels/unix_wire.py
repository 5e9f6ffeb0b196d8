"""What travels on an AF_UNIX channel besides frames: addresses, the hello, reports, and the wake-up pipe.

Called by the transport and both ends in this package. What must never happen here: an address that depends on anything but
the channel's name.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

MAX_PATH = 107 if sys.platform == "linux" else 103
"""Bytes of a socket address without its terminator."""

HEADER = struct.Struct("<QI")
"""Number and length of a frame."""

BYE_LENGTH = 0xFFFFFFFF
"""Length that says: the producer closed on purpose, nothing more comes."""

REPORT = struct.Struct("<Q")
REPORT_REFUSED = 2**64 - 2
REPORT_GONE = 2**64 - 1

HELLO_PRODUCE = 1
HELLO_DELETE = 2
HELLO = struct.Struct("<4sBQH")
HELLO_MAGIC = b"MSC1"
MAX_NAME = 4096

Handler = Callable[[int], bool]
"""Called with the selector's mask; True when the caller of ``wait`` has something to look at."""


class Hello(NamedTuple):
    """First words of whoever connects."""

    kind: int
    generation: int
    name: str
    size: int


def socket_name(name: str) -> str:
    """File name of a channel's socket: names are longer than socket addresses may be, so it is a hash."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest() + ".sock"


def hello(kind: int, generation: int, name: str) -> bytes:
    """Encode the first words."""
    raw = name.encode()
    return HELLO.pack(HELLO_MAGIC, kind, generation, len(raw)) + raw


def parse_hello(data: bytes | bytearray) -> Hello | None:
    """Decode the first words; None while they are incomplete; ValueError when this is no peer of ours."""
    if len(data) < HELLO.size:
        if not HELLO_MAGIC.startswith(bytes(data[:4])):
            raise ValueError("not a channel's peer")
        return None
    magic, kind, generation, length = HELLO.unpack_from(data)
    if magic != HELLO_MAGIC or length > MAX_NAME:
        raise ValueError("not a channel's peer")
    size = HELLO.size + length
    if len(data) < size:
        return None
    return Hello(kind, generation, bytes(data[HELLO.size : size]).decode(errors="replace"), size)


class WakePipe:
    """Lets another thread end a ``select``. Only :meth:`wake` may be called from other threads."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._receive, self._send = socket.socketpair()
        self._receive.setblocking(False)
        self._send.setblocking(False)
        self._pending = False
        self.count = 0
        """Wake-ups seen; tells a loop that one was answered while it was busy elsewhere with the same selector."""
        selector.register(self._receive, selectors.EVENT_READ, self._on_ready)

    def wake(self) -> None:
        """Make the running or next ``select`` return; cheap while one is already pending."""
        if self._pending:
            return
        self._pending = True
        try:
            self._send.send(b"w")
        except OSError:  # closed, or full of wake-ups: either way nobody sleeps
            pass

    def _on_ready(self, mask: int) -> bool:
        self._receive.recv(4096)
        # Cleared after the read: a wake-up in between is answered by the return that is already under way.
        self._pending = False
        self.count += 1
        return True

    def close(self) -> None:
        """Close both ends."""
        self._receive.close()
        self._send.close()


def inode(path: str) -> tuple[int, int] | None:
    """Identity of the file at ``path``; tells one's own socket file from a successor's."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
