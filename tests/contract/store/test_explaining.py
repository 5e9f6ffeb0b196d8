"""The facts behind a line on why a task is not running, on three databases."""

from __future__ import annotations

from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import HOUR, LEASE, new, read, session, submit, take, taken

from millstream_schema.durable.catalogue import Served
from millstream_schema.durable.explaining import why
from millstream_schema.durable.gates import GateKind
from millstream_schema.store import catalogue, explaining, gates, registry


def line(store: Opened, key: str, namespace: str = "default") -> str:
    t = store.db.tables.task
    (task,) = store.db.read(lambda tx: [r["id"] for r in tx.rows(t.select().where(t.c.key == key, t.c.namespace == namespace))])
    row = read(store.db, task)
    return why(row, store.db.read(lambda tx: explaining.facts(tx, row)))


def serve(store: Opened, name: str, queues: tuple[str, ...], handlers: tuple[str, ...]) -> None:
    served = Served(queues, dict.fromkeys(handlers, ""))
    store.db.run(lambda tx: catalogue.enter(tx, name, name, LEASE, served, ()))


def test_workers_are_told_by_what_they_serve(store: Opened) -> None:
    """No worker, workers of other queues, workers without the handler, workers that can."""
    submit(store.db, new("a"), new("b"))
    assert line(store, "b") == "no live worker serves queue 'default'"
    serve(store, "s1", ("other",), ("work",))
    assert "of other queues 1 live worker serves handler 'work'" in line(store, "b")
    serve(store, "s2", ("default",), ("else",))
    assert "and none has handler 'work'" in line(store, "b")
    serve(store, "s3", ("default",), ("work",))
    assert "1 live worker serves its queue and handler, ahead of it in its queue: 1" in line(store, "b")
    store.db.run(lambda tx: registry.leave_node(tx, "s3"))
    assert "and none has" in line(store, "b")


def test_permits_pauses_and_holders(store: Opened) -> None:
    """Of its own namespace: the same key of another one is another permit."""
    (held,) = taken(store.db, new("held", permit="p"))
    submit(store.db, new("waits", permit="p"), new("foreign", namespace="other", permit="p"))
    take(store.db, "s", lanes=["default/default", "other/default"])
    assert line(store, "waits") == "it waits for permit 'p': 1 of 1 are held"
    assert line(store, "foreign", "other").startswith("it runs since") and "at s (session s), whose lease holds" in line(store, held.key)
    submit(store.db, new("paused"))
    store.db.run(lambda tx: gates.pause(tx, GateKind.QUEUE, "default", "default", actor="me", reason="moving house"))
    said = line(store, "paused")
    assert said.startswith("queue 'default' is paused by me since") and said.endswith(": moving house")
    store.db.run(lambda tx: gates.resume(tx, GateKind.QUEUE, "default", "default", actor="me"))
    store.db.run(lambda tx: gates.pause(tx, GateKind.PERMIT, "default", "p", actor="me", reason="it is broken"))
    assert "permit 'p' is paused by me since" in line(store, "waits")
    store.db.run(lambda tx: gates.set_rate(tx, GateKind.QUEUE, "default", "default", 1, HOUR, 1, actor="me"))
    assert [r.key for r in take(store.db, "s")] == ["paused"]
    submit(store.db, new("metered"))
    assert line(store, "metered").startswith("queue 'default' starts 1/h: the next token is there in ")
    session(store.db, "s9")
    store.db.run(lambda tx: registry.leave_node(tx, "s"))
    assert "lease ran out" in line(store, held.key)
