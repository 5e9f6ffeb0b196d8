"""``Queues`` and ``Permits`` as users call them: what is set is seen, felt and told with who did it; what cannot be set is refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream import ConfigurationError, Handlers, Installation, PermitNotFound, Permits, Queues, Tasks
from millstream_schema.durable.records import TaskRow
from millstream_schema.ports import SystemClock
from millstream_schema.store import claims, registry
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

handlers = Handlers()


@handlers.task(name="mail", queue="post", effects="idempotent", permit="box:{number}")
def mail(number: int) -> None:
    """Nothing."""


class Desk:
    """Everything of one installation, on one database."""

    def __init__(self, path: Path) -> None:
        inst = Installation.local(path)
        self.db = Database(inst.database, SystemClock())
        create_schema(self.db)
        self.woken: list[str] = []
        self.queues = Queues(inst, actor="ann", database=self.db, wake=self.woken.append)
        self.permits = Permits(inst, actor="ann", database=self.db)
        self.tasks = Tasks(inst, handlers, database=self.db)
        self.db.run(lambda tx: registry.register_node(tx, "s", "s", 0, 60_000_000, "{}"))

    def take(self, claim: str) -> list[TaskRow]:
        found = self.db.run(lambda tx: claims.claim(tx, "s", claim, claim, {"default/post": 9}, ["mail"], 9, again=False))
        assert found is not None
        return found.tasks


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path)
    yield found
    found.db.close()


@pytest.mark.parametrize("of", ["queue", "handler", "permit"])
def test_a_pause_is_seen_felt_and_told_by_whom_and_why(desk: Desk, of: str) -> None:
    """Until it ends; whoever waits is told."""
    task = desk.tasks.submit("mail", 7).task
    pause: dict[str, Any] = {
        "queue": lambda: desk.queues.pause("post", reason="strike"), "handler": lambda: desk.queues.pause(handler="mail", reason="strike"),
        "permit": lambda: desk.permits.pause("box:7", reason="strike"),
    }  # fmt: skip
    resume: dict[str, Any] = {
        "queue": lambda: desk.queues.resume("post"), "handler": lambda: desk.queues.resume(handler="mail"), "permit": lambda: desk.permits.resume("box:7"),
    }  # fmt: skip
    gate = pause[of]()
    assert (gate.paused_by, gate.paused_why) == ("ann", "strike")
    assert desk.take("c1") == []
    assert (
        f"{of} " in desk.tasks.why(task) and "is paused by ann since" in desk.tasks.why(task) and desk.tasks.why(task).endswith(": strike")
    )
    assert [g.name for g in desk.queues.handlers()] == (["mail"] if of == "handler" else [])
    assert resume[of]() is True and resume[of]() is False
    assert [r.key for r in desk.take("c2")] == [desk.tasks.get(task).key]
    assert ("post" in desk.woken) == (of == "queue")


def test_a_queue_shows_what_is_set_of_it_and_how_it_stands(desk: Desk) -> None:
    """Open tasks by state, what blocks them, the oldest; a queue with nothing but a setting is listed."""
    for i in range(5):
        desk.tasks.submit("mail", 7 if i < 3 else i)
    assert len(desk.take("c1")) == 3
    desk.queues.set_weight("post", 3)
    desk.queues.set_rate("post", rate="10/m", burst=2)
    desk.queues.set_quota("post", backlog=100)
    desk.queues.set_quota("idle", accepting=False)
    views = {v.queue: v for v in desk.queues.list()}
    assert set(views) == {"post", "idle"}
    v = desk.queues.show("post")
    assert v.standing.states == {"RUNNING": 3, "READY": 2} and v.standing.blocked == {"permit:default/box:7": 2}
    assert (v.standing.held, v.standing.oldest_us, v.standing.complete, v.weight) == (3, None, True, 3)
    assert v.weighed_by == "ann" and v.weighed_us > 0
    assert v.gate is not None and (v.gate.rate, v.gate.burst) == (10, 2) and v.quota is not None and v.quota.backlog == 100
    empty = desk.queues.show("nothing")
    assert (empty.weight, empty.weighed_by, empty.gate, empty.quota, empty.standing.states) == (1, "", None, None, {})
    assert desk.queues.quota() is None


def test_a_permit_shows_who_holds_it_and_who_waits(desk: Desk) -> None:
    """And takes another capacity at once."""
    with pytest.raises(PermitNotFound):
        desk.permits.show("box:7")
    ids = [desk.tasks.submit("mail", 7).task for _ in range(4)]
    (first,) = desk.take("c1")
    view = desk.permits.show("box:7")
    assert (view.line.holders, view.line.waiting, set(view.line.first)) == ([first.id], 3, set(ids) - {first.id})
    assert [(p.key, p.capacity, p.held) for p in desk.permits.list()] == [("box:7", 1, 1)]
    desk.permits.set_capacity("box:7", 3)
    assert len(desk.take("c2")) == 2
    assert desk.permits.show("box:7").permit.changed_by == "ann" and view.permit.changed_by == ""
    desk.permits.set_capacity("box:7", 1)
    assert desk.take("c3") == [] and desk.permits.show("box:7").permit.held == 3
    assert "3 of 1 are held" in desk.tasks.why(next(t for t in ids if desk.tasks.get(t).blocked_by))
    assert desk.permits.list(after="box:7") == []


def test_a_rate_is_felt_and_told(desk: Desk) -> None:
    """Of a permit's key, of a queue, of a handler."""
    for i in range(3):
        desk.tasks.submit("mail", i)
    desk.queues.set_rate(handler="mail", rate="1/h")
    assert len(desk.take("c1")) == 1
    waiting = next(t.id for t in desk.tasks.list() if t.blocked_by)
    assert "handler 'mail' starts 1/h: the next token is there in" in desk.tasks.why(waiting)
    desk.queues.set_rate(handler="mail", rate=None)
    assert len(desk.take("c2")) == 2


REFUSED: dict[str, Any] = {
    "neither": lambda d: d.queues.pause(reason="x"),
    "both": lambda d: d.queues.pause("post", handler="mail", reason="x"),
    "no reason": lambda d: d.queues.pause("post", reason=" "),
    "bad queue": lambda d: d.queues.resume("no such/queue"),
    "bad handler": lambda d: d.queues.set_rate(handler="1 2", rate="1/s"),
    "bad rate": lambda d: d.queues.set_rate("post", rate="often"),
    "bad burst": lambda d: d.queues.set_rate("post", rate="1/s", burst=0),
    "bad weight": lambda d: d.queues.set_weight("post", 0),
    "bad backlog": lambda d: d.queues.set_quota("post", backlog=-1),
    "bad window": lambda d: d.queues.set_quota("post", accept="20000/s"),
    "bad quota queue": lambda d: d.queues.set_quota("a/b"),
    "bad capacity": lambda d: d.permits.set_capacity("p", 0),
    "empty key": lambda d: d.permits.pause("", reason="x"),
    "long key": lambda d: d.permits.set_rate("x" * 201, rate="1/s"),
    "bad namespace": lambda d: Queues(Installation.local(Path("/nowhere")), "a/b"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_cannot_be_set_is_refused_and_nothing_is_stored(desk: Desk, what: str) -> None:
    """At once, with what to write instead."""
    with pytest.raises(ConfigurationError):
        REFUSED[what](desk)
    for table in ("gate", "quota", "lane", "permit"):
        assert desk.db.read(lambda tx, t=table: tx.rows(getattr(tx.t, t).select())) == []  # type: ignore[misc]
