"""Forgetting on three databases: what is over for long goes with all that belongs to it, and nothing that is still referred to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import ending, every, evidence, new, permit, read, settle, states, submit, take, taken

from millstream_coordinator import retention_sweep
from millstream_coordinator.retention_sweep import RetentionSweep
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.bulk import linked_retry
from millstream_schema.durable.catalogue import Served
from millstream_schema.durable.records import Policy
from millstream_schema.durable.retention import RetentionRule, Scope
from millstream_schema.durable.states import TaskState
from millstream_schema.ports import SystemClock
from millstream_schema.store import catalogue, operations, retention
from millstream_schema.store.database import Transaction

T = TaskState
DAY = 86_400_000_000


@pytest.fixture
def ages(store: Opened) -> Callable[..., None]:
    """Let tasks be older: by keys, days."""

    def age(days: float, *keys: str) -> None:
        t = store.db.tables.task
        where = [t.c.settled_us > 0, *([t.c.key.in_(keys)] if keys else [])]
        store.db.run(lambda tx: tx.update(t, *where, settled_us=t.c.settled_us - int(days * DAY)))

    return age


def sweep(store: Opened) -> RetentionSweep:
    found = RetentionSweep(store.db, SystemClock())
    found.sweep()
    return found


def rule(store: Opened, days: float, namespace: str = "", scope: Scope = Scope.ALL, name: str = "") -> None:
    value = RetentionRule(namespace=namespace, scope=scope, name=name, keep_us=int(days * DAY))
    store.db.run(lambda tx: retention.set_rule(tx, value, "anna"))


def finished(store: Opened, *keys: str, **changes: object) -> list[str]:
    rows = taken(store.db, *[new(k, policy=Policy(attempts=1), **changes) for k in keys], who=f"s-{keys[0]}")
    settle(store.db, *[ending(r) for r in rows])
    return [r.id for r in rows]


def test_settled_tasks_go_after_thirty_days_with_their_evidence(store: Opened, ages: Callable[..., None]) -> None:
    """Younger ones, unsettled ones and those in review stay, however old; the key of what went is free, the permit's sequence is not set back."""
    rows = taken(store.db, new("old", policy=Policy(attempts=1), permit="p"), new("young"), new("review"), new("running"))
    settle(store.db, ending(rows[0], o.Raised("E", "x")), ending(rows[1]), ending(rows[2], o.AskedForReview("?")))
    submit(store.db, new("ready"))
    ages(31, "old")
    t = store.db.tables.task
    store.db.run(lambda tx: tx.update(t, created_us=1, changed_us=1))
    seq = permit(store.db).seq
    assert sweep(store).purged == 1
    assert set(states(store.db)) == {"young", "review", "running", "ready"}
    assert evidence(store.db, rows[0].id) == [] and len(evidence(store.db, rows[2].id)) == 1
    assert permit(store.db).seq == seq > 0
    assert not submit(store.db, new("old"))[0].replayed


def test_each_queue_and_handler_has_its_own_time(store: Opened, ages: Callable[..., None]) -> None:
    """0 keeps for ever; a namespace's rule is its own; a rule that is dropped leaves the wider one."""
    finished(store, "a")
    finished(store, "b", queue="short")
    finished(store, "c", namespace="other", queue="short")
    finished(store, "d", queue="ever")
    ages(10)
    rule(store, 5, "default", Scope.QUEUE, "short")
    rule(store, 0, scope=Scope.QUEUE, name="ever")
    assert sweep(store).purged == 1 and set(states(store.db)) == {"a", "c", "d"}
    rule(store, 7)
    assert sweep(store).purged == 2 and set(states(store.db)) == {"d"}
    assert store.db.run(lambda tx: retention.drop_rule(tx, "", "queue", "ever"))
    assert not store.db.run(lambda tx: retention.drop_rule(tx, "", "queue", "ever"))
    assert sweep(store).purged == 1
    rule(store, 1)
    assert [(r.scope, r.keep_us // DAY) for r in store.db.read(retention.rules) if not r.namespace] == [(Scope.ALL, 1)]


def test_a_task_stays_as_long_as_a_retry_of_it(store: Opened, ages: Callable[..., None]) -> None:
    """They share root and intents: the whole chain goes together, or later from its end."""
    (first,) = finished(store, "first")
    submit(store.db, linked_retry(read(store.db, first), "retry-1", origin="retry", actor=""))
    ages(40, "first")
    assert sweep(store).purged == 0
    (row,) = take(store.db, "s-first")
    settle(store.db, ending(row))
    assert sweep(store).purged == 0, "settled, but not for long"
    ages(35, f"{first}/retry")
    assert sweep(store).purged == 2 and every(store.db) == {}


def test_an_end_that_is_not_delivered_keeps_its_task(store: Opened, ages: Callable[..., None]) -> None:
    """Pending as an event, or as a delivery, also a parked one."""
    ids = finished(store, "pending", "parked", "taken", "plain")
    ages(40)

    def deliver(tx: Transaction) -> None:
        e, d = tx.t.event, tx.t.delivery
        for task, pending in zip(ids[:3], (1, None, None), strict=True):
            values = dict.fromkeys(("handler", "key", "queue", "root"), "x") | dict.fromkeys(("reason", "result", "error"), "")
            tx.insert(e, id=task, namespace="default", state="SUCCEEDED", pending=pending, settled_us=1, created_us=1, seen=0, **values)
        for task, state in zip(ids[1:3], ("PARKED", "ACKNOWLEDGED"), strict=True):
            tx.insert(d, subscription="s", event=task, state=state, reason="", created_us=1, changed_us=1)

    store.db.run(deliver)
    store.db.run(lambda tx: retention.purge(tx, "default", ids))
    assert set(states(store.db)) == {"pending", "parked"}


def test_a_fire_that_has_not_noticed_the_end_keeps_its_task(store: Opened) -> None:
    """Whether the next one may begin depends on it."""
    waiting, noticed = finished(store, "waiting", "noticed")

    def fires(tx: Transaction) -> None:
        f = tx.t.fire
        plain = {c.name: ("" if isinstance(c.type, sa.String) else 0) for c in f.c} | {
            "namespace": "default",
            "state": "FIRED",
            "kind": "auto",
            "times": 1,
            "until_us": 9,
        }
        for instant, (task, unsettled) in enumerate(((waiting, 1), (noticed, 0))):
            tx.insert(f, **{**plain, "slot": instant, "instant_us": instant, "task": task, "unsettled": unsettled})

    store.db.run(fires)
    assert store.db.run(lambda tx: retention.purge(tx, "default", [waiting, noticed])) == 1
    assert set(states(store.db)) == {"waiting"}


def test_a_purge_is_of_one_namespace_and_of_settled_tasks(store: Opened) -> None:
    """Whatever ids it is given."""
    (mine,), (other,) = finished(store, "mine"), finished(store, "other", namespace="other")
    submit(store.db, new("ready"))
    ids = [mine, other, every(store.db)["ready"].id, "nobody"]
    assert store.db.run(lambda tx: retention.purge(tx, "default", ids)) == 1
    assert store.db.run(lambda tx: retention.purge(tx, "default", ids)) == 0
    assert set(states(store.db)) == {"other", "ready"}


@pytest.mark.parametrize("seed", range(8))
def test_no_link_ever_points_nowhere(store: Opened, seed: int) -> None:
    """Random chains of retries with random states, purged in random parts: what remains refers to nothing that went, and nothing unsettled went."""
    rng = random.Random(seed)
    t = store.db.tables.task
    names: list[str] = []
    for i in range(40):
        before = rng.choice(names) if names and rng.random() < 0.7 else ""
        names.append(f"t{i:02}")
        submit(store.db, new(names[-1], id=names[-1], retry_of=before))
    open_ = {n for n in names if rng.random() < 0.1}
    store.db.run(lambda tx: tx.update(t, t.c.id.not_in(sorted(open_)), state=T.FAILED, ready_lane=None, settled_us=1, amiss_us=1))
    for _ in range(12):
        part = rng.sample(names, rng.randint(1, 40))
        store.db.run(lambda tx, p=part: retention.purge(tx, "default", p))  # type: ignore[misc]
        rows = {r.id: r for r in every(store.db).values()}
        assert open_ <= set(rows)
        assert all(not r.retry_of or r.retry_of in rows for r in rows.values())
    while store.db.run(lambda tx: retention.purge(tx, "default", names)):
        pass
    needed = set(open_)
    links = {r.id: r.retry_of for r in every(store.db).values()}
    for name in open_:
        while name := links.get(name, ""):
            needed.add(name)
    assert set(links) == needed


def test_a_retry_asked_for_while_its_task_is_purged_is_one_or_none(store: Opened) -> None:
    """Never a task that is linked to nothing."""
    t = store.db.tables.task
    for turn in range(6):
        (task,) = finished(store, f"k{turn}", queue=f"q{turn}")
        store.db.run(lambda tx, i=task: tx.update(t, t.c.id == i, state=T.FAILED))  # type: ignore[misc]
        one, other = store.open(), store.open()
        values = {"id": f"op-{turn}", "namespace": "default", "act": "retry", "reason": "r", "actor": "a"}
        together(
            lambda db=one, i=task: db.run(lambda tx: retention.purge(tx, "default", [i])),  # type: ignore[misc]
            lambda db=other, i=task, v=values, n=turn: db.run(lambda tx: operations.retry(tx, "default", i, v, f"new-{n}")),  # type: ignore[misc]
        )
        rows = {r.id: r for r in every(store.db).values()}
        assert all(not r.retry_of or r.retry_of in rows for r in rows.values())


def test_a_tick_is_bounded_and_the_next_one_goes_on(store: Opened, ages: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several namespaces; what is kept for long does not hold up what comes after it; in the end the walk begins anew only after a pause."""
    monkeypatch.setattr(retention_sweep, "CHUNK", 2)
    monkeypatch.setattr(retention_sweep, "CHUNKS", 3)
    for n in ("a", "b", "c"):
        finished(store, *[f"{n}{i}" for i in range(5)], namespace=n)
    finished(store, *[f"kept{i}" for i in range(5)], namespace="a", queue="ever")
    ages(60, *[f"kept{i}" for i in range(5)])
    ages(40, *[f"{n}{i}" for n in "abc" for i in range(5)])
    rule(store, 0, scope=Scope.QUEUE, name="ever")
    found = RetentionSweep(store.db, SystemClock())
    counts = []
    for _ in range(6):
        found.sweep()
        counts.append(found.purged)
    assert counts[0] <= 6 and counts == sorted(counts) and counts[-1] == 15
    assert {r.queue for r in every(store.db).values()} == {"ever"}


def test_handlers_nobody_serves_are_forgotten(store: Opened) -> None:
    """What a live session serves has been seen now, however long ago it told so."""
    t = store.db.tables.handler
    row = {"queue": "q", "effects": "external", "policy": "{}", "permit": "", "ordered": 0, "parameters": "[]", "since_us": 1, "seen_us": 1}
    store.db.run(lambda tx: tx.insert_many(t, [{"name": "live", "version": "1", **row}, {"name": "gone", "version": "1", **row}]))
    store.db.run(lambda tx: catalogue.enter(tx, "s", "s", 60_000_000, Served(("q",), {"live": "1"}), ()))
    sweep(store)
    assert store.db.read(lambda tx: catalogue.names(tx, 10)) == ["live"]


def test_looking_for_what_is_over_walks_the_index_of_settled_tasks(store: Opened) -> None:
    """On every database: no scan, no sort."""
    statements: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: object, *_rest: object) -> None:
        statements.append((statement, parameters))

    sa.event.listen(store.db.engine, "before_cursor_execute", note)
    try:
        store.db.read(lambda tx: retention.settled_before(tx, "default", 10, None, 5))
        store.db.read(lambda tx: retention.next_namespace(tx, ""))
    finally:
        sa.event.remove(store.db.engine, "before_cursor_execute", note)
    explain = "EXPLAIN QUERY PLAN" if store.kind == "sqlite" else "EXPLAIN"
    index = f"{store.db.tables.task.name}_settled_i"
    with store.db.engine.connect() as connection:
        for statement, parameters in statements:
            if store.db.tables.task.name in statement:
                plan = str(connection.exec_driver_sql(f"{explain} {statement}", parameters).fetchall())
                assert index in plan and "filesort" not in plan and "TEMP B-TREE FOR ORDER BY" not in plan, plan
