"""Attempts of durable tasks: claimed by one session, begun and ended under their fence, taken back from lost sessions."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import (
    HOUR,
    LANE,
    LEASE,
    POLICY,
    SECOND,
    asked,
    begin,
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
from millstream_schema.durable.records import TaskRow
from millstream_schema.durable.states import HELD, Cause, Effects, TaskState
from millstream_schema.store import blockers, claims, gates, lanes, permits, registry, settling, sweeps, tasks
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.settling import Answer

T = TaskState
CAN_END_MANY_WAYS = [
    o.Succeeded("[1]"), o.Raised("ValueError", "no"), o.Raised("ValueError", "no", retryable=False), o.RetryAsked(HOUR, "later"), o.Snoozed(HOUR), o.GaveUp("no"),
    o.CancelledItself("no"), o.AskedForReview("look"), o.Unfit("large"), o.Crashed("-9"), o.Killed("limit"), o.Killed("drain"), o.Lost(),
]  # fmt: skip


# -- claims


def test_a_claim_takes_by_rank_and_begins_the_first(store: Opened) -> None:
    """Priority is worth seconds; as many begin as there are slots, but none whose start is a commit of its own; the rest is held."""
    submit(
        store.db, new("c"), new("a", priority=20), external("b", priority=10), new("d", priority=-1), new("later", delay_us=HOUR), new("e", priority=-2)
    )  # fmt: skip
    session(store.db)
    rows = take(store.db, count=4, starting=2)
    assert [(r.key, r.state, r.starts, bool(r.started_us)) for r in rows] == [
        ("a", T.RUNNING, 1, True),
        ("b", T.DISPATCHED, 0, False),
        ("c", T.DISPATCHED, 0, False),
        ("d", T.DISPATCHED, 0, False),
    ]
    assert [r.key for r in take(store.db)] == ["e"]
    consistent(store.db)


def test_what_a_claim_gives_is_what_is_stored(store: Opened) -> None:
    """Also the second time, and with a permit: fence, token, sequence, start."""

    def plain(row: TaskRow) -> dict[str, Any]:
        return {k: v for k, v in msgspec.structs.asdict(row).items() if k not in ("rev", "changed_us")}

    rows = taken(store.db, new("a", permit="p"), external("b"), new("c"), starting=2)
    for _ in range(2):
        for row in rows:
            assert plain(row) == plain(read(store.db, row.id))
            assert (row.session, row.ready_lane) == ("s", None)
        settle(store.db, *[ending(r, o.Unstarted()) for r in rows])
        before = {r.key: r.fence for r in rows}
        rows = take(store.db, starting=2)
        assert {r.key: r.fence for r in rows} == {k: f + 1 for k, f in before.items()}


def test_a_claim_that_is_repeated_gives_the_same_tasks(store: Opened) -> None:
    """Its answer was lost: no second task is taken for it; what was settled meanwhile is not given again; one that gave nothing claims."""
    submit(store.db, *[new(f"k{i}") for i in range(4)])
    session(store.db)
    first = take(store.db, count=2, claim="c1")
    assert {r.id for r in take(store.db, count=2, claim="c1", again=True)} == {r.id for r in first}
    other = take(store.db, count=1, claim="c2")
    assert {r.id for r in take(store.db, count=2, claim="c1", again=True)} == {r.id for r in first}
    settle(store.db, ending(first[0]))
    assert [r.id for r in take(store.db, count=2, claim="c1", again=True)] == [first[1].id]
    assert len({r.id for r in [*first, *other]}) == 3
    assert [r.key for r in take(store.db, claim="c3", again=True)] == ["k3"]


@pytest.mark.parametrize("why", ["expired", "gone", "draining", "unknown"])
def test_a_session_without_a_lease_gets_nothing(store: Opened, why: str) -> None:
    """Not a task, not the ones it claimed before: the answer says that its lease is over."""
    submit(store.db, new())
    session(store.db, "s", 1 if why == "expired" else LEASE)
    if why == "gone":
        store.db.run(lambda tx: registry.leave_node(tx, "s"))
    if why == "draining":
        store.db.run(lambda tx: registry.drain_node(tx, "s"))
    who = "nobody" if why == "unknown" else "s"
    assert store.db.run(lambda tx: asked(tx, who)) is None
    assert store.db.run(lambda tx: asked(tx, who, again=True)) is None
    assert states(store.db) == {"k": T.READY}


def test_a_lease_that_runs_out_while_a_claim_waits_for_it_has_run_out(store: Opened) -> None:
    """The row is locked first, then the clock is read."""
    submit(store.db, new())
    session(store.db, "s", 200_000)
    locked, other = threading.Event(), store.open()

    def hold() -> None:
        with other.transaction() as tx:
            n = tx.t.node
            tx.row(n.select().where(n.c.id == "s").with_for_update())
            locked.set()
            threading.Event().wait(0.3)

    def claim() -> Any:
        assert locked.wait(10)
        return store.db.run(lambda tx: asked(tx, "s"))

    assert together(hold, claim)[1] is None
    assert states(store.db) == {"k": T.READY}


def test_a_claim_takes_only_what_was_asked_for(store: Opened) -> None:
    """Lanes, handlers and counts; without handlers nothing."""
    submit(
        store.db, new("a"), new("b", handler="other"), new("c", queue="slow"), new("d", namespace="shop"), new("e", namespace="shop", handler="other")
    )  # fmt: skip
    session(store.db)
    assert store.db.read(lambda tx: claims.ready_lanes(tx, ["default"])) == [LANE, "shop/default"]
    assert store.db.read(lambda tx: claims.ready_lanes(tx, ["slow", "none"])) == ["default/slow"]
    assert take(store.db, handlers=[]) == [] == take(store.db, lanes=[]) == take(store.db, count=0)
    assert [r.key for r in take(store.db, lanes=["shop/default"], handlers=["other", "third"])] == ["e"]
    assert [r.key for r in take(store.db)] == ["a"]
    assert sorted(r.key for r in take(store.db, lanes=[LANE, "default/slow"], handlers=["work", "other"])) == ["b", "c"]
    assert store.db.read(lanes.held) == {LANE: 2, "default/slow": 1, "shop/default": 1}
    assert store.db.read(lambda tx: lanes.held(tx, but="s")) == {}


def test_what_did_not_start_in_time_expires_when_it_would_be_claimed(store: Opened) -> None:
    """It is not given out; the rest of the claim is. Its permit was never taken."""
    submit(
        store.db,
        new("start_by", start_by_us=1),
        new("deadline", deadline_us=1, permit="p"),
        new("in time", start_by_us=HOUR, deadline_us=HOUR),
    )
    session(store.db)
    assert [r.key for r in take(store.db)] == ["in time"]
    rows = every(store.db)
    assert {k: (r.state, r.cause) for k, r in rows.items()} == {
        "start_by": (T.EXPIRED, Cause.START_BY), "deadline": (T.EXPIRED, Cause.DEADLINE), "in time": (T.RUNNING, Cause.NONE),
    }  # fmt: skip
    consistent(store.db)


def test_a_claim_says_when_the_next_waiting_task_is_due(store: Opened) -> None:
    """By the database's clock, beside its time now."""
    submit(store.db, new("later", delay_us=2 * HOUR), new("sooner", delay_us=HOUR))
    session(store.db)
    claimed = store.db.run(lambda tx: asked(tx, "s"))
    assert claimed is not None and claimed.tasks == []
    assert claimed.next_us == every(store.db)["sooner"].wake_us
    assert claimed.next_us is not None and HOUR - 10 * SECOND < claimed.next_us - claimed.now_us <= HOUR


def test_celery_t02_many_sessions_never_get_the_same_task(store: Opened) -> None:
    """However often and however many at once they ask: each task once, under its first fence."""
    keys = [f"k{i:03}" for i in range(150)]
    store.db.run(lambda tx: tasks.submit_many(tx, [new(k) for k in keys]))
    dbs = [store.open() for _ in range(4)]
    for i in range(4):
        session(store.db, f"s{i}")

    def claim(i: int) -> list[TaskRow]:
        found: list[TaskRow] = []
        while rows := take(dbs[i], f"s{i}", 7):
            found += rows
        return found

    found = together(*[lambda i=i: claim(i) for i in range(4)])
    assert all(isinstance(f, list) for f in found), found
    got = [(row.key, row.fence, row.session) for rows in found if isinstance(rows, list) for row in rows]
    assert sorted(key for key, _, _ in got) == keys and {fence for _, fence, _ in got} == {1}
    assert Counter(r.session for r in every(store.db).values()) == Counter(s for _, _, s in got)
    consistent(store.db)


def test_celery_t24_t25_what_is_due_later_is_with_nobody_until_it_is_due(store: Opened) -> None:
    """No worker holds it, and whichever asks when it is due gets it."""
    store.db.run(lambda tx: tasks.submit_many(tx, [new(f"k{i}", delay_us=HOUR) for i in range(50)]))
    submit(store.db, new("soon", delay_us=100_000))
    session(store.db, "old")
    assert take(store.db, "old", 100) == [] == store.db.read(lambda tx: claims.ready_lanes(tx, ["default"]))
    session(store.db, "newcomer")
    threading.Event().wait(0.12)
    assert store.db.run(lambda tx: claims.wake_due(tx, 100)) == 1
    assert [r.key for r in take(store.db, "newcomer", 100)] == ["soon"]
    assert Counter(states(store.db).values()) == {T.SCHEDULED: 50, T.RUNNING: 1}


# -- the start of an attempt


def test_a_start_is_fenced_and_can_be_repeated(store: Opened) -> None:
    """Only by who holds it, under this claim; the repeat of a start whose answer was lost is granted and counts once."""
    (row,) = taken(store.db, external())
    before = read(store.db, row.id)
    for wrong in ({"session": "other"}, {"fence": 0}, {"fence": 2}, {"token": "other"}, {"id": "other"}):
        assert begin(store.db, row, **wrong) is False
    assert read(store.db, row.id) == before and before.state is T.DISPATCHED
    assert begin(store.db, row) is True
    after = read(store.db, row.id)
    assert (after.state, after.starts, after.started_us > 0) == (T.RUNNING, 1, True)
    assert begin(store.db, row) is True
    assert read(store.db, row.id) == after
    settle(store.db, ending(row))
    assert begin(store.db, row) is False


def test_what_was_taken_back_cannot_begin(store: Opened) -> None:
    """Its session did not know that it was lost."""
    (row,) = taken(store.db, external())
    lose(store.db, "s")
    assert begin(store.db, row) is False
    session(store.db, "s2")
    (again,) = take(store.db, "s2")
    assert begin(store.db, row) is False and begin(store.db, again) is True


# -- ends


@pytest.mark.parametrize("outcome", CAN_END_MANY_WAYS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("permitted", ["", "p"], ids=["plain", "permit"])
def test_an_end_is_written_once_and_its_repeat_is_told_apart(store: Opened, outcome: o.AnyOutcome, permitted: str) -> None:
    """Applied, then Duplicate, whatever the end; also when the next attempt has begun. The permit is freed once, evidence is kept once."""
    (row,) = taken(store.db, new(permit=permitted))
    end = ending(row, outcome)
    assert settle(store.db, end) == [Answer.APPLIED]
    after, kept = read(store.db, row.id), evidence(store.db, row.id)
    assert not after.state.held and after.session == ""
    assert kept == ([] if isinstance(outcome, o.Succeeded) else [(1, type(outcome).__name__, 0)])
    assert settle(store.db, end, end) == [Answer.DUPLICATE] * 2
    assert (read(store.db, row.id), evidence(store.db, row.id)) == (after, kept)
    consistent(store.db)
    if after.state is T.READY:
        (again,) = take(store.db)
        assert settle(store.db, end) == [Answer.DUPLICATE]
        assert read(store.db, row.id).state is T.RUNNING and evidence(store.db, row.id) == kept
        assert settle(store.db, ending(again)) == [Answer.APPLIED]
        consistent(store.db)


def test_a_success_keeps_its_result_and_a_failure_its_error(store: Opened) -> None:
    """As they were reported."""
    good, bad = taken(store.db, new("good"), new("bad"))
    settle(store.db, ending(good, o.Succeeded('["é"]')), ending(bad, o.GaveUp("no: é")))
    rows = every(store.db)
    assert (rows["good"].state, rows["good"].result, rows["good"].error) == (T.SUCCEEDED, '["é"]', "")
    assert (rows["bad"].state, rows["bad"].cause, rows["bad"].error) == (T.FAILED, Cause.HANDLER, "no: é")


LATE = [o.Succeeded("[2]"), o.Raised("ValueError", "late"), o.GaveUp("late"), o.CancelledItself(), o.Crashed()]


@pytest.mark.parametrize("outcome", LATE, ids=lambda v: type(v).__name__)
def test_celery_t03_a_stale_attempt_changes_nothing_but_evidence(store: Opened, outcome: o.AnyOutcome) -> None:
    """Another attempt runs, then has ended: the late report is kept beside it, once, however often it comes."""
    (first,) = taken(store.db, new(permit="p"))
    lose(store.db, "s")
    session(store.db, "s2")
    (second,) = take(store.db, "s2")
    running = read(store.db, first.id)
    for _ in range(2):
        assert settle(store.db, ending(first, outcome, submits=(new("continuation"),))) == [Answer.STALE]
    assert read(store.db, first.id) == running and list(every(store.db)) == ["k"]
    assert evidence(store.db, first.id) == [(1, "Lost", 0), (1, type(outcome).__name__, 1)]
    assert settle(store.db, ending(second)) == [Answer.APPLIED]
    over = read(store.db, first.id)
    assert settle(store.db, ending(first, outcome)) == [Answer.STALE]
    assert read(store.db, first.id) == over
    assert evidence(store.db, first.id) == [(1, "Lost", 0), (1, type(outcome).__name__, 1)]
    consistent(store.db)


@pytest.mark.parametrize("outcome", [o.Succeeded("[1]"), o.GaveUp("no")], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("wrong", [{"token": "other"}, {"fence": 2}, {"fence": 0}, {"token": ""}], ids=str)
def test_an_end_needs_both_the_fence_and_the_token(store: Opened, outcome: o.AnyOutcome, wrong: dict[str, Any]) -> None:
    """One of them is not enough, for a success either."""
    (row,) = taken(store.db, new())
    before = read(store.db, row.id)
    assert settle(store.db, ending(row, outcome, **wrong)) == [Answer.STALE]
    assert read(store.db, row.id) == before
    assert settle(store.db, ending(row, outcome)) == [Answer.APPLIED]


def test_what_a_fenced_attempt_reports_is_still_its_end_while_nobody_has_taken_it_back(store: Opened) -> None:
    """The lease is over, the row is its own: the work is done and counts."""
    (row,) = taken(store.db, new())
    store.db.run(lambda tx: registry.leave_node(tx, "s"))
    assert settle(store.db, ending(row)) == [Answer.APPLIED]
    assert store.db.run(lambda tx: settling.take_back(tx, "s", lambda: 0.5, 10)) == 0


def test_each_of_a_mixed_batch_has_its_own_answer(store: Opened) -> None:
    """Good, stale, repeated, unknown and of every kind, in one transaction."""
    keys = ["good", "also", "other result", "stale", "raised", "permit", "dispatched", "done"]
    rows = dict(zip(keys, taken(store.db, *[new(k, permit="p" if k == "permit" else "") for k in keys])))
    settle(store.db, ending(rows["done"]))
    batch = [
        ending(rows["good"]), ending(rows["stale"], token="x"), ending(rows["also"]), ending(rows["other result"], o.Succeeded("[9]")),
        ending(rows["raised"], o.Raised("ValueError", "no", retryable=False)), ending(rows["permit"]), ending(rows["dispatched"]), ending(rows["done"]),
        ending(rows["good"], task="nobody"),
    ]  # fmt: skip
    expected = [Answer.APPLIED] * 9
    expected[1], expected[7], expected[8] = Answer.STALE, Answer.DUPLICATE, Answer.UNKNOWN
    assert settle(store.db, *batch) == expected
    found = states(store.db)
    assert found.pop("stale") is T.RUNNING and found.pop("raised") is T.FAILED and set(found.values()) == {T.SUCCEEDED}
    assert every(store.db)["other result"].result == "[9]"
    assert settle(store.db) == []
    consistent(store.db)


@pytest.mark.parametrize(
    "outcomes", [(o.Raised("E", "1"), o.GaveUp("2")), (o.Succeeded("[1]"), o.Succeeded("[2]"))], ids=["errors", "successes"]
)
@pytest.mark.parametrize("permitted", ["", "p"], ids=["plain", "permit"])
@pytest.mark.parametrize("late_first", [True, False], ids=["late first", "late last"])
def test_two_attempts_of_one_task_in_one_batch_do_not_hide_each_other(
    store: Opened, outcomes: tuple[o.AnyOutcome, o.AnyOutcome], permitted: str, late_first: bool
) -> None:
    """A worker that lost its lease and got the task again reports both: the valid end is written, the late one is evidence."""
    (first,) = taken(store.db, new(permit=permitted))
    lose(store.db, "s")
    session(store.db, "s2")
    (second,) = take(store.db, "s2")
    batch = [ending(first, outcomes[0]), ending(second, outcomes[1])]
    settle(store.db, *(batch if late_first else reversed(batch)))
    row = read(store.db, first.id)
    assert (row.state, row.result, row.error) == ((T.SUCCEEDED, "[2]", "") if isinstance(outcomes[1], o.Succeeded) else (T.FAILED, "", "2"))
    assert (1, type(outcomes[0]).__name__, 1) in evidence(store.db, first.id)
    consistent(store.db)


def test_celery_t32_what_a_handler_submitted_comes_in_with_its_success_or_not_at_all(store: Opened) -> None:
    """One transaction: not before, not when it fails, not twice; in the order of keys whatever was given."""
    good, bad = taken(store.db, new("good"), new("bad"))
    submits = (new("z", delay_us=HOUR), new("a"))

    class Oops(Exception):
        """A crash before the commit."""

    with pytest.raises(Oops), store.db.transaction() as tx:
        settling.settle(tx, [ending(good, submits=submits)])
        raise Oops
    assert set(every(store.db)) == {"good", "bad"}
    batch = [ending(good, submits=submits), ending(bad, o.Raised("E", "no"), submits=(new("never"),))]
    assert settle(store.db, *batch) == [Answer.APPLIED] * 2
    assert states(store.db) == {"good": T.SUCCEEDED, "bad": T.RETRY_WAIT, "z": T.SCHEDULED, "a": T.READY}
    assert settle(store.db, batch[0]) == [Answer.DUPLICATE]
    assert len(every(store.db)) == 4


def test_a_success_whose_continuation_cannot_be_stored_is_a_failure_that_says_so(store: Opened) -> None:
    """Its key is known with other content: nothing of it comes in, and the task has not succeeded without it."""
    submit(store.db, new("known"))
    (row,) = taken_beside(store, "k")
    end = ending(row, submits=(new("b"), new("known", digest="1:other"), new("z")))
    assert settle(store.db, end) == [Answer.APPLIED]
    failed = read(store.db, row.id)
    assert (failed.state, failed.cause) == (T.FAILED, Cause.RESULT)
    assert "known" in failed.reason and set(every(store.db)) == {"known", "k"}
    assert settle(store.db, end) == [Answer.DUPLICATE]
    assert settle(store.db, ending(taken_beside(store, "k2")[0], submits=(new("known"), new("b")))) == [Answer.APPLIED]
    assert states(store.db) == {"known": T.READY, "k": T.FAILED, "k2": T.SUCCEEDED, "b": T.READY}


def taken_beside(store: Opened, key: str) -> list[TaskRow]:
    """Claim this one by a handler of its own, so that what waits stays."""
    submit(store.db, new(key, handler=key))
    return take(store.db, session(store.db, fresh("s")), handlers=[key])


def test_a_start_that_came_about_counts_and_one_that_did_not_is_taken_off(store: Opened) -> None:
    """Folded into the claim or reported with the end: start_by is over for what has run, and only for that."""
    ran, folded, given_back = taken(
        store.db, new("ran", start_by_us=HOUR), new("folded", start_by_us=HOUR), new("given back", start_by_us=HOUR)
    )  # fmt: skip
    settle(store.db, ending(given_back, o.Unstarted()))
    assert read(store.db, given_back.id).starts == 0
    assert (ran.state, folded.starts) == (T.RUNNING, 1)
    settle(store.db, ending(ran, o.Unstarted()))
    (held,) = [r for r in take(store.db, starting=0) if r.key == "ran"]
    assert (held.state, held.starts) == (T.DISPATCHED, 0)
    settle(store.db, ending(held, o.RetryAsked(0)))
    assert read(store.db, ran.id).starts == 1, "it ran as a prefetched one"
    for row in (ran, given_back):
        put(store.db, row.id, start_by_us=1)  # an hour later
    store.db.run(lambda tx: claims.wake_due(tx, 10))
    assert states(store.db)["ran"] is T.READY
    lose(store.db, "s")
    session(store.db, "s2")
    assert [r.key for r in take(store.db, "s2")].count("ran") == 1
    assert states(store.db)["given back"] is T.EXPIRED


def put(db: Database, task: str, **times: int) -> None:
    """As if so much time had passed."""
    db.run(lambda tx: tx.update(tx.t.task, tx.t.task.c.id == task, **times))


# -- lost sessions


def lose(db: Database, name: str) -> None:
    """What a sweep does with a session whose lease is over."""
    n = db.tables.node
    db.run(lambda tx: tx.update(n, n.c.id == name, expires_us=1))
    assert db.run(lambda tx: settling.expire_session(tx, name, 0))
    db.run(lambda tx: settling.take_back(tx, name, lambda: 0.5, 1000))


@pytest.mark.parametrize("effects", list(Effects))
@pytest.mark.parametrize("state", sorted(HELD))
def test_what_a_lost_session_held_ends_by_its_effects(store: Opened, effects: Effects, state: TaskState) -> None:
    """Never begun: ready again, and nothing is counted. Begun and external: to a person. The permit is free, evidence is kept, a loss is counted."""
    (row,) = taken(store.db, new(effects=effects, permit="p"), starting=int(state is T.RUNNING))
    if effects is Effects.EXTERNAL and state is T.RUNNING:
        assert begin(store.db, row)
    assert read(store.db, row.id).state is state
    lose(store.db, "s")
    after = read(store.db, row.id)
    unknown = effects is Effects.EXTERNAL and state is T.RUNNING
    assert (after.state, after.cause, after.losses, after.session) == (
        T.UNKNOWN if unknown else T.READY,
        Cause.LOST,
        int(state is T.RUNNING),
        "",
    )
    assert evidence(store.db, row.id) == [(1, "Lost", 0)] and permit(store.db).held == 0
    consistent(store.db)


def test_a_lease_is_over_only_past_its_margin(store: Opened) -> None:
    """Clocks differ a little; a live session is let alone, and one that is gone stays gone."""
    session(store.db, "s", 1)
    assert not store.db.run(lambda tx: settling.expire_session(tx, "s", HOUR))
    assert store.db.run(lambda tx: registry.live_node_ids(tx, {"s"})) == set()
    session(store.db, "live")
    assert not store.db.run(lambda tx: settling.expire_session(tx, "live", 0))
    assert store.db.run(lambda tx: registry.renew_node(tx, "live", LEASE))
    assert store.db.run(lambda tx: settling.expire_session(tx, "s", 0))
    assert store.db.run(lambda tx: settling.expire_session(tx, "s", HOUR)), "it has been taken away"
    assert not store.db.run(lambda tx: registry.renew_node(tx, "s", LEASE))
    assert store.db.run(lambda tx: settling.expire_session(tx, "nobody", HOUR)), "there is no lease that could be"


def test_sessions_that_hold_something_are_found_and_taken_back_in_parts(store: Opened) -> None:
    """Each part is bounded; others' tasks are not touched."""
    taken(store.db, *[new(f"a{i}") for i in range(5)], who="a")
    taken(store.db, *[new(f"b{i}") for i in range(3)], who="b")
    session(store.db, "idle")
    assert store.db.read(settling.holding_sessions) == ["a", "b"]
    parts = [store.db.run(lambda tx: settling.take_back(tx, "a", lambda: 0.5, 2)) for _ in range(4)]
    assert parts == [2, 2, 1, 0]
    assert store.db.read(settling.holding_sessions) == ["b"]
    assert Counter(states(store.db).values()) == {T.READY: 5, T.RUNNING: 3}


def test_a_task_whose_worker_is_lost_each_time_goes_to_a_person(store: Opened) -> None:
    """By its policy: three."""
    submit(store.db, new())
    for turn in range(3):
        session(store.db, f"s{turn}")
        assert len(take(store.db, f"s{turn}")) == 1
        lose(store.db, f"s{turn}")
    row = every(store.db)["k"]
    assert (row.state, row.cause, row.losses) == (T.UNKNOWN, Cause.POISON, 3)
    assert [n for n, _, _ in evidence(store.db, row.id)] == [1, 2, 3]


# -- waiting


def test_what_is_due_is_ready_and_what_is_late_expires(store: Opened) -> None:
    """In parts, the longest due first; its rank is when it became available."""
    submit(store.db, new("late", delay_us=HOUR, deadline_us=1), *[new(k, delay_us=HOUR) for k in ("soon", "sooner", "later")])
    (retried,) = taken_beside(store, "retried")
    settle(store.db, ending(retried, o.RetryAsked(2 * HOUR, "why")))
    waiting = every(store.db)
    for at, key in enumerate(("sooner", "soon", "late", "retried"), 1):
        put(store.db, waiting[key].id, wake_us=at)  # hours later
    assert store.db.run(lambda tx: claims.wake_due(tx, 1)) == 1
    assert states(store.db)["sooner"] is T.READY
    assert store.db.run(lambda tx: claims.wake_due(tx, 10)) == 3
    assert store.db.run(lambda tx: claims.wake_due(tx, 10)) == 0
    rows = every(store.db)
    assert {k: r.state for k, r in rows.items()} == {
        "soon": T.READY, "sooner": T.READY, "late": T.EXPIRED, "later": T.SCHEDULED, "retried": T.READY,
    }  # fmt: skip
    assert (rows["retried"].reason, rows["retried"].rank > rows["soon"].rank) == ("why", True)
    consistent(store.db)


def test_a_waiting_row_that_somebody_holds_is_passed_over(store: Opened) -> None:
    """A cancel in an open transaction holds up no other task."""
    submit(store.db, new("a", delay_us=1), new("b", delay_us=1))
    rows, other = every(store.db), store.open()
    with other.transaction() as tx:
        settling.cancel(tx, rows["a"].id)
        if store.kind != "sqlite":
            assert store.db.run(lambda t: claims.wake_due(t, 10)) == 1
    store.db.run(lambda tx: claims.wake_due(tx, 10))
    assert states(store.db) == {"a": T.CANCELLED, "b": T.READY}


# -- the outage guard


def test_nothing_expires_for_one_lease_after_a_gap_between_sweeps(store: Opened) -> None:
    """While the database is away nobody can renew; the first sweep ever is such a gap, a distrusted clock another."""
    c = store.db.tables.coordinator

    def mark(*, distrust: bool = False) -> bool:
        return store.db.run(lambda tx: sweeps.mark_sweep(tx, HOUR, distrust=distrust)).closed

    def put(**values: int) -> None:
        store.db.run(lambda tx: tx.update(c, c.c.id == sweeps.SWEEP, **values))

    now = store.db.read(lambda tx: tx.now_us())
    assert mark() and mark(), "it stays closed for the whole lease"
    put(expires_us=0)
    assert not mark() and not mark()
    put(ticked_us=now - HOUR - SECOND)
    assert mark() and mark()
    put(expires_us=0)
    assert mark(distrust=True) and mark()
    put(expires_us=0, ticked_us=now + 5 * HOUR)
    assert not mark(), "a clock that was set back is told by distrust"
    row = store.db.read(lambda tx: tx.row(c.select().where(c.c.id == sweeps.SWEEP)))
    assert row is not None and row["ticked_us"] == now + 5 * HOUR


# -- permits


def test_a_permit_is_never_held_by_more_than_its_capacity(store: Opened) -> None:
    """Sessions on threads claim and settle at once, over two queues: the number inside never exceeds it; all get their turn, each with a later sequence number."""
    policy = msgspec.structs.replace(POLICY, permit_capacity=2)
    keys = [f"k{i:02}" for i in range(30)]
    submit(store.db, *[new(k, permit="p", policy=policy, queue="default" if i % 2 else "slow") for i, k in enumerate(keys)])
    dbs = [store.open() for _ in range(4)]
    inside, most, lock = set[str](), [0], threading.Lock()
    sequence: list[tuple[int, str]] = []
    for i in range(4):
        session(store.db, f"s{i}")

    def work(i: int) -> None:
        while len(sequence) < len(keys):
            rows = take(dbs[i], f"s{i}", 3, lanes=[LANE, "default/slow"])
            with lock:
                inside.update(r.id for r in rows)
                most[0] = max(most[0], len(inside))
                sequence.extend((r.permit_seq, r.key) for r in rows)
            with lock:
                inside.difference_update(r.id for r in rows)
            settle(dbs[i], *[ending(r) for r in rows])
            if not rows:
                dbs[i].run(lambda tx: refilled(tx))

    found = together(*[lambda i=i: work(i) for i in range(4)])
    assert found == [None] * 4
    assert most[0] <= 2 and sorted(k for _, k in sequence) == keys
    assert len({n for n, _ in sequence}) == len(keys) == permit(store.db).seq
    assert set(states(store.db).values()) == {T.SUCCEEDED} and permit(store.db).held == 0
    consistent(store.db)


def refilled(tx: Transaction) -> None:
    """What the sweep does for a permit whose next in line was passed over."""
    blocker = blockers.following(tx, "")
    if blocker is not None:
        gates.relieve(tx, blocker, 100)


def test_what_a_permit_blocks_is_parked_and_moves_up_by_rank(store: Opened) -> None:
    """Out of every claim's way; one for each that frees, whatever its queue."""
    submit(store.db, new("1", permit="p"))
    session(store.db)
    (first,) = take(store.db)
    submit(store.db, new("4", permit="p"), new("3", permit="p", priority=10, queue="slow"), new("2", permit="p", priority=20), new("free"))
    lanes = [LANE, "default/slow"]
    assert [r.key for r in take(store.db, lanes=lanes)] == ["free"]
    assert store.db.read(lambda tx: claims.ready_lanes(tx, ["default", "slow"])) == []
    blocked = {k for k, r in every(store.db).items() if r.blocked_by == "permit:default/p"}
    assert blocked == {"2", "3", "4"}
    assert store.db.read(lambda tx: blockers.following(tx, "")) == "permit:default/p"
    assert store.db.read(lambda tx: blockers.following(tx, "permit:default/p")) is None
    order, last = [], first
    for _ in range(3):
        settle(store.db, ending(last))
        (last,) = take(store.db, lanes=lanes)
        order.append((last.key, last.permit_seq))
        consistent(store.db)
    assert order == [("2", 2), ("3", 3), ("4", 4)]


FREEING = [
    *CAN_END_MANY_WAYS[:12],
    o.Unstarted(),
]


@pytest.mark.parametrize("outcome", FREEING, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("effects", [Effects.IDEMPOTENT, Effects.EXTERNAL])
def test_every_end_frees_the_permit_for_the_next_in_line(store: Opened, outcome: o.AnyOutcome, effects: Effects) -> None:
    """Success, failure, a pause, review, loss or give-back."""
    submit(store.db, new("1", permit="p", effects=effects, policy=msgspec.structs.replace(POLICY, delay_ms=HOUR, max_delay_ms=HOUR)))
    session(store.db)
    (row,) = take(store.db)
    submit(store.db, new("2", permit="p", priority=1000))
    assert take(store.db) == [] and every(store.db)["2"].blocked_by
    assert settle(store.db, ending(row, outcome)) == [Answer.APPLIED]
    assert not read(store.db, row.id).permit_held
    (following,) = take(store.db, count=1)
    assert (following.key, following.permit_seq) == ("2", 2)
    consistent(store.db)


def test_ordered_tasks_keep_their_place_over_pauses_and_queues(store: Opened) -> None:
    """The second waits while the first waits for its next attempt; a later queue does not overtake; each attempt has a later sequence number."""
    lanes = [LANE, "default/slow"]
    submit(store.db, *[new(k, permit="p", ordered=True, queue=q) for k, q in (("1", "slow"), ("2", "default"), ("3", "slow"))])
    session(store.db)
    assert take(store.db, lanes=[LANE]) == [], "1 is first in line, though in another queue"
    (first,) = take(store.db, lanes=lanes)
    assert first.key == "1"
    settle(store.db, ending(first, o.RetryAsked(1000)))
    assert (read(store.db, first.id).permit_held, permit(store.db).held) == (1, 1)
    assert take(store.db, lanes=lanes) == []
    threading.Event().wait(0.01)
    store.db.run(lambda tx: claims.wake_due(tx, 10))
    seen = []
    for _ in range(3):
        (row,) = take(store.db, lanes=lanes)
        seen.append((row.key, row.permit_seq))
        settle(store.db, ending(row))
        consistent(store.db)
    assert seen == [("1", 2), ("2", 3), ("3", 4)]


def test_an_ordered_task_that_holds_its_permit_is_nobodys_turn(store: Opened) -> None:
    """Of two places one is held by a task that waits to be claimed again: the other is for the next in line, and is given."""
    policy = msgspec.structs.replace(POLICY, permit_capacity=2)
    submit(
        store.db,
        *[new(k, permit="p", ordered=True, queue=q, policy=policy) for k, q in (("1", "slow"), ("2", "default"), ("3", "default"))],
    )
    session(store.db)
    assert [r.key for r in take(store.db, count=1, lanes=["default/slow"])] == ["1"]
    lose(store.db, "s")
    assert (every(store.db)["1"].state, every(store.db)["1"].permit_held) == (T.READY, 1)
    session(store.db, "s2")
    assert [r.key for r in take(store.db, "s2")] == ["2"], "nobody serves the other queue just now"
    assert [r.key for r in take(store.db, "s2", lanes=["default/slow"])] == ["1"]
    consistent(store.db)


def test_a_paused_permit_is_given_to_nobody_until_it_goes_again(store: Opened) -> None:
    """What holds it ends; nobody moves up."""
    submit(store.db, new("1", permit="p"), new("2", permit="p"))
    session(store.db)
    (row,) = take(store.db)
    p = store.db.tables.permit
    store.db.run(lambda tx: tx.update(p, p.c.id == "default/p", paused=1))
    settle(store.db, ending(row))
    assert store.db.run(lambda tx: permits.refill(tx, "default/p")) == 0
    assert take(store.db) == []
    store.db.run(lambda tx: tx.update(p, p.c.id == "default/p", paused=0))
    assert store.db.run(lambda tx: permits.refill(tx, "default/p")) == 1
    assert [r.key for r in take(store.db)] == ["2"]


def test_a_cancelled_first_in_line_lets_the_next_one_go(store: Opened) -> None:
    """A place in a line is no permit."""
    submit(store.db, *[new(k, permit="p", ordered=True, queue=q) for k, q in (("1", "slow"), ("2", "default"))])
    session(store.db)
    assert take(store.db) == []
    store.db.run(lambda tx: settling.cancel(tx, every(store.db)["1"].id) if store.kind != "sqlite" else settling.cancel(tx, first_id(tx)))
    assert [r.key for r in take(store.db)] == ["2"]


def first_id(tx: Transaction) -> str:
    return str(tx.rows(tx.t.task.select().where(tx.t.task.c.key == "1"))[0]["id"])
