"""A consumer's own session or connection, as far as a few statements need it: SQLAlchemy's Session or Connection, or a DB-API connection of the drivers below.

Used by the inbox. What must never happen here: a commit, a rollback; a statement on a connection that commits each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_schema.errors import ConfigurationError
from millstream_schema.target.dialects import DIALECTS, Dialect

_DRIVERS = {
    "sqlite3": "sqlite", "psycopg": "postgresql", "psycopg2": "postgresql", "pymysql": "mysql", "MySQLdb": "mysql",
}  # fmt: skip
_NAMES = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}
_IDLE = 0
"""PostgreSQL's status of a connection without a transaction."""
_IN_TRANSACTION = 1
"""MySQL's flag of one that has begun."""


class CallersConnection:
    """``given``: the session or connection. Raises ConfigurationError for what is neither, or commits each statement by itself."""

    def __init__(self, given: Any) -> None:
        if hasattr(given, "run_sync"):
            raise ConfigurationError("an asynchronous session is given: call this inside await session.run_sync(lambda session: …)")
        if hasattr(given, "get_bind") and hasattr(given, "connection"):
            given = given.connection()
        self._through = given if hasattr(given, "exec_driver_sql") else None
        if self._through is not None:
            if not self._through.in_transaction():
                self._through.begin()  # as its first statement would
            raw, name = self._through.connection.dbapi_connection, _NAMES.get(self._through.dialect.name, "")
        else:
            raw, name = given, _DRIVERS.get(type(given).__module__.partition(".")[0], "")
        if not name or not hasattr(raw, "cursor"):
            raise ConfigurationError(
                f"{type(given).__module__}.{type(given).__qualname__} is no session or connection that is known here: give an SQLAlchemy Session or Connection, "
                f"or a connection of {', '.join(_DRIVERS)}"
            )
        if _commits_by_itself(raw):
            raise ConfigurationError(
                "the connection commits each statement by itself: what is done must commit with the marker, so begin a transaction first"
            )
        self._raw = raw
        self.dialect: Dialect = DIALECTS[name]

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> tuple[int, list[tuple[Any, ...]]]:
        """Rows it counted, and rows it gave."""
        if self._through is not None:
            found = self._through.exec_driver_sql(statement, tuple(parameters))
            return found.rowcount, [tuple(r) for r in found] if found.returns_rows else []
        cursor = self._raw.cursor()
        try:
            cursor.execute(statement, tuple(parameters))
            return cursor.rowcount, [tuple(r) for r in cursor.fetchall()] if cursor.description else []
        finally:
            cursor.close()


def _commits_by_itself(raw: Any) -> bool:
    """Whether the next statement would be a transaction of its own."""
    kind = type(raw).__module__.partition(".")[0]
    if kind == "sqlite3":
        own = raw.isolation_level is None if getattr(raw, "autocommit", -1) == -1 else raw.autocommit is True
        return bool(own and not raw.in_transaction)
    if kind == "psycopg":
        return bool(raw.autocommit and raw.info.transaction_status == _IDLE)
    if kind == "psycopg2":
        return bool(raw.autocommit and raw.get_transaction_status() == _IDLE)
    if kind == "pymysql":
        return bool(raw.get_autocommit() and not raw.server_status & _IN_TRANSACTION)
    return bool(raw.get_autocommit())
