"""Callers with transactions of their own, as users open them: an SQLAlchemy Session, a Connection, a driver's connection; at an isolation level."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
import pymysql
import sqlalchemy as sa
from sqlalchemy.orm import Session
from tests.contract.store.stores import Opened

from millstream_schema.errors import RetryTransaction
from millstream_schema.ports import Clock, SystemClock
from millstream_schema.store.callers import caller_of, installation_home, joined
from millstream_schema.store.database import Transaction
from millstream_schema.store.migrate import installation_id

T = TypeVar("T")
WAYS = ["session", "connection", "driver"]
LEVELS = ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
TABLE = "callers_own"


def own_table(store: Opened) -> None:
    """A table of the user's beside ours."""
    engine = sa.create_engine(store.url)
    with engine.begin() as c:
        c.exec_driver_sql(f"CREATE TABLE IF NOT EXISTS {TABLE} (id INTEGER PRIMARY KEY, note VARCHAR(50))")
        c.exec_driver_sql(f"DELETE FROM {TABLE}")
    engine.dispose()


def own_rows(store: Opened) -> list[int]:
    """What the user has committed."""
    engine = sa.create_engine(store.url)
    with engine.begin() as c:
        found = [int(r[0]) for r in c.exec_driver_sql(f"SELECT id FROM {TABLE} ORDER BY id")]
    engine.dispose()
    return found


def raw_connection(url: str, **options: Any) -> Any:
    """A connection as a user of the driver opens it."""
    at = sa.make_url(url)
    if at.get_backend_name() == "sqlite":
        return sqlite3.connect(str(at.database), check_same_thread=False, **{"timeout": 10, **options})
    if at.get_backend_name() == "postgresql":
        return psycopg.connect(at.set(drivername="postgresql").render_as_string(hide_password=False), **options)
    return pymysql.connect(
        host=at.host or "localhost", port=at.port or 3306, user=at.username, password=at.password or "", database=at.database, **options
    )


class User:
    """One user's open transaction in the store's database, on a connection of his own."""

    def __init__(self, store: Opened, way: str, level: str = "") -> None:
        self.store = store
        self.way = way
        self.level = "" if store.kind == "sqlite" else level
        self.engine = sa.create_engine(store.url, **({"isolation_level": self.level} if self.level else {}))
        self._opened: Any = None
        self.session: Any = None
        self.begin()

    def begin(self) -> None:
        """The next transaction."""
        if self.session is None:
            if self.way == "session":
                self.session = Session(self.engine)
            elif self.way == "connection":
                self.session = self.engine.connect()
            else:
                self.session = raw_connection(self.store.url)
                if self.level and self.store.kind == "mariadb":
                    self.sql(f"SET SESSION TRANSACTION ISOLATION LEVEL {self.level}")
                    self.session.rollback()
        if self.way == "driver" and self.level and self.store.kind == "postgres":
            self.sql(f"SET TRANSACTION ISOLATION LEVEL {self.level}")

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        """A statement of the user's own."""
        if self.way == "driver":
            cursor = self.session.cursor()
            cursor.execute(text)
            rows = [tuple(r) for r in cursor.fetchall()] if cursor.description else []
            cursor.close()
            return rows
        result = self.session.execute(sa.text(text))
        return [tuple(r) for r in result] if result.returns_rows else []

    def note(self, number: int) -> None:
        self.sql(f"INSERT INTO {TABLE} (id, note) VALUES ({number}, 'mine')")

    def look(self) -> None:
        """Takes the snapshot, where there is one."""
        self.sql(f"SELECT COUNT(*) FROM {TABLE}")

    def do(self, work: Callable[[Transaction], T], *, wait_ms: int = 8000, uid: str = "", clock: Clock | None = None) -> T:
        """Statements of ours in the user's transaction."""
        db = self.store.db
        own = uid or db.read(installation_id)
        with joined(caller_of(self.session), installation_home(db.tables, db.dialect, own), wait_ms, clock or SystemClock()) as tx:
            return work(tx)

    def whole(self, work: Callable[[], T], tries: list[int]) -> T:
        """The user's whole transaction, again as long as that is what he is told; committed."""
        while True:
            tries.append(1)
            try:
                found = work()
            except RetryTransaction:
                assert len(tries) < 10
                self.rollback()
                self.begin()
                continue
            self.commit()
            return found

    def commit(self) -> None:
        self.session.commit()

    def rollback(self) -> None:
        self.session.rollback()

    def wait_setting(self) -> Any:
        """How long the user's statements wait for locks."""
        text = {"sqlite": "PRAGMA busy_timeout", "postgres": "SHOW lock_timeout", "mariadb": "SELECT @@innodb_lock_wait_timeout"}
        return self.sql(text[self.store.kind])[0][0]

    def close(self) -> None:
        self.session.close()
        self.engine.dispose()
