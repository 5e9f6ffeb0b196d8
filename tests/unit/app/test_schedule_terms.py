"""What users write of schedules: each term is honoured or refused by name; Celery's beat schedule comes over with its meaning, or is refused entry by entry."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from itertools import pairwise, takewhile
from typing import Any, cast

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule, solar

from millstream.handlers import Handlers
from millstream.schedule_imports import beat_declarations, spec_of_celery
from millstream.schedule_terms import Terms, declaration
from millstream_schema.durable.recurrence import SECOND, Cron, Fold, Gap, Interval, OneOff, instants, local
from millstream_schema.durable.requests import Options
from millstream_schema.durable.schedules import Misfire, Overlap, Rules
from millstream_schema.errors import ConfigurationError, ScheduleInvalid

UTC = dt.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


def declared(when: Any, options: Options | None = None, **terms: Any) -> Any:
    return declaration("s", "work", when, (1,), {"a": 2}, options, cast(Terms, terms))


def test_each_kind_of_when_becomes_its_value() -> None:
    """With the defaults of daylight rules and anchors."""
    assert declared("0 3 * * *").spec == Cron(expression="0 3 * * *", zone="UTC", gap=Gap.RUN_AFTER, fold=Fold.FIRST)
    assert declared("0 3 * * *", zone="Asia/Tokyo", gap="skip", fold="both").spec == Cron(
        expression="0 3 * * *", zone="Asia/Tokyo", gap=Gap.SKIP, fold=Fold.BOTH
    )
    assert declared(dt.timedelta(minutes=5)).spec == Interval(every_us=300 * SECOND)
    start = dt.datetime(2024, 1, 1, 1, tzinfo=BERLIN)
    assert declared(dt.timedelta(days=1), start=start).spec == Interval(every_us=86_400 * SECOND, start_us=int(start.timestamp()) * SECOND)
    assert declared(start).spec == OneOff(at_us=int(start.timestamp()) * SECOND)
    assert declared(OneOff(at_us=5)).spec == OneOff(at_us=5)


def test_rules_are_read_in_seconds() -> None:
    """And kept in microseconds."""
    found = declared("@daily", misfire="catch_up", limit=3, window=60, overlap="queue_one", jitter=1.5, tolerance=10).rules
    assert found == Rules(
        misfire=Misfire.CATCH_UP, limit=3, window_us=60 * SECOND, overlap=Overlap.QUEUE_ONE, jitter_us=1_500_000, tolerance_us=10 * SECOND
    )
    assert declared("@daily").rules == Rules()


@pytest.mark.parametrize(
    ("when", "terms", "text"),
    [
        pytest.param("@daily", {"start": dt.datetime.now(UTC)}, "start means nothing for Cron", id="start-of-cron"),
        pytest.param(dt.timedelta(1), {"zone": "UTC", "fold": "first"}, "fold, zone means nothing for Interval", id="zone-of-interval"),
        pytest.param(dt.datetime.now(UTC), {"gap": "skip"}, "gap means nothing for OneOff", id="gap-of-one-off"),
        pytest.param(dt.datetime(2030, 1, 1), {}, "no time zone", id="naive"),
        pytest.param(dt.timedelta(1), {"start": dt.datetime(2030, 1, 1)}, "no time zone", id="naive-start"),
        pytest.param(5, {}, "cron expression, a timedelta or an aware datetime", id="number"),
        pytest.param("@daily", {"gap": "never"}, "gap must be one of skip, run_after", id="gap"),
        pytest.param("@daily", {"fold": ""}, "fold must be one of", id="fold"),
        pytest.param("@daily", {"misfire": "all"}, "misfire must be one of", id="misfire"),
        pytest.param("@daily", {"overlap": True}, "overlap must be one of", id="overlap"),
        pytest.param("@daily", {"limit": 3}, "belong to misfire", id="limit-without-catch-up"),
        pytest.param("@daily", {"misfire": "catch_up", "limit": 2.5}, "whole number", id="limit"),
        pytest.param("@daily", {"jitter": float("nan")}, "jitter must be a number", id="nan"),
        pytest.param("@daily", {"tolerance": "60"}, "tolerance must be a number", id="text"),
        pytest.param("@daily", {"timezone": "UTC"}, "timezone: no such term", id="unknown"),
        pytest.param("nonsense", {}, "wrong number of fields", id="cron"),
    ],
)
def test_terms_that_cannot_be_honoured_are_refused_by_name(when: Any, terms: dict[str, Any], text: str) -> None:
    """At once, and nothing is declared."""
    with pytest.raises(ScheduleInvalid, match=text):
        declared(when, **terms)


@pytest.mark.parametrize(
    "options", [Options(due_at=dt.datetime.now(UTC)), Options(expires_at=dt.datetime.now(UTC))], ids=["due_at", "expires_at"]
)
def test_options_that_name_one_instant_are_refused(options: Options) -> None:
    """A schedule has its own instants."""
    with pytest.raises(ScheduleInvalid, match="single instants"):
        declared("@daily", options)


def test_schedules_are_declared_beside_handlers() -> None:
    """By object or by name; a name twice is refused unless it is the same."""
    handlers = Handlers()

    @handlers.task(name="work", effects="idempotent")
    def work(n: int) -> int:
        return n

    handlers.schedule("b", work, "@daily", args=(1,), zone="Europe/Berlin")
    handlers.schedule("a", "work", dt.timedelta(hours=1), kwargs={"n": 2})
    handlers.schedule("b", work, "@daily", args=(1,), zone="Europe/Berlin")
    assert [(d.name, d.handler) for d in handlers.registry.declared()] == [("a", "work"), ("b", "work")]
    with pytest.raises(ConfigurationError, match="two schedules are named 'b'"):
        handlers.schedule("b", work, "@hourly", args=(1,))


# -- from Celery


@pytest.mark.parametrize(
    ("tab", "expression"),
    [
        pytest.param(crontab(), "* * * * *", id="each-minute"),
        pytest.param(crontab(minute=30, hour=2), "30 2 * * *", id="daily"),
        pytest.param(crontab(minute="*/15"), "*/15 * * * *", id="stepped"),
        pytest.param(crontab(minute=0, hour="*/3,8-17"), "0 0,3,6,8,9,10,11,12,13,14,15,16,17,18,21 * * *", id="mixed"),
        pytest.param(crontab(minute=0, hour="22-3"), "0 0,1,2,3,22,23 * * *", id="wrapped"),
        pytest.param(crontab(minute=0, hour=0, day_of_week="fri-mon"), "0 0 * * 0,1,5,6", id="weekdays-wrapped"),
        pytest.param(crontab(minute=0, hour=0, day_of_week="sunday"), "0 0 * * 0", id="names"),
        pytest.param(crontab(0, 0, day_of_month="1,15", month_of_year="*/3"), "0 0 1,15 1,4,7,10 *", id="months"),
    ],
)
def test_a_crontab_comes_over_as_what_it_means(tab: Any, expression: str) -> None:
    """In the application's zone."""
    assert spec_of_celery(tab, "Europe/Berlin") == Cron(expression=expression, zone="Europe/Berlin")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(30, 30), (2.5, 2.5), (dt.timedelta(minutes=2), 120), (schedule(10.0), 10)],
    ids=["int", "float", "delta", "object"],
)
def test_intervals_come_over(given: Any, seconds: float) -> None:
    """Counted from a fixed start."""
    assert spec_of_celery(given, "UTC") == Interval(every_us=int(seconds * SECOND))


class Own(crontab):  # type: ignore[misc]  # Celery has no types
    """Fires when it likes."""


class OwnSchedule(schedule):  # type: ignore[misc]  # Celery has no types
    """Likewise."""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        pytest.param(crontab(0, 0, day_of_week="mon", day_of_month="1-7"), "wants both", id="day-and-weekday"),
        pytest.param(solar.__new__(solar), "solar", id="solar"),  # made without ephem, which it computes with
        pytest.param(Own(), "class of your own", id="own-crontab"),
        pytest.param(OwnSchedule(5), "class of your own", id="own-schedule"),
        pytest.param(schedule(5, relative=True), "relative", id="relative"),
        pytest.param(BaseSchedule(), "BaseSchedule", id="base"),
        pytest.param("0 0 * * *", "str", id="text"),
        pytest.param(True, "True", id="bool"),
    ],
)
def test_what_has_another_meaning_is_refused(given: Any, text: str) -> None:
    """By what it is."""
    with pytest.raises(ScheduleInvalid, match=text):
        spec_of_celery(given, "UTC")


def test_entries_are_taken_or_refused_each_for_itself() -> None:
    """By their names, which become names here."""
    app = Celery("proj", set_as_current=False)
    app.conf.timezone = "Europe/Berlin"
    task = {"task": "proj.report"}
    app.conf.beat_schedule = {
        "every 30 seconds": {**task, "schedule": 30.0, "args": (1, 2), "options": {"queue": "reports", "expires": 15.0, "priority": 3}},
        "nightly": {**task, "schedule": crontab(0, 3), "kwargs": {"kind": "x"}, "options": {"expires": dt.timedelta(hours=1)}},
        "millstream-tick": {"task": "millstream.tick", "schedule": 5.0},
        "linked": {**task, "schedule": 30.0, "options": {"link": "other"}},
        "once named": {**task, "schedule": 30.0, "options": {"task_id": "x"}},
        "relative": {**task, "schedule": 30.0, "relative": True},
        "short": {**task, "schedule": 0.5},
        "strange": {**task, "schedule": 30.0, "frequency": 3},
        "no task": {"schedule": 30.0},
        "every/30/seconds": {**task, "schedule": 31.0},
        "---": {**task, "schedule": 30.0},
    }
    found, refused = beat_declarations(app)
    assert [(d.name, d.handler, d.args, d.kwargs, d.options) for d in found] == [
        ("every-30-seconds", "proj.report", (1, 2), {}, Options(queue="reports", start_by_s=15.0, priority=3)),
        ("nightly", "proj.report", (), {"kind": "x"}, Options(start_by_s=3600.0)),
    ]
    assert found[1].spec == Cron(expression="0 3 * * *", zone="Europe/Berlin")
    assert {d.rules.misfire for d in found} == {Misfire.ONCE} and {d.rules.overlap for d in found} == {Overlap.ALLOW}
    words = {
        "linked": "link",
        "once named": "task_id",
        "relative": "relative",
        "short": "1 second",
        "strange": "frequency",
        "no task": "task and schedule",
    }
    words |= {"every/30/seconds": "every-30-seconds", "---": "name"}
    assert set(refused) == set(words) and all(word in refused[entry] for entry, word in words.items()), refused


# -- Celery's complaints


def celery_fires(start: dt.datetime, hours: int, **fields: Any) -> list[dt.datetime]:
    """What beat does: asks at each minute of elapsed time, by the application's clock, and remembers when it ran last."""
    app = Celery("control", set_as_current=False)
    app.conf.timezone = "Europe/Berlin"
    now = [start]
    tab = crontab(**fields, app=app, nowfun=lambda: now[0].astimezone(BERLIN))
    last, found = start, []
    for _ in range(hours * 60):
        if tab.is_due(last.astimezone(BERLIN)).is_due:
            found.append(now[0])
            last = now[0]
        now[0] += dt.timedelta(minutes=1)
    return found


def our_fires(start: dt.datetime, hours: int, **fields: Any) -> list[dt.datetime]:
    """The same crontab, imported."""
    spec = spec_of_celery(crontab(**fields), "Europe/Berlin")
    end = start + dt.timedelta(hours=hours)
    return list(takewhile(lambda i: i < end, (local(i, UTC) for i in instants(spec, int(start.timestamp()) * SECOND - 1))))


def shown(found: list[dt.datetime]) -> list[str]:
    return [i.astimezone(BERLIN).strftime("%d %H:%M%z") for i in found]


def test_celery_t37_an_hourly_schedule_leaves_out_no_hour_when_the_clocks_go_back() -> None:
    """27 October 2024 in Berlin. Celery's crontab is the control: it leaves out the second hour that is called two."""
    night = dt.datetime(2024, 10, 26, 22, tzinfo=UTC)
    hours = {b - a for a, b in pairwise(our_fires(night, 8, minute=0))}
    assert hours == {dt.timedelta(hours=1)}
    assert dt.timedelta(hours=2) in {b - a for a, b in pairwise(celery_fires(night, 8, minute=0))}, "the control has learnt it"


def test_celery_t37_a_daily_schedule_runs_right_after_the_hour_that_is_left_out() -> None:
    """31 March 2024 in Berlin, at 02:30, which does not exist. The control runs it an hour late; in autumn both run it once."""
    spring, autumn = dt.datetime(2024, 3, 30, 12, tzinfo=UTC), dt.datetime(2024, 10, 26, 12, tzinfo=UTC)
    assert shown(our_fires(spring, 24, hour=2, minute=30)) == ["31 03:00+0200"]
    assert shown(celery_fires(spring, 24, hour=2, minute=30)) == ["31 03:30+0200"], "the control has learnt it"
    assert shown(our_fires(autumn, 24, hour=2, minute=30)) == ["27 02:30+0200"] == shown(celery_fires(autumn, 24, hour=2, minute=30))
