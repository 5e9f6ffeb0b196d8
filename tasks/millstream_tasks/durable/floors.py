"""From which rank on a claim looks, while looking from the start is slow: pure.

An old snapshot somewhere in the database keeps every version of every claimed row from being cleaned away, and the index that claims walk begins with them. While a claim from the
start is slow, the next ones begin a little below where the last one found something; while that is slow, too, they begin right there. The slow looks take a small part of the time.
What must never happen here: a task that is passed over for longer than until the next look from the start.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from millstream_schema.durable.records import TaskRow

SLOW, TIMES_QUICK, SLOW_FOR_ALL = 0.01, 2.0, 0.05
"""A claim is slow that takes as many seconds and so many times what a quick one takes; and at any rate if it takes the last of these, as those of a worker do that begins beside an
old snapshot."""
QUICK_GROWS = 1.01
"""By how much what is taken for quick grows with each claim that is not: on a machine that is busy from now on nothing is slow for ever."""
FOR, PART = 1.0, 20.0
"""After a slow look from the start, or a little below, it is left out for so many seconds, and so many times what it took: so long a lower rank may be passed over."""
BELOW_US = 10_000_000
"""How far below the last find claims begin while that is quick: a task of priority 10 that comes in now is seen at once."""


class _From(enum.Enum):
    """Where a claim began to look."""

    START, BELOW, FIND = range(3)


class Floors:
    """Of one worker session."""

    def __init__(self) -> None:
        self._ranks: dict[str, int] = {}
        self._start_at = 0.0
        self._below_at = 0.0
        self._quick = SLOW_FOR_ALL / TIMES_QUICK
        self._looked = _From.START

    def at(self, now: float) -> Mapping[str, int]:
        """Lane → rank from which on to look; a lane that is not named is looked at from the start."""
        if now >= self._start_at:
            self._looked = _From.START
            return {}
        if now >= self._below_at:
            self._looked = _From.BELOW
            return {lane: rank - BELOW_US for lane, rank in self._ranks.items()}
        self._looked = _From.FIND
        return self._ranks

    def learn(self, now: float, took: float, found: Sequence[TaskRow]) -> None:
        """What the claim gave that began to look where :meth:`at` said, at ``now``, and how many seconds it took."""
        if not found:
            return
        slow = took >= max(SLOW, self._quick * TIMES_QUICK)
        self._quick = min(took, self._quick * QUICK_GROWS, SLOW_FOR_ALL / TIMES_QUICK)
        if self._looked is _From.START and not slow:
            return
        later = now + max(FOR, took * PART)
        if self._looked is _From.START:
            self._start_at, self._below_at = later, now
        elif self._looked is _From.BELOW and slow:
            self._below_at = later
        lowest: dict[str, int] = {}
        for task in found:
            lowest[task.lane] = min(lowest.get(task.lane, task.rank), task.rank)
        self._ranks |= lowest

    def forget(self) -> None:
        """Something below may have become free."""
        self._start_at = 0.0
        self._ranks.clear()
