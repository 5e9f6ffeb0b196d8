"""Statements that give tasks to a worker session, and take waiting ones up when they are due.

Which task is taken is decided here alone, in SQL: messages only hasten it. A claim's cost depends on what it takes: what is finished, blocked or due later has no entry in the
index it walks. What must never happen here: a task given to two sessions; a claim for a session whose lease is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import sqlalchemy as sa

from ..durable.decisions import limit_of, on_due, on_limit
from ..durable.records import TaskRow
from ..durable.states import Effects, TaskState
from ..states import NodeState
from . import gates, lanes
from .columns import among, compared, not_empty
from .database import ClockQuery, DialectQuery, Query, Transaction
from .rows import left_alone
from .selection import Selected, select, soonest
from .tables import Tables
from .tasks import apply, by_permit, first_readable, known_here, readable

LANES = 200
"""Lanes with claimable tasks that one claim looks at."""


class Claimed(msgspec.Struct, frozen=True):
    """What a claim gave. ``next_us``: the database's time when the next waiting task is due, looked up when nothing was claimed;
    ``now_us``: its time now; ``more``: another claim at once may find some."""

    tasks: list[TaskRow]
    now_us: int
    next_us: int | None
    more: bool = False


def _session(t: Tables, now: sa.ColumnElement[int], dialect: str) -> sa.Select[tuple[int, bool, int]]:
    """Locked first, then the clock is read: a lease that ran out while this waited has run out. PostgreSQL computes a list before it locks, but not that of what surrounds it.

    By the way it says whether anybody has set a gate: who has not pays nothing for them.
    """
    n = t.node
    gated = sa.exists(sa.select(t.gate.c.id)).label("gated")
    lease = sa.select(n.c.expires_us, gated).where(n.c.id == sa.bindparam("session"), n.c.state == NodeState.ACTIVE).with_for_update()
    if dialect != "postgresql":
        return lease.add_columns(now.label("now_us"))
    locked = lease.subquery()
    return sa.select(locked.c.expires_us, locked.c.gated, now.label("now_us"))


def _give(t: Tables, dialect: str) -> sa.Update:
    c = t.task.c
    given = {
        "state": sa.bindparam("to"), "fence": c.fence + 1, "token": sa.bindparam("token"), "session": sa.bindparam("session"), "claim": sa.bindparam("claim"),
        "ready_lane": None, "limit_us": None, "starts": c.starts + sa.bindparam("started"), "claimed_us": sa.bindparam("now"), "changed_us": sa.bindparam("now"),
        "started_us": sa.bindparam("started_us"), "rev": c.rev + 1,
    }  # fmt: skip
    where = [among(c.id, "ids", dialect), c.state == TaskState.READY, compared(c.ready_lane) != ""]
    return sa.update(t.task).where(*where).values(given)


_SESSION = ClockQuery(_session)
_GIVE = DialectQuery(_give)
_OF_CLAIM = Query(
    lambda t: (
        sa.select(t.task)
        .where(t.task.c.session == sa.bindparam("session"), not_empty(t.task.c.session), t.task.c.claim == sa.bindparam("claim"))
        .order_by(t.task.c.rank, t.task.c.id)
    )
)
_NEXT_LANE = Query(lambda t: sa.select(sa.func.min(t.task.c.ready_lane).label("lane")).where(t.task.c.ready_lane > sa.bindparam("after")))
_NEXT_WAKE = Query(lambda t: sa.select(sa.func.min(t.task.c.wake_us).label("next")))
_NEXT_READABLE = Query(
    lambda t: (
        sa.select(t.task.c.wake_us.label("next"))
        .where(t.task.c.wake_us.is_not(None), known_here(t), t.task.c.id.not_in(sa.bindparam("seen", expanding=True)))
        .order_by(t.task.c.wake_us)
        .limit(1)
    )
)
_LANES = Query(lambda t: sa.select(t.lane).where(t.lane.c.id.in_(sa.bindparam("lanes", expanding=True))))


def ready_lanes(tx: Transaction, queues: Sequence[str]) -> list[str]:
    """Lanes of these queues that hold claimable tasks: one short index look-up for each lane, not for each task."""
    wanted = set(queues)
    found: list[str] = []
    after = ""
    for _ in range(LANES):
        row = tx.row(_NEXT_LANE, after=after)
        if row is None or row["lane"] is None:
            break
        after = row["lane"]
        if after.partition("/")[2] in wanted:
            found.append(after)
    return found


def lane_settings(tx: Transaction, names: Collection[str]) -> dict[str, tuple[int, bool]]:
    """Weight and pause of those of these lanes that somebody has set; all others weigh 1 and go."""
    return {r["id"]: (int(r["weight"]), bool(r["paused"])) for r in tx.rows(_LANES, lanes=sorted(names))} if names else {}


def survey(
    tx: Transaction, session: str, queues: Sequence[str], known: Collection[str]
) -> tuple[list[str], dict[str, int], dict[str, tuple[int, bool]]]:
    """Lanes with claimable tasks, how many tasks of each lane other sessions hold, and what is set of these and of the ``known`` lanes.

    What the session itself holds it knows better: ends that it has not written yet are still held here."""
    found = ready_lanes(tx, queues)
    return found, lanes.held(tx, but=session), lane_settings(tx, {*found, *known})


def claim(
    tx: Transaction,
    session: str,
    claim_id: str,
    token: str,
    shares: Mapping[str, int],
    handlers: Sequence[str],
    starting: int,
    *,
    again: bool,
    floors: Mapping[str, int] | None = None,
) -> Claimed | None:
    """Give a session up to ``shares[lane]`` tasks of each lane; None: its lease is over, it may hold nothing.

    ``claim_id`` is made before the first try; ``again``: the outcome of an earlier try is unknown, and what it gave is given once more. The first ``starting`` tasks begin at once:
    the start of all that are not ``external`` is folded in. ``floors``: lane → rank from which on to look.
    """
    lease = tx.row(_SESSION, session=session)
    if lease is None or lease["expires_us"] <= lease["now_us"]:
        return None
    now = int(lease["now_us"])
    if again:
        before, _ = readable(tx.rows(_OF_CLAIM, session=session, claim=claim_id))
        if before:
            return Claimed([t for t in before if t.state.held], now, next_wake(tx, now))
    found = select(tx, shares, handlers, now, gated=bool(lease["gated"]), floors=floors or {})
    granted, now = found.tasks, found.now_us
    begun = {t.id for t in granted[:starting] if t.effects is not Effects.EXTERNAL}
    given: list[TaskRow] = []
    for state, started in ((TaskState.RUNNING, 1), (TaskState.DISPATCHED, 0)):
        part = [t for t in granted if (t.id in begun) == bool(started)]
        if part:
            values = {"session": session, "claim": claim_id, "token": token, "started_us": now * started}
            if tx.changed(_GIVE, ids=[t.id for t in part], to=state, now=now, started=started, **values) != len(part):
                raise AssertionError(f"claim {claim_id}: fewer of {len(part)} locked tasks were given")
            given += [
                msgspec.structs.replace(
                    t, state=state, fence=t.fence + 1, starts=t.starts + started, ready_lane=None, limit_us=None, claimed_us=now, **values
                )
                for t in part
            ]
    given.sort(key=lambda t: (t.rank, t.id))
    return Claimed(given, now, None if given else _next_look(tx, found, gated=bool(lease["gated"])), found.more)


def _next_look(tx: Transaction, found: Selected, *, gated: bool) -> int | None:
    """When something that waits for an instant or for a token may be claimed."""
    token = gates.next_token(tx) if gated else None
    return soonest(next_wake(tx, found.now_us), found.next_us, None if token is None else max(token, found.now_us + gates.NO_SOONER_US))


def next_wake(tx: Transaction, now: int) -> int | None:
    """When the next waiting task is due. One that is overdue may be one that cannot be read: then it is looked behind those."""
    row = tx.row(_NEXT_WAKE)
    if row is not None and row["next"] is not None and row["next"] <= now and (others := left_alone()):
        row = tx.row(_NEXT_READABLE, seen=others)
    return None if row is None or row["next"] is None else int(row["next"])


def wake_due(tx: Transaction, limit: int) -> int:
    """Waiting tasks whose instant has come become READY, or expire; how many there were. Rows someone else holds are passed over."""
    t = tx.t.task
    now = tx.now_us()
    due = sa.select(t).where(t.c.wake_us <= now).order_by(t.c.wake_us, t.c.id).limit(limit).with_for_update(skip_locked=True)
    rows = first_readable(tx, due)
    for row in by_permit(rows):
        apply(tx, row, on_due(row, now), now)
    return len(rows)


def expire_late(tx: Transaction, limit: int) -> int:
    """Tasks that wait for whatever it is and may not start any more expire, though no claim looks at them; how many were looked at. No clock stops for a pause."""
    t = tx.t.task
    now = tx.now_us()
    late = sa.select(t).where(t.c.limit_us <= now).order_by(t.c.limit_us, t.c.id).limit(limit).with_for_update(skip_locked=True)
    rows = first_readable(tx, late)
    for row in by_permit(rows):
        decision = on_limit(row, now)
        if decision is not None:
            apply(tx, row, decision, now)
        else:  # the limit was another one when it was written
            tx.update(t, t.c.id == row.id, t.c.state == row.state, t.c.rev == row.rev, limit_us=limit_of(row, row.starts))
    return len(rows)


def begin(tx: Transaction, session: str, task: str, fence: int, token: str) -> bool:
    """The fenced start of one DISPATCHED attempt, committed before its code runs; False: it is not this session's any more. A repeat is granted."""
    now = tx.now_us()
    t = tx.t.task
    mine = [t.c.id == task, t.c.session == session, t.c.fence == fence, t.c.token == token]
    if tx.update(
        t, *mine, t.c.state == TaskState.DISPATCHED, state=TaskState.RUNNING, starts=t.c.starts + 1, started_us=now, changed_us=now
    ):
        return True
    return tx.row(sa.select(t.c.id).where(*mine, t.c.state == TaskState.RUNNING)) is not None
