"""Session windows: per key, records less than a gap apart form one window.

Driven by the chain. State: table ``sessions``, key → tuple of (start, end, accumulator, sent), ordered, no two overlapping. What must
never happen here: a result that depends on the order of arrival, a record counted twice by the sessions it joins, state of a merged
session left behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from millstream_schema.canonical import canonical
from millstream_schema.errors import ConfigurationError
from millstream_schema.model import OperatorSpec

from .base import MAX_WATERMARK, TIME_LIMIT, Batch
from .deadlines import Deadlines
from .window_base import Window, Windowed, fold, millis

_Session = tuple[int, int, Any, bool]


class SessionWindow(Windowed):
    """A session is ``[first, last + gap)``; a record at exactly its end starts another. It fires when the watermark reaches ``end - 1``.

    Config (ms): ``gap``, and those of :class:`Windowed`. Functions as in :func:`fold`; create + add needs ``merge(earlier, later)`` too.
    A late record is judged by the session it becomes part of. Results come by end.
    """

    def __init__(self, spec: OperatorSpec, key: Callable[[Any], Any], **functions: Any) -> None:
        super().__init__(spec, key, fold(**functions))
        if self.fold.merge is None:
            raise ConfigurationError(f"session window {spec.id!r} needs a merge function: a record can join two sessions")
        self._merge = self.fold.merge
        self.gap = millis(spec, "gap", 1)
        self._table = self.table("sessions")
        self._line = Deadlines()

    def process(self, batch: Batch) -> Batch | None:
        live, delta = self._table.pane()
        gap, add = self.gap, self.fold.add
        out = Batch([], [])
        for key, value, t in zip(map(self.key, batch.values), batch.values, self._times(batch)):
            try:
                sessions = live[key]
            except (KeyError, TypeError):  # TypeError: not hashable, which canonical refuses by name
                canonical(key)
                sessions = ()
            if len(sessions) == 1:
                start, end, acc, sent = sessions[0]
                # The usual record extends the only session of its key: nothing to merge, nothing to put in line.
                if start <= t < end and not sent:
                    live[key] = delta[key] = ((start, max(end, t + gap), add(acc, value), False),)
                    continue
            self._place(key, value, t, sessions, out)
        return out if out.values else None

    def _place(self, key: Any, value: Any, t: int, sessions: tuple[_Session, ...], out: Batch) -> None:
        """Put a record into the session it belongs to, made of all it touches."""
        start, end = t, t + self.gap
        touched = [s for s in sessions if s[0] < end and start < s[1]]
        if touched:
            start, end = min(start, touched[0][0]), max(end, touched[-1][1])
            acc = touched[0][2]
            for other in touched[1:]:
                acc = self._merge(acc, other[2])
            acc = self.fold.add(acc, value)
        elif self._past(end, self.watermark):
            self._too_late(value, t)
            return
        else:
            acc = self.fold.first(value)
        fired = end - 1 <= self.watermark
        before = [s for s in sessions if s[1] <= start]
        after = [s for s in sessions if s[0] >= end]
        self._table.put(key, (*before, (start, end, acc, fired), *after))
        self._line.set(key, end - 1)
        if fired:
            self._emit(key, start, end, acc, True, out)

    def _emit(self, key: Any, start: int, end: int, acc: Any, kept: bool, out: Batch) -> None:
        out.values.append(self._result(key, Window(start, end), acc, kept))
        assert out.timestamps is not None
        out.timestamps.append(min(end - 1, TIME_LIMIT))

    def _advance(self, to: int) -> Batch | None:
        out = Batch([], [])
        # +∞ fires and frees what ends, or may be late, beyond it too.
        until = math.inf if to >= MAX_WATERMARK else to
        while (due := self._line.pop(until)) is not None:
            self._visit(due[1], due[0], to, out)
        return out if out.values else None

    def _visit(self, key: Any, time: int, to: int, out: Batch) -> None:
        """Fire the sessions of ``key`` that end at ``time``, free those past their lateness, keep the rest in line."""
        sessions: tuple[_Session, ...] = self._table.get(key, ())
        if sessions and (wanted := min(map(self._wanted, sessions))) > time:
            self._line.set(key, wanted)  # it has grown since it was put in line
            return
        left: list[_Session] = []
        for session in sessions:
            start, end, acc, sent = session
            gone = self._past(end, to)
            if not sent and end - 1 <= time:
                self._emit(key, start, end, acc, not gone, out)
                session = (start, end, acc, True)
            if not (session[3] and gone):
                left.append(session)
        if not left:
            self._table.remove(key)
            return
        if tuple(left) != sessions:
            self._table.put(key, tuple(left))
        self._line.set(key, min(map(self._wanted, left)))

    def _wanted(self, session: _Session) -> int:
        """When a session wants attention: to fire, then to be freed."""
        return session[1] - 1 + (self.lateness if session[3] else 0)

    def _next_end(self) -> int | None:
        time = self._line.next()
        return None if time is None else time + 1

    def _rebuild(self) -> None:
        self._line = Deadlines()
        for key, sessions in self._table.panes.get(None, {}).items():
            if sessions:
                self._line.set(key, min(map(self._wanted, sessions)))
