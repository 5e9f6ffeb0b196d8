"""What a snapshot key may look like, and the checksum that goes into its handle: one rule for every storage.

Called by the storages beside it. What must never happen here: a key that leads out of the storage's own directory.
"""

from __future__ import annotations

import hashlib
import re

from millstream_schema.connectors import Handle
from millstream_schema.errors import ConfigurationError, SnapshotUnreadable

_PART = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*\Z")
_MAX_KEY = 512
_MAX_PART = 200


def checked_key(key: str) -> str:
    """``key`` itself. Raises :class:`ConfigurationError` unless it is slash-separated parts of ``[A-Za-z0-9._=-]`` with no leading dot."""
    parts = key.split("/")
    if len(key) > _MAX_KEY or not all(len(part) <= _MAX_PART and _PART.match(part) for part in parts):
        raise ConfigurationError(
            f"snapshot key {key!r} is refused: use at most {_MAX_KEY} characters, parts of A-Z a-z 0-9 . _ = - that do not start with a "
            f"dot and have at most {_MAX_PART} characters, separated by single slashes"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """``prefix`` itself: empty, a key, a key with a trailing slash, or the beginning of a key."""
    if prefix:
        checked_key(prefix.removesuffix("/"))
    return prefix


def digest(data: bytes) -> str:
    """BLAKE2b-128 of a blob, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def handle_for(key: str, data: bytes) -> Handle:
    """The handle under which ``data`` can be read back."""
    return Handle(checked_key(key), len(data), digest(data))


def verified(handle: Handle, data: bytes, place: str) -> bytes:
    """``data`` if it is what the handle promises. Raises :class:`SnapshotUnreadable` that names ``place``."""
    if len(data) != handle.size:
        raise SnapshotUnreadable(
            f"snapshot {handle.key} is damaged: {place} holds {len(data)} bytes, {handle.size} were written; restore it from a copy"
        )
    if digest(data) != handle.checksum:
        raise SnapshotUnreadable(f"snapshot {handle.key} is damaged: the checksum of {place} does not match; restore it from a copy")
    return data
