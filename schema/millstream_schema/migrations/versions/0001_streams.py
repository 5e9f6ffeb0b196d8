"""The tables of the stream runtime.

A fresh install: every table is created unless it is there, so that an interrupted run can be repeated.
"""

from __future__ import annotations

from alembic import context, op

revision = "0001"
down_revision = None

TABLES = (
    "schema",
    "coordinator",
    "node",
    "job",
    "assignment",
    "epoch",
    "ack",
    "manifest",
    "split",
    "source",
    "savepoint",
    "history",
    "channel",
)


def upgrade() -> None:
    tables = context.config.attributes["database"].tables
    tables.metadata.create_all(op.get_bind(), tables=[getattr(tables, name) for name in TABLES], checkfirst=True)
