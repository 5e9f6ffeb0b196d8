"""How many tasks of each lane the next claim takes: pure. The lane with the least (held + just taken) / weight comes first, one at a time.

Where two have as little, the one that has had less for its weight: a worker with one slot, whose lanes hold nothing whenever it asks, serves them in turn. What must never happen
here: a lane that is passed over for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def shares(
    lanes: Sequence[str],
    held: Mapping[str, int],
    settings: Mapping[str, tuple[int, bool]],
    room: int,
    had: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """``settings``: lane → (weight, paused); a lane nobody has set weighs 1 and goes. ``had``: lane → what it has had for its weight. Whether a lane holds as many is for the
    claim to find out."""
    heap: list[tuple[float, float, str]] = []
    before = had or {}
    for lane in lanes:
        weight, paused = settings.get(lane, (1, False))
        if not paused:
            heap.append((held.get(lane, 0) / weight, before.get(lane, 0.0), lane))
    heapq.heapify(heap)
    taken: dict[str, int] = {}
    for _ in range(room if heap else 0):
        _, _, lane = heap[0]
        taken[lane] = taken.get(lane, 0) + 1
        weight = settings.get(lane, (1, False))[0]
        now = (held.get(lane, 0) + taken[lane]) / weight
        heapq.heapreplace(heap, (now, before.get(lane, 0.0) + taken[lane] / weight, lane))
    return taken


class Fairness:
    """Between the lanes of one worker session: what a survey found, and what the session took and ended since."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._settings: Mapping[str, tuple[int, bool]] = {}
        self._had: dict[str, float] = {}

    def surveyed(
        self, others: Mapping[str, int], own: Mapping[str, int], settings: Mapping[str, tuple[int, bool]], lanes: Sequence[str]
    ) -> None:
        """``others``: what other sessions hold of each lane; ``own``: what this one holds now, without what has ended and is not written yet.

        A lane that is new, or was away, has had as much as the one that has had least: it takes its turn and does not make up for what it missed."""
        self._held = {lane: others.get(lane, 0) + own.get(lane, 0) for lane in {*others, *own}}
        self._settings = settings
        least = min((self._had[lane] for lane in lanes if lane in self._had), default=0.0)
        self._had = {lane: self._had.get(lane, least) - least for lane in lanes}

    def split(self, room: int) -> dict[str, int]:
        """What to ask of each lane."""
        return shares(list(self._had), self._held, self._settings, room, self._had)

    def took(self, lane: str) -> None:
        self._held[lane] = self._held.get(lane, 0) + 1
        if lane in self._had:
            self._had[lane] += 1 / self._settings.get(lane, (1, False))[0]

    def ended(self, lane: str) -> None:
        self._held[lane] = max(0, self._held.get(lane, 0) - 1)
