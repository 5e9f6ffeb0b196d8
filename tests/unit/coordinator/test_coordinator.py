"""The coordinator: a job that fails is set aside and stops no other, what is not needed any more is forgotten, and it sleeps meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from tests.contract.store.stores import PLAN, insert_job, manifest, read_job, snapshot

from millstream.testing.outside import SimDatabase, SimStorage
from millstream.testing.world import EPOCH_0, Faults, SimChance, SimClock, World
from millstream_coordinator.coordinator import FORGET_EVERY, HELD, NODES_KEPT_US, Coordinator
from millstream_coordinator.reconciler import PENDING_UNKNOWN
from millstream_schema.connectors import SnapshotStorage
from millstream_schema.errors import ConfigurationError
from millstream_schema.hints import NoHints
from millstream_schema.manifest import SplitState
from millstream_schema.states import AssignmentState, JobState
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.migrate import create_schema

DAY = NODES_KEPT_US


class Unmoved:
    """An actor that never stands still; for an actor the database may be away."""

    def nap(self, where: str) -> None:
        """Nothing happens."""


class Rig:
    """A coordinator that leads, with a clock the test moves."""

    def __init__(self) -> None:
        self.world = World(0, Faults())
        self.db = SimDatabase(self.world, SimClock(self.world))
        create_schema(self.db)
        self.storage = SimStorage(self.world)
        self.coordinator = self.another("c1")
        self.db.run(lambda tx: registry.register_node(tx, "n1", "n1", 8, 10 * DAY, "{}"))

    def another(self, holder: str) -> Coordinator:
        return Coordinator(self.db, NoHints(), SimClock(self.world), SimChance(self.world), lambda _url: self.storage, holder, 10_000)

    def sweep(self, seconds: float = 1.1) -> float:
        self.world.now += seconds
        return self.coordinator.sweep()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.db.close()


def test_one_failing_job_is_set_aside_and_stops_nothing(rig: Rig) -> None:
    """B16, E18: its plan cannot be read; the job behind it is deployed all the same, and the row says what is wrong."""
    insert_job(rig.db, "a-broken", JobState.PENDING, generation=0, plan="not a plan")
    insert_job(rig.db, "b-whole", JobState.PENDING, generation=0)
    wait = rig.sweep()
    assert read_job(rig.db, "b-whole").state is JobState.DEPLOYING
    broken = read_job(rig.db, "a-broken")
    assert broken.state is JobState.PENDING and "please report" in broken.reason
    assert (rig.coordinator.set_aside, rig.coordinator.defects) == (1, 1)
    assert wait > 0, "a job that is set aside must not keep the sweep spinning"
    rig.sweep()
    assert rig.coordinator.set_aside == 1, "it is left alone for a while"
    rig.sweep(HELD)
    assert rig.coordinator.set_aside == 2


@pytest.mark.parametrize("restarted", [False, True], ids=["same coordinator", "another coordinator"])
def test_a_defect_told_in_a_row_is_cleared_once_the_job_goes_on(rig: Rig, restarted: bool) -> None:
    """The row is mended: the text does not stay as the reason of a job that runs."""
    row = insert_job(rig.db, "a", JobState.RUNNING, generation=1)
    change(rig, "a", plan="not a plan")
    rig.sweep()
    assert "please report" in read_job(rig.db, "a").reason
    change(rig, "a", plan=row.plan, settings=row.settings)
    if restarted:
        rig.coordinator.release()
        rig.coordinator = rig.another("c2")
    rig.sweep(HELD + 1)
    assert "please report" not in read_job(rig.db, "a").reason


def change(rig: Rig, job: str, **values: object) -> None:
    """Write to a job's row as an operator at the database does."""
    t = rig.db.tables.job
    rig.db.run(lambda tx: tx.update(t, t.c.id == job, **values))


def test_a_job_whose_storage_cannot_be_opened_stops_no_other(rig: Rig) -> None:
    """Its checkpoints URL is refused each time: the sweep goes on with the job behind it, and the row says what is wrong."""

    def opened(url: str) -> SnapshotStorage:
        if url == "tape:///x":
            raise ConfigurationError("checkpoint storage tape:///x: this kind is not known")
        return rig.storage

    coordinator = Coordinator(rig.db, NoHints(), SimClock(rig.world), SimChance(rig.world), opened, "c1", 10_000)
    insert_job(rig.db, "a-broken", JobState.PENDING, generation=0, settings='{"checkpoints":"tape:///x"}')
    insert_job(rig.db, "b-whole", JobState.PENDING, generation=0)
    rig.world.now += 1.1
    wait = coordinator.sweep()
    assert read_job(rig.db, "b-whole").state is JobState.DEPLOYING
    assert (read_job(rig.db, "a-broken").state, read_job(rig.db, "a-broken").reason) == (
        JobState.PENDING,
        "checkpoint storage tape:///x: this kind is not known",
    )
    assert wait > 0 and coordinator.counts() == {"set_aside": 1, "defects": 0, "tasks_set_aside": 0, "schedules_held": 0}


def test_a_split_in_two_snapshots_ends_the_job(rig: Rig) -> None:
    """A conflict is an error with a name, not a job that restarts for ever."""
    whole = manifest("j")
    from_reader = [s for s in whole.subtasks if s.subtask.startswith("in:")]
    split = SplitState("in", "twice", None, 1, False)
    twice = [type(s)(s.subtask, s.operators, s.segments, [split]) for s in from_reader]
    rest = [s for s in whole.subtasks if not s.subtask.startswith("in:")]
    damaged = type(whole)(**{**{f: getattr(whole, f) for f in whole.__struct_fields__}, "subtasks": [*rest, *twice], "splits": [split]})
    insert_job(rig.db, "j", JobState.RESTARTING, newest_durable=7)
    rig.db.run(lambda tx: epochs.write_manifest(tx, damaged))
    rig.sweep()
    row = read_job(rig.db, "j")
    assert row.state is JobState.FAILED and "'twice'" in row.reason


def test_t40_an_unreadable_newest_manifest_ends_the_job(rig: Rig) -> None:
    """It is never passed over for an older one."""
    insert_job(rig.db, "j", JobState.RESTARTING, newest_durable=7)
    rig.db.run(lambda tx: epochs.write_manifest(tx, manifest("j", 6)))
    rig.sweep()
    row = read_job(rig.db, "j")
    assert row.state is JobState.FAILED and "epoch 7" in row.reason


def test_b5_b12_a_standby_decides_nothing(rig: Rig) -> None:
    """Only the holder of the lease sweeps; when it is gone another takes over with a higher term."""
    rig.sweep()
    standby = rig.another("c2")
    insert_job(rig.db, "j", JobState.PENDING, generation=0)
    standby.sweep()
    assert not standby.leading and read_job(rig.db, "j").state is JobState.PENDING
    rig.world.now += 11
    standby.sweep()
    assert standby.leading and standby.term == 2 and read_job(rig.db, "j").state is JobState.DEPLOYING
    rig.sweep(0.1)
    assert not rig.coordinator.leading


def test_b6_a_standby_that_shuts_down_leaves_the_lease_alone(rig: Rig) -> None:
    """And the holder gives it back at once."""
    rig.sweep()
    standby = rig.another("c2")
    standby.sweep()
    standby.release()
    assert rig.db.read(registry.read_lease)["holder"] == "c1"  # type: ignore[index]
    rig.coordinator.release()
    assert standby.renew() and standby.term == 2


def test_rf12_a_read_error_stops_no_job(rig: Rig) -> None:
    """The database is away: nothing is decided from it."""
    insert_job(rig.db, "j", JobState.PENDING, generation=0)
    rig.sweep()
    rig.world.away["store"] = rig.world.now + 5
    rig.world.current = Unmoved()
    assert rig.sweep() > 0
    rig.world.current = None
    assert read_job(rig.db, "j").state is JobState.DEPLOYING


def test_c3_nodes_that_are_gone_for_a_day_are_forgotten(rig: Rig) -> None:
    """Each start has an id of its own: the table must not grow for ever."""
    rig.db.run(lambda tx: registry.register_node(tx, "old", "n", 8, 1, "{}"))
    rig.sweep(FORGET_EVERY + 1)
    nodes = rig.db.tables.node
    assert {r["id"] for r in rig.db.read(lambda tx: tx.rows(nodes.select()))} == {"n1", "old"}
    rig.sweep(DAY / 1e6)
    assert {r["id"] for r in rig.db.read(lambda tx: tx.rows(nodes.select()))} == {"n1"}


def test_a_savepoint_whose_id_another_job_took_meanwhile_is_taken_all_the_same(rig: Rig) -> None:
    """Its epoch is durable: it is saved under an id of its own, and the history says so."""
    rig.db.run(lambda tx: epochs.write_savepoint(tx, "sp", manifest("other", 3), "m"))
    insert_job(rig.db, "j", in_flight=9, next_epoch=10, wanted_savepoint="sp", generation=3, newest_durable=0, newest_committed=0)
    nodes = {s.id: "n1" for s in PLAN.subtasks()}
    rig.db.run(lambda tx: registry.assign(tx, "j", 3, nodes, 0))
    for subtask in nodes:
        rig.db.run(lambda tx, s=subtask: registry.start_assignment(tx, "j", 3, s, "n1", f"a-{s}"))  # type: ignore[misc]
        rig.db.run(lambda tx, s=subtask: registry.ready_assignment(tx, "j", 3, s, f"a-{s}", 0))  # type: ignore[misc]
    rig.db.run(lambda tx: epochs.trigger(tx, "j", 9, 3, 2, "savepoint", "sp", []))
    for subtask in nodes:
        rig.db.run(lambda tx, s=subtask: epochs.acknowledge(tx, "j", 9, 3, s, f"a-{s}", replace(snapshot(s), segments=[]), ""))  # type: ignore[misc]
    rig.sweep()
    assert read_job(rig.db, "j").newest_durable == 9
    assert [s["id"] for s in rig.db.read(lambda tx: epochs.savepoints(tx, "j"))] == ["sp-j-e9"]
    assert [s["id"] for s in rig.db.read(lambda tx: epochs.savepoints(tx, "other"))] == ["sp"]
    assert read_job(rig.db, "j").wanted_savepoint == ""
    told = [h["detail"] for h in rig.db.read(lambda tx: jobs.history(tx, "j")) if h["event"] == "savepoint"]
    assert told == ["sp is another job's by now: saved as sp-j-e9"]


def test_an_ending_whose_manifest_cannot_be_read_ends_with_its_pending_commits_unknown(rig: Rig) -> None:
    """What cannot be listed does not keep the job from ending: the row says that commits may be pending and why nobody knows which."""
    insert_job(rig.db, "j", newest_durable=7, newest_committed=6, generation=3)
    nodes = {s.id: "n1" for s in PLAN.subtasks()}
    rig.db.run(lambda tx: registry.assign(tx, "j", 3, nodes, 0))
    who = ("j", 3, next(iter(nodes)))
    rig.db.run(lambda tx: registry.end_assignment(tx, *who, "", AssignmentState.FAILED, "factory", "it is not registered"))
    rig.sweep()
    row = read_job(rig.db, "j")
    assert (row.state, row.ended, row.pending_commits) == (JobState.FAILED, 1, PENDING_UNKNOWN)
    assert row.reason.startswith("factory: ") and "which commits are pending is unknown" in row.reason and "epoch 7" in row.reason
    assert rig.coordinator.defects == 0


def test_a_finalising_deployment_without_its_manifest_ends_with_its_pending_commits_unknown(rig: Rig) -> None:
    """`jobs commit` of such a job fails with the cause, and does not say that nothing is pending."""
    insert_job(
        rig.db,
        "j",
        JobState.STOPPING,
        newest_durable=7,
        newest_committed=6,
        mode="finalize",
        target="STOPPED",
        stopping_us=EPOCH_0,
        deployed_us=0,
    )
    rig.sweep()
    row = read_job(rig.db, "j")
    assert (row.state, row.pending_commits) == (JobState.FAILED, PENDING_UNKNOWN)
