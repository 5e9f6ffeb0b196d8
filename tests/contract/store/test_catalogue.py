"""Submitting by name: what workers tell of their handlers decides what is accepted where the code is not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import HOUR, LEASE, read

from millstream.handlers import Handlers
from millstream.installation import Installation
from millstream.tasks import Item, Refusal, Tasks
from millstream_schema.durable.catalogue import HandlerEntry, Served
from millstream_schema.durable.records import Receipt
from millstream_schema.durable.requests import Options
from millstream_schema.errors import TaskInvalid, UnknownHandler, UnknownQueue
from millstream_schema.store import catalogue, registry
from millstream_schema.store.rows import to


def program() -> Handlers:
    handlers = Handlers()

    @handlers.task(name="invoice", queue="money", effects="idempotent", permit="customer:{customer}")
    def invoice(customer: int, amount: float, note: str = "") -> None: ...

    return handlers


def newer() -> Handlers:
    handlers = Handlers()

    @handlers.task(name="invoice", queue="money", effects="idempotent")
    def invoice(customer: str, currency: str) -> None: ...

    return handlers


def serve(opened: Opened, handlers: Handlers, session: str = "s1", queues: tuple[str, ...] = ("money",)) -> None:
    told = handlers.registry.entries()
    served = Served(queues, {e.name: e.version for e in told})
    opened.db.run(lambda tx: catalogue.enter(tx, session, session, LEASE, served, told))


def entries(opened: Opened) -> list[HandlerEntry]:
    return opened.db.read(lambda tx: [to(HandlerEntry, r) for r in tx.rows(tx.t.handler.select())])


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation.local(tmp_path)


def client(opened: Opened, installation: Installation, handlers: Handlers | None = None) -> Tasks:
    return Tasks(installation, handlers, database=opened.db)


def test_a_handler_that_is_not_imported_is_submitted_as_if_it_were(store: Opened, installation: Installation) -> None:
    """The same row under another id: handler, arguments, queue, policy, permit, digest. So the second is a replay of the first."""
    serve(store, program())
    here, there = client(store, installation, program()), client(store, installation)
    one = here.submit("invoice", "7", amount=5, key="i-7")
    again = there.submit("invoice", "7", amount=5, key="i-7")
    other = there.submit("invoice", 8, 5.0, key="i-8")
    assert (again.task, again.replayed, again.digest) == (one.task, True, one.digest)
    row, like = read(store.db, other.task), read(store.db, one.task)
    assert row.queue == "money" and row.permit == "customer:8" and (row.policy, row.effects) == (like.policy, like.effects)
    assert there.submit_many("invoice", [Item(args=(9, 1)), Item(args=("x", 1))])[1] == Refusal(
        "handler 'invoice': customer: Input should be a valid integer, unable to parse string as an integer"
    )


def test_arguments_are_checked_against_what_workers_told(store: Opened, installation: Installation) -> None:
    """And nothing is stored."""
    serve(store, program())
    there = client(store, installation)
    for args in ((), (1,), (1, "x"), (1, 2.0, 3), (1, 2, "n", "more")):
        with pytest.raises(TaskInvalid, match="handler 'invoice'"):
            there.submit("invoice", *args)
    assert there.list() == []


def test_unknown_handlers_and_queues_are_refused_with_what_is_known_nearby(store: Opened, installation: Installation) -> None:
    """A queue is known that a handler declares, here or at a worker, or that a session serves."""
    there = client(store, installation)
    with pytest.raises(UnknownHandler, match="known: none"):
        there.submit("invoice", 1, 2)
    serve(store, program(), queues=("special",))
    with pytest.raises(UnknownHandler, match="did you mean invoice"):
        there.submit("invoise", 1, 2)
    with pytest.raises(UnknownQueue, match="did you mean money"):
        there.submit("invoice", 1, 2, queue="monney")
    with pytest.raises(UnknownQueue, match="nobody-s"):
        there.submit("invoice", 1, 2, queue="nobody-s")
    for queue in ("", "money", "special"):
        assert read(store.db, there.submit("invoice", 1, 2, queue=queue).task).queue == (queue or "money")
    found = there.submit_many("invoice", [Item(args=(1, 2), options=Options(queue="nowhere")), Item(args=(1, 2))])
    assert isinstance(found[0], Refusal) and "nowhere" in found[0].reason and isinstance(found[1], Receipt)


def test_a_handler_registered_here_needs_no_worker(store: Opened, installation: Installation) -> None:
    """Its own queue and those of its program are known; nothing is read for it."""
    here = client(store, installation, program())
    assert here.submit("invoice", 1, 2).state == "READY"
    assert here.submit("invoice", 1, 2, queue="money").state == "READY"


def test_of_workers_of_two_versions_the_newest_decides(store: Opened, installation: Installation) -> None:
    """While both run, and until the newer one has gone: then the older one's shape counts again."""
    serve(store, program(), "s1")
    serve(store, newer(), "s2")
    assert len(entries(store)) == 2
    t = store.db.tables.handler
    old = program().registry.entries()[0].version
    store.db.run(lambda tx: tx.update(t, t.c.version == old, since_us=1, seen_us=1))
    assert read(store.db, client(store, installation).submit("invoice", "c", "EUR").task).permit == ""
    with pytest.raises(TaskInvalid):
        client(store, installation).submit("invoice", 1, 2.0)
    store.db.run(lambda tx: registry.leave_node(tx, "s2"))
    assert read(store.db, client(store, installation).submit("invoice", 1, 2.0).task).permit == "customer:1"


def test_sessions_that_begin_together_tell_the_same_once(store: Opened) -> None:
    """And an entry that is fresh is not written again; an old one is."""
    together(*[lambda n=n: serve(store, program(), f"s{n}") for n in range(4)])
    (entry,) = entries(store)
    assert msgspec.structs.replace(entry, since_us=0, seen_us=0) == program().registry.entries()[0]
    serve(store, program(), "s5")
    assert entries(store) == [entry]
    t = store.db.tables.handler
    store.db.run(lambda tx: tx.update(t, seen_us=entry.seen_us - HOUR))
    serve(store, program(), "s6")
    assert entries(store)[0].seen_us >= entry.seen_us and entries(store)[0].since_us == entry.since_us


def test_only_sessions_whose_lease_holds_count_as_serving(store: Opened) -> None:
    """Nodes of stream jobs, sessions that left or were not renewed do not."""
    serve(store, program(), "live")
    serve(store, program(), "left")
    serve(store, program(), "late")
    store.db.run(lambda tx: registry.leave_node(tx, "left"))
    store.db.run(lambda tx: tx.update(tx.t.node, tx.t.node.c.id == "late", expires_us=1))
    store.db.run(lambda tx: registry.register_node(tx, "node", "n", 4, LEASE, '{"counts": {}}'))
    served = store.db.read(catalogue.live_sessions)
    assert {k: v.queues for k, v in served.items()} == {"live": ("money",)}


def test_parameters_named_like_options_are_submitted_apart(store: Opened, installation: Installation) -> None:
    """submit() refuses such a handler, by object and by name; submit_with takes it."""
    handlers = Handlers()

    @handlers.task(name="rotate", option_names=True)
    def rotate(key: str) -> None: ...

    serve(store, handlers)
    for tasks in (client(store, installation, handlers), client(store, installation)):
        with pytest.raises(TaskInvalid, match="submit_with"):
            tasks.submit("rotate", key="k")
        receipt = tasks.submit_with("rotate", kwargs={"key": "secret"}, key="k")
        assert read(store.db, receipt.task).key == "k" and "secret" in read(store.db, receipt.task).args
