"""Columns come back with their exact types, whatever they hold; malformed bytes are CodecError and nothing else."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import math
import struct
import uuid
import zoneinfo
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_schema.errors import CodecError, ConfigurationError, UnknownFormat
from millstream_schema.values import Format, TypeRegistry, decode_column, encode_column

FORMATS: tuple[Format, ...] = ("msgpack", "json")
UTC = dt.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Counted:
    n: int
    doubled: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.n += 1
        self.doubled = self.n * 2


@dataclasses.dataclass
class Empty:
    pass


class Record(msgspec.Struct):
    a: Any
    b: Any


class Keyword(msgspec.Struct, kw_only=True):
    a: Any
    b: int = 0


class Named(NamedTuple):
    a: Any
    b: Any


class Single(NamedTuple):
    a: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = object()


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    A = "a"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Model(pydantic.BaseModel):
    a: int
    b: Any = None
    _secret: int = pydantic.PrivateAttr(default=0)


TYPES = (Point, Slotted, Counted, Empty, Record, Keyword, Named, Single, Colour, Level, Word, Access, Model)


@pytest.fixture(scope="module")
def registry() -> TypeRegistry:
    return make_registry()


def make_registry() -> TypeRegistry:
    registry = TypeRegistry()
    for type_ in TYPES:
        registry.register(type_.__name__, type_)
    return registry


def form(value: Any) -> Any:
    """A value as nested tuples in which the exact types show, so that 1, True and 1.0 differ and NaN is itself."""
    kind = type(value)
    if kind is float:
        return (kind, "nan" if math.isnan(value) else struct.pack(">d", value))
    if kind is Decimal:
        return (kind, str(value))
    if kind in (dt.datetime, dt.time):
        zone = value.tzinfo
        return (kind, value.replace(tzinfo=None).isoformat(), value.fold, type(zone), str(zone), value.utcoffset())
    if kind in (set, frozenset):
        return (kind, sorted(map(repr, map(form, value))))
    if kind is dict:
        return (kind, [(form(key), form(item)) for key, item in value.items()])
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    if isinstance(value, (list, tuple)):
        return (kind, [form(item) for item in value])
    if isinstance(value, pydantic.BaseModel):
        return (kind, form(value.__dict__), sorted(value.model_fields_set), form(value.__pydantic_private__))
    if dataclasses.is_dataclass(value):
        return (kind, [form(getattr(value, field.name)) for field in dataclasses.fields(value)])
    if isinstance(value, msgspec.Struct):
        return (kind, [form(getattr(value, field)) for field in value.__struct_fields__])
    return (kind, value)


def check(values: list[Any], registry: TypeRegistry) -> None:
    for codec in FORMATS:
        assert form(decode_column(encode_column(values, registry, format=codec), registry)) == form(values), codec


zones = st.sampled_from(
    [None, UTC, BERLIN, zoneinfo.ZoneInfo("UTC"), dt.timezone(dt.timedelta(hours=-7, seconds=1)), dt.timezone(dt.timedelta(hours=1), "XYZ")]
)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(max_size=5),
    st.text(st.characters(categories=["Cs", "Ll"]), max_size=3),
    st.binary(max_size=5),
    st.decimals(allow_nan=True),
    st.datetimes(timezones=zones, allow_imaginary=True),
    st.dates(),
    st.times(timezones=zones),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([*Colour, *Level, *Word, Access.READ, Access.READ | Access.WRITE, Access(0)]),
)


def hashable(value: Any) -> bool:
    try:
        hash(value)
    except (TypeError, ValueError):  # a signalling NaN cannot be hashed either
        return False
    return True


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    element = inner.filter(hashable)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(element, inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", Word.A]), inner, max_size=2),
        st.frozensets(element, max_size=3),
        st.sets(element, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Slotted, inner, inner),
        st.builds(Empty),
        st.builds(Record, inner, inner),
        st.builds(Keyword, a=inner, b=st.integers(0, 5)),
        st.builds(Named, inner, inner),
        st.builds(Single, inner),
        st.builds(lambda value: Model(a=1, b=value), inner),
    )


anything = st.recursive(atoms, containers, max_leaves=8)


@st.composite
def columns(draw: st.DrawFn) -> list[Any]:
    """Uniform columns (the fast paths) as often as mixed ones."""
    one_type = draw(st.sampled_from([anything, atoms, *[containers(atoms) for _ in range(2)]]))
    return draw(st.one_of(st.lists(one_type, max_size=5), st.lists(st.tuples(atoms, st.integers()), max_size=5)))


REGISTRY = make_registry()


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # hypothesis describing its own strategy
@settings(max_examples=400, deadline=None)
@given(columns())
def test_every_column_comes_back_exactly(values: list[Any]) -> None:
    """Decoding gives what was encoded, types included, in both formats."""
    check(values, REGISTRY)


SAMPLES: dict[str, list[Any]] = {
    "empty": [],
    "null only (D5)": [None, None],
    "null among others (D5)": [None, "a", None, 3],
    "null among tuples (D5)": [("a", 1), None, ("b", None)],
    "int, bool, float": [1, True, 1.0, 0, False, -0.0],
    "bools": [True, False],
    "ints to the edge": [2**63, -(2**63), 2**64 - 1],
    "ints beyond": [2**53 + 1, 2**64, -(2**63) - 1, 10**5000],
    "big int in a tuple": [("a", 2**70), ("b", 1)],
    "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e16, 1.0],
    "lone surrogate": ["\ud800", "ok"],
    "decimals": [Decimal("1.00"), Decimal("1E+3"), Decimal("-0"), Decimal("NaN"), Decimal("sNaN12"), Decimal("-Infinity")],
    "datetimes": [dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold) for fold in (0, 1)] + [dt.datetime.min, dt.datetime.max],
    "timedeltas": [dt.timedelta.max, dt.timedelta.min, dt.timedelta(0)],
    "tuples of none": [(), ()],
    "tuples of different lengths": [(), (1,), (1, 2)],
    "tuple against list": [(1, [2, (3,)]), (1, [2, (3,)])],
    "dicts of one form": [{"b": 1, "a": (1,)}, {"b": 2, "a": (2,)}],
    "dicts of one set of keys in two orders": [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    "dicts whose keys only look alike": [{"a": 1}, {Word.A: 1}],
    "dicts without keys": [{}, {}],
    "dicts of other keys": [{1: "a", (1, 2): None}, {True: 2.0}],
    "sets": [{1, 2}, set(), {"a"}],
    "frozensets": [frozenset({(1, "a")}), frozenset()],
    "enums": [Colour.RED, Colour.BLUE],
    "flags": [Access.READ | Access.WRITE, Access(0)],
    "post init does not run again": [Counted(1), Counted(2)],
    "without fields": [Empty(), Empty()],
    "nested registered": [Point(Record(1, Named(2, Colour.RED)), [Slotted((1,), {Level.LOW})])] * 2,
    "mixed registered": [Point(1, 2), Record(1.0, True), "a", None, (Point(3, Point(4, 5)),)],
    "uuids": [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)],
    "deep": [[[[[[[[[(1, (2, (3, [{"a": ()}])))]]]]]]]]],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_t08_d5_d25_known_traps_come_back_exactly(name: str, registry: TypeRegistry) -> None:
    """None, ints > 2^53 and > 64 bits, bytes, Decimal, zones, nested dataclasses, NaN: nothing is lost and no type drifts."""
    check(SAMPLES[name], registry)


def test_d25_pydantic_models_keep_unvalidated_values_unset_fields_and_private_state(registry: TypeRegistry) -> None:
    """A model comes back as it was, without a second validation."""
    model = Model(a=1)
    model._secret = 7
    model.__dict__["a"] = "not an int"
    check([model, Model(a=2, b=(1,))], registry)
    (back,) = decode_column(encode_column([model], registry), registry)
    assert back._secret == 7
    assert back.model_fields_set == {"a"}


def test_foreign_time_zones_are_kept_by_their_offset(registry: TypeRegistry) -> None:
    """A tzinfo class that is neither ZoneInfo nor timezone becomes its offset: the instant stays."""

    class Foreign(dt.tzinfo):
        def utcoffset(self, when: dt.datetime | None) -> dt.timedelta:
            return dt.timedelta(hours=3)

        def dst(self, when: dt.datetime | None) -> None:
            return None

        def tzname(self, when: dt.datetime | None) -> str:
            return "FOREIGN"

    moment = dt.datetime(2024, 1, 1, tzinfo=Foreign())
    (back,) = decode_column(encode_column([moment], registry), registry)
    assert back == moment
    assert back.tzinfo == dt.timezone(dt.timedelta(hours=3))


def test_the_result_shares_nothing_with_the_input(registry: TypeRegistry) -> None:
    """A decoded column is a copy: changing it does not reach the original."""
    original = [[1], [2]]
    decode_column(encode_column(original, registry), registry)[0].append(9)
    assert original == [[1], [2]]


class Unregistered(NamedTuple):
    a: int


class Text(str):
    pass


@pytest.mark.parametrize("codec", FORMATS)
@pytest.mark.parametrize(
    "value", [Unregistered(1), Text("a"), collections.OrderedDict(a=1), collections.Counter("a"), 1j, object(), bytearray(b"a"), range(3)]
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: (v, 1), lambda v: Point(v, 1)])
def test_a_class_that_is_not_registered_is_refused_by_name(codec: Format, value: Any, wrap: Any, registry: TypeRegistry) -> None:
    """The error names the class and says to register it; subclasses of built-in types do not pass as their base."""
    with pytest.raises(UnknownFormat, match=rf"{type(value).__qualname__}.*register the type with the job"):
        encode_column([wrap(value)], registry, format=codec)


@pytest.mark.parametrize("codec", FORMATS)
@pytest.mark.parametrize("values", [[Point(1, 2)], [Point(1, 2), 3]])
def test_data_that_names_an_unknown_type_imports_nothing(codec: Format, values: list[Any], registry: TypeRegistry) -> None:
    """Decoding without the registration is UnknownFormat with the name, even if the name is an importable path."""
    writer = TypeRegistry()
    writer.register("os.path.Point", Point)
    with pytest.raises(UnknownFormat, match=r"os\.path\.Point"):
        decode_column(encode_column(values, writer, format=codec), registry)


@pytest.mark.parametrize("codec", FORMATS)
@pytest.mark.parametrize("values", [[Point(1, 2)], [Point(1, 2), 3]])
def test_a_type_whose_fields_changed_is_refused(codec: Format, values: list[Any]) -> None:
    """Fields are never matched by position with those of another version of the class."""
    writer, reader = TypeRegistry(), TypeRegistry()
    writer.register("p", Point)
    reader.register("p", Record)
    with pytest.raises(UnknownFormat, match=r"'x', 'y'.*'a', 'b'"):
        decode_column(encode_column(values, writer, format=codec), reader)


@pytest.mark.parametrize("codec", FORMATS)
def test_endless_values_are_refused(codec: Format, registry: TypeRegistry) -> None:
    """A list that contains itself and a far too deep one are CodecError."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CodecError, match="contains itself"):
        encode_column([endless], registry, format=codec)


def test_registry_refuses_what_would_be_ambiguous() -> None:
    """A name has one type, a type one name; a repeat is harmless; plain classes cannot be registered."""
    registry = TypeRegistry()
    registry.register("p", Point)
    registry.register("p", Point)
    assert registry.name_of(Point) == "p"
    assert registry.type_of("p") is Point
    assert "p" in registry
    assert "q" not in registry
    for name, type_ in (("p", Record), ("q", Point), ("o", object), ("", Record), ("x" * 300, Record), ("i", int)):
        with pytest.raises(ConfigurationError):
            registry.register(name, type_)
    with pytest.raises(UnknownFormat):
        registry.name_of(Record)
    with pytest.raises(UnknownFormat):
        registry.type_of("nothing")


@pytest.mark.parametrize("head", [b"\x02M", b"\x00J", b"\x01X", b"{}"])
def test_unknown_versions_and_formats_are_named(head: bytes, registry: TypeRegistry) -> None:
    """Another version or format is UnknownFormat, not a guess."""
    with pytest.raises(UnknownFormat, match="version"):
        decode_column(head + b"\x90\x90", registry)


ENCODED = [encode_column(values, REGISTRY, format=codec) for values in SAMPLES.values() for codec in FORMATS]


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(ENCODED), st.data())
def test_altered_bytes_raise_codec_error_or_decode(data: bytes, draws: st.DataObject) -> None:
    """Flipped, cut and inserted bytes never raise anything but CodecError."""
    altered = bytearray(data)
    for _ in range(draws.draw(st.integers(1, 3))):
        at = draws.draw(st.integers(2, len(altered)))
        altered[at : at + draws.draw(st.integers(0, 2))] = draws.draw(st.binary(max_size=2))
    try:
        values = decode_column(bytes(altered), REGISTRY)
    except CodecError:
        return
    assert type(values) is list


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([b"", b"\x01M", b"\x01J", b"\x01MT", b"\x01MW", b"\x01Ma", b"\x01MR", b"\x01MK", b"\x01Ml", b"\x01Mo"]), st.binary())
def test_random_bytes_raise_codec_error_or_decode(head: bytes, tail: bytes) -> None:
    """Noise behind any valid beginning never raises anything but CodecError."""
    try:
        values = decode_column(head + tail, REGISTRY)
    except CodecError:
        return
    assert type(values) is list


@pytest.mark.parametrize("sample", range(len(ENCODED)))
def test_every_truncation_is_refused(sample: int) -> None:
    """No proper beginning of a column decodes to something."""
    data = ENCODED[sample]
    for size in [*range(min(len(data), 60)), len(data) - 1]:
        with pytest.raises(CodecError):
            decode_column(data[:size], REGISTRY)


def test_endless_nesting_in_data_is_refused() -> None:
    """Hostile depth is CodecError, not RecursionError."""
    for data in (b"\x01M" + b"D" * 100_000, b"\x01J" + b"[" * 100_000, b"\x01MW" + b"\x91" * 100_000):
        with pytest.raises(CodecError):
            decode_column(data, REGISTRY)
