"""What attempts do beyond returning a value: external intents, progress, notes."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, Double, Integer, MetaData, Table

from ..durable.effects import IntentState
from .columns import big, ident, long_text, one_of


def effect_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    intent = Table(
        f"{p}intent",
        m,
        Column("root", ident(64), primary_key=True),
        Column("name", ident(64), primary_key=True),
        Column("key", ident(200), primary_key=True),
        Column("idempotency_key", ident(64), nullable=False),
        Column("state", ident(16), nullable=False),
        Column("task", ident(64), nullable=False),
        big("fence"),
        Column("opening", ident(64), nullable=False),
        Column("calls", Integer, nullable=False, default=1),
        Column("result", long_text(), nullable=True),
        Column("detail", long_text(), nullable=False),
        Column("closed_by", ident(200), nullable=False, default=""),
        big("opened_us"),
        big("closed_us"),
        big("rev"),
        one_of("state", IntentState, f"{p}intent_state"),
        CheckConstraint("(state = 'OPEN') = (closed_us = 0)", name=f"{p}intent_closed"),
        CheckConstraint("result IS NULL OR state = 'DONE'", name=f"{p}intent_result"),
    )
    return {
        "intent": intent,
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
