"""The loop that drives a :class:`Coordinator` on one thread: its timer, hints handed in from others, and threads for what storage takes long for.

Run by embedded mode and by node processes. What must never happen here: a turn that fails and takes the loop with it.
"""

from __future__ import annotations

import threading
from collections import deque

import structlog

from millstream_schema.hints import JobHint

from .coordinator import Coordinator
from .lanes import ThreadLanes

log = structlog.get_logger(__name__)
LONGEST = 1.0


class CoordinatorLoop:
    """Sweeps when due; looks at a job when a hint names it. A failing turn is logged and the loop goes on."""

    def __init__(self, coordinator: Coordinator, poll: float = LONGEST) -> None:
        self._coordinator = coordinator
        self._poll = poll
        self._event = threading.Event()
        self._hints: deque[str] = deque()
        self._stop = False
        self._ticked = False
        self._lanes = ThreadLanes(self._event.set)
        coordinator.work_in(self._lanes)

    def hint(self, hint: JobHint) -> None:
        """A job to look at; without one, a tick. Thread-safe."""
        if not hint.job:
            self._ticked = True
        elif hint.job not in self._hints:
            self._hints.append(hint.job)
        self._event.set()

    def stop(self) -> None:
        """Thread-safe; the loop gives the lease back and returns."""
        self._stop = True
        self._event.set()

    def run(self) -> None:
        while not self._stop:
            self._event.clear()
            try:
                if self._ticked:
                    self._ticked = False
                    self._coordinator.tick()
                while self._hints:
                    self._coordinator.look(self._hints.popleft())
                wait = self._coordinator.sweep()
            except Exception:
                log.exception("coordinator turn failed; it goes on")
                wait = LONGEST
            if not self._hints:
                self._event.wait(min(max(wait, 0.001), self._poll))
        try:
            self._coordinator.release()
        except Exception:
            log.exception("lease not given back; it will expire")
        self._lanes.close()
