"""The source of a subtask: its splits, their readers, and the cut of their offsets.

Called by the runner on the source's own reading thread only. What must never happen here: a cut between an offset and the emission of its record, a split
read that is not owned, a finished split forgotten before a durable manifest holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from millstream_schema.connectors import (
    CheckpointParticipant,
    Committable,
    ConnectorContext,
    Json,
    Read,
    Source,
    Split,
    SplitReader,
    Truncatable,
)
from millstream_schema.manifest import SplitState
from millstream_schema.model import OperatorSpec

from ..calls import make_all


class _Owned:
    """One split of this reader."""

    __slots__ = ("body", "cursor", "finished", "finished_in", "reader", "split_id")

    def __init__(self, state: SplitState, reader: SplitReader | None) -> None:
        self.split_id = state.split_id
        self.body = state.body
        self.cursor: Json = state.cursor
        self.reader = reader
        self.finished = state.finished
        self.finished_in: int | None = None


class SourceDriver:
    """Reads the splits one subtask owns, in turn."""

    def __init__(self, spec: OperatorSpec, source: Source, context: ConnectorContext, restored: dict[str, Json], epoch: int) -> None:
        self.id = spec.id
        self._source = source
        self._context = context
        self._restored = restored
        self._restore_epoch = epoch
        self._owned: dict[str, _Owned] = {}
        self._turn: list[_Owned] = []
        self._next = 0
        self.complete = False
        self.truncated = False
        self.skipped = 0
        self.dead = 0
        self.records = 0

    def assign(self, splits: Iterable[SplitState], complete: bool) -> list[str]:
        """Open those that are not owned yet; ids of the new ones that can be read."""
        new = []
        for state in splits:
            if state.operator != self.id or state.split_id in self._owned:
                continue
            reader = None
            if not state.finished:
                reader = self._source.open(Split(state.split_id, state.body), state.cursor, self._context)
                if isinstance(reader, CheckpointParticipant):
                    saved = self._restored.get(f"{self.id}/{state.split_id}")
                    if saved is not None:
                        reader.restore_from_epoch(self._restore_epoch, saved)
            owned = self._owned[state.split_id] = _Owned(state, reader)
            if reader is not None:
                self._turn.append(owned)
                new.append(state.split_id)
        self.complete = self.complete or complete
        return new

    def poll(self, limit: int) -> tuple[str, Read] | None:
        """What the next split that has something brings; None when none has."""
        for _ in range(len(self._turn)):
            if self._next >= len(self._turn):
                self._next = 0
            owned = self._turn[self._next]
            assert owned.reader is not None
            read = owned.reader.poll(limit)
            self._next += 1
            self.skipped += read.skipped
            self.dead += len(read.dead)
            self.records += len(read.values)
            if read.exhausted:
                owned.finished = True
                owned.cursor = owned.reader.cursor()
                self._retire(owned)
            if read.values or read.exhausted or read.dead:
                return owned.split_id, read
        return None

    def _retire(self, owned: _Owned) -> None:
        at = self._turn.index(owned)
        self._turn.pop(at)
        if at < self._next:
            self._next -= 1
        if owned.reader is not None and not isinstance(owned.reader, CheckpointParticipant):
            owned.reader.close()
            owned.reader = None

    def active(self) -> list[str]:
        """Ids of the splits that are still read."""
        return [o.split_id for o in self._turn]

    @property
    def exhausted(self) -> bool:
        """Nothing more will come, ever."""
        return (self.complete or self.truncated) and not self._turn

    @property
    def wants_epoch(self) -> bool:
        """A reader can give nothing more until an epoch is durable."""
        return any(getattr(o.reader, "wants_epoch", False) for o in self._turn)

    def truncate(self) -> None:
        """DRAIN: readers that can end at what they have taken are told to; the others are read no longer."""
        if self.truncated:
            return
        self.truncated = True
        for owned in list(self._turn):
            if isinstance(owned.reader, Truncatable):
                owned.reader.truncate_for_drain()
            else:
                assert owned.reader is not None
                owned.cursor = owned.reader.cursor()
                self._turn.remove(owned)
        self._next = 0

    def cut(self, epoch: int) -> list[SplitState]:
        """Offsets (exclusive) of every owned split, finished ones included."""
        states = []
        for o in self._owned.values():
            if o.finished and o.finished_in is None:
                o.finished_in = epoch
            cursor = o.reader.cursor() if o.reader is not None and not o.finished else o.cursor
            states.append(SplitState(self.id, o.split_id, o.body, cursor, o.finished))
        return states

    def durable(self, epoch: int) -> None:
        """Forget finished splits that a durable manifest holds now."""
        for o in list(self._owned.values()):
            if o.finished and o.finished_in is not None and o.finished_in <= epoch and not isinstance(o.reader, CheckpointParticipant):
                del self._owned[o.split_id]

    def participants(self) -> list[tuple[str, CheckpointParticipant]]:
        found: list[tuple[str, CheckpointParticipant]] = []
        for o in self._owned.values():
            reader: object = o.reader
            if isinstance(reader, CheckpointParticipant):
                found.append((f"{self.id}/{o.split_id}", reader))
        return found

    def save_state(self, epoch: int) -> dict[str, Json]:
        """What the readers that take part in epochs put into this one's snapshot."""
        return {name: participant.save_state(epoch) for name, participant in self.participants()}

    def prepare_commit(self, epoch: int) -> list[Committable]:
        return [c for _, participant in self.participants() for c in participant.prepare_commit(epoch)]

    def finish_commit(self, epoch: int, success: bool) -> None:
        """``epoch`` is committed, or aborted: then what its participants prepared goes into the next. All hear of it, also when one fails."""
        make_all(partial(participant.finish_commit, epoch, success) for _, participant in reversed(self.participants()))

    def close(self) -> None:
        make_all(o.reader.close for o in self._owned.values() if o.reader is not None)


def dead_letters(dead: Iterable[tuple[str, bytes, str]]) -> list[dict[str, Any]]:
    """Dead records as values of the source's ``dead-letter`` side output."""
    return [{"position": position, "raw": raw, "reason": reason} for position, raw, reason in dead]
