"""What one claim may take: the first of each lane that has room, without what has expired or is blocked.

What is blocked is parked, and with it what stands behind it in the lane for the same reason, in bulk: each blocked row is seen once and not by every claim. The claim then looks
again at once, so that one call finds what is free behind thousands that wait. Called by ``claims.claim``, whose transaction this is. What must never happen here: a task given
that is not READY in its lane under a lock; a wait for a lock after the first round, when the order of locks can no longer be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.decisions import Decision, expired
from ..durable.records import PermitRow, Policy, TaskRow
from ..durable.states import TaskState
from . import permits
from .database import Query, Transaction
from .rows import to
from .tables import Tables
from .tasks import apply

ROUNDS = 4
"""How often one claim looks. What is left then is found by the next one, which is made at once."""
PARKED_AT_ONCE = 1_000
"""Rows of a lane that are looked at when something in front was blocked."""


class Selected(msgspec.Struct):
    """``tasks``: locked, permitted, not yet given. ``more``: something was moved out of the way to the last, so there may be free tasks behind it."""

    tasks: list[TaskRow]
    more: bool = False


def candidates(t: Tables) -> sa.Select[tuple[object, ...]]:
    c = t.task.c
    handlers: sa.BindParameter[Any] = sa.bindparam("handlers", expanding=True)
    where = [c.ready_lane == sa.bindparam("lane"), c.handler.in_(handlers)]
    return sa.select(t.task).where(*where).order_by(c.rank, c.id).limit(sa.bindparam("count")).with_for_update(skip_locked=True)


def _further(t: Tables) -> sa.Select[tuple[object, ...]]:
    """Likewise, without those that were chosen before."""
    return candidates(t).where(t.task.c.id.not_in(sa.bindparam("chosen", expanding=True)))


def _front(t: Tables) -> sa.Select[tuple[object, ...]]:
    c = t.task.c
    front = sa.select(c.id, c.namespace, c.permit, c.permit_held).where(c.ready_lane == sa.bindparam("lane"))
    return front.order_by(c.rank, c.id).limit(PARKED_AT_ONCE)


_CANDIDATES = Query(candidates)
_FURTHER = Query(_further)
_FRONT = Query(_front)


class _Round(msgspec.Struct):
    """What is known of permits in this claim: those without room, and those with some left."""

    full: set[str] = msgspec.field(default_factory=set)
    roomy: set[str] = msgspec.field(default_factory=set)
    first: bool = True


def select(tx: Transaction, shares: Mapping[str, int], handlers: Sequence[str], now: int) -> Selected:
    """Up to ``shares[lane]`` tasks of each lane by rank; what one lane does not fill is given to those that have more."""
    room = {lane: count for lane, count in sorted(shares.items()) if count > 0} if handlers else {}
    total = sum(room.values())
    found = Selected([])
    known = _Round()
    for _ in range(ROUNDS):
        wanted, deep = _look(tx, room, handlers, [t.id for t in found.tasks])
        chosen, moved = _free(tx, wanted, now, known)
        found.tasks += chosen
        left = total - len(found.tasks)
        found.more = bool(moved and deep and left)
        if not (left and deep):
            break
        if moved:
            for lane in deep:
                _clear(tx, lane, known)
        room = _split(left, deep)
        known.first = False
    found.tasks.sort(key=lambda t: (t.rank, t.id))
    return found


def _look(tx: Transaction, room: Mapping[str, int], handlers: Sequence[str], chosen: Sequence[str]) -> tuple[list[TaskRow], list[str]]:
    """The first of each lane, locked, and the lanes that may hold more."""
    wanted: list[TaskRow] = []
    deep = []
    for lane, count in room.items():
        values = {"lane": lane, "handlers": list(handlers), "count": count}
        rows = tx.rows(_FURTHER, chosen=list(chosen), **values) if chosen else tx.rows(_CANDIDATES, **values)
        wanted += [to(TaskRow, r) for r in rows]
        if len(rows) == count:
            deep.append(lane)
    return wanted, deep


def _split(count: int, lanes: Sequence[str]) -> dict[str, int]:
    """As evenly as it goes."""
    each, more = divmod(count, len(lanes))
    return {lane: each + (at < more) for at, lane in enumerate(lanes) if each + (at < more)}


def _free(tx: Transaction, wanted: list[TaskRow], now: int, known: _Round) -> tuple[list[TaskRow], int]:
    """Those that may start now, and how many were moved out of the way: expired, or parked."""
    in_time = _in_time(tx, wanted, now)
    chosen, parked = _permitted(tx, in_time, known)
    return chosen, parked + len(wanted) - len(in_time)


def _in_time(tx: Transaction, tasks: list[TaskRow], now: int) -> list[TaskRow]:
    """Those that may still start; the others expire here."""
    kept = []
    for task in tasks:
        cause = expired(task, now)
        if cause:
            apply(tx, task, Decision(state=TaskState.EXPIRED, cause=cause), now)
        else:
            kept.append(task)
    return kept


def _permitted(tx: Transaction, tasks: list[TaskRow], known: _Round) -> tuple[list[TaskRow], int]:
    """Those whose permit is granted, or that need none; the others are parked. Permits are locked in the order of their ids."""
    free = [t for t in tasks if not t.permit]
    parked = 0
    needing: dict[str, list[TaskRow]] = {}
    for task in tasks:
        if task.permit:
            needing.setdefault(task.permit_id, []).append(task)
    for permit_id in sorted(needing):
        permit = _permit(tx, permit_id, needing[permit_id], known)
        if permit is not None:
            granted, refused = _granted(tx, permit, sorted(needing[permit_id], key=lambda t: (t.rank, t.id)))
            fresh = sum(not t.permit_held for t in needing[permit_id]) - refused
            (known.full if refused or permit.held + fresh >= permit.capacity else known.roomy).add(permit_id)
            free += granted
            parked += refused
    return free, parked


def _permit(tx: Transaction, permit_id: str, tasks: list[TaskRow], known: _Round) -> PermitRow | None:
    """The locked permit, made if it is not there. None: somebody has it just now, and in a later round nobody is waited for."""
    permit = permits.lock(tx, permit_id, wait=known.first)
    if permit is None:
        permits.ensure(tx, permit_id, msgspec.json.decode(tasks[0].policy, type=Policy).permit_capacity)
        permit = permits.lock(tx, permit_id, wait=known.first)
    return permit


def _granted(tx: Transaction, permit: PermitRow, tasks: list[TaskRow]) -> tuple[list[TaskRow], int]:
    """Of the tasks that want one permit, in order, those that get it, and how many were parked."""
    kept = [t for t in tasks if t.permit_held]
    room = 0 if permit.paused else permit.capacity - permit.held
    waiting = [t for t in tasks if not t.permit_held]
    first: list[str] = []
    if any(t.ordered for t in waiting) and room > 0:
        first = permits.first_in_line(tx, permit.namespace, permit.key, room)
        waiting = [t for t in waiting if t.id in first or not t.ordered]
    given = waiting[: max(0, room)]
    refused = [t.id for t in tasks if not t.permit_held and t not in given]
    permits.park(tx, permit.id, refused)
    permits.call_up(tx, permit.id, [t for t in first if t not in {g.id for g in given}])
    seq = permits.take(tx, permit, len(given), len(kept)) if given or kept else 0
    result = []
    for offset, task in enumerate([*kept, *given]):
        t = tx.t.task
        tx.update(t, t.c.id == task.id, t.c.state == TaskState.READY, permit_held=1, permit_seq=seq + offset)
        result.append(msgspec.structs.replace(task, permit_held=1, permit_seq=seq + offset, rev=task.rev + 1))
    return result, len(refused)


def _clear(tx: Transaction, lane: str, known: _Round) -> None:
    """Park what stands at the front of a lane and waits for a permit that has no room. Such a permit is locked: whoever frees it afterwards sees what is parked."""
    front = tx.rows(_FRONT, lane=lane)
    wanted = {f"{r['namespace']}/{r['permit']}" for r in front if r["permit"]}
    known.full |= permits.lock_full(tx, sorted(wanted - known.full - known.roomy))
    blocked = [r["id"] for r in front if r["permit"] and not r["permit_held"] and f"{r['namespace']}/{r['permit']}" in known.full]
    permits.park_line(tx, lane, blocked)
