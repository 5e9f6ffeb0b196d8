"""What travels over a channel: numbered envelopes of records, barriers, watermarks, status and end.

Called by the subtask runner on both ends of an edge; channels carry the bytes and never look inside. What must never happen here: an
envelope that decodes to something else than was sent, or that is passed over in silence. A flipped bit, a cut tail, an unknown version,
kind or type is an error that names the channel, and the subtask fails.

Layout (little-endian). The first 32 bytes keep their place in every version, so a stale envelope is recognised even when newer::

    version u8 | kind u8 | codec u8 | compression u8 | generation u64 | number u64 | epoch u64 | payload size u32
    checksum u64 (XXH3 of all other bytes) | size of value type u8 | value type, UTF-8 | payload
"""

from __future__ import annotations

import enum
import struct
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import msgspec
import xxhash
import zstandard

from millstream_schema.connectors import Json
from millstream_schema.errors import CodecError, UnknownFormat
from millstream_schema.values import Format, TypeRegistry, decode_column, encode_column

Compression = Literal["zstd"] | None

VERSION: Final = 1
MAX_ENVELOPE_BYTES: Final = 1024 * 1024
MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
"""No payload, compressed or not, decodes to more than this."""

_MIN_COMPRESSED_BYTES: Final = 512
_FIXED: Final = struct.Struct("<BBBBQQQI")
_CHECKSUM: Final = struct.Struct("<Q")
_SIZE: Final = struct.Struct("<I")
_HEADER_BYTES: Final = _FIXED.size + _CHECKSUM.size + 1
_MAX_TYPE_BYTES: Final = 255
HEAD_BYTES: Final = _HEADER_BYTES + _MAX_TYPE_BYTES
"""What an envelope takes before its payload, at most."""
_LIMIT: Final = 2**63
_CODECS: Final[dict[str, int]] = {"msgpack": 1, "json": 2}
_NO_TYPES: Final = TypeRegistry()

BUILTIN_VALUE_TYPES: Final = frozenset(
    {"any", "none", "bool", "int", "float", "str", "bytes", "decimal", "datetime", "date", "time", "timedelta", "uuid"}
    | {"list", "tuple", "dict", "set", "frozenset"}
)
"""Value types every job has besides those in its registry. ``any`` promises nothing."""


class Kind(enum.IntEnum):
    """What an envelope carries. CONTROL is known to the codec only: control messages do not wait behind data."""

    RECORDS = 1
    BARRIER = 2
    WATERMARK = 3
    STATUS = 4
    END = 5
    CONTROL = 6


_KINDS: Final = {int(kind): kind for kind in Kind}


class Batch(msgspec.Struct, frozen=True):
    """Payload of RECORDS. ``timestamps`` are UTC milliseconds, one per value, or None when the records have no event time."""

    values: list[Any]
    timestamps: list[int] | None = None


class EncodedBatch(msgspec.Struct, frozen=True):
    """A batch that :func:`encode_batches` has encoded already; stands for its :class:`Batch` when an envelope is encoded."""

    payload: bytes
    count: int
    codec: Format


class Barrier(msgspec.Struct, frozen=True):
    """Payload of BARRIER. ``mode``: what the epoch is for (checkpoint, savepoint, drain, suspend, final)."""

    epoch: int
    mode: str = "checkpoint"
    options: dict[str, Json] = {}


Payload = Batch | EncodedBatch | Barrier | int | bool | dict[str, Json] | None


class Envelope(msgspec.Struct, frozen=True):
    """One unit on a channel.

    ``number`` counts all kinds from 1 without gaps; ``epoch`` is the last barrier sent on this channel (0: none yet). The payload by kind:
    RECORDS :class:`Batch`, BARRIER :class:`Barrier`, WATERMARK int (ms), STATUS bool (True: idle), END None, CONTROL dict of JSON.
    ``value_type`` is a name registered with the job or one of :data:`BUILTIN_VALUE_TYPES`, never an importable path.
    """

    generation: int
    number: int
    epoch: int
    kind: Kind
    payload: Payload = None
    value_type: str = "any"
    version: int = VERSION


class Header(NamedTuple):
    """What decides the fate of an envelope before its payload is looked at."""

    generation: int
    number: int
    epoch: int
    kind: Kind


class _Zstd(threading.local):
    """Contexts are expensive to make and not safe to share, so each thread keeps its own."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd: Final = _Zstd()


def encode_batches(
    values: Sequence[Any],
    timestamps: Sequence[int] | None,
    registry: TypeRegistry,
    *,
    codec: Format = "msgpack",
    max_bytes: int = MAX_ENVELOPE_BYTES,
) -> list[EncodedBatch]:
    """Encode records into as few batches as needed for envelopes of at most ``max_bytes`` before compression, in order.

    No records give no batches. Raises :class:`CodecError`, naming the size, for a single record that is larger, and for a bound that leaves no room for any.
    """
    if timestamps is not None and len(timestamps) != len(values):
        raise CodecError(f"{len(values)} records have {len(timestamps)} timestamps")
    room = max_bytes - HEAD_BYTES
    if room < 1:
        raise CodecError(f"an envelope of {max_bytes} bytes has no room for a record: its head takes up to {HEAD_BYTES}; raise batch_bytes")
    done: list[EncodedBatch] = []
    # A stack of slices still to encode, last first: no recursion, whatever the sizes are.
    waiting = [(0, len(values))] if len(values) else []
    while waiting:
        start, end = waiting.pop()
        part = Batch(list(values[start:end]), None if timestamps is None else list(timestamps[start:end]))
        payload = _encode_batch(part, registry, codec)
        if len(payload) <= room:
            done.append(EncodedBatch(payload, end - start, codec))
        elif end - start == 1:
            raise CodecError(
                f"one record of {len(payload)} bytes does not fit into an envelope of {max_bytes}; send a reference to its content"
            )
        else:
            pieces = min(end - start, len(payload) // room + 1)
            bounds = [start + (end - start) * piece // pieces for piece in range(pieces + 1)]
            waiting.extend(reversed(list(pairwise(bounds))))
    return done


def encode_envelope(envelope: Envelope, registry: TypeRegistry, *, codec: Format = "msgpack", compression: Compression = None) -> bytes:
    """Encode one envelope. ``zstd`` compresses payloads of more than 512 bytes if that makes them smaller.

    Raises :class:`UnknownFormat` for an unregistered value type, :class:`CodecError` for anything else that cannot be sent.
    """
    _check_outgoing(envelope, registry)
    payload = _encode_payload(envelope, registry, codec)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise CodecError(f"a payload of {len(payload)} bytes exceeds the limit of {MAX_PAYLOAD_BYTES}; split it with encode_batches")
    compressed = 0
    if compression == "zstd" and len(payload) > _MIN_COMPRESSED_BYTES:
        smaller = _zstd.compressor.compress(payload)
        if len(smaller) < len(payload):
            payload, compressed = smaller, 1
    value_type = envelope.value_type.encode()
    fixed = _FIXED.pack(
        VERSION,
        envelope.kind,
        _CODECS[codec],
        compressed,
        envelope.generation,
        envelope.number,
        envelope.epoch,
        len(payload),
    )
    rest = b"".join((bytes((len(value_type),)), value_type, payload))
    return b"".join((fixed, _CHECKSUM.pack(_checksum(fixed, rest)), rest))


def decode_header(data: bytes, channel_name: str = "?") -> Header:
    """Generation, number, epoch and kind, without the cost of the payload and without its check.

    Raises :class:`UnknownFormat` for another version or kind, :class:`CodecError` for bytes that are too short.
    """
    if len(data) < _HEADER_BYTES:
        raise CodecError(f"channel {channel_name}: an envelope of {len(data)} bytes is cut short")
    version, kind, _codec, _compression, generation, number, epoch, _size = _FIXED.unpack_from(data)
    if version != VERSION:
        raise UnknownFormat(f"channel {channel_name}, envelope {number}: version {version} is not known here (this build reads {VERSION})")
    if kind not in _KINDS:
        raise UnknownFormat(f"channel {channel_name}, envelope {number}: kind {kind} is not known here")
    return Header(generation, number, epoch, _KINDS[kind])


def decode_envelope(data: bytes, registry: TypeRegistry, channel_name: str) -> Envelope:
    """Decode one envelope and check all of it.

    Raises :class:`UnknownFormat` for an unknown version, kind or value type, :class:`CodecError` for truncated or altered bytes; both name
    the channel, and the number as far as it can be read.
    """
    header = decode_header(data, channel_name)
    where = f"channel {channel_name}, envelope {header.number}"
    try:
        return _decode_checked(header, memoryview(data), registry)
    except UnknownFormat as error:
        raise UnknownFormat(f"{where}: {error}") from error
    except CodecError as error:
        raise CodecError(f"{where}: {error}") from error


def _decode_checked(header: Header, data: memoryview, registry: TypeRegistry) -> Envelope:
    _version, _kind, codec, compression, _generation, _number, _epoch, size = _FIXED.unpack_from(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _FIXED.size)
    start = _HEADER_BYTES + data[_HEADER_BYTES - 1]
    if len(data) != start + size:
        raise CodecError(f"it has {len(data)} bytes where its header says {start + size}: truncated, or joined with another")
    if checksum != _checksum(data[: _FIXED.size], data[_HEADER_BYTES - 1 :]):
        raise CodecError("its bytes do not fit their checksum: altered on the way")
    if codec not in _CODECS.values():
        raise UnknownFormat(f"codec {codec} is not known here")
    # Bytes that are no UTF-8 are no known name either.
    value_type = str(data[_HEADER_BYTES:start], "utf-8", "replace")
    if value_type not in BUILTIN_VALUE_TYPES and value_type not in registry:
        raise UnknownFormat(f"value type {value_type!r} is not known here; register it with the job under that name")
    payload = _decode_payload(header.kind, _expand(data[start:], compression), registry)
    return Envelope(header.generation, header.number, header.epoch, header.kind, payload, value_type)


def _checksum(fixed: bytes | memoryview, rest: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(fixed)
    digest.update(rest)
    return digest.intdigest()


def _expand(payload: memoryview, compression: int) -> bytes | memoryview:
    if compression == 0:
        return payload
    if compression != 1:
        raise UnknownFormat(f"compression {compression} is not known here")
    try:
        # The size a frame claims is checked first: the library's own limit does not apply to frames that claim one.
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= MAX_PAYLOAD_BYTES:
            raise CodecError(f"its payload would expand to {size} bytes, the limit is {MAX_PAYLOAD_BYTES}")
        return _zstd.decompressor.decompress(payload, max_output_size=MAX_PAYLOAD_BYTES, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"its payload cannot be expanded: {error}") from error


def _check_outgoing(envelope: Envelope, registry: TypeRegistry) -> None:
    if not (0 <= envelope.generation < _LIMIT and 1 <= envelope.number < _LIMIT and 0 <= envelope.epoch < _LIMIT):
        raise CodecError(
            f"generation {envelope.generation}, number {envelope.number} or epoch {envelope.epoch} is out of range: numbers count from 1"
        )
    if envelope.version != VERSION:
        raise UnknownFormat(f"this build writes envelopes of version {VERSION}, not {envelope.version}")
    if envelope.value_type not in BUILTIN_VALUE_TYPES and envelope.value_type not in registry:
        raise UnknownFormat(f"value type {envelope.value_type!r} is not registered with the job; register it, or send it as 'any'")


def _encode_payload(envelope: Envelope, registry: TypeRegistry, codec: Format) -> bytes:
    payload = envelope.payload
    if isinstance(payload, EncodedBatch):
        if envelope.kind is not Kind.RECORDS or payload.codec != codec:
            raise CodecError(
                f"a batch encoded as {payload.codec} cannot be sent in an envelope of kind {envelope.kind.name} and codec {codec}"
            )
        return payload.payload
    _check_payload(envelope.kind, payload)
    if isinstance(payload, Batch):
        return _encode_batch(payload, registry, codec)
    if isinstance(payload, Barrier):
        return encode_column([payload.epoch, payload.mode, payload.options], _NO_TYPES, format=codec)
    return encode_column([payload], _NO_TYPES, format=codec)


def _check_payload(kind: Kind, payload: Any) -> None:
    """Both ways: a wrong payload is refused by its sender, and again by its receiver."""
    match kind:
        case Kind.RECORDS:
            fits = type(payload) is Batch and type(payload.values) is list
            if fits and payload.timestamps is not None:
                fits = len(payload.timestamps) == len(payload.values) and set(map(type, payload.timestamps)) <= {int}
        case Kind.BARRIER:
            fits = type(payload) is Barrier and (type(payload.epoch), type(payload.mode), type(payload.options)) == (int, str, dict)
            fits = fits and payload.epoch >= 1
        case Kind.WATERMARK:
            fits = type(payload) is int
        case Kind.STATUS:
            fits = type(payload) is bool
        case Kind.CONTROL:
            fits = type(payload) is dict
        case Kind.END:
            fits = payload is None
    if not fits:
        raise CodecError(
            f"the payload does not fit the kind {kind.name}: {type(payload).__name__}, see Envelope for what each kind carries"
        )


def _encode_batch(batch: Batch, registry: TypeRegistry, codec: Format) -> bytes:
    stamps = b"" if batch.timestamps is None else encode_column(batch.timestamps, _NO_TYPES, format=codec)
    return b"".join((_SIZE.pack(len(stamps)), stamps, encode_column(batch.values, registry, format=codec)))


def _decode_payload(kind: Kind, payload: bytes | memoryview, registry: TypeRegistry) -> Payload:
    decoded: Any
    if kind is Kind.RECORDS:
        if len(payload) < _SIZE.size:
            raise CodecError("its batch is cut short")
        body = memoryview(payload)
        end = _SIZE.size + _SIZE.unpack_from(body)[0]
        stamps = decode_column(body[_SIZE.size : end], _NO_TYPES) if end > _SIZE.size else None
        decoded = Batch(decode_column(body[end:], registry), stamps)
    else:
        items = decode_column(payload, _NO_TYPES)
        if len(items) != (3 if kind is Kind.BARRIER else 1):
            raise CodecError(f"its payload has {len(items)} parts")
        decoded = Barrier(*items) if kind is Kind.BARRIER else items[0]
    _check_payload(kind, decoded)
    payload_checked: Payload = decoded
    return payload_checked
