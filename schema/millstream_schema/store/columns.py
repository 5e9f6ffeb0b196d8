"""Kinds of columns that mean the same on every database.

Used by the table modules beside it. What must never happen here: a text that one database compares without case or trailing spaces, or cuts off.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    Index,
    LargeBinary,
    String,
    Text,
    bindparam,
    func,
    literal_column,
    text,
)
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.types import TypeEngine


def ident(length: int) -> TypeEngine[str]:
    """A string that compares byte by byte."""
    return (
        String(length)
        .with_variant(mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_nopad_bin"), "mysql", "mariadb")
        .with_variant(postgresql.VARCHAR(length, collation="C"), "postgresql")
    )


def long_text() -> TypeEngine[str]:
    return Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def blob() -> TypeEngine[bytes]:
    return LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def one_of(column: str, values: Iterable[str], name: str) -> CheckConstraint:
    listed = ", ".join(f"'{v}'" for v in values)
    return CheckConstraint(f"{column} IN ({listed})", name=name)


def big(name: str, *, null: bool = False, default: int | None = 0) -> Column[int]:
    """A 64-bit integer: times, sizes, counters."""
    return Column(name, BigInteger, nullable=null, default=None if null else default)


def changed() -> tuple[Column[str], Column[int]]:
    """Who changed last what people set of a row, and when; of one nobody has changed: nobody, 0."""
    by = Column("changed_by", ident(128), nullable=False, default="", server_default=text("''"))
    return by, Column("changed_us", BigInteger, nullable=False, default=0, server_default=text("0"))


def not_empty(column: ColumnElement[str]) -> ColumnElement[bool]:
    """The condition of an index that holds only rows with this column, written as the index has it: no parameter, so that a planner can tell that it applies."""
    return column != literal_column("''")


def compared(column: ColumnElement[str | None]) -> ColumnElement[str]:
    """A column, NULL as empty text, so that no planner takes an index for it: a guard on rows that are named by their ids, and must be reached by them alone."""
    return func.coalesce(column, literal_column("''"))


def among(column: ColumnElement[str], name: str, dialect: str) -> ColumnElement[bool]:
    """Whether a column is one of a list given by this name. On PostgreSQL the list is one value: the statement's text, and so what is prepared, is the same for each length."""
    if dialect == "postgresql":
        return column == func.any(bindparam(name, type_=ARRAY(Text())))
    return column.in_(bindparam(name, expanding=True))


def some(name: str, where: str, *columns: str, beside: tuple[str, ...] = ()) -> Index:
    """An index of those rows alone that are looked for by it, where the database has such indexes: the others need no entry at each change.

    Nothing depends on it: elsewhere it holds all rows and is only larger. A statement that uses it repeats the condition where it does not follow from the others.
    ``beside``: columns that PostgreSQL keeps in it for statements that count, which then need not read the rows.
    """
    return Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where), postgresql_include=list(beside))
