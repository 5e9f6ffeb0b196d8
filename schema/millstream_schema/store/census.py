"""How many tasks are open, for metrics: counted up to a bound, never a walk over everything. Called by the collector of metrics."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from ..durable.records import lane
from ..durable.states import TaskState
from .database import Transaction
from .lanes import open_tasks


class Census(msgspec.Struct, frozen=True):
    """``open``: (queue, state) → how many; ``whole``: whether all were counted; ``waiting_us``: queue → how long the first in
    line has been due."""

    open: dict[tuple[str, str], int]
    whole: bool
    waiting_us: dict[str, int]


def census(tx: Transaction, namespace: str, limit: int) -> Census:
    """At most ``limit`` open tasks of a namespace, by queue and state."""
    t = tx.t.task
    some = open_tasks(tx, namespace, "", limit, t.c.queue, t.c.state)
    rows = tx.rows(sa.select(some.c.queue, some.c.state, sa.func.count().label("n")).group_by(some.c.queue, some.c.state))
    found = {(str(r["queue"]), TaskState(r["state"]).value): int(r["n"]) for r in rows}
    now = tx.now_us()
    oldest = {}
    for queue in sorted({q for q, state in found if state == TaskState.READY.value}):
        first = tx.row(sa.select(t.c.due_us).where(t.c.ready_lane == lane(namespace, queue)).order_by(t.c.rank, t.c.id).limit(1))
        if first is not None:
            oldest[queue] = max(0, now - int(first["due_us"]))
    return Census(found, sum(found.values()) < limit, oldest)
