"""Known traps of checkpoints, retention, rescaling and splits, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from tests.simulation.base import counting
from tests.simulation.scene import Scene
from tests.simulation.workloads import Growing

from millstream.builder import JobBuilder
from millstream.pipelines import Pipelines
from millstream_schema.control import Durable
from millstream_schema.errors import RestoreRefused, StorageUnavailable
from millstream_schema.states import Desired, EpochState, JobState
from millstream_schema.store import epochs
from millstream_tasks.operators.keyed_state import OperatorListState
from millstream_tasks.operators.process import Context, ProcessFunction
from millstream_tasks.sinks.memory import CollectSink

Make = Callable[..., Scene]


def test_t36_epoch_ids_never_repeat(scene: Make) -> None:
    """Over crashes of everything and over cancel and resume, an epoch id is given out once."""
    job = scene()
    first: dict[int, tuple[int, int]] = {}

    def note() -> bool:
        for row in job.epoch_rows():
            assert first.setdefault(row.epoch, (row.generation, row.triggered_us)) == (row.generation, row.triggered_us)
        return False

    for _ in range(2):
        job.sim.run(note, job.sim.world.now + 2)
        for coordinator in job.sim.coordinators:
            coordinator.crash()
        for node in job.sim.nodes:
            if node.node is not None:
                node.crash()
    job.stop(Desired.CANCEL)
    job.sim.run_to_end(job.job)
    newest = job.row.next_epoch
    job.sim.resume(job.job, job.submission())
    job.until_durable(newest)
    note()
    job.complete()


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_t40_an_unreadable_newest_manifest_stops_the_job_and_names_it(scene: Make, how: str) -> None:
    """Recovery with a newest manifest that is missing or damaged fails the job; it never falls back to an older epoch or to the beginning."""
    job = scene()
    job.until_committed(3)
    visible = job.visible()
    newest = job.row.newest_durable
    t = job.sim.database.tables.manifest
    where = (t.c.job == job.job, t.c.epoch == newest)
    change: Any = sa.delete(t).where(*where) if how == "missing" else sa.update(t).where(*where).values(body=t.c.body + " ")
    if how == "damaged":
        change = sa.update(t).where(*where).values(checksum="0" * 32)
    job.sim.database.run(lambda tx: tx.execute(change))
    for node in job.sim.nodes:
        node.crash()
    job.sim.run(lambda: job.sim.state(job.job).ended, job.sim.world.now + 60)
    assert job.row.state is JobState.FAILED
    assert str(newest) in job.row.reason
    assert not visible - job.visible()
    assert not job.visible() - job.reference


def test_t40_a_missing_segment_stops_the_job_and_names_it(scene: Make) -> None:
    """A segment of the newest manifest is gone: FAILED with its key, nothing restored in part."""
    job = scene()
    job.until_committed(2)
    key = job.manifest().handles()[0].key
    for node in job.sim.nodes:
        node.crash()
    key = job.manifest().handles()[0].key
    job.sim.storage.delete([key])
    job.sim.run(lambda: job.sim.state(job.job).ended, job.sim.world.now + 60)
    assert job.row.state is JobState.FAILED
    assert key in job.row.reason


class Long(Scene):
    per_split = 260


def test_t84_rescaling_1_3_2_5_keeps_every_count(scene: Make) -> None:
    """Suspended and resumed at other parallelisms, keyed counts go on as if nothing had happened."""
    job = scene(Long)
    for parallelism in (3, 2, 5):
        job.until_committed(job.row.next_epoch)
        job.stop(Desired.SUSPEND, f"sp{parallelism}")
        assert job.sim.run_to_end(job.job) is JobState.STOPPED
        assert job.visible() == job.before(job.manifest())
        job.sim.resume(job.job, job.submission(parallelism=parallelism))
        job.until(lambda: job.row.state is JobState.RUNNING, "running again")
    job.complete()


class Swapping(Scene):
    """Two operators of one class in a row, one counting by ones, one by thousands; which comes first is said by ``order``."""

    order = ("ones", "thousands")

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(self.splits, self.per_split, self.rate, self.value), uid="records")
        steps: dict[str, Any] = {"ones": lambda n, _: n + 1, "thousands": lambda n, _: n + 1000, "others": lambda n, _: n + 1}
        for uid in self.order:
            records = records.key_by(lambda r: r[0]).aggregate(int, steps[uid], uid=uid)
        records.sink_to(CollectSink("out", self.target), uid="out")

    def verify(self) -> None:
        extra = {v for v in self.target.values("out") if v[1] % 1000 and v[1] >= 1000}
        assert not extra, f"a count by ones went on from one by thousands, or the other way: {extra}"


def test_t03_operators_that_change_places_keep_their_own_state(scene: Callable[..., Swapping]) -> None:
    """State is found by uid, not by class or position: swapped between two lives, each goes on from its own count."""
    job = scene(Swapping)
    job.until_committed(2)
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    before = Counter(key for key, _ in job.visible().elements())
    assert job.visible() == Counter((k, 1000 * i) for k, n in before.items() for i in range(1, n + 1)) and len(before) == job.keys
    job.order = ("thousands", "ones")
    job.sim.resume(job.job, job.submission())
    job.finish()
    later = Counter((k, i) for k, total in job.totals.items() for i in range(before[k] + 1, total + 1))
    assert job.visible() - later == Counter((k, 1000 * i) for k, n in before.items() for i in range(1, n + 1))
    assert not later - job.visible()


def test_t03_state_of_an_unknown_uid_is_refused_unless_it_may_be_dropped(scene: Callable[..., Swapping]) -> None:
    """An operator that keeps state and is gone: resume names it and changes nothing; told to be lenient it goes on, and the others keep theirs."""
    job = scene(Swapping)
    job.until_committed(2)
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    job.order = ("others", "thousands")
    with pytest.raises(RestoreRefused, match=r"'ones' \(aggregate\) keeps state and is gone"):
        job.sim.resume(job.job, job.submission())
    assert job.row.state is JobState.STOPPED
    job.sim.resume(job.job, job.submission(lenient=True))
    job.finish()
    assert job.visible() == Counter((k, 1000 * i) for k, total in job.totals.items() for i in range(1, total + 1))


@dataclass
class Total:
    """A value kept in state."""

    count: int = 0
    last: int = 0


def moved(*fields: str) -> type:
    """A class of that name defined elsewhere, with these fields."""
    return make_dataclass("Total", [(name, int, 0) for name in fields], namespace={"__module__": "elsewhere"})


class Kept(Scene):
    """A rolling count whose state is of a registered class."""

    type_: type = Total

    def define(self, job: JobBuilder) -> None:
        job.register_type("total", self.type_)
        records = job.source(counting(self.splits, self.per_split, self.rate, self.value), uid="records")
        counts = records.key_by(lambda r: r[0]).aggregate(
            self.type_, lambda t, r: self.type_(t.count + 1, r[1]), result=lambda key, t: (key, t.count), uid="count"
        )
        counts.sink_to(CollectSink("out", self.target), uid="out")


def test_t89_a_class_that_moved_to_another_module_is_still_itself(scene: Callable[..., Kept]) -> None:
    """State names its type as it was registered, not where it was defined."""
    job = scene(Kept)
    job.until_committed(2)
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    job.type_ = moved("count", "last")
    job.sim.resume(job.job, job.submission())
    job.complete()


@pytest.mark.parametrize("fields", [("count",), ("count", "latest"), ("count", "last", "more")], ids=["removed", "renamed", "added"])
def test_t89_a_class_with_other_fields_is_refused_and_operator_and_state_are_named(
    scene: Callable[..., Kept], fields: tuple[str, ...]
) -> None:
    """Nothing is matched by position or filled in: the job fails at once, nothing of its state is touched, and with the old class it goes on."""
    job = scene(Kept)
    job.until_committed(2)
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    newest, visible = job.row.newest_durable, job.visible()
    job.type_ = moved(*fields)
    job.sim.resume(job.job, job.submission())
    job.sim.run(lambda: job.row.state.ended, job.sim.world.now + 30)
    assert job.row.state is JobState.FAILED
    for said in ("'count'", "'value'", "'total'", "['count', 'last']"):
        assert said in job.row.reason, job.row.reason
    assert (job.row.newest_durable, job.visible()) == (newest, visible)
    job.type_ = Total
    job.sim.resume(job.job, job.submission())
    job.complete()


class Lists(ProcessFunction):
    """One operator list of each redistribution; each subtask adds its own items."""

    states: ClassVar = {
        "split": OperatorListState("split"),
        "union": OperatorListState("union"),
        "broadcast": OperatorListState("broadcast"),
    }

    def process(self, value: Any, ctx: Context) -> None:
        ctx.operator_list("split").append(value[1])
        union = ctx.operator_list("union")
        if not list(union.get()):
            union.append("mine")
        if not list(ctx.operator_list("broadcast").get()):
            ctx.operator_list("broadcast").append("rule")


class WithLists(Scene):
    parallelism = 1

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(2, 50, 20.0, lambda s, i: (s * 50 + i, s * 50 + i), bounded=False, name="numbers"), uid="records")
        records.key_by(lambda r: r[0]).process(Lists, uid="lists").sink_to(CollectSink("out", self.target), uid="out")

    def verify(self) -> None:
        assert not self.target.values("out")


def test_t84_list_state_is_split_united_and_broadcast(scene: Make) -> None:
    """After 1 → 3: the split list's items are each in one subtask, the union's in all, the broadcast one's in all once."""
    job = scene(WithLists)
    job.until(lambda: [c.runner.counters["records_in"] for c in job.children("records")] == [100], "all records taken")
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    job.sim.resume(job.job, job.submission(parallelism=3))
    job.until(lambda: len([c for c in job.children("lists") if c._started]) == 3, "three subtasks")
    lists = [{n: list(held.get()) for n, held in c.runner.chain.operators[0]._lists.items()} for c in job.children("lists")]  # type: ignore[attr-defined]
    assert Counter(i for held in lists for i in held["split"]) == Counter(range(100))
    assert max(len(held["split"]) for held in lists) < 100
    assert [held["union"] for held in lists] == [["mine"]] * 3
    assert [held["broadcast"] for held in lists] == [["rule"]] * 3


def test_t85_another_shard_count_is_refused(scene: Make) -> None:
    """Keyed state cannot be redistributed over another number of shards: resume says so and changes nothing."""
    job = scene()
    job.until_committed(1)
    job.stop(Desired.SUSPEND, "sp")
    job.sim.run_to_end(job.job)
    others = Pipelines()
    others.define("scene", parallelism=2, shard_count=64)(lambda j, _config: job._build(j))
    with pytest.raises(RestoreRefused, match="shard_count was 128 and is 64"):
        job.sim.operations.resume(job.job, others.build("scene"), job.submission())
    assert job.row.state is JobState.STOPPED


@pytest.mark.parametrize("late", [0.3, 0.5, 0.7, 0.9])
def test_t87_retaining_one_checkpoint_never_deletes_what_the_next_builds_on(scene: Make, late: float) -> None:
    """Subtasks hear of a durable epoch only around the next cut: increments still build on segments that exist, and restore from them."""
    job = scene(Long, retained=1, epoch_interval_ms=300, max_segments=50)
    patched: set[int] = set()

    def delay() -> None:
        """Notices of every epoch but the first ones come late."""
        for child in job.children():
            if id(child) not in patched:
                patched.add(id(child))
                send = child.send

                def later(message: Any, send: Any = send) -> None:
                    if isinstance(message, Durable) and message.epoch > 3:
                        job.sim.world.at(late, lambda: send(message))
                    else:
                        send(message)

                child.send = later  # type: ignore[method-assign]

    def enough() -> bool:
        delay()
        job.check()
        return job.row.newest_durable >= 12

    job.until(enough, "twelve epochs")
    for node in job.sim.nodes:
        node.crash()
    job.complete()


def test_t88_segments_of_aborted_epochs_are_collected(scene: Make) -> None:
    """A snapshot stored for an epoch that was aborted is neither referenced nor kept."""
    job = scene(retained=2)
    job.until_durable(2)
    put, failing = job.sim.storage.put, [True]

    def put_or_not(key: str, data: bytes) -> Any:
        handle = put(key, data)
        if failing[0] and "count-0" in key:
            raise StorageUnavailable("written, and the answer lost")
        return handle

    job.sim.storage.put = put_or_not  # type: ignore[method-assign]
    job.until(lambda: any(e.state is EpochState.ABORTED for e in job.epoch_rows()), "an aborted epoch")
    failing[0] = False
    aborted = [e.epoch for e in job.epoch_rows() if e.state is EpochState.ABORTED]
    assert job.sim.storage.keys(f"{job.job}/e{aborted[0]}/")
    job.until_durable(aborted[-1] + 1)
    job.until(lambda: not job.sim.storage.keys(f"{job.job}/e{aborted[0]}/"), "collected", 30)
    job.check()
    job.complete()


class Splits(Scene):
    """Splits appear while the job runs; each brings forty records of its own key."""

    most = 6

    def define(self, job: JobBuilder) -> None:
        records = job.source(Growing(self.sim.world, self.most, 40, rate=20.0), uid="records")
        records.key_by(lambda r: r[0]).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(CollectSink("out", self.target), uid="out")

    def prepare(self) -> None:
        self.reference = Counter((f"k{s}", n) for s in range(self.most) for n in range(1, 41))


@pytest.mark.parametrize("seed", range(4))
def test_t62_splits_whose_reader_died_before_any_epoch_are_handed_out_again(scene: Make, seed: int) -> None:
    """Discovery is over and every split has its reader; a node dies before anything is durable: all splits are owned and read again, from their beginning."""
    job = scene(seed=seed, epoch_interval_ms=2000)
    job.until(lambda: job.row.state is JobState.RUNNING, "running")
    read, generation = job.sim.database.read, job.row.generation
    assert read(lambda tx: epochs.discoveries(tx, job.job, generation)) == {"records": True}
    assert [s.owner for s in read(lambda tx: epochs.splits(tx, job.job))].count(-1) == 0
    job.until(lambda: any(c.runner.counters["records_in"] for c in job.children("count")), "records on their way")
    assert job.row.newest_durable == 0
    job.sim.nodes[seed % 2].crash()
    job.until(lambda: job.row.generation > generation and job.row.state is JobState.RUNNING, "redeployed")
    assert {s.cursor for c in job.children("records") for s in c.runner.deployment.splits} <= {None}
    assert sorted(s.split for s in read(lambda tx: epochs.splits(tx, job.job)) if s.owner >= 0) == ["0", "1", "2"]
    job.complete()


@pytest.mark.parametrize("seed", range(6))
def test_t61_a_split_handed_out_around_a_failure_is_neither_lost_nor_read_twice(scene: Make, seed: int) -> None:
    """Splits found between trigger and barrier, with crashes at every phase: each is read once."""
    job = scene(Splits, seed=seed, discovery_interval_ms=300, epoch_interval_ms=250)
    for _ in range(4):
        rows, seen = job.row, job.row.splits_rev
        job.sim.run(lambda seen=seen: job.row.splits_rev > seen, job.sim.world.now + 2)  # type: ignore[misc]
        job.sim.run_for(0.1 * (1 + (seed + rows.generation) % 4))
        job.verify()
        for node in job.sim.nodes[: 1 + seed % 2]:
            if node.node is not None:
                node.crash()
    job.until(lambda: job.visible() == job.reference, "all records of all splits", 60)
    job.stop(Desired.DRAIN)
    job.complete()


def test_t67_a_split_that_appears_while_the_job_is_down_is_read_from_its_beginning(scene: Make) -> None:
    """Suspended at one split, resumed when there are more: all are read whole."""
    job = scene(Splits, discovery_interval_ms=300)
    job.until_committed(1)
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    job.sim.run_for(6)
    job.sim.resume(job.job, job.submission())
    job.until(lambda: job.visible() == job.reference, "all records of all splits", 60)
    job.stop(Desired.DRAIN)
    job.complete()
