"""What attempts do beyond returning a value: external intents, progress, notes."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, Table

from .columns import big, ident, long_text


def effect_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    return {
        "progress": Table(
            f"{p}progress",
            m,
            Column("task", ident(64), primary_key=True),
            Column("fence", BigInteger, primary_key=True, autoincrement=False),
            Column("number", Integer, nullable=False),
            Column("done", Double, nullable=False),
            Column("total", Double, nullable=True),
            Column("message", long_text(), nullable=False),
            big("at_us"),
        ),
        "note": Table(
            f"{p}note",
            m,
            Column("task", ident(64), primary_key=True),
            Column("fence", BigInteger, primary_key=True, autoincrement=False),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("text", long_text(), nullable=False),
            Column("fields", long_text(), nullable=False),
            big("at_us"),
        ),
    }
