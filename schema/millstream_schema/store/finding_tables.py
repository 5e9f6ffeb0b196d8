"""What finding, bulk acts and retention keep."""

from __future__ import annotations

from sqlalchemy import Column, Index, Integer, MetaData, Table

from ..durable.bulk import Act
from ..durable.retention import Scope
from ..durable.states import Effects
from .columns import big, ident, long_text, one_of


def finding_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    return {
        "handler": Table(
            f"{p}handler",
            m,
            Column("name", ident(200), primary_key=True),
            Column("version", ident(80), primary_key=True),
            Column("queue", ident(64), nullable=False),
            Column("effects", ident(16), nullable=False),
            Column("policy", long_text(), nullable=False),
            Column("permit", long_text(), nullable=False),
            Column("ordered", Integer, nullable=False, default=0),
            Column("parameters", long_text(), nullable=False),
            big("since_us"),
            big("seen_us"),
            one_of("effects", Effects, f"{p}handler_effects"),
        ),
        "operation": Table(
            f"{p}operation",
            m,
            Column("id", ident(64), primary_key=True),
            Column("namespace", ident(64), nullable=False),
            Column("act", ident(16), nullable=False),
            Column("task", ident(64), nullable=False, default=""),
            Column("filter", long_text(), nullable=False),
            big("instant_us"),
            big("expected"),
            Column("reason", long_text(), nullable=False),
            Column("actor", ident(128), nullable=False, default=""),
            big("after_us"),
            Column("after_id", ident(64), nullable=False, default=""),
            big("seen"),
            big("done"),
            Column("over", Integer, nullable=False, default=0),
            big("created_us"),
            big("changed_us"),
            big("rev"),
            one_of("act", Act, f"{p}operation_act"),
            Index(f"{p}operation_created_i", "namespace", "created_us"),
        ),
        "retention": Table(
            f"{p}retention",
            m,
            Column("namespace", ident(64), primary_key=True),
            Column("scope", ident(16), primary_key=True),
            Column("name", ident(200), primary_key=True),
            big("keep_us"),
            Column("actor", ident(128), nullable=False, default=""),
            big("changed_us"),
            one_of("scope", Scope, f"{p}retention_scope"),
        ),
    }
