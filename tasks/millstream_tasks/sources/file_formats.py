"""How lines become records: text, JSON lines, CSV.

Called by the file reader. Each format has a fast path over whole batches and a careful one record by record, taken when the fast
one fails; both must give the same records for the same bytes wherever a batch ends. What must never happen here: a record decoded from
bytes that the cursor does not move past, or a value that depends on how the file was cut into batches.
"""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from millstream_tasks.sources.file_lines import LineBuffer
from millstream_tasks.sources.poison import PoisonTally

Parse = Callable[[Any], Any]
QUOTED_RAW_LIMIT = 64 * 1024


class RecordFormat(Protocol):
    """Turns buffered lines into values."""

    def read(self, lines: LineBuffer, limit: int, values: list[Any], tally: PoisonTally) -> bool:
        """Append up to ``limit`` values from what is buffered. False: a poison record is next and must wait until ``values`` were
        handed out. Raises :class:`RecordError` for it when ``values`` is empty and the policy is FAIL."""
        ...


class _LineFormat:
    """A format whose every line is one record, or none (blank)."""

    def __init__(self, encoding: str, parse: Parse | None, name: str) -> None:
        self._encoding = encoding
        self._parse = parse
        self._name = name

    @abstractmethod
    def _batch(self, lines: list[bytes]) -> list[Any]:
        raise NotImplementedError

    @abstractmethod
    def _one(self, line: bytes) -> tuple[Any] | None:
        """The record of one line, None when the line is blank. Raises anything when it cannot be decoded."""
        raise NotImplementedError

    def read(self, lines: LineBuffer, limit: int, values: list[Any], tally: PoisonTally) -> bool:
        end = len(values) + limit
        while (want := end - len(values)) > 0:
            batch = lines.peek(want)
            if not batch:
                if lines.long_line() is None:
                    return True
                if not self._careful(lines, 1, values, tally):
                    return False
                continue
            try:
                found = self._batch(batch)
                if self._parse is not None:
                    found = list(map(self._parse, found))
            except Exception:  # whatever the decoder or the user's parse raises, the careful pass finds the record and says why
                if not self._careful(lines, len(batch), values, tally):
                    return False
                continue
            lines.consume(len(batch), len(found))
            values += found
        return True

    def _careful(self, lines: LineBuffer, count: int, values: list[Any], tally: PoisonTally) -> bool:
        for _ in range(count):
            line = lines.line(0)
            assert line is not None
            try:
                if (length := lines.long_line()) is not None:
                    raise ValueError(f"the line has {length} bytes, more than max_record_bytes")
                record = self._one(line)
                if record is not None and self._parse is not None:
                    record = (self._parse(record[0]),)
            except Exception as error:  # the poison policy decides
                if not note_poison(lines, 1, line, reason(error), values, tally, self._name):
                    return False
                continue
            lines.consume(1, 0 if record is None else 1)
            if record is not None:
                values.append(record[0])
        return True


class TextFormat(_LineFormat):
    """Each line is a str, without its ``\\n`` or ``\\r\\n``. Empty lines are records."""

    def _batch(self, lines: list[bytes]) -> list[Any]:
        return decode_lines(lines, self._encoding)

    def _one(self, line: bytes) -> tuple[Any] | None:
        return (line.decode(self._encoding).removesuffix("\r"),)


class JsonLinesFormat(_LineFormat):
    """Each line is a JSON document; blank lines are passed over. ``type`` is a Struct, dataclass or other type msgspec decodes into."""

    def __init__(self, encoding: str, parse: Parse | None, name: str, type: Any = Any) -> None:
        super().__init__(encoding, parse, name)
        self._decode: Callable[[bytes | str], Any] = msgspec.json.Decoder(type).decode
        self._transcode = encoding != "utf-8"

    def _batch(self, lines: list[bytes]) -> list[Any]:
        if self._transcode:
            return [self._decode(text) for text in decode_lines(lines, self._encoding) if text]
        return list(map(self._decode, filter(None, lines)))

    def _one(self, line: bytes) -> tuple[Any] | None:
        if not line.strip():
            return None
        return (self._decode(line.decode(self._encoding) if self._transcode else line),)


class CsvFormat:
    """Records as the csv module reads them, strictly: a dict of str with ``columns``, else a list of str; blank lines are passed over.

    A quoted field may hold newlines unless ``multiline`` is off. A record that cannot be read takes all the lines the csv module
    had to look at, so an unclosed quote takes the rest up to ``max_record`` bytes.
    """

    def __init__(
        self,
        encoding: str,
        parse: Parse | None,
        name: str,
        *,
        delimiter: str,
        quote: str,
        multiline: bool,
        columns: Sequence[str] | None,
        max_record: int,
        type: Any = None,
    ) -> None:
        self._encoding = encoding
        self._parse = parse
        self._name = name
        self._options: dict[str, Any] = {"delimiter": delimiter, "quotechar": quote, "strict": True}
        self._multiline = multiline
        self._columns = None if columns is None else list(columns)
        self._max = max_record
        self._type = type
        # The module's own field limit (128 KiB unless set) is one per process: a lower one would make poison depend on who else runs here.
        if csv.field_size_limit() < max_record:
            csv.field_size_limit(max_record)

    def read(self, lines: LineBuffer, limit: int, values: list[Any], tally: PoisonTally) -> bool:
        end = len(values) + limit
        while (want := end - len(values)) > 0:
            batch = lines.peek(want)
            if not batch and lines.long_line() is None:
                return True
            found = self._batch(batch) if batch else None
            if found is None:
                if not self._careful(lines, max(1, len(batch)), values, tally):
                    return False
                continue
            lines.consume(len(batch), len(found))
            values += found
        return True

    def first(self, lines: LineBuffer) -> list[str] | None:
        """The first record, blank lines passed over: the header. None when the input is empty. Raises ValueError, csv.Error."""
        while True:
            feed = _RecordLines(lines, self._encoding, self._max, self._multiline)
            row = next(csv.reader(feed, **self._options), None)
            if row is None:
                return None
            lines.consume(feed.taken, 0)
            if row:
                return row

    def _batch(self, batch: list[bytes]) -> list[Any] | None:
        """All records of ``batch`` when each line is one record and none is poison, else None."""
        try:
            rows = list(csv.reader(decode_lines(batch, self._encoding), **self._options))
            # Every record takes a line or more: as many records as lines means that no record spans lines.
            return self._values(rows) if len(rows) == len(batch) else None
        except Exception:  # the careful pass finds the record and says why
            return None

    def _values(self, rows: list[list[str]]) -> list[Any]:
        rows = [row for row in rows if row]
        found: list[Any] = rows
        if (columns := self._columns) is not None:
            width = len(columns)
            if rows and (min(map(len, rows)) != width or max(map(len, rows)) != width):
                raise ValueError(f"{len(rows[0])} fields where {width} columns are known")
            found = [dict(zip(columns, row)) for row in rows]
        if self._type is not None:
            found = msgspec.convert(found, list[self._type], strict=False)  # type: ignore[name-defined]  # a type given at run time
        return found if self._parse is None else list(map(self._parse, found))

    def _careful(self, lines: LineBuffer, count: int, values: list[Any], tally: PoisonTally) -> bool:
        """Read up to ``count`` lines' worth of records one by one."""
        while count > 0:
            feed = _RecordLines(lines, self._encoding, self._max, self._multiline)
            try:
                found = self._values([next(csv.reader(feed, **self._options))])
            except StopIteration:
                return True
            except Exception as error:  # the poison policy decides
                raw = b"\n".join(feed.raw)[:QUOTED_RAW_LIMIT]
                if not note_poison(lines, feed.taken, raw, reason(error), values, tally, self._name):
                    return False
            else:
                lines.consume(feed.taken, len(found))
                values += found
            count -= feed.taken
        return True


class _RecordLines:
    """Feeds the csv module the lines of one record and counts what it takes."""

    def __init__(self, lines: LineBuffer, encoding: str, limit: int, multiline: bool) -> None:
        self._lines = lines
        self._encoding = encoding
        self._limit = limit
        self._multiline = multiline
        self._size = 0
        self.taken = 0
        self.raw: list[bytes] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.taken and not self._multiline:
            raise StopIteration
        line = self._lines.line(self.taken)
        if line is None:
            raise StopIteration
        length = self._lines.long_line(self.taken)
        self.taken += 1
        self.raw.append(line)
        self._size += (len(line) if length is None else length) + 1
        if length is not None or self._size > self._limit + 1:
            raise ValueError(f"the record has at least {self._size} bytes, more than max_record_bytes")
        return line.decode(self._encoding) + "\n"


def note_poison(lines: LineBuffer, taken: int, raw: bytes, why: str, values: list[Any], tally: PoisonTally, name: str) -> bool:
    """Hand one poison record to the policy and move past it. False: good records are to be handed out first."""
    if tally.fails and values:
        return False
    tally.record(f"{name}, byte {lines.offset} (record {lines.records})", raw, why)
    lines.consume(taken, 1)
    return True


def decode_lines(lines: list[bytes], encoding: str) -> list[str]:
    """``lines`` as text without a ``\\r`` at their ends. Raises UnicodeDecodeError, ValueError."""
    text = b"\n".join(lines).decode(encoding)
    found = text.split("\n")
    if len(found) != len(lines):
        raise ValueError(f"{encoding} does not keep lines apart")
    if "\r" in text:
        found = [line.removesuffix("\r") for line in found]
    return found


def reason(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
