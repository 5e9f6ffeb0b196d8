"""Statements that fire schedules: what is due, by hand, backfilled; who runs still; what is kept of it.

A fire is consumed by compare-and-set in the transaction that inserts its row, its task and the instant after it. Whatever is decided about overlapping runs is decided under the
schedule's row lock; task rows are locked after it, by id. What must never happen here: a fire with two tasks; an instant passed over without a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable import schedules as s
from ..durable.records import NewTask
from ..durable.schedules import Definition, FireKind, FireRow, FireState, Overlap, Running, ScheduleRow, ScheduleState
from ..durable.states import SETTLED, TaskState
from ..errors import TaskConflict
from . import schedules, settling, tasks
from .database import Database, Transaction
from .rows import to

REASON_KEPT = 2_000
SUPERSEDED_HOPS = 20
CHUNK = 500


class Turn:
    """A schedule whose row is locked, while fires of it are decided. Ends with :meth:`close`, which writes the row."""

    def __init__(self, tx: Transaction, row: ScheduleRow, definition: Definition, new_id: Callable[[], str]) -> None:
        self._tx = tx
        self.row = row
        self.rules = definition.rules
        self._request = definition.request
        self._new_id = new_id
        self.now = tx.now_us()
        self._running: list[Running] | None = None
        self._waiting = row.waiting
        self._tail = (row.tail_us, row.tail_state)
        self._counted = {"fired": 0, "skipped": 0, "missed": 0, "late": 0}
        self.queues: set[str] = set()
        """Queues that tasks were submitted to."""

    def missed(self, part: s.Missed, reason: str) -> None:
        """Record instants that are not run."""
        self._counted["missed"] += part.count
        self._not_run(FireState.MISSED, part, reason)

    def enter(self, kind: FireKind, request: str, slot: int, instant: int, actor: str, *, late: bool = False) -> None:
        """A fire's time has come: it starts, waits, or is skipped. One that is known already stays what it is."""
        entry = s.Entry(begin=s.Begin.START) if kind is FireKind.BACKFILL else self._entry()
        if entry.begin is s.Begin.SKIP and kind is FireKind.AUTO:
            self._counted["skipped"] += 1
            self._not_run(FireState.SKIPPED, s.Missed(instant, instant, 1), entry.reason)
            return
        if entry.replaces and self._waiting is not None:
            self._settle_waiting(FireState.SKIPPED, "a newer fire took its place", "")
        state = {s.Begin.START: FireState.FIRED, s.Begin.QUEUE: FireState.QUEUED, s.Begin.SKIP: FireState.SKIPPED}[entry.begin]
        started = state is FireState.FIRED
        task = self._start(self._task(kind, request, slot, instant, actor)) if started else ""
        inserted = self._tx.insert_or_nothing(
            self._tx.t.fire, namespace=self.row.namespace, schedule=self.row.name, kind=kind, request=request, slot=slot, instant_us=instant,
            until_us=instant, times=1, version=self.row.version, state=state, reason=entry.reason[:REASON_KEPT], task=task, unsettled=int(started),
            late=int(late), actor=actor, recorded_us=self.now, rev=0,
        )  # fmt: skip
        if not inserted:
            return
        self._tail = (0, "")
        self._counted["late"] += late
        self._counted["fired"] += started
        self._counted["skipped"] += state is FireState.SKIPPED
        if state is FireState.QUEUED:
            self._waiting = _handle(kind, request, slot)

    def release(self) -> bool:
        """Start what waits, if nothing runs any more; whether it did."""
        if self._waiting is None or self._still_running():
            return False
        fire = read(self._tx, self.row.namespace, self.row.name, *_identity(self._waiting))
        if fire is None or fire.state is not FireState.QUEUED:
            self._waiting = None
            return False
        task = self._start(self._task(fire.kind, fire.request, fire.slot, fire.instant_us, fire.actor))
        self._settle_waiting(FireState.FIRED, "", task)
        self._counted["fired"] += 1
        return True

    def close(self, **values: Any) -> None:
        """Write the schedule's row."""
        added = {name: getattr(self.row, name) + n for name, n in self._counted.items()}
        kept = {"waiting": self._waiting, "tail_us": self._tail[0], "tail_state": self._tail[1]}
        schedules.write(self._tx, self.row, self.now, **added, **kept, **values)

    def _entry(self) -> s.Entry:
        """Whether it may start now; asks for the end of earlier runs where that is the rule."""
        if self.rules.overlap is Overlap.ALLOW:
            return s.on_overlap(self.rules, (), False)
        if self.rules.overlap is Overlap.CANCEL_PREVIOUS:
            self._cancel([r.task for r in self._still_running() if r.state is not TaskState.UNKNOWN])
        else:
            self.release()
        return s.on_overlap(self.rules, self._still_running(), self._waiting is not None)

    def _still_running(self) -> list[Running]:
        if self._running is None:
            self._running = running(self._tx, self.row.namespace, self.row.name)
        return self._running

    def _cancel(self, ids: list[str]) -> None:
        for task in tasks.by_permit(list(tasks.lock_tasks(self._tx, ids).values())):
            settling.cancel(self._tx, task.id)
        self._running = None

    def _task(self, kind: FireKind, request: str, slot: int, instant: int, actor: str) -> NewTask:
        name = self.row.name
        return msgspec.structs.replace(
            self._request,
            id=self._new_id(),
            key=s.key(name, kind, request, slot),
            origin=s.origin(name, self.row.version, instant),
            actor=actor,
        )

    def _start(self, new: NewTask) -> str:
        """Submit a fire's task; its id. A fire whose row was forgotten has its task still, under its key."""
        receipt = tasks.submit(self._tx, new)
        if receipt.conflict:
            raise TaskConflict(
                f"key {new.key!r} of handler {new.handler!r} is taken by task {receipt.task}, which is none of this schedule's"
            )
        self.queues.add(new.queue)
        if self._running is not None and not receipt.state.settled:
            self._running.append(Running(receipt.task, receipt.state))
        return receipt.task

    def _settle_waiting(self, state: FireState, reason: str, task: str) -> None:
        assert self._waiting is not None
        kind, request, slot = _identity(self._waiting)
        t = self._tx.t.fire
        values = {"state": state, "reason": reason[:REASON_KEPT], "task": task, "unsettled": int(bool(task)), "recorded_us": self.now}
        where = _is(t, self.row.namespace, self.row.name, kind, request, slot)
        if self._tx.update(t, *where, t.c.state == FireState.QUEUED, **values) != 1:
            raise AssertionError(f"schedule {self.row.name!r}: the fire that waits changed under the schedule's lock")
        self._counted["skipped"] += state is FireState.SKIPPED
        self._waiting = None

    def _not_run(self, state: FireState, part: s.Missed, reason: str) -> None:
        """One row for those in a row: thousands of missed instants are one row with their number and range."""
        t = self._tx.t.fire
        slot, kind_of_tail = self._tail
        if kind_of_tail == state:
            where = (*_is(t, self.row.namespace, self.row.name, FireKind.AUTO, "", slot), t.c.state == state, t.c.until_us < part.first)
            if self._tx.update(t, *where, until_us=part.last, times=t.c.times + part.count, recorded_us=self.now):
                return
        self._tx.insert_or_nothing(
            t, namespace=self.row.namespace, schedule=self.row.name, kind=FireKind.AUTO, request="", slot=part.first, instant_us=part.first,
            until_us=part.last, times=part.count, version=self.row.version, state=state, reason=reason[:REASON_KEPT], task="", unsettled=0, late=0, actor="",
            recorded_us=self.now, rev=0,
        )  # fmt: skip
        self._tail = (part.first, state)


def turn(tx: Transaction, namespace: str, name: str, new_id: Callable[[], str]) -> Turn | None:
    """Lock a schedule to decide about its fires; None: there is none."""
    row = schedules.lock(tx, namespace, name)
    if row is None or row.state is ScheduleState.DELETED:
        return None
    return Turn(tx, row, schedules.defined(tx, row), new_id)


class Advanced(msgspec.Struct, frozen=True):
    """``queues``: where tasks were submitted."""

    queues: tuple[str, ...] = ()


def advance(db: Database, namespace: str, name: str, new_id: Callable[[], str], *, early: bool = False) -> Advanced | None:
    """Decide and carry out the oldest part of what is due; None: nothing is, or somebody else was faster. ``early``: a held schedule is not left alone first.

    Decided outside of the transaction that writes it, which does so only while the row is the one that was decided about.
    """

    def look(tx: Transaction) -> tuple[ScheduleRow, Definition, int] | None:
        row = schedules.read(tx, namespace, name)
        now = tx.now_us()
        if row is None or row.due_us is None or (row.due_us > now and not early):
            return None
        return row, schedules.defined(tx, row), now

    found = db.read(look)
    if found is None:
        return None
    row, definition, now = found
    decided = s.due(row, definition, now)
    return db.run(lambda tx: _carry_out(tx, row, definition, decided, new_id))


def _carry_out(
    tx: Transaction, row: ScheduleRow, definition: Definition, decided: s.Due | None, new_id: Callable[[], str]
) -> Advanced | None:
    locked = schedules.lock(tx, row.namespace, row.name)
    if locked is None or locked.rev != row.rev:
        return None
    t = Turn(tx, locked, definition, new_id)
    following, last = row.next_us, row.last_us
    if decided is not None:
        following = decided.next_us
        if decided.missed is not None:
            last = decided.missed.last
            t.missed(decided.missed, f"later than its tolerance; misfire policy {t.rules.misfire}")
        for instant in decided.runs:
            last = instant
            t.enter(FireKind.AUTO, "", instant, instant, f"schedule:{row.name}", late=s.is_late(instant, t.rules, t.now))
    state = ScheduleState.ENDED if following is None else ScheduleState.ACTIVE
    due = s.due_us(row.namespace, row.name, following, t.rules)
    t.close(state=state, reason="", next_us=following, due_us=due, last_us=last)
    return Advanced(tuple(sorted(t.queues)))


def release(tx: Transaction, namespace: str, name: str, new_id: Callable[[], str]) -> Advanced | None:
    """Start a schedule's queued fire if its runs are over."""
    t = turn(tx, namespace, name, new_id)
    if t is None or t.row.state is ScheduleState.PAUSED or t.row.waiting is None:
        return None
    t.release()
    t.close()
    return Advanced(tuple(t.queues))


def trigger(tx: Transaction, namespace: str, name: str, request: str, actor: str, new_id: Callable[[], str]) -> FireRow | None:
    """Fire once, now, also while it is paused. The same request again is the same fire. None: there is no such schedule."""
    t = turn(tx, namespace, name, new_id)
    if t is None:
        return None
    if read(tx, namespace, name, FireKind.MANUAL, request, 0) is None:
        t.enter(FireKind.MANUAL, request, 0, t.now, actor)
        t.close()
    return read(tx, namespace, name, FireKind.MANUAL, request, 0)


def backfill(
    tx: Transaction, namespace: str, name: str, request: str, instants: Iterable[int], actor: str, new_id: Callable[[], str]
) -> tuple[str, ...] | None:
    """Fire past instants, whatever runs; those known of this request stay. Queues that tasks were submitted to; None: there is no such schedule."""
    t = turn(tx, namespace, name, new_id)
    if t is None:
        return None
    for instant in instants:
        t.enter(FireKind.BACKFILL, request, instant, instant, actor)
    t.close()
    return tuple(t.queues)


# -- reading


def read(tx: Transaction, namespace: str, name: str, kind: FireKind, request: str, slot: int) -> FireRow | None:
    t = tx.t.fire
    row = tx.row(sa.select(*_columns(t)).where(*_is(t, namespace, name, kind, request, slot)))
    return None if row is None else to(FireRow, row)


def recent(tx: Transaction, namespace: str, name: str, limit: int) -> list[FireRow]:
    """The newest fires of a schedule."""
    t = tx.t.fire
    order = (t.c.recorded_us.desc(), t.c.instant_us.desc())
    return [
        to(FireRow, r)
        for r in tx.rows(sa.select(*_columns(t)).where(t.c.namespace == namespace, t.c.schedule == name).order_by(*order).limit(limit))
    ]


def running(tx: Transaction, namespace: str, name: str) -> list[Running]:
    """Runs of a schedule that are not over, the oldest first; a retry that took over a run counts for it. What is over is marked so that it is not looked at again."""
    t = tx.t.fire
    where = (t.c.unsettled == 1, t.c.namespace == namespace, t.c.schedule == name)
    while True:
        fired = [r["task"] for r in tx.rows(sa.select(t.c.task).where(*where).order_by(t.c.instant_us).limit(CHUNK))]
        ends = _last_of(tx, fired)
        _mark_settled(tx, [task for task in fired if task not in ends])
        if ends or len(fired) < CHUNK:
            return [ends[task] for task in fired if task in ends]


def _last_of(tx: Transaction, ids: list[str]) -> dict[str, Running]:
    """Task → the task at the end of its line of retries, if that one is not over."""
    t = tx.t.task
    found: dict[str, Running] = {}
    front = {task: task for task in ids}  # where its line has come to → whose line it is
    for _ in range(SUPERSEDED_HOPS):
        if not front:
            break
        rows = tx.rows(sa.select(t.c.id, t.c.state, t.c.superseded_by).where(t.c.id.in_(sorted(front))))
        ahead = {}
        for r in rows:
            state, mine = TaskState(r["state"]), front[r["id"]]
            if r["superseded_by"]:
                ahead[r["superseded_by"]] = mine
            elif not state.settled:
                found[mine] = Running(r["id"], state)
        front = ahead
    return found


def in_review(tx: Transaction, namespace: str) -> dict[str, int]:
    """Schedule → how many of its runs are in review: they count as running."""
    f, t = tx.t.fire, tx.t.task
    joined = sa.select(f.c.schedule, sa.func.count().label("n")).join(t, t.c.id == f.c.task)
    where = (f.c.unsettled == 1, f.c.namespace == namespace, t.c.state == TaskState.UNKNOWN)
    return {r["schedule"]: int(r["n"]) for r in tx.rows(joined.where(*where).group_by(f.c.schedule))}


# -- upkeep


def mark_settled(tx: Transaction) -> int:
    """Fires whose tasks are over, or gone, are not looked at again: of schedules that never ask who runs still. How many."""
    f, t = tx.t.fire, tx.t.task
    over = sa.or_(t.c.id.is_(None), sa.and_(t.c.state.in_(tuple(SETTLED)), t.c.superseded_by == ""))
    found = sa.select(f.c.task).outerjoin(t, t.c.id == f.c.task).where(f.c.unsettled == 1, over).limit(CHUNK)
    ids = [r["task"] for r in tx.rows(found)]
    _mark_settled(tx, ids)
    return len(ids)


def _mark_settled(tx: Transaction, ids: list[str]) -> None:
    t = tx.t.fire
    if ids:
        tx.update(t, t.c.unsettled == 1, t.c.task.in_(ids), unsettled=0)


def forget(tx: Transaction, before_us: int) -> int:
    """Remove old fires whose tasks are over, some at once; how many."""
    t = tx.t.fire
    identity = (t.c.namespace, t.c.schedule, t.c.kind, t.c.request, t.c.slot)
    where = (t.c.recorded_us < before_us, t.c.unsettled == 0, t.c.state != FireState.QUEUED)
    found = [tuple(r.values()) for r in tx.rows(sa.select(*identity).where(*where).limit(CHUNK))]
    return tx.delete(t, sa.tuple_(*identity).in_(found), *where) if found else 0


def _columns(t: sa.Table) -> list[sa.Column[Any]]:
    return [c for c in t.c if c.name != "rev"]


def _is(t: sa.Table, namespace: str, name: str, kind: FireKind, request: str, slot: int) -> tuple[sa.ColumnElement[bool], ...]:
    return (t.c.namespace == namespace, t.c.schedule == name, t.c.kind == kind, t.c.request == request, t.c.slot == slot)


def _handle(kind: FireKind, request: str, slot: int) -> str:
    """A fire of a schedule in one text."""
    return f"{kind}/{request}/{slot}"


def _identity(handle: str) -> tuple[FireKind, str, int]:
    kind, request, slot = handle.split("/")
    return FireKind(kind), request, int(slot)
