"""Statements that end attempts: settle what a worker reports, take back what a lost session held, cancel, decide reviews.

Every write names the task's fence and claim token. What must never happen here: a stale attempt that changes anything but evidence; a write without an answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.decisions import Decision, careful, on_cancel, on_end
from ..durable.outcomes import Absent, AnyOutcome, Lost, Raised, Succeeded, Unfit, Unstarted
from ..durable.records import NewTask, Policy, Receipt, TaskRow
from ..durable.states import HELD, Cause, TaskState
from ..errors import StoreError
from ..states import NodeState
from . import events, gates, intents
from .columns import among, not_empty
from .database import DialectQuery, Transaction
from .rows import Row
from .tables import Tables
from .tasks import TEXT_KEPT, apply, by_permit, keep_attempt, known_here, lock_rows, lock_task, readable, submit


class Answer(enum.StrEnum):
    """What a guarded write came to."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """This very attempt has been settled already."""
    STALE = "stale"
    """Another attempt, or another end, was faster: the caller stops; what it reported is kept as evidence."""
    UNKNOWN = "unknown"
    """There is no such task."""


ERROR_CLASS_KEPT = 200
"""Characters of an exception's class name."""
_NO_CALLS: Mapping[intents.Call, str] = MappingProxyType({})
_BEST = list(Answer)


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one attempt, as its worker reports it. ``submits``: tasks it asked for, which come in with it or not at all."""

    task: str
    fence: int
    token: str
    outcome: AnyOutcome
    submits: tuple[NewTask, ...] = ()
    chance: float = 0.0


def _succeed(t: Tables, dialect: str) -> sa.Update:
    c = t.task.c
    folded = c.state == TaskState.DISPATCHED  # held ahead, and begun without a write of its own
    values = {
        "starts": sa.case((folded, c.starts + 1), else_=c.starts), "started_us": sa.case((folded, c.claimed_us), else_=c.started_us),
        "state": TaskState.SUCCEEDED, "cause": "", "reason": "", "session": "", "ending": None, "result": sa.bindparam("value"), "settled_us": sa.bindparam("now"),
        "changed_us": sa.bindparam("now"), "rev": c.rev + 1,
    }  # fmt: skip
    where = [
        among(c.id, "ids", dialect), c.token == sa.bindparam("claim_token"), c.fence == sa.bindparam("claim_fence"),
        c.state.in_((TaskState.DISPATCHED, TaskState.RUNNING)), c.permit_held == 0,
        c.open_intents == 0,
    ]  # fmt: skip
    return sa.update(t.task).where(*where).values(values)


_SUCCEED = DialectQuery(_succeed)


def settle(tx: Transaction, settlements: Sequence[Settlement]) -> dict[str, Answer]:
    """Write the ends of attempts; an answer for each task, the best if several of its attempts are reported. Plain successes of one claim with one result take one statement."""
    now, heard = events.clock(tx)
    answers: dict[str, Answer] = {}
    plain: dict[tuple[str, int, str], list[Settlement]] = {}
    single: list[Settlement] = []
    for s in settlements:
        if isinstance(s.outcome, Succeeded) and not s.submits:
            plain.setdefault((s.token, s.fence, s.outcome.result), []).append(s)
        else:
            single.append(s)
    for (token, fence, value), group in plain.items():
        ids = [s.task for s in group]
        if tx.changed(_SUCCEED, ids=ids, claim_token=token, claim_fence=fence, value=value, now=now) == len(set(ids)):
            answers |= dict.fromkeys(ids, Answer.APPLIED)
        else:
            single += group  # some were not as expected: each by itself
    reported: dict[str, list[Settlement]] = {}
    for s in single:
        reported.setdefault(s.task, []).append(s)
    unstarted: list[TaskRow] = []
    there, others = readable(lock_rows(tx, list(reported)))
    answers |= {row["id"]: _of_unreadable(row, reported[row["id"]]) for row in others}
    for task in by_permit(there):
        unstarted += [task for s in reported[task.id] if isinstance(s.outcome, Unstarted) and _mine(task, s) and task.state.held]
        answers[task.id] = min([*_settle_reports(tx, task, reported[task.id], now), answers.get(task.id, Answer.UNKNOWN)], key=_BEST.index)
    gates.put_back(tx, unstarted)
    if heard:
        events.record(tx, sorted(t for t, answer in answers.items() if answer is Answer.APPLIED), now)
    return {s.task: answers.get(s.task, Answer.UNKNOWN) for s in settlements}


def _of_unreadable(row: Row, reports: Sequence[Settlement]) -> Answer:
    """A newer version has written it: nothing is decided here. Raises StoreError for an attempt that is still the valid one: its end is kept until it can be written."""
    if row["state"] in HELD and any((s.token, s.fence) == (row["token"], row["fence"]) for s in reports):
        raise StoreError(
            f"task {row['id']} holds what this version of Millstream does not know: upgrade this process to the version that wrote it"
        )
    return Answer.STALE


def _never_began(task: TaskRow) -> bool:
    """Whether that is certain although its worker did not say so: others of a claim may begin without a write of their own."""
    return task.state is TaskState.DISPATCHED and careful(task)


def _mine(task: TaskRow, s: Settlement) -> bool:
    """Whether a report is of the attempt that is valid."""
    return task.fence == s.fence and task.token == s.token


def _settle_reports(tx: Transaction, task: TaskRow, reports: list[Settlement], now: int) -> list[Answer]:
    """All that one batch says of a task: a worker that lost it and got it again may report both attempts. The valid one comes first."""
    answers: list[Answer] = []
    for s in sorted(reports, key=lambda s: (s.fence, s.token) != (task.fence, task.token)):
        row = lock_task(tx, task.id) if answers else task
        assert row is not None
        answers.append(_settle_one(tx, row, s, now))
    return answers


def _settle_one(tx: Transaction, task: TaskRow, s: Settlement, now: int) -> Answer:
    mine = _mine(task, s)
    if mine and task.state.held:
        return _apply_end(tx, task, s, now)
    name = type(s.outcome).__name__
    if mine and isinstance(s.outcome, Succeeded) and task.state is TaskState.SUCCEEDED and task.result == s.outcome.result:
        return Answer.APPLIED if task.settled_us == now else Answer.DUPLICATE  # the statement for all may have written it just now
    kept = _kept(tx, task.id, s.fence)
    if kept == name or (kept == "Unfit" and name == "Succeeded"):
        return Answer.DUPLICATE  # the next attempt may have begun since
    if not isinstance(s.outcome, Unstarted):
        late = Decision(state=task.state, cause=Cause.NONE, reason=_said(s.outcome))
        keep_attempt(tx, task.id, s.fence, task.session, name, late, task.started_us, now, late=True)
    return Answer.STALE


def _said(outcome: AnyOutcome) -> str:
    return msgspec.json.encode(outcome).decode()


def _kept(tx: Transaction, task: str, fence: int) -> str | None:
    t = tx.t.attempt
    row = tx.row(sa.select(t.c.outcome).where(t.c.task == task, t.c.fence == fence, t.c.number == 0))
    return None if row is None else str(row["outcome"])


def _apply_end(tx: Transaction, task: TaskRow, s: Settlement, now: int) -> Answer:
    policy = msgspec.json.decode(task.policy, type=Policy)
    outcome = s.outcome
    if isinstance(outcome, Succeeded) and s.submits and not task.open_intents:
        outcome = _continued(tx, s.submits) or outcome
    decision = on_end(task, policy, outcome, now, s.chance)
    extra: dict[str, Any] = {}
    if isinstance(outcome, Succeeded) and decision.state is TaskState.SUCCEEDED:
        extra["result"] = outcome.result
    elif decision.state in (TaskState.FAILED, TaskState.UNKNOWN):
        extra["error"] = decision.reason[:TEXT_KEPT]
    if isinstance(outcome, Raised):
        extra["error_class"] = outcome.error[:ERROR_CLASS_KEPT]
    if isinstance(outcome, Unstarted):
        extra["starts"] = task.starts - int(task.state is TaskState.RUNNING)  # its start was folded into the claim and never came about
    elif task.state is TaskState.DISPATCHED:
        extra["starts"] = task.starts + 1  # held ahead, and begun without a write of its own
    apply(tx, task, decision, now, announced=False, **extra)
    if isinstance(outcome, Succeeded) and decision.state is not TaskState.SUCCEEDED:
        said = msgspec.structs.replace(decision, reason=_said(outcome))  # what it returned is offered, and decides nothing
        keep_attempt(tx, task.id, task.fence, task.session, "Succeeded", said, task.started_us, now)
    elif not isinstance(outcome, Succeeded | Unstarted | Absent):
        keep_attempt(tx, task.id, task.fence, task.session, type(outcome).__name__, decision, task.started_us, now)
    return Answer.APPLIED


def _continued(tx: Transaction, submits: Sequence[NewTask]) -> Unfit | None:
    """Bring in what an attempt asked for, all of it or nothing; why not."""
    receipts = [(new, submit(tx, new)) for new in sorted(submits, key=lambda n: (n.namespace, n.handler, n.key))]
    refused = [new for new, receipt in receipts if receipt.conflict]
    if not refused:
        return None
    t = tx.t.task
    tx.delete(t, t.c.id.in_([r.task for _, r in receipts if not (r.replayed or r.conflict)]))  # inserted in this transaction
    known = ", ".join(f"{new.handler} {new.key!r}" for new in refused)
    return Unfit(f"what it submitted is known under its key with other content: {known}")


def settle_success(tx: Transaction, s: Settlement) -> Answer | Unfit:
    """Write the success of one attempt as the last statement of its handler's own transaction. Whoever gets another answer than Applied must not commit."""
    assert isinstance(s.outcome, Succeeded)
    now, heard = events.clock(tx)
    one = {"ids": [s.task], "claim_token": s.token, "claim_fence": s.fence, "value": s.outcome.result, "now": now}
    if s.submits or tx.changed(_SUCCEED, **one) != 1:
        task = lock_task(tx, s.task)
        if task is None or (task.fence, task.token) != (s.fence, s.token) or not task.state.held:
            return Answer.STALE
        if task.open_intents:
            return Unfit("a call by ctx.external is open: its outcome has to be known before the task can succeed")
        unfit = _continued(tx, s.submits)
        if unfit is not None:
            return unfit
        _apply_end(tx, task, msgspec.structs.replace(s, submits=()), now)
    if heard:
        events.record(tx, [s.task], now)
    return Answer.APPLIED


def mark(tx: Transaction, task: str, fence: int, token: str, database: str) -> bool | str:
    """Record, before it goes there, that an attempt does its work in another database: True. False: it is not the valid one; or the database that was recorded before.

    From now on no end is written but by a worker that has raised the marker's fence there.
    """
    t, now = tx.t.task, tx.now_us()
    folded = t.c.state == TaskState.DISPATCHED
    begun = {
        "state": TaskState.RUNNING,
        "starts": sa.case((folded, t.c.starts + 1), else_=t.c.starts),
        "started_us": sa.case((folded, now), else_=t.c.started_us),
    }
    mine = [t.c.id == task, t.c.fence == fence, t.c.token == token, t.c.state.in_(tuple(HELD))]
    if tx.update(t, *mine, t.c.marker.in_(("", database)), marker=database, changed_us=now, **begun):
        return True
    row = tx.row(sa.select(t.c.marker).where(*mine))
    return False if row is None else str(row["marker"])


def committed(tx: Transaction, attempts: Mapping[str, int]) -> frozenset[str]:
    """Of these attempts (task → fence), the tasks that ended by success under that fence: their handlers committed it."""
    t = tx.t.task
    found = tx.rows(sa.select(t.c.id, t.c.fence).where(t.c.id.in_(sorted(attempts)), t.c.state == TaskState.SUCCEEDED))
    return frozenset(r["id"] for r in found if int(r["fence"]) == attempts[r["id"]])


# -- cancelling


def cancel(tx: Transaction, task_id: str) -> TaskState | None:
    """Ask for the end of a task: at once if it does not run; else the flag is set and the first end wins. Its state afterwards, None: no such task."""
    task = lock_task(tx, task_id)
    if task is None:
        return None
    cancel_locked(tx, task, tx.now_us())
    decision = on_cancel(task)
    return task.state if decision is None else decision.state


def cancel_locked(tx: Transaction, task: TaskRow, now: int) -> bool:
    """Likewise for one whose row is locked; whether anything was to do."""
    decision = on_cancel(task)
    if decision is not None:
        apply(tx, task, decision, now)
        gates.put_back(tx, [task] if _never_began(task) else [])
        return True
    if not task.state.held or task.cancel:
        return False
    t = tx.t.task
    return tx.update(t, t.c.id == task.id, t.c.state == task.state, t.c.fence == task.fence, cancel=1, changed_us=now) == 1


def flags(tx: Transaction, session: str) -> dict[str, tuple[int, bool]]:
    """What a session holds: task → (fence, whether its end is asked for). A heartbeat reads it; it locks nothing."""
    t = tx.t.task
    held = sa.select(t.c.id, t.c.fence, t.c.cancel).where(t.c.session == session, not_empty(t.c.session), t.c.state.in_(tuple(HELD)))
    return {r["id"]: (int(r["fence"]), bool(r["cancel"])) for r in tx.rows(held)}


# -- lost sessions


def holding_sessions(tx: Transaction) -> list[str]:
    """Sessions that hold tasks, live or not: one short index look-up for each."""
    t = tx.t.task
    found: list[str] = []
    after = ""
    while True:
        row = tx.row(sa.select(sa.func.min(t.c.session).label("session")).where(t.c.session > after, not_empty(t.c.session)))
        if row is None or row["session"] is None:
            return found
        after = row["session"]
        found.append(after)


def expire_session(tx: Transaction, session: str, margin_us: int) -> bool:
    """Take the lease of a session away whose time is over by ``margin_us``; whether it holds none now. Locked against its claims."""
    n = tx.t.node
    row = tx.row(sa.select(n).where(n.c.id == session).with_for_update())
    if row is None or row["state"] == NodeState.GONE:
        return True
    if row["expires_us"] + margin_us > tx.now_us():
        return False
    tx.update(n, n.c.id == session, n.c.rev == row["rev"], state=NodeState.GONE)
    return True


def take_back(tx: Transaction, session: str, chance: Callable[[], float], limit: int) -> int:
    """End attempts of a session that has no lease, each by its declared effects; how many.

    One whose row is held is passed over, and looked at by the next sweep: its handler may be committing it, or stand still in the middle of that until its session is cut.
    """
    t = tx.t.task
    now = tx.now_us()
    held = sa.select(t.c.id).where(t.c.session == session, not_empty(t.c.session), t.c.state.in_(tuple(HELD))).limit(limit)
    # Found, then locked by id: one statement for both tempts a planner to walk the whole table in the order of ids.
    ids = [r["id"] for r in tx.rows(held)]
    there, others = readable(lock_rows(tx, ids, skip_locked=True))
    if others:  # behind those that cannot be read
        ids = [r["id"] for r in tx.rows(held.where(t.c.id.not_in([row["id"] for row in others]), known_here(tx.t)))]
        there, _ = readable(lock_rows(tx, ids, skip_locked=True))
    lost = by_permit([row for row in there if row.session == session])
    for task in lost:
        outcome = Lost(started=task.state is TaskState.RUNNING)
        decision = on_end(task, msgspec.json.decode(task.policy, type=Policy), outcome, now, chance())
        apply(tx, task, decision, now)
        keep_attempt(tx, task.id, task.fence, session, "Lost", decision, task.started_us, now)
    gates.put_back(tx, [task for task in lost if _never_began(task)])
    return len(lost)


# -- reviews


class ReviewRefused(enum.StrEnum):
    """Why a review's decision was not taken."""

    GONE = "there is no such task"
    MOVED = "the task has changed since it was read"
    NOT_IN_REVIEW = "the task is not in review"
    NO_CALL = "it has no call of that name and key whose outcome is not known"
    TAKEN = "the key of the task that is to follow it is known with other content"


def review(
    tx: Transaction,
    task_id: str,
    rev: int,
    *,
    done: bool,
    result: str,
    reason: str,
    actor: str,
    successor: NewTask | None = None,
    known: Mapping[intents.Call, str] = _NO_CALLS,
) -> ReviewRefused | Receipt | None:
    """A person's decision on an UNKNOWN task, compare-and-set on ``rev``. ``successor``: the linked task that does it again, or the one that makes up for it.

    None or the new task's receipt: decided. Its open intents are closed with it, as done, not done, or made up for; ``known``: the encoded outcomes of calls that were made
    although the task is not done.
    """
    task = lock_task(tx, task_id)
    if task is None:
        return ReviewRefused.GONE
    said = f"{actor}: {reason}"
    state = TaskState.SUCCEEDED if done else TaskState.FAILED
    decided = (task.state, task.cause, task.reason, task.rev, bool(task.superseded_by))
    if decided == (state, Cause.REVIEWED, said[:TEXT_KEPT], rev + 1, successor is not None) and task.result == (result if done else ""):
        return None if successor is None else _followed(tx, successor)  # this very decision, whose answer was lost
    if task.state is not TaskState.UNKNOWN:
        return ReviewRefused.NOT_IN_REVIEW
    if task.rev != rev:
        return ReviewRefused.MOVED
    there = intents.without_outcome(tx, task.root)
    if set(known) - {(row.name, row.key) for row in there}:
        return ReviewRefused.NO_CALL
    receipt: Receipt | ReviewRefused | None = None
    extra: dict[str, Any] = {"open_intents": 0, **({"result": result} if done else {"error": reason[:TEXT_KEPT]})}
    if successor is not None:
        receipt = _followed(tx, successor)
        if isinstance(receipt, ReviewRefused):
            return receipt
        extra["superseded_by"] = receipt.task
    now = tx.now_us()
    decision = Decision(state=state, cause=Cause.REVIEWED, reason=said)
    apply(tx, task, decision, now, **extra)
    compensated = f"made up for by {successor.id}" if successor is not None and not successor.retry_of else ""
    intents.close_reviewed(tx, there, done=done, known=known, who=f"review: {actor}"[:200], said=compensated)
    keep_attempt(tx, task.id, task.fence, actor[:64], "Reviewed", decision, task.started_us, now, late=True)
    return receipt


def _followed(tx: Transaction, successor: NewTask) -> Receipt | ReviewRefused:
    receipt = submit(tx, successor)
    return ReviewRefused.TAKEN if receipt.conflict else receipt
