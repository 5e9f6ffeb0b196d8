"""``SubtaskRunner``: one subtask as a step machine.

A shell calls :meth:`SubtaskRunner.start` once and :meth:`SubtaskRunner.step` until :attr:`SubtaskRunner.over`; control messages and completions of background work
are handed in from any thread. One step takes what arrived, does a bounded amount of work and says how long it can wait. What must never happen here: blocking; a
barrier from any thread but the one that reads the source; a publish, stage, snapshot or commit after the lease's deadline.

What one attempt has come to (ready, running, sealed, ended) stays in one place, however long; work is done by the parts: feed, receiver, checkpointer, committer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from millstream_schema.connectors import CommitAnswer, CommitResult, CommittingWriter
from millstream_schema.control import (
    Abort,
    AssignSplits,
    ChannelsDeleted,
    CommitPending,
    Committed,
    Declined,
    Deployment,
    DeployMode,
    Durable,
    EpochKind,
    Failed,
    Finished,
    Lease,
    NodeMessage,
    Ready,
    Run,
    Stats,
    Stop,
    Trigger,
)
from millstream_schema.envelope import Barrier
from millstream_schema.errors import ChannelError, JobInvalid, OperatorError
from millstream_schema.model import StreamModel
from millstream_schema.pipeline import Pipeline
from millstream_schema.plan import PartitionedPlan

from ..calls import make_all
from ..chain import Chain
from ..operators.base import MAX_WATERMARK
from .assembly import Assembly
from .causes import cause_of
from .checkpointing import Checkpointer
from .committing import Committer
from .environment import Environment, LeaseExpired
from .feeding import SourceFeed
from .flushing import Flusher
from .inputs import Alignment, InputChannel
from .outputs import Outputs
from .pace import Pace
from .participants import SinkParticipants
from .receiving import Receiver
from .snapshotting import Snapshotter

log = structlog.get_logger(__name__)
IDLE_WAIT = 0.002
LONG_WAIT = 0.05


class SubtaskRunner:
    """One attempt of one subtask."""

    def __init__(
        self, deployment: Deployment, pipeline: Pipeline, model: StreamModel, plan: PartitionedPlan, environment: Environment
    ) -> None:
        self.deployment = deployment
        self._assembly = Assembly(deployment, pipeline, model, plan, environment, self.guard)
        self.subtask = self._assembly.subtask
        self.over = False
        self.deadline = float("inf")
        self.busy = False
        self.progress = 0
        self.source_thread: int | None = None
        self._env = environment
        self._control: deque[NodeMessage] = deque()
        self._completions: deque[Callable[[], None]] = deque()
        self._running = False
        self._ready = False
        self._sealed: int | None = None
        self._terminal = 0
        self._ends_input = False
        self._ended = False
        self._pending: Trigger | None = None
        self._durable = 0
        self.counters: dict[str, int] = {"records_in": 0, "snapshots": 0, "declined": 0}
        self.longest_cut = 0.0
        self._pace = Pace(environment.clock)
        self.inputs: list[InputChannel] = []
        self.feed: SourceFeed | None = None
        self.checkpointer: Checkpointer | None = None
        self.chain: Chain
        self.outputs: Outputs
        self.receiver: Receiver
        self.flusher: Flusher
        self.alignment: Alignment
        self.snapshotter: Snapshotter
        self.committer: Committer
        self.taking: SinkParticipants

    # -- starting -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Restore, create the channels that end here, raise the sinks' fences, begin the restored commits. READY is reported by :meth:`step`."""
        d, parts = self.deployment, self._assembly
        self.guard()
        problems = parts.problems()
        if problems and d.mode is DeployMode.RUN:
            raise JobInvalid(problems)
        writers = parts.writers()
        self.outputs = parts.outputs()
        self.chain = parts.chain(writers, self.outputs)
        if problems := parts.writer_problems(writers):
            raise JobInvalid(problems)
        self._committing = {name: w for name, w in writers.items() if isinstance(w, CommittingWriter)}
        self.committer = Committer(self._committing, self._env.background, self.complete, self._commit_outcome)
        self.committer.add(parts.committables(self._committing))
        self.taking = parts.taking(writers)
        self.committer.durable(d.restore_epoch)
        if d.mode is DeployMode.FINALIZE:
            return
        self.chain = parts.restored(self.chain)
        self.snapshotter = parts.snapshotter(self.chain)
        self.feed = parts.feed(self.chain, self.outputs, self.counters)
        if self.feed is not None:
            self.feed.start(d.splits)
        self.inputs = parts.inputs()
        self.alignment = parts.alignment(self.inputs)
        self.receiver = Receiver(self.inputs, self.chain, self.outputs, self.counters, self._barrier)
        self.flusher = Flusher(self.outputs, self.chain.sinks())
        self.checkpointer = Checkpointer(
            self.subtask.id,
            list(parts.vertex.operators),
            self.chain,
            self.outputs,
            self.snapshotter,
            self.committer,
            self.taking,
            self.feed,
            self._env,
            self.counters,
            self.guard,
            self.complete,
        )

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
        self._pace.step_begins()
        try:
            return self._step()
        finally:
            self.busy = False
            self._pace.step_ends()

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
        self._pace.waiting = "backpressured"
        if self.outputs.pump():
            if self._pending is not None and self._pending.kind is not EpochKind.DRAIN:
                self._inject(self._pending)  # back-pressure delays the barrier's journey, not the cut
            return self._wait(retry)
        self._pace.waiting = "idle"
        worked = self.receiver.turn() if self.inputs else self._read_source(now)
        self._timers()
        self.flusher.turn(now, worked)
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
        wait = LONG_WAIT if self.feed is None or self._sealed is not None or self.feed.driver.exhausted else IDLE_WAIT
        if self.outputs.unflushed:
            wait = min(wait, self.outputs.linger_ms() / 1000)
        due = self.chain.next_time()
        if due is not None:
            wait = min(wait, max(0.0, (due - self._env.clock.now_ms()) / 1000))
        return wait if retry is None else min(wait, retry)

    def _timers(self) -> None:
        if self._sealed is None and (due := self.chain.next_time()) is not None and due <= self._env.clock.now_ms():
            self.chain.on_time(self._env.clock.now_ms())

    # -- control ----------------------------------------------------------------------------------------------------------------------

    def _handle(self, message: NodeMessage) -> None:
        match message:
            case Run():
                if not self._running and self._ready:
                    self.outputs.connect(self._env.transport)
                    self._running = True
                    self._delete_old_channels()
                    if self.feed is not None:
                        self.feed.run()
                        self.source_thread = threading.get_ident()
            case Trigger():
                self._triggered(message)
            case AssignSplits():
                if self.feed is not None:
                    self.feed.take_splits(message.splits, message.complete)
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
        if self.feed is None or not self._running:
            if self.feed is not None:
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
        if self.feed is not None:
            self.feed.durable(epoch)
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
        self._finish_commit(epoch, False)

    # -- barriers ---------------------------------------------------------------------------------------------------------------------

    def _read_source(self, now: float) -> bool:
        assert self.feed is not None
        if self._pending is not None:
            return self._inject(self._pending)
        return self._sealed is None and self.feed.turn(now)

    def _inject(self, trigger: Trigger) -> bool:
        """Between two records, on the source's own reading thread: cut, snapshot, send the barrier."""
        assert self.feed is not None
        if trigger.kind is EpochKind.DRAIN and (worked := self.feed.drain()) is not None:
            return worked
        self.feed.take_splits(trigger.splits, trigger.splits_complete)
        self._pending = None
        self.alignment.finish(trigger.epoch)
        if trigger.kind.terminal:
            self._sealed = trigger.epoch
        self._checkpoint(trigger.epoch, trigger.kind)
        return True

    def _barrier(self, index: int, channel: InputChannel, barrier: Barrier) -> None:
        kind = EpochKind(barrier.mode)
        channel.final = kind.ends_input
        if self.alignment.barrier(index, barrier.epoch):
            self._checkpoint(barrier.epoch, kind)

    def _checkpoint(self, epoch: int, kind: EpochKind) -> None:
        assert self.checkpointer is not None
        self.guard()
        began = self._env.clock.monotonic()
        if kind.terminal:
            self._terminal = epoch
            self._ends_input = kind.ends_input  # by the barrier: an exhausted source may be suspended, too
        self.checkpointer.cut(epoch, kind)
        self.longest_cut = max(self.longest_cut, self._env.clock.monotonic() - began)

    @property
    def _storing(self) -> int:
        return 0 if self.checkpointer is None else self.checkpointer.storing

    def _finish_commit(self, epoch: int, success: bool) -> None:
        """Sinks first, then the source: it may give up its records once their effects are there. All hear of it, also when one fails."""
        driver = None if self.feed is None else self.feed.driver
        make_all(partial(p.finish_commit, epoch, success) for p in (self.taking, driver) if p is not None)

    def _commit_outcome(self, epoch: int, answer: CommitAnswer) -> None:
        if answer.result in (CommitResult.COMMITTED, CommitResult.ALREADY_COMMITTED):
            self._finish_commit(epoch, True)
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

    # -- seen from outside --------------------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counters and gauges; may be called from another thread."""
        runs = self._ready and self.deployment.mode is DeployMode.RUN
        mark = self.chain.watermark if runs else MAX_WATERMARK
        watermark = mark if abs(mark) < MAX_WATERMARK else None
        values: dict[str, Any] = {
            **self.counters,
            "records_out": self.outputs.records if self._ready else 0,
            "watermark": watermark,
            "late": sum(o.late for o in self.chain.operators) if self._ready else 0,
            "fenced": sum(c.fenced for c in self.inputs),
            "dropped": sum(c.repeats for c in self.inputs) + (self.alignment.dropped if runs else 0),
            "bytes_in": sum(c.bytes_in for c in self.inputs),
            "bytes_out": sum(c.bytes_out for c in self.outputs.channels) if self._ready else 0,
            "skipped": self.feed.driver.skipped if self.feed else 0,
            "dead_lettered": self.feed.driver.dead if self.feed else 0,
            "longest_cut_ms": round(self.longest_cut * 1000, 3),
            "watermark_lag_ms": None if watermark is None else self._env.clock.now_ms() - watermark,
            "source_lag_ms": self.feed.lag_ms if self.feed else None,
            "alignments": self.alignment.times() if runs else [],
            "state_bytes": self.snapshotter.size if runs else 0,
            **self._pace.milliseconds(),
            "channels": [c.status() for c in self.outputs.channels] if self._running else [],
        }
        progress = self.progress + (0 if self.checkpointer is None else self.checkpointer.ended)
        return Stats(progress, self.busy or self._storing > 0, values)  # a slow upload is no stall: the epoch timeout bounds it

    def fail(self, error: BaseException) -> None:
        """Report why this attempt ends. Called by the shell with what :meth:`start` or :meth:`step` raised."""
        self.over = True
        if isinstance(error, LeaseExpired):
            return
        self._env.report(Failed(cause_of(error), f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Release readers, writers and channels; errors while closing change nothing, and are logged."""
        for close in (self._close_source, self._close_chain, self._env.transport.close):
            try:
                close()
            except Exception:  # user code's, too: the attempt is over; what it held dies with its connections
                log.warning("closing failed", subtask=self.subtask.id, exc_info=True)

    def _close_source(self) -> None:
        if self.feed is not None:
            self.feed.driver.close()

    def _close_chain(self) -> None:
        if hasattr(self, "chain"):
            self.chain.close()


__all__ = ["SubtaskRunner"]
