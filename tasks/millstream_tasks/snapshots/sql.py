"""Checkpoint storage in a SQL database: for machines that share no directory.

Called by the subtask runner (put, get) and the collector (keys, delete); may be used from several threads, one at a time. A blob is
written in one transaction, so a reader sees a whole blob or none. What must never happen here: a key's content being replaced by another
(a durable manifest may name it), or a database that cannot be reached looking like one that holds nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from millstream_schema.connectors import LOCK_TIMEOUT, Handle
from millstream_schema.errors import CommitUnknown, SnapshotMissing, StorageError, StorageUnavailable
from millstream_schema.target import snapshot_statements as statements
from millstream_schema.target.connection import Connect, Transaction, connect
from millstream_schema.target.failures import TargetBusy, TargetRefused, TargetUnavailable
from millstream_tasks.snapshots.keys import checked_key, checked_prefix, handle_for, verified

_T = TypeVar("_T")
_MAX_BLOB = 1 << 30
_TRIES = 3
_AFTER_EVERY_KEY = "\x7f"  # keys are printable ASCII


class SqlSnapshots:
    """A :class:`millstream_schema.connectors.SnapshotStorage` in the table ``millstream_snapshot`` of one database.

    Meant for blobs up to some 64 MiB. ``lock_timeout`` (seconds): below a third of the job's lease.
    """

    def __init__(self, url: str, *, lock_timeout: float = LOCK_TIMEOUT, connect: Connect = connect) -> None:
        self._connection = connect(url, durable=True, lock_timeout=lock_timeout)
        self._lock = threading.Lock()
        self._ready = False

    @property
    def url(self) -> str:
        """The database, without its password."""
        return self._connection.url.redacted()

    def put(self, key: str, data: bytes) -> Handle:
        handle = handle_for(key, data)
        if handle.size > _MAX_BLOB:
            raise StorageError(
                f"snapshot {key} has {handle.size} bytes, the most is {_MAX_BLOB}; use file:// checkpoint storage or more subtasks"
            )
        self._run(key, lambda transaction: self._put(transaction, handle, data))
        return handle

    def get(self, handle: Handle) -> bytes:
        checked_key(handle.key)
        parts = self._run(handle.key, lambda transaction: self._get(transaction, handle.key))
        if not parts:
            raise SnapshotMissing(f"there is no snapshot {handle.key} in {self.url}")
        return verified(handle, b"".join(parts), self.url)

    def copy(self, handle: Handle, key: str) -> Handle:
        return self.put(key, self.get(handle))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            checked_key(key)
            self._run(key, lambda transaction, key=key: transaction.execute(statements.delete_blob(), [key]))  # type: ignore[misc]

    def keys(self, prefix: str) -> list[str]:
        checked_prefix(prefix)
        rows = self._run(prefix, lambda transaction: transaction.fetch(statements.keys_between(), [prefix, prefix + _AFTER_EVERY_KEY]))
        return [str(key) for (key,) in rows]

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        with self._lock:
            self._connection.close()

    def _put(self, transaction: Transaction, handle: Handle, data: bytes) -> None:
        insert = statements.insert_part(transaction.dialect)
        for part, start in enumerate(range(0, max(1, len(data)), statements.PART_BYTES)):
            body = data[start : start + statements.PART_BYTES]
            if transaction.execute(insert, [handle.key, part, handle.size, handle.checksum, body]) == 1:
                continue
            if transaction.fetch(statements.read_identity(), [handle.key]) != [(handle.size, handle.checksum)]:
                raise StorageError(
                    f"{self.url} already holds another content under {handle.key}; a snapshot key is written once: use a new key"
                )
            return

    def _get(self, transaction: Transaction, key: str) -> list[bytes]:
        ((count,),) = transaction.fetch(statements.count_parts(), [key])
        rows = [transaction.fetch(statements.read_part(), [key, part]) for part in range(count)]
        return [bytes(body) for found in rows for (body,) in found]

    def _run(self, key: str, action: Callable[[Transaction], _T]) -> _T:
        """One transaction; again when it was busy or its answer was lost, which every action here bears."""
        with self._lock:
            for attempt in range(_TRIES):
                try:
                    self._prepare()
                    with self._connection.transaction() as transaction:
                        return action(transaction)
                except (TargetBusy, CommitUnknown) as error:
                    if attempt == _TRIES - 1:
                        raise StorageUnavailable(f"checkpoint storage cannot write or read {key!r}: {error}") from error
                except TargetUnavailable as error:
                    raise StorageUnavailable(f"checkpoint storage cannot write or read {key!r}: {error}") from error
                except TargetRefused as error:
                    raise StorageError(f"checkpoint storage refuses {key!r}: {error}") from error
        raise AssertionError("unreachable: the last try returns or raises")

    def _prepare(self) -> None:
        if not self._ready:
            self._connection.ensure_tables(statements.snapshot_table(self._connection.dialect))
            self._ready = True
