"""Statements that move READY tasks out of every claim's way and back: parked under what blocks them, moved up by rank when it ends.

A parked row has no ``ready_lane``; its ``blocked_by`` names a permit, a pause or a rate. What must never happen here: a row parked under something whose row is not locked by the
same transaction, so that whoever ends it afterwards would not see the parked row; a row that is moved and looked for by anything but its id.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from ..durable.states import TaskState
from .columns import compared
from .database import Query, Transaction
from .tables import Tables


def _where_in_lane(t: Tables) -> list[sa.ColumnElement[bool]]:
    c = t.task.c
    return [c.id.in_(sa.bindparam("ids", expanding=True)), c.state == TaskState.READY, compared(c.ready_lane) != ""]


def _park(t: Tables) -> sa.Update:
    return sa.update(t.task).where(*_where_in_lane(t)).values(ready_lane=None, blocked_by=sa.bindparam("blocker"), rev=t.task.c.rev + 1)


def _park_each(t: Tables, column: str, kind: str) -> sa.Update:
    """Each under its own permit, or its own handler."""
    c = t.task.c
    text = c.blocked_by.type
    own = sa.literal(kind, text) + c.namespace + sa.literal("/", text) + c[column]
    return sa.update(t.task).where(*_where_in_lane(t)).values(ready_lane=None, blocked_by=own, rev=c.rev + 1)


def _lane_rows(t: Tables) -> sa.Select[tuple[str]]:
    c = t.task.c
    where = [c.id.in_(sa.bindparam("ids", expanding=True)), compared(c.ready_lane) == sa.bindparam("lane")]
    return sa.select(c.id).where(*where).order_by(c.id).with_for_update(skip_locked=True)


def _first(t: Tables) -> sa.Select[tuple[str]]:
    c = t.task.c
    first = sa.select(c.id).where(c.blocked_by == sa.bindparam("blocker")).order_by(c.rank, c.id)
    return first.limit(sa.bindparam("count")).with_for_update(skip_locked=True)


def _called(t: Tables) -> sa.Select[tuple[str]]:
    c = t.task.c
    where = [c.id.in_(sa.bindparam("ids", expanding=True)), compared(c.blocked_by) == sa.bindparam("blocker")]
    return sa.select(c.id).where(*where).order_by(c.id).with_for_update(skip_locked=True)


def _move_up(t: Tables) -> sa.Update:
    c = t.task.c
    own = c.namespace + sa.literal("/", c.ready_lane.type) + c.queue
    where = [c.id.in_(sa.bindparam("ids", expanding=True)), c.state == TaskState.READY, compared(c.blocked_by) == sa.bindparam("blocker")]
    return sa.update(t.task).where(*where).values(ready_lane=own, blocked_by=None, rev=c.rev + 1)


_PARK = Query(_park)
_PARK_EACH = {
    "permit:": Query(lambda t: _park_each(t, "permit", "permit:")),
    "rate:permit:": Query(lambda t: _park_each(t, "permit", "rate:permit:")),
    "rate:handler:": Query(lambda t: _park_each(t, "handler", "rate:handler:")),
    "pause:handler:": Query(lambda t: _park_each(t, "handler", "pause:handler:")),
}
_LANE_ROWS = Query(_lane_rows)
_FIRST = Query(_first)
_CALLED = Query(_called)
_MOVE_UP = Query(_move_up)
_FOLLOWING = Query(
    lambda t: sa.select(sa.func.min(t.task.c.blocked_by).label("blocker")).where(t.task.c.blocked_by > sa.bindparam("after"))
)


def park(tx: Transaction, blocker: str, tasks: Sequence[str]) -> None:
    """Out of the way until it ends. Their rows are locked, and so is its."""
    if tasks:
        tx.changed(_PARK, ids=list(tasks), blocker=blocker)


def park_line(tx: Transaction, lane: str, kind: str, tasks: Sequence[str]) -> None:
    """Park these of a lane, each under what blocks it, by one statement. ``kind``: how its blocker's name begins. A row someone else holds is passed over."""
    if tasks:
        held = [r["id"] for r in tx.rows(_LANE_ROWS, ids=list(tasks), lane=lane)]
        if held:
            tx.changed(_PARK_EACH[kind], ids=held)


def move_up(tx: Transaction, blocker: str, count: int) -> int:
    """Let the first ``count`` of those it blocks be claimed, by rank; how many there were. A row someone else holds is passed over: the sweep looks again."""
    if count <= 0:
        return 0
    return _up(tx, blocker, [r["id"] for r in tx.rows(_FIRST, blocker=blocker, count=count)])


def call_up(tx: Transaction, blocker: str, tasks: Sequence[str]) -> int:
    """Let these be claimed, as far as it blocks them; how many."""
    return _up(tx, blocker, [r["id"] for r in tx.rows(_CALLED, blocker=blocker, ids=list(tasks))]) if tasks else 0


def _up(tx: Transaction, blocker: str, tasks: list[str]) -> int:
    if tasks:
        tx.changed(_MOVE_UP, ids=tasks, blocker=blocker)
    return len(tasks)


def following(tx: Transaction, after: str) -> str | None:
    """The first thing after ``after`` that blocks a task: a walk over few index entries, however many tasks are blocked."""
    row = tx.row(_FOLLOWING, after=after)
    return None if row is None else row["blocker"]
