"""The tables, for one prefix. Alembic's migrations create them; a test compares the two.

No foreign keys. Identifiers compare byte by byte on every database. Every guarded UPDATE raises ``rev``. Times are BIGINT UTC microseconds by the database's clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from sqlalchemy import BigInteger, CheckConstraint, Column, Integer, LargeBinary, MetaData, String, Table, Text
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.types import TypeEngine

from ..errors import ConfigurationError
from ..states import AssignmentState, Desired, EpochState, JobState, NodeState, SplitOwner

SCHEMA_VERSION = 1
_PREFIX = re.compile(r"[a-z][a-z0-9_]{0,20}\Z")


def ident(length: int) -> TypeEngine[str]:
    """A string that compares byte by byte."""
    return (
        String(length)
        .with_variant(mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_nopad_bin"), "mysql", "mariadb")
        .with_variant(postgresql.VARCHAR(length, collation="C"), "postgresql")
    )


def long_text() -> TypeEngine[str]:
    return Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def blob() -> TypeEngine[bytes]:
    return LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def _one_of(column: str, values: Iterable[str], name: str) -> CheckConstraint:
    listed = ", ".join(f"'{v}'" for v in values)
    return CheckConstraint(f"{column} IN ({listed})", name=name)


@dataclass(frozen=True)
class Tables:
    """Every table of one installation."""

    metadata: MetaData
    prefix: str
    schema: Table
    coordinator: Table
    node: Table
    job: Table
    assignment: Table
    epoch: Table
    ack: Table
    manifest: Table
    split: Table
    source: Table
    savepoint: Table
    history: Table
    channel: Table


@cache
def tables(prefix: str = "millstream_") -> Tables:
    """Table objects for ``prefix``. Raises ConfigurationError for one that is not an SQL identifier."""
    if not _PREFIX.match(prefix):
        raise ConfigurationError(f"table prefix {prefix!r} must match {_PREFIX.pattern}")
    m = MetaData()
    p = prefix

    def big(name: str, *, null: bool = False, default: int | None = 0) -> Column[int]:
        return Column(name, BigInteger, nullable=null, default=None if null else default)

    return Tables(
        metadata=m,
        prefix=p,
        schema=Table(
            f"{p}schema",
            m,
            Column("id", Integer, primary_key=True),
            Column("version", Integer, nullable=False),
            Column("state", ident(16), nullable=False),
        ),
        coordinator=Table(
            f"{p}coordinator",
            m,
            Column("id", ident(32), primary_key=True),
            Column("holder", ident(64), nullable=False),
            big("term"),
            big("expires_us"),
            big("ticked_us"),
            big("rev"),
        ),
        node=Table(
            f"{p}node",
            m,
            Column("id", ident(64), primary_key=True),
            Column("name", ident(255), nullable=False),
            Column("slots", Integer, nullable=False),
            Column("state", ident(16), nullable=False),
            Column("info", long_text(), nullable=False),
            big("started_us"),
            big("renewed_us"),
            big("expires_us"),
            big("rev"),
            _one_of("state", NodeState, f"{p}node_state"),
            CheckConstraint("slots >= 0", name=f"{p}node_slots"),
        ),
        job=Table(
            f"{p}job",
            m,
            Column("id", ident(64), primary_key=True),
            Column("namespace", ident(64), nullable=False),
            Column("name", ident(64), nullable=False),
            Column("factory", ident(128), nullable=False),
            Column("config", long_text(), nullable=False),
            Column("parallelism", Integer, nullable=True),
            Column("overrides", long_text(), nullable=False),
            Column("settings", long_text(), nullable=False),
            Column("plan", long_text(), nullable=False),
            Column("model", long_text(), nullable=False),
            Column("plan_fingerprint", ident(64), nullable=False),
            Column("state", ident(32), nullable=False),
            Column("reason", long_text(), nullable=False),
            Column("desired", ident(16), nullable=False),
            Column("mode", ident(16), nullable=False),
            big("generation"),
            big("term"),
            big("next_epoch", default=1),
            big("in_flight"),
            big("newest_durable"),
            big("newest_committed"),
            big("restore_epoch"),
            Column("target", ident(16), nullable=False, default=""),
            Column("restore_from", ident(128), nullable=False),
            Column("lenient", Integer, nullable=False, default=0),
            Column("renames", long_text(), nullable=False),
            Column("aborts", Integer, nullable=False, default=0),
            Column("failures", Integer, nullable=False, default=0),
            Column("stalls", Integer, nullable=False, default=0),
            Column("restarts", Integer, nullable=False, default=0),
            Column("recent_restarts", long_text(), nullable=False),
            Column("causes", long_text(), nullable=False),
            Column("wanted_savepoint", ident(128), nullable=False, default=""),
            Column("wants_epoch", Integer, nullable=False, default=0),
            Column("pending_commits", long_text(), nullable=False),
            Column("splits_rev", BigInteger, nullable=False, default=0),
            big("deployed_us"),
            big("due_us"),
            big("epoch_us"),
            big("restarted_us"),
            big("stopping_us"),
            big("created_us"),
            big("changed_us"),
            big("rev"),
            Column("ended", Integer, nullable=False, default=0),
            Column("live_name", ident(130), nullable=True, unique=True),
            _one_of("state", JobState, f"{p}job_state"),
            _one_of("desired", Desired, f"{p}job_desired"),
            CheckConstraint("newest_committed <= newest_durable", name=f"{p}job_commit_after_durable"),
        ),
        assignment=Table(
            f"{p}assignment",
            m,
            Column("job", ident(64), primary_key=True),
            Column("generation", BigInteger, primary_key=True, autoincrement=False),
            Column("subtask", ident(80), primary_key=True),
            Column("node", ident(64), nullable=False, index=True),
            Column("attempt", ident(64), nullable=False, default=""),
            Column("state", ident(16), nullable=False),
            Column("cause", ident(32), nullable=False, default=""),
            Column("detail", long_text(), nullable=False),
            big("committed"),
            Column("commit_detail", long_text(), nullable=False),
            Column("exhausted", Integer, nullable=False, default=0),
            big("progress"),
            big("progressed_us"),
            Column("stats", long_text(), nullable=False),
            big("changed_us"),
            big("rev"),
            _one_of("state", AssignmentState, f"{p}assignment_state"),
        ),
        epoch=Table(
            f"{p}epoch",
            m,
            Column("job", ident(64), primary_key=True),
            Column("epoch", BigInteger, primary_key=True, autoincrement=False),
            big("generation"),
            big("term"),
            Column("kind", ident(16), nullable=False),
            Column("state", ident(16), nullable=False),
            Column("reason", long_text(), nullable=False),
            Column("savepoint", ident(128), nullable=False, default=""),
            Column("splits", long_text(), nullable=False),
            big("size"),
            big("triggered_us"),
            big("durable_us"),
            big("committed_us"),
            big("rev"),
            _one_of("state", EpochState, f"{p}epoch_state"),
        ),
        ack=Table(
            f"{p}ack",
            m,
            Column("job", ident(64), primary_key=True),
            Column("epoch", BigInteger, primary_key=True, autoincrement=False),
            Column("subtask", ident(80), primary_key=True),
            big("generation"),
            Column("attempt", ident(64), nullable=False),
            Column("snapshot", long_text(), nullable=False),
            Column("declined", long_text(), nullable=False),
            big("acked_us"),
        ),
        manifest=Table(
            f"{p}manifest",
            m,
            Column("job", ident(64), primary_key=True),
            Column("epoch", BigInteger, primary_key=True, autoincrement=False),
            Column("kind", ident(16), nullable=False),
            Column("body", long_text(), nullable=False),
            Column("checksum", ident(64), nullable=False),
            big("created_us"),
        ),
        split=Table(
            f"{p}split",
            m,
            Column("job", ident(64), primary_key=True),
            Column("operator", ident(64), primary_key=True),
            Column("split", ident(255), primary_key=True),
            Column("body", long_text(), nullable=False),
            Column("cursor", long_text(), nullable=False),
            Column("state", ident(16), nullable=False),
            Column("owner", Integer, nullable=False, default=-1),
            big("rev"),
            _one_of("state", SplitOwner, f"{p}split_state"),
        ),
        source=Table(
            f"{p}source",
            m,
            Column("job", ident(64), primary_key=True),
            Column("operator", ident(64), primary_key=True),
            Column("complete", Integer, nullable=False, default=0),
            big("generation"),
            big("rev"),
        ),
        savepoint=Table(
            f"{p}savepoint",
            m,
            Column("id", ident(128), primary_key=True),
            Column("job", ident(64), nullable=False),
            big("epoch"),
            Column("body", long_text(), nullable=False),
            Column("checksum", ident(64), nullable=False),
            Column("model", long_text(), nullable=False),
            Column("state", ident(16), nullable=False),
            Column("error", long_text(), nullable=False),
            big("created_us"),
            big("rev"),
        ),
        channel=Table(
            f"{p}channel",
            m,
            Column("job", ident(64), primary_key=True),
            Column("generation", BigInteger, primary_key=True, autoincrement=False),
            Column("edge", ident(16), primary_key=True),
            Column("source", Integer, primary_key=True, autoincrement=False),
            Column("target", Integer, primary_key=True, autoincrement=False),
        ),
        history=Table(
            f"{p}history",
            m,
            Column("job", ident(64), primary_key=True),
            Column("seq", BigInteger, primary_key=True, autoincrement=False),
            Column("event", ident(32), nullable=False),
            Column("detail", long_text(), nullable=False),
            big("at_us"),
        ),
    )
