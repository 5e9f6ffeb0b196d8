"""Alembic's entry: runs revisions on the engine of the database handed in, with tables named by its prefix."""

from __future__ import annotations

from alembic import context

database = context.config.attributes["database"]

with database.engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=database.tables.metadata,
        version_table=f"{database.tables.prefix}alembic",
        transactional_ddl=database.dialect != "mysql",  # all or nothing where the database can; SQLite takes the write lock with it
    )
    with context.begin_transaction():
        context.run_migrations()
    connection.commit()
