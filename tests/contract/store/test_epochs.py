"""Epochs, acknowledgements, manifests, savepoints and splits: from-states, repeats, stale answers, long bodies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.contract.store.stores import PLAN, Opened, insert_job, job_values, manifest, read_job, snapshot, table_rows, text

from millstream_schema.connectors import Split
from millstream_schema.errors import SnapshotMissing, SnapshotUnreadable, StoreError
from millstream_schema.manifest import EpochManifest, Renames, SplitState
from millstream_schema.plan import Subtask
from millstream_schema.states import EpochState, JobState, SplitOwner
from millstream_schema.store import epochs, jobs, registry, truth
from millstream_schema.store.database import Database
from millstream_schema.store.rows import JobRow

E = EpochState
JOB = "job-1"


def trigger(db: Database, epoch: int = 7, generation: int = 3, kind: str = "checkpoint", splits: list[SplitState] | None = None) -> None:
    db.run(lambda tx: epochs.trigger(tx, JOB, epoch, generation, 2, kind, "", splits or []))


def move(db: Database, after: EpochState, epoch: int = 7) -> bool:
    return db.run(lambda tx: epochs.move_epoch(tx, JOB, epoch, after, reason="why"))


def state(db: Database, epoch: int = 7) -> EpochState:
    row = db.read(lambda tx: epochs.read_epoch(tx, JOB, epoch))
    assert row is not None
    return row.state


def acknowledge(db: Database, subtask: str = "in:0", epoch: int = 7, generation: int = 3, declined: str = "", filler: str = "") -> bool:
    given = None if declined else snapshot(subtask, filler=filler)
    return db.run(lambda tx: epochs.acknowledge(tx, JOB, epoch, generation, subtask, "a-1", given, declined))


# -- epochs


def test_t36_an_epoch_id_is_used_once(db: Database) -> None:
    """The database refuses a second row of the same epoch."""
    trigger(db)
    with pytest.raises(StoreError):
        trigger(db, generation=4)
    row = db.read(lambda tx: epochs.read_epoch(tx, JOB, 7))
    assert row is not None and (row.generation, row.state) == (3, E.TRIGGERED)
    assert db.read(lambda tx: epochs.read_epoch(tx, JOB, 8)) is None


def test_e10_an_epoch_moves_as_the_table_of_transitions_says_only(db: Database) -> None:
    """An aborted epoch does not come back to life; a durable one is not aborted; a repeat answers no."""
    trigger(db)
    assert not move(db, E.COMMITTED)
    assert move(db, E.PRECOMMITTED)
    assert not move(db, E.PRECOMMITTED)
    assert move(db, E.DURABLE)
    assert not move(db, E.ABORTED)
    assert state(db) is E.DURABLE
    assert move(db, E.COMMITTED)
    trigger(db, 8)
    assert move(db, E.ABORTED, 8)
    assert not move(db, E.DURABLE, 8)
    assert state(db, 8) is E.ABORTED
    assert not move(db, E.DURABLE, 99)


def test_a_durable_epoch_shows_the_id_it_was_saved_under(db: Database) -> None:
    """One that is not durable was not saved."""
    trigger(db)
    assert not db.run(lambda tx: epochs.rename_savepoint(tx, JOB, 7, "own"))
    move(db, E.DURABLE)
    assert db.run(lambda tx: epochs.rename_savepoint(tx, JOB, 7, "own"))
    row = db.read(lambda tx: epochs.read_epoch(tx, JOB, 7))
    assert row is not None and (row.savepoint, row.state) == ("own", E.DURABLE)


def test_commits_subsume_and_repeat_without_effect(db: Database) -> None:
    """T-26: every durable epoch up to the one named; aborted ones stay aborted; a late one is a no-op."""
    for epoch, to in ((5, E.DURABLE), (6, E.ABORTED), (7, E.DURABLE), (8, E.DURABLE)):
        trigger(db, epoch)
        move(db, to, epoch)
    assert db.read(lambda tx: epochs.uncommitted(tx, JOB)) == 3
    assert db.run(lambda tx: epochs.commit_epochs(tx, JOB, 7)) == 2
    assert db.run(lambda tx: epochs.commit_epochs(tx, JOB, 7)) == 0
    assert db.run(lambda tx: epochs.commit_epochs(tx, JOB, 5)) == 0
    assert [state(db, e) for e in (5, 6, 7, 8)] == [E.COMMITTED, E.ABORTED, E.COMMITTED, E.DURABLE]
    assert db.read(lambda tx: epochs.uncommitted(tx, JOB)) == 1


def test_aborted_epochs_of_this_generation_are_listed(db: Database) -> None:
    """Above the newest durable one; those of older generations are nobody's business."""
    for epoch, generation, to in ((4, 2, E.ABORTED), (5, 3, E.ABORTED), (6, 3, E.DURABLE), (7, 3, E.ABORTED), (8, 3, E.ABORTED)):
        trigger(db, epoch, generation)
        move(db, to, epoch)
    assert db.read(lambda tx: epochs.aborted_since(tx, JOB, 3, 6)) == [7, 8]
    assert db.read(lambda tx: epochs.aborted_since(tx, JOB, 3, 0)) == [5, 7, 8]
    assert [e.epoch for e in db.read(lambda tx: epochs.list_epochs(tx, JOB, 3))] == [8, 7, 6]


def test_e13_old_epochs_are_forgotten_unless_they_wait_for_their_commit(db: Database) -> None:
    """Rows do not pile up; a durable epoch that is not committed stays whatever its age."""
    for epoch, to in ((1, E.COMMITTED), (2, E.ABORTED), (3, E.DURABLE), (4, E.COMMITTED)):
        trigger(db, epoch)
        acknowledge(db, epoch=epoch)
        move(db, E.DURABLE if to is E.COMMITTED else to, epoch)
    db.run(lambda tx: epochs.move_epoch(tx, JOB, 1, E.COMMITTED))
    db.run(lambda tx: epochs.delete_epochs(tx, JOB, 4))
    assert [e.epoch for e in db.read(lambda tx: epochs.list_epochs(tx, JOB, 9))] == [4, 3]
    assert {a["epoch"] for a in table_rows(db, "ack")} == {4}


# -- acknowledgements


def test_e5_an_acknowledgement_is_one_row_however_often_it_comes(db: Database) -> None:
    """The first counts; a repeat, also one that declines, answers no and changes nothing."""
    trigger(db)
    assert acknowledge(db)
    before = table_rows(db, "ack")
    assert not acknowledge(db)
    assert not acknowledge(db, declined="disk full")
    assert table_rows(db, "ack") == before
    assert [(m.subtask, m.generation, m.declined) for m in db.read(lambda tx: epochs.ack_marks(tx, JOB, 7))] == [("in:0", 3, "")]


@pytest.mark.parametrize("over", [E.PRECOMMITTED, E.DURABLE, E.ABORTED])
def test_t42_an_acknowledgement_of_an_epoch_that_is_over_is_refused(db: Database, over: EpochState) -> None:
    """It frees nothing and changes nothing: a durable epoch's segments stay."""
    trigger(db)
    acknowledge(db)
    move(db, over)
    before = table_rows(db, "ack")
    assert not acknowledge(db, "in:1")
    assert table_rows(db, "ack") == before


def test_t41_a_stale_or_unknown_acknowledgement_is_refused(db: Database) -> None:
    """Of another generation, older or newer, of an epoch or a job that does not exist."""
    trigger(db)
    assert not acknowledge(db, generation=2)
    assert not acknowledge(db, generation=4)
    assert not acknowledge(db, epoch=8)
    assert db.read(lambda tx: epochs.ack_marks(tx, JOB, 7)) == []


def test_e6_what_declined_has_no_snapshot(db: Database) -> None:
    """An empty snapshot is never taken for one."""
    trigger(db)
    acknowledge(db, "in:0", declined="disk full")
    acknowledge(db, "in:1")
    assert [s.subtask for s in db.read(lambda tx: epochs.ack_snapshots(tx, JOB, 7))] == ["in:1"]
    assert {m.subtask: m.declined for m in db.read(lambda tx: epochs.ack_marks(tx, JOB, 7))} == {"in:0": "disk full", "in:1": ""}


# -- long bodies


@pytest.mark.parametrize("size", [70_000, 1_200_000])
def test_long_manifests_snapshots_and_savepoints_come_back_whole(db: Database, size: int) -> None:
    """Above 64 KiB and above 1 MiB: a text that was cut off would not match its checksum."""
    big = "é😀" * (size // 6)
    whole = manifest(filler=big)
    db.run(lambda tx: epochs.write_manifest(tx, whole))
    assert db.read(lambda tx: epochs.read_manifest(tx, JOB, 7)) == whole
    db.run(lambda tx: epochs.write_savepoint(tx, "sp", whole, big))
    row = db.read(lambda tx: epochs.read_savepoint(tx, "sp"))
    assert row is not None and row["model"] == big
    trigger(db)
    acknowledge(db, filler=big)
    assert db.read(lambda tx: epochs.ack_snapshots(tx, JOB, 7)) == [snapshot("in:0", filler=big)]


# -- manifests


def test_e12_a_manifest_is_written_once(db: Database) -> None:
    """A second one of the same epoch is refused: the first is the truth."""
    db.run(lambda tx: epochs.write_manifest(tx, manifest()))
    with pytest.raises(StoreError):
        db.run(lambda tx: epochs.write_manifest(tx, manifest(filler="other")))
    assert db.read(lambda tx: epochs.read_manifest(tx, JOB, 7)) == manifest()


def test_e23_a_missing_and_a_damaged_manifest_are_two_errors(db: Database) -> None:
    """Both name job and epoch; neither is an empty start."""
    with pytest.raises(SnapshotMissing, match="job-1, epoch 7"):
        db.read(lambda tx: epochs.read_manifest(tx, JOB, 7))
    db.run(lambda tx: epochs.write_manifest(tx, manifest()))
    t = db.tables.manifest
    db.run(lambda tx: tx.update(t, t.c.job == JOB, checksum="0" * 32))
    with pytest.raises(SnapshotUnreadable, match="job-1/7"):
        db.read(lambda tx: epochs.read_manifest(tx, JOB, 7))


def test_e17_manifests_are_deleted_by_job_and_epoch(db: Database) -> None:
    """Another job's of the same epoch stay."""
    for job, epoch in ((JOB, 6), (JOB, 7), ("job-2", 6)):
        db.run(lambda tx, j=job, e=epoch: epochs.write_manifest(tx, manifest(j, e)))  # type: ignore[misc]
    db.run(lambda tx: epochs.delete_manifests(tx, JOB, [6]))
    db.run(lambda tx: epochs.delete_manifests(tx, JOB, []))
    assert db.read(lambda tx: epochs.manifest_epochs(tx, JOB)) == [7]
    assert db.read(lambda tx: epochs.manifest_epochs(tx, "job-2")) == [6]


# -- savepoints


def test_a_savepoint_goes_from_copying_to_complete_once(db: Database) -> None:
    """A repeat of either step changes nothing; an error is noted only while it is being copied."""
    db.run(lambda tx: epochs.write_savepoint(tx, "sp", manifest(), "m"))
    assert db.run(lambda tx: epochs.fail_savepoint(tx, "sp", "disk full"))
    assert [(r["state"], r["error"]) for r in db.read(epochs.copying_savepoints)] == [("COPYING", "disk full")]
    assert db.run(lambda tx: epochs.complete_savepoint(tx, "sp", manifest(filler="copied")))
    assert not db.run(lambda tx: epochs.complete_savepoint(tx, "sp", manifest(filler="again")))
    assert not db.run(lambda tx: epochs.fail_savepoint(tx, "sp", "late"))
    db.run(lambda tx: epochs.write_savepoint(tx, "sp", manifest(filler="other"), "m"))
    assert db.read(epochs.copying_savepoints) == []
    row = db.read(lambda tx: epochs.read_savepoint(tx, "sp"))
    assert row is not None and (row["state"], row["error"]) == ("COMPLETE", "") and "copied" in row["body"]
    assert [s["id"] for s in db.read(lambda tx: epochs.savepoints(tx, JOB))] == ["sp"]


def test_a_generation_starts_from_the_newest_durable_epoch_else_the_savepoint_else_nothing(db: Database) -> None:
    """ "None" and "unreadable" are different at each of the three."""

    def restored(job: JobRow) -> EpochManifest | None:
        return db.read(lambda tx: epochs.restored_manifest(tx, job))

    fresh = insert_job(db)
    assert restored(fresh) is None
    from_savepoint = msgspec.structs.replace(fresh, restore_from="sp")
    with pytest.raises(SnapshotMissing, match="sp"):
        restored(from_savepoint)
    db.run(lambda tx: epochs.write_savepoint(tx, "sp", manifest("other", 3), "m"))
    with pytest.raises(SnapshotUnreadable, match="COPYING"):
        restored(from_savepoint)
    db.run(lambda tx: epochs.complete_savepoint(tx, "sp", manifest("other", 3)))
    assert restored(from_savepoint) == manifest("other", 3)
    durable = msgspec.structs.replace(from_savepoint, newest_durable=7)
    with pytest.raises(SnapshotMissing, match="epoch 7"):
        restored(durable)
    db.run(lambda tx: epochs.write_manifest(tx, manifest()))
    assert restored(durable) == manifest()


def test_t03_renames_hold_for_the_epoch_they_were_given_for(db: Database) -> None:
    """The next manifest has the new names already."""
    names = text(Renames(7, {"in": "input"}))
    row = insert_job(db, renames=names, newest_durable=7)
    db.run(lambda tx: epochs.write_manifest(tx, manifest()))
    found = db.read(lambda tx: epochs.restored_manifest(tx, row))
    assert found is not None and {o for s in found.subtasks for o in s.operators} == {"input", "count", "out"}
    db.run(lambda tx: epochs.write_manifest(tx, manifest(epoch=8)))
    later = db.read(lambda tx: epochs.restored_manifest(tx, msgspec.structs.replace(row, newest_durable=8)))
    assert later == manifest(epoch=8)


# -- splits


def discover(db: Database, names: list[str], complete: bool = True, generation: int = 3) -> bool:
    return db.run(lambda tx: epochs.discover(tx, JOB, generation, "in", [Split(n, {"of": n}) for n in names], complete))


def split_states(db: Database) -> dict[str, tuple[str, int, str]]:
    return {s.split: (s.state.value, s.owner, s.cursor) for s in db.read(lambda tx: epochs.splits(tx, JOB))}


def test_discovery_adds_what_is_new_and_touches_nothing_else(db: Database) -> None:
    """A repeat finds its rows; a split that is owned or finished stays so; each report raises the revision nodes look at."""
    insert_job(db, splits_rev=0)
    assert discover(db, ["a", "b"], complete=False)
    db.run(lambda tx: epochs.own_splits(tx, JOB, {("in", "a"): 1}))
    assert discover(db, ["a", "b", "c"])
    assert split_states(db) == {"a": ("ASSIGNED", 1, "null"), "b": ("UNASSIGNED", -1, "null"), "c": ("UNASSIGNED", -1, "null")}
    assert db.read(lambda tx: epochs.discoveries(tx, JOB, 3)) == {"in": True}
    assert read_job(db).splits_rev == 2


def test_discovery_of_another_generation_is_refused(db: Database) -> None:
    """A stale reader adds no rows and does not say that discovery is over; an older generation's word does not count for this one."""
    insert_job(db)
    assert not discover(db, ["a"], generation=2)
    assert not discover(db, ["a"], generation=4)
    assert split_states(db) == {} and table_rows(db, "source") == []
    discover(db, [])
    assert db.read(lambda tx: epochs.discoveries(tx, JOB, 4)) == {}


def test_t61_only_an_unassigned_split_is_handed_out(db: Database) -> None:
    """A repeat with another owner takes nothing away, and says so."""
    insert_job(db)
    discover(db, ["a"])
    assert db.run(lambda tx: epochs.own_splits(tx, JOB, {("in", "a"): 0})) == []
    assert db.run(lambda tx: epochs.own_splits(tx, JOB, {("in", "a"): 1, ("in", "ghost"): 1})) == [("in", "a"), ("in", "ghost")]
    assert split_states(db) == {"a": ("ASSIGNED", 0, "null")}


def test_a_finished_split_stays_finished_at_its_first_cursor(db: Database) -> None:
    """A late repeat of an older manifest does not move it; it is told, and so is a split without a row."""
    insert_job(db)
    discover(db, ["a"])

    def done(cursor: int, split: str = "a") -> list[tuple[str, str]]:
        return db.run(lambda tx: epochs.finish_splits(tx, JOB, [SplitState("in", split, None, cursor, True)]))

    assert done(9) == []
    assert done(4) == [("in", "a")]
    assert done(4, "ghost") == [("in", "ghost")]
    assert split_states(db) == {"a": ("FINISHED", -1, "9")}


def test_t62_a_reset_puts_every_split_where_the_manifest_says(db: Database) -> None:
    """Owned, free, finished; rows the manifest does not know go back to be handed out from their beginning; missing rows are made; a repeat is the same."""
    insert_job(db)
    discover(db, ["a", "b", "c"])
    db.run(lambda tx: epochs.own_splits(tx, JOB, {("in", n): 1 for n in "abc"}))
    states = [
        (SplitState("in", "a", {"n": 1}, 5, False), 0),
        (SplitState("in", "b", None, 8, True), -1),
        (SplitState("in", "new", None, None, False), -1),
    ]
    for _ in range(2):
        db.run(lambda tx: epochs.reset_splits(tx, JOB, states))
        assert split_states(db) == {
            "a": ("ASSIGNED", 0, "5"), "b": ("FINISHED", -1, "8"), "c": ("UNASSIGNED", -1, "null"), "new": ("UNASSIGNED", -1, "null"),
        }  # fmt: skip
    assert next(s for s in db.read(lambda tx: epochs.splits(tx, JOB)) if s.split == "a").body == '{"n":1}'


# -- channels


def test_t44_channels_are_forgotten_by_generation(db: Database) -> None:
    """Only those below the job's are old."""
    for generation in (1, 2, 3):
        db.run(lambda tx, g=generation: epochs.write_channels(tx, PLAN.channels(JOB, g)))  # type: ignore[misc]
    old = db.read(lambda tx: epochs.old_channels(tx, JOB, 3))
    assert {c.generation for c in old} == {1, 2} and len(old) == 8
    assert sorted(c.name() for c in old if c.generation == 1) == sorted(c.name() for c in PLAN.channels(JOB, 1))
    db.run(lambda tx: epochs.forget_channels(tx, JOB, 3))
    assert db.read(lambda tx: epochs.old_channels(tx, JOB, 3)) == []
    assert len(db.read(lambda tx: epochs.old_channels(tx, JOB, 4))) == 4


# -- what a node is told


def told(db: Database, node: str = "n1") -> tuple[Any, Any]:
    rows, truths = db.read(lambda tx: truth.node_truth(tx, node))
    return rows, truths.get(JOB)


def placed(db: Database, generation: int = 3) -> None:
    db.run(lambda tx: registry.assign(tx, JOB, generation, {s.id: "n1" for s in PLAN.subtasks()}, 0))


def test_a_node_is_told_what_it_runs_and_what_its_job_is_at(db: Database) -> None:
    """Assignments, epoch in flight, newest durable epoch, aborted ones and splits: one read answers a renewal."""
    insert_job(db, in_flight=9, newest_durable=7)
    placed(db)
    discover(db, ["a", "b"])
    db.run(lambda tx: epochs.own_splits(tx, JOB, {("in", "a"): 0}))
    trigger(db, 8)
    move(db, E.ABORTED, 8)
    trigger(db, 9, kind="savepoint")
    rows, job = told(db)
    assert [r.subtask for r in rows] == ["count:0", "count:1", "in:0", "in:1"]
    assert (job.running, job.trigger, job.durable, job.aborted) == (True, (9, "savepoint"), 7, [8])
    assert [s.split_id for s in job.owned(Subtask("in", 0))] == ["a"] and job.owned(Subtask("in", 1)) == []
    assert not job.all_assigned(Subtask("in", 0))
    db.run(lambda tx: epochs.own_splits(tx, JOB, {("in", "b"): 1}))
    assert told(db)[1].all_assigned(Subtask("in", 0))
    assert told(db, "n2") == ([], None)


@pytest.mark.parametrize(
    ("changes", "epoch"),
    [
        ({"in_flight": 9}, E.PRECOMMITTED),
        ({"in_flight": 9}, E.ABORTED),
        ({"in_flight": 0}, E.TRIGGERED),
        ({"in_flight": 9, "generation": 4}, E.TRIGGERED),
    ],
    ids=str,
)
def test_t34_nobody_is_told_to_trigger_an_epoch_that_is_over_or_not_theirs(
    db: Database, changes: dict[str, Any], epoch: EpochState
) -> None:
    """Only the one in flight, of this generation, and only while it waits."""
    insert_job(db, **changes)
    placed(db, changes.get("generation", 3))
    trigger(db, 9, generation=3)
    if epoch is not E.TRIGGERED:
        move(db, epoch, 9)
    assert told(db)[1].trigger is None


@pytest.mark.parametrize("state", ["DEPLOYING", "STOPPING"])
def test_a_job_that_does_not_run_triggers_and_aborts_nothing(db: Database, state: str) -> None:
    """Before RUNNING sources read nothing, after it nothing is cut."""
    insert_job(db, JOB, JobState(state), in_flight=9)
    placed(db)
    trigger(db, 9)
    job = told(db)[1]
    assert (job.running, job.trigger, job.aborted) == (False, None, [])


def test_a_deployment_holds_what_its_subtask_needs_and_no_more(db: Database) -> None:
    """At the same shape its own snapshot, its splits, the epoch; a row of an older generation gives none."""
    insert_job(db, newest_durable=7)
    db.run(lambda tx: epochs.write_manifest(tx, manifest()))
    placed(db)
    discover(db, ["a", "b"])
    db.run(lambda tx: epochs.own_splits(tx, JOB, {("in", "a"): 0, ("in", "b"): 1}))
    row = next(a for a in db.read(lambda tx: registry.assignments(tx, JOB, 3)) if a.subtask == "in:0")
    d = db.read(lambda tx: truth.load_deployment(tx, row, "a-9"))
    assert d is not None
    assert (d.attempt, d.generation, d.restore_epoch, d.subtask, d.rescaled, d.lenient) == ("a-9", 3, 7, "in:0", False, False)
    assert [s.subtask for s in d.restored] == ["in:0"]
    assert [s.split_id for s in d.splits] == ["a"] and d.known_splits == {"in": ["a", "b"]}
    assert db.read(lambda tx: truth.load_deployment(tx, msgspec.structs.replace(row, generation=2), "a-9")) is None
    assert db.read(lambda tx: truth.load_deployment(tx, msgspec.structs.replace(row, job="ghost"), "a-9")) is None


def test_after_a_rescale_a_deployment_holds_every_old_snapshot_of_its_operators(db: Database) -> None:
    """E25: never "some" subtask's state."""
    insert_job(db, newest_durable=7)
    old = manifest()
    wide = msgspec.structs.replace(old, subtasks=[*old.subtasks, snapshot("count:2")])
    db.run(lambda tx: epochs.write_manifest(tx, wide))
    placed(db)
    row = next(a for a in db.read(lambda tx: registry.assignments(tx, JOB, 3)) if a.subtask == "count:0")
    d = db.read(lambda tx: truth.load_deployment(tx, row, "a"))
    assert d is not None and d.rescaled and [s.subtask for s in d.restored] == ["count:0", "count:1", "count:2"]
    reader = db.read(lambda tx: truth.load_deployment(tx, msgspec.structs.replace(row, subtask="in:0"), "a"))
    assert reader is not None and not reader.rescaled and [s.subtask for s in reader.restored] == ["in:0"]


def test_an_unreadable_manifest_stops_the_deployment(db: Database) -> None:
    """T-40: it is not a fresh start."""
    insert_job(db, newest_durable=7)
    placed(db)
    row = db.read(lambda tx: registry.assignments(tx, JOB, 3))[0]
    with pytest.raises(SnapshotMissing):
        db.read(lambda tx: truth.load_deployment(tx, row, "a"))


def test_lock_job_gives_the_row_or_nothing(db: Database, store: Opened) -> None:
    """What is read under the lock is what a write is guarded by."""
    row = insert_job(db)
    assert db.run(lambda tx: jobs.lock_job(tx, JOB)) == row
    assert db.run(lambda tx: jobs.lock_job(tx, "ghost")) is None
    assert set(job_values()) < set(msgspec.structs.asdict(row))
    assert SplitOwner.UNASSIGNED == "UNASSIGNED"
