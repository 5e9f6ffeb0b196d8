"""Ends of tasks are frozen as events in their own transaction, once, for every subscription that was there, and found for one that came at that moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from tests.contract.store.delivery_rows import asked_for, caught_up, delivered, fanned, frozen, outcomes_agree, subscribed
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import (
    HOUR,
    SECOND,
    ending,
    every,
    external,
    new,
    settle,
    submit,
    take,
    taken,
)

from millstream_schema.durable import outcomes as o
from millstream_schema.durable.deliveries import CatchUp, DeliveryState, SubscriptionState
from millstream_schema.durable.records import TaskRow
from millstream_schema.durable.states import TaskState
from millstream_schema.store import claims, events, settling, subscriptions
from millstream_schema.store.database import Database, Transaction

D = DeliveryState


@contextmanager
def statements(db: Database) -> Iterator[list[str]]:
    """Every statement sent meanwhile."""
    seen: list[str] = []

    def saw(_c: object, _cursor: object, text: str, *_: object) -> None:
        seen.append(text)

    sa.event.listen(db.engine, "before_cursor_execute", saw)
    try:
        yield seen
    finally:
        sa.event.remove(db.engine, "before_cursor_execute", saw)


def every_end(db: Database) -> dict[str, str]:
    """Tasks that have come to each kind of end, and some that have not; the ends by key."""
    rows = taken(
        db, new("one"), new("two"), new("failed"), new("cancelled itself"), new("raised"), external("done by hand"),
        external("failed by hand"), external("retried by hand"), new("with more"), new("unfit"), new("running"),
    )  # fmt: skip
    by = {r.key: r for r in rows}
    for key in ("done by hand", "failed by hand", "retried by hand"):
        r = by[key]
        db.run(lambda tx, r=r: claims.begin(tx, r.session, r.id, r.fence, r.token))  # type: ignore[misc]
    settle(
        db, ending(by["one"]), ending(by["two"]), ending(by["failed"], o.GaveUp("no")), ending(by["cancelled itself"], o.CancelledItself("so")),
        ending(by["raised"], o.RetryAsked(HOUR)), ending(by["with more"], submits=(new("more"),)), ending(by["unfit"], o.Unfit("too large")),
        *(ending(by[k], o.AskedForReview("look")) for k in ("done by hand", "failed by hand", "retried by hand")),
    )  # fmt: skip
    unknown = every(db)

    def decide(key: str, *, done: bool = False, result: str = "", retry: bool = False) -> None:
        row = unknown[key]
        again = new(f"{key}/retry") if retry else None
        answer = db.run(
            lambda tx: settling.review(tx, row.id, row.rev, done=done, result=result, reason="looked", actor="me", successor=again)
        )
        assert not isinstance(answer, settling.ReviewRefused)

    decide("done by hand", done=True, result="[7]")
    decide("failed by hand")
    decide("retried by hand", retry=True)
    submit(db, new("cancelled"), new("late", start_by_us=1), new("due and late", delay_us=1, deadline_us=1))
    unwanted = every(db)["cancelled"].id
    db.run(lambda tx: settling.cancel(tx, unwanted))
    db.run(lambda tx: claims.wake_due(tx, 10))
    take(db)
    return {k: r.state for k, r in every(db).items() if r.state.settled}


def test_every_kind_of_end_is_frozen_as_it_is_in_its_row(store: Opened) -> None:
    """Success in bulk and alone, failure, cancel before and while it runs, expiry by a claim and by the clock, decisions of reviews; nothing that goes on."""
    subscribed(store.db)
    ends = every_end(store.db)
    assert set(ends.values()) == {"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"} and len(ends) == 12
    assert set(frozen(store.db)) == set(ends)
    outcomes_agree(store.db)


def test_nobody_subscribed_nothing_is_written(store: Opened) -> None:
    """Not in an empty installation, not where the only subscription is another namespace's, another handler's or deleted."""
    ends = every_end(store.db)
    assert len(ends) == 12 and frozen(store.db) == {}
    store.empty()
    subscribed(store.db, namespace="other")
    subscribed(store.db, "h", handler="somebody")
    subscribed(store.db, "q", queue="elsewhere")
    subscribed(store.db, "b", business_key="order-1")
    subscribed(store.db, "gone")
    store.db.run(lambda tx: subscriptions.set_state(tx, "default", "gone", SubscriptionState.DELETED, "me"))
    every_end(store.db)
    assert frozen(store.db) == {}


@pytest.mark.parametrize("plain", [True, False], ids=["successes of one claim", "failures"])
def test_a_settle_of_many_costs_no_statement_more_and_one_when_somebody_listens(store: Opened, plain: bool) -> None:
    """Whether anybody listens comes with the time; all ends of a batch are frozen by one statement."""
    counted: list[int] = []
    for listens in (False, True):
        store.empty()
        if listens:
            subscribed(store.db)
        rows = taken(store.db, *[new(f"k{i:03}") for i in range(200)])
        ends = [ending(r, None if plain else o.GaveUp("no")) for r in rows]
        with statements(store.db) as seen:
            store.db.run(lambda tx, e=ends: settling.settle(tx, e))  # type: ignore[misc]
        counted.append(len(seen))
        assert len(frozen(store.db)) == 200 * listens
    assert counted[1] == counted[0] + 1
    assert not plain or counted[0] == (3 if store.kind == "sqlite" else 2)


def test_an_end_that_is_settled_again_is_frozen_once(store: Opened) -> None:
    """The same report after a lost answer; a late one that changes nothing."""
    subscribed(store.db)
    (row,) = taken(store.db, new())
    settle(store.db, ending(row))
    before = frozen(store.db)
    settle(store.db, ending(row))
    settle(store.db, ending(row, o.GaveUp("late")))
    assert frozen(store.db) == before and len(before) == 1


def test_a_subscription_gets_what_ended_after_it_and_nothing_before(store: Opened) -> None:
    """One that came between two ends gets the second, also when the first is still waiting to be handed on."""
    first = subscribed(store.db, "first")
    one, two = taken(store.db, new("one"), new("two"))
    settle(store.db, ending(one))
    second = subscribed(store.db, "second")
    settle(store.db, ending(two))
    assert fanned(store.db) == 2 and fanned(store.db) == 0
    assert set(delivered(store.db, first)) == {"one", "two"} and set(delivered(store.db, second)) == {"two"}


def test_a_deleted_subscriptions_number_is_never_given_again(store: Opened) -> None:
    """A new one does not get what waits for the one before it."""
    subscribed(store.db, "old")
    gone = subscribed(store.db, "gone")
    (row,) = taken(store.db, new())
    settle(store.db, ending(row))
    store.db.run(lambda tx: subscriptions.set_state(tx, "default", "gone", SubscriptionState.DELETED, "me"))
    assert store.db.run(lambda tx: subscriptions.remove(tx, gone.id, 10))
    again = subscribed(store.db, "gone")
    fanned(store.db)
    assert again.seq > gone.seq and delivered(store.db, again) == {}


def test_filters_take_what_they_name(store: Opened) -> None:
    """Handler, queue, business key byte by byte, and ends."""
    by = {
        "all": subscribed(store.db, "all"),
        "handler": subscribed(store.db, "handler", handler="work"),
        "queue": subscribed(store.db, "queue", queue="fast"),
        "order": subscribed(store.db, "order", business_key="order-1"),
        "failed": subscribed(store.db, "failed", states="CANCELLED,FAILED"),
        "none": subscribed(store.db, "none", handler="Work"),
    }
    rows = taken(store.db, new("a"), new("b", queue="fast"), new("c", business_key="order-1"), new("d"), new("e", business_key="ORDER-1"))
    settle(store.db, *[ending(r, o.GaveUp("no") if r.key == "d" else None) for r in rows])
    fanned(store.db)
    found = {name: "".join(sorted(delivered(store.db, s))) for name, s in by.items()}
    assert found == {"all": "abcde", "handler": "abcde", "queue": "b", "order": "c", "failed": "d", "none": ""}


def test_since_brings_what_had_ended_before(store: Opened) -> None:
    """From that instant on, in parts, frozen as it is in its row; what ends later comes as ever; nothing comes twice."""
    rows = taken(store.db, *[new(f"k{i:02}") for i in range(25)], new("later"))
    early, later = rows[:-1], rows[-1]
    settle(store.db, *[ending(r) for r in early[:10]])
    middle = every(store.db)["k00"].settled_us + 1
    settle(store.db, *[ending(r) for r in early[10:]])
    s = subscribed(store.db, since_us=middle)
    other = subscribed(store.db, "other", since_us=1)
    assert s.catch_up is CatchUp.SINCE
    settle(store.db, ending(later))
    assert caught_up(store.db, s, limit=4) >= 4
    caught_up(store.db, other)
    fanned(store.db)
    assert sorted(delivered(store.db, s)) == [f"k{i}" for i in range(10, 25)] + ["later"]
    assert sorted(delivered(store.db, other)) == [f"k{i:02}" for i in range(25)] + ["later"]
    outcomes_agree(store.db)


# -- a subscription that is made while tasks end


@pytest.mark.parametrize("commits", [True, False], ids=["committed", "rolled back"])
def test_an_end_whose_transaction_did_not_see_the_subscription_is_found(store: Opened, commits: bool) -> None:
    """It looked before the subscription was committed and was committed after it. Where writers wait for each other this cannot be."""
    if store.kind == "sqlite":
        return
    rows = taken(store.db, new("before"), new("racing"), new("after"))
    settle(store.db, ending(rows[0]))
    longest = SECOND // 2

    class Oops(Exception):
        """Its process goes away."""

    try:
        with store.db.transaction() as tx:
            assert settling.settle(tx, [ending(rows[1])]) == {rows[1].id: settling.Answer.APPLIED}
            s = subscribed(store.open(), longest_us=longest)
            if not commits:
                raise Oops
    except Oops:
        pass
    settle(store.db, ending(rows[2]))
    fanned(store.db)
    assert set(delivered(store.db, s)) == {"after"} and s.catch_up is CatchUp.RACE
    assert store.db.read(events.catching_up) == [], "the window is open as long as such a transaction may be"
    threading.Event().wait(2 * longest / 1e6 + 0.05)
    assert caught_up(store.db, s) == 1
    assert set(delivered(store.db, s)) == {"after", *(["racing"] if commits else [])}, "what had ended before is not its"
    left = store.db.read(lambda tx: tx.rows(tx.t.delivery.select().where(tx.t.delivery.c.state == D.PASSED)))
    assert left == []


def test_a_transaction_that_lasts_longer_than_is_waited_for_ends_nothing(store: Opened) -> None:
    """It is executed again, and so late that it sees the subscription."""
    if store.kind == "sqlite":
        return
    db = store.open(timeout_ms=1000)
    rows = taken(store.db, new("slow"))
    tries: list[int] = []

    def work(tx: Transaction) -> None:
        tries.append(1)
        settling.settle(tx, [ending(rows[0])])
        if len(tries) == 1:
            db.clock = Later(db.clock.monotonic() + 3.2)  # type: ignore[assignment]

    db.run(work)
    assert len(tries) == 2 and every(store.db)["slow"].state is TaskState.SUCCEEDED


class Later:
    """A clock that stands still, later."""

    def __init__(self, at: float) -> None:
        self._at = at

    def monotonic(self) -> float:
        return self._at


def test_subscriptions_made_while_tasks_end_miss_none(store: Opened) -> None:
    """Settles and creations at once: each subscription gets every end that was committed after it, no end twice, none that had been committed before it was asked for."""
    count = 60 if store.kind == "sqlite" else 120
    rows = taken(store.db, *[new(f"k{i:03}") for i in range(count)])
    committed: dict[str, tuple[int, int]] = {}
    made: list[tuple[int, int, str]] = []
    order = iter(range(10**6))
    longest = 0 if store.kind == "sqlite" else 3 * SECOND // 2

    def settles(part: int) -> None:
        db = store.open()

        def work(tx: Transaction, row: TaskRow) -> int:
            settling.settle(tx, [ending(row)])
            if store.kind != "sqlite":
                threading.Event().wait(0.004)  # what is committed meanwhile, it has not seen
            return next(order)

        for row in rows[part::2]:
            before = db.run(lambda tx, row=row: work(tx, row))  # type: ignore[misc]
            committed[row.key] = (before, next(order))

    def subscribes() -> None:
        db = store.open()
        for i in range(8):
            before = next(order)
            subscribed(db, f"s{i}", longest_us=longest)
            made.append((before, next(order), f"s{i}"))

    assert together(lambda: settles(0), lambda: settles(1), subscribes) == [None] * 3
    threading.Event().wait(2 * longest / 1e6 + 0.05)
    there = {s.name: s for s in store.db.read(lambda tx: subscriptions.listed(tx, "default"))}
    while fanned(store.db, 7):
        pass
    for before, after, name in made:
        caught_up(store.db, there[name], limit=5)
        found = delivered(store.db, there[name])
        assert {k for k, (begun, _) in committed.items() if begun > after} <= set(found), name
        assert not {k for k, (_, answered) in committed.items() if answered < before} & set(found), name
    outcomes_agree(store.db)


def test_everybody_makes_deliveries_at_once_and_each_is_made_once(store: Opened) -> None:
    """Several sweeps and a client that hurries: no pair twice, none missing, no deadlock comes out."""
    subs = [subscribed(store.db, f"s{i}") for i in range(3)]
    rows = taken(store.db, *[new(f"k{i:03}") for i in range(150)])
    settle(store.db, *[ending(r) for r in rows])

    def fans(db: Database) -> None:
        while db.run(lambda tx: events.fan_out(tx, 11)):
            pass

    dbs = [store.open() for _ in range(3)]
    assert together(*[lambda db=db: fans(db) for db in dbs]) == [None] * 3
    fans(store.db)
    for s in subs:
        assert len(delivered(store.db, s)) == 150


def test_a_name_is_given_once_and_the_same_request_is_the_same_subscription(store: Opened) -> None:
    """Two that ask at one moment get one; another content is told from it."""
    asked = asked_for("n", handler="work")
    dbs = [store.open() for _ in range(4)]
    made = together(*[lambda db=db: db.run(lambda tx: subscriptions.create(tx, asked_for("n", handler="work"), 0)) for db in dbs])
    assert len({getattr(m, "id", m) for m in made}) == 1
    row = store.db.run(lambda tx: subscriptions.create(tx, asked, 0))
    assert asked.same_as(row) == [] and asked_for("n", attempts=9).same_as(row) == ["handler", "attempts"]
    other = subscribed(store.db, "n", namespace="other")
    assert other.id != row.id
