"""Submissions in callers' transactions: at every isolation level of every database, by every way in; nothing of the caller's is committed, undone or left changed by us."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg.rows
import pymysql.cursors
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from tests.contract.store.callers import LEVELS, TABLE, WAYS, User, own_rows, own_table, raw_connection
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import SECOND, every, new, submit

from millstream_schema.durable.records import Receipt
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError, ForeignSession, RetryTransaction, StoreError
from millstream_schema.ports import SystemClock
from millstream_schema.store import tasks
from millstream_schema.store.callers import caller_of

T = TaskState
Users = Callable[..., User]


@pytest.fixture
def user(store: Opened) -> Iterator[Users]:
    """Opens users of the store's database."""
    own_table(store)
    opened: list[User] = []

    def make(way: str = "session", level: str = "") -> User:
        if store.kind == "sqlite" and level in LEVELS[1:]:
            pytest.skip("SQLite has one level")
        opened.append(User(store, way, level))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


every_way = pytest.mark.parametrize("way", WAYS)
every_level = pytest.mark.parametrize("level", LEVELS)


@every_way
@every_level
@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_a_submission_is_the_callers_to_commit(store: Opened, user: Users, way: str, level: str, commits: bool) -> None:
    """With the caller's own rows, before and after it: all or none, and none before he says so."""
    one = user(way, level)
    one.note(1)
    assert one.do(lambda tx: tasks.submit(tx, new())).replayed is False
    one.note(2)
    later = one.do(lambda tx: tasks.submit_many(tx, [new("b"), new("a"), new("k")]))
    assert [r.replayed for r in later] == [False, False, True]
    one.note(3)
    if store.kind != "sqlite" or commits:
        assert (own_rows(store), every(store.db)) == ([], {})
    (one.commit if commits else one.rollback)()
    assert own_rows(store) == ([1, 2, 3] if commits else [])
    assert set(every(store.db)) == ({"a", "b", "k"} if commits else set())


@every_way
@every_level
def test_a_repeat_is_an_answer_and_the_transaction_goes_on(store: Opened, user: Users, way: str, level: str) -> None:
    """Also one with other content: what was written before and after is committed."""
    first = new()
    submit(store.db, first)
    one = user(way, level)
    one.note(1)
    assert one.do(lambda tx: tasks.submit(tx, new("before"))).replayed is False
    assert one.do(lambda tx: tasks.submit(tx, new())) == Receipt(first.id, T.READY, first.digest, replayed=True)
    assert one.do(lambda tx: tasks.submit(tx, new(digest="1:x"))).conflict == first.digest
    one.note(2)
    assert one.do(lambda tx: tasks.submit(tx, new("after"))).replayed is False
    one.commit()
    assert (set(every(store.db)), own_rows(store)) == ({"k", "before", "after"}, [1, 2])


@every_way
@every_level
@pytest.mark.parametrize("looked", [True, False], ids=["with a snapshot", "without"])
@pytest.mark.parametrize("commits", [True, False], ids=["winner commits", "winner rolls back"])
def test_a_repeat_of_what_is_not_committed_waits_for_its_end(
    store: Opened, user: Users, way: str, level: str, looked: bool, commits: bool
) -> None:
    """Committed: the winner's receipt, at once or when the whole transaction is run again. Rolled back: it is accepted."""
    winner, loser, inserted = user("connection", level), user(way, level), threading.Event()
    first, second, tries = new(), new(), list[int]()

    def win() -> None:
        winner.do(lambda tx: tasks.submit(tx, first))
        inserted.set()
        threading.Event().wait(0.1)
        (winner.commit if commits else winner.rollback)()

    def lose() -> Receipt:
        assert inserted.wait(10)
        if looked:
            loser.look()
        return loser.do(lambda tx: tasks.submit(tx, second))

    _, receipt = together(win, lambda: loser.whole(lose, tries))
    assert receipt == Receipt(first.id if commits else second.id, T.READY, first.digest, replayed=commits)
    if store.kind != "sqlite":
        assert len(tries) == 1 or (commits and level in ("REPEATABLE READ", "SERIALIZABLE")), tries
    assert [r.id for r in every(store.db).values()] == [receipt.task]


@every_way
@every_level
def test_what_was_committed_after_the_callers_snapshot_is_found(store: Opened, user: Users, way: str, level: str) -> None:
    """The snapshot does not show the winner: its receipt, or the typed error that says to run the whole transaction again; then its receipt."""
    first, tries = new(), list[int]()
    one, winner = user(way, level), user("connection")

    def work() -> Receipt:
        if one.way == "driver" and store.kind == "sqlite":
            one.sql("BEGIN")  # else the driver begins with the first change, and there is no snapshot
        one.look()
        if len(tries) == 1:
            winner.do(lambda tx: tasks.submit(tx, first))
            winner.commit()
        return one.do(lambda tx: tasks.submit(tx, new()))

    receipt = one.whole(work, tries)
    assert receipt == Receipt(first.id, T.READY, first.digest, replayed=True)
    assert len(tries) == 1 or level in ("REPEATABLE READ", "SERIALIZABLE") or store.kind == "sqlite"
    assert len(tries) <= 2 and len(every(store.db)) == 1


@every_way
@every_level
def test_the_wait_for_one_key_is_bounded(store: Opened, user: Users, way: str, level: str) -> None:
    """A winner that stays open costs the other a typed error after the lock timeout, not a hanging request; afterwards it goes through."""
    winner, loser = user("session", level), user(way, level)
    winner.do(lambda tx: tasks.submit(tx, new()))
    clock = SystemClock()
    began = clock.monotonic()
    with pytest.raises(RetryTransaction, match="run the whole of it again"):
        loser.do(lambda tx: tasks.submit(tx, new()), wait_ms=300)
    assert clock.monotonic() - began < 5
    loser.rollback()
    winner.commit()
    loser.begin()
    assert loser.do(lambda tx: tasks.submit(tx, new())).replayed
    loser.rollback()


@every_way
def test_the_callers_own_settings_are_put_back(store: Opened, user: Users, way: str) -> None:
    """After a submission, a repeat, a refusal, a timeout; a shorter wait than ours stays the caller's."""
    one = user(way)
    before = one.wait_setting()
    one.do(lambda tx: tasks.submit(tx, new()), wait_ms=1000)
    assert one.wait_setting() == before
    one.do(lambda tx: tasks.submit(tx, new()), wait_ms=1000)
    assert one.wait_setting() == before
    with pytest.raises(ForeignSession):
        one.do(lambda tx: tasks.submit(tx, new()), wait_ms=1000, uid="somebody else")
    assert one.wait_setting() == before
    one.rollback()
    blocker = user("session")
    blocker.do(lambda tx: tasks.submit(tx, new()))
    with pytest.raises(RetryTransaction):
        one.do(lambda tx: tasks.submit(tx, new()), wait_ms=1000)
    if store.kind == "postgres":
        one.rollback()
        assert one.wait_setting() == before
        one.rollback()
        one.sql("SET lock_timeout = '77ms'")
        with pytest.raises(RetryTransaction):
            one.do(lambda tx: tasks.submit(tx, new()), wait_ms=60_000)
    else:
        assert one.wait_setting() == before
    one.rollback()


@every_way
def test_a_foreign_session_is_refused_and_stays_whole(store: Opened, user: Users, way: str, tmp_path: Any) -> None:
    """Another installation of the same name; a database without ours. What its owner did and does is committed: no error of the database was raised in it."""
    one = user(way)
    one.note(1)
    with pytest.raises(ForeignSession, match=r"another installation's.*Outbox"):
        one.do(lambda tx: tasks.submit(tx, new()), uid="somebody else")
    one.note(2)
    one.commit()
    assert own_rows(store) == [1, 2] and every(store.db) == {}
    here = store.db.tables.installation.name
    store.db.run(lambda tx: tx.execute(sa.text(f"ALTER TABLE {here} RENAME TO away")))
    try:
        stranger = user(way)
        stranger.note(3)
        with pytest.raises(ForeignSession, match=rf"no table {here}.*Outbox"):
            stranger.do(lambda tx: tasks.submit(tx, new()), uid="x")
        stranger.note(4)
        stranger.commit()
    finally:
        one.rollback()
        store.db.run(lambda tx: tx.execute(sa.text(f"ALTER TABLE away RENAME TO {here}")))
    assert own_rows(store) == [1, 2, 3, 4] and every(store.db) == {}


def test_another_kind_of_database_is_foreign(store: Opened, tmp_path: Any) -> None:
    """SQLite for an installation on a server, and the other way round."""
    if store.kind == "sqlite":
        return  # the servers' runs try it
    other = raw_connection(f"sqlite:///{tmp_path / 'x.db'}")
    wrong = User.__new__(User)
    wrong.store, wrong.session = store, other
    with pytest.raises(ForeignSession, match="sqlite database"):
        wrong.do(lambda tx: tasks.submit(tx, new()))
    other.close()


@every_way
def test_rights_that_are_missing_are_told_before_the_database_aborts(store: Opened, user: Users, way: str) -> None:
    """PostgreSQL aborts a transaction at the first error: the rights are asked for first."""
    if store.kind != "postgres":
        return
    role = f"millstream_test_guest_{way}"
    store.db.run(lambda tx: tx.execute(sa.text(f"DROP ROLE IF EXISTS {role}")))
    store.db.run(lambda tx: tx.execute(sa.text(f"CREATE ROLE {role}")))
    try:
        store.db.run(lambda tx: tx.execute(sa.text(f"GRANT SELECT ON {tx.t.installation.name} TO {role}")))
        store.db.run(lambda tx: tx.execute(sa.text(f"GRANT ALL ON {TABLE} TO {role}")))
        one = user(way)
        one.sql(f"SET LOCAL ROLE {role}")
        with pytest.raises(ConfigurationError, match="grant SELECT, INSERT, UPDATE"):
            one.do(lambda tx: tasks.submit(tx, new()), uid=uid_of(store))
        one.note(1)
        one.commit()
        assert own_rows(store) == [1]
    finally:
        store.db.run(lambda tx: tx.execute(sa.text(f"DROP OWNED BY {role}")))
        store.db.run(lambda tx: tx.execute(sa.text(f"DROP ROLE {role}")))


def uid_of(store: Opened) -> str:
    return str(store.db.read(lambda tx: tx.rows(tx.t.installation.select()))[0]["uid"])


@every_way
def test_times_are_right_whatever_the_callers_time_zone(store: Opened, user: Users, way: str) -> None:
    """A session's zone, and an SQLite connection that lacks our clock, change no instant."""
    one = user(way)
    zone = {"postgres": "SET TIME ZONE 'Asia/Tokyo'", "mariadb": "SET time_zone = '+09:00'", "sqlite": "SELECT 1"}[store.kind]
    one.sql(zone)
    instant = store.db.run(lambda tx: tx.now_us()) + 3600 * SECOND
    one.do(lambda tx: tasks.submit_many(tx, [new("now"), new("later", delay_us=60 * SECOND), new("at", due_us=instant)]))
    one.commit()
    rows, now = every(store.db), store.db.run(lambda tx: tx.now_us())
    assert all(0 <= now - r.created_us < 30 * SECOND for r in rows.values())
    assert abs((rows["later"].wake_us or 0) - rows["later"].created_us - 60 * SECOND) < SECOND and rows["at"].wake_us == instant


class At(SystemClock):
    """A clock that stands."""

    def __init__(self, us: int) -> None:
        self._us = us

    def now_us(self) -> int:
        return self._us


@every_way
def test_each_submission_has_the_time_at_which_it_is_made(store: Opened, user: Users, way: str) -> None:
    """One statement is built for many: a caller's time is in none that another uses, nor is ours in a caller's."""
    for turn in range(2):
        submit(store.db, new(f"own {turn}"))
        one = user(way)
        one.do(lambda tx, n=turn: tasks.submit(tx, new(f"theirs {n}")), clock=At(1000 + turn))  # type: ignore[misc]
        one.commit()
    rows = every(store.db)
    if store.kind == "sqlite":
        assert [rows[f"theirs {n}"].created_us for n in range(2)] == [1000, 1001]
    else:
        assert rows["own 0"].created_us < rows["theirs 0"].created_us < rows["own 1"].created_us < rows["theirs 1"].created_us
    assert 1001 < rows["own 0"].created_us < rows["own 1"].created_us


@every_way
def test_a_session_that_commits_each_statement_by_itself_is_refused(store: Opened, way: str) -> None:
    """The task would be there whatever became of the rest."""
    engine = sa.create_engine(store.url, isolation_level="AUTOCOMMIT")
    if way == "driver":
        session: Any = raw_connection(store.url, **({"isolation_level": None} if store.kind == "sqlite" else {"autocommit": True}))
    else:
        session = Session(engine) if way == "session" else engine.connect()
    with pytest.raises(ConfigurationError, match="begin a transaction"):
        caller_of(session)
    if way == "driver":
        session.cursor().execute("BEGIN")
        assert caller_of(session).dialect == store.db.dialect
        session.rollback()
    session.close()
    engine.dispose()


def test_rows_come_as_our_statements_want_them_whatever_the_callers_cursors_give(store: Opened, user: Users) -> None:
    """Dictionaries, row objects, text as bytes: the caller's choice is his."""
    first = new()
    submit(store.db, first)
    raws: list[Any] = []
    if store.kind == "sqlite":
        raws = [raw_connection(store.url), raw_connection(store.url)]
        raws[0].row_factory = sqlite3.Row
        raws[1].text_factory = bytes
    elif store.kind == "postgres":
        raws = [
            raw_connection(store.url, row_factory=f) for f in (psycopg.rows.dict_row, psycopg.rows.namedtuple_row, psycopg.rows.scalar_row)
        ]
    else:
        raws = [raw_connection(store.url, cursorclass=c) for c in (pymysql.cursors.DictCursor, pymysql.cursors.SSCursor)]
    for raw in raws:
        one = User.__new__(User)
        one.store, one.session = store, raw
        assert one.do(lambda tx: tasks.submit(tx, new())) == Receipt(first.id, T.READY, first.digest, replayed=True)
        raw.commit()
        raw.close()


def test_a_scoped_session_is_its_session(store: Opened, user: Users) -> None:
    """As Flask's extension and others hand it out."""
    one = user()
    scoped = scoped_session(sessionmaker(one.engine))
    helper = User.__new__(User)
    helper.store, helper.session = store, scoped
    helper.do(lambda tx: tasks.submit(tx, new()))
    assert every(store.db) == {}
    scoped.commit()
    scoped.remove()
    assert set(every(store.db)) == {"k"}


@pytest.mark.parametrize("given", [object(), "postgresql://x", 7], ids=["object", "url", "number"])
def test_what_is_no_session_is_refused(given: Any) -> None:
    """With the kinds that are taken."""
    with pytest.raises(ConfigurationError, match=r"SQLAlchemy Session or Connection.*psycopg"):
        caller_of(given)


def test_a_session_without_a_database_of_its_own_is_told_what_to_pass() -> None:
    """One that is bound by its classes."""
    with pytest.raises(ConfigurationError, match="pass the connection"):
        caller_of(Session())


@every_way
def test_a_transaction_that_has_failed_before_is_not_blamed_on_another(store: Opened, user: Users, way: str) -> None:
    """PostgreSQL takes no statement after an error of the caller's: he is told so, not to run it again."""
    if store.kind != "postgres":
        return
    one = user(way)
    with pytest.raises((sa.exc.DBAPIError, psycopg.Error)):
        one.sql("SELECT * FROM there_is_no_such_table")
    with pytest.raises(StoreError, match="aborted") as caught:
        one.do(lambda tx: tasks.submit(tx, new()))
    assert not isinstance(caught.value, RetryTransaction)
    one.rollback()


@every_way
def test_a_deadlock_of_callers_is_the_typed_error_for_one_of_them(store: Opened, user: Users, way: str) -> None:
    """Two callers who submit the same keys in opposite orders: one goes through, the other is told to run it again, and then does."""
    if store.kind == "sqlite":
        return  # one writer
    at, tries = threading.Barrier(2), (list[int](), list[int]())

    def work(one: User, keys: tuple[str, str], mine: list[int]) -> list[Receipt]:
        first = one.do(lambda tx: tasks.submit(tx, new(keys[0])))
        if len(mine) == 1:
            with contextlib.suppress(threading.BrokenBarrierError):  # MariaDB may see a circle in the gaps of the first two already
                at.wait(2)
        return [first, one.do(lambda tx: tasks.submit(tx, new(keys[1])))]

    users = user(way, "READ COMMITTED"), user(way, "READ COMMITTED")
    found = together(
        lambda: users[0].whole(lambda: work(users[0], ("a", "b"), tries[0]), tries[0]),
        lambda: users[1].whole(lambda: work(users[1], ("b", "a"), tries[1]), tries[1]),
    )
    assert all(isinstance(f, list) for f in found), found
    assert len(tries[0]) + len(tries[1]) > 2
    assert set(every(store.db)) == {"a", "b"}


@pytest.mark.parametrize("level", LEVELS)
def test_celery_t40_many_callers_at_once_with_one_key_are_one_task(store: Opened, user: Users, level: str) -> None:
    """In transactions of their own, all by different ways; each with a row of its own, all committed."""
    users = [user(WAYS[i % 3], level) for i in range(6)]

    def work(i: int) -> Receipt:
        users[i].note(i)
        return users[i].do(lambda tx: tasks.submit(tx, new()))

    found = together(*[lambda i=i: users[i].whole(lambda: work(i), []) for i in range(6)])
    assert all(isinstance(f, Receipt) for f in found), found
    assert sum(not f.replayed for f in found if isinstance(f, Receipt)) == 1
    assert len(every(store.db)) == 1 and own_rows(store) == list(range(6))
