"""One open input file: its identity, plain or gzip bytes, and errors that name it.

Called by the file source. What must never happen here: resuming in a file that is not the one the cursor was taken in, or reading on past
the size the file had when it was opened.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import IO

import xxhash

from millstream_schema.connectors import Json
from millstream_schema.errors import SourceError, SourceUnavailable

HEAD_BYTES = 4096


class InputFile:
    """An open file. ``size`` and ``head`` (hash of the first ≤ 4 KiB on disk) identify it; offsets are of the uncompressed bytes."""

    def __init__(self, path: Path, name: str, compressed: bool) -> None:
        self.path = path
        self.name = name
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # held until close()
        except FileNotFoundError:
            raise SourceError(f"{path} is missing: it was there when its split was discovered. Put the same file back.") from None
        except OSError as error:
            raise SourceUnavailable(f"{path} cannot be opened: {error}") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.head = xxhash.xxh3_128_hexdigest(_read_fully(self._file, HEAD_BYTES))
            self._file.seek(0)
        except OSError as error:
            self._file.close()
            raise SourceUnavailable(f"{path} cannot be read: {error}") from error
        self._gzip = gzip.GzipFile(fileobj=self._file, mode="rb") if compressed else None

    def identity(self) -> dict[str, Json]:
        """What a cursor keeps to know the file again."""
        return {"file": self.name, "size": self.size, "head": self.head}

    def verify(self, cursor: dict[str, Json]) -> None:
        """Raises :class:`SourceError` unless the cursor was taken in this file as it is now."""
        for key, now in self.identity().items():
            if cursor.get(key) != now:
                raise SourceError(
                    f"{self.path} changed since it was read: its {key} was {cursor.get(key)!r} and is {now!r}. "
                    "Files must be complete and stay as they are; put the former file back, or start the job without this state."
                )

    def seek(self, offset: int) -> None:
        """Stand at ``offset``. Raises :class:`SourceError` when the file ends before it."""
        try:
            reached = self._file.seek(offset) if self._gzip is None else self._gzip.seek(offset)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise SourceUnavailable(f"{self.path} cannot be read: {error}") from error
        if reached != offset or (self._gzip is None and offset > self.size):
            raise SourceError(f"{self.path} ends before byte {offset}, where its cursor stands: the file was cut short. Put it back.")

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, ``b""`` at the end. Raises :class:`SourceError` when the file is damaged or grew."""
        try:
            data = self._file.read(size) if self._gzip is None else self._gzip.read(size)
            if not data and (now := os.fstat(self._file.fileno()).st_size) != self.size:
                raise SourceError(
                    f"{self.path} had {self.size} bytes when it was opened and has {now} now: it is still being written. "
                    "Write files under a name that ends in .tmp, then rename them."
                )
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise SourceUnavailable(f"{self.path} cannot be read: {error}") from error
        return data

    def close(self) -> None:
        if self._gzip is not None:
            self._gzip.close()
        self._file.close()

    def _damaged(self, error: Exception) -> SourceError:
        return SourceError(
            f"{self.path} is not a whole gzip file: {error}. Put a whole one in its place and start the job without this state."
        )


def _read_fully(file: IO[bytes], size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (data := file.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
