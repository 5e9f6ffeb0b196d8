"""The file sink: staged files that appear, whole, when their epoch commits (STAGED_ATOMIC_COMMIT).

Called by the subtask runner. A segment is written to a hidden file; a barrier flushes and seals it; a commit notes itself in a journal
and renames the file to its published name. The journal line comes first: a sealed file that is gone and was noted *is* committed, even if
a reader has already moved it away. What must never happen here: a published file that may still change or vanish, or one that replaces
another.
"""

from __future__ import annotations

import csv
import datetime as dt
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from millstream_schema.connectors import (
    CommitAnswer,
    CommitResult,
    Committable,
    ConnectorContext,
    Json,
    SinkCapability,
)
from millstream_schema.errors import ConfigurationError, SinkError
from millstream_schema.target.failures import TargetUnavailable
from millstream_tasks.sinks.file_target import Entry, FileTarget, append_journal, file_checksum, read_journal
from millstream_tasks.sinks.rows import RowMapper
from millstream_tasks.sinks.segments import Answers, Missing, Segment, column_problems, missing_answer, missing_problems
from millstream_tasks.snapshots.disk import reason_of, sync_directory, sync_file, write_all
from millstream_tasks.snapshots.files import directory_of

Format = Literal["jsonl", "csv"]
Encode = Callable[[list[Any]], bytes]


class FileSink:
    """Writes each epoch of each subtask to a file of its own: ``part-{job}.{operator}.{subtask}.{epoch}.jsonl`` (or ``.csv``).

    ``directory``: a path or ``file:///…``; every node that runs the sink must reach it, on one file system. Readers pass over the hidden
    directory in it. jsonl: one JSON value a line (Decimal and dates as strings, bytes in base64, NaN as null). csv: needs ``columns``,
    which make the first line of each file; None is an empty field. ``patience`` (seconds): how long a lock is waited for. ``missing``:
    what a committable becomes whose file is gone, ``fail`` or ``warn``.
    """

    kind = "files"
    version = 1

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        format: Format = "jsonl",
        columns: Sequence[str] = (),
        patience: float = 20.0,
        missing: Missing = "fail",
    ) -> None:
        self.directory = os.fspath(directory)
        self.format: Format = format
        self.columns = tuple(columns)
        self.patience = patience
        self.missing: Missing = missing

    @property
    def capability(self) -> SinkCapability:
        return SinkCapability.STAGED_ATOMIC_COMMIT

    def config(self) -> dict[str, Json]:
        return {"directory": self.directory, "format": self.format, "columns": list(self.columns)}

    def problems(self) -> list[str]:
        name = f"file sink into {self.directory}"
        problems = missing_problems(self.missing, name)
        try:
            directory_of(self.directory)
        except ConfigurationError as error:
            problems.append(f"{name}: {error}")
        if self.format == "csv":
            problems += column_problems(self.columns, name)
        elif self.format != "jsonl":
            problems.append(f"{name}: format must be 'jsonl' or 'csv', not {self.format!r}")
        elif self.columns:
            problems.append(f"{name}: columns are for format='csv'; jsonl writes each value as it is")
        return problems

    def open(self, context: ConnectorContext) -> FileWriter:
        segment, target = Segment.first(context), FileTarget(directory_of(self.directory), context, self.patience)
        context.guard()
        try:
            target.create()
            target.raise_fence()
        except OSError as error:
            raise TargetUnavailable(f"file sink cannot use {target.directory}: {reason_of(error)}") from error
        return FileWriter(self, context, segment, target)

    def encoder(self) -> Encode:
        """What turns a batch into bytes."""
        return _csv_encoder(self.columns) if self.format == "csv" else _json_lines


class FileWriter:
    """One subtask's end. Writes on the subtask's thread; :meth:`commit` touches nothing of it but the target."""

    def __init__(self, sink: FileSink, context: ConnectorContext, segment: Segment, target: FileTarget) -> None:
        self._sink = sink
        self._context = context
        self._target = target
        self._encode = sink.encoder()
        self._head = _csv_line(sink.columns, sink.columns) if sink.format == "csv" else b""
        self._segment = segment
        self._file = -1
        self._size = self._rows = 0
        self._hasher = hashlib.blake2b(digest_size=16)

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        if not values:
            return
        data = self._encode(values)
        self._context.guard()
        self._target.check_fence()
        path = self._target.staging(self._segment, "open")
        try:
            if self._file < 0:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self._append(data if self._size else self._head + data)
        except FileExistsError as error:
            raise SinkError(f"{path} exists: a second writer of this generation runs; only one may") from error
        except OSError as error:
            raise TargetUnavailable(f"file sink cannot write {path}: {reason_of(error)}") from error
        self._rows += len(values)

    def flush(self) -> None:
        """Nothing is held back: :meth:`write` writes at once, :meth:`prepare_commit` makes it durable."""

    def close(self) -> None:
        """Leave the open file to the next generation, which deletes it."""
        descriptor, self._file = self._file, -1
        if descriptor >= 0:
            os.close(descriptor)

    def prepare_commit(self, epoch: int) -> list[Committable]:
        if not self._rows:
            return []
        self._context.guard()
        self._target.check_fence()
        path, sealed = self._target.staging(self._segment, "open"), self._target.staging(self._segment, "sealed")
        try:
            os.fsync(self._file)
            os.rename(path, sealed)
            sync_directory(sealed.parent)
        except OSError as error:
            raise TargetUnavailable(f"file sink cannot seal {path}: {reason_of(error)}") from error
        self.close()
        committable = self._segment.seal(epoch, self._rows, self._hasher.hexdigest(), format=self._sink.format)
        self._segment = self._segment.next()
        self._size = self._rows = 0
        self._hasher = hashlib.blake2b(digest_size=16)
        return [committable]

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        answers = Answers()
        for committable in committables:
            if not answers.add(self._decided(committable)):
                break
        return answers.answer

    def clean(self, keep: Sequence[Committable]) -> None:
        kept = {Segment.of(committable) for committable in keep}
        self._context.guard()
        self._target.check_fence()
        for segment, path in self._target.left_behind():
            if segment in kept:
                continue
            with self._target.committing(segment) as journal:
                # A commit that was begun is finished by whoever repeats it: without its file it would look finished.
                if path.name not in {entry.sealed for entry in read_journal(journal).entries.values()}:
                    path.unlink(missing_ok=True)

    def _append(self, data: bytes) -> None:
        """Write whole batches only: what a full disk cut off is taken back."""
        try:
            write_all(self._file, data)
        except OSError:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(data)
        self._hasher.update(data)

    def _decided(self, committable: Committable) -> CommitAnswer:
        self._context.guard()
        try:
            segment = Segment.of(committable)
            with self._target.committing(segment) as journal:
                return self._commit(committable, segment, journal)
        except TargetUnavailable as error:
            return CommitAnswer(CommitResult.RETRY, f"{committable.id}: {error}")
        except OSError as error:
            return CommitAnswer(CommitResult.RETRY, f"{committable.id}: {error.filename or self._target.directory}: {reason_of(error)}")
        except SinkError as error:
            return CommitAnswer(CommitResult.FAILED, f"{committable.id}: {error}")

    def _commit(self, committable: Committable, segment: Segment, path: Path) -> CommitAnswer:
        journal = read_journal(path)
        sealed = self._target.staging(segment, "sealed")
        published = self._target.published(committable, segment.job, _ending(committable))
        begun, here = journal.entries.get(committable.id), sealed.exists()
        if begun is not None and (begun.checksum, begun.rows, begun.sealed) != (committable.checksum, committable.rows, sealed.name):
            raise SinkError("another content was committed under this id; an epoch id was issued twice")
        if not here and begun is None:
            if committable.epoch <= journal.pruned:
                return CommitAnswer(CommitResult.ALREADY_COMMITTED, f"{committable.id}: committed long ago, its journal line was pruned")
            return missing_answer(committable, self._sink.missing, str(self._target.hidden))
        if here:
            if file_checksum(sealed, self._context.guard) != committable.checksum:
                raise SinkError(f"{sealed} is damaged: its checksum does not match")
            if published.exists():
                raise SinkError(f"{published} exists and was not written by this commit; move it away and run the commit again")
            if begun is not None:
                sync_file(path)  # whoever began it may have been stopped before the line was durable
            else:
                append_journal(path, journal, Entry(committable.id, committable.epoch, committable.rows, committable.checksum, sealed.name))
            self._context.guard()
            os.rename(sealed, published)
        # Also when the rename was another's: it may have been stopped before it made the rename durable.
        sync_directory(self._target.directory)
        sync_directory(self._target.hidden)
        return CommitAnswer(CommitResult.COMMITTED if here else CommitResult.ALREADY_COMMITTED)


def _ending(committable: Committable) -> str:
    ending = committable.body.get("format")
    if ending not in ("jsonl", "csv"):
        raise SinkError("it names no file format: it was sealed by another kind of sink")
    return str(ending)


def _json_lines(values: list[Any]) -> bytes:
    try:
        return _json.encode_lines(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise SinkError(f"a value cannot be written as JSON: {error}; map it to plain values before the sink") from error


_json = msgspec.json.Encoder()


def _csv_encoder(columns: Sequence[str]) -> Encode:
    mapper = RowMapper(columns)

    def encode(values: list[Any]) -> bytes:
        return b"".join(_csv_line(columns, [_csv_cell(cell) for cell in row]) for row in mapper.rows(values))

    return encode


def _csv_line(columns: Sequence[str], cells: Sequence[Any]) -> bytes:
    """One line that ends in a newline. The writer quotes the characters of its own line end only, so it is given both."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    try:
        return text.getvalue().removesuffix("\r\n").encode() + b"\n"
    except UnicodeEncodeError as error:
        name = next((name for name, cell in zip(columns, cells) if _surrogates(str(cell))), columns[0])
        raise SinkError(f"column {name}: text with a lone surrogate is no UTF-8; replace it before the sink") from error


def _surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _csv_cell(cell: Any) -> Any:
    if isinstance(cell, bytes):
        raise SinkError("bytes cannot be written to a CSV file; encode them as text before the sink")
    return cell.isoformat() if isinstance(cell, dt.date | dt.time) else cell
