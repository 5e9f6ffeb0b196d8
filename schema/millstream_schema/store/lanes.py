"""Statements on lanes: what is set of a queue of a namespace, and how it stands, by bounded queries.

Called by commands. What must never happen here: a count without a bound.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.records import lane
from ..durable.states import HELD
from .columns import not_empty
from .database import Query, Transaction
from .rows import to


def ensure(tx: Transaction, namespace: str, queue: str) -> None:
    """The lane's row, unless it is there."""
    tx.insert_or_nothing(tx.t.lane, id=lane(namespace, queue), namespace=namespace, queue=queue, weight=1, paused=0, backlog=0, rev=0)


def set_weight(tx: Transaction, namespace: str, queue: str, weight: int, *, actor: str) -> None:
    """How much of the slots it gets beside other lanes."""
    ensure(tx, namespace, queue)
    tx.update(tx.t.lane, tx.t.lane.c.id == lane(namespace, queue), weight=weight, changed_by=actor, changed_us=tx.now_us())


class Weight(msgspec.Struct, frozen=True):
    """A lane's part of the slots beside others; who set it and when (UTC µs), if anybody has."""

    weight: int = 1
    changed_by: str = ""
    changed_us: int = 0


def weight(tx: Transaction, namespace: str, queue: str) -> Weight:
    """What is set."""
    t = tx.t.lane
    row = tx.row(sa.select(t.c.weight, t.c.changed_by, t.c.changed_us).where(t.c.id == lane(namespace, queue)))
    return Weight() if row is None else to(Weight, row)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a queue stands. ``states``: tasks that are not over by state, ``blocked``: by what blocks them, both of the first ``looked_at`` alone; ``complete``: there are no more.

    ``oldest_us``: when the first that could be claimed became due; None: there is none. ``held``: with workers now.
    """

    states: dict[str, int]
    blocked: dict[str, int]
    looked_at: int
    complete: bool
    oldest_us: int | None
    held: int


def standing(tx: Transaction, namespace: str, queue: str, limit: int) -> Standing:
    """Counts of at most ``limit`` rows."""
    t = tx.t.task
    some = open_tasks(tx, namespace, queue, limit, t.c.state, t.c.blocked_by)
    rows = tx.rows(sa.select(some.c.state, some.c.blocked_by, sa.func.count().label("n")).group_by(some.c.state, some.c.blocked_by))
    states: dict[str, int] = {}
    blocked: dict[str, int] = {}
    for row in rows:
        states[row["state"]] = states.get(row["state"], 0) + int(row["n"])
        if row["blocked_by"]:
            blocked[row["blocked_by"]] = blocked.get(row["blocked_by"], 0) + int(row["n"])
    seen = sum(states.values())
    first = tx.row(sa.select(t.c.due_us).where(t.c.ready_lane == lane(namespace, queue)).order_by(t.c.rank, t.c.id).limit(1))
    return Standing(
        states=states, blocked=blocked, looked_at=seen, complete=seen < limit, oldest_us=None if first is None else int(first["due_us"]),
        held=held(tx).get(lane(namespace, queue), 0),
    )  # fmt: skip


def open_tasks(tx: Transaction, namespace: str, queue: str, limit: int, *columns: sa.ColumnElement[Any]) -> sa.Subquery:
    """At most ``limit`` tasks that are not over, of a queue or, without one, of all: to be counted. By the index of these, whatever a planner believes of the table."""
    t = tx.t.task
    asked = sa.select(*columns).where(t.c.namespace == namespace, t.c.settled_us == sa.literal_column("0")).limit(limit)
    if queue and tx.dialect != "sqlite":
        asked = asked.where(t.c.queue == queue)  # and no order: MariaDB would sort all
    elif queue:  # in an order, or it scans the table when all of it was open at the last ANALYZE
        asked = asked.where(t.c.queue.between(queue, queue)).order_by(t.c.queue)
    else:
        asked = asked.order_by(t.c.queue)
    for dialect in ("mysql", "mariadb"):  # whose planner prefers an index of all tasks of the namespace
        asked = asked.with_hint(t, f"FORCE INDEX ({t.name}_open_i)", dialect)
    return asked.subquery()


_HELD = Query(
    lambda t: (
        sa.select(t.task.c.namespace, t.task.c.queue, sa.func.count().label("n"))
        # With the range, so that SQLite walks the index of held tasks and not, for the grouping, the one of all tasks of a namespace.
        .where(t.task.c.state.in_(tuple(HELD)), not_empty(t.task.c.session), t.task.c.session > "")
        .where(t.task.c.session != sa.bindparam("but"))
        .group_by(t.task.c.namespace, t.task.c.queue)
    )
)


def held(tx: Transaction, *, but: str = "") -> dict[str, int]:
    """How many tasks of each lane workers hold now, ``but`` this session: a walk over what is held anywhere."""
    return {lane(r["namespace"], r["queue"]): int(r["n"]) for r in tx.rows(_HELD, but=but)}


def with_open_tasks(tx: Transaction, namespace: str, limit: int) -> list[str]:
    """Queues with tasks that are not over: one index look-up for each."""
    t = tx.t.task
    # Where the index holds only what is open, that has to be said; elsewhere saying it would have all that is finished looked at.
    open_ = [] if tx.dialect == "mysql" else [t.c.settled_us == sa.literal_column("0")]
    found: list[str] = []
    for _ in range(limit):
        after = found[-1] if found else ""
        # Ordered, and not min(): PostgreSQL may add that up over all rows of the namespace.
        row = tx.row(sa.select(t.c.queue).where(t.c.namespace == namespace, t.c.queue > after, *open_).order_by(t.c.queue).limit(1))
        if row is None:
            break
        found.append(row["queue"])
    return found


def names(tx: Transaction, namespace: str, limit: int) -> list[str]:
    """Queues with tasks that are not over, or of which something is set."""
    t = tx.t.lane
    set_ = {r["queue"] for r in tx.rows(sa.select(t.c.queue).where(t.c.namespace == namespace).order_by(t.c.id).limit(limit))}
    return sorted(set_.union(with_open_tasks(tx, namespace, limit)))
