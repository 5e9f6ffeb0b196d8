"""A node: it starts what the rows say, once; reports survive a database that is away, and one that is refused fails its own job only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.contract.store.stores import PLAN, insert_job, snapshot

from millstream.testing.outside import SimDatabase
from millstream.testing.world import Faults, SimClock, SimIds, World
from millstream_coordinator.status import describe_nodes
from millstream_schema.connectors import Split
from millstream_schema.control import (
    Ack,
    Deployment,
    Discovered,
    Failed,
    Finished,
    Lease,
    NodeMessage,
    Ready,
    Run,
    Stats,
    SubtaskMessage,
    Trigger,
)
from millstream_schema.errors import StoreError
from millstream_schema.hints import NodeHint, NoHints
from millstream_schema.states import AssignmentState, JobState
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Transaction
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.rows import AssignmentRow
from millstream_tasks.node import Node, NodeSettings, NoEvents

A = AssignmentState


class Child:
    """A subtask that the test plays."""

    def __init__(self, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> None:
        self.deployment = deployment
        self.deliver = deliver
        self.got: list[NodeMessage] = []
        self.killed = False

    def send(self, message: NodeMessage) -> None:
        self.got.append(message)

    def kill(self) -> None:
        self.killed = True

    def kinds(self) -> list[str]:
        return [type(m).__name__ for m in self.got if not isinstance(m, Lease)]


class Unmoved:
    """An actor that never stands still; for an actor the database may be away."""

    def nap(self, where: str) -> None:
        """Nothing happens."""


class Rig:
    """One node on a database of its own, with a clock the test moves."""

    def __init__(self) -> None:
        self.world = World(0, Faults())
        self.db = SimDatabase(self.world, SimClock(self.world))
        create_schema(self.db)
        self.children: list[Child] = []
        self.refuse: Exception | None = None
        settings = NodeSettings(name="n", slots=8, lease_ms=3000, renew_ms=800, poll_ms=100, liveness_ms=2000, ping_ms=500)
        self.node = Node(self.db, NoHints(), SimClock(self.world), SimIds(self.world), self, settings, {}, NoEvents())

    def launch(self, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> Child:
        if self.refuse is not None:
            raise self.refuse
        child = Child(deployment, deliver)
        self.children.append(child)
        return child

    def step(self, seconds: float = 0.15) -> None:
        """A while later."""
        self.world.now += seconds
        for _ in range(20):
            if self.node.step() > 0:
                return
        raise AssertionError("the node never rests")

    def place(self, job: str = "job-1", state: JobState = JobState.DEPLOYING) -> None:
        """Assign a job's subtasks to the node, which has registered."""
        if not self.node.id:
            self.step()
        insert_job(self.db, job, state, generation=1)
        self.db.run(lambda tx: registry.assign(tx, job, 1, {s.id: self.node.id for s in PLAN.subtasks()}, 0))

    def change(self, **values: Any) -> None:
        """Write to the job's row as the coordinator does."""

        def work(tx: Transaction) -> None:
            row = jobs.lock_job(tx, "job-1")
            assert row is not None and jobs.update_job(tx, row, **values)

        self.db.run(work)

    def rows(self, job: str = "job-1") -> dict[str, AssignmentRow]:
        return {r.subtask: r for r in self.db.read(lambda tx: registry.assignments(tx, job, 1))}

    def states(self, job: str = "job-1") -> set[AssignmentState]:
        return {r.state for r in self.rows(job).values()}

    def of(self, job: str) -> list[Child]:
        return [c for c in self.children if c.deployment.job == job]

    def all(self, message: SubtaskMessage, job: str = "job-1") -> None:
        for child in self.of(job):
            child.deliver(message)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.db.close()


def test_what_is_assigned_is_started_once_and_ready_is_a_row(rig: Rig) -> None:
    """C16: one process per row, however often the rows are read; B4: its deployment carries the row's generation."""
    rig.place()
    for _ in range(5):
        rig.step()
    assert sorted(c.deployment.subtask for c in rig.children) == sorted(s.id for s in PLAN.subtasks())
    assert rig.states() == {A.STARTED}
    assert {c.deployment.generation for c in rig.children} == {1} and len({c.deployment.attempt for c in rig.children}) == 4
    rig.all(Ready(0))
    rig.all(Ready(0))
    rig.step()
    assert rig.states() == {A.READY}
    assert all(set(c.kinds()) <= {"AssignSplits"} for c in rig.children), "nothing runs before the job does"


def running(rig: Rig) -> None:
    rig.place()
    rig.step()
    rig.all(Ready(0))
    rig.step()
    rig.change(state=JobState.RUNNING)
    rig.step()


def test_e3_each_message_is_told_once_and_triggers_go_to_sources_only(rig: Rig) -> None:
    """Run to all; the trigger of an epoch to the sources, once."""
    running(rig)
    rig.db.run(lambda tx: epochs.trigger(tx, "job-1", 5, 1, 1, "checkpoint", "", []))
    rig.change(in_flight=5)
    for _ in range(4):
        rig.step()
    for child in rig.children:
        source = child.deployment.subtask.startswith("in:")
        assert sum(isinstance(m, Run) for m in child.got) == 1
        assert [m.epoch for m in child.got if isinstance(m, Trigger)] == ([5] if source else [])


def test_t41_another_generation_ends_what_runs_here(rig: Rig) -> None:
    """The row says so; nobody has to send a message."""
    running(rig)
    rig.change(state=JobState.RESTARTING, generation=2)
    rig.step()
    assert all(c.killed for c in rig.children) and rig.node.hosted() == []
    rig.all(Failed("late", ""))
    rig.step()
    assert rig.states() == {A.READY}, "a report of an attempt that is no longer hosted counted"


def test_reports_are_kept_while_the_database_is_away(rig: Rig) -> None:
    """In order, and written when it is back; the lease is renewed then, too."""
    running(rig)
    rig.db.run(lambda tx: epochs.trigger(tx, "job-1", 5, 1, 1, "checkpoint", "", []))
    rig.world.away["store"] = rig.world.now + 1.5
    rig.world.current = Unmoved()
    for child in rig.children:
        child.deliver(Ack(5, snapshot(child.deployment.subtask)))
    rig.step()
    rig.step(0.5)
    assert rig.node.hosted()
    rig.step(1.0)
    rig.world.current = None
    marks = rig.db.read(lambda tx: epochs.ack_marks(tx, "job-1", 5))
    assert len(marks) == 4


def test_a_lease_that_could_not_be_renewed_ends_everything_and_the_node_starts_anew(rig: Rig) -> None:
    """B8, C5: under another id; what it ran is not its own any more."""
    running(rig)
    before = rig.node.id
    rig.world.now += 2.75
    rig.node.step()
    assert all(c.killed for c in rig.children) and rig.node.hosted() == []
    rig.step()
    assert rig.node.id != before
    rig.step()
    assert len(rig.children) == 4


@pytest.mark.parametrize("error", [StoreError("value too long"), TypeError("not JSON")], ids=str)
def test_c12_a_report_that_is_refused_for_good_fails_its_own_job_only(rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """One job's impossible split must not hold up what another job on the same node has to say."""
    rig.place("bad")
    rig.place("good")
    rig.step()
    discover = epochs.discover

    def refused(tx: Any, job: str, *rest: Any) -> bool:
        if job == "bad":
            raise error
        return discover(tx, job, *rest)

    monkeypatch.setattr(epochs, "discover", refused)
    for job in ("bad", "good"):
        rig.of(job)[0].deliver(Discovered("in", [Split("x" * 300)], True))
        rig.all(Ready(0), job)
    rig.step()
    rig.step()
    assert rig.states("good") == {A.READY}
    assert len(rig.db.read(lambda tx: epochs.splits(tx, "good"))) == 1
    assert rig.states("bad") == {A.FAILED}
    assert {r.cause for r in rig.rows("bad").values()} == {"report"} and str(error) in rig.rows("bad")["in:0"].detail
    assert all(c.killed for c in rig.of("bad")) and not any(c.killed for c in rig.of("good"))


def test_a_subtask_that_cannot_be_started_is_failed_with_its_reason(rig: Rig) -> None:
    """C17: a refused start is a row, not silence."""
    rig.refuse = OSError("no more processes")
    rig.place()
    rig.step()
    rig.step()
    assert rig.states() == {A.FAILED}
    assert {r.cause for r in rig.rows().values()} == {"start"} and "no more processes" in rig.rows()["in:0"].detail


@pytest.mark.parametrize("damaged", [False, True], ids=["not encodable", "row not decodable"])
def test_a_start_that_fails_in_an_unforeseen_way_is_a_row_too(rig: Rig, damaged: bool) -> None:
    """A deployment that cannot be encoded, a row that cannot be decoded: the attempt is refused, the node goes on."""
    rig.refuse = None if damaged else OverflowError("can't serialize ints > 2**64 - 1")
    rig.place()
    if damaged:
        rig.change(overrides="not JSON")
    rig.step()
    rig.step()
    assert {(r.state, r.cause) for r in rig.rows().values()} == {(A.FAILED, "start")}
    assert rig.children == []


def test_a_subtask_that_ends_without_a_word_or_does_not_answer_is_failed(rig: Rig) -> None:
    """A dead process at once, a silent one after the liveness limit; one that finished before it died is finished."""
    running(rig)
    first, second, third, fourth = sorted(rig.children, key=lambda c: c.deployment.subtask)
    first.deliver(None)
    second.deliver(Finished())
    second.deliver(None)
    third.deliver(Stats(1, True, {}))
    rig.step()
    assert (rig.rows()["count:0"].state, rig.rows()["count:0"].cause) == (A.FAILED, "died")
    assert rig.rows()["count:1"].state is A.FINISHED
    for _ in range(12):
        third.deliver(Stats(1, True, {}))
        rig.step(0.2)
    assert rig.rows()["in:0"].state is A.READY
    assert (rig.rows()["in:1"].state, rig.rows()["in:1"].cause) == (A.FAILED, "silent") and fourth.killed


def test_a_busy_subtask_counts_as_progress(rig: Rig) -> None:
    """It is in the user's code: its counter stands still, its row does not."""
    running(rig)
    child = next(c for c in rig.children if c.deployment.subtask == "in:0")
    seen = set()
    for _ in range(8):
        child.deliver(Stats(7, True, {"records_in": 3}))
        rig.step(0.4)
        seen.add(rig.rows()["in:0"].progress)
    assert len(seen) > 2 and rig.rows()["in:0"].stats == '{"records_in":3}'


def test_t06_a_hint_of_an_older_term_or_for_another_node_is_counted_and_passed_over(rig: Rig) -> None:
    """A newer term is learned, never an older one."""
    rig.step()
    rig.node.hint(NodeHint(rig.node.id, "j", 1, 5, "run"))
    rig.node.hint(NodeHint(rig.node.id, "j", 1, 4, "run"))
    rig.node.hint(NodeHint("another", "j", 1, 9, "run"))
    assert (rig.node.term, rig.node.stale_hints) == (5, 2)


def test_the_nodes_row_shows_what_was_counted_since(rig: Rig) -> None:
    """From its registration on, and anew with each renewal, for metrics that are read from rows."""

    def shown() -> dict[str, int]:
        (found,) = rig.db.read(describe_nodes)
        return dict(found["counts"])

    rig.step()
    assert shown() == {"stale_hints": 0}
    rig.node.hint(NodeHint("another", "j", 1, 9, "run"))
    rig.step(1.0)
    assert shown() == {"stale_hints": 1}


def test_a_shut_down_hands_everything_back(rig: Rig) -> None:
    """Free of budget, at once, and the node is gone from the registry."""
    running(rig)
    rig.node.drain()
    assert {(r.state, r.cause) for r in rig.rows().values()} == {(A.FAILED, "handback")}
    assert rig.db.read(registry.active_nodes) == [] and all(c.killed for c in rig.children)
