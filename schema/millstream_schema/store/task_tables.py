"""The tables of durable tasks.

What is finished, blocked or due later costs a claim nothing: only READY rows that nothing blocks have a ``ready_lane``, only waiting ones a ``wake_us``, only blocked ones a
``blocked_by``, and each has an index of its own.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, Integer, MetaData, Table, UniqueConstraint, text

from ..durable.states import Effects, TaskState
from .columns import big, ident, long_text, one_of


def _some(name: str, where: str, *columns: str) -> Index:
    """An index of those rows alone that are looked for by it, where the database has such indexes: the others need no entry at each change.

    Nothing depends on it: elsewhere it holds all rows and is only larger. A statement that uses it repeats the condition where it does not follow from the others.
    """
    return Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where))


def task_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    task = Table(
        f"{p}task",
        m,
        Column("id", ident(64), primary_key=True),
        Column("namespace", ident(64), nullable=False),
        Column("handler", ident(200), nullable=False),
        Column("key", ident(200), nullable=False),
        Column("digest", ident(80), nullable=False),
        Column("queue", ident(64), nullable=False),
        Column("business_key", ident(200), nullable=False, default=""),
        Column("state", ident(16), nullable=False),
        Column("cause", ident(16), nullable=False, default=""),
        Column("reason", long_text(), nullable=False),
        Column("effects", ident(16), nullable=False),
        Column("policy", long_text(), nullable=False),
        Column("args", long_text(), nullable=False),
        Column("priority", Integer, nullable=False, default=0),
        big("fence"),
        Column("token", ident(64), nullable=False, default=""),
        Column("session", ident(64), nullable=False, default=""),
        Column("claim", ident(64), nullable=False, default=""),
        Column("failures", Integer, nullable=False, default=0),
        Column("crashes", Integer, nullable=False, default=0),
        Column("losses", Integer, nullable=False, default=0),
        Column("snoozes", Integer, nullable=False, default=0),
        Column("starts", Integer, nullable=False, default=0),
        Column("cancel", Integer, nullable=False, default=0),
        Column("permit", ident(200), nullable=False, default=""),
        Column("ordered", Integer, nullable=False, default=0),
        Column("permit_held", Integer, nullable=False, default=0),
        big("permit_seq"),
        Column("blocked_by", ident(300), nullable=True),
        Column("ready_lane", ident(160), nullable=True),
        big("rank"),
        big("wake_us", null=True),
        big("due_us"),
        big("start_by_us"),
        big("deadline_us"),
        big("claimed_us"),
        big("started_us"),
        big("settled_us"),
        big("created_us"),
        big("changed_us"),
        Column("result", long_text(), nullable=False),
        Column("error", long_text(), nullable=False),
        Column("origin", ident(200), nullable=False, default=""),
        Column("root", ident(64), nullable=False),
        Column("retry_of", ident(64), nullable=False, default=""),
        Column("superseded_by", ident(64), nullable=False, default=""),
        Column("actor", ident(128), nullable=False, default=""),
        Column("marker", ident(64), nullable=False, default="", server_default=text("''")),
        Column("ending", long_text(), nullable=True),
        Column("error_class", ident(200), nullable=False, default="", server_default=text("''")),
        big("amiss_us", null=True),
        big("rev"),
        UniqueConstraint("namespace", "handler", "key", name=f"{p}task_identity"),
        one_of("state", TaskState, f"{p}task_state"),
        one_of("effects", Effects, f"{p}task_effects"),
        CheckConstraint(
            "(state IN ('DISPATCHED', 'RUNNING')) = (session <> '')",
            name=f"{p}task_held",
        ),
        CheckConstraint("ready_lane IS NULL OR (state = 'READY' AND blocked_by IS NULL)", name=f"{p}task_ready"),
        CheckConstraint("(wake_us IS NOT NULL) = (state IN ('SCHEDULED', 'RETRY_WAIT'))", name=f"{p}task_waiting"),
        _some(f"{p}task_ready_i", "ready_lane IS NOT NULL", "ready_lane", "rank", "id"),
        _some(f"{p}task_wake_i", "wake_us IS NOT NULL", "wake_us"),
        _some(f"{p}task_blocked_i", "blocked_by IS NOT NULL", "blocked_by", "rank", "id"),
        _some(f"{p}task_permit_i", "permit <> ''", "namespace", "permit", "state", "rank"),
        _some(f"{p}task_session_i", "session <> ''", "session", "state"),
        _some(f"{p}task_business_i", "business_key <> ''", "namespace", "business_key", "created_us"),
        _some(f"{p}task_amiss_i", "amiss_us IS NOT NULL", "namespace", "amiss_us"),
        Index(f"{p}task_created_i", "namespace", "created_us"),
        _some(f"{p}task_open_i", "settled_us = 0", "namespace", "queue", "settled_us"),
        _some(f"{p}task_settled_i", "settled_us > 0", "namespace", "settled_us"),
        _some(f"{p}task_retry_i", "retry_of <> ''", "retry_of"),
        postgresql_with={
            "autovacuum_vacuum_scale_factor": 0.02,
            "autovacuum_analyze_scale_factor": 0.05,
            "autovacuum_vacuum_threshold": 2000,
        },
    )
    return {
        "task": task,
        "attempt": Table(
            f"{p}attempt",
            m,
            Column("task", ident(64), primary_key=True),
            Column("fence", BigInteger, primary_key=True, autoincrement=False),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("session", ident(64), nullable=False),
            Column("outcome", ident(32), nullable=False),
            Column("cause", ident(16), nullable=False),
            Column("detail", long_text(), nullable=False),
            Column("late", Integer, nullable=False, default=0),
            big("started_us"),
            big("ended_us"),
        ),
        "permit": Table(
            f"{p}permit",
            m,
            Column("id", ident(300), primary_key=True),
            Column("namespace", ident(64), nullable=False),
            Column("key", ident(200), nullable=False),
            Column("capacity", Integer, nullable=False),
            Column("held", Integer, nullable=False, default=0),
            big("seq"),
            Column("paused", Integer, nullable=False, default=0),
            big("rev"),
            CheckConstraint("held >= 0", name=f"{p}permit_held"),
            CheckConstraint("capacity >= 1", name=f"{p}permit_capacity"),
        ),
        "lane": Table(
            f"{p}lane",
            m,
            Column("id", ident(160), primary_key=True),
            Column("namespace", ident(64), nullable=False),
            Column("queue", ident(64), nullable=False),
            Column("weight", Integer, nullable=False, default=1),
            Column("paused", Integer, nullable=False, default=0),
            Column("backlog", Integer, nullable=False, default=0),
            big("rev"),
            CheckConstraint("weight >= 1", name=f"{p}lane_weight"),
        ),
    }
