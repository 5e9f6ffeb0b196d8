"""Windows one trap at a time: borders, lateness, processing time, restores, ends of the input."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
from tests.unit.operators.driving import Driver, restored, spec

from millstream_schema.connectors import Json
from millstream_schema.errors import ConfigurationError, KeyRefused, OperatorError
from millstream_tasks.operators.base import MAX_WATERMARK, MIN_WATERMARK, TIME_LIMIT, Operator
from millstream_tasks.operators.session import SessionWindow
from millstream_tasks.operators.windows import SlidingWindow, TumblingWindow

SUM: dict[str, Any] = {"create": int, "add": lambda acc, r: acc + r[1], "merge": lambda a, b: a + b}


def tumbling(functions: dict[str, Any] | None = None, **config: Json) -> Driver:
    config = {"size": 10, **config}
    return Driver(lambda: TumblingWindow(spec("tumbling_window", **config), itemgetter(0), **(functions or SUM)))


def sliding(**config: Json) -> Driver:
    return Driver(lambda: SlidingWindow(spec("sliding_window", **config), itemgetter(0), **SUM))


def session(functions: dict[str, Any] | None = None, **config: Json) -> Driver:
    config = {"gap": 10, **config}
    return Driver(lambda: SessionWindow(spec("session_window", **config), itemgetter(0), **(functions or SUM)))


def test_t79_a_record_at_the_end_belongs_to_the_next_window_and_one_at_the_watermark_is_not_late() -> None:
    """Start inclusive, end exclusive; a watermark of w leaves records of w in time (T-79)."""
    d = tumbling()
    d.send([("a", 1), ("a", 2), ("a", 4)], [0, 9, 10])
    assert d.watermark(8) == []
    d.send([("a", 8)], [8])
    assert d.watermark(9) == [("a", 0, 10, 11)]
    assert d.watermark(19) == [("a", 10, 20, 4)]
    assert d.out == [(("a", 0, 10, 11), 9), (("a", 10, 20, 4), 19)]
    assert d.operator.late == 0


def test_t79_a_record_at_the_end_of_a_session_starts_another() -> None:
    """A session is [first, last + gap): a pause of a whole gap ends it, one ms less does not."""
    d = session()
    d.send([("a", 1), ("a", 2), ("a", 4)], [0, 9, 19])
    assert d.watermark(MAX_WATERMARK) == [("a", 0, 19, 3), ("a", 19, 29, 4)]


@pytest.mark.parametrize(
    ("t", "offset", "start"), [(-1, 0, -10), (-10, 0, -10), (-11, 0, -20), (2, 3, -7), (3, 3, 3), (-8, -3, -13), (0, 25, -5)]
)
def test_rc14_windows_of_negative_times_and_offsets_are_found_by_floor_modulo(t: int, offset: int, start: int) -> None:
    """The window that contains t, on either side of zero (RC14)."""
    d = tumbling(offset=offset)
    d.send([("a", 1)], [t])
    assert d.watermark(MAX_WATERMARK) == [("a", start, start + 10, 1)]


def test_t80_within_lateness_updates_beyond_goes_aside_and_state_is_freed_after() -> None:
    """A late record fires its (key, window) again at once; past the lateness it is counted and put aside; nothing is kept then (T-80)."""
    d = tumbling(lateness_ms=5, late_tag="late")
    d.send([("a", 1), ("b", 1)], [1, 1])
    assert d.watermark(13) == [("a", 0, 10, 1), ("b", 0, 10, 1)]
    assert d.send([("a", 2), ("c", 7)], [2, 3]) == [("a", 0, 10, 3), ("c", 0, 10, 7)]
    assert d.content()["windows"] == 3
    assert d.watermark(14) == []
    assert d.content() == {"windows": 0, "sent": 0}
    assert d.send([("a", 4)], [4]) == []
    assert (d.operator.late, d.sides) == (1, {"late": [(("a", 4), 4)]})


def test_t80_a_late_record_without_a_side_output_is_dropped_and_counted() -> None:
    """Undeclared: nothing goes out, the count says so."""
    for d in (tumbling(), session(), sliding(size=10, slide=10)):
        d.watermark(99)
        assert d.send([("a", 1)], [5]) == []
        assert (d.operator.late, d.sides, d.watermark(MAX_WATERMARK)) == (1, {}, [])


def test_a_record_late_for_some_sliding_windows_counts_in_the_others() -> None:
    """It is late when no window takes it, not before."""
    d = sliding(size=10, slide=5)
    d.watermark(10)
    d.send([("a", 1)], [7])
    assert d.watermark(MAX_WATERMARK) == [("a", 5, 15, 1)]
    assert d.operator.late == 0


def test_a_slide_above_the_size_leaves_gaps_whose_records_are_in_no_window() -> None:
    """Such a record is not late, it is nowhere."""
    d = sliding(size=3, slide=10)
    d.send([("a", 1), ("a", 2), ("a", 4)], [2, 3, 10])
    assert d.watermark(MAX_WATERMARK) == [("a", 0, 3, 1), ("a", 10, 13, 4)]
    assert d.operator.late == 0


def test_t72_the_end_of_the_input_fires_everything_once_and_is_not_state() -> None:
    """+∞ fires what remains, a second +∞ nothing, and the watermark kept is the last finite one (T-72, T-71)."""
    for d in (tumbling(lateness_ms=10**19), sliding(size=10, slide=10, lateness_ms=10**19), session(lateness_ms=10**19)):
        d.send([("a", 1)], [5])
        d.watermark(3)
        assert len(d.watermark(MAX_WATERMARK)) == 1
        assert d.watermark(MAX_WATERMARK) == []
        assert d.operator.meta() == {"watermark": 3}
        assert sum(d.content().values()) == 0
        d.snapshot(full=True)
        d.restore()
        d.send([("a", 2)], [25])
        assert len(d.watermark(MAX_WATERMARK)) == 1


def test_the_end_of_the_input_fires_windows_that_end_beyond_it() -> None:
    """A window longer than time has a result like any other, whose time is an event time that others may build on."""
    for d in (tumbling(size=10**19), sliding(size=10**19, slide=10**19), session(gap=10**19), session(gap=10**19, lateness_ms=7)):
        d.send([("a", 1), ("a", 2), ("b", 4)], [5, TIME_LIMIT, 6])
        assert d.watermark(TIME_LIMIT) == []
        assert sorted((key, total) for key, _, _, total in d.watermark(MAX_WATERMARK)) == [("a", 3), ("b", 4)]
        assert [time for _, time in d.out] == [TIME_LIMIT] * 2
        assert sum(d.content().values()) == 0


def test_the_end_of_the_input_frees_fired_windows_whatever_their_lateness() -> None:
    """A lateness that reaches beyond +∞ keeps nothing, and nothing is sent again."""
    for d in (tumbling(lateness_ms=10**19), sliding(size=10, slide=10, lateness_ms=10**19), session(lateness_ms=10**19)):
        d.send([("a", 1)], [0])
        assert d.watermark(30) == [("a", 0, 10, 1)]
        assert sum(d.content().values()) > 0
        assert d.watermark(MAX_WATERMARK) == []
        assert sum(d.content().values()) == 0


def test_t73_a_window_fires_after_a_restore_without_new_input_for_its_key() -> None:
    """What waits is in the snapshot (T-73)."""
    for d in (tumbling(), sliding(size=10, slide=10), session()):
        d.send([("a", 1)], [0])
        d.snapshot(full=False)
        d.restore()
        assert d.watermark(9) == [("a", 0, 10, 1)]


def test_g7_the_watermark_does_not_go_back() -> None:
    """Neither by a lower one nor by a restore (G7)."""
    d = tumbling()
    d.watermark(99)
    d.watermark(5)
    d.send([("a", 1)], [50])
    d.snapshot(full=True)
    d.restore()
    d.send([("a", 1)], [50])
    assert (d.late + d.operator.late, d.watermark(MAX_WATERMARK)) == (2, [])


def test_a_window_fired_by_one_old_subtask_is_not_fired_again_by_the_lower_watermark_of_another() -> None:
    """Two subtasks become one at the lower watermark: what one has sent goes out again only when it changed."""

    def make() -> Operator:
        return TumblingWindow(spec("tumbling_window", size=10, lateness_ms=50), itemgetter(0), **SUM)

    ahead, behind = Driver(make), Driver(make)
    for d, key, mark in ((ahead, "a", 20), (behind, "b", 5)):
        d.send([(key, 1), (key + key, 2)], [1, 1])
        d.watermark(mark)
        d.snapshot(full=True)
    assert len(ahead.out) == 2
    both = Driver(make)
    both.operator = restored([ahead, behind], make)[0]
    assert both.operator.meta() == {"watermark": 5}
    both.send([("aa", 5)], [3])
    assert sorted(both.watermark(9)) == [("aa", 0, 10, 7), ("b", 0, 10, 1), ("bb", 0, 10, 2)]


def test_t75_windows_due_during_downtime_fire_once_after_the_restore() -> None:
    """Processing time: the clock alone fires, also what fell due while nothing ran (T-75, T-76)."""
    for d in (tumbling(time="processing"), sliding(size=10, slide=10, time="processing"), session(time="processing")):
        d.operator.now_ms = lambda: 100  # type: ignore[attr-defined]
        d.send([("a", 1), ("a", 2)])
        assert d.operator.next_time() == 110
        assert d.time(109) == []
        d.snapshot(full=True)
        d.restore()
        assert d.operator.next_time() == 110
        assert d.time(500) == [("a", 100, 110, 3)]
        assert d.time(500) == []
        assert (d.operator.next_time(), d.watermark(5)) == (None, [])


def test_a_clock_set_back_does_not_reopen_a_window_that_has_fired() -> None:
    """Processing time never goes back for a window operator."""
    d = tumbling(time="processing")
    now = [105]
    d.operator.now_ms = lambda: now[0]  # type: ignore[attr-defined]
    d.send([("a", 1)])
    d.time(110)
    now[0] = 101
    d.send([("a", 2)])
    assert d.watermark(MAX_WATERMARK) == [("a", 110, 120, 2)]


def test_g1_accumulators_are_shared_by_no_two_keys_windows_or_results() -> None:
    """A reduce that works in place changes neither the records, nor other windows, nor what was sent (G1)."""
    record = ("a", [1])

    def extend(acc: Any, r: Any) -> Any:
        acc[1].extend(r[1])
        return acc

    d = Driver(lambda: SlidingWindow(spec("s", size=10, slide=5, lateness_ms=100), itemgetter(0), reduce=extend))
    d.send([record, ("a", [2])], [7, 3])
    first = d.watermark(9)
    assert first == [("a", -5, 5, ("a", [2])), ("a", 0, 10, ("a", [1, 2]))]
    d.send([("a", [3])], [8])
    assert record == ("a", [1])
    assert first[1] == ("a", 0, 10, ("a", [1, 2]))
    assert d.watermark(MAX_WATERMARK) == [("a", 5, 15, ("a", [1, 3]))]


def test_g1_a_record_that_bridges_two_sessions_counts_once_and_nothing_is_left_behind() -> None:
    """Merging takes both accumulators and the record once (G1, G2, RA1)."""
    d = session()
    d.send([("a", 1), ("a", 2), ("a", 4)], [0, 15, 8])
    assert d.content() == {"sessions": 1}
    assert d.watermark(24) == [("a", 0, 25, 7)]
    assert (d.content(), d.watermark(MAX_WATERMARK)) == ({"sessions": 0}, [])


def test_a_late_record_that_extends_a_fired_session_fires_it_again_with_its_new_end() -> None:
    """Within the lateness; at its new end when that is still to come."""
    d = session(lateness_ms=20)
    d.send([("a", 1)], [0])
    assert d.watermark(12) == [("a", 0, 10, 1)]
    assert d.send([("a", 2)], [1]) == [("a", 0, 11, 3)]
    assert d.send([("a", 4)], [9]) == []
    assert d.watermark(18) == [("a", 0, 19, 7)]
    assert d.watermark(38) == []
    assert d.content() == {"sessions": 0}


def test_rb6_a_window_whose_result_fails_keeps_its_state() -> None:
    """Nothing is purged that was not emitted (RB6)."""

    def fail(key: Any, window: Any, acc: Any) -> Any:
        raise ZeroDivisionError

    d = tumbling({**SUM, "result": fail})
    d.send([("a", 1)], [0])
    with pytest.raises(ZeroDivisionError):
        d.watermark(50)
    assert d.content()["windows"] == 1


def test_results_come_by_window_then_in_the_order_of_the_keys() -> None:
    """Deterministic whatever the order of the windows' first records."""
    d = tumbling()
    d.send([("b", 1), ("z", 1), ("a", 1), ("b", 1)], [25, 5, 5, 5])
    assert [r[:2] for r in d.watermark(MAX_WATERMARK)] == [("z", 0), ("a", 0), ("b", 0), ("b", 20)]


@pytest.mark.parametrize("key", [float("nan"), [1], object()])
def test_a_value_that_cannot_be_a_key_is_refused_at_its_first_record(key: Any) -> None:
    """By all windows, hashable or not."""
    for d in (tumbling(), sliding(size=10, slide=5), session()):
        with pytest.raises(KeyRefused):
            d.send([(key, 1)], [0])


def test_an_error_of_the_users_function_is_not_taken_for_a_new_key() -> None:
    """A KeyError or TypeError inside add goes up as it is."""
    for error in (KeyError, TypeError):

        def add(acc: int, record: Any, error: type[Exception] = error) -> int:
            raise error("user")

        d = tumbling({"create": int, "add": add})
        with pytest.raises(error, match="user"):
            d.send([("a", 1)], [0])


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (TumblingWindow, {"size": 0}),
        (TumblingWindow, {"size": -5}),
        (TumblingWindow, {"size": True}),
        (TumblingWindow, {}),
        (TumblingWindow, {"size": 1, "lateness_ms": -1}),
        (TumblingWindow, {"size": 1, "time": "wall"}),
        (TumblingWindow, {"size": 1, "time": "processing", "lateness_ms": 1}),
        (TumblingWindow, {"size": 1, "late_tag": 5}),
        (SlidingWindow, {"size": 1, "slide": 0}),
        (SessionWindow, {"gap": 0}),
    ],
)
def test_rc15_impossible_settings_are_refused_when_built(make: Any, config: dict[str, Json]) -> None:
    """Sizes, slides and gaps ≤ 0 and what contradicts itself (RC15)."""
    with pytest.raises(ConfigurationError):
        make(spec("w", **config), itemgetter(0), **SUM)


def test_functions_that_do_not_make_one_fold_are_refused() -> None:
    """Exactly one of create + add, reduce, function; a session with create + add can merge."""
    wrong: list[dict[str, Any]] = [
        {},
        {"create": int},
        {"add": max},
        {"create": int, "add": max, "reduce": max},
        {"function": len, "result": len},
        {"reduce": max, "function": len},
    ]
    for functions in wrong:
        with pytest.raises(ConfigurationError):
            TumblingWindow(spec("w", size=1), itemgetter(0), **functions)
    with pytest.raises(ConfigurationError, match="merge"):
        SessionWindow(spec("w", gap=1), itemgetter(0), create=int, add=max)


def test_missing_timestamps_or_clock_are_named() -> None:
    """Event time without timestamps, processing time without a clock."""
    with pytest.raises(OperatorError, match="assign_timestamps"):
        tumbling().send([("a", 1)])
    with pytest.raises(ConfigurationError, match="now_ms"):
        tumbling(time="processing").send([("a", 1)])


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([], MIN_WATERMARK),
        ([None, 7], MIN_WATERMARK),
        ([9, 7], 7),
        ([MAX_WATERMARK], MAX_WATERMARK - 1),
        ([MIN_WATERMARK - 5], MIN_WATERMARK),
    ],
)
def test_a_restored_watermark_is_the_lowest_and_finite(marks: list[int | None], expected: int) -> None:
    """No old subtask, one without a mark, one with +∞ by mistake: never +∞, never below −∞."""
    metas: list[dict[str, Json]] = [{} if mark is None else {"watermark": mark} for mark in marks]
    d = tumbling()
    d.operator.restore_meta(metas, 0, 1)
    assert d.operator.meta() == {"watermark": expected}
