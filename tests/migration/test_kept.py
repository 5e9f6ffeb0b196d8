"""Installations and messages of released versions: this build migrates, reads and goes on with each of them."""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from millstream import Handlers, Installation, OutboxRelay, Schedules, Subscriptions, TaskFilter, Tasks, TaskState, TaskWorker
from millstream.intake import decode_arrived
from millstream_schema.durable.requests import decode_arguments
from millstream_schema.hints import JobHint, NodeHint
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import check_schema, create_schema

KEPT = Path(__file__).parent / "kept"
VERSIONS = sorted(path.stem for path in KEPT.glob("*.json"))
VALUES: tuple[Any, ...] = (
    None, True, 10**40, -1, 0.1, float("inf"), Decimal("1.10"), "é\u0000\n", b"\x00\xff", dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.date(2026, 1, 1),
    dt.timedelta(microseconds=1), (1, "a"), {"a": [1, {"b": None}], "c": {1, 2}},
)  # fmt: skip
KINDS = [
    pytest.param("sqlite", id="sqlite"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgres),
    pytest.param("mariadb", id="mariadb", marks=pytest.mark.mariadb),
]
handlers = Handlers()


@handlers.task(name="echo", effects="idempotent")
def echo(value: Any) -> Any:
    return value


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def installation(request: pytest.FixtureRequest, version: str, tmp_path: Path) -> Iterator[Installation]:
    """What the version left, migrated to this build: the file itself, and its rows on the servers."""
    path = tmp_path / "data" / "kept.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as kept:
        kept.executescript((KEPT / f"{version}.sql").read_text())
    local = Installation(database=f"sqlite:///{path}", transport="unix://", checkpoints=f"file://{tmp_path}/checkpoints")
    with closing(Database(local.database, SystemClock())) as db:
        create_schema(db)
        check_schema(db)
        if request.param == "sqlite":
            yield local
            return
        moved = local.model_copy(update={"database": request.getfixturevalue(f"{request.param}_url")})
        with closing(Database(moved.database, SystemClock())) as there:
            create_schema(there)
            move(db, there)
        yield moved


def move(here: Database, there: Database) -> None:
    """Every row, as it is."""
    for table in here.tables.metadata.sorted_tables:
        rows = here.read(lambda tx, t=table: tx.rows(sa.select(t)))  # type: ignore[misc]
        there.run(lambda tx, t=table: tx.delete(t))  # type: ignore[misc]
        if rows:
            there.run(lambda tx, t=table, rows=rows: tx.insert_many(t, rows))  # type: ignore[misc]


def test_what_a_version_left_is_read_and_goes_on(installation: Installation, version: str, tmp_path: Path) -> None:
    """Results come back with their types, states, evidence and links are there, cursors lead on, what waited runs, what was to be delivered is."""
    messages = json.loads((KEPT / f"{version}.json").read_text())
    with (
        Tasks(installation, handlers) as tasks,
        Subscriptions(installation) as subscriptions,
        Schedules(installation, handlers) as schedules,
    ):
        by = {row.key: row for row in tasks.list(limit=200)}
        assert [tasks.result(by[f"value-{at}"].id).get(1) for at in range(len(VALUES))] == list(VALUES)
        states = {key: by[key].state for key in ("failed", "known", "doubted", "waits", "scheduled", "cancelled", "held")}
        assert states == {
            "failed": TaskState.FAILED, "known": TaskState.UNKNOWN, "doubted": TaskState.UNKNOWN, "waits": TaskState.RETRY_WAIT,
            "scheduled": TaskState.SCHEDULED, "cancelled": TaskState.CANCELLED, "held": TaskState.SUCCEEDED,
        }  # fmt: skip
        assert tasks.get(by["failed"].superseded_by).retry_of == by["failed"].id
        assert "kept for later versions" in tasks.attempts(by["failed"].id)[0].detail
        assert [(n.text, n.task) for n in tasks.notes(by["held"].id)] == [("noted", by["held"].id)]
        assert [(p.done, p.total) for p in tasks.progress(by["held"].id)] == [(1, 2)]
        assert {(i.name, i.state.value) for key in ("known", "doubted") for i in tasks.intents(by[key].id)} == {
            ("known", "DONE"),
            ("doubted", "OPEN"),
        }
        for row in by.values():
            assert tasks.why(row.id) and decode_arguments(row.args)
        assert len(tasks.find(TaskFilter(business_key="values"), limit=50, cursor=messages["cursor"]).tasks) == len(VALUES) - 2
        tasks.review_done(tasks.get(by["known"].id), result=7, reason="kept")
        assert subscriptions.received(messages["publication"]).key.startswith("value-")
        assert {s.name for s in schedules.list()} == {"yearly"} and schedules.preview("yearly", 1)[0].month in (12, 1)
        assert [fire.request for fire in schedules.fires("yearly")] == ["by-hand"]
    with TaskWorker(installation, handlers) as worker:
        assert worker.tasks.wait(worker.tasks.submit(echo, 5), timeout=30) == 5
        outbox = tmp_path / "theirs.db"
        with closing(sqlite3.connect(outbox)) as theirs:
            theirs.executescript((KEPT / f"{version}.outbox.sql").read_text())
        with OutboxRelay(installation, f"sqlite:///{outbox}", tasks=worker.tasks) as relay:
            relay.once()
        [brought] = [row for row in worker.tasks.list(limit=200) if row.key == "outbox"]
        assert worker.tasks.wait(brought.id, timeout=30) == "from the outbox"


def test_messages_of_a_version_are_understood(version: str) -> None:
    """Those that may lie in a queue while builds change."""
    messages = json.loads((KEPT / f"{version}.json").read_text())
    arrived = decode_arrived(bytes.fromhex(messages["arrived"]))
    assert (arrived.id, arrived.handler, decode_arguments(arrived.arguments), arrived.options.business_key) == (
        "id-1",
        "echo",
        ([1], {}),
        "b",
    )
    assert msgspec.json.decode(messages["node hint"], type=NodeHint) == NodeHint("node-1", "job-1", 3, 2, "assigned")
    assert msgspec.json.decode(messages["job hint"], type=JobHint) == JobHint("job-1")
