"""State of a process function: what it declares, and the handles it works with.

Declared by users in ``ProcessFunction.states``, opened by :class:`millstream_tasks.operators.process.Process`. What must never happen
here: a change that does not go through ``KeyedTable.put`` or ``remove`` (the next incremental snapshot would miss it), a default shared
by two keys.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

from millstream_schema.canonical import canonical_json
from millstream_schema.connectors import Json
from millstream_schema.errors import ConfigurationError, OperatorError
from millstream_tasks.state import KeyedTable

from .deadlines import Deadlines
from .ownership import frozen, own

REDISTRIBUTIONS = ("split", "union", "broadcast")
NO_KEY: Any = type("NoKey", (), {"__slots__": (), "__repr__": lambda self: "NO_KEY"})()
"""The key in hand when there is none, as in ``open``."""
MISSING: Any = type("Missing", (), {"__slots__": (), "__repr__": lambda self: "MISSING"})()


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """Base of keyed state. ``ttl_ms``: processing time after the last write when the state of a key is gone; None: never."""

    kind: ClassVar[str] = ""
    ttl_ms: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.ttl_ms is not None and (type(self.ttl_ms) is not int or self.ttl_ms <= 0):
            raise ConfigurationError(f"ttl_ms must be a positive integer number of milliseconds or None, not {self.ttl_ms!r}")

    def describe(self) -> dict[str, Json]:
        """What the plan and the snapshot know of it."""
        return {"kind": self.kind, "ttl_ms": self.ttl_ms}


@dataclasses.dataclass(frozen=True)
class ValueState(StateSpec):
    """One value per key; ``default`` (each key gets a copy of its own) until it is set."""

    kind: ClassVar[str] = "value"
    default: Any = None


@dataclasses.dataclass(frozen=True)
class ListState(StateSpec):
    """A list per key."""

    kind: ClassVar[str] = "list"


@dataclasses.dataclass(frozen=True)
class MapState(StateSpec):
    """A dict per key. Each change writes the whole dict of the key to the next snapshot."""

    kind: ClassVar[str] = "map"


@dataclasses.dataclass(frozen=True)
class ReducingState(StateSpec):
    """One value per key, reduced with each that is added."""

    kind: ClassVar[str] = "reducing"


@dataclasses.dataclass(frozen=True)
class AggregatingState(StateSpec):
    """One accumulator per key."""

    kind: ClassVar[str] = "aggregating"


@dataclasses.dataclass(frozen=True)
class OperatorListState:
    """A list of JSON values that belongs to the subtask, not to a key.

    ``redistribution`` when the number of subtasks changes: ``split`` (dealt out in turn), ``union`` (all get all), ``broadcast`` (all get
    the first's).
    """

    redistribution: str
    kind: ClassVar[str] = "operator_list"

    def __post_init__(self) -> None:
        if self.redistribution not in REDISTRIBUTIONS:
            raise ConfigurationError(f"redistribution must be one of {', '.join(REDISTRIBUTIONS)}, not {self.redistribution!r}")

    def describe(self) -> dict[str, Json]:
        """What the plan and the snapshot know of it."""
        return {"kind": self.kind, "redistribution": self.redistribution}


class Scope(Protocol):
    """Whose state is in hand, and when."""

    key: Any

    def processing_time(self) -> int:
        """The node's clock, UTC ms."""


class Cell:
    """One keyed state of the key in hand. With a TTL the table holds (expires at, value)."""

    __slots__ = ("expiry", "name", "scope", "table", "ttl")

    def __init__(self, name: str, table: KeyedTable, ttl: int | None, scope: Scope, expiry: Deadlines) -> None:
        self.name = name
        self.table = table
        self.ttl = ttl
        self.scope = scope
        self.expiry = expiry

    def _key(self) -> Any:
        key = self.scope.key
        if key is NO_KEY:
            raise OperatorError(f"state {self.name!r} belongs to a key and there is none here: use it in process and on_timer")
        return key

    def read(self) -> Any:
        """The value, or MISSING. What has expired is gone, swept or not."""
        key = self._key()
        held = self.table.get(key, MISSING)
        if self.ttl is None or held is MISSING:
            return held
        if held[0] <= self.scope.processing_time():
            self.table.remove(key)
            return MISSING
        return held[1]

    def write(self, value: Any) -> None:
        key = self._key()
        if self.ttl is None:
            self.table.put(key, value)
            return
        expires = self.scope.processing_time() + self.ttl
        self.table.put(key, (expires, value))
        self.expiry.set((self.name, key), expires)

    def touch(self) -> None:
        """Count the value as changed, without renewing it: the user holds something that can be changed in place."""
        key = self._key()
        self.table.put(key, self.table.get(key))

    def clear(self) -> None:
        self.table.remove(self._key())


def sweep(cells: dict[str, Cell], expiry: Deadlines, now_ms: int) -> None:
    """Remove every value whose time is over."""
    while (due := expiry.pop(now_ms)) is not None:
        name, key = due[1]
        held = cells[name].table.get(key, MISSING)
        if held is MISSING:
            continue
        if held[0] <= now_ms:
            cells[name].table.remove(key)
        else:
            expiry.set((name, key), held[0])


class Handle:
    """Base of the handles: state of the key in hand, whichever that is at the time of the call."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def clear(self) -> None:
        """Forget the state of this key."""
        self._cell.clear()


class ValueHandle(Handle):
    """See :class:`ValueState`."""

    __slots__ = ("_default",)

    def __init__(self, cell: Cell, default: Any) -> None:
        super().__init__(cell)
        self._default = default

    def get(self) -> Any:
        """The value, or the default. Keep what you change by calling :meth:`set`."""
        value = self._cell.read()
        if value is MISSING:
            return own(self._default)
        if not frozen(value):
            self._cell.touch()
        return value

    def set(self, value: Any) -> None:
        self._cell.write(value)


class ListHandle(Handle):
    """See :class:`ListState`."""

    __slots__ = ()

    def get(self) -> list[Any]:
        """A list of the elements; changing the list changes no state."""
        values = self._cell.read()
        if values is MISSING:
            return []
        if not all(map(frozen, values)):
            self._cell.touch()
        return list(values)

    def append(self, value: Any) -> None:
        self.extend((value,))

    def extend(self, values: Iterable[Any]) -> None:
        held = self._cell.read()
        if held is MISSING:
            held = []
        held.extend(values)
        self._cell.write(held)

    def set(self, values: Iterable[Any]) -> None:
        self._cell.write(list(values))


class MapHandle(Handle):
    """See :class:`MapState`."""

    __slots__ = ()

    def _held(self) -> dict[Any, Any]:
        held = self._cell.read()
        return {} if held is MISSING else held

    def get(self, name: Any, default: Any = None) -> Any:
        value = self._held().get(name, MISSING)
        if value is MISSING:
            return default
        if not frozen(value):
            self._cell.touch()
        return value

    def put(self, name: Any, value: Any) -> None:
        held = self._held()
        held[name] = value
        self._cell.write(held)

    def remove(self, name: Any) -> None:
        """Remove an entry; nothing when there is none."""
        held = self._held()
        if held.pop(name, MISSING) is MISSING:
            return
        if held:
            self._cell.write(held)
        else:
            self._cell.clear()

    def items(self) -> list[tuple[Any, Any]]:
        """(name, value) of every entry, a list of its own: entries may be changed while it is gone through."""
        held = self._held()
        if not all(map(frozen, held.values())):
            self._cell.touch()
        return list(held.items())

    def __contains__(self, name: Any) -> bool:
        return name in self._held()

    def __len__(self) -> int:
        return len(self._held())


class ReducingHandle(Handle):
    """See :class:`ReducingState`."""

    __slots__ = ("function",)

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.function: Callable[[Any, Any], Any]

    def add(self, value: Any) -> None:
        held = self._cell.read()
        self._cell.write(own(value) if held is MISSING else self.function(held, value))

    def get(self) -> Any:
        """A value of its own, None when nothing was added."""
        held = self._cell.read()
        return None if held is MISSING else own(held)


class AggregatingHandle(Handle):
    """See :class:`AggregatingState`."""

    __slots__ = ("add_function", "create", "result")

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.create: Callable[[], Any]
        self.add_function: Callable[[Any, Any], Any]
        self.result: Callable[[Any], Any] | None

    def add(self, value: Any) -> None:
        held = self._cell.read()
        self._cell.write(self.add_function(self.create() if held is MISSING else held, value))

    def get(self) -> Any:
        """``result(accumulator)``, or the accumulator; None when nothing was added."""
        held = self._cell.read()
        if held is MISSING:
            return None
        held = own(held)
        return held if self.result is None else self.result(held)


class CheckpointedOperatorList:
    """See :class:`OperatorListState`. Elements are JSON values and come back as JSON has them (tuples as lists)."""

    __slots__ = ("_items", "redistribution")

    def __init__(self, redistribution: str) -> None:
        self.redistribution = redistribution
        self._items: list[Json] = []

    def get(self) -> list[Json]:
        """A deep copy: changing it changes no state."""
        return [_plain(item) for item in self._items]

    def append(self, item: Json) -> None:
        """Raises :class:`CodecError` for what JSON cannot hold."""
        self._items.append(_plain(item))

    def set(self, items: Iterable[Json]) -> None:
        """Replace everything. Raises :class:`CodecError` for what JSON cannot hold."""
        self._items = [_plain(item) for item in items]

    def clear(self) -> None:
        self._items = []

    def redistribute(self, old: list[list[Json]], index: int, parallelism: int) -> None:
        """Take this subtask's part of what all old subtasks held."""
        if self.redistribution == "broadcast":
            self.set(old[0] if old else [])
            return
        together = [item for items in old for item in items]
        self.set(together[index::parallelism] if self.redistribution == "split" else together)


def _plain(item: Json) -> Json:
    plain: Json = json.loads(canonical_json(item))
    return plain
