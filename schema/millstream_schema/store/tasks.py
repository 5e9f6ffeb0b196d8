"""Statements that bring durable tasks in, read them, and write what was decided about one.

:func:`submit` may run inside a caller's transaction, at any isolation level: a repeat is an answer, never a database error. What must never happen here: a decision; a write that
does not name the state and the fence it was decided from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.decisions import RANK_STEP_US, Decision, limit_of, rank
from ..durable.records import AttemptRow, NewTask, Policy, Receipt, TaskRow, lane
from ..durable.states import AMISS, Cause, TaskState, may_become
from .database import NewRows, Query, Transaction
from .events import record
from .permits import refill, release
from .rows import Row, parted, to, unreadable
from .tables import Tables

TEXT_KEPT = 20_000
LATE_KEPT = 20
"""Late reports of one attempt that are kept."""
TOGETHER = 500
"""Submissions that one statement takes."""


def _by_key(t: Tables) -> sa.Select[tuple[str, str, str]]:
    c = t.task.c
    same = [c.namespace == sa.bindparam("namespace"), c.handler == sa.bindparam("handler"), c.key == sa.bindparam("key")]
    return sa.select(c.id, c.state, c.digest).where(*same)


_BY_KEY = Query(_by_key)
_BY_KEY_LOCKED = Query(lambda t: _by_key(t).with_for_update(read=True, key_share=True))
_TASK = Query(lambda t: sa.select(t.task).where(t.task.c.id == sa.bindparam("id")))
_LOCKED = Query(lambda t: sa.select(t.task).where(t.task.c.id == sa.bindparam("id")).with_for_update())


def submit(tx: Transaction, new: NewTask) -> Receipt:
    """Insert it, or answer with what is stored under its key. The later of two with one key waits for the first to commit, at most the lock timeout."""
    if _plain(new):
        if tx.insert_new(_PLAIN, [_row_of_plain(new)]) == 1:
            return Receipt(new.id, TaskState.READY, new.digest)
        return _known(tx, new)
    waits = new.delay_us > 0 or new.due_us > tx.now_us() if new.due_us else new.delay_us > 0
    if tx.insert_or_nothing(tx.t.task, _times(tx, new, waits), **_values(new, waits)):
        return Receipt(new.id, TaskState.SCHEDULED if waits else TaskState.READY, new.digest)
    return _known(tx, new)


def submit_many(tx: Transaction, news: Sequence[NewTask]) -> list[Receipt]:
    """Several, in the order of their keys so that two callers never wait for each other in a circle; receipts in the order given.

    Those that are due at once and have no times of their own take one statement together.
    """
    ordered = sorted(news, key=lambda n: (n.namespace, n.handler, n.key))
    receipts: dict[str, Receipt] = {}
    plain = [n for n in ordered if _plain(n)]
    for start in range(0, len(plain), TOGETHER):
        part = plain[start : start + TOGETHER]
        distinct = len({(n.namespace, n.handler, n.key) for n in part}) == len(part)
        if distinct and tx.insert_new(_PLAIN, [_row_of_plain(n) for n in part]) == len(part):
            receipts |= {n.id: Receipt(n.id, TaskState.READY, n.digest) for n in part}
    for new in ordered:
        if new.id not in receipts:
            receipts[new.id] = submit(tx, new)
    return [receipts[n.id] for n in news]


def is_known(tx: Transaction, new: NewTask) -> bool:
    """Whether something is stored under its key."""
    return tx.row(_BY_KEY, namespace=new.namespace, handler=new.handler, key=new.key) is not None


def _known(tx: Transaction, new: NewTask) -> Receipt:
    """What is stored under the key. Read without a lock: a caller's transaction that stays open must not hold up the task, and two repeats must not wait for each other.

    A snapshot taken before does not show it; a locking read does.
    """
    key = {"namespace": new.namespace, "handler": new.handler, "key": new.key}
    known = tx.row(_BY_KEY, **key) or tx.row(_BY_KEY_LOCKED, **key)
    if known is None:
        raise AssertionError(f"task id {new.id} exists under another key")
    if known["id"] == new.id:
        return Receipt(new.id, TaskState(known["state"]), new.digest)
    conflict = "" if known["digest"] == new.digest else known["digest"]
    return Receipt(known["id"], TaskState(known["state"]), new.digest, replayed=not conflict, conflict=conflict)


_UNBEGUN: Mapping[str, str | int | None] = {
    "cause": "", "reason": "", "fence": 0, "token": "", "session": "", "claim": "", "failures": 0, "crashes": 0, "losses": 0, "snoozes": 0, "starts": 0,
    "cancel": 0, "permit_held": 0, "permit_seq": 0, "claimed_us": 0, "started_us": 0, "settled_us": 0, "result": "", "error": "", "superseded_by": "",
    "marker": "", "error_class": "", "tokens": 0, "open_intents": 0, "rev": 0, "blocked_by": None, "amiss_us": None, "ending": None,
}  # fmt: skip
"""What every task is before anything has happened to it."""


def _given(new: NewTask) -> dict[str, Any]:
    """The columns a submission brings."""
    return {
        "id": new.id, "namespace": new.namespace, "handler": new.handler, "key": new.key, "digest": new.digest, "queue": new.queue,
        "business_key": new.business_key, "effects": new.effects.value, "policy": encoded(new.policy), "args": new.args, "priority": new.priority,
        "permit": new.permit, "ordered": int(new.ordered), "origin": new.origin, "root": new.root or new.id, "retry_of": new.retry_of, "actor": new.actor,
    }  # fmt: skip


def _values(new: NewTask, waits: bool) -> dict[str, Any]:
    """The columns that are no times."""
    state = TaskState.SCHEDULED if waits else TaskState.READY
    return {**_UNBEGUN, **_given(new), "state": state, "ready_lane": None if waits else lane(new.namespace, new.queue)}


def _times(tx: Transaction, new: NewTask, waits: bool) -> dict[str, Any]:
    """The times, by the database's clock inside the statement: a submission is one round trip. An instant long past gives no better rank than now."""
    now = tx.now()
    due: Any = new.due_us or now + new.delay_us
    available: Any = due if waits else now
    start_by: Any = due + new.start_by_us if new.start_by_us else new.expires_us
    deadline: Any = now + new.deadline_us if new.deadline_us else 0
    return {
        "rank": rank(available, new.priority), "wake_us": due if waits else None, "due_us": due, "created_us": now, "changed_us": now,
        "start_by_us": start_by, "deadline_us": deadline, "limit_us": _sooner(new, start_by, deadline),
    }  # fmt: skip


def _sooner(new: NewTask, start_by: Any, deadline: Any) -> Any:
    """Until when it has to start, of its two limits."""
    if not (new.start_by_us or new.expires_us):
        return deadline if new.deadline_us else None
    return sa.case((deadline < start_by, deadline), else_=start_by) if new.deadline_us else start_by


def _plain(new: NewTask) -> bool:
    """Due at once, without times of its own."""
    return not (new.delay_us or new.due_us or new.expires_us or new.start_by_us or new.deadline_us)


def _row_of_plain(new: NewTask) -> dict[str, Any]:
    return {**_given(new), "ready_lane": lane(new.namespace, new.queue), "earlier_us": new.priority * RANK_STEP_US}


_PLAIN = NewRows(
    lambda t: t.task,
    {**_UNBEGUN, "state": TaskState.READY.value, "wake_us": None, "start_by_us": 0, "deadline_us": 0, "limit_us": None},
    ("namespace", "handler", "queue", "ready_lane", "effects", "policy", "origin", "actor"),
    {"earlier_us": sa.BigInteger()},
    lambda now, given: {"rank": now - given["earlier_us"], "due_us": now, "created_us": now, "changed_us": now},
)


@cache
def encoded(policy: Policy) -> str:
    """A policy as text; there are as many as handlers."""
    return msgspec.json.encode(policy).decode()


def read_task(tx: Transaction, task: str) -> TaskRow | None:
    row = tx.row(_TASK, id=task)
    return None if row is None else to(TaskRow, row)


def task_of_key(tx: Transaction, namespace: str, handler: str, key: str) -> TaskRow | None:
    row = tx.row(_BY_KEY, namespace=namespace, handler=handler, key=key)
    return None if row is None else read_task(tx, row["id"])


def lock_task(tx: Transaction, task: str) -> TaskRow | None:
    """Lock its row: every decision about one task begins so. Several at once: in the order of their ids."""
    row = tx.row(_LOCKED, id=task)
    return None if row is None else to(TaskRow, row)


def lock_tasks(tx: Transaction, ids: Sequence[str], *, skip_locked: bool = False) -> dict[str, TaskRow]:
    """Lock several, in the order of their ids; those that this version can read. ``skip_locked``: but those that somebody holds now."""
    found, _ = readable(lock_rows(tx, ids, skip_locked=skip_locked))
    return {task.id: task for task in found}


def lock_rows(tx: Transaction, ids: Sequence[str], *, skip_locked: bool = False) -> list[Row]:
    """Likewise, all of them, as they are."""
    if not ids:
        return []
    t = tx.t.task
    return tx.rows(sa.select(t).where(t.c.id.in_(sorted(ids))).order_by(t.c.id).with_for_update(skip_locked=skip_locked))


def readable(rows: Sequence[Row]) -> tuple[list[TaskRow], list[Row]]:
    """Those of rows of tasks that this version can decide about, and the others: nothing is done about them here."""
    return parted(rows, _whole)


def known_here(t: Tables) -> sa.ColumnElement[bool]:
    """What those have in common that this version can read. No statement begins with it, so that what cannot be read is told of; it is for looking behind that."""
    return t.task.c.cause.in_([cause.value for cause in Cause])


def first_readable(tx: Transaction, wanted: sa.Select[Any]) -> list[TaskRow]:
    """The first tasks of a statement with a limit that this version can read, however many stand before them that it cannot."""
    found, others = readable(tx.rows(wanted))
    if others:
        behind = wanted.where(known_here(tx.t), tx.t.task.c.id.not_in([row["id"] for row in others]))
        found, _ = readable(tx.rows(behind))
    return found


def _whole(row: Row) -> TaskRow:
    """Raises UnknownFormat, also for what is kept as JSON and needed to decide."""
    task = to(TaskRow, row)
    try:
        _policy(task.policy)
        if task.ending is not None:
            msgspec.json.decode(task.ending, type=Decision)
    except msgspec.DecodeError as exc:
        raise unreadable(TaskRow, row, exc) from exc
    return task


@lru_cache(1_000)
def _policy(text: str) -> Policy:
    """There are as many as handlers."""
    return msgspec.json.decode(text, type=Policy)


def by_permit(tasks: Sequence[TaskRow]) -> list[TaskRow]:
    """In the order in which their permits are to be locked, whose rows are locked already."""
    return sorted(tasks, key=lambda t: (t.permit_id, t.rank, t.id))


def attempts(tx: Transaction, task: str) -> list[AttemptRow]:
    """Its ended attempts and what came too late, oldest first; those that this version can read."""
    t = tx.t.attempt
    rows = tx.rows(sa.select(t).where(t.c.task == task).order_by(t.c.fence, t.c.number))
    found, _ = parted(({**r, "id": f"{task}/{r['fence']}/{r['number']}"} for r in rows), lambda r: to(AttemptRow, r))
    return found


def apply(tx: Transaction, task: TaskRow, decision: Decision, now: int, *, announced: bool = True, **extra: Any) -> None:
    """Write a decision about a task whose row is locked, free what it held, and announce its end. ``announced`` off: the caller does it, for many at once."""
    waits_on = decision.ending is not None and task.state is decision.state is TaskState.READY
    if not (waits_on or may_become(task.state, decision.state)):
        raise AssertionError(f"task {task.id}: {task.state} may not become {decision.state}")
    t = tx.t.task
    after = decision.state
    keeps = bool(task.permit_held) and decision.keeps_permit
    queues_again = after is TaskState.RETRY_WAIT and not keeps
    place = rank(decision.wake_us or now, task.priority) if queues_again else task.rank
    values: dict[str, Any] = {
        "state": after,
        "cause": decision.cause,
        "reason": decision.reason[:TEXT_KEPT],
        "session": "",
        "failures": task.failures + decision.failures,
        "crashes": task.crashes + decision.crashes,
        "losses": task.losses + decision.losses,
        "snoozes": task.snoozes + decision.snoozes,
        "permit_held": int(keeps),
        "blocked_by": None,
        "ready_lane": task.lane if after is TaskState.READY else None,
        "rank": place,
        "wake_us": decision.wake_us,
        "limit_us": limit_of(task, extra.get("starts", task.starts))
        if (after is TaskState.READY or after.waiting) and not decision.ending
        else None,
        "ending": decision.ending,
        "settled_us": now if after.settled else 0,
        "changed_us": now,
        "amiss_us": task.created_us if after in AMISS else None,
        **extra,
    }
    if tx.update(t, t.c.id == task.id, t.c.state == task.state, t.c.fence == task.fence, t.c.rev == task.rev, **values) != 1:
        raise AssertionError(f"task {task.id} changed under its lock")
    if after.settled and announced:
        record(tx, [task.id], now)
    if task.permit_held and not keeps:
        release(tx, task.permit_id)
    elif task.ordered and task.state is TaskState.READY and not task.permit_held:
        refill(tx, task.permit_id)  # it may have been first in its line, and others wait behind it


def keep_attempt(
    tx: Transaction, task: str, fence: int, session: str, outcome: str, decision: Decision, started_us: int, now: int, *, late: bool = False
) -> None:
    """Evidence of an attempt: its end, or what it reported after another end was settled. A repeat of the same report is kept once."""
    t = tx.t.attempt
    number = 0
    if late:
        known = tx.rows(sa.select(t.c.number, t.c.late, t.c.outcome, t.c.detail).where(t.c.task == task, t.c.fence == fence))
        number = max((int(r["number"]) for r in known), default=0) + 1
        said = (1, outcome, decision.reason[:TEXT_KEPT])
        if number > LATE_KEPT or any((r["late"], r["outcome"], r["detail"]) == said for r in known):
            return  # a reporter that repeats itself tells nothing new
    tx.insert_or_nothing(
        t, task=task, fence=fence, number=number, session=session, outcome=outcome, cause=decision.cause, detail=decision.reason[:TEXT_KEPT],
        late=int(late), started_us=started_us, ended_us=now,
    )  # fmt: skip
