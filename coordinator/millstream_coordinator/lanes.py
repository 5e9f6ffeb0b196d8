"""Lanes: where the coordinator's storage work runs, apart from the thread that renews the lease and advances epochs.

:class:`Upkeep <millstream_coordinator.upkeep.Upkeep>` hands work in; the loop gives threads, the simulator later moments, and who drives sweeps by hand runs it inline.
What must never happen here: work of one lane out of order, a lane that ends with a failing piece of work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)
CLOSE_SECONDS = 2.0


class Lanes(Protocol):
    """Runs work later, each lane in order, one piece at a time."""

    def submit(self, lane: str, work: Callable[[], None]) -> None: ...


class InlineLanes:
    """At once, on the caller's thread."""

    def submit(self, lane: str, work: Callable[[], None]) -> None:
        work()


class ThreadLanes:
    """One daemon thread a lane, started at its first work. ``wake`` is called after each piece, from that thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lanes: dict[str, tuple[threading.Thread, SimpleQueue[Callable[[], None] | None]]] = {}
        self.closed = False

    def submit(self, lane: str, work: Callable[[], None]) -> None:
        if lane not in self._lanes:
            waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            thread = threading.Thread(target=self._run, args=(waiting,), name=f"millstream-storage-{lane}", daemon=True)
            self._lanes[lane] = thread, waiting
            thread.start()
        self._lanes[lane][1].put(work)

    def _run(self, waiting: SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := waiting.get()) is not None and not self.closed:
            try:
                work()
            except Exception:
                log.exception("storage work failed; its lane goes on")
            self._wake()

    def close(self) -> None:
        """What waits is dropped; what runs is given a moment, then left behind: whoever coordinates next does it again."""
        self.closed = True
        for _, waiting in self._lanes.values():
            waiting.put(None)
        for thread, _ in self._lanes.values():
            thread.join(CLOSE_SECONDS / len(self._lanes))
