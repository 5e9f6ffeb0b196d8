"""Records as rows: tuples in the order of a sink's columns.

Called by the SQL and CSV writers on the subtask's thread. What must never happen here: a value that lands in another column, or a record
that does not fit being cut or filled up in silence.
"""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from operator import attrgetter, itemgetter
from typing import Any, Final

from millstream_schema.errors import SinkError

Row = tuple[Any, ...]
_CELLS: Final = frozenset(
    {type(None), bool, int, float, str, bytes, Decimal, dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID},
)


class RowMapper:
    """Turns records into rows: tuples and lists by position; dicts by key; dataclasses, Structs, NamedTuples and objects by attribute."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        single = len(self.columns) == 1
        attributes, items = attrgetter(*self.columns), itemgetter(*self.columns)
        self._attributes: Callable[[Any], Row] = (lambda value: (attributes(value),)) if single else attributes
        self._items: Callable[[Any], Row] = (lambda value: (items(value),)) if single else items

    def rows(self, values: Sequence[Any]) -> list[Row]:
        """One row a value. Raises :class:`SinkError` that names the column or the type that does not fit."""
        rows = []
        take: Callable[[Any], Row] = self._position
        kind: type | None = None
        for value in values:
            if type(value) is not kind:
                kind = type(value)
                take = self._taker(kind)
            try:
                rows.append(take(value))
            except (KeyError, AttributeError) as error:
                raise SinkError(f"a {kind.__name__} does not fit the columns {', '.join(self.columns)}: it lacks {error}") from error
        return self._plain(rows)

    def _taker(self, kind: type) -> Callable[[Any], Row]:
        if issubclass(kind, Mapping):
            return self._items
        if issubclass(kind, list | tuple) and not hasattr(kind, "_fields"):
            return self._position
        return self._attributes

    def _position(self, value: Any) -> Row:
        if len(value) != len(self.columns):
            raise SinkError(f"a record of {len(value)} values does not fit {len(self.columns)} columns ({', '.join(self.columns)})")
        return tuple(value)

    def _plain(self, rows: list[Row]) -> list[Row]:
        """Look at types by column: cells of plain types pass untouched, at next to no cost."""
        kinds: set[type] = set()
        for column in zip(*rows):
            kinds.update(map(type, column))
        if kinds <= _CELLS:
            return rows
        return [tuple(cell if type(cell) in _CELLS else self._cell(name, cell) for name, cell in zip(self.columns, row)) for row in rows]

    def _cell(self, name: str, cell: Any) -> Any:
        if isinstance(cell, enum.Enum) and type(cell.value) in _CELLS:
            return cell.value
        if isinstance(cell, bytearray | memoryview):
            return bytes(cell)
        raise SinkError(
            f"column {name} cannot hold a {type(cell).__qualname__}: map it to text, a number, bytes, a date or None before the sink"
        )
