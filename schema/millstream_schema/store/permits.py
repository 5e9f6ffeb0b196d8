"""Statements on permits: how many tasks may use one resource at once, and the sequence that tells their attempts apart.

A permit is granted in the transaction that claims its task and freed in the one that ends the attempt. Tasks it blocks are parked under it, out of every claim's way, and
moved back one for each that frees, by rank. What must never happen here: more grants than the capacity; a sequence that goes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from ..durable.gates import permit_blocker
from ..durable.records import PermitRow
from ..durable.states import TaskState
from . import blockers
from .columns import not_empty
from .database import Query, Transaction
from .rows import to
from .tables import Tables


def _one(t: Tables) -> sa.Select[tuple[object, ...]]:
    return sa.select(t.permit).where(t.permit.c.id == sa.bindparam("id"))


def _several(t: Tables) -> sa.Select[tuple[object, ...]]:
    c = t.permit.c
    return sa.select(t.permit).where(c.id.in_(sa.bindparam("ids", expanding=True))).order_by(c.id)


def _full(t: Tables) -> sa.Select[tuple[str]]:
    c = t.permit.c
    full = [c.id.in_(sa.bindparam("ids", expanding=True)), sa.or_(c.held >= c.capacity, c.paused == 1)]
    return sa.select(c.id).where(*full).order_by(c.id).with_for_update(skip_locked=True)


_LOCKED = Query(lambda t: _one(t).with_for_update())
_SEVERAL = Query(lambda t: _several(t).with_for_update())
_SEVERAL_IF_FREE = Query(lambda t: _several(t).with_for_update(skip_locked=True))
_FULL = Query(_full)


def ensure(tx: Transaction, permit: str, capacity: int) -> None:
    """The permit, unless it is there."""
    namespace, _, key = permit.partition("/")
    tx.insert_or_nothing(tx.t.permit, id=permit, namespace=namespace, key=key, capacity=max(1, capacity), held=0, seq=0, paused=0, rev=0)


def lock(tx: Transaction, permit: str) -> PermitRow | None:
    """Lock its row. Order: task rows by id, then permits by id."""
    row = tx.row(_LOCKED, id=permit)
    return None if row is None else to(PermitRow, row)


def lock_several(tx: Transaction, permits: Sequence[str], *, wait: bool) -> dict[str, PermitRow]:
    """Lock several, in the order of their ids. Whoever cannot keep that order does not ``wait``: what somebody else holds is passed over."""
    found = tx.rows(_SEVERAL if wait else _SEVERAL_IF_FREE, ids=sorted(permits)) if permits else []
    return {r["id"]: to(PermitRow, r) for r in found}


def existing(tx: Transaction, permits: Sequence[str]) -> set[str]:
    """Those of these that are there, locked by whom it may be."""
    c = tx.t.permit.c
    return {r["id"] for r in tx.rows(sa.select(c.id).where(c.id.in_(list(permits))))}


def lock_full(tx: Transaction, permits: Sequence[str]) -> set[str]:
    """Those of these that have no room, locked; what somebody else holds is passed over."""
    return {r["id"] for r in tx.rows(_FULL, ids=list(permits))} if permits else set()


def take(tx: Transaction, permit: PermitRow, grants: int, kept: int) -> int:
    """Grant ``grants`` new holders and renew ``kept`` old ones of a locked permit; the first of their sequence numbers."""
    t = tx.t.permit
    held, seq = permit.held + grants, permit.seq + grants + kept
    if held > permit.capacity and grants:
        raise AssertionError(f"permit {permit.id}: {held} of {permit.capacity} would be held")
    if tx.update(t, t.c.id == permit.id, t.c.rev == permit.rev, held=held, seq=seq) != 1:
        raise AssertionError(f"permit {permit.id} changed under its lock")
    return permit.seq + 1


def first_in_line(tx: Transaction, namespace: str, key: str, limit: int) -> list[str]:
    """The first tasks that wait for the permit, parked or not, in whatever queue: for those that keep their order."""
    t = tx.t.task
    waiting = [t.c.namespace == namespace, t.c.permit == key, not_empty(t.c.permit), t.c.state == TaskState.READY, t.c.permit_held == 0]
    waiting.append(t.c.ending.is_(None))
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
        blockers.move_up(tx, permit_blocker(permit), row.capacity - (row.held - 1))


def refill(tx: Transaction, permit: str) -> int:
    """Move up whoever could have it now; how many. Harmless when nobody waits or nothing is free."""
    row = lock(tx, permit)
    if row is None or row.paused:
        return 0
    return blockers.move_up(tx, permit_blocker(permit), row.capacity - row.held)


# -- commands


def set_capacity(tx: Transaction, permit: str, capacity: int, *, actor: str) -> PermitRow:
    """How many may hold it at once from now on; those who hold it keep it. Who can have it now moves up. A repeat changes nothing but who set it."""
    ensure(tx, permit, capacity)
    row = lock(tx, permit)
    assert row is not None
    t = tx.t.permit
    tx.update(t, t.c.id == permit, t.c.rev == row.rev, capacity=capacity, changed_by=actor, changed_us=tx.now_us())
    if not row.paused:
        blockers.move_up(tx, permit_blocker(permit), capacity - row.held)
    return row


def read(tx: Transaction, permit: str) -> PermitRow | None:
    """As it is; not locked."""
    row = tx.row(_one(tx.t), id=permit)
    return None if row is None else to(PermitRow, row)


def of_namespace(tx: Transaction, namespace: str, after: str, limit: int) -> list[PermitRow]:
    """Permits of a namespace in the order of their keys."""
    t = tx.t.permit
    where = [t.c.namespace == namespace, t.c.id > f"{namespace}/{after}", t.c.id < f"{namespace}0"]
    return [to(PermitRow, r) for r in tx.rows(sa.select(t).where(*where).order_by(t.c.id).limit(limit))]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of tasks that hold a permit, and of the first that wait for it; ``waiting``: how many wait, as far as they were counted."""

    holders: list[str]
    first: list[str]
    waiting: int


def line(tx: Transaction, namespace: str, key: str, limit: int) -> Line:
    """Of each state at most ``limit`` tasks are looked at."""
    t = tx.t.task
    holders: list[str] = []
    waiting: list[str] = []
    for state in (TaskState.RUNNING, TaskState.DISPATCHED, TaskState.RETRY_WAIT, TaskState.READY):
        mine = [t.c.namespace == namespace, t.c.permit == key, not_empty(t.c.permit), t.c.state == state]
        for row in tx.rows(sa.select(t.c.id, t.c.permit_held).where(*mine).order_by(t.c.rank, t.c.id).limit(limit)):
            if row["permit_held"]:
                holders.append(row["id"])
            elif state is TaskState.READY:
                waiting.append(row["id"])
    return Line(holders=holders, first=waiting[:10], waiting=len(waiting))
