"""Contract of the SQL key source: exact resumption, keys keep their type, nothing is passed over that may still commit below."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sqlite3
import time
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_schema.connectors import ConnectorContext, Json, Source, SourceCapability, SplitReader
from millstream_schema.errors import SourceError, SourceUnavailable
from millstream_tasks.sources.sql import SqlKeyReader, SqlKeySource
from millstream_tasks.sources.sql_keys import decode_key, encode_key

CONTEXT = ConnectorContext("job", "source", 0, 1, 1, lambda: None, lambda: 0)
POSTGRES = "postgresql://postgres@127.0.0.1:5432/test"
MARIADB = "mariadb://root@127.0.0.1:3306/test"


class Database:
    """A table of its own in one database; ``writer`` sessions are the application's."""

    def __init__(self, url: str, connect: Any, table: str) -> None:
        self.url = url
        self.connect = connect
        self.table = table
        self._sessions: list[Any] = []
        self.admin = self.session()

    def session(self) -> Any:
        session = self.connect()
        self._sessions.append(session)
        return session

    def run(self, statement: str, session: Any = None) -> None:
        session = session or self.admin
        cursor = session.cursor()
        cursor.execute(statement.replace("TABLE_", self.table))
        cursor.close()
        if session is self.admin:
            session.commit()

    def close(self) -> None:
        self.admin.rollback()
        self.run("DROP TABLE IF EXISTS TABLE_")
        for session in self._sessions:
            session.close()


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ]
)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    table = f"ms_source_{uuid.uuid4().hex[:12]}"
    if request.param == "sqlite":
        path = tmp_path / "a.db"
        made = Database(f"sqlite:///{path}", lambda: sqlite3.connect(path), table)
    elif request.param == "postgres":
        made = Database(POSTGRES, lambda: psycopg.connect(POSTGRES, options="-c timezone=UTC"), table)
    else:
        made = Database(
            MARIADB,
            lambda: pymysql.connect(host="127.0.0.1", user="root", database="test", init_command="SET time_zone = '+00:00'"),
            table,
        )
    yield made
    made.close()


def open_reader(source: SqlKeySource, cursor: Json = None) -> SplitReader:
    assert source.problems() == []
    (split,) = source.discover(frozenset())
    assert source.discover(frozenset({split.split_id})) == []
    return source.open(split, cursor, CONTEXT)


def drain(reader: SplitReader, limit: int = 100) -> list[Any]:
    values: list[Any] = []
    with contextlib.closing(reader):
        while True:
            read = reader.poll(limit)
            assert len(read.values) <= limit
            values += read.values
            if read.exhausted:
                return values


def test_reading_to_any_cut_and_reopening_there_gives_exactly_the_rest(database: Database) -> None:
    """Property: for every cut of a table with gaps in its keys, prefix + reopened rest = all rows of the filter."""
    database.run("CREATE TABLE TABLE_ (id BIGINT PRIMARY KEY, name VARCHAR(20), tenant VARCHAR(5))")
    ids = [-5, 1, 2, 7, 2**40, 2**63 - 1]
    for key in ids:
        for tenant, number in (("a", key), ("b", key - 1)):
            if number not in ids or tenant == "a":
                database.run(f"INSERT INTO TABLE_ VALUES ({number}, 'n{number}', '{tenant}')")
    source = SqlKeySource(database.url, database.table, "id", ["name", "id"], ordered_commits=True, bounded=True, where={"tenant": "a"})
    whole = drain(open_reader(source))
    assert whole == [{"name": f"n{key}", "id": key} for key in ids]
    for cut in range(len(ids) + 1):
        reader = open_reader(source)
        before = [value for _ in range(cut) for value in reader.poll(1).values]
        cursor = json.loads(json.dumps(reader.cursor()))
        reader.close()
        assert before + drain(open_reader(source, cursor), 2) == whole


def test_rows_committed_later_are_read_by_the_same_reader(database: Database) -> None:
    """Property: an unbounded source goes on; the row after the cursor comes when it is committed."""
    database.run("CREATE TABLE TABLE_ (id BIGINT PRIMARY KEY)")
    source: Source = SqlKeySource(database.url, database.table, "id", ["id"], ordered_commits=True, poll_interval=0)
    assert isinstance(source, SqlKeySource)
    assert source.capability is SourceCapability.REPLAYABLE
    reader = open_reader(source)
    assert reader.poll(10).values == []
    assert reader.cursor() is None
    for key in (3, 4):
        database.run(f"INSERT INTO TABLE_ VALUES ({key})")
        assert reader.poll(10) == ([{"id": key}], None, False, (), 0)
    reader.close()


@pytest.mark.parametrize("unit", ["timestamp", "ms"])
def test_a_lower_key_that_commits_later_is_not_passed_over(database: Database, unit: str) -> None:
    """Property: nothing behind an unsettled row is read, so the lower key that commits last is read first."""
    if database.url.startswith("sqlite") and unit == "timestamp":
        kind, now, old = "TEXT", "strftime('%Y-%m-%d %H:%M:%f', 'now')", "datetime('now', '-1 hour')"
    elif unit == "timestamp":
        kind, now, old = "TIMESTAMP", "now()", "now() - INTERVAL '1' HOUR"
    else:
        kind, old = "BIGINT", "0"
        now = {
            "s": "CAST(strftime('%s', 'now') AS INTEGER) * 1000",
            "p": "CAST(extract(epoch FROM now()) * 1000 AS BIGINT)",
            "m": "CAST(UNIX_TIMESTAMP(now(6)) * 1000 AS SIGNED)",
        }[database.url[0]]
    nullable = "NULL" if database.url.startswith("mariadb") else ""
    database.run(f"CREATE TABLE TABLE_ (id BIGINT PRIMARY KEY, at {kind} {nullable})")
    source = SqlKeySource(
        database.url, database.table, "id", ["id"], settle=600, settle_column="at", settle_unit=unit, bounded=True, poll_interval=0
    )
    assert source.capability is SourceCapability.REPLAYABLE
    database.run(f"INSERT INTO TABLE_ VALUES (1, {old})")
    if not database.url.startswith("sqlite"):  # SQLite has one writer at a time
        late = database.session()
        database.run(f"INSERT INTO TABLE_ VALUES (2, {now})", late)
    database.run(f"INSERT INTO TABLE_ VALUES (3, {now})")
    database.run(f"INSERT INTO TABLE_ VALUES (4, {old})")
    reader = open_reader(source)
    assert [v["id"] for v in reader.poll(10).values] == [1]
    assert reader.poll(10) == ([], None, False, (), 0), "row 4 is settled but stands behind row 3, which is not"
    if database.url.startswith("sqlite"):
        database.run(f"INSERT INTO TABLE_ VALUES (2, {now})")
    else:
        late.commit()
    assert reader.poll(10).values == []
    database.run(f"UPDATE TABLE_ SET at = {old}")
    assert [v["id"] for v in drain(reader)] == [2, 3, 4]
    database.run("INSERT INTO TABLE_ VALUES (9, NULL)")
    with pytest.raises(SourceError, match="key 9 has NULL in the settle column"):
        drain(open_reader(source))


def test_a_key_that_is_not_unique_is_an_error_also_across_fetches(database: Database) -> None:
    """Property: rows that share a key are never lost at the edge of a fetch."""
    database.run("CREATE TABLE TABLE_ (id BIGINT)")
    database.run("INSERT INTO TABLE_ VALUES " + ", ".join(f"({min(key, 999)})" for key in range(1001)))
    with pytest.raises(SourceError, match="has 999 twice"):
        drain(open_reader(SqlKeySource(database.url, database.table, "id", ["id"], ordered_commits=True, bounded=True)), 1000)


@pytest.mark.parametrize(
    "keys",
    [
        ["a", "b'; DROP TABLE x; --", "é", "漢"],
        [dt.datetime(2024, 1, 2, 3, 4, 5, 6), dt.datetime(2024, 1, 2, 3, 4, 5, 7)],
        [Decimal("1.10"), Decimal("12345678901234567.25")],
    ],
    ids=["text", "datetime", "decimal"],
)
def test_keys_of_other_types_resume_exactly(database: Database, keys: list[Any]) -> None:
    """Property: a key survives the cursor's JSON with type and value, and finds its place again."""
    if database.url.startswith("sqlite") and not isinstance(keys[0], str):
        pytest.skip("SQLite has no such type: its keys are int, float, str or bytes")
    kind = {str: "VARCHAR(40)", dt.datetime: "TIMESTAMP(6)", Decimal: "NUMERIC(30, 2)"}[type(keys[0])]
    database.run(f"CREATE TABLE TABLE_ (id {kind} PRIMARY KEY)")
    cursor = database.admin.cursor()
    mark = "?" if database.url.startswith("sqlite") else "%s"
    cursor.executemany(f"INSERT INTO {database.table} VALUES ({mark})", [(key,) for key in keys])
    database.admin.commit()
    source = SqlKeySource(database.url, database.table, "id", ["id"], ordered_commits=True, bounded=True)
    reader = open_reader(source)
    seen = []
    for _ in keys:
        seen += [value["id"] for value in reader.poll(1).values]
        again = json.loads(json.dumps(reader.cursor()))
        assert type(decode_key(again)) is type(keys[0])
        assert seen + [v["id"] for v in drain(open_reader(source, again))] == keys
    reader.close()


KEYS = st.one_of(
    st.integers(),
    st.text(),
    st.binary(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.decimals(allow_nan=False),
    st.datetimes(timezones=st.none() | st.timezones().map(lambda z: dt.timezone(dt.timedelta(hours=3)))),
    st.dates(),
    st.uuids(),
)


@given(KEYS)
def test_every_key_type_survives_json(key: Any) -> None:
    """Property: decode(JSON(encode(key))) has the same type and value."""
    again = decode_key(json.loads(json.dumps(encode_key(key))))
    assert type(again) is type(key)
    assert again == key
    assert str(again) == str(key)


@pytest.mark.parametrize("cursor", [5, ["int", 5], ["int", "x"], ["object", "x"], ["decimal", "x"], []])
def test_a_foreign_cursor_is_refused(cursor: Json) -> None:
    """Property: no cursor is taken for another one."""
    with pytest.raises(SourceError, match="not a cursor"):
        decode_key(cursor)


def test_neither_order_nor_settling_promises_nothing() -> None:
    """Property: without the user's word the capability is NONE, so STRICT is refused."""
    assert SqlKeySource("sqlite:///a.db", "t", "id", ["id"]).capability is SourceCapability.NONE


def test_wrong_options_and_injections_are_problems() -> None:
    """Property: every name is checked before it comes near a statement; everything wrong is listed."""
    for table, key, columns, where in (
        ("t; DROP TABLE x", "id", ["id"], {}),
        ("t", 'id" --', ["id"], {}),
        ("t", "id", ["count(*)"], {}),
        ("t", "id", ["id"], {"1=1 OR x": 1}),
        ("t", "id", ["id", "id"], {}),
        ("t", "id", ["id"], {"x": object()}),
    ):
        assert len(SqlKeySource("sqlite:///a.db", table, key, columns, where=where).problems()) == 1
    assert len(SqlKeySource("sqlite:///a.db", "t", "id", [], settle=-1, settle_unit="h", poll_interval=-1).problems()) == 5
    assert len(SqlKeySource("oracle://x", "t", "id", ["id"]).problems()) == 1


def test_the_configuration_holds_no_secret_and_every_option() -> None:
    """Property: no password in config(); changing what identifies the source changes it."""
    base: dict[str, Any] = {"url": "postgresql://u:s3cret@h/d", "table": "t", "key_column": "id", "columns": ["id"]}
    changes: list[dict[str, Any]] = [
        {},
        {"url": "postgresql://u:s3cret@h/e"},
        {"table": "s.t"},
        {"key_column": "k"},
        {"columns": ["x"]},
        {"settle": 1.0},
        {"settle_column": "c"},
        {"settle_unit": "ms"},
        {"ordered_commits": True},
        {"bounded": True},
        {"where": {"a": 1}},
        {"where": {"a": "1"}},
    ]
    seen = [json.dumps(SqlKeySource(**{**base, **change}).config()) for change in changes]
    assert len(set(seen)) == len(seen)
    assert not any("s3cret" in text for text in seen)


def test_an_unreachable_database_is_an_empty_read_and_then_an_error() -> None:
    """Property: outages are waited out without blocking, then the source gives up with a way to go on."""
    source = SqlKeySource("postgresql://postgres@127.0.0.1:1/test", "t", "id", ["id"], ordered_commits=True, give_up=60)
    reader = open_reader(source)
    assert reader.poll(10).values == []
    reader.close()
    impatient = SqlKeySource("postgresql://postgres@127.0.0.1:1/test", "t", "id", ["id"], ordered_commits=True, give_up=0)
    with pytest.raises(SourceUnavailable, match="could not be reached"):
        drain(open_reader(impatient))


def test_a_lost_session_is_opened_again(database: Database) -> None:
    """Property: the database's end of a session costs no row and repeats none."""
    if database.url.startswith("sqlite"):
        pytest.skip("SQLite has no session to lose")
    database.run("CREATE TABLE TABLE_ (id BIGINT PRIMARY KEY)")
    database.run("INSERT INTO TABLE_ VALUES (1)")
    reader = open_reader(SqlKeySource(database.url, database.table, "id", ["id"], ordered_commits=True, poll_interval=0))
    assert reader.poll(10).values == [{"id": 1}]
    if database.url.startswith("postgres"):
        database.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'millstream' AND query LIKE '%TABLE_%'"
        )
    else:
        assert isinstance(reader, SqlKeyReader)
        ((number,),) = reader._connection.read("SELECT CONNECTION_ID()", [])
        database.run(f"KILL {number}")
    database.run("INSERT INTO TABLE_ VALUES (2)")
    values: list[Any] = []
    deadline = time.monotonic() + 10
    while not values and time.monotonic() < deadline:
        values += reader.poll(10).values
    reader.close()
    assert values == [{"id": 2}]


def test_a_missing_table_is_an_error_that_names_it(database: Database) -> None:
    """Property: what the database refuses for good is raised at once."""
    with pytest.raises(SourceError, match=database.table):
        drain(open_reader(SqlKeySource(database.url, database.table, "id", ["id"], ordered_commits=True)))
