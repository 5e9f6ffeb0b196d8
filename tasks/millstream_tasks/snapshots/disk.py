"""Files that survive a power cut: the few steps in which checkpoint storage and the file sink write.

Called by both. What must never happen here: a name that is durable before the content behind it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a file's content to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create ``path`` and what is missing above it, and flush every directory that got an entry."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte: a write may be short when the disk fills."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def reason_of(error: OSError) -> str:
    """What went wrong, and what to do when the disk is full."""
    reason = error.strerror or str(error)
    return f"{reason}; free space, then go on" if error.errno in _FULL else reason
