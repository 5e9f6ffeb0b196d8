"""When schedules fire: cases computed by hand, another library's opinion, and every change of any zone's clocks from 2020 to 2035 against an oracle that counts minutes."""

from __future__ import annotations

import datetime as dt
import os
import random
import zoneinfo
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, takewhile

import pytest
from croniter import croniter
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_schema.durable import recurrence
from millstream_schema.durable.recurrence import (
    LAST_US,
    SECOND,
    Cron,
    Fold,
    Gap,
    Interval,
    OneOff,
    check,
    follows_elapsed_time,
    instants,
    local,
    next_after,
    zone_of,
)
from millstream_schema.errors import ScheduleInvalid

UTC = dt.UTC
BERLIN = "Europe/Berlin"
ALL = os.environ.get("MILLSTREAM_TEST_ALL_TRANSITIONS") == "1"
ZONES, SAMPLE = 60, 50
EVENTFUL = (
    "Africa/Casablanca",
    "Australia/Lord_Howe",
    "America/Santiago",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Africa/Juba",
    "Europe/Volgograd",
)
"""Changes by half an hour and by two, at midnight, in Ramadan, for good."""
MINUTE = 60


def us(*parts: int, zone: str = "UTC", fold: int = 0) -> int:
    return int(dt.datetime(*parts, tzinfo=zoneinfo.ZoneInfo(zone), fold=fold).timestamp()) * SECOND  # type: ignore[arg-type, misc]


def cron(expression: str, zone: str = "UTC", gap: Gap = Gap.RUN_AFTER, fold: Fold = Fold.FIRST) -> Cron:
    return Cron(expression=expression, zone=zone, gap=gap, fold=fold)


def shown(spec: Cron, after: int, count: int) -> list[str]:
    return [local(i, zone_of(spec.zone)).strftime("%Y-%m-%d %H:%M%z") for i in islice(instants(spec, after), count)]


# -- by hand


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        pytest.param("0 0 29 2 *", us(2023, 1, 1), ["2024-02-29 00:00", "2028-02-29 00:00", "2032-02-29 00:00"], id="leap-day"),
        pytest.param("0 0 29 2 *", us(2096, 3, 1), ["2104-02-29 00:00"], id="no-leap-day-in-2100"),
        pytest.param("30 6 L * *", us(2024, 1, 15), ["2024-01-31 06:30", "2024-02-29 06:30", "2024-03-31 06:30"], id="last-day"),
        pytest.param("0 9 LW * *", us(2024, 3, 1), ["2024-03-29 09:00", "2024-04-30 09:00", "2024-05-31 09:00"], id="last-weekday"),
        pytest.param("0 9 * * 5L", us(2024, 1, 1), ["2024-01-26 09:00", "2024-02-23 09:00"], id="last-friday"),
        pytest.param("0 9 * * MON#2", us(2024, 1, 1), ["2024-01-08 09:00", "2024-02-12 09:00"], id="second-monday"),
        pytest.param("0 0 13 * FRI", us(2024, 9, 1), ["2024-09-06 00:00", "2024-09-13 00:00", "2024-09-20 00:00"], id="day-or-weekday-1"),
        pytest.param("0 0 13 * FRI", us(2024, 10, 12), ["2024-10-13 00:00", "2024-10-18 00:00"], id="day-or-weekday-2"),
        pytest.param("0 0 */2 * MON", us(2024, 1, 1), ["2024-01-15 00:00", "2024-01-29 00:00"], id="stepped-day-and-weekday"),
        pytest.param("5-59/20 8-9 * JAN,jul mon-wed", us(2024, 1, 1, 8, 26), ["2024-01-01 08:45", "2024-01-01 09:05"], id="names-ranges-steps"),
        pytest.param("0 12 * * 0", us(2024, 1, 1), ["2024-01-07 12:00"], id="sunday-is-0"),
        pytest.param("0 12 * * 7", us(2024, 1, 1), ["2024-01-07 12:00"], id="sunday-is-7"),
        pytest.param("@weekly", us(2024, 1, 1), ["2024-01-07 00:00", "2024-01-14 00:00"], id="macro"),
        pytest.param("0 0 31 * *", us(2024, 1, 31), ["2024-03-31 00:00", "2024-05-31 00:00", "2024-07-31 00:00"], id="months-without-31"),
        pytest.param("0 0 * 2 MON#5", us(2024, 1, 1), ["2044-02-29 00:00", "2072-02-29 00:00"], id="decades-apart"),
        pytest.param("59 23 31 12 *", us(2024, 12, 31, 23, 58), ["2024-12-31 23:59", "2025-12-31 23:59"], id="end-of-year"),
    ],
)  # fmt: skip
def test_expressions_fire_when_they_say(expression: str, after: int, expected: list[str]) -> None:
    """Computed by hand from a calendar."""
    assert [i[:-5] for i in shown(cron(expression), after, len(expected))] == expected


def test_six_fields_begin_with_seconds() -> None:
    """Every twenty seconds of one minute of the day."""
    found = list(islice(instants(cron("*/20 30 4 * * *"), us(2024, 1, 1)), 4))
    assert found == [us(2024, 1, 1, 4, 30, s) for s in (0, 20, 40)] + [us(2024, 1, 2, 4, 30)]


@pytest.mark.parametrize("gap", list(Gap))
def test_a_wall_time_that_does_not_exist_is_left_out_or_run_right_after(gap: Gap) -> None:
    """31 March 2024 in Berlin: 02:00 to 03:00 does not exist; another expression's 03:00 is not run twice."""
    found = shown(cron("30 2 * * *", BERLIN, gap=gap), us(2024, 3, 30, 12), 2)
    assert (
        found
        == (["2024-03-31 03:00+0200"] if gap is Gap.RUN_AFTER else [])
        + ["2024-04-01 02:30+0200", "2024-04-02 02:30+0200"][: 1 + (gap is Gap.SKIP)]
    )
    several = shown(cron("0,10,50 2,3 * * *", BERLIN, gap=gap), us(2024, 3, 30, 12), 4)
    assert several == ["2024-03-31 03:00+0200", "2024-03-31 03:10+0200", "2024-03-31 03:50+0200", "2024-04-01 02:00+0200"]


@pytest.mark.parametrize("fold", list(Fold))
def test_a_wall_time_that_exists_twice_means_the_one_that_is_asked_for(fold: Fold) -> None:
    """27 October 2024 in Berlin: 02:00 to 03:00 exists twice; several times of that hour stay in order."""
    found = shown(cron("10,40 2 * * *", BERLIN, fold=fold), us(2024, 10, 26, 12), 5)
    first, second = ["2024-10-27 02:10+0200", "2024-10-27 02:40+0200"], ["2024-10-27 02:10+0100", "2024-10-27 02:40+0100"]
    day = {Fold.FIRST: first, Fold.SECOND: second, Fold.BOTH: first + second}[fold]
    assert found[: len(day) + 1] == [*day, "2024-10-28 02:10+0100"]


@pytest.mark.parametrize("expression", ["0 * * * *", "*/15 * * * *", "0 0-23 * * *", "7 */1 * * *"])
def test_hourly_and_stepped_expressions_go_on_through_a_change_of_the_clocks(expression: str) -> None:
    """As much elapsed time lies between two fires as on any other day, whatever gap and fold say."""
    usual = {b - a for a, b in pairwise(islice(instants(cron(expression, BERLIN), us(2024, 6, 1)), 50))}
    for day in (us(2024, 3, 30, 20), us(2024, 10, 26, 20)):
        for gap, fold in ((Gap.SKIP, Fold.SECOND), (Gap.RUN_AFTER, Fold.FIRST)):
            found = list(islice(instants(cron(expression, BERLIN, gap, fold), day), 50))
            assert {b - a for a, b in pairwise(found)} == usual


@pytest.mark.parametrize(
    ("expression", "elapsed"),
    [("30 2 * * *", False), ("0,30 1,2 * * *", False), ("0 9-17 * * *", False), ("0 1-23 * * *", False), ("0 30 2 * * *", False),
     ("*/5 2 * * *", True), ("0 */2 * * *", True), ("0 0-23/2 * * *", True), ("* 2 * * *", True), ("*/10 0 0 * * *", True), ("@hourly", True)],
)  # fmt: skip
def test_which_expressions_follow_elapsed_time(expression: str, elapsed: bool) -> None:
    """Those with a star or a step in seconds, minutes or hours, or all hours; the others name wall times."""
    assert follows_elapsed_time(expression) is elapsed


def test_zones_whose_clocks_change_by_half_an_hour_or_at_midnight() -> None:
    """Lord Howe goes back by 30 minutes; Beirut and Santiago leave out midnight."""
    half = shown(cron("45 1 * * *", "Australia/Lord_Howe", fold=Fold.BOTH), us(2024, 4, 5), 4)
    assert half == ["2024-04-06 01:45+1100", "2024-04-07 01:45+1100", "2024-04-07 01:45+1030", "2024-04-08 01:45+1030"]
    midnight = shown(cron("0 0 * * *", "America/Santiago"), us(2024, 9, 7, 12), 3)
    assert midnight == ["2024-09-08 01:00-0300", "2024-09-09 00:00-0300", "2024-09-10 00:00-0300"]


def test_a_day_that_a_zone_left_out() -> None:
    """Samoa had no 30 December 2011: run after is its next midnight, which fires once."""
    after = us(2011, 12, 29, 15)  # 29 December, 05:00 there
    assert shown(cron("0 12 * * *", "Pacific/Apia"), after, 3) == [
        "2011-12-29 12:00-1000",
        "2011-12-31 00:00+1400",
        "2011-12-31 12:00+1400",
    ]
    assert shown(cron("0 12 * * *", "Pacific/Apia", gap=Gap.SKIP), after, 2) == ["2011-12-29 12:00-1000", "2011-12-31 12:00+1400"]


# -- intervals and single instants


@given(st.integers(SECOND, 10**12), st.integers(0, 10**16), st.integers(-(10**16), 2 * 10**16))
def test_intervals_are_anchored_at_their_start(every: int, start: int, after: int) -> None:
    """The next is the least of start + n × every that is later."""
    found = next_after(Interval(every_us=every, start_us=start), after)
    if found is None:
        assert max(after, start) >= LAST_US - every
        return
    assert found > after and found >= start and (found - start) % every == 0 and (found == start or found - every <= after)


def test_a_one_off_fires_once() -> None:
    """And not after its instant."""
    assert [next_after(OneOff(at_us=7), t) for t in (6, 7, 8)] == [7, None, None]


# -- bounds, refusals


@pytest.mark.parametrize(
    "expression",
    ["0 0 30 2 *", "0 0 31 2,4,6,9,11 *", "0 0 */40 * MON#5", "61 * * * *", "* 24 * * *", "0 0 0 * *", "* * * 13 *", "* * * * 8", "*/0 * * * *", "5-1 * * * *",
     "* * * *", "* * * * * * *", "", " ", "@reboot", "a b c d e", "* * * * 5L/2", "* * * * MON#6", "1, * * * *", "٣ * * * *", "* * 15W * *", "* " * 120],
)  # fmt: skip
def test_what_never_fires_or_is_no_expression_is_refused(expression: str) -> None:
    """At once, with a text that says what to write."""
    with pytest.raises(ScheduleInvalid, match="cron"):
        check(cron(expression))


@given(st.text(alphabet="0123456789*/,-LW#?@ MONjan٣", max_size=30))
@settings(max_examples=400, deadline=None)
def test_no_text_makes_anything_but_a_schedule_or_a_refusal(text: str) -> None:
    """Whatever is written: refused, or it has a next fire."""
    try:
        check(cron(text))
    except ScheduleInvalid:
        return
    assert next_after(cron(text), us(2024, 1, 1)) is not None


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../../etc/passwd", "/etc/localtime", "Europe/Berlin\x00", "x" * 300, "CEST-2"])
def test_unknown_zones_are_refused(zone: str) -> None:
    """As a name, whatever is in it."""
    with pytest.raises(ScheduleInvalid, match="time zone"):
        check(cron("0 0 * * *", zone))


@pytest.mark.parametrize(
    "spec",
    [Interval(every_us=SECOND - 1), Interval(every_us=0), Interval(every_us=-5), Interval(every_us=10**18), Interval(every_us=SECOND, start_us=-1),
     OneOff(at_us=-1), OneOff(at_us=LAST_US)],
    ids=["short", "zero", "negative", "long", "before-1970", "one-off-before-1970", "one-off-after-2199"],
)  # fmt: skip
def test_times_out_of_bounds_are_refused(spec: Interval | OneOff) -> None:
    """Intervals from a second to ten years, instants from 1970 to 2199."""
    with pytest.raises(ScheduleInvalid):
        check(spec)


@pytest.mark.parametrize(
    "spec", [cron("0 0 1 1 *"), cron("0 0 1 1 *", BERLIN), Interval(every_us=365 * 86_400 * SECOND)], ids=["utc", "zone", "interval"]
)
def test_nothing_fires_from_2200_on(spec: Cron | Interval) -> None:
    """The sequence ends; what lies beyond any calendar is answered, too."""
    found = list(instants(spec, us(2190, 6, 1)))
    assert 8 <= len(found) <= 11 and found[-1] < LAST_US
    assert next_after(spec, LAST_US) is None and next_after(spec, 10**19) is None


def test_before_1970_nothing_fires() -> None:
    """However early one asks."""
    assert next_after(cron("0 0 * * *"), -(10**18)) == 0
    assert next_after(cron("0 0 * * *", BERLIN), -(10**18)) == 23 * 3600 * SECOND


# -- another library


FIELDS = ((0, 59), (0, 23), (1, 28), (1, 12), (0, 6))


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Five fields of stars, steps, numbers, ranges, stepped ranges, lists."""
    parts = []
    for low, high in FIELDS:
        number = st.integers(low, high)
        kind = draw(st.sampled_from(["star", "star", "number", "step", "range", "stepped", "list"]))
        a, b = sorted(draw(st.tuples(number, number).filter(lambda pair: pair[0] != pair[1])))  # croniter takes the weekdays 0-0 for all
        step = draw(st.integers(1, max(1, (high - low) // 2)))
        listed = ",".join(map(str, sorted(draw(st.sets(number, min_size=1, max_size=4)))))
        parts.append(
            {"star": "*", "number": str(a), "step": f"*/{step}", "range": f"{a}-{b}", "stepped": f"{a}-{b}/{step}", "list": listed}[kind]
        )
    return " ".join(parts)


@given(expressions(), st.integers(us(1990, 1, 1) // SECOND, us(2090, 1, 1) // SECOND))
@settings(max_examples=300, deadline=None)
def test_croniter_agrees_without_a_change_of_the_clocks(expression: str, start: int) -> None:
    """The next five fires of any expression, from any second. A day field that begins with a star is taken as Vixie's cron takes it (croniter: ``implement_cron_bug``)."""
    spec = cron(expression)
    mine = list(islice(instants(spec, start * SECOND), 5))
    theirs = croniter(expression, dt.datetime.fromtimestamp(start, UTC), implement_cron_bug=True)
    assert [i // SECOND for i in mine] == [int(theirs.get_next(float)) for _ in mine]


# -- every change of the clocks


def offset(zone: str, second: int) -> int:
    """Independent of the product: what zoneinfo says."""
    found = dt.datetime.fromtimestamp(second, zoneinfo.ZoneInfo(zone)).utcoffset()
    assert found is not None
    return int(found.total_seconds())


def changes(zone: str) -> Iterator[int]:
    """Seconds at which the zone's clocks change, 2020 to 2035: found day by day, then halved to the second."""
    key = zoneinfo.ZoneInfo(zone)

    def at(second: int) -> dt.timedelta | None:
        return dt.datetime.fromtimestamp(second, key).utcoffset()

    before, second = at(us(2020, 1, 1) // SECOND), us(2020, 1, 1) // SECOND
    while second < us(2036, 1, 1) // SECOND:
        after = at(second + 86_400)
        if after != before:
            low, high = second, second + 86_400
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if at(middle) == before else (low, middle)
            yield high
        before, second = after, second + 86_400


def every_change(zones: Sequence[str]) -> list[tuple[str, int]]:
    """Zone and second; of zones that change alike one is enough, unless all are asked for."""
    found: list[tuple[str, int]] = []
    known = set()
    for zone in zones:
        mine = tuple(changes(zone))
        signature = tuple((c, offset(zone, c - 1), offset(zone, c)) for c in mine)
        if mine and (ALL or signature not in known):
            known.add(signature)
            found += [(zone, c) for c in mine]
    return found


class Oracle:
    """Around one change: each minute of elapsed time with what the clocks show."""

    def __init__(self, zone: str, change: int) -> None:
        self.start, self.end = change - 30 * 3600, change + 30 * 3600
        key = zoneinfo.ZoneInfo(zone)
        shown = ((m, dt.datetime.fromtimestamp(m, key).replace(tzinfo=UTC)) for m in range(self.start, self.end, MINUTE))
        self.walls = [(m, int(wall.timestamp())) for m, wall in shown]
        self.times: dict[int, list[int]] = {}
        for minute, wall in self.walls:
            self.times.setdefault(wall, []).append(minute)
        self.first_wall, self.last_wall = self.walls[0][1], self.walls[-1][1]

    def daily(self, second_of_day: int, gap: Gap, fold: Fold) -> list[int]:
        """Fires of a fixed time of the day."""
        found = set()
        for day in range(self.first_wall // 86_400 - 1, self.last_wall // 86_400 + 2):
            wall = day * 86_400 + second_of_day
            times = self.times.get(wall, [])
            if not self.first_wall <= wall <= self.last_wall:
                continue
            if not times and gap is Gap.RUN_AFTER:
                found.add(next(m for m, w in self.walls if w > wall))
            elif len(times) > 1:
                found |= {Fold.FIRST: {times[0]}, Fold.SECOND: {times[-1]}, Fold.BOTH: set(times)}[fold]
            else:
                found |= set(times)
        return sorted(found)

    def matching(self, minutes: set[int]) -> list[int]:
        """Fires of an expression that follows elapsed time."""
        return [m for m, wall in self.walls if wall // 60 % 60 in minutes]


def times_of_day(zone: str, change: int, rng: random.Random) -> set[int]:
    """Around what is left out or repeated, and one anywhere."""
    old, new = change + offset(zone, change - 1), change + offset(zone, change)
    low, high = min(old, new), max(old, new)
    near = {low - MINUTE, low, low + MINUTE, (low + high) // 2, high - MINUTE, high, high + MINUTE}
    return {(s - s % MINUTE) % 86_400 for s in near} | {rng.randrange(1440) * MINUTE}


@pytest.mark.timeout(3000 if ALL else 120)
def test_daily_fires_around_every_change_of_the_clocks_are_exactly_the_expected_ones() -> None:
    """All zones, 2020 to 2035, each gap and fold rule: what fires is what an oracle finds that looks at every minute.

    A sample by a seed; all with MILLSTREAM_TEST_ALL_TRANSITIONS=1.
    """
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED", dt.datetime.now(UTC).toordinal()))
    rng = random.Random(seed)
    zones = sorted(zoneinfo.available_timezones() - {"localtime", "Factory"})
    found = every_change(zones if ALL else [*EVENTFUL, *rng.sample(zones, ZONES)])
    assert len(found) > 100
    for zone, change in found if ALL else rng.sample(found, SAMPLE):
        oracle = Oracle(zone, change)
        for time in sorted(times_of_day(zone, change, rng)):
            for gap in Gap:
                for fold in Fold:
                    spec = cron(f"{time // 60 % 60} {time // 3600} * * *", zone, gap, fold)
                    mine = [i // SECOND for i in until(spec, oracle.start, oracle.end)]
                    assert mine == [i for i in oracle.daily(time, gap, fold) if oracle.start < i < oracle.end], (seed, spec, change)
        for text, minutes in (("*/20 * * * *", {0, 20, 40}), ("17 * * * *", {17}), ("59 */1 * * *", {59})):
            fires = takewhile(lambda i, end=oracle.end: i < end * SECOND, instants(cron(text, zone), (oracle.start - 1) * SECOND))  # type: ignore[misc]
            mine = [i // SECOND for i in fires]
            assert mine == oracle.matching(minutes), (seed, zone, change)


def until(spec: Cron, start: int, end: int) -> Iterator[int]:
    """Fires in (start, end), asked for one by one as the sweep does, and strictly increasing."""
    at = start * SECOND
    while (following := next_after(spec, at)) is not None and following < end * SECOND:
        assert following > at
        yield following
        at = following


def test_asking_one_by_one_is_asking_once() -> None:
    """A sequence does not depend on where one began to look, also in the middle of a repeated hour."""
    for gap in Gap:
        for fold in Fold:
            for text in ("5,35 0-4 * * *", "*/10 * * * *", "30 2 27,31 3,10 *"):
                spec = cron(text, BERLIN, gap, fold)
                whole = [i for i in islice(instants(spec, us(2024, 3, 30)), 3000) if i < us(2024, 11, 1)]
                rng = random.Random(text)
                for at in [rng.randrange(us(2024, 3, 30), us(2024, 11, 1)) for _ in range(60)] + [
                    us(2024, 10, 27, 0, 30) + i * 600 * SECOND for i in range(9)
                ]:
                    later = [i for i in whole if i > at]
                    if later:
                        assert next_after(spec, at) == later[0]


def test_no_zone_changes_its_clocks_twice_within_a_day_and_ends_where_it_began() -> None:
    """What the search for changes relies on, for all zones from 1970 on."""
    from zoneinfo import _zoneinfo  # type: ignore[attr-defined]

    for zone in sorted(zoneinfo.available_timezones() - {"localtime"}):
        known = [t for t in _zoneinfo.ZoneInfo(zone)._trans_utc if t >= 0]
        for first, second in pairwise(known):
            if second - first < recurrence._PIECE:
                assert offset(zone, first - 1) != offset(zone, second), zone
