"""Checkpoint storage in a directory that every node reaches.

Called by the subtask runner (put, get) and the collector (keys, delete). A blob is one file: written beside its final place, flushed to the
device, then linked to its name, so a reader sees a whole blob or none. What must never happen here: ``put`` returning before file and
directories would survive a power cut, or a key's content being replaced by another (a durable manifest may name it).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from millstream_schema.connectors import Handle
from millstream_schema.errors import ConfigurationError, SnapshotMissing, SnapshotUnreadable, StorageError, StorageUnavailable
from millstream_tasks.snapshots.disk import make_directories, reason_of, sync_directory, write_all
from millstream_tasks.snapshots.keys import checked_key, checked_prefix, handle_for, verified

_T = TypeVar("_T")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_temporary = count()


def directory_of(url_or_path: str | os.PathLike[str]) -> Path:
    """The directory that a ``file:///…`` URL or a plain path names, made absolute. Raises :class:`ConfigurationError`."""
    text = os.fspath(url_or_path)
    if "://" in text or text.startswith("file:"):
        parts = urlsplit(text)
        if (
            parts.scheme != "file"
            or parts.netloc not in ("", "localhost")
            or not parts.path.startswith("/")
            or parts.query
            or parts.fragment
        ):
            raise ConfigurationError(f"checkpoint storage {text!r} is not a file URL; write file:///absolute/directory")
        text = unquote(parts.path)
    if not text:
        raise ConfigurationError("checkpoint storage needs a directory; write file:///absolute/directory")
    return Path(text).absolute()


class FileSnapshots:
    """A :class:`millstream_schema.connectors.SnapshotStorage` under one directory; may be shared by threads, processes and machines."""

    def __init__(self, url_or_path: str | os.PathLike[str]) -> None:
        self._root = directory_of(url_or_path)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def put(self, key: str, data: bytes) -> Handle:
        handle = handle_for(key, data)
        path = self._path(key)
        self._io(path, lambda: self._put(path, data, handle))
        return handle

    def get(self, handle: Handle) -> bytes:
        path = self._path(handle.key)
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SnapshotMissing(f"there is no snapshot {handle.key}: {path} does not exist") from error
        except IsADirectoryError as error:
            raise SnapshotMissing(f"there is no snapshot {handle.key}: {path} is a directory") from error
        except OSError as error:
            if error.errno == errno.EIO:
                raise SnapshotUnreadable(f"snapshot {handle.key} cannot be read: {path}: {error.strerror}") from error
            raise self._unavailable(path, error) from error
        return verified(handle, data, str(path))

    def copy(self, handle: Handle, key: str) -> Handle:
        return self.put(key, self.get(handle))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            self._io(path, lambda path=path: self._delete(path))  # type: ignore[misc]  # mypy cannot type a lambda's default

    def keys(self, prefix: str) -> list[str]:
        start = self._root / checked_prefix(prefix).rpartition("/")[0]
        found = self._io(start, lambda: self._walk(start))
        return sorted(key for key in found if key.startswith(prefix))

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _put(self, path: Path, data: bytes, handle: Handle) -> None:
        for _ in range(8):  # a collector may remove an empty directory between its creation and its first file
            try:
                make_directories(path.parent)
                return self._write(path, data, handle)
            except FileNotFoundError:
                continue
        raise StorageUnavailable(f"{path.parent} vanishes as fast as it is created; is something else deleting below {self._root}?")

    def _write(self, path: Path, data: bytes, handle: Handle) -> None:
        temporary = path.with_name(f".{path.name[:150]}.{os.getpid():x}.{time.monotonic_ns():x}.{next(_temporary):x}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._publish(temporary, path, handle)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)

    def _publish(self, temporary: Path, path: Path, handle: Handle) -> None:
        """Give the file its name without ever replacing another content."""
        try:
            os.link(temporary, path)
        except FileExistsError:
            self._same(path, handle)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if path.exists():
                self._same(path, handle)
            else:
                temporary.rename(path)

    def _same(self, path: Path, handle: Handle) -> None:
        try:
            verified(handle, path.read_bytes(), str(path))
        except (SnapshotUnreadable, IsADirectoryError) as error:
            raise StorageError(f"{path} already holds another content; a snapshot key is written once: use a new key") from error

    def _delete(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self._root:
                    break
                parent.rmdir()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _walk(self, start: Path) -> list[str]:
        if not start.is_dir():
            return []
        found: list[str] = []
        for directory, _, names in os.walk(start, onerror=_raise_unless_gone):
            below = Path(directory).relative_to(self._root)
            found.extend((below / name).as_posix() for name in names if not name.startswith("."))
        return found

    def _io(self, path: Path, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except OSError as error:
            raise self._unavailable(path, error) from error

    def _unavailable(self, path: Path, error: OSError) -> StorageError:
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
            return StorageError(f"{path}: {error.strerror}: a key cannot lie below another key's file; use another key")
        return StorageUnavailable(f"checkpoint storage cannot write or read {path}: {reason_of(error)}")


def _raise_unless_gone(error: OSError) -> None:
    """A directory that a collector removed during the walk held no key; any other failure must not look like absence."""
    if error.errno != errno.ENOENT:
        raise error
