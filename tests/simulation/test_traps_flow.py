"""Known traps of barriers, alignment, back-pressure and watermarks, one by one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.simulation.base import counting
from tests.simulation.scene import Scene

from millstream.builder import JobBuilder
from millstream.testing.actors import SimBackground, SimChild
from millstream.testing.network import SimQueue
from millstream_schema.channels import ChannelId, Frame
from millstream_schema.control import Declined, EpochKind, Run, Trigger
from millstream_schema.envelope import Envelope, Kind, decode_envelope, encode_envelope
from millstream_schema.errors import ChannelBroken, Fenced, JobInvalid
from millstream_schema.model import EdgeSpec, Guarantee, Partitioning
from millstream_schema.plan import compile_plan, validate
from millstream_schema.ports import SystemClock
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import Desired, EpochState, JobState
from millstream_schema.store import epochs, registry
from millstream_schema.values import TypeRegistry
from millstream_tasks.operators.base import MAX_WATERMARK
from millstream_tasks.runner.inputs import Alignment, InputChannel
from millstream_tasks.sinks.memory import CollectSink, CollectTarget
from millstream_tasks.sources.memory import CollectionSource, GeneratorSource

Make = Callable[..., Scene]


class Frames:
    """A reader over given frames."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames

    def take(self) -> Frame | None:
        return self.frames.pop(0) if self.frames else None

    def processed(self, number: int) -> None:
        """Nothing to report to."""

    def close(self) -> None:
        """Nothing is held."""


def channel(index: int, frames: list[Frame] | None = None, generation: int = 1) -> InputChannel:
    return InputChannel(ChannelId("j", generation, "e0", index, 0), Frames(frames or []), TypeRegistry())


def watermark(generation: int, number: int) -> Frame:
    return Frame(number, encode_envelope(Envelope(generation, number, 0, Kind.WATERMARK, number, "any"), TypeRegistry()))


def test_t11_a_newer_barrier_ends_the_older_alignment() -> None:
    """Epoch 2's barrier comes while 1 is not aligned: held channels are released, 1's late barrier is dropped and counted, 2 aligns."""
    inputs = [channel(0), channel(1)]
    alignment = Alignment(inputs, True, 0, SystemClock())
    assert not alignment.barrier(0, 1)
    assert inputs[0].held
    assert not alignment.barrier(1, 2)
    assert not inputs[0].held
    assert not alignment.barrier(1, 1)
    assert alignment.dropped == 1
    assert alignment.barrier(0, 2)
    assert not any(c.held for c in inputs)
    assert not alignment.barrier(0, 1)
    assert alignment.dropped == 2


def test_t11_a_lost_abort_does_not_keep_channels_held(scene: Make) -> None:
    """Epochs are aborted again and again and no subtask ever hears of it: the next barrier ends the older alignment."""
    job = scene()
    job.until_durable(1)
    for child in job.children():
        send = child.send
        child.send = lambda message, send=send: None if type(message).__name__ == "Abort" else send(message)  # type: ignore[method-assign,misc]
    job.sim.world.away["storage"] = job.sim.world.now + 1.5
    job.until(lambda: any(e.state is EpochState.ABORTED for e in job.epoch_rows()), "an aborted epoch")
    job.complete()


def mute(job: Scene, edge_end: str) -> SimQueue:
    """One channel that brings nothing any more."""
    name = next(n for n, q in job.sim.network.queues.items() if q.alive and n.endswith(edge_end))
    queue = job.sim.network.queues[name]
    queue.frames.clear()

    class Silent(type(queue.frames)):  # type: ignore[misc]
        def append(self, _item: Any) -> None:
            """Lost."""

    queue.frames = Silent()
    return queue


def test_t12_a_silent_channel_leads_to_recovery(scene: Make) -> None:
    """One channel brings nothing for ever: its epoch does not hang, the job recovers and the result is whole."""
    job = scene(alignment_ms=1500)
    job.until_durable(2)
    mute(job, ".0.1")
    stuck = job.row.generation
    job.until(lambda: job.row.generation > stuck, "recovery", 30)
    assert not any(e.state is EpochState.TRIGGERED and e.generation == stuck for e in job.epoch_rows())
    job.complete()


def test_t12_aborts_in_a_row_lead_to_recovery_and_timer_and_savepoint_make_one_epoch_each(scene: Make) -> None:
    """Storage that refuses every snapshot aborts epoch after epoch until the job recovers; a savepoint asked meanwhile has an epoch of its own."""
    job = scene(max_aborts=2, epoch_interval_ms=200)
    job.until_durable(1)
    job.sim.world.away["storage"] = job.sim.world.now + 4
    job.sim.operations.savepoint(job.job, "sp")
    job.until(lambda: "aborts" in job.row.causes, "recovery after aborts")
    job.complete()
    kinds = [e.kind for e in job.epoch_rows() if e.state is not EpochState.ABORTED]
    assert kinds.count("savepoint") == 1
    ids = [e.epoch for e in job.epoch_rows()]
    assert ids == sorted(set(ids))


class Wide(Scene):
    """Edges with room for everything that is on its way."""

    def define(self, job: JobBuilder) -> None:
        job.edges(capacity=500, batch_records=1)
        super().define(job)


def test_t12_an_epoch_that_times_out_releases_everyone_who_waits_for_it(scene: Make) -> None:
    """One channel is slow, so records flow and the epoch takes too long: it is aborted, no alignment goes on waiting for it, the job is not restarted, and a later epoch comes."""
    job = scene(Wide, alignment_ms=1000, epoch_timeout_ms=1500, epoch_interval_ms=300)
    job.until_durable(1)
    generation = job.row.generation
    name = next(n for n, q in job.sim.network.queues.items() if q.alive and n.endswith(".1.0"))
    slow, send = job.sim.network.queues[name], job.sim.network.send
    late = [2.5]

    def delayed(queue: SimQueue, frame: Frame) -> None:
        send(queue, frame)
        if queue is slow and queue.frames:
            at, frame = queue.frames[-1]
            queue.frames[-1] = (max(at, job.sim.world.now + late[0]), frame)

    job.sim.network.send = delayed  # type: ignore[method-assign]
    job.until(lambda: any(e.state is EpochState.ABORTED for e in job.epoch_rows()), "an epoch aborted")
    late[0] = 0.0
    aborted = next(e for e in job.epoch_rows() if e.state is EpochState.ABORTED)
    assert "not acknowledged within 1500 ms by count:0" in aborted.reason

    def released() -> bool:
        counts = [c.runner for c in job.children("count")]
        return all(r.alignment.done >= aborted.epoch for r in counts) and all(
            r.alignment.epoch > aborted.epoch for r in counts if any(c.held for c in r.inputs)
        )

    job.until(released, "nobody waits for the aborted epoch any more", 2)
    job.until_durable(aborted.epoch + 1)
    assert job.row.generation == generation
    job.complete()


class Silent(Scene):
    """Sources that bring a few records and then nothing, for ever."""

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(self.splits, 10, self.rate, self.value, bounded=False), uid="records")
        records.key_by(lambda r: r[0]).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(CollectSink("out", self.target), uid="out")

    def prepare(self) -> None:
        self.reference = self.counts({str(s): 10 for s in range(self.splits)})

    def quiet(self) -> None:
        """Until everything there is has been read, counted and committed."""
        self.until(lambda: self.visible() == self.reference, "all records")


def test_t14_epochs_of_sources_that_bring_nothing_are_as_quick_as_others(scene: Callable[..., Silent]) -> None:
    """The barrier does not wait for a record: every epoch behind the last record is durable within the time one takes anyway."""
    job = scene(Silent)
    job.quiet()
    first = job.row.next_epoch
    job.until_durable(first + 5)
    took = [e.durable_us - e.triggered_us for e in job.epoch_rows() if first <= e.epoch <= first + 5]
    assert len(took) == 6 and max(took) < 1_500_000
    job.stop(Desired.DRAIN)
    job.complete()


def test_a_snapshot_whose_upload_takes_long_is_no_stall(scene: Callable[..., Silent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing flows, and one subtask stores its snapshot for much longer than the stall limit: the epoch becomes durable in the same generation, nothing is restarted."""
    job = scene(Silent, alignment_ms=1500)
    job.quiet()
    generation, slow = job.row.generation, [0]
    later = SimBackground._later

    def slowly(lanes: SimBackground, lane: str) -> None:
        if lane == "snapshot" and lanes._child.runner.subtask.id == "count:0" and not slow[0]:
            slow[0] = job.row.in_flight
            lanes._child.world.at(7.0, lambda: lanes._run(lane))
        else:
            later(lanes, lane)

    monkeypatch.setattr(SimBackground, "_later", slowly)
    job.until(lambda: slow[0] > 0, "a slow upload")
    job.until(lambda: job.row.newest_durable >= slow[0], "its epoch durable")
    epoch = next(e for e in job.epoch_rows() if e.epoch == slow[0])
    assert epoch.durable_us - epoch.triggered_us >= 7_000_000
    assert job.row.generation == generation
    job.stop(Desired.DRAIN)
    job.complete()


def test_t16_a_subtask_that_does_not_run_yet_declines(scene: Make) -> None:
    """A trigger before RUN is declined at once; the declined epoch is aborted long before its timeout, and the next one completes."""
    job = scene()
    job.until(lambda: bool(job.children("records")), "a source subtask")
    source = job.children("records")[0]
    source.send(Trigger(1, EpochKind.CHECKPOINT, [], False))
    while source.runner._control:
        source.runner._handle(source.runner._control.popleft())
    assert [m for m in source._outbox if isinstance(m, Declined)]
    job.until(lambda: job.row.in_flight > 0, "an epoch in flight")
    flying, at = job.row.in_flight, job.sim.world.now
    attempt = source.runner.deployment
    job.sim.database.run(
        lambda tx: epochs.acknowledge(tx, job.job, flying, attempt.generation, attempt.subtask, attempt.attempt, None, "not running")
    )
    job.until(lambda: next(e for e in job.epoch_rows() if e.epoch == flying).state is EpochState.ABORTED, "the epoch aborted")
    assert job.sim.world.now - at < 2.0
    job.until_durable(flying + 1)
    job.complete()


def test_t19_a_failed_subtask_is_not_counted_as_finished(scene: Make) -> None:
    """A subtask fails while its epoch is in flight: the epoch never becomes durable without its snapshot."""
    job = scene()
    job.until_durable(1)
    job.until(lambda: job.row.in_flight > 0, "an epoch in flight")
    flying = job.row.in_flight
    job.children("count")[0].kill()
    job.until(lambda: job.row.newest_durable > flying, "a later epoch durable")
    row = next(e for e in job.epoch_rows() if e.epoch == flying)
    assert row.state is EpochState.ABORTED
    job.complete()


def test_t23_repeated_frames_make_one_snapshot_per_epoch(scene: Make) -> None:
    """Every frame comes twice, barriers too: one snapshot per subtask and epoch, and every record counts once."""
    job = scene()
    send = job.sim.network.send
    job.sim.network.send = lambda queue, frame: (send(queue, frame), send(queue, frame))  # type: ignore[assignment]
    job.until_durable(4)
    for child in job.children("count"):
        assert child.runner.counters["snapshots"] <= job.row.next_epoch - 1
        assert sum(c.repeats for c in child.runner.inputs) > 0
    job.complete()


class Quiet(Scene):
    """Two sources under windows: one steady, one that pauses for long and comes back in time. Whoever brings nothing is passed over."""

    back = 9.0

    def define(self, job: JobBuilder) -> None:
        world = self.sim.world

        def paused(split: int, at: int, limit: int) -> list[Any] | None:
            end = 40 if world.now >= self.back else 20
            return None if at >= 40 else [self.second(i) for i in range(at, min(at + limit, end))]

        steady = job.source(counting(1, 200, 20.0, lambda s, i: ("steady", i * 50)), uid="steady")
        pausing = job.source(GeneratorSource(paused, 1, "pausing", rate=20.0), uid="pausing")
        first = steady.assign_timestamps(lambda r: r[1], idle_ms=600, uid="t1")
        second = pausing.assign_timestamps(lambda r: r[1], idle_ms=600, uid="t2")
        windows = first.union(second, uid="both").key_by(lambda r: r[0]).tumbling(1000, late_tag="late")
        sums = windows.aggregate(int, lambda n, _: n + 1, uid="sums")
        sums.sink_to(CollectSink("out", self.target), uid="out")
        sums.side_output("late").sink_to(CollectSink("late", self.target), uid="late")

    def second(self, i: int) -> tuple[str, int]:
        return "pausing", i * 50 if i < 20 else 10_000 + i * 50

    def prepare(self) -> None:
        records = [("steady", i * 50) for i in range(200)] + [self.second(i) for i in range(40)]
        sums = Counter((key, time // 1000 * 1000) for key, time in records)
        self.reference = Counter((key, start, start + 1000, n) for (key, start), n in sums.items())

    def verify(self) -> None:
        assert not self.target.values("late")
        super().verify()


@pytest.mark.parametrize("seed", range(4))
def test_t24_t76_windows_are_exact_when_frames_come_again_around_a_pause(scene: Callable[..., Quiet], seed: int) -> None:
    """Every few frames some older ones come once more, statuses and watermarks too: windows close by the other source alone, whoever pauses comes back in time, nothing is late."""
    job = scene(Quiet, seed=seed)
    send, sent, rng = job.sim.network.send, dict[int, list[Frame]](), random.Random(seed)

    def again(queue: SimQueue, frame: Frame) -> None:
        mine = sent.setdefault(id(queue), [])
        mine.append(frame)
        send(queue, frame)
        if rng.random() < 0.5:
            for old in mine[-rng.randint(1, 6) :]:
                send(queue, old)

    job.sim.network.send = again  # type: ignore[method-assign]
    job.until(lambda: any(v[2] >= 3000 for v in job.target.values("out")), "windows closed without the one that pauses", 9)
    assert job.sim.world.now < job.back
    job.complete()


class Apart(Scene):
    """Timestamps are given behind an exchange or a union, not at the source."""

    shape = "rebalance"

    def define(self, job: JobBuilder) -> None:
        source = counting(2, 300, 20.0, lambda s, i: (f"a{s}", i * 50))
        if self.shape == "union":
            b = job.source(counting(1, 300, 20.0, lambda s, i: ("b", i * 50)), uid="b")
            merged = job.source(source, uid="a").union(b, uid="both")
        else:
            merged = job.source(source, uid="a", parallelism=1).rebalance()
        timed = merged.assign_timestamps(lambda r: r[1], out_of_orderness_ms=2000, uid="times")
        windows = timed.key_by(lambda r: r[0]).tumbling(1000, late_tag="late")
        sums = windows.aggregate(int, lambda n, _: n + 1, uid="sums")
        sums.sink_to(CollectSink("out", self.target), uid="out")
        sums.side_output("late").sink_to(CollectSink("late", self.target), uid="late")

    def prepare(self) -> None:
        records = [(f"a{s}", i * 50) for s in range(2) for i in range(300)]
        if self.shape == "union":
            records += [("b", i * 50) for i in range(300)]
        sums = Counter((key, time // 1000 * 1000) for key, time in records)
        self.reference = Counter((key, start, start + 1000, n) for (key, start), n in sums.items())

    def verify(self) -> None:
        assert not self.target.values("late")
        super().verify()


class Merged(Apart):
    shape = "union"


@pytest.mark.parametrize("kind", [Apart, Merged])
def test_timestamps_given_away_from_the_source_close_windows_while_the_job_runs(scene: Callable[..., Apart], kind: type[Apart]) -> None:
    """Each channel is to the assigner what a split is at a source: event time goes on, nobody is made late, and the answer is exact."""
    job = scene(kind)
    job.until(lambda: len(job.target.values("out")) >= 2, "windows closed before the input ended", 12)
    assert job.sim.world.now < 15
    job.complete()


def test_t23_an_old_barrier_is_ignored() -> None:
    """A barrier of an epoch that is over changes nothing."""
    inputs = [channel(0)]
    alignment = Alignment(inputs, True, 7, SystemClock())
    assert not alignment.barrier(0, 7)
    assert not inputs[0].held
    assert alignment.barrier(0, 8)


def test_t47_a_newer_generation_is_never_adopted() -> None:
    """An envelope of a newer generation stops its receiver and is not acknowledged; an older one is dropped and counted; a gap breaks the channel."""
    receiver = channel(0, [watermark(8, 1)], generation=7)
    with pytest.raises(Fenced):
        receiver.take()
    assert (receiver.number, receiver.channel.generation) == (0, 7)
    old = channel(0, [watermark(6, 1), watermark(7, 1)], generation=7)
    envelope = old.take()
    assert envelope is not None
    assert (envelope.generation, old.fenced) == (7, 1)
    gap = channel(0, [watermark(7, 2)], generation=7)
    with pytest.raises(ChannelBroken):
        gap.take()


class Diamond(Scene):
    """Two branches of one source that meet again, with room for one envelope on every edge."""

    def define(self, job: JobBuilder) -> None:
        job.edges(capacity=1, batch_records=1)
        records = job.source(counting(2, 60, 30.0, lambda s, i: (s, i), name="pairs"), uid="records")
        slow = records.rebalance().map(lambda r: ("slow", *r), uid="slow")
        fast = records.rebalance().map(lambda r: ("fast", *r), uid="fast")
        slow.rebalance().union(fast.rebalance(), uid="both").sink_to(CollectSink("out", self.target), uid="out")

    def prepare(self) -> None:
        self.reference = Counter((b, s, i) for b in ("slow", "fast") for s in range(2) for i in range(60))


def test_t53_a_diamond_with_a_slow_branch_and_full_channels_goes_on(scene: Make) -> None:
    """Capacity 1 everywhere, one branch slow: epochs complete under back-pressure and everything arrives once."""
    job = scene(Diamond, alignment_ms=8000)
    step = SimChild.schedule

    def slowly(child: SimChild, delay: float) -> None:
        step(child, delay + (0.08 if child.runner.subtask.vertex == "slow" else 0.0))

    job.until(lambda: len(job.children()) >= 8, "all subtasks")
    for child in job.children("slow"):
        child.schedule = lambda delay, child=child: slowly(child, delay)  # type: ignore[method-assign,misc]
    job.until_committed(2)
    assert job.row.state is JobState.RUNNING
    job.finish()
    assert Counter(job.target.values("out")) == job.reference


def test_t54_a_cycle_is_rejected_when_compiled() -> None:
    """A feedback edge is an error that names the operators."""
    from millstream.pipelines import Pipelines

    pipelines = Pipelines()

    @pipelines.define("loop", guarantee="BEST_EFFORT")
    def loop(job: Any, config: Any) -> None:
        records = job.source(counting(1, 1, 1.0, lambda s, i: i), uid="records")
        records.map(lambda r: r, uid="a").map(lambda r: r, uid="b").union(records.map(lambda r: r, uid="c"), uid="u").map(
            lambda r: r, uid="end"
        )

    import msgspec

    model = pipelines.build("loop").model
    cyclic = msgspec.structs.replace(model, edges=[*model.edges, EdgeSpec("end", "u", Partitioning.UNION)])
    assert not [p for p in validate(model) if "cycle" in p]
    with pytest.raises(JobInvalid, match="cycle"):
        compile_plan(cyclic)


class Spare(Scene):
    """More subtasks than splits, an ended source beside an endless one, windows behind both."""

    parallelism = 3

    def define(self, job: JobBuilder) -> None:
        ended = job.source(counting(1, 10, 20.0, lambda s, i: ("a", i * 100), name="ended"), uid="ended")
        endless = job.source(counting(2, 10**9, 20.0, lambda s, i: ("b", i * 100), bounded=False, name="endless"), uid="endless")
        both = ended.assign_timestamps(lambda r: r[1], uid="t1").union(endless.assign_timestamps(lambda r: r[1], uid="t2"), uid="both")
        windows = both.key_by(lambda r: r[0]).tumbling(1000)
        windows.aggregate(int, lambda n, _: n + 1, uid="sums").sink_to(CollectSink("out", self.target), uid="out")

    def verify(self) -> None:
        wrong = [v for v in self.target.values("out") if v[3] != (10 if v[0] == "a" else 20)]
        assert not wrong, f"windows with a part of their records, or too many: {wrong}"


def test_t64_subtasks_without_splits_hold_back_neither_epochs_nor_watermarks(scene: Make) -> None:
    """Windows of the endless source become visible although one subtask has no split and another's input has ended."""
    job = scene(Spare)
    job.until(lambda: len([v for v in job.target.values("out") if v[0] == "b"]) >= 3, "windows of the endless source", 30)
    job.verify()
    assert [v for v in job.target.values("out") if v[0] == "a"]


def test_t15_a_cut_is_exactly_the_records_emitted_before_it(scene: Make) -> None:
    """At whatever record a barrier falls, what is visible of an epoch is exactly what lies before its offsets."""
    for batch in (1, 2, 7):
        job = scene(seed=batch, source_batch=batch, epoch_interval_ms=150)
        job.until_committed(4)
        job.stop(Desired.CANCEL)
        job.sim.run_to_end(job.job)
        assert job.visible() == job.before(job.manifest())


def test_t04_the_source_resumes_exactly_at_the_durable_cut(scene: Make) -> None:
    """After a crash every split is read from the offset in the newest durable manifest, and from nowhere else."""
    job = scene()
    job.until_durable(2)
    generation = job.row.generation
    for node in job.sim.nodes:
        node.crash()
    job.until(lambda: job.row.generation > generation and len(job.children("records")) == 2, "redeployed")
    manifest = job.manifest()
    given = {s.split_id: s.cursor for c in job.children("records") for s in c.runner.deployment.splits}
    assert given == {s.split_id: s.cursor for s in manifest.splits}
    assert any(given.values())
    job.complete()


def test_t05_parallelism_two_really_runs_two_subtasks(scene: Make) -> None:
    """Each vertex has two subtasks with ids of their own, all of which take records; without a coordinator nothing is deployed."""
    job = scene()
    job.until_durable(2)
    children = job.children()
    assert sorted(c.runner.subtask.id for c in children) == ["count:0", "count:1", "records:0", "records:1"]
    assert all(c.runner.counters["records_in"] > 0 for c in children)
    orphan = Scene(9)
    for coordinator in orphan.sim.coordinators:
        coordinator.paused = True
    orphan.start()
    orphan.sim.run_for(10)
    assert orphan.row.state is JobState.PENDING
    assert not orphan.children()
    orphan.sim.close()


class Failing(Scene):
    """User code that fails."""

    def tuned(self, settings: StreamSettings) -> StreamSettings:
        import msgspec

        return msgspec.structs.replace(settings, restart=RestartPolicy(failures=2, stalls=0, delay_ms=50))

    def define(self, job: JobBuilder) -> None:
        def fail(record: Any) -> Any:
            raise ValueError(f"cannot take {record}")

        records = job.source(counting(2, 50, 30.0, lambda s, i: i), uid="records")
        records.map(fail, uid="fails").sink_to(CollectSink("out", self.target), uid="out")


def test_t09_a_job_whose_subtasks_fail_is_failed_with_the_cause(scene: Make) -> None:
    """The budget is used up: FAILED, naming operator and error; nothing is visible and nothing staged is left."""
    job = scene(Failing)
    assert job.sim.run_to_end(job.job) is JobState.FAILED
    assert "cannot take" in job.row.reason
    assert "'fails'" in job.row.reason
    assert not job.target.values("out")
    assert not job.target.staged()


__all__ = ["MAX_WATERMARK", "Run", "decode_envelope", "registry"]


def test_silence_is_told_from_waiting_only_right_behind_a_source() -> None:
    """``idle_ms`` elsewhere would never act, so it is refused with what to do."""
    job = JobBuilder("j", 1, Guarantee.STRICT_EXACTLY_ONCE, parallelism=2)
    source = job.source(CollectionSource([1, 2]), uid="in", parallelism=1)
    timed = source.rebalance().assign_timestamps(int, idle_ms=100, uid="times")
    timed.sink_to(CollectSink("out", CollectTarget()), uid="out")
    with pytest.raises(JobInvalid, match="'times' has idle_ms and is not right behind a source"):
        compile_plan(job.build().model)
