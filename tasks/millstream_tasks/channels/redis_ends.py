"""Both ends of a channel that is a Redis stream, and what their two I/O threads share with the subtask's thread.

Made by :class:`millstream_tasks.channels.redis.RedisTransport`. What must never happen here: a Redis command issued by the
subtask's thread, or a frame handed out while ``capacity`` frames are unprocessed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from millstream_schema.channels import Frame
from millstream_schema.errors import ChannelError, ChannelLost

from .redis_link import command


class RedisReader:
    """See :class:`millstream_schema.channels.ChannelReader`.

    Fields without underscore are shared: ``frames``, ``fetched``, ``full`` are the incoming thread's, ``told`` the outgoing
    thread's, ``done`` and ``closing`` the subtask thread's; each has one writer, so no lock is needed.
    """

    def __init__(self, name: str, generation: int, capacity: int, poke: Callable[[], None]) -> None:
        self.name = name
        self.key = name.encode()
        self.progress_key = self.key + b".r"
        self.generation = generation
        self.capacity = capacity
        self.frames: deque[Frame] = deque()
        self.fetched = 0
        self.full = False
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
        """Let the outgoing thread report what is not reported yet."""
        if self.done > self.told:
            self._poke()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.frames.clear()
            self._poke()

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


class RedisWriter:
    """See :class:`millstream_schema.channels.ChannelWriter`.

    ``pending`` is filled by the subtask's thread and emptied by the outgoing one, ``progress`` is the incoming thread's,
    ``answered`` and ``failure`` the outgoing one's.
    """

    def __init__(self, name: str, generation: int, poke: Callable[[], None], answers: threading.Condition, flush_seconds: float) -> None:
        self.name = name
        self.key = name.encode()
        self.progress_key = self.key + b".r"
        self.generation = generation
        self.pending: deque[Frame] = deque()
        self.put_count = 0
        self.answered = 0
        self.progress = 0
        self.failure: ChannelError | None = None
        self.closed = False
        self._poke = poke
        self._answers = answers
        self._flush_seconds = flush_seconds
        self._head = b"*6\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$10\r\nNOMKSTREAM\r\n" % (len(self.key), self.key)

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
        if self.closed:
            return
        self.close_by(monotonic() + self._flush_seconds)

    def close_by(self, deadline: float) -> None:
        """Wait until Redis answered for every frame, at most until ``deadline`` (monotonic seconds), and close."""
        self.closed = True
        self._poke()
        with self._answers:
            self._answers.wait_for(lambda: self.answered >= self.put_count or self.failure is not None, max(0.0, deadline - monotonic()))
        self.failure = self.failure or ChannelLost(f"the writer of channel {self.name} is closed")
        self.pending.clear()
        self._poke()

    def encode(self, frame: Frame) -> bytes:
        """The command that adds a frame: refused with an error when the id is not above the last one, None when no stream."""
        number, data = frame
        identity = b"%d-%d" % (self.generation, number)
        return b"%b$%d\r\n%b\r\n$1\r\nd\r\n$%d\r\n%b\r\n" % (self._head, len(identity), identity, len(data), data)
