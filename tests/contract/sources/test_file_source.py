"""Contract of the file source: byte-exact cursors, ranges, poison, identity of the file, discovery."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_schema.connectors import ConnectorContext, Source, Split, SplitReader
from millstream_schema.errors import RecordError, SourceError, SourceUnavailable
from millstream_tasks.sources.files import FileSource

CONTEXT = ConnectorContext("job", "source", 0, 1, 1, lambda: None, lambda: 0)


def drain(reader: SplitReader, limit: int = 1000) -> list[Any]:
    values: list[Any] = []
    try:
        for _ in range(100_000):
            read = reader.poll(limit)
            assert len(read.values) <= limit
            values += read.values
            if read.exhausted:
                return values
    finally:
        reader.close()
    raise AssertionError("never exhausted")


def read_all(source: FileSource, limit: int = 1000) -> list[Any]:
    assert source.problems() == []
    return [value for split in source.discover(frozenset()) for value in drain(source.open(split, None, CONTEXT), limit)]


def records_at_every_cut(source: FileSource, split: Split, whole: list[Any], limit: int) -> None:
    """Asserts that for every cut, what was read before it and what a reader reopened there reads make up ``whole``."""
    reader = source.open(split, None, CONTEXT)
    before: list[Any] = []
    ended = False
    try:
        while True:
            cursor = json.loads(json.dumps(reader.cursor()))
            assert before + drain(source.open(split, cursor, CONTEXT), limit) == whole
            if ended:
                return
            read = reader.poll(1)
            before += read.values
            ended = read.exhausted
    finally:
        reader.close()


LINE = st.text(st.sampled_from("ab,é漢🙂 \r\x0b\x85\u2028\"'"), max_size=9)
EOL = st.sampled_from(["\n", "\r\n"])


@st.composite
def text_content(draw: st.DrawFn) -> tuple[str, list[str]]:
    """File content and its lines as the contract defines them."""
    content = "".join(line + eol for line, eol in draw(st.lists(st.tuples(LINE, EOL), max_size=8)))
    content += draw(st.sampled_from(["", "tail", "é", "\r", "x\r"]))
    lines = content.split("\n")
    if lines[-1] == "":
        lines.pop()
    return content, [line.removesuffix("\r") for line in lines]


def write(directory: str, name: str, content: bytes) -> str:
    path = os.path.join(directory, name)
    if name.endswith(".gz"):
        content = gzip.compress(content)
    with open(path, "wb") as file:
        file.write(content)
    return path


@settings(max_examples=80, deadline=None)
@given(text_content(), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.booleans())
def test_text_resumes_exactly_at_every_cut(content: tuple[str, list[str]], chunk: int, limit: int, packed: bool, bom: bool) -> None:
    """Property: whatever the content, chunk size, poll size and compression, prefix + reopened rest = the lines."""
    text, lines = content
    with tempfile.TemporaryDirectory() as directory:
        data = (b"\xef\xbb\xbf" if bom else b"") + text.encode()
        path = write(directory, "a.txt.gz" if packed else "a.txt", data)
        source = FileSource(path, "text", chunk_bytes=chunk)
        (split,) = source.discover(frozenset())
        assert drain(source.open(split, None, CONTEXT), limit) == lines
        records_at_every_cut(source, split, lines, limit)


@settings(max_examples=80, deadline=None)
@given(text_content(), st.integers(1, 12), st.integers(2, 7), st.booleans())
def test_ranges_of_a_file_have_each_line_once(content: tuple[str, list[str]], chunk: int, ranges: int, bom: bool) -> None:
    """Property: the ranges in order are the file, and each resumes exactly at every cut."""
    text, lines = content
    with tempfile.TemporaryDirectory() as directory:
        path = write(directory, "a.txt", (b"\xef\xbb\xbf" if bom else b"") + text.encode())
        source = FileSource(path, "text", chunk_bytes=chunk, splits_per_file=ranges)
        splits = source.discover(frozenset())
        assert len(splits) == ranges
        parts = [drain(source.open(split, None, CONTEXT), 2) for split in splits]
        assert [line for part in parts for line in part] == lines
        for split, part in zip(splits, parts):
            records_at_every_cut(source, split, part, 3)


JSON_VALUE = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda c: st.lists(c, max_size=3), max_leaves=4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(JSON_VALUE, st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n", "\n \r\n"])), max_size=8),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)
def test_json_lines_resume_exactly_at_every_cut(rows: list[tuple[Any, bool, str]], chunk: int, packed: bool, last: bool) -> None:
    """Property: JSON lines with blank lines between them, in any chunks, plain or gzip, resume exactly."""
    text = "".join(json.dumps(value, ensure_ascii=ascii_only) + eol for value, ascii_only, eol in rows)
    expected = [value for value, _, _ in rows]
    with tempfile.TemporaryDirectory() as directory:
        path = write(directory, "a.jsonl.gz" if packed else "a.jsonl", (text.rstrip("\r\n ") if last else text).encode())
        source = FileSource(path, chunk_bytes=chunk)
        (split,) = source.discover(frozenset())
        records_at_every_cut(source, split, expected, 3)


FIELD = st.text(st.sampled_from('ab",\n\r é;'), max_size=5)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(FIELD, min_size=2, max_size=2), max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.booleans(),
)
def test_csv_with_quoted_newlines_resumes_exactly_at_every_cut(
    rows: list[list[str]], eol: str, chunk: int, packed: bool, quoting: Any, header: bool
) -> None:
    """Property: quotes, quoted newlines, CRLF, header and gzip, in any chunks: the rows written are the rows read, from every cut."""
    if quoting == csv.QUOTE_MINIMAL:  # the csv module does not quote a carriage return then, so it does not read back what it wrote
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator=eol, quoting=quoting)
    writer.writerows([["näme", "line\nbreak"], *rows] if header else rows)
    expected: list[Any] = [dict(zip(["näme", "line\nbreak"], row)) for row in rows] if header else rows
    with tempfile.TemporaryDirectory() as directory:
        path = write(directory, "a.csv.gz" if packed else "a.csv", out.getvalue().encode())
        source = FileSource(path, "csv", header=header, chunk_bytes=chunk)
        (split,) = source.discover(frozenset())
        records_at_every_cut(source, split, expected, 4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["1", "[2]", "{bad", "\xff", "x" * 40, "", '"é"']), max_size=10),
    st.integers(1, 15),
    st.integers(1, 4),
    st.sampled_from(["skip", "dead-letter"]),
)
def test_poison_is_counted_once_and_moves_the_cursor(lines: list[str], chunk: int, limit: int, policy: str) -> None:
    """Property: good values, and poison with its position, do not depend on chunks or polls; a cut after poison does not see it again."""
    raw = [line.encode("latin-1" if line == "\xff" else "utf-8") for line in lines]
    bad = [r for r in raw if r in (b"{bad", b"\xff", b"x" * 40)]
    good = [json.loads(line) for line in lines if line in ("1", "[2]", '"é"')]
    with tempfile.TemporaryDirectory() as directory:
        path = write(directory, "a.jsonl", b"".join(r + b"\n" for r in raw))
        source = FileSource(path, chunk_bytes=chunk, max_record_bytes=30, poison=policy)
        (split,) = source.discover(frozenset())
        values: list[Any] = []
        dead: list[tuple[str, bytes, str]] = []
        skipped = 0
        cursor = None
        exhausted = False
        while not exhausted:
            reader = source.open(split, cursor, CONTEXT)
            start = reader.cursor()
            read = reader.poll(limit)
            while reader.cursor() == start and not read.exhausted:  # the chunks of a long line may take several polls
                read = reader.poll(limit)
            cursor = json.loads(json.dumps(reader.cursor()))
            reader.close()
            values += read.values
            dead += read.dead
            skipped += read.skipped
            exhausted = read.exhausted
        assert values == good
        assert skipped == (len(bad) if policy == "skip" else 0)
        assert [d[1] for d in dead] == (bad if policy == "dead-letter" else [])
        assert len({d[0] for d in dead}) == len(dead)
        assert cursor is not None and cursor["offset"] == os.path.getsize(path)


def test_fail_hands_out_what_came_before_and_stays_at_the_poison(tmp_path: Path) -> None:
    """Property: under FAIL the records before the poison are emitted, then RecordError names the byte, and the cursor does not move."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2\n{bad\n3\n")
    source = FileSource(path)
    (split,) = source.discover(frozenset())
    reader = source.open(split, None, CONTEXT)
    assert reader.poll(10).values == [1, 2]
    cursor = reader.cursor()
    for again in (reader, source.open(split, cursor, CONTEXT)):
        with pytest.raises(RecordError, match=r"a.jsonl, byte 4") as caught:
            again.poll(10)
        assert caught.value.raw == b"{bad"
        assert again.cursor() == cursor
        again.close()


def test_a_huge_line_is_poison_without_being_held(tmp_path: Path) -> None:
    """Property: a line of many chunks over the limit is one dead letter with its length; what follows is read."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n" + b"x" * 100_000 + b"\ntwo\n" + b"y" * 5_000)
    source = FileSource(path, "text", max_record_bytes=1000, poison="dead-letter")
    (split,) = source.discover(frozenset())
    reader = source.open(split, None, CONTEXT)
    values: list[str] = []
    dead: list[tuple[str, bytes, str]] = []
    for _ in range(1000):
        read = reader.poll(10)
        values += read.values
        dead += read.dead
        if read.exhausted:
            break
    assert values == ["one", "two"]
    assert ["100000 bytes" in d[2] for d in dead] == [True, False]
    assert [len(d[1]) for d in dead] == [1024, 1024]
    cursor = reader.cursor()
    assert isinstance(cursor, dict)
    assert cursor["offset"] == path.stat().st_size
    reader.close()


def test_an_unclosed_quote_takes_what_the_csv_module_looked_at(tmp_path: Path) -> None:
    """Property: multiline: the rest of the file is one poison record; multiline=False: only its line."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'a,b\n1,"2\n3,4\n5,6\n')
    many = FileSource(path, "csv", header=True, poison="skip")
    (split,) = many.discover(frozenset())
    assert drain(many.open(split, None, CONTEXT)) == []
    single = FileSource(path, "csv", header=True, poison="skip", multiline=False)
    assert read_all(single) == [{"a": "3", "b": "4"}, {"a": "5", "b": "6"}]


def test_rows_of_another_width_are_poison(tmp_path: Path) -> None:
    """Property: no row is padded or cut silently."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"1,2\n3\n4,5,6\n\n7,8\n")
    source = FileSource(path, "csv", columns=["x", "y"], poison="dead-letter")
    (split,) = source.discover(frozenset())
    reader = source.open(split, None, CONTEXT)
    read = reader.poll(10)
    reader.close()
    assert read.values == [{"x": "1", "y": "2"}, {"x": "7", "y": "8"}]
    assert [d[1] for d in read.dead] == [b"3", b"4,5,6"]


class Order(msgspec.Struct):
    id: int
    name: str


def test_records_decode_into_a_declared_type(tmp_path: Path) -> None:
    """Property: type= makes Structs of JSON and CSV, and a record that does not fit is poison."""
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 1, "name": "a"}\n{"id": "x", "name": "b"}\n')
    (tmp_path / "a.csv").write_bytes(b"id,name\n1,a\nx,b\n")
    for name, options in (("a.jsonl", {}), ("a.csv", {"format": "csv", "header": True})):
        source = FileSource(tmp_path / name, type=Order, poison="skip", **options)  # type: ignore[arg-type]
        assert read_all(source) == [Order(1, "a")]


def test_parse_is_applied_and_what_it_refuses_is_poison(tmp_path: Path) -> None:
    """Property: parse sees each decoded record; an exception makes that record poison and no other."""
    path = tmp_path / "a.txt"
    path.write_text("1\nx\n3\n")
    assert read_all(FileSource(path, "text", parse=int, poison="skip")) == [1, 3]


def test_other_encodings_are_read_and_unfit_ones_refused(tmp_path: Path) -> None:
    """Property: single-byte and multi-byte encodings that keep 0x0A work; UTF-16 is a problem, not garbage."""
    path = tmp_path / "a"
    for encoding, text in (("latin-1", "é\nü"), ("shift_jis", "漢字\nソ"), ("gb18030", "漢\n字")):
        path.write_bytes(text.encode(encoding))
        assert read_all(FileSource(path, "text", encoding=encoding)) == text.split("\n")
        path.write_bytes(json.dumps(text, ensure_ascii=False).encode(encoding))
        assert read_all(FileSource(path, encoding=encoding)) == [text]
    for encoding in ("utf-16", "utf-32", "utf-7", "hex", "nonsense"):
        assert len(FileSource(path, "text", encoding=encoding).problems()) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_changed_file_is_refused_by_name(tmp_path: Path, packed: bool) -> None:
    """Property: another head, another size, a cut file, a missing file: each an error that names it; the same file again is fine."""
    name = "a.txt.gz" if packed else "a.txt"
    path = tmp_path / name
    original = "".join(f"{i * 7919}\n" for i in range(100)).encode()

    def put(content: bytes) -> None:
        write(str(tmp_path), name, content)

    put(original)
    source = FileSource(path, "text")
    (split,) = source.discover(frozenset())
    reader = source.open(split, None, CONTEXT)
    reader.poll(90)
    cursor = reader.cursor()
    reader.close()
    for content in (b"9" + original[1:], original + b"more\n", original[:50], b""):
        put(content)
        with pytest.raises(SourceError, match=f"{name} changed"):
            source.open(split, cursor, CONTEXT)
    path.unlink()
    with pytest.raises(SourceError, match=f"{name} is missing"):
        source.open(split, cursor, CONTEXT)
    path.write_bytes(gzip.compress(original, mtime=0) if packed else original)
    if not packed:
        assert len(drain(source.open(split, cursor, CONTEXT))) == 10
        beyond = {**cursor, "offset": 10_000} if isinstance(cursor, dict) else None
        with pytest.raises(SourceError, match="ends before byte 10000"):
            source.open(split, beyond, CONTEXT)


def test_a_file_that_grows_while_read_is_an_error(tmp_path: Path) -> None:
    """Property: a file that is still being written is refused, not read half."""
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    source = FileSource(path, "text", chunk_bytes=1)
    (split,) = source.discover(frozenset())
    reader = source.open(split, None, CONTEXT)
    with path.open("a") as file:
        file.write("two\n")
    with pytest.raises(SourceError, match="still being written"):
        drain(reader)


def test_a_truncated_or_false_gzip_file_is_an_error(tmp_path: Path) -> None:
    """Property: damage is never taken for the end."""
    whole = gzip.compress(os.urandom(50_000).hex().encode())
    for content in (whole[:-100], b"no gzip at all\n"):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(SourceError, match="not a whole gzip file"):
            read_all(FileSource(tmp_path / "a.gz", "text"))


def test_a_directory_gives_complete_files_sorted_and_new_ones_later(tmp_path: Path) -> None:
    """Property: hidden, .tmp and .part files are not seen; a rename makes a file appear; known splits are not named again."""
    for name in ("b.jsonl", "a.jsonl", ".hidden.jsonl", "c.jsonl.tmp", "d.jsonl.part", "e.csv"):
        (tmp_path / name).write_text("1\n")
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.jsonl").write_text("1\n")
    (tmp_path / "sub" / "deep" / "z.jsonl").write_text("2\n")
    source = FileSource(tmp_path, glob="*.jsonl", watch=True)
    assert not source.bounded
    first = source.discover(frozenset())
    assert [s.split_id for s in first] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "c.jsonl.tmp").rename(tmp_path / "c.jsonl")
    assert [s.split_id for s in source.discover(frozenset(s.split_id for s in first))] == ["c.jsonl"]
    deep = FileSource(tmp_path, glob="**/*.jsonl")
    assert [s.split_id for s in deep.discover(frozenset())] == ["a.jsonl", "b.jsonl", "c.jsonl", "sub/deep/z.jsonl"]
    assert read_all(deep) == [1, 1, 1, 2]


def test_split_ids_of_ranges_do_not_collide_with_odd_file_names(tmp_path: Path) -> None:
    """Property: ids are unique whatever the files are called."""
    for name in ("0:a", "1:a", "a", "a.gz", "0", "2:x.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"1\n") if name.endswith(".gz") else b"1\n")
    source = FileSource(tmp_path, splits_per_file=2)
    ids = [s.split_id for s in source.discover(frozenset())]
    assert len(set(ids)) == len(ids) == 4 * 2 + 2
    assert read_all(source) == [1] * 6


def test_what_cannot_be_found_is_an_error_and_never_an_empty_list(tmp_path: Path) -> None:
    """Property: a read error does not look like absence."""
    with pytest.raises(SourceError, match="neither a file nor a directory"):
        FileSource(tmp_path / "nowhere").discover(frozenset())
    source = FileSource(tmp_path)
    for name in ("../etc/passwd", "/etc/passwd", "a/../../b", ""):
        with pytest.raises(SourceError, match="no file name below"):
            source.open(Split("x", {"file": name}), None, CONTEXT)
    (tmp_path / "dir").mkdir()
    with pytest.raises(SourceUnavailable, match="cannot be opened"):
        source.open(Split("x", {"file": "dir"}), None, CONTEXT)


def test_files_are_closed(tmp_path: Path) -> None:
    """Property: neither a refused open nor a closed reader leaves a descriptor behind."""
    path = tmp_path / "a.csv"
    path.write_text("a,a\n")
    source = FileSource(path, "csv", header=True)
    (split,) = source.discover(frozenset())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SourceError, match="names a column twice"):
            source.open(split, None, CONTEXT)
        FileSource(path, "text").open(split, None, CONTEXT).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_wrong_options_are_listed_all_at_once(tmp_path: Path) -> None:
    """Property: every option that cannot work has its sentence."""
    bad = FileSource(tmp_path, "xml", compression="bz2", poison="ignore", splits_per_file=0, glob="../*", header=True)
    assert len(bad.problems()) == 6
    assert len(FileSource(tmp_path, "csv", header=True, columns=["a"], splits_per_file=2, delimiter=";;").problems()) == 3
    source: Source = FileSource(tmp_path, "csv", header=True, multiline=False, splits_per_file=2)
    assert source.problems() == []
    assert json.loads(json.dumps(source.config())) == source.config()


def test_every_option_is_part_of_what_identifies_the_source(tmp_path: Path) -> None:
    """Property: changing an option that changes the records changes config()."""
    base: dict[str, Any] = {"path": tmp_path, "format": "csv"}
    changes: list[dict[str, Any]] = [
        {"format": "text"},
        {"glob": "*.csv"},
        {"watch": True},
        {"compression": "none"},
        {"encoding": "latin-1"},
        {"poison": "skip"},
        {"splits_per_file": 2},
        {"type": Order},
        {"parse": int},
        {"header": True},
        {"columns": ["a"]},
        {"delimiter": ";"},
        {"quote": "'"},
        {"multiline": False},
        {"max_record_bytes": 9},
    ]
    seen = [json.dumps(FileSource(**{**base, **change}).config()) for change in [{}, *changes]]
    assert len(set(seen)) == len(seen)


def test_a_header_is_known_again_after_a_cut_and_in_every_range(tmp_path: Path) -> None:
    """Property: columns come from the file whichever range or cursor a reader starts at."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfid,name\r\n" + b"".join(b"%d,n%d\r\n" % (i, i) for i in range(40)))
    expected = [{"id": str(i), "name": f"n{i}"} for i in range(40)]
    for ranges in (1, 3, 60):
        source = FileSource(path, "csv", header=True, multiline=False, splits_per_file=ranges)
        assert read_all(source, 3) == expected
        for split in source.discover(frozenset()):
            records_at_every_cut(source, split, drain(source.open(split, None, CONTEXT)), 5)
