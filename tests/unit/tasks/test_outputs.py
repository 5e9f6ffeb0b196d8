"""Outgoing edges: where records go, what an envelope holds, and the window that is never exceeded."""

from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.coordinator.rows import model
from tests.unit.tasks.parts import REGISTRY, SHARDS, HandTransport, at_ease, output_edge

from millstream import JobBuilder, Pipelines
from millstream_schema.canonical import shard_of
from millstream_schema.channels import ChannelId
from millstream_schema.envelope import HEAD_BYTES, Barrier, Envelope, Kind, decode_envelope, encode_batches
from millstream_schema.errors import ChannelMissing, CodecError, JobInvalid, KeyRefused, OperatorError
from millstream_schema.model import Partitioning
from millstream_schema.pipeline import planned
from millstream_schema.plan import MIN_BATCH_BYTES, compile_plan
from millstream_tasks.operators.base import Batch
from millstream_tasks.runner.outputs import OutputEdge, Outputs
from millstream_tasks.sinks.memory import CollectSink, CollectTarget
from millstream_tasks.sources.memory import CollectionSource

H, R, B = Partitioning.HASH, Partitioning.REBALANCE, Partitioning.BROADCAST
KEYS: list[Any] = [0, 1, True, 1.0, Decimal("1.00"), -0.0, "1", b"1", None, ("a", 1), 10**30, -(2**63), "é", "", 2.5, False]


def sent(edge: OutputEdge) -> list[list[Any]]:
    """Values per target, in order; in-process channels hold envelopes."""
    for channel in edge.channels:
        channel.flush()
    found = []
    for channel in edge.channels:
        envelopes: list[Any] = [f.data for f in channel._waiting]
        found.append([v for e in envelopes if e.kind is Kind.RECORDS for v in e.payload.values])
    return found


@pytest.mark.parametrize("targets", [2, 3, 5, 128])
def test_d23_a19_a_record_goes_to_the_owner_the_plan_names(targets: int) -> None:
    """The route of the edge and the ownership of the plan are one rule: each key arrives where its state is."""
    plan = compile_plan(msgspec.structs.replace(model(p=targets)))
    edge = output_edge(H, targets, key=lambda r: r[0])
    edge.write(Batch([(k, i) for i, k in enumerate([*KEYS, *range(500)])]))
    for target, records in enumerate(sent(edge)):
        for key, _ in records:
            assert plan.owner("count", shard_of(key, SHARDS)) == target
    assert sum(map(len, sent(edge))) == len(KEYS) + 500


def test_d25_keys_that_are_equal_go_one_way() -> None:
    """Whichever of 1, True, 1.0 and Decimal("1.00") comes first: the remembered route is the same."""
    equal = [1, True, 1.0, Decimal("1.00")]
    for first in equal:
        edge = output_edge(H, 7, key=lambda r: r)
        for key in [first, *equal]:
            edge.write(Batch([key]))
        assert [n for n in map(len, sent(edge)) if n] == [5]


def test_d4_the_order_of_a_key_is_kept() -> None:
    """Also across batches, with and without timestamps."""
    edge = output_edge(H, 4, key=lambda r: r[0], batch_records=3)
    for n in range(20):
        edge.write(Batch([(k, n) for k in "abc"], [n] * 3 if n % 3 else None))
    for records in sent(edge):
        for key in "abc":
            mine = [n for k, n in records if k == key]
            assert mine == sorted(mine)
    assert Counter(k for records in sent(edge) for k, _ in records) == {"a": 20, "b": 20, "c": 20}


def test_timestamps_travel_with_their_records() -> None:
    """Every partitioner keeps the pairs together; batches with and without do not mix."""
    for how, key in ((H, lambda r: r), (R, None), (B, None)):
        edge = output_edge(how, 3, key=key)
        edge.write(Batch(list(range(50)), [v * 10 for v in range(50)]))
        edge.write(Batch([100, 101]))
        edge.write(Batch([200], [2000]))
        for channel in edge.channels:
            channel.flush()
            for frame in channel._waiting:
                envelope: Any = frame.data
                values, times = envelope.payload.values, envelope.payload.timestamps
                assert times is None or times == [v * 10 for v in values]
                assert (times is None) == (values[0] in (100, 101))


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(2, 5))
@settings(deadline=None, max_examples=60)
def test_d4_rebalance_deals_evenly_for_ever(sizes: list[int], targets: int) -> None:
    """Round robin over all batches: nobody gets two more than another, nothing is lost or repeated."""
    edge = output_edge(R, targets)
    n = 0
    for size in sizes:
        edge.write(Batch(list(range(n, n + size))))
        n += size
    counts = [len(records) for records in sent(edge)]
    assert max(counts) - min(counts) <= 1
    assert sorted(v for records in sent(edge) for v in records) == list(range(n))


def test_broadcast_sends_everything_to_everyone() -> None:
    """Each target has all records in order."""
    edge = output_edge(B, 3)
    edge.write(Batch([1, 2]))
    edge.write(Batch([3]))
    assert sent(edge) == [[1, 2, 3]] * 3


@pytest.mark.parametrize("key", [float("nan"), Decimal("NaN"), ["list"], {"a": 1}, object()], ids=lambda k: type(k).__name__)
def test_a_value_that_cannot_be_a_key_is_refused_and_the_operator_is_named(key: Any) -> None:
    """At the first record, also when the value cannot even be hashed."""
    edge = output_edge(H, 2, key=lambda r: r)
    with pytest.raises(KeyRefused, match=r"'b'.*cannot be a key"):
        edge.write(Batch([key]))


def test_a_key_function_that_fails_names_its_operator() -> None:
    """It is the user's code: OperatorError, not a bare TypeError."""
    edge = output_edge(H, 2, key=lambda r: r["x"])
    with pytest.raises(OperatorError, match=r"'b'.*KeyError"):
        edge.write(Batch([{"y": 1}]))


# -- envelopes


def test_numbers_are_contiguous_over_all_kinds_and_the_epoch_is_the_last_barrier() -> None:
    """Records are flushed before anything that must not overtake them."""
    edge = output_edge(R, 1, objects=False, batch_records=2)
    outputs = Outputs([edge], at_ease)
    outputs.emit(Batch([1, 2, 3]))
    outputs.emit_watermark(5)
    outputs.emit(Batch([4]))
    outputs.barrier(7, "checkpoint")
    outputs.emit(Batch([5]))
    outputs.emit_status(True)
    outputs.barrier(8, "final")
    outputs.end()
    found: list[Any] = [decode_envelope(f.data, REGISTRY, "c") for f in edge.channels[0]._waiting]
    assert [e.number for e in found] == list(range(1, len(found) + 1))
    records: dict[int, list[Any]] = {}
    for e in found:
        if e.kind is Kind.RECORDS:
            records.setdefault(e.epoch, []).extend(e.payload.values)
    assert records == {0: [1, 2, 3, 4], 7: [5]}
    assert [(e.kind, e.epoch) for e in found if e.kind is not Kind.RECORDS] == [
        (Kind.WATERMARK, 0), (Kind.BARRIER, 7), (Kind.STATUS, 7), (Kind.BARRIER, 8), (Kind.END, 8),
    ]  # fmt: skip
    barrier = next(e for e in found if e.kind is Kind.BARRIER)
    assert barrier.payload == Barrier(7, "checkpoint") and barrier.generation == 1


def test_d2_d3_barriers_and_watermarks_go_to_every_channel_of_every_edge() -> None:
    """Side outputs' channels, too."""
    edges = [output_edge(H, 3, key=lambda r: r), output_edge(R, 2)]
    outputs = Outputs(edges, at_ease)
    outputs.emit_watermark(5)
    outputs.barrier(1, "checkpoint")
    for channel in outputs.channels:
        kinds = [e.kind for f in channel._waiting if isinstance(e := f.data, Envelope)]
        assert kinds == [Kind.WATERMARK, Kind.BARRIER]
    assert len(outputs.channels) == 5


def test_a_batch_is_cut_by_records_and_by_bytes() -> None:
    """No envelope above either bound; nothing is lost."""
    edge = output_edge(R, 1, objects=False, batch_records=10, batch_bytes=2000)
    values = ["x" * n for n in (10, 500, 1500, 10, 10)] * 5
    edge.write(Batch(values))
    edge.channels[0].flush()
    found: list[Any] = [decode_envelope(f.data, REGISTRY, "c") for f in edge.channels[0]._waiting]
    assert [v for e in found for v in e.payload.values] == values
    assert all(len(e.payload.values) <= 10 for e in found)
    assert all(len(f.data) < 2300 for f in edge.channels[0]._waiting)


def test_a_record_above_batch_bytes_is_refused_with_its_size() -> None:
    """It can be sent in no envelope; records that fit alone are sent, each in one."""
    fits = output_edge(R, 1, objects=False, batch_bytes=MIN_BATCH_BYTES)
    fits.write(Batch(["x" * 300] * 5))
    fits.channels[0].flush()
    assert all(len(f.data) <= MIN_BATCH_BYTES for f in fits.channels[0]._waiting)
    edge = output_edge(R, 1, objects=False, batch_bytes=MIN_BATCH_BYTES)
    edge.write(Batch(["x" * 2000]))
    with pytest.raises(CodecError, match=rf"one record of 20\d\d bytes does not fit into an envelope of {MIN_BATCH_BYTES}"):
        edge.channels[0].flush()


@pytest.mark.parametrize("bound", [1, HEAD_BYTES])
def test_a_bound_without_room_for_a_record_is_refused_as_such(bound: int) -> None:
    """Not as a record that is too large: no record would fit."""
    with pytest.raises(CodecError, match=f"{bound} bytes has no room for a record.*raise batch_bytes"):
        encode_batches([1], None, REGISTRY, max_bytes=bound)


def test_a_plan_with_batch_bytes_below_the_least_is_refused_and_the_least_is_taken() -> None:
    """When it is compiled, the edge named."""

    def compiled(batch_bytes: int) -> None:
        def define(job: JobBuilder) -> None:
            job.edges(batch_bytes=batch_bytes)
            job.source(CollectionSource([1]), uid="in").rebalance().sink_to(CollectSink("out", CollectTarget()), uid="out", parallelism=2)

        pipelines = Pipelines()
        pipelines.define("job")(lambda job, _config: define(job))
        planned(pipelines.build("job"), None, {})

    compiled(MIN_BATCH_BYTES)
    with pytest.raises(JobInvalid, match=f"'in->out': batch_bytes must be at least {MIN_BATCH_BYTES}, not {MIN_BATCH_BYTES - 1}"):
        compiled(MIN_BATCH_BYTES - 1)


# -- the window


@pytest.mark.parametrize("seed", range(10))
def test_t51_the_window_is_never_exceeded_and_everything_arrives(seed: int) -> None:
    """Whatever the consumer reports and when: at most ``capacity`` above it, one window per channel, in order, nothing lost."""
    rng = random.Random(seed)
    transport = HandTransport()
    capacity = rng.choice((1, 2, 8))
    edge = output_edge(R, 2, transport=transport, capacity=capacity, batch_records=3)
    outputs = Outputs([edge], at_ease)
    wires = list(transport.channels.values())
    total = 0
    for n in range(200):
        size = rng.randrange(6)
        outputs.emit(Batch(list(range(total, total + size))))
        total += size
        if rng.random() < 0.1:
            outputs.barrier(n + 1, "checkpoint")
        waiting = outputs.pump()
        for wire in wires:
            assert not wire.sent or wire.sent[-1].number - wire.reported <= capacity
            if wire.sent and rng.random() < 0.5:
                wire.processed(rng.randint(wire.reported, wire.sent[-1].number))
        assert waiting == sum(len(c._waiting) for c in edge.channels)
    outputs.flush()
    for _ in range(10_000):
        if not outputs.pump():
            break
        for wire in wires:
            wire.processed(wire.sent[-1].number)
    assert outputs.pump() == 0
    for wire in wires:
        assert [f.number for f in wire.sent] == list(range(1, len(wire.sent) + 1))
    values = [v for w in wires for f in w.sent if (e := f.data) and e.kind is Kind.RECORDS for v in e.payload.values]  # type: ignore[attr-defined]
    assert sorted(values) == list(range(total))


def test_t52_a_full_window_holds_its_own_channel_only() -> None:
    """The other targets go on while one consumer is slow."""
    transport = HandTransport()
    edge = output_edge(B, 2, transport=transport, capacity=2, batch_records=1)
    outputs = Outputs([edge], at_ease)
    slow, fast = transport.channels.values()
    for n in range(10):
        outputs.emit(Batch([n]))
        outputs.pump()
        fast.processed(n + 1)
    assert (len(slow.sent), len(fast.sent)) == (2, 10)
    assert outputs.pump() == 8


def test_nothing_is_sent_before_the_outputs_are_connected() -> None:
    """READY comes first; what was emitted meanwhile waits."""
    edge = output_edge(R, 1)
    outputs = Outputs([edge], at_ease)
    outputs.emit(Batch([1]))
    outputs.flush()
    assert outputs.pump() == 1
    transport = HandTransport()
    with pytest.raises(ChannelMissing):
        outputs.connect(transport)
    transport.create(ChannelId("j", 1, "e0", 0, 0), 8)
    outputs.connect(transport)
    assert outputs.pump() == 0
