"""The blob one subtask writes for one epoch: keyed state by operator, state name and namespace, for a range of shards.

Written on the background thread, read when a subtask is restored, by whatever subtask owns a key's shard then: keys are not sorted by shard when they are written (that
costs more than all the rest, at every epoch) but picked by shard when they are read, and only if the reader owns other shards than the writer did. Paths inside name
operator and state; never attempt, node or generation. What must never happen here: a partly applied segment. The whole blob is verified by its handle's checksum before.

Layout: magic, header length (u32), header (msgpack), payload. The header lists (operator, state, op, namespace, count, key range, value range).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import compress, islice
from typing import Any

import msgspec

from millstream_schema.canonical import shard_of
from millstream_schema.errors import CodecError, RestoreRefused, SnapshotUnreadable
from millstream_schema.values import TypeRegistry, decode_column, encode_column

from .state import GONE, KeyedTable, Namespace, TableCut

MAGIC = b"MSG1"
_LENGTH = struct.Struct("<I")
PUT, DEL, DROP = "put", "del", "drop"
RUN = 4096
"""Keys encoded at a time: about a millisecond, so that the subtask's thread is not kept waiting for the interpreter; their values stay in the CPU's cache meanwhile."""


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One run of keys. Offsets count from the start of the payload."""

    operator: str
    state: str
    op: str
    namespace: int | None
    count: int
    keys: tuple[int, int]
    values: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    """``shards``: first shard the writer owned and the one behind its last, of ``shard_count``."""

    entries: list[Entry]
    full: bool
    shards: tuple[int, int]
    shard_count: int


class SegmentWriter:
    """Collects cuts and gives the blob. ``pause`` is called between runs of a few thousand keys so that other threads get their turn."""

    def __init__(self, registry: TypeRegistry, shards: range, shard_count: int, full: bool, pause: Callable[[], None]) -> None:
        self._registry = registry
        self._shards = shards
        self._shard_count = shard_count
        self._full = full
        self._pause = pause
        self._entries: list[Entry] = []
        self._parts: list[bytes] = []
        self._size = 0

    def _append(self, column: list[Any]) -> tuple[int, int]:
        data = encode_column(column, self._registry)
        at = self._size
        self._parts.append(data)
        self._size += len(data)
        return (at, len(data))

    def table(self, operator: str, cut: TableCut) -> None:
        """Add one table's cut."""
        for ns in sorted(cut.dropped, key=lambda n: (n is not None, n)):
            self._entries.append(Entry(operator, cut.name, DROP, ns, 0, (0, 0), (0, 0)))
        for ns, pane in cut.panes.items():
            self._pane(operator, cut.name, ns, pane)

    def _pane(self, operator: str, state: str, ns: Namespace, pane: dict[Any, Any]) -> None:
        all_keys, all_values = iter(pane), iter(pane.values())
        while keys := list(islice(all_keys, RUN)):
            values = list(islice(all_values, RUN))
            if type(GONE) in set(map(type, values)):
                lives = [value is not GONE for value in values]
                gone = [key for key, alive in zip(keys, lives) if not alive]
                self._entries.append(Entry(operator, state, DEL, ns, len(gone), self._append(gone), (0, 0)))
                keys, values = list(compress(keys, lives)), list(compress(values, lives))
            if keys:
                self._entries.append(Entry(operator, state, PUT, ns, len(keys), self._append(keys), self._append(values)))
            self._pause()

    def finish(self) -> bytes:
        shards = (self._shards.start, self._shards.stop)
        header = msgspec.msgpack.encode(Header(self._entries, self._full, shards, self._shard_count))
        return b"".join((MAGIC, _LENGTH.pack(len(header)), header, *self._parts))


class Segment:
    """A blob opened for reading."""

    def __init__(self, data: bytes, name: str, registry: TypeRegistry) -> None:
        self._name = name
        self._registry = registry
        try:
            if data[:4] != MAGIC:
                raise SnapshotUnreadable(f"snapshot segment {name} does not start with {MAGIC!r}: it was not written by Millstream")
            (length,) = _LENGTH.unpack_from(data, 4)
            self.header = msgspec.msgpack.decode(data[8 : 8 + length], type=Header)
        except (struct.error, msgspec.MsgspecError) as exc:
            raise SnapshotUnreadable(f"snapshot segment {name} has no readable header: {exc}") from exc
        self._payload = memoryview(data)[8 + length :]

    def _column(self, entry: Entry, where: tuple[int, int]) -> list[Any]:
        try:
            return decode_column(bytes(self._payload[where[0] : where[0] + where[1]]), self._registry)
        except CodecError as exc:
            raise SnapshotUnreadable(f"snapshot segment {self._name}: state {entry.state!r} of operator {entry.operator!r}: {exc}") from exc

    def operators(self) -> set[str]:
        return {e.operator for e in self.header.entries}

    def states(self, operator: str) -> set[str]:
        return {e.state for e in self.header.entries if e.operator == operator}

    def apply(self, operator: str, tables: dict[str, KeyedTable], shards: range, *, lenient: bool = False) -> None:
        """Load what this segment holds of ``operator`` for ``shards``. A state without a table is an error, or dropped when ``lenient``."""
        unknown = sorted(self.states(operator) - set(tables))
        if unknown and not lenient:
            raise RestoreRefused([f"operator {operator!r}: the snapshot holds state {s!r}, the job has no such state" for s in unknown])
        first, stop = self.header.shards
        count = self.header.shard_count
        mixed = first not in shards or stop - 1 not in shards
        alone = (first, stop) == (shards.start, shards.stop)
        for e in self.header.entries:
            if e.operator != operator:
                continue
            table = tables.get(e.state)
            if table is None:
                continue
            if e.op == DROP:
                # Only what the writer owned: another old subtask, whose clock was behind, may still have keys there.
                held = table.panes.get(e.namespace, ())
                table.unload(e.namespace, None if alone else [key for key in held if first <= shard_of(key, count) < stop])
                continue
            keys = self._column(e, e.keys)
            if len(keys) != e.count:
                raise SnapshotUnreadable(
                    f"snapshot segment {self._name}: {e.operator}/{e.state} has {len(keys)} keys where {e.count} are listed"
                )
            mine = [shard_of(key, count) in shards for key in keys] if mixed else None
            if e.op == DEL:
                table.unload(e.namespace, keys if mine is None else list(compress(keys, mine)))
                continue
            values = self._column(e, e.values)
            if len(values) != len(keys):
                raise SnapshotUnreadable(
                    f"snapshot segment {self._name}: {e.operator}/{e.state} has {len(keys)} keys and {len(values)} values"
                )
            if mine is not None:
                keys, values = list(compress(keys, mine)), list(compress(values, mine))
            table.load(e.namespace, keys, values)
