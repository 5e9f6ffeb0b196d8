"""Finished tasks as events, subscriptions to them, their deliveries."""

from __future__ import annotations

from sqlalchemy import MetaData, Table


def delivery_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    return {}
