"""The statement that the SQL key source reads by.

Called by ``millstream_tasks.sources.sql``. Written with ``?``; the connection door translates. What must never happen here: a name that
was not checked, or a value in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millstream_schema.errors import ConfigurationError
from millstream_schema.target.dialects import Dialect

SETTLE_UNITS: Final = {"timestamp": 0, "s": 1_000_000, "ms": 1_000, "us": 1}
"""What a settle column holds: a timestamp, or a count since 1970; the number is how many microseconds one is."""


def select_after_key(
    d: Dialect,
    table: str,
    key: str,
    columns: Sequence[str],
    equal: Sequence[str] = (),
    null: Sequence[str] = (),
    settle_column: str | None = None,
    settle_unit: str = "timestamp",
    resumed: bool = False,
) -> str:
    """Rows of ``table`` above a key, in its order: key, ``columns``, and 1 | 0 | NULL for settled | too young | no time.

    Parameters in order: the settle time (when there is a ``settle_column``; see :func:`settle_parameter`), the key (when ``resumed``), the
    values of ``equal``, the limit. Settling is judged by the clock of the statement's *start*, which is not above its snapshot: a row that
    counts as settled would otherwise let rows through that committed in between.
    """
    name = d.identifier
    settled = "1" if settle_column is None else _settled(d, name(settle_column), settle_unit)
    conditions = [f"{name(key)} > ?"] if resumed else []
    conditions += [f"{name(column)} = ?" for column in equal]
    conditions += [f"{name(column)} IS NULL" for column in null]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {d.names([key, *columns])}, {settled} FROM {d.table(table)}{where} ORDER BY {name(key)} LIMIT ?"


def settle_parameter(d: Dialect, seconds: float, unit: str) -> int | float | str:
    """The settle time as :func:`select_after_key` compares with."""
    if unit != "timestamp" or d.name == "mysql":
        return round(seconds * 1_000_000)
    return f"-{seconds:.6f} seconds" if d.name == "sqlite" else float(seconds)


def _settled(d: Dialect, column: str, unit: str) -> str:
    if unit not in SETTLE_UNITS:
        raise ConfigurationError(f"settle_unit={unit!r} is unknown; write one of {', '.join(map(repr, SETTLE_UNITS))}")
    if unit != "timestamp":
        compared = f"{column} * {SETTLE_UNITS[unit]} <= {_statement_start_us(d)} - ?"
    elif d.name == "sqlite":
        compared = f"julianday({column}) <= julianday('now', ?)"
    elif d.name == "postgresql":
        compared = f"{column} <= statement_timestamp() - make_interval(secs => CAST(? AS double precision))"
    else:
        compared = f"{column} <= NOW(6) - INTERVAL ? MICROSECOND"
    return f"CASE WHEN {column} IS NULL THEN NULL WHEN {compared} THEN 1 ELSE 0 END"


def _statement_start_us(d: Dialect) -> str:
    if d.name == "postgresql":
        return "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS BIGINT)"
    if d.name == "mysql":
        return "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
    return d.now_us
