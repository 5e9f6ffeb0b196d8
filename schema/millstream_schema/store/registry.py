"""Statements on nodes, assignments and the coordinator's lease: who is there and who runs what.

Called by nodes and coordinators. What must never happen here: a lease judged by another clock than the database's, a live one taken over,
a report of an attempt that is not the row's.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from ..states import AssignmentState, NodeState, before_assignment
from .database import Query, Transaction
from .rows import AssignmentRow, NodeRow, to
from .single_rows import lock_single
from .tables import Tables

COORDINATOR = "coordinator"


# -- the coordinator's lease


def read_lease(tx: Transaction) -> dict[str, Any] | None:
    t = tx.t.coordinator
    return tx.row(sa.select(t).where(t.c.id == COORDINATOR))


def read_term(tx: Transaction) -> int:
    """The term in force; 0 before the first take-over."""
    row = read_lease(tx)
    return 0 if row is None else int(row["term"])


def take_lease(tx: Transaction, holder: str, lease_us: int) -> tuple[int, bool, int]:
    """Renew the lease if ``holder`` has it, take it over (term + 1) if it has *expired*; (term, held, µs until it expires). Never takes a live one."""
    t = tx.t.coordinator
    row = lock_single(tx, COORDINATOR)
    now = tx.now_us()
    term = int(row["term"])
    if row["holder"] == holder and row["expires_us"] > now:
        tx.update(t, t.c.id == COORDINATOR, t.c.holder == holder, expires_us=now + lease_us)
        return term, True, lease_us
    if row["expires_us"] > now:
        return term, False, int(row["expires_us"]) - now
    tx.update(t, t.c.id == COORDINATOR, t.c.term == term, holder=holder, term=term + 1, expires_us=now + lease_us)
    return term + 1, True, lease_us


def release_lease(tx: Transaction, holder: str) -> bool:
    """Give the lease back at a clean shut-down."""
    t = tx.t.coordinator
    return tx.update(t, t.c.id == COORDINATOR, t.c.holder == holder, expires_us=0, holder="") == 1


def mark_tick(tx: Transaction, min_interval_us: int) -> bool:
    """Record a tick unless the last one is younger than ``min_interval_us``; whether this one counts."""
    t = tx.t.coordinator
    now = tx.now_us()
    return tx.update(t, t.c.id == COORDINATOR, t.c.ticked_us <= now - min_interval_us, ticked_us=now) == 1


# -- nodes


def register_node(tx: Transaction, node: str, name: str, slots: int, lease_us: int, info: str) -> None:
    """A node's id is new at each start, so this inserts; a repeat after an unknown outcome changes nothing."""
    now = tx.now_us()
    tx.insert_or_nothing(
        tx.t.node,
        id=node, name=name, slots=slots, state=NodeState.ACTIVE, info=info, started_us=now, renewed_us=now, expires_us=now + lease_us, rev=0,
    )  # fmt: skip


def renew_node(tx: Transaction, node: str, lease_us: int, info: str | None = None) -> bool:
    """Extend the lease of a node that still has one, with a new ``info`` if given; False: it has expired and the node must start anew."""
    t = tx.t.node
    now = tx.now_us()
    values: dict[str, Any] = {"renewed_us": now, "expires_us": now + lease_us} | ({} if info is None else {"info": info})
    return tx.update(t, t.c.id == node, t.c.state != NodeState.GONE, t.c.expires_us > now, **values) == 1


def drain_node(tx: Transaction, node: str) -> bool:
    """The node takes no more work; False: it did not before, or its row is gone."""
    t = tx.t.node
    return tx.update(t, t.c.id == node, t.c.state == NodeState.ACTIVE, state=NodeState.DRAINING) == 1


def leave_node(tx: Transaction, node: str) -> bool:
    """The node has gone; its assignments of whatever generation were handed back before. False: it had left, or its row is gone."""
    t = tx.t.node
    return tx.update(t, t.c.id == node, t.c.state != NodeState.GONE, state=NodeState.GONE, expires_us=0) == 1


def active_nodes(tx: Transaction) -> list[NodeRow]:
    """Nodes whose lease has not expired by the database's clock and that take work, by name and id."""
    t = tx.t.node
    now = tx.now_us()
    found = tx.rows(sa.select(t).where(t.c.state == NodeState.ACTIVE, t.c.expires_us > now).order_by(t.c.name, t.c.id))
    return [to(NodeRow, r) for r in found]


def live_node_ids(tx: Transaction, ids: set[str]) -> set[str]:
    """Which of these nodes still have a lease (draining ones, too)."""
    if not ids:
        return set()
    t = tx.t.node
    now = tx.now_us()
    found = tx.rows(sa.select(t.c.id).where(t.c.id.in_(sorted(ids)), t.c.state != NodeState.GONE, t.c.expires_us > now))
    return {r["id"] for r in found}


def forget_nodes(tx: Transaction, before_us: int) -> int:
    """Delete rows of nodes gone for long."""
    t = tx.t.node
    return tx.delete(t, t.c.expires_us < before_us)


# -- assignments


def used_slots(tx: Transaction) -> dict[str, int]:
    """Slots taken per node by assignments of jobs' present generations that are not over."""
    a, j = tx.t.assignment, tx.t.job
    over = (AssignmentState.FINISHED, AssignmentState.FAILED)
    statement = (
        sa.select(a.c.node, sa.func.count().label("used"))
        .select_from(a.join(j, sa.and_(a.c.job == j.c.id, a.c.generation == j.c.generation)))
        .where(a.c.state.not_in(over), j.c.ended == 0)
        .group_by(a.c.node)
    )
    return {r["node"]: int(r["used"]) for r in tx.rows(statement)}


def lock_capacity(tx: Transaction) -> None:
    """Serialise decisions over the set of free slots. Lock order: job row, then this."""
    lock_single(tx, "capacity")


def assign(tx: Transaction, job: str, generation: int, nodes: dict[str, str], committed: int) -> None:
    """All assignments of one generation."""
    now = tx.now_us()
    tx.insert_many(
        tx.t.assignment,
        [
            {
                "job": job, "generation": generation, "subtask": subtask, "node": node, "attempt": "", "state": AssignmentState.ASSIGNED,
                "cause": "", "detail": "", "committed": committed, "commit_detail": "", "exhausted": 0, "progress": 0, "progressed_us": now, "stats": "{}",
                "changed_us": now, "rev": 0,
            }
            for subtask, node in nodes.items()
        ],
    )  # fmt: skip


def _assignments(t: Tables) -> sa.Select[Any]:
    a = t.assignment
    return sa.select(a).where(a.c.job == sa.bindparam("job"), a.c.generation == sa.bindparam("generation")).order_by(a.c.subtask)


def _current(t: Tables) -> sa.Select[Any]:
    a, j = t.assignment, t.job
    return (
        sa.select(a)
        .select_from(a.join(j, sa.and_(a.c.job == j.c.id, a.c.generation == j.c.generation)))
        .where(a.c.node == sa.bindparam("node"), a.c.state.not_in((AssignmentState.FINISHED, AssignmentState.FAILED)), j.c.ended == 0)
        .order_by(a.c.job, a.c.subtask)
    )


_ASSIGNMENTS = Query(_assignments)
_CURRENT = Query(_current)


def assignments(tx: Transaction, job: str, generation: int) -> list[AssignmentRow]:
    return [to(AssignmentRow, r) for r in tx.rows(_ASSIGNMENTS, job=job, generation=generation)]


def current_assignments(tx: Transaction, node: str) -> list[AssignmentRow]:
    """What a node is to run: assignments of jobs' present generations that are not over."""
    return [to(AssignmentRow, r) for r in tx.rows(_CURRENT, node=node)]


def _mine(tx: Transaction, job: str, generation: int, subtask: str, attempt: str) -> list[Any]:
    t = tx.t.assignment
    return [t.c.job == job, t.c.generation == generation, t.c.subtask == subtask, t.c.attempt == attempt]


def start_assignment(tx: Transaction, job: str, generation: int, subtask: str, node: str, attempt: str) -> bool:
    """ASSIGNED → STARTED with an attempt id; a second copy is refused. A repeat by the same attempt is granted."""
    t = tx.t.assignment
    key = [t.c.job == job, t.c.generation == generation, t.c.subtask == subtask, t.c.node == node]
    if tx.update(t, *key, t.c.state == AssignmentState.ASSIGNED, state=AssignmentState.STARTED, attempt=attempt, changed_us=tx.now_us()):
        return True
    row = tx.row(sa.select(t.c.attempt, t.c.state).where(*key))
    return row is not None and row["attempt"] == attempt and row["state"] == AssignmentState.STARTED


def ready_assignment(tx: Transaction, job: str, generation: int, subtask: str, attempt: str, committed: int) -> bool:
    t = tx.t.assignment
    now = tx.now_us()
    where = [*_mine(tx, job, generation, subtask, attempt), t.c.state == AssignmentState.STARTED]
    return tx.update(t, *where, state=AssignmentState.READY, committed=committed, progressed_us=now, changed_us=now) == 1


def end_assignment(
    tx: Transaction, job: str, generation: int, subtask: str, attempt: str, state: AssignmentState, cause: str = "", detail: str = ""
) -> bool:
    """To FINISHED or FAILED, from a state that the table of transitions allows; the first end wins."""
    t = tx.t.assignment
    where = [*_mine(tx, job, generation, subtask, attempt), t.c.state.in_(before_assignment(state))]
    return tx.update(t, *where, state=state, cause=cause, detail=detail[:20_000], changed_us=tx.now_us()) == 1


def committed_assignment(tx: Transaction, job: str, generation: int, subtask: str, attempt: str, epoch: int) -> bool:
    """Every committable up to ``epoch`` is committed; never goes back."""
    t = tx.t.assignment
    where = [*_mine(tx, job, generation, subtask, attempt), t.c.committed < epoch]
    return tx.update(t, *where, committed=epoch, commit_detail="", changed_us=tx.now_us()) == 1


def note_commit(tx: Transaction, job: str, generation: int, subtask: str, attempt: str, detail: str) -> bool:
    """What commits wait for; False: another attempt has the subtask by now."""
    t = tx.t.assignment
    return tx.update(t, *_mine(tx, job, generation, subtask, attempt), commit_detail=detail[:20_000]) == 1


def exhausted_assignment(tx: Transaction, job: str, generation: int, subtask: str, attempt: str) -> bool:
    t = tx.t.assignment
    return tx.update(t, *_mine(tx, job, generation, subtask, attempt), t.c.exhausted == 0, exhausted=1, changed_us=tx.now_us()) == 1


def progress_assignment(tx: Transaction, job: str, generation: int, subtask: str, attempt: str, progress: int, stats: str) -> None:
    """What the node saw of an attempt; ``progressed_us`` moves only when something was done since (max-merged, never back)."""
    t = tx.t.assignment
    now = tx.now_us()
    mine = _mine(tx, job, generation, subtask, attempt)
    tx.update(
        t, *mine, stats=stats,
        progressed_us=sa.case((t.c.progress < progress, now), else_=t.c.progressed_us), progress=sa.case((t.c.progress < progress, progress), else_=t.c.progress),
    )  # fmt: skip


def delete_assignments(tx: Transaction, job: str, below: int) -> int:
    """Forget generations older than ``below``."""
    t = tx.t.assignment
    return tx.delete(t, t.c.job == job, t.c.generation < below)
