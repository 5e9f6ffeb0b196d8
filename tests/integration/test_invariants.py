"""The fifteen invariants of the stream contract, each with a test of its own, on an embedded cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.embedded import EXPECTED, FAST, WORDS, Job, counted, endless, saved

from millstream import JobBuilder, Pipelines
from millstream_coordinator.operations import Submission
from millstream_schema.canonical import shard_of
from millstream_schema.channels import ChannelId, Frame
from millstream_schema.connectors import CommitAnswer, Committable, ConnectorContext, Json, Read, SourceCapability, Split
from millstream_schema.control import Deployment, DeployMode, Failed, Trigger
from millstream_schema.envelope import Envelope, Kind, encode_envelope
from millstream_schema.errors import Fenced, JobFailed, JobInvalid
from millstream_schema.hints import NodeHint, NoHints
from millstream_schema.model import EdgeConfig, Guarantee, Override, StreamComponents, with_overrides
from millstream_schema.pipeline import planned
from millstream_schema.plan import Subtask, compile_plan
from millstream_schema.ports import SystemClock, SystemIds
from millstream_schema.states import AssignmentState, Desired, EpochState, JobState
from millstream_schema.store import epochs, registry
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.migrate import create_schema
from millstream_schema.values import TypeRegistry
from millstream_tasks.channels.memory import MemoryBroker, MemoryTransport
from millstream_tasks.node import Node, NodeSettings, NoEvents
from millstream_tasks.opening import open_storage
from millstream_tasks.operators.process import Context, ProcessFunction
from millstream_tasks.runner.environment import Environment
from millstream_tasks.runner.inputs import InputChannel
from millstream_tasks.runner.outputs import Outputs
from millstream_tasks.runner.subtask import SubtaskRunner
from millstream_tasks.shell.background import ThreadBackground
from millstream_tasks.shell.driving import make_runner
from millstream_tasks.sinks.memory import CollectSink, CollectTarget, CollectWriter, PrintSink
from millstream_tasks.sources.memory import CollectionSource, GeneratorSource
from millstream_tasks.state import KeyedTable


def test_invariant_01_every_piece_of_state_carries_a_stable_operator_id(tmp_path: Path) -> None:
    """Segments, list state, splits and committables name operators by uid; keys of blobs name no attempt, node or generation; without uid STRICT refuses."""
    job = Job(tmp_path, counted, parallelism=2)
    with job.cluster as cluster:
        name = job.submit()
        cluster.wait(name, 20)
        manifest = cluster.manifest(name)
        uids = {"words", "count", "out"}
        seen = {o for _, segment in cluster.segments(manifest) for o in segment.operators()}
        assert seen == {"count"}
        assert {o for s in manifest.subtasks for o in s.operators} == uids == set(manifest.operators)
        assert {s.operator for s in manifest.splits} == {"words"}
        assert {
            c.operator
            for e in cluster.database.read(lambda tx: epochs.manifest_epochs(tx, name))
            for c in cluster.manifest(name, e).committables()
        } == {"out"}
        assert {h.key.split("/")[2] for h in manifest.handles()} <= {f"{s.vertex}-{s.index}" for s in cluster.plan(name).subtasks()}
    assert sorted(job.out) == EXPECTED
    nameless = Pipelines()
    nameless.define("job")(
        lambda b, _c: b.source(CollectionSource([1]), uid="s").key_by(str).reduce(max).sink_to(CollectSink("o", CollectTarget()), uid="o")
    )
    with pytest.raises(JobInvalid, match="no uid"):
        planned(nameless.build("job"), None, {})


def test_invariant_02_a_key_has_one_shard_and_its_state_lies_with_the_shards_owner(tmp_path: Path) -> None:
    """Each subtask's segments hold keys of its own shards only, by the function that routed them."""
    job = Job(tmp_path, counted, parallelism=3)
    with job.cluster as cluster:
        name = job.submit()
        cluster.wait(name, 20)
        plan, found = cluster.plan(name), {}
        for subtask, segment in cluster.segments(cluster.manifest(name)):
            table = KeyedTable("value")
            segment.apply("count", {"value": table}, range(128))
            for key in list(table.keys()):
                assert plan.owner("count", shard_of(key, 128)) == Subtask.parse(subtask).index
                found[key] = subtask
        assert set(found) == set(WORDS) and len(set(found.values())) > 1


def test_invariant_03_the_partitioned_plan_is_the_only_source(tmp_path: Path) -> None:
    """What is assigned, what acknowledges an epoch and which channels exist is what the plan says, subtask by subtask."""
    job = Job(tmp_path, counted, parallelism=2)
    with job.cluster as cluster:
        name = job.submit(parallelism=3)
        cluster.wait(name, 20)
        plan = cluster.plan(name)
        wanted = [s.id for s in plan.subtasks()]
        assert len(wanted) == 6
        last = cluster.manifest(name)
        assert sorted(s.subtask for s in last.subtasks) == sorted(wanted) and last.plan_fingerprint == plan.fingerprint()
        marks = cluster.database.read(lambda tx: epochs.ack_marks(tx, name, last.epoch))
        assert sorted(m.subtask for m in marks) == sorted(wanted)
        rows = cluster.database.read(lambda tx: registry.assignments(tx, name, last.generation))
        assert sorted(r.subtask for r in rows) == sorted(wanted)
        rows_of = cluster.database.tables.channel
        named = cluster.database.read(lambda tx: tx.rows(rows_of.select().where(rows_of.c.generation == last.generation)))
        channels = {(c["edge"], c["source"], c["target"]) for c in named}
        assert channels <= {(c.edge, c.source, c.target) for c in plan.channels(name, last.generation)}
    assert sorted(job.out) == EXPECTED


class Watched:
    """A replayable source that notes which thread polls it and which takes its cursor."""

    kind, version, bounded = "watched", 1, False
    capability = SourceCapability.REPLAYABLE

    def __init__(self) -> None:
        self.polls: set[tuple[str, int]] = set()
        self.cuts: set[tuple[str, int]] = set()

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def discover(self, known: frozenset[str]) -> list[Split]:
        return [Split(n) for n in ("a", "b") if n not in known]

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> WatchedReader:
        return WatchedReader(self, split.split_id, cursor if isinstance(cursor, int) else 0)


class WatchedReader:
    """One record now and then."""

    def __init__(self, source: Watched, name: str, at: int) -> None:
        self.source, self.name, self.at = source, name, at
        self.quiet = 0

    def poll(self, limit: int) -> Read:
        self.source.polls.add((threading.current_thread().name, threading.get_ident()))
        self.quiet += 1
        if self.quiet % 3:
            return Read([])
        self.at += 1
        return Read([(self.name, self.at)])

    def cursor(self) -> Json:
        self.source.cuts.add((threading.current_thread().name, threading.get_ident()))
        return self.at

    def close(self) -> None:
        """Nothing is held."""


def test_invariant_04_barriers_come_from_the_sources_reading_thread_and_through_the_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By thread identity: each source's barriers are sent by the thread that polls it; subtasks behind it are told nothing and send theirs when it came by all channels."""
    source = Watched()
    sent: list[tuple[str, int, int]] = []
    triggered: set[str] = set()
    received: dict[tuple[str, int], int] = {}
    barrier, trigger, arrived = Outputs.barrier, SubtaskRunner._triggered, SubtaskRunner._barrier

    def on_barrier(self: Outputs, epoch: int, kind: str) -> None:
        sent.append((threading.current_thread().name, threading.get_ident(), epoch))
        barrier(self, epoch, kind)

    def on_trigger(self: SubtaskRunner, message: Trigger) -> None:
        triggered.add(self.subtask.id)
        trigger(self, message)

    def on_arrival(self: SubtaskRunner, index: int, channel: InputChannel, b: Any) -> None:
        key = (threading.current_thread().name, b.epoch)
        received[key] = received.get(key, 0) + 1
        arrived(self, index, channel, b)

    monkeypatch.setattr(Outputs, "barrier", on_barrier)
    monkeypatch.setattr(SubtaskRunner, "_triggered", on_trigger)
    monkeypatch.setattr(SubtaskRunner, "_barrier", on_arrival)

    def define(b: JobBuilder, target: CollectTarget) -> None:
        b.source(source, uid="in").key_by(lambda r: r[1] % 5).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(
            CollectSink("out", target), uid="out"
        )

    job = Job(tmp_path, define, parallelism=2)
    with job.cluster as cluster:
        name = job.submit()
        cluster.until(lambda: cluster.row(name).newest_durable >= 3, "three durable epochs")
        cluster.stop(name, Desired.CANCEL)
    readers = {"subtask-in:0", "subtask-in:1"}
    assert {thread for thread, _ in source.polls} == readers
    assert source.cuts <= source.polls, "an offset was cut by a thread that does not read the source"
    from_sources = {(thread, ident) for thread, ident, _ in sent if thread in readers}
    assert from_sources == source.polls
    assert {thread for thread, *_ in sent} == readers | {"subtask-count:0", "subtask-count:1"}
    assert triggered == {"in:0", "in:1"}
    for thread, _, epoch in sent:
        assert thread in readers or received[thread, epoch] == 2, f"{thread} sent barrier {epoch} before it came by both channels"


class Judging(CollectTarget):
    """Looks in the database at the moment of each commit."""

    def __init__(self) -> None:
        super().__init__()
        self.database: Database | None = None
        self.early: list[str] = []
        self.commits = 0

    def commit(self, name: str, committable: Committable, context: ConnectorContext, missing: Any) -> CommitAnswer:
        assert self.database is not None
        known = self.database.read(
            lambda tx: [
                c.id for e in epochs.manifest_epochs(tx, context.job) for c in epochs.read_manifest(tx, context.job, e).committables()
            ]
        )
        self.commits += 1
        if committable.id not in known:
            self.early.append(committable.id)
        return super().commit(name, committable, context, missing)


def test_invariant_05_nothing_is_committed_before_its_manifest_is_durable(tmp_path: Path) -> None:
    """At the moment of each commit a durable manifest lists the committable."""
    target = Judging()
    job = Job(tmp_path, lambda b, t: b.source(endless(), uid="in").sink_to(CollectSink("out", t), uid="out"), target=target, parallelism=2)
    with job.cluster as cluster:
        target.database = cluster.database
        name = job.submit()
        cluster.until(lambda: cluster.row(name).newest_committed >= 3, "three committed epochs")
        cluster.stop(name, Desired.CANCEL)
    assert target.commits >= 3 and target.early == []


def test_invariant_06_recovery_starts_from_the_newest_durable_manifest(tmp_path: Path) -> None:
    """A failure after some durable epochs: the next generation is deployed from the newest of them, and no record counts twice."""
    fail, failed = threading.Event(), threading.Event()

    def fragile(record: Any) -> Any:
        if fail.is_set() and not failed.is_set():
            failed.set()
            raise RuntimeError("the disk of the operator is full")
        return record

    def define(b: JobBuilder, target: CollectTarget) -> None:
        b.source(endless(), uid="in").map(fragile, uid="map").sink_to(CollectSink("out", target), uid="out")

    job = Job(tmp_path, define)
    with job.cluster as cluster:
        name = job.submit()
        cluster.until(lambda: cluster.row(name).newest_durable >= 3, "three durable epochs")
        fail.set()
        cluster.until(lambda: cluster.row(name).restarts == 1 and cluster.row(name).state is JobState.RUNNING, "the recovery")
        row = cluster.row(name)
        older = [e for e in cluster.database.read(lambda tx: epochs.list_epochs(tx, name, 1000)) if e.generation < row.generation]
        newest = max(e.epoch for e in older if e.state in (EpochState.DURABLE, EpochState.COMMITTED))
        assert row.restore_epoch == newest >= 3
        cluster.durable(name)
        cluster.stop(name, Desired.DRAIN)
    seen = sorted(job.out)
    assert seen == [(s, i) for s in (0, 1) for i in range(sum(1 for split, _ in seen if split == s))]


def test_invariant_07_no_strict_claim_with_a_weak_end(tmp_path: Path) -> None:
    """Refused when it is compiled, the operator named; refused again on the node, where another build may plan a weak end."""

    def weak(b: JobBuilder, _target: CollectTarget) -> None:
        b.source(CollectionSource([1]), uid="in").sink_to(PrintSink(), uid="paper")

    job = Job(tmp_path, weak)
    with job.cluster, pytest.raises(JobInvalid, match="sink 'paper' is NONE, STRICT_EXACTLY_ONCE needs"):
        job.submit()
    reports: list[Any] = []
    deployment = Deployment(
        job="j", factory="job", config={}, parallelism=None, overrides={}, plan_fingerprint="of the strong build", generation=1, attempt="a", subtask="in:0",
        mode=DeployMode.RUN, settings=FAST, restore_epoch=0, restored=[], splits=[], known_splits={},
    )  # fmt: skip
    storage = open_storage(tmp_path.as_uri())
    transport = MemoryTransport(MemoryBroker())
    environment = Environment(transport, storage, SystemClock(), ThreadBackground("t"), reports.append, lambda: None, "memory")
    assert make_runner(job.pipelines.registry, deployment, environment) is None
    assert [(type(r), r.cause) for r in reports] == [(Failed, "invalid")] and "'paper'" in reports[0].detail


def zombie_reports(tx: Transaction, generation: int, attempt: str) -> list[bool]:
    """What a subtask would write; whether any of it counted."""
    return [
        registry.ready_assignment(tx, "j", generation, "in:0", attempt, 5),
        registry.committed_assignment(tx, "j", generation, "in:0", attempt, 5),
        registry.exhausted_assignment(tx, "j", generation, "in:0", attempt),
        registry.end_assignment(tx, "j", generation, "in:0", attempt, AssignmentState.FAILED, "zombie", ""),
    ]


def test_invariant_08_stale_attempts_and_coordinators_are_fenced(tmp_path: Path) -> None:
    """A stale generation's reports, records and staging, and a stale term's hints, change nothing anywhere."""
    db = Database(f"sqlite:///{tmp_path / 'x.db'}", SystemClock())
    create_schema(db)
    db.run(lambda tx: registry.assign(tx, "j", 8, {"in:0": "n"}, 0))
    assert db.run(lambda tx: registry.start_assignment(tx, "j", 8, "in:0", "n", "new"))
    for generation, attempt in ((7, "old"), (8, "old"), (7, "new")):
        refused = db.run(lambda tx, g=generation, a=attempt: zombie_reports(tx, g, a))  # type: ignore[misc]
        assert refused == [False] * 4
    target = CollectTarget()
    sink = CollectSink("out", target)
    old = sink.open(ConnectorContext("j", "out", 0, 1, 7, lambda: None, lambda: 0))
    sink.open(ConnectorContext("j", "out", 0, 1, 8, lambda: None, lambda: 0))
    for late in (lambda: old.write([1], None), lambda: sink.open(ConnectorContext("j", "out", 0, 1, 7, lambda: None, lambda: 0))):
        with pytest.raises(Fenced):
            late()
    broker = MemoryBroker()
    channel = ChannelId("j", 8, "e0", 0, 0)
    receiving, sending = MemoryTransport(broker), MemoryTransport(broker)
    reader = InputChannel(channel, receiving.create(channel, 8), TypeRegistry())
    writer = sending.connect(channel, 8)
    for generation in (7, 8):
        envelope = Envelope(generation, 1, 0, Kind.WATERMARK, generation, "any")
        writer.put(Frame(1, encode_envelope(envelope, TypeRegistry())))
    first = reader.take()
    assert first is not None and first.payload == 8 and reader.fenced == 1
    node = Node(db, NoHints(), SystemClock(), SystemIds(), None, NodeSettings(name="n"), {}, NoEvents())  # type: ignore[arg-type]
    node.hint(NodeHint("", "j", 8, 5, "run"))
    node.hint(NodeHint("", "j", 8, 4, "run"))
    assert node.term == 5 and node.stale_hints == 1
    db.close()


class Alarm(ProcessFunction):
    """Sets a timer far ahead for each key and says when it rang."""

    def process(self, value: Any, ctx: Context) -> None:
        ctx.timers.event(10**15)

    def on_timer(self, timestamp: int, ctx: Context) -> None:
        ctx.emit((ctx.key, timestamp))


def test_invariant_09_timers_are_in_the_snapshot(tmp_path: Path) -> None:
    """Suspended with timers pending: nothing rings; resumed without any new record they ring once each when the input is drained."""
    given = threading.Event()

    def once(split: int, at: int, limit: int) -> list[Any]:
        if at or split:
            return []
        given.set()
        return ["a", "b", "c"][:limit]

    def define(b: JobBuilder, target: CollectTarget) -> None:
        source = GeneratorSource(once, 1, "once", bounded=False)
        stamped = b.source(source, uid="in").assign_timestamps(lambda _r: 0, uid="ts")
        stamped.key_by(str).process(Alarm, uid="alarm").sink_to(CollectSink("out", target), uid="out")

    job = Job(tmp_path, define)
    with job.cluster as cluster:
        name = job.submit()
        cluster.until(given.is_set, "the records")
        cluster.durable(name, 2)
        assert cluster.stop(name, Desired.SUSPEND, "sp").state is JobState.STOPPED
        assert job.out == []
        assert "timers.event" in {s for _, segment in cluster.segments(cluster.manifest(name)) for s in segment.states("alarm")}
        cluster.resume(name, job.pipelines)
        cluster.until(lambda: cluster.row(name).state is JobState.RUNNING, "the resumed job")
        assert cluster.stop(name, Desired.DRAIN).state is JobState.FINISHED
    assert sorted(job.out) == [("a", 10**15), ("b", 10**15), ("c", 10**15)]


def test_invariant_10_changes_are_made_to_models_never_to_running_objects(tmp_path: Path) -> None:
    """A rescale is another model with another fingerprint in another generation; what was planned before is frozen and as it was."""

    def define(b: JobBuilder, target: CollectTarget) -> None:
        counts = b.source(endless(), uid="in").key_by(lambda r: r[1] % 9).aggregate(int, lambda n, _: n + 1, uid="count")
        counts.sink_to(CollectSink("out", target), uid="out")

    job = Job(tmp_path, define)
    pipeline = job.pipelines.build("job")
    before = pipeline.model.fingerprint()
    with job.cluster as cluster:
        name = job.submit()
        cluster.durable(name)
        cluster.stop(name, Desired.SUSPEND, "sp")
        first = cluster.row(name)
        cluster.resume(name, job.pipelines, parallelism=2, overrides={o: Override(parallelism=3) for o in ("count", "out")})
        cluster.durable(name)
        second = cluster.row(name)
        cluster.stop(name, Desired.DRAIN)
        assert second.plan_fingerprint != first.plan_fingerprint and second.generation > first.generation
        assert {v.id: v.parallelism for v in cluster.plan(name).vertices} == {"in": 2, "count": 3}
    assert pipeline.model.fingerprint() == before == job.pipelines.build("job").model.fingerprint()
    for frozen, field in (
        (pipeline.model, "parallelism"),
        (pipeline.model.operators[0], "parallelism"),
        (compile_plan(pipeline.model), "shard_count"),
    ):
        with pytest.raises(AttributeError):
            setattr(frozen, field, 9)
    per_key: dict[Any, list[int]] = {}
    for key, n in job.out:
        per_key.setdefault(key, []).append(n)
    assert all(sorted(ns) == list(range(1, len(ns) + 1)) for ns in per_key.values()) and len(per_key) == 9


def test_invariant_11_every_model_has_its_components_registry(tmp_path: Path) -> None:
    """Each component that the builder registered is needed: without any one of those in use the job is refused, and it is named."""
    job = Job(tmp_path, counted)
    model = job.pipelines.build("job").model
    components = model.components.components
    assert {(c.kind, c.name) for c in components} == {
        ("source", "words"), ("sink", "out"), ("function", "count.key"), ("function", "count.create"), ("function", "count.add"), ("codec", "msgpack"),
        ("state", "count.value"),
    }  # fmt: skip
    for missing in components:
        rest = StreamComponents([c for c in components if c is not missing])
        with pytest.raises(JobInvalid, match="not in the components registry") as caught:
            compile_plan(msgspec.structs.replace(model, components=rest))
        assert missing.name in str(caught.value)


def test_invariant_12_requirements_are_checked_at_compile_and_at_run(tmp_path: Path) -> None:
    """An unknown one is refused before submission; one this node cannot meet fails the job there by name; those met are in the manifest."""

    def needing(name: str) -> Callable[[JobBuilder, CollectTarget], None]:
        def define(b: JobBuilder, target: CollectTarget) -> None:
            b.require(name)
            counted(b, target)

        return define

    unknown = Job(tmp_path / "a", needing("moon_phase"))
    with unknown.cluster, pytest.raises(JobInvalid, match="moon_phase"):
        unknown.submit()
    unmet = Job(tmp_path / "b", needing("broker_transport"))
    with unmet.cluster as cluster, pytest.raises(JobFailed, match="broker transport"):
        cluster.wait(unmet.submit(), 20)
    assert unmet.out == []
    met = Job(tmp_path / "c", needing("shared_storage"))
    with met.cluster as cluster:
        name = met.submit()
        cluster.wait(name, 20)
        recorded = {r["name"] for r in cluster.manifest(name).requirements}
    assert recorded == {"guarantee", "durable_checkpoint_storage", "shared_storage"} and sorted(met.out) == EXPECTED


class Queue(Watched):
    """A source whose reader takes part in epochs; notes the calls."""

    capability = SourceCapability.TRANSACTIONAL_READ

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def discover(self, known: frozenset[str]) -> list[Split]:
        return [Split("q")] if "q" not in known else []

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> QueueReader:
        return QueueReader(self, split.split_id, cursor if isinstance(cursor, int) else 0)


class QueueReader(WatchedReader):
    """A participant."""

    source: Queue

    def save_state(self, epoch: int) -> Json:
        self.source.calls.append(("source saves", epoch))
        return {"at": self.at}

    def prepare_commit(self, epoch: int) -> list[Committable]:
        self.source.calls.append(("source prepares", epoch))
        return []

    def finish_commit(self, epoch: int, success: bool) -> None:
        self.source.calls.append(("source finishes" if success else "source keeps", epoch))

    def restore_from_epoch(self, epoch: int, state: Json) -> None:
        self.source.calls.append((f"source restores {state}", epoch))


class Noting(CollectTarget):
    """Notes when an epoch's output becomes visible."""

    def __init__(self, calls: list[tuple[str, int]]) -> None:
        super().__init__()
        self.calls = calls

    def commit(self, name: str, committable: Committable, context: ConnectorContext, missing: Any) -> CommitAnswer:
        answer = super().commit(name, committable, context, missing)
        self.calls.append(("sink commits", committable.epoch))
        return answer


class TakingSink(CollectSink):
    """A two-phase sink whose writer takes part in epochs."""

    target: Noting

    def open(self, context: ConnectorContext) -> TakingWriter:
        self.target.raise_fence(context.job, context.operator, context.generation)
        return TakingWriter(self, context)


class TakingWriter(CollectWriter):
    """Notes the calls beside the source's."""

    def __init__(self, sink: TakingSink, context: ConnectorContext) -> None:
        super().__init__(sink, context)
        self.calls = sink.target.calls

    def save_state(self, epoch: int) -> Json:
        self.calls.append(("sink saves", epoch))
        return {"saved in": epoch}

    def prepare_commit(self, epoch: int) -> list[Committable]:
        self.calls.append(("sink prepares", epoch))
        return super().prepare_commit(epoch)

    def finish_commit(self, epoch: int, success: bool) -> None:
        self.calls.append(("sink finishes" if success else "sink keeps", epoch))

    def restore_from_epoch(self, epoch: int, state: Json) -> None:
        self.calls.append((f"sink restores {state}", epoch))


def test_invariant_13_transactional_operators_take_part_in_epochs(tmp_path: Path) -> None:
    """Source before sink to save and prepare, sink before source to finish; what was saved is given back once when it is restored."""
    source = Queue()
    target = Noting(source.calls)
    job = Job(tmp_path, lambda b, t: b.source(source, uid="in").sink_to(TakingSink("out", t), uid="out"), target=target)
    with job.cluster as cluster:
        name = job.submit()
        cluster.until(lambda: ("source finishes", 3) in source.calls, "three epochs")
        cluster.stop(name, Desired.SUSPEND, "sp")
        saved = cluster.manifest(name)
        (states,) = [s.participants for s in saved.subtasks if s.participants]
        before = len(source.calls)
        cluster.resume(name, job.pipelines)
        cluster.durable(name)
        cluster.stop(name, Desired.CANCEL)
        ended = cluster.row(name)
    life = source.calls[:before]
    for epoch in range(1, 4):
        wanted = ["source saves", "sink saves", "source prepares", "sink prepares", "sink commits", "sink finishes", "source finishes"]
        mine = [what for what, e in life if e == epoch]
        assert mine == [w for w in wanted if w in mine] and mine[:4] == wanted[:4] and mine[-2:] == wanted[-2:], mine
    assert states == {"in/q": states["in/q"], "out/0": {"saved in": saved.epoch}}
    after = source.calls[before:]
    for end, name in (("source", "in/q"), ("sink", "out/0")):
        mine = [what for what, _ in after if what.startswith(end) and "commits" not in what]
        assert mine[0] == f"{end} restores {states[name]}"
        restored = [e for what, e in after if what.startswith(f"{end} restores")]
        assert restored[0] == saved.epoch
        # A job that was cancelled may get writers once more, to carry out the commits of its newest epoch; nothing is read then.
        assert restored[1:] in ([], [ended.newest_durable] if end == "sink" else [])


def test_invariant_14_every_distributed_edge_has_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each edge of the plan runs with its own bounds; an edge without sensible ones is refused."""
    job = Job(tmp_path, counted, parallelism=2)
    model = job.pipelines.build("job").model
    for bad in ({"capacity": 0}, {"batch_records": 0}, {"batch_bytes": 2 << 20}, {"linger_ms": -1}):
        with pytest.raises(JobInvalid):
            compile_plan(with_overrides(model, None, {"count": Override(edge=bad)}))
    used: set[tuple[str, int]] = set()
    connect = MemoryTransport.connect

    def watched(self: MemoryTransport, channel: ChannelId, capacity: int) -> Any:
        used.add((channel.edge, capacity))
        return connect(self, channel, capacity)

    monkeypatch.setattr(MemoryTransport, "connect", watched)
    with job.cluster as cluster:
        overrides = {"count": Override(edge={"capacity": 1, "batch_records": 2}), "out": Override(parallelism=1)}
        submission = Submission(job="j1", name="job", factory="job", settings=FAST, overrides=overrides)
        with pytest.raises(JobInvalid, match="FORWARD needs equal parallelism"):
            cluster.operations.submit(submission, job.pipelines.build("job"))
        kept = {"count": overrides["count"]}
        cluster.operations.submit(msgspec.structs.replace(submission, overrides=kept), job.pipelines.build("job"))
        cluster.hint("j1")
        cluster.wait("j1", 20)
        configs = {e.id: e.spec.config for e in cluster.plan("j1").edges}
    assert configs and all(isinstance(c, EdgeConfig) for c in configs.values())
    assert used == {(edge, c.capacity) for edge, c in configs.items()} == {("e0", 1)}
    assert sorted(job.out) == EXPECTED


@pytest.mark.parametrize(
    ("mode", "state", "fires"),
    [
        ("CANCEL", JobState.STOPPED, False),
        ("SUSPEND", JobState.STOPPED, False),
        ("DRAIN", JobState.FINISHED, True),
        ("EXPORT_SAVEPOINT", JobState.RUNNING, False),
    ],
)
def test_invariant_15_every_ending_has_its_mode(tmp_path: Path, mode: str, state: JobState, fires: bool) -> None:
    """What remains open is fired by DRAIN only; SUSPEND and EXPORT_SAVEPOINT leave a savepoint; an ended job keeps its mode and takes no other."""

    def define(b: JobBuilder, target: CollectTarget) -> None:
        stamped = b.source(endless(splits=1), uid="in").assign_timestamps(lambda r: r[1], uid="ts")
        windows = stamped.key_by(lambda _r: "all").tumbling(10**12).aggregate(int, lambda n, _: n + 1, uid="window")
        windows.sink_to(CollectSink("out", target), uid="out")

    job = Job(tmp_path, define)
    with job.cluster as cluster:
        name = job.submit()
        cluster.durable(name, 2)
        if mode == "EXPORT_SAVEPOINT":
            cluster.operations.savepoint(name, "sp")
            cluster.hint(name)
            cluster.until(lambda: saved(cluster, name) == [("sp", "COMPLETE")], "the savepoint")
            cluster.durable(name, 2)
        else:
            assert cluster.stop(name, Desired(mode), "sp" if mode == "SUSPEND" else "").state is state
            row = cluster.row(name)
            assert row.desired == mode and row.newest_committed == row.newest_durable and row.pending_commits == "[]"
            assert saved(cluster, name) == ([("sp", "COMPLETE")] if mode == "SUSPEND" else [])
        assert cluster.row(name).state is state
        assert job.target.staged() == {} or mode == "EXPORT_SAVEPOINT"
        if mode == "EXPORT_SAVEPOINT":
            cluster.stop(name, Desired.CANCEL)
    assert bool(job.out) is fires
    assert len(job.out) <= 1


def test_the_guarantee_of_these_jobs_is_strict() -> None:
    """Else most of what is above would be shown of something weaker."""
    pipelines = Pipelines()
    pipelines.define("job")(lambda b, _c: counted(b, CollectTarget()))
    assert pipelines.build("job").model.guarantee is Guarantee.STRICT_EXACTLY_ONCE
