"""What attempts do beyond returning a value: external intents, progress, notes."""

from __future__ import annotations

from sqlalchemy import MetaData, Table


def effect_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    return {}
