"""Values a database refuses fail with their record, before an epoch holds them: a commit that is refused is refused at every restart."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from decimal import Decimal
from typing import Any

import pytest
from tests.contract.sinks.worlds import records

from millstream_schema.connectors import CommitResult
from millstream_schema.errors import SinkError
from millstream_schema.target.dialects import DIALECTS
from millstream_schema.target.failures import TargetRefused
from millstream_tasks.sinks.sql import SqlAppendSink
from millstream_tasks.sinks.upsert import SqlUpsertSink

COMMITTED = CommitResult.COMMITTED
EVERYWHERE: dict[str, Any] = {
    "wide": 2**63,
    "wide below": -(2**63) - 1,
    "lone surrogate": "a\udc80",
}
SOMEWHERE: dict[str, dict[str, Any]] = {
    "sqlite": {"nan": float("nan"), "decimal": Decimal("Infinity"), "before year 1": dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5)))},
    "postgresql": {"nul": "a\0b", "zoned time": dt.time(1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Oslo"))},
    "mysql": {
        "nan": float("nan"),
        "infinity": float("-inf"),
        "decimal": Decimal("NaN"),
        "before year 1": dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5))),
    },
}  # fmt: skip
ACCEPTED: list[Any] = [None, True, -(2**63), 2**63 - 1, "é💧", "", b"\x00\xff", 0.5, Decimal("1.5"), dt.date(2024, 2, 29)]


@pytest.mark.parametrize("name", DIALECTS)
def test_what_a_database_refuses_is_found_by_looking_and_the_column_is_named(name: str) -> None:
    """Alone in a column, and last among others of its kind and of other kinds."""
    dialect = DIALECTS[name]
    for value in {**EVERYWHERE, **SOMEWHERE[name]}.values():
        for column in (
            [value],
            [None, 0, "x", value],
            [*ACCEPTED, value],
            [type(value)(), value] if type(value) in (int, str, float) else [value],
        ):
            with pytest.raises(TargetRefused, match=r"^column b: "):
                dialect.check(["a", "b"], [(1, cell) for cell in column])
    dialect.check(["a", "b"], [(1, cell) for cell in ACCEPTED])
    for cell in ACCEPTED:
        dialect.check(["a", "b"], [(1, cell)])
    dialect.check(["a", "b"], [])


def test_a_refused_value_fails_the_write_and_the_epoch_is_sealed_without_it(sql_world: Any, sealed: Any) -> None:
    """SinkError that names the column; what was written before it, and what comes after, is committed."""
    writer = sql_world.open()
    writer.write(records(1), None)
    for value in {**EVERYWHERE, **SOMEWHERE[sql_world.reader.dialect.name]}.values():
        with pytest.raises(SinkError, match="column name"):
            writer.write([(9, "fine"), (10, value)], None)
    assert writer.commit(sealed(writer, 1, 2)).result is COMMITTED
    assert sql_world.visible() == [1, 2]


def test_the_upsert_sink_refuses_the_same_values_at_the_write(sql_world: Any) -> None:
    """In a key as in any other column."""
    sql_world.run(f"CREATE UNIQUE INDEX one_name_{sql_world.table} ON {sql_world.table} (name)")
    writer = SqlUpsertSink(sql_world.url, sql_world.table, ["id", "name"], ["name"]).open(sql_world.context())
    for value in {**EVERYWHERE, **SOMEWHERE[sql_world.reader.dialect.name]}.values():
        with pytest.raises(SinkError, match="column name"):
            writer.write([(1, value)], None)
    writer.write([(1, "fine")], None)
    writer.flush()
    assert sql_world.run(f"SELECT id, name FROM {sql_world.table}") == [(1, "fine")]
    writer.close()


SHAPES: dict[str, tuple[Any, Any, set[str]]] = {
    "None in a NOT NULL column": ((None, "b", 1), (2, "b", 1), {"sqlite", "postgresql", "mysql"}),
    "text that is too long": ((2, "x" * 11, 1), (2, "x" * 10, 1), {"postgresql", "mysql"}),
    "a number that is too wide": ((2, "b", 2**15), (2, "b", 2**15 - 1), {"postgresql", "mysql"}),
    "a number that is too low": ((2, "b", -(2**15) - 1), (2, "b", -(2**15)), {"postgresql", "mysql"}),
    "text in a number's column": (("two", "b", 1), (2, "b", 1), {"postgresql", "mysql"}),
    "bytes in a number's column": ((b"\xff", "b", 1), (2, "b", 1), {"postgresql", "mysql"}),
    "a number with too many digits": ((Decimal("1E+25"), "b", 1), (Decimal(7), "b", 1), {"postgresql", "mysql"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_unlike_those_before_is_tried_on_the_table_before_it_is_staged(sql_world: Any, shape: str) -> None:
    """A type, a None, a length or a width the table refuses fails the flush; the trial leaves no row, and its like that fits passes."""
    bad, good, where = SHAPES[shape]
    if sql_world.reader.dialect.name not in where:
        bad = good  # SQLite stores it
    table = f"shape_{sql_world.table}"
    sql_world.run(f"CREATE TABLE {table} (id BIGINT NOT NULL, name VARCHAR(10), small SMALLINT)")
    sink = SqlAppendSink(sql_world.url, table, ["id", "name", "small"])
    writer = sink.open(sql_world.context())
    writer.write([(1, "a", 1), (3, None, None)], None)
    writer.flush()
    writer.write([(4, "a", 1), bad, (5, "a", 1)], None)
    if bad is not good:
        with pytest.raises(SinkError, match=f"table {table} refuses a record"):
            writer.flush()
        with pytest.raises(SinkError, match=f"table {table} refuses a record"):
            writer.prepare_commit(1)  # nothing is sealed without what was refused
        writer.close()
        writer = sink.open(sql_world.context(generation=2))
        writer.write([(1, "a", 1), (3, None, None), (4, "a", 1), good, (5, "a", 1)], None)
    committables = writer.prepare_commit(1)
    assert sql_world.run(f"SELECT COUNT(*) FROM {table}") == [(0,)]
    assert writer.commit(committables).result is COMMITTED
    assert sql_world.run(f"SELECT COUNT(*) FROM {table}") == [(5,)]
    writer.close()
    sql_world.run(f"DROP TABLE {table}")


def test_a_table_that_is_only_busy_refuses_nothing(sql_world: Any) -> None:
    """The trial gives up, the rows are staged; what it could not try is tried with the next rows."""
    table = f"busy_{sql_world.table}"
    sql_world.run(f"CREATE TABLE {table} (id BIGINT NOT NULL PRIMARY KEY, name VARCHAR(100))")
    writer = SqlAppendSink(sql_world.url, table, ["id", "name"], lock_timeout=1.0, patience=20).open(sql_world.context())
    if sql_world.reader.dialect.name == "sqlite":
        with sql_world.reader.transaction():
            writer.write([(None, "a")], None)
            writer._trial.run(writer._buffer)
    else:
        with sql_world.reader.transaction() as holder:
            holder.execute(f"INSERT INTO {table} VALUES (1, 'mine')")
            writer.write([(1, "a")], None)
            writer.flush()
            writer.write([(None, "a")], None)
    with pytest.raises(SinkError, match="refuses a record"):
        writer.flush()
    writer.close()
    sql_world.run(f"DROP TABLE {table}")
