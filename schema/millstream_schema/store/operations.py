"""Statements on acts that people and programs ask for: a retry by hand, an act on many tasks in parts.

Each part is one transaction that acts and writes down how far it is, guarded by the operation's ``rev``: repeated, by the same or by another process, it acts on nothing twice.
Lock order: the operation, then tasks by id. What must never happen here: an act on a task that does not match any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..durable.bulk import REACHES, Act, OperationRow, linked_retry
from ..durable.finding import Place
from ..durable.records import Receipt, TaskRow
from .database import Transaction
from .retention import purge
from .rows import to
from .settling import cancel_locked
from .tasks import by_permit, lock_task, lock_tasks, submit


def begin(tx: Transaction, values: Mapping[str, Any]) -> OperationRow:
    """The operation as it is: new, or as far as it has come."""
    now = tx.now_us()
    plain = {"task": "", "filter": "", "instant_us": now, "after_us": 0, "after_id": "", "seen": 0, "done": 0, "over": 0, "rev": 0}
    tx.insert_or_nothing(tx.t.operation, **{**plain, **values, "created_us": now, "changed_us": now})
    found = read(tx, values["id"])
    assert found is not None
    return found


def read(tx: Transaction, operation: str) -> OperationRow | None:
    t = tx.t.operation
    row = tx.row(sa.select(t).where(t.c.id == operation))
    return None if row is None else to(OperationRow, row)


def listed(tx: Transaction, namespace: str, limit: int) -> list[OperationRow]:
    """The newest of a namespace."""
    t = tx.t.operation
    asked = sa.select(t).where(t.c.namespace == namespace).order_by(t.c.created_us.desc(), t.c.id.desc()).limit(limit)
    return [to(OperationRow, r) for r in tx.rows(asked)]


def forget(tx: Transaction, before_us: int) -> int:
    """Acts that are over for long; how many went."""
    t = tx.t.operation
    return tx.delete(t, t.c.over == 1, t.c.created_us < before_us)


def part(
    tx: Transaction, before: OperationRow, ids: Sequence[str], place: Place | None, matches: Callable[[Mapping[str, Any]], bool], new_id: Callable[[], str]
) -> OperationRow:  # fmt: skip
    """Act on those of these tasks that still match; ``place``: where the next part begins, None: this was the last. Whoever has been faster is not repeated."""
    t = tx.t.operation
    row = tx.row(sa.select(t).where(t.c.id == before.id).with_for_update())
    now = to(OperationRow, row) if row is not None else before
    if row is None or now.rev != before.rev or now.over:
        return now
    done = _purged(tx, now, ids) if now.act is Act.PURGE else _acted(tx, now, ids, matches, new_id)
    at = place or Place(now.after_us, now.after_id)
    values = {
        "after_us": at.created_us,
        "after_id": at.id,
        "seen": now.seen + len(ids),
        "done": now.done + done,
        "over": int(place is None),
    }
    tx.update(t, t.c.id == now.id, t.c.rev == now.rev, **values, changed_us=tx.now_us())
    after = read(tx, now.id)
    assert after is not None
    return after


def _purged(tx: Transaction, operation: OperationRow, ids: Sequence[str]) -> int:
    return purge(tx, operation.namespace, ids)


def _acted(
    tx: Transaction, operation: OperationRow, ids: Sequence[str], matches: Callable[[Mapping[str, Any]], bool], new_id: Callable[[], str]
) -> int:
    rows = [r for r in lock_tasks(tx, ids).values() if matches(_columns(r))]
    now = tx.now_us()
    if operation.act is Act.CANCEL:
        return sum(cancel_locked(tx, row, now) for row in by_permit(rows))
    return sum(not _retried(tx, row, new_id(), operation.id, operation.actor).replayed for row in rows)


def _columns(row: TaskRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__struct_fields__}


def _retried(tx: Transaction, row: TaskRow, task_id: str, operation: str, actor: str) -> Receipt:
    """A linked task that does it again; the one there is if it has been asked for before."""
    receipt = submit(tx, linked_retry(row, task_id, origin=f"retry:{operation}", actor=actor))
    if not receipt.replayed:
        t = tx.t.task
        tx.update(t, t.c.id == row.id, t.c.state == row.state, t.c.rev == row.rev, superseded_by=receipt.task)
    return receipt


def retry(tx: Transaction, namespace: str, task: str, values: Mapping[str, Any], task_id: str) -> Receipt | TaskRow | None:
    """One task by hand. The receipt; the row that cannot be retried in its state; None: no such task."""
    row = lock_task(tx, task)
    if row is None or row.namespace != namespace:
        return None
    if row.state not in REACHES[Act.RETRY]:
        return row
    receipt = _retried(tx, row, task_id, values["id"], values["actor"])
    if receipt.task == task_id:
        begin(tx, {**values, "task": task, "expected": 1, "seen": 1, "done": 1, "over": 1})
    return receipt
