"""Which files a file source sees: complete ones under a directory, or the one file it names.

Called by the file source's discovery. What must never happen here: a directory that cannot be read taken for an empty one, or a file
taken while it is being written (hidden, or named ``*.tmp`` or ``*.part``; they come in by rename).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from millstream_schema.errors import SourceError, SourceUnavailable

UNFINISHED = (".tmp", ".part")


def list_files(root: Path, pattern: str) -> list[str]:
    """Names relative to ``root`` (with ``/``) of the files that match ``pattern``, sorted. ``**`` matches any number of directories."""
    if root.is_file():
        return [root.name]
    if not root.is_dir():
        raise SourceError(f"{root} is neither a file nor a directory on this node. Create it, or mount it on every node.")
    wanted = pattern.split("/")
    return sorted(name for name in _walk(root, "", depth=None if "**" in wanted else len(wanted)) if _matches(name.split("/"), wanted))


def resolve(root: Path, name: str) -> Path:
    """The path of a file that :func:`list_files` named. Raises :class:`SourceError` for a name that leads outside ``root``."""
    parts = name.split("/")
    if not name or name.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise SourceError(f"{name!r} is no file name below {root}; this split was not made by this source")
    if root.is_dir():
        return root.joinpath(*parts)
    return root if root.name == name else root.parent.joinpath(*parts)


def _walk(root: Path, prefix: str, depth: int | None) -> Iterator[str]:
    try:
        with os.scandir(root) as found:
            entries = list(found)
    except FileNotFoundError:
        if not prefix:
            raise SourceError(f"{root} is gone") from None
        return  # a directory below was removed while we looked
    except OSError as error:
        raise SourceUnavailable(f"the directory {root} cannot be read: {error}") from error
    for entry in entries:
        name = prefix + entry.name
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if depth is None or depth > 1:
                yield from _walk(root / entry.name, name + "/", None if depth is None else depth - 1)
        elif entry.is_file() and not entry.name.endswith(UNFINISHED):
            if not name.isprintable() or any("\ud800" <= c <= "\udfff" for c in name):
                raise SourceError(f"the name of {name!r} in {root} is not printable UTF-8; rename it")
            yield name


def _matches(parts: list[str], wanted: list[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return _matches(parts, wanted[1:]) or (bool(parts) and _matches(parts[1:], wanted))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])
