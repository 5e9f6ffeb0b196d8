"""Durable tasks come in once, under identifiers that compare byte by byte, inside callers' transactions; cancel; reviews."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import (
    HOUR,
    LANE,
    SECOND,
    consistent,
    ending,
    every,
    evidence,
    external,
    fresh,
    new,
    permit,
    read,
    session,
    settle,
    states,
    submit,
    take,
    taken,
)

from millstream_schema.durable import outcomes as o
from millstream_schema.durable.decisions import RANK_STEP_US
from millstream_schema.durable.records import NewTask, Receipt
from millstream_schema.durable.states import Cause, TaskState
from millstream_schema.store import claims, settling, tasks
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.settling import Answer, ReviewRefused

T = TaskState


# -- one key, one task


def test_a_key_with_the_same_content_is_answered_with_the_first_receipt(store: Opened) -> None:
    """The end state comes with it; the second request's id is nobody's."""
    first, again = new(), new()
    assert submit(store.db, first) == [Receipt(first.id, T.READY, first.digest)]
    assert submit(store.db, again) == [Receipt(first.id, T.READY, first.digest, replayed=True)]
    session(store.db)
    (row,) = take(store.db)
    settle(store.db, ending(row))
    assert submit(store.db, new()) == [Receipt(first.id, T.SUCCEEDED, first.digest, replayed=True)]
    assert list(every(store.db)) == ["k"] and read(store.db, first.id).root == first.id


def test_a_key_with_other_content_is_a_conflict_that_names_what_is_stored(store: Opened) -> None:
    """And changes nothing."""
    first, other = new(args="first"), new(digest="1:other", args="other")
    submit(store.db, first)
    assert submit(store.db, other) == [Receipt(first.id, T.READY, "1:other", conflict=first.digest)]
    assert read(store.db, first.id).args == "first" and len(every(store.db)) == 1


def test_the_same_submission_again_is_the_same_answer(store: Opened) -> None:
    """It is what a caller does whose COMMIT was not answered: not a replay of somebody else's."""
    one = new()
    assert submit(store.db, one, one) == [Receipt(one.id, T.READY, one.digest)] * 2


def test_times_are_the_databases_and_nothing_is_due_before_its_time(store: Opened) -> None:
    """Delay counts from acceptance; rank is when it is available less what its priority is worth; start_by counts from when it is due."""
    submit(
        store.db, new("now", priority=3), new("later", delay_us=HOUR, start_by_us=SECOND), new("limited", start_by_us=HOUR, deadline_us=2 * HOUR)
    )  # fmt: skip
    rows = every(store.db)
    assert {k: r.state for k, r in rows.items()} == {"now": T.READY, "later": T.SCHEDULED, "limited": T.READY}
    now, later, limited = rows["now"], rows["later"], rows["limited"]
    assert (now.ready_lane, now.wake_us, now.start_by_us, now.deadline_us) == (LANE, None, 0, 0)
    assert abs(now.created_us - 3 * RANK_STEP_US - now.rank) < SECOND
    assert later.ready_lane is None and later.wake_us is not None and abs(later.wake_us - later.created_us - HOUR) < SECOND
    assert abs(later.start_by_us - later.wake_us - SECOND) < SECOND
    assert (
        abs(limited.deadline_us - limited.created_us - 2 * HOUR) < SECOND and abs(limited.start_by_us - limited.created_us - HOUR) < SECOND
    )
    instant = later.wake_us
    submit(store.db, new("at", due_us=instant), new("past", due_us=SECOND))
    assert (read(store.db, every(store.db)["at"].id).wake_us, states(store.db)["past"]) == (instant, T.READY)


def test_an_instant_long_past_does_not_jump_the_queue(store: Opened) -> None:
    """Only priority does, which is bounded: whoever gives due_at = 1970 must not be served first for ever."""
    submit(store.db, new("early"), new("backdated", due_us=SECOND))
    rows = every(store.db)
    assert rows["early"].rank <= rows["backdated"].rank


PAIRS = [
    ("a", "A"),
    ("e", "é"),
    ("a", "a "),
    ("a", " a"),
    ("\u00e9", "e\u0301"),
    ("ß", "ss"),
    ("a", "ａ"),
    ("k", "K"),
    ("i", "ı"),
    ("𝄞", "𝄢"),
]


@pytest.mark.parametrize("column", ["namespace", "handler", "key"])
def test_identifiers_that_differ_in_anything_are_different_keys(store: Opened, column: str) -> None:
    """Case, accents, blanks at the ends, Unicode form, width: the database's collation folds none of them."""
    for one, other in PAIRS:
        store.empty()
        receipts = submit(store.db, *[new(**{"key": "k", column: value}) for value in (one, other, one, other)])
        assert [r.replayed for r in receipts] == [False, False, True, True], (one, other)
        assert len({r.task for r in receipts}) == 2
        found = store.db.read(lambda tx: {r[column] for r in tx.rows(tx.t.task.select())})
        assert found == {one, other}, "they come back as they were given"


def test_queues_and_permits_compare_byte_by_byte_too(store: Opened) -> None:
    """A lane holds its own tasks; a permit of capacity 1 blocks nobody who wants another one."""
    for one, other in PAIRS:
        store.empty()
        session(store.db)
        submit(store.db, new("1", queue=one, permit=one), new("2", queue=other, permit=other))
        lanes = sorted([f"default/{one}", f"default/{other}"])
        assert sorted(store.db.read(lambda tx, q=(one, other): claims.ready_lanes(tx, q))) == lanes  # type: ignore[misc]
        assert [r.queue for r in take(store.db, lanes=[f"default/{one}"])] == [one]
        assert [r.queue for r in take(store.db, lanes=lanes)] == [other]
        assert permit(store.db, f"default/{one}").held == permit(store.db, f"default/{other}").held == 1
        consistent(store.db)


def test_permits_of_two_namespaces_never_meet(store: Opened) -> None:
    """One key, two resources."""
    session(store.db)
    submit(store.db, new("1", permit="p"), new("2", namespace="other", permit="p"))
    assert len(take(store.db, lanes=[LANE, "other/default"])) == 2


def test_many_come_in_by_one_statement_and_each_is_answered(store: Opened) -> None:
    """New ones, known ones, conflicts and two of one key in one call, in the order given."""
    known = new("known")
    submit(store.db, known)
    given = [
        new("b"), new("known"), new("a", delay_us=HOUR), new("known", digest="1:other"), new("twice"), new("twice"), new("c", deadline_us=HOUR),
    ]  # fmt: skip
    found = store.db.run(lambda tx: tasks.submit_many(tx, given))
    assert [(r.task, r.state, r.replayed, r.conflict) for r in found] == [
        (given[0].id, T.READY, False, ""),
        (known.id, T.READY, True, ""),
        (given[2].id, T.SCHEDULED, False, ""),
        (known.id, T.READY, False, known.digest),
        (given[4].id, T.READY, False, ""),
        (given[4].id, T.READY, True, ""),
        (given[6].id, T.READY, False, ""),
    ]
    plain = [new(f"p{i:04}") for i in range(503)]
    assert [r.task for r in store.db.run(lambda tx: tasks.submit_many(tx, plain))] == [n.id for n in plain]
    assert len(every(store.db)) == 5 + 503
    assert store.db.run(lambda tx: tasks.submit_many(tx, [])) == []
    consistent(store.db)


# -- callers' transactions


LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


def at_level(store: Opened, level: str) -> Database:
    """A caller's own way into the database."""
    db = store.open()
    if store.kind != "sqlite":
        db.engine = db.engine.execution_options(isolation_level=level)
    return db


@pytest.mark.parametrize("level", LEVELS)
def test_a_repeat_in_a_callers_transaction_is_an_answer(store: Opened, level: str) -> None:
    """No error of the database, and the rest of the transaction is what it would have been."""
    first = new()
    submit(store.db, first)
    db = at_level(store, level)
    with db.transaction() as tx:
        assert tasks.submit(tx, new("before")).replayed is False
        assert tasks.submit(tx, new()) == Receipt(first.id, T.READY, first.digest, replayed=True)
        assert tasks.submit(tx, new(digest="1:x")).conflict == first.digest
        assert tasks.submit(tx, new("after")).replayed is False
    assert set(every(store.db)) == {"k", "before", "after"}


@pytest.mark.parametrize("level", LEVELS)
def test_what_was_committed_after_a_callers_snapshot_is_found(store: Opened, level: str) -> None:
    """A snapshot that does not show the winner: the answer is the winner's, at once or when the transaction is executed again."""
    first = new()
    db = at_level(store, level)
    tries: list[int] = []

    def work(tx: Transaction) -> Receipt:
        tries.append(1)
        tx.rows(tx.t.node.select())  # takes the snapshot
        if len(tries) == 1 and store.kind != "sqlite":  # SQLite's one writer is this transaction
            store.db.run(lambda other: tasks.submit(other, first))
        return tasks.submit(tx, new())

    if store.kind == "sqlite":
        submit(store.db, first)
    receipt = db.run(work)
    assert (receipt.task, receipt.replayed) == (first.id, True)
    assert len(tries) == 1 or level != "READ COMMITTED"
    assert len(tries) <= 2 and len(every(store.db)) == 1


def test_a_submission_that_is_rolled_back_was_never_there(store: Opened) -> None:
    """With the caller's own rows."""

    class Oops(Exception):
        """The caller's own error."""

    with pytest.raises(Oops), store.db.transaction() as tx:
        tasks.submit(tx, new())
        raise Oops
    assert every(store.db) == {}
    assert submit(store.db, new())[0].replayed is False


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_the_later_of_two_waits_for_the_first_to_end(store: Opened, commits: bool) -> None:
    """Committed: its receipt. Rolled back: the later one is accepted."""
    first, second, other = new(), new(), store.open()
    inserted, waiting = threading.Event(), threading.Event()

    class Oops(Exception):
        """The first caller's own error."""

    def one() -> None:
        with store.db.transaction() as tx:
            tasks.submit(tx, first)
            inserted.set()
            assert waiting.wait(10)
            threading.Event().wait(0.05)
            if not commits:
                raise Oops

    def two() -> Receipt:
        assert inserted.wait(10)
        waiting.set()
        return other.run(lambda tx: tasks.submit(tx, second))

    found = together(one, two)
    assert found[1] == Receipt(first.id if commits else second.id, T.READY, first.digest, replayed=commits)
    assert isinstance(found[0], Oops) is not commits
    assert len(every(store.db)) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_celery_t40_many_at_once_with_one_key_are_one_task(store: Opened, level: str) -> None:
    """Every one of them is answered; exactly one is not a replay."""
    dbs = [at_level(store, level) for _ in range(4)]
    for turn in range(6):
        news = [new(f"k{turn}") for _ in range(8)]
        found = together(*[lambda n=n, db=dbs[i % 4]: db.run(lambda tx: tasks.submit(tx, n)) for i, n in enumerate(news)])
        assert all(isinstance(r, Receipt) for r in found), found
        assert len({r.task for r in found if isinstance(r, Receipt)}) == 1
        assert Counter(r.replayed for r in found if isinstance(r, Receipt)) == {False: 1, True: 7}
    assert len(every(store.db)) == 6


def test_repeats_that_wait_for_one_winner_are_answered_without_an_error_of_the_database(store: Opened) -> None:
    """They are in transactions of their callers, which are not ours to execute again: a deadlock among them would be the callers' error."""
    winner, inserted = new(), threading.Event()
    dbs = [store.open() for _ in range(5)]
    near = threading.Barrier(6)

    def win() -> Receipt:
        with store.db.transaction() as tx:
            receipt = tasks.submit(tx, winner)
            inserted.set()
            near.wait(10)
            threading.Event().wait(0.2)
            return receipt

    def repeat(db: Database) -> Receipt:
        assert inserted.wait(10)
        near.wait(10)
        with db.transaction() as tx:
            return tasks.submit(tx, new())

    found = together(win, *[lambda db=db: repeat(db) for db in dbs])
    assert found == [Receipt(winner.id, T.READY, winner.digest)] + [Receipt(winner.id, T.READY, winner.digest, replayed=True)] * 5


def test_an_open_transaction_that_repeated_a_submission_does_not_stop_its_task(store: Opened) -> None:
    """A caller may keep his transaction open for minutes: the task is claimed and settled meanwhile."""
    if store.kind == "sqlite":
        return  # one writer at a time is what SQLite is
    (row,) = taken(store.db, new())
    other = store.open(timeout_ms=1000)
    with store.db.transaction() as tx:
        assert tasks.submit(tx, new()).replayed
        assert settle(other, ending(row)) == [Answer.APPLIED]


def test_callers_that_submit_many_in_opposite_orders_never_wait_in_a_circle(store: Opened) -> None:
    """Keys are taken in one order, whatever order they are given in."""
    keys = [f"k{i:02}" for i in range(40)]
    dbs = [store.open() for _ in range(4)]

    def work(db: Database, turn: int) -> list[Receipt]:
        mine = [new(k) for k in (keys if turn % 2 else reversed(keys))]
        with db.transaction() as tx:
            return tasks.submit_many(tx, mine)

    found = together(*[lambda db=db, i=i: work(db, i) for i, db in enumerate(dbs)])
    assert all(isinstance(f, list) for f in found), found
    assert sorted(every(store.db)) == keys


# -- cancel


def test_cancel_is_at_once_before_it_runs(store: Opened) -> None:
    """Scheduled, ready, parked, waiting for another attempt: over, and nothing is kept."""
    (held, retried) = taken(store.db, new("held", permit="p"), new("retried"))
    settle(store.db, ending(retried, o.RetryAsked(HOUR)))
    submit(store.db, new("ready"), new("scheduled", delay_us=HOUR), new("parked", permit="p"))
    take(store.db, count=1, lanes=[LANE], handlers=["nobody"])
    session(store.db, "s2")
    submit(store.db, new("ordered", permit="q", ordered=True))
    keeper = next(r for r in take(store.db, "s2", 20) if r.key == "ordered")
    settle(store.db, ending(keeper, o.RetryAsked(HOUR)))
    rows = every(store.db)
    assert rows["parked"].blocked_by == "permit:default/p" and rows["ordered"].permit_held == 1
    for key in ("scheduled", "parked", "retried", "ordered"):
        assert store.db.run(lambda tx, k=key: settling.cancel(tx, rows[k].id)) is T.CANCELLED  # type: ignore[misc]
        assert store.db.run(lambda tx, k=key: settling.cancel(tx, rows[k].id)) is T.CANCELLED, "again"  # type: ignore[misc]
        assert read(store.db, rows[key].id).cause is Cause.CANCELLED
    consistent(store.db)
    assert (permit(store.db).held, permit(store.db, "default/q").held) == (1, 0)
    assert read(store.db, held.id).state is T.RUNNING


@pytest.mark.parametrize("kind", [new, external], ids=["idempotent", "external"])
def test_cancel_of_what_has_not_begun_is_at_once_though_a_worker_holds_it(store: Opened, kind: Callable[..., NewTask]) -> None:
    """The permit is free; the worker finds out by its heartbeat, at the start or at the end, and what it reports is too late."""
    (row,) = taken(store.db, kind(permit="p"), starting=0)
    assert store.db.run(lambda tx: settling.cancel(tx, row.id)) is T.CANCELLED
    over = read(store.db, row.id)
    assert (over.state, over.cause, over.session, permit(store.db).held) == (T.CANCELLED, Cause.CANCELLED, "", 0)
    assert store.db.read(lambda tx: settling.flags(tx, "s")) == {}
    assert store.db.run(lambda tx: claims.begin(tx, "s", row.id, row.fence, row.token)) is False
    assert settle(store.db, ending(row, o.Unstarted())) == [Answer.STALE] and evidence(store.db, row.id) == []
    assert settle(store.db, ending(row)) == [Answer.STALE] and evidence(store.db, row.id) == [(1, "Succeeded", 1)]
    assert read(store.db, row.id) == over
    consistent(store.db)


def test_cancel_of_what_runs_sets_a_flag_that_its_heartbeat_reads(store: Opened) -> None:
    """Its permit stays taken until its end; the first end wins."""
    (row,) = taken(store.db, new(permit="p"))
    assert store.db.run(lambda tx: settling.cancel(tx, row.id)) is T.RUNNING
    after = read(store.db, row.id)
    assert store.db.run(lambda tx: settling.cancel(tx, row.id)) is T.RUNNING
    assert read(store.db, row.id) == after, "asking again changes nothing"
    assert store.db.read(lambda tx: settling.flags(tx, "s")) == {row.id: (1, True)}
    assert permit(store.db).held == 1
    assert settle(store.db, ending(row, o.Raised("ValueError", "no"))) == [Answer.APPLIED]
    assert (read(store.db, row.id).state, permit(store.db).held) == (T.CANCELLED, 0)


def test_celery_t36_cancel_and_success_end_a_task_once(store: Opened) -> None:
    """Success that comes first stays, a cancel that comes first stays; never both."""
    early, late = taken(store.db, new("early"), new("late"))
    settle(store.db, ending(early))
    assert store.db.run(lambda tx: settling.cancel(tx, early.id)) is T.SUCCEEDED
    store.db.run(lambda tx: settling.cancel(tx, late.id))
    assert settle(store.db, ending(late)) == [Answer.APPLIED]
    assert states(store.db) == {"early": T.SUCCEEDED, "late": T.SUCCEEDED}
    assert store.db.run(lambda tx: settling.cancel(tx, "nobody")) is None


def test_cancel_leaves_a_task_in_review_to_its_reviewer(store: Opened) -> None:
    """Nobody knows whether its effect has happened."""
    row = in_review(store)
    before = read(store.db, row)
    assert store.db.run(lambda tx: settling.cancel(tx, row)) is T.UNKNOWN
    assert read(store.db, row) == before


# -- reviews


def in_review(store: Opened, key: str = "k") -> str:
    (row,) = taken(store.db, external(key, business_key="b"), who=fresh("s"))
    settle(store.db, ending(row, o.AskedForReview("look")))
    assert read(store.db, row.id).state is T.UNKNOWN
    return row.id


def review(db: Database, task: str, rev: int, **given: Any) -> ReviewRefused | Receipt | None:
    values: dict[str, Any] = {"done": False, "result": "", "reason": "I looked", "actor": "me", **given}
    return db.run(lambda tx: settling.review(tx, task, rev, **values))


@pytest.mark.parametrize("done", [True, False], ids=["done", "failed"])
def test_a_decision_ends_the_task_and_is_kept_with_who_took_it_and_why(store: Opened, done: bool) -> None:
    """Once: whoever read it before has to read it again."""
    task = in_review(store)
    rev = read(store.db, task).rev
    assert review(store.db, task, rev - 1, done=done) is ReviewRefused.MOVED
    assert review(store.db, "nobody", rev, done=done) is ReviewRefused.GONE
    assert review(store.db, task, rev, done=done, result="[2]" if done else "") is None
    row = read(store.db, task)
    assert (row.state, row.cause, row.reason, row.result) == (
        T.SUCCEEDED if done else T.FAILED,
        Cause.REVIEWED,
        "me: I looked",
        "[2]" if done else "",
    )
    assert evidence(store.db, task) == [(1, "AskedForReview", 0), (1, "Reviewed", 1)]
    assert review(store.db, task, row.rev, done=not done) is ReviewRefused.NOT_IN_REVIEW
    consistent(store.db)


def test_a_retry_is_a_new_linked_task_of_the_same_root(store: Opened) -> None:
    """The old one has failed and names the one that took over."""
    task = in_review(store)
    again = new(f"{task}/retry", business_key="b", retry_of=task, root=task)
    found = review(store.db, task, read(store.db, task).rev, successor=again)
    assert found == Receipt(again.id, T.READY, again.digest)
    old, successor = read(store.db, task), read(store.db, again.id)
    assert (old.state, old.superseded_by) == (T.FAILED, again.id)
    assert (successor.state, successor.retry_of, successor.root) == (T.READY, task, task)
    settle(store.db, ending(take(store.db, session(store.db, "s9"))[0], o.Crashed()))
    assert read(store.db, again.id).root == task


def test_two_reviewers_decide_once(store: Opened) -> None:
    """Both have read the same row; one of them is told that it has moved."""
    for turn in range(5):
        store.empty()
        task = in_review(store, f"k{turn}")
        rev = read(store.db, task).rev
        retry = new(f"{task}/retry")
        found = together(
            lambda task=task, rev=rev: review(store.db, task, rev, done=True, result="[2]", actor="a"),  # type: ignore[misc]
            lambda task=task, rev=rev, retry=retry: review(store.open(), task, rev, successor=retry, actor="b"),  # type: ignore[misc]
        )
        refused = [f for f in found if isinstance(f, ReviewRefused)]
        assert len(refused) == 1, found
        row = read(store.db, task)
        assert (row.state is T.FAILED) == bool(row.superseded_by) == (f"{task}/retry" in every(store.db))


def test_a_decision_whose_answer_was_lost_is_answered_again(store: Opened) -> None:
    """The same decision by the same person is the same answer, not a refusal of what he has just done; any other one is refused."""
    for retry in (None, new("r/retry")):
        task = in_review(store, fresh("k"))
        rev = read(store.db, task).rev
        first = review(store.db, task, rev, successor=retry)
        after = every(store.db)
        again = review(store.db, task, rev, successor=retry)
        assert (
            (again is None) if first is None else (isinstance(again, Receipt) and isinstance(first, Receipt) and again.task == first.task)
        )
        assert every(store.db) == after
        assert review(store.db, task, rev, successor=retry, actor="you") is ReviewRefused.NOT_IN_REVIEW
        assert review(store.db, task, rev, done=True, result="[2]") is ReviewRefused.NOT_IN_REVIEW
