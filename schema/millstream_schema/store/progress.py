"""Statements on what running attempts have told: the last progress of each, and its notes.

Written beside a heartbeat or an end by the session that runs the attempt, read by clients, deleted with the task. What must never happen here: a write to a task's row; what an
older attempt says over what a newer one has said.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from ..durable.progress import NoteRow, ProgressRow, Told
from .database import Query, Transaction
from .rows import to

_FENCES = Query(lambda t: sa.select(t.task.c.id, t.task.c.fence).where(t.task.c.id.in_(sa.bindparam("ids", expanding=True))))


def write(tx: Transaction, said: Mapping[tuple[str, int], Told]) -> int:
    """Keep what these attempts (task, fence) have told; of how many it was kept. One that is not its task's newest any more says nothing. A repeat changes nothing."""
    if not said:
        return 0
    fences = {r["id"]: int(r["fence"]) for r in tx.rows(_FENCES, ids=sorted({task for task, _ in said}))}
    valid = {key: told for key, told in said.items() if fences.get(key[0]) == key[1]}
    now = tx.now_us() if valid else 0
    for (task, fence), told in sorted(valid.items(), key=lambda item: item[0]):
        own = {"task": task, "fence": fence, "at_us": now}
        if told.progress is not None:
            _progress(tx, own, msgspec.structs.asdict(told.progress))
        for note in told.notes:
            tx.insert_or_nothing(tx.t.note, **own, **msgspec.structs.asdict(note))
    return len(valid)


def _progress(tx: Transaction, own: dict[str, object], values: dict[str, object]) -> None:
    t = tx.t.progress
    older = [t.c.task == own["task"], t.c.fence == own["fence"], t.c.number < values["number"]]
    if not tx.update(t, *older, **values, at_us=own["at_us"]):
        tx.insert_or_nothing(t, **own, **values)


def latest(tx: Transaction, task: str, fence: int) -> ProgressRow | None:
    """How far an attempt was when it was last heard."""
    t = tx.t.progress
    row = tx.row(sa.select(t).where(t.c.task == task, t.c.fence == fence))
    return None if row is None else to(ProgressRow, row)


def of_task(tx: Transaction, task: str) -> list[ProgressRow]:
    """How far each attempt came, oldest first."""
    t = tx.t.progress
    return [to(ProgressRow, r) for r in tx.rows(sa.select(t).where(t.c.task == task).order_by(t.c.task, t.c.fence))]


def notes_of_task(tx: Transaction, task: str) -> list[NoteRow]:
    """What its attempts have noted, oldest first."""
    t = tx.t.note
    return [to(NoteRow, r) for r in tx.rows(sa.select(t).where(t.c.task == task).order_by(t.c.task, t.c.fence, t.c.number))]
