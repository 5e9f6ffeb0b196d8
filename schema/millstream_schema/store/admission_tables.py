"""What may come in and what may run: gates (pauses and rates) before queues, handlers and permit keys; quotas of queues and applications.

Only what somebody has set has a row.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Index, Integer, MetaData, Table

from ..durable.gates import GateKind
from .columns import big, ident, long_text, one_of


def admission_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    gate = Table(
        f"{p}gate",
        m,
        Column("id", ident(300), primary_key=True),
        Column("namespace", ident(64), nullable=False),
        Column("kind", ident(16), nullable=False),
        Column("name", ident(200), nullable=False),
        Column("paused", Integer, nullable=False, default=0),
        Column("paused_by", ident(128), nullable=False, default=""),
        Column("paused_why", long_text(), nullable=False),
        big("paused_us"),
        Column("rate", Integer, nullable=False, default=0),
        big("per_us"),
        Column("burst", Integer, nullable=False, default=0),
        big("level"),
        big("level_us"),
        big("wake_us", null=True),
        Column("changed_by", ident(128), nullable=False, default=""),
        big("changed_us"),
        big("rev"),
        one_of("kind", GateKind, f"{p}gate_kind"),
        CheckConstraint("rate = 0 OR (burst >= 1 AND per_us >= 1)", name=f"{p}gate_rate"),
        CheckConstraint("level >= 0", name=f"{p}gate_level"),
        Index(f"{p}gate_namespace_i", "namespace", "kind", "name"),
        Index(f"{p}gate_wake_i", "wake_us"),
    )
    quota = Table(
        f"{p}quota",
        m,
        Column("id", ident(160), primary_key=True),
        Column("namespace", ident(64), nullable=False),
        Column("queue", ident(64), nullable=False, default=""),
        Column("accepting", Integer, nullable=False, default=1),
        Column("backlog", Integer, nullable=False, default=0),
        Column("accept", Integer, nullable=False, default=0),
        big("per_us"),
        Column("changed_by", ident(128), nullable=False, default=""),
        big("changed_us"),
        big("rev"),
        CheckConstraint("accept = 0 OR per_us >= 1", name=f"{p}quota_window"),
        Index(f"{p}quota_namespace_i", "namespace"),
    )
    acceptance = Table(
        f"{p}acceptance",
        m,
        Column("quota", ident(160), primary_key=True),
        Column("task", ident(64), primary_key=True),
        big("at_us"),
        Column("number", Integer, nullable=False, default=1),
        Index(f"{p}acceptance_quota_i", "quota", "at_us"),
        Index(f"{p}acceptance_at_i", "at_us"),
    )
    return {"gate": gate, "quota": quota, "acceptance": acceptance}
