"""One epoch at one subtask: seal, cut, send the barrier on, store, acknowledge.

Called by the runner, on its thread, when a barrier is due here. The synchronous part is short: storing goes on in the background. What must never happen
here: an acknowledgement before everything the epoch needs is stored; a record between the cut of the source and that of the state.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millstream_schema.connectors import Handle
from millstream_schema.control import Ack, Declined, EpochKind
from millstream_schema.errors import StorageError
from millstream_schema.manifest import SubtaskSnapshot

from ..chain import Chain
from .committing import Committer
from .environment import Environment
from .feeding import SourceFeed
from .outputs import Outputs
from .participants import SinkParticipants, sealed
from .snapshotting import Capture, Snapshotter


class Checkpointer:
    """Takes the snapshots of one subtask. ``complete`` runs work on the subtask's thread, ``guard`` raises LeaseExpired."""

    def __init__(
        self,
        subtask: str,
        operators: list[str],
        chain: Chain,
        outputs: Outputs,
        snapshotter: Snapshotter,
        committer: Committer,
        taking: SinkParticipants,
        feed: SourceFeed | None,
        environment: Environment,
        counters: dict[str, int],
        guard: Callable[[], None],
        complete: Callable[[Callable[[], None]], None],
    ) -> None:
        self._subtask = subtask
        self._operators = operators
        self._chain = chain
        self._outputs = outputs
        self._snapshotter = snapshotter
        self._committer = committer
        self._taking = taking
        self._feed = feed
        self._env = environment
        self._counters = counters
        self._guard = guard
        self._complete = complete
        self.storing = 0
        """Snapshots on their way to the storage."""
        self.ended = 0
        """Snapshots stored or declined."""

    def cut(self, epoch: int, kind: EpochKind) -> None:
        """The synchronous part: seal, cut, send the barrier on."""
        sinks = self._chain.sinks()
        for op in sinks:
            op.writer.flush()
        participants = {} if self._feed is None else self._feed.driver.save_state(epoch)  # source first, as the data flows
        participants |= self._taking.save_state(epoch)
        prepared = [] if self._feed is None else self._feed.driver.prepare_commit(epoch)
        for op in sinks:
            prepared += sealed(op.id, op.writer, epoch)
        self._committer.add(prepared)
        snapshot = SubtaskSnapshot(
            subtask=self._subtask,
            operators=self._operators,
            segments=[],
            splits=[] if self._feed is None else self._feed.driver.cut(epoch),
            committables=self._committer.pending(),
            participants=participants,
            meta={o.id: meta for o in self._chain.operators if (meta := o.meta())},
            exhausted=self._feed is not None and self._feed.exhausted,
            records=self._counters["records_in"],
        )
        capture = self._snapshotter.cut(epoch)
        self._outputs.barrier(epoch, kind.value)
        self._counters["snapshots"] += 1
        self._store(capture, snapshot)

    def _store(self, capture: Capture, snapshot: SubtaskSnapshot) -> None:
        def work() -> list[Handle]:
            self._guard()
            return self._snapshotter.store(capture)

        def done(handles: list[Handle] | None, error: BaseException | None) -> None:
            self._complete(lambda: self._stored(capture, snapshot, handles, error))

        self.storing += 1
        self._env.background.submit("snapshot", work, done)

    def _stored(self, capture: Capture, snapshot: SubtaskSnapshot, handles: list[Handle] | None, error: BaseException | None) -> None:
        self.storing -= 1
        self.ended += 1
        if isinstance(error, StorageError):
            self._counters["declined"] += 1
            self._env.report(Declined(capture.epoch, str(error)))
            return
        if error is not None:
            raise error
        assert handles is not None
        self._guard()
        self._snapshotter.stored(capture, handles)
        self._env.report(Ack(capture.epoch, msgspec.structs.replace(snapshot, segments=handles)))
