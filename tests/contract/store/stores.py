"""What the store's tests share: a database with rows of jobs and epochs, and threads that start together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from tests.unit.coordinator.rows import job_row, model

from millstream_schema.connectors import Committable, Handle
from millstream_schema.manifest import EpochManifest, Renames, SplitState, SubtaskSnapshot
from millstream_schema.plan import compile_plan
from millstream_schema.ports import SystemClock
from millstream_schema.settings import StreamSettings
from millstream_schema.states import JobState
from millstream_schema.store import jobs
from millstream_schema.store.database import Database, Faults, Transaction
from millstream_schema.store.rows import JobRow

T = TypeVar("T")


class Opened:
    """One database and how to open it again."""

    def __init__(self, kind: str, url: str, db: Database) -> None:
        self.kind = kind
        self.url = url
        self.db = db
        self.ways: dict[tuple[str, bool], Database] = {}
        """Further ones that are opened again and again: see ``crash_table.opened``."""
        self._others: list[tuple[int, Database]] = []
        self._free: dict[int, list[Database]] = {}
        self._filled: sa.CompoundSelect[tuple[str]] | None = None

    def open(self, *, timeout_ms: int = 3000, faults: Faults | None = None) -> Database:
        """Another process's way to the database, on connections of its own; what was compiled for one of an earlier test is used again."""
        free = self._free.get(timeout_ms)
        other = free.pop() if free else Database(self.url, SystemClock(), timeout_ms=timeout_ms)
        other.faults = faults
        self._others.append((timeout_ms, other))
        return other

    def empty(self) -> None:
        """Delete every row. Which tables have any is asked at once: a DELETE of each would be a tenth of the whole run."""
        kept = (self.db.tables.schema, self.db.tables.installation)
        tables = {t.name: t for t in self.db.tables.metadata.sorted_tables if t not in kept}
        filled = self._filled
        if filled is None:
            filled = self._filled = sa.union_all(
                *[sa.select(sa.literal(n).label("name")).where(sa.exists().select_from(t)) for n, t in tables.items()]
            )

        def work(tx: Transaction) -> None:
            for row in tx.rows(filled):
                tx.delete(tables[row["name"]])

        self.db.run(work)

    def close_others(self) -> None:
        for timeout_ms, other in self._others:
            other.close()
            self._free.setdefault(timeout_ms, []).append(other)
        self._others.clear()

    def close(self) -> None:
        self.close_others()
        for way in self.ways.values():
            way.close()
        self.db.close()


MODEL = model()
PLAN = compile_plan(MODEL)


def text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def job_values(name: str = "job-1", state: JobState = JobState.RUNNING, **changes: Any) -> dict[str, Any]:
    """Every column of a job that can be decoded and decided about."""
    row = msgspec.structs.asdict(job_row(state))
    del row["created_us"], row["changed_us"], row["rev"]
    live = None if state.ended else f"default/{name}"
    plans = {
        "plan": text(PLAN),
        "model": text(MODEL),
        "settings": text(StreamSettings()),
        "plan_fingerprint": PLAN.fingerprint(),
        "renames": text(Renames()),
    }
    return {**row, "id": name, "name": name, "live_name": live, **plans, **changes}


def insert_job(db: Database, job: str = "job-1", state: JobState = JobState.RUNNING, **changes: Any) -> JobRow:
    assert db.run(lambda tx: jobs.insert_job(tx, **{**job_values(job, state), **changes}))
    return read_job(db, job)


def read_job(db: Database, name: str = "job-1") -> JobRow:
    row = db.read(lambda tx: jobs.read_job(tx, name))
    assert row is not None
    return row


def snapshot(
    subtask: str, *, splits: Sequence[SplitState] = (), filler: str = "", committables: Sequence[Committable] = ()
) -> SubtaskSnapshot:
    vertex = subtask.partition(":")[0]
    meta: dict[str, Any] = {"filler": filler} if filler else {}
    return SubtaskSnapshot(
        subtask, PLAN.vertex(vertex).operators, [Handle(f"k/{subtask}", 1, "c")], list(splits), list(committables), meta=meta
    )


def manifest(job: str = "job-1", epoch: int = 7, filler: str = "") -> EpochManifest:
    return EpochManifest(
        job=job, epoch=epoch, kind="checkpoint", generation=3, term=2, model_fingerprint="m", plan_fingerprint=PLAN.fingerprint(), shard_count=128,
        requirements=[], operators={}, subtasks=[snapshot(s.id, filler=filler) for s in PLAN.subtasks()], splits=[], triggered_us=1, durable_us=2,
    )  # fmt: skip


def table_rows(db: Database, table: str) -> list[dict[str, Any]]:
    """Everything in a table, without what changes with each write."""
    found = db.read(lambda tx: tx.rows(getattr(tx.t, table).select()))
    dull = {
        "rev",
        "changed_us",
        "acked_us",
        "created_us",
        "triggered_us",
        "durable_us",
        "committed_us",
        "renewed_us",
        "expires_us",
        "started_us",
        "progressed_us",
    }
    return sorted(({k: v for k, v in row.items() if k not in dull} for row in found), key=repr)


def together(*works: Callable[[], T]) -> list[T | BaseException]:
    """Run all at one moment, each on a thread; what each returned or raised."""
    start = threading.Barrier(len(works))
    results: list[T | BaseException] = [RuntimeError("not over")] * len(works)

    def run(at: int) -> None:
        start.wait(10)
        try:
            results[at] = works[at]()
        except BaseException as exc:
            results[at] = exc

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a transaction hangs"
    return results
