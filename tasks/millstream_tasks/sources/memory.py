"""Sources that need no outside system: a collection held in memory and a function of (split, position).

Built by user code; opened by the subtask runner. Both are replayable: the cursor is an index. What must never happen here: two nodes
that build the same collection and get different fingerprints, or a poll that costs more than a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import xxhash

from millstream_schema.connectors import ConnectorContext, Json, Read, SourceCapability, Split
from millstream_schema.errors import SourceError

Generate = Callable[[int, int, int], "list[Any] | None"]


class CollectionSource:
    """A bounded source over values in memory.

    ``values`` are copied. ``timestamps`` (UTC ms) must be as many as the values. Split *i* of ``splits`` holds the *i*-th contiguous
    slice, so one split keeps the order given.
    """

    kind = "collection"
    version = 1
    bounded = True
    capability = SourceCapability.REPLAYABLE

    def __init__(self, values: Iterable[Any], timestamps: Iterable[int] | None = None, splits: int = 1) -> None:
        self._values = list(values)
        self._timestamps = None if timestamps is None else list(timestamps)
        self._splits = splits
        self._config: dict[str, Json] | None = None

    def config(self) -> dict[str, Json]:
        if self._config is None:
            content = self._values if self._timestamps is None else [self._values, self._timestamps]
            self._config = {
                "length": len(self._values),
                "splits": self._splits,
                "timestamps": self._timestamps is not None,
                "digest": _digest(content),
            }
        return self._config

    def problems(self) -> list[str]:
        found = [] if _is_count(self._splits) else [f"splits must be an integer of at least 1, not {self._splits!r}"]
        if self._timestamps is not None:
            if len(self._timestamps) != len(self._values):
                found.append(f"{len(self._timestamps)} timestamps for {len(self._values)} values; give one for each")
            if not all(type(t) is int for t in self._timestamps):
                found.append("timestamps must be integers: UTC milliseconds since 1970-01-01")
        return found

    def discover(self, known: frozenset[str]) -> list[Split]:
        total, parts = len(self._values), self._splits
        return [Split(str(i), {"from": total * i // parts, "to": total * (i + 1) // parts}) for i in range(parts) if str(i) not in known]

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> CollectionReader:
        start, end = _bounds(split)
        at = start if cursor is None else _position(cursor, split, "collection")
        if not start <= at <= end <= len(self._values):
            raise SourceError(
                f"collection split {split.split_id} holds values {start} to {end} of {len(self._values)} and cannot resume at {at}: "
                "the collection is not the one that was read before. Restore with the same values."
            )
        return CollectionReader(self._values, self._timestamps, at, end)


class CollectionReader:
    """Hands out slices of the collection."""

    def __init__(self, values: list[Any], timestamps: list[int] | None, at: int, end: int) -> None:
        self._values = values
        self._timestamps = timestamps
        self._at = at
        self._end = end

    def poll(self, limit: int) -> Read:
        start = self._at
        stop = min(start + limit, self._end)
        self._at = stop
        stamps = self._timestamps
        return Read(self._values[start:stop], None if stamps is None else stamps[start:stop], stop >= self._end)

    def cursor(self) -> Json:
        return self._at

    def close(self) -> None:
        """Nothing is held."""


class GeneratorSource:
    """Records made by ``function(split_index, position, limit)``, which must be deterministic.

    The function returns up to ``limit`` records that start at ``position`` (counted from 0 per split), ``[]`` when there are none now,
    None when the split has ended. ``rate`` is in records per second per split, paced by the node's clock; at most one second's worth
    is caught up after a pause. ``timestamp`` gives a record's event time in UTC ms. ``bounded`` says whether the splits end.
    ``name`` identifies the function in the job's fingerprint; left out, it is its module and qualified name.
    """

    kind = "generator"
    version = 1
    capability = SourceCapability.REPLAYABLE

    def __init__(
        self,
        function: Generate,
        splits: int = 1,
        name: str | None = None,
        *,
        rate: float | None = None,
        bounded: bool = True,
        timestamp: Callable[[Any], int] | None = None,
    ) -> None:
        self._function = function
        self._splits = splits
        self._name = name if name is not None else qualified_name(function)
        self._rate = rate
        self.bounded = bounded
        self._timestamp = timestamp

    def config(self) -> dict[str, Json]:
        return {
            "function": self._name,
            "splits": self._splits,
            "rate": self._rate,
            "bounded": self.bounded,
            "timestamp": None if self._timestamp is None else qualified_name(self._timestamp),
        }

    def problems(self) -> list[str]:
        found = [] if _is_count(self._splits) else [f"splits must be an integer of at least 1, not {self._splits!r}"]
        if not callable(self._function):
            found.append(f"function must be callable as f(split_index, position, limit), not {self._function!r}")
        if self._rate is not None and not self._rate > 0:
            found.append(f"rate must be above 0 records per second, not {self._rate!r}; leave it out for no limit")
        return found

    def discover(self, known: frozenset[str]) -> list[Split]:
        return [Split(str(i), {"index": i}) for i in range(self._splits) if str(i) not in known]

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> GeneratorReader:
        at = 0 if cursor is None else _position(cursor, split, "generator")
        index = split.body["index"] if isinstance(split.body, dict) else None
        if type(index) is not int:
            raise SourceError(f"generator split {split.split_id} was not made by this source: {split.body!r}")
        pace = None if self._rate is None else _Pace(self._rate, context.now_ms)
        return GeneratorReader(self._function, self._name, index, at, pace, self._timestamp)


class GeneratorReader:
    """Calls the function for what is due."""

    def __init__(
        self,
        function: Generate,
        name: str,
        index: int,
        at: int,
        pace: _Pace | None,
        timestamp: Callable[[Any], int] | None,
    ) -> None:
        self._function = function
        self._name = name
        self._index = index
        self._at = at
        self._pace = pace
        self._timestamp = timestamp

    def poll(self, limit: int) -> Read:
        if self._pace is not None:
            limit = self._pace.due(limit)
            if limit == 0:
                return Read([])
        values = self._function(self._index, self._at, limit)
        if values is None:
            return Read([], exhausted=True)
        if len(values) > limit:
            raise SourceError(
                f"generator {self._name} returned {len(values)} records at position {self._at} of split {self._index} where at most "
                f"{limit} were asked for; return values[:limit]"
            )
        if self._pace is not None:
            self._pace.spend(len(values))
        stamps = None if self._timestamp is None else [self._timestamp(value) for value in values]
        self._at += len(values)
        return Read(values, stamps)

    def cursor(self) -> Json:
        return self._at

    def close(self) -> None:
        """Nothing is held."""


class _Pace:
    """A token bucket over the node's clock: starts empty, holds at most one second's worth (but at least one record)."""

    def __init__(self, rate: float, now_ms: Callable[[], int]) -> None:
        self._rate = rate
        self._now_ms = now_ms
        self._last = now_ms()
        self._tokens = 0.0

    def due(self, limit: int) -> int:
        now = self._now_ms()
        # A node's clock may be set back: then nothing is earned and counting starts again from there.
        earned = max(0, now - self._last) * self._rate / 1000.0
        self._last = now
        self._tokens = min(self._tokens + earned, max(self._rate, 1.0))
        return min(limit, int(self._tokens))

    def spend(self, count: int) -> None:
        self._tokens -= count


def qualified_name(function: object) -> str:
    """``module.qualname`` of a function, or of the type of a callable object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _bounds(split: Split) -> tuple[int, int]:
    if isinstance(split.body, dict):
        start, end = split.body.get("from"), split.body.get("to")
        if type(start) is int and type(end) is int:
            return start, end
    raise SourceError(f"collection split {split.split_id} was not made by this source: {split.body!r}")


def _position(cursor: Json, split: Split, what: str) -> int:
    if type(cursor) is not int or cursor < 0:
        raise SourceError(f"{what} split {split.split_id}: the cursor must be a position, not {cursor!r}")
    return cursor


def _digest(values: list[Any]) -> str | None:
    """Hash of the content, the same in every process; None when a value has no canonical encoding (then only the length identifies)."""
    try:
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(values, order="deterministic"))
    except (TypeError, OverflowError, ValueError):
        pass
    try:
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(_canonical(values), order="deterministic"))
    except (TypeError, OverflowError, ValueError, RecursionError):
        return None


def _canonical(value: Any) -> Any:
    """Integers above 64 bits and mappings with keys other than str, in a form the encoder orders."""
    kind = type(value)
    if kind is int:
        return value if -(2**63) <= value < 2**64 else ["int", str(value)]
    if kind is dict:
        pairs = [[_canonical(k), _canonical(v)] for k, v in value.items()]
        return ["map", sorted(pairs, key=lambda pair: msgspec.msgpack.encode(pair[0], order="deterministic"))]
    if kind in (list, tuple):
        return [_canonical(item) for item in value]
    if kind in (set, frozenset):
        return ["set", sorted((_canonical(item) for item in value), key=lambda item: msgspec.msgpack.encode(item, order="deterministic"))]
    return value
