"""Which keys are one key, where they live, and that no process disagrees."""

from __future__ import annotations

import datetime as dt
import enum
import os
import subprocess
import sys
import zoneinfo
from collections import namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from millstream_schema.canonical import canonical, canonical_json, fingerprint, owner_of, shard_of, shards_of, stable_hash
from millstream_schema.errors import CodecError, ConfigurationError, KeyRefused


class Colour(enum.Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796 - an alias, on purpose
    BLUE = 2


class Shade(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    A = "a"


class Mixed(str, enum.Enum):  # noqa: UP042 - the older way to write it, whose str() is not its value
    A = "a"

    def __str__(self) -> str:
        return "something else"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True)
class Place:
    x: int
    y: Any
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class Other:
    x: int
    y: Any


@dataclass
class Open:
    x: int


class Loud(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


Pair = namedtuple("Pair", "a b")
UTC = dt.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=UTC)

atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=False),
    st.decimals(allow_nan=False, places=2, min_value=-3, max_value=3),
    st.decimals(allow_nan=False).filter(lambda d: d.is_infinite() or d.adjusted() < 10_000),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([*Colour, *Shade, *Level, *Word, Access.READ, Access.READ | Access.WRITE]),
    st.datetimes(timezones=st.sampled_from([UTC, dt.timezone(dt.timedelta(hours=2))])),
)
keys = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Place, inner, inner),
        st.builds(Other, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    "equal",
    [
        [1, True, 1.0, Decimal("1.00"), Decimal("100E-2"), Level.LOW],
        [0, False, 0.0, -0.0, Decimal("-0.00"), Decimal("0E+9999999")],
        [0.5, Decimal("0.5"), Decimal("0.500")],
        [10**30, Decimal("1e30"), Decimal(10**30)],
        [float(2**70), 2**70],
        [float("inf"), Decimal("Infinity")],
        [float("-inf"), Decimal("-Infinity")],
        [NOON, NOON.astimezone(BERLIN), NOON.astimezone(dt.timezone(dt.timedelta(hours=-7)))],
        ["a", Word.A, Mixed.A],
        [(1, "b"), Pair(1, "b"), (True, "b"), Pair(Decimal("1.0"), "b")],
        [Place(1, 2), Place(1.0, Decimal(2), note="not compared")],  # type: ignore[arg-type]
        [Colour.RED, Colour.CRIMSON],
        [Access.READ | Access.WRITE, Access(3)],
        [dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold) for fold in (0, 1)],
    ],
)
def test_keys_equal_in_python_are_one_key(equal: list[Any]) -> None:
    """All of a row are equal, hash alike and have one canonical form and one stable hash."""
    assert all(a == b and hash(a) == hash(b) for a in equal for b in equal)
    assert len({canonical(key) for key in equal}) == 1
    assert len({stable_hash(key) for key in equal}) == 1


def test_t83_different_keys_have_different_identities() -> None:
    """1, "1", b"1", ("a", 1), enums, None and their like are all told apart (D25)."""
    different: list[Any] = [1, "1", b"1", None, "None", ("a", 1), ("a", "1"), ("a",), (("a",), 1), "", b"", (), 0, 0.1, Decimal("0.1")]
    different += [-1, 1.5, -1.5, float("inf"), float("-inf"), Colour.RED, Colour.BLUE, Shade.RED, Access.READ, Place(1, 2), Other(1, 2)]
    different += [(1, 2), NOON, NOON + dt.timedelta(microseconds=1), int((NOON - dt.datetime(1970, 1, 1, tzinfo=UTC)).total_seconds())]
    assert len({canonical(key) for key in different}) == len(different)


PROBE = """
import enum, datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from millstream_schema.canonical import stable_hash, shard_of
class Colour(enum.Enum):
    RED = 1
@dataclass(frozen=True)
class Place:
    x: int
    y: str
keys = [1, 1.0, True, "1", b"1", ("a", 1), Colour.RED, None, Place(1, "y"), Decimal("0.1"), 0.1, 2**80]
keys += [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)]
print(hash("1"), *[f"{stable_hash(k)}:{shard_of(k, 128)}" for k in keys], sep="\\n")
"""


def test_t83_d24_three_processes_agree_on_the_shard_of_every_key() -> None:
    """Processes with different PYTHONHASHSEED compute the same hash and shard for the same key."""
    outputs = []
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True, timeout=60)
        outputs.append(run.stdout.split())
    assert len({output[0] for output in outputs}) == 3, "the seeds must matter, or the test shows nothing"
    assert outputs[0][1:] == outputs[1][1:] == outputs[2][1:]
    assert len(outputs[0]) == 14


def test_t83_the_encoding_is_pinned() -> None:
    """Stored state depends on these bytes: a change moves keys away from their state."""
    assert canonical("ab") == b"sab"
    assert canonical(None) == b"n"
    assert canonical(b"\0") == b"y\0"
    assert canonical(-129) == b"i\x7f\xff"
    assert canonical(0.5) == b"q+" + (-1).to_bytes(8, "little", signed=True) + b"\x05"
    assert canonical(("a",)) == b"t" + (2).to_bytes(8, "little") + b"sa"
    assert stable_hash("ab") == xxhash.xxh3_64_intdigest(b"sab")


@given(keys, keys)
def test_canonical_is_equal_exactly_when_keys_are(a: Any, b: Any) -> None:
    """a == b if and only if canonical(a) == canonical(b); equal ones hash alike."""
    assert (canonical(a) == canonical(b)) == (a == b)


@given(st.integers(-50, 50), st.integers(0, 4))
def test_numbers_of_all_types_meet(n: int, places: int) -> None:
    """The same value as float, Decimal and (if whole) int is one key."""
    number = Decimal(n) / (2**places)
    forms: list[Any] = [number, float(number), number + Decimal("0.00000000")]
    if number == int(number):
        forms.append(int(number))
    assert len({canonical(form) for form in forms}) == 1


@given(keys)
def test_fast_paths_agree_with_canonical_and_d4_are_never_negative(key: Any) -> None:
    """stable_hash is XXH3 of canonical for every key, unsigned, so no shard is negative (D4)."""
    assert stable_hash(key) == xxhash.xxh3_64_intdigest(canonical(key))
    assert 0 <= stable_hash(key) < 2**64
    assert 0 <= shard_of(key, 128) < 128


@pytest.mark.parametrize("key", ["\ud800", "", "ü", 0, -1, -128, 128, 2**63, -(2**63), pytest.param(10**5000, id="5001 digits")])
def test_fast_paths_agree_at_the_edges(key: Any) -> None:
    """Lone surrogates and large or negative integers hash the same on both paths."""
    assert stable_hash(key) == xxhash.xxh3_64_intdigest(canonical(key))


def test_g4_rc10_no_content_looks_like_a_border() -> None:
    """Composite keys whose parts contain delimiters or encoded bytes of other keys never meet."""
    parts = ["a", "a#b", "b", "#", "", ":", "_", "|", "a\0", "sa"]
    different: list[Any] = [(x, y) for x in parts for y in parts]
    different += [(x,) for x in parts] + [(x, y, "") for x in parts for y in parts]
    different += [((x, y),) for x in parts for y in parts] + [canonical(("a", "b")), (canonical(("a", "b")),)]
    different += [Place(1, x) for x in parts] + [("Place", 1, x) for x in parts]
    assert len({canonical(key) for key in different}) == len(different)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (float("nan"), "NaN"),
        (Decimal("NaN"), "NaN"),
        (Decimal("sNaN"), "NaN"),
        (("a", float("nan")), "NaN"),
        (dt.datetime(2024, 1, 1), "naive"),
        (dt.date(2024, 1, 1), "datetime.date"),
        (Fraction(1, 2), "fractions.Fraction"),
        (1 + 0j, "complex"),
        ([1], "builtins.list"),
        ({"a": 1}, "builtins.dict"),
        (frozenset({1}), "frozenset"),
        ((1, [2]), "builtins.list"),
        (object(), "builtins.object"),
        (Open(1), "frozen=True"),
        (Loud("x"), "equality"),
        (Decimal("1e999999999"), "digits"),
    ],
)
def test_what_cannot_be_a_key_is_refused_with_its_reason(key: Any, reason: str) -> None:
    """NaN, naive datetimes and every other type raise KeyRefused, on both entries, naming the reason."""
    for function in (canonical, stable_hash):
        with pytest.raises(KeyRefused, match=reason):
            function(key)


def test_a_key_nested_without_end_is_refused() -> None:
    """Depth beyond the interpreter's is KeyRefused, not RecursionError."""
    key: Any = ()
    for _ in range(100_000):
        key = (key,)
    with pytest.raises(KeyRefused, match="nested"):
        canonical(key)
    while key:  # taken apart in steps: freeing it at once recurses in C
        (key,) = key


@given(st.integers(1, 300), st.data())
def test_owners_and_their_shards_are_one_partition(shard_count: int, data: st.DataObject) -> None:
    """shards_of is the exact inverse of owner_of, covers every shard once, and is balanced to one."""
    parallelism = data.draw(st.integers(1, shard_count))
    ranges = [shards_of(owner, parallelism, shard_count) for owner in range(parallelism)]
    assert [shard for held in ranges for shard in held] == list(range(shard_count))
    assert all(owner_of(shard, parallelism, shard_count) == owner for owner, held in enumerate(ranges) for shard in held)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: shard_of("a", 0),
        lambda: shard_of("a", -1),
        lambda: owner_of(0, 0, 128),
        lambda: owner_of(0, 129, 128),
        lambda: owner_of(128, 2, 128),
        lambda: owner_of(-1, 2, 128),
        lambda: shards_of(2, 2, 128),
        lambda: shards_of(-1, 2, 128),
    ],
)
def test_counts_that_do_not_fit_are_refused(call: Any) -> None:
    """Zero, negative and out-of-range counts raise ConfigurationError."""
    with pytest.raises(ConfigurationError):
        call()


def test_canonical_json_depends_on_content_alone() -> None:
    """Order of keys and tuple or list make no difference; text stays UTF-8; types stay apart."""
    assert canonical_json({"b": (1, 2.0), "a": "ü"}) == canonical_json({"a": "ü", "b": [1, 2.0]}) == '{"a":"ü","b":[1,2.0]}'.encode()
    assert fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
    apart: list[Any] = [1, "1", True, None, [], {}, 1.0]
    assert len({fingerprint(value) for value in apart}) == 7
    assert len(fingerprint(None)) == 32


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, {1: "a"}, [{None: 1}], b"x", {"a": object()}, "\ud800"])
def test_canonical_json_refuses_what_is_no_json(value: Any) -> None:
    """NaN, keys that are no text, and foreign types raise CodecError."""
    with pytest.raises(CodecError):
        canonical_json(value)
