"""The rest of durable tasks: columns and indexes of the first ones that came later, and their further tables. Each part is made unless it is there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = "0003"
down_revision = "0002"

TABLES = (
    "installation",
    # effects
    "progress",
    "note",
    "intent",
    # schedules
    "schedule",
    "schedule_version",
    "fire",
    # admission
    "gate",
    "quota",
    "acceptance",
    # deliveries
    "subscription",
    "event",
    "delivery",
    # finding
    "handler",
    "operation",
    "retention",
)
TASK_COLUMNS = ("marker", "ending", "error_class", "amiss_us", "tokens", "limit_us", "open_intents")
ADMISSION_COLUMNS = ("changed_by", "changed_us")
TASK_INDEXES = ("task_open_i", "task_settled_i", "task_retry_i", "task_amiss_i", "task_limit_i")


def upgrade() -> None:
    tables = context.config.attributes["database"].tables
    bind = op.get_bind()
    there = sa.inspect(bind)
    columns = {c["name"] for c in there.get_columns(tables.task.name)}
    for table, names in ((tables.task, TASK_COLUMNS), (tables.lane, ADMISSION_COLUMNS), (tables.permit, ADMISSION_COLUMNS)):
        known = {c["name"] for c in there.get_columns(table.name)}
        for column in (table.c[name] for name in names if name not in known):
            added = sa.Column(column.name, column.type, nullable=column.nullable, server_default=column.server_default)
            op.add_column(table.name, added)
    if "amiss_us" not in columns:
        t = tables.task
        op.execute(sa.update(t).where(t.c.state.in_(("FAILED", "CANCELLED", "EXPIRED", "UNKNOWN"))).values(amiss_us=t.c.created_us))
    indexes = {i["name"] for i in there.get_indexes(tables.task.name)}
    for index in sorted(tables.task.indexes, key=lambda i: str(i.name)):
        if str(index.name).removeprefix(tables.prefix) in TASK_INDEXES and index.name not in indexes:
            index.create(bind)
    tables.metadata.create_all(bind, tables=[getattr(tables, name) for name in TABLES], checkfirst=True)
