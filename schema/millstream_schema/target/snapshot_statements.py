"""Every statement of SQL checkpoint storage, one named function a statement. Written with ``?``; the connection door translates.

Called by ``millstream_tasks.snapshots.sql``. One table: a blob is one or more parts of at most a mebibyte, which every database's packet
limit lets through. Each part carries the whole blob's size and checksum. What must never happen here: a part that replaces another.
"""

from __future__ import annotations

from typing import Final

from millstream_schema.target.dialects import Dialect

SNAPSHOT: Final = "millstream_snapshot"
PART_BYTES: Final = 1 << 20


def snapshot_table(d: Dialect) -> dict[str, str]:
    """DDL, by table. Keys are ASCII and compared byte by byte."""
    key = "VARCHAR(512) CHARACTER SET ascii COLLATE ascii_bin" if d.name == "mysql" else d.text_key
    return {
        SNAPSHOT: f"CREATE TABLE IF NOT EXISTS {SNAPSHOT} (blob_key {key} NOT NULL, part INTEGER NOT NULL, size BIGINT NOT NULL, "
        f"checksum VARCHAR(64) NOT NULL, body {d.blob} NOT NULL, PRIMARY KEY (blob_key, part)) {d.table_options}"
    }


def insert_part(d: Dialect) -> str:
    """Parameters blob_key, part, size, checksum, body; touches no row when the part is there."""
    return f"INSERT INTO {SNAPSHOT} (blob_key, part, size, checksum, body) VALUES (?, ?, ?, ?, ?) {d.ignore_repeat('part')}"


def read_identity() -> str:
    """Size and checksum of the blob under a key."""
    return f"SELECT size, checksum FROM {SNAPSHOT} WHERE blob_key = ? AND part = 0"


def read_part() -> str:
    """Body of one part; parameters blob_key, part."""
    return f"SELECT body FROM {SNAPSHOT} WHERE blob_key = ? AND part = ?"


def count_parts() -> str:
    """How many parts a key has."""
    return f"SELECT COUNT(*) FROM {SNAPSHOT} WHERE blob_key = ?"


def delete_blob() -> str:
    """Delete every part of a key."""
    return f"DELETE FROM {SNAPSHOT} WHERE blob_key = ?"


def keys_between() -> str:
    """Keys from the first parameter up to the second, excluded."""
    return f"SELECT blob_key FROM {SNAPSHOT} WHERE part = 0 AND blob_key >= ? AND blob_key < ? ORDER BY blob_key"
