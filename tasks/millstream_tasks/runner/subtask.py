"""``SubtaskRunner``: one subtask as a step machine.

A shell calls :meth:`SubtaskRunner.start` once and :meth:`SubtaskRunner.step` until :attr:`SubtaskRunner.over`; control messages and completions of background work
are handed in from any thread. One step takes what arrived, does a bounded amount of work and says how long it can wait. What must never happen here: blocking; a
barrier from any thread but the one that reads the source; a publish, stage, snapshot or commit after the lease's deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from millstream_schema.channels import ChannelId
from millstream_schema.connectors import CommitAnswer, CommitResult, CommittingWriter, ConnectorContext, Json, SinkWriter
from millstream_schema.control import (
    Abort,
    Ack,
    AssignSplits,
    ChannelsDeleted,
    CommitPending,
    Committed,
    Declined,
    Deployment,
    DeployMode,
    Discovered,
    Durable,
    EpochKind,
    Exhausted,
    Failed,
    Finished,
    Lease,
    NodeMessage,
    Ready,
    Run,
    Stats,
    Stop,
    Trigger,
    WantsEpoch,
)
from millstream_schema.envelope import Barrier, Envelope, Kind
from millstream_schema.errors import (
    ChannelError,
    CodecError,
    ConfigurationError,
    Fenced,
    JobInvalid,
    MillstreamError,
    OperatorError,
    RecordError,
    RestoreRefused,
    SnapshotMissing,
    SnapshotUnreadable,
    SourceError,
    StorageError,
    StoreError,
)
from millstream_schema.manifest import SubtaskSnapshot
from millstream_schema.model import EdgeMode, StreamModel
from millstream_schema.pipeline import Pipeline
from millstream_schema.plan import PartitionedPlan, PlanEdge, Subtask

from ..chain import Chain, SinkOperator, build_chain, key_function
from ..operators.base import MAX_WATERMARK, Batch, Operator
from ..operators.stateless import AssignTimestamps
from ..requirements import unmet
from .committing import Committer
from .environment import Environment, LeaseExpired
from .inputs import Alignment, InputChannel, idle, low_watermark
from .outputs import OutputChannel, OutputEdge, Outputs
from .reading import SourceDriver, dead_letters
from .restoring import load_operators, restored_committables, restored_participants, same_shape
from .snapshotting import Capture, Snapshotter

FRAMES_PER_STEP = 16
IDLE_WAIT = 0.002
LONG_WAIT = 0.05


class SubtaskRunner:
    """One attempt of one subtask."""

    def __init__(
        self, deployment: Deployment, pipeline: Pipeline, model: StreamModel, plan: PartitionedPlan, environment: Environment
    ) -> None:
        self.deployment = deployment
        self.subtask = Subtask.parse(deployment.subtask)
        self.over = False
        self.deadline = float("inf")
        self.busy = False
        self.progress = 0
        self.source_thread: int | None = None
        self._env = environment
        self._pipeline = pipeline
        self._model = model
        self._plan = plan
        self._vertex = plan.vertex(self.subtask.vertex)
        self._settings = deployment.settings
        self._control: deque[NodeMessage] = deque()
        self._completions: deque[Callable[[], None]] = deque()
        self._running = False
        self._ready = False
        self._sealed: int | None = None
        self._terminal = 0
        self._ends_input = False
        self._ended = False
        self._pending: Trigger | None = None
        self._exhausted = False
        self._idle = False
        self._last_data: float = 0.0
        self._unflushed_since: float | None = None
        self._watermark_at = 0
        self._discover_at: float | None = None
        self._durable = 0
        self._wanted_epoch = False
        self._storing = 0
        self._in_turn = 0
        self.counters: dict[str, int] = {"records_in": 0, "poison": 0, "snapshots": 0, "declined": 0}
        self.longest_cut = 0.0
        self._seconds = {"busy": 0.0, "idle": 0.0, "backpressured": 0.0}
        self._step_ended = environment.clock.monotonic()
        self._waiting_for = "idle"
        self.inputs: list[InputChannel] = []
        self.source: SourceDriver | None = None
        self.chain: Chain
        self.outputs: Outputs
        self.alignment: Alignment
        self.snapshotter: Snapshotter
        self.committer: Committer

    # -- starting -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Restore, create the channels that end here, raise the sinks' fences, begin the restored commits. READY is reported by :meth:`step`."""
        d = self.deployment
        self.guard()
        problems = unmet(self._model, d.job, self._env.storage, self._env.transport_kind)
        if problems and d.mode is DeployMode.RUN:
            raise JobInvalid([f"{self.subtask.id}: {p}" for p in problems])
        writers = self._open_sinks()
        self._build_outputs()
        self.chain = build_chain(self._model, self._vertex, self._pipeline, writers, self.outputs, self._env.clock.now_ms)
        committing = {name: w for name, w in writers.items() if isinstance(w, CommittingWriter)}
        self._committing = committing
        self.committer = Committer(committing, self._env.background, self.complete, self._commit_outcome)
        self.committer.add(restored_committables(d, self._vertex, set(committing)))
        self.committer.durable(d.restore_epoch)
        if d.mode is DeployMode.FINALIZE:
            return
        load_operators(self.chain.operators, d, self._plan, self._env.storage, self._pipeline.types)
        self.chain = Chain(self.chain.operators, self.outputs)  # its watermark starts where the restored assigner is
        self.snapshotter = Snapshotter(
            self.chain.operators,
            self._env,
            self._pipeline.types,
            self._settings,
            self._plan.shards(self.subtask),
            self._plan.shard_count,
            d.job,
            f"{self.subtask.vertex}-{self.subtask.index}",
        )
        if (own := same_shape(d)) is not None:
            self.snapshotter.restored(own.segments)
        self._open_source()
        for edge, index in self._plan.inputs(self.subtask):
            channel = ChannelId(d.job, d.generation, edge.id, index, self.subtask.index)
            reader = self._env.transport.create(channel, edge.spec.config.capacity)
            self.inputs.append(InputChannel(channel, reader, self._pipeline.types))
        self.alignment = Alignment(self.inputs, self._model.guarantee.aligned, d.restore_epoch)

    def _context(self, operator: str) -> ConnectorContext:
        d = self.deployment
        return ConnectorContext(
            d.job, operator, self.subtask.index, self._vertex.parallelism, d.generation, self.guard, self._env.clock.now_ms
        )

    def _open_sinks(self) -> dict[str, SinkWriter]:
        return {o: self._pipeline.sinks[o].open(self._context(o)) for o in self._vertex.operators if self._model.operator(o).kind == "sink"}

    def _build_outputs(self) -> None:
        edges = []
        for edge, targets in self._plan.outputs(self.subtask):
            ids = [ChannelId(self.deployment.job, self.deployment.generation, edge.id, self.subtask.index, t) for t in targets]
            objects = self._passes_objects(edge)
            channels = [OutputChannel(c, edge, self._pipeline.types, objects) for c in ids]
            key = key_function(self._model, self._pipeline, edge.spec.target) if edge.spec.partitioning == "HASH" else None
            edges.append(OutputEdge(edge, channels, key, self._plan.shard_count))
        self.outputs = Outputs(edges)

    def _passes_objects(self, edge: PlanEdge) -> bool:
        """Whether the edge hands objects over instead of encoding them. Raises JobInvalid for a queue between processes."""
        config = edge.spec.config
        if config.mode is EdgeMode.BLOCKING_QUEUE and self._env.transport_kind != "memory":
            raise JobInvalid([f"edge {edge.spec.id!r}: mode BLOCKING_QUEUE needs both ends in one process; use CREDIT_BASED"])
        return self._env.objects and not config.verify_serialization and config.mode is not EdgeMode.CREDIT_BASED

    def _open_source(self) -> None:
        head = self._model.operator(self._vertex.operators[0])
        if head.kind != "source":
            return
        d = self.deployment
        source = self._pipeline.sources[head.id]
        self.source = SourceDriver(head, source, self._context(head.id), restored_participants(d), d.restore_epoch)
        self._take_splits(d.splits, False)
        if self.subtask.index == 0:
            self._discover(set(d.known_splits.get(head.id, ())))

    def _discover(self, known: set[str]) -> None:
        assert self.source is not None
        source = self._pipeline.sources[self.source.id]
        found = source.discover(frozenset(known))
        self._known = known | {s.split_id for s in found}
        if found or source.bounded or self._discover_at is None:
            self._env.report(Discovered(self.source.id, found, source.bounded))
        if not source.bounded:
            self._discover_at = self._env.clock.monotonic() + self._settings.discovery_interval_ms / 1000

    def _take_splits(self, splits: list[Any], complete: bool) -> None:
        assert self.source is not None
        new = self.source.assign(splits, complete)
        if self.chain.assigner is not None:
            self.chain.assigner.begin(new)

    # -- handed in from other threads -----------------------------------------------------------------------------------------------

    def control(self, message: NodeMessage) -> None:
        """A message from the node. Thread-safe. A lease takes effect at once, even while a step is running."""
        if isinstance(message, Lease):
            self.deadline = max(self.deadline, message.deadline) if self.deadline != float("inf") else message.deadline
            return
        self._control.append(message)
        self._env.transport.wake()

    def complete(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the next step. Thread-safe."""
        self._completions.append(work)
        self._env.transport.wake()

    def guard(self) -> None:
        """Raises LeaseExpired when the node's lease has passed."""
        if self._env.clock.monotonic() > self.deadline:
            raise LeaseExpired

    # -- the step ---------------------------------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do a bounded amount of work; seconds until there may be more, 0 when there is more now. Errors end the attempt: see :meth:`fail`."""
        self.guard()
        self.busy = True
        began = self._env.clock.monotonic()
        self._seconds[self._waiting_for] += began - self._step_ended
        try:
            return self._step()
        finally:
            self.busy = False
            self._step_ended = self._env.clock.monotonic()
            self._seconds["busy"] += self._step_ended - began

    def _step(self) -> float:
        while self._control:
            self._handle(self._control.popleft())
        while self._completions:
            self._completions.popleft()()
        now = self._env.clock.monotonic()
        retry = self.committer.tick(now)
        if self.over:
            return 0.0
        if not self._ready:
            return self._becoming_ready(retry)
        if not self._running:
            return LONG_WAIT
        if self._ended:
            return LONG_WAIT if retry is None else min(retry, LONG_WAIT)  # only the last commit is awaited
        self._waiting_for = "backpressured"
        if self.outputs.pump():
            if self._pending is not None and self._pending.kind is not EpochKind.DRAIN:
                self._inject(self._pending)  # back-pressure delays the barrier's journey, not the cut
            return self._wait(retry)
        self._waiting_for = "idle"
        worked = self._read_inputs() if self.inputs else self._read_source(now)
        self._timers(now)
        self._linger(now, worked)
        blocked = self.outputs.pump()
        if worked:
            self.progress += 1
            return self._wait(retry) if blocked else 0.0
        return self._wait(retry)

    def _becoming_ready(self, retry: float | None) -> float:
        if not self.committer.settled:
            return LONG_WAIT if retry is None else min(retry, LONG_WAIT)
        for operator, writer in self._committing.items():
            writer.clean([c for c in self.committer.pending() if c.operator == operator])
        self._ready = True
        if self.deployment.mode is DeployMode.FINALIZE:
            self._delete_old_channels()
            self._env.report(Committed(self.committer.committed))
            self._finish()
            return 0.0
        self._env.report(Ready(self.committer.committed))
        return LONG_WAIT

    def _wait(self, retry: float | None) -> float:
        wait = LONG_WAIT if self.source is None or self._sealed is not None or self.source.exhausted else IDLE_WAIT
        if self.outputs.unflushed:
            wait = min(wait, self.outputs.linger_ms() / 1000)
        due = self.chain.next_time()
        if due is not None:
            wait = min(wait, max(0.0, (due - self._env.clock.now_ms()) / 1000))
        return wait if retry is None else min(wait, retry)

    # -- control ----------------------------------------------------------------------------------------------------------------------

    def _handle(self, message: NodeMessage) -> None:
        match message:
            case Run():
                if not self._running and self._ready:
                    self.outputs.connect(self._env.transport)
                    self._running = True
                    self._delete_old_channels()
                    self._last_data = self._env.clock.monotonic()
                    if self.source is not None:
                        self.source_thread = threading.get_ident()
            case Trigger():
                self._triggered(message)
            case AssignSplits():
                if self.source is not None and not self.source.truncated:
                    self._take_splits(message.splits, message.complete)
            case Durable():
                self._on_durable(message.epoch)
            case Abort():
                self._on_abort(message.epoch)
            case Stop():
                self.over = True
            case Lease():
                pass

    def _delete_old_channels(self) -> None:
        """By exact name, those of older generations: nobody may publish there any more."""
        if self.deployment.old_channels:
            self._env.transport.delete(self.deployment.old_channels)
            self._env.report(ChannelsDeleted())

    def _triggered(self, trigger: Trigger) -> None:
        """Into the pending slot: a repeat or an older epoch is refused, a newer one replaces what waits."""
        if self.source is None or not self._running:
            if self.source is not None:
                self._env.report(Declined(trigger.epoch, "not running yet"))
            return
        newest = max(self.alignment.done, self._pending.epoch if self._pending else 0)
        if trigger.epoch > newest:
            self._pending = trigger

    def _on_durable(self, epoch: int) -> None:
        if epoch <= self._durable:
            return
        self._durable = epoch
        self.snapshotter.durable(epoch)
        if self.source is not None:
            self.source.durable(epoch)
        self._wanted_epoch = False
        self.committer.durable(epoch)
        if self._terminal and epoch >= self._terminal:
            self._end_outputs()

    def _on_abort(self, epoch: int) -> None:
        """Sealed committables are kept for the next durable epoch; who waits for the barrier is released."""
        if self._pending is not None and self._pending.epoch <= epoch:
            self._pending = None
        self.alignment.finish(epoch)
        if self._sealed is not None and self._sealed <= epoch:
            self._sealed = None
            self._terminal = 0
        for _, participant in self._participants():
            participant.finish_commit(epoch, False)

    def _participants(self) -> list[tuple[str, Any]]:
        """Source first, as the data flows."""
        return [] if self.source is None else self.source.participants()

    # -- the source -------------------------------------------------------------------------------------------------------------------

    def _read_source(self, now: float) -> bool:
        source = self.source
        assert source is not None
        if self._pending is not None:
            return self._inject(self._pending)
        if self._sealed is not None:
            return False
        self._rediscover(now)
        found = source.poll(self._settings.source_batch)
        if found is None:
            self._nothing_to_read(now)
            return False
        split, read = found
        if read.values or read.dead:
            self._last_data = now
            self._set_idle(False)
        if read.values:
            self.counters["records_in"] += len(read.values)
            if self.chain.assigner is not None:
                self.chain.assigner.select(split)
            self.chain.push(Batch(read.values, read.timestamps))
        if read.dead:
            self.outputs.emit_side(source.id, "dead-letter", Batch(dead_letters(read.dead)))
        if read.exhausted and self.chain.assigner is not None:
            self.chain.assigner.finish(split)
        self._assign_watermark()
        return True

    def _rediscover(self, now: float) -> None:
        if self._discover_at is not None and now >= self._discover_at and self.subtask.index == 0:
            self._discover(self._known)

    def _assign_watermark(self) -> None:
        now_ms = self._env.clock.now_ms()
        if self.chain.assigner is not None and not 0 <= now_ms - self._watermark_at < self._settings.watermark_interval_ms:
            self._watermark_at = now_ms
            self.chain.assign_watermark()

    def _nothing_to_read(self, now: float) -> None:
        source = self.source
        assert source is not None
        if source.exhausted:
            if not self._exhausted:
                self._exhausted = True
                self._set_idle(False)
                self.chain.advance(MAX_WATERMARK)
                self._env.report(Exhausted())
            return
        if self.chain.assigner is not None:
            self._watermark_at = 0
            self._assign_watermark()
        if source.wants_epoch and not self._wanted_epoch:
            self._wanted_epoch = True
            self._env.report(WantsEpoch())
        idle_ms = self.chain.assigner.idle_ms if self.chain.assigner is not None else None
        if not source.active() or (isinstance(idle_ms, int) and (now - self._last_data) * 1000 >= idle_ms):
            self._set_idle(True)

    def _set_idle(self, idle: bool) -> None:
        if idle != self._idle:
            self._idle = idle
            self.outputs.emit_status(idle)

    def _inject(self, trigger: Trigger) -> bool:
        """Between two records, on the source's own reading thread: cut, snapshot, send the barrier."""
        source = self.source
        assert source is not None
        if trigger.kind is EpochKind.DRAIN and not source.exhausted:
            if not source.truncated:
                source.truncate()
            if not source.exhausted:
                found = source.poll(self._settings.source_batch)
                if found is not None and found[1].values:
                    self.chain.push(Batch(found[1].values, found[1].timestamps))
                return found is not None
        if trigger.kind is EpochKind.DRAIN:
            self._nothing_to_read(self._env.clock.monotonic())
        if not source.truncated:  # what is found after DRAIN began is for whoever resumes
            self._take_splits(trigger.splits, trigger.splits_complete)
        self._pending = None
        self.alignment.finish(trigger.epoch)
        if trigger.kind.terminal:
            self._sealed = trigger.epoch
        self._checkpoint(trigger.epoch, trigger.kind)
        return True

    # -- inputs -----------------------------------------------------------------------------------------------------------------------

    def _read_inputs(self) -> bool:
        """One bounded turn over the channels that are not held. A held channel stops fetching."""
        worked = False
        n = len(self.inputs)
        for i in range(n):
            index = (self._in_turn + i) % n
            channel = self.inputs[index]
            taken = 0
            while not channel.held and taken < FRAMES_PER_STEP:
                envelope = channel.take()
                if envelope is None:
                    break
                taken += 1
                self._envelope(index, channel, envelope)
                channel.reader.processed(channel.number)
                worked = True
                if self.outputs.pump():
                    self._in_turn = (index + 1) % n
                    return True
        self._in_turn = (self._in_turn + 1) % n
        return worked

    def _envelope(self, index: int, channel: InputChannel, envelope: Envelope) -> None:
        payload: Any = envelope.payload
        match envelope.kind:
            case Kind.RECORDS:
                self.counters["records_in"] += len(payload.values)
                self.chain.push(Batch(payload.values, payload.timestamps))
            case Kind.BARRIER:
                self._barrier(index, channel, payload)
            case Kind.WATERMARK:
                channel.watermark = max(channel.watermark, payload)
                self._merge_watermarks()
            case Kind.STATUS:
                channel.idle = payload
                self._merge_watermarks()
            case Kind.END:
                channel.end()
            case _:
                raise CodecError(
                    f"channel {channel.channel.name()}: envelope {envelope.number} of kind {envelope.kind} has no place on a data channel"
                )

    def _merge_watermarks(self) -> None:
        self.chain.advance(low_watermark(self.inputs))
        if self.chain.assigner is not None:
            self.chain.assign_watermark()
        self._set_idle(idle(self.inputs))

    def _barrier(self, index: int, channel: InputChannel, barrier: Barrier) -> None:
        kind = EpochKind(barrier.mode)
        channel.final = kind.ends_input
        if self.alignment.barrier(index, barrier.epoch):
            self._checkpoint(barrier.epoch, kind)

    # -- epochs -----------------------------------------------------------------------------------------------------------------------

    def _checkpoint(self, epoch: int, kind: EpochKind) -> None:
        """The synchronous part: seal, cut, send the barrier on; storing goes on in the background."""
        self.guard()
        began = self._env.clock.monotonic()
        if kind.terminal:
            self._terminal = epoch
            self._ends_input = kind.ends_input  # by the barrier: an exhausted source may be suspended, too
        participants = {name: p.save_state(epoch) for name, p in self._participants()}
        sealed = []
        for _, participant in self._participants():
            sealed += participant.prepare_commit(epoch)
        for op in self.chain.sinks():
            sealed += self._seal(op, epoch)
        self.committer.add(sealed)
        snapshot = SubtaskSnapshot(
            subtask=self.subtask.id,
            operators=list(self._vertex.operators),
            segments=[],
            splits=self.source.cut(epoch) if self.source is not None else [],
            committables=self.committer.pending(),
            participants=participants,
            meta={o.id: meta for o in self.chain.operators if (meta := o.meta())},
            exhausted=self._exhausted,
            records=self.counters["records_in"],
        )
        capture = self.snapshotter.cut(epoch)
        self.outputs.barrier(epoch, kind.value)
        self.longest_cut = max(self.longest_cut, self._env.clock.monotonic() - began)
        self.counters["snapshots"] += 1
        self._store(capture, snapshot)

    def _seal(self, op: SinkOperator, epoch: int) -> list[Any]:
        op.writer.flush()
        return op.writer.prepare_commit(epoch) if isinstance(op.writer, CommittingWriter) else []

    def _store(self, capture: Capture, snapshot: SubtaskSnapshot) -> None:
        def work() -> list[Any]:
            self.guard()
            return self.snapshotter.store(capture)

        def done(handles: list[Any] | None, error: BaseException | None) -> None:
            self.complete(lambda: self._stored(capture, snapshot, handles, error))

        self._storing += 1
        self._env.background.submit("snapshot", work, done)

    def _stored(self, capture: Capture, snapshot: SubtaskSnapshot, handles: list[Any] | None, error: BaseException | None) -> None:
        self._storing -= 1
        self.progress += 1
        if isinstance(error, StorageError):
            self.counters["declined"] += 1
            self._env.report(Declined(capture.epoch, str(error)))
            return
        if error is not None:
            raise error
        assert handles is not None
        self.guard()
        self.snapshotter.stored(capture, handles)
        fields: dict[str, Json] = {f: getattr(snapshot, f) for f in snapshot.__struct_fields__}
        self._env.report(Ack(capture.epoch, SubtaskSnapshot(**{**fields, "segments": handles})))  # type: ignore[arg-type]

    def _commit_outcome(self, epoch: int, answer: CommitAnswer) -> None:
        if answer.result in (CommitResult.COMMITTED, CommitResult.ALREADY_COMMITTED):
            for _, participant in reversed(self._participants()):
                participant.finish_commit(epoch, True)
            if self._ready:
                if self._committing:
                    self._env.report(Committed(epoch))
                if self._terminal and epoch >= self._terminal and self._ended:
                    self._finish()
            return
        self._env.report(CommitPending(epoch, answer.result.value, answer.detail))
        if answer.result is CommitResult.FAILED:
            raise OperatorError(f"commit of epoch {epoch} failed for good: {answer.detail}")
        self.committer.retry_later(self._env.clock.monotonic())

    # -- endings ----------------------------------------------------------------------------------------------------------------------

    def _end_outputs(self) -> None:
        """The terminal epoch is durable: END right behind its barrier; who reads it may be gone already."""
        if self._ended:
            return
        self._ended = True
        try:
            if self._ends_input:
                self.outputs.end()
                self.outputs.pump()
        except ChannelError:
            pass  # the consumer has finished: its commit did not wait for END
        if self.committer.settled:
            self._finish()

    def _finish(self) -> None:
        """The last epoch is committed: the channels that end here are not needed any more."""
        try:
            self._env.transport.delete([c.channel for c in self.inputs])
        except ChannelError:
            pass  # they expire
        self._env.report(Finished())
        self.over = True

    # -- time and odds ------------------------------------------------------------------------------------------------------------------

    def _timers(self, now: float) -> None:
        if self._sealed is None and (due := self.chain.next_time()) is not None and due <= self._env.clock.now_ms():
            self.chain.on_time(self._env.clock.now_ms())

    def _linger(self, now: float, worked: bool) -> None:
        """Flush when there is nothing to wait for, or a record has waited long enough. Sinks that write at once are flushed, too."""
        if not worked:
            if self.outputs.unflushed:
                self.outputs.flush()
                self._unflushed_since = None
            self._flush_sinks()
            return
        if self._unflushed_since is None:
            self._unflushed_since = now
        elif (now - self._unflushed_since) * 1000 >= max(self.outputs.linger_ms(), 5):
            self.outputs.flush()
            self._flush_sinks()
            self._unflushed_since = None

    def _flush_sinks(self) -> None:
        for op in self.chain.sinks():
            if op.records and not isinstance(op.writer, CommittingWriter):
                op.records = 0
                op.writer.flush()

    def stats(self) -> Stats:
        """Counters and gauges; may be called from another thread."""
        watermark = self.chain.watermark if self._ready and self.deployment.mode is DeployMode.RUN else None
        values: dict[str, Any] = {
            **self.counters,
            "records_out": self.outputs.records if self._ready else 0,
            "watermark": watermark if watermark is not None and abs(watermark) < MAX_WATERMARK else None,
            "late": sum(o.late for o in self.chain.operators) if self._ready else 0,
            "fenced": sum(c.fenced for c in self.inputs),
            "dropped": sum(c.repeats for c in self.inputs),
            "bytes_in": sum(c.bytes_in for c in self.inputs),
            "bytes_out": sum(c.bytes_out for c in self.outputs.channels) if self._ready else 0,
            "skipped": self.source.skipped if self.source else 0,
            "dead_lettered": self.source.dead if self.source else 0,
            "longest_cut_ms": round(self.longest_cut * 1000, 3),
            "watermark_lag_ms": self._env.clock.now_ms() - watermark if watermark is not None and abs(watermark) < MAX_WATERMARK else None,
            "state_bytes": self.snapshotter.size if self._ready and self.deployment.mode is DeployMode.RUN else 0,
            **{f"{name}_ms": round(seconds * 1000) for name, seconds in self._seconds.items()},
            "channels": [c.status() for c in self.outputs.channels] if self._running else [],
        }
        return Stats(self.progress, self.busy or self._storing > 0, values)  # a slow upload is no stall: the epoch timeout bounds it

    def fail(self, error: BaseException) -> None:
        """Report why this attempt ends. Called by the shell with what :meth:`start` or :meth:`step` raised."""
        self.over = True
        if isinstance(error, LeaseExpired):
            return
        self._env.report(Failed(cause_of(error), f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Release readers, writers and channels; errors while closing change nothing."""
        for close in (self._close_source, self._close_chain, self._env.transport.close):
            try:
                close()
            except (MillstreamError, OSError):
                pass  # the attempt is over; what it held dies with its connections

    def _close_source(self) -> None:
        if self.source is not None:
            self.source.close()

    def _close_chain(self) -> None:
        if hasattr(self, "chain"):
            self.chain.close()


def cause_of(error: BaseException) -> str:
    """One word for metrics and budgets."""
    for kind, cause in (
        (Fenced, "fenced"),
        (JobInvalid, "invalid"),
        (ConfigurationError, "invalid"),
        (RestoreRefused, "restore"),
        (SnapshotMissing, "unreadable"),
        (SnapshotUnreadable, "unreadable"),
        (RecordError, "record"),
        (SourceError, "source"),
        (ChannelError, "channel"),
        (CodecError, "codec"),
        (StorageError, "storage"),
        (StoreError, "target"),
        (OperatorError, "operator"),
    ):
        if isinstance(error, kind):
            return cause
    return "error"


__all__ = ["AssignTimestamps", "Operator", "SubtaskRunner", "cause_of"]
