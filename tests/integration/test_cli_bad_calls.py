"""Every command about durable tasks, with every kind of wrong value in every place: a text on standard error and an exit code, never a traceback, and nothing is changed.

The table is held against the commands themselves: one that it does not name, or a parameter of one, fails.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.support.command_line import CommandLine, plain_environment

from millstream.cli import main
from millstream.handlers import Handlers
from millstream.installation import Installation
from millstream.outbox import Outbox
from millstream.schedules import Schedules
from millstream.subscriptions import Subscriptions
from millstream.tasks import Tasks
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

NOUNS = {
    "why", "doctor", "tasks", "reviews", "markers", "outbox", "retention", "queues", "permits", "subscriptions", "deliveries", "schedules",
}  # fmt: skip
TORN, LONG = "\udcff", "x" * 100_000
TEXT = [TORN, LONG]
NAME = ["a b", TORN, LONG]
ID = ["nobody", "' OR 1=1 --", TORN, LONG]
COUNT = ["0", "-1", "x", "1.5", "9" * 30]
SECONDS = ["-1", "nan", "inf", "x", "1e300"]
INSTANT = ["yesterday", "2030-01-01T00:00:00", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59-12:00", TORN]
JSON = ["{", "x", TORN]
MODULE = ["nobody:nothing", "..", TORN, "os:path"]
ANY: list[str] = []
"""Nothing that is wrong: a flag, or words."""
BY_NAME: Mapping[str, list[str]] = {
    "limit": COUNT, "cursor": ["abc", *TEXT], "as_json": ANY, "state": ["nobody", TORN, ""], "handler": NAME, "queue": NAME, "business_key": TEXT,
    "created_from": INSTANT, "created_until": INSTANT, "settled_from": INSTANT, "settled_until": INSTANT, "origin": TEXT, "error_class": TEXT,
    "done": ["{}", "[]", '{"name": 1}', '{"name": "nobody"}', *JSON],
    "retry_of": TEXT, "task": ID, "dry_run": ANY, "token": ["abc", *TEXT], "reason": [""], "result": JSON, "older_than": ["x", "-1d", "9" * 30 + "d"],
    "celery": MODULE, "handlers": MODULE, "names": TEXT, "url": ["", "x", "nobody://", TORN], "prefix": NAME, "entry": ID, "once": ANY, "forever": ANY,
    "log": ANY, "time": ["x", "-1d", "0s", "9" * 30 + "d", TORN], "everywhere": ANY, "weight": COUNT, "rate": ["x", "0/s", "-1/s", TORN, LONG],
    "burst": COUNT, "backlog": ["-1", "x", "9" * 30], "accept": ["x", "0/s", TORN], "closed": ANY, "after": ANY, "key": ["", *TEXT], "capacity": COUNT,
    "name": ID, "publish_to": TEXT, "celery_task": TEXT, "attempts": COUNT, "delay": SECONDS, "max_delay": SECONDS, "lease": ["0", *SECONDS],
    "since": INSTANT, "ids": ID, "event": ANY, "all_parked": ANY, "cron": ["x", "", "99 * * * *", TORN, LONG], "every": ["x", "0", "-1", "nan", "inf", "1e300"],
    "at": INSTANT, "zone": ["Mars/Olympus", "../../etc/passwd", TORN, LONG], "gap": ["x", TORN], "fold": ["x", TORN], "args": JSON, "kwargs": JSON,
    "priority": ["x", "1.5", "9" * 30], "start_by": SECONDS, "deadline": SECONDS, "misfire": ["x"], "window": SECONDS, "overlap": ["x"], "jitter": SECONDS,
    "tolerance": SECONDS, "request": NAME, "start": INSTANT, "end": INSTANT, "count": COUNT, "target": MODULE, "partly": ANY, "permit": TEXT, "due_at": INSTANT,
}  # fmt: skip
RIGHT: Mapping[str, dict[str, str]] = {
    "markers init": {"handlers": "os:path"}, "outbox show": {"entry": "nobody"}, "outbox retry": {"entry": "nobody", "reason": "r"},
    "outbox relay": {"once": "--once"}, "retention set": {"time": "30d"}, "queues pause": {"queue": "q", "reason": "r"}, "queues resume": {"queue": "q"},
    "queues set": {"weight": "2"}, "queues rate": {"queue": "q", "rate": "1/s"}, "permits set": {"key": "p", "capacity": "2"},
    "permits rate": {"key": "p", "rate": "1/s"}, "permits pause": {"key": "p", "reason": "r"}, "deliveries ack": {"ids": "nobody"},
    "deliveries nack": {"event": "nobody", "lease": "l"}, "schedules publish": {"name": "n", "handler": "work", "cron": "0 0 * * *", "args": "[1]"},
    "schedules backfill": {"start": "2020-01-01T00:00:00+00:00", "end": "2020-01-02T00:00:00+00:00"}, "schedules preview": {"cron": "0 0 * * *"},
    "schedules import": {"celery": "os:path"}, "subscriptions create": {"name": "n", "publish_to": "q"},
    "tasks submit": {"handler": "work", "args": "[1]"}, "tasks of-key": {"handler": "work", "key": "k"},
    "tasks purge": {"older_than": "30d", "dry_run": "--dry-run"}, "tasks cancel": {"dry_run": "--dry-run"},
    "tasks retry": {"dry_run": "--dry-run"}, "reviews compensate": {"handler": "work", "args": "[1]"},
}  # fmt: skip
"""Of each command what it needs, or what makes its wrong values the only thing that is wrong. ``name``, ``task``: of what there is."""


def wrong(command: str, parameter: Any, of: list[Any]) -> list[str]:
    """Values that are wrong there."""
    filters = "created_from" in {p.name for p in of}
    if filters and parameter.name in ("handler", "queue"):
        return TEXT  # what no name could be is found nowhere
    if filters and parameter.name == "reason":
        return ANY  # a dry run needs none
    return ANY if (parameter.name, command) in ELSEWHERE_TEXT else BY_NAME[parameter.name]


ELSEWHERE_TEXT = {("lease", "deliveries nack")}
"""A parameter that means another thing in this command: text of any kind."""


def commands() -> dict[str, list[Any]]:
    """Parameters of each command about durable tasks."""
    found: dict[str, list[Any]] = {}

    def walk(command: Any, path: list[str]) -> None:
        if path and path[0] not in NOUNS:
            return
        if hasattr(command, "commands"):
            for name, below in command.commands.items():
                walk(below, [*path, name])
        else:
            found[" ".join(path)] = [p for p in command.params if p.name != "help"]

    walk(typer.main.get_command(main), [])
    return found


def words(command: str, parameters: list[Any], given: Mapping[str, str]) -> list[str]:
    """A command line."""
    options, arguments = [], []
    for p in parameters:
        if p.name not in given:
            continue
        if p.param_type_name == "argument":
            arguments.append(given[p.name])
        elif given[p.name].startswith("--") and given[p.name] in p.opts:
            options.append(given[p.name])
        else:
            options.append(f"{p.opts[0]}={given[p.name]}")
    return [*command.split(), *options, "--", *arguments] if arguments else [*command.split(), *options]


class Scene(CommandLine):
    """``millstream`` where there is one of everything."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        installation, handlers = Installation.local(directory), Handlers()
        self.database = Database(installation.database, SystemClock(), prefix=installation.table_prefix)
        create_schema(self.database)

        @handlers.task(name="work", effects="idempotent")
        def work(a: int) -> None: ...

        tasks = Tasks(installation, handlers, database=self.database)
        self.task = tasks.submit("work", 1, key="k").task
        Subscriptions(installation, database=self.database).create("s")
        Schedules(installation, handlers, database=self.database).publish("s", "work", dt.timedelta(days=1), (1,))
        self.url = f"sqlite:///{directory / 'shop.db'}"
        Outbox.create(self.url)

    def right(self, command: str, parameters: list[Any]) -> dict[str, str]:
        there = {"name": "s", "task": self.task, "url": self.url, "queue": "q", "key": "p", "reason": "r"}
        return {p.name: there[p.name] for p in parameters if p.required and p.name in there} | RIGHT.get(command, {})

    def rows(self) -> dict[str, list[Any]]:
        return self.database.read(lambda tx: {t.name: tx.rows(t.select()) for t in self.database.tables.metadata.sorted_tables})


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    plain_environment(monkeypatch)
    made = Scene(tmp_path)
    yield made
    made.database.close()


def test_the_table_names_every_parameter() -> None:
    """So that what is new is tried too."""
    assert {c.split()[0] for c in commands()} == NOUNS
    assert {p.name for parameters in commands().values() for p in parameters} - set(BY_NAME) == set()


@pytest.mark.parametrize("noun", sorted(NOUNS))
def test_what_is_wrong_is_refused_and_changes_nothing(scene: Scene, noun: str) -> None:
    """One value at a time, all others right; all values where a noun has a parameter first, one in its other commands."""
    before, found, seen = scene.rows(), [], set[str]()
    for command, parameters in commands().items():
        if command.split()[0] != noun:
            continue
        right = scene.right(command, parameters)
        for p in parameters:
            values = wrong(command, p, parameters)
            for value in values[:1] if p.name in seen else values:
                code, _, err = scene(*words(command, parameters, {**right, p.name: value}))
                if (
                    code not in (1, 2, 3, 4, 5)
                    or not err
                    or len(err) > 3_000 + 2 * len(value) * (code == 2)
                    or "should not have happened" in err
                ):
                    found.append(f"{command} {p.name}={value!r:.30}: {code} {err[:250]!r}")
            seen.add(p.name)
    assert not found, "\n".join(found)
    assert scene.rows() == before
