"""Process functions: timers, keyed state, TTL, side outputs, operator lists, and their restores."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operators.driving import Driver, restored, spec

from millstream_schema.errors import CodecError, ConfigurationError, KeyRefused, OperatorError
from millstream_tasks.operators.base import MAX_WATERMARK
from millstream_tasks.operators.keyed_state import (
    AggregatingState,
    ListState,
    MapState,
    OperatorListState,
    ReducingState,
    StateSpec,
    ValueState,
)
from millstream_tasks.operators.process import Context, Process, ProcessFunction

States = dict[str, StateSpec | OperatorListState]
Process_ = Callable[[Any, Context], None]
OnTimer = Callable[[int, Context], None]


class Scripted(ProcessFunction):
    """A process function of the callables it is given."""

    def __init__(self, process: Process_, on_timer: OnTimer | None, states: States) -> None:
        self.states = states  # type: ignore[misc]
        self._process = process
        self._on_timer = on_timer

    def process(self, value: Any, ctx: Context) -> None:
        self._process(value, ctx)

    def on_timer(self, timestamp: int, ctx: Context) -> None:
        if self._on_timer is None:
            ctx.emit((ctx.key, timestamp))
        else:
            self._on_timer(timestamp, ctx)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def driver(process: Process_, on_timer: OnTimer | None = None, clock: Clock | None = None, **states: Any) -> Driver:
    def make() -> Process:
        operator = Process(spec("process"), itemgetter(0), Scripted(process, on_timer, states))
        operator.now_ms = clock
        return operator

    return Driver(make)


def set_timer(value: Any, ctx: Context) -> None:
    """(key, how, moment): the call of ctx.timers of that name."""
    getattr(ctx.timers, value[1])(value[2])


def test_timers_fire_by_moment_over_all_keys_when_the_watermark_is_there() -> None:
    """Whatever the order of setting; a record's result carries the timer's moment."""
    d = driver(set_timer)
    d.send([("a", "event", 30), ("b", "event", 10), ("a", "event", 20), ("c", "event", 20)])
    assert d.watermark(19) == [("b", 10)]
    assert d.watermark(30) == [("a", 20), ("c", 20), ("a", 30)]
    assert d.out[0] == (("b", 10), 10)
    assert d.content()["timers.event"] == 0


def test_g7_deleting_a_timer_touches_only_its_key_and_moment() -> None:
    """Other keys and other moments stay; deleting what is not there is nothing (G7)."""
    d = driver(set_timer)
    d.send([(k, "event", t) for k in "ab" for t in (5, 10)])
    d.send([("a", "delete_event", 5), ("a", "delete_event", 99), ("c", "delete_event", 5)])
    assert d.watermark(20) == [("b", 5), ("a", 10), ("b", 10)]


def test_g7_a_moment_set_again_fires_once_each_time() -> None:
    """Twice before it fires is one timer; after a deletion or a firing it is a new one (G7)."""
    d = driver(set_timer)
    d.send([("a", "event", 5), ("a", "event", 5), ("a", "delete_event", 5), ("a", "event", 5)])
    assert d.watermark(5) == [("a", 5)]
    d.send([("a", "event", 5)])
    assert d.watermark(5) == [("a", 5)]
    assert d.watermark(6) == []


def test_g7_deletion_and_setting_inside_a_callback_are_honoured() -> None:
    """A callback deletes a timer that is due and sets one that is due: the same advance knows both (G7)."""

    def on_timer(timestamp: int, ctx: Context) -> None:
        ctx.emit((ctx.key, timestamp))
        if timestamp == 5:
            ctx.timers.delete_event(10)
            ctx.timers.event(7)
            ctx.timers.event(99)

    d = driver(set_timer, on_timer)
    d.send([("a", "event", 5), ("a", "event", 10), ("b", "event", 8)])
    assert d.watermark(20) == [("a", 5), ("a", 7), ("b", 8)]
    assert d.watermark(99) == [("a", 99)]


def test_a_timer_set_below_the_watermark_fires_at_the_next_advance() -> None:
    """Not lost, not fired in the middle of process."""
    d = driver(set_timer)
    d.watermark(50)
    assert d.send([("a", "event", 10)]) == []
    assert d.watermark(51) == [("a", 10)]


def test_t73_t75_timers_survive_a_restore_and_what_fell_due_meanwhile_fires_once() -> None:
    """Both domains, by incremental snapshots, deleted ones stay deleted (T-73, T-75, invariant 9)."""
    d = driver(set_timer, clock=Clock())
    d.send([("a", "event", 10), ("a", "processing", 100), ("b", "processing", 90), ("c", "event", 1)])
    d.snapshot(full=True)
    d.watermark(5)
    d.send([("b", "delete_processing", 90), ("b", "processing", 200)])
    d.snapshot(full=False)
    d.restore()
    assert d.operator.next_time() == 100
    assert d.time(500) == [("a", 100), ("b", 200)]
    assert d.time(500) == []
    assert d.watermark(10) == [("a", 10)]
    assert d.watermark(MAX_WATERMARK) == []


def test_t72_the_end_of_the_input_fires_all_timers_and_a_heartbeat_does_not_go_on_for_ever() -> None:
    """Event timers with those they set, then the processing timers that are set; the ones these set wait for the clock (T-72)."""

    def on_timer(timestamp: int, ctx: Context) -> None:
        ctx.emit((ctx.key, ctx.time_domain, timestamp))
        if ctx.time_domain == "processing":
            ctx.timers.processing(timestamp + 100)
        elif timestamp == 10:
            ctx.timers.event(10**15)

    d = driver(set_timer, on_timer)
    d.send([("a", "event", 10), ("b", "processing", 100)])
    assert d.watermark(MAX_WATERMARK) == [("a", "event", 10), ("a", "event", 10**15), ("b", "processing", 100)]
    assert d.watermark(MAX_WATERMARK) == []
    assert d.time(199) == []
    assert d.operator.next_time() == 200
    assert d.operator.meta()["watermark"] < 0  # type: ignore[operator]


def test_an_event_timer_set_by_a_processing_timer_after_the_end_of_the_input_fires() -> None:
    """No watermark will come to fire it (RB9)."""

    def on_timer(timestamp: int, ctx: Context) -> None:
        ctx.emit((ctx.time_domain, timestamp))
        if ctx.time_domain == "processing":
            ctx.timers.event(timestamp + 1)
            if timestamp == 100:
                ctx.timers.processing(200)

    d = driver(set_timer, on_timer)
    d.send([("b", "processing", 100)])
    assert d.watermark(MAX_WATERMARK) == [("processing", 100), ("event", 101)]
    assert d.time(200) == [("processing", 200), ("event", 201)]


def test_event_timers_set_without_end_after_the_end_of_the_input_are_an_error_not_a_hang() -> None:
    """The message says what to do."""
    d = driver(set_timer, lambda timestamp, ctx: ctx.timers.event(timestamp + 1))
    d.send([("a", "event", 1)])
    with pytest.raises(OperatorError, match="MAX_WATERMARK"):
        d.watermark(MAX_WATERMARK)


def every_state(value: Any, ctx: Context) -> None:
    """Work on all kinds of state with (key, n) and send what they hold."""
    n = value[1]
    v, items, m = ctx.value("v"), ctx.list("l"), ctx.map("m")
    v.set([*v.get(), n])
    items.append({"n": n})
    m.put(n % 2, m.get(n % 2, 0) + n)
    r = ctx.reducing("r", max)
    r.add(n)
    a = ctx.aggregating("a", lambda: [0, 0], _count, lambda acc: acc[0] / acc[1])
    a.add(n)
    ctx.emit((ctx.key, v.get(), items.get(), m.items(), r.get(), a.get()))


def _count(acc: list[int], n: int) -> list[int]:
    acc[0] += n
    acc[1] += 1
    return acc


ALL: dict[str, Any] = {
    "v": ValueState(default=[]),
    "l": ListState(),
    "m": MapState(),
    "r": ReducingState(),
    "a": AggregatingState(),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=25),
    st.lists(st.sampled_from(["", "full", "delta", "delta+restore", "full+restore"]), min_size=25, max_size=25),
)
def test_g8_all_kinds_of_state_are_the_same_whatever_was_restored_in_between(records: list[tuple[str, int]], plan: list[str]) -> None:
    """Every change is in the next snapshot, none is shared between keys (G1, G5, G8)."""
    d = driver(every_state, **ALL)
    seen: dict[str, list[int]] = {}
    expected = []
    for record, step in zip(records, plan, strict=False):
        d.send([record])
        mine = seen.setdefault(record[0], [])
        mine.append(record[1])
        halves: dict[int, int] = {}
        for n in mine:
            halves[n % 2] = halves.get(n % 2, 0) + n
        expected.append((record[0], list(mine), [{"n": n} for n in mine], list(halves.items()), max(mine), sum(mine) / len(mine)))
        if step:
            d.snapshot(full=step.startswith("full"))
        if step.endswith("restore"):
            d.restore()
    assert [v for v, _ in d.out] == expected


def test_g8_a_value_changed_in_place_after_it_was_read_is_in_the_next_snapshot() -> None:
    """Reading what can be changed counts as changing it (G8)."""

    def process(value: Any, ctx: Context) -> None:
        if value[1] == "set":
            ctx.value("v").set({"n": 0})
            ctx.list("l").set([[0]])
            ctx.map("m").put("x", [0])
        else:
            ctx.value("v").get()["n"] += 1
            ctx.list("l").get()[0].append(1)
            ctx.map("m").get("x").append(1)
        ctx.emit((ctx.value("v").get()["n"], ctx.list("l").get(), ctx.map("m").items()))

    d = driver(process, v=ValueState(), l=ListState(), m=MapState())
    d.send([("a", "set")])
    d.snapshot(full=True)
    d.send([("a", "change")])
    d.snapshot(full=False)
    d.restore()
    assert d.send([("a", "change")]) == [(2, [[0, 1, 1]], [("x", [0, 1, 1])])]


def test_g1_a_mutable_default_is_shared_by_no_two_keys() -> None:
    """What one key does to its default, no other key sees, and it is kept only by set (G1)."""

    def process(value: Any, ctx: Context) -> None:
        held = ctx.value("v").get()
        held.append(value[0])
        ctx.emit(held)

    d = driver(process, v=ValueState(default=[]))
    assert d.send([("a", 1), ("b", 1), ("a", 1)]) == [["a"], ["b"], ["a"]]


def test_state_that_is_cleared_or_emptied_is_gone_from_the_tables() -> None:
    """Nothing is left of a key that keeps nothing (G3)."""

    def process(value: Any, ctx: Context) -> None:
        if value[1] == "clear":
            ctx.value("v").clear()
            ctx.list("l").clear()
            ctx.map("m").remove("x")
            ctx.map("m").remove("never")
            ctx.reducing("r", max).clear()
            ctx.aggregating("a", list, _count).clear()
            assert "x" not in ctx.map("m") and len(ctx.map("m")) == 0
        else:
            ctx.value("v").set(1)
            ctx.list("l").extend([1, 2])
            ctx.map("m").put("x", 1)
            ctx.reducing("r", max).add(1)
            ctx.aggregating("a", lambda: [0, 0], _count).add(1)

    d = driver(process, **ALL)
    d.send([("a", "fill")])
    assert sum(d.content().values()) == 5
    d.snapshot(full=True)
    d.send([("a", "clear")])
    assert sum(d.content().values()) == 0
    d.snapshot(full=False)
    d.restore()
    assert sum(d.content().values()) == 0


def test_g8_expired_state_is_gone_when_read_and_swept_without_being_read() -> None:
    """By processing time after the last write, across a restore, not only at snapshots (G8)."""
    clock = Clock()

    def process(value: Any, ctx: Context) -> None:
        held = ctx.value("v")
        ctx.emit((ctx.key, held.get()))
        if value[1] is not None:
            held.set(value[1])

    d = driver(process, clock=clock, v=ValueState(default=0, ttl_ms=100))
    d.send([("a", 1), ("b", 1)])
    clock.now = 60
    d.send([("a", 2)])
    d.snapshot(full=True)
    d.restore()
    assert d.operator.next_time() == 100
    d.time(100)
    assert d.content()["state.v"] == 1
    assert d.operator.next_time() == 160
    clock.now = 159
    assert d.send([("a", None), ("b", None)]) == [("a", 2), ("b", 0)]
    clock.now = 160
    assert d.send([("a", None)]) == [("a", 0)]
    assert d.content()["state.v"] == 0
    d.time(160)
    assert d.operator.next_time() is None


def test_g8_a_renewed_value_is_swept_when_its_new_time_is_over() -> None:
    """Not at its first, and without being read (G8)."""
    clock = Clock()
    d = driver(lambda value, ctx: ctx.value("v").set(1), clock=clock, v=ValueState(ttl_ms=100))
    for clock.now in (0, 60):
        d.send([("a", 1)])
    for now, kept in ((100, 1), (159, 1), (160, 0)):
        d.time(now)
        assert d.content()["state.v"] == kept


def test_side_outputs_and_timestamps_stay_side_by_side() -> None:
    """Each record keeps its timestamp unless another is given; tags are apart."""

    def process(value: Any, ctx: Context) -> None:
        ctx.side("odd" if value[1] % 2 else "even", value[1])
        ctx.emit(ctx.timestamp, None if value[1] < 3 else 77)

    d = driver(process)
    d.send([("a", n) for n in range(4)], [10, 11, 12, 13])
    assert d.out == [(10, 10), (11, 11), (12, 12), (13, 77)]
    assert d.sides == {"even": [(0, 10), (2, 12)], "odd": [(1, 11), (3, 13)]}
    d.send([("a", 1)])
    assert (d.out[-1], d.sides["odd"][-1]) == ((None, None), (1, None))


def test_a_record_of_a_processing_timer_among_records_with_event_time_is_late_nowhere() -> None:
    """It has no event time of its own and gets the watermark."""

    def on_timer(timestamp: int, ctx: Context) -> None:
        ctx.emit(ctx.timestamp)
        ctx.emit("own", 99)

    d = driver(set_timer, on_timer)
    d.watermark(42)
    d.send([("a", "processing", 7)], [50])
    d.time(7)
    assert d.out == [(None, 42), ("own", 99)]


@pytest.mark.parametrize(
    ("redistribution", "parallelism", "expected"),
    [
        ("split", 3, [[1, 4], [2, 5], [3]]),
        ("split", 1, [[1, 2, 3, 4, 5]]),
        ("union", 2, [[1, 2, 3, 4, 5]] * 2),
        ("broadcast", 3, [[1, 2, 3]] * 3),
    ],
)
def test_t84_operator_lists_are_redistributed_as_declared(redistribution: str, parallelism: int, expected: list[list[int]]) -> None:
    """Split loses and doubles nothing, union gives all to all, broadcast the first's to all (T-84)."""

    class Listing(ProcessFunction):
        states = {"l": OperatorListState(redistribution)}  # noqa: RUF012

        def open(self, ctx: Context) -> None:
            self.held = ctx.operator_list("l", redistribution)

        def process(self, value: Any, ctx: Context) -> None:
            self.held.append(value[1])

    def make() -> Process:
        return Process(spec("process"), itemgetter(0), Listing())

    old = [Driver(make), Driver(make)]
    for d, numbers in zip(old, ([1, 2, 3], [4, 5]), strict=True):
        d.send([("a", n) for n in numbers])
        d.snapshot(full=True)
    new = restored(old, make, parallelism)
    assert [operator.meta()["lists"]["l"] for operator in new] == expected  # type: ignore[index, call-overload]


def test_operator_lists_hold_copies_of_json_values() -> None:
    """What is put in or taken out may be changed without changing the state; what JSON cannot hold is refused (G5)."""

    def process(value: Any, ctx: Context) -> None:
        held = ctx.operator_list("l")
        held.append(value[1])
        value[1].append("after")
        held.get()[0].append("got")  # type: ignore[union-attr]
        ctx.emit(held.get())

    d = driver(process, l=OperatorListState("split"))
    assert d.send([("a", [1, (2,)])]) == [[[1, [2]]]]
    with pytest.raises(CodecError):
        d.send([("a", [object()])])


def test_open_comes_once_before_anything_else_and_has_no_key() -> None:
    """After a restore too; keyed state and timers are refused there; close is passed on."""
    calls: list[str] = []

    class Opening(ProcessFunction):
        states = {"v": ValueState()}  # noqa: RUF012

        def open(self, ctx: Context) -> None:
            calls.append("open")
            for touch in (ctx.value("v").get, lambda: ctx.value("v").set(1), ctx.value("v").clear, lambda: ctx.timers.event(1)):
                with pytest.raises(OperatorError, match="belongs to a key"):
                    touch()

        def process(self, value: Any, ctx: Context) -> None:
            calls.append(value[0])

        def close(self) -> None:
            calls.append("close")

    operator = Process(spec("process"), itemgetter(0), Opening())
    operator.restore_meta([], 0, 1)
    d = Driver(lambda: operator)
    d.watermark(5)
    d.send([("a", 1)])
    operator.close()
    assert calls == ["open", "a", "close"]


def test_what_is_not_declared_so_or_makes_no_sense_is_refused_by_name() -> None:
    """Undeclared state, another kind, a wrong timer, a wrong name, a wrong TTL, no clock, no key."""
    wrong: list[Process_] = [
        lambda value, ctx: ctx.value("x").set(1),
        lambda value, ctx: ctx.list("v").append(1),
        lambda value, ctx: ctx.operator_list("v").append(1),
        lambda value, ctx: ctx.operator_list("l", "union").append(1),
        lambda value, ctx: ctx.timers.event(1.5),  # type: ignore[arg-type]
        lambda value, ctx: ctx.timers.processing(MAX_WATERMARK + 1),
    ]
    for process in wrong:
        with pytest.raises(OperatorError):
            driver(process, v=ValueState(), l=OperatorListState("split")).send([("a", 1)])
    with pytest.raises(ConfigurationError, match="now_ms"):
        driver(lambda value, ctx: ctx.emit(ctx.processing_time())).send([("a", 1)])
    with pytest.raises(ConfigurationError, match="must match"):
        driver(set_timer, None, None, **{"a.b": ValueState()})
    with pytest.raises(ConfigurationError):
        ListState(ttl_ms=0)
    with pytest.raises(ConfigurationError):
        OperatorListState("some")
    for key in (float("nan"), [1]):
        with pytest.raises(KeyRefused):
            driver(set_timer).send([(key, "event", 1)])


class CountByTimer(ProcessFunction):
    """Tumbling counts of 10 ms made by hand of state and timers."""

    states = {"counts": MapState()}  # noqa: RUF012

    def process(self, value: Any, ctx: Context) -> None:
        assert ctx.timestamp is not None
        start = ctx.timestamp - ctx.timestamp % 10
        counts = ctx.map("counts")
        counts.put(start, counts.get(start, 0) + 1)
        ctx.timers.event(start + 9)

    def on_timer(self, timestamp: int, ctx: Context) -> None:
        counts = ctx.map("counts")
        ctx.emit((ctx.key, timestamp, counts.get(timestamp - 9)))
        counts.remove(timestamp - 9)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 7), st.integers(-40, 40)), max_size=30))
def test_t82_timers_and_state_give_the_same_counts_whatever_the_batches_and_restores(
    data: st.DataObject, records: list[tuple[str, int, int]]
) -> None:
    """In any order within the bound, any batches, snapshots and restores: each window's count once (T-73, T-82)."""
    d = Driver(lambda: Process(spec("process"), itemgetter(0), CountByTimer()))
    arrival = sorted(records, key=lambda r: r[1] + r[2])
    highest, batch = -(10**6), []
    for record in arrival:
        batch.append(record)
        highest = max(highest, record[2])
        if data.draw(st.booleans()):
            d.send(batch, [t for _, _, t in batch])
            batch = []
            d.watermark(highest - 8)
            step = data.draw(st.sampled_from(["", "", "full", "delta"]))
            if step:
                d.snapshot(full=step == "full")
                d.restore()
    if batch:
        d.send(batch, [t for _, _, t in batch])
    d.watermark(MAX_WATERMARK)
    expected: dict[tuple[str, int], int] = {}
    for key, _, t in records:
        end = t - t % 10 + 9
        expected[key, end] = expected.get((key, end), 0) + 1
    assert sorted(v for v, _ in d.out) == sorted((*at, n) for at, n in expected.items())
    assert sum(d.content().values()) == 0
