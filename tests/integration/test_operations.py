"""Operations on jobs that would lose or repeat output are refused, and say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream import CollectionSource, CollectSink, CollectTarget, JobBuilder, Pipelines
from millstream_coordinator.compatibility import orphaned_output
from millstream_coordinator.operations import Operations, Submission
from millstream_schema.connectors import Committable
from millstream_schema.errors import JobConflict, RestoreRefused
from millstream_schema.manifest import EpochManifest, SubtaskSnapshot
from millstream_schema.ports import SystemClock
from millstream_schema.states import Desired, JobState
from millstream_schema.store import epochs, jobs, registry, truth
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

pipelines = Pipelines()


@pipelines.define("one")
def one(job: JobBuilder, config: dict[str, Any]) -> None:
    job.source(CollectionSource([1, 2, 3]), uid="in").sink_to(
        CollectSink(str(config.get("target", "out")), CollectTarget()), uid=str(config.get("sink", "out"))
    )


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'm.db'}", SystemClock())
    create_schema(database)
    yield database
    database.close()


def submitted(database: Database, job: str, **changes: Any) -> None:
    pipeline = pipelines.build("one", changes.get("config", {}))
    Operations(database).submit(Submission(job=job, name=job, factory="one", **changes), pipeline)


def written(database: Database, job: str, **values: Any) -> None:
    """Put a job's row where the test needs it."""
    t = database.tables.job
    database.run(lambda tx: tx.update(t, t.c.id == job, **values))


def manifest(job: str, epoch: int) -> EpochManifest:
    held = Committable(f"{job}:out:0:{epoch}", "out", 0, epoch, 3, "c")
    snapshot = SubtaskSnapshot("in:0", ["in", "out"], [], committables=[held])
    return EpochManifest(job, epoch, "suspend", 1, 1, "m", "p", 128, [], {}, [snapshot], [], 1, 2)


def model(sink: str = "out") -> Any:
    return pipelines.build("one", {"sink": sink}).model


def saved(database: Database, savepoint: str, job: str, epoch: int) -> None:
    text = msgspec.json.encode(model()).decode()

    def work(tx: Any) -> None:
        epochs.write_savepoint(tx, savepoint, manifest(job, epoch), text)
        epochs.complete_savepoint(tx, savepoint, manifest(job, epoch))

    database.run(work)


def test_uncommitted_output_is_never_dropped_however_lenient_the_restore(database: Database) -> None:
    """A sink that is gone or renamed while it holds sealed output: refused, with the command that finishes it."""
    submitted(database, "a")
    database.run(lambda tx: epochs.write_manifest(tx, manifest("a", 50)))
    written(database, "a", state=JobState.STOPPED, ended=1, live_name=None, newest_durable=50, newest_committed=45, generation=1)
    changes = Submission(job="a", name="a", factory="one", config={"sink": "other"}, lenient=True)
    with pytest.raises(RestoreRefused, match="jobs commit"):
        Operations(database).resume("a", pipelines.build("one", {"sink": "other"}), changes)
    assert orphaned_output(manifest("a", 50), model(), {}) == []
    assert orphaned_output(manifest("a", 50), model(), {"out": "out2"}) != []


def test_a_savepoint_is_not_restored_twice_when_the_first_restore_has_committed_more(database: Database) -> None:
    """Effects behind the savepoint are visible through the job that was started from it: refused without --repeat-effects, for a new job and for the old one."""
    submitted(database, "a")
    database.run(lambda tx: epochs.write_manifest(tx, manifest("a", 50)))
    written(database, "a", state=JobState.STOPPED, ended=1, live_name=None, newest_durable=50, newest_committed=50, generation=1)
    saved(database, "s1", "a", 50)
    submitted(database, "b", savepoint="s1")
    written(database, "b", newest_durable=60, newest_committed=60)
    with pytest.raises(RestoreRefused, match="repeat-effects"):
        submitted(database, "c", savepoint="s1")
    with pytest.raises(RestoreRefused, match="repeat-effects"):
        Operations(database).resume("a", pipelines.build("one"), Submission(job="a", name="a", factory="one"))
    submitted(database, "c", savepoint="s1", repeat_effects=True)


def test_a_savepoint_id_that_is_wanted_already_is_refused(database: Database) -> None:
    """By another live job, or by the export that is under way."""
    submitted(database, "a")
    submitted(database, "b")
    operations = Operations(database)
    operations.savepoint("a", "nightly")
    assert operations.savepoint("a", "nightly").wanted_savepoint == "nightly"
    with pytest.raises(JobConflict, match="being taken of job a"):
        operations.savepoint("b", "nightly")
    with pytest.raises(JobConflict, match="being taken of job a"):
        operations.stop("a", Desired.SUSPEND, "nightly")
    assert operations.stop("b", Desired.SUSPEND, "other").desired is Desired.SUSPEND


def test_a_job_that_is_ending_takes_neither_resume_nor_another_ending(database: Database) -> None:
    """STOPPING after a used-up budget: what is asked meanwhile would silently not happen."""
    submitted(database, "a")
    written(database, "a", state=JobState.STOPPING, target="FAILED", mode="finalize")
    with pytest.raises(JobConflict, match="ending"):
        Operations(database).resume("a", pipelines.build("one"), Submission(job="a", name="a", factory="one"))
    with pytest.raises(JobConflict, match="ending"):
        Operations(database).stop("a", Desired.DRAIN)
    row = database.read(lambda tx: jobs.read_job(tx, "a"))
    assert row is not None and row.desired is Desired.RUN


@pytest.mark.parametrize(("committed", "deployed"), [(50, []), (49, ["a:out:0:50"])])
def test_a_savepoint_is_deployed_without_the_output_its_job_has_committed(database: Database, committed: int, deployed: list[str]) -> None:
    """Only what the row of the job it was taken of proves: with one epoch less, the output is deployed and committed once more."""
    submitted(database, "a")
    written(database, "a", state=JobState.STOPPED, ended=1, live_name=None, newest_durable=50, newest_committed=committed, generation=1)
    saved(database, "s1", "a", 50)
    submitted(database, "b", savepoint="s1")
    assert [c.id for c in handed(database, "b")] == deployed


def test_a_savepoint_whose_job_is_gone_is_deployed_with_all_its_output(database: Database) -> None:
    """Nothing proves a commit any more."""
    submitted(database, "a")
    written(database, "a", state=JobState.STOPPED, ended=1, live_name=None, newest_durable=50, newest_committed=50, generation=1)
    saved(database, "s1", "a", 50)
    submitted(database, "b", savepoint="s1")
    database.run(lambda tx: tx.delete(tx.t.job, tx.t.job.c.id == "a"))
    assert [c.id for c in handed(database, "b")] == ["a:out:0:50"]


def handed(database: Database, job: str) -> list[Committable]:
    """The committables that the first subtask of a job is deployed with."""

    def work(tx: Any) -> list[Committable]:
        row = jobs.read_job(tx, job)
        assert row is not None
        registry.register_node(tx, "n1", "n1", 4, 60_000_000, "{}")
        registry.assign(tx, job, row.generation, {"in:0": "n1"}, 0)
        (assignment,) = registry.assignments(tx, job, row.generation)
        deployment = truth.load_deployment(tx, assignment, "attempt")
        assert deployment is not None and deployment.restore_epoch == 50
        return [c for s in deployment.restored for c in s.committables]

    return database.run(work)


def test_another_target_is_taken_when_all_output_is_committed_and_refused_else(database: Database) -> None:
    """What is uncommitted lies at the old target: the refusal names the setting and the command that finishes it."""
    submitted(database, "a")
    written(database, "a", state=JobState.STOPPED, ended=1, live_name=None, newest_durable=50, newest_committed=49, generation=1)
    saved(database, "s1", "a", 50)
    with pytest.raises(RestoreRefused, match=r"its name has changed.*jobs commit"):
        submitted(database, "b", savepoint="s1", config={"target": "elsewhere"})
    written(database, "a", newest_committed=50)
    submitted(database, "b", savepoint="s1", config={"target": "elsewhere"})
    assert handed(database, "b") == []
