"""Bringing a database's schema to the version of this build, by Alembic; refusing one that is newer, older or half migrated.

Called by ``millstream up``, embedded mode and ``millstream dev``; every other start only checks. The ledger is a row of the ``schema`` table: it says MIGRATING while DDL runs, so
that a half-done migration is noticed. What must never happen here: a start on a schema this build does not know.
"""

from __future__ import annotations

from importlib.resources import files

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from ..errors import SchemaMismatch
from .database import Database, Transaction
from .tables import SCHEMA_VERSION


def create_schema(database: Database) -> None:
    """Migrate to this build's version; harmless when it is there already, tolerant of another process doing the same.

    Raises SchemaMismatch for a newer schema, or a half-done one that cannot be repeated.
    """
    have = _version(database)
    if have is not None and have[0] > SCHEMA_VERSION:
        raise SchemaMismatch(f"the database has schema {have[0]}, this build knows {SCHEMA_VERSION}: upgrade Millstream")
    if have == (SCHEMA_VERSION, "READY"):
        return
    database.tables.schema.create(database.engine, checkfirst=True)
    database.run(lambda tx: _mark(tx, "MIGRATING"))
    _upgrade(database)
    database.run(lambda tx: _mark(tx, "READY"))


def check_schema(database: Database) -> None:
    """Raises SchemaMismatch unless the schema is exactly this build's and whole."""
    have = _version(database)
    if have is None:
        raise SchemaMismatch("the database has no Millstream schema: run `millstream up` first")
    version, state = have
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(f"the database has schema {version}, this build knows {SCHEMA_VERSION}: upgrade Millstream")
    if version < SCHEMA_VERSION:
        raise SchemaMismatch(f"the database has schema {version}, this build needs {SCHEMA_VERSION}: run `millstream up`")
    if state != "READY":
        raise SchemaMismatch(f"a migration to schema {version} was not finished: run `millstream up` again, it repeats what is missing")


def _version(database: Database) -> tuple[int, str] | None:
    t = database.tables.schema
    if not database.read(lambda tx: tx.has_table(t.name)):
        return None
    row = database.read(lambda tx: tx.row(sa.select(t.c.version, t.c.state).where(t.c.id == 1)))
    return None if row is None else (int(row["version"]), str(row["state"]))


def _mark(tx: Transaction, state: str) -> None:
    t = tx.t.schema
    if not tx.insert_or_nothing(t, id=1, version=SCHEMA_VERSION, state=state):
        tx.update(t, t.c.id == 1, version=SCHEMA_VERSION, state=state)


def _upgrade(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(files("millstream_schema") / "migrations"))
    config.attributes["database"] = database
    command.upgrade(config, "head")
