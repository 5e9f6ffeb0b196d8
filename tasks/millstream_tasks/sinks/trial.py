"""A few rows tried on the user's table, in a transaction that is rolled back, before their batch is staged.

Called by the append writer on the subtask's thread. What a table refuses when an epoch is committed it refuses at every restart; refused
here, no durable epoch holds it. Trying each row would write everything twice, so those are tried that a column has not met the like of:
another type, None, a longer text, a wider number. What must never happen here: a row that stays, or a target that is merely busy or
away taken for one that refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

from millstream_schema.target import statements
from millstream_schema.target.connection import TargetConnection
from millstream_schema.target.failures import TargetRefused, TargetUnavailable
from millstream_tasks.sinks.rows import Row

_SIZE: Final[dict[type, Callable[[Any], int]]] = {str: len, bytes: len, Decimal: Decimal.adjusted}
_Feature = tuple[int, type, bool]
"""Column, type of the value, and whether it is below zero, for integers."""


class _Undo(Exception):
    """Ends the transaction of a trial that went well."""


class Trial:
    """What one writer's table has taken so far, by column."""

    def __init__(self, connection: TargetConnection, table: str, columns: Sequence[str]) -> None:
        self._connection = connection
        self._columns = columns
        self._table = table
        self._head = statements.insert_head(connection.dialect, table, columns)
        self._taken: dict[_Feature, int] = {}

    def run(self, rows: Sequence[Row]) -> None:
        """Raise :class:`TargetRefused` when the table refuses a row unlike all it took before. A busy or lost target is asked next time."""
        found = self._unlike(rows)
        if not found:
            return
        try:
            with self._connection.transaction() as transaction:
                transaction.insert(self._head, len(self._columns), "", [rows[index] for index in sorted({i for _, i in found.values()})])
                raise _Undo
        except _Undo:
            self._taken.update((feature, size) for feature, (size, _) in found.items())
        except TargetUnavailable:
            return
        except TargetRefused as error:
            raise TargetRefused(
                f"table {self._table} refuses a record, nothing of its epoch was made durable: {error}; "
                "map or filter such records before the sink, or change the table"
            ) from error

    def _unlike(self, rows: Sequence[Row]) -> dict[_Feature, tuple[int, int]]:
        """Size and row of what no earlier row was like."""
        found: dict[_Feature, tuple[int, int]] = {}
        for number, column in enumerate(zip(*rows)):
            kinds = set(map(type, column))
            for kind in kinds:
                places = range(len(column)) if len(kinds) == 1 else [i for i, value in enumerate(column) if type(value) is kind]
                values = column if len(kinds) == 1 else [column[i] for i in places]
                for feature, size, at in _extremes(number, kind, values):
                    if size > self._taken.get(feature, _NEVER):
                        found[feature] = (size, places[at])
        return found


_NEVER: Final = -(1 << 62)  # below the size of any value, a small Decimal's too


def _extremes(number: int, kind: type, values: Sequence[Any]) -> list[tuple[_Feature, int, int]]:
    """The widest values of one type in one column: feature, size, place."""
    if kind is int:
        low, high = min(values), max(values)
        wide: list[tuple[_Feature, int, int]] = [] if high < 0 else [((number, kind, False), high.bit_length(), values.index(high))]
        return wide if low >= 0 else [*wide, ((number, kind, True), (~low).bit_length(), values.index(low))]
    measure = _SIZE.get(kind)
    if measure is None:
        return [((number, kind, False), 0, 0)]
    sizes = list(map(measure, values))
    size = max(sizes)
    return [((number, kind, False), size, sizes.index(size))]
