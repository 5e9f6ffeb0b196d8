"""Input channels and the alignment of barriers: order, fences, holding, and what ends an alignment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tasks.parts import REGISTRY, HandChannel

from millstream.testing.world import Faults, SimClock, World
from millstream_schema.channels import ChannelId, Frame
from millstream_schema.envelope import Barrier, Batch, Envelope, Kind, encode_envelope
from millstream_schema.errors import ChannelBroken, CodecError, Fenced
from millstream_schema.ports import SystemClock
from millstream_tasks.operators.base import MAX_WATERMARK, MIN_WATERMARK
from millstream_tasks.runner.inputs import TIMES_KEPT, Alignment, InputChannel, low_watermark


def channel(source: int = 0, generation: int = 3) -> tuple[InputChannel, HandChannel]:
    wire = HandChannel()
    return InputChannel(ChannelId("j", generation, "e0", source, 0), wire, REGISTRY), wire


def frame(number: int, *, generation: int = 3, kind: Kind = Kind.WATERMARK, payload: Any = None, epoch: int = 0) -> Frame:
    body: Any = {Kind.WATERMARK: number, Kind.END: None, Kind.RECORDS: Batch([number], None), Kind.BARRIER: Barrier(number, "checkpoint")}[
        kind
    ]
    envelope = Envelope(generation, number, epoch, kind, body if payload is None else payload, "any")
    return Frame(number, encode_envelope(envelope, REGISTRY))


def inputs(n: int, hold: bool = True, last: int = 0) -> tuple[Alignment, list[InputChannel]]:
    channels = [channel(i)[0] for i in range(n)]
    return Alignment(channels, hold, last, SystemClock()), channels


def held(channels: list[InputChannel]) -> list[int]:
    return [i for i, c in enumerate(channels) if c.held]


# -- order and fences


def test_t57_repeats_are_dropped_and_counted() -> None:
    """Redelivered envelopes change nothing, in whatever order they come back."""
    one, wire = channel()
    wire.frames.extend(frame(n) for n in (1, 2, 1, 2, 3, 3, 1, 4))
    taken = []
    while (envelope := one.take()) is not None:
        taken.append(envelope.number)
    assert taken == [1, 2, 3, 4] and one.repeats == 4


@pytest.mark.parametrize("last", [Kind.WATERMARK, Kind.RECORDS, Kind.BARRIER, Kind.END], ids=lambda k: k.name)
@pytest.mark.parametrize("numbers", [(2,), (1, 3), (1, 2, 4)])
def test_t56_t58_a_gap_breaks_the_channel(numbers: tuple[int, ...], last: Kind) -> None:
    """What is lost is noticed at the next envelope, a barrier too, and both numbers are named."""
    one, wire = channel()
    wire.frames.extend(frame(n) for n in numbers[:-1])
    wire.frames.append(frame(numbers[-1], kind=last))
    with pytest.raises(ChannelBroken, match=f"envelope {numbers[-1]} after {len(numbers) - 1}"):
        for _ in numbers:
            one.take()


def test_t41_an_older_generation_is_dropped_and_counted() -> None:
    """A zombie's output goes nowhere; it does not disturb the numbers."""
    one, wire = channel()
    wire.frames.extend([frame(1, generation=2), frame(1), frame(9, generation=1), frame(2)])
    assert [e.number for e in (one.take(), one.take()) if e] == [1, 2]
    assert one.fenced == 2 and one.repeats == 0


def test_t47_a_newer_generation_stops_the_receiver() -> None:
    """It is the stale one; it never takes the newer number for its own."""
    one, wire = channel()
    wire.frames.extend([frame(1), frame(2, generation=4)])
    assert one.take() is not None
    with pytest.raises(Fenced):
        one.take()
    assert one.channel.generation == 3 and one.number == 1


def test_d12_nothing_comes_after_end() -> None:
    """And END comes behind a final barrier only (T-17)."""
    one, wire = channel()
    with pytest.raises(ChannelBroken, match="END before the final barrier"):
        one.end()
    one.final = True
    one.end()
    wire.frames.append(frame(1))
    with pytest.raises(ChannelBroken, match="after END"):
        one.take()


def test_d11_what_cannot_be_read_is_an_error_naming_channel() -> None:
    """A flipped bit is not passed over."""
    one, wire = channel()
    good = frame(1, kind=Kind.RECORDS)
    for at in range(len(good.data)):
        wire.frames.append(Frame(1, good.data[:at] + bytes([good.data[at] ^ 4]) + good.data[at + 1 :]))
        with pytest.raises(CodecError, match="e0"):
            one.take()


# -- alignment


def test_a_barrier_holds_its_channel_until_all_have_it() -> None:
    """Then all go on."""
    alignment, channels = inputs(3)
    assert not alignment.barrier(1, 5)
    assert held(channels) == [1]
    assert not alignment.barrier(0, 5)
    assert held(channels) == [0, 1]
    assert alignment.barrier(2, 5)
    assert held(channels) == [] and alignment.done == 5


def test_at_least_once_holds_nothing_and_snapshots_when_all_have_it() -> None:
    """E9: one snapshot, not one per channel."""
    alignment, channels = inputs(2, hold=False)
    assert not alignment.barrier(0, 5)
    assert held(channels) == []
    assert alignment.barrier(1, 5)


def test_d22_one_channel_has_the_same_checks() -> None:
    """A repeat or an older epoch is dropped there, too."""
    alignment, channels = inputs(1, last=3)
    assert not alignment.barrier(0, 3)
    assert alignment.barrier(0, 4)
    assert not alignment.barrier(0, 4)
    assert alignment.dropped == 2 and held(channels) == []


def test_t11_a_newer_barrier_ends_the_older_alignment() -> None:
    """Nothing waits for the old one any more; its barrier is dropped and counted when it comes late."""
    alignment, channels = inputs(3)
    alignment.barrier(0, 5)
    alignment.barrier(1, 5)
    assert not alignment.barrier(2, 6)
    assert held(channels) == [2]
    assert not alignment.barrier(2, 5)
    assert alignment.dropped == 1 and held(channels) == [2]
    assert not alignment.barrier(0, 6)
    assert alignment.barrier(1, 6)
    assert not alignment.barrier(1, 5)
    assert alignment.dropped == 2 and alignment.done == 6


def test_t23_e7_a_repeated_barrier_counts_once() -> None:
    """The same epoch twice on one channel does not stand in for another channel."""
    alignment, channels = inputs(2)
    assert not alignment.barrier(0, 5)
    assert not alignment.barrier(0, 5)
    assert held(channels) == [0]
    assert alignment.barrier(1, 5)
    assert not alignment.barrier(0, 5) and not alignment.barrier(1, 5)
    assert alignment.dropped == 3 and held(channels) == []


def test_e10_an_abort_ends_the_alignment_and_the_epoch_does_not_come_back() -> None:
    """Who waited is released; what comes late is dropped."""
    alignment, channels = inputs(2)
    alignment.barrier(0, 5)
    alignment.finish(5)
    assert held(channels) == []
    assert not alignment.barrier(1, 5)
    assert held(channels) == [] and alignment.dropped == 1


def test_an_abort_of_an_epoch_never_heard_of_keeps_its_late_barriers_out() -> None:
    """The abort came by control, the barrier comes later by the channel."""
    alignment, channels = inputs(2)
    alignment.finish(7)
    assert not alignment.barrier(0, 7) and not alignment.barrier(1, 7)
    assert held(channels) == []
    assert not alignment.barrier(0, 8)
    assert alignment.barrier(1, 8)


def test_an_abort_of_an_older_epoch_leaves_the_present_alignment() -> None:
    """A late abort of 4 does not release those who wait for 5; one of a newer epoch does."""
    alignment, channels = inputs(2)
    alignment.barrier(0, 5)
    alignment.finish(4)
    assert held(channels) == [0]
    alignment.finish(6)
    assert held(channels) == []
    assert not alignment.barrier(1, 5)


@given(
    st.lists(
        st.one_of(st.tuples(st.just("b"), st.integers(0, 2), st.integers(1, 6)), st.tuples(st.just("x"), st.just(0), st.integers(1, 6))),
        max_size=40,
    )
)
@settings(deadline=None, max_examples=200)
def test_no_order_of_barriers_and_aborts_snapshots_twice_or_backwards(events: list[tuple[str, int, int]]) -> None:
    """Each epoch at most once, growing, only when all channels had it since the last end, and nobody is held by an epoch that is over."""
    alignment, channels = inputs(3)
    done: list[int] = []
    had: dict[int, set[int]] = {}
    for what, index, epoch in events:
        if what == "x":
            alignment.finish(epoch)
        else:
            had.setdefault(epoch, set()).add(index)
            if alignment.barrier(index, epoch):
                assert had[epoch] == {0, 1, 2}
                done.append(epoch)
        assert done == sorted(set(done))
        assert alignment.epoch == 0 or alignment.epoch > alignment.done
        assert alignment.epoch != 0 or held(channels) == []
        assert len(held(channels)) < 3


# -- watermarks


@pytest.mark.parametrize(
    ("marks", "idle", "low"),
    [
        ([5, 3], [], 3),
        ([5, MIN_WATERMARK], [], MIN_WATERMARK),
        ([5, 3], [1], 5),
        ([5, 3], [0, 1], MIN_WATERMARK),
        ([5, MAX_WATERMARK], [], 5),
        ([MAX_WATERMARK, MAX_WATERMARK], [], MAX_WATERMARK),
        ([MAX_WATERMARK, 3], [1], MIN_WATERMARK),
        ([MAX_WATERMARK, MAX_WATERMARK], [0], MAX_WATERMARK),
        ([MAX_WATERMARK, 3], [0], 3),
        ([-7, 3], [], -7),
    ],
)
def test_a13_t72_the_low_watermark_is_the_least_of_those_that_count(marks: list[int], idle: list[int], low: int) -> None:
    """Idle channels do not hold it back; the end comes when every input has ended and not before, whoever is idle."""
    _, channels = inputs(2)
    for i, mark in enumerate(marks):
        channels[i].watermark = mark
        channels[i].idle = i in idle
    assert low_watermark(channels) == low


# -- what is watched


def test_the_time_of_an_alignment_is_that_from_its_first_barrier_to_its_last() -> None:
    """An aborted one has none; only the newest are kept."""
    world = World(0, Faults())
    alignment = Alignment([channel(i)[0] for i in range(3)], True, 0, SimClock(world))
    alignment.barrier(0, 1)
    world.now += 2.0
    alignment.finish(1)
    assert alignment.times() == []
    for epoch in range(2, TIMES_KEPT + 3):
        alignment.barrier(1, epoch)
        world.now += 0.25
        alignment.barrier(2, epoch)
        world.now += epoch
        alignment.barrier(0, epoch)
        world.now += 100.0
    assert alignment.times() == [(epoch, (epoch + 0.25) * 1000) for epoch in range(3, TIMES_KEPT + 3)]
