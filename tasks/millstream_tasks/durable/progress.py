"""What an attempt tells while it runs: gathered beside its handler and sent once a second, gathered again beside its worker's session until that writes.

Used by the pools and by the host. What must never happen here: a message for each call of a handler's loop; a last word that is not sent before the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from millstream_schema.durable.progress import NOTES, Note, Progress, Told, later, note_of, progress_of
from millstream_schema.ports import Clock

EVERY = 1.0
"""Seconds between two messages of an attempt."""

Tell = Callable[[str, int, Told], None]
"""Task, fence, what its attempt has said. Thread-safe."""


class Coalescing:
    """What was said and is not sent yet: pure, times are given."""

    def __init__(self) -> None:
        self._due = 0.0
        self._said = 0
        self._noted = 0
        self._progress: Progress | None = None
        self._notes: list[Note] = []

    def progress(self, done: float, total: float | None, message: str) -> None:
        """Instead of what was said before. Raises ValueError, TypeError."""
        self._progress = progress_of(self._said + 1, done, total, message)
        self._said += 1

    def note(self, text: str, fields: Mapping[str, object]) -> bool:
        """Whether it is kept: the first are."""
        if self._noted >= NOTES:
            return False
        self._noted += 1
        self._notes.append(note_of(self._noted, text, fields))
        return True

    def due(self, now: float) -> Told | None:
        """What is to be sent now, if it is time again."""
        return self.rest(now) if now >= self._due else None

    def rest(self, now: float) -> Told | None:
        """What has not been sent."""
        if self._progress is None and not self._notes:
            return None
        told = Told(self._progress, tuple(self._notes))
        self._due, self._progress, self._notes = now + EVERY, None, []
        return told


class Telling:
    """Of one attempt; used by its handler's thread, and by one that looks after handlers which say nothing more."""

    def __init__(self, clock: Clock, send: Callable[[Told], None]) -> None:
        self._clock = clock
        self._send = send
        self._lock = threading.Lock()
        self._coalescing = Coalescing()

    def progress(self, done: float, total: float | None, message: str) -> None:
        with self._lock:
            self._coalescing.progress(done, total, message)
        self.flush()

    def note(self, text: str, fields: Mapping[str, object]) -> bool:
        with self._lock:
            kept = self._coalescing.note(text, fields)
        self.flush()
        return kept

    def flush(self) -> None:
        """Send what has waited for long enough."""
        with self._lock:  # held while it is sent: what is said later is sent later
            told = self._coalescing.due(self._clock.monotonic())
            if told is not None:
                self._send(told)

    def close(self) -> None:
        """Send the rest: the attempt is over, or what ends it has committed."""
        with self._lock:
            told = self._coalescing.rest(self._clock.monotonic())
            if told is not None:
                self._send(told)


class Gathered:
    """What a session's attempts have said and is not written yet. ``add`` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[tuple[str, int], Told] = {}

    def add(self, task: str, fence: int, told: Told) -> None:
        with self._lock:
            self._said[task, fence] = later(self._said.get((task, fence)), told)

    def __bool__(self) -> bool:
        return bool(self._said)

    def all(self) -> dict[tuple[str, int], Told]:
        """As it is now."""
        with self._lock:
            return dict(self._said)

    def written(self, said: Mapping[tuple[str, int], Told]) -> None:
        """These are kept, or cannot be; of an attempt that has said more meanwhile everything is written again, which changes nothing."""
        with self._lock:
            for key, told in said.items():
                if self._said.get(key) is told:
                    del self._said[key]
