"""Statements that find tasks: an index is walked in the order of creation, in bounded parts, and what is not in the index is compared here.

So every statement has one plan on every database, and its cost is what it walks. Called by clients and by bulk acts. What must never happen here: a statement that sorts or
scans what it does not return; a task given on two pages.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.finding import LAST, Place, TaskFilter, Walk, bounds, matching, walk_of
from ..durable.records import TaskRow
from ..durable.states import HELD
from .columns import not_empty
from .database import Transaction
from .rows import parted, to

FIRST_PART, LARGEST_PART = 100, 5_000
"""Rows that one statement walks, at first and at most."""
BUDGET = 50_000
"""Rows that one page may walk: one whose filter lets little through may end early, with a place to go on from."""
_COMPARED = ("id", "state", "handler", "queue", "business_key", "created_us", "settled_us", "origin", "error_class", "retry_of")


class Found(msgspec.Struct, frozen=True):
    """Ids of tasks, newest first. ``place``: where the next page goes on; None: this was the last."""

    ids: list[str]
    place: Place | None


def page(tx: Transaction, namespace: str, f: TaskFilter, after: Place | None, limit: int, until_us: int = LAST) -> Found:
    """The next ``limit`` tasks that match and were created before ``until_us``."""
    matches = matching(f)
    walk = walk_of(f)
    if walk.few:
        return _few(tx, namespace, f, after, limit, until_us)
    found: list[str] = []
    walked, part = 0, max(FIRST_PART, limit + 1)
    while walked < BUDGET:
        rows = _part(tx, namespace, f, walk, after, min(part, LARGEST_PART), until_us)
        for row in rows:
            if len(found) == limit:
                return Found(found, after)
            after = Place(int(row["created_us"]), row["id"])
            if matches(row):
                found.append(row["id"])
        if len(rows) < min(part, LARGEST_PART):
            return Found(found, None)
        walked += len(rows)
        part *= 4
    return Found(found, after)


def _part(
    tx: Transaction, namespace: str, f: TaskFilter, walk: Walk, after: Place | None, count: int, until_us: int
) -> list[dict[str, Any]]:
    """The next rows of an index, from the newest."""
    t = tx.t.task
    at = t.c.amiss_us if walk is Walk.AMISS else t.c.created_us
    (first, last), _ = bounds(f)
    last = min(last, until_us)
    where = [t.c.namespace == namespace, at >= first, at < last]
    if walk is Walk.BUSINESS:
        where += [t.c.business_key == f.business_key, not_empty(t.c.business_key)]
    if after is not None:
        where += [at <= after.created_us, sa.or_(at < after.created_us, t.c.id < after.id)]
    columns = [t.c[name] for name in _COMPARED]
    asked = sa.select(*columns).where(*where).order_by(at.desc(), t.c.id.desc()).limit(count)
    for dialect in ("mysql", "mariadb"):  # whose planner prefers to sort a whole namespace
        asked = asked.with_hint(t, f"FORCE INDEX ({t.name}_{walk}_i)", dialect)
    return tx.rows(asked)


def _few(tx: Transaction, namespace: str, f: TaskFilter, after: Place | None, limit: int, until_us: int) -> Found:
    """All candidates at once, sorted here: what workers hold, the retries of one task."""
    t = tx.t.task
    if f.retry_of:
        where = [t.c.retry_of == f.retry_of, not_empty(t.c.retry_of)]
    else:
        where = [t.c.session > "", not_empty(t.c.session), t.c.state.in_(tuple(HELD))]
    matches = matching(f)
    rows = tx.rows(sa.select(*[t.c[name] for name in _COMPARED]).where(*where, t.c.namespace == namespace))
    places = sorted(((int(r["created_us"]), r["id"].encode()) for r in rows if matches(r) and r["created_us"] < until_us), reverse=True)
    if after is not None:
        places = [p for p in places if p < (after.created_us, after.id.encode())]
    chosen = [Place(us, name.decode()) for us, name in places[:limit]]
    return Found([p.id for p in chosen], chosen[-1] if len(places) > limit else None)


def rows_of(tx: Transaction, ids: list[str]) -> list[TaskRow]:
    """These tasks, in the order given; without those that are gone meanwhile, or that this version cannot read."""
    t = tx.t.task
    read, _ = parted(tx.rows(sa.select(t).where(t.c.id.in_(ids))) if ids else [], lambda r: to(TaskRow, r))
    found = {task.id: task for task in read}
    return [found[i] for i in ids if i in found]
