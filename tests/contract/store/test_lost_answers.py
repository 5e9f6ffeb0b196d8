"""COMMITs that lose their answer on the wire, at every operation on durable tasks, through the real clients, hosts, sweeps and relays.

Whoever repeats gets the same answer, nothing is lost or doubled. The same injected in the process, for every statement and with every row compared: ``test_crash_table``. Here the
connection is gone, too, and the server is as late as it is.
"""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from tests.contract.store.handler_rig import EFFECTS
from tests.contract.store.schedule_rows import back, every_fire
from tests.contract.store.schedule_rows import consistent as fires_consistent
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import consistent, every, evidence, session, settle, take
from tests.contract.store.task_rows import ending as success
from tests.support.swallowing import Moment, Swallowing

from millstream import Handlers, Installation, Item, Outbox, OutboxRelay, Retry, Schedules, Subscriptions, TaskContext, Tasks, TaskState
from millstream_coordinator.delivery_sweep import DeliverySweep, Message
from millstream_coordinator.schedule_sweep import ScheduleSweep
from millstream_coordinator.task_sweep import TaskSweep
from millstream_schema.durable.deliveries import DeliveryState
from millstream_schema.durable.outbox import EntryRow, EntryState, Limits
from millstream_schema.durable.records import Receipt, TaskRow
from millstream_schema.errors import StoreError
from millstream_schema.ports import SystemChance, SystemClock, SystemIds
from millstream_schema.store import deliveries, markers, outboxes, subscriptions
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.outbox_table import outbox_table
from millstream_tasks.durable.databases import HandlerDatabases
from millstream_tasks.durable.host import HostSettings, TaskHost
from millstream_tasks.durable.threads import ThreadPool

R = TypeVar("R")
T = TaskState
KINDS = [pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("mariadb", marks=pytest.mark.mariadb)]
LEASE_MS = 60_000
PATIENCE = 10.0
"""Seconds after which a test gives up."""
FOREVER = dt.timedelta(days=1)


class Wire:
    """One database with the schema: the test's way to it, and that of everybody else, which leads through the proxy."""

    def __init__(self, kind: str, url: str, proxy: Swallowing) -> None:
        self.url = url
        self.proxy = proxy
        self.home = Database(url, SystemClock())
        self.store = Opened(kind, url, self.home)
        create_schema(self.home)
        EFFECTS.metadata.create_all(self.home.engine)
        markers.create(url, "millstream_")
        Outbox.create(url, prefix="shop")
        self.shop = Database(url, SystemClock(), prefix="shop_")
        self.far = Database(proxy.url, SystemClock())
        self.installation = Installation(database=proxy.url, transport="redis://nowhere/0", checkpoints="/nowhere", lease_ms=LEASE_MS)
        self.databases = HandlerDatabases(proxy.url, "millstream_", 3000, SystemClock(), {"orders": proxy.url})
        self.direct = Tasks(self.installation, handlers, database=self.home)
        self.tasks = Tasks(self.installation, handlers, database=self.far)

    def close(self) -> None:
        for database in (self.far, self.shop, self.databases):
            database.close()
        self.store.close()

    def effects(self, word: str) -> int:
        with self.home.engine.begin() as connection:
            return len(connection.execute(sa.select(EFFECTS).where(EFFECTS.c.word == word)).all())

    def rows(self) -> list[TaskRow]:
        return list(every(self.home).values())


@pytest.fixture(scope="module", params=KINDS)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    url = request.getfixturevalue(f"{request.param}_url")
    with Swallowing(url) as proxy:
        made = Wire(request.param, url, proxy)
        yield made
        made.close()


def answered(work: Callable[[], R]) -> R:
    """What a caller does who gets an error instead of an answer: the same again."""
    for _ in range(5):
        try:
            return work()
        except StoreError:
            continue
    raise AssertionError("it never came through")


def until(what: str, happened: Callable[[], bool]) -> None:
    clock = SystemClock()
    end = clock.monotonic() + PATIENCE
    while not happened():
        assert clock.monotonic() < end, f"not within {PATIENCE} s: {what}"


# -- operations


class Operation(Protocol):
    """One operation on things of its own: made ready on the test's connection, done over the wire, then looked at."""

    def __init__(self, wire: Wire, stack: ExitStack) -> None: ...

    def act(self) -> None: ...

    def check(self) -> None: ...


class Submits:
    """By a client, with a key."""

    def __init__(self, wire: Wire, stack: ExitStack) -> None:
        self.wire, self.key, self.tasks = wire, "k", wire.tasks

    def act(self) -> None:
        self.receipt = answered(lambda: self.tasks.submit("work", key=self.key))

    def check(self) -> None:
        row = every(self.wire.home)[self.key]
        assert (self.receipt.task, row.state, row.rev) == (row.id, T.READY, 0)
        again = self.tasks.submit("work", key=self.key)
        assert (again.task, again.replayed) == (row.id, True)


class SubmitsMany(Submits):
    """In one transaction, one of which was known."""

    def act(self) -> None:
        items = [Item(key=f"{self.key}/{i}") for i in range(3)]
        self.receipts = answered(lambda: self.tasks.submit_many("work", items))

    def check(self) -> None:
        rows = every(self.wire.home)
        assert [r.task for r in self.receipts if isinstance(r, Receipt)] == [rows[f"{self.key}/{i}"].id for i in range(3)]


class SubmitsInATransactionOfItsOwn(Submits):
    """A user's, with a row of the user's: what fails is done again as a whole."""

    def act(self) -> None:
        engine = sa.create_engine(self.wire.proxy.url)
        for _ in range(5):
            try:
                with Session(engine) as mine:
                    if not mine.execute(sa.select(EFFECTS).where(EFFECTS.c.word == self.key)).all():
                        mine.execute(EFFECTS.insert(), {"word": self.key})
                    self.receipt = self.tasks.submit("work", key=self.key, session=mine)
                    mine.commit()
                    break
            except (sa.exc.DBAPIError, StoreError):
                continue
        engine.dispose()

    def check(self) -> None:
        super().check()
        assert self.wire.effects(self.key) == 1


class Cancels(Submits):
    """What waits: at once; what is held: it is told."""

    def __init__(self, wire: Wire, stack: ExitStack) -> None:
        super().__init__(wire, stack)
        wire.direct.submit("work", key="held")
        (self.held,) = take(wire.home, session(wire.home))
        self.waiting = wire.direct.submit("work", key="waits").task

    def act(self) -> None:
        self.answers = [answered(lambda t=t: self.tasks.cancel(t)) for t in (self.waiting, self.held.id)]  # type: ignore[misc]

    def check(self) -> None:
        rows = every(self.wire.home)
        assert self.answers == [T.CANCELLED, T.RUNNING]
        waited, held = rows["waits"], rows["held"]
        assert (waited.state, held.state, held.cancel, held.fence) == (T.CANCELLED, T.RUNNING, 1, self.held.fence)


class Serves:
    """A worker's host: it registers, claims, starts and settles. What its handlers are is the subclass's matter."""

    handler = "work"
    tasks = 2
    permit = "p"
    runs = 1
    attempts = 1

    def __init__(self, wire: Wire, stack: ExitStack) -> None:
        self.wire = wire
        for i in range(self.tasks):
            wire.direct.submit(self.handler, key=f"{i}", permit=self.permit)
        clock, ids = SystemClock(), SystemIds()
        registry, self.event = handlers.registry, threading.Event()
        self.pool = ThreadPool(
            registry, clock, ids, 2, self.ended, wire.databases, lambda *said: self.host.told(*said), lambda *said: self.host.known(*said)
        )
        stack.callback(self.close)
        settings = HostSettings(
            name="h", queues=("default",), handlers=registry.names(), slots=2, lease_ms=LEASE_MS, poll_ms=50, renew_ms=LEASE_MS // 4
        )
        self.host = TaskHost(wire.far, self.pool, clock, ids, SystemChance(), settings)

    def ended(self, *report: Any) -> None:
        self.host.ended(*report)
        self.event.set()

    def close(self) -> None:
        self.pool.close()
        for thread in self.pool._threads:
            thread.join(PATIENCE)

    def act(self) -> None:
        until("all are over", self.over)

    def over(self) -> bool:
        self.event.wait(min(self.host.step(), 0.05))
        self.event.clear()
        return not self.host.holding and all(r.state.settled or r.state is T.UNKNOWN for r in self.wire.rows())

    def check(self) -> None:
        rows = {r.key: r for r in self.wire.rows()}
        mine = [rows.pop(f"{i}") for i in range(self.tasks)]
        for row in mine:
            assert (row.state, row.fence, row.starts) == (T.SUCCEEDED, self.attempts, self.attempts), row
            assert RAN.pop(row.id) == self.runs
            assert [late for _, _, late in evidence(self.wire.home, row.id)] == [0] * (self.attempts - 1), (
                "a success leaves no row of its own"
            )
        assert [r.state for r in rows.values()] == self.followed()

    def followed(self) -> list[TaskState]:
        """What came of the handlers' submissions."""
        return []


class ServesOutside(Serves):
    """Each start is committed before its code runs, and is never repeated."""

    handler = "outside"
    tasks = 1
    permit = ""


class ServesAgain(Serves):
    """First they ask for a retry, then they submit one more task each."""

    handler = "twice"
    tasks = 1
    permit = ""
    runs = attempts = 2

    def followed(self) -> list[TaskState]:
        return [T.SUCCEEDED] * self.tasks


class ServesWithEffects(Serves):
    """Each commits a row with its end, in the installation's own database."""

    handler = "writes"
    tasks = 1
    permit = ""

    def check(self) -> None:
        rows = self.wire.rows()
        for row in rows:
            assert (row.state, self.wire.effects(row.id)) == (T.SUCCEEDED, 1), row
            assert RAN.pop(row.id) >= 1
        assert len(rows) == self.tasks


class ServesWithEffectsElsewhere(ServesWithEffects):
    """Likewise in another database, with a marker."""

    handler = "writes_elsewhere"


class TakesBack:
    """The sweep: a session whose lease is over, what has become due."""

    def __init__(self, wire: Wire, stack: ExitStack) -> None:
        self.wire = wire
        n, t = wire.home.tables.node, wire.home.tables.task
        for handler, permit in (("work", "p"), ("outside", "")):
            wire.direct.submit(handler, key=handler, permit=permit)
        self.held = take(wire.home, session(wire.home), handlers=["work", "outside"])
        wire.direct.submit("work", key="due", delay=3600)
        clock = SystemClock()
        self.sweep = TaskSweep(wire.far, clock, SystemChance(), LEASE_MS, 0)
        TaskSweep(wire.home, clock, SystemChance(), LEASE_MS, 0).sweep()
        wire.home.run(lambda tx: tx.update(tx.t.coordinator, tx.t.coordinator.c.id == "task-sweep", expires_us=1))  # no outage before
        wire.home.run(lambda tx: tx.update(n, n.c.id == "s", expires_us=1))
        wire.home.run(lambda tx: tx.update(t, t.c.key == "due", wake_us=1))

    def act(self) -> None:
        answered(self.sweep.sweep)

    def check(self) -> None:
        rows = {r.key: r for r in self.wire.rows()}
        assert {k: (r.state, r.losses) for k, r in rows.items()} == {"work": (T.READY, 1), "outside": (T.READY, 0), "due": (T.READY, 0)}
        assert {len(evidence(self.wire.home, r.id)) for r in self.held} == {1}


class Fires:
    """The sweep over schedules."""

    def __init__(self, wire: Wire, stack: ExitStack) -> None:
        self.wire, self.name = wire, "s"
        self.schedules = Schedules(wire.installation, handlers, database=wire.far)
        Schedules(wire.installation, handlers, database=wire.home).publish(self.name, "work", FOREVER)
        self.prepare()

    def prepare(self) -> None:
        """Its fire has come."""
        back(self.wire.home, self.name, ago_us=0)

    def act(self) -> None:
        answered(ScheduleSweep(self.wire.far, SystemClock(), SystemIds(), 1.0).sweep)

    def check(self) -> None:
        (fire,) = every_fire(self.wire.home, self.name)
        assert [r.id for r in self.wire.rows()] == [fire.task]
        self.fire = fire


class Triggers(Fires):
    """By hand, with a request."""

    def prepare(self) -> None:
        """Its fire has not come."""

    def act(self) -> None:
        self.answer = answered(lambda: self.schedules.trigger(self.name, "r"))

    def check(self) -> None:
        super().check()
        assert (self.answer.task, self.schedules.trigger(self.name, "r").task) == (self.fire.task, self.fire.task)


class Pulls:
    """A consumer: what has ended is handed to it once, and done when it says so."""

    target = ""

    def __init__(self, wire: Wire, stack: ExitStack) -> None:
        self.wire, self.name = wire, "s"
        self.subscriptions = Subscriptions(wire.installation, database=wire.far)
        Subscriptions(wire.installation, database=wire.home).create(self.name, publish_to=self.target)
        self.task = wire.direct.submit("work", key=self.name).task
        settle(wire.home, *map(success, take(wire.home, session(wire.home))))

    def act(self) -> None:
        (delivery,) = answered(lambda: self.subscriptions.pull(self.name, wait=PATIENCE))
        assert (delivery.event, delivery.attempt) == (self.task, 1)
        answered(lambda: self.subscriptions.acknowledge(delivery))

    def check(self) -> None:
        (row,) = self.rows()
        assert (row.state, row.attempts) == (DeliveryState.ACKNOWLEDGED, 1)

    def rows(self) -> Any:
        s = self.wire.home.read(lambda tx: subscriptions.read(tx, "default", self.name))
        assert s is not None
        return self.wire.home.read(lambda tx: deliveries.listed(tx, s, None, 10))


class Published:
    """A broker that keeps what it got."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def room(self) -> int:
        return 100

    def publish(self, messages: list[Message]) -> None:
        self.messages += messages

    def unsent(self) -> list[Message]:
        return []


class Publishes(Pulls):
    """The sweep over deliveries, to a queue of the broker."""

    target = "q"

    def act(self) -> None:
        broker = Published()
        sweep = DeliverySweep(self.wire.far, SystemClock(), SystemChance(), SystemIds(), broker)
        until("it is published", lambda: bool(answered(sweep.sweep) or broker.messages))
        assert [(m.event, m.body["attempt"]) for m in broker.messages] == [(self.task, 1)]

    def check(self) -> None:
        (row,) = self.rows()
        assert (row.state, row.attempts) == (DeliveryState.LEASED, 1)


class Relays:
    """From a user's database."""

    def __init__(self, wire: Wire, stack: ExitStack) -> None:
        self.wire = wire
        wire.shop.run(lambda tx: tx.delete(outbox_table("shop_")))
        with Session(wire.home.engine) as mine:
            outbox = Outbox(handlers, target=wire.direct.installation_id, prefix="shop")
            self.entry = outbox.submit(mine, "work", key="k").entry
            mine.commit()
        limits = Limits(first_ms=1, longest_ms=1, lease_ms=500)
        self.relay = OutboxRelay(wire.installation, wire.proxy.url, prefix="shop", limits=limits, tasks=wire.tasks)
        stack.callback(self.relay.close)

    def act(self) -> None:
        until("the entry is sent", lambda: bool(answered(self.relay.once)) or self.row().state is EntryState.SENT)

    def row(self) -> EntryRow:
        row = self.wire.shop.read(lambda tx: outboxes.read(tx, self.entry))
        assert row is not None
        return row

    def check(self) -> None:
        assert (self.row().state, self.row().task) == (EntryState.SENT, self.entry)
        assert [r.id for r in self.wire.rows()] == [self.entry]


OPERATIONS: Mapping[str, tuple[type[Operation], int]] = {
    "submit": (Submits, 1),
    "submit many": (SubmitsMany, 1),
    "submit in a transaction": (SubmitsInATransactionOfItsOwn, 1),
    "claim and settle": (Serves, 3),
    "start": (ServesOutside, 4),
    "retry and continuations": (ServesAgain, 4),
    "transaction of a handler": (ServesWithEffects, 3),
    "transaction elsewhere": (ServesWithEffectsElsewhere, 5),
    "cancel": (Cancels, 2),
    "lost lease and due work": (TakesBack, 4),
    "fire": (Fires, 1),
    "trigger": (Triggers, 1),
    "delivery pulled": (Pulls, 3),
    "delivery published": (Publishes, 2),
    "relay": (Relays, 3),
}
"""Each with the number of COMMITs it has at least."""


@pytest.mark.parametrize("moments", [[Moment.ANSWER], [Moment.LATE, Moment.REQUEST]], ids=["answer lost", "late or never"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_operation_whose_commit_is_lost_is_repeated_and_done_once(wire: Wire, name: str, moments: list[Moment]) -> None:
    """Each of its COMMITs in turn, until it has no more of them."""
    operation, least = OPERATIONS[name]
    for at in itertools.count(1):
        wire.store.empty()
        with ExitStack() as stack:
            one = operation(wire, stack)
            wire.proxy.arm(at, moments[at % len(moments)])
            one.act()
            struck = wire.proxy.disarm()
            one.check()
        consistent(wire.home)
        fires_consistent(wire.home)
        if not struck:
            assert at > least
            return


# -- handlers

RAN: Counter[str] = Counter()
handlers = Handlers()


@handlers.task(name="work", effects="idempotent", delay=0.01)
def work(ctx: TaskContext) -> None:
    RAN[ctx.task_id] += 1


@handlers.task(name="outside", effects="external")
def outside(ctx: TaskContext) -> None:
    RAN[ctx.task_id] += 1


@handlers.task(name="twice", effects="idempotent", delay=0.01)
def twice(ctx: TaskContext) -> None:
    RAN[ctx.task_id] += 1
    if ctx.fence == 1:
        raise Retry(after=0.01)
    ctx.submit("work")


@handlers.task(name="writes", effects="transactional", delay=0.01)
def writes(ctx: TaskContext) -> None:
    RAN[ctx.task_id] += 1
    with ctx.transaction() as tx:
        tx.execute(EFFECTS.insert(), {"word": ctx.task_id, "n": ctx.fence})
        tx.result(None)


@handlers.task(name="writes_elsewhere", effects="transactional", delay=0.01)
def writes_elsewhere(ctx: TaskContext) -> None:
    RAN[ctx.task_id] += 1
    with ctx.transaction("orders") as tx:
        tx.execute(EFFECTS.insert(), {"word": ctx.task_id, "n": ctx.fence})
        tx.result(None)
