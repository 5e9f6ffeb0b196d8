"""A worker session's step machine on a pool that only notes: what begins, in which order, and what its handlers are told of the attempt."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
import sqlalchemy as sa

from millstream.testing.outside import SimDatabase
from millstream.testing.world import Faults, SimChance, SimClock, SimIds, World
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.effects import IntentId, IntentRow, IntentState, KnownCall
from millstream_schema.durable.progress import Told, progress_of
from millstream_schema.durable.records import NewTask, Policy, TaskRow
from millstream_schema.durable.states import Cause, Effects, TaskState
from millstream_schema.errors import StoreUnavailable
from millstream_schema.store import intents, settling, tasks
from millstream_schema.store.database import Transaction
from millstream_schema.store.intents import Attempt
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.settling import Answer
from millstream_tasks.durable.host import HostSettings, TaskHost

T = TaskState


class Noted:
    """A pool of so many slots in which nothing ends by itself."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running: list[TaskRow] = []
        self.begun: list[TaskRow] = []
        self.told: list[str] = []
        self.killed: list[str] = []

    def free(self) -> int:
        return self.slots - len(self.running)

    def ahead(self) -> int:
        return 0

    def waiting(self) -> int:
        return 0

    def give_back(self) -> None:
        """Nothing waits here."""

    def start(self, task: TaskRow) -> None:
        assert self.free() > 0
        self.running.append(task)
        self.begun.append(task)

    def cancel(self, task: str, fence: int) -> None:
        self.told.append(task)

    def lease(self, deadline: float) -> None:
        """Nothing is judged here."""

    def tick(self) -> float:
        return 1.0

    def kill(self, task: str, fence: int) -> None:
        self.killed.append(task)
        self.running = [t for t in self.running if t.id != task]


class Rig:
    """One host on a simulated clock and database."""

    def __init__(self, slots: int = 1, prefetch: int = 0) -> None:
        self.world = World(0, Faults())
        clock = SimClock(self.world)
        self.db = SimDatabase(self.world, clock)
        create_schema(self.db)
        self.pool = Noted(slots)
        settings = HostSettings(name="h", queues=("default",), handlers=("work",), slots=slots, prefetch=prefetch)
        self.host = TaskHost(self.db, self.pool, clock, SimIds(self.world), SimChance(self.world), settings)

    def submit(self, key: str, **changes: object) -> None:
        self.db.run(lambda tx: self.put(tx, key, **changes))

    def put(self, tx: Transaction, key: str, **changes: object) -> None:
        base = NewTask(
            id=key, namespace="default", handler="work", key=key, digest="1:", queue="default", args="[]", effects=Effects.IDEMPOTENT,
            policy=Policy(attempts=5, delay_ms=0, max_delay_ms=0),
        )  # fmt: skip
        tasks.submit(tx, msgspec.structs.replace(base, **changes))

    def fences(self) -> dict[str, int]:
        return self.db.read(lambda tx: {r["key"]: int(r["fence"]) for r in tx.rows(tx.t.task.select())})

    def go(self, until: Callable[[], bool], seconds: float = 30.0) -> None:
        """Step as the host asks, until this holds."""
        end = self.world.now + seconds
        while not until():
            assert self.world.now < end, "it does not come about"
            self.world.now += min(max(self.host.step(), 0.005), 0.2)

    def end(self, key: str, outcome: o.AnyOutcome | None = None) -> None:
        """The handler that runs it is over; it is written."""
        (row,) = [t for t in self.pool.running if t.id == key]
        self.pool.running.remove(row)
        settled = sum(self.host.answers.values())
        self.host.ended(key, row.fence, outcome or o.Succeeded("[1]"), (), 0.01)
        self.go(lambda: sum(self.host.answers.values()) > settled)

    def intent(self, root: str = "k") -> IntentRow:
        (row,) = self.db.read(lambda tx: intents.of_root(tx, root))
        return row

    def progress(self) -> dict[str, float]:
        return self.db.read(lambda tx: {r["task"]: r["done"] for r in tx.rows(tx.t.progress.select())})

    def states(self) -> dict[str, TaskState]:
        return self.db.read(lambda tx: {r["key"]: TaskState(r["state"]) for r in tx.rows(tx.t.task.select())})


@pytest.mark.parametrize("effects", list(Effects))
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "held ahead"])
def test_a_handler_is_told_which_start_it_is(effects: Effects, ahead: bool) -> None:
    """1, 2, 3, whether its start was folded into the claim, committed by itself, or it waited for a slot."""
    rig = Rig(prefetch=2)
    for i in range(3):
        rig.submit("blocker" if ahead else f"before-{i}", priority=100)
        rig.submit("one", effects=effects)
        if ahead:
            rig.go(lambda: rig.host.holding == 2)
            rig.end("blocker", o.RetryAsked(0))
        else:
            rig.go(lambda: bool(rig.pool.running))
            rig.end(rig.pool.running[0].id)
        rig.go(lambda: any(t.id == "one" for t in rig.pool.running))
        rig.end("one", o.RetryAsked(0))
    assert [t.starts for t in rig.pool.begun if t.id == "one"] == [1, 2, 3]
    assert {t.state for t in rig.pool.begun} == {T.RUNNING}


def test_what_was_claimed_together_begins_by_rank() -> None:
    """Also what waited for a slot, whatever its effects and its id."""
    rig = Rig(slots=2, prefetch=2)
    for name, priority in (("a", -5), ("z", 9), ("m", 0), ("b", 3)):
        rig.submit(name, priority=priority, effects=Effects.EXTERNAL if name == "b" else Effects.IDEMPOTENT)
    rig.go(lambda: rig.host.holding == 4)
    for _ in range(4):
        rig.go(lambda: bool(rig.pool.running))
        rig.end(rig.pool.running[0].id)
    assert [t.id for t in rig.pool.begun] == ["z", "b", "m", "a"]
    assert rig.host.answers[Answer.APPLIED] == 4 and set(rig.states().values()) == {T.SUCCEEDED}


def test_one_slot_serves_two_applications_in_turn() -> None:
    """Whatever a look at the lanes meets: an end that is not written yet is still held in the database, and is not counted as held."""
    rig = Rig()
    for i in range(20):
        rig.submit(f"a{i}")
        rig.submit(f"b{i}", namespace="other")
    order = []
    for _ in range(30):
        rig.go(lambda: bool(rig.pool.running))
        row = rig.pool.running.pop()
        order.append(row.namespace)
        rig.world.now += 0.3
        rig.host.ended(row.id, row.fence, o.Succeeded("[1]"), (), 0.3)
    assert {x != y for x, y in itertools.pairwise(order)} == {True}, order


def test_a_worker_whose_slots_are_taken_for_long_leaves_the_rest_to_others() -> None:
    """It held what came for a second, gave it back, took it again, for as long as its slots were taken; and the first one free looks at once."""
    rig = Rig(slots=2, prefetch=50)
    for key in ("a", "b"):
        rig.submit(key)
    rig.go(lambda: len(rig.pool.running) == 2)
    for turn in range(30):
        end = rig.world.now + 0.1
        rig.go(lambda end=end: rig.world.now > end)  # type: ignore[misc]
        if turn == 5:
            rig.submit("c")
        rig.host.wake()
        assert rig.states().get("c", T.READY) is T.READY
    began = rig.world.now
    rig.end("a")
    rig.go(lambda: any(t.id == "c" for t in rig.pool.running))
    assert rig.world.now - began < 0.1


def test_what_was_given_back_because_the_slots_are_taken_is_left_to_others() -> None:
    """That it goes back is no slot that has become free: taken again at once, for as long as the slots are taken, no other worker would ever get it."""
    rig = Rig(slots=2, prefetch=50)
    for i in range(80):
        rig.submit(f"short-{i}")
        rig.go(lambda: bool(rig.pool.running))
        rig.end(f"short-{i}")

    def together(tx: Transaction) -> None:
        for key in "abcdef":
            rig.put(tx, key)

    rig.db.run(together)
    rig.go(lambda: rig.host.holding == 6)
    rig.go(lambda: rig.host.holding == 2)
    assert [t.id for t in rig.pool.running] == ["a", "b"]
    fences = rig.fences()
    for _ in range(30):
        end = rig.world.now + 0.1
        rig.go(lambda end=end: rig.world.now > end)  # type: ignore[misc]
        rig.host.wake()
    assert rig.fences() == fences and {rig.states()[k] for k in "cdef"} == {T.READY}
    rig.end("a")
    rig.go(lambda: any(t.id == "c" for t in rig.pool.running))


def test_a_drain_gives_back_what_has_not_begun_and_waits_for_the_rest() -> None:
    """Nothing new is claimed; no attempt is used up."""
    rig = Rig(slots=2, prefetch=2)
    for i in range(5):
        rig.submit(f"k{i}")
    rig.go(lambda: rig.host.holding == 4)
    running = [t.id for t in rig.pool.running]
    rig.host.drain()
    rig.go(lambda: rig.host.holding == 2)
    assert sorted(rig.states().values()) == [T.READY] * 3 + [T.RUNNING] * 2
    for key in running:
        rig.end(key)
    rig.go(lambda: rig.host.holding == 0)
    assert len(rig.pool.begun) == 2 and {rig.states()[key] for key in running} == {T.SUCCEEDED}
    rows = rig.db.read(lambda tx: tx.rows(tx.t.task.select()))
    assert {r["starts"] for r in rows if r["state"] == T.READY} == {0}


def test_a_cancel_reaches_the_handler_or_ends_what_has_not_begun() -> None:
    """By the heartbeat; the handler is told once."""
    rig = Rig(prefetch=1)
    rig.submit("runs", priority=9)
    rig.submit("waits")
    rig.go(lambda: rig.host.holding == 2)
    for key in ("runs", "waits"):
        rig.db.run(lambda tx, k=key: settling.cancel(tx, k))  # type: ignore[misc]
    rig.go(lambda: rig.states()["waits"] is T.CANCELLED and bool(rig.pool.told))
    assert rig.pool.told == ["runs"] and [t.id for t in rig.pool.begun] == ["runs"]
    rig.end("runs", o.CancelledItself())
    assert rig.states()["runs"] is T.CANCELLED and rig.pool.told == ["runs"]


def test_what_an_attempt_says_is_written_beside_heartbeats_and_ends() -> None:
    """Also of one whose own transaction was its end; what the database refuses holds up neither a heartbeat nor an end."""
    rig = Rig()

    def begun(key: str, done: int) -> int:
        rig.submit(key)
        rig.go(lambda: any(t.id == key for t in rig.pool.running))
        fence = rig.pool.running[0].fence
        rig.host.told(key, fence, Told(progress_of(1, done, 9, "")))
        return fence

    fence = begun("one", 1)
    assert rig.progress() == {}
    rig.go(lambda: rig.progress() == {"one": 1.0})
    rig.host.told("one", fence, Told(progress_of(2, 2, 9, "")))
    rig.end("one")
    assert rig.progress() == {"one": 2.0}
    fence = begun("two", 3)
    rig.pool.running.clear()
    rig.host.ended("two", fence, o.Committed(), (), 0.01)
    rig.host.step()
    assert rig.progress() == {"one": 2.0, "two": 3.0}
    refused = f"CREATE TRIGGER refuse BEFORE INSERT ON {rig.db.tables.progress.name} BEGIN SELECT RAISE(ABORT, 'refused'); END"
    rig.db.run(lambda tx: tx.execute(sa.text(refused)))
    session = rig.host.session
    begun("three", 4)
    rig.end("three")
    begun("four", 5)
    rig.go(lambda: not rig.host._said)
    rig.world.now += 5.0
    rig.end("four")
    assert rig.host.session == session and rig.states()["three"] is rig.states()["four"] is T.SUCCEEDED
    assert set(rig.progress()) == {"one", "two"}


def test_an_end_the_database_refuses_holds_up_no_other_and_fails_its_own_task() -> None:
    """Each is written by itself then; what cannot be stored is FAILED with cause ``result``, the neighbours are what they are."""
    rig = Rig(slots=3)
    for key in ("a", "b", "c"):
        rig.submit(key)
    rig.go(lambda: len(rig.pool.running) == 3)
    refused = f"CREATE TRIGGER refuse BEFORE UPDATE ON {rig.db.tables.task.name} WHEN NEW.result = 'poison' BEGIN SELECT RAISE(ABORT, 'refused'); END"
    rig.db.run(lambda tx: tx.execute(sa.text(refused)))
    for row in list(rig.pool.running):
        rig.pool.running.remove(row)
        rig.host.ended(row.id, row.fence, o.Succeeded("poison" if row.id == "b" else "[1]"), (), 0.01)
    rig.go(lambda: not rig.host.holding)
    assert rig.states() == {"a": T.SUCCEEDED, "b": T.FAILED, "c": T.SUCCEEDED}
    (failed,) = rig.db.read(lambda tx: tx.rows(tx.t.task.select().where(tx.t.task.c.key == "b")))
    assert failed["cause"] == Cause.RESULT and "refused" in failed["reason"]
    rig.submit("next")
    rig.go(lambda: bool(rig.pool.running))
    rig.end("next")
    assert rig.states()["next"] is T.SUCCEEDED


class Gone:
    """A database that takes nothing."""

    def before_commit(self) -> None:
        raise StoreUnavailable("injected")

    def after_commit(self) -> None:
        """Nothing was."""


@pytest.mark.parametrize("how", ["killed with the lease", "crashed", "gave up"])
def test_what_a_call_came_to_outlasts_its_process_and_an_outage_of_two_leases(how: str) -> None:
    """Its process knew it and could not write it: its worker does, before the attempt's end or loss is judged, and no person is asked."""
    rig = Rig()
    policy = Policy(attempts=5, delay_ms=0, max_delay_ms=0, intents_only=True)
    rig.submit("k", effects=Effects.EXTERNAL, policy=policy)
    rig.go(lambda: bool(rig.pool.running))
    (row,), charge = rig.pool.running, IntentId("k", "charge")
    rig.db.run(lambda tx: intents.open_intent(tx, Attempt(row.id, row.fence, row.token), charge, "o"))
    rig.host.known(row.id, row.fence, charge, KnownCall("o", True, "[5]", "", "me"))
    rig.host.step()
    assert rig.intent().open, "it is its attempt's to write, while that runs"
    rig.db.faults = Gone()
    if how == "crashed":
        rig.host.ended(row.id, row.fence, o.Crashed("exit code -9"))
    if how == "gave up":
        rig.host.ended(row.id, row.fence, o.InDoubt("what became of it could not be written down"))
    session, away = rig.host.session, rig.world.now + 25.0
    rig.go(lambda: rig.world.now >= away)
    assert rig.pool.killed == (["k"] if how == "killed with the lease" else [])
    rig.db.faults = None
    rig.go(lambda: not rig.intent().open)
    assert (rig.intent().state, rig.intent().result) == (IntentState.DONE, "[5]")
    rig.pool.running.clear()
    if how == "killed with the lease":
        assert rig.db.run(lambda tx: settling.expire_session(tx, session, 0))
        rig.db.run(lambda tx: settling.take_back(tx, session, lambda: 0.5, 10))
    rig.go(lambda: bool(rig.pool.running))
    assert rig.pool.running[0].open_intents == 0 and rig.host.holding == 1


def test_an_outcome_that_the_database_refuses_is_kept_told_of_once_and_holds_up_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """In whatever form it refuses: other outcomes and ends are written meanwhile, and this one as soon as it is taken."""
    rig = Rig(slots=2)
    for key in ("a", "b"):
        rig.submit(key, effects=Effects.EXTERNAL, policy=Policy(attempts=5, delay_ms=0, max_delay_ms=0, intents_only=True))
    rig.go(lambda: len(rig.pool.running) == 2)
    table = rig.db.tables.intent.name
    refused = f"CREATE TRIGGER refuse BEFORE UPDATE ON {table} WHEN NEW.root = 'a' BEGIN SELECT RAISE(ABORT, 'refused'); END"
    rig.db.run(lambda tx: tx.execute(sa.text(refused)))
    for row in list(rig.pool.running):
        call = IntentId(row.id, "charge")
        mine = Attempt(row.id, row.fence, row.token)
        rig.db.run(lambda tx, a=mine, c=call: intents.open_intent(tx, a, c, "o"))  # type: ignore[misc]
        rig.host.known(row.id, row.fence, call, KnownCall("o", True, "[5]", "", "me"))
        rig.pool.running.remove(row)
        rig.host.ended(row.id, row.fence, o.Crashed("exit code -9"))
    session, later = rig.host.session, rig.world.now + 20.0
    rig.go(lambda: rig.world.now >= later)
    assert rig.intent("a").open and rig.intent("b").state is IntentState.DONE
    assert rig.states()["a"] is T.UNKNOWN and rig.host.session == session
    assert capsys.readouterr().out.count("cannot be stored; it is kept and tried again") == 1
    rig.db.run(lambda tx: tx.execute(sa.text("DROP TRIGGER refuse")))
    rig.go(lambda: not rig.intent("a").open)
    assert (rig.intent("a").state, rig.intent("a").result) == (IntentState.DONE, "[5]")


def test_what_an_attempt_has_written_itself_is_not_written_again() -> None:
    """Nothing is kept of it."""
    rig = Rig()
    rig.host.known("k", 1, IntentId("k", "charge"), KnownCall("o", True, "[5]", "", "me"))
    assert rig.host.holding == 1
    rig.host.known("k", 1, IntentId("k", "charge"), None)
    assert rig.host.holding == 0


def test_ends_are_kept_while_the_database_takes_none() -> None:
    """Refused in whatever form, as by a server that has become read-only: no success becomes a failure, and none is dropped."""
    rig = Rig(slots=2)
    for key in ("a", "b"):
        rig.submit(key)
    rig.go(lambda: len(rig.pool.running) == 2)
    table = rig.db.tables.task.name
    refused = f"CREATE TRIGGER refuse BEFORE UPDATE ON {table} WHEN NEW.session = '' BEGIN SELECT RAISE(ABORT, 'read-only'); END"
    rig.db.run(lambda tx: tx.execute(sa.text(refused)))
    for row in list(rig.pool.running):
        rig.pool.running.remove(row)
        rig.host.ended(row.id, row.fence, o.Succeeded("[1]"), (), 0.01)
    rig.go(lambda: len(rig.host._aside) == 2)
    assert rig.host.holding == 2 and set(rig.states().values()) == {T.RUNNING}
    session = rig.host.session
    rig.db.run(lambda tx: tx.execute(sa.text("DROP TRIGGER refuse")))
    rig.go(lambda: not rig.host.holding)
    assert rig.states() == {"a": T.SUCCEEDED, "b": T.SUCCEEDED} and rig.host.session == session


def test_a_claim_that_fails_holds_up_no_end() -> None:
    """They are written together, and by themselves where that does not work."""
    rig = Rig(slots=2)
    rig.submit("a")
    rig.go(lambda: bool(rig.pool.running))
    rig.submit("b")
    refused = (
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {rig.db.tables.task.name} WHEN NEW.key = 'b' BEGIN SELECT RAISE(ABORT, 'refused'); END"
    )
    rig.db.run(lambda tx: tx.execute(sa.text(refused)))
    rig.end("a")
    assert rig.states() == {"a": T.SUCCEEDED, "b": T.READY}
