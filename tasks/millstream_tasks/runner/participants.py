"""Sinks' writers that take part in epochs with state of their own, beside what they commit.

Called by the runner and its checkpointer, on the subtask's thread. What must never happen here: a participant that hears of an epoch's end before it was given
back what it had saved, or one that does not hear because another failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from millstream_schema.connectors import CheckpointParticipant, Committable, CommittingWriter, Json, SinkWriter
from millstream_schema.errors import SinkError
from millstream_schema.model import StreamModel
from millstream_schema.plan import COMMITTING

from ..calls import make_all


class SinkParticipants:
    """Those among the ``writers`` of subtask ``index``, in the order of its chain; what they save is kept as ``{operator}/{index}``."""

    def __init__(self, writers: Mapping[str, SinkWriter], index: int, parallelism: int) -> None:
        self._index = index
        self._parallelism = parallelism
        self._participants: dict[str, CheckpointParticipant] = {}
        for operator, writer in writers.items():
            held: object = writer
            if isinstance(held, CheckpointParticipant):
                self._participants[operator] = held

    def restore(self, epoch: int, saved: Mapping[str, Json]) -> None:
        """Give back what was saved for ``epoch``: that of original subtask j goes to j mod the new parallelism, as its committables do."""
        for operator, participant in self._participants.items():
            mine = {int(at): state for name, state in saved.items() for own, _, at in [name.partition("/")] if own == operator}
            for subtask in sorted(mine):
                if subtask % self._parallelism == self._index:
                    participant.restore_from_epoch(epoch, mine[subtask])

    def save_state(self, epoch: int) -> dict[str, Json]:
        return {f"{operator}/{self._index}": participant.save_state(epoch) for operator, participant in self._participants.items()}

    def finish_commit(self, epoch: int, success: bool) -> None:
        """All hear of it, the last of the chain first."""
        make_all(partial(participant.finish_commit, epoch, success) for participant in reversed(self._participants.values()))


def sealed(operator: str, writer: SinkWriter, epoch: int) -> list[Committable]:
    """What ``writer`` prepares for ``epoch``. Raises SinkError for committables that nothing could commit."""
    if isinstance(writer, CommittingWriter):
        return writer.prepare_commit(epoch)
    held: object = writer
    if isinstance(held, CheckpointParticipant) and held.prepare_commit(epoch):
        raise SinkError(f"sink {operator!r}: prepare_commit gave committables and its writer cannot commit them: give it commit and clean")
    return []


def writer_problems(model: StreamModel, writers: Mapping[str, SinkWriter]) -> list[str]:
    """Sinks that claim to commit, whose writers cannot: the job would wait for their commits for ever."""
    return [
        f"sink {operator!r} is {capability} and its writer has not all of prepare_commit, commit and clean (millstream.CommittingWriter)"
        for operator, writer in writers.items()
        if (capability := model.operator(operator).capability) in COMMITTING and not isinstance(writer, CommittingWriter)
    ]
