"""An append-only SQL table as a source, read in the order of a unique key.

Built by user code; read by the subtask runner. Keys do not become visible in order: a transaction may commit a lower key after a higher
one was read. So this source is replayable only when the user declares that commits come in key order, or gives a settle time. What must
never happen here: moving past a row that is not settled, whatever lies behind it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_schema.connectors import ConnectorContext, Json, Read, SourceCapability, Split
from millstream_schema.errors import ConfigurationError, SourceError
from millstream_schema.source_sql import SETTLE_UNITS, select_after_key, settle_parameter
from millstream_schema.target.connection import TargetConnection, connect
from millstream_schema.target.dialects import DIALECTS
from millstream_schema.target.failures import TargetRefused, TargetUnavailable
from millstream_schema.target.urls import parse_url
from millstream_tasks.sources.outage import Outage, negative_problems
from millstream_tasks.sources.sql_keys import decode_key, encode_key

FETCH_ROWS = 1000


class SqlKeySource:
    """Rows of ``table`` as dicts of ``columns``, in the order of ``key_column`` (unique, not NULL, only ever appended above).

    - ``ordered_commits=True`` declares that rows become visible in key order: one writer, or a table that is closed.
    - ``settle`` (seconds): rows younger than that, by the database's clock and ``settle_column``, are not read yet, nor any row after
      them. It must exceed the longest time from taking a key to the commit, twice that when the column holds the *transaction's*
      start (PostgreSQL's ``now()``). ``settle_unit`` is ``timestamp`` or, for integer columns, ``s``, ``ms``, ``us`` since 1970.
      Timestamps without a zone are UTC on MariaDB, MySQL and SQLite, in the session's zone on PostgreSQL.
    - with neither, rows may be missed and the capability is NONE.
    - ``where``: column → value that must be equal (None: IS NULL).
    - ``bounded=True``: ends when it has caught up.
    - ``poll_interval`` (seconds) between queries that bring nothing; ``give_up`` (seconds) of not reaching the database.
    """

    kind = "sql-key"
    version = 1

    def __init__(
        self,
        url: str,
        table: str,
        key_column: str,
        columns: Sequence[str],
        *,
        settle: float | None = None,
        settle_column: str | None = None,
        settle_unit: str = "timestamp",
        ordered_commits: bool = False,
        bounded: bool = False,
        where: Mapping[str, Any] | None = None,
        poll_interval: float = 0.2,
        give_up: float = 30.0,
    ) -> None:
        self._url = url
        self._table = table
        self._key = key_column
        self._columns = list(columns)
        self._settle = settle
        self._settle_column = settle_column
        self._settle_unit = settle_unit
        self._ordered = ordered_commits
        self.bounded = bounded
        self._where = dict(where or {})
        self._poll_interval = poll_interval
        self._give_up = give_up

    @property
    def capability(self) -> SourceCapability:
        return SourceCapability.REPLAYABLE if self._ordered or self._settle is not None else SourceCapability.NONE

    def config(self) -> dict[str, Json]:
        return {
            "database": parse_url(self._url).redacted(),
            "table": self._table,
            "key_column": self._key,
            "columns": list(self._columns),
            "settle": self._settle,
            "settle_column": self._settle_column,
            "settle_unit": self._settle_unit,
            "ordered_commits": self._ordered,
            "bounded": self.bounded,
            "where": {name: None if value is None else encode_key(value) for name, value in self._where.items()},
        }

    def problems(self) -> list[str]:
        found: list[str] = []
        try:
            self._statement(resumed=True)
        except ConfigurationError as error:
            found.append(str(error))
        if not self._columns or len(set(self._columns)) != len(self._columns):
            found.append(f"columns={self._columns!r} must be distinct names, at least one")
        if (self._settle is None) != (self._settle_column is None):
            found.append("settle= (seconds) and settle_column= (the column that holds when a row was inserted) go together")
        if self._settle is not None and not self._settle > 0:
            found.append(f"settle must be above 0 s, not {self._settle!r}")
        if self._settle_unit not in SETTLE_UNITS:
            found.append(f"settle_unit={self._settle_unit!r} is unknown; write one of {', '.join(map(repr, SETTLE_UNITS))}")
        found += negative_problems(poll_interval=self._poll_interval, give_up=self._give_up)
        for column, value in self._where.items():
            try:
                if value is not None:
                    encode_key(value)
            except SourceError as error:
                found.append(f"where[{column!r}]: {error}")
        return list(dict.fromkeys(found))

    def discover(self, known: frozenset[str]) -> list[Split]:
        return [] if "0" in known else [Split("0")]

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> SqlKeyReader:
        connection = connect(self._url, durable=False, lock_timeout=context.lock_timeout, connection=ReadConnection)
        assert isinstance(connection, ReadConnection)
        parameters: list[Any] = []
        if self._settle is not None:
            parameters.append(settle_parameter(connection.dialect, self._settle, self._settle_unit))
        return SqlKeyReader(
            connection,
            (self._statement(resumed=False), self._statement(resumed=True)),
            (parameters, [value for value in self._where.values() if value is not None]),
            self._columns,
            None if cursor is None else decode_key(cursor),
            f"{self._table}.{self._key} in {connection.url.redacted()}",
            bounded=self.bounded,
            poll_interval=self._poll_interval,
            give_up=self._give_up,
        )

    def _statement(self, *, resumed: bool) -> str:
        return select_after_key(
            DIALECTS[parse_url(self._url).dialect],
            self._table,
            self._key,
            self._columns,
            equal=[name for name, value in self._where.items() if value is not None],
            null=[name for name, value in self._where.items() if value is None],
            settle_column=None if self._settle is None else self._settle_column,
            settle_unit=self._settle_unit,
            resumed=resumed,
        )


class ReadConnection(TargetConnection):
    """A connection that reads single statements, each its own snapshot and no lock held after it."""

    def read(self, statement: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """All rows. Raises :class:`TargetUnavailable`, :class:`TargetRefused`; a lost session is opened by the next call."""
        if self._session is None:
            self._open()
        return self.send(statement, parameters)[1]


class SqlKeyReader:
    """Reads ahead one fetch; the cursor is the key of the last row handed out."""

    def __init__(
        self,
        connection: ReadConnection,
        statements: tuple[str, str],
        parameters: tuple[list[Any], list[Any]],
        columns: list[str],
        key: Any,
        what: str,
        *,
        bounded: bool,
        poll_interval: float,
        give_up: float,
    ) -> None:
        self._connection = connection
        self._from_start, self._from_key = statements
        self._before, self._after = parameters
        self._columns = columns
        self._key = key
        self._what = what
        self._bounded = bounded
        self._poll_interval = poll_interval
        self._outage = Outage(what, give_up)
        self._ahead: list[tuple[Any, ...]] = []
        self._at = 0
        self._not_before = 0.0

    def poll(self, limit: int) -> Read:
        exhausted = False
        if self._at == len(self._ahead):
            exhausted = self._fetch(max(limit, FETCH_ROWS))
        rows = self._ahead[self._at : self._at + limit]
        if not rows:
            return Read([], None, exhausted)
        self._at += len(rows)
        self._key = rows[-1][0]
        columns = self._columns
        return Read([dict(zip(columns, row[1:])) for row in rows])

    def cursor(self) -> Json:
        return None if self._key is None else encode_key(self._key)

    def close(self) -> None:
        self._connection.close()

    def _fetch(self, count: int) -> bool:
        """Read ahead. True when a bounded source has caught up."""
        now = time.monotonic()
        if now < self._not_before or not self._outage.may_try():
            return False
        first = self._key is None
        key = [] if first else [self._key]
        try:
            # One row more than is handed out: only so is a key seen twice noticed when its rows fall on both sides of a fetch.
            found = self._connection.read(self._from_start if first else self._from_key, [*self._before, *key, *self._after, count + 1])
        except TargetUnavailable as error:
            self._outage.failed(error)
            return False
        except TargetRefused as error:
            raise SourceError(f"{self._what} cannot be read: {error}") from error
        self._outage.over()
        self._check(found)
        settled = next((index for index, row in enumerate(found) if row[-1] != 1), len(found))
        self._ahead, self._at = found[: min(settled, count)], 0
        if not self._ahead:
            self._not_before = now + self._poll_interval
        return self._bounded and not found

    def _check(self, rows: list[tuple[Any, ...]]) -> None:
        last = self._key
        for row in rows:
            if row[0] is None:
                raise SourceError(f"{self._what} is NULL in a row; the key must be unique and NOT NULL")
            if row[0] == last:
                raise SourceError(f"{self._what} has {last!r} twice; the key must be unique, or rows would be missed")
            last = row[0]
            if row[-1] is None:
                raise SourceError(f"{self._what}: the row with key {last!r} has NULL in the settle column, so it would never settle")
