"""Identifiers that a person, or a forgiving collation, takes for the same: case, accents, blanks at the end, Unicode forms, width. They are different, or refused; never merged."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session
from tests.contract.store.schedule_rows import every_fire
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import asked, every, session

from millstream import Handlers, Installation, Item, MillstreamError, Outbox, Permits, Queues, Schedules, Subscriptions, Tasks, TaskState
from millstream_schema.durable.records import Receipt, TaskRow
from millstream_schema.durable.requests import NAME

PAIRS = {
    "case": ("key", "KEY"),
    "case of one letter": ("key", "keY"),
    "accent": ("cafe", "café"),
    "composed and decomposed": ("caf\u00e9", "cafe\u0301"),
    "blank at the end": ("key", "key "),
    "blank at the front": ("key", " key"),
    "line at the end": ("key", "key\n"),
    "width": ("key", "ｋey"),
    "letter and ligature": ("ae", "æ"),
    "sharp s": ("strasse", "straße"),
    "dotless i": ("i", "ı"),
    "ohm and omega": ("\u2126", "\u03a9"),
    "joiner that nobody sees": ("key", "k\u200dey"),
    "zero that counts nothing": ("1", "01"),
}
NAMES = sorted({name for pair in PAIRS.values() for name in pair})
GOOD = [name for name in NAMES if NAME.match(name)]
"""What can name a queue, a handler, a schedule or a subscription at all."""
CASES = ["KEY", "keY", "key"]


class Clients:
    """All that take identifiers, on one store."""

    def __init__(self, store: Opened) -> None:
        self.db = store.db
        installation = Installation(database=store.url, transport="redis://nowhere/0", checkpoints="/nowhere")
        self.handlers = Handlers()
        self.handlers.task(name="work", effects="idempotent")(lambda: None)
        self.tasks = Tasks(installation, self.handlers, database=store.db)
        self.schedules = Schedules(installation, self.handlers, database=store.db)
        self.subscriptions = Subscriptions(installation, database=store.db)
        self.queues = Queues(installation, database=store.db)
        self.permits = Permits(installation, database=store.db)

    def claimed(self, lane: str = "default/default", handler: str = "work") -> list[TaskRow]:
        """What a worker of this one queue and handler gets."""
        found = self.db.run(lambda tx: asked(tx, "s", 100, lanes=[lane], handlers=[handler]))
        assert found is not None
        return found.tasks


@pytest.fixture
def clients(store: Opened) -> Iterator[Clients]:
    session(store.db)
    yield Clients(store)


def named(make: Callable[[str], Any]) -> list[str]:
    """The names with which something can be made; the others are refused with an error of ours."""
    made = []
    for name in NAMES:
        try:
            make(name)
        except MillstreamError:
            continue
        made.append(name)
    return made


def test_the_pairs_differ() -> None:
    """Else they would show nothing."""
    assert all(a != b for a, b in PAIRS.values())
    assert set(CASES) <= set(GOOD)


def test_keys_business_keys_and_permit_keys_are_what_was_given(clients: Clients) -> None:
    """Each is a task of its own, found by its own business key alone, and waits for nobody else's permit; a repeat finds its own."""
    first = {name: clients.tasks.submit("work", key=name, business_key=name, permit=name).task for name in NAMES}
    assert {name: clients.tasks.submit("work", key=name, business_key=name, permit=name).task for name in NAMES} == first
    assert len(set(first.values())) == len(NAMES) == len(every(clients.db))
    assert {name: [r.id for r in clients.tasks.list(business_key=name)] for name in NAMES} == {n: [t] for n, t in first.items()}
    stopped = NAMES[0]
    clients.permits.pause(stopped, reason="only this one")
    assert sorted(r.key for r in clients.claimed()) == sorted(set(NAMES) - {stopped})
    clients.permits.resume(stopped)
    assert [r.key for r in clients.claimed()] == [stopped]
    assert {p.id: p.held for p in clients.permits.list()} == {f"default/{name}": 1 for name in NAMES}


def test_many_at_once_and_an_outbox_keep_keys_apart(clients: Clients, store: Opened) -> None:
    """Also within one transaction, in whatever order they come."""
    receipts = clients.tasks.submit_many("work", [Item(key=name) for name in [*NAMES, *reversed(NAMES)]])
    ids = [r.task for r in receipts if isinstance(r, Receipt)]
    assert ids == [*ids[: len(NAMES)], *reversed(ids[: len(NAMES)])] and len(set(ids)) == len(NAMES)
    Outbox.create(store.url, prefix="alike")
    outbox = Outbox(clients.handlers, target=clients.tasks.installation_id, prefix="alike")
    with Session(store.db.engine) as mine:
        entries = [outbox.submit(mine, "work", key=name).entry for name in [*NAMES, *NAMES]]
        mine.rollback()
    assert entries == entries[: len(NAMES)] * 2 and len(set(entries)) == len(NAMES)


def test_handlers_and_queues_are_told_apart_or_refused(clients: Clients) -> None:
    """Those that a worker serves it gets, and no other; a pause stops its own."""

    def register(name: str) -> None:
        clients.handlers.task(name=name, queue=name, effects="idempotent")(lambda: None)

    made = [name for name in named(register) if name in clients.handlers.registry.names()]
    assert made == [n for n in GOOD if not n[0].isdigit()]
    for name in made:
        clients.tasks.submit(name, key="k")
    assert len({r.id for r in clients.tasks.list(limit=1000)}) == len(made)
    clients.queues.pause(made[0], reason="only this one")
    for name in made:
        others = [o for o in made if o != name]
        assert [r.handler for other in others for r in clients.claimed(f"default/{other}", name)] == []
        assert [r.handler for r in clients.claimed(f"default/{name}", name)] == [name] * (name != made[0])


def test_schedules_and_subscriptions_are_told_apart_or_refused(clients: Clients) -> None:
    """One that is triggered, paused or deleted leaves the other as it is."""
    assert named(lambda name: clients.schedules.publish(name, "work", dt.timedelta(days=1))) == GOOD
    assert [r.name for r in clients.schedules.list()] == GOOD
    assert named(lambda name: clients.subscriptions.create(name)) == GOOD
    assert [s.name for s in clients.subscriptions.list()] == GOOD
    for name in CASES:
        fires = [clients.schedules.trigger(name, request) for request in CASES]
        assert len({f.task for f in fires}) == len(CASES) == len(every_fire(clients.db, name))
    gone = GOOD[0]
    clients.schedules.delete(gone)
    clients.subscriptions.delete(gone)
    assert [r.name for r in clients.schedules.list()] == [s.name for s in clients.subscriptions.list()] == GOOD[1:]
    for name in set(NAMES) - set(GOOD[1:]):
        with pytest.raises(MillstreamError):
            clients.schedules.get(name)
        with pytest.raises(MillstreamError):
            clients.subscriptions.get(name)


def test_a_namespace_sees_its_own_tasks_alone(clients: Clients, store: Opened) -> None:
    """Names of namespaces likewise."""
    installation = Installation(database=store.url, transport="redis://nowhere/0", checkpoints="/nowhere")
    made: dict[str, Tasks] = {}

    def make(name: str) -> None:
        made[name] = Tasks(installation, clients.handlers, name, database=store.db)

    assert named(make) == GOOD
    ids = {name: tasks.submit("work", key="k", permit="p").task for name, tasks in made.items()}
    assert {name: [r.id for r in tasks.list()] for name, tasks in made.items()} == {name: [task] for name, task in ids.items()}
    for name in GOOD:
        assert [r.state for r in clients.claimed(f"{name}/default")] == [TaskState.RUNNING], "its permit is its own"
