"""Every statement that sinks execute in a target database, one named function a statement. Written with ``?``; the connection door
translates.

Called by the SQL sinks. Tables in the target, created when they are missing::

    millstream_fence      one row per (job, operator): the generation that may write
    millstream_committer  one row per original sink subtask: its lock, and ``pruned``, the highest epoch whose marker was removed
    millstream_committed  one row per committable: the marker, written in the transaction that moved its rows
    millstream_staging    one row per chunk of staged records

A marker is a row per committable and not a "last epoch" per subtask: the order of commits is the caller's promise, and a marker that
trusts it would turn a late commit into lost rows. Markers are bounded by :func:`prune_markers`; what was pruned stays known by
``pruned``. What must never happen here: a statement that changes rows without naming job, operator and what it expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millstream_schema.target.dialects import Dialect

FENCE: Final = "millstream_fence"
COMMITTER: Final = "millstream_committer"
COMMITTED: Final = "millstream_committed"
STAGING: Final = "millstream_staging"
OWN_TABLES: Final = (FENCE, COMMITTER, COMMITTED, STAGING)


def fence_table(d: Dialect) -> dict[str, str]:
    """DDL of the fence, by table."""
    return {
        FENCE: f"CREATE TABLE IF NOT EXISTS {FENCE} (job {d.text_key} NOT NULL, operator {d.text_key} NOT NULL, "
        f"generation BIGINT NOT NULL, PRIMARY KEY (job, operator)) {d.table_options}"
    }


def append_tables(d: Dialect) -> dict[str, str]:
    """DDL of all that a two-phase sink needs, by table."""
    owner = f"job {d.text_key} NOT NULL, operator {d.text_key} NOT NULL, subtask INTEGER NOT NULL"
    return {
        **fence_table(d),
        COMMITTER: f"CREATE TABLE IF NOT EXISTS {COMMITTER} ({owner}, pruned BIGINT NOT NULL, "
        f"PRIMARY KEY (job, operator, subtask)) {d.table_options}",
        COMMITTED: f"CREATE TABLE IF NOT EXISTS {COMMITTED} ({owner}, epoch BIGINT NOT NULL, checksum VARCHAR(64) NOT NULL, "
        f"records BIGINT NOT NULL, committed_at_us BIGINT NOT NULL, PRIMARY KEY (job, operator, subtask, epoch)) {d.table_options}",
        STAGING: f"CREATE TABLE IF NOT EXISTS {STAGING} ({owner}, generation BIGINT NOT NULL, n BIGINT NOT NULL, seq BIGINT NOT NULL, "
        f"records BIGINT NOT NULL, checksum VARCHAR(64) NOT NULL, body {d.blob} NOT NULL, "
        f"PRIMARY KEY (job, operator, subtask, generation, n, seq)) {d.table_options}",
    }


# --- fence: parameters job, operator -------------------------------------------------------------------------------------------------


def insert_fence(d: Dialect) -> str:
    """Parameters job, operator, generation; touches no row when there is a fence."""
    return f"INSERT INTO {FENCE} (job, operator, generation) VALUES (?, ?, ?) {d.ignore_repeat('generation')}"


def lock_fence(d: Dialect) -> str:
    """The generation, locked against everyone: to raise it."""
    return f"SELECT generation FROM {FENCE} WHERE job = ? AND operator = ? {d.update}"


def share_fence(d: Dialect) -> str:
    """The generation, held against being raised until the transaction ends; other writers of the same generation may hold it too."""
    return f"SELECT generation FROM {FENCE} WHERE job = ? AND operator = ? {d.share}"


def raise_fence() -> str:
    """Parameters generation, job, operator, generation."""
    return f"UPDATE {FENCE} SET generation = ? WHERE job = ? AND operator = ? AND generation < ?"


# --- committer and markers: parameters job, operator, subtask ------------------------------------------------------------------------


def insert_committer(d: Dialect) -> str:
    """Parameters job, operator, subtask; touches no row when there is one."""
    return f"INSERT INTO {COMMITTER} (job, operator, subtask, pruned) VALUES (?, ?, ?, 0) {d.ignore_repeat('pruned')}"


def lock_committer(d: Dialect) -> str:
    """``pruned``, locked: one commit of an original subtask at a time, whoever carries it out."""
    return f"SELECT pruned FROM {COMMITTER} WHERE job = ? AND operator = ? AND subtask = ? {d.update}"


def read_marker() -> str:
    """Checksum and records of a committed epoch; parameters end with epoch."""
    return f"SELECT checksum, records FROM {COMMITTED} WHERE job = ? AND operator = ? AND subtask = ? AND epoch = ?"


def insert_marker(d: Dialect) -> str:
    """Parameters job, operator, subtask, epoch, checksum, records. A repeat violates the primary key, and must."""
    columns = "job, operator, subtask, epoch, checksum, records, committed_at_us"
    return f"INSERT INTO {COMMITTED} ({columns}) VALUES (?, ?, ?, ?, ?, ?, {d.now_us})"


def marker_to_prune(keep: int) -> str:
    """The newest epoch beyond the ``keep`` newest markers, if there are as many."""
    return f"SELECT epoch FROM {COMMITTED} WHERE job = ? AND operator = ? AND subtask = ? ORDER BY epoch DESC LIMIT 1 OFFSET {int(keep)}"


def prune_markers() -> str:
    """Parameters end with the newest epoch to remove."""
    return f"DELETE FROM {COMMITTED} WHERE job = ? AND operator = ? AND subtask = ? AND epoch <= ?"


def note_pruned() -> str:
    """Parameters pruned, job, operator, subtask, pruned."""
    return f"UPDATE {COMMITTER} SET pruned = ? WHERE job = ? AND operator = ? AND subtask = ? AND pruned < ?"


# --- staging: parameters job, operator, subtask, generation, n -----------------------------------------------------------------------


def stage_chunk(d: Dialect) -> str:
    """Parameters end with seq, records, checksum, body; touches no row when the chunk is there (a COMMIT whose answer was lost)."""
    columns = "job, operator, subtask, generation, n, seq, records, checksum, body"
    return f"INSERT INTO {STAGING} ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) {d.ignore_repeat('seq')}"


def staged_checksum() -> str:
    """Checksum of one chunk; parameters end with seq."""
    return f"SELECT checksum FROM {STAGING} WHERE job = ? AND operator = ? AND subtask = ? AND generation = ? AND n = ? AND seq = ?"


def staged_chunks() -> str:
    """Sequence numbers, records and checksums of a segment, in order, without bodies."""
    return (
        f"SELECT seq, records, checksum FROM {STAGING} WHERE job = ? AND operator = ? AND subtask = ? AND generation = ? AND n = ? "
        "ORDER BY seq"
    )


def staged_body() -> str:
    """Body of one chunk; parameters end with seq."""
    return f"SELECT body FROM {STAGING} WHERE job = ? AND operator = ? AND subtask = ? AND generation = ? AND n = ? AND seq = ?"


def delete_staged() -> str:
    """Delete one segment."""
    return f"DELETE FROM {STAGING} WHERE job = ? AND operator = ? AND subtask = ? AND generation = ? AND n = ?"


def older_segments() -> str:
    """Subtask, generation and n of every segment below a generation; parameters job, operator, generation."""
    return f"SELECT DISTINCT subtask, generation, n FROM {STAGING} WHERE job = ? AND operator = ? AND generation < ?"


# --- the user's table ----------------------------------------------------------------------------------------------------------------


def read_nothing(d: Dialect, table: str, columns: Sequence[str]) -> str:
    """Fails unless the table has the columns."""
    return f"SELECT {d.names(columns)} FROM {d.table(table)} WHERE 1 = 0"


def insert_head(d: Dialect, table: str, columns: Sequence[str]) -> str:
    """The part of an INSERT before VALUES."""
    return f"INSERT INTO {d.table(table)} ({d.names(columns)})"


def upsert_nothing(d: Dialect, table: str, columns: Sequence[str], keys: Sequence[str]) -> str:
    """Upserts no row: fails on SQLite and PostgreSQL unless a unique key over exactly ``keys`` exists."""
    return f"{insert_head(d, table, columns)} {read_nothing(d, table, columns)} {d.upsert_tail(columns, keys)}"


def table_engine(table: str) -> tuple[str, list[str]]:
    """MariaDB, MySQL: the storage engine of a table, with its parameters."""
    schema, _, name = table.rpartition(".")
    where = "table_schema = ?" if schema else "table_schema = DATABASE()"
    return f"SELECT engine FROM information_schema.tables WHERE {where} AND table_name = ?", [*([schema] if schema else []), name]


def unique_keys(table: str) -> tuple[str, list[str]]:
    """MariaDB, MySQL: index name and column of every unique key of a table, in order, with its parameters."""
    schema, _, name = table.rpartition(".")
    where = "table_schema = ?" if schema else "table_schema = DATABASE()"
    return (
        f"SELECT index_name, column_name FROM information_schema.statistics WHERE {where} AND table_name = ? AND non_unique = 0 "
        "ORDER BY index_name, seq_in_index",
        [*([schema] if schema else []), name],
    )


def table_persistence(d: Dialect) -> str:
    """PostgreSQL: ``p`` for a logged table, ``u`` for one that a crash empties; parameter the quoted table."""
    return "SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass(?)"
