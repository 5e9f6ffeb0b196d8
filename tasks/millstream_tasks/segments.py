"""The blob one subtask writes for one epoch: keyed state by operator, state name and shard.

Written on the background thread, read when a subtask is restored, by whatever subtask owns the shard then. Paths inside name operator, state and shard;
never attempt, node or generation. What must never happen here: a partly applied segment. The whole blob is verified by its handle's checksum before.

Layout: magic, header length (u32), header (msgpack), payload. The header lists (operator, state, op, namespace, shard, count, key range, value range).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from millstream_schema.canonical import shard_of
from millstream_schema.errors import CodecError, SnapshotUnreadable
from millstream_schema.values import TypeRegistry, decode_column, encode_column

from .state import GONE, KeyedTable, Namespace, TableCut

MAGIC = b"MSG1"
_LENGTH = struct.Struct("<I")
PUT, DEL, DROP = "put", "del", "drop"


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One run of keys of one shard. Offsets count from the start of the payload."""

    operator: str
    state: str
    op: str
    namespace: int | None
    shard: int
    count: int
    keys: tuple[int, int]
    values: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    entries: list[Entry]
    full: bool


class SegmentWriter:
    """Collects cuts and gives the blob. ``pause`` is called between runs of a few thousand keys so that other threads get their turn."""

    def __init__(self, registry: TypeRegistry, shard_count: int, full: bool, pause: Callable[[], None]) -> None:
        self._registry = registry
        self._shards = shard_count
        self._full = full
        self._pause = pause
        self._entries: list[Entry] = []
        self._parts: list[bytes] = []
        self._size = 0

    def _append(self, data: bytes) -> tuple[int, int]:
        at = self._size
        self._parts.append(data)
        self._size += len(data)
        return (at, len(data))

    def table(self, operator: str, cut: TableCut) -> None:
        """Add one table's cut."""
        for ns in sorted(cut.dropped, key=lambda n: (n is not None, n)):
            self._entries.append(Entry(operator, cut.name, DROP, ns, -1, 0, (0, 0), (0, 0)))
        for ns, pane in cut.panes.items():
            self._pane(operator, cut.name, ns, pane)

    def _pane(self, operator: str, state: str, ns: Namespace, pane: dict[Any, Any]) -> None:
        buckets: dict[int, list[Any]] = {}
        shards = self._shards
        for n, key in enumerate(pane):
            buckets.setdefault(shard_of(key, shards), []).append(key)
            if n & 0xFFF == 0xFFF:
                self._pause()
        for shard in sorted(buckets):
            keys = buckets[shard]
            gone = [k for k in keys if pane[k] is GONE]
            if gone:
                self._entries.append(Entry(operator, state, DEL, ns, shard, len(gone), self._append(self._encode(gone)), (0, 0)))
                keys = [k for k in keys if pane[k] is not GONE]
            if keys:
                where = self._append(self._encode(keys)), self._append(self._encode([pane[k] for k in keys]))
                self._entries.append(Entry(operator, state, PUT, ns, shard, len(keys), *where))
            self._pause()

    def _encode(self, column: list[Any]) -> bytes:
        return encode_column(column, self._registry)

    def finish(self) -> bytes:
        header = msgspec.msgpack.encode(Header(self._entries, self._full))
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

    def _column(self, where: tuple[int, int]) -> list[Any]:
        try:
            return decode_column(bytes(self._payload[where[0] : where[0] + where[1]]), self._registry)
        except CodecError as exc:
            raise SnapshotUnreadable(f"snapshot segment {self._name}: {exc}") from exc

    def operators(self) -> set[str]:
        return {e.operator for e in self.header.entries}

    def states(self, operator: str) -> set[str]:
        return {e.state for e in self.header.entries if e.operator == operator}

    def apply(self, operator: str, tables: dict[str, KeyedTable], shards: range) -> None:
        """Load what this segment holds of ``operator`` for ``shards`` into its tables, which must exist."""
        for e in self.header.entries:
            if e.operator != operator or (e.shard >= 0 and e.shard not in shards):
                continue
            table = tables[e.state]
            if e.op == DROP:
                table.unload(e.namespace, None)
                continue
            keys = self._column(e.keys)
            if len(keys) != e.count:
                raise SnapshotUnreadable(
                    f"snapshot segment {self._name}: {e.operator}/{e.state}/{e.shard} has {len(keys)} keys, {e.count} listed"
                )
            if e.op == DEL:
                table.unload(e.namespace, keys)
            else:
                table.load(e.namespace, keys, self._column(e.values))


def states_of(segments: Iterable[Segment], operator: str) -> set[str]:
    """Names of all keyed states any of the segments holds for ``operator``."""
    return set().union(*(s.states(operator) for s in segments))
