"""Statements on lanes: what is set of a queue of a namespace, and how it stands, by bounded queries.

Called by commands. What must never happen here: a count without a bound.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from ..durable.records import lane
from ..durable.states import HELD
from .columns import not_empty
from .database import Transaction


def ensure(tx: Transaction, namespace: str, queue: str) -> None:
    """The lane's row, unless it is there."""
    tx.insert_or_nothing(tx.t.lane, id=lane(namespace, queue), namespace=namespace, queue=queue, weight=1, paused=0, backlog=0, rev=0)


def set_weight(tx: Transaction, namespace: str, queue: str, weight: int) -> None:
    """How much of the slots it gets beside other lanes."""
    ensure(tx, namespace, queue)
    tx.update(tx.t.lane, tx.t.lane.c.id == lane(namespace, queue), weight=weight)


def weight(tx: Transaction, namespace: str, queue: str) -> int:
    """What is set; 1: nothing is."""
    t = tx.t.lane
    row = tx.row(sa.select(t.c.weight).where(t.c.id == lane(namespace, queue)))
    return 1 if row is None else int(row["weight"])


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
    mine = [t.c.namespace == namespace, t.c.queue == queue, t.c.settled_us == sa.literal_column("0")]
    some = sa.select(t.c.state, t.c.blocked_by).where(*mine).limit(limit).subquery()
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
        held=held(tx, namespace, queue),
    )  # fmt: skip


def held(tx: Transaction, namespace: str, queue: str) -> int:
    """How many tasks workers hold now: a walk over what is held anywhere."""
    t = tx.t.task
    where = [t.c.state.in_(tuple(HELD)), not_empty(t.c.session), t.c.session > "", t.c.namespace == namespace, t.c.queue == queue]
    return int(tx.execute(sa.select(sa.func.count()).where(*where)).scalar_one())


def names(tx: Transaction, namespace: str, limit: int) -> list[str]:
    """Queues with tasks that are not over, or of which something is set: one index look-up for each."""
    t = tx.t.task
    found: set[str] = {r["queue"] for r in tx.rows(sa.select(tx.t.lane.c.queue).where(tx.t.lane.c.namespace == namespace).limit(limit))}
    after = ""
    # Where the index holds only what is open, that has to be said; elsewhere saying it would have all that is finished looked at.
    open_ = [] if tx.dialect == "mysql" else [t.c.settled_us == sa.literal_column("0")]
    for _ in range(limit):
        row = tx.row(sa.select(sa.func.min(t.c.queue).label("queue")).where(t.c.namespace == namespace, t.c.queue > after, *open_))
        if row is None or row["queue"] is None:
            break
        after = row["queue"]
        found.add(after)
    return sorted(found)
