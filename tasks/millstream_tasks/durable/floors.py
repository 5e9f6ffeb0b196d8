"""From which rank on a claim looks, while looking from the start is slow: pure.

An old snapshot somewhere in the database keeps every version of every claimed row from being cleaned away, and the index that claims walk begins with them. While a claim is slow,
the next ones begin a little below where the last one found something, for a second at most; then one looks from the start again. What must never happen here: a task that is
passed over for longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream_schema.durable.records import TaskRow

SLOW = 0.05
"""Seconds from which a claim is slow."""
FOR = 1.0
"""Seconds until one looks from the start again: for so long a task whose rank is lower than where claims begin may be passed over."""
BELOW_US = 10_000_000
"""How far below the last find claims begin: a task of priority 10 that comes in now is still seen."""


class Floors:
    """Of one worker session."""

    def __init__(self) -> None:
        self._ranks: dict[str, int] = {}
        self._until = 0.0

    def at(self, now: float) -> Mapping[str, int]:
        """Lane → rank from which on to look; a lane that is not named is looked at from the start."""
        if now >= self._until:
            self._ranks.clear()
        return self._ranks

    def learn(self, now: float, took: float, found: Sequence[TaskRow]) -> None:
        """What a claim gave and how many seconds it took."""
        if took < SLOW or self._ranks:
            return
        for task in found:
            self._ranks[task.lane] = min(self._ranks.get(task.lane, task.rank), task.rank)
        self._ranks = {lane: rank - BELOW_US for lane, rank in self._ranks.items()}
        self._until = now + FOR

    def forget(self) -> None:
        """Something below may have become free."""
        self._ranks.clear()
