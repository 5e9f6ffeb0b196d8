"""From a call to what is stored: arguments come back as they were, one digest for the same request, every bad option is named."""

from __future__ import annotations

import datetime as dt
import enum
import math
import uuid
import zoneinfo
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_schema.durable.records import Policy
from millstream_schema.durable.requests import (
    LARGEST_ARGUMENTS,
    LONGEST_DELAY_S,
    HandlerSpec,
    Options,
    decode_arguments,
    decode_result,
    digest,
    encode_arguments,
    encode_result,
    new_task,
)
from millstream_schema.durable.states import Effects
from millstream_schema.errors import TaskInvalid

SPEC = HandlerSpec(name="shop.send_invoice")
UTC = dt.UTC


def request(spec: HandlerSpec = SPEC, *, namespace: str = "default", key: str = "k", permit: str = "", **options: Any) -> Any:
    return new_task(
        spec, namespace, "task-1", key, encode_arguments((), {}), Options(**options), permit=permit, actor="me", origin="direct"
    )


def same(a: Any, b: Any) -> bool:
    """Equal, of one type, all the way down; NaN is NaN, -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, Decimal):
        return bool(a.as_tuple() == b.as_tuple())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(x, y) for x, y in zip(a.items(), b.items()))
    if isinstance(a, set | frozenset):
        return bool(a == b) and sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, dt.datetime | dt.time):
        return bool(a == b) and a.tzinfo == b.tzinfo and a.fold == b.fold
    return bool(a == b)


# -- exactness


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**400, -(10**400), 0.0, -0.0, 0.1, 1e308, 5e-324, math.inf, -math.inf, math.nan,
    1.0, Decimal("1.10"), Decimal("0E-40"), Decimal("NaN"), Decimal("-0"), Decimal(10) ** 60 / 3, "", "é", "e\u0301", "𝄞", "\x00", "\ud800", "'; DROP",
    b"", b"\x00\xff", (), [], {}, set(), frozenset(), (1, [2, (3,)]), {"a": (1,), 2: "b", (1, 2): None, None: b"x"}, {1, "1", 1.5}, frozenset({(1, 2)}),
    dt.datetime(2026, 3, 1, 12, 30, 1, 999999, UTC), dt.datetime(2026, 3, 1), dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime.max, dt.date(2026, 1, 1), dt.time(23, 59, 59, 1), dt.timedelta(days=-1, microseconds=1),
    uuid.UUID(int=7), ["l", "k", "D"], [["i", "0x1"]],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    """As a positional and a keyword argument, and as a result; its text fits any database."""
    text = encode_arguments((value, 1), {"name": value})
    args, kwargs = decode_arguments(text)
    assert same(args, [value, 1]) and same(kwargs, {"name": value})
    assert same(decode_result(encode_result(value)), value)
    assert "\x00" not in text and text.encode().decode() == text


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**60), 10**60), st.floats(), st.text(st.characters(exclude_categories=())), st.binary(), st.decimals(),
    st.datetimes(timezones=st.none() | st.just(UTC)), st.dates(), st.timedeltas(), st.uuids(),
)  # fmt: skip
HASHABLE = st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
NESTED = st.recursive(
    ATOMS,
    lambda c: (
        st.lists(c, max_size=4)
        | st.lists(c, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, c, max_size=4)
        | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)


@given(st.lists(NESTED, max_size=3), st.dictionaries(st.text(max_size=5), NESTED, max_size=3))
def test_any_nesting_of_plain_values_comes_back_as_it_was(args: list[Any], kwargs: dict[str, Any]) -> None:
    """And encoding what came back gives the same request."""
    text = encode_arguments(tuple(args), kwargs)
    found, named = decode_arguments(text)
    assert same(found, args) and same(named, kwargs)
    assert digest("h", encode_arguments(tuple(found), named), Options()) == digest("h", text, Options())


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("value", [object(), print, Colour.RED, iter(()), range(3), type("Sub", (int,), {})(3)])
def test_what_cannot_be_stored_is_refused_before_anything_is(value: Any) -> None:
    """By name of its type, as an argument and as a result."""
    with pytest.raises(TaskInvalid, match="arguments cannot be stored"):
        encode_arguments((value,), {})
    with pytest.raises(TaskInvalid, match="result cannot be stored"):
        encode_result([value])


def test_a_value_that_contains_itself_is_refused() -> None:
    """And not followed for ever."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TaskInvalid, match="contains itself"):
        encode_arguments((value,), {})


def test_the_limit_is_exact_and_counts_bytes() -> None:
    """As many are taken as the message says, and no more."""
    spare = LARGEST_ARGUMENTS - len(encode_arguments(("",), {}))
    assert len(encode_arguments(("x" * spare,), {})) == LARGEST_ARGUMENTS
    with pytest.raises(TaskInvalid, match=f"{LARGEST_ARGUMENTS} are allowed"):
        encode_arguments(("x" * (spare + 1),), {})
    with pytest.raises(TaskInvalid, match="allowed"):
        encode_arguments(("é" * (spare // 2 + 1),), {})
    with pytest.raises(TaskInvalid, match="result takes"):
        encode_result("x" * LARGEST_ARGUMENTS)


def test_a_task_without_a_result_has_none() -> None:
    """One that has not ended, and one whose handler returned nothing."""
    assert decode_result("") is None
    assert decode_result(encode_result(None)) is None


# -- the digest


def of(*args: Any, options: Options | None = None, handler: str = "h", **kwargs: Any) -> str:
    return digest(handler, encode_arguments(args, kwargs), options or Options())


def test_the_digest_names_its_rule() -> None:
    """Keys are kept for long: a later rule must not take an old digest for its own."""
    assert of().startswith("1:")


def test_a_default_that_is_written_out_changes_nothing() -> None:
    """Only what is given, and differs from giving nothing, is in it."""
    assert of(options=Options(priority=0, delay_s=0, queue="", due_at=None, start_by_s=0.0, permit="")) == of()


@pytest.mark.parametrize(
    "changed",
    [
        {"queue": "other"}, {"priority": 1}, {"delay_s": 1.0}, {"due_at": dt.datetime(2026, 1, 1, tzinfo=UTC)}, {"start_by_s": 1.0}, {"deadline_s": 1.0},
        {"business_key": "b"}, {"permit": "p"}, {"expires_at": dt.datetime(2026, 1, 1, tzinfo=UTC)},
    ],
)  # fmt: skip
def test_every_option_that_is_given_is_in_the_digest(changed: dict[str, Any]) -> None:
    """Another value is another request."""
    assert of(options=Options(**changed)) != of()


def test_the_parametrization_above_names_every_option() -> None:
    """So that a new one cannot be forgotten."""
    assert set(Options.__struct_fields__) == {
        "queue",
        "priority",
        "delay_s",
        "due_at",
        "start_by_s",
        "deadline_s",
        "business_key",
        "permit",
        "expires_at",
    }


def test_types_are_in_the_digest() -> None:
    """1, 1.0, True, "1" and Decimal(1) are five requests; so are a list and a tuple."""
    values = [1, 1.0, True, "1", Decimal(1), [1], (1,), b"1", Decimal("1.0"), None]
    assert len({of(v) for v in values}) == len(values)
    assert of("a", handler="h2") != of("a")


def test_the_order_of_sets_and_dicts_is_not_in_the_digest() -> None:
    """Equal arguments are one request, in whatever order a process happens to hold them: sets of text differ by it from process to process."""
    assert list({0, 8}) != list({8, 0}), "these two show it"
    assert of({0, 8}) == of({8, 0})
    assert of(frozenset([0, 8]), x=[{8, 0}]) == of(frozenset([8, 0]), x=[{0, 8}])
    assert of({"a": 1, "b": {8, 0}}) == of({"b": {0, 8}, "a": 1})
    assert of(a=1, b=2) == of(b=2, a=1)
    assert of([1, 2]) != of([2, 1])
    assert of({"a": 1, "b": 2}) != of({"a": 2, "b": 1})


def test_seconds_are_one_number_whether_written_whole_or_not() -> None:
    """delay=5 and delay=5.0 are one request."""
    for name in ("delay_s", "start_by_s", "deadline_s"):
        whole, written, other = ({name: v} for v in (5, 5.0, 5.5))
        assert given_as(whole) == given_as(written) != given_as(other)
        assert given_as({name: 0}) == of()


def given_as(options: dict[str, Any]) -> str:
    return of(options=Options(**options))


# -- options


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("namespace", {"namespace": ""}), ("namespace", {"namespace": "a/b"}), ("namespace", {"namespace": "a\n"}), ("namespace", {"namespace": "x" * 64}),
        ("queue", {"queue": "a/b"}), ("queue", {"queue": "é"}), ("queue", {"queue": " default"}),
        ("key", {"key": "x" * 201}), ("key", {"key": "a\x00"}), ("key", {"key": "\ud800"}), ("key", {"key": 7}),
        ("business_key", {"business_key": "x" * 201}), ("business_key", {"business_key": "\udfff"}), ("business_key", {"business_key": b"b"}),
        ("permit", {"permit": "x" * 201}), ("permit", {"permit": "a\x00b"}),
        ("priority", {"priority": 1001}), ("priority", {"priority": -1001}), ("priority", {"priority": 1.5}), ("priority", {"priority": "1"}),
        ("delay", {"delay_s": -1.0}), ("delay", {"delay_s": math.nan}), ("delay", {"delay_s": math.inf}), ("delay", {"delay_s": LONGEST_DELAY_S + 1}),
        ("delay", {"delay_s": "5"}), ("delay", {"delay_s": dt.timedelta(seconds=1)}),
        ("start_by", {"start_by_s": -0.1}), ("deadline", {"deadline_s": -5}), ("deadline", {"deadline_s": None}),
        ("due_at", {"due_at": dt.datetime(2026, 1, 1)}), ("due_at", {"due_at": dt.date(2026, 1, 1)}), ("due_at", {"due_at": 1_700_000_000}),
        ("due_at", {"due_at": dt.datetime(2026, 1, 1, tzinfo=UTC), "delay_s": 1.0}),
    ],
)  # fmt: skip
def test_a_bad_option_is_named(named: str, changes: dict[str, Any]) -> None:
    """Also one of a wrong type, in a sentence and not by an error of Python's."""
    with pytest.raises(TaskInvalid, match=rf"\b{named}\b"):
        request(**changes)


def test_all_bad_options_are_named_at_once() -> None:
    """One round of corrections is enough."""
    with pytest.raises(TaskInvalid) as caught:
        request(namespace="", queue="/", key="x" * 201, priority=5000, delay_s=-1.0, due_at=dt.datetime(2026, 1, 1))
    for name in ("namespace", "queue", "key", "priority", "delay", "due_at"):
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "é", "1a", "x" * 201, "a/b"])
def test_a_handler_name_that_no_table_could_hold_is_refused(name: str) -> None:
    """By its own name."""
    with pytest.raises(TaskInvalid, match="handler"):
        request(HandlerSpec(name=name))


def test_what_is_just_within_the_limits_is_taken() -> None:
    """Limits are the last allowed values."""
    new = request(
        namespace="x" * 63, key="𝄞" * 200, queue="q" * 63, priority=-1000, delay_s=float(LONGEST_DELAY_S), deadline_s=LONGEST_DELAY_S, business_key=" ",
        permit="p" * 200,
    )  # fmt: skip
    assert (new.key, new.priority, new.delay_us) == ("𝄞" * 200, -1000, LONGEST_DELAY_S * 10**6)


def test_what_is_not_given_comes_from_the_handler() -> None:
    """Queue, effects, policy, order; a permit in the options wins over the handler's."""
    policy = Policy(attempts=7)
    spec = HandlerSpec(name="h", queue="slow", effects=Effects.IDEMPOTENT, policy=policy, permit="p", ordered=True)
    new = request(spec, key="", permit="filled in")
    assert (new.queue, new.effects, new.policy, new.ordered, new.permit) == ("slow", Effects.IDEMPOTENT, policy, True, "filled in")
    assert new.key == new.id, "without a key a request is its own"
    options = Options(queue="fast", permit="mine")
    own = new_task(spec, "default", "t", "k", encode_arguments((), {}), options, permit="filled in", actor="", origin="")
    assert (own.queue, own.permit) == ("fast", "mine")


@given(st.datetimes(dt.datetime(1971, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_an_instant_keeps_its_microsecond(due: dt.datetime) -> None:
    """It is not taken through a float."""
    assert request(due_at=due).due_us == (due - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(microseconds=1)


def test_a_request_survives_its_way_to_a_worker_process() -> None:
    """What a handler submits crosses a pipe as msgpack."""
    new = request(priority=3, permit="p", delay_s=1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=type(new)) == new
