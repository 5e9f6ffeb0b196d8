"""Statements on intents: what is known of calls that handlers make to the outside.

Each locks the row of the task whose attempt opened the intent, then the intent, and keeps ``open_intents`` of that task: whatever ends or cancels a task decides by its own row.
Each may be repeated after a lost answer: it names the opening. What must never happen here: an intent opened by an attempt that is not the valid one; a recorded outcome that is
written over; a call that is taken for not made because somebody else's was not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.effects import IntentId, IntentRow, IntentState, KnownCall, kept, may_open, on_denial, on_outcome
from .database import Transaction
from .rows import to
from .tasks import lock_task

Call = tuple[str, str]
"""Name and key, within one root."""


class Attempt(msgspec.Struct, frozen=True):
    """Who acts."""

    task: str
    fence: int
    token: str

    def __str__(self) -> str:
        return f"attempt {self.fence} of {self.task}"


def open_intent(tx: Transaction, attempt: Attempt, intent: IntentId, opening: str) -> IntentRow | None:
    """Write that a call is about to be made; what is stored then: this ``opening``, or what is known of the call already.

    None: the attempt is not the valid one, and nothing was written.
    """
    if not _valid(tx, attempt):
        return None
    row = _read(tx, intent)
    t, now = tx.t.intent, tx.now_us()
    opened: dict[str, Any] = {
        "state": IntentState.OPEN, "task": attempt.task, "fence": attempt.fence, "opening": opening, "detail": "", "closed_by": "", "opened_us": now,
        "closed_us": 0,
    }  # fmt: skip
    if row is None:
        tx.insert_or_nothing(
            t, **_key(intent), idempotency_key=intent.idempotency_key, calls=1, result=None, rev=0, **opened
        )  # its task is locked: nobody else opens it
    else:
        row = _locked(tx, intent)
        if row is not None and may_open(row):
            tx.update(t, *_is(tx, intent), t.c.rev == row.rev, calls=row.calls + 1, **opened)
    _count(tx, attempt.task)
    return _read(tx, intent)


def record(tx: Transaction, intent: IntentId, result: str | None, detail: str, who: str) -> IntentRow | None:
    """The call happened, with this outcome (None: one that cannot be stored, as ``detail`` says). What is stored now; None: its task is forgotten.

    Whoever reports it, under whatever fence: it is a fact about the outside. The first outcome stays.
    """
    row = _held(tx, intent)
    if row is None:
        return None
    said = on_outcome(row, result, who)
    t = tx.t.intent
    if said.state is not None:
        values = {"state": said.state, "result": result, "detail": kept(detail), "closed_by": who, "closed_us": tx.now_us()}
        tx.update(t, *_is(tx, intent), t.c.rev == row.rev, **values)
        _count(tx, row.task)
    elif said.detail is not None and said.detail != row.detail:
        tx.update(t, *_is(tx, intent), t.c.rev == row.rev, detail=said.detail)
    return _read(tx, intent)


def deny(tx: Transaction, intent: IntentId, opening: str, detail: str, who: str, attempt: Attempt | None = None) -> IntentRow | None:
    """The call of this opening certainly did not happen; what is stored now. ``attempt``: who says so, if it is not the one that opened it: None when that is not the valid one."""
    if attempt is not None and not _valid(tx, attempt):
        return None
    row = _held(tx, intent)
    if row is None or not on_denial(row, opening):
        return row
    t = tx.t.intent
    values = {"state": IntentState.NOT_DONE, "detail": kept(detail), "closed_by": who, "closed_us": tx.now_us()}
    tx.update(t, *_is(tx, intent), t.c.rev == row.rev, **values)
    _count(tx, row.task)
    return _read(tx, intent)


def write_known(tx: Transaction, intent: IntentId, call: KnownCall) -> IntentRow | None:
    """What the attempt that made a call knows of it, whatever became of the attempt; what is stored now, None: its task is forgotten."""
    if call.happened:
        return record(tx, intent, call.result, call.detail, call.who)
    return deny(tx, intent, call.opening, call.detail, call.who)


def note(tx: Transaction, intent: IntentId, opening: str, detail: str) -> bool:
    """Keep what is known of a call that is in doubt; False: it is not open any more."""
    t = tx.t.intent
    return tx.update(t, *_is(tx, intent), t.c.state == IntentState.OPEN, t.c.opening == opening, detail=kept(detail)) == 1


def of_root(tx: Transaction, root: str) -> list[IntentRow]:
    """All of a task and of those that do it again, in the order they were opened in last."""
    t = tx.t.intent
    return [to(IntentRow, r) for r in tx.rows(sa.select(t).where(t.c.root == root).order_by(t.c.opened_us, t.c.name, t.c.key))]


def without_outcome(tx: Transaction, root: str) -> list[IntentRow]:
    """Those whose outcome a person can still tell."""
    return [row for row in of_root(tx, root) if row.state is not IntentState.DONE]


def close_reviewed(tx: Transaction, there: Sequence[IntentRow], *, done: bool, known: Mapping[Call, str], who: str, said: str) -> None:
    """Close what is open of a task that a person has decided, its row being locked: done or not done as a whole, ``known`` calls with their encoded outcomes."""
    for row in there:
        result = known.get((row.name, row.key))
        detail = "; ".join(t for t in (row.detail, said) if t)
        if result is not None or (row.open and done):
            record(tx, row.id, result, detail, who)
        elif row.open:
            deny(tx, row.id, row.opening, detail, who)


def forget(tx: Transaction, roots: Sequence[str]) -> int:
    """Delete the intents of tasks that are forgotten: the first one goes last."""
    t = tx.t.intent
    return tx.delete(t, t.c.root.in_(sorted(roots)))


def _valid(tx: Transaction, attempt: Attempt) -> bool:
    """Whether it is the valid one, its task's row being locked from now on."""
    task = lock_task(tx, attempt.task)
    return task is not None and task.state.held and (task.fence, task.token) == (attempt.fence, attempt.token)


def _key(intent: IntentId) -> dict[str, Any]:
    return {"root": intent.root, "name": intent.name, "key": intent.key}


def _is(tx: Transaction, intent: IntentId) -> list[Any]:
    t = tx.t.intent
    return [t.c.root == intent.root, t.c.name == intent.name, t.c.key == intent.key]


def _read(tx: Transaction, intent: IntentId) -> IntentRow | None:
    row = tx.row(sa.select(tx.t.intent).where(*_is(tx, intent)))
    return None if row is None else to(IntentRow, row)


def _locked(tx: Transaction, intent: IntentId) -> IntentRow | None:
    row = tx.row(sa.select(tx.t.intent).where(*_is(tx, intent)).with_for_update())
    return None if row is None else to(IntentRow, row)


def _held(tx: Transaction, intent: IntentId) -> IntentRow | None:
    """It and the task whose attempt opened it, locked in the order task, intent; None: there is none."""
    row = _read(tx, intent)
    while row is not None:
        lock_task(tx, row.task)
        now = _locked(tx, intent)
        if now is None or now.task == row.task:
            return now
        row = now  # a linked task has opened it meanwhile
    return None


def _count(tx: Transaction, task: str) -> None:
    """Have the task's row say how many are open; whoever read it before looks again."""
    i, t = tx.t.intent, tx.t.task
    root = sa.select(t.c.root).where(t.c.id == task).scalar_subquery()
    row = tx.row(sa.select(sa.func.count().label("n")).where(i.c.root == root, i.c.task == task, i.c.state == IntentState.OPEN))
    assert row is not None
    tx.update(t, t.c.id == task, t.c.open_intents != row["n"], open_intents=row["n"])
