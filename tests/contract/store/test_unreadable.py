"""Rows that a newer version has written: this one leaves them alone, says so once, and goes on with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import HOUR, ending, evidence, fresh, new, session, settle, submit, take, taken

from millstream import Installation
from millstream.tasks import Tasks
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import StoreError, UnknownFormat
from millstream_schema.store import claims, settling
from millstream_schema.store.settling import Answer

T = TaskState
NEWER: dict[str, dict[str, Any]] = {
    "cause": {"cause": "a newer cause"},
    "policy": {"policy": '{"attempts": "as many as it takes"}'},
    "ending": {"ending": '{"state": "RESTING"}'},
}
"""What this version cannot read, by column."""


@pytest.fixture(params=list(NEWER))
def newer(request: pytest.FixtureRequest) -> dict[str, Any]:
    return NEWER[request.param]


def written(store: Opened, *keys: str, **values: Any) -> None:
    """A newer version writes this into these tasks."""
    t = store.db.tables.task
    assert store.db.run(lambda tx: tx.update(t, t.c.key.in_(keys), **values)) == len(keys)


def state(store: Opened, key: str) -> str:
    t = store.db.tables.task
    return str(store.db.read(lambda tx: tx.rows(t.select().where(t.c.key == key)))[0]["state"])


def test_claims_go_past_what_cannot_be_read(store: Opened, newer: dict[str, Any]) -> None:
    """However little room there is; each is told of once, with what to do, and is taken as soon as it can be read again."""
    submit(store.db, *[new(f"newer-{i}", priority=9) for i in range(7)], new("a"), new("b"))
    written(store, *[f"newer-{i}" for i in range(7)], **newer)
    session(store.db)
    with capture_logs() as logs:
        assert [take(store.db, count=1)[0].key for _ in range(2)] == ["a", "b"]
        assert take(store.db, count=10) == []
    told = [entry for entry in logs if "cannot be read" in entry["event"]]
    assert told and len({entry["id"] for entry in told}) == len(told) and all("upgrade this process" in e["error"] for e in told)
    assert {state(store, f"newer-{i}") for i in range(7)} == {"READY"}
    written(store, "newer-3", cause="", ending=None, policy='{"attempts": 3}')
    assert [row.key for row in take(store.db, count=1)] == ["newer-3"]


def test_what_is_due_is_woken_past_what_cannot_be_read(store: Opened, newer: dict[str, Any]) -> None:
    """And nobody is told to look again at once for what it cannot wake."""
    submit(store.db, *[new(f"newer-{i}", delay_us=HOUR) for i in range(5)], new("a", delay_us=HOUR), new("later", delay_us=HOUR))
    t = store.db.tables.task
    written(store, *[f"newer-{i}" for i in range(5)], wake_us=1, **newer)
    written(store, "a", wake_us=2)
    assert store.db.run(lambda tx: claims.wake_due(tx, 5)) == 1
    assert state(store, "a") == "READY" and state(store, "newer-0") == "SCHEDULED"
    wake = store.db.read(lambda tx: tx.rows(t.select().where(t.c.key == "later")))[0]["wake_us"]
    assert store.db.run(lambda tx: claims.next_wake(tx, tx.now_us())) == wake


def test_what_is_late_expires_past_what_cannot_be_read(store: Opened, newer: dict[str, Any]) -> None:
    """Those are left as they are."""
    submit(store.db, *[new(f"newer-{i}", deadline_us=HOUR) for i in range(5)], new("a", deadline_us=HOUR))
    written(store, *[f"newer-{i}" for i in range(5)], limit_us=1, deadline_us=1, **newer)
    written(store, "a", limit_us=2, deadline_us=2)
    assert store.db.run(lambda tx: claims.expire_late(tx, 5)) == 1
    assert state(store, "a") == "EXPIRED" and {state(store, f"newer-{i}") for i in range(5)} == {"READY"}


def test_what_a_lost_session_held_is_taken_back_past_what_cannot_be_read(store: Opened, newer: dict[str, Any]) -> None:
    """However many of those come first."""
    keys = [f"k{i}" for i in range(6)]
    taken(store.db, *[new(key) for key in keys])
    t, n = store.db.tables.task, store.db.tables.node
    first = store.db.read(lambda tx: [r["key"] for r in tx.rows(t.select().order_by(t.c.id))])[:5]
    written(store, *first, **newer)
    store.db.run(lambda tx: tx.update(n, n.c.id == "s", expires_us=1))
    assert store.db.run(lambda tx: settling.expire_session(tx, "s", 0))
    assert store.db.run(lambda tx: settling.take_back(tx, "s", lambda: 0.5, 5)) == 1
    assert [state(store, key) for key in keys if key not in first] == ["READY"] and {state(store, key) for key in first} == {"RUNNING"}


def test_an_end_of_a_task_that_cannot_be_read_holds_up_no_other(store: Opened, newer: dict[str, Any]) -> None:
    """Somebody newer has it: the report is stale. One that is still this worker's is refused, so that its host keeps it and tries again."""
    rows = taken(store.db, new("gone"), new("mine"), new("plain"))
    written(store, "gone", fence=9, **newer)
    ends = [ending(row, o.GaveUp("no")) for row in rows]
    assert settle(store.db, ends[0], ends[2]) == [Answer.STALE, Answer.APPLIED]
    written(store, "mine", **newer)
    with pytest.raises(StoreError, match="upgrade this process"):
        settle(store.db, ends[1])
    assert state(store, "mine") == "RUNNING"
    written(store, "mine", cause="", ending=None, policy='{"attempts": 1}')
    assert settle(store.db, ends[1]) == [Answer.APPLIED]


def test_whoever_asks_for_it_is_told_why_and_lists_show_the_others(store: Opened, tmp_path: Path) -> None:
    """Also the attempts of one task: those that can be read."""
    (row,) = taken(store.db, new("a"), who=fresh("s"))
    settle(store.db, ending(row, o.RetryAsked(0)))
    submit(store.db, new("b"))
    a = store.db.tables.attempt
    newer = {"outcome": "Rested", "cause": "a newer cause", "detail": "", "late": 0, "started_us": 1, "ended_us": 1}
    store.db.run(lambda tx: tx.insert(a, task=row.id, fence=7, number=0, session="s", **newer))
    assert [fence for fence, *_ in evidence(store.db, row.id)] == [1]
    written(store, "a", **NEWER["cause"])
    with Tasks(Installation.local(tmp_path, database=store.url)) as tasks:
        assert [r.key for r in tasks.list()] == ["b"]
        with pytest.raises(UnknownFormat, match=f"task {row.id} holds what this version.*upgrade this process"):
            tasks.get(row.id)
