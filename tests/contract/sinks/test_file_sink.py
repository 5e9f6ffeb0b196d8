"""What the file sink keeps beyond the contract: formats, names, the journal, and full or failing disks."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.sinks.worlds import FileWorld, records
from tests.contract.snapshots.test_snapshot_storage import full_disk

from millstream_schema.connectors import CommitResult
from millstream_schema.errors import SinkError
from millstream_schema.target.failures import TargetBusy, TargetUnavailable
from millstream_tasks.sinks import file_target
from millstream_tasks.sinks.files import FileSink

COMMITTED, ALREADY, FAILED = CommitResult.COMMITTED, CommitResult.ALREADY_COMMITTED, CommitResult.FAILED


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """A directory as target."""
    world = FileWorld(tmp_path)
    yield world
    world.close()


def published(world: FileWorld) -> list[Path]:
    return sorted(path for path in world.directory.iterdir() if not path.name.startswith("."))


def test_a_file_per_subtask_and_epoch_is_named_after_what_it_holds(files: Any, sealed: Any) -> None:
    """Job, operator, subtask and epoch are in the name; names that are no file names are escaped and do not collide."""
    names = []
    for operator in ("plain", "a/../b", "a.b", "a%2Eb", "x" * 180, "x" * 179 + "y"):
        writer = files.open(operator=operator)
        assert writer.commit(sealed(writer, 12, 1)).result is COMMITTED
        names = [path.name for path in published(files)]
    assert f"part-{files.job}.plain.0.0000000012.jsonl" in names
    assert len(names) == 6
    assert files.visible() == [1] * 6


def test_csv_files_have_a_header_each_and_quote_what_needs_it(files: Any) -> None:
    """Readable on its own, in the order of the columns."""
    sink = FileSink(files.directory, format="csv", columns=["id", "name", "price"])
    assert sink.problems() == []
    writer = sink.open(files.context())
    writer.write([{"id": 1, "name": 'a "b", c\nd', "price": Decimal("1.50")}], None)
    writer.write([(2, None, None)], None)
    with pytest.raises(SinkError, match="bytes"):
        writer.write([(3, b"raw", 1)], None)
    assert writer.commit(writer.prepare_commit(1)).result is COMMITTED
    assert published(files)[0].read_text() == 'id,name,price\n1,"a ""b"", c\nd",1.50\n2,,\n'
    writer.close()


CELLS = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.text("\r\n,\"' \0a"))


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1), st.lists(CELLS, min_size=1))
def test_any_text_comes_back_from_csv_as_it_was(pairs: list[tuple[str, str]], singles: list[str]) -> None:
    """Line ends of every system, quotes, commas, NUL, nothing at all: what a reader of CSV gets is what was written."""
    for columns, rows in ((["a", "b"], pairs), (["only"], [(cell,) for cell in singles])):
        text = FileSink("x", format="csv", columns=columns).encoder()(list(rows)).decode()
        assert [tuple(row) for row in csv.reader(io.StringIO(text, newline=""))] == rows


@pytest.mark.parametrize("options", [{"format": "csv", "columns": ["id", "name"]}, {}])
def test_text_that_is_no_utf8_is_a_sink_error_and_leaves_the_file_whole(files: Any, options: dict[str, Any]) -> None:
    """A lone surrogate; in CSV the column is named."""
    writer = FileSink(files.directory, **options).open(files.context())
    writer.write([(1, "a")], None)
    with pytest.raises(SinkError, match="column name" if options else "JSON"):
        writer.write([(2, "fine"), (3, "\udc80")], None)
    assert writer.commit(writer.prepare_commit(1)).result is COMMITTED
    assert published(files)[0].read_text().splitlines()[-1] in ("1,a", '[1,"a"]')
    writer.close()


def test_every_problem_of_a_configuration_is_listed(tmp_path: Path) -> None:
    """Format, columns, directory, policy."""
    assert FileSink(tmp_path, columns=["a"]).problems() != []
    assert FileSink(tmp_path, format="csv").problems() != []
    wrong: Any = {"format": "xml", "missing": "maybe"}
    assert len(FileSink("s3://x", **wrong).problems()) == 3


def test_a_published_file_that_a_reader_moved_away_stays_committed(files: Any, sealed: Any) -> None:
    """The journal remembers; a repeat does not bring the file back."""
    writer = files.open()
    committables = sealed(writer, 1, 1)
    writer.commit(committables)
    published(files)[0].unlink()
    assert files.open(generation=2).commit(committables).result is ALREADY
    assert published(files) == []


def test_a_file_of_that_name_that_is_not_ours_is_never_replaced(files: Any, sealed: Any) -> None:
    """FAILED and named; when it is moved away the commit goes through."""
    writer = files.open()
    (committable,) = sealed(writer, 1, 1)
    stranger = files.directory / f"part-{files.job}.sink.0.0000000001.jsonl"
    stranger.write_text("precious")
    answer = writer.commit([committable])
    assert answer.result is FAILED
    assert stranger.name in answer.detail
    assert stranger.read_text() == "precious"
    stranger.unlink()
    assert writer.commit([committable]).result is COMMITTED


def test_a_sealed_file_that_was_damaged_is_never_published(files: Any, sealed: Any) -> None:
    """A flipped bit is found by its checksum."""
    writer = files.open()
    committables = sealed(writer, 1, 1)
    (path,) = (files.directory / ".millstream").glob("*.sealed")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    answer = writer.commit(committables)
    assert answer.result is FAILED
    assert path.name in answer.detail
    assert files.visible() == []


def test_a_torn_journal_line_does_not_count_and_a_damaged_one_is_an_error(files: Any, sealed: Any) -> None:
    """A line without its end was never acknowledged; anything else must not be guessed at."""
    writer = files.open()
    first, second = sealed(writer, 1, 1), sealed(writer, 2, 2)
    assert writer.commit(first).result is COMMITTED
    (journal,) = (files.directory / ".millstream").glob("*.journal")
    with journal.open("a") as file:
        file.write(json.dumps({"id": second[0].id})[:-4])
    assert writer.commit(first + second).result is COMMITTED
    assert files.visible() == [1, 2]
    journal.write_text("{garbage}\n" + journal.read_text())
    answer = writer.commit(first)
    assert answer.result is FAILED
    assert journal.name in answer.detail


def test_the_journal_is_bounded_and_what_was_pruned_stays_known(files: Any, sealed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long-running jobs do not grow it without end."""
    monkeypatch.setattr(file_target, "_KEPT_COMMITS", 2)
    monkeypatch.setattr(file_target, "_MAX_COMMITS", 4)
    writer = files.open()
    everything = []
    for epoch in range(1, 12):
        committables = sealed(writer, epoch, epoch)
        everything += committables
        assert writer.commit(committables).result is COMMITTED
    (journal,) = (files.directory / ".millstream").glob("*.journal")
    assert len(journal.read_text().splitlines()) <= 5
    assert files.open(generation=2).commit(everything).result is ALREADY
    assert files.visible() == list(range(1, 12))


def test_a_full_disk_fails_the_write_names_the_file_and_takes_back_the_half(files: Any, sealed: Any) -> None:
    """The next write goes on where the last whole batch ended."""
    writer = files.open()
    writer.write(records(1), None)
    with full_disk(100), pytest.raises(TargetUnavailable, match=r"\.open.*free space"):
        writer.write(records(*range(2, 50)), None)
    writer.write(records(60), None)
    committables = writer.prepare_commit(1)
    assert committables[0].rows == 2
    with full_disk(10):
        answer = writer.commit(committables)
    assert answer.result is CommitResult.RETRY
    assert writer.commit(committables).result is COMMITTED
    assert files.visible() == [1, 60]


def test_a_failing_device_fails_the_seal(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO at the flush is never a sealed committable."""
    writer = files.open()
    writer.write(records(1), None)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(TargetUnavailable, match="seal"):
            writer.prepare_commit(1)


def test_a_stopped_process_that_holds_the_lock_is_not_waited_for_without_end(files: Any) -> None:
    """SIGSTOP within a commit: opening fails in bounded time and says why; after its death it goes on."""
    files.open().close()
    (lock,) = (files.directory / ".millstream").glob("*.fence.lock")
    program = "import fcntl,os,sys,signal; d=os.open(sys.argv[1],os.O_RDWR); fcntl.flock(d,fcntl.LOCK_SH); print('held',flush=True); signal.pause()"
    holder = subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(TargetBusy, match="stopped process"):
            FileSink(files.directory, patience=0.2).open(files.context(generation=2))
    finally:
        holder.kill()
        holder.communicate()
    files.open(generation=2)
