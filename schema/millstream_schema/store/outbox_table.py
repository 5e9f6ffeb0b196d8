"""The table of an outbox, in a user's own database: it is no part of the installation's schema.

Used by ``outboxes``. What must never happen here: a column for a credential.
"""

from __future__ import annotations

from functools import cache

from sqlalchemy import CheckConstraint, Column, Index, Integer, MetaData, Table, UniqueConstraint

from ..durable.outbox import EntryState
from .columns import big, ident, long_text, one_of


@cache
def outbox_table(prefix: str) -> Table:
    """``{prefix}outbox``."""
    return Table(
        f"{prefix}outbox",
        MetaData(),
        Column("id", ident(64), primary_key=True),
        Column("target", ident(64), nullable=False),
        Column("namespace", ident(64), nullable=False),
        Column("handler", ident(200), nullable=False),
        Column("key", ident(200), nullable=False),
        Column("digest", ident(80), nullable=False),
        Column("request", long_text(), nullable=False),
        Column("state", ident(16), nullable=False),
        Column("cause", ident(16), nullable=False),
        Column("reason", long_text(), nullable=False),
        Column("task", ident(64), nullable=False),
        Column("sends", Integer, nullable=False),
        Column("tries", Integer, nullable=False),
        Column("failures", Integer, nullable=False),
        Column("owner", ident(64), nullable=False),
        Column("claim", ident(64), nullable=False),
        big("generation"),
        big("lease_us"),
        big("due_us"),
        big("since_us"),
        big("created_us"),
        big("sent_us"),
        big("changed_us"),
        Column("actor", ident(128), nullable=False),
        big("rev"),
        UniqueConstraint("target", "namespace", "handler", "key", name=f"{prefix}outbox_identity"),
        one_of("state", EntryState, f"{prefix}outbox_state"),
        CheckConstraint("(state = 'SENDING') = (owner <> '')", name=f"{prefix}outbox_held"),
        CheckConstraint("(state = 'SENT') = (task <> '')", name=f"{prefix}outbox_sent"),
        Index(f"{prefix}outbox_due_i", "target", "state", "due_us"),
    )
