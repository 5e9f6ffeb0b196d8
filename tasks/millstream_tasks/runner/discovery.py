"""Looking for splits that a source did not name before.

Done by the source's first subtask only, on its own thread; the rows decide who reads what is found. What must never happen here: a bounded source that answered
asked again, or a wait for one that does not answer.
"""

from __future__ import annotations

import structlog

from millstream_schema.connectors import Source
from millstream_schema.control import Discovered
from millstream_schema.errors import SourceUnavailable

from ..sources.outage import FIRST_WAIT, LONGEST_WAIT
from .environment import Environment

log = structlog.get_logger(__name__)
GIVE_UP = 30.0
"""Seconds a source may be unreachable; one that has a ``give_up`` of its own says so itself."""


class Discovery:
    """Asks one source for its splits: at the start, and again every ``interval`` seconds unless it is bounded.

    One that cannot be reached is asked again, after pauses as a reader makes them; what is known stays known meanwhile.
    """

    def __init__(self, operator: str, source: Source, known: set[str], environment: Environment, interval: float) -> None:
        self._operator = operator
        self._source = source
        self._known = known
        self._env = environment
        self._interval = interval
        self._give_up = float(getattr(source, "give_up", GIVE_UP))
        self._due: float | None = None
        self._reported = False
        self._failing_since: float | None = None
        self._pause = FIRST_WAIT

    def look(self) -> None:
        """Report what is new; the first answer is reported even when it finds nothing. Raises SourceUnavailable when there was none for too long."""
        try:
            found = self._source.discover(frozenset(self._known))
        except SourceUnavailable as error:
            self._try_again(error)
            return
        self._failing_since, self._pause = None, FIRST_WAIT
        self._known |= {s.split_id for s in found}
        if found or self._source.bounded or not self._reported:
            self._reported = True
            self._env.report(Discovered(self._operator, found, self._source.bounded))
        self._due = None if self._source.bounded else self._env.clock.monotonic() + self._interval

    def turn(self, now: float) -> None:
        if self._due is not None and now >= self._due:
            self.look()

    def _try_again(self, error: SourceUnavailable) -> None:
        now = self._env.clock.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            log.warning("a source cannot be asked for its splits; it is tried again", operator=self._operator, error=str(error))
        if now - self._failing_since >= self._give_up:
            raise SourceUnavailable(
                f"source {self._operator!r} could not be asked for its splits for {self._give_up:g} s: {error}"
            ) from error
        self._due = now + self._pause
        self._pause = min(self._pause * 2, LONGEST_WAIT)
