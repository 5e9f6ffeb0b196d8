"""Statements on an inbox: a table in a consumer's database that knows which deliveries its effects are in.

Executed by :class:`millstream.Inbox` in the consumer's own transaction. What must never happen here: a repeat that raises an error of the database, and with it ends that
transaction; a
count of rows that depends on how a driver is set up.
"""

from __future__ import annotations

from typing import Final

from .dialects import Dialect

SUBSCRIPTION: Final = 64
"""Characters of a subscription's and of a task's id, at most."""


def create_table(dialect: Dialect, table: str) -> list[str]:
    """The table, unless it is there."""
    kind = "VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin" if dialect.name == "mysql" else dialect.text_key
    name = dialect.table(table)
    index = dialect.identifier(f"{table.rpartition('.')[2]}_accepted")
    inline = f", INDEX {index} (accepted_us)" if dialect.name == "mysql" else ""
    made = [
        f"CREATE TABLE IF NOT EXISTS {name} (subscription {kind} NOT NULL, event {kind} NOT NULL, accepted_us BIGINT NOT NULL, "
        f"PRIMARY KEY (subscription, event){inline}) {dialect.table_options}".rstrip()
    ]
    if not inline:
        made.append(f"CREATE INDEX IF NOT EXISTS {index} ON {name} (accepted_us)")
    return made


def accept(dialect: Dialect, table: str) -> str:
    """Take (subscription, event) in; it counts one row, or none when it is there. The later of two waits for the first to end.

    MySQL's ON DUPLICATE KEY UPDATE counts a row for a repeat when the driver asks for found rows, as SQLAlchemy's do; IGNORE does not. The values always fit.
    """
    values = f"{dialect.table(table)} (subscription, event, accepted_us) VALUES (?, ?, {dialect.now_us})"
    if dialect.name == "mysql":
        return dialect.sql(f"INSERT IGNORE INTO {values}")
    return dialect.sql(f"INSERT INTO {values} ON CONFLICT DO NOTHING")


def oldest(dialect: Dialect, table: str) -> str:
    """A page of (subscription, event) older than so many microseconds, the oldest first; parameters: age, page, offset."""
    return dialect.sql(
        f"SELECT subscription, event FROM {dialect.table(table)} WHERE accepted_us < {dialect.now_us} - ? ORDER BY accepted_us, subscription, event LIMIT ? OFFSET ?"
    )


def forget(dialect: Dialect, table: str) -> str:
    """Remove one."""
    return dialect.sql(f"DELETE FROM {dialect.table(table)} WHERE subscription = ? AND event = ?")
