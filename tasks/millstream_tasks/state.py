"""Keyed state of one operator subtask: plain dicts, with what changed since the last cut kept beside them.

Used by operators on the subtask's thread; captured by the runner at a barrier and encoded on the background thread. A capture shares immutable values
and encodes mutable ones at once: a snapshot is a copy, never a view. What must never happen here: a change that is not recorded in the delta.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

Key = Any
Namespace = int | None
"""A window's start, or None for state that has no window."""


class _Gone:
    __slots__ = ()

    def __repr__(self) -> str:
        return "GONE"


GONE = _Gone()
"""Marks a removed key in a delta."""

_ATOMS = frozenset(
    {int, float, bool, str, bytes, type(None), _Gone, decimal.Decimal, datetime.datetime, datetime.date, datetime.timedelta, datetime.time}
)


class KeyedTable:
    """One named keyed state. ``panes`` maps namespace → key → value; plain state uses the namespace None.

    Operators on hot paths work on ``pane(ns)`` directly: every write goes to both dicts. ``lasting`` says whether all values ever written are immutable. An operator may keep
    it, batch by batch (:meth:`note`), while the values are in the CPU's cache; where it is None a cut looks at every value, on the subtask's thread.
    """

    __slots__ = ("delta", "dropped", "lasting", "name", "panes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.panes: dict[Namespace, dict[Key, Any]] = {}
        self.delta: dict[Namespace, dict[Key, Any]] = {}
        self.dropped: set[Namespace] = set()
        self.lasting: bool | None = None

    def note(self, values: Collection[Any]) -> None:
        """These values were written by an operator that keeps ``lasting``."""
        if self.lasting:
            self.lasting = immutable(values)

    def pane(self, ns: Namespace = None) -> tuple[dict[Key, Any], dict[Key, Any]]:
        """(live, delta) of a namespace, made when missing. Both must be written."""
        live = self.panes.get(ns)
        if live is None:
            live = self.panes[ns] = {}
        delta = self.delta.get(ns)
        if delta is None:
            delta = self.delta[ns] = {}
        return live, delta

    def get(self, key: Key, default: Any = None, ns: Namespace = None) -> Any:
        pane = self.panes.get(ns)
        return default if pane is None else pane.get(key, default)

    def put(self, key: Key, value: Any, ns: Namespace = None) -> None:
        live, delta = self.pane(ns)
        live[key] = value
        delta[key] = value
        self.note((value,))

    def remove(self, key: Key, ns: Namespace = None) -> None:
        live, delta = self.pane(ns)
        if live.pop(key, GONE) is not GONE:
            delta[key] = GONE

    def drop(self, ns: Namespace) -> dict[Key, Any]:
        """Remove a whole namespace; its last content."""
        self.delta.pop(ns, None)
        self.dropped.add(ns)
        return self.panes.pop(ns, {})

    def size(self) -> int:
        """Entries over all namespaces."""
        return sum(map(len, self.panes.values()))

    def keys(self) -> Iterator[Key]:
        return chain.from_iterable(self.panes.values())

    def cut(self, full: bool) -> TableCut:
        """What a snapshot needs, and a fresh delta. ``full``: everything; else what changed since the last cut."""
        if full:
            panes = {ns: dict(pane) for ns, pane in self.panes.items()}
            result = TableCut(self.name, panes, set(), True, self.lasting)
        else:
            result = TableCut(self.name, self.delta, self.dropped, False, self.lasting)
        self.delta = {}
        self.dropped = set()
        return result

    def load(self, ns: Namespace, keys: list[Key], values: list[Any]) -> None:
        """Restore entries; they are not changes."""
        self.note(values)
        self.panes.setdefault(ns, {}).update(zip(keys, values))

    def unload(self, ns: Namespace, keys: list[Key] | None) -> None:
        """Apply a removal of a later segment while restoring; ``keys`` None: the whole namespace."""
        if keys is None:
            self.panes.pop(ns, None)
            return
        pane = self.panes.get(ns, {})
        for key in keys:
            pane.pop(key, None)
        if not pane:
            self.panes.pop(ns, None)


class TableCut:
    """The content of one table at a cut, or what changed between two."""

    __slots__ = ("dropped", "full", "lasting", "name", "panes")

    def __init__(
        self, name: str, panes: dict[Namespace, dict[Key, Any]], dropped: set[Namespace], full: bool, lasting: bool | None = None
    ) -> None:
        self.name = name
        self.panes = panes
        self.dropped = dropped
        self.full = full
        self.lasting = lasting

    def after(self, older: TableCut) -> TableCut:
        """This change applied on top of an older one: what both did together."""
        panes = {ns: dict(pane) for ns, pane in older.panes.items() if ns not in self.dropped}
        for ns, pane in self.panes.items():
            panes.setdefault(ns, {}).update(pane)
        return TableCut(self.name, panes, older.dropped | self.dropped, older.full, self.lasting)  # of all time, so of the older one, too

    def entries(self) -> int:
        return sum(map(len, self.panes.values()))

    def shareable(self) -> bool:
        """Whether every value is immutable, so that the background thread may encode it later."""
        return self.lasting or all(immutable(pane.values()) for pane in self.panes.values())


def immutable(values: Collection[Any]) -> bool:
    """Whether all values are atoms, or tuples (nested) of atoms."""
    kinds = set(map(type, values))
    if kinds <= _ATOMS:
        return True
    if kinds <= _ATOMS | {tuple}:
        return immutable(list(chain.from_iterable(v for v in values if type(v) is tuple)))
    return False
