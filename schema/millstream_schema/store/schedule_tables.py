"""Schedules, their versions and their fires."""

from __future__ import annotations

from sqlalchemy import MetaData, Table


def schedule_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    return {}
