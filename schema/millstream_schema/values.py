"""Columns of values as bytes and back, with their exact types: the codec of edges, state snapshots and keys.

Called by :mod:`millstream_schema.envelope` for records and by the state backends for keys and values. A column is a list of values of one
place (one field, one operator's output, one state's values).

What must never happen here: a value that comes back as another type (1 as 1.0, a tuple as a list, True as 1), a class that is imported
because data named it, or malformed bytes that raise anything but :class:`CodecError`.

Layout: version byte, format byte (``M`` msgpack, ``J`` JSON), body. JSON is one array ``[types, items]`` of tagged items. A msgpack body
is a tree of columns, each a tag byte and either one msgpack array or a number of child columns with their lengths before them::

    S I F  str, int (64 bits), float, as one msgpack array                           o  optional: mask, those that are there
    a  atoms: None, bool, int, float, str, bytes, mixed, as one msgpack array
    T  tuples of one length, column by column                                        R  registered type: its name and fields, columns
    K  dicts of the same str keys in the same order, key by key                      M  other dicts: lengths, keys, values
    l t s z  lists, tuples, sets, frozensets: lengths, items                         D d m c e u  scalars, as simpler columns
    W  all else: tagged items

An item is tagged when msgpack (or JSON) alone would lose its type: it becomes an array whose first element is the tag, so a bare array
never occurs. Subclasses of the built-in types are not their bases: they are registered or refused.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import inspect
import math
import struct
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from itertools import chain, islice, starmap
from operator import attrgetter, itemgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec

from millstream_schema.errors import CodecError, ConfigurationError, UnknownFormat

Format = Literal["msgpack", "json"]
Rows = Iterable[Sequence[Any]]

VERSION: Final = 1
_MSGPACK: Final = bytes([VERSION]) + b"M"
_JSON: Final = bytes([VERSION]) + b"J"
_NONE: Final = type(None)
_ATOMS: Final = frozenset({_NONE, bool, int, float, str, bytes})
# Columns are cut into columns only so far; what is nested deeper goes through the tagged walker, whose depth is bounded as well.
_MAX_COLUMN_DEPTH: Final = 5
_MAX_DEPTH: Final = 150

_encode_msgpack = msgspec.msgpack.Encoder().encode
_decode_msgpack = msgspec.msgpack.Decoder().decode
_TYPED_TAGS: Final[dict[type, bytes]] = {str: b"S", int: b"I", float: b"F"}
_TYPED_DECODERS: Final[dict[str, Callable[[memoryview], list[Any]]]] = {
    "S": msgspec.msgpack.Decoder(list[str]).decode,
    "I": msgspec.msgpack.Decoder(list[int]).decode,
    "F": msgspec.msgpack.Decoder(list[float]).decode,
}


class Shape(NamedTuple):
    """How a registered type is taken apart into a row of field values and put together again, without running user code if possible."""

    name: str
    type: type
    fields: tuple[str, ...]
    take: Callable[[Any], tuple[Any, ...]]
    build: Callable[[Rows], list[Any]]


class TypeRegistry:
    """The types a job sends and stores, by name. Names come from the job's code; data may only refer to them."""

    def __init__(self) -> None:
        self._by_name: dict[str, Shape] = {}
        self._by_type: dict[type, Shape] = {}

    def register(self, name: str, type_: type) -> None:
        """Give a dataclass, msgspec Struct, NamedTuple, Enum or pydantic model its name in this job's data.

        Repeating a registration is harmless. Raises :class:`ConfigurationError` for another kind of class, and when the name or the type
        is taken. Attributes that are no fields are not kept; a Struct's ``__post_init__`` runs again on decoding.
        """
        if not name or len(name.encode()) > 255:
            raise ConfigurationError(f"the name of a type must have 1 to 255 bytes, not {name!r}")
        known, other = self._by_name.get(name), self._by_type.get(type_)
        if known is not None and known.type is not type_:
            raise ConfigurationError(
                f"the type name {name!r} is taken by {known.type.__qualname__}; choose another for {type_.__qualname__}"
            )
        if other is not None and other.name != name:
            raise ConfigurationError(f"{type_.__qualname__} is already registered as {other.name!r}; a type has one name")
        self._by_name[name] = self._by_type[type_] = _shape(name, type_)

    def name_of(self, type_: type) -> str:
        """The name of a registered type. Raises :class:`UnknownFormat`."""
        return self.shape_of(type_).name

    def type_of(self, name: str) -> type:
        """The type registered under a name. Raises :class:`UnknownFormat`."""
        return self.named(name).type

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def shape_of(self, type_: type) -> Shape:
        shape = self._by_type.get(type_)
        if shape is None:
            raise UnknownFormat(
                f"values of type {type_.__module__}.{type_.__qualname__} cannot be encoded: register the type with the job under a name "
                "(a dataclass, msgspec Struct, NamedTuple, Enum or pydantic model can be)"
            )
        return shape

    def named(self, name: object, fields: Sequence[object] | None = None) -> Shape:
        shape = self._by_name.get(name) if isinstance(name, str) else None
        if shape is None:
            raise UnknownFormat(f"the data names the type {name!r}, which is not registered with this job; register it under that name")
        if fields is not None and tuple(fields) != shape.fields:
            raise UnknownFormat(
                f"the type {name!r} was written with the fields {list(fields)} and now has {list(shape.fields)}: use the class it was written with"
            )
        return shape


def _shape(name: str, type_: Any) -> Shape:
    if not isinstance(type_, type):
        raise ConfigurationError(f"{type_!r} is not a class and cannot be registered as {name!r}")
    if issubclass(type_, enum.Enum):
        if issubclass(type_, enum.Flag):
            return Shape(name, type_, ("value",), lambda v: (v._value_,), lambda rows: [type_(value) for (value,) in rows])
        return Shape(name, type_, ("name",), lambda v: (v._name_,), lambda rows: [type_[member] for (member,) in rows])
    if issubclass(type_, tuple) and hasattr(type_, "_fields"):
        return Shape(name, type_, tuple(type_._fields), tuple, lambda rows: [tuple.__new__(type_, row) for row in rows])
    if issubclass(type_, msgspec.Struct):
        fields = type_.__struct_fields__
        named = any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(type_).parameters.values())
        build = (lambda rows: [type_(**dict(zip(fields, row))) for row in rows]) if named else (lambda rows: list(starmap(type_, rows)))
        return Shape(name, type_, fields, _getter(fields), build)
    if dataclasses.is_dataclass(type_):
        return _dataclass_shape(name, type_)
    if hasattr(type_, "__pydantic_validator__") and hasattr(type_, "model_fields"):
        return _pydantic_shape(name, type_)
    raise ConfigurationError(
        f"{type_.__qualname__} cannot be registered as {name!r}: make it a dataclass, msgspec Struct, NamedTuple, Enum or pydantic model"
    )


def _getter(fields: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(fields) > 1:
        return attrgetter(*fields)
    return lambda value: tuple(getattr(value, field) for field in fields)


def _dataclass_shape(name: str, type_: Any) -> Shape:
    """Fields are set directly: ``__init__`` and ``__post_init__`` ran when the value was made and must not run twice."""
    if type_.__new__ is not object.__new__:
        raise ConfigurationError(
            f"{type_.__qualname__} cannot be registered as {name!r}: a dataclass with its own __new__ cannot be restored"
        )
    fields = tuple(field.name for field in dataclasses.fields(type_))
    slotted = any(isinstance(inspect.getattr_static(type_, field, None), types.MemberDescriptorType) for field in fields)

    def build_slotted(rows: Rows) -> list[Any]:
        built = []
        for row in rows:
            value: Any = object.__new__(type_)
            for field, item in zip(fields, row):
                object.__setattr__(value, field, item)
            built.append(value)
        return built

    def build_plain(rows: Rows) -> list[Any]:
        built = []
        for row in rows:
            value: Any = object.__new__(type_)
            value.__dict__.update(zip(fields, row))
            built.append(value)
        return built

    return Shape(name, type_, fields, _getter(fields), build_slotted if slotted else build_plain)


def _pydantic_shape(name: str, type_: Any) -> Shape:
    """Through pydantic's own state protocol: validation ran when the value was made, and would change types."""
    fields = tuple(type_.model_fields)

    def take(value: Any) -> tuple[Any, ...]:
        state = value.__getstate__()
        held = state["__dict__"]
        marks = sorted(state["__pydantic_fields_set__"])
        return (*[held[field] for field in fields], marks, state["__pydantic_extra__"], state["__pydantic_private__"])

    def build(rows: Rows) -> list[Any]:
        built = []
        for row in rows:
            marks, extra, private = row[-3:]
            value = type_.__new__(type_)
            value.__setstate__(
                {
                    "__dict__": dict(zip(fields, row)),
                    "__pydantic_fields_set__": set(marks),
                    "__pydantic_extra__": extra,
                    "__pydantic_private__": private,
                }
            )
            built.append(value)
        return built

    return Shape(name, type_, (*fields, "<set>", "<extra>", "<private>"), take, build)


# --- scalars that become simpler values -----------------------------------------------------------------------------------------------

_MICROSECOND: Final = dt.timedelta(microseconds=1)
_YEAR_ONE: Final = dt.datetime(1, 1, 1)


def _zone(value: dt.datetime | dt.time) -> Any:
    """None, the offset in µs, (offset in µs, name), or the key of a zone. Foreign tzinfo classes are kept by their offset."""
    zone = value.tzinfo
    if zone is None:
        return None
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key is not None:
        return zone.key
    offset = value.utcoffset()
    if offset is None:
        raise CodecError(f"{value!r} has a time zone without an offset; use zoneinfo.ZoneInfo or datetime.timezone")
    micros = offset // _MICROSECOND
    if type(zone) is dt.timezone and zone.tzname(None) != dt.timezone(offset).tzname(None):
        return (micros, zone.tzname(None))
    return micros


def _unzone(zone: Any) -> dt.tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        return zoneinfo.ZoneInfo(zone)
    if isinstance(zone, tuple):
        return dt.timezone(zone[0] * _MICROSECOND, zone[1])
    return dt.timezone(zone * _MICROSECOND)


def _from_datetime(value: dt.datetime) -> tuple[Any, ...]:
    zone = _zone(value)
    known = zone is None or isinstance(zone, str) or type(value.tzinfo) is dt.timezone
    return (value.replace(tzinfo=None, fold=0) - _YEAR_ONE) // _MICROSECOND, value.fold if known else 0, zone


def _to_datetime(plain: tuple[Any, ...]) -> dt.datetime:
    wall, fold, zone = plain
    moment: dt.datetime = _YEAR_ONE + wall * _MICROSECOND
    return moment.replace(tzinfo=_unzone(zone), fold=fold)


def _from_time(value: dt.time) -> tuple[Any, ...]:
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return seconds * 1_000_000 + value.microsecond, value.fold, _zone(value)


def _to_time(plain: tuple[Any, ...]) -> dt.time:
    wall, fold, zone = plain
    if not 0 <= wall < 86_400_000_000:
        raise CodecError(f"{wall} µs is no time of a day")
    moment: dt.datetime = _YEAR_ONE + wall * _MICROSECOND
    return moment.time().replace(tzinfo=_unzone(zone), fold=fold)


class _Scalar(NamedTuple):
    tag: str
    simpler: Callable[[Any], Any]
    restore: Callable[[Any], Any]


_SCALARS: Final[dict[type, _Scalar]] = {
    Decimal: _Scalar("D", str, Decimal),
    dt.datetime: _Scalar("m", _from_datetime, _to_datetime),
    dt.date: _Scalar("d", dt.date.toordinal, dt.date.fromordinal),
    dt.time: _Scalar("c", _from_time, _to_time),
    dt.timedelta: _Scalar("e", lambda value: value // _MICROSECOND, lambda micros: micros * _MICROSECOND),
    uuid.UUID: _Scalar("u", attrgetter("bytes"), lambda data: uuid.UUID(bytes=data)),
}
_SCALAR_BY_TAG: Final = {scalar.tag: scalar for scalar in _SCALARS.values()}
_CONTAINERS: Final[dict[type, str]] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_CONTAINER_BY_TAG: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {"l": list, "t": tuple, "s": set, "z": frozenset}


# --- the tagged walker ----------------------------------------------------------------------------------------------------------------


class _Walker:
    """One column as tagged items. ``types`` lists the registered types met, each once: ``[name, *fields]``."""

    def __init__(self, registry: TypeRegistry, *, text: bool) -> None:
        self.registry = registry
        self.text = text
        self.types: list[list[str]] = []
        self.indexes: dict[type, int] = {}

    def tag(self, value: Any, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise CodecError(f"a value is nested more than {_MAX_DEPTH} levels deep, or contains itself; make it flatter")
        kind = type(value)
        if kind in _ATOMS:
            return self._tag_atom(kind, value)
        if kind is dict:
            return ["k", *[self.tag(item, depth + 1) for item in chain.from_iterable(value.items())]]
        container = _CONTAINERS.get(kind)
        if container is not None:
            return [container, *[self.tag(item, depth + 1) for item in value]]
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return [scalar.tag, self.tag(scalar.simpler(value), depth + 1)]
        shape = self.registry.shape_of(kind)
        index = self.indexes.get(kind)
        if index is None:
            index = self.indexes[kind] = len(self.types)
            self.types.append([shape.name, *shape.fields])
        return ["r", index, *[self.tag(item, depth + 1) for item in shape.take(value)]]

    def _tag_atom(self, kind: type, value: Any) -> Any:
        if kind is int:
            return value if -(2**63) <= value < 2**64 else ["i", hex(value)]
        if kind is str:
            try:
                value.encode()
            except UnicodeEncodeError:
                return ["x", self._tag_atom(bytes, value.encode("utf-8", "surrogatepass"))]
            return value
        if self.text and kind is bytes:
            return ["y", base64.b64encode(value).decode()]
        if self.text and kind is float and not math.isfinite(value):
            return ["f", repr(value)]
        return value

    def untag(self, node: Any) -> Any:
        if type(node) is not list:
            if type(node) not in _ATOMS:
                raise CodecError(f"a value is neither an atom nor tagged: {type(node).__name__}")
            return node
        tag, parts = node[0], node[1:]
        container = _CONTAINER_BY_TAG.get(tag)
        if container is not None:
            return container([self.untag(part) for part in parts])
        if tag == "k":
            items = [self.untag(part) for part in parts]
            return dict(zip(items[::2], items[1::2], strict=True))
        if tag == "r":
            name, *fields = self.types[_index(parts[0], self.types)]
            shape = self.registry.named(name, fields)
            row = [self.untag(part) for part in parts[1:]]
            if len(row) != len(fields):
                raise CodecError(f"a value of type {name!r} has {len(row)} of {len(fields)} fields")
            return shape.build([row])[0]
        (part,) = parts
        if tag in _SCALAR_BY_TAG:
            return _SCALAR_BY_TAG[tag].restore(self.untag(part))
        return self._untag_atom(tag, part)

    def _untag_atom(self, tag: Any, part: Any) -> Any:
        if tag == "i":
            return int(part, 16)
        if tag == "x":
            return self.untag(part).decode("utf-8", "surrogatepass")
        if tag == "y":
            return base64.b64decode(part, validate=True)
        if tag == "f":
            return float(part)
        raise CodecError(f"unknown tag {tag!r}")


def _index(index: Any, table: Sequence[Any]) -> int:
    if type(index) is not int or not 0 <= index < len(table):
        raise CodecError(f"a value refers to type {index!r} of {len(table)}")
    return index


# --- columns --------------------------------------------------------------------------------------------------------------------------


def _join(tag: bytes, children: Iterable[bytes]) -> bytes:
    """Tag, number of children, and each child behind its length. The number shows a cut between two children."""
    parts: list[bytes] = []
    count = 0
    for child in children:
        parts += (struct.pack("<Q", len(child)), child)
        count += 1
    return b"".join((tag, struct.pack("<I", count), *parts))


def _split(body: memoryview) -> list[memoryview]:
    (count,) = struct.unpack_from("<I", body, 1)
    children: list[memoryview] = []
    start = 5
    while start < len(body):
        (size,) = struct.unpack_from("<Q", body, start)
        start += 8
        if size > len(body) - start:
            raise CodecError("a column is shorter than it says")
        children.append(body[start : start + size])
        start += size
    if len(children) != count:
        raise CodecError(f"a column has {len(children)} of {count} parts")
    return children


def _pack(values: list[Any], registry: TypeRegistry, depth: int) -> bytes:
    first = type(values[0]) if values else _NONE
    types_met = list(map(type, values))
    # Counting one type is twice as fast as building the set, and nearly every column has one type.
    kinds = {first} if types_met.count(first) == len(values) else set(types_met)
    if kinds <= _ATOMS:
        try:
            tag = _TYPED_TAGS.get(first, b"a") if len(kinds) == 1 else b"a"
            return tag + _encode_msgpack(values)
        except (OverflowError, UnicodeEncodeError):  # more than 64 bits, or a lone surrogate
            return _pack_tagged(values, registry)
    if depth < _MAX_COLUMN_DEPTH:
        if len(kinds) == 1:
            return _pack_uniform(kinds.pop(), values, registry, depth + 1)
        if len(kinds) == 2 and _NONE in kinds:
            present = [value for value in values if value is not None]
            mask = _encode_msgpack([value is not None for value in values])
            return _join(b"o", [b"a" + mask, _pack(present, registry, depth + 1)])
    return _pack_tagged(values, registry)


def _pack_uniform(kind: type, values: list[Any], registry: TypeRegistry, depth: int) -> bytes:
    if kind is tuple:
        width = len(values[0])
        if width and list(map(len, values)).count(width) == len(values):
            return _join(b"T", _pack_rows(values, width, registry, depth))
    if kind is dict:
        return _pack_dicts(values, registry, depth)
    container = _CONTAINERS.get(kind)
    if container is not None:
        flat = list(chain.from_iterable(values))
        return _join(container.encode(), [b"a" + _encode_msgpack(list(map(len, values))), _pack(flat, registry, depth)])
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        return scalar.tag.encode() + _pack(list(map(scalar.simpler, values)), registry, depth)
    shape = registry.shape_of(kind)
    if not shape.fields:
        return _pack_tagged(values, registry)
    head = b"a" + _encode_msgpack([shape.name, *shape.fields])
    return _join(b"R", [head, *_pack_rows(list(map(shape.take, values)), len(shape.fields), registry, depth)])


def _pack_rows(rows: list[Any], width: int, registry: TypeRegistry, depth: int) -> list[bytes]:
    return [_pack(list(map(itemgetter(index), rows)), registry, depth) for index in range(width)]


def _pack_dicts(values: list[dict[Any, Any]], registry: TypeRegistry, depth: int) -> bytes:
    keys = tuple(values[0])
    # Types first: a StrEnum key is equal to a str key and must not come back as one.
    uniform = keys and set(map(type, chain.from_iterable(values))) == {str} and all(tuple(value) == keys for value in values)
    if uniform:
        columns = [_pack(list(map(itemgetter(key), values)), registry, depth) for key in keys]
        return _join(b"K", [_pack(list(keys), registry, depth), *columns])
    lengths = b"a" + _encode_msgpack(list(map(len, values)))
    flat_keys = list(chain.from_iterable(values))
    flat_values = list(chain.from_iterable(value.values() for value in values))
    return _join(b"M", [lengths, _pack(flat_keys, registry, depth), _pack(flat_values, registry, depth)])


def _pack_tagged(values: list[Any], registry: TypeRegistry) -> bytes:
    walker = _Walker(registry, text=False)
    items = [walker.tag(value) for value in values]
    return b"W" + _encode_msgpack([walker.types, items])


def _unpack(body: memoryview, registry: TypeRegistry) -> list[Any]:
    tag = chr(body[0])
    typed = _TYPED_DECODERS.get(tag)
    if typed is not None:
        return typed(body[1:])
    if tag == "a":
        values: list[Any] = _decode_msgpack(body[1:])
        if type(values) is not list or not set(map(type, values)) <= _ATOMS:
            raise CodecError("a column of atoms holds something else")
        return values
    if tag == "T":
        return list(_rows(_split(body), registry))
    if tag == "R":
        head, *columns = _split(body)
        name, *fields = _unpack(head, registry)
        shape = registry.named(name, fields)
        return shape.build(_rows(columns, registry, len(fields)))
    if tag == "W":
        return _untag_all(_decode_msgpack(body[1:]), registry, text=False)
    if tag in _SCALAR_BY_TAG:
        return list(map(_SCALAR_BY_TAG[tag].restore, _unpack(body[1:], registry)))
    return _unpack_grouped(tag, body, registry)


def _unpack_grouped(tag: str, body: memoryview, registry: TypeRegistry) -> list[Any]:
    if tag == "K":
        head, *columns = _split(body)
        keys = _unpack(head, registry)
        return [dict(zip(keys, row)) for row in _rows(columns, registry, len(keys))]
    if tag == "o":
        mask, present = (_unpack(child, registry) for child in _split(body))
        if mask.count(True) != len(present):
            raise CodecError("an optional column has another number of values than its mask says")
        rest = iter(present)
        return [next(rest) if there is True else None for there in mask]
    if tag == "M":
        lengths, keys, items = (_unpack(child, registry) for child in _split(body))
        pairs = list(zip(keys, items, strict=True))
        return [dict(group) for group in _groups(lengths, pairs)]
    container = _CONTAINER_BY_TAG.get(tag)
    if container is None:
        raise CodecError(f"unknown column tag {tag!r}")
    lengths, items = (_unpack(child, registry) for child in _split(body))
    return [container(group) for group in _groups(lengths, items)]


def _rows(columns: list[memoryview], registry: TypeRegistry, width: int | None = None) -> Iterable[tuple[Any, ...]]:
    if not columns or (width is not None and width != len(columns)):
        raise CodecError(f"{len(columns)} columns where {width} were announced")
    return zip(*[_unpack(column, registry) for column in columns], strict=True)


def _groups(lengths: list[Any], items: list[Any]) -> Iterable[list[Any]]:
    if any(type(length) is not int or length < 0 for length in lengths) or sum(lengths) != len(items):
        raise CodecError("the lengths of a column do not fit its items")
    rest = iter(items)
    return [list(islice(rest, length)) for length in lengths]


def _untag_all(document: Any, registry: TypeRegistry, *, text: bool) -> list[Any]:
    walker = _Walker(registry, text=text)
    walker.types, items = document
    return [walker.untag(item) for item in items]


def encode_column(values: list[Any], registry: TypeRegistry, *, format: Format = "msgpack") -> bytes:
    """Encode a list of values; their types come back exactly. ``json`` is the readable, slower form with the same guarantees.

    Raises :class:`UnknownFormat` for values of a class that is not registered, :class:`CodecError` for what cannot be encoded.
    """
    try:
        if format == "msgpack":
            return _MSGPACK + _pack(values, registry, 0)
        walker = _Walker(registry, text=True)
        items = [walker.tag(value) for value in values]
        return _JSON + msgspec.json.encode([walker.types, items])
    except CodecError:
        raise
    except Exception as error:  # a value's own attributes and methods may raise anything
        raise CodecError(f"values cannot be encoded: {type(error).__name__}: {error}") from error


def decode_column(data: bytes | memoryview, registry: TypeRegistry) -> list[Any]:
    """Decode what :func:`encode_column` wrote, whichever its format.

    Raises :class:`UnknownFormat` for another version or a type that is not registered, :class:`CodecError` for malformed bytes.
    """
    body = memoryview(data)
    if len(body) < 3:
        raise CodecError(f"a column of {len(body)} bytes is cut short")
    head = bytes(body[:2])
    if head not in (_MSGPACK, _JSON):
        raise UnknownFormat(f"columns of version {head[0]} and format {head[1:]!r} are not known here; this build reads version {VERSION}")
    try:
        if head == _MSGPACK:
            return _unpack(body[2:], registry)
        return _untag_all(msgspec.json.decode(body[2:]), registry, text=True)
    except CodecError:
        raise
    except Exception as error:  # bytes from outside reach constructors of many types; whatever they raise, the bytes are at fault
        raise CodecError(f"malformed column: {type(error).__name__}: {error}") from error
