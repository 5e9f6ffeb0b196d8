"""What lies outside a simulated job and outlives everything in it: the SQL database, checkpoint storage, and the targets of sinks.

All can be away for a while, fail, or lose an answer, and an actor may stand still right before it reaches them, so that a woken zombie really knocks. What must never happen
here: an effect that comes late by itself, a fence that is looked at apart from what it guards.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from millstream_schema.connectors import CommitAnswer, Committable, ConnectorContext, Handle, Json, SinkCapability
from millstream_schema.errors import CommitUnknown, Fenced, SnapshotMissing, SnapshotUnreadable, StorageUnavailable, StoreUnavailable
from millstream_schema.ports import Clock
from millstream_schema.store.database import Database, Transaction
from millstream_tasks.sinks.memory import CollectTarget
from millstream_tasks.sinks.segments import Missing, Segment

from .world import Crash, World

T = TypeVar("T")


class StoreFaults:
    """Stands in the way of transactions of actors; the simulator's own pass."""

    def __init__(self, world: World) -> None:
        self._world = world

    def before_commit(self) -> None:
        w = self._world
        if w.current is None:
            return
        if w.strikes(w.faults.store, "store: unavailable"):
            raise StoreUnavailable("simulated")
        if w.strikes(w.faults.store, "store: crash before commit"):
            raise Crash

    def after_commit(self) -> None:
        w = self._world
        if w.current is None:
            return
        if w.strikes(w.faults.store, "store: commit unknown"):
            raise CommitUnknown("simulated")
        if w.strikes(w.faults.store, "store: crash after commit"):
            raise Crash
        w.stumble("after a transaction")


class SimDatabase(Database):
    """The product's own store on SQLite in memory, which can be away."""

    def __init__(self, world: World, clock: Clock) -> None:
        self._world = world
        super().__init__("sqlite://", clock, faults=StoreFaults(world))

    def _reach(self) -> None:
        if self._world.current is None:
            return
        self._world.stumble("before a transaction")
        if not self._world.reachable("store"):
            raise StoreUnavailable("the database is away (simulated)")

    def run(self, work: Callable[[Transaction], T]) -> T:
        self._reach()
        return super().run(work)

    def read(self, work: Callable[[Transaction], T]) -> T:
        self._reach()
        found = super().read(work)
        self._world.stumble("after rows were read")
        return found


class SimStorage:
    """Checkpoint storage."""

    url = "sim://"

    def __init__(self, world: World) -> None:
        self._world = world
        self.blobs: dict[str, bytes] = {}

    def _reach(self, key: str) -> None:
        w = self._world
        if not w.reachable("storage") or w.strikes(w.faults.storage, "storage: unavailable"):
            raise StorageUnavailable(f"{key}: cannot be reached (simulated)")

    def put(self, key: str, data: bytes) -> Handle:
        self._world.stumble("before a snapshot is stored", 10)
        self._reach(key)
        if self.blobs.get(key, data) != data:
            self._world.probes["segment written twice with other content"] += 1
        self.blobs[key] = data
        return Handle(key, len(data), str(zlib.crc32(data)))

    def get(self, handle: Handle) -> bytes:
        self._reach(handle.key)
        data = self.blobs.get(handle.key)
        if data is None:
            raise SnapshotMissing(f"{handle.key} is not there")
        if str(zlib.crc32(data)) != handle.checksum:
            raise SnapshotUnreadable(f"{handle.key} does not match its checksum")
        return data

    def copy(self, handle: Handle, key: str) -> Handle:
        self.blobs[key] = self.get(handle)
        return Handle(key, handle.size, handle.checksum)

    def delete(self, keys: Sequence[str]) -> None:
        self._world.stumble("before snapshots are deleted", 10)
        for key in keys:
            self.blobs.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        return sorted(k for k in self.blobs if k.startswith(prefix))


class SimTarget(CollectTarget):
    """A two-phase target that can be away. ``on_commit`` sees each committable right before it is made visible."""

    def __init__(self, world: World, on_commit: Callable[[Committable], None]) -> None:
        super().__init__()
        self._world = world
        self._on_commit = on_commit

    def _reach(self, where: str) -> None:
        w = self._world
        w.stumble(where, 10)
        if not w.reachable("target") or w.strikes(w.faults.target, "target: unavailable"):
            raise StoreUnavailable("the target cannot be reached (simulated)")

    def raise_fence(self, job: str, operator: str, generation: int) -> None:
        self._reach("before a fence is raised")
        self._fenced("fence", lambda: super(SimTarget, self).raise_fence(job, operator, generation))

    def stage(self, segment: Segment, values: Sequence[Any]) -> None:
        if self._world.reachable("target"):
            self._world.stumble("before staging")
        else:
            raise StoreUnavailable("the target cannot be reached (simulated)")
        self._fenced("staging", lambda: super(SimTarget, self).stage(segment, values))

    def commit(self, name: str, committable: Committable, context: ConnectorContext, missing: Missing) -> CommitAnswer:
        w = self._world
        self._reach("before a commit")
        known = set(self.committed())
        answer = self._fenced("commit", lambda: super(SimTarget, self).commit(name, committable, context, missing))
        if committable.id in known:
            w.probes["commit repeated"] += 1
        else:
            self._on_commit(committable)
        if w.strikes(w.faults.target, "target: answer lost"):
            raise CommitUnknown("simulated")
        return answer

    def _fenced(self, what: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except Fenced:
            self._world.probes[f"zombie fenced at target: {what}"] += 1
            raise


class UpsertTarget:
    """Rows by key under a fence: what an upsert into a table shows."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rows: dict[Any, Any] = {}
        self.writes: dict[Any, list[Any]] = {}
        self._fences: dict[tuple[str, str], int] = {}

    def raise_fence(self, context: ConnectorContext) -> None:
        self._check(context)
        self._fences[context.job, context.operator] = context.generation

    def upsert(self, context: ConnectorContext, rows: dict[Any, Any]) -> None:
        w = self._world
        w.stumble("before an upsert", 10)
        if not w.reachable("target") or w.strikes(w.faults.target, "target: unavailable"):
            raise StoreUnavailable("the target cannot be reached (simulated)")
        self._check(context)
        self.rows |= rows
        for key, value in rows.items():
            self.writes.setdefault(key, []).append(value)

    def _check(self, context: ConnectorContext) -> None:
        if self._fences.get((context.job, context.operator), 0) > context.generation:
            self._world.probes["zombie fenced at target: upsert"] += 1
            raise Fenced(f"generation {context.generation} is stale")


class UpsertSink:
    """UPSERT_BY_KEY of ``(key, value)`` records into an :class:`UpsertTarget`."""

    kind = "sim-upsert"
    version = 1
    capability = SinkCapability.UPSERT_BY_KEY

    def __init__(self, target: UpsertTarget) -> None:
        self.target = target

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def open(self, context: ConnectorContext) -> UpsertWriter:
        self.target.raise_fence(context)
        return UpsertWriter(self.target, context)


class UpsertWriter:
    """Buffers the newest value per key until it is flushed."""

    def __init__(self, target: UpsertTarget, context: ConnectorContext) -> None:
        self._target = target
        self._context = context
        self._rows: dict[Any, Any] = {}

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self._rows.update(values)

    def flush(self) -> None:
        if self._rows:
            self._context.guard()
            self._target.upsert(self._context, self._rows)
            self._rows = {}

    def close(self) -> None:
        """Nothing to release."""
