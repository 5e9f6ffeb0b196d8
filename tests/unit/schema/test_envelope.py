"""Envelopes come back as they were sent; whatever is altered, cut or unknown is refused with the channel's name."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import struct
import threading
from decimal import Decimal
from typing import Any

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_schema import envelope as module
from millstream_schema.envelope import (
    MAX_ENVELOPE_BYTES,
    Barrier,
    Batch,
    Envelope,
    Kind,
    decode_envelope,
    decode_header,
    encode_batches,
    encode_envelope,
)
from millstream_schema.errors import CodecError, UnknownFormat
from millstream_schema.values import Format, TypeRegistry

CHANNEL = "millstream.job.3.e1.0.1"
FORMATS: tuple[Format, ...] = ("msgpack", "json")


@dataclasses.dataclass(frozen=True)
class Inner:
    amount: Decimal
    when: dt.datetime


@dataclasses.dataclass(frozen=True)
class Order:
    key: tuple[str, int]
    inner: Inner
    note: Any = None


REGISTRY = TypeRegistry()
REGISTRY.register("order", Order)
REGISTRY.register("inner", Inner)
ORDER = Order(("a", 2**80), Inner(Decimal("1.10"), dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5)))), b"\0")


def records(values: list[Any], timestamps: list[int] | None = None, **changes: Any) -> Envelope:
    fields: dict[str, Any] = {"generation": 3, "number": 7, "epoch": 2, "kind": Kind.RECORDS, "payload": Batch(values, timestamps)}
    return Envelope(**{**fields, **changes})


SAMPLES = [
    records([ORDER, ORDER], [1, -5], value_type="order"),
    records([("a", 1)] * 500, list(range(500))),
    records([None, 2**53 + 1, b"x", 1.0, True]),
    records([], []),
    records([], None),
    Envelope(3, 1, 0, Kind.BARRIER, Barrier(1)),
    Envelope(3, 2, 1, Kind.BARRIER, Barrier(2, "savepoint", {"target": "s3://x", "n": [1, None, 2.0], "deep": {"a": True}})),
    Envelope(3, 3, 2, Kind.WATERMARK, -1),
    Envelope(3, 4, 2, Kind.WATERMARK, 2**63 - 1),
    Envelope(3, 5, 2, Kind.STATUS, True),
    Envelope(3, 6, 2, Kind.STATUS, False),
    Envelope(2**63 - 1, 2**63 - 1, 2**63 - 1, Kind.END),
    Envelope(3, 8, 2, Kind.CONTROL, {"do": "stop", "list": [1, 2.5, None]}),
]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("codec", FORMATS)
@pytest.mark.parametrize("envelope", SAMPLES, ids=lambda e: e.kind.name)
def test_t08_every_kind_comes_back_whole(envelope: Envelope, codec: Format, compression: Any) -> None:
    """Value type, timestamps, watermark, idle status, barrier options, None, big ints, bytes, Decimal, zones survive."""
    data = encode_envelope(envelope, REGISTRY, codec=codec, compression=compression)
    back = decode_envelope(data, REGISTRY, CHANNEL)
    assert back == envelope
    assert repr(back) == repr(envelope)
    assert decode_header(data) == (envelope.generation, envelope.number, envelope.epoch, envelope.kind)


@pytest.mark.parametrize("codec", FORMATS)
def test_t08_nan_survives(codec: Format) -> None:
    """NaN, which is unequal to itself, arrives as NaN."""
    back = decode_envelope(encode_envelope(records([math.nan]), REGISTRY, codec=codec), REGISTRY, CHANNEL)
    assert isinstance(back.payload, Batch)
    assert math.isnan(back.payload.values[0])


@pytest.mark.parametrize("codec", FORMATS)
def test_d1_no_timestamps_are_told_from_timestamps_of_zero(codec: Format) -> None:
    """Records without event time, with timestamp 0, and an empty batch of either sort stay what they are."""
    for batch in (Batch([1], None), Batch([1], [0]), Batch([], None), Batch([], [])):
        data = encode_envelope(records([], payload=batch), REGISTRY, codec=codec)
        assert decode_envelope(data, REGISTRY, CHANNEL).payload == batch


@pytest.mark.parametrize("codec", FORMATS)
def test_d5_null_values_travel(codec: Format) -> None:
    """A batch of nothing but None has as many records after as before."""
    data = encode_envelope(records([None, None], [1, 2]), REGISTRY, codec=codec)
    assert decode_envelope(data, REGISTRY, CHANNEL).payload == Batch([None, None], [1, 2])


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(1, 1, 0, Kind.RECORDS, 5),
        Envelope(1, 1, 0, Kind.RECORDS, None),
        records([1, 2], [1]),
        records([1], [True]),
        records([1], [1.0]),  # type: ignore[list-item]
        Envelope(1, 1, 0, Kind.BARRIER, 1),
        Envelope(1, 1, 0, Kind.BARRIER, Barrier(0)),
        Envelope(1, 1, 0, Kind.WATERMARK, True),
        Envelope(1, 1, 0, Kind.STATUS, 1),
        Envelope(1, 1, 0, Kind.END, 0),
        Envelope(1, 1, 0, Kind.CONTROL, None),
        Envelope(1, 0, 0, Kind.END),
        Envelope(-1, 1, 0, Kind.END),
        Envelope(1, 1, 2**63, Kind.END),
        Envelope(1, 1, 0, Kind.END, version=2),
    ],
)
def test_a_payload_that_does_not_fit_is_refused_by_the_sender(envelope: Envelope) -> None:
    """Kind and payload, ranges and version are checked before anything is sent."""
    with pytest.raises(CodecError):
        encode_envelope(envelope, REGISTRY)


def sealed(data: bytes) -> bytes:
    """The same bytes with the checksum they should have."""
    fixed, rest = data[:32], data[40:]
    return fixed + struct.pack("<Q", xxhash.xxh3_64_intdigest(fixed + rest)) + rest


@pytest.mark.parametrize(("offset", "what"), [(0, "version 99"), (1, "kind 99"), (2, "codec 99"), (3, "compression 99")])
def test_unknown_version_kind_codec_and_compression_are_named(offset: int, what: str) -> None:
    """Each is UnknownFormat with the channel and the number."""
    data = bytearray(encode_envelope(records([1]), REGISTRY))
    data[offset] = 99
    with pytest.raises(UnknownFormat, match=rf"{CHANNEL}, envelope 7: .*{what}"):
        decode_envelope(sealed(bytes(data)), REGISTRY, CHANNEL)


def test_unknown_value_types_are_refused_on_both_ends() -> None:
    """A value type is a registered name; an importable path is only an unknown name."""
    with pytest.raises(UnknownFormat, match=r"os\.path"):
        encode_envelope(records([1], value_type="os.path"), REGISTRY)
    writer = TypeRegistry()
    writer.register("os.path", Order)
    for envelope in (records([1], value_type="os.path"), records([ORDER])):
        if envelope.value_type == "any":
            writer.register("inner", Inner)
        data = encode_envelope(envelope, writer)
        with pytest.raises(UnknownFormat, match=rf"{CHANNEL}, envelope 7.*'os\.path'"):
            decode_envelope(data, REGISTRY, CHANNEL)


ENCODED = [encode_envelope(e, REGISTRY, codec=c, compression=z) for e in SAMPLES for c in FORMATS for z in (None, "zstd")]


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(ENCODED), st.data())
def test_every_flipped_bit_and_cut_tail_is_refused_with_the_channel(data: bytes, draws: st.DataObject) -> None:
    """An altered envelope is a CodecError that names the channel, never another value and never another exception."""
    if draws.draw(st.booleans()):
        altered = bytearray(data)
        altered[draws.draw(st.integers(0, len(data) - 1))] ^= 1 << draws.draw(st.integers(0, 7))
    else:
        altered = bytearray(data[: draws.draw(st.integers(0, len(data) - 1))])
    with pytest.raises(CodecError, match=CHANNEL):
        decode_envelope(bytes(altered), REGISTRY, CHANNEL)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(ENCODED), st.data())
def test_altered_payloads_with_a_right_checksum_raise_codec_error_or_decode(data: bytes, draws: st.DataObject) -> None:
    """Even bytes that somebody sealed on purpose raise nothing but CodecError."""
    altered = bytearray(data)
    for _ in range(draws.draw(st.integers(1, 3))):
        altered[draws.draw(st.integers(40, len(data) - 1))] = draws.draw(st.integers(0, 255))
    try:
        decoded = decode_envelope(sealed(bytes(altered)), REGISTRY, CHANNEL)
    except CodecError as error:
        assert CHANNEL in str(error)
    else:
        assert isinstance(decoded, Envelope)


@given(st.binary(max_size=80))
def test_noise_is_refused(data: bytes) -> None:
    """Random bytes are CodecError for the header and for the whole."""
    with pytest.raises(CodecError, match=CHANNEL):
        decode_envelope(data, REGISTRY, CHANNEL)
    if len(data) < 41:
        with pytest.raises(CodecError, match="cut short"):
            decode_header(data)


def test_two_envelopes_joined_are_refused() -> None:
    """Bytes behind an envelope are not passed over."""
    data = encode_envelope(records([1]), REGISTRY)
    with pytest.raises(CodecError, match="joined"):
        decode_envelope(data + data, REGISTRY, CHANNEL)


def test_compression_is_used_only_where_it_pays() -> None:
    """Small and incompressible payloads go as they are; large repetitive ones shrink."""
    small, large = records([1]), records(["same text"] * 500)
    noise = records([b"".join(xxhash.xxh3_128_digest(bytes([i])) for i in range(200))])
    for envelope in (small, noise):
        assert encode_envelope(envelope, REGISTRY, compression="zstd") == encode_envelope(envelope, REGISTRY)
    assert len(encode_envelope(large, REGISTRY, compression="zstd")) < len(encode_envelope(large, REGISTRY)) // 10


def with_payload(payload: bytes) -> bytes:
    fixed = struct.pack("<BBBBQQQI", 1, Kind.RECORDS, 1, 1, 3, 7, 2, len(payload))
    return sealed(fixed + bytes(8) + b"\x03any" + payload)


def test_a_decompression_bomb_is_refused_by_its_claimed_size() -> None:
    """A frame that claims more than 64 MiB, or claims nothing, is refused before memory is taken."""
    bomb = zstandard.ZstdCompressor().compress(bytes(module.MAX_PAYLOAD_BYTES + 1))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    for payload in (bomb, silent, b"", b"no frame"):
        with pytest.raises(CodecError, match=f"{CHANNEL}, envelope 7: its payload"):
            decode_envelope(with_payload(payload), REGISTRY, CHANNEL)


def test_threads_compress_at_the_same_time() -> None:
    """Each thread has contexts of its own: eight at once lose nothing."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(30):
                envelope = records([f"{seed}-{step}-{i}" for i in range(200)])
                assert decode_envelope(encode_envelope(envelope, REGISTRY, compression="zstd"), REGISTRY, CHANNEL) == envelope
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("codec", FORMATS)
@pytest.mark.parametrize("stamped", [True, False])
def test_batches_are_split_so_that_each_envelope_fits(codec: Format, stamped: bool) -> None:
    """Uneven records are split in order, none lost, and every envelope is at most the limit."""
    values = [("x" * (i * 37 % 5000), i) for i in range(400)]
    stamps = list(range(400)) if stamped else None
    batches = encode_batches(values, stamps, REGISTRY, codec=codec, max_bytes=20_000)
    assert len(batches) > 1
    got_values: list[Any] = []
    got_stamps: list[int] = []
    for batch in batches:
        data = encode_envelope(records([], payload=batch, value_type="order"), REGISTRY, codec=codec)
        assert len(data) <= 20_000
        payload = decode_envelope(data, REGISTRY, CHANNEL).payload
        assert isinstance(payload, Batch)
        assert len(payload.values) == batch.count
        got_values += payload.values
        got_stamps += payload.timestamps or []
    assert got_values == values
    assert got_stamps == (stamps or [])


def test_batches_at_the_border() -> None:
    """No records give no batch, few records one, a record above 1 MiB an error that names its size."""
    assert encode_batches([], None, REGISTRY) == []
    assert [batch.count for batch in encode_batches([1, 2], [3, 4], REGISTRY)] == [2]
    with pytest.raises(CodecError, match=r"one record of 10485\d\d bytes"):
        encode_batches([1, "x" * MAX_ENVELOPE_BYTES, 2], None, REGISTRY)
    with pytest.raises(CodecError, match="2 records have 1 timestamps"):
        encode_batches([1, 2], [1], REGISTRY)


def test_an_encoded_batch_goes_only_where_it_fits() -> None:
    """Another codec or kind than it was encoded for is refused."""
    (batch,) = encode_batches([1], None, REGISTRY, codec="json")
    with pytest.raises(CodecError, match="encoded as json"):
        encode_envelope(records([], payload=batch), REGISTRY)
    with pytest.raises(CodecError, match="WATERMARK"):
        encode_envelope(Envelope(1, 1, 0, Kind.WATERMARK, batch), REGISTRY, codec="json")


def test_d4_headers_of_a_newer_generation_are_read_without_the_payload() -> None:
    """Generation and number, up to 2^63 - 1 and never negative, are read even where the payload cannot be."""
    data = encode_envelope(records([ORDER], generation=2**63 - 1), REGISTRY)
    assert decode_header(data[:60]) == (2**63 - 1, 7, 2, Kind.RECORDS)
