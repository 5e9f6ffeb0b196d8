"""Both ends of a channel that is a Redis stream, and what their two I/O threads share with the subtask's thread.

Made by :class:`millstream_tasks.channels.redis.RedisTransport`. What must never happen here: a Redis command issued by the
subtask's thread, or a frame handed out while ``capacity`` frames are unprocessed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from millstream_schema.channels import Frame

from .broker_ends import BrokerReader, BrokerWriter
from .redis_link import command


class RedisReader(BrokerReader):
    """The incoming thread receives, the outgoing one sends the reports. ``fetched`` and ``full`` are the incoming thread's."""

    def __init__(self, name: str, generation: int, capacity: int, poke: Callable[[], None]) -> None:
        super().__init__(name, capacity, poke)
        self.key = name.encode()
        self.progress_key = self.key + b".r"
        self.generation = generation
        self.fetched = 0
        self.full = False

    def room(self) -> int:
        """How many frames may be fetched now. Called by the incoming thread, which then waits if there is none.

        ``full`` is set before ``done`` is read, and the outgoing thread reads it after ``done`` was written: whoever
        comes second sees the other, so a reader that got room is never left out of a blocking read unnoticed.
        """
        self.full = True
        room = self.done + self.capacity - self.fetched
        if room > 0:
            self.full = False
        return room

    def report_commands(self, number: int, expire: bytes | None) -> list[bytes]:
        """Commands that report ``number``, free what it covers and renew the expiry; the second answers None when deleted."""
        generation = self.generation
        commands: list[bytes] = []
        if number > self.told:
            identity = b"%d-%d" % (generation, number)
            # Trimmed first: it is allowed, and gives room, when Redis is out of memory.
            commands.append(command(b"XTRIM", self.key, b"MINID", b"%d-%d" % (generation, number + 1)))
            commands.append(command(b"XADD", self.progress_key, b"NOMKSTREAM", b"MAXLEN", b"1", identity, b"n", b""))
        if expire is not None:
            commands.append(command(b"PEXPIRE", self.key, expire))
            commands.append(command(b"PEXPIRE", self.progress_key, expire))
        return commands


class RedisWriter(BrokerWriter):
    """The outgoing thread sends and counts answers, the incoming one receives the reports; ``failure`` is the outgoing one's."""

    def __init__(self, name: str, generation: int, poke: Callable[[], None], answers: threading.Condition, flush_seconds: float) -> None:
        super().__init__(name, poke, answers, flush_seconds)
        self.key = name.encode()
        self.progress_key = self.key + b".r"
        self.generation = generation
        self._head = b"*6\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$10\r\nNOMKSTREAM\r\n" % (len(self.key), self.key)

    def encode(self, frame: Frame) -> bytes:
        """The command that adds a frame: refused with an error when the id is not above the last one, None when no stream."""
        number, data = frame
        identity = b"%d-%d" % (self.generation, number)
        return b"%b$%d\r\n%b\r\n$1\r\nd\r\n$%d\r\n%b\r\n" % (self._head, len(identity), identity, len(data), data)
