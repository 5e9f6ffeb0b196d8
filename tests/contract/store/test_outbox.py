"""An outbox in a user's database and its relay: one request, one task, wherever a crash or a lost answer falls; late relays change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from tests.contract.store.callers import LEVELS, WAYS, User, own_rows, own_table
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import HOUR, SECOND, every, new

from millstream_coordinator.outbox_relay import OutboxCore
from millstream_schema.durable.outbox import DAY_US, EntryCause, EntryDecision, EntryRow, EntryState, Limits, on_claim, retried
from millstream_schema.durable.records import NewTask, Receipt
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import CommitUnknown, ConfigurationError, RetryTransaction, StoreError, StoreUnavailable, TaskConflict
from millstream_schema.ports import SystemClock, SystemIds
from millstream_schema.store import outboxes, tasks
from millstream_schema.store.callers import caller_of, joined
from millstream_schema.store.database import Database
from millstream_schema.store.outbox_table import outbox_table
from millstream_schema.store.rows import to

E, C = EntryState, EntryCause
TARGET = "installation-1"
PREFIX = "shop_"


class Half:
    """Chance that is always the same."""

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2


class Installation:
    """The installation the relay sends to: the store's own tables. ``fails``: what the next sendings do before or after they are stored."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.fails: list[Callable[[], None] | None] = []
        self.lost: list[BaseException] = []
        self.asked = 0

    def forward(self, new: NewTask) -> Receipt:
        self.asked += 1
        if self.fails:
            fail = self.fails.pop(0)
            if fail is not None:
                fail()
        receipt = self.db.run(lambda tx: tasks.submit(tx, new))
        if self.lost:
            raise self.lost.pop(0)
        if receipt.conflict:
            raise TaskConflict(f"known as {receipt.conflict}")
        return receipt


class Fault:
    """Strikes at commit number ``at`` of the outbox's database: before it, or its answer is lost."""

    def __init__(self) -> None:
        self.count = self.at = 0
        self.before = False

    def before_commit(self) -> None:
        self.count += 1
        if self.before and self.count == self.at:
            raise StoreUnavailable("injected")

    def after_commit(self) -> None:
        if not self.before and self.count == self.at:
            raise CommitUnknown("injected")


class Shop:
    """A user's database with an outbox (here: beside the installation's tables, under another prefix), and relays."""

    def __init__(self, store: Opened) -> None:
        self.store = store
        self.fault = Fault()
        self.db = Database(store.url, SystemClock(), prefix=PREFIX, faults=self.fault)
        self.installation = Installation(store.db)
        self.db.run(outboxes.create)
        self.db.run(lambda tx: tx.delete(outbox_table(PREFIX)))
        self._n = itertools.count(1)

    def put(self, key: str = "k", *, target: str = TARGET, **changes: Any) -> outboxes.Put:
        one = new(key, id=f"task-o{next(self._n)}", **changes)
        return self.db.run(lambda tx: outboxes.put(tx, target, one))

    def relay(self, name: str = "r", *, limits: Limits | None = None, target: str = TARGET, batch: int = 50) -> OutboxCore:
        own = limits or Limits(first_ms=0, longest_ms=0)
        return OutboxCore(self.db, self.installation, target, name, SystemClock(), SystemIds(), Half(), own, batch)

    def entries(self) -> dict[str, EntryRow]:
        t = outbox_table(PREFIX)
        return self.db.read(lambda tx: {r["key"]: to(EntryRow, r) for r in tx.rows(sa.select(t))})

    def set(self, key: str, **values: Any) -> None:
        t = outbox_table(PREFIX)
        self.db.run(lambda tx: tx.update(t, t.c.key == key, **values))

    def claim(self, owner: str, claim: str = "c", lease_us: int = 60 * SECOND) -> list[EntryRow]:
        return self.db.run(lambda tx: outboxes.claim(tx, TARGET, owner, claim, 10, lease_us, lambda e, now: on_claim(e, Limits(), now)))

    def settle(self, entry: EntryRow, task: str = "t") -> bool:
        return self.db.run(lambda tx: outboxes.settle(tx, entry, lambda e, now: EntryDecision(state=E.SENT, task=task)))

    def states(self) -> dict[str, EntryState]:
        return {k: e.state for k, e in self.entries().items()}


@pytest.fixture
def shop(store: Opened) -> Iterator[Shop]:
    shop = Shop(store)
    yield shop
    shop.db.close()


# -- coming in


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_an_entry_belongs_to_the_users_transaction(shop: Shop, way: str, level: str, commits: bool) -> None:
    """With the user's own row; a repeat is an answer, other content a conflict, and neither ends the transaction."""
    store = shop.store
    if store.kind == "sqlite" and level != LEVELS[0]:
        pytest.skip("SQLite has one level")
    own_table(store)
    user = User(store, way, level)
    user.note(1)
    home, clock = outboxes.home(shop.db.tables), SystemClock()
    puts = []
    for one in (new("k"), new("k"), new("k", digest="1:other"), new("l")):
        with joined(caller_of(user.session), home, 2000, clock) as tx:
            puts.append(outboxes.put(tx, TARGET, one))
    assert [(p.replayed, p.conflict) for p in puts] == [(False, ""), (True, ""), (False, "1:k"), (False, "")]
    user.note(2)
    (user.commit if commits else user.rollback)()
    user.close()
    assert (own_rows(store), set(shop.entries())) == (([1, 2], {"k", "l"}) if commits else ([], set()))


def test_a_wait_for_the_same_key_is_bounded(shop: Shop) -> None:
    """By the typed error."""
    users = User(shop.store, "session"), User(shop.store, "session")
    with joined(caller_of(users[0].session), outboxes.home(shop.db.tables), 2000, SystemClock()) as tx:
        outboxes.put(tx, TARGET, new())
    with (
        pytest.raises(RetryTransaction),
        joined(caller_of(users[1].session), outboxes.home(shop.db.tables), 200, SystemClock()) as tx,
    ):
        outboxes.put(tx, TARGET, new())
    for user in users:
        user.rollback()
        user.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_database_without_an_outbox_is_told_before_anything_fails(shop: Shop, way: str) -> None:
    """The user's transaction goes on."""
    own_table(shop.store)
    user = User(shop.store, way)
    user.note(1)
    other = Database(shop.store.url, SystemClock(), prefix="nowhere_")
    with (
        pytest.raises(ConfigurationError, match="millstream outbox init"),
        joined(caller_of(user.session), outboxes.home(other.tables), 2000, SystemClock()) as tx,
    ):
        outboxes.put(tx, TARGET, new())
    user.note(2)
    user.commit()
    user.close()
    other.close()
    assert own_rows(shop.store) == [1, 2]


# -- going out


def test_an_entry_becomes_the_task_it_was_kept_as(shop: Shop) -> None:
    """Key, digest, content, id: as they were; the delay counts from when the installation accepts it."""
    shop.put("a", delay_us=HOUR, args='[[],[["l"],["k"]]]', business_key="b", actor="me")
    shop.set("a", created_us=5)
    assert shop.relay().step() == 1
    entry, row = shop.entries()["a"], every(shop.store.db)["a"]
    assert (entry.state, entry.task, entry.sends) == (E.SENT, row.id, 1) and entry.sent_us > 0
    assert (row.digest, row.business_key, row.actor, row.state) == ("1:a", "b", "me", TaskState.SCHEDULED)
    assert row.wake_us is not None and abs(row.wake_us - row.created_us - HOUR) < SECOND
    assert "password" not in entry.request and shop.relay().step() == 0


def test_what_the_installation_knew_already_is_a_success(shop: Shop) -> None:
    """A replayed receipt; the entry names the task that there is."""
    known = new("k")
    shop.store.db.run(lambda tx: tasks.submit(tx, known))
    shop.put("k")
    shop.relay().step()
    assert (shop.entries()["k"].state, shop.entries()["k"].task) == (E.SENT, known.id)


def test_a_conflict_is_parked_at_once_and_holds_up_nothing(shop: Shop) -> None:
    """Never a new key; the others go."""
    shop.store.db.run(lambda tx: tasks.submit(tx, new("b", digest="1:else")))
    for key in "abc":
        shop.put(key)
    shop.relay().step()
    assert shop.states() == {"a": E.SENT, "b": E.PARKED, "c": E.SENT}
    assert shop.entries()["b"].cause is C.CONFLICT and shop.installation.asked == 3
    assert shop.relay().step() == 0 and set(every(shop.store.db)) == {"a", "b", "c"}


def test_what_somebody_changed_is_parked(shop: Shop) -> None:
    """Content that is no request; a request that is another than its columns say."""
    shop.put("a")
    shop.put("b")
    shop.set("a", request="{")
    shop.set("b", request=msgspec.json.encode(new("x")).decode())
    shop.relay().step()
    assert {e.cause for e in shop.entries().values()} == {C.INVALID} and every(shop.store.db) == {}


def test_an_installation_that_is_away_is_tried_again_with_pauses(shop: Shop) -> None:
    """Nobody else of the batch is tried then; later all are, as they were."""

    def away() -> None:
        raise StoreUnavailable("no route")

    shop.put("a")
    shop.put("b")
    shop.installation.fails = [away]
    shop.relay(limits=Limits(first_ms=60_000)).step()
    assert shop.installation.asked == 1
    assert {(e.state, e.cause, e.failures, e.reason) for e in shop.entries().values()} == {(E.WAITING, C.AWAY, 1, "no route")}
    assert shop.relay().step() == 0
    left = shop.relay().wait()
    assert left is not None and 40 < left <= 60
    for key in "ab":
        shop.set(key, due_us=1)
    shop.relay().step()
    assert shop.states() == {"a": E.SENT, "b": E.SENT}


@pytest.mark.parametrize(
    ("error", "state", "cause"),
    [
        (CommitUnknown("lost"), E.WAITING, C.AWAY),
        (StoreUnavailable("gone"), E.WAITING, C.AWAY),
        (StoreError("InsufficientPrivilege: permission denied"), E.PARKED, C.REFUSED),
    ],
    ids=["commit unknown", "answer lost", "permission"],
)
def test_answers_that_are_lost_are_asked_for_again_and_refusals_are_not(
    shop: Shop, error: Exception, state: EntryState, cause: EntryCause
) -> None:
    """The task was made, the answer was not heard: the same request finds it."""
    shop.put("k")
    shop.installation.lost = [error]
    shop.relay().step()
    assert (shop.entries()["k"].state, shop.entries()["k"].cause) == (state, cause)
    if state is E.WAITING:
        shop.relay().step()
        assert shop.entries()["k"].task == every(shop.store.db)["k"].id and shop.states() == {"k": E.SENT}
    assert len(every(shop.store.db)) == 1


def test_one_whose_sending_meets_a_defect_is_tried_again_and_holds_up_no_other(shop: Shop) -> None:
    """Whatever is raised: nobody knows whether the entry itself is to blame."""

    def fail() -> None:
        raise RuntimeError("nobody expected this")

    shop.put("a")
    shop.put("b")
    shop.installation.fails = [fail]
    shop.relay().step()
    found = shop.entries()
    assert {k: (e.state, e.failures) for k, e in found.items()} == {"a": (E.WAITING, 1), "b": (E.SENT, 0)}
    assert found["a"].reason == "RuntimeError: nobody expected this"
    shop.relay().step()
    assert shop.states() == {"a": E.SENT, "b": E.SENT}


def test_one_that_is_throttled_waits_as_long_as_it_is_told(shop: Shop) -> None:
    """By an error that says after how many seconds."""

    class Full(StoreError):
        retry_after = 1000.0

    shop.put("k")
    shop.installation.lost = [Full("full")]
    shop.relay().step()
    entry, now = shop.entries()["k"], shop.db.run(lambda tx: tx.now_us())
    assert (entry.state, entry.cause) == (E.WAITING, C.THROTTLED) and 900 * SECOND < entry.due_us - now <= 1000 * SECOND


def test_old_entries_and_those_sent_too_often_are_parked_unsent(shop: Shop) -> None:
    """And kept."""
    shop.put("old")
    shop.put("often")
    shop.set("old", since_us=1)
    shop.set("often", tries=1000, reason="no route")
    shop.relay().step()
    found = shop.entries()
    assert {k: e.cause for k, e in found.items()} == {"old": C.OLD, "often": C.SENDS} and shop.installation.asked == 0


def test_entries_for_another_installation_are_left_to_its_relay(shop: Shop) -> None:
    """One key for two installations is two requests."""
    assert not shop.put("k").replayed and not shop.put("k", target="installation-2").replayed
    assert shop.relay().step() == 1
    assert len(every(shop.store.db)) == 1 and shop.relay(target="installation-3").step() == 0


# -- leases


def test_a_relay_whose_lease_is_over_changes_nothing(shop: Shop) -> None:
    """Superseded by another, or only late by its database's clock; the generation grows with each taking."""
    shop.put("k")
    (first,) = shop.claim("one", "c1", lease_us=1)
    assert not shop.settle(first), "late, though nobody else has it"
    (second,) = shop.claim("two", "c2")
    assert (first.generation, second.generation) == (1, 2)
    assert not shop.settle(first, "wrong")
    assert shop.settle(second, "right") and shop.settle(second, "right"), "again: the answer was lost"
    assert not shop.settle(first, "wrong")
    assert (shop.entries()["k"].task, shop.entries()["k"].sends) == ("right", 2)


def test_a_taking_that_is_executed_again_gives_the_same(shop: Shop) -> None:
    """Its answer was lost; nothing is sent twice by it."""
    for key in "abc":
        shop.put(key)
    first = shop.claim("one", "c1")
    assert [e.generation for e in shop.claim("one", "c1")] == [1, 1, 1] and len(first) == 3
    assert shop.claim("one", "c2") == [] and shop.claim("two", "c1") == []


def test_relays_that_work_at_once_send_each_entry_to_one_task(shop: Shop) -> None:
    """Four of them, small batches."""
    keys = [f"k{i:02}" for i in range(40)]
    for key in keys:
        shop.put(key)

    def work(name: str) -> int:
        relay = shop.relay(name, batch=5)
        while relay.step():
            continue
        return relay.sent

    found = together(*[lambda n=n: work(f"r{n}") for n in range(4)])
    assert all(isinstance(f, int) for f in found), found
    assert sum(f for f in found if isinstance(f, int)) == 40
    assert sorted(every(shop.store.db)) == keys and set(shop.states().values()) == {E.SENT}


# -- crashes


def life(shop: Shop) -> None:
    """Everything an entry can go through, with a relay that is begun again whenever it fails; a lost lease is waited out by setting it."""
    for key in ("a", "b", "conflict", "late"):
        while True:
            try:
                shop.put(key, delay_us=HOUR if key == "late" else 0)
                break
            except (CommitUnknown, StoreUnavailable):
                continue
    shop.installation.lost = [CommitUnknown("lost")]
    for turn in range(12):
        relay = shop.relay(f"r{turn}", batch=3)
        try:
            while relay.step():
                continue
        except (CommitUnknown, StoreUnavailable):
            t = outbox_table(PREFIX)
            shop.fault.at = 0
            shop.db.run(lambda tx: tx.update(t, t.c.state == E.SENDING, lease_us=1))  # noqa: B023  # used at once
            continue
        if not [e for e in shop.entries().values() if e.state in (E.WAITING, E.SENDING)]:
            return
    raise AssertionError("it never came through")


@pytest.mark.parametrize("before", [True, False], ids=["before the commit", "answer lost"])
def test_a_crash_at_any_transaction_leaves_one_task_for_each_request(store: Opened, before: bool) -> None:
    """At every commit of the outbox's database in turn; then all is as if nothing had happened."""
    struck = 0
    for at in range(1, 60):
        store.empty()
        shop = Shop(store)
        store.db.run(lambda tx: tasks.submit(tx, new("conflict", digest="1:else")))
        shop.fault.count, shop.fault.at, shop.fault.before = 0, at, before
        life(shop)
        rows, entries = every(store.db), shop.entries()
        assert set(rows) == {"a", "b", "conflict", "late"}
        assert {k: (e.state, e.cause) for k, e in entries.items()} == {
            "a": (E.SENT, C.NONE), "b": (E.SENT, C.NONE), "late": (E.SENT, C.NONE), "conflict": (E.PARKED, C.CONFLICT),
        }  # fmt: skip
        assert all(e.task == rows[k].id for k, e in entries.items() if e.state is E.SENT)
        done, count = shop.fault.at, shop.fault.count
        shop.db.close()
        if done and count < at:
            break
        struck += 1
    assert struck >= 8


# -- people


def test_a_parked_entry_is_sent_again_under_its_own_key_or_not_at_all(shop: Shop) -> None:
    """Asked twice it is done once; what could run twice is refused."""
    shop.put("k")
    shop.set("k", tries=1000, sends=1000)
    shop.relay().step()
    before = shop.entries()["k"]
    assert shop.db.run(lambda tx: outboxes.retry(tx, before.id, "the network is back", retried)) == ""
    assert shop.db.run(lambda tx: outboxes.retry(tx, before.id, "the network is back", retried)) == ""
    after = shop.entries()["k"]
    assert (after.state, after.cause, after.key, after.digest, after.tries, after.sends) == (
        E.WAITING,
        C.PERSON,
        "k",
        before.digest,
        0,
        1000,
    )
    shop.relay().step()
    assert shop.states() == {"k": E.SENT}
    refused = shop.db.run(lambda tx: outboxes.retry(tx, before.id, "again", retried))
    assert refused is not None and "SENT" in refused
    assert shop.db.run(lambda tx: outboxes.retry(tx, "nobody", "x", retried)) is None


def test_counts_tell_states_causes_and_age(shop: Shop) -> None:
    """By the outbox's own clock."""
    for key in "ab":
        shop.put(key)
    shop.relay(batch=1).step()
    found = {(c["state"], c["cause"]): (c["entries"], 0 <= int(c["oldest_us"]) < 60 * SECOND) for c in shop.db.read(outboxes.counts)}
    assert found == {("SENT", ""): (1, True), ("WAITING", ""): (1, True)}


def test_only_what_was_accepted_long_ago_is_removed(shop: Shop) -> None:
    """Its key is kept as long as the installation keeps it."""
    for key in ("old", "new", "parked", "waiting"):
        shop.put(key)
    for key in ("old", "new"):
        shop.set(key, state=E.SENT, task="t", sent_us=1 if key == "old" else 10**18)
    shop.set("parked", state=E.PARKED, sent_us=0)
    assert shop.db.run(lambda tx: outboxes.forget_sent(tx, TARGET, 30 * DAY_US, 10)) == 1
    assert set(shop.entries()) == {"new", "parked", "waiting"}
