"""Bringing a database's schema to the version of this build, by Alembic; refusing one that is newer or half migrated.

Called by ``millstream up`` and by embedded mode; every start checks. The ledger is a row of the ``schema`` table beside Alembic's own version table.
"""

from __future__ import annotations

from .database import Database, Transaction
from .tables import SCHEMA_VERSION


def create_schema(database: Database) -> None:
    """Create all tables at the present version; harmless when they exist."""
    database.tables.metadata.create_all(database.engine)
    database.run(lambda tx: _ledger(tx))


def _ledger(tx: Transaction) -> None:
    tx.insert_or_nothing(tx.t.schema, id=1, version=SCHEMA_VERSION, state="READY")
