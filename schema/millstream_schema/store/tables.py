"""The tables, for one prefix. Alembic's migrations create them; a test compares the two.

No foreign keys. Identifiers compare byte by byte on every database. Every guarded UPDATE raises ``rev``. Times are BIGINT UTC microseconds by the database's clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from sqlalchemy import MetaData, Table

from ..errors import ConfigurationError
from .admission_tables import admission_tables
from .delivery_tables import delivery_tables
from .effect_tables import effect_tables
from .finding_tables import finding_tables
from .schedule_tables import schedule_tables
from .stream_tables import stream_tables
from .task_tables import task_tables

SCHEMA_VERSION = 3
_PREFIX = re.compile(r"[a-z][a-z0-9_]{0,20}\Z")


@dataclass(frozen=True)
class Tables:
    """Every table of one installation."""

    metadata: MetaData
    prefix: str
    schema: Table
    installation: Table
    coordinator: Table
    node: Table
    job: Table
    assignment: Table
    epoch: Table
    ack: Table
    manifest: Table
    split: Table
    source: Table
    savepoint: Table
    history: Table
    channel: Table
    task: Table
    attempt: Table
    permit: Table
    lane: Table

    # effects
    progress: Table
    note: Table
    intent: Table

    # schedules
    schedule: Table
    schedule_version: Table
    fire: Table

    # admission
    gate: Table
    quota: Table
    acceptance: Table

    # deliveries
    subscription: Table
    event: Table
    delivery: Table

    # finding
    handler: Table
    operation: Table
    retention: Table


@cache
def tables(prefix: str = "millstream_") -> Tables:
    """Table objects for ``prefix``. Raises ConfigurationError for one that is not an SQL identifier."""
    if not _PREFIX.match(prefix):
        raise ConfigurationError(f"table prefix {prefix!r} must match {_PREFIX.pattern}")
    m = MetaData()
    made = [
        make(m, prefix)
        for make in (stream_tables, task_tables, effect_tables, schedule_tables, admission_tables, delivery_tables, finding_tables)
    ]
    return Tables(metadata=m, prefix=prefix, **{name: table for part in made for name, table in part.items()})
