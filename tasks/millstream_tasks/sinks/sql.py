"""The SQL append sink: two-phase commit into a table, without PREPARE TRANSACTION.

Records are staged, in chunks, in a table of the *target* database before a barrier is acknowledged. A commit is one transaction there:
read the fence, lock the original subtask's row, look for the marker, insert the staged rows (count and checksum must match), write the
marker, delete the staging. So a commit may be repeated by anyone any number of times. What must never happen here: rows inserted in a
transaction that does not write their marker, or a marker written without the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from millstream_schema.connectors import (
    CommitAnswer,
    CommitResult,
    Committable,
    ConnectorContext,
    Json,
    SinkCapability,
)
from millstream_schema.errors import CodecError, CommitUnknown, SinkError
from millstream_schema.target import statements
from millstream_schema.target.connection import Connect, TargetConnection, Transaction, connect
from millstream_schema.target.failures import TargetRefused, TargetUnavailable
from millstream_schema.target.urls import parse_url
from millstream_schema.values import TypeRegistry, decode_column, encode_column
from millstream_tasks.sinks.rows import Row, RowMapper
from millstream_tasks.sinks.segments import (
    Answers,
    Chunk,
    Missing,
    Segment,
    checksum_of,
    column_problems,
    digest,
    missing_answer,
    missing_problems,
)
from millstream_tasks.sinks.sql_target import SqlFence, check_table, lock_limit, patiently, target_problems
from millstream_tasks.sinks.trial import Trial

_CHUNK_BYTES = 4 << 20  # below MariaDB's default max_allowed_packet (16 MiB) with every byte escaped
_KEPT_MARKERS = 128  # more than the epochs that may be pending (10) and the manifests that are kept (5), with room for savepoints
_TRIES = 3


class SqlAppendSink:
    """Appends records to ``table``: each exactly once, visible when their epoch commits (TWO_PHASE_COMMIT).

    ``url``: sqlite:///file.db, postgresql://… or mysql://… (MariaDB too). The table is yours and must exist; four ``millstream_…`` tables
    are created beside it. ``columns``: where tuples go by position, dicts by key, objects by attribute. ``batch_rows``: records staged at
    a time; rows unlike all before (another type, None, longer, wider) are first tried on the table and rolled back. ``lock_timeout``
    (seconds): less than the installation's ``idle_in_transaction_ms``, which holds if none is given and is never exceeded. ``patience``
    (seconds): how long a busy or lost target is tried again before the subtask fails. ``missing``: what a committable becomes whose staging is gone, ``fail`` or ``warn``.
    """

    kind = "sql-append"
    version = 1

    def __init__(
        self,
        url: str,
        table: str,
        columns: Sequence[str],
        *,
        batch_rows: int = 1000,
        lock_timeout: float | None = None,
        patience: float = 20.0,
        missing: Missing = "fail",
        connect: Connect = connect,
    ) -> None:
        self.url = url
        self.table = table
        self.columns = tuple(columns)
        self.batch_rows = batch_rows
        self.lock_timeout = lock_timeout
        self.patience = patience
        self.missing: Missing = missing
        self._connect = connect

    @property
    def capability(self) -> SinkCapability:
        return SinkCapability.TWO_PHASE_COMMIT

    def config(self) -> dict[str, Json]:
        return {"url": parse_url(self.url).redacted(), "table": self.table, "columns": list(self.columns)}

    def problems(self) -> list[str]:
        name = f"SQL append sink into {self.table}"
        problems = target_problems(name, self.url, self.table, self.columns, self.lock_timeout)
        problems += column_problems(self.columns, name) + missing_problems(self.missing, name)
        if not 1 <= self.batch_rows <= 100_000:
            problems.append(f"{name}: batch_rows is {self.batch_rows}; give 1 to 100000")
        return problems

    def connection(self, context: ConnectorContext) -> TargetConnection:
        """A connection of this sink; opened by its first transaction."""
        return self._connect(self.url, durable=True, lock_timeout=lock_limit(self.lock_timeout, context))

    def open(self, context: ConnectorContext) -> SqlAppendWriter:
        segment, fence, connection = Segment.first(context), SqlFence(context), self.connection(context)
        tables = statements.append_tables(connection.dialect)
        try:
            patiently(lambda: connection.ensure_tables(tables), context.guard, self.patience)
            patiently(lambda: check_table(connection, self.table, self.columns, durable=True), context.guard, self.patience)
            patiently(lambda: fence.up(connection), context.guard, self.patience)
        except BaseException:
            connection.close()
            raise
        return SqlAppendWriter(self, context, segment, fence, connection)


class _Packed(NamedTuple):
    """A chunk that is on its way: kept until the target has it, so that a repeat sends the same bytes under the same number."""

    chunk: Chunk
    body: bytes


class SqlAppendWriter:
    """One subtask's end. Writes on the subtask's thread; commits on its background thread, with a connection of its own."""

    def __init__(
        self, sink: SqlAppendSink, context: ConnectorContext, segment: Segment, fence: SqlFence, connection: TargetConnection
    ) -> None:
        self._sink = sink
        self._context = context
        self._fence = fence
        self._connection = connection
        self._committer = Committer(sink, context, fence)
        self._mapper = RowMapper(sink.columns)
        self._trial = Trial(connection, sink.table, sink.columns)
        self._registry = TypeRegistry()
        self._segment = segment
        self._buffer: list[Row] = []
        self._pending: list[_Packed] = []
        self._staged: list[Chunk] = []

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        rows = self._mapper.rows(values)
        # Here, not at the commit: what is sealed with an epoch and then refused would be refused at every restart.
        self._connection.dialect.check(self._sink.columns, rows)
        self._buffer.extend(rows)
        if len(self._buffer) >= self._sink.batch_rows:
            self.flush()

    def flush(self) -> None:
        if self._buffer:
            self._context.guard()
            self._trial.run(self._buffer)
        rows, self._buffer = self._buffer, []
        for start in range(0, len(rows), self._sink.batch_rows):
            self._pack(rows[start : start + self._sink.batch_rows])
        while self._pending:
            packed = self._pending[0]
            patiently(lambda packed=packed: self._stage(packed), self._context.guard, self._sink.patience)  # type: ignore[misc]
            self._staged.append(self._pending.pop(0).chunk)

    def close(self) -> None:
        self._connection.close()
        self._committer.close()

    def prepare_commit(self, epoch: int) -> list[Committable]:
        self.flush()
        if not self._staged:
            return []
        chunks, segment = self._staged, self._segment
        self._staged, self._segment = [], segment.next()
        rows = sum(chunk.records for chunk in chunks)
        return [segment.seal(epoch, rows, checksum_of(chunks), table=self._sink.table, columns=list(self._sink.columns))]

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        return self._committer.commit(committables)

    def clean(self, keep: Sequence[Committable]) -> None:
        kept = {Segment.of(committable) for committable in keep}
        patiently(lambda: self._clean(kept), self._context.guard, self._sink.patience)

    def _pack(self, rows: list[Row]) -> None:
        body = encode_column(rows, self._registry)
        if len(body) > _CHUNK_BYTES and len(rows) > 1:
            middle = len(rows) // 2
            self._pack(rows[:middle])
            self._pack(rows[middle:])
            return
        self._pending.append(_Packed(Chunk(len(self._staged) + len(self._pending), len(rows), digest(body)), body))

    def _stage(self, packed: _Packed) -> None:
        (seq, records, checksum), body = packed
        with self._connection.transaction() as transaction:
            self._fence.check(transaction)
            if transaction.execute(statements.stage_chunk(transaction.dialect), [*self._segment, seq, records, checksum, body]) != 1:
                there = transaction.fetch(statements.staged_checksum(), [*self._segment, seq])
                if there != [(checksum,)]:
                    raise SinkError(
                        f"chunk {seq} of {'/'.join(map(str, self._segment))} is staged with another content: a second writer runs"
                    )
            self._context.guard()

    def _clean(self, kept: set[Segment]) -> None:
        owner = (self._context.job, self._context.operator)
        with self._connection.transaction() as transaction:
            self._fence.check(transaction)
            for row in transaction.fetch(statements.older_segments(), [*owner, self._context.generation]):
                segment = Segment(*owner, *row)
                if segment.left_behind(self._context) and segment not in kept:
                    transaction.execute(statements.delete_staged(), segment)
            self._context.guard()


class Committer:
    """Carries out commits, one transaction a committable, in the order given."""

    def __init__(self, sink: SqlAppendSink, context: ConnectorContext, fence: SqlFence) -> None:
        self._sink = sink
        self._context = context
        self._fence = fence
        self._connection = sink.connection(context)
        self._registry = TypeRegistry()

    def close(self) -> None:
        self._connection.close()

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        """See :meth:`millstream_schema.connectors.CommittingWriter.commit`."""
        answers = Answers()
        for committable in committables:
            if not answers.add(self._decided(committable)):
                break
        return answers.answer

    def _decided(self, committable: Committable) -> CommitAnswer:
        """Run the transaction; when the answer to COMMIT is lost run it again: the marker decides."""
        unknown = ""
        for _ in range(_TRIES):
            self._context.guard()
            try:
                return self._commit(committable)
            except CommitUnknown as error:
                unknown = f"{committable.id}: {error}"
            except TargetUnavailable as error:
                detail = f"{committable.id}: {error}"
                return CommitAnswer(CommitResult.UNKNOWN, unknown) if unknown else CommitAnswer(CommitResult.RETRY, detail)
            except (SinkError, CodecError) as error:
                return CommitAnswer(CommitResult.FAILED, f"{committable.id}: {error}")
        return CommitAnswer(CommitResult.UNKNOWN, unknown)

    def _commit(self, committable: Committable) -> CommitAnswer:
        segment = Segment.of(committable)
        owner = [segment.job, segment.operator, segment.subtask]
        with self._connection.transaction() as transaction:
            self._fence.check(transaction)
            pruned = self._lock(transaction, owner)
            marker = transaction.fetch(statements.read_marker(), [*owner, committable.epoch])
            if marker:
                if marker[0] != (committable.checksum, committable.rows):
                    raise TargetRefused("another content was committed under this id; an epoch id was issued twice")
                transaction.execute(statements.delete_staged(), segment)
                return CommitAnswer(CommitResult.ALREADY_COMMITTED)
            chunks = [Chunk(*row) for row in transaction.fetch(statements.staged_chunks(), segment)]
            if not chunks:
                if committable.epoch <= pruned:
                    return CommitAnswer(CommitResult.ALREADY_COMMITTED, f"{committable.id}: committed long ago, its marker was pruned")
                return missing_answer(committable, self._sink.missing, statements.STAGING)
            self._move(transaction, segment, committable, chunks)
            transaction.execute(
                statements.insert_marker(transaction.dialect), [*owner, committable.epoch, committable.checksum, committable.rows]
            )
            transaction.execute(statements.delete_staged(), segment)
            self._prune(transaction, owner)
            self._context.guard()
        return CommitAnswer(CommitResult.COMMITTED)

    def _lock(self, transaction: Transaction, owner: list[Any]) -> int:
        """One commit of an original subtask at a time. Waits for a transaction of a lost connection that is still under way."""
        query = statements.lock_committer(transaction.dialect)
        rows = transaction.fetch(query, owner)
        if not rows:
            transaction.execute(statements.insert_committer(transaction.dialect), owner)
            rows = transaction.fetch(query, owner)
        return int(rows[0][0])

    def _move(self, transaction: Transaction, segment: Segment, committable: Committable, chunks: list[Chunk]) -> None:
        rows = sum(chunk.records for chunk in chunks)
        if rows != committable.rows or checksum_of(chunks) != committable.checksum:
            raise TargetRefused(
                f"{committable.rows} rows were sealed and {rows} are staged, or their checksums differ; staging was changed"
            )
        table, columns = _destination(committable)
        head = statements.insert_head(transaction.dialect, table, columns)
        for chunk in chunks:
            ((body,),) = transaction.fetch(statements.staged_body(), [*segment, chunk.seq])
            if digest(body) != chunk.checksum:
                raise TargetRefused(f"staged chunk {chunk.seq} is damaged: its checksum does not match")
            values = decode_column(body, self._registry)
            if len(values) != chunk.records:
                raise TargetRefused(f"staged chunk {chunk.seq} holds {len(values)} records, {chunk.records} were staged")
            transaction.insert(head, len(columns), "", values)

    def _prune(self, transaction: Transaction, owner: list[Any]) -> None:
        beyond = transaction.fetch(statements.marker_to_prune(_KEPT_MARKERS), owner)
        if beyond:
            epoch = beyond[0][0]
            transaction.execute(statements.prune_markers(), [*owner, epoch])
            transaction.execute(statements.note_pruned(), [epoch, *owner, epoch])


def _destination(committable: Committable) -> tuple[str, list[str]]:
    """The table and columns a committable was sealed for, whatever the sink is configured for by now."""
    table, columns = committable.body.get("table"), committable.body.get("columns")
    if not isinstance(table, str) or not isinstance(columns, list) or not all(isinstance(column, str) for column in columns):
        raise SinkError("it names no table and columns: it was sealed by another kind of sink")
    return table, [str(column) for column in columns]
