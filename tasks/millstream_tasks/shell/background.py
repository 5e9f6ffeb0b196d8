"""Background lanes of a subtask: one daemon thread each, started when first used.

Used by the thread and process shells. What must never happen here: work whose end, however it came, is not told to whoever handed it in.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Job = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class ThreadBackground:
    """Runs work of one lane in order; lanes do not wait for each other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lanes: dict[str, queue.SimpleQueue[Job | None]] = {}

    def submit(self, lane: str, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._lanes[lane],), name=f"{self._name}-{lane}", daemon=True).start()
        self._lanes[lane].put((work, done))

    @staticmethod
    def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            work, done = job
            try:
                result = work()
            except BaseException as exc:  # LeaseExpired, too: whoever waits for the work decides what it means
                done(None, exc)
            else:
                done(result, None)

    def close(self) -> None:
        """Let the threads end after what they are doing."""
        for jobs in self._lanes.values():
            jobs.put(None)


def yield_thread() -> None:
    """Let the subtask's thread have the interpreter: called between runs of encoding."""
    time.sleep(0)  # noqa: TID251 - not a wait: it gives up the interpreter lock
