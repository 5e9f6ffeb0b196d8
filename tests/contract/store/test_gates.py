"""Pauses and rates before queues, handlers and permit keys: what may not pass is parked, and moves up when it may."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import (
    HOUR,
    LANE,
    SECOND,
    asked,
    consistent,
    ending,
    every,
    external,
    new,
    permit,
    session,
    settle,
    states,
    submit,
    take,
)  # fmt: skip

from millstream_coordinator.task_sweep import TaskSweep
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.gates import Gate, GateKind, gate_id
from millstream_schema.durable.records import Policy, TaskRow
from millstream_schema.durable.states import Cause, TaskState
from millstream_schema.ports import SystemChance, SystemClock
from millstream_schema.store import blockers, claims, database, gates, settling, tasks
from millstream_schema.store.database import Database, meaning

T = TaskState
K = GateKind
NAMES = {K.QUEUE: "default", K.HANDLER: "work", K.PERMIT: "p"}


def pause(db: Database, kind: GateKind, name: str = "", namespace: str = "default") -> Gate:
    return db.run(lambda tx: gates.pause(tx, kind, namespace, name or NAMES[kind], actor="me", reason="because"))


def resume(db: Database, kind: GateKind, name: str = "", namespace: str = "default") -> None:
    """As the command does it."""
    key = gate_id(kind, namespace, name or NAMES[kind])
    db.run(lambda tx: gates.resume(tx, kind, namespace, name or NAMES[kind], actor="me"))
    while db.run(lambda tx: gates.relieve(tx, f"pause:{key}", 100)):
        pass
    db.run(lambda tx: gates.relieve(tx, f"permit:{namespace}/{name or NAMES[kind]}", 100))


def rate(db: Database, kind: GateKind, number: int, per_us: int = HOUR, burst: int = 1, name: str = "", namespace: str = "default") -> Gate:
    return db.run(lambda tx: gates.set_rate(tx, kind, namespace, name or NAMES[kind], number, per_us, burst, actor="me"))


def gate(db: Database, kind: GateKind, name: str = "") -> Gate | None:
    key = gate_id(kind, "default", name or NAMES[kind])
    return db.read(lambda tx: gates.read(tx, [key])).get(key)


def some(store: Opened, count: int = 6, **changes: Any) -> None:
    store.db.run(lambda tx: tasks.submit_many(tx, [new(f"k{i}", permit="p", **changes) for i in range(count)]))


def sweep(store: Opened) -> None:
    TaskSweep(store.db, SystemClock(), SystemChance(), 60_000, 0).sweep()


# -- pauses


@pytest.mark.parametrize("kind", list(K))
def test_what_is_paused_is_given_to_nobody_and_goes_again_by_rank(store: Opened, kind: GateKind) -> None:
    """Who paused it, why and when is kept; a second pause changes nothing; others pass all the while."""
    some(store)
    submit(store.db, new("free", handler="other", queue="slow"))
    session(store.db)
    lanes = [LANE, "default/slow"]
    first = pause(store.db, kind)
    assert (first.paused_by, first.paused_why, first.paused_us > 0) == ("me", "because", True)
    store.db.run(lambda tx: gates.pause(tx, kind, "default", NAMES[kind], actor="you", reason="too"))
    assert gate(store.db, kind) == first
    for expected in (["free"], []):
        assert [r.key for r in take(store.db, lanes=lanes, handlers=["work", "other"])] == expected
    parked = {r.blocked_by for r in every(store.db).values() if r.permit}
    assert parked == {{K.QUEUE: None, K.HANDLER: "pause:handler:default/work", K.PERMIT: "permit:default/p"}[kind]}
    sweep(store)
    assert take(store.db, lanes=lanes, handlers=["work"]) == []
    resume(store.db, kind)
    assert gate(store.db, kind) is None, "what nobody has set costs nothing"
    order = []
    for _ in range(6):
        (row,) = take(store.db, count=1, lanes=lanes)
        order.append(row.key)
        settle(store.db, ending(row))
    assert order == [f"k{i}" for i in range(6)]
    consistent(store.db)


@pytest.mark.parametrize("kind", list(K))
def test_a_pause_is_of_one_namespace(store: Opened, kind: GateKind) -> None:
    """The same names elsewhere go on."""
    pause(store.db, kind, namespace="other")
    submit(store.db, new("mine", permit="p"), new("theirs", permit="p", namespace="other"))
    session(store.db)
    assert [r.key for r in take(store.db, lanes=[LANE, "other/default"])] == ["mine"]


def test_what_holds_a_paused_permit_over_its_retry_waits_too(store: Opened) -> None:
    """An ordered task keeps its permit between attempts; the pause keeps it, and afterwards it is first again."""
    submit(store.db, *[new(f"k{i}", permit="p", ordered=True) for i in range(3)])
    session(store.db)
    (first,) = take(store.db)
    settle(store.db, ending(first, o.RetryAsked(0)))
    pause(store.db, K.PERMIT)
    store.db.run(lambda tx: claims.wake_due(tx, 10))
    assert take(store.db) == []
    assert every(store.db)["k0"].blocked_by == "pause:permit:default/p" and permit(store.db).held == 1
    resume(store.db, K.PERMIT)
    order = []
    for _ in range(3):
        (row,) = take(store.db)
        order.append((row.key, row.permit_seq))
        settle(store.db, ending(row))
    assert order == [("k0", 2), ("k1", 3), ("k2", 4)]
    consistent(store.db)


def test_hundreds_of_a_paused_handler_hide_nothing_behind_them(store: Opened) -> None:
    """They are parked in bulk by the claim that meets them."""
    pause(store.db, K.HANDLER)
    store.db.run(lambda tx: tasks.submit_many(tx, [new(f"k{i:04}", priority=9) for i in range(900)]))
    submit(store.db, new("free", handler="other"))
    session(store.db)
    assert [r.key for r in take(store.db, count=2, handlers=["work", "other"])] == ["free"]
    assert sum(r.blocked_by is not None for r in every(store.db).values()) == 900


def test_what_is_left_parked_when_a_pause_has_ended_is_moved_by_the_sweep(store: Opened) -> None:
    """Whoever ended it died before he had moved it."""
    some(store)
    pause(store.db, K.HANDLER)
    session(store.db)
    assert take(store.db) == []
    store.db.run(lambda tx: gates.resume(tx, K.HANDLER, "default", "work", actor="me"))
    assert take(store.db) == []
    sweep(store)
    assert len(take(store.db)) == 1


def test_clocks_do_not_stop_for_a_pause(store: Opened) -> None:
    """Deadlines and the last instants to start expire what is parked, what waits in a paused queue and what waits for an attempt, by the sweep alone."""
    submit(
        store.db, new("deadline", deadline_us=HOUR), new("start", start_by_us=HOUR), new("both", start_by_us=2 * HOUR, deadline_us=HOUR), new("at", expires_us=1),
        new("later", delay_us=HOUR, deadline_us=30 * SECOND), new("slow", queue="slow", deadline_us=HOUR), new("none"),
    )  # fmt: skip
    session(store.db)
    pause(store.db, K.HANDLER)
    pause(store.db, K.QUEUE, "slow")
    assert take(store.db, lanes=[LANE, "default/slow"]) == []
    rows = every(store.db)
    assert {k for k, r in rows.items() if r.limit_us is None} == {"none", "at"} - {
        k for k, r in rows.items() if r.state is not T.EXPIRED and k == "at"
    }
    t = store.db.tables.task
    store.db.run(
        lambda tx: tx.update(
            t,
            t.c.limit_us.is_not(None),
            limit_us=1,
            deadline_us=sa.case((t.c.deadline_us > 0, 1), else_=0),
            start_by_us=sa.case((t.c.start_by_us > 0, 1), else_=0),
        )
    )
    sweep(store)
    found = {k: (r.state, r.cause) for k, r in every(store.db).items()}
    late = (T.EXPIRED, Cause.DEADLINE)
    assert found == {
        "deadline": late, "start": (T.EXPIRED, Cause.START_BY), "both": late, "at": (T.EXPIRED, Cause.START_BY), "later": late, "slow": late,
        "none": (T.READY, Cause.NONE),
    }  # fmt: skip
    consistent(store.db)


def test_a_limit_counts_while_nobody_holds_the_task(store: Opened) -> None:
    """Set again when it goes back; a start that has happened is no longer waited for."""
    submit(store.db, new("k", start_by_us=HOUR, deadline_us=2 * HOUR))
    row = every(store.db)["k"]
    assert abs((row.limit_us or 0) - row.start_by_us) < 10_000
    session(store.db)
    (held,) = take(store.db)
    assert held.limit_us is None is every(store.db)["k"].limit_us
    settle(store.db, ending(held, o.Unstarted()))
    assert every(store.db)["k"].limit_us == row.start_by_us
    (held,) = take(store.db)
    settle(store.db, ending(held, o.RetryAsked(0)))
    assert every(store.db)["k"].limit_us == row.deadline_us
    t = store.db.tables.task
    store.db.run(lambda tx: tx.update(t, t.c.key == "k", limit_us=1))
    assert store.db.run(lambda tx: claims.expire_late(tx, 10)) == 1
    assert (every(store.db)["k"].limit_us, states(store.db)["k"]) == (row.deadline_us, T.RETRY_WAIT)


# -- rates


@pytest.mark.parametrize("kind", list(K))
def test_no_more_start_than_the_bucket_holds_and_the_rest_comes_with_its_tokens(store: Opened, kind: GateKind) -> None:
    """The claim says when the next token is there; who comes first then is who was first in the line."""
    some(store, policy=Policy(permit_capacity=100))
    session(store.db)
    rate(store.db, kind, 10, SECOND, burst=2)
    claimed = store.db.run(lambda tx: asked(tx, "s"))
    assert claimed is not None and [r.key for r in claimed.tasks] == ["k0", "k1"]
    blocked = {r.blocked_by for r in every(store.db).values() if r.state is T.READY}
    assert blocked == {{K.QUEUE: None, K.HANDLER: "rate:handler:default/work", K.PERMIT: "rate:permit:default/p"}[kind]}
    claimed = store.db.run(lambda tx: asked(tx, "s"))
    assert claimed is not None and claimed.tasks == []
    assert claimed.next_us is not None and 0 < claimed.next_us - claimed.now_us <= 100_000
    order: list[Any] = []
    at = claimed.next_us
    while len(order) < 4:
        now = store.db.read(lambda tx: tx.now_us())
        threading.Event().wait(max(0.0, (at - now) / 1e6) + 0.001)
        order += [r.key for r in take(store.db)]
        again = store.db.run(lambda tx: asked(tx, "s"))
        assert again is not None
        order += [r.key for r in again.tasks]
        at = again.next_us or at
    assert order == ["k2", "k3", "k4", "k5"]
    consistent(store.db)


@pytest.mark.parametrize("kind", list(K))
def test_a_token_of_a_task_that_never_started_comes_back(store: Opened, kind: GateKind) -> None:
    """Given back by its worker; lost with it, where its start would have been committed. One that started has used it up."""
    submit(store.db, *[external(f"k{i}", permit="p", policy=Policy(permit_capacity=9)) for i in range(3)])
    session(store.db)
    rate(store.db, kind, 1, HOUR, burst=1)
    (row,) = take(store.db)
    assert row.tokens and take(store.db) == []
    settle(store.db, ending(row, o.Unstarted()))
    (row,) = take(store.db)
    assert row.key == "k0" or kind is not K.QUEUE
    n = store.db.tables.node
    store.db.run(lambda tx: tx.update(n, n.c.id == "s", expires_us=1))
    sweep_lost(store)
    session(store.db, "t")
    (row,) = take(store.db, "t")
    store.db.run(lambda tx: claims.begin(tx, row.session, row.id, row.fence, row.token))
    settle(store.db, ending(row))
    assert take(store.db, "t") == []
    consistent(store.db)


def sweep_lost(store: Opened) -> None:
    assert store.db.run(lambda tx: settling.expire_session(tx, "s", 0))
    store.db.run(lambda tx: settling.take_back(tx, "s", lambda: 0.5, 100))


@pytest.mark.parametrize("kind", list(K))
def test_a_rate_that_is_taken_away_lets_all_go(store: Opened, kind: GateKind) -> None:
    """By the command, and by the sweep when it did not get to it."""
    some(store, policy=Policy(permit_capacity=100))
    session(store.db)
    rate(store.db, kind, 1)
    assert len(take(store.db)) == 1 and take(store.db) == []
    rate(store.db, kind, 0, 0, 0)
    assert gate(store.db, kind) is None
    sweep(store)
    assert len(take(store.db)) == 5


def test_a_faster_rate_is_felt_at_once(store: Opened) -> None:
    """Who waits for a token of the old one is looked at again."""
    some(store, policy=Policy(permit_capacity=100))
    session(store.db)
    rate(store.db, K.HANDLER, 1)
    assert len(take(store.db)) == 1 and take(store.db) == []
    rate(store.db, K.HANDLER, 1000, SECOND, burst=100)
    threading.Event().wait(0.01)
    assert len(take(store.db)) > 0


@pytest.mark.parametrize("kind", list(K))
def test_celery_t40_a_rate_holds_across_eight_workers(store: Opened, kind: GateKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than burst + rate × t starts in any window, however many claim at once, also if the first makes the permit; and it is used: nobody waits in a ring."""
    rings: list[str] = []

    def noted(exc: sa.exc.DBAPIError, *rest: str) -> BaseException:
        rings.extend([str(exc.orig)] if "eadlock" in str(exc.orig) else [])
        return meaning(exc, *rest)

    monkeypatch.setattr(database, "meaning", noted)
    number, per, burst = 40, SECOND, 5
    dbs = [store.open() for _ in range(8)]
    for i in range(8):
        assert take(dbs[i], session(store.db, f"s{i}")) == []  # its statements are compiled
    lanes = [LANE, "default/slow"] if kind is not K.QUEUE else [LANE]
    rate(store.db, kind, number, per, burst)
    store.db.run(lambda tx: tasks.submit_many(tx, [new(f"k{i:03}", permit="p" if kind is K.PERMIT else "", queue=lanes[i % len(lanes)].partition("/")[2],
        policy=Policy(permit_capacity=1000)) for i in range(300)]))  # fmt: skip
    clock = SystemClock()
    begun: list[TaskRow] = []
    began = clock.monotonic()

    def goes_on() -> bool:
        lasted = clock.monotonic() - began
        return lasted < 1.5 or (len(begun) < 3 * burst and lasted < 30)

    def work(i: int) -> list[TaskRow]:
        found: list[TaskRow] = []
        while goes_on():
            rows = take(dbs[i], f"s{i}", 3, lanes=lanes)
            if rows and i % 3 == 0 and len(found) % 5 == 4:
                settle(dbs[i], *[ending(r, o.Unstarted()) for r in rows])
                continue
            found += rows
            begun.extend(rows)
            settle(dbs[i], *[ending(r) for r in rows])
            if not rows:
                threading.Event().wait(0.005)
        return found

    parts = together(*[lambda i=i: work(i) for i in range(8)])
    assert all(isinstance(p, list) for p in parts), parts
    starts = sorted(r.claimed_us for p in parts if isinstance(p, list) for r in p)
    assert within(starts, number, per, burst) == []
    assert len(starts) >= 3 * burst, len(starts)
    assert (
        store.kind == "mariadb" or rings == []
    )  # MariaDB tells at once of a ring, and keeps a shared lock on what was there: first comers of a permit meet one
    consistent(store.db)


def within(starts: list[int], number: int, per: int, burst: int) -> list[tuple[int, int]]:
    """Windows with more starts than burst + rate × t."""
    found = []
    for i in range(len(starts)):
        for j in range(i, len(starts)):
            allowed = burst + (starts[j] - starts[i]) * number / per
            if j - i + 1 > allowed + 1e-6:
                found.append((i, j))
    return found


def test_nothing_is_parked_under_what_is_not_there(store: Opened) -> None:
    """Pauses and rates come and go while others claim: when all are gone and the sweep has been there, everything runs."""
    stop = threading.Event()
    store.db.run(
        lambda tx: tasks.submit_many(tx, [new(f"k{i:03}", permit=f"p{i % 3}", policy=Policy(permit_capacity=2)) for i in range(60)])
    )
    dbs = [store.open() for _ in range(4)]
    session(store.db)
    done: list[str] = []

    def works() -> None:
        while not stop.is_set():
            rows = take(dbs[0], "s", 4)
            done.extend(r.key for r in rows)
            settle(dbs[0], *[ending(r) for r in rows])
            if not rows:
                threading.Event().wait(0.002)

    def sets(db: Database, kind: GateKind, name: str) -> None:
        for _ in range(6):
            pause(db, kind, name)
            rate(db, kind, 50, SECOND, 1, name)
            threading.Event().wait(0.01)
            resume(db, kind, name)
            rate(db, kind, 0, 0, 0, name)

    def commands() -> None:
        try:
            assert (
                together(
                    lambda: sets(dbs[1], K.HANDLER, "work"), lambda: sets(dbs[2], K.PERMIT, "p1"), lambda: sets(dbs[3], K.QUEUE, "default")
                )
                == [None] * 3
            )
        finally:
            stop.set()

    assert together(works, commands) == [None, None]
    sweep(store)
    for _ in range(40):
        rows = take(store.db)
        done += [r.key for r in rows]
        settle(store.db, *[ending(r) for r in rows])
    assert sorted(done) == sorted(every(store.db)) and len(done) == 60
    assert store.db.read(lambda tx: blockers.following(tx, "")) is None
    consistent(store.db)
