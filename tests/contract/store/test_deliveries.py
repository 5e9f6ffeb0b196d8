"""Deliveries are handed out under leases, each to one consumer at a time, until they are acknowledged; nothing is given up by itself."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from tests.contract.store.delivery_rows import asked_for, caught_up, delivered, fanned, frozen, keys, pulled, subscribed
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import SECOND, ending, new, settle, taken
from tests.contract.store.test_task_faults import Fault

from millstream_schema.durable import outcomes as o
from millstream_schema.durable.deliveries import DeliveryState, Handed, SubscriptionRow, SubscriptionState
from millstream_schema.durable.records import NewTask
from millstream_schema.errors import CommitUnknown, StoreUnavailable
from millstream_schema.store import deliveries, events, settling, subscriptions
from millstream_schema.store.database import Database, Transaction

D = DeliveryState
R = TypeVar("R")


def ended(store: Opened, *names: str) -> None:
    """Tasks of these keys, succeeded and handed on."""
    rows = taken(store.db, *[new(name) for name in names])
    settle(store.db, *[ending(row) for row in rows])
    while fanned(store.db):
        pass


def rows(db: Database) -> dict[str, Any]:
    names = {e.id: key for key, e in frozen(db).items()}
    return {names[r["event"]]: r for r in db.read(lambda tx: tx.rows(tx.t.delivery.select()))}


def test_what_is_handed_out_is_nobody_elses_until_its_lease_is_over(store: Opened) -> None:
    """Then it waits for its back-off, comes again with the next attempt, and is parked after the last; what it brings stays as it was."""
    s = subscribed(store.db, attempts=2)
    ended(store, "a", "b")
    first = pulled(store.db, s, lease_us=SECOND // 4)
    assert keys(first) == ["a", "b"] and pulled(store.db, s) == []
    assert [(h.delivery.state, h.delivery.attempts) for h in first] == [(D.LEASED, 1)] * 2
    threading.Event().wait(0.3)
    second = pulled(store.db, s, lease_us=SECOND // 4) or pulled(store.db, s, lease_us=SECOND // 4)
    assert keys(second) == ["a", "b"] and {h.delivery.attempts for h in second} == {2}
    assert [h.event for h in second] == [h.event for h in first]
    threading.Event().wait(0.3)
    assert pulled(store.db, s) == [] and delivered(store.db, s) == {"a": D.PARKED, "b": D.PARKED}
    assert {r["reason"] for r in rows(store.db).values()} == {deliveries.LEASE_OVER}


def test_a_sweep_ends_leases_nobody_asks_about(store: Opened) -> None:
    """In parts, and only those that are over."""
    s = subscribed(store.db, delay_ms=3_600_000, max_delay_ms=3_600_000)
    ended(store, *[f"k{i}" for i in range(5)])
    pulled(store.db, s, 3, lease_us=1)
    pulled(store.db, s, 2)
    assert [store.db.run(lambda tx: deliveries.expire(tx, s, 2, lambda: 0.0)) for _ in range(3)] == [2, 1, 0]
    assert Counter(delivered(store.db, s).values()) == {D.PENDING: 3, D.LEASED: 2}
    assert pulled(store.db, s) == [], "they wait an hour"


def test_a_refusal_counts_under_its_own_lease_only(store: Opened) -> None:
    """With its reason; after the pause that the consumer asks for; a stale one changes nothing of who has it now."""
    s = subscribed(store.db, delay_ms=3_600_000, max_delay_ms=3_600_000)
    ended(store, "a")
    (first,) = pulled(store.db, s)
    lease, event = first.delivery.lease, first.event.id
    refused = store.db.run(lambda tx: deliveries.refuse(tx, s, event, lease, "not now", 0, 0.0))
    assert refused is not None and (refused.state, refused.reason, refused.lease) == (D.PENDING, "not now", "")
    (second,) = pulled(store.db, s)
    for stale in (lease, "", "nobody's"):
        assert store.db.run(lambda tx, t=stale: deliveries.refuse(tx, s, event, t, "late", 0, 0.0)) is None  # type: ignore[misc]
    assert rows(store.db)["a"]["lease"] == second.delivery.lease
    store.db.run(lambda tx: deliveries.refuse(tx, s, event, second.delivery.lease, "again", None, 0.0))
    assert pulled(store.db, s) == [], "by the back-off, an hour"


@pytest.mark.parametrize("state", ["leased by another", "waiting", "parked", "acknowledged"])
def test_an_acknowledgement_is_valid_whatever_became_of_its_lease(store: Opened, state: str) -> None:
    """The consumer has done it: that it is late changes nothing of that. A repeat is the same."""
    s = subscribed(store.db, attempts=1 if state == "parked" else 5)
    ended(store, "a")
    (first,) = pulled(store.db, s, lease_us=1)
    store.db.run(lambda tx: deliveries.expire(tx, s, 10, lambda: 0.0))
    if state == "leased by another":
        assert len(pulled(store.db, s)) == 1
    if state == "acknowledged":
        store.db.run(lambda tx: deliveries.acknowledge(tx, s, [first.event.id], "me"))
    assert store.db.run(lambda tx: deliveries.acknowledge(tx, s, [first.event.id, "task-nowhere"], "me")) == ["task-nowhere"]
    assert delivered(store.db, s) == {"a": D.ACKNOWLEDGED} and rows(store.db)["a"]["actor"] == "me"
    assert pulled(store.db, s) == []


@pytest.mark.parametrize("state", [D.PENDING, D.LEASED, D.PARKED, D.ACKNOWLEDGED], ids=str)
def test_a_redelivery_by_hand_begins_again_with_the_same_outcome(store: Opened, state: DeliveryState) -> None:
    """All attempts are its again; another subscription's is not touched."""
    s, other = subscribed(store.db, attempts=1), subscribed(store.db, "other", attempts=1)
    ended(store, "a")
    before = frozen(store.db)["a"]
    handed = pulled(store.db, s, lease_us=1 if state is D.PARKED else 60 * SECOND) if state is not D.PENDING else []
    pulled(store.db, other)
    if state is D.PARKED:
        store.db.run(lambda tx: deliveries.expire(tx, s, 10, lambda: 0.0))
    if state is D.ACKNOWLEDGED:
        store.db.run(lambda tx: deliveries.acknowledge(tx, s, [handed[0].event.id], "me"))
    assert delivered(store.db, s) == {"a": state}
    assert store.db.run(lambda tx: deliveries.redeliver(tx, s, [before.id, "task-nowhere"], "me")) == 1
    (again,) = pulled(store.db, s)
    assert (again.event, again.delivery.attempts) == (before, 1)
    assert delivered(store.db, other) == {"a": D.LEASED}


def test_what_was_not_sent_was_not_tried(store: Opened) -> None:
    """Given back, it is due again later and no attempt is counted."""
    s = subscribed(store.db, attempts=1)
    ended(store, "a")
    (handed,) = pulled(store.db, s)
    give = (s, [handed.event.id], handed.delivery.lease, 0)
    assert store.db.run(lambda tx: deliveries.give_back(tx, *give)) == 1 and store.db.run(lambda tx: deliveries.give_back(tx, *give)) == 0
    assert pulled(store.db, s)[0].delivery.attempts == 1


def test_nothing_is_handed_out_while_a_subscription_is_paused_or_when_it_is_gone(store: Opened) -> None:
    """Deliveries are made meanwhile; with a deleted one all of its go, in parts, and nothing of others."""
    s, other = subscribed(store.db), subscribed(store.db, "other")

    def becomes(state: SubscriptionState) -> None:
        assert store.db.run(lambda tx: subscriptions.set_state(tx, "default", "s", state, "me")) is not None

    becomes(SubscriptionState.PAUSED)
    ended(store, *[f"k{i}" for i in range(5)])
    assert pulled(store.db, s) == [] and len(delivered(store.db, s)) == 5
    becomes(SubscriptionState.ACTIVE)
    assert len(pulled(store.db, s, 2)) == 2
    becomes(SubscriptionState.DELETED)
    assert (
        pulled(store.db, s) == []
        and store.db.run(lambda tx: subscriptions.set_state(tx, "default", "s", SubscriptionState.ACTIVE, "me")) is None
    )
    assert [store.db.run(lambda tx: subscriptions.remove(tx, s.id, 2)) for _ in range(4)] == [False, False, True, True]
    assert delivered(store.db, s) == {} and len(delivered(store.db, other)) == 5
    assert [x.id for x in store.db.read(subscriptions.everywhere)] == [other.id]


def test_the_same_lease_asked_again_gives_the_same(store: Opened) -> None:
    """And nothing else, though more is due; another lease gets that."""
    s = subscribed(store.db)
    ended(store, "a", "b", "c")
    first = pulled(store.db, s, 2, token="lease-1")
    again = pulled(store.db, s, 2, token="lease-1", again=True)
    assert again == first and len(first) == 2
    assert len(pulled(store.db, s, token="lease-2", again=True)) == 1


def test_pullers_at_once_get_each_delivery_once(store: Opened) -> None:
    """With acknowledgements, refusals and leases that end meanwhile: two live leases never hold one delivery, all are acknowledged at last, no deadlock comes out."""
    s = subscribed(store.db, attempts=1_000_000)
    count = 60
    ended(store, *[f"k{i:03}" for i in range(count)])
    live: Counter[str] = Counter()
    lock, done = threading.Lock(), set[str]()

    def consumes(seed: int) -> None:
        db, rng = store.open(), random.Random(seed)
        for turn in itertools.count():
            assert turn < 3_000
            if len(done) == count:
                return
            token = f"lease-{seed}-{turn}"
            handed = db.run(lambda tx, t=token: deliveries.lease(tx, s, 7, t, 600 * SECOND, rng.random, again=False))  # type: ignore[misc]
            with lock:
                for h in handed:
                    live[h.event.id] += 1
                    assert live[h.event.id] == 1, "leased twice"
            for h in handed:
                with lock:
                    live[h.event.id] -= 1
                if rng.random() < 0.5:
                    assert db.run(lambda tx, h=h: deliveries.acknowledge(tx, s, [h.event.id], "")) == []  # type: ignore[misc]
                    with lock:
                        done.add(h.event.id)
                else:
                    db.run(lambda tx, h=h, t=token: deliveries.refuse(tx, s, h.event.id, t, "no", 0, 0.0))  # type: ignore[misc]

    assert together(lambda: consumes(0), lambda: consumes(1), lambda: consumes(2)) == [None] * 3
    assert set(delivered(store.db, s).values()) == {D.ACKNOWLEDGED}


def first_of_all(db: Database, s: SubscriptionRow, event: str) -> None:
    """The next to be handed out."""
    d = db.tables.delivery
    db.run(lambda tx: tx.update(d, d.c.event == event, d.c.subscription == s.id, due_us=1))


def test_purging_takes_what_is_done_and_nothing_that_can_still_be_sent(store: Opened) -> None:
    """Not what is pending, leased, parked or redelivered; an event goes with its last delivery; in parts."""
    s, other = subscribed(store.db, attempts=1), subscribed(store.db, "other")
    ended(store, *[f"k{i}" for i in range(6)], "pending", "leased", "parked", "again")
    by = {e.key: e.id for e in frozen(store.db).values()}
    mine = [by[f"k{i}"] for i in range(6)]
    store.db.run(lambda tx: deliveries.acknowledge(tx, other, list(by.values()), ""))
    for name in ("leased", "parked"):
        first_of_all(store.db, s, by[name])
        pulled(store.db, s, 1, lease_us=1 if name == "parked" else 60 * SECOND)
    threading.Event().wait(0.01)
    store.db.run(lambda tx: deliveries.expire(tx, s, 10, lambda: 0.0))
    store.db.run(lambda tx: deliveries.acknowledge(tx, s, [*mine, by["again"]], ""))
    store.db.run(lambda tx: deliveries.redeliver(tx, s, [by["again"]], ""))
    late = store.db.read(lambda tx: tx.now_us()) + 1
    assert store.db.run(lambda tx: deliveries.purge(tx, 1, 100)) == 0
    total = 0
    while gone := store.db.run(lambda tx: deliveries.purge(tx, late, 4)):
        assert gone <= 8
        total += gone
    assert total == 10 + 6 + 6
    assert delivered(store.db, s) == {"pending": D.PENDING, "leased": D.LEASED, "parked": D.PARKED, "again": D.PENDING}
    assert delivered(store.db, other) == {} and set(frozen(store.db)) == {"pending", "leased", "parked", "again"}


def test_purging_takes_nothing_from_a_subscription_that_is_catching_up(store: Opened) -> None:
    """It would come again."""
    ended(store, "a")
    s = subscribed(store.db, since_us=1)
    store.db.run(lambda tx: events.catch_up(tx, s.id, 1))
    (handed,) = pulled(store.db, s)
    store.db.run(lambda tx: deliveries.acknowledge(tx, s, [handed.event.id], ""))
    late = store.db.read(lambda tx: tx.now_us()) + 1
    assert store.db.run(lambda tx: deliveries.purge(tx, late, 100)) == 0
    caught_up(store.db, s)
    assert delivered(store.db, s) == {"a": D.ACKNOWLEDGED}
    assert store.db.run(lambda tx: deliveries.purge(tx, late, 100)) == 2


# -- COMMITs whose answer is lost


class Life:
    """Every operation on subscriptions once, each executed again as it was until it is answered."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.said: list[Any] = []
        self._serial = itertools.count(1)

    def do(self, work: Callable[[Transaction, bool], R]) -> R:
        for again in (False, True):
            try:
                return self.db.run(lambda tx, again=again: work(tx, again))  # type: ignore[misc]
            except (CommitUnknown, StoreUnavailable):
                continue
        raise AssertionError("it never came through")

    def create(self, name: str, **changes: Any) -> SubscriptionRow:
        wanted = asked_for(name, **changes)
        row = self.do(lambda tx, _: subscriptions.create(tx, wanted, 0))
        self.said.append((row.name, row.seq, wanted.same_as(row)))
        return row

    def pull(self, s: SubscriptionRow, limit: int, lease_us: int = 600 * SECOND) -> list[Handed]:
        token = f"lease-{next(self._serial)}"
        found = self.do(lambda tx, again: deliveries.lease(tx, s, limit, token, lease_us, lambda: 0.5, again=again))
        self.said.append((token, [(h.event.key, h.delivery.attempts) for h in found]))
        return found

    def lived(self, store: Opened) -> None:
        first = self.create("first", attempts=2)
        names = [f"k{i}" for i in range(6)]
        new_tasks: list[NewTask] = [new(n, id=f"task-{n}") for n in names]
        tasks_ = taken(store.db, *new_tasks)
        self.do(lambda tx, _: settling.settle(tx, [ending(r) for r in tasks_[:2]]))
        self.do(lambda tx, _: settling.settle(tx, [ending(r, o.GaveUp("no")) for r in tasks_[2:4]]))
        late = self.create("late", since_us=1)
        self.do(lambda tx, _: settling.settle(tx, [ending(r) for r in tasks_[4:]]))
        while self.do(lambda tx, _: events.fan_out(tx, 4)):
            pass
        while self.do(lambda tx, _: events.catch_up(tx, late.id, 2)):
            pass
        a = self.pull(first, 4)
        self.do(lambda tx, _: deliveries.acknowledge(tx, first, [a[0].event.id], "me"))
        self.do(lambda tx, _: deliveries.refuse(tx, first, a[1].event.id, a[1].delivery.lease, "no", 0, 0.5))
        self.do(lambda tx, _: deliveries.give_back(tx, first, [a[2].event.id], a[2].delivery.lease, 0))
        b = self.pull(first, 4)
        for h in b:
            self.do(lambda tx, _, h=h: deliveries.refuse(tx, first, h.event.id, h.delivery.lease, "no", 0, 0.5))  # type: ignore[misc]
        self.do(lambda tx, _: deliveries.redeliver(tx, first, [a[0].event.id], "me"))
        self.do(lambda tx, _: subscriptions.set_state(tx, "default", "first", SubscriptionState.PAUSED, "me"))
        self.pull(first, 1)
        self.pull(late, 2)
        self.do(lambda tx, _: subscriptions.set_state(tx, "default", "late", SubscriptionState.DELETED, "me"))
        while not self.do(lambda tx, _: subscriptions.remove(tx, late.id, 4)):
            pass

    def seen(self) -> Any:
        """All that was answered and stored, without times, ids of subscriptions, and how often a row was written."""
        dull = re.compile(r".*_us|rev|id|subscription")

        def stored(tx: Transaction, table: str) -> list[dict[str, Any]]:
            found = tx.rows(getattr(tx.t, table).select())
            return sorted(({k: v for k, v in row.items() if not dull.fullmatch(k)} for row in found), key=repr)

        return self.said, self.db.read(lambda tx: {t: stored(tx, t) for t in ("subscription", "event", "delivery")})


def lived(store: Opened, fault: Fault) -> Any:
    store.empty()
    life = Life(store.open(faults=fault))
    life.lived(store)
    seen = life.seen()
    store.close_others()
    return seen


@pytest.mark.parametrize("before", [False, True], ids=["answer lost", "nothing done"])
def test_celery_t35_a_commit_without_an_answer_changes_nothing(store: Opened, before: bool) -> None:
    """Each commit in turn of creating, ending, handing on, catching up, pulling, acknowledging, refusing, redelivering, pausing, removing: the same is answered and stored."""
    counted = Fault(0)
    reference = lived(store, counted)
    states = Counter(r["state"] for r in reference[1]["delivery"])
    assert states == {D.PENDING: 1, D.PARKED: 2, D.LEASED: 1} or len(reference[1]["delivery"]) == 6, states
    step = 1 if store.kind == "sqlite" else 3
    for at in range(1, counted.count + 1, step):
        fault = Fault(at, before=before)
        assert lived(store, fault) == reference, f"commit {at}"
        assert fault.struck
