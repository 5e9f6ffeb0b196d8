"""The source of a subtask in turn: what is read after DRAIN began counts as what was read before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.runner.rig import Rig, split
from tests.unit.tasks.parts import REGISTRY

from millstream import JobBuilder
from millstream_schema.connectors import ConnectorContext, Json, Read, SourceCapability, Split
from millstream_schema.control import EpochKind
from millstream_schema.envelope import Envelope, Kind, decode_envelope
from millstream_schema.errors import OperatorError
from millstream_tasks.operators.base import MAX_WATERMARK
from millstream_tasks.sinks.memory import CollectSink, CollectTarget


class Prefetching:
    """A source whose readers hold batches taken from outside: told to end, they still hand those out."""

    kind, version, bounded, capability = "prefetching", 1, False, SourceCapability.REPLAYABLE

    def __init__(self, **held: list[Read]) -> None:
        self.held = held

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def discover(self, known: frozenset[str]) -> list[Split]:
        return []

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> PrefetchingReader:
        return PrefetchingReader(self.held[split.split_id])


class PrefetchingReader:
    def __init__(self, held: list[Read]) -> None:
        self.held = held
        self.told = False

    def poll(self, limit: int) -> Read:
        if not self.told or not self.held:
            return Read([], exhausted=self.told)
        return self.held.pop(0)

    def truncate_for_drain(self) -> None:
        self.told = True

    def cursor(self) -> Json:
        return None

    def close(self) -> None:
        """Nothing is held open."""


def sent(rig: Rig, kind: Kind) -> list[Any]:
    """(epoch, payload) of what was sent, channel by channel."""
    frames = [f.data for channel in rig.downstream() for f in channel.sent]
    found = [f if isinstance(f, Envelope) else decode_envelope(f, REGISTRY, "c") for f in frames]
    return [(e.epoch, e.payload) for e in found if e.kind is kind]


def drained(source: Prefetching, define: Callable[[JobBuilder], None]) -> Rig:
    """The subtask of the source, behind its barrier of DRAIN."""
    rig = Rig(define, "in:0", splits=[split(name) for name in source.held]).running()
    rig.trigger(1, EpochKind.DRAIN, complete=True)
    for _ in range(8):
        rig.after(1.0)
    rig.background()
    return rig


def test_records_and_dead_letters_handed_over_after_drain_are_sent_and_counted_before_the_barrier() -> None:
    """A truncated reader's last batches are part of the final epoch, whatever is in them."""
    source = Prefetching(a=[Read([10, 11]), Read([], dead=[("at 7", b"\xff", "no text")])], b=[Read([900])])

    def define(job: JobBuilder) -> None:
        read = job.source(source, uid="in")
        read.rebalance().sink_to(CollectSink("out", CollectTarget()), uid="out", parallelism=2)
        read.side_output("dead-letter").rebalance().sink_to(CollectSink("bad", CollectTarget()), uid="bad", parallelism=2)

    rig = drained(source, define)
    batches = sent(rig, Kind.RECORDS)
    values = [v for _, batch in batches for v in batch.values]
    assert sorted(v for v in values if isinstance(v, int)) == [10, 11, 900]
    assert [v for v in values if isinstance(v, dict)] == [{"position": "at 7", "raw": b"\xff", "reason": "no text"}]
    assert {epoch for epoch, _ in batches} == {0}
    assert rig.snapshot(1).records == 3


def test_event_time_read_after_drain_is_that_of_its_own_split() -> None:
    """The watermark trails the slower of two truncated splits, until that one has ended."""
    source = Prefetching(slow=[Read([10, 11]), Read([12])], fast=[Read([900]), Read([901]), Read([902])])

    def define(job: JobBuilder) -> None:
        stamped = job.source(source, uid="in").assign_timestamps(lambda r: r, uid="times")
        stamped.rebalance().sink_to(CollectSink("out", CollectTarget()), uid="out", parallelism=2)

    marks = sent(drained(source, define), Kind.WATERMARK)
    assert list(dict.fromkeys(mark for _, mark in marks)) == [10, 11, 900, 901, MAX_WATERMARK]


@pytest.mark.parametrize("times", [[1, 2.0], [1, None], [True, 2], [1, 1 << 61], [1]], ids=repr)
def test_event_times_of_a_source_that_are_none_are_refused_and_the_source_is_named(times: list[Any]) -> None:
    """No int, out of range, or not one for each record: before the chain sees them, with or without operators that use them."""
    source = Prefetching(one=[Read([1, 2], times)])

    def define(job: JobBuilder) -> None:
        job.source(source, uid="in").rebalance().sink_to(CollectSink("out", CollectTarget()), uid="out", parallelism=2)

    with pytest.raises(OperatorError, match="source 'in' gave"):
        drained(source, define)


def test_the_lag_of_a_source_is_the_age_of_its_newest_record_when_it_was_read() -> None:
    """Unknown before the first record and where records have no event time; it does not grow while nothing comes."""

    def lag_after(read: Read) -> object:
        source = Prefetching(a=[read])

        def define(job: JobBuilder) -> None:
            job.source(source, uid="in").rebalance().sink_to(CollectSink("out", CollectTarget()), uid="out", parallelism=2)

        return drained(source, define).runner.stats().values["source_lag_ms"]

    assert lag_after(Read([], dead=[("at 7", b"\xff", "no text")])) is None
    assert lag_after(Read([1, 2])) is None
    long_ago, later = lag_after(Read([1, 2], [0, 1_000])), lag_after(Read([1, 2], [0, 61_000]))
    assert isinstance(long_ago, int) and isinstance(later, int) and long_ago - later == 60_000
