"""Acts wait for the outermost commit of a caller's SQLAlchemy transaction, whichever way it is begun, nested and ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session
from tests.contract.store.stores import Opened

from millstream_schema.store.commits import after_commit


@pytest.fixture
def engine(store: Opened) -> Iterator[Engine]:
    """The user's."""
    engine = sa.create_engine(store.url)
    with engine.begin() as c:
        c.exec_driver_sql("CREATE TABLE IF NOT EXISTS callers_rows (id INTEGER PRIMARY KEY)")
        c.exec_driver_sql("DELETE FROM callers_rows")
    yield engine
    engine.dispose()


class Seen:
    """What was acted, and how many rows another connection saw at that moment."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.acts: list[tuple[str, int]] = []
        self._n = 0

    def act(self, name: str) -> None:
        with self.engine.connect() as other:
            self.acts.append((name, int(other.exec_driver_sql("SELECT COUNT(*) FROM callers_rows").scalar_one())))

    def on(self, session: Session | Connection, name: str) -> None:
        """A row of the user's, and an act that waits for it."""
        connection = session.connection() if isinstance(session, Session) else session
        self._n += 1
        connection.exec_driver_sql(f"INSERT INTO callers_rows (id) VALUES ({self._n})")
        after_commit(connection, session if isinstance(session, Session) else None, lambda: self.act(name))


@pytest.fixture
def seen(engine: Engine) -> Seen:
    return Seen(engine)


def test_a_session_that_commits(engine: Engine, seen: Seen) -> None:
    """Once for each transaction, when others can see the rows; the next transaction's are its own."""
    with Session(engine) as session:
        seen.on(session, "a")
        seen.on(session, "b")
        assert seen.acts == []
        session.commit()
        assert seen.acts == [("a", 2), ("b", 2)]
        seen.on(session, "c")
        session.rollback()
        seen.on(session, "d")
        session.commit()
        session.commit()
    assert seen.acts == [("a", 2), ("b", 2), ("d", 3)]


def test_a_session_that_is_closed_without_a_commit(engine: Engine, seen: Seen) -> None:
    """Nothing was submitted, nobody is woken."""
    with Session(engine) as session:
        seen.on(session, "a")
    with Session(engine) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
    assert seen.acts == []


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "undone"])
def test_savepoints_of_a_session(engine: Engine, seen: Seen, kept: bool) -> None:
    """The end of one is no commit; what was done in one that is undone is forgotten, what was done around it is not. A variable that holds it changes nothing."""
    with Session(engine) as session, session.begin():
        seen.on(session, "before")
        nested = session.begin_nested()
        seen.on(session, "in it")
        with session.begin_nested():
            seen.on(session, "deeper")
        (nested.commit if kept else nested.rollback)()
        assert seen.acts == []
        seen.on(session, "after")
    assert [a for a, _ in seen.acts] == (["before", "in it", "deeper", "after"] if kept else ["before", "after"])
    assert {rows for _, rows in seen.acts} == {4 if kept else 2}


def test_a_connection_whichever_way_it_ends(engine: Engine, seen: Seen) -> None:
    """Commits of its own, blocks, a transaction object that is kept: then with the next transaction at the latest."""
    with engine.begin() as c:
        seen.on(c, "block of the engine")
    with engine.connect() as c:
        seen.on(c, "as you go")
        c.commit()
        assert len(seen.acts) == 2
        with c.begin():
            seen.on(c, "block")
        assert len(seen.acts) == 3
        seen.on(c, "undone")
        c.rollback()
        transaction = c.begin()
        with c.begin_nested():
            seen.on(c, "savepoint")
        undone = c.begin_nested()
        seen.on(c, "undone savepoint")
        undone.rollback()
        transaction.commit()
        with c.begin():
            assert [a for a, _ in seen.acts] == ["block of the engine", "as you go", "block", "savepoint"]


def test_a_session_inside_a_connections_transaction(engine: Engine, seen: Seen) -> None:
    """As test suites do it: the session's commit is none, the connection's is."""
    with engine.connect() as c:
        c.begin()
        with Session(c, join_transaction_mode="create_savepoint") as session:
            seen.on(session, "a")
            session.commit()
        assert seen.acts == []
        c.commit()
        assert seen.acts == [("a", 1)]
        c.begin()
        with Session(c, join_transaction_mode="create_savepoint") as session:
            seen.on(session, "b")
            session.commit()
        c.rollback()
    assert seen.acts == [("a", 1)]


def test_an_act_that_fails_does_not_fail_the_commit(engine: Engine, seen: Seen) -> None:
    """The rows are there, and the other acts are done."""

    def broken() -> None:
        raise RuntimeError("no broker")

    with Session(engine) as session:
        after_commit(session.connection(), session, broken)
        seen.on(session, "b")
        session.commit()
    assert seen.acts == [("b", 1)]


def test_many_transactions_of_one_session_leave_nothing_behind(engine: Engine, seen: Seen) -> None:
    """One listener, not one for each."""
    with Session(engine) as session:
        for i in range(50):
            seen.on(session, f"{i}")
            session.commit()
        assert len(seen.acts) == 50
        assert len(session.dispatch.after_commit) == 1
