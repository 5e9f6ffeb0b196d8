"""Transactions on Millstream's own database, its clock, and the mapping of driver errors.

Every write goes through :meth:`Database.run`: one function, one transaction, executed again after a deadlock or serialisation failure. What must never happen here: a
network call or user code inside a transaction, a lost COMMIT answer taken for success or failure.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, CursorResult, Engine
from sqlalchemy.pool import StaticPool

from ..errors import CommitUnknown, ConfigurationError, StoreError, StoreUnavailable
from ..ports import Clock
from .tables import Tables, tables

T = TypeVar("T")
ATTEMPTS = 8
ASKED_AFTER = 0.5
"""Seconds a connection may rest and be used again without being asked whether its server is still there."""
LAZY = "millstream_lazy"
"""Execution option of a connection whose transaction takes SQLite's write lock only when it writes."""
_NOW = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))",
    "sqlite": "millstream_now_us()",
}
_RETRY_PG = {"40001", "40P01", "55P03"}
_READ_ONLY_PG = "25006"
"""A standby, or a server that its keeper has closed to writes: nothing is wrong with what is written."""
_RETRY_MYSQL = {1213, 1205, 1020}
_DUPLICATE_MYSQL = 1062
_DEFECT_MYSQL = {1054, 1060, 1061, 1091, 1264, 1364, 1366, 1406, 3819, 4025}
"""Unknown columns, broken CHECKs, values that do not fit: PyMySQL calls these operational errors, but waiting mends none of them."""
_DEFECT_SQLITE = ("no such ", "table ", "near ", "incomplete input", "too many SQL variables")
_GONE_MYSQL = {2006, 2013, 2003, 2055, 4031, 1927, 1053, 1152, 1158, 1159, 1160, 1161}


class Faults(Protocol):
    """Where the simulator stands in the way of a transaction."""

    def before_commit(self) -> None: ...

    def after_commit(self) -> None: ...


class Retry(BaseException):
    """A deadlock or serialisation failure: execute the transaction again. Never leaves this module; no ``except Exception`` in a transaction's work holds it up."""


class Query:
    """A statement built once for each table prefix, its values given by name at each execution: building one costs more than SQLite needs to execute it."""

    def __init__(self, build: Callable[[Tables], Any]) -> None:
        self._build = build
        self._built: dict[tuple[str, str], Any] = {}

    has_clock = False

    def of(self, tx: Transaction) -> Any:
        """It, for the tables and the database of a transaction."""
        if self.has_clock and tx.own_clock:
            return self.built(tx)
        found = self._built.get((tx.t.prefix, tx.dialect))
        if found is None:
            found = self._built[tx.t.prefix, tx.dialect] = self.built(tx)
        return found

    def built(self, tx: Transaction) -> Any:
        return self._build(tx.t)


class ClockQuery(Query):
    """Likewise, with the database's clock in it: ``build`` gets the tables, the clock's expression and the dialect."""

    has_clock = True

    def __init__(self, build: Callable[[Tables, sa.ColumnElement[int], str], Any]) -> None:
        super().__init__(lambda t: t)
        self._with_clock = build

    def built(self, tx: Transaction) -> Any:
        return self._with_clock(tx.t, tx.now(), tx.dialect)


class DialectQuery(Query):
    """Likewise, written differently for each kind of database: ``build`` gets the tables and the dialect."""

    def __init__(self, build: Callable[[Tables, str], Any]) -> None:
        super().__init__(lambda t: t)
        self._for_dialect = build

    def built(self, tx: Transaction) -> Any:
        return self._for_dialect(tx.t, tx.dialect)


class NewRows(ClockQuery):
    """Likewise an INSERT of one row whose unique keys are free, for databases that have such a clause. ``constants``: columns that are the same in every such row.
    ``alike``: columns that hardly differ between rows that come together. ``computed``: columns from the clock and from the values of ``beside``, which are given with a row and
    are no columns. All other columns are given."""

    def __init__(
        self,
        table: Callable[[Tables], sa.Table],
        constants: Mapping[str, str | int | None],
        alike: Sequence[str],
        beside: Mapping[str, sa.types.TypeEngine[Any]],
        computed: Callable[[sa.ColumnElement[int], Mapping[str, sa.ColumnElement[Any]]], dict[str, Any]],
    ) -> None:
        super().__init__(self._one)
        self.table = table
        self.constants = {name: _constant(value) for name, value in constants.items()}
        self.alike = frozenset(alike)
        self.beside = beside
        self.computed = computed
        self.together = ClockQuery(self._many)
        """The same of several rows by one statement, on PostgreSQL: what is alike once, the rest as one text. What a statement costs there before its first row is more
        than the row, and so is what the driver takes for lists."""

    def expressions(self, now: sa.ColumnElement[int]) -> dict[str, Any]:
        """The columns that are not given."""
        return {**self.constants, **self.computed(now, {name: sa.bindparam(name, type_=kind) for name, kind in self.beside.items()})}

    def _one(self, t: Tables, now: sa.ColumnElement[int], dialect: str) -> Any:
        insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
        return insert(self.table(t)).on_conflict_do_nothing().values(self.expressions(now))

    def _many(self, t: Tables, now: sa.ColumnElement[int], _dialect: str) -> Any:
        table = self.table(t)
        computed = self.computed(now, {name: sa.column(name) for name in self.beside})
        given = {
            c.name: sa.Text() if isinstance(c.type, sa.String) else c.type
            for c in table.c
            if c.name not in computed.keys() | self.constants.keys()
        }
        kinds = {name: kind for name, kind in given.items() if name not in self.alike} | dict(self.beside)
        told = sa.cast(sa.bindparam("rows", type_=sa.Text()), postgresql.JSON())
        columns = [sa.column(name, kind) for name, kind in kinds.items()]
        rows = sa.func.json_to_recordset(told).table_valued(*columns).render_derived(with_types=True)
        values = {**self.constants, **self.computed(now, {name: rows.c[name] for name in self.beside})}
        values |= {name: sa.bindparam(name, type_=given[name]) if name in self.alike else rows.c[name] for name in given}
        return (
            postgresql.insert(table).from_select(list(values), sa.select(*values.values()), include_defaults=False).on_conflict_do_nothing()
        )

    def parts(self, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Values for :attr:`together`: rows that follow each other and agree in what is alike."""
        names = sorted(self.alike)
        for alike, part in groupby(rows, key=lambda row: tuple(row[name] for name in names)):
            differing = [{name: value for name, value in row.items() if name not in self.alike} for row in part]
            yield {"rows": msgspec.json.encode(differing).decode(), **dict(zip(names, alike, strict=True))}


def _constant(value: str | int | None) -> sa.ColumnElement[Any]:
    """A value that a statement carries in its text."""
    if value is None:
        return sa.null()
    assert isinstance(value, int) or value.isalpha() or not value, "a constant of a statement is a number or a word"
    return sa.literal_column(str(value) if isinstance(value, int) else f"'{value}'")


class Transaction:
    """One open transaction: statements, tables and the database's clock."""

    own_clock = False
    """Whether its clock is not that of our own sessions: a statement with the clock in it is then built for it alone."""

    def __init__(self, connection: Connection, tables_: Tables, dialect: str) -> None:
        self._connection = connection
        self.t = tables_
        self.dialect = dialect
        self.brief = False
        """Set by what ends tasks: the transaction is given up when it lasts longer than :attr:`Database.longest_us` allows."""

    @staticmethod
    def clock_of(dialect: str) -> sa.ColumnElement[int]:
        """A database's clock as an expression."""
        return sa.literal_column(_NOW[dialect], sa.BigInteger())

    def execute(self, statement: Any, parameters: Any = None) -> CursorResult[Any]:
        return self._connection.execute(statement, parameters)

    def put(self, settings: Sequence[str]) -> None:
        """Execute settings of the session."""
        for setting in settings:
            try:
                self._connection.exec_driver_sql(setting)
            except sa.exc.DBAPIError as exc:
                if exc.orig is None or exc.orig.args[:1] != (1193,):  # MySQL has no idle_transaction_timeout
                    raise

    def now(self) -> sa.ColumnElement[int]:
        """The database's clock as an expression inside a statement."""
        return self.clock_of(self.dialect)

    def now_us(self) -> int:
        """The database's clock now, UTC microseconds, by a statement of its own."""
        return int(self._connection.exec_driver_sql(f"SELECT {_NOW[self.dialect]}").scalar_one())

    def _result(self, statement: Any, values: dict[str, Any]) -> CursorResult[Any]:
        if isinstance(statement, Query):
            statement = statement.of(self)
        return self._connection.execute(statement, values or None)

    def rows(self, statement: Any, **values: Any) -> list[dict[str, Any]]:
        """Every row of a statement or :class:`Query`."""
        found = self._result(statement, values)
        columns = found.keys()
        names = [str(k) for k in columns]  # plain strings, not SQLAlchemy's quoted names
        return [dict(zip(names, row, strict=True)) for row in found]

    def row(self, statement: Any, **values: Any) -> dict[str, Any] | None:
        """The first row of a statement or :class:`Query`."""
        found = self._result(statement, values)
        row = found.first()
        return None if row is None else {str(k): v for k, v in zip(found.keys(), row, strict=True)}

    def changed(self, statement: Query, **values: Any) -> int:
        """Execute a guarded UPDATE or DELETE; number of rows that matched."""
        return self._result(statement, values).rowcount

    def has_table(self, name: str) -> bool:
        return sa.inspect(self._connection).has_table(name)

    def create_table(self, table: sa.Table) -> None:
        """Create it unless it is there."""
        table.create(self._connection, checkfirst=True)

    def insert(self, table: sa.Table, **values: Any) -> None:
        self._connection.execute(sa.insert(table), values)

    def insert_many(self, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._connection.execute(sa.insert(table), rows)

    def insert_or_nothing(self, table: sa.Table, expressions: dict[str, Any] | None = None, /, **values: Any) -> bool:
        """Insert unless a row with one of its unique keys exists; whether a row was inserted. ``expressions``: columns the database computes."""
        return self.insert_those_new(table, expressions, [values]) == 1

    def insert_those_new(self, table: sa.Table, expressions: dict[str, Any] | None, rows: list[dict[str, Any]]) -> int:
        """Insert every row whose unique keys are free; how many were inserted."""
        if self.dialect == "mysql":
            return sum(self._inserted_mysql(table, expressions, row) for row in rows)
        insert = postgresql.insert if self.dialect == "postgresql" else sqlite.insert
        statement = insert(table).on_conflict_do_nothing()
        if expressions:
            statement = statement.values(expressions)
        # Without the option SQLAlchemy answers -1 for an INSERT.
        return self._connection.execute(statement, rows, execution_options={"preserve_rowcount": True}).rowcount

    def insert_new(self, statement: NewRows, rows: list[dict[str, Any]]) -> int:
        """Insert every row whose unique keys are free; how many were inserted."""
        if self.dialect == "mysql":
            return self.insert_those_new(statement.table(self.t), statement.expressions(self.now()), rows)
        counted = {"preserve_rowcount": True}  # without it SQLAlchemy answers -1 for an INSERT
        if self.dialect == "postgresql" and len(rows) > 1:
            together = statement.together.of(self)
            return sum(self._connection.execute(together, part, execution_options=counted).rowcount for part in statement.parts(rows))
        parameters = rows[0] if len(rows) == 1 else rows
        return self._connection.execute(statement.of(self), parameters, execution_options=counted).rowcount

    def _inserted_mysql(self, table: sa.Table, expressions: dict[str, Any] | None, values: dict[str, Any]) -> bool:
        """A plain INSERT whose duplicate is an answer: INSERT IGNORE would also cut off what is too long and pass over CHECK constraints."""
        statement = sa.insert(table).values(expressions) if expressions else sa.insert(table)
        try:
            self._connection.execute(statement, values)
        except sa.exc.IntegrityError as exc:
            if exc.orig is not None and exc.orig.args[:1] == (_DUPLICATE_MYSQL,):
                return False  # the statement is undone, the transaction goes on
            raise
        return True

    def update(self, table: sa.Table, *where: Any, **values: Any) -> int:
        """Guarded update; raises ``rev``; number of rows that matched."""
        if "rev" in table.c:
            values["rev"] = table.c.rev + 1
        return self._connection.execute(sa.update(table).where(*where).values(**values)).rowcount

    def delete(self, table: sa.Table, *where: Any) -> int:
        return self._connection.execute(sa.delete(table).where(*where)).rowcount


class Database:
    """One SQL database. ``url`` is SQLAlchemy's; ``lock_timeout_ms`` and the idle-in-transaction limit stay below a third of the lease."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        prefix: str = "millstream_",
        timeout_ms: int = 3_000,
        faults: Faults | None = None,
    ) -> None:
        self.tables = tables(prefix)
        self.clock = clock
        self.faults = faults
        self._timeout_ms = timeout_ms
        try:
            parsed = sa.make_url(url)
        except sa.exc.ArgumentError as exc:
            raise ConfigurationError(
                "the database URL cannot be parsed: write e.g. postgresql+psycopg://user@host/db or sqlite:///path"
            ) from exc
        name = parsed.get_backend_name()
        self.dialect = "mysql" if name in ("mysql", "mariadb") else name
        if self.dialect not in _NOW:
            raise ConfigurationError(f"database {name!r} is not supported: use sqlite, postgresql+psycopg or mysql+pymysql")
        self.url = parsed
        self.engine = self._engine(parsed)
        _OPEN.add(self)

    def options(self, url: sa.URL) -> dict[str, Any]:
        """What its engine is made with."""
        options: dict[str, Any] = {"hide_parameters": True}
        if self.dialect == "sqlite":
            if url.database in (None, "", ":memory:"):
                options |= {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
            else:
                options |= {"connect_args": {"check_same_thread": False, "timeout": self._timeout_ms / 1000 * 3}}
        elif self.dialect == "postgresql":
            flags = f"-c lock_timeout={self._timeout_ms} -c idle_in_transaction_session_timeout={self._timeout_ms} -c synchronous_commit=on"
            # Every frequent statement walks an index in its order. Before the first ANALYZE of a table that grew by thousands of rows the planner would sort them all instead.
            flags += " -c enable_sort=off -c enable_bitmapscan=off -c enable_seqscan=off -c jit=off"
            options |= {
                "isolation_level": "READ COMMITTED",
                # A peer that vanished without a word is noticed: without this a renewal could wait for hours.
                "connect_args": {
                    "options": flags, "connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 30_000,
                },
            }  # fmt: skip
        else:
            options |= {
                "isolation_level": "READ COMMITTED",
                "connect_args": {"connect_timeout": 5, "read_timeout": 30, "write_timeout": 30},
            }
        return options

    def _engine(self, url: sa.URL) -> Engine:
        try:
            engine = sa.create_engine(url, **self.options(url))
        except (ImportError, sa.exc.ArgumentError) as exc:
            raise ConfigurationError(
                f"no driver for database {url.drivername!r}: install millstream[postgres] or millstream[mysql]"
            ) from exc
        event.listen(engine, "connect", {"sqlite": self._on_sqlite, "mysql": self.on_mysql}.get(self.dialect, _nothing))
        if self.dialect == "sqlite":
            event.listen(engine, "begin", _begin_sqlite)
        else:
            event.listen(engine, "checkin", self._rested)
            event.listen(engine, "checkout", self._still_there)
        return engine

    def _rested(self, _connection: Any, record: Any) -> None:
        record.info["rested"] = self.clock.monotonic()

    def _still_there(self, connection: Any, record: Any, _proxy: Any) -> None:
        """Ask a connection that rested for a while whether its server is still there: one that was used just now need not be asked."""
        if self.clock.monotonic() - record.info.get("rested", 0.0) < ASKED_AFTER:
            return
        try:
            alive = self.engine.dialect.do_ping(connection)
        except self.engine.dialect.loaded_dbapi.Error:
            alive = False
        if not alive:
            raise sa.exc.DisconnectionError("the server has closed this connection")

    def _on_sqlite(self, connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        connection.create_function("millstream_now_us", 0, self.clock.now_us)
        connection.execute(f"PRAGMA busy_timeout={self._timeout_ms * 3}")
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")

    def on_mysql(self, connection: Any, _record: Any) -> None:
        """Settings of a new session."""
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION time_zone='+00:00'")
            for setting in self.tight():
                try:
                    cursor.execute(setting)
                except Exception as exc:  # MySQL has no idle_transaction_timeout; there the server's wait_timeout is the bound
                    if not (exc.args and exc.args[0] == 1193):
                        raise

    def tight(self) -> tuple[str, ...]:
        """Statements after which a session waits for no lock, and keeps no row idly, for longer than this database's timeout."""
        if self.dialect == "postgresql":
            names = ("lock_timeout", "idle_in_transaction_session_timeout")
            return ("SELECT " + ", ".join(f"set_config('{name}', '{self._timeout_ms}', true)" for name in names),)
        if self.dialect == "mysql":
            seconds = max(1, self._timeout_ms // 1000)
            return (f"SET SESSION innodb_lock_wait_timeout={seconds}", f"SET SESSION idle_transaction_timeout={seconds}")
        return ()

    def tighten(self, tx: Transaction) -> None:
        """Execute these for a session that was made without limits."""
        tx.put(self.tight())

    @property
    def longest_us(self) -> int:
        """How long after its begin a transaction that ends tasks can still be committed: it is given up after three quarters of this, and a process that stands still before its
        COMMIT loses its connection within the last. 0 on SQLite, where writers wait for each other."""
        return 0 if self.dialect == "sqlite" else max(self._timeout_ms, 1_000) * 4_000

    def check_durability(self) -> None:
        """Raises ConfigurationError when a commit of this database may be lost with the power."""
        if self.dialect != "mysql":
            return
        value = self.read(lambda tx: tx.execute(sa.text("SELECT @@innodb_flush_log_at_trx_commit")).scalar_one())
        if int(value) != 1:
            raise ConfigurationError("innodb_flush_log_at_trx_commit is not 1: commits may be lost with the power, STRICT needs 1")

    @contextmanager
    def transaction(self, *, read_only: bool = False) -> Iterator[Transaction]:
        """One transaction. Raises Retry, StoreUnavailable (nothing was done) or CommitUnknown (the answer to COMMIT was lost)."""
        try:
            connection = self.engine.connect()
        except sa.exc.DBAPIError as exc:
            raise self.mapped(exc) from exc
        except (sa.exc.TimeoutError, sa.exc.InvalidRequestError) as exc:  # all are in use; none that was opened answered
            raise StoreUnavailable(f"there is no connection to {self.url.render_as_string(hide_password=True)}: {exc}") from exc
        with connection:
            if read_only:
                # PostgreSQL: without BEGIN and ROLLBACK round it; under READ COMMITTED each statement sees what is committed when it begins, with or without.
                alone = {"isolation_level": "AUTOCOMMIT"} if self.dialect == "postgresql" else {}
                connection = connection.execution_options(millstream_read_only=True, **alone)
            try:
                connection.begin()
                began = self.clock.monotonic()
                tx = Transaction(connection, self.tables, self.dialect)
                yield tx
                if tx.brief and (self.clock.monotonic() - began) * 1e6 > self.longest_us * 3 / 4 > 0:
                    raise Retry("the transaction lasted too long: whoever waits for all such transactions to be over has stopped waiting")
            except sa.exc.DBAPIError as exc:
                quietly(connection.rollback)
                raise self.mapped(exc) from exc
            except BaseException:
                quietly(connection.rollback)
                raise
            self.commit(connection, None if read_only else self.faults)
        if self.faults is not None and not read_only:
            self.faults.after_commit()

    def commit(self, connection: Connection, faults: Faults | None) -> None:
        """COMMIT. Raises Retry, StoreUnavailable (nothing was done) or CommitUnknown; what a broken rule of the database's undid is StoreError."""
        if faults is not None:
            try:
                faults.before_commit()
            except BaseException:
                quietly(connection.rollback)
                raise
        try:
            connection.commit()
        except sa.exc.DBAPIError as exc:
            mapped = self.mapped(exc)
            if isinstance(mapped, StoreUnavailable) and not connection.get_execution_options().get("millstream_read_only"):
                raise CommitUnknown(
                    f"the answer to COMMIT was lost ({mapped}); the same guarded statement is to be executed again"
                ) from exc
            raise mapped from exc

    def run(self, work: Callable[[Transaction], T]) -> T:
        """Execute ``work`` in a transaction, again after deadlocks and serialisation failures."""
        return self._again(work, read_only=False)

    def read(self, work: Callable[[Transaction], T]) -> T:
        """Execute a read, likewise: opening a connection and reading can meet a lock, too."""
        return self._again(work, read_only=True)

    def _again(self, work: Callable[[Transaction], T], *, read_only: bool) -> T:
        for attempt in range(ATTEMPTS):
            try:
                with self.transaction(read_only=read_only) as tx:
                    return work(tx)
            except Retry as exc:
                if attempt == ATTEMPTS - 1:
                    raise StoreUnavailable("the database kept refusing the transaction (deadlocks or lock timeouts); try again") from exc
        raise AssertionError("unreachable")

    def mapped(self, exc: sa.exc.DBAPIError) -> BaseException:
        """A driver's error as one of ours."""
        return meaning(exc, self.dialect, f"at {self.url.render_as_string(hide_password=True)}")

    @property
    def lock_timeout_ms(self) -> int:
        """How long a statement waits for another transaction."""
        return self._timeout_ms

    def close(self) -> None:
        self.engine.dispose()


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()


def _forget_connections() -> None:
    """In a forked child (Celery's prefork pool, a preloading web server): the parent's connections stay the parent's, the child opens its own."""
    for database in _OPEN:
        database.engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_connections)


def meaning(exc: sa.exc.DBAPIError, dialect: str, where: str) -> BaseException:
    """A driver's error as Retry, StoreUnavailable or StoreError. ``where``: which database, for people."""
    original = exc.orig
    code = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    number = original.args[0] if original is not None and original.args else None
    text = str(original).splitlines()[0] if original is not None and str(original) else type(original).__name__
    if code in _RETRY_PG or number in _RETRY_MYSQL or (dialect == "sqlite" and "locked" in text):
        return Retry(text)
    defect = number in _DEFECT_MYSQL or (dialect == "sqlite" and text.startswith(_DEFECT_SQLITE))
    lost = exc.connection_invalidated or isinstance(exc, (sa.exc.OperationalError, sa.exc.InterfaceError))
    away = lost or number in _GONE_MYSQL or code == _READ_ONLY_PG
    if away and not defect:
        return StoreUnavailable(f"the database {where} cannot be used: {text}")
    return StoreError(f"{type(original).__name__}: {text}")


def _write_ahead(connection: Any) -> None:
    """Put a SQLite file into write-ahead mode. The change does not wait for other connections as statements do: take the file for oneself first, which waits."""
    for attempt in range(ATTEMPTS):
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if attempt == ATTEMPTS - 1:
                raise
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("ROLLBACK")


def quietly(rollback: Callable[[], None]) -> None:
    """Roll back; a connection that is gone has rolled back by itself."""
    try:
        rollback()
    except sa.exc.DBAPIError:
        pass


def _nothing(_connection: Any, _record: Any) -> None:
    """Nothing to set: PostgreSQL gets its session settings with the connection request."""


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get(LAZY):
        return  # a handler's: begun at its first write
    read_only = options.get("millstream_read_only", False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


__all__ = ["ClockQuery", "Database", "DialectQuery", "Faults", "NewRows", "Query", "Transaction"]
