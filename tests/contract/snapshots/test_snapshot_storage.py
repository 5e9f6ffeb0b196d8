"""What every checkpoint storage keeps: whole blobs, written once, verified when read, and never "none" for "cannot be read"."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream_schema.connectors import Handle
from millstream_schema.errors import ConfigurationError, SnapshotMissing, SnapshotUnreadable, StorageError, StorageUnavailable
from millstream_schema.target import snapshot_statements
from millstream_schema.target.connection import connect
from millstream_tasks.snapshots.files import FileSnapshots
from millstream_tasks.snapshots.sql import SqlSnapshots

BIG = bytes(range(256)) * 4096 * 3 + b"odd"


class Place:
    """A storage and the means to damage what it holds."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def flip_bit(self, key: str) -> None:
        raise NotImplementedError

    def truncate(self, key: str) -> None:
        raise NotImplementedError


class Directory(Place):
    def __init__(self, path: Path) -> None:
        super().__init__(FileSnapshots(path))
        self.path = path

    def flip_bit(self, key: str) -> None:
        data = bytearray((self.path / key).read_bytes())
        data[len(data) // 2] ^= 1
        (self.path / key).write_bytes(data)

    def truncate(self, key: str) -> None:
        os.truncate(self.path / key, 1)


class Database(Place):
    def __init__(self, url: str) -> None:
        super().__init__(SqlSnapshots(url))
        self.url = url

    def _change(self, key: str, body: Any) -> None:
        connection = connect(self.url)
        with connection.transaction() as transaction:
            ((old,),) = transaction.fetch(snapshot_statements.read_part(), [key, 0])
            changed = transaction.execute(
                f"UPDATE {snapshot_statements.SNAPSHOT} SET body = ? WHERE blob_key = ? AND part = 0", [body(old), key]
            )
            assert changed == 1
        connection.close()

    def flip_bit(self, key: str) -> None:
        self._change(key, lambda old: bytes([old[0] ^ 1]) + bytes(old[1:]))

    def truncate(self, key: str) -> None:
        self._change(key, lambda old: old[:1])


@pytest.fixture(
    params=["files", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("mariadb", marks=pytest.mark.mariadb)]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each storage in turn, empty."""
    if request.param == "files":
        yield Directory(tmp_path / "deep" / "storage")
        return
    url = f"sqlite:///{tmp_path / 'snapshots.db'}" if request.param == "sqlite" else request.getfixturevalue(f"{request.param}_url")
    made = Database(url)
    made.storage.delete(made.storage.keys(""))
    yield made
    made.storage.close()


@pytest.mark.parametrize("data", [b"", b"x", BIG], ids=["empty", "one", "3 MiB"])
def test_what_was_put_is_read_back_byte_by_byte(place: Place, data: bytes) -> None:
    """Any size, empty and larger than one part too; the handle says key and size."""
    handle = place.storage.put("job/1/state-0", data)
    assert (handle.key, handle.size) == ("job/1/state-0", len(data))
    assert place.storage.get(handle) == data


def test_a_second_storage_of_the_same_place_reads_it(place: Place, tmp_path: Path) -> None:
    """Nothing is kept in the object: the URL names the place, without secrets."""
    handle = place.storage.put("job/a=1/b_2.c-3", b"content")
    url = place.storage.url
    assert "://" in url
    if isinstance(place, Directory):
        assert FileSnapshots(url).get(handle) == b"content"
    else:
        other = SqlSnapshots(url)
        assert other.get(handle) == b"content"
        other.close()


def test_putting_the_same_again_is_harmless_and_another_content_is_refused(place: Place) -> None:
    """A key is written once: a durable manifest may name it."""
    handle = place.storage.put("k", b"one")
    assert place.storage.put("k", b"one") == handle
    with pytest.raises(StorageError, match="another content"):
        place.storage.put("k", b"two")
    with pytest.raises(StorageError, match="another content"):
        place.storage.put("k", BIG)
    assert place.storage.get(handle) == b"one"


def test_a_snapshot_that_is_not_there_is_missing_and_named(place: Place) -> None:
    """Missing and unreadable are different answers."""
    with pytest.raises(SnapshotMissing, match=r"job/9/none"):
        place.storage.get(Handle("job/9/none", 1, "00"))
    place.storage.put("job/9/some", b"x")
    with pytest.raises(SnapshotMissing, match=r"job/9/none"):
        place.storage.get(Handle("job/9/none", 1, "00"))


def test_a_damaged_snapshot_is_unreadable_and_named(place: Place) -> None:
    """T-90: a flipped bit and a truncation are found, never returned."""
    flipped, short = place.storage.put("job/1/flipped", BIG), place.storage.put("job/1/short", b"some bytes")
    place.flip_bit("job/1/flipped")
    place.truncate("job/1/short")
    with pytest.raises(SnapshotUnreadable, match=r"job/1/flipped"):
        place.storage.get(flipped)
    with pytest.raises(SnapshotUnreadable, match=r"job/1/short"):
        place.storage.get(short)
    with pytest.raises(SnapshotUnreadable):
        place.storage.copy(flipped, "savepoint/flipped")
    assert place.storage.keys("savepoint/") == []


def test_keys_are_listed_by_prefix_in_order(place: Place) -> None:
    """Prefixes are of characters, not of parts; nothing else is listed."""
    for key in ("job/10/b", "job/1/a", "job/1/c", "job2/1/a", "k"):
        place.storage.put(key, b"x")
    assert place.storage.keys("job/1/") == ["job/1/a", "job/1/c"]
    assert place.storage.keys("job/1") == ["job/1/a", "job/1/c", "job/10/b"]
    assert place.storage.keys("job") == ["job/1/a", "job/1/c", "job/10/b", "job2/1/a"]
    assert place.storage.keys("") == ["job/1/a", "job/1/c", "job/10/b", "job2/1/a", "k"]
    assert place.storage.keys("nothing/here/") == []


def test_deleting_is_exact_and_passes_over_what_is_gone(place: Place) -> None:
    """Only the keys named are deleted, repeats do nothing, and the key can be used again."""
    kept, gone = place.storage.put("job/1/a", b"a"), place.storage.put("job/1/b", BIG)
    place.storage.delete(["job/1/b", "job/1/none", "job/2/none/x"])
    place.storage.delete(["job/1/b"])
    assert place.storage.keys("") == ["job/1/a"]
    assert place.storage.get(kept) == b"a"
    with pytest.raises(SnapshotMissing):
        place.storage.get(gone)
    place.storage.delete(["job/1/a"])
    assert place.storage.get(place.storage.put("job/1/a", b"again")) == b"again"


def test_a_copy_lives_on_when_the_original_is_deleted(place: Place) -> None:
    """A savepoint's namespace is its own."""
    handle = place.storage.put("job/1/a", b"content")
    copy = place.storage.copy(handle, "savepoints/s1/a")
    assert (copy.size, copy.checksum) == (handle.size, handle.checksum)
    place.storage.delete(["job/1/a"])
    assert place.storage.get(copy) == b"content"


@pytest.mark.parametrize(
    "key", ["", "/abs", "../up", "a/../b", "a//b", "a/", "a/./b", ".hidden", "a/.b", "a b", "a\x00b", "ä", "a\\b", "a%2fb", "x" * 600]
)
def test_a_key_that_could_lead_elsewhere_is_refused(place: Place, key: str) -> None:
    """E28: in every operation, before anything is touched."""
    attempts: list[Callable[[], Any]] = [
        lambda: place.storage.put(key, b"x"),
        lambda: place.storage.get(Handle(key, 1, "00")),
        lambda: place.storage.delete([key]),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigurationError, match="snapshot key"):
            attempt()


def test_many_threads_may_put_the_same_and_other_keys_at_once(place: Place) -> None:
    """Late and repeated uploads of one epoch meet; each blob is whole."""
    failures: list[BaseException] = []

    def upload(number: int) -> None:
        try:
            for step in range(3):
                place.storage.put(f"job/{step}/own-{number}", str(number).encode() * 100)
                place.storage.put(f"job/{step}/shared", b"same")
                place.storage.delete([f"gone/{step}/x"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(place.storage.keys("job/")) == 3 * 3 + 3


@contextmanager
def full_disk(limit: int = 4096) -> Iterator[None]:
    """Files cannot grow beyond ``limit`` bytes: the system refuses the write that would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_unavailable_names_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    """The snapshot is not there afterwards, nor a part of it, and the storage works again when there is room."""
    storage = FileSnapshots(tmp_path)
    with full_disk(), pytest.raises(StorageUnavailable, match=r"job/1/a.*free space"):
        storage.put("job/1/a", BIG)
    assert storage.keys("") == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert storage.get(storage.put("job/1/a", BIG)) == BIG


@pytest.mark.parametrize("call", ["fsync", "link", "write"])
def test_a_failing_device_is_unavailable_and_not_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """EIO at any step of writing: the caller hears of it."""
    storage = FileSnapshots(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StorageUnavailable, match=r"job/a"):
            storage.put("job/a", b"x")
    assert storage.get(storage.put("job/a", b"x")) == b"x"


def test_a_file_system_without_links_still_writes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falls back to a rename that looks first."""
    storage = FileSnapshots(tmp_path)

    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    handle = storage.put("k", b"one")
    assert storage.put("k", b"one") == handle
    with pytest.raises(StorageError, match="another content"):
        storage.put("k", b"two")
    assert storage.keys("") == ["k"]


def test_leftovers_of_a_process_that_died_while_writing_are_not_listed(tmp_path: Path) -> None:
    """Temporary files are hidden, and hidden files are no keys."""
    storage = FileSnapshots(tmp_path)
    storage.put("job/a", b"x")
    (tmp_path / "job" / ".a.1f.2.tmp").write_bytes(b"half")
    assert storage.keys("") == ["job/a"]


def test_a_key_below_another_keys_file_is_refused_with_advice(tmp_path: Path) -> None:
    """A file is no directory."""
    storage = FileSnapshots(tmp_path)
    storage.put("job", b"x")
    with pytest.raises(StorageError, match="another key"):
        storage.put("job/a", b"x")


@pytest.mark.parametrize("url", ["http://x/y", "file://host/dir", "file://", "s3://bucket", ""])
def test_a_place_that_is_no_directory_is_refused_with_an_example(url: str) -> None:
    """What to write instead is in the message."""
    with pytest.raises(ConfigurationError, match="file:///"):
        FileSnapshots(url)


def test_a_database_that_cannot_be_reached_is_unavailable_and_not_empty() -> None:
    """E23: no answer is not "none"; the password is not in the message."""
    storage = SqlSnapshots("postgresql://user:hunter2@127.0.0.1:1/none")
    for attempt in (lambda: storage.keys(""), lambda: storage.get(Handle("a", 1, "00")), lambda: storage.put("a", b"x")):
        with pytest.raises(StorageUnavailable) as caught:
            attempt()
        assert "hunter2" not in str(caught.value)
    assert "hunter2" not in storage.url
