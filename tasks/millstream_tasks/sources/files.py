"""Files as a source: one file or a directory of them, as text lines, JSON lines or CSV, plain or gzip.

Built by user code; discovered on a node; read by the subtask runner. Replayable: a split is a file or a byte range of one, its cursor
names the file (name, size, hash of its head) and the byte where the next record starts. What must never happen here: a record read twice
or not at all because of where a chunk, a range or a cursor fell; going on in a file that is not the one the cursor was taken in.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millstream_schema.connectors import ConnectorContext, Json, PoisonPolicy, Read, SourceCapability, Split
from millstream_schema.errors import SourceError
from millstream_tasks.sources.file_formats import CsvFormat, JsonLinesFormat, RecordFormat, TextFormat
from millstream_tasks.sources.file_handle import InputFile
from millstream_tasks.sources.file_lines import LineBuffer
from millstream_tasks.sources.file_paths import list_files, resolve
from millstream_tasks.sources.memory import qualified_name
from millstream_tasks.sources.poison import PoisonTally, policy_problem

FORMATS = ("jsonl", "csv", "text")
CHUNK_BYTES = 256 * 1024
FILLS_PER_POLL = 16
# Encodings whose bytes of one line depend on the lines before it, or where byte 0x0A is not always a line end.
STATEFUL_ENCODINGS = (
    "utf-7",
    "utf7",
    "hz",
    "iso2022",
    "iso-2022",
    "punycode",
    "idna",
    "unicode_escape",
    "raw_unicode_escape",
    "mbcs",
    "oem",
)


class FileSource:
    """Records of files, each read once, in order within a split.

    - ``path``: a file, or a directory whose files match ``glob`` (``**`` for directories below); hidden files and names that end in
      ``.tmp`` or ``.part`` are passed over. ``watch=True`` goes on looking for new files, which must come in by rename.
    - ``format``: ``jsonl`` (one JSON document a line; ``type`` decodes into a Struct or dataclass), ``csv`` (dicts of str when ``header``
      or ``columns`` is given, else lists; ``type`` converts), ``text`` (str a line).
    - ``compression``: ``auto`` (by the name's ``.gz``), ``gzip`` or ``none``.
    - ``splits_per_file``: cut each uncompressed file into that many byte ranges; for csv only with ``multiline=False``.
    - ``parse``: called with each decoded record; what it raises makes the record poison. It must be pure: it may be called again.
    - ``poison``: ``fail``, ``skip`` or ``dead-letter``; a line over ``max_record_bytes`` is poison too.
    """

    kind = "file"
    version = 1
    capability = SourceCapability.REPLAYABLE

    def __init__(
        self,
        path: str | Path,
        format: str = "jsonl",
        *,
        glob: str = "*",
        watch: bool = False,
        compression: str = "auto",
        encoding: str = "utf-8",
        poison: PoisonPolicy | str = PoisonPolicy.FAIL,
        splits_per_file: int = 1,
        type: Any = None,
        parse: Callable[[Any], Any] | None = None,
        header: bool = False,
        columns: Sequence[str] | None = None,
        delimiter: str = ",",
        quote: str = '"',
        multiline: bool = True,
        max_record_bytes: int = 1024 * 1024,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._root = Path(path)
        self._format = format
        self._glob = glob
        self.bounded = not watch
        self._compression = compression
        self._encoding = _normal_encoding(encoding)
        self._poison = str(poison)
        self._ranges = splits_per_file
        self._type = type
        self._parse = parse
        self._header = header
        self._columns = None if columns is None else list(columns)
        self._delimiter = delimiter
        self._quote = quote
        self._multiline = multiline
        self._max = max_record_bytes
        self._chunk = chunk_bytes

    def config(self) -> dict[str, Json]:
        csv_options: dict[str, Json] = {
            "header": self._header,
            "columns": list(self._columns) if self._columns is not None else None,
            "delimiter": self._delimiter,
            "quote": self._quote,
            "multiline": self._multiline,
        }
        return {
            "path": str(self._root),
            "format": self._format,
            "glob": self._glob,
            "watch": not self.bounded,
            "compression": self._compression,
            "encoding": self._encoding,
            "poison": self._poison,
            "splits_per_file": self._ranges,
            "type": None if self._type is None else _type_name(self._type),
            "parse": None if self._parse is None else qualified_name(self._parse),
            "csv": csv_options if self._format == "csv" else None,
            "max_record_bytes": self._max,
        }

    def problems(self) -> list[str]:
        found = policy_problem(self._poison)
        if self._format not in FORMATS:
            found.append(f"format={self._format!r} is unknown; write one of {', '.join(map(repr, FORMATS))}")
        if self._compression not in ("auto", "gzip", "none"):
            found.append(f"compression={self._compression!r} is unknown; write 'auto', 'gzip' or 'none'")
        for name, value in (("splits_per_file", self._ranges), ("max_record_bytes", self._max), ("chunk_bytes", self._chunk)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                found.append(f"{name} must be an integer of at least 1, not {value!r}")
        if any(part in ("", ".", "..") for part in self._glob.split("/")):
            found.append(f"glob={self._glob!r} must be a relative pattern below the directory, such as '*.jsonl' or '**/*.csv'")
        if self._ranges != 1 and self._compression == "gzip":
            found.append("a gzip file cannot be cut into ranges: leave splits_per_file at 1")
        found += _encoding_problems(self._encoding)
        return found + (self._csv_problems() if self._format == "csv" else self._no_csv_problems())

    def _csv_problems(self) -> list[str]:
        found: list[str] = []
        try:
            csv.reader([], delimiter=self._delimiter, quotechar=self._quote, strict=True)
        except (TypeError, ValueError, csv.Error) as error:
            found.append(f"delimiter={self._delimiter!r}, quote={self._quote!r}: {error}")
        if "\n" in self._delimiter + self._quote or "\r" in self._delimiter + self._quote:
            found.append("delimiter and quote must not be line ends")
        if self._ranges != 1 and self._multiline:
            found.append("splits_per_file needs multiline=False for csv: a range must be able to start at any line")
        if self._header and self._columns is not None:
            found.append("give header=True (names from the file) or columns=[...], not both")
        if self._columns is not None and (not self._columns or len(set(self._columns)) != len(self._columns)):
            found.append(f"columns={self._columns!r} must be distinct names, at least one")
        return found

    def _no_csv_problems(self) -> list[str]:
        found = []
        if self._header or self._columns is not None:
            found.append(f"header and columns are options of format='csv', not of {self._format!r}")
        if self._type is not None and self._format == "text":
            found.append("type is an option of 'jsonl' and 'csv'; for text give parse=")
        return found

    def discover(self, known: frozenset[str]) -> list[Split]:
        splits: list[Split] = []
        for name in list_files(self._root, self._glob):
            if self._ranges == 1 or self._is_gzip(name):
                if name not in known:
                    splits.append(Split(name, {"file": name}))
                continue
            # The prefix up to the first ":" has a fixed form, so ids cannot collide whatever a file is called; see the tests.
            ids = [f"{i}/{self._ranges}:{name}" for i in range(self._ranges)]
            if known.issuperset(ids):
                continue
            size = resolve(self._root, name).stat().st_size
            cuts = [size * i // self._ranges for i in range(self._ranges)]
            for i, split_id in enumerate(ids):
                if split_id not in known:
                    end = cuts[i + 1] if i + 1 < self._ranges else None
                    splits.append(Split(split_id, {"file": name, "size": size, "from": cuts[i], "to": end}))
        return splits

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> FileReader:
        body = split.body
        if not isinstance(body, dict) or not isinstance(body.get("file"), str):
            raise SourceError(f"split {split.split_id} was not made by a file source: {body!r}")
        name = str(body["file"])
        file = InputFile(resolve(self._root, name), name, self._is_gzip(name))
        try:
            return self._reader(file, body, cursor)
        except BaseException:
            file.close()
            raise

    def _reader(self, file: InputFile, body: dict[str, Json], cursor: Json) -> FileReader:
        start, stop = body.get("from", 0), body.get("to")
        if type(start) is not int or not (stop is None or type(stop) is int):
            raise SourceError(f"{file.path}: the split's range {start!r} to {stop!r} is not one of this source")
        if body.get("size", file.size) != file.size:
            raise SourceError(f"{file.path} had {body['size']} bytes when it was cut into ranges and has {file.size} now: it changed")
        columns, data_start = self._columns, 0
        if self._format == "csv" and self._header:
            columns, data_start = self._read_header(file)
        records = 0
        if cursor is not None:
            offset, records = _place(file, cursor)
        else:
            offset = max(data_start, self._align(file, start))
        file.seek(offset)
        lines = self._lines(file, offset, stop)
        lines.records = records
        return FileReader(
            file, lines, self._record_format(file.name, columns), PoisonTally(PoisonPolicy(self._poison), f"file {file.path}")
        )

    def _lines(self, file: InputFile, offset: int, stop: int | None) -> LineBuffer:
        return LineBuffer(file.read, offset=offset, chunk=self._chunk, max_line=self._max, stop=stop, strip_bom=self._encoding == "utf-8")

    def _align(self, file: InputFile, start: int) -> int:
        """First byte at or above ``start`` where a line starts."""
        if start == 0:
            return 0
        file.seek(start - 1)
        at = start - 1
        while data := file.read(self._chunk):
            if (newline := data.find(b"\n")) >= 0:
                return at + newline + 1
            at += len(data)
        return at

    def _read_header(self, file: InputFile) -> tuple[list[str] | None, int]:
        file.seek(0)
        lines = self._lines(file, 0, None)
        reader = self._record_format(file.name, None)
        assert isinstance(reader, CsvFormat)
        try:
            header = reader.first(lines)
        except (csv.Error, ValueError) as error:
            raise SourceError(f"{file.path}: the header cannot be read: {error}. Mend it, or give columns=[...].") from error
        if header is not None and len(set(header)) != len(header):
            raise SourceError(f"{file.path}: the header names a column twice: {header!r}. Mend it, or give columns=[...].")
        return header, lines.offset

    def _record_format(self, name: str, columns: list[str] | None) -> RecordFormat:
        if self._format == "text":
            return TextFormat(self._encoding, self._parse, name)
        if self._format == "jsonl":
            return JsonLinesFormat(self._encoding, self._parse, name, Any if self._type is None else self._type)
        return CsvFormat(
            self._encoding,
            self._parse,
            name,
            delimiter=self._delimiter,
            quote=self._quote,
            multiline=self._multiline,
            columns=columns,
            max_record=self._max,
            type=self._type,
        )

    def _is_gzip(self, name: str) -> bool:
        return self._compression == "gzip" or (self._compression == "auto" and name.endswith(".gz"))


class FileReader:
    """Reads one split. The cursor is ``{file, size, head, offset, record}``."""

    def __init__(self, file: InputFile, lines: LineBuffer, format: RecordFormat, tally: PoisonTally) -> None:
        self._file = file
        self._lines = lines
        self._format = format
        self._tally = tally

    def poll(self, limit: int) -> Read:
        values: list[Any] = []
        exhausted = False
        # A bound on the chunks, not on the records: a huge line or a long run of poison must not hold up a barrier.
        for _ in range(FILLS_PER_POLL):
            if not self._format.read(self._lines, limit - len(values), values, self._tally) or len(values) >= limit:
                break
            if not self._lines.fill():
                exhausted = True
                break
        dead, skipped = self._tally.drain()
        return Read(values, None, exhausted, dead, skipped)

    def cursor(self) -> Json:
        return {**self._file.identity(), "offset": self._lines.offset, "record": self._lines.records}

    def close(self) -> None:
        self._file.close()


def _place(file: InputFile, cursor: Json) -> tuple[int, int]:
    if not isinstance(cursor, dict):
        raise SourceError(f"{file.path}: {cursor!r} is not a file cursor")
    file.verify(cursor)
    offset, record = cursor.get("offset"), cursor.get("record")
    if type(offset) is not int or offset < 0 or type(record) is not int or record < 0:
        raise SourceError(f"{file.path}: {cursor!r} is not a file cursor")
    return offset, record


def _normal_encoding(encoding: str) -> str:
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        return encoding
    return "utf-8" if name == "utf-8-sig" else name


def _encoding_problems(encoding: str) -> list[str]:
    try:
        keeps = "a\nb".encode(encoding) == b"a\nb" and not encoding.startswith(STATEFUL_ENCODINGS)
    except (LookupError, UnicodeError, TypeError):
        return [f"encoding={encoding!r} is unknown; write one such as 'utf-8', 'latin-1' or 'cp1252'"]
    return [] if keeps else [f"encoding={encoding!r} does not mark line ends by the byte 0x0A alone; convert the files to UTF-8"]


def _type_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
