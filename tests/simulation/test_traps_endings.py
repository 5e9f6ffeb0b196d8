"""Known traps of endings, savepoints and finished inputs, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.simulation.base import counting
from tests.simulation.scene import Scene
from tests.simulation.workloads import visible_is

from millstream.builder import JobBuilder
from millstream.testing.actors import SimChild
from millstream_schema.channels import ChannelId
from millstream_schema.connectors import Handle
from millstream_schema.errors import ChannelBroken, JobConflict, StorageUnavailable
from millstream_schema.states import Desired, EpochState, JobState
from millstream_schema.store import epochs
from millstream_schema.values import TypeRegistry
from millstream_tasks.runner.inputs import InputChannel
from millstream_tasks.sinks.memory import CollectSink

Make = Callable[..., Scene]


def exhausted(child: SimChild) -> bool:
    """Whether the source that this subtask reads has reported its end."""
    return child.runner.feed is not None and child.runner.feed.exhausted


class Windowed(Scene):
    """Tumbling windows of a second over event time; the last ones stay open until the input ends."""

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(self.splits, self.per_split, self.rate, self.value), uid="records")
        windows = records.assign_timestamps(lambda r: r[1] * 50, uid="times").key_by(lambda r: r[0]).tumbling(1000)
        windows.aggregate(int, lambda n, _: n + 1, uid="sums").sink_to(CollectSink("out", self.target), uid="out")

    def counts(self, cursors: dict[str, Any]) -> Any:
        sums: Counter[Any] = Counter()
        for split, cursor in cursors.items():
            for i in range(int(cursor or 0)):
                key, position = self.value(int(split), i)
                sums[key, position * 50 // 1000 * 1000] += 1
        return Counter((k, s, s + 1000, n) for (k, s), n in sums.items())


class OneEnds(Scene):
    """A source that ends soon beside one that goes on."""

    def define(self, job: JobBuilder) -> None:
        short = job.source(counting(1, 20, 20.0, lambda s, i: ("short", i), name="short"), uid="short", parallelism=1)
        long = job.source(counting(1, 120, 20.0, lambda s, i: ("long", i), name="long"), uid="long", parallelism=1)
        both = short.union(long, uid="both")
        both.key_by(lambda r: r[0]).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(CollectSink("out", self.target), uid="out")

    parallelism = 1

    def counts(self, cursors: dict[str, Any]) -> Any:
        return Counter([("short", n) for n in range(1, 21)] + [("long", n) for n in range(1, 121)])


def test_t17_an_exhausted_source_goes_on_injecting_barriers(scene: Make) -> None:
    """One of two sources has ended: epochs go on becoming durable, each acknowledged by every subtask, and the result is whole."""
    job = scene(OneEnds)
    job.until(lambda: any(exhausted(a) for a in job.children("short")), "the short source exhausted")
    ended = job.row.next_epoch
    job.until_durable(ended + 2)
    snapshots = {s.subtask: s for s in job.manifest().subtasks}
    assert {"short:0", "long:0"} <= set(snapshots)
    assert snapshots["short:0"].exhausted
    job.complete()


def test_t17_an_end_before_the_final_barrier_is_an_error() -> None:
    """END that does not follow a final barrier breaks the channel."""

    class Nothing:
        def take(self) -> None:
            return None

        def processed(self, number: int) -> None:
            raise AssertionError(number)

        def close(self) -> None:
            raise AssertionError

    channel = InputChannel(ChannelId("j", 1, "e0", 0, 0), Nothing(), TypeRegistry())
    with pytest.raises(ChannelBroken, match="final barrier"):
        channel.end()


def test_t20_the_data_behind_the_last_periodic_epoch_is_committed(scene: Make) -> None:
    """No periodic epoch is ever due: the final epoch commits everything, and the job ends after it."""
    job = scene(epoch_interval_ms=9_000)
    job.complete()
    assert [e.kind for e in job.epoch_rows()][-1] == "final"
    assert job.epoch_rows()[-1].state is EpochState.COMMITTED


@pytest.mark.parametrize("desired", [Desired.CANCEL, Desired.DRAIN, Desired.SUSPEND, None])
def test_t21_no_ending_leaves_an_open_transaction(scene: Make, desired: Desired | None) -> None:
    """Nothing is staged after the end, whatever way it ended, and what is visible is what lies before the durable offsets."""
    job = scene()
    job.until_committed(2)
    if desired is not None:
        job.stop(desired, "sp" if desired is Desired.SUSPEND else "")
    job.sim.run_to_end(job.job)
    assert not job.target.staged()
    assert job.visible() == job.before(job.manifest())


def test_t66_drain_commits_the_final_offsets(scene: Make) -> None:
    """After DRAIN the newest manifest holds the offsets up to which everything is visible, and resuming goes on exactly there."""
    job = scene()
    job.until_committed(2)
    job.stop(Desired.DRAIN)
    assert job.sim.run_to_end(job.job) is JobState.FINISHED
    manifest = job.manifest()
    assert manifest.kind == "drain"
    assert job.row.newest_committed == manifest.epoch
    assert job.visible() == job.before(manifest)
    job.sim.resume(job.job, job.submission())
    job.complete()


def test_t72_the_last_input_that_ends_fires_every_window_once(scene: Make) -> None:
    """All windows that were open at the end are there, once."""
    job = scene(Windowed)
    job.complete()


def test_t91_suspend_fires_nothing_and_drain_fires_everything(scene: Make) -> None:
    """SUSPEND leaves open windows open: resumed, each fires once with all its records. DRAIN fires what is open."""
    job = scene(Windowed)
    job.until_committed(2)
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    assert not job.visible() - job.reference, "a window fired with a part of its records"
    job.sim.resume(job.job, job.submission())
    job.complete()
    other = scene(Windowed, seed=1)
    other.until_committed(2)
    other.stop(Desired.DRAIN)
    assert other.sim.run_to_end(other.job) is JobState.FINISHED
    assert other.visible() == other.before(other.manifest())


def test_t92_suspend_while_the_sources_finish_is_never_half(scene: Make) -> None:
    """SUSPEND asked when the sources are exhausted, at different moments: the job ends suspended or finished, and is whole after resume."""
    for seed, wait in enumerate((0.0, 0.1, 0.3, 0.6, 1.0)):
        job = scene(OneEnds if seed % 2 else Scene, seed=seed)
        job.until(lambda job=job: any(exhausted(c) for c in job.children()), "a source exhausted")  # type: ignore[misc]
        job.sim.run_for(wait)
        try:
            job.stop(Desired.SUSPEND, f"sp{seed}")
        except JobConflict:
            assert job.row.state is JobState.FINISHED
        state = job.sim.run_to_end(job.job, 60)
        assert state in (JobState.STOPPED, JobState.FINISHED)
        if state is JobState.STOPPED:
            saved = job.sim.database.read(lambda tx, s=seed: epochs.read_savepoint(tx, f"sp{s}"))  # type: ignore[misc]
            assert saved is not None
            assert saved["state"] == "COMPLETE"
            assert job.row.newest_durable == saved["epoch"]
        job.sim.resume(job.job, job.submission())
        job.complete()


def test_t92_suspend_after_every_source_is_exhausted_keeps_the_savepoint_the_newest(scene: Make) -> None:
    """No failure behind the durable savepoint may lead to a newer epoch: the savepoint could not be restored any more."""
    job = scene(epoch_interval_ms=2000)
    job.until(lambda: [exhausted(c) for c in job.children("records")] == [True, True], "every source exhausted")
    job.stop(Desired.SUSPEND, "sp")
    state = job.sim.run_to_end(job.job, 60)
    saved = job.sim.database.read(lambda tx: epochs.read_savepoint(tx, "sp"))
    if state is JobState.STOPPED:
        assert saved is not None
        assert saved["epoch"] == job.row.newest_durable
    visible_is(job, job.reference)


def test_t95_a_savepoint_that_cannot_be_copied_does_not_hold_the_job_up(scene: Make) -> None:
    """The copy fails for a while: the job goes on, the savepoint says why, and is complete once the storage is back."""
    job = scene()
    storage = job.sim.storage
    copy, failing = storage.copy, [True]

    def copy_or_not(handle: Handle, key: str) -> Handle:
        if failing[0]:
            raise StorageUnavailable("no space left")
        return copy(handle, key)

    storage.copy = copy_or_not  # type: ignore[method-assign]
    job.until_durable(1)
    job.sim.operations.savepoint(job.job, "sp")
    job.until(lambda: job.sim.database.read(lambda tx: epochs.read_savepoint(tx, "sp")) is not None, "the savepoint's epoch durable")
    newest = job.row.newest_durable
    job.until_durable(newest + 2)
    saved = job.sim.operations.status(job.job)["savepoints"]
    assert saved[0]["state"] == "COPYING"
    assert "no space left" in saved[0]["error"]
    failing[0] = False
    job.until(lambda: job.sim.operations.status(job.job)["savepoints"][0]["state"] == "COMPLETE", "the savepoint complete")
    job.complete()


def test_t95_a_declined_savepoint_epoch_is_tried_again(scene: Make) -> None:
    """The epoch of a savepoint is aborted: the job goes on and the savepoint comes with a later epoch."""
    job = scene()
    job.until_durable(1)
    job.sim.world.away["storage"] = job.sim.world.now + 1.5
    job.sim.operations.savepoint(job.job, "sp")
    job.until(lambda: job.sim.operations.status(job.job)["savepoints"] != [], "the savepoint")
    job.until(lambda: job.sim.operations.status(job.job)["savepoints"][0]["state"] == "COMPLETE", "the savepoint complete")
    job.complete()


def test_t96_cancel_overtakes_suspend(scene: Make) -> None:
    """CANCEL while SUSPEND waits for its epoch: the job is cancelled and leaves no savepoint behind as if it were suspended."""
    job = scene()
    job.until_committed(1)
    job.sim.world.away["storage"] = job.sim.world.now + 5
    job.stop(Desired.SUSPEND, "sp")
    job.sim.run_for(1)
    job.stop(Desired.CANCEL)
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    assert job.row.reason == "cancelled"
    assert job.sim.database.read(lambda tx: epochs.read_savepoint(tx, "sp")) is None
    assert job.visible() == job.before(job.manifest())


def test_t87_a_savepoint_outlives_the_checkpoints_and_starts_a_new_job(scene: Make) -> None:
    """With one checkpoint retained, a savepoint's segments stay, and a new job of it at another parallelism brings the rest."""
    job = scene(retained=1)
    job.until_durable(1)
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    manifest = job.manifest()
    job.job = "another"
    job._seen = (0, 0, 0, 0)
    for key in job.sim.storage.keys("scene-"):
        job.sim.storage.delete([key])
    job.start(savepoint="sp", parallelism=3)
    job.complete()
    assert job.manifest().epoch > manifest.epoch
