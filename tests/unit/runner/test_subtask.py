"""One subtask as a step machine: when it cuts, what it tells the outside and when, what comes again, and how it ends when something fails."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import structlog
from tests.unit.runner.rig import Rig, split, spoken
from tests.unit.tasks.parts import REGISTRY, HandChannel, HandTransport

from millstream import JobBuilder, ProcessFunction
from millstream_schema.channels import Frame
from millstream_schema.connectors import Committable, ConnectorContext, Json, Read, SinkCapability, SourceCapability, Split
from millstream_schema.control import Abort, Ack, Durable, Exhausted, Failed, Lease, NodeMessage, Run, Trigger, WantsEpoch
from millstream_schema.control import EpochKind as E
from millstream_schema.envelope import Envelope, Kind, decode_envelope
from millstream_schema.errors import ChannelLost, Fenced, SourceError
from millstream_tasks.runner.environment import LeaseExpired
from millstream_tasks.runner.subtask import LONG_WAIT
from millstream_tasks.shell.driving import drive
from millstream_tasks.sinks.memory import CollectSink, CollectTarget


class Fed:
    """A source that brings what the test puts into ``ready``, by split. ``taking``: its readers take part in epochs."""

    kind, version, bounded = "fed", 1, False

    def __init__(self, *names: str, taking: bool = False, ends: bool = False) -> None:
        self.capability = SourceCapability.TRANSACTIONAL_READ if taking else SourceCapability.REPLAYABLE
        self.ready: dict[str, list[Any]] = {name: [] for name in names}
        self.readers: dict[str, FedReader] = {}
        self.taking, self.ends = taking, ends
        self.heard: list[tuple[str, int, bool]] = []
        self.breaks: dict[str, Exception] = {}
        self.closing: dict[str, Exception] = {}

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def discover(self, known: frozenset[str]) -> list[Split]:
        return []

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> FedReader:
        reader = (TakingReader if self.taking else FedReader)(self, split.split_id, cursor if isinstance(cursor, int) else 0)
        self.readers[split.split_id] = reader
        return reader


class FedReader:
    wants_epoch = False

    def __init__(self, source: Fed, name: str, at: int) -> None:
        self.source, self.name, self.at = source, name, at
        self.closed = False

    def poll(self, limit: int) -> Read:
        have = self.source.ready[self.name]
        values = have[self.at : self.at + limit]
        self.at += len(values)
        return Read(values, exhausted=self.source.ends and self.at >= len(have))

    def cursor(self) -> Json:
        return self.at

    def close(self) -> None:
        self.closed = True
        if self.name in self.source.closing:
            raise self.source.closing[self.name]


class TakingReader(FedReader):
    """Takes part in epochs; what it hears is noted, and may be answered with an error."""

    def save_state(self, epoch: int) -> Json:
        return self.at

    def prepare_commit(self, epoch: int) -> list[Committable]:
        return []

    def finish_commit(self, epoch: int, success: bool) -> None:
        self.source.heard.append((self.name, epoch, success))
        if success and self.name in self.source.breaks:
            raise self.source.breaks[self.name]

    def restore_from_epoch(self, epoch: int, state: Json) -> None:
        self.source.heard.append((f"{self.name} restored", epoch, True))


def alone(source: Any, target: CollectTarget | None = None) -> Callable[[JobBuilder], None]:
    """The source and its sink in one subtask."""
    return lambda job: job.source(source, uid="in").sink_to(CollectSink("out", target or CollectTarget()), uid="out")


def before_others(source: Any, idle_ms: int | None = None) -> Callable[[JobBuilder], None]:
    """The source in a subtask of its own, with channels to others behind it."""

    def define(job: JobBuilder) -> None:
        job.edges(capacity=4, batch_records=1)
        stamped = job.source(source, uid="in").assign_timestamps(lambda r: r, idle_ms=idle_ms, uid="times")
        stamped.rebalance().map(lambda r: r, uid="same", parallelism=2).sink_to(
            CollectSink("out", CollectTarget()), uid="out", parallelism=2
        )

    return define


def envelopes(channel: HandChannel) -> list[Envelope]:
    """What was sent there."""
    return [f.data if isinstance(f.data, Envelope) else decode_envelope(f.data, REGISTRY, "c") for f in channel.sent]


# -- when a barrier is injected


def test_t14_a_source_that_brings_nothing_injects_in_the_very_next_step() -> None:
    """An idle source, and one whose window only an epoch can free, take the barrier between two polls; a message wakes who waits, and no wait is long."""
    source = Fed("a")
    rig = Rig(before_others(source), "in:0", splits=[split("a")]).running()
    waits = [rig.runner.step() for _ in range(5)]
    assert 0.0 < max(waits) <= LONG_WAIT
    woken: list[None] = []
    rig.transport.wake = lambda: woken.append(None)  # type: ignore[method-assign]
    source.readers["a"].wants_epoch = True
    rig.runner.step()
    assert rig.said(WantsEpoch) == [WantsEpoch()]
    rig.trigger(1)
    assert woken
    for channel in rig.downstream():
        assert [e.kind for e in envelopes(channel)] == [Kind.BARRIER]
    rig.background()
    assert [a.epoch for a in rig.said(Ack)] == [1]


def test_t14_a_source_that_is_held_back_downstream_cuts_at_once() -> None:
    """The window is full and stays full: the offsets are cut and acknowledged now, the barrier travels when there is room, right behind the records before the cut."""
    source = Fed("a")
    source.ready["a"] = list(range(100))
    rig = Rig(before_others(source), "in:0", splits=[split("a")]).running()
    for _ in range(30):
        rig.runner.step()
    left, right = rig.downstream()
    stuck = len(left.sent), len(right.sent)
    taken = source.readers["a"].at
    assert max(stuck) == 4 and taken < 100
    rig.trigger(1)
    rig.background()
    assert (len(left.sent), len(right.sent)) == stuck
    assert rig.snapshot(1).splits[0].cursor == taken
    before: list[int] = []
    for _ in range(50):
        for channel in (left, right):
            if channel.sent:
                channel.processed(channel.sent[-1].number)
        rig.runner.step()
    for channel in (left, right):
        found = envelopes(channel)
        at = next(i for i, e in enumerate(found) if e.kind is Kind.BARRIER)
        before += [v for e in found[:at] if e.kind is Kind.RECORDS for v in e.payload.values]  # type: ignore[union-attr]
    assert sorted(before) == list(range(taken))


@pytest.mark.parametrize("ends", [False, True], ids=["no splits", "exhausted"])
def test_t14_a_source_without_anything_left_to_read_injects_too(ends: bool) -> None:
    """A reader without a split, and one whose splits have ended."""
    source = Fed("a", ends=True)
    rig = Rig(before_others(source), "in:0", splits=[split("a")] if ends else []).running()
    rig.runner.step()
    rig.trigger(1, complete=ends)
    rig.runner.step()
    rig.background()
    rig.trigger(2, complete=ends)
    rig.background()
    assert [a.epoch for a in rig.said(Ack)] == [1, 2]
    assert bool(rig.said(Exhausted)) is ends


# -- idleness


def statuses(channel: HandChannel) -> list[bool]:
    return [bool(e.payload) for e in envelopes(channel) if e.kind is Kind.STATUS]


def drained(rig: Rig) -> None:
    """Whoever reads the channels has processed everything."""
    for channel in rig.downstream():
        if channel.sent:
            channel.processed(channel.sent[-1].number)


def test_t71_idleness_does_not_flip_while_records_come() -> None:
    """Records that come more often than the idle time, and ones that wait for room for long, are no pause; a real pause is told once, and its end before the next record."""
    source = Fed("a")
    rig = Rig(before_others(source, idle_ms=100), "in:0", splits=[split("a")]).running()
    for n in range(60):
        if n % 3 == 0:
            source.ready["a"].append(n)
        rig.after(0.03)
        drained(rig)
    source.ready["a"] += range(60, 100)
    for _ in range(40):
        rig.after(0.5)  # nobody downstream takes anything
    assert source.readers["a"].at < len(source.ready["a"])
    while source.readers["a"].at < len(source.ready["a"]):
        drained(rig)
        rig.after(0.01)
    channel = rig.downstream()[0]
    assert statuses(channel) == []
    for _ in range(40):
        rig.after(0.03)
        drained(rig)
    assert statuses(channel) == [True]
    source.ready["a"] += [1000, 1001]
    for _ in range(3):
        rig.after(0.02)
        drained(rig)
    assert statuses(channel) == [True, False]
    kinds = [e.kind for e in envelopes(channel) if e.kind is not Kind.WATERMARK]
    assert kinds[-2:] == [Kind.STATUS, Kind.RECORDS]


# -- what comes again


class Marks(ProcessFunction):
    """Each record with the watermark it meets."""

    def process(self, value: Any, ctx: Any) -> None:
        ctx.emit((value, ctx.watermark))


def behind_one(job: JobBuilder) -> None:
    """``marks:0`` has one channel in and two out."""
    job.edges(capacity=1000)
    keyed = job.source(Fed("a"), uid="in", parallelism=1).rebalance().map(lambda r: r, uid="first", parallelism=2).key_by(lambda r: r % 3)
    keyed.process(Marks, uid="marks", parallelism=1).rebalance().sink_to(CollectSink("out", CollectTarget()), uid="out", parallelism=2)


def said_on(rig: Rig, frames: list[list[Frame]], repeat: random.Random | None) -> list[list[Any]]:
    """What the subtask says, channel by channel, when it hears these frames; with ``repeat``, after every few of them some older ones come once more."""
    ways = rig.upstream()
    for at in range(max(map(len, frames))):
        for way, mine in zip(ways, frames, strict=True):
            way.frames.extend(mine[at : at + 1])
            if repeat is not None and repeat.random() < 0.5:
                again = mine[max(0, at - repeat.randint(0, 8)) : at + 1]
                if repeat.random() < 0.3:
                    again.reverse()
                way.frames.extend(again)
        rig.runner.step()
    for _ in range(5):
        rig.background()
    found = []
    for channel in rig.downstream():
        said: list[Any] = []
        for e in envelopes(channel):
            if e.kind is Kind.RECORDS:
                said.extend(e.payload.values)  # type: ignore[union-attr, arg-type]
            else:
                said.append((e.kind, e.payload))
        found.append(said)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_t24_what_is_delivered_again_moves_no_watermark_status_or_barrier_among_the_records(seed: int) -> None:
    """Frames that come once more, behind newer ones and in any order, change nothing: each record meets the same watermark, and what goes out is the same, in the same order."""
    frames = [spoken(f"{seed}-{sender}") for sender in (0, 1)]
    once, again = Rig(behind_one, "marks:0").running(), Rig(behind_one, "marks:0").running()
    expected = said_on(once, frames, None)
    assert said_on(again, frames, random.Random(seed)) == expected
    for one, other in zip(once.runner.inputs, again.runner.inputs, strict=True):
        assert (other.number, other.watermark, other.idle) == (one.number, one.watermark, one.idle)
        assert other.repeats > 0
    heard = {decode_envelope(f.data, REGISTRY, "c").kind for mine in frames for f in mine}
    assert heard == {Kind.RECORDS, Kind.WATERMARK, Kind.STATUS, Kind.BARRIER}
    assert any(what[0] is Kind.WATERMARK for said in expected for what in said)


def test_t25_a_barrier_that_one_channel_refuses_ends_the_attempt() -> None:
    """It is never on some channels only while the subtask goes on."""
    source = Fed("a")
    rig = Rig(before_others(source), "in:0", splits=[split("a")]).running()
    _, second = rig.downstream()

    def refuse(frame: Frame) -> None:
        raise ChannelLost("the connection broke")

    second.put = refuse  # type: ignore[method-assign]
    with pytest.raises(ChannelLost) as caught:
        rig.trigger(1)
    rig.runner.fail(caught.value)
    assert rig.runner.over
    assert [f.cause for f in rig.said(Failed)] == ["channel"]


# -- completion


@pytest.mark.parametrize("which", ["a", "b", "c"])
@pytest.mark.parametrize("error", [SourceError("the broker refused"), ValueError("a defect")], ids=lambda e: type(e).__name__)
def test_t32_a_completion_callback_that_fails_ends_the_attempt_and_the_others_still_hear(which: str, error: Exception) -> None:
    """Nothing is swallowed, and nobody misses the notice because another failed."""
    source = Fed("a", "b", "c", taking=True)
    source.breaks[which] = error
    rig = Rig(alone(source), "in:0", splits=[split(n) for n in "abc"]).running()
    rig.trigger(1)
    rig.background()
    with pytest.raises(type(error), match=str(error)):
        rig.tell(Durable(1))
    assert sorted(source.heard) == [(n, 1, True) for n in "abc"]


class Script(HandTransport):
    """Where the shell would wait, the next act happens."""

    def __init__(self, *acts: Callable[[Rig], object]) -> None:
        super().__init__()
        self.acts = deque(acts)
        self.rig: Rig
        self.closed = False

    def wait(self, timeout: float) -> None:
        if self.acts:
            self.acts.popleft()(self.rig)

    def close(self) -> None:
        self.closed = True


def told(message: NodeMessage) -> Callable[[Rig], None]:
    return lambda rig: rig.runner.control(message)


def stored(rig: Rig) -> None:
    """The background lanes get on."""
    while rig.lanes.waiting:
        rig.lanes.run()


def driven(define: Callable[[JobBuilder], None], script: Script, **options: Any) -> Rig:
    """The shell's own loop over subtask ``in:0``, until the acts are used up or it is over."""
    rig = script.rig = Rig(define, "in:0", transport=script, **options)
    drive(rig.runner, script, lambda: not script.acts)
    return rig


def test_t32_the_shell_reports_a_completion_callback_that_failed() -> None:
    """The attempt is FAILED with its cause, and everything it held is closed."""
    source = Fed("a", "b", taking=True)
    source.breaks["a"] = ValueError("a defect")
    splits = [split("a"), split("b")]
    script = Script(told(Run()), told(Trigger(1, E.CHECKPOINT, splits, False)), stored, told(Durable(1)), lambda _: None, lambda _: None)
    rig = driven(alone(source), script, splits=splits)
    assert [(f.cause, f.detail) for f in rig.said(Failed)] == [("error", "ValueError: a defect")]
    assert set(source.heard) == {("a", 1, True), ("b", 1, True)}
    assert script.closed and all(r.closed for r in source.readers.values())


# -- a position kept outside


class Outside(Fed):
    """A source whose readers keep a position in a consumer group: for others to see, never to start from."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names, taking=True)
        self.group: dict[str, int] = {}
        self.opened: dict[str, Json] = {}

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> FedReader:
        self.opened[split.split_id] = cursor
        reader = self.readers[split.split_id] = GroupReader(self, split.split_id, cursor if isinstance(cursor, int) else 0)
        return reader


class GroupReader(TakingReader):
    source: Outside

    def __init__(self, source: Outside, name: str, at: int) -> None:
        super().__init__(source, name, at)
        self.cuts: dict[int, int] = {}

    def save_state(self, epoch: int) -> Json:
        self.cuts[epoch] = self.at
        return self.at

    def finish_commit(self, epoch: int, success: bool) -> None:
        if success and (known := [at for e, at in self.cuts.items() if e <= epoch]):
            self.source.group[self.name] = max(known)


@pytest.mark.parametrize("seed", range(20))
def test_t65_a_position_outside_follows_durable_epochs_and_is_never_started_from(seed: int) -> None:
    """Whatever is read, stored, aborted and lost: the group moves to durable cuts only, and a restart goes by the manifest wherever the group is."""
    rng = random.Random(seed)
    source, target = Outside("a", "b"), CollectTarget()
    source.ready = {name: [f"{name}{i}" for i in range(1000)] for name in "ab"}
    epoch = durable = 0
    cuts: dict[str, Any] = {"a": None, "b": None}
    snapshot, moves = None, 0
    for generation in range(1, 5):
        source.group = {name: rng.randint(0, 1000) for name in "ab"}  # somebody else set it: ahead, or far behind
        splits = [split(n, cuts[n]) for n in "ab"]
        rig = Rig(alone(source, target), "in:0", splits=splits, restored=snapshot, epoch=durable, generation=generation)
        rig.runner.start()
        rig.background()  # restored commits
        rig.tell(Run())
        assert source.opened == cuts
        flying = 0
        for _ in range(60):
            before = dict(source.group)
            match rng.choice(["read", "read", "epoch", "stored", "stored", "durable", "abort"]):
                case "read":
                    rig.runner.step()
                case "epoch" if not flying:
                    flying = epoch = epoch + 1
                    rig.trigger(epoch)
                case "stored":
                    rig.background()
                case "durable" if flying and flying in [a.epoch for a in rig.said(Ack)]:
                    snapshot, durable, flying = rig.snapshot(flying), flying, 0
                    cuts = {s.split_id: s.cursor for s in snapshot.splits}
                    rig.tell(Durable(durable))
                    rig.background()
                case "abort" if flying:
                    rig.tell(Abort(flying))
                    flying = 0
            if source.group != before:
                moves += 1
                assert source.group == cuts
        rig.runner.close()
    assert moves
    assert sorted(target.values("out")) == sorted(f"{n}{i}" for n in "ab" for i in range(cuts[n]))


# -- uploads


def test_a_snapshot_that_is_being_stored_counts_as_work_until_it_is_stored_or_has_failed() -> None:
    """Nothing else moves while the upload takes its time: the subtask says that it is busy, so nobody takes it for stalled."""
    source = Fed("a")
    rig = Rig(before_others(source), "in:0", splits=[split("a")]).running()
    assert not rig.runner.stats().busy
    rig.trigger(1)
    still = rig.runner.stats().progress
    for _ in range(10):
        rig.after(10.0)
        assert rig.runner.stats().busy and rig.runner.stats().progress == still
    rig.background()
    assert not rig.runner.stats().busy and rig.runner.stats().progress > still

    def gone(capture: Any) -> Any:
        raise OSError("the disk is gone")

    rig.runner.snapshotter.store = gone  # type: ignore[method-assign]
    rig.trigger(2)
    assert rig.runner.stats().busy
    with pytest.raises(OSError, match="the disk is gone"):
        rig.background()
    assert not rig.runner.stats().busy


# -- closing after a failure


class Fencing:
    """A sink whose target has let a newer generation in: everything it does is refused, closing too."""

    kind, version, capability = "fencing", 1, SinkCapability.UPSERT_BY_KEY

    def __init__(self) -> None:
        self.closed = 0

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def open(self, context: ConnectorContext) -> Fencing:
        return self

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        raise Fenced("generation 1 is stale: the target is fenced at 2")

    def flush(self) -> None:
        raise Fenced("generation 1 is stale: the target is fenced at 2")

    def close(self) -> None:
        self.closed += 1
        raise Fenced("generation 1 is stale: the target is fenced at 2")


class Clinging(ProcessFunction):
    """User code that fails when it is closed."""

    closed: ClassVar[int] = 0

    def process(self, value: Any, ctx: Any) -> None:
        ctx.emit(value)

    def close(self) -> None:
        type(self).closed += 1
        raise RuntimeError("cannot let go")


def failing(source: Fed, sink: Fencing) -> Callable[[JobBuilder], None]:
    def define(job: JobBuilder) -> None:
        keyed = job.source(source, uid="in").key_by(str)
        keyed.process(Clinging, uid="clings").sink_to(sink, uid="out")

    return define


def test_t49_closing_after_a_fence_releases_everything_and_changes_no_verdict() -> None:
    """Fenced at work and at each close after: one report, with the first cause; reader, user code, writer and transport are closed all the same."""
    source, sink = Fed("a", "b"), Fencing()
    source.ready["a"].append(1)
    source.closing["a"] = SourceError("the group has thrown this member out")
    Clinging.closed = 0
    script = Script(told(Run()), lambda _: None, lambda _: None)
    rig = driven(failing(source, sink), script, splits=[split("a"), split("b")], guarantee="EFFECTIVELY_ONCE")
    assert [f.cause for f in rig.said(Failed)] == ["fenced"]
    assert all(r.closed for r in source.readers.values())
    assert (Clinging.closed, sink.closed, script.closed) == (1, 1, True)


def test_t49_closing_twice_and_before_it_has_started_is_harmless() -> None:
    """Whatever had been opened by then."""
    source, sink = Fed("a"), Fencing()
    early = Rig(failing(source, sink), "in:0", splits=[split("a")], guarantee="EFFECTIVELY_ONCE")
    early.runner.close()
    assert sink.closed == 0
    late = Rig(failing(source, sink), "in:0", splits=[split("a")], guarantee="EFFECTIVELY_ONCE").running()
    late.runner.close()
    late.runner.close()
    assert sink.closed == 2 and source.readers["a"].closed


def test_a_failing_close_is_in_the_log() -> None:
    """It changes no verdict and is not hidden."""
    source, sink = Fed("a"), Fencing()
    source.closing["a"] = SourceError("the group has thrown this member out")
    rig = Rig(failing(source, sink), "in:0", splits=[split("a")], guarantee="EFFECTIVELY_ONCE").running()
    with structlog.testing.capture_logs() as logs:
        rig.runner.close()
    assert [(entry["subtask"], entry["log_level"]) for entry in logs] == [("in:0", "warning")] * 2


# -- the lease


@pytest.mark.parametrize("held_back", [False, True])
def test_a_subtask_that_slept_through_its_lease_within_a_step_publishes_nothing_more(held_back: bool) -> None:
    """SIGSTOP between the look at the step's beginning and the publish: it looks before each."""
    source = Fed("a")
    rigs: list[Rig] = []

    def sleeps(value: int) -> int:
        if value == 2:
            rigs[0].world.now += 60
        return value

    def define(job: JobBuilder) -> None:
        job.edges(capacity=1 if held_back else 100, batch_records=1)
        mapped = job.source(source, uid="in").map(sleeps, uid="sleeps")
        mapped.rebalance().map(str, uid="same", parallelism=2).sink_to(CollectSink("out", CollectTarget()), uid="out", parallelism=2)

    rig = Rig(define, "in:0", splits=[split("a")], source_batch=2)
    rigs.append(rig)
    rig.running()
    rig.tell(Lease(rig.runner._env.clock.monotonic() + 10))
    source.ready["a"] += [0, 1]
    rig.after(0.1)
    sent = [len(channel.sent) for channel in rig.downstream()]
    assert sum(sent) == 2
    source.ready["a"] += [2, 3]
    if held_back:
        for channel in rig.downstream():
            channel.processed(1)
    with pytest.raises(LeaseExpired):
        rig.after(0.1)
    assert [len(channel.sent) for channel in rig.downstream()] == sent


def test_what_user_code_raises_is_one_line_in_the_reason() -> None:
    """A drawing of a driver's, or a report of many lines, stays out of rows and tables; no word is lost."""
    source = Fed("a")
    source.ready["a"].append(1)

    def draws(_value: int) -> int:
        raise ValueError('relation "x" does not exist\nLINE 1: SELECT * FROM x\n                      ^\nDETAIL:  none')

    def define(job: JobBuilder) -> None:
        job.source(source, uid="in").map(draws, uid="draws").sink_to(CollectSink("out", CollectTarget()), uid="out")

    script = Script(told(Run()), lambda _: None, lambda _: None)
    rig = driven(define, script, splits=[split("a")])
    (failed,) = rig.said(Failed)
    assert failed.detail == "OperatorError: operator 'draws' failed: ValueError: relation \"x\" does not exist DETAIL: none"
