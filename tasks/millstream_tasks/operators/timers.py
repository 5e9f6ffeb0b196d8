"""Timers of a process function: state like any other, kept per key in the tables ``timers.event`` and ``timers.processing``.

Used by :class:`millstream_tasks.operators.process.Process`. What must never happen here: a timer that is in the heap alone (a crash would
lose it), a deletion that touches another key.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from millstream_schema.errors import OperatorError
from millstream_tasks.state import KeyedTable

from .base import MAX_WATERMARK, MIN_WATERMARK
from .deadlines import Deadlines
from .keyed_state import NO_KEY, Scope


class TimerTable:
    """Timers of one time domain: key → ordered tuple of moments. The same moment twice for one key is one timer."""

    def __init__(self, table: KeyedTable) -> None:
        self._table = table
        self._line = Deadlines()

    def add(self, key: Any, time: int) -> None:
        held = self._table.get(key, ())
        at = bisect_left(held, time)
        if at == len(held) or held[at] != time:
            self._table.put(key, (*held[:at], time, *held[at:]))
        self._line.set(key, time)

    def remove(self, key: Any, time: int) -> bool:
        """Forget one timer of one key; whether there was one."""
        held = self._table.get(key, ())
        if time not in held:
            return False
        self._keep(key, tuple(t for t in held if t != time))
        return True

    def _keep(self, key: Any, times: tuple[int, ...]) -> None:
        if times:
            self._table.put(key, times)
        else:
            self._table.remove(key)

    def take(self, until: int) -> tuple[int, Any] | None:
        """Remove the earliest timer that is not after ``until``: (moment, key). One at a time, so callbacks may set and delete timers
        freely.
        """
        while (due := self._line.pop(until)) is not None:
            wanted, key = due
            held = self._table.get(key, ())
            if not held:
                continue
            if held[0] > wanted:  # the one it was set for has been deleted
                self._line.set(key, held[0])
                continue
            self._keep(key, held[1:])
            if len(held) > 1:
                self._line.set(key, held[1])
            return held[0], key
        return None

    def next(self) -> int | None:
        """No timer is earlier than this; None when there is none."""
        return self._line.next()

    def all(self) -> list[tuple[int, Any]]:
        """Every (moment, key), by moment."""
        every = [(time, key) for key, times in self._table.panes.get(None, {}).items() for time in times]
        return sorted(every, key=lambda timer: timer[0])

    def rebuild(self) -> None:
        """Make the firing order anew from the table."""
        self._line = Deadlines()
        for key, times in self._table.panes.get(None, {}).items():
            if times:
                self._line.set(key, times[0])


class Timers:
    """``ctx.timers``: timers of the key in hand. Moments are UTC ms."""

    def __init__(self, event: TimerTable, processing: TimerTable, scope: Scope) -> None:
        self._event = event
        self._processing = processing
        self._scope = scope

    def event(self, timestamp: int) -> None:
        """Call ``on_timer`` when the watermark reaches ``timestamp``; at its next advance when it is there already."""
        self._event.add(self._key(timestamp), timestamp)

    def processing(self, timestamp: int) -> None:
        """Call ``on_timer`` when the node's clock reaches ``timestamp``."""
        self._processing.add(self._key(timestamp), timestamp)

    def delete_event(self, timestamp: int) -> None:
        self._event.remove(self._key(timestamp), timestamp)

    def delete_processing(self, timestamp: int) -> None:
        self._processing.remove(self._key(timestamp), timestamp)

    def _key(self, timestamp: int) -> Any:
        if type(timestamp) is not int or not MIN_WATERMARK <= timestamp <= MAX_WATERMARK:
            raise OperatorError(f"a timer needs a moment in UTC milliseconds, not {timestamp!r}")
        if self._scope.key is NO_KEY:
            raise OperatorError("a timer belongs to a key and there is none here: set it in process or on_timer")
        return self._scope.key
