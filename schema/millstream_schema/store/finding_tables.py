"""What finding, bulk acts and retention keep."""

from __future__ import annotations

from sqlalchemy import Column, Integer, MetaData, Table

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
    }
