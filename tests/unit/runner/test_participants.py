"""Sinks' writers that take part in epochs: what they are asked, in which order, and what they are given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.runner.rig import Rig
from tests.unit.tasks.parts import context

from millstream import JobBuilder
from millstream_schema.connectors import CommitAnswer, Committable, ConnectorContext, Json, SinkCapability
from millstream_schema.control import Abort, Committed, Durable
from millstream_schema.errors import JobInvalid, SinkError
from millstream_schema.manifest import SplitState, SubtaskSnapshot
from millstream_tasks.runner.participants import SinkParticipants
from millstream_tasks.sinks.memory import CollectSink, CollectTarget, CollectWriter
from millstream_tasks.sources.memory import CollectionSource

SPLITS = [SplitState("in", "0", {"from": 0, "to": 3}, None, False)]


class Numbering:
    """A writer that numbers what it writes, and keeps the number in the epoch's snapshot; ``calls`` is what it was asked."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.number = 0
        self.gives: list[Committable] = []

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self.number += len(values)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        """Nothing is held."""

    def save_state(self, epoch: int) -> Json:
        self.calls.append(("save", epoch))
        return self.number

    def prepare_commit(self, epoch: int) -> list[Committable]:
        self.calls.append(("prepare", epoch))
        return self.gives

    def finish_commit(self, epoch: int, success: bool) -> None:
        self.calls.append(("finish" if success else "keep", epoch))

    def restore_from_epoch(self, epoch: int, state: Json) -> None:
        assert isinstance(state, int)
        self.number += state
        self.calls.append(("restore", epoch))


class NumberingSink:
    """Opens one prepared writer."""

    kind, version = "numbering", 1

    def __init__(self, writer: Any, capability: SinkCapability = SinkCapability.IDEMPOTENT) -> None:
        self.writer, self.capability = writer, capability

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def open(self, context: ConnectorContext) -> Any:
        return self.writer


class Sealing(CollectWriter):
    """A two-phase writer that takes part in epochs as well."""

    def __init__(self, target: CollectTarget, calls: list[Any]) -> None:
        super().__init__(CollectSink("out", target), context(job="j", operator="out"))
        self.calls = calls

    def save_state(self, epoch: int) -> Json:
        self.calls.append(("save", epoch))
        return {"epoch": epoch}

    def prepare_commit(self, epoch: int) -> list[Committable]:
        self.calls.append(("prepare", epoch))
        return super().prepare_commit(epoch)

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        self.calls.append(("commit", committables[-1].epoch))
        return super().commit(committables)

    def finish_commit(self, epoch: int, success: bool) -> None:
        self.calls.append(("finish" if success else "keep", epoch))

    def restore_from_epoch(self, epoch: int, state: Json) -> None:
        self.calls.append(("restore", epoch))


def into(sink: Any, restored: SubtaskSnapshot | None = None, epoch: int = 0) -> Rig:
    def define(job: JobBuilder) -> None:
        job.source(CollectionSource([1, 2, 3], splits=1), uid="in").sink_to(sink, uid="out")

    return Rig(
        define, "in:0", splits=SPLITS if restored is None else [], guarantee="EFFECTIVELY_ONCE", restored=restored, epoch=epoch
    )  # fmt: skip


def epochs_of(calls: list[Any]) -> list[Any]:
    return [c for c in calls if c != "flush"]


def test_a_writer_that_takes_part_is_flushed_saves_and_prepares_at_a_barrier_and_hears_how_the_epoch_ended() -> None:
    """An abort keeps what was prepared; durable is heard once; its state is in the snapshot."""
    calls: list[Any] = []
    rig = into(NumberingSink(Numbering(calls))).running()
    rig.trigger(1)
    assert calls[-3:] == ["flush", ("save", 1), ("prepare", 1)]
    rig.background()
    rig.tell(Abort(1))
    rig.trigger(2)
    rig.background()
    rig.tell(Durable(2), Durable(2))
    assert epochs_of(calls) == [("save", 1), ("prepare", 1), ("keep", 1), ("save", 2), ("prepare", 2), ("finish", 2)]
    assert rig.snapshot(1).participants.keys() == {"out/0"}


def test_a_writer_gets_back_what_it_saved_before_it_hears_of_that_epoch_and_before_any_record() -> None:
    """Restored, then told that the restored epoch is durable: it may have been killed before it heard."""
    calls: list[Any] = []
    first = into(NumberingSink(Numbering(calls))).running()
    first.after(0.1)
    first.trigger(1)
    first.background()
    saved = first.snapshot(1)
    again: list[Any] = []
    writer = Numbering(again)
    into(NumberingSink(writer), saved, 1).running()
    assert epochs_of(again)[:2] == [("restore", 1), ("finish", 1)]
    assert writer.number == saved.participants["out/0"]


def test_a_two_phase_writer_that_takes_part_hears_of_its_epoch_after_the_commit() -> None:
    """Prepared once, committed once, then told."""
    calls: list[Any] = []
    target = CollectTarget()
    rig = into(NumberingSink(Sealing(target, calls), SinkCapability.TWO_PHASE_COMMIT)).running()
    rig.after(0.1)
    rig.trigger(1)
    rig.background()
    rig.tell(Durable(1))
    assert ("finish", 1) not in calls
    rig.background()
    assert calls == [("save", 1), ("prepare", 1), ("commit", 1), ("finish", 1)]
    assert [c.epoch for c in rig.said(Committed)] == [1] and target.values("out") != []


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_after_a_rescale_each_saved_state_goes_to_one_subtask(parallelism: int) -> None:
    """That of original subtask j to j mod the new parallelism, as its committables do; another operator's to nobody."""
    saved: dict[str, Json] = {"out/0": 1, "out/1": 10, "out/2": 100, "in/2": 1000, "outer/0": 10_000}
    numbers = []
    for index in range(parallelism):
        writer = Numbering([])
        SinkParticipants({"out": writer}, index, parallelism).restore(4, saved)
        numbers.append(writer.number)
    assert numbers == {1: [111], 2: [101, 10], 3: [1, 10, 100]}[parallelism]


def test_all_participants_hear_the_last_first_also_when_one_fails() -> None:
    """The first error is raised, once everybody knows."""
    calls: list[Any] = []

    class Breaking(Numbering):
        def finish_commit(self, epoch: int, success: bool) -> None:
            calls.append(("breaks", epoch))
            raise SinkError("the outbox is gone")

    taking = SinkParticipants({"a": Numbering(calls), "b": Breaking(calls)}, 0, 1)
    with pytest.raises(SinkError, match="outbox"):
        taking.finish_commit(3, True)
    assert calls == [("breaks", 3), ("finish", 3)]


def test_committables_that_nothing_can_commit_are_refused() -> None:
    """They would be kept in every snapshot and never become visible."""
    writer = Numbering([])
    writer.gives = [Committable("j:out:0:1", "out", 0, 1, 1, "")]
    rig = into(NumberingSink(writer)).running()
    with pytest.raises(SinkError, match=r"'out'.*cannot commit"):
        rig.trigger(1)


@pytest.mark.parametrize(
    "capability", [SinkCapability.TWO_PHASE_COMMIT, SinkCapability.STAGED_ATOMIC_COMMIT, SinkCapability.OUTBOX_EPOCH_LOG]
)
def test_a_sink_that_claims_to_commit_and_whose_writer_cannot_is_refused_when_it_starts(capability: SinkCapability) -> None:
    """The job would wait for its commits until it stands still."""
    rig = into(NumberingSink(Numbering([]), capability))
    with pytest.raises(JobInvalid, match=rf"'out' is {capability}.*CommittingWriter"):
        rig.runner.start()
