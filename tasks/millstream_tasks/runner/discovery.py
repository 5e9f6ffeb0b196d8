"""Looking for splits that a source did not name before.

Done by the source's first subtask only, on its own thread; the rows decide who reads what is found. What must never happen here: a bounded source asked twice.
"""

from __future__ import annotations

from millstream_schema.connectors import Source
from millstream_schema.control import Discovered

from .environment import Environment


class Discovery:
    """Asks one source for its splits: at the start, and again every ``interval`` seconds unless it is bounded."""

    def __init__(self, operator: str, source: Source, known: set[str], environment: Environment, interval: float) -> None:
        self._operator = operator
        self._source = source
        self._known = known
        self._env = environment
        self._interval = interval
        self._due: float | None = None

    def look(self) -> None:
        """Report what is new; the first look is reported even when it finds nothing."""
        found = self._source.discover(frozenset(self._known))
        self._known |= {s.split_id for s in found}
        if found or self._source.bounded or self._due is None:
            self._env.report(Discovered(self._operator, found, self._source.bounded))
        if not self._source.bounded:
            self._due = self._env.clock.monotonic() + self._interval

    def turn(self, now: float) -> None:
        if self._due is not None and now >= self._due:
            self.look()
