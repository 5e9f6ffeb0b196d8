"""Handlers on threads of this process: embedded mode, and Celery's pools ``threads`` and ``solo``.

A thread cannot be killed: *one valid attempt* holds, *one running* does not. What must never happen here: a report that is not made, whatever the handler raises.
"""

from __future__ import annotations

import queue
import threading
from functools import partial

from millstream_schema.durable.outcomes import Committed, Reported, Unstarted
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.ports import Clock, Ids

from .databases import HandlerDatabases
from .execution import execute
from .handlers import HandlerRegistry
from .kept_calls import Know
from .pool import Report
from .progress import Tell, Telling
from .surroundings import Surroundings


class ThreadPool:
    """``slots`` threads, started with the first attempts."""

    def __init__(
        self,
        registry: HandlerRegistry,
        clock: Clock,
        ids: Ids,
        slots: int,
        report: Report,
        databases: HandlerDatabases,
        tell: Tell,
        know: Know,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._deadline = 0.0
        self._ids = ids
        self._slots = slots
        self._report = report
        self._databases = databases
        self._tell = tell
        self._know = know
        self._telling: set[Telling] = set()
        self._waiting: queue.SimpleQueue[TaskRow | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._told: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._busy = 0
        self._pause = threading.Event()  # never set

    def free(self) -> int:
        return self._slots - self._busy

    def ahead(self) -> int:
        """None: a thread takes its next attempt from this process at no cost."""
        return 0

    def waiting(self) -> int:
        return 0

    def give_back(self) -> None:
        """Nothing waits here."""

    def start(self, task: TaskRow) -> None:
        with self._lock:
            self._busy += 1
            if len(self._threads) < min(self._busy, self._slots):
                thread = threading.Thread(target=self._work, name=f"millstream-task-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._waiting.put(task)

    def cancel(self, task: str, fence: int) -> None:
        """A thread is not interrupted: its handler can see it at ``ctx.cancelled``, and its end is taken as it comes."""
        self._told.add((task, fence))

    def lease(self, deadline: float) -> None:
        """Nothing begins past it. A thread that runs cannot be ended with it: what it reports then is late."""
        self._deadline = deadline

    def tick(self) -> float:
        """Send what handlers said that say nothing more. Nothing is judged here: a thread has no limit that could be enforced."""
        for telling in list(self._telling):
            telling.flush()
        return 1.0

    def kill(self, task: str, fence: int) -> None:
        """A thread cannot be killed: it is told, and what it reports is late."""
        self._told.add((task, fence))

    def close(self) -> None:
        """Threads end when what they run ends."""
        for _ in self._threads:
            self._waiting.put(None)

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            mine = (task.id, task.fence)
            if self._clock.monotonic() >= self._deadline:
                self._done(task, Unstarted(), (), 0.0)
                continue
            began = self._clock.monotonic()
            around = self._surroundings(mine)
            self._telling.add(around.telling)
            outcome, submits = execute(task, self._registry, around)
            self._telling.discard(around.telling)
            self._told.discard(mine)
            self._done(task, outcome, submits, self._clock.monotonic() - began)

    def _surroundings(self, mine: tuple[str, int]) -> Surroundings:
        return Surroundings(
            ids=self._ids,
            clock=self._clock,
            told=partial(self._told.__contains__, mine),
            databases=self._databases,
            committed=partial(self._report, *mine, Committed(), (), 0.0),
            wait=self._pause.wait,
            telling=Telling(self._clock, partial(self._tell, *mine)),
            raised=lambda _: None,
            known=partial(self._know, *mine),
        )

    def _done(self, task: TaskRow, outcome: Reported, submits: tuple[NewTask, ...], seconds: float) -> None:
        with self._lock:
            self._busy -= 1
        self._report(task.id, task.fence, outcome, submits, seconds)
