"""The tables of durable tasks. Each is created unless it is there, so that an interrupted run can be repeated."""

from __future__ import annotations

from alembic import context, op

revision = "0002"
down_revision = "0001"

TABLES = ("task", "attempt", "permit", "lane")


def upgrade() -> None:
    tables = context.config.attributes["database"].tables
    tables.metadata.create_all(op.get_bind(), tables=[getattr(tables, name) for name in TABLES], checkfirst=True)
