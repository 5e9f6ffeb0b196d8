"""Statements on jobs and their history.

Called by the coordinator and by users' operations, which lock the row first. What must never happen here: a write of a job that is not
guarded by the revision and generation it was read with.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from ..states import JobState
from .database import Query, Transaction
from .rows import JobRow, to

HISTORY_KEPT = 200


def insert_job(tx: Transaction, **values: Any) -> bool:
    """Insert a new job; False when the id exists or a live job has the name."""
    now = tx.now_us()
    return tx.insert_or_nothing(tx.t.job, **{"created_us": now, "changed_us": now, "rev": 0, **values})


_JOB = Query(lambda t: sa.select(t.job).where(t.job.c.id == sa.bindparam("job")))
_LOCKED_JOB = Query(lambda t: sa.select(t.job).where(t.job.c.id == sa.bindparam("job")).with_for_update())


def lock_job(tx: Transaction, job: str) -> JobRow | None:
    """Lock the job's row first: every coordinator write begins so."""
    row = tx.row(_LOCKED_JOB, job=job)
    return None if row is None else to(JobRow, row)


def read_job(tx: Transaction, job: str) -> JobRow | None:
    row = tx.row(_JOB, job=job)
    return None if row is None else to(JobRow, row)


def find_job(tx: Transaction, namespace: str, name: str) -> JobRow | None:
    """The newest job of that name."""
    t = tx.t.job
    row = tx.row(sa.select(t).where(t.c.namespace == namespace, t.c.name == name).order_by(t.c.created_us.desc(), t.c.id.desc()).limit(1))
    return None if row is None else to(JobRow, row)


def live_job(tx: Transaction, live_name: str) -> str | None:
    """Id of the job that is live under this name."""
    row = tx.row(sa.select(tx.t.job.c.id).where(tx.t.job.c.live_name == live_name))
    return None if row is None else str(row["id"])


def list_jobs(tx: Transaction, namespace: str) -> list[JobRow]:
    t = tx.t.job
    return [to(JobRow, r) for r in tx.rows(sa.select(t).where(t.c.namespace == namespace).order_by(t.c.created_us, t.c.id))]


def live_job_ids(tx: Transaction) -> list[str]:
    """Jobs the coordinator has to look after."""
    t = tx.t.job
    return [r["id"] for r in tx.rows(sa.select(t.c.id).where(t.c.ended == 0).order_by(t.c.id))]


def committed_from_savepoint(tx: Transaction, savepoint: str) -> int:
    """The newest epoch committed by jobs that were started from a savepoint; ids only grow along that line."""
    t = tx.t.job
    return int(tx.execute(sa.select(sa.func.max(t.c.newest_committed)).where(t.c.restore_from == savepoint)).scalar() or 0)


def committed_after_savepoints_of(tx: Transaction, job: str) -> int:
    """The same over all savepoints that were taken of a job."""
    t, s = tx.t.job, tx.t.savepoint
    mine = sa.select(s.c.id).where(s.c.job == job)
    return int(tx.execute(sa.select(sa.func.max(t.c.newest_committed)).where(t.c.restore_from.in_(mine), t.c.id != job)).scalar() or 0)


def committed_epoch(tx: Transaction, job: JobRow, origin: str) -> int:
    """The newest epoch that is committed for sure in the line a manifest of ``origin`` stems from; 0 when that job's row is gone, for then nothing is proven."""
    row = job if origin == job.id else read_job(tx, origin)
    return 0 if row is None else row.newest_committed


def update_job(tx: Transaction, job: JobRow, **values: Any) -> bool:
    """Guarded by the row's ``rev``: the row is locked, so zero rows means a bug or a lost lock."""
    t = tx.t.job
    return tx.update(t, t.c.id == job.id, t.c.rev == job.rev, t.c.generation == job.generation, changed_us=tx.now_us(), **values) == 1


def want_epoch(tx: Transaction, job: str, generation: int) -> bool:
    """A source's window is full: trigger as soon as may be."""
    t = tx.t.job
    return tx.update(t, t.c.id == job, t.c.generation == generation, t.c.state == JobState.RUNNING, wants_epoch=1) == 1


def add_history(tx: Transaction, job: str, event: str, detail: str) -> None:
    """Append to the job's history, kept to the last ``HISTORY_KEPT`` entries. The job's row is locked."""
    t = tx.t.history
    newest = tx.execute(sa.select(sa.func.max(t.c.seq)).where(t.c.job == job)).scalar() or 0
    tx.insert(t, job=job, seq=newest + 1, event=event, detail=detail[:20_000], at_us=tx.now_us())
    tx.delete(t, t.c.job == job, t.c.seq <= newest + 1 - HISTORY_KEPT)


def history(tx: Transaction, job: str, limit: int = 50) -> list[dict[str, Any]]:
    t = tx.t.history
    return tx.rows(sa.select(t).where(t.c.job == job).order_by(t.c.seq.desc()).limit(limit))
