"""How many tasks of each lane the next claim takes: pure. The lane with the least (held + just taken) / weight comes first, one at a time."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def shares(lanes: Sequence[str], held: Mapping[str, int], settings: Mapping[str, tuple[int, bool]], room: int) -> dict[str, int]:
    """``settings``: lane → (weight, paused); a lane nobody has set weighs 1 and goes. Whether a lane holds as many is for the claim to find out."""
    heap: list[tuple[float, str]] = []
    for lane in lanes:
        weight, paused = settings.get(lane, (1, False))
        if not paused:
            heap.append((held.get(lane, 0) / weight, lane))
    heapq.heapify(heap)
    taken: dict[str, int] = {}
    for _ in range(room if heap else 0):
        _, lane = heap[0]
        taken[lane] = taken.get(lane, 0) + 1
        weight = settings.get(lane, (1, False))[0]
        heapq.heapreplace(heap, ((held.get(lane, 0) + taken[lane]) / weight, lane))
    return taken
