"""Schedules, their versions and their fires.

Only schedules that the sweep is to look at have a ``due_us``, only those with a queued fire a ``waiting``: what is paused, ended or deleted costs it nothing.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, Integer, MetaData, Table

from ..durable.schedules import FireKind, FireState, ScheduleState
from .columns import big, ident, long_text, one_of


def schedule_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    return {
        "schedule": Table(
            f"{p}schedule",
            m,
            Column("namespace", ident(64), primary_key=True),
            Column("name", ident(64), primary_key=True),
            Column("state", ident(16), nullable=False),
            Column("reason", long_text(), nullable=False),
            Column("version", Integer, nullable=False),
            Column("digest", ident(80), nullable=False),
            big("next_us", null=True),
            big("due_us", null=True),
            big("last_us"),
            big("tolerance_us"),
            Column("waiting", ident(200), nullable=True),
            big("tail_us"),
            Column("tail_state", ident(16), nullable=False, default=""),
            big("fired"),
            big("skipped"),
            big("missed"),
            big("late"),
            Column("actor", ident(128), nullable=False, default=""),
            big("created_us"),
            big("changed_us"),
            big("rev"),
            one_of("state", ScheduleState, f"{p}schedule_state"),
            CheckConstraint("(due_us IS NOT NULL) = (state IN ('ACTIVE', 'HELD'))", name=f"{p}schedule_due"),
            CheckConstraint("next_us IS NULL OR next_us > last_us", name=f"{p}schedule_forward"),
            Index(f"{p}schedule_due_i", "due_us"),
            Index(f"{p}schedule_waiting_i", "waiting"),
        ),
        "schedule_version": Table(
            f"{p}schedule_version",
            m,
            Column("namespace", ident(64), primary_key=True),
            Column("name", ident(64), primary_key=True),
            Column("version", Integer, primary_key=True, autoincrement=False),
            Column("definition", long_text(), nullable=False),
            Column("digest", ident(80), nullable=False),
            Column("actor", ident(128), nullable=False, default=""),
            big("created_us"),
        ),
        "fire": Table(
            f"{p}fire",
            m,
            Column("namespace", ident(64), primary_key=True),
            Column("schedule", ident(64), primary_key=True),
            Column("kind", ident(16), primary_key=True),
            Column("request", ident(64), primary_key=True),
            Column("slot", BigInteger, primary_key=True, autoincrement=False),
            big("instant_us"),
            big("until_us"),
            big("times"),
            Column("version", Integer, nullable=False),
            Column("state", ident(16), nullable=False),
            Column("reason", long_text(), nullable=False),
            Column("task", ident(64), nullable=False, default=""),
            Column("unsettled", Integer, nullable=False, default=0),
            Column("late", Integer, nullable=False, default=0),
            Column("actor", ident(128), nullable=False, default=""),
            big("recorded_us"),
            big("rev"),
            one_of("kind", FireKind, f"{p}fire_kind"),
            one_of("state", FireState, f"{p}fire_state"),
            CheckConstraint("(state = 'FIRED') = (task <> '')", name=f"{p}fire_task"),
            CheckConstraint("times >= 1 AND until_us >= instant_us", name=f"{p}fire_range"),
            Index(f"{p}fire_unsettled_i", "unsettled", "namespace", "schedule"),
            Index(f"{p}fire_recent_i", "namespace", "schedule", "recorded_us"),
            Index(f"{p}fire_old_i", "recorded_us"),
        ),
    }
