"""Transactions that a handler's code runs in: on connections that may be held for long, ended by statements of ours that may not.

Opened by ``ctx.transaction()``. Everything the handler does is its own until :meth:`HandlerTransaction.commit` executes the last, fenced statement and commits both together.
Never here: a COMMIT that is not ours; a row of ours held by a process that stands still for longer than the database's timeout; SQLite's one write lock held for long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.orm import Session

from ..durable.requests import encode_result
from ..errors import StoreUnavailable, TransactionRefused, TransactionTooLong
from .database import LAZY, Database, Retry, Transaction, quietly
from .statements import beginnings, ends_transaction

SQLITE_SECONDS = 2.0
"""How long a transaction may hold SQLite's write lock: leases of all workers are renewed through it."""
_TAKE = "BEGIN IMMEDIATE"
_READS = ("SELECT", "PRAGMA", "EXPLAIN", "VALUES")
_COMMITS_BY_ITSELF = (
    "CREATE",
    "ALTER",
    "DROP",
    "TRUNCATE",
    "RENAME",
    "LOCK",
    "UNLOCK",
    "GRANT",
    "REVOKE",
    "ANALYZE",
    "OPTIMIZE",
    "REPAIR",
    "FLUSH",
)


class HeldDatabase(Database):
    """A database on connections that handlers hold: no limit on how long they think, none of our own statements' planner settings."""

    def options(self, url: sa.URL) -> dict[str, Any]:
        options = super().options(url)
        if self.dialect == "postgresql":
            options["connect_args"]["options"] = "-c idle_in_transaction_session_timeout=0 -c synchronous_commit=on"
        elif self.dialect == "mysql":
            options["connect_args"] |= {"read_timeout": 600, "write_timeout": 600}
        return options | ({} if "poolclass" in options else {"max_overflow": -1})

    def on_mysql(self, connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION time_zone='+00:00'")

    def loose(self) -> tuple[str, ...]:
        """Statements that undo :meth:`tight` for a session that is used again."""
        if self.dialect == "mysql":
            return ("SET SESSION innodb_lock_wait_timeout=DEFAULT", "SET SESSION idle_transaction_timeout=0")
        return ()


class HandlerTransaction:
    """One open transaction of a handler's, as its code sees it. Leaving it with a result is the attempt's success."""

    def __init__(self, database: Database, longest: float = SQLITE_SECONDS) -> None:
        """Raises StoreUnavailable. ``longest``: seconds SQLite's write lock may be held; 0: for ever."""
        self._db = database
        self._longest = longest if database.dialect == "sqlite" else 0.0
        self._lock = threading.Lock()
        self._over = ""
        self._writes = self._ours = self._cut_off = False
        self._timer: threading.Timer | None = None
        self.value: str | None = None
        try:
            self._connection = database.engine.connect().execution_options(**{LAZY: True})
        except sa.exc.DBAPIError as exc:
            raise self._mapped(exc) from exc
        try:
            self._begun = self._connection.begin()
            if isinstance(database, HeldDatabase):
                Transaction(self._connection, database.tables, database.dialect).put(database.loose())
        except BaseException as exc:
            quietly(self._connection.close)
            if isinstance(exc, sa.exc.DBAPIError):
                raise self._mapped(exc) from exc
            raise
        event.listen(self._connection, "before_cursor_execute", self._before)
        event.listen(self._connection, "commit", self._before_commit)

    # -- what a handler uses

    def execute(self, statement: Any, parameters: Any = None) -> CursorResult[Any]:
        """Execute a statement: SQLAlchemy's, or text with ``:name`` places."""
        return self._connection.execute(sa.text(statement) if isinstance(statement, str) else statement, parameters)

    @property
    def connection(self) -> Connection:
        """SQLAlchemy's connection. It is committed with the result, and not by its user."""
        return self._connection

    @cached_property
    def session(self) -> Session:
        """An ORM session in this transaction: its ``commit`` writes what is pending, its ``rollback`` undoes what was done since the last one."""
        return Session(self._connection, join_transaction_mode="create_savepoint")

    def result(self, value: Any = None) -> None:
        """The attempt has succeeded with this, once the block is left. Raises TaskInvalid for what cannot be stored."""
        self.value = encode_result(value)

    # -- how it ends

    def commit(self, last: Callable[[Transaction], None]) -> None:
        """Write what is pending, execute ``last`` with short limits, COMMIT. What ``last`` raises undoes everything.

        Raises CommitUnknown, StoreUnavailable (nothing was done), StoreError, and what the driver says of the handler's own statements.
        """
        try:
            if "session" in self.__dict__:
                self.session.commit()
            if not self._begun.is_active:
                raise TransactionRefused(
                    "the transaction was rolled back within its block: leave the block by an exception, or do not roll back"
                )
            self._last(last)
            if (self._db.clock.monotonic() - self._ending) * 1e6 > self._db.longest_us * 3 / 4 > 0:
                raise StoreUnavailable("writing the end took so long that nobody waits for it any more; nothing was done")
            with self._lock:
                self._check()
                self._ours = True  # past this the timer leaves it alone
            self._db.commit(self._connection, self._db.faults)
        except Retry as exc:
            self.abandon(exc)
            raise StoreUnavailable(f"the database refused the transaction ({exc}); nothing was done") from exc
        except BaseException as exc:
            self.abandon(exc)
            raise
        self._close()
        if self._db.faults is not None:
            self._db.faults.after_commit()

    def _last(self, last: Callable[[Transaction], None]) -> None:
        self._ending = self._db.clock.monotonic()
        try:
            tx = Transaction(self._connection, self._db.tables, self._db.dialect)
            self._db.tighten(tx)
            last(tx)
        except sa.exc.DBAPIError as exc:
            raise self._mapped(exc) from exc

    def abandon(self, error: BaseException | None) -> None:
        """Undo everything. Raises TransactionTooLong when that is what ``error`` comes from."""
        cut = self._cut_off
        self._close()
        if cut:
            raise TransactionTooLong(self._over) from error

    def _close(self) -> None:
        with self._lock:
            self._over = self._over or "the transaction is over: its block was left"
        if self._timer is not None:
            self._timer.cancel()
        if "session" in self.__dict__:
            quietly(self.session.close)
        quietly(self._connection.close)

    # -- guards

    def _mapped(self, exc: sa.exc.DBAPIError) -> BaseException:
        mapped = self._db.mapped(exc)
        return (
            StoreUnavailable(f"the database refused the transaction ({mapped}); nothing was done") if isinstance(mapped, Retry) else mapped
        )

    def _check(self) -> None:
        if self._over:
            raise (TransactionTooLong if self._cut_off else TransactionRefused)(self._over)

    def _before(self, _connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        """Before each statement: what would end the transaction is refused; on SQLite the first that writes takes the write lock."""
        if statement == _TAKE:
            return
        self._check()
        writes = False
        for words in beginnings(statement, self._db.dialect):
            self._refuse(words)
            writes = writes or words[0] not in _READS
        if self._db.dialect == "sqlite" and writes and not self._writes:
            self._connection.exec_driver_sql(_TAKE)
            self._writes = True
            if self._longest:
                self._timer = threading.Timer(self._longest, self._cut)
                self._timer.daemon = True
                self._timer.start()

    def _refuse(self, words: Sequence[str]) -> None:
        """``words``: with which a statement begins, in capitals."""
        first = words[0]
        if ends_transaction(words):
            raise TransactionRefused(
                f"{first} within ctx.transaction(): it commits with tx.result(value) when its block is left, and rolls back by an exception"
            )
        by_itself = first in _COMMITS_BY_ITSELF and "TEMPORARY" not in words[1:2]
        if self._db.dialect == "mysql" and (by_itself or (first == "SET" and "AUTOCOMMIT" in words)):
            raise TransactionRefused(f"{first} commits what was done before it on this database: keep it out of ctx.transaction()")

    def _before_commit(self, _connection: Any) -> None:
        if not self._ours:
            raise TransactionRefused("commit() within ctx.transaction(): it commits with tx.result(value) when its block is left")

    def _cut(self) -> None:
        """Others wait for the write lock: give it back, whatever the handler is doing."""
        with self._lock:
            if self._over or self._ours:
                return
            self._over = (
                f"on SQLite a transaction may write for {self._longest:g} s, because every other writer waits for it: "
                "work it out first and write last, or use PostgreSQL or MariaDB; "
                "nothing of it was done"
            )
            self._cut_off = True
            driver: Any = self._connection.connection.driver_connection
            driver.interrupt()
            driver.rollback()
