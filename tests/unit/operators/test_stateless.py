"""Event times and keys that are none are refused at their first record, by name."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operators.driving import Driver, spec

from millstream_schema.errors import KeyRefused, OperatorError
from millstream_tasks.operators.base import MIN_WATERMARK, TIME_LIMIT, Operator, check_times, highest_time
from millstream_tasks.operators.process import Context, Process, ProcessFunction
from millstream_tasks.operators.rolling import Aggregate, Reduce
from millstream_tasks.operators.stateless import AssignTimestamps

NO_TIMES: list[Any] = [None, True, 1.0, float("nan"), float("inf"), "1", Decimal(1), [1], TIME_LIMIT + 1, -TIME_LIMIT - 1, 10**30]


def assigner() -> AssignTimestamps:
    return AssignTimestamps(spec("assign_timestamps"), lambda record: record)


@pytest.mark.parametrize("bad", NO_TIMES)
def test_an_event_time_that_is_none_is_refused_and_raises_no_watermark(bad: Any) -> None:
    """Alone or among good ones: OperatorError with the operator and the value, before the watermark moves."""
    far = 1_700_000_000_000
    for times in ([bad], [1, 2, bad], [bad, 3], [0, bad, 0], [far, bad, far], [far] * 9 + [bad], [TIME_LIMIT, bad]):
        operator = assigner()
        with pytest.raises(OperatorError, match=r"operator 'op'.*event time") as caught:
            Driver(lambda operator=operator: operator).send(times)  # type: ignore[misc]
        assert repr(bad) in str(caught.value)
        assert operator.watermark() == MIN_WATERMARK


@given(st.lists(st.integers(-TIME_LIMIT, TIME_LIMIT)))
def test_every_int_within_the_limit_is_an_event_time(times: list[int]) -> None:
    """The limits too; records keep the times they were given."""
    d = Driver(assigner)
    d.send(list(times))
    assert d.out == list(zip(times, times))


@given(st.lists(st.integers(-(1 << 61), 1 << 61) | st.integers(-2, 2) | st.booleans() | st.floats() | st.none(), min_size=1))
def test_the_quick_look_at_times_sees_what_the_thorough_one_sees(times: list[Any]) -> None:
    """The sum stands for the times only where it proves them."""
    fine = all(type(t) is int and -TIME_LIMIT <= t <= TIME_LIMIT for t in times)
    if fine:
        assert highest_time(times, "it") == max(times)
    else:
        with pytest.raises(OperatorError, match="it gave the event time"):
            highest_time(times, "it")


def test_no_times_are_fine() -> None:
    """An empty batch has nothing wrong with it."""
    check_times([], "nobody")


@pytest.mark.parametrize("bad", [bad for bad in NO_TIMES if bad is not None])
def test_a_time_that_a_process_function_gives_is_held_to_the_same(bad: Any) -> None:
    """``emit`` refuses it."""

    class Emits(ProcessFunction):
        def process(self, value: Any, ctx: Context) -> None:
            ctx.emit(value, bad)

    with pytest.raises(OperatorError, match=r"operator 'op'.*event time"):
        Driver(lambda: Process(spec("process"), lambda value: 1, Emits())).send([1], [1])


ROLLING: list[Callable[[], Operator]] = [
    lambda: Reduce(spec("reduce"), lambda record: record, lambda old, new: new),
    lambda: Aggregate(spec("aggregate"), lambda record: record, int, lambda acc, new: acc + 1, None),
]


@pytest.mark.parametrize("make", ROLLING)
@pytest.mark.parametrize("key", [["list"], {"a": 1}, ("a", ["list"]), float("nan"), object()])
def test_a_value_that_cannot_be_a_key_is_refused_hashable_or_not(make: Callable[[], Operator], key: Any) -> None:
    """KeyRefused that says what a key may be, as behind an exchange."""
    with pytest.raises(KeyRefused, match="cannot be a key"):
        Driver(make).send([key])


def test_a_type_error_of_the_users_function_stays_what_it_is() -> None:
    """It is not taken for a key that cannot be hashed."""
    d = Driver(lambda: Reduce(spec("reduce"), lambda record: "k", lambda old, new: old + new))
    with pytest.raises(TypeError, match="unsupported operand"):
        d.send([1, "x"])
