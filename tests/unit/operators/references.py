"""Naive models of windows: one record at a time, all of it in lists. The operators must agree with them.

Used by the property tests beside it. What must never happen here: code shared with the operators.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

Record = tuple[str, int, int]
"""(key, value, timestamp)."""
END = math.inf


def windows_of(t: int, size: int, slide: int, offset: int) -> list[tuple[int, int]]:
    """Every ``[offset + n * slide, + size)`` that contains ``t``, found by trying."""
    n = math.floor((t - offset) / slide)
    around = range(n - size // slide - 3, n + 3)
    return [(s, s + size) for s in (offset + i * slide for i in around) if s <= t < s + size]


@dataclasses.dataclass
class Held:
    """One window or session of one key."""

    key: str
    start: int
    end: int
    values: list[int]
    sent: bool = False


class Model:
    """What windows send, step by step. ``place(model, record)`` gives the windows that now hold the record, or none."""

    def __init__(self, lateness: int, place: Callable[[Model, Record], list[Held]]) -> None:
        self.lateness = lateness
        self.place = place
        self.mark: float = -END
        self.held: list[Held] = []
        self.out: list[tuple[Any, int]] = []
        self.late: list[tuple[Record, int]] = []

    def alive(self, end: int) -> bool:
        return end - 1 + self.lateness > self.mark

    def send(self, record: Record) -> None:
        for window in self.place(self, record):
            window.values.append(record[1])
            window.sent = False
            if window.end - 1 <= self.mark:
                self.emit(window)

    def emit(self, window: Held) -> None:
        window.sent = True
        self.out.append(((window.key, window.start, window.end, sum(window.values), len(window.values)), window.end - 1))

    def watermark(self, mark: float) -> None:
        self.mark = max(self.mark, mark)
        for window in self.held:
            if window.end - 1 <= self.mark and not window.sent:
                self.emit(window)
        self.held = [w for w in self.held if self.alive(w.end)]


def sized(size: int, slide: int, offset: int) -> Callable[[Model, Record], list[Held]]:
    """Tumbling and sliding windows."""

    def place(model: Model, record: Record) -> list[Held]:
        key, _, t = record
        every = windows_of(t, size, slide, offset)
        taken = []
        for start, end in every:
            if not model.alive(end):
                continue
            found = [w for w in model.held if (w.key, w.start) == (key, start)]
            if not found:
                found = [Held(key, start, end, [])]
                model.held += found
            taken += found
        if every and not taken:
            model.late.append((record, t))
        return taken

    return place


def sessions(gap: int) -> Callable[[Model, Record], list[Held]]:
    """Session windows."""

    def place(model: Model, record: Record) -> list[Held]:
        key, _, t = record
        joined = [w for w in model.held if w.key == key and w.start < t + gap and t < w.end]
        end = max([t + gap, *(w.end for w in joined)])
        if not model.alive(end):
            model.late.append((record, t))
            return []
        whole = Held(key, min([t, *(w.start for w in joined)]), end, [v for w in joined for v in w.values])
        model.held = [w for w in model.held if w not in joined] + [whole]
        return [whole]

    return place


def sessions_at_once(records: list[Record], gap: int) -> list[tuple[Any, int]]:
    """The sessions of a finished input: sort, and cut where the pause is a gap or longer."""
    out = []
    for key in {r[0] for r in records}:
        mine = sorted((t, v) for k, v, t in records if k == key)
        runs = [[mine[0]]]
        for t, v in mine[1:]:
            if t - runs[-1][-1][0] < gap:
                runs[-1].append((t, v))
            else:
                runs.append([(t, v)])
        out += [((key, r[0][0], r[-1][0] + gap, sum(v for _, v in r), len(r)), r[-1][0] + gap - 1) for r in runs]
    return sorted(out)


def windows_at_once(records: list[Record], size: int, slide: int, offset: int) -> list[tuple[Any, int]]:
    """The windows of a finished input: every record into every window that contains it."""
    held: dict[tuple[str, int, int], list[int]] = {}
    for key, value, t in records:
        for start, end in windows_of(t, size, slide, offset):
            held.setdefault((key, start, end), []).append(value)
    return sorted(((key, s, e, sum(vs), len(vs)), e - 1) for (key, s, e), vs in held.items())
