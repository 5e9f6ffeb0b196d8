"""The one door to a target database: ``connect(url)`` gives a session that is bounded, durable and speaks in Millstream's errors.

Called by SQL sinks, sources and snapshot storage, one connection a thread. Every session runs READ COMMITTED, gives up a lock and loses
an idle transaction within ``lock_timeout``, so that a stopped process holds no row for longer. What must never happen here: a COMMIT
whose answer was lost being reported as done or as not done (it is :class:`CommitUnknown`), or a password in an error.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from millstream_schema.connectors import LOCK_TIMEOUT
from millstream_schema.errors import CommitUnknown, ConfigurationError, MillstreamError
from millstream_schema.reasons import one_line
from millstream_schema.target.dialects import DIALECTS, Dialect
from millstream_schema.target.failures import Failure, TargetBusy, TargetRefused, TargetUnavailable, classify
from millstream_schema.target.urls import TargetUrl, parse_url

_CONNECT_SECONDS: Final = 5
_ANSWER_SECONDS: Final = 30
_BEGIN: Final = {
    "sqlite": "BEGIN IMMEDIATE",
    "postgresql": "BEGIN ISOLATION LEVEL READ COMMITTED",
    "mysql": "START TRANSACTION",
}
Rows = list[tuple[Any, ...]]


class Connect(Protocol):
    """How a sink opens a connection: :func:`connect`, or a test's own."""

    def __call__(self, url: str, *, durable: bool, lock_timeout: float) -> TargetConnection: ...


class Transaction:
    """One open transaction. Valid inside the ``with`` block of :meth:`TargetConnection.transaction` only."""

    def __init__(self, connection: TargetConnection) -> None:
        self._connection = connection
        self.dialect = connection.dialect

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Execute one statement written with ``?``; the number of rows it touched."""
        return self._connection.send(statement, parameters)[0]

    def fetch(self, statement: str, parameters: Sequence[Any] = ()) -> Rows:
        """All rows of one SELECT."""
        return self._connection.send(statement, parameters)[1]

    def insert(self, head: str, columns: int, tail: str, rows: Sequence[Sequence[Any]]) -> None:
        """Insert ``rows`` of ``columns`` values: ``head`` ends before VALUES, ``tail`` follows it. As fast as the driver allows."""
        rows = self.dialect.bindable(rows)
        if not self.dialect.multi_row:
            self._connection.send_many(f"{head} VALUES {self.dialect.values(columns)} {tail}", rows)
            return
        step = max(1, min(500, self.dialect.max_parameters // columns))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            flat = [value for row in part for value in row]
            self._connection.send(f"{head} VALUES {self.dialect.values(columns, len(part))} {tail}", flat)


class TargetConnection:
    """A session that opens itself when needed and again after it was lost. Used by one thread at a time."""

    def __init__(self, url: TargetUrl, open_session: Callable[[], Any], errors: tuple[type[BaseException], ...]) -> None:
        self.url = url
        self.dialect: Dialect = DIALECTS[url.dialect]
        self._open_session = open_session
        self._errors = errors
        self._session: Any = None

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Run the block in one transaction: committed at its end, rolled back when it raises.

        Raises :class:`TargetUnavailable` (nothing was done), :class:`TargetRefused`, or :class:`CommitUnknown` when COMMIT was sent and
        its answer lost: execute the same guarded statements again.
        """
        self._begin()
        try:
            yield Transaction(self)
        except BaseException:
            self._rollback()
            raise
        self._commit()

    def ensure_tables(self, tables: Mapping[str, str]) -> None:
        """Create the tables that are missing: name to CREATE … IF NOT EXISTS. Losing the race against another creator is success.

        Looking first spares a start DDL, and the locks it takes, whenever the tables are there.
        """
        try:
            with self.transaction() as transaction:
                for name in tables:
                    transaction.fetch(f"SELECT 1 FROM {self.dialect.table(name)} WHERE 1 = 0")
            return
        except TargetRefused:
            pass  # one is missing
        for statement in tables.values():
            for attempt in range(3):
                try:
                    with self.transaction() as transaction:
                        transaction.execute(statement)
                    break
                except (TargetRefused, TargetBusy):
                    # PostgreSQL answers a lost race with a unique violation in its own catalogue; the table is there by the next try.
                    if attempt == 2:
                        raise

    def close(self) -> None:
        """Close the session; an open transaction is rolled back by the database."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(*self._errors):
                session.close()

    def send(self, statement: str, parameters: Sequence[Any] = ()) -> tuple[int, Rows]:
        """Send one statement: rows touched and rows read. All statements but bulk ones pass here."""
        session = self._live()
        try:
            cursor = session.cursor()
            try:
                if parameters:
                    cursor.execute(self.dialect.sql(statement), parameters)
                else:
                    cursor.execute(self.dialect.sql(statement))
                rows = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
                return cursor.rowcount, rows
            finally:
                cursor.close()
        except self._errors as error:
            self._fail(error)

    def send_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Send one statement for many rows, for drivers that are fast at it (SQLite)."""
        session = self._live()
        try:
            cursor = session.cursor()
            try:
                cursor.executemany(self.dialect.sql(statement), rows)
            finally:
                cursor.close()
        except self._errors as error:
            self._fail(error)

    def _live(self) -> Any:
        if self._session is None:
            raise TargetUnavailable(f"{self.url.redacted()}: the connection was lost within the transaction; begin it again")
        return self._session

    def _begin(self) -> None:
        fresh = self._session is None
        if fresh:
            self._open()
        try:
            self.send(_BEGIN[self.dialect.name])
        except TargetBusy:
            raise
        except TargetUnavailable:
            if fresh:
                raise
            self._open()  # the session idled out or the database restarted between two transactions: nothing was done
            self.send(_BEGIN[self.dialect.name])

    def _open(self) -> None:
        self.close()
        try:
            self._session = self._open_session()
        except self._errors as error:
            self._fail(error)

    def _commit(self) -> None:
        try:
            self.send("COMMIT")
        except TargetBusy:
            self._rollback()
            raise
        except TargetUnavailable as error:
            self.close()
            raise CommitUnknown(f"{error}: the answer to COMMIT was lost; execute the same guarded statements again") from error
        except TargetRefused:
            self._rollback()
            raise

    def _rollback(self) -> None:
        """Undo. If that fails the session goes, and the database undoes it."""
        if self._session is None:
            return
        try:
            self.send("ROLLBACK")
        except MillstreamError:
            # SQLite rolls back by itself on a full disk and then refuses a second ROLLBACK: the new session starts clean either way.
            self.close()

    def _fail(self, error: BaseException) -> NoReturn:
        raw = str(error).strip() or type(error).__name__
        text = self.url.scrub(raw)
        cause = error if text == raw else None
        text = one_line(text)
        message = f"{self.url.redacted()}: {text}"
        failure = classify(self.dialect.name, error)
        if failure is Failure.BUSY:
            raise TargetBusy(message) from cause
        if failure is Failure.REFUSED:
            raise TargetRefused(message) from cause
        self.close()
        raise TargetUnavailable(message) from cause


def connect(
    url: str,
    *,
    durable: bool = True,
    lock_timeout: float = LOCK_TIMEOUT,
    connection: type[TargetConnection] = TargetConnection,
) -> TargetConnection:
    """A connection to ``url``; nothing is opened before its first transaction.

    ``lock_timeout`` (seconds) bounds every lock wait and idle transaction and must be below a third of the job's lease. ``durable`` sets
    (SQLite, PostgreSQL) or checks (MariaDB, MySQL) that a commit survives a power cut. Raises :class:`ConfigurationError` for a URL or
    driver that is missing; the first transaction raises it for a database that does not commit durably.
    """
    if not 0.05 <= lock_timeout <= 3600:
        raise ConfigurationError(f"lock_timeout is {lock_timeout} s; give 0.05 to 3600 s, below a third of the job's lease")
    target = parse_url(url)
    errors: tuple[type[BaseException], ...]
    if target.dialect == "sqlite":
        open_session, errors = _sqlite(target, durable, lock_timeout)
    elif target.dialect == "postgresql":
        open_session, errors = _postgresql(target, durable, lock_timeout)
    else:
        open_session, errors = _mysql(target, durable, lock_timeout)
    return connection(target, open_session, (*errors, OSError, OverflowError, UnicodeError))


Opened = tuple[Callable[[], Any], tuple[type[BaseException], ...]]


def _sqlite(target: TargetUrl, durable: bool, lock_timeout: float) -> Opened:
    def open_session() -> sqlite3.Connection:
        directory = Path(target.database).absolute().parent
        if not directory.is_dir():
            raise ConfigurationError(f"{target.redacted()}: there is no directory {directory}; create it")
        session = sqlite3.connect(target.database, timeout=lock_timeout, isolation_level=None, check_same_thread=False)
        try:
            _write_ahead(session, lock_timeout, target)
            session.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        except BaseException:
            session.close()
            raise
        return session

    return open_session, (sqlite3.Error,)


def _write_ahead(session: sqlite3.Connection, lock_timeout: float, target: TargetUrl) -> None:
    """Switch the file to WAL.

    SQLite's busy handler does not cover this switch, so two that open a new file at once wait here.
    """
    deadline = time.monotonic() + lock_timeout
    while True:
        try:
            (mode,) = session.execute("PRAGMA journal_mode=WAL").fetchone()
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.01)
            continue
        if mode != "wal":
            raise ConfigurationError(f"{target.redacted()}: the file's journal stays {mode!r}; put it on a file system that supports WAL")
        return


def _postgresql(target: TargetUrl, durable: bool, lock_timeout: float) -> Opened:
    try:
        import psycopg
    except ImportError as error:
        raise ConfigurationError("postgresql:// needs a driver: pip install 'millstream[postgres]'") from error
    millis = math.ceil(lock_timeout * 1000)
    settings = f"SET lock_timeout = {millis}; SET idle_in_transaction_session_timeout = {millis}; SET client_encoding = 'UTF8'"
    if durable:
        settings += "; SET synchronous_commit = on"
    given: dict[str, Any] = {
        "connect_timeout": _CONNECT_SECONDS,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": _ANSWER_SECONDS * 1000,
        "application_name": "millstream",
        "host": target.host,
        "port": target.port,
        "user": target.user,
        "password": target.password,
        "dbname": target.database,
        **dict(target.options),
    }

    def open_session() -> Any:
        session = psycopg.connect(autocommit=True, **{name: value for name, value in given.items() if value is not None})
        try:
            session.execute(settings.encode())
        except BaseException:
            session.close()
            raise
        return session

    return open_session, (psycopg.Error,)


def _mysql(target: TargetUrl, durable: bool, lock_timeout: float) -> Opened:
    try:
        import pymysql
    except ImportError as error:
        raise ConfigurationError("mysql:// and mariadb:// need a driver: pip install 'millstream[mysql]'") from error
    options: dict[str, Any] = dict(target.options)
    options.setdefault("charset", "utf8mb4")

    def open_session() -> Any:
        session = pymysql.connect(
            host=target.host or "localhost",
            port=target.port or 3306,
            user=target.user,
            password=target.password or "",
            database=target.database,
            autocommit=True,
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_ANSWER_SECONDS,
            write_timeout=_ANSWER_SECONDS,
            **options,
        )
        try:
            with session.cursor() as cursor:
                _mysql_session(cursor, target, durable, max(1, int(lock_timeout)))  # whole seconds only; 0 would be no limit
        except BaseException:
            session.close()
            raise
        return session

    return open_session, (pymysql.MySQLError,)


def _mysql_session(cursor: Any, target: TargetUrl, durable: bool, seconds: int) -> None:
    cursor.execute("SELECT VERSION(), @@innodb_flush_log_at_trx_commit")
    version, flush = cursor.fetchone()
    if durable and flush != 1:
        raise ConfigurationError(
            f"{target.redacted()}: innodb_flush_log_at_trx_commit is {flush}, so a power cut can undo commits; "
            "STRICT_EXACTLY_ONCE is refused. Set it to 1 on the server"
        )
    # MySQL knows no limit for an idle transaction; its limit for any idle session is the nearest, and the door opens the session again.
    idle = "idle_transaction_timeout" if "mariadb" in version.lower() else "wait_timeout"
    cursor.execute(f"SET SESSION {idle} = {seconds}, innodb_lock_wait_timeout = {seconds}, lock_wait_timeout = {seconds}")
    cursor.execute("SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION'")
    cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
