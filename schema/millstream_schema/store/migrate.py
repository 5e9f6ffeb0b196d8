"""Bringing a database's schema to the version of this build, by Alembic; refusing one that is newer, older or half migrated.

Called by ``millstream up``, embedded mode and ``millstream dev``; every other start only checks. The ledger is a row of the ``schema`` table: it says MIGRATING while DDL runs, so
that a half-done migration is noticed. What must never happen here: a start on a schema this build does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from ..errors import SchemaMismatch, StoreUnavailable
from ..ports import SystemIds
from .database import Database, Transaction
from .tables import SCHEMA_VERSION

_IN_PROCESS = threading.Lock()
"""Alembic keeps its context in a module: one migration at a time in a process."""
_LOCK_SECONDS = 60


def create_schema(database: Database) -> None:
    """Migrate to this build's version; harmless when it is there already, tolerant of another process doing the same.

    Raises SchemaMismatch for a newer schema, or a half-done one that cannot be repeated.
    """
    have = _version(database)
    if have is not None and have[0] > SCHEMA_VERSION:
        raise SchemaMismatch(f"the database has schema {have[0]}, this build knows {SCHEMA_VERSION}: upgrade Millstream")
    if have == (SCHEMA_VERSION, "READY"):
        return
    with _IN_PROCESS, _alone(database):
        if _version(database) == (SCHEMA_VERSION, "READY"):
            return  # another process was faster
        database.run(lambda tx: tx.create_table(tx.t.schema))
        database.run(lambda tx: _mark(tx, "MIGRATING"))
        _upgrade(database)
        database.run(_name)
        database.run(lambda tx: _mark(tx, "READY"))


def _name(tx: Transaction) -> None:
    """What this installation is known by, and what its cursors and tokens are signed with."""
    ids = SystemIds()
    tx.insert_or_nothing(tx.t.installation, id=1, uid=ids.new("installation", 20), secret=ids.new("secret", 32))


def installation_secret(tx: Transaction) -> str:
    """From which the keys are derived that sign cursors and tokens. Never shown, never sent."""
    return str(tx.execute(sa.select(tx.t.installation.c.secret)).scalar_one())


def installation_id(tx: Transaction) -> str:
    """What tells this installation from every other, also from one of the same name elsewhere: made with its schema, never changed."""
    return str(tx.execute(sa.select(tx.t.installation.c.uid)).scalar_one())


@contextmanager
def _alone(database: Database) -> Iterator[None]:
    """Hold the server's own lock for this prefix, so that of two processes one migrates and the other waits. It goes with its session.

    SQLite needs none: there a migration is one transaction that begins with the write lock.
    """
    if database.dialect == "sqlite":
        yield
        return
    name = f"millstream migrate {database.tables.prefix}"
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if database.dialect == "postgresql":
            connection.exec_driver_sql(f"SET lock_timeout = '{_LOCK_SECONDS}s'")
            connection.execute(sa.text("SELECT pg_advisory_lock(hashtextextended(:name, 0))"), {"name": name})
            release = "SELECT pg_advisory_unlock(hashtextextended(:name, 0))"
        else:
            if connection.execute(sa.text("SELECT GET_LOCK(:name, :wait)"), {"name": name, "wait": _LOCK_SECONDS / 3}).scalar() != 1:
                raise StoreUnavailable("another process is migrating the schema and does not finish: try again when it has")
            release = "SELECT RELEASE_LOCK(:name)"
        try:
            yield
        finally:
            connection.execute(sa.text(release), {"name": name})
            connection.invalidate()  # its session settings are not for the pool


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
        raise SchemaMismatch(
            f"a migration to schema {version} was not finished: run `millstream up` again, it repeats what is missing (one that runs now: wait for it)"
        )


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
