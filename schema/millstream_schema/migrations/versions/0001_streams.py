"""The tables of the stream runtime.

A fresh install: every table is created unless it is there, so that an interrupted run can be repeated.
"""

from __future__ import annotations

from alembic import context, op

revision = "0001"
down_revision = None


def upgrade() -> None:
    tables = context.config.attributes["database"].tables
    tables.metadata.create_all(op.get_bind(), checkfirst=True)
