"""``ctx.transaction()`` in Millstream's own database: effect, result and continuations commit together under the attempt's fence, or nothing does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from tests.contract.store.delivery_rows import frozen, subscribed
from tests.contract.store.handler_rig import EFFECTS, Rig, Strike, in_background
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import ending, evidence, new, permit, read, session, settle, states, submit, take

from millstream import Handlers, Installation, TaskWorker
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.requests import decode_result
from millstream_schema.durable.states import Cause, Effects, TaskState
from millstream_schema.errors import Fenced, StoreError, StoreUnavailable, TransactionRefused, TransactionTooLong
from millstream_schema.ports import SystemClock
from millstream_schema.store import claims, settling
from millstream_schema.store.handler_transactions import HandlerTransaction, HeldDatabase
from millstream_schema.store.settling import Answer

T = TaskState


def writes(ctx: Any, word: str = "w", result: Any = "done") -> Any:
    """The plain case."""
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO user_effect (word, n) VALUES (:word, :n)", {"word": word, "n": ctx.fence})
        tx.result(result)
    return "not this"


def test_effect_result_and_continuations_commit_together(store: Opened) -> None:
    """The attempt is settled when the block is left; what the function returns does not matter."""

    def work(ctx: Any) -> None:
        ctx.submit("next", 1)
        writes(ctx)
        assert ctx.settled
        with pytest.raises(TransactionRefused, match="submit before"):
            ctx.submit("next", 2)

    rig = Rig(store, work)
    rig.submit(permit="p")
    row = rig.claim()
    run = rig.run(row)
    assert (run.outcome, run.commits) == (o.Committed(), 1)
    after = rig.task()
    assert (after.state, decode_result(after.result), after.session, after.starts) == (T.SUCCEEDED, "done", "", 1)
    assert rig.effects() == {"w": 1} and permit(store.db).held == 0
    assert sorted(states(store.db).values()) == [T.READY, T.SUCCEEDED]
    assert store.db.read(lambda tx: settling.committed(tx, {row.id: row.fence})) == {row.id}
    assert store.db.read(lambda tx: settling.committed(tx, {row.id: row.fence + 1})) == frozenset()


@pytest.mark.parametrize("more", [False, True], ids=["plain", "with a continuation"])
def test_whoever_subscribes_hears_of_it(store: Opened, more: bool) -> None:
    """The end is frozen as an event in the same transaction, or undone with it."""

    def work(ctx: Any) -> None:
        if more:
            ctx.submit("next", 1)
        writes(ctx)

    rig = Rig(store, work)
    subscribed(store.db)
    rig.submit()
    rig.whole(held=Strike(1, "refused"))
    assert frozen(store.db) == {}
    rig.db.run(lambda tx: claims.wake_due(tx, 10))
    rig.whole()
    assert list(frozen(store.db)) == ["k"]


def test_a_success_stays_one_whatever_the_handler_does_afterwards(store: Opened) -> None:
    """It raises behind the block: the task has succeeded; that its process dies later is evidence."""

    def work(ctx: Any) -> None:
        writes(ctx)
        raise ValueError("later")

    rig = Rig(store, work)
    rig.submit()
    row = rig.claim()
    assert rig.run(row).outcome == o.Committed()
    assert settle(store.db, ending(row, o.Crashed("-9"))) == [Answer.STALE]
    assert rig.task().state is T.SUCCEEDED and evidence(store.db, row.id) == [(1, "Crashed", 1)]


def test_leaving_the_block_by_an_exception_undoes_everything(store: Opened) -> None:
    """Tried again by its policy; the next attempt does it once."""
    broken = [True]

    def work(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(EFFECTS.insert(), {"word": "w", "n": ctx.fence})
            tx.result(1)
            if broken[0]:
                raise ValueError("no")

    rig = Rig(store, work)
    rig.submit()
    assert isinstance(rig.whole().outcome, o.Raised)
    assert rig.effects() == {}
    rig.db.run(lambda tx: claims.wake_due(tx, 10))
    broken.clear()
    broken.append(False)
    rig.whole()
    assert rig.effects() == {"w": 2} and rig.task().state is T.SUCCEEDED


def test_leaving_the_block_without_a_result_undoes_everything_and_says_what_to_do(store: Opened) -> None:
    """It is not tried again: it would be the same."""

    def work(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(EFFECTS.insert(), {"word": "w", "n": 1})

    rig = Rig(store, work)
    rig.submit()
    rig.whole()
    assert rig.effects() == {} and rig.task().state is T.FAILED
    assert "tx.result()" in rig.task().reason


def test_a_result_or_continuation_that_cannot_be_stored_undoes_everything(store: Opened) -> None:
    """FAILED with cause ``result``; the continuation's key is known with other content, the result is no value."""

    def result(ctx: Any) -> None:
        writes(ctx, result=object())

    def continuation(ctx: Any) -> None:
        ctx.submit("next", 1, key="known")
        writes(ctx)

    for work in (result, continuation):
        store.empty()
        rig = Rig(store, work)
        submit(store.db, new("known", handler="next", digest="1:other", queue="q"))
        rig.submit()
        rig.whole()
        assert (rig.task().state, rig.task().cause, rig.effects()) == (T.FAILED, Cause.RESULT, {})


REFUSED = [
    "COMMIT", "commit;", " ROLLBACK", "BEGIN", "START TRANSACTION", "END", "/* done */ COMMIT", "-- done\nCOMMIT", "/* a */ -- b\n ( /* c */ \t COMMIT", "SELECT 1; COMMIT",
    "SELECT ';' /* ; */ -- ;\n;\n/**/ ROLLBACK /* TO x */;", "; ;COMMIT",
]  # fmt: skip


@pytest.mark.parametrize("statement", REFUSED)
def test_nobody_else_ends_the_transaction(store: Opened, statement: str) -> None:
    """Neither by a statement nor through SQLAlchemy's connection; what was done before is undone."""

    def work(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(EFFECTS.insert(), {"word": "w", "n": 1})
            with pytest.raises(TransactionRefused):
                tx.execute(statement)
            with pytest.raises(TransactionRefused):
                tx.connection.commit()
            tx.result(1)

    rig = Rig(store, work)
    rig.submit()
    run = rig.whole()
    assert isinstance(run.outcome, o.Raised) or run.outcome == o.Committed()
    assert rig.effects() == ({"w": 1} if run.outcome == o.Committed() else {})
    assert (rig.task().state is T.SUCCEEDED) == (run.outcome == o.Committed())


def test_a_rollback_inside_the_block_is_no_success(store: Opened) -> None:
    """What it undid would be missing: everything is undone."""

    def work(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(EFFECTS.insert(), {"word": "w", "n": 1})
            tx.connection.rollback()
            tx.result(1)

    rig = Rig(store, work)
    rig.submit()
    rig.whole()
    assert rig.effects() == {} and rig.task().state is T.FAILED and "rolled back" in rig.task().reason


def test_an_attempt_has_one_transaction(store: Opened) -> None:
    """A second block is refused, before and after the first has committed."""

    def work(ctx: Any) -> None:
        writes(ctx)
        with pytest.raises(TransactionRefused, match="one"):
            writes(ctx, "again")

    rig = Rig(store, work)
    rig.submit()
    rig.whole()
    assert rig.effects() == {"w": 1} and rig.task().state is T.SUCCEEDED


def test_on_mariadb_what_commits_by_itself_is_refused(store: Opened) -> None:
    """DDL ends the transaction there; elsewhere it is part of it."""

    def work(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute("CREATE TABLE user_made (a INTEGER)")
            tx.execute("DROP TABLE user_made")
            tx.result(1)

    rig = Rig(store, work)
    rig.submit()
    rig.whole()
    assert (rig.task().state, "commits" in rig.task().reason) == ((T.FAILED, True) if store.kind == "mariadb" else (T.SUCCEEDED, False))


class Base(DeclarativeBase):
    """Of the user's models."""


class Effect(Base):
    __tablename__ = "user_effect"
    word: Mapped[str] = mapped_column(primary_key=True)
    n: Mapped[int]


def test_an_orm_session_takes_part(store: Opened) -> None:
    """Its commit writes, its rollback undoes what came since; both stay inside."""

    def work(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.session.add(Effect(word="kept", n=1))
            tx.session.commit()
            tx.session.add(Effect(word="undone", n=1))
            tx.session.flush()
            tx.session.rollback()
            tx.session.add(Effect(word="pending", n=1))
            tx.result(tx.session.scalar(sa.select(sa.func.count()).select_from(Effect)))

    rig = Rig(store, work)
    rig.submit()
    run = rig.whole()
    assert run.outcome == o.Committed(), run.outcome
    assert rig.effects() == {"kept": 1, "pending": 1} and decode_result(rig.task().result) == 2


# -- fences


@pytest.mark.parametrize("again", [False, True], ids=["taken back", "running again"])
def test_a_zombie_does_not_commit(store: Opened, again: bool) -> None:
    """Its lease is over before the block is left: everything is undone, its report is late evidence, the next attempt's effect is the only one."""
    inside, leave = threading.Event(), threading.Event()

    def work(ctx: Any) -> None:
        if ctx.fence > 1:
            writes(ctx)
            return
        with ctx.transaction() as tx:
            if store.kind != "sqlite":  # there it would hold the one write lock
                tx.execute(EFFECTS.insert(), {"word": "w", "n": 1})
            inside.set()
            assert leave.wait(20)
            if store.kind == "sqlite":
                tx.execute(EFFECTS.insert(), {"word": "zombie", "n": 1})
            tx.result(1)

    rig, other = Rig(store, work), None
    rig.submit()
    row = rig.claim()
    ended = in_background(lambda: rig.run(row))
    assert inside.wait(20)
    rig.lose(row.session)
    if again:
        other = Rig.claim(rig)
    leave.set()
    run = ended()
    assert isinstance(run.outcome, o.Raised) and run.outcome.error == "Fenced" and run.commits == 0
    assert rig.effects() == {}
    assert rig.report(row, run) is Answer.STALE
    assert (1, "Raised", 1) in evidence(store.db, row.id)
    other = other or rig.claim()
    assert rig.run(other).outcome == o.Committed()
    assert rig.effects() == {"w": 2} and rig.task().fence == 2


def test_what_was_cancelled_before_it_was_known_to_begin_has_no_effect(store: Opened) -> None:
    """A claimed attempt, held ahead, that runs all the same finds its fence gone."""
    rig = Rig(store, writes)
    rig.submit()
    row = rig.claim(starting=0)
    assert store.db.run(lambda tx: settling.cancel(tx, row.id)) is T.CANCELLED
    run = rig.run(row)
    assert isinstance(run.outcome, o.Raised) and rig.effects() == {}
    assert rig.report(row, run) is Answer.STALE and rig.task().state is T.CANCELLED


def test_success_wins_over_a_cancel_that_is_only_asked_for(store: Opened) -> None:
    """The canceller is told too late."""
    rig = Rig(store, writes)
    rig.submit()
    row = rig.claim()
    assert store.db.run(lambda tx: settling.cancel(tx, row.id)) is T.RUNNING
    assert rig.run(row).outcome == o.Committed()
    assert store.db.run(lambda tx: settling.cancel(tx, row.id)) is T.SUCCEEDED
    assert rig.effects() == {"w": 1}


# -- COMMITs that fail


@pytest.mark.parametrize("how", ["refused", "answer lost", "dies before", "dies after"])
@pytest.mark.parametrize("effects", [Effects.TRANSACTIONAL, Effects.EXTERNAL])
def test_celery_t35_whatever_happens_around_commit_the_effect_is_there_once_or_the_task_says_so(
    store: Opened, how: str, effects: Effects
) -> None:
    """A process that dies, a COMMIT that fails, an answer that is lost: by its policy the effect comes once; an external one that was cut off is in review, with no effect."""
    rig = Rig(store, writes)
    rig.submit(effects=effects)
    run = rig.whole(held=Strike(1, how))
    if how in ("answer lost", "dies after"):
        assert rig.task().state is T.SUCCEEDED and rig.effects() == {"w": 1}
        assert run.commits == int(how == "answer lost")
        return
    assert rig.effects() == {}
    if how == "dies before" and effects is Effects.EXTERNAL:
        assert rig.task().state is T.UNKNOWN
        return
    rig.db.run(lambda tx: claims.wake_due(tx, 10))
    rig.whole()
    assert rig.task().state is T.SUCCEEDED and rig.effects() == {"w": 2}


@pytest.mark.parametrize("how", ["refused", "answer lost"])
def test_asking_what_became_of_a_commit_is_repeated(store: Opened, how: str) -> None:
    """The answer was lost, and the first questions fail, too."""
    rig = Rig(store, writes)
    rig.submit()
    run = rig.whole(held=Strike(1, "answer lost"), short=Strike(1, how))
    assert (run.outcome, run.commits, rig.task().state) == (o.Committed(), 1, T.SUCCEEDED)


class Cut:
    """The server ends the session right before COMMIT."""

    def __init__(self, store: Opened) -> None:
        self._store = store
        self.session: list[int] = []

    def before_commit(self) -> None:
        kill = "SELECT pg_terminate_backend(:id)" if self._store.kind == "postgres" else "KILL CONNECTION :id"
        with self._store.db.engine.begin() as connection:
            connection.execute(sa.text(kill), {"id": self.session[0]})

    def after_commit(self) -> None:
        """Nothing: it does not come to it."""


def test_a_commit_that_did_not_come_about_is_known_not_to_have(store: Opened) -> None:
    """The connection breaks at COMMIT: the row says that it did not, and the task is tried again."""
    if store.kind == "sqlite":
        pytest.skip("no server that could end a session")
    cut = Cut(store)

    def work(ctx: Any) -> None:
        with ctx.transaction() as tx:
            query = "SELECT pg_backend_pid()" if store.kind == "postgres" else "SELECT CONNECTION_ID()"
            cut.session.append(int(tx.execute(query).scalar_one()))
            tx.execute(EFFECTS.insert(), {"word": "w", "n": ctx.fence})
            tx.result(1)

    rig = Rig(store, work)
    rig.submit()
    run = rig.whole(held=cut)
    assert isinstance(run.outcome, o.Raised) and run.outcome.error == "StoreUnavailable", run.outcome
    assert rig.effects() == {} and rig.task().state is T.RETRY_WAIT


class Stands:
    """A process that stands still right before COMMIT, its end written."""

    def __init__(self) -> None:
        self.there, self.go = threading.Event(), threading.Event()

    def before_commit(self) -> None:
        self.there.set()
        assert self.go.wait(60)

    def after_commit(self) -> None:
        """Nothing: it does not come to it."""


@pytest.mark.parametrize("then", ["taken back", "cancelled"])
def test_celery_t17_a_process_that_stands_still_before_commit_keeps_no_row(store: Opened, then: str) -> None:
    """The sweep passes over it and is not held up; within the short limit the server ends the session, and what it had written is undone."""
    if store.kind == "sqlite":
        pytest.skip("a process that stands still in a write keeps a SQLite file: it is killed")
    rig, stands = Rig(store, writes), Stands()
    rig.submit()
    row = rig.claim()
    submit(store.db, new("neighbour"))
    (neighbour,) = take(store.db, row.session, 1)
    clock = SystemClock()
    ended = in_background(lambda: rig.run(row, held=stands, timeout_ms=1000))
    assert stands.there.wait(20)
    began = clock.monotonic()
    if then == "taken back":
        rig.lose(row.session)
        assert clock.monotonic() - began < 0.8, "the sweep waited for it"
        assert read(store.db, neighbour.id).state is T.READY, "its neighbour was held up"
        while read(store.db, row.id).state is T.RUNNING:
            rig.db.run(lambda tx: settling.take_back(tx, row.session, lambda: 0.5, 10))
            assert clock.monotonic() - began < 10
        assert read(store.db, row.id).state is T.READY
    else:
        assert store.db.run(lambda tx: settling.cancel(tx, row.id)) is T.RUNNING
    assert 0.2 < clock.monotonic() - began < 8
    stands.go.set()
    run = ended()
    assert isinstance(run.outcome, o.Raised) and run.commits == 0, run.outcome
    assert run.outcome.error in ("Fenced", "StoreUnavailable")
    assert rig.effects() == {}


# -- holding it for long


def test_a_handler_may_hold_its_transaction_for_three_leases_and_its_neighbours_keep_theirs(store: Opened, tmp_path: Path) -> None:
    """A hundred other attempts of the same worker run through all of it: nothing is lost, nothing runs twice."""
    if store.kind == "sqlite":
        pytest.skip("on SQLite it is limited to seconds")
    Rig(store, writes)
    handlers = Handlers()
    lease_ms, holding, enough = 4000, threading.Event(), threading.Event()

    @handlers.task(name="holds", effects="transactional")
    def holds(ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(EFFECTS.insert(), {"word": "held", "n": ctx.fence})
            holding.set()
            enough.wait(lease_ms * 3 / 1000)
            tx.result("held on")

    @handlers.task(name="waits", effects="idempotent")
    def waits(number: int) -> int:
        assert enough.wait(60)
        return number

    # A short lease would tell of a busy machine: a hundred threads share it with other tests.
    installation = Installation.local(tmp_path, database=store.url, lease_ms=lease_ms, poll_ms=50)
    with TaskWorker(installation, handlers, slots=101) as worker:
        held = worker.tasks.submit("holds").task
        neighbours = [worker.tasks.submit("waits", i).task for i in range(100)]
        assert worker.tasks.wait(held, 30) == "held on"
        enough.set()
        assert [worker.tasks.wait(n, 30) for n in neighbours] == list(range(100))
        rows = [worker.tasks.get(t) for t in [held, *neighbours]]
        assert {(r.fence, r.losses, r.starts) for r in rows} == {(1, 0, 1)}
    with store.db.engine.begin() as connection:
        assert connection.execute(sa.select(EFFECTS)).all() == [("held", 1)]


@pytest.mark.parametrize("fails", ["begin", "settings"])
def test_one_that_cannot_begin_gives_its_connection_back(store: Opened, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the driver refuses the transaction or the settings of its session."""
    Rig(store, writes)
    held = HeldDatabase(store.url, SystemClock())
    if fails == "settings":
        monkeypatch.setattr(held, "loose", lambda: ("SELECT nothing FROM nowhere",))
    else:

        def refuse(_connection: Any) -> None:
            raise sa.exc.OperationalError("BEGIN", {}, Exception("refused"))

        sa.event.listen(held.engine, "begin", refuse)
    with pytest.raises(StoreError):
        HandlerTransaction(held)
    assert getattr(held.engine.pool, "checkedout")() == 0  # noqa: B009  # not every pool has it
    held.close()


# -- SQLite


def sqlite_only(store: Opened) -> HeldDatabase:
    if store.kind != "sqlite":
        pytest.skip("SQLite has one write lock for all")
    Rig(store, writes)
    return HeldDatabase(store.url, SystemClock())


def test_on_sqlite_it_begins_at_its_first_write(store: Opened) -> None:
    """However long it reads and thinks before, others write."""
    held = sqlite_only(store)
    tx = HandlerTransaction(held)
    assert tx.execute("SELECT count(*) FROM user_effect").scalar_one() == 0
    session(store.db)
    tx.execute(EFFECTS.insert(), {"word": "w", "n": 1})
    impatient = store.open(timeout_ms=1)
    with pytest.raises(StoreUnavailable):
        session(impatient)
    tx.abandon(None)
    session(impatient)
    held.close()


def test_on_sqlite_a_write_that_takes_too_long_gives_the_lock_back(store: Opened) -> None:
    """Others go on; the handler is told what to do, at its next statement or at the end, and nothing of it is done."""
    held = sqlite_only(store)
    tx = HandlerTransaction(held, 0.2)
    tx.execute(EFFECTS.insert(), {"word": "w", "n": 1})
    session(store.db)  # waits for the lock
    with pytest.raises(TransactionTooLong, match="write last"):
        tx.execute("SELECT 1")
    tx.result(1)
    with pytest.raises(TransactionTooLong):
        tx.commit(lambda _: pytest.fail("too late"))
    with store.db.engine.begin() as connection:
        assert connection.execute(sa.select(EFFECTS)).all() == []
    held.close()


def test_a_fence_that_is_gone_at_commit_is_told_apart_from_a_database_that_is_away(store: Opened) -> None:
    """Fenced says: stop; StoreUnavailable says: nothing was done, try again."""
    raised: list[BaseException] = []

    def work(ctx: Any) -> None:
        try:
            writes(ctx)
        except BaseException as exc:
            raised.append(exc)
            raise

    rig = Rig(store, work)
    rig.submit()
    row = rig.claim()
    store.db.run(lambda tx: tx.update(tx.t.task, tx.t.task.c.id == row.id, token="other"))
    rig.run(row)
    store.db.run(lambda tx: tx.update(tx.t.task, tx.t.task.c.id == row.id, token=row.token))
    rig.run(row, held=Strike(1, "refused"))
    assert [type(e) for e in raised] == [Fenced, StoreUnavailable]
