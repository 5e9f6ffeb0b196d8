"""What the tests of schedules' statements share: definitions, schedules whose fires have come, and what must hold of the rows at any time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
from tests.contract.store.task_rows import fresh, new

from millstream_schema.canonical import fingerprint
from millstream_schema.durable.recurrence import SECOND, Interval, Spec
from millstream_schema.durable.schedules import Definition, FireKind, FireRow, FireState, Overlap, Rules, ScheduleRow
from millstream_schema.durable.states import TaskState
from millstream_schema.store import fires, schedules
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.rows import to
from millstream_schema.store.schedules import Published

MINUTELY = Interval(every_us=60 * SECOND)
F = FireState


def definition(spec: Spec = MINUTELY, namespace: str = "default", args: str = "[]", **rules: Any) -> Definition:
    request = new("schedule", namespace=namespace, id="schedule", args=args)
    return Definition(spec=spec, rules=Rules(**rules), request=request)


def publish(db: Database, name: str = "s", given: Definition | None = None) -> Published:
    d = given or definition()
    found = db.run(lambda tx: schedules.publish(tx, name, d, fingerprint(msgspec.to_builtins(d)), "tester"))
    assert found is not None
    return found


def task_id() -> str:
    return fresh("task")


def now_us(db: Database) -> int:
    return db.read(lambda tx: tx.now_us())


def back(db: Database, name: str = "s", *, ago_us: int) -> int:
    """As if its last fire lay so long ago: its next instant is the one that came then."""
    row = schedule(db, name)
    spec = db.read(lambda tx: schedules.defined(tx, row)).spec
    assert isinstance(spec, Interval)
    at = (now_us(db) - ago_us) // spec.every_us * spec.every_us
    t = db.tables.schedule
    db.run(lambda tx: tx.update(t, t.c.namespace == row.namespace, t.c.name == name, next_us=at, due_us=at, last_us=at - spec.every_us))
    return at


def schedule(db: Database, name: str = "s", namespace: str = "default") -> ScheduleRow:
    row = db.read(lambda tx: schedules.read(tx, namespace, name))
    assert row is not None
    return row


def advance(db: Database, name: str = "s") -> fires.Advanced | None:
    return fires.advance(db, "default", name, task_id)


def advance_all(db: Database, name: str = "s") -> None:
    while advance(db, name) is not None:
        pass


def trigger(db: Database, name: str = "s", request: str = "r") -> FireRow:
    fire = db.run(lambda tx: fires.trigger(tx, "default", name, request, "tester", task_id))
    assert fire is not None
    return fire


def release(db: Database, name: str = "s") -> fires.Advanced | None:
    return db.run(lambda tx: fires.release(tx, "default", name, task_id))


def every_fire(db: Database, name: str = "s") -> list[FireRow]:
    """In the order of their instants."""
    t = db.tables.fire
    found = db.read(lambda tx: tx.rows(t.select().where(t.c.schedule == name).order_by(t.c.instant_us, t.c.kind)))
    return [to(FireRow, {k: v for k, v in r.items() if k != "rev"}) for r in found]


def shown(db: Database, name: str = "s") -> list[tuple[FireState, int]]:
    """State and number of instants of each row of fires."""
    return [(f.state, f.times) for f in every_fire(db, name)]


def set_task(db: Database, task: str, state: TaskState) -> None:
    """As if workers had brought it there."""
    t = db.tables.task
    values: dict[str, Any] = {"state": state, "session": "s" if state.held else "", "ready_lane": None, "settled_us": int(state.settled)}
    db.run(lambda tx: tx.update(t, t.c.id == task, **values))


def overlapping(db: Database, overlap: Overlap, state: TaskState = TaskState.RUNNING) -> str:
    """A schedule whose first fire's task is in this state; its id. The next fire has come."""
    publish(db, given=definition(overlap=overlap))
    back(db, ago_us=0)
    advance_all(db)
    (first,) = every_fire(db)
    set_task(db, first.task, state)
    come_again(db)
    return first.task


def come_again(db: Database, name: str = "s") -> None:
    """Its next instant has come, that is moved into the past, later than all before it."""
    row = schedule(db, name)
    assert row.next_us is not None
    at = max(row.last_us + 1, now_us(db) - 1)
    t = db.tables.schedule
    db.run(lambda tx: tx.update(t, t.c.name == name, next_us=at, due_us=at))


def consistent(db: Database) -> None:
    """What must hold of the rows at any time: a fire has its task, and no other fire has it; what waits is queued; counters are sums; no instant is in two rows."""

    def work(tx: Transaction) -> tuple[list[ScheduleRow], list[FireRow], dict[str, str]]:
        found = [to(FireRow, {k: v for k, v in r.items() if k != "rev"}) for r in tx.rows(tx.t.fire.select())]
        return (
            [to(ScheduleRow, r) for r in tx.rows(tx.t.schedule.select())],
            found,
            {r["id"]: r["origin"] for r in tx.rows(tx.t.task.select())},
        )

    rows, found, origins = db.run(work)
    tasks = [f.task for f in found if f.task]
    assert len(set(tasks)) == len(tasks) and set(tasks) <= set(origins)
    assert {t for t, origin in origins.items() if origin.startswith("schedule:")} <= set(tasks), "a task without its fire"
    for row in rows:
        mine = [f for f in found if (f.namespace, f.schedule) == (row.namespace, row.name)]
        queued = [f"{f.kind}/{f.request}/{f.slot}" for f in mine if f.state is F.QUEUED]
        assert queued == ([row.waiting] if row.waiting else []), row
        for state, counter in ((F.FIRED, row.fired), (F.SKIPPED, row.skipped), (F.MISSED, row.missed)):
            assert sum(f.times for f in mine if f.state is state) == counter, (row, state)
        auto = sorted((f.instant_us, f.until_us) for f in mine if f.kind is FireKind.AUTO)
        assert all(a[1] < b[0] for a, b in pairwise(auto)), "an instant in two rows"
        assert row.next_us is None or row.next_us > row.last_us
        assert not auto or auto[-1][1] <= row.last_us
