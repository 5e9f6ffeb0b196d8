"""Where a subtask's time goes: busy, idle, held back by its consumers.

Kept by the runner around each step; shown in the statistics. What must never happen here: a decision taken on it.
"""

from __future__ import annotations

from typing import Literal

from millstream_schema.ports import Clock

Waiting = Literal["idle", "backpressured"]


class Pace:
    """Seconds by kind, written on the subtask's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = {"busy": 0.0, "idle": 0.0, "backpressured": 0.0}
        self._since = clock.monotonic()
        self.waiting: Waiting = "idle"
        """What the time until the next step counts as."""

    def step_begins(self) -> None:
        self._counted(self.waiting)

    def step_ends(self) -> None:
        self._counted("busy")

    def _counted(self, kind: str) -> None:
        now = self._clock.monotonic()
        self._seconds[kind] += now - self._since
        self._since = now

    def milliseconds(self) -> dict[str, int]:
        """As they stand in the statistics."""
        return {f"{name}_ms": round(seconds * 1000) for name, seconds in self._seconds.items()}
