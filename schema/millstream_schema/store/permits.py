"""Statements on permits: how many tasks may use one resource at once, and the sequence that tells their attempts apart.

A permit is granted in the transaction that claims its task and freed in the one that ends the attempt. Tasks it blocks are parked under it, out of every claim's way, and
moved back one for each that frees, by rank. What must never happen here: more grants than the capacity; a sequence that goes back.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from ..durable.records import PermitRow, lane
from ..durable.states import TaskState
from .columns import not_empty
from .database import Query, Transaction
from .rows import to
from .tables import Tables


def _one(t: Tables) -> sa.Select[tuple[object, ...]]:
    return sa.select(t.permit).where(t.permit.c.id == sa.bindparam("id"))


def _full(t: Tables) -> sa.Select[tuple[str]]:
    c = t.permit.c
    full = [c.id.in_(sa.bindparam("ids", expanding=True)), sa.or_(c.held >= c.capacity, c.paused == 1)]
    return sa.select(c.id).where(*full).order_by(c.id).with_for_update(skip_locked=True)


def _these(t: Tables) -> sa.Select[tuple[str]]:
    c = t.task.c
    where = [c.id.in_(sa.bindparam("ids", expanding=True)), c.ready_lane == sa.bindparam("lane")]
    return sa.select(c.id).where(*where).order_by(c.id).with_for_update(skip_locked=True)


def _park_each(t: Tables) -> sa.Update:
    """Each under its own permit."""
    c = t.task.c
    own = sa.literal("permit:", c.id.type) + c.namespace + sa.literal("/", c.id.type) + c.permit
    where = [c.id.in_(sa.bindparam("ids", expanding=True)), c.state == TaskState.READY, c.ready_lane.is_not(None)]
    return sa.update(t.task).where(*where).values(ready_lane=None, blocked_by=own, rev=c.rev + 1)


_LOCKED = Query(lambda t: _one(t).with_for_update())
_LOCKED_IF_FREE = Query(lambda t: _one(t).with_for_update(skip_locked=True))
_FULL = Query(_full)
_THESE = Query(_these)
_PARK_EACH = Query(_park_each)


def blocker(permit: str) -> str:
    """Under what its waiting tasks are parked."""
    return f"permit:{permit}"


def ensure(tx: Transaction, permit: str, capacity: int) -> None:
    """The permit, unless it is there."""
    namespace, _, key = permit.partition("/")
    tx.insert_or_nothing(tx.t.permit, id=permit, namespace=namespace, key=key, capacity=max(1, capacity), held=0, seq=0, paused=0, rev=0)


def lock(tx: Transaction, permit: str, *, wait: bool = True) -> PermitRow | None:
    """Lock its row. Order: task rows by id, then permits by id; whoever cannot keep it does not ``wait`` and has None for what somebody else holds."""
    row = tx.row(_LOCKED if wait else _LOCKED_IF_FREE, id=permit)
    return None if row is None else to(PermitRow, row)


def take(tx: Transaction, permit: PermitRow, grants: int, kept: int) -> int:
    """Grant ``grants`` new holders and renew ``kept`` old ones of a locked permit; the first of their sequence numbers."""
    t = tx.t.permit
    held, seq = permit.held + grants, permit.seq + grants + kept
    if held > permit.capacity and grants:
        raise AssertionError(f"permit {permit.id}: {held} of {permit.capacity} would be held")
    if tx.update(t, t.c.id == permit.id, t.c.rev == permit.rev, held=held, seq=seq) != 1:
        raise AssertionError(f"permit {permit.id} changed under its lock")
    return permit.seq + 1


def park(tx: Transaction, permit: str, tasks: list[str]) -> None:
    """Out of the way until the permit frees. Their rows are locked."""
    t = tx.t.task
    if tasks:
        tx.update(t, t.c.id.in_(tasks), t.c.state == TaskState.READY, ready_lane=None, blocked_by=blocker(permit))


def lock_full(tx: Transaction, permits: list[str]) -> set[str]:
    """Those of these that have no room, locked; what somebody else holds is passed over."""
    return {r["id"] for r in tx.rows(_FULL, ids=permits)} if permits else set()


def park_line(tx: Transaction, lane: str, tasks: list[str]) -> None:
    """Park these tasks of a lane, each under its own permit, which is locked. A row someone else holds is passed over."""
    if tasks:
        held = [r["id"] for r in tx.rows(_THESE, ids=tasks, lane=lane)]
        if held:
            tx.changed(_PARK_EACH, ids=held)


def call_up(tx: Transaction, permit: str, tasks: list[str]) -> None:
    """Let these be claimed, if they are parked under the permit: their turn has come while they were not looked at."""
    t = tx.t.task
    if tasks:
        where = [t.c.id.in_(tasks), t.c.blocked_by == blocker(permit)]
        _move_up(tx, permit, tx.rows(sa.select(t.c.id, t.c.namespace, t.c.queue).where(*where).with_for_update(skip_locked=True)))


def first_in_line(tx: Transaction, namespace: str, key: str, limit: int) -> list[str]:
    """The first tasks that wait for the permit, parked or not, in whatever queue: for those that keep their order."""
    t = tx.t.task
    waiting = [t.c.namespace == namespace, t.c.permit == key, not_empty(t.c.permit), t.c.state == TaskState.READY, t.c.permit_held == 0]
    return [r["id"] for r in tx.rows(sa.select(t.c.id).where(*waiting).order_by(t.c.rank, t.c.id).limit(limit))]


def release(tx: Transaction, permit: str) -> None:
    """One holder less; the next in line may be claimed."""
    row = lock(tx, permit)
    if row is None:
        raise AssertionError(f"permit {permit} is held and does not exist")
    t = tx.t.permit
    if tx.update(t, t.c.id == permit, t.c.rev == row.rev, t.c.held > 0, held=row.held - 1) != 1:
        raise AssertionError(f"permit {permit} was freed more often than it was taken")
    if not row.paused:
        unpark(tx, permit, row.capacity - (row.held - 1))


def unpark(tx: Transaction, permit: str, free: int) -> int:
    """Let the first ``free`` of those it blocks be claimed, by rank; how many there were. A row someone else holds is passed over: the sweep looks again."""
    if free <= 0:
        return 0
    t = tx.t.task
    waiting = tx.rows(
        sa.select(t.c.id, t.c.namespace, t.c.queue)
        .where(t.c.blocked_by == blocker(permit))
        .order_by(t.c.rank, t.c.id)
        .limit(free)
        .with_for_update(skip_locked=True)
    )
    _move_up(tx, permit, waiting)
    return len(waiting)


def _move_up(tx: Transaction, permit: str, waiting: list[dict[str, Any]]) -> None:
    """Into their lanes. Their rows are locked."""
    t = tx.t.task
    for row in waiting:
        where = [t.c.id == row["id"], t.c.state == TaskState.READY, t.c.blocked_by == blocker(permit)]
        tx.update(t, *where, blocked_by=None, ready_lane=lane(row["namespace"], row["queue"]))


def refill(tx: Transaction, permit: str) -> int:
    """Move up whoever could have it now; how many. Harmless when nobody waits or nothing is free."""
    row = lock(tx, permit)
    if row is None or row.paused:
        return 0
    return unpark(tx, permit, row.capacity - row.held)


def next_blocker(tx: Transaction, after: str) -> str | None:
    """The first permit after ``after`` that blocks a task: a walk over few index entries, however many tasks are blocked."""
    t = tx.t.task
    found = tx.execute(sa.select(sa.func.min(t.c.blocked_by)).where(t.c.blocked_by > blocker(after), t.c.blocked_by < "permit;")).scalar()
    return None if found is None else str(found).removeprefix("permit:")
