"""Statements on an inbox: a table in a consumer's own database that knows which deliveries its effects are in. It is no part of the installation's schema.

Executed by :class:`millstream.Inbox` in consumers' transactions. What must never happen here: a repeat that is an error of the database, which would end that transaction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateTable

from .. import given
from ..errors import ConfigurationError
from .callers import Caller, Home
from .columns import big, ident
from .database import Transaction
from .tables import tables

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")
_WORDS: Mapping[str, sa.Dialect] = {"sqlite": sqlite.dialect(), "postgresql": postgresql.dialect(), "mysql": mysql.dialect()}  # type: ignore[no-untyped-call]
_SEPARATOR = "/"
"""Between a subscription's id and a task's: neither holds one."""


@cache
def inbox_table(name: str) -> sa.Table:
    """One row for each delivery whose effects are in."""
    return sa.Table(name, sa.MetaData(), sa.Column("id", ident(130), primary_key=True), big("accepted_us"))


def home(name: str) -> Home:
    """What a consumer's session must lead to. Raises ConfigurationError for what is no SQL identifier."""
    given.require("inbox table", name, given.named(_NAME))
    table = inbox_table(name)
    missing = f"the session's database has no inbox: there is no table {name}: create it once with Inbox.create(session)"
    return Home(tables=tables(), known_by=table, written=table, missing=lambda _: ConfigurationError(missing))


def create(caller: Caller, name: str) -> None:
    """The table, unless it is there."""
    made = CreateTable(inbox_table(name), if_not_exists=True).compile(dialect=_WORDS[caller.dialect])
    caller.connection.exec_driver_sql(str(made))


def accept(tx: Transaction, name: str, subscription: str, event: str) -> bool:
    """Take a delivery in; False: it is in. The later of two waits for the first to end."""
    return tx.insert_or_nothing(inbox_table(name), {"accepted_us": tx.now()}, id=marker(subscription, event))


def page(tx: Transaction, name: str, older_us: int, after: str, limit: int) -> list[tuple[str, str]]:
    """The next (subscription, event) after ``after`` (an id) that came in before so many microseconds."""
    c = inbox_table(name).c
    found = sa.select(c.id).where(c.id > after, c.accepted_us < tx.now() - older_us).order_by(c.id).limit(limit)
    return [(s, e) for s, _, e in (r["id"].partition(_SEPARATOR) for r in tx.rows(found))]


def forget(tx: Transaction, name: str, pairs: Sequence[tuple[str, str]]) -> int:
    """Remove these; how many."""
    table = inbox_table(name)
    return tx.delete(table, table.c.id.in_([marker(*pair) for pair in pairs]))


def marker(subscription: str, event: str) -> str:
    """The id of a delivery's row."""
    return f"{subscription}{_SEPARATOR}{event}"
