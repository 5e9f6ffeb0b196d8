"""What the SQL sinks share: their fence, their patience, and the checks of the user's table.

Called by the append and upsert writers. What must never happen here: a write in a transaction that did not read the fence, or a retry
that goes on after the subtask's lease has passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from millstream_schema.connectors import ConnectorContext
from millstream_schema.errors import CommitUnknown, ConfigurationError, Fenced
from millstream_schema.target import statements
from millstream_schema.target.connection import TargetConnection, Transaction
from millstream_schema.target.dialects import DIALECTS
from millstream_schema.target.failures import TargetBusy, TargetRefused, TargetUnavailable
from millstream_schema.target.urls import parse_url

_T = TypeVar("_T")


def patiently(action: Callable[[], _T], guard: Callable[[], None], patience: float) -> _T:
    """Run a transaction that may be repeated until it is through, for at most ``patience`` seconds; ``guard`` runs before each try.

    A wait for a lock is bounded by the session, so a busy target is tried again at once; a lost one after a growing pause.
    """
    deadline, pause = time.monotonic() + patience, 0.02
    while True:
        guard()
        try:
            return action()
        except (TargetUnavailable, CommitUnknown) as error:
            if time.monotonic() >= deadline:
                raise
            if not isinstance(error, TargetBusy):
                threading.Event().wait(pause)
                pause = min(2 * pause, 1.0)


def lock_limit(given: float | None, context: ConnectorContext) -> float:
    """Seconds for a lock and an idle transaction: what the user gave, never more than the lease of this installation bears."""
    return context.lock_timeout if given is None else min(given, context.lock_timeout)


class SqlFence:
    """The fence row of one (job, operator), seen from one generation."""

    def __init__(self, context: ConnectorContext) -> None:
        self._owner = (context.job, context.operator)
        self._generation = context.generation

    def up(self, connection: TargetConnection) -> None:
        """Admit this generation and shut out older ones; waits for their transactions in flight. Raises :class:`Fenced`."""
        dialect = connection.dialect
        with connection.transaction() as transaction:
            transaction.execute(statements.insert_fence(dialect), [*self._owner, self._generation])
            self._judge(transaction.fetch(statements.lock_fence(dialect), self._owner))
            transaction.execute(statements.raise_fence(), [self._generation, *self._owner, self._generation])

    def check(self, transaction: Transaction) -> None:
        """Hold the fence until the transaction ends. Raises :class:`Fenced` when a newer generation was admitted."""
        self._judge(transaction.fetch(statements.share_fence(transaction.dialect), self._owner))

    def _judge(self, rows: list[tuple[int, ...]]) -> None:
        job, operator = self._owner
        if not rows:
            raise TargetRefused(f"the fence of {job}/{operator} is gone from {statements.FENCE}; do not delete rows of a job that runs")
        if rows[0][0] > self._generation:
            raise Fenced(f"generation {self._generation} of {job}/{operator} is stale: the target is fenced at {rows[0][0]}")


def check_table(connection: TargetConnection, table: str, columns: Sequence[str], durable: bool) -> None:
    """Raise :class:`ConfigurationError` unless the user's table exists, has the columns and keeps what was committed."""
    dialect = connection.dialect
    try:
        with connection.transaction() as transaction:
            transaction.fetch(statements.read_nothing(dialect, table, columns))
            if dialect.name == "mysql":
                query, parameters = statements.table_engine(table)
                engines = {str(engine).lower() for (engine,) in transaction.fetch(query, parameters)} - {"none"}
                if engines and engines != {"innodb"}:
                    raise ConfigurationError(f"table {table} is of engine {', '.join(engines)}, which has no transactions; make it InnoDB")
            if dialect.name == "postgresql" and durable:
                kinds = transaction.fetch(statements.table_persistence(dialect), [dialect.table(table)])
                if kinds == [("u",)]:
                    raise ConfigurationError(f"table {table} is UNLOGGED: a crash of the database empties it; ALTER TABLE … SET LOGGED")
    except TargetRefused as error:
        raise ConfigurationError(
            f"table {table} cannot take the columns {', '.join(columns)}: {error}; create it before the job starts"
        ) from error


def target_problems(name: str, url: str, table: str, columns: Sequence[str], lock_timeout: float | None) -> list[str]:
    """What is wrong with what every SQL sink is configured with."""
    problems = []
    try:
        dialect = DIALECTS[parse_url(url).dialect]
    except ConfigurationError as error:
        return [f"{name}: {error}"]
    checks: list[Callable[[], str]] = [partial(dialect.table, table), *(partial(dialect.identifier, column) for column in columns)]
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            problems.append(f"{name}: {error}")
    if table.rpartition(".")[2] in statements.OWN_TABLES:
        problems.append(f"{name}: table {table} is Millstream's own; write into a table of yours")
    if lock_timeout is not None and not 0.05 <= lock_timeout <= 3600:
        problems.append(f"{name}: lock_timeout is {lock_timeout} s; give 0.05 to 3600 s, below a third of the job's lease")
    return problems
