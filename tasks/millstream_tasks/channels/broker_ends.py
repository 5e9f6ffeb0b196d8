"""Both ends of a channel over a broker, as the subtask's thread uses them; I/O threads of the transport do the rest.

The Redis and the RabbitMQ transport build theirs on these. What must never happen here: a command to the broker issued by the subtask's thread, a field
written by two threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from millstream_schema.channels import Frame
from millstream_schema.errors import ChannelError, ChannelLost


class BrokerReader:
    """See :class:`millstream_schema.channels.ChannelReader`.

    Fields without underscore are shared: ``frames`` is filled by the receiving thread, ``told`` is the sending thread's, ``done`` and ``closing`` the
    subtask thread's; each has one writer, so no lock is needed.
    """

    def __init__(self, name: str, capacity: int, poke: Callable[[], None]) -> None:
        self.name = name
        self.capacity = capacity
        self.frames: deque[Frame] = deque()
        self.done = 0
        self.told = 0
        self.closing = False
        self.failure: ChannelError | None = None
        self._step = max(1, capacity // 2)
        self._poke = poke

    def take(self) -> Frame | None:
        if self.failure is not None:  # what is buffered died with the connection
            raise self.failure
        if self.closing:  # a frame may have come in since
            raise ChannelLost(f"the reader of channel {self.name} is closed")
        if self.frames:
            return self.frames.popleft()
        self.report()
        return None

    def processed(self, number: int) -> None:
        if number > self.done:
            self.done = number
            if number - self.told >= self._step:
                self._poke()

    def report(self) -> None:
        """Let the I/O threads acknowledge and report what is not yet."""
        if self.done > self.told:
            self._poke()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.frames.clear()
            self._poke()


class BrokerWriter:
    """See :class:`millstream_schema.channels.ChannelWriter`.

    ``pending`` is filled by the subtask's thread and emptied by the sending one, which also counts ``answered``, the frames the broker has answered for;
    ``progress`` is the receiving thread's.
    """

    def __init__(self, name: str, poke: Callable[[], None], answers: threading.Condition, flush_seconds: float) -> None:
        self.name = name
        self.pending: deque[Frame] = deque()
        self.put_count = 0
        self.answered = 0
        self.progress = 0
        self.failure: ChannelError | None = None
        self.closed = False
        self._poke = poke
        self._answers = answers
        self._flush_seconds = flush_seconds

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
        if not self.closed:
            self.close_by(monotonic() + self._flush_seconds)

    def close_by(self, deadline: float) -> None:
        """Wait until the broker answered for every frame, at most until ``deadline`` (monotonic seconds), and close."""
        self.closed = True
        self._poke()
        with self._answers:
            self._answers.wait_for(lambda: self.answered >= self.put_count or self.failure is not None, max(0.0, deadline - monotonic()))
        self.failure = self.failure or ChannelLost(f"the writer of channel {self.name} is closed")
        self.pending.clear()
        self._poke()


R = TypeVar("R", bound=BrokerReader)
W = TypeVar("W", bound=BrokerWriter)


class BrokerEnds(Generic[R, W]):
    """All ends of one transport: what the subtask's thread and the two I/O threads have in common."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.answers = threading.Condition()
        self.readers: tuple[R, ...] = ()
        self.writers: tuple[W, ...] = ()
        self.failure: ChannelError | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float) -> None:
        """Until something arrived. Called by the subtask's thread; nothing that was processed stays unreported meanwhile."""
        for reader in self.readers:
            reader.report()
        self.arrived.wait(timeout)
        self.arrived.clear()

    def close(self, deadline: float) -> None:
        """Close every end, writers first: they may wait for the broker until ``deadline`` (monotonic seconds)."""
        for writer in self.writers:
            writer.close_by(deadline)
        for reader in self.readers:
            reader.close()

    def retire(self, name: str, seconds: float) -> None:
        """Close this transport's own reader of ``name``, if any, and wait until nothing more is sent for it."""
        for reader in [reader for reader in self.readers if reader.name == name]:
            reader.close()
            with self.answers:
                self.answers.wait_for(lambda: name not in [r.name for r in self.readers] or self.failure is not None, seconds)

    def answered(self) -> None:
        """Somebody may be waiting in a close."""
        with self.answers:
            self.answers.notify_all()

    def fail(self, failure: ChannelError) -> None:
        """A connection is gone: tell everybody."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
            ends: list[R | W] = [*self.readers, *self.writers]
            for end in ends:
                end.failure = end.failure or self.failure
        self.arrived.set()
        self.answered()
