"""The SQL upsert sink: one row a key, the last value wins (UPSERT_BY_KEY).

Called by the subtask runner. Repeating records after a recovery writes the same rows again, so a reader may see an older value for a
moment, never a wrong one at the end. What must never happen here: an upsert in a transaction that did not read the fence. A process that
slept through its lease and wakes up would put an old value over a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_schema.connectors import ConnectorContext, Json, SinkCapability
from millstream_schema.errors import ConfigurationError, SinkError
from millstream_schema.target import statements
from millstream_schema.target.connection import Connect, TargetConnection, connect
from millstream_schema.target.failures import TargetRefused
from millstream_schema.target.urls import parse_url
from millstream_tasks.sinks.rows import Row, RowMapper
from millstream_tasks.sinks.segments import Segment, column_problems
from millstream_tasks.sinks.sql_target import SqlFence, check_table, lock_limit, patiently, target_problems


class SqlUpsertSink:
    """Keeps one row per ``key_columns`` in ``table``: inserted, or updated to the newest value.

    The table is yours and must have a primary key or unique key over exactly ``key_columns``. ``columns`` includes the keys.
    ``batch_rows``: keys upserted in one transaction. ``durable=False`` lets commits be lost in a power cut; the sink then promises
    nothing. Other arguments as in :class:`millstream_tasks.sinks.sql.SqlAppendSink`.
    """

    kind = "sql-upsert"
    version = 1

    def __init__(
        self,
        url: str,
        table: str,
        columns: Sequence[str],
        key_columns: Sequence[str],
        *,
        batch_rows: int = 1000,
        lock_timeout: float | None = None,
        patience: float = 20.0,
        durable: bool = True,
        connect: Connect = connect,
    ) -> None:
        self.url = url
        self.table = table
        self.columns = tuple(columns)
        self.key_columns = tuple(key_columns)
        self.batch_rows = batch_rows
        self.lock_timeout = lock_timeout
        self.patience = patience
        self.durable = durable
        self._connect = connect

    @property
    def capability(self) -> SinkCapability:
        return SinkCapability.UPSERT_BY_KEY if self.durable else SinkCapability.NONE

    def config(self) -> dict[str, Json]:
        return {
            "url": parse_url(self.url).redacted(),
            "table": self.table,
            "columns": list(self.columns),
            "key_columns": list(self.key_columns),
            "durable": self.durable,
        }

    def problems(self) -> list[str]:
        name = f"SQL upsert sink into {self.table}"
        problems = target_problems(name, self.url, self.table, self.columns, self.lock_timeout) + column_problems(self.columns, name)
        if not self.key_columns:
            problems.append(f"{name}: key_columns is empty; name the columns of the table's key")
        if strangers := [column for column in self.key_columns if column not in self.columns]:
            problems.append(f"{name}: key_columns names {', '.join(strangers)}, which columns does not")
        if not 1 <= self.batch_rows <= 100_000:
            problems.append(f"{name}: batch_rows is {self.batch_rows}; give 1 to 100000")
        return problems

    def open(self, context: ConnectorContext) -> SqlUpsertWriter:
        Segment.first(context)  # the fence is kept under the same names, with the same bounds
        fence = SqlFence(context)
        connection = self._connect(self.url, durable=self.durable, lock_timeout=lock_limit(self.lock_timeout, context))
        tables = statements.fence_table(connection.dialect)
        try:
            patiently(lambda: connection.ensure_tables(tables), context.guard, self.patience)
            patiently(lambda: self._check(connection), context.guard, self.patience)
            patiently(lambda: fence.up(connection), context.guard, self.patience)
        except BaseException:
            connection.close()
            raise
        return SqlUpsertWriter(self, context, fence, connection)

    def _check(self, connection: TargetConnection) -> None:
        check_table(connection, self.table, self.columns, self.durable)
        if connection.dialect.name == "mysql":
            return check_unique_keys(connection, self.table, self.columns, self.key_columns)
        try:
            with connection.transaction() as transaction:
                transaction.execute(statements.upsert_nothing(connection.dialect, self.table, self.columns, self.key_columns))
        except TargetRefused as error:
            raise ConfigurationError(
                f"table {self.table} cannot be upserted by {', '.join(self.key_columns)}: {error}; "
                "give it a unique key over exactly these columns"
            ) from error


def check_unique_keys(connection: TargetConnection, table: str, columns: Sequence[str], keys: Sequence[str]) -> None:
    """MariaDB and MySQL upsert by whichever unique key matches: there must be one over the keys, and no other that the columns fill."""
    query, parameters = statements.unique_keys(table)
    with connection.transaction() as transaction:
        found: dict[str, set[str]] = {}
        for index, column in transaction.fetch(query, parameters):
            found.setdefault(str(index), set()).add(str(column).lower())
    wanted, written = {key.lower() for key in keys}, {column.lower() for column in columns}
    if wanted not in found.values():
        raise ConfigurationError(f"table {table} has no unique key over exactly {', '.join(keys)}: upserts would pile up rows; add one")
    others = [index for index, key in found.items() if key != wanted and key <= written]
    if others:
        raise ConfigurationError(
            f"table {table} has another unique key ({', '.join(others)}) that this database would upsert by as well; drop it or the column"
        )


class SqlUpsertWriter:
    """One subtask's end: the newest row per key until a batch is full, then one transaction."""

    def __init__(self, sink: SqlUpsertSink, context: ConnectorContext, fence: SqlFence, connection: TargetConnection) -> None:
        self._sink = sink
        self._context = context
        self._fence = fence
        self._connection = connection
        self._mapper = RowMapper(sink.columns)
        self._keys = [sink.columns.index(column) for column in sink.key_columns]
        dialect = connection.dialect
        self._head = statements.insert_head(dialect, sink.table, sink.columns)
        self._tail = dialect.upsert_tail(sink.columns, sink.key_columns)
        self._buffer: dict[Any, Row] = {}

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        buffer, keys = self._buffer, self._keys
        single = keys[0] if len(keys) == 1 else None
        rows = self._mapper.rows(values)
        self._connection.dialect.check(self._sink.columns, rows)
        for row in rows:
            key = row[single] if single is not None else tuple([row[index] for index in keys])
            if key is None or (single is None and None in key):
                names = ", ".join(self._sink.key_columns)
                raise SinkError(f"a record has no value in the key {names}: NULL never equals NULL, so it cannot be upserted")
            buffer.pop(key, None)  # the order of last changes, for databases whose collation finds more keys equal than Python does
            buffer[key] = row
        if len(buffer) >= self._sink.batch_rows:
            self.flush()

    def flush(self) -> None:
        while self._buffer:
            batch = list(self._buffer.items())[: self._sink.batch_rows]
            rows = [row for _, row in batch]
            patiently(lambda rows=rows: self._upsert(rows), self._context.guard, self._sink.patience)  # type: ignore[misc]
            for key, _ in batch:
                del self._buffer[key]

    def close(self) -> None:
        self._connection.close()

    def _upsert(self, rows: list[Row]) -> None:
        with self._connection.transaction() as transaction:
            self._fence.check(transaction)
            transaction.insert(self._head, len(self._sink.columns), self._tail, rows)
            self._context.guard()
