"""The order in which keys want attention: one entry per key, its earliest moment, in a heap.

Used by sessions, timers and the sweep of expired state; never stored, rebuilt from the tables at a restore. What must never happen here:
an entry per record, or two keys compared with each other (they need not be comparable).
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any


class Deadlines:
    """Key → its earliest deadline. Equal deadlines come in the order in which they were set."""

    __slots__ = ("_earliest", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Any]] = []
        self._earliest: dict[Any, int] = {}
        self._serial = 0

    def set(self, key: Any, time: int) -> None:
        """Want ``key`` at ``time``, unless it is wanted earlier already: whoever takes it early sets it anew."""
        known = self._earliest.get(key)
        if known is not None and known <= time:
            return
        self._earliest[key] = time
        self._serial += 1
        heappush(self._heap, (time, self._serial, key))

    def pop(self, until: float) -> tuple[int, Any] | None:
        """Take the earliest (time, key) that is not after ``until``. The key is unknown afterwards."""
        time = self.next()
        if time is None or time > until:
            return None
        _, _, key = heappop(self._heap)
        del self._earliest[key]
        return time, key

    def next(self) -> int | None:
        """The earliest deadline."""
        heap = self._heap
        # What was overtaken by an earlier deadline of the same key is left in the heap and skipped here.
        while heap and self._earliest.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None
