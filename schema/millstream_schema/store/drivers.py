"""A DB-API connection of a caller's (psycopg, psycopg2, PyMySQL, MySQLdb, sqlite3), as far as statements of ours need one.

Used by ``callers``. Statements are compiled for the database and sent through a cursor; no engine is made over the connection, whose start would query and roll back.
What must never happen here: a commit, a rollback, a setting that stays; a driver imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import pymysql
from sqlalchemy.dialects.postgresql import psycopg, psycopg2
from sqlalchemy.dialects.sqlite import pysqlite
from sqlalchemy.engine.interfaces import Dialect

_DIALECTS: Mapping[str, Dialect] = {
    "sqlite3": pysqlite.dialect(),
    "psycopg": psycopg.dialect(),  # type: ignore[no-untyped-call]  # SQLAlchemy has no types there
    "psycopg2": psycopg2.dialect(),  # type: ignore[no-untyped-call]  # likewise
    "pymysql": pymysql.dialect(),
    "MySQLdb": pymysql.dialect(),
}
KNOWN = ", ".join(_DIALECTS)
_IN_TRANSACTION = 1
"""``SERVER_STATUS_IN_TRANS`` of the MySQL protocol."""
_IDLE = 0
"""``PQTRANS_IDLE`` of libpq."""


def driver_of(raw: Any) -> str:
    """Which driver a connection is of; empty: none that is known. Wrappers that pass for their connection (``__class__``) are taken for it."""
    roots = (kind.__module__.partition(".")[0] for kind in raw.__class__.__mro__)
    return next((root for root in roots if root in _DIALECTS), "")


def in_transaction(raw: Any) -> bool:
    """Whether what is executed now waits for a COMMIT. One of an unknown driver is believed to."""
    driver = driver_of(raw)
    if driver == "sqlite3":
        mode = getattr(raw, "autocommit", -1)  # Python 3.12; -1 is the older way, in which the driver begins before the first change
        begins = raw.isolation_level is not None if mode == -1 else not mode
        return bool(raw.in_transaction or begins)
    if driver in ("psycopg", "psycopg2"):
        return not raw.autocommit or raw.info.transaction_status != _IDLE
    if driver in ("pymysql", "MySQLdb"):
        return not raw.get_autocommit() or bool(getattr(raw, "server_status", 0) & _IN_TRANSACTION)
    return True


class Answer:
    """What a statement gave, read to its end: the part of SQLAlchemy's result that ``Transaction`` uses."""

    def __init__(self, columns: Sequence[str], rows: Sequence[tuple[Any, ...]], rowcount: int) -> None:
        self._columns = columns
        self._rows = rows
        self.rowcount = rowcount

    def keys(self) -> Sequence[str]:
        return self._columns

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)

    def first(self) -> tuple[Any, ...] | None:
        return self._rows[0] if self._rows else None

    def scalar_one(self) -> Any:
        ((value,),) = self._rows
        return value


class DriverConnection:
    """A caller's DB-API connection with the methods of an SQLAlchemy one that ``Transaction`` calls."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._driver = driver_of(raw)
        self._dialect = _DIALECTS[self._driver]
        self.dialect = self._dialect.name

    def execute(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> Answer:
        """Execute it with one set of values, or with each of a list. Raises SQLAlchemy's DBAPIError around the driver's own."""
        many = parameters if isinstance(parameters, list) else [parameters or {}]
        compiled = statement.compile(dialect=self._dialect, column_keys=sorted(many[0]) or None)
        places = compiled.positiontup
        values = []
        for given in many:
            bound = {name: str(v) if isinstance(v, str) else v for name, v in compiled.construct_params(given).items()}
            values.append([bound[name] for name in places] if places is not None else bound)
        return self._send(str(compiled), values)

    def exec_driver_sql(self, statement: str) -> Answer:
        return self._send(statement, [None])

    def _send(self, text: str, values: Sequence[Any]) -> Answer:
        cursor: Any = None
        try:
            cursor = self._cursor()
            touched = 0
            for one in values:
                cursor.execute(text, one) if one else cursor.execute(text)
                touched += max(cursor.rowcount, 0)
            if cursor.description is None:
                return Answer((), (), touched)
            columns = [_text(c[0]) for c in cursor.description]
            return Answer(columns, [_row(r) for r in cursor.fetchall()], touched)
        except Exception as exc:
            self._fail(exc)
        finally:
            if cursor is not None:
                cursor.close()

    def _cursor(self) -> Any:
        """A cursor whose rows are tuples, whatever kind the connection makes for its owner."""
        if self._driver == "psycopg":
            return self.raw.cursor(row_factory=lambda _: tuple)
        cursor = self.raw.cursor()
        if self._driver == "sqlite3":
            cursor.row_factory = None
        return cursor

    def _fail(self, exc: Exception) -> NoReturn:
        base = next((kind for kind in type(exc).__mro__ if kind.__name__ == "Error"), None)
        if base is None:
            raise exc
        raise sa.exc.DBAPIError.instance("", None, exc, base, hide_parameters=True) from exc


def _row(row: Any) -> tuple[Any, ...]:
    """A row as a tuple of plain values: cursors for dictionaries and connections that give text as bytes are their owner's choice."""
    return tuple(_text(v) for v in (row.values() if isinstance(row, Mapping) else row))


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes | bytearray) else value


class Remembered:
    """What is known of a connection, for as long as it lives; nothing of one that cannot be referred to weakly (sqlite3's)."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()

    def has(self, raw: Any, fact: Any) -> bool:
        try:
            return fact in self._known.get(raw, ())
        except TypeError:
            return False

    def keep(self, raw: Any, fact: Any) -> None:
        try:
            self._known.setdefault(raw, set()).add(fact)
        except TypeError:
            return
