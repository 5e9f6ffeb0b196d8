"""The directory that file sinks write to, as a fenced target: names, locks, the fence, and the journal of commits.

Called by :mod:`millstream_tasks.sinks.files`. All but published files lies in the hidden directory ``.millstream``, which readers pass
over::

    {job}.{operator}.fence                       the generation that may write           (+ .lock)
    {job}.{operator}.{subtask}.journal           commits begun, one JSON line each       (+ .lock)
    {job}.{operator}.{subtask}.{generation}.{n}.open | .sealed

What must never happen here: a lock that is waited for without end (a stopped process may hold it), or a torn journal line that is taken
for a commit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from millstream_schema.connectors import Committable, ConnectorContext
from millstream_schema.errors import Fenced, SinkError
from millstream_schema.target.failures import TargetBusy
from millstream_tasks.sinks.segments import Segment
from millstream_tasks.snapshots.disk import make_directories, sync_directory, write_all

HIDDEN = ".millstream"
_KEPT_COMMITS = 128
_MAX_COMMITS = 1024


def escaped(name: str) -> str:
    """A job or operator as part of a file name: without dots and slashes, unique, at most 60 characters."""
    plain = re.sub(r"[^A-Za-z0-9_-]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)
    if len(plain) <= 60:
        return plain
    return f"{plain[:40]}~{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"


class Entry(NamedTuple):
    """One commit that was begun: its file has its published name, or is still sealed and gets it when the commit is repeated."""

    id: str
    epoch: int
    rows: int
    checksum: str
    sealed: str


class Journal(NamedTuple):
    """What a journal says: ``size`` is its length up to the last whole line, ``pruned`` the highest epoch that is no longer listed."""

    entries: dict[str, Entry]
    pruned: int
    size: int


class FileTarget:
    """One directory, seen from one subtask."""

    def __init__(self, directory: Path, context: ConnectorContext, patience: float) -> None:
        self.directory = directory
        self.hidden = directory / HIDDEN
        self._context = context
        self._patience = patience
        self._owner = f"{escaped(context.job)}.{escaped(context.operator)}"
        self._fence = self.hidden / f"{self._owner}.fence"

    def create(self) -> None:
        """Make the directories."""
        make_directories(self.hidden)

    def staging(self, segment: Segment, ending: str) -> Path:
        """Path of a segment's file; ``ending`` is ``open`` or ``sealed``."""
        job, operator, *numbers = segment
        return self.hidden / ".".join([escaped(job), escaped(operator), *map(str, numbers), ending])

    def published(self, committable: Committable, job: str, ending: str) -> Path:
        """Path under which a committable becomes visible: sorts by epoch within a subtask."""
        names = f"{escaped(job)}.{escaped(committable.operator)}.{committable.subtask}.{committable.epoch:010d}"
        return self.directory / f"part-{names}.{ending}"

    # --- fence ------------------------------------------------------------------------------------------------------------------------

    def raise_fence(self) -> None:
        """Admit this generation and shut out older ones; waits for their commits in flight. Raises :class:`Fenced`."""
        with self._locked(self._fence, fcntl.LOCK_EX):
            if self._fence.exists():
                self.check_fence()
            _replace(self._fence, f"{self._context.generation}\n".encode())

    def check_fence(self) -> None:
        """Raise :class:`Fenced` when a newer generation was admitted."""
        try:
            text = self._fence.read_text()
        except FileNotFoundError as error:
            raise SinkError(f"the fence {self._fence} is gone; do not delete {HIDDEN} of a job that runs") from error
        if not text.endswith("\n") or not text.strip().isdigit():
            raise SinkError(f"the fence {self._fence} cannot be read: {text[:40]!r}; stop the job and write its generation into it")
        if int(text) > self._context.generation:
            owner = f"{self._context.job}/{self._context.operator}"
            raise Fenced(f"generation {self._context.generation} of {owner} is stale: the target is fenced at {int(text)}")

    @contextmanager
    def committing(self, segment: Segment) -> Iterator[Path]:
        """Hold the fence and the original subtask's journal, whose path is given."""
        journal = self.hidden / f"{escaped(segment.job)}.{escaped(segment.operator)}.{segment.subtask}.journal"
        with self._locked(self._fence, fcntl.LOCK_SH), self._locked(journal, fcntl.LOCK_EX):
            self.check_fence()
            yield journal

    @contextmanager
    def _locked(self, path: Path, mode: int) -> Iterator[None]:
        """Hold a lock file. The lock goes with the descriptor, so with the process."""
        descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + self._patience
            while not _try_lock(descriptor, mode):
                if time.monotonic() >= deadline:
                    raise TargetBusy(f"{path} has been locked for {self._patience:g} s; is a stopped process of this job still there?")
                self._context.guard()
                threading.Event().wait(0.01)
            yield
        finally:
            os.close(descriptor)

    # --- what older generations left --------------------------------------------------------------------------------------------------

    def left_behind(self) -> Iterator[tuple[Segment, Path]]:
        """Staged files of older generations that fall to this subtask."""
        pattern = re.compile(re.escape(self._owner) + r"\.(\d+)\.(\d+)\.(\d+)\.(open|sealed)\Z")
        for name in sorted(os.listdir(self.hidden)):
            if match := pattern.match(name):
                segment = Segment(self._context.job, self._context.operator, *map(int, match.groups()[:3]))
                if segment.left_behind(self._context):
                    yield segment, self.hidden / name


def _try_lock(descriptor: int, mode: int) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _replace(path: Path, data: bytes) -> None:
    """Put a file in place of another, whole or not at all. Callers hold the lock that makes the temporary name theirs."""
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_directory(path.parent)


def read_journal(path: Path) -> Journal:
    """What was committed. A last line without its end was never acknowledged and does not count; any other damage is an error."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Journal({}, 0, 0)
    size = data.rfind(b"\n") + 1
    entries: dict[str, Entry] = {}
    pruned = 0
    for number, line in enumerate(data[:size].splitlines(), 1):
        try:
            fields = json.loads(line)
            if "pruned" in fields:
                pruned = int(fields["pruned"])
            else:
                entry = Entry(**fields)
                entries[entry.id] = entry
        except (ValueError, TypeError) as error:
            raise SinkError(f"line {number} of the commit journal {path} is damaged; restore the file before the job goes on") from error
    return Journal(entries, pruned, size)


def append_journal(path: Path, journal: Journal, entry: Entry) -> None:
    """Note a commit that begins, durably; rewrites the journal when it has grown long."""
    entries = [*journal.entries.values(), entry]
    if len(entries) > _MAX_COMMITS:
        entries.sort(key=lambda one: one.epoch)
        dropped, entries = entries[:-_KEPT_COMMITS], entries[-_KEPT_COMMITS:]
        head = json.dumps({"pruned": max(journal.pruned, dropped[-1].epoch)})
        _replace(path, "".join(f"{line}\n" for line in (head, *(json.dumps(one._asdict()) for one in entries))).encode())
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, journal.size)
        os.lseek(descriptor, journal.size, os.SEEK_SET)
        write_all(descriptor, f"{json.dumps(entry._asdict())}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if journal.size == 0:
        sync_directory(path.parent)


def file_checksum(path: Path, guard: Callable[[], None]) -> str:
    """BLAKE2b-128 of a file's content, in hex."""
    hasher = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            guard()
            hasher.update(block)
    return hasher.hexdigest()
