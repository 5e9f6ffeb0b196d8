"""Tumbling and sliding windows over a key, in event or processing time.

Driven by the chain. A window's state is the namespace of its start in the table ``windows``: key → accumulator. What must never happen
here: a record in a window that does not contain it, a (key, window) fired twice without a change, state that outlives its lateness.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from millstream_schema.canonical import canonical
from millstream_schema.model import OperatorSpec

from .base import MAX_WATERMARK, TIME_LIMIT, Batch
from .window_base import Window, Windowed, fold, millis

_Pane = tuple[dict[Any, Any], dict[Any, Any]]


class _Sized(Windowed):
    """Windows of one size at fixed places; ``functions`` as in :func:`fold`. All have the same length, so the order of starts is the
    order of ends.
    """

    def __init__(self, spec: OperatorSpec, key: Callable[[Any], Any], **functions: Any) -> None:
        super().__init__(spec, key, fold(**functions))
        self.size = millis(spec, "size", 1)
        self.offset = millis(spec, "offset", None, 0)
        self._table = self.table("windows")
        # Which keys of a kept window have been sent as they are. Needed only with lateness: after a rescale the watermark is the lowest
        # of the old ones, so a window may be unfired for some keys and fired for others.
        self._sent = self.table("sent")
        self._unfired: list[int] = []
        self._fired: list[int] = []

    def _pane(self, start: int) -> _Pane:
        """The pane of a window that has not fired; a new one is put in line to fire."""
        if start not in self._table.panes:
            heappush(self._unfired, start)
        return self._table.pane(start)

    def _special(self, start: int) -> bool:
        """Whether a record for this window needs more than to be added: the window has fired, for some key at least."""
        return start + self.size - 1 <= self.watermark or start in self._sent.panes

    def _late_record(self, key: Any, value: Any, start: int, out: Batch) -> bool:
        """Add a record to a special window, or not (False) when it is past its lateness. A window that has fired fires again for this
        key.
        """
        window = Window(start, start + self.size)
        if self._past(window.end, self.watermark):
            return False
        fired = window.end - 1 <= self.watermark
        if start not in self._table.panes:
            heappush(self._fired if fired else self._unfired, start)
        live, delta = self._table.pane(start)
        _add(live, delta, key, value, self.fold.first, self.fold.add)
        if not fired:
            self._sent.remove(key, start)
            return True
        self._sent.put(key, True, start)
        out.values.append(self._result(key, window, live[key], True))
        assert out.timestamps is not None
        out.timestamps.append(window.end - 1)
        return True

    def _advance(self, to: int) -> Batch | None:
        values: list[Any] = []
        times: list[int] = []
        size = self.size
        # +∞ fires a window that ends beyond it too.
        while self._unfired and (self._unfired[0] + size - 1 <= to or to >= MAX_WATERMARK):
            start = self._unfired[0]
            window = Window(start, start + size)
            kept = not self._past(window.end, to)
            values += self._fire(window, kept)
            times += [min(window.end - 1, TIME_LIMIT)] * (len(values) - len(times))
            # Only now: nothing is purged that was not emitted.
            heappop(self._unfired)
            if kept:
                heappush(self._fired, start)
            else:
                self._free(start)
        while self._fired and self._past(self._fired[0] + size, to):
            self._free(heappop(self._fired))
        return Batch(values, times) if values else None

    def _fire(self, window: Window, kept: bool) -> list[Any]:
        start, end = window
        pane = self._table.panes.get(start, {})
        sent = self._sent.panes.get(start)
        if sent:
            pane = {key: acc for key, acc in pane.items() if key not in sent}
        if kept:
            live, delta = self._sent.pane(start)
            marks = dict.fromkeys(pane, True)
            live.update(marks)
            delta.update(marks)
            return [self._result(key, window, acc, True) for key, acc in pane.items()]
        result = self.fold.result
        if result is None:
            return [(key, start, end, acc) for key, acc in pane.items()]
        return [result(key, window, acc) for key, acc in pane.items()]

    def _free(self, start: int) -> None:
        self._table.drop(start)
        if start in self._sent.panes:
            self._sent.drop(start)

    def _next_end(self) -> int | None:
        return self._unfired[0] + self.size if self._unfired else None

    def _rebuild(self) -> None:
        self._unfired, self._fired = [], []
        for start in [ns for ns in self._table.panes if ns is not None]:
            (self._fired if start + self.size - 1 <= self.watermark else self._unfired).append(start)
        heapify(self._unfired)
        heapify(self._fired)


def _add(
    live: dict[Any, Any], delta: dict[Any, Any], key: Any, value: Any, first: Callable[[Any], Any], add: Callable[[Any, Any], Any]
) -> None:
    try:
        acc = live[key]
    except (KeyError, TypeError):  # TypeError: not hashable, which canonical refuses by name
        canonical(key)
        acc = first(value)
    else:
        acc = add(acc, value)
    live[key] = delta[key] = acc


class TumblingWindow(_Sized):
    """Windows of ``size`` that follow each other. A record at ``end`` belongs to the next.

    Config (ms): ``size``, ``offset`` (0), and those of :class:`Windowed`. Functions as in :func:`fold`. Results carry the timestamp ``end
    - 1``; they come by window, then in the order in which the keys first came.
    """

    def process(self, batch: Batch) -> Batch | None:
        size, offset = self.size, self.offset
        first, add = self.fold.first, self.fold.add
        out = Batch([], [])
        live: dict[Any, Any] = {}
        delta: dict[Any, Any] = {}
        start = end = 0
        for key, value, t in zip(map(self.key, batch.values), batch.values, self._times(batch)):
            if not start <= t < end:
                start = t - (t - offset) % size
                end = start + size
                if self._special(start):
                    if not self._late_record(key, value, start, out):
                        self._too_late(value, t)
                    start = end = 0
                    continue
                live, delta = self._pane(start)
            # Written out, as in _add: a call per record costs more than the rest of the loop.
            try:
                acc = live[key]
            except (KeyError, TypeError):
                canonical(key)
                acc = first(value)
            else:
                acc = add(acc, value)
            live[key] = delta[key] = acc
        return out if out.values else None


class SlidingWindow(_Sized):
    """Windows of ``size`` that start every ``slide``. A ``slide`` above ``size`` leaves gaps whose records are in no window.

    Config (ms): ``size``, ``slide``, ``offset`` (0), and those of :class:`Windowed`. A record is late when all its windows are past their
    lateness.
    """

    def __init__(self, spec: OperatorSpec, key: Callable[[Any], Any], **functions: Any) -> None:
        super().__init__(spec, key, **functions)
        self.slide = millis(spec, "slide", 1)

    def _cell(self, t: int) -> tuple[int, int, list[int]]:
        """(low, high, starts): all moments in ``[low, high)``, ``t`` among them, are in exactly the windows with these starts."""
        last = t - (t - self.offset) % self.slide
        count, rest = divmod(self.size, self.slide)
        if t - last < rest:
            count += 1
            low, high = last, last + rest
        else:
            low, high = last + rest, last + self.slide
        return low, high, [last - i * self.slide for i in range(count - 1, -1, -1)]

    def process(self, batch: Batch) -> Batch | None:
        first, add = self.fold.first, self.fold.add
        out = Batch([], [])
        panes: list[_Pane] = []
        low = high = 0
        for key, value, t in zip(map(self.key, batch.values), batch.values, self._times(batch)):
            if not low <= t < high:
                low, high, starts = self._cell(t)
                if any(map(self._special, starts)):
                    if not self._late_in_some(key, value, starts, out):
                        self._too_late(value, t)
                    low = high = 0
                    continue
                panes = list(map(self._pane, starts))
            for live, delta in panes:
                try:
                    acc = live[key]
                except (KeyError, TypeError):
                    canonical(key)
                    acc = first(value)
                else:
                    acc = add(acc, value)
                live[key] = delta[key] = acc
        return out if out.values else None

    def _late_in_some(self, key: Any, value: Any, starts: list[int], out: Batch) -> bool:
        """Add a record to those of its windows that still take it; False when none does."""
        taken = False
        for start in starts:
            if self._special(start):
                taken = self._late_record(key, value, start, out) or taken
            else:
                _add(*self._pane(start), key, value, self.fold.first, self.fold.add)
                taken = True
        return taken
