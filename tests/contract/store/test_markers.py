"""``ctx.transaction("orders")``: effects in another database, told apart by a marker that is raised to the fence of each attempt before its code runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from tests.contract.store.handler_rig import EFFECTS, Died, Rig, Run, Strike, in_background
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import (
    consistent,
    ending,
    evidence,
    new,
    permit,
    read,
    session,
    settle,
    states,
    submit,
    take,
)

from millstream_schema.durable import outcomes as o
from millstream_schema.durable.records import TaskRow
from millstream_schema.durable.requests import decode_result
from millstream_schema.durable.states import Cause, Effects, TaskState
from millstream_schema.errors import Fenced
from millstream_schema.ports import SystemClock
from millstream_schema.store import claims, markers, settling
from millstream_schema.store.handler_transactions import HeldDatabase
from millstream_schema.store.settling import Answer

T = TaskState
ORDERS = "orders_"
"""Prefix of the tables in the second database; on servers it is the same one, reached by sessions of its own."""


class Second(Rig):
    """A rig whose handler works in a second database, with a table of the user's there."""

    def __init__(self, store: Opened, function: Callable[..., Any], url: str) -> None:
        super().__init__(store, function)
        self.others = {"orders": url}
        self.orders = HeldDatabase(url, SystemClock())
        EFFECTS.metadata.create_all(self.orders.engine)
        markers.create(url, "millstream_")
        with self.orders.engine.begin() as connection:
            connection.execute(EFFECTS.delete())
            connection.execute(markers.table("millstream_").delete())

    def effects(self) -> dict[str, int]:
        with self.orders.engine.begin() as connection:
            return {str(word): int(n) for word, n in connection.execute(sa.select(EFFECTS))}

    def marker(self, task: str) -> markers.Marker:
        return markers.in_short(self.orders, lambda tx: markers.read(tx, task))

    def resolve(self) -> TaskRow:
        """Claim and run until it is over or waits."""
        for _ in range(3):
            row = self.claim()
            run = self.run(row)
            self.report(row, run)
            after = read(self.db, row.id)
            if after.state is not T.READY:
                break
        return after


@pytest.fixture
def second(store: Opened, tmp_path: Any) -> Iterator[Callable[[Callable[..., Any]], Second]]:
    made: list[Second] = []

    def make(function: Callable[..., Any]) -> Second:
        url = f"sqlite:///{tmp_path / 'orders.db'}" if store.kind == "sqlite" else store.url
        made.append(Second(store, function, url))
        return made[-1]

    yield make
    for rig in made:
        rig.orders.close()


Make = Callable[[Callable[..., Any]], Second]


def writes(ctx: Any, word: str = "w") -> str:
    with ctx.transaction("orders") as tx:
        tx.execute(EFFECTS.insert(), {"word": word, "n": ctx.fence})
        tx.result(["done", ctx.fence])
    return "not this"


def test_effect_and_marker_commit_together_and_the_end_is_settled_from_them(second: Make) -> None:
    """With what it submits; our row says where it went."""

    def work(ctx: Any) -> None:
        ctx.submit("next", 1)
        writes(ctx)
        assert ctx.settled
        raise ValueError("later")

    rig = second(work)
    rig.submit()
    row = rig.claim()
    run = rig.run(row)
    assert isinstance(run.outcome, o.Succeeded) and decode_result(run.outcome.result) == ["done", 1]
    held = read(rig.db, row.id)
    assert (held.state, held.marker, held.starts) == (T.RUNNING, "orders", 1)
    found = rig.marker(row.id)
    assert (found.fence, found.result, [s.key for s in found.submits]) == (1, run.outcome.result, [f"{row.id}/0"])
    assert rig.report(row, run) is Answer.APPLIED
    assert sorted(states(rig.db).values()) == [T.READY, T.SUCCEEDED] and rig.effects() == {"w": 1}
    consistent(rig.db)


def test_a_marker_with_a_result_is_the_truth(second: Make) -> None:
    """The worker is lost between the user's COMMIT and the settle: the next attempt's code does not run, its end is the first one's."""
    ran: list[int] = []

    def work(ctx: Any) -> None:
        ran.append(ctx.fence)
        ctx.submit("next", 1)
        writes(ctx)

    rig = second(work)
    rig.submit()
    row = rig.claim()
    rig.run(row)
    rig.lose(row.session)
    assert read(rig.db, row.id).state is T.READY
    after = rig.resolve()
    assert (after.state, decode_result(after.result), ran, rig.effects()) == (T.SUCCEEDED, ["done", 1], [1], {"w": 1})
    assert sorted(states(rig.db).values()) == [T.READY, T.SUCCEEDED], "what it submitted came in, once"


BOUNDARIES = [("short", 1), ("orders", 1), ("orders", 2)]


@pytest.mark.parametrize("where", BOUNDARIES, ids=["record", "raise", "commit"])
@pytest.mark.parametrize("how", ["refused", "answer lost", "dies before", "dies after"])
def test_celery_t35_whatever_happens_at_any_commit_the_effect_comes_once(second: Make, where: tuple[str, int], how: str) -> None:
    """Our record, the raising of the marker, the user's own COMMIT: by its policy the task ends in success, with one effect."""
    rig = second(writes)
    rig.submit()
    rig.whole(**{where[0]: Strike(where[1], how)})
    for _ in range(3):
        rig.db.run(lambda tx: claims.wake_due(tx, 10))
        if rig.task().state is T.SUCCEEDED:
            break
        rig.whole()
    (n,) = rig.effects().values()
    after = rig.task()
    assert (after.state, decode_result(after.result)) == (T.SUCCEEDED, ["done", n])
    lost = how == "answer lost" or (where == ("orders", 2) and how == "dies after")
    assert n == (1 if lost else 2)


@pytest.mark.parametrize("kind", ["fail", "retried"])
def test_the_handlers_own_failure_undoes_it_and_its_end_takes_the_way_by_the_marker(second: Make, kind: str) -> None:
    """Fail: kept, resolved by the next claim, FAILED without running again. An error that is tried again: plainly again."""
    ran: list[int] = []

    def work(ctx: Any) -> None:
        ran.append(ctx.fence)
        with ctx.transaction("orders") as tx:
            tx.execute(EFFECTS.insert(), {"word": "w", "n": ctx.fence})
            tx.result(1)
            if kind == "fail":
                raise Fail("no")
            if ctx.fence == 1:
                raise ValueError("not yet")

    from millstream import Fail

    rig = second(work)
    rig.submit()
    rig.whole()
    if kind == "retried":
        rig.db.run(lambda tx: claims.wake_due(tx, 10))
        rig.whole()
        assert (rig.task().state, rig.effects(), ran) == (T.SUCCEEDED, {"w": 2}, [1, 2])
        return
    kept = rig.task()
    assert (kept.state, kept.cause, kept.failures, kept.ending is not None) == (T.READY, Cause.HANDLER, 1, True)
    after = rig.resolve()
    assert (after.state, after.cause, after.failures, after.error, after.ending, ran) == (T.FAILED, Cause.HANDLER, 1, "no", None, [1])
    assert rig.effects() == {} and rig.marker(after.id).fence == 2


# -- zombies


def lost(rig: Second, row: TaskRow) -> None:
    rig.lose(row.session)


def ended(rig: Second, row: TaskRow, outcome: o.AnyOutcome) -> None:
    settle(rig.db, ending(row, outcome))


def put(rig: Second, row: TaskRow, **values: Any) -> None:
    rig.db.run(lambda tx: tx.update(tx.t.task, tx.t.task.c.id == row.id, **values))


def cancelled(rig: Second, row: TaskRow) -> None:
    lost(rig, row)
    assert rig.db.run(lambda tx: settling.cancel(tx, row.id)) is T.READY


def expired(rig: Second, row: TaskRow) -> None:
    lost(rig, row)
    put(rig, row, deadline_us=1, limit_us=1)
    assert rig.db.run(lambda tx: claims.expire_late(tx, 10)) == 1


def expired_by_a_claim(rig: Second, row: TaskRow) -> None:
    lost(rig, row)
    put(rig, row, deadline_us=1)


def too_late(rig: Second, row: TaskRow) -> None:
    put(rig, row, deadline_us=1)
    lost(rig, row)


def poisoned(rig: Second, row: TaskRow) -> None:
    put(rig, row, losses=2)
    lost(rig, row)


def exhausted(rig: Second, row: TaskRow) -> None:
    put(rig, row, failures=2)
    ended(rig, row, o.Raised("E", "no"))


def overdue(rig: Second, row: TaskRow) -> None:
    put(rig, row, failures=2)
    ended(rig, row, o.Killed("limit"))


def lost_outside(rig: Second, row: TaskRow) -> None:
    put(rig, row, effects=Effects.EXTERNAL)
    lost(rig, row)


ENDINGS: dict[str, tuple[Callable[[Second, TaskRow], None], TaskState, Cause]] = {
    "Fail": (lambda rig, row: ended(rig, row, o.GaveUp("no")), T.FAILED, Cause.HANDLER),
    "attempts exhausted": (exhausted, T.FAILED, Cause.ATTEMPTS),
    "killed at its limit": (overdue, T.FAILED, Cause.ATTEMPTS),
    "review": (lambda rig, row: ended(rig, row, o.AskedForReview("look")), T.UNKNOWN, Cause.HANDLER),
    "cancel": (cancelled, T.CANCELLED, Cause.CANCELLED),
    "expiry": (expired, T.EXPIRED, Cause.DEADLINE),
    "expiry at a claim": (expired_by_a_claim, T.EXPIRED, Cause.DEADLINE),
    "deadline": (too_late, T.FAILED, Cause.DEADLINE),
    "poison": (poisoned, T.UNKNOWN, Cause.POISON),
    "lost external": (lost_outside, T.UNKNOWN, Cause.LOST),
}


@pytest.mark.parametrize("name", list(ENDINGS))
@pytest.mark.parametrize("first", ["the zombie commits first", "the fence is raised first"])
def test_celery_t03_a_zombie_commit_in_a_second_database_and_an_end_are_never_both(
    store: Opened, second: Make, name: str, first: str
) -> None:
    """An attempt that stands inside its transaction in a second database while its task ends otherwise: one of the two holds, and the task says which."""
    bring, state, cause = ENDINGS[name]
    inside, leave = threading.Event(), threading.Event()

    def work(ctx: Any) -> None:
        with ctx.transaction("orders") as tx:
            if store.kind != "sqlite":  # there it would hold the one write lock
                tx.execute(EFFECTS.insert(), {"word": "w", "n": ctx.fence})
            inside.set()
            assert leave.wait(30)
            if store.kind == "sqlite":
                tx.execute(EFFECTS.insert(), {"word": "w", "n": ctx.fence})
            tx.result("zombie's")

    rig = second(work)
    rig.submit()
    row = rig.claim()
    zombie = in_background(lambda: rig.run(row))
    assert inside.wait(20)
    bring(rig, row)
    kept = read(rig.db, row.id)
    assert kept.state is T.READY and (kept.ending is not None or name == "expiry at a claim")

    def leaves() -> Run:
        leave.set()
        run: Run = zombie()
        return run

    if first.startswith("the zombie"):
        run = leaves()
        assert isinstance(run.outcome, o.Succeeded)
        assert rig.report(row, run) in (Answer.STALE, Answer.DUPLICATE)
        after = rig.resolve()
        assert (after.state, decode_result(after.result), rig.effects()) == (T.SUCCEEDED, "zombie's", {"w": 1})
        return
    after = rig.resolve()
    assert (after.state, after.cause, after.ending) == (state, cause, None)
    run = leaves()
    assert isinstance(run.outcome, o.Raised) and run.outcome.error == "Fenced"
    assert rig.effects() == {} and read(rig.db, row.id).state is state
    consistent(rig.db)


def test_a_zombie_that_wakes_before_it_has_raised_the_marker_goes_no_further(second: Make) -> None:
    """It has recorded where it goes, and stands still there while its task ends."""
    ran: list[int] = []

    def work(ctx: Any) -> None:
        with ctx.transaction("orders"):
            ran.append(ctx.fence)

    rig = second(work)
    rig.submit()
    row = rig.claim()

    class Sleeps:
        """Right after the record, until the task has ended."""

        def before_commit(self) -> None:
            """Nothing yet."""

        def after_commit(self) -> None:
            cancelled(rig, row)
            assert rig.resolve().state is T.CANCELLED

    run = rig.run(row, short=Sleeps())
    assert isinstance(run.outcome, o.Raised) and run.outcome.error == "Fenced" and ran == []


def test_an_attempt_whose_lease_is_over_cannot_even_record_where_it_goes(second: Make) -> None:
    """And touches no marker."""
    rig = second(writes)
    rig.submit()
    row = rig.claim()
    rig.lose(row.session)
    run = rig.run(row)
    assert isinstance(run.outcome, o.Raised) and run.outcome.error == "Fenced"
    assert (read(rig.db, row.id).marker, rig.marker(row.id).fence) == ("", -1)


# -- finding out


def test_a_database_that_cannot_be_reached_is_asked_again_and_the_end_is_kept(second: Make) -> None:
    """Nothing is counted, a cancel changes nothing, and the end comes when it answers."""
    rig = second(writes)
    rig.submit()
    row = rig.claim()
    put(rig, row, marker="orders")
    settle(rig.db, ending(row, o.GaveUp("no")))
    away, rig.others = rig.others, {"orders": "postgresql+psycopg://nobody:secret@127.0.0.1:1/none"}
    asked = rig.claim()
    assert rig.report(asked, rig.run(asked)) is Answer.APPLIED
    waits = rig.task()
    assert (waits.state, waits.cause, waits.failures, waits.ending is not None) == (T.RETRY_WAIT, Cause.MARKER, 1, True)
    assert "orders" in waits.reason and "secret" not in waits.reason
    assert rig.db.run(lambda tx: settling.cancel(tx, row.id)) is T.RETRY_WAIT
    rig.others = away
    put(rig, row, wake_us=1)
    rig.db.run(lambda tx: claims.wake_due(tx, 10))
    assert (rig.resolve().state, rig.task().failures) == (T.FAILED, 1)


@pytest.mark.parametrize("how", ["given back", "lost", "crashed"])
def test_whoever_was_to_find_out_may_be_lost(second: Make, how: str) -> None:
    """The end is kept for the next one."""
    rig = second(writes)
    rig.submit()
    row = rig.claim()
    put(rig, row, marker="orders")
    settle(rig.db, ending(row, o.GaveUp("no")))
    asked = rig.claim()
    if how == "lost":
        rig.lose(asked.session)
    else:
        settle(rig.db, ending(asked, o.Unstarted() if how == "given back" else o.Crashed("-9")))
    put(rig, row, **({"wake_us": 1} if how == "crashed" else {}))
    rig.db.run(lambda tx: claims.wake_due(tx, 10))
    assert read(rig.db, row.id).state is T.READY
    after = rig.resolve()
    assert (after.state, after.crashes, after.losses, after.cause) == (T.FAILED, 0, 0, Cause.HANDLER)


def test_a_kept_end_holds_no_permit_and_needs_none(second: Make) -> None:
    """The next in line runs while it waits; finding out does not wait for the permit, nor does an ordered line wait for it."""
    rig = second(writes)
    rig.submit("1", permit="p", ordered=True)
    row = rig.claim()
    put(rig, row, marker="orders")
    submit(rig.db, new("2", permit="p", ordered=True), new("3", permit="p", ordered=True))
    settle(rig.db, ending(row, o.GaveUp("no")))
    assert permit(rig.db).held == 0
    session(rig.db, "other")
    (over, following) = sorted(take(rig.db, "other"), key=lambda r: r.key)
    assert (over.key, over.permit_held, following.key, following.permit_held) == ("1", 0, "2", 1)
    rig.report(over, rig.run(over))
    assert read(rig.db, row.id).state is T.FAILED
    settle(rig.db, ending(following))
    assert [r.key for r in take(rig.db, "other")] == ["3"]
    consistent(rig.db)


def test_a_task_works_in_one_other_database(second: Make) -> None:
    """A second name is refused; the end goes by way of the first."""

    def work(ctx: Any) -> None:
        with ctx.transaction("orders" if ctx.fence == 1 else "billing"):
            raise ValueError("not yet")

    rig = second(work)
    rig.others["billing"] = rig.others["orders"]
    rig.submit()
    rig.whole()
    rig.db.run(lambda tx: claims.wake_due(tx, 10))
    rig.whole()
    kept = rig.task()
    assert kept.ending is not None and "'orders' before" in kept.reason
    assert rig.resolve().state is T.FAILED


def test_an_unknown_database_and_a_missing_table_say_what_to_do(second: Make) -> None:
    """The first is not tried again."""
    rig = second(lambda ctx: ctx.transaction("nowhere").__enter__())
    rig.submit()
    rig.whole()
    assert rig.task().state is T.FAILED and "Handlers(databases=" in rig.task().reason
    rig.store.empty()
    rig.registry.get("work").function = writes
    with rig.orders.engine.begin() as connection:
        markers.table("millstream_").drop(connection)
    rig.submit("again")
    run = rig.whole()
    assert isinstance(run.outcome, o.Raised) and "millstream markers init" in run.outcome.message


def test_a_marker_that_is_ahead_of_our_row_fences(second: Make) -> None:
    """As after our database was brought back from an older copy: nothing is done under a fence that was passed."""
    rig = second(writes)
    rig.submit()
    row = rig.claim()
    markers.in_short(rig.orders, lambda tx: markers.raise_fence(tx, row.id, 9))
    run = rig.run(row)
    assert isinstance(run.outcome, o.Raised) and run.outcome.error == "Fenced" and rig.effects() == {}


def test_only_one_of_two_attempts_seals_the_marker(second: Make) -> None:
    """Even if both reach it: the one whose fence it has."""
    rig = second(writes)

    def sealed(fence: int) -> bool:
        return markers.in_short(rig.orders, lambda tx: markers.seal(tx, "t", fence, f"[{fence}]", ()))

    def raised(fence: int) -> markers.Marker:
        return markers.in_short(rig.orders, lambda tx: markers.raise_fence(tx, "t", fence))

    assert raised(1).result is None and raised(1).result is None and raised(3).fence == 3
    with pytest.raises(Fenced):
        raised(2)
    assert not sealed(1) and not sealed(2) and sealed(3) and not sealed(3)
    assert raised(4) == markers.Marker(3, "[3]") == raised(1)


def test_a_claim_repeats_an_external_attempt_no_more_than_before(second: Make) -> None:
    """An external handler whose process died inside its transaction is in review, by way of the marker, and its code has run once."""
    ran: list[int] = []

    def work(ctx: Any) -> None:
        ran.append(1)
        writes(ctx)

    rig = second(work)
    rig.submit(effects=Effects.EXTERNAL)
    row = rig.claim()
    with pytest.raises(Died):
        rig.run(row, orders=Strike(2, "dies before"))
    settle(rig.db, ending(row, o.Crashed("-9")))
    assert (rig.resolve().state, ran, rig.effects()) == (T.UNKNOWN, [1], {})
    assert [e[1] for e in evidence(rig.db, row.id)] == ["Crashed"]
