"""Facts for one line on why a task is not running: read, never locked, only what the task's state asks for.

Called by clients. What must never happen here: a look whose cost grows with the backlog; a fact of another namespace.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from ..durable.explaining import Holder, WhyFacts
from ..durable.gates import Gate, GateKind, gates_of
from ..durable.records import PermitRow, TaskRow
from ..durable.states import TaskState
from ..states import NodeState
from . import catalogue, gates, intents, progress
from .database import Transaction
from .rows import to

AHEAD = 1_000
"""Tasks before it that are counted, at most."""


def facts(tx: Transaction, task: TaskRow) -> WhyFacts:
    """What :func:`~millstream_schema.durable.explaining.why` needs to know of a task."""
    now = tx.now_us()
    if task.state.held:
        return WhyFacts(now_us=now, holder=_holder(tx, task.session), progress=progress.latest(tx, task.id, task.fence))
    if task.state is TaskState.UNKNOWN:
        return WhyFacts(now_us=now, progress=progress.latest(tx, task.id, task.fence), open_calls=_open_calls(tx, task))
    if task.state is not TaskState.READY:
        return WhyFacts(now_us=now, open_calls=_open_calls(tx, task))
    if task.blocked_by:
        return WhyFacts(now_us=now, permit=_permit(tx, task), gate=_gate(tx, task))
    sessions = catalogue.live_sessions(tx).values()
    serving = [s for s in sessions if task.queue in s.queues]
    return WhyFacts(
        now_us=now, gate=_gate(tx, task), serving=len(serving), able=sum(task.handler in s.handlers for s in serving),
        elsewhere=sum(task.handler in s.handlers and task.queue not in s.queues for s in sessions), ahead=_ahead(tx, task),
    )  # fmt: skip


def _open_calls(tx: Transaction, task: TaskRow) -> tuple[str, ...]:
    found = intents.of_root(tx, task.root) if task.open_intents else []
    return tuple(str(row.id) for row in found if row.open)


def _holder(tx: Transaction, session: str) -> Holder | None:
    n = tx.t.node
    row = tx.row(sa.select(n.c.name, n.c.expires_us, n.c.state).where(n.c.id == session))
    return None if row is None else Holder(name=row["name"], expires_us=int(row["expires_us"]), gone=row["state"] == NodeState.GONE)


def _permit(tx: Transaction, task: TaskRow) -> PermitRow | None:
    if not task.permit:
        return None
    row = tx.row(sa.select(tx.t.permit).where(tx.t.permit.c.id == task.permit_id))
    return None if row is None else to(PermitRow, row)


def _gate(tx: Transaction, task: TaskRow) -> Gate | None:
    """The one that keeps it: named by what it is parked under, else before its queue."""
    kind, _, key = (task.blocked_by or "").partition(":")
    at = gates_of(task)
    wanted = key if kind in ("pause", "rate") else at.get(GateKind.PERMIT, "") if kind == "permit" else at[GateKind.QUEUE]
    return gates.read(tx, [wanted]).get(wanted) if wanted else None


def _ahead(tx: Transaction, task: TaskRow) -> int:
    t: Any = tx.t.task
    before = sa.select(t.c.id).where(t.c.ready_lane == task.ready_lane, t.c.rank < task.rank).order_by(t.c.rank).limit(AHEAD).subquery()
    return int(tx.execute(sa.select(sa.func.count()).select_from(before)).scalar_one())
