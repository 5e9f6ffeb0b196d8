"""How SQLite, PostgreSQL and MariaDB/MySQL differ, as plain values: names, placeholders, types, locks, upserts, bindable values.

Called by the statement builders and the connection door. What must never happen here: an identifier in a statement that was not checked,
or a value that a driver stores as something else (an aware datetime without its offset, NaN as NULL) without an error.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

from millstream_schema.errors import ConfigurationError
from millstream_schema.target.failures import TargetRefused

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}\Z")
_SAFE: Final = frozenset({type(None), bool, int, str, bytes})
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
Convert = Callable[[Any], Any]


def checked_name(name: str, what: str) -> str:
    """``name`` itself. Raises :class:`ConfigurationError` unless it is one plain SQL identifier."""
    if not _NAME.match(name):
        raise ConfigurationError(f"{what} {name!r} is refused: use a letter or _ and then letters, digits, _ or $, at most 63 in all")
    return name


@dataclass(frozen=True)
class Dialect:
    """One database's ways. ``convert`` maps Python types to functions that make a value of it bindable; types not in it and not plain are
    refused. ``refused_character``: one that its text cannot hold.

    ``share`` and ``update`` end a SELECT that locks the rows it reads. ``max_parameters`` bounds one statement's placeholders.
    """

    name: str
    placeholder: str
    quote: str
    share: str
    update: str
    now_us: str
    text_key: str
    blob: str
    table_options: str
    max_parameters: int
    multi_row: bool
    convert: dict[type, Convert]
    refused_character: str = ""

    def sql(self, statement: str) -> str:
        """A statement written with ``?`` in this driver's placeholders. The text must hold no other ``?``, and no ``%`` but SQLite's."""
        return _with_placeholders(statement, self.placeholder)

    def identifier(self, name: str, what: str = "column") -> str:
        """One quoted identifier."""
        return f"{self.quote}{checked_name(name, what)}{self.quote}"

    def table(self, name: str) -> str:
        """A quoted table, with its schema when the name has one: ``schema.table``."""
        parts = name.split(".")
        if len(parts) > 2:
            raise ConfigurationError(f"table {name!r} is refused: write table or schema.table")
        return ".".join(self.identifier(part, "table") for part in parts)

    def names(self, columns: Sequence[str]) -> str:
        """Quoted columns, separated by commas."""
        return ", ".join(self.identifier(column) for column in columns)

    def values(self, columns: int, rows: int = 1) -> str:
        """``(?, ?), (?, ?)``: every item a placeholder, which PyMySQL and PostgreSQL need to be fast."""
        row = f"({', '.join(['?'] * columns)})"
        return ", ".join([row] * rows)

    def ignore_repeat(self, column: str) -> str:
        """Tail of an INSERT that does nothing, and counts no row, when the primary key exists."""
        if self.name == "mysql":
            return f"ON DUPLICATE KEY UPDATE {self.identifier(column)} = {self.identifier(column)}"
        return "ON CONFLICT DO NOTHING"

    def upsert_tail(self, columns: Sequence[str], keys: Sequence[str]) -> str:
        """Tail of an INSERT that makes it an upsert by ``keys``."""
        others = [self.identifier(column) for column in columns if column not in keys]
        if self.name == "mysql":
            updates = [f"{column} = VALUES({column})" for column in others] or [f"{self.identifier(keys[0])} = {self.identifier(keys[0])}"]
            return f"ON DUPLICATE KEY UPDATE {', '.join(updates)}"
        if not others:
            return f"ON CONFLICT ({self.names(keys)}) DO NOTHING"
        return f"ON CONFLICT ({self.names(keys)}) DO UPDATE SET {', '.join(f'{column} = excluded.{column}' for column in others)}"

    def bindable(self, rows: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Rows that the driver stores without changing a value. Looks at types by column, so that plain rows cost next to nothing.

        Raises :class:`TargetRefused` for a value that this database cannot hold.
        """
        kinds: set[type] = set()
        for column in zip(*rows):
            kinds.update(map(type, column))
        if kinds <= _SAFE:
            return rows
        return [[self.bind(value) for value in row] for row in rows]

    def check(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Raise :class:`TargetRefused`, naming column and value, for what this database or its driver refuses whatever the column's type.

        Called before rows are staged: what was sealed with an epoch and is refused at the commit would be refused for ever.
        """
        for name, column in zip(columns, zip(*rows)):
            kinds = set(map(type, column))
            if not self._plain(kinds, column):
                for value in column:
                    self._check(name, value)

    def _plain(self, kinds: set[type], column: Sequence[Any]) -> bool:
        """Whether a column surely holds nothing that is refused. Cheap: it is asked for each batch."""
        if any(self.convert.get(kind) is not _same or kind is dt.time for kind in kinds - _SAFE):
            return kinds == {float} and all(map(math.isfinite, column))
        if int in kinds:
            numbers = column if kinds == {int} else [value for value in column if type(value) is int]
            if min(numbers) < _LOWEST or max(numbers) > _HIGHEST:
                return False
        if str in kinds:
            text = "".join(column if kinds == {str} else [value for value in column if type(value) is str])
            if not (text.isascii() or _encodable(text)) or (self.refused_character and self.refused_character in text):
                return False
        return True

    def _check(self, column: str, value: Any) -> None:
        kind = type(value)
        try:
            bound = self.bind(value)
            if kind is int and not _LOWEST <= value <= _HIGHEST:
                raise TargetRefused(f"an integer of {value.bit_length()} bits does not fit 64 bits; give it as Decimal for a wider column")
            if isinstance(bound, dt.time) and bound.tzinfo is not None and bound.utcoffset() is None:
                raise TargetRefused("a time of a zone whose offset depends on the day; give it a fixed offset or none")
            if kind is str:
                if not _encodable(value):
                    raise TargetRefused("text with a lone surrogate is no UTF-8; replace it before the sink")
                if self.refused_character and self.refused_character in value:
                    raise TargetRefused(
                        f"text with {self.refused_character!r} cannot be stored by this database; remove it before the sink"
                    )
        except TargetRefused as error:
            raise TargetRefused(f"column {column}: {error}") from error

    def bind(self, value: Any) -> Any:
        """One value for the driver."""
        kind = type(value)
        if kind in _SAFE:
            return value
        convert = self.convert.get(kind)
        if convert is None:
            raise TargetRefused(
                f"a value of type {kind.__qualname__} cannot be stored in a column; turn it into text, a number or bytes first"
            )
        try:
            return convert(value)
        except (OverflowError, ValueError) as error:
            raise TargetRefused(f"the {kind.__qualname__} {value!r} cannot be stored: {error}") from error


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@lru_cache(maxsize=512)
def _with_placeholders(statement: str, placeholder: str) -> str:
    return statement.replace("?", placeholder)


def _same(value: Any) -> Any:
    return value


def _number_or_refuse(value: float) -> float:
    if math.isfinite(value):
        return value
    raise TargetRefused(f"{value} cannot be stored by this database; filter it out or turn it into NULL before the sink")


def _finite_or_infinite(value: float) -> float:
    if math.isnan(value):
        raise TargetRefused("NaN becomes NULL in SQLite; filter it out or turn it into NULL before the sink")
    return value


def _decimal_text(value: Decimal) -> str:
    return str(_number_or_refuse_decimal(value))


def _number_or_refuse_decimal(value: Decimal) -> Decimal:
    if value.is_finite():
        return value
    raise TargetRefused(f"{value} cannot be stored by this database; filter it out or turn it into NULL before the sink")


def _utc_naive(value: dt.datetime) -> dt.datetime:
    """PyMySQL drops the offset of an aware datetime; DATETIME has none, so the instant is kept by storing UTC."""
    return value if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)


def _utc_text(value: dt.datetime) -> str:
    return (value if value.tzinfo is None else value.astimezone(dt.UTC)).isoformat(" ")


SQLITE: Final = Dialect(
    name="sqlite",
    placeholder="?",
    quote='"',
    share="",
    update="",
    now_us="CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) || '000' AS INTEGER)",
    text_key="TEXT",
    blob="BLOB",
    table_options="",
    max_parameters=30_000,
    multi_row=False,
    convert={
        float: _finite_or_infinite,
        Decimal: _decimal_text,
        dt.datetime: _utc_text,
        dt.date: dt.date.isoformat,
        dt.time: dt.time.isoformat,
        dt.timedelta: lambda value: value.total_seconds(),
        uuid.UUID: str,
    },
)
POSTGRESQL: Final = Dialect(
    name="postgresql",
    placeholder="%s",
    quote='"',
    share="FOR SHARE",
    update="FOR UPDATE",
    now_us="CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)",
    text_key='TEXT COLLATE "C"',
    blob="BYTEA",
    table_options="",
    max_parameters=30_000,
    multi_row=True,
    convert=dict.fromkeys((float, Decimal, dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID), _same),
    refused_character="\0",
)
MYSQL: Final = Dialect(
    name="mysql",
    placeholder="%s",
    quote="`",
    share="LOCK IN SHARE MODE",
    update="FOR UPDATE",
    now_us="CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)",
    text_key="VARCHAR(190) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
    blob="LONGBLOB",
    table_options="ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin",
    max_parameters=30_000,
    multi_row=True,
    convert={
        float: _number_or_refuse,
        Decimal: _number_or_refuse_decimal,
        dt.datetime: _utc_naive,
        dt.date: _same,
        dt.time: _same,
        dt.timedelta: _same,
        uuid.UUID: str,
    },
)
DIALECTS: Final = {dialect.name: dialect for dialect in (SQLITE, POSTGRESQL, MYSQL)}
