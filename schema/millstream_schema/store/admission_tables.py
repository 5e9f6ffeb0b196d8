"""What may come in and what may run: quotas, rates, pauses."""

from __future__ import annotations

from sqlalchemy import MetaData, Table


def admission_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    return {}
