"""Joining a caller's transaction: whose it is, how long a statement of ours may wait in it, what its errors mean, and when it is committed.

Used by the app's ``Tasks`` for ``session=``. A session is an SQLAlchemy Session or Connection, a DB-API connection, or a Django connection. Whether the database behind it is this
installation's is read through it, from the catalogue first: an SQL error would abort the caller's transaction. What must never happen here: a commit or rollback of
a transaction that is not ours; a wait without bound; a setting of the caller's session that is not put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, scoped_session

from ..errors import ConfigurationError, ForeignSession, RetryTransaction
from ..ports import Clock
from . import commits
from .database import Retry, Transaction, meaning
from .drivers import KNOWN, DriverConnection, Remembered, driver_of, in_transaction
from .tables import Tables

_OURS = Remembered()
_NOW = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    # Not SYSDATE(6) as in our own sessions: it follows the caller's time zone.
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
}


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller's session must lead to. ``known_by``: the table that must be there; ``written``: the one that is written; ``uid``: what ``known_by`` must
    hold (empty: anything), ``dialect``: which kind of database it is (empty: any). ``missing``: the error when it is another place, from why."""

    tables: Tables
    known_by: sa.Table
    written: sa.Table
    missing: Callable[[str], ConfigurationError]
    uid: str = ""
    dialect: str = ""


def installation_home(tables_: Tables, dialect: str, uid: str) -> Home:
    """The installation's own database."""
    return Home(tables=tables_, known_by=tables_.installation, written=tables_.task, missing=_foreign, uid=uid, dialect=dialect)


class CallersTransaction(Transaction):
    """The caller's transaction. On SQLite the time is a literal: its clock is a function that a caller's connection does not have."""

    own_clock = True

    def __init__(self, connection: Connection, tables_: Tables, dialect: str, clock: Clock) -> None:
        super().__init__(connection, tables_, dialect)
        self._clock = clock

    def now(self) -> sa.ColumnElement[int]:
        if self.dialect == "sqlite":
            return sa.literal(self._clock.now_us(), sa.BigInteger())
        return sa.literal_column(_NOW[self.dialect], sa.BigInteger())

    def now_us(self) -> int:
        if self.dialect == "sqlite":
            return self._clock.now_us()
        return int(self._connection.exec_driver_sql(f"SELECT {_NOW[self.dialect]}").scalar_one())


class Caller(Protocol):
    """One way into a caller's transaction."""

    connection: Connection
    """Executes our statements in it."""
    raw: Any
    """The driver's connection below."""
    dialect: str

    def after_commit(self, act: Callable[[], None]) -> None:
        """Have it done after the outermost commit, if anybody tells when that is."""
        ...

    def failed(self) -> None:
        """A statement failed: whoever manages the transaction is told, so that it is not committed."""
        ...


class SqlAlchemyCaller:
    """A Session or Connection of SQLAlchemy's. One that has not begun is begun by its first statement, as always."""

    def __init__(self, session: Session | None, connection: Connection) -> None:
        self.connection = connection
        self._session = session
        self.raw = connection.connection.dbapi_connection
        name = connection.dialect.name
        self.dialect = "mysql" if name == "mariadb" else name
        if not connection.in_transaction():
            connection.begin()

    def after_commit(self, act: Callable[[], None]) -> None:
        commits.after_commit(self.connection, self._session, act)

    def failed(self) -> None:
        """Nothing to tell: the database itself refuses what follows, or has undone the statement alone."""


class DriverCaller:
    """A DB-API connection."""

    def __init__(self, raw: Any) -> None:
        driver = DriverConnection(raw)
        self.connection = cast(Connection, driver)  # it has the methods that Transaction calls
        self.raw = raw
        self.dialect = driver.dialect

    def after_commit(self, act: Callable[[], None]) -> None:
        """Nothing can be asked to tell: the caller's receipt has ``hint()``."""

    def failed(self) -> None:
        """Nothing to tell anybody: the caller gets the error."""


class DjangoCaller(DriverCaller):
    """``django.db.connection`` or one of ``connections``, known by its methods: Django is not imported here."""

    def __init__(self, wrapper: Any) -> None:
        wrapper.ensure_connection()
        super().__init__(wrapper.connection)
        self._wrapper = wrapper

    def after_commit(self, act: Callable[[], None]) -> None:
        if self._wrapper.in_atomic_block:  # begun by hand: Django keeps no callbacks
            self._wrapper.on_commit(lambda: commits.acted(act))

    def failed(self) -> None:
        if self._wrapper.in_atomic_block:
            self._wrapper.needs_rollback = True


def caller_of(session: Any) -> Caller:
    """Raises ConfigurationError for what is no session this build knows, or one without a transaction."""
    if isinstance(session, scoped_session):
        session = session()
    found: Caller
    if isinstance(session, Session):
        try:
            found = SqlAlchemyCaller(session, session.connection())
        except sa.exc.UnboundExecutionError as exc:
            raise ConfigurationError(
                "the session has no database of its own: pass the connection, session.connection(bind_arguments=…)"
            ) from exc
    elif isinstance(session, Connection):
        found = SqlAlchemyCaller(None, session)
    elif hasattr(session, "ensure_connection") and hasattr(session, "on_commit"):
        found = DjangoCaller(session)
    elif hasattr(session, "sync_session") or hasattr(session, "sync_connection"):
        raise ConfigurationError("an asynchronous session: write await session.run_sync(lambda s: tasks.submit(…, session=s))")
    elif driver_of(session) and not type(session).__name__.startswith("Async"):
        found = DriverCaller(session)
    else:
        raise ConfigurationError(
            f"session is a {type(session).__name__}: pass an SQLAlchemy Session or Connection, django.db.connection, or a connection of {KNOWN}"
        )
    if not in_transaction(found.raw):
        raise ConfigurationError("the session commits each statement by itself (autocommit): begin a transaction, or leave session away")
    return found


@contextmanager
def joined(caller: Caller, home: Home, wait_ms: int, clock: Clock) -> Iterator[Transaction]:
    """The caller's transaction for statements of ours, each of which waits for another at most ``wait_ms``.

    Raises ForeignSession (before anything was written), RetryTransaction, StoreUnavailable, StoreError.
    """
    dialect = caller.dialect
    if home.dialect not in ("", dialect):
        raise home.missing(f"it is a {dialect} database, the installation's is {home.dialect}")
    tx = CallersTransaction(caller.connection, home.tables, dialect, clock)
    try:
        restore = _LOOKS[dialect](tx, caller.raw, home, wait_ms)
        try:
            yield tx
        except sa.exc.DBAPIError:
            if dialect != "postgresql":  # there the setting goes with the transaction, which takes no further statement
                _put_back(restore)
            raise
        except BaseException:
            _put_back(restore)
            raise
        restore()
    except sa.exc.DBAPIError as exc:
        caller.failed()
        found = meaning(exc, dialect, "behind the session")
        if isinstance(found, Retry):
            raise RetryTransaction(
                f"the database could not carry on with the caller's transaction ({found}): roll it back and run the whole of it again"
            ) from exc
        raise found from exc


def _put_back(restore: Callable[[], None]) -> None:
    try:
        restore()
    except sa.exc.DBAPIError:
        return  # the error that led here says more


def _foreign(why: str) -> ForeignSession:
    return ForeignSession(
        f"the session's database is not this installation's: {why}. Submit without session=, or through an Outbox, which keeps the request in the session's own database"
    )


def _nothing() -> None:
    """Nothing was changed, nothing is put back."""


def _look_postgresql(tx: CallersTransaction, raw: Any, home: Home, wait_ms: int) -> Callable[[], None]:
    """One statement tells which table our name is here and bounds the wait, unless the caller has. The table's rights and content are read once for a connection."""
    bound = f"CASE WHEN current_setting('lock_timeout') = '0' THEN set_config('lock_timeout', '{int(wait_ms)}', true) END AS bound"
    look = f"SELECT CAST(CAST(to_regclass('{home.known_by.name}') AS oid) AS bigint) AS ours, {bound}"
    row = tx.row(sa.text(look))
    assert row is not None
    restore = _nothing if row["bound"] is None else lambda: _set_postgresql(tx)
    fact = (row["ours"], home.known_by.name, home.uid)
    if not _OURS.has(raw, fact):
        try:
            if row["ours"] is None:
                raise home.missing(f"there is no table {home.known_by.name}")
            if not _allowed(tx, home):
                raise ConfigurationError(
                    f"the session's user may not read {home.known_by.name} or write {home.written.name}: grant SELECT, INSERT, UPDATE"
                )
            _compare(tx, home)
        except ConfigurationError:
            _put_back(restore)
            raise
        _OURS.keep(raw, fact)
    return restore


def _allowed(tx: CallersTransaction, home: Home) -> bool:
    """Whether what follows will not be refused, which would abort the transaction."""
    wanted = ((home.known_by, "SELECT"), (home.written, "SELECT"), (home.written, "INSERT"), (home.written, "UPDATE"))
    rights = " AND ".join(f"COALESCE(has_table_privilege(to_regclass('{t.name}'), '{right}'), false)" for t, right in wanted)
    row = tx.row(sa.text(f"SELECT {rights} AS allowed"))
    return row is not None and bool(row["allowed"])


def _set_postgresql(tx: CallersTransaction) -> None:
    tx.execute(sa.text("SELECT set_config('lock_timeout', '0', true)"))


def _look_mysql(tx: CallersTransaction, raw: Any, home: Home, wait_ms: int) -> Callable[[], None]:
    row = tx.row(sa.text("SELECT DATABASE() AS at, @@innodb_lock_wait_timeout AS wait"))
    assert row is not None
    fact = (row["at"], home.known_by.name, home.uid)
    if not _OURS.has(raw, fact):
        there = "SELECT COUNT(*) AS n FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = :name"
        found = tx.row(sa.text(there), name=home.known_by.name)
        if found is None or not found["n"]:
            raise home.missing(f"there is no table {home.known_by.name}")
        _compare(tx, home)
        _OURS.keep(raw, fact)
    seconds, theirs = max(1, wait_ms // 1000), int(row["wait"])
    if theirs <= seconds:
        return _nothing
    tx.execute(sa.text(f"SET SESSION innodb_lock_wait_timeout = {seconds}"))
    return lambda: _set_mysql(tx, theirs)


def _set_mysql(tx: CallersTransaction, seconds: int) -> None:
    tx.execute(sa.text(f"SET SESSION innodb_lock_wait_timeout = {seconds}"))


def _look_sqlite(tx: CallersTransaction, raw: Any, home: Home, wait_ms: int) -> Callable[[], None]:
    """Begins with a write that changes nothing: a transaction that has read may not wait for another's write, it would be refused at once."""
    waits = tx.rows(sa.text("PRAGMA busy_timeout"))
    theirs = int(next(iter(waits[0].values()))) if waits else 0
    restore = _nothing if theirs <= wait_ms else lambda: _set_sqlite(tx, theirs)
    if theirs > wait_ms:
        _set_sqlite(tx, wait_ms)
    try:
        tx.execute(sa.text(f"UPDATE {home.known_by.name} SET id = id WHERE id = '-1'"))
        _compare(tx, home)
    except sa.exc.DBAPIError as exc:
        _put_back(restore)
        if "no such table" in str(exc.orig):
            raise home.missing(f"there is no table {home.known_by.name}") from None
        raise
    except ConfigurationError:
        _put_back(restore)
        raise
    return restore


def _set_sqlite(tx: CallersTransaction, wait_ms: int) -> None:
    tx.rows(sa.text(f"PRAGMA busy_timeout = {int(wait_ms)}"))


def _compare(tx: CallersTransaction, home: Home) -> None:
    if home.uid:
        row = tx.row(sa.select(home.known_by.c.uid))
        if row is None or row["uid"] != home.uid:
            raise home.missing("it is another installation's of the same name")


_LOOKS = {"postgresql": _look_postgresql, "mysql": _look_mysql, "sqlite": _look_sqlite}
