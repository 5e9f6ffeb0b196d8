"""``millstream subscriptions`` and ``millstream deliveries`` against an installation in which tasks end: what is shown, what is done, exit codes; what the client refuses."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import CommandLine, plain_environment

from millstream.handlers import Handlers
from millstream.inbox import Inbox
from millstream.installation import Installation
from millstream.subscriptions import Subscriptions
from millstream.task_worker import TaskWorker
from millstream.tasks import Tasks
from millstream_schema.errors import ConfigurationError, DeliveryNotFound, SubscriptionConflict, SubscriptionNotFound
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

LINE = {
    "id", "namespace", "name", "state", "mode", "publish_to", "celery_task", "handler", "queue", "business_key", "states", "attempts", "delay", "max_delay",
    "lease", "since_us", "catch_up", "created_us",
}  # fmt: skip
PULLED = {"event", "lease", "attempt", "handler", "key", "queue", "business_key", "state", "cause", "reason", "result", "settled_us"}
LISTED = {"event", "state", "attempts", "due_us", "lease", "reason", "created_us", "changed_us", "actor"}
handlers = Handlers()


@handlers.task(name="add", effects="idempotent")
def add(a: int, b: int) -> int:
    return a + b


class Program(CommandLine):
    """``millstream`` on one installation below a directory, and its clients."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.installation = Installation.local(directory)
        database = Database(self.installation.database, SystemClock(), prefix=self.installation.table_prefix)
        create_schema(database)
        self.tasks = Tasks(self.installation, handlers, database=database)
        self.subscriptions = Subscriptions(self.installation, database=database)
        self.database = database

    def ended(self, key: str) -> str:
        """A task that is over."""
        task = self.tasks.submit(add, 1, 2, key=key).task
        self.tasks.cancel(task)
        return task


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    plain_environment(monkeypatch)
    made = Program(tmp_path)
    yield made
    made.database.close()


def test_a_subscription_is_made_shown_paused_resumed_and_deleted(program: Program) -> None:
    """With stable keys; its name is free afterwards; the same again is the same."""
    options = ["--handler", "add", "--state", "cancelled", "--state", "FAILED", "--attempts", "3", "--lease", "5"]
    made = program.data("subscriptions", "create", "billing", *options)
    assert set(made) == LINE
    assert (made["state"], made["mode"], made["states"], made["attempts"], made["lease"]) == (
        "ACTIVE",
        "pull",
        ["CANCELLED", "FAILED"],
        3,
        5.0,
    )
    assert program.done("subscriptions", "create", "billing", *options) == "subscription billing is ACTIVE"
    assert program.refused("subscriptions", "create", "billing", "--handler", "other")[0] == 4
    program.done("subscriptions", "create", "mail", "--publish-to", "mail-q", "--celery-task", "shop.mail")
    program.ended("one")
    assert [s["name"] for s in program.data("subscriptions", "list")] == ["billing", "mail"]
    assert "billing" in program.done("subscriptions", "list") and program.data("subscriptions", "list", "--namespace", "other") == []
    assert program.done("subscriptions", "pause", "billing") == "subscription billing is PAUSED"
    assert program.data("deliveries", "pull", "billing") == []
    assert "billing is paused and hands out nothing" in program("deliveries", "pull", "billing")[2]
    assert program.done("subscriptions", "resume", "billing") == "subscription billing is ACTIVE"
    shown = program.data("subscriptions", "show", "billing")
    assert set(shown) == LINE | {"deliveries"} and shown["deliveries"] == {"PENDING": 1}
    assert "1 PENDING" in program.done("subscriptions", "show", "billing")
    assert program.done("subscriptions", "delete", "billing") == "subscription billing is deleted"
    assert program.refused("subscriptions", "show", "billing")[0] == 3
    assert program.data("subscriptions", "create", "billing")["id"] != made["id"]


def test_a_delivery_is_pulled_refused_parked_redelivered_and_acknowledged(program: Program) -> None:
    """By ids and leases as they are shown."""
    program.done("subscriptions", "create", "s", "--attempts", "2", "--delay", "0", "--max-delay", "0")
    one, two = program.ended("one"), program.ended("two")
    pulled = {d["key"]: d for d in program.data("deliveries", "pull", "s", "--lease", "60")}
    assert all(set(d) == PULLED for d in pulled.values())
    assert (pulled["one"]["event"], pulled["one"]["state"], pulled["one"]["attempt"], pulled["one"]["result"]) == (
        one,
        "CANCELLED",
        1,
        None,
    )
    lease = pulled["one"]["lease"]
    assert program.done("deliveries", "nack", "s", one, "--lease", lease, "--reason", "no\ndisk") == f"{one} is PENDING"
    assert program.refused("deliveries", "nack", "s", one, "--lease", lease)[0] == 3
    (again,) = program.data("deliveries", "pull", "s", "--limit", "1")
    assert program.done("deliveries", "nack", "s", one, "--lease", again["lease"], "--reason", "no\ndisk") == f"{one} is PARKED"
    (parked,) = program.data("deliveries", "parked", "s")
    assert set(parked) == LISTED and (parked["event"], parked["attempts"], parked["reason"]) == (one, 2, "no disk")
    assert program.done("deliveries", "redeliver", "s", "--parked") == "1 are delivered again"
    assert program.done("deliveries", "redeliver", "s", "--parked") == "0 are delivered again"
    assert program.done("deliveries", "ack", "s", one, two, one) == "2 acknowledged"
    assert {d["state"] for d in program.data("deliveries", "list", "s", "--state", "acknowledged")} == {"ACKNOWLEDGED"}
    assert program.data("deliveries", "list", "s", "--state", "parked") == [] and one in program.done("deliveries", "list", "s")
    assert program.done("deliveries", "redeliver", "s", one) == "1 are delivered again"
    assert one in program.done("deliveries", "pull", "s")


def test_what_is_wrong_is_said_and_exits_as_promised(program: Program) -> None:
    """Usage 2, not found 3; nothing is made."""
    program.done("subscriptions", "create", "s")
    assert program.refused("deliveries", "pull", "nobody")[0] == 3
    assert program.refused("deliveries", "ack", "s", "task-nowhere")[0] == 3
    assert program.refused("deliveries", "redeliver", "s", "task-nowhere")[0] == 3
    assert program.refused("deliveries", "redeliver", "s")[0] == 2
    assert program.refused("deliveries", "list", "s", "--state", "passed")[0] == 2
    code, text = program.refused("subscriptions", "create", "t", "--since", "yesterday")
    assert code == 2 and "--since must be an instant" in text
    code, text = program.refused("subscriptions", "create", "t", "--since", "2026-01-01T00:00:00")
    assert code == 2 and "has no time zone" in text
    assert [s["name"] for s in program.data("subscriptions", "list")] == ["s"]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("a b", {}, "its name must match"),
    ("", {}, "its name must match"),
    ("a/b", {}, "its name must match"),
    ("n", {"handler": "no such"}, "handler 'no such' must match"),
    ("n", {"queue": "a/b"}, "queue 'a/b' must match"),
    ("n", {"business_key": "x" * 201}, "business_key must be text"),
    ("n", {"business_key": "\x00"}, "business_key must be text"),
    ("n", {"states": ["RUNNING"]}, r"states must be ends of a task \(CANCELLED, EXPIRED, FAILED, SUCCEEDED\), not 'RUNNING'"),
    ("n", {"attempts": 0}, "attempts must be between 1 and 1000000"),
    ("n", {"attempts": 1.5}, "attempts must be between 1 and 1000000, a whole number, not 1.5"),
    ("n", {"delay": 5, "max_delay": 1}, "delay must not exceed"),
    ("n", {"delay": -1}, "delay must be a number of seconds"),
    ("n", {"lease": float("nan")}, "lease must be a number of seconds"),
    ("n", {"lease": 0}, "lease must be a number of seconds above 0 and at most 2592000, not 0"),
    ("n", {"celery_task": "t"}, "celery_task needs publish_to"),
    ("n", {"since": dt.datetime(2026, 1, 1)}, "has no time zone"),
    ("n", {"since": dt.datetime(2200, 1, 1, tzinfo=dt.UTC)}, "lies in the future"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_definition_is_refused_at_once(program: Program, case: int) -> None:
    """Naming what is wrong; nothing is stored."""
    name, options, said = WRONG[case]
    with pytest.raises(ConfigurationError, match=said):
        program.subscriptions.create(name, **options)
    assert program.subscriptions.list() == []


def test_a_consumer_is_told_what_it_may_not_do(program: Program) -> None:
    """A name of another definition; a delivery of a subscription that is gone; a foreign message."""
    s = program.subscriptions
    s.create("s")
    with pytest.raises(SubscriptionConflict, match="with another attempts, lease_ms: choose another name"):
        s.create("s", attempts=3, lease=1)
    task = program.ended("one")
    (delivery,) = s.pull("s")
    for limit in (0, 1001):
        with pytest.raises(ConfigurationError, match="limit must be between 1 and 1000"):
            s.pull("s", limit)
    with pytest.raises(ConfigurationError, match="lease must be a number of seconds above 0"):
        s.pull("s", lease=0)
    for body in ({}, {"subscription": "s", "event": task}, {"subscription": 1, "event": task, "namespace": "default"}):
        with pytest.raises(ConfigurationError, match="no message of a subscription"):
            s.received(body)
    s.delete("s")
    s.create("s")
    with pytest.raises(DeliveryNotFound):
        s.acknowledge(delivery)
    assert s.refuse(delivery) is False
    with pytest.raises(SubscriptionNotFound):
        s.pause("other")
    with pytest.raises(SubscriptionNotFound):
        s.delete("other")


def test_another_namespaces_subscriptions_are_not_there(program: Program) -> None:
    """Nor are its ends."""
    program.subscriptions.create("s")
    with Subscriptions(program.installation, "other") as other:
        other.create("s")
        task = program.ended("one")
        assert other.pull("s") == [] and other.list()[0].namespace == "other"
        with pytest.raises(DeliveryNotFound):
            other.acknowledge_by_id("s", task)
    assert [d.event for d in program.subscriptions.pull("s")] == [task]


def test_a_worker_in_this_process_delivers_and_a_consumer_gets_the_result(program: Program) -> None:
    """From submission to acknowledgement, with the result as it was returned; and what had ended before by ``since``."""
    with TaskWorker(program.installation, handlers) as worker:
        worker.tasks.wait(worker.tasks.submit(add, 20, 22, key="early"), 20)
        s = program.subscriptions
        s.create("s", states=["SUCCEEDED"])
        s.create("all", since=dt.datetime.now(dt.UTC) - dt.timedelta(hours=1))
        worker.tasks.wait(worker.tasks.submit(add, 1, 2, key="late"), 20)
        (delivery,) = s.pull("s")
        assert (delivery.key, delivery.result, delivery.handler) == ("late", 3, "add")
        with program.database.engine.begin() as connection:
            inbox = Inbox("consumer_inbox")
            inbox.create(connection)
            assert inbox.accept(connection, delivery) and not inbox.accept(connection, delivery)
        s.acknowledge(delivery)
        deadline, pause, found = 200, threading.Event(), list(s.pull("all"))
        while len(found) < 2 and deadline:
            pause.wait(0.05)
            deadline -= 1
            found += s.pull("all")
        assert sorted((d.key, d.result) for d in found) == [("early", 42), ("late", 3)]
