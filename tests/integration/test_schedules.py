"""Schedules on a worker of this process, declared beside handlers, from Python and by ``millstream schedules``: what fires, what is shown, exit codes."""

from __future__ import annotations

import datetime as dt
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from tests.support.command_line import CommandLine, plain_environment
from typer.testing import CliRunner

from millstream.cli import main
from millstream.handlers import Handlers
from millstream.installation import Installation
from millstream.metrics import render
from millstream.schedules import Schedules, preview
from millstream.task_worker import TaskWorker
from millstream_schema.durable.recurrence import Interval
from millstream_schema.durable.requests import Options
from millstream_schema.durable.schedules import FireKind, FireState, ScheduleState
from millstream_schema.errors import ScheduleInvalid, ScheduleNotFound, TaskInvalid, UnknownHandler, UnknownQueue
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

SECONDS = 30
UTC = dt.UTC
MODULE = """
import datetime as dt

from celery import Celery
from celery.schedules import crontab

from millstream import Handlers

handlers = Handlers()


@handlers.task(name="report", effects="idempotent")
def report(kind: str) -> str:
    return kind


handlers.schedule("nightly", report, "30 2 * * *", args=("daily",), zone="Europe/Berlin")

app = Celery("proj", set_as_current=False)
app.conf.beat_schedule = {
    "hourly report": {"task": "report", "schedule": crontab(minute=5), "args": ("hourly",)},
    "wrong arguments": {"task": "report", "schedule": 60.0, "args": (1, 2)},
    "nobody's": {"task": "other", "schedule": 60.0},
    "relative": {"task": "report", "schedule": 60.0, "args": ("x",), "relative": True},
}
"""


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    found = Installation.local(tmp_path)
    database = Database(found.database, SystemClock(), prefix=found.table_prefix)
    create_schema(database)
    database.close()
    return found


def made(gate: threading.Event, ran: list[tuple[str, float]]) -> Handlers:
    handlers, clock = Handlers(), SystemClock()

    @handlers.task(name="tick", effects="idempotent")
    def tick(who: str) -> str:
        ran.append((who, clock.now_us() / 1e6))
        if len(ran) >= 6:
            gate.set()
        return who

    return handlers


def test_a_worker_fires_what_is_declared_in_time(installation: Installation) -> None:
    """Each second by an interval and by a cron expression, without anybody's asking; as rows, on time to a fraction of a second on this busy machine."""
    gate, ran = threading.Event(), list[tuple[str, float]]()
    handlers = made(gate, ran)
    handlers.schedule("interval", "tick", dt.timedelta(seconds=1), args=("interval",))
    handlers.schedule("cron", "tick", "* * * * * *", args=("cron",), zone="Asia/Kolkata")
    with TaskWorker(installation, handlers) as worker:
        assert gate.wait(SECONDS)
        for name in ("interval", "cron"):
            found = [f for f in worker.schedules.fires(name) if f.kind is FireKind.AUTO and f.state is FireState.FIRED]
            assert len({f.instant_us for f in found}) == len(found) >= 2
            assert all(f.instant_us % 1_000_000 == 0 and f.recorded_us >= f.instant_us for f in found)
            assert min(f.recorded_us - f.instant_us for f in found) < 400_000
            assert worker.tasks.get(found[-1].task).origin == f"schedule:{name}:1:{found[-1].instant_us}"
        assert {who for who, _ in ran} == {"interval", "cron"}
        text = render(worker.database).decode()
    assert (
        'millstream_schedule_state{schedule="cron",state="ACTIVE"} 1.0' in text
        and 'millstream_schedule_fired_total{schedule="interval"}' in text
    )
    assert 'millstream_schedule_behind_seconds{schedule="cron"} 0.0' in text


def test_a_worker_that_starts_again_publishes_only_what_changed(installation: Installation) -> None:
    """What is not declared any more stays; sets and dicts in arguments do not look like changes."""
    gate, ran = threading.Event(), list[tuple[str, float]]()

    def handlers_with(when: str) -> Handlers:
        found = made(gate, ran)
        found.task(name="sets", effects="idempotent")(lambda s: None)
        found.schedule("s", "sets", when, args=({"a", "b", "c", "d"},))
        return found

    for when, version in (("@daily", 1), ("@daily", 1), ("@weekly", 2)):
        with TaskWorker(installation, handlers_with(when)) as worker:
            assert worker.schedules.get("s").version == version
    with TaskWorker(installation, made(gate, ran)) as worker:
        assert worker.schedules.get("s").state is ScheduleState.ACTIVE


def test_what_could_not_be_submitted_is_not_published(installation: Installation) -> None:
    """Unknown handlers and queues, arguments that do not fit: refused at once, nothing is stored."""
    with Schedules(installation, made(threading.Event(), [])) as schedules:
        for handler, args, options, error in (
            ("tack", (), None, UnknownHandler),
            ("tick", (), None, TaskInvalid),
            ("tick", (5,), None, TaskInvalid),
            ("tick", ("x",), Options(queue="nowhere"), UnknownQueue),
            ("tick", ("x",), Options(delay_s=-1), TaskInvalid),
        ):
            with pytest.raises(error):
                schedules.publish("s", handler, "@daily", args, options=options)
        with pytest.raises(ScheduleInvalid):
            schedules.publish("s", "tick", "0 0 30 2 *", ("x",))
        handlers = made(threading.Event(), [])
        handlers.schedule("forgetful", "tick", "@daily")
        with Schedules(installation, handlers) as declared, pytest.raises(TaskInvalid, match=r"schedule 'forgetful': .* missing"):
            declared.sync()
        assert schedules.list() == []
        for work in (
            schedules.get,
            schedules.trigger,
            schedules.pause,
            schedules.resume,
            schedules.delete,
            schedules.fires,
            schedules.versions,
            schedules.preview,
        ):
            with pytest.raises(ScheduleNotFound):
                work("s")


def test_a_schedule_from_python(installation: Installation) -> None:
    """Publish, preview, trigger, backfill, pause, resume, versions, delete."""
    with Schedules(installation, made(threading.Event(), []), actor="me") as schedules:
        tick = "tick"
        assert schedules.publish("s", tick, "30 2 * * *", ("x",), zone="Europe/Berlin").changed
        shown = schedules.preview("s", 3)
        assert [(i.hour, i.minute, str(i.tzinfo)) for i in shown] == [(2, 30, "Europe/Berlin")] * 3 or len(shown) == 3
        assert schedules.get("s").next_us == int(shown[0].timestamp() * 1e6)
        first, again = schedules.trigger("s", "r"), schedules.trigger("s", "r")
        assert first == again and first.actor == "me" and first.state is FireState.FIRED
        now = dt.datetime.now(UTC)
        done = schedules.backfill("s", now - dt.timedelta(days=10), now - dt.timedelta(seconds=1), "b")
        assert 9 <= done.fires <= 11 and schedules.backfill("s", now - dt.timedelta(days=10), now - dt.timedelta(seconds=1), "b") == done
        assert sum(f.kind is FireKind.BACKFILL for f in schedules.fires("s")) == done.fires
        for start, end in ((now - dt.timedelta(days=2000), now), (now, now + dt.timedelta(days=1))):
            with pytest.raises(ScheduleInvalid):
                schedules.backfill("s", start, end)
        with pytest.raises(ScheduleInvalid, match="must match"):
            schedules.trigger("s", "a/b")
        assert schedules.pause("s", "holidays").state is ScheduleState.PAUSED and len(schedules.preview("s", 2)) == 2
        assert schedules.resume("s").state is ScheduleState.ACTIVE
        assert schedules.publish("s", tick, dt.timedelta(hours=2), ("x",)).version == 2 and len(schedules.versions("s")) == 2
        assert isinstance(schedules.definition("s").spec, Interval)
        schedules.delete("s", "done with it")
        assert schedules.list() == [] and len(schedules.fires("s")) > 0


def test_a_preview_needs_no_database() -> None:
    """And is bounded."""
    assert [i.second for i in preview(Interval(every_us=20_000_000), 3, 0)] == [20, 40, 0]
    for count in (0, 1001):
        with pytest.raises(ScheduleInvalid):
            preview(Interval(every_us=20_000_000), count, 0)


# -- the command line


@pytest.fixture
def program(tmp_path: Path, installation: Installation, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    plain_environment(monkeypatch)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    (tmp_path / "proj_schedules.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield CommandLine(tmp_path, "schedules")
    sys.modules.pop("proj_schedules", None)
    structlog.reset_defaults()


def test_commands_do_what_they_say(program: CommandLine) -> None:
    """From sync to deletion; lists and JSON have stable keys."""
    code = "proj_schedules:handlers"
    assert program.done("sync", code).startswith("nightly: version 1 published, next fire 2")
    assert "version 1 as before" in program.done("sync", code)
    published = program.data(
        "publish",
        "s",
        "report",
        "--cron",
        "0 9 * * MON#1",
        "--zone",
        "Asia/Tokyo",
        "--args",
        '["x"]',
        "--overlap",
        "skip",
        "--handlers",
        code,
    )
    assert published["s"]["version"] == 1 and published["s"]["changed"] is True
    assert [r["name"] for r in program.data("list")] == ["nightly", "s"] and "ACTIVE" in program.done("list")
    shown = program.data("show", "s")
    assert (shown["when"], shown["handler"], shown["overlap"], shown["args"]) == (
        "0 9 * * MON#1 (Asia/Tokyo, gap run_after, fold first)",
        "report",
        "skip",
        "['x']",
    )
    assert "version 1 of" in program.done("show", "nightly")
    assert len(program.data("preview", "s", "--count", "4")) == 4 and program.done("preview", "s", "--count", "1").startswith("Mon ")
    assert "+0900" in program.done("preview", "s", "--count", "1")
    fire = program.data("trigger", "s", "--request", "r")
    assert program.data("trigger", "s", "--request", "r") == fire and fire["state"] == "FIRED"
    assert "s is SKIPPED by request r2" in program.done("trigger", "s", "--request", "r2")
    assert "backfill" not in program.done("fires", "s")
    assert program.data(
        "backfill", "nightly", "--from", "2024-01-01T00:00:00+01:00", "--to", "2024-01-04T00:00:00+01:00", "--request", "b"
    ) == {"request": "b", "fires": 3}
    assert [f["kind"] for f in program.data("fires", "nightly")] == ["backfill"] * 3 and "2024-01-03 01:30:00" in program.done(
        "fires", "nightly"
    )
    assert program.done("pause", "s", "--reason", "holidays") == "s is PAUSED" and program.data("show", "s")["reason"] == "holidays"
    assert program.done("resume", "s").startswith("s is ACTIVE, next fire")
    assert program.done("delete", "s") == "s is DELETED" and [r["name"] for r in program.data("list")] == ["nightly"]


def test_a_preview_of_an_expression_needs_nothing(tmp_path: Path) -> None:
    """No database, no configuration."""
    result = CliRunner().invoke(main, ["schedules", "preview", "--cron", "0 12 * * *", "--zone", "Europe/Berlin", "--count", "2", "--json"])
    assert result.exit_code == 0 and len(json.loads(result.stdout)) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        pytest.param(["show", "nobody"], 3, "no schedule 'nobody'", id="not-found"),
        pytest.param(["publish", "s", "report", "--cron", "0 0 30 2 *"], 4, "bad day-of-month", id="impossible"),
        pytest.param(["publish", "s", "report"], 2, "one of --cron, --every and --at", id="no-when"),
        pytest.param(["publish", "s", "report", "--cron", "@daily", "--every", "5"], 2, "one of --cron", id="two-whens"),
        pytest.param(["publish", "s", "report", "--every", "60", "--zone", "UTC"], 4, "zone means nothing", id="zone-of-interval"),
        pytest.param(["publish", "s", "report", "--at", "2030-01-01T00:00:00"], 2, "no offset", id="no-offset"),
        pytest.param(["publish", "s", "report", "--at", "tomorrow"], 2, "--at must be like", id="no-instant"),
        pytest.param(["publish", "s", "report", "--cron", "@daily", "--args", "{}"], 2, "--args is no JSON array", id="args"),
        pytest.param(["preview"], 2, "one of --cron", id="preview-of-nothing"),
        pytest.param(["preview", "s", "--cron", "@daily"], 2, "not both", id="preview-of-both"),
        pytest.param(["backfill", "s", "--from", "x", "--to", "y"], 2, "--from must be like", id="backfill"),
    ],
)
def test_wrong_commands_say_what_to_write(program: CommandLine, arguments: list[str], code: int, text: str) -> None:
    """Exit code and a text, nothing is stored."""
    found = program.refused(*arguments)
    assert found[0] == code and text in found[1]
    assert program.data("list") == []


def test_a_beat_schedule_is_imported_or_refused_entry_by_entry(program: CommandLine) -> None:
    """Nothing is published while an entry cannot be honoured, unless it is asked for."""
    given = ("import", "--celery", "proj_schedules:app", "--handlers", "proj_schedules:handlers")
    code, text = program.refused(*given)
    assert code == 4 and "3 of 4 entries are refused, nothing was published" in text and program.data("list") == []
    for entry in (
        "wrong-arguments: refused: handler 'report'",
        "nobody-s: refused: no handler named 'other'",
        "relative: refused: relative",
    ):
        assert f"millstream: {entry}" in text
    code, out, _ = program(*given, "--dry-run")
    assert code == 0 and out.startswith("hourly-report: 5 * * * * (UTC)") and program.data("list") == []
    code, out, _ = program(*given, "--partly")
    assert (
        code == 0
        and out.startswith("hourly-report: version 1 published")
        and [r["name"] for r in program.data("list")] == ["hourly-report"]
    )
