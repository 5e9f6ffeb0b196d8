"""The door to target databases: bounded sessions, exact values, errors that say what happened and keep secrets."""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from tests.contract.sinks.worlds import World, records

from millstream_schema.connectors import CommitResult
from millstream_schema.errors import CommitUnknown, ConfigurationError, SinkError, StoreUnavailable
from millstream_schema.target import connection as door
from millstream_schema.target import statements
from millstream_schema.target.connection import TargetConnection, connect
from millstream_schema.target.dialects import DIALECTS
from millstream_schema.target.failures import TargetBusy, TargetRefused, TargetUnavailable
from millstream_schema.target.urls import parse_url
from millstream_tasks.opening import open_storage
from millstream_tasks.sinks import sql
from millstream_tasks.sinks.sql import SqlAppendSink
from millstream_tasks.sinks.upsert import SqlUpsertSink
from millstream_tasks.snapshots.sql import SqlSnapshots


def test_a_lock_that_another_holds_is_waited_for_no_longer_than_the_timeout(sql_world: Any) -> None:
    """A busy target is TargetBusy: nothing was done, and the same connection goes on."""
    sql_world.run(f"INSERT INTO {sql_world.table} VALUES (1, 'a')")
    other = connect(sql_world.url, lock_timeout=0.2)
    with sql_world.reader.transaction() as holder:
        holder.execute(f"UPDATE {sql_world.table} SET name = 'b' WHERE id = 1")
        with pytest.raises(TargetBusy), other.transaction() as waiting:
            waiting.execute(f"UPDATE {sql_world.table} SET name = 'c' WHERE id = 1")
    with other.transaction() as transaction:
        assert transaction.fetch(f"SELECT name FROM {sql_world.table}") == [("b",)]
    other.close()


@pytest.mark.parametrize("kind", [pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("mariadb", marks=pytest.mark.mariadb)])
def test_a_transaction_that_idles_is_ended_by_the_database(kind: str, request: pytest.FixtureRequest) -> None:
    """A process stopped between lock and COMMIT holds its rows no longer than the timeout; the woken one did nothing."""
    url = request.getfixturevalue(f"{kind}_url")
    sleeper, other = connect(url, lock_timeout=0.3), connect(url, lock_timeout=3)
    with other.transaction() as transaction:
        transaction.execute("CREATE TABLE idle_rows (id BIGINT)")
    with other.transaction() as transaction:
        transaction.execute("INSERT INTO idle_rows VALUES (1)")
    with pytest.raises((TargetUnavailable, CommitUnknown)), sleeper.transaction() as stopped:
        stopped.execute("UPDATE idle_rows SET id = 2")
        with other.transaction() as transaction:  # waits until the database has ended the sleeper's
            transaction.execute("UPDATE idle_rows SET id = id + 10")
    with sleeper.transaction() as again:
        assert again.fetch("SELECT id FROM idle_rows") == [(11,)]
        again.execute("DROP TABLE idle_rows")
    sleeper.close()
    other.close()


@pytest.mark.parametrize(("given", "limit"), [(None, 0.25), (0.1, 0.1), (60.0, 0.25)])
def test_sinks_wait_for_locks_no_longer_than_the_installation_says(sql_world: Any, given: float | None, limit: float) -> None:
    """Below a third of the lease whatever the sink was built with; a sink may ask for less."""
    asked: list[float] = []

    def counting(url: str, *, durable: bool, lock_timeout: float) -> TargetConnection:
        asked.append(lock_timeout)
        return connect(url, durable=durable, lock_timeout=lock_timeout)

    sql_world.run(f"CREATE UNIQUE INDEX one_id_{sql_world.table} ON {sql_world.table} (id)")
    context = msgspec.structs.replace(sql_world.context(), lock_timeout=0.25)
    options: dict[str, Any] = {"connect": counting, "lock_timeout": given}
    SqlAppendSink(sql_world.url, sql_world.table, ["id", "name"], **options).open(context).close()
    assert asked == [limit] * 2  # writing and committing
    SqlUpsertSink(sql_world.url, sql_world.table, ["id", "name"], ["id"], **options).open(context).close()
    assert asked == [limit] * 3


@pytest.mark.parametrize("kind", [pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("mariadb", marks=pytest.mark.mariadb)])
def test_checkpoint_storage_waits_for_locks_no_longer_than_it_is_told(kind: str, request: pytest.FixtureRequest) -> None:
    """The limit of the installation reaches the session; MariaDB knows whole seconds, and never more of them."""
    storage = open_storage(request.getfixturevalue(f"{kind}_url"), 2.5)
    assert isinstance(storage, SqlSnapshots)
    ask = {
        "postgres": "SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')",
        "mariadb": "SELECT @@innodb_lock_wait_timeout, @@idle_transaction_timeout",
    }
    with storage._connection.transaction() as transaction:
        assert transaction.fetch(ask[kind]) == [{"postgres": ("2500ms", "2500ms"), "mariadb": (2, 2)}[kind]]
    storage.close()


def test_an_error_of_a_target_is_one_line(sql_world: Any) -> None:
    """Drivers draw: psycopg repeats the statement and puts a caret under it. It is stored as the reason of a failure."""
    with pytest.raises(TargetRefused) as caught, sql_world.reader.transaction() as transaction:
        transaction.fetch("SELECT nothing_such FROM nowhere_at_all WHERE id = 1")
    assert "nowhere_at_all" in str(caught.value)
    assert not set("\n^") & set(str(caught.value))


def test_a_session_that_was_killed_between_transactions_is_opened_again(sql_world: Any) -> None:
    """Nothing was done, so nobody needs to hear of it."""
    victim = connect(sql_world.url)
    with victim.transaction() as transaction:
        transaction.execute(f"INSERT INTO {sql_world.table} VALUES (1, 'a')")
    victim._session.close()
    if victim.dialect.name != "sqlite":  # a closed SQLite handle is a programming error, not a lost connection
        with victim.transaction() as transaction:
            transaction.execute(f"INSERT INTO {sql_world.table} VALUES (2, 'b')")
        assert sql_world.visible() == [1, 2]
    victim.close()
    with victim.transaction() as transaction:
        transaction.execute(f"INSERT INTO {sql_world.table} VALUES (3, 'c')")
    assert 3 in sql_world.visible()
    victim.close()


def test_a_block_that_raises_is_rolled_back_and_its_error_is_kept(sql_world: Any) -> None:
    """All or nothing; refused statements are SinkErrors, and the next transaction works."""
    connection = connect(sql_world.url)
    with pytest.raises(RuntimeError, match="mine"), connection.transaction() as transaction:
        transaction.execute(f"INSERT INTO {sql_world.table} VALUES (1, 'a')")
        raise RuntimeError("mine")
    with pytest.raises(TargetRefused) as caught, connection.transaction() as transaction:
        transaction.execute(f"INSERT INTO {sql_world.table} VALUES (2, 'a')")
        transaction.execute("INSERT INTO no_such_table VALUES (1)")
    assert isinstance(caught.value, SinkError)
    assert "no_such_table" in str(caught.value)
    with connection.transaction() as transaction:
        transaction.insert(f"INSERT INTO {sql_world.table} (id, name)", 2, "", [(number, "x") for number in range(1203)])
    assert sql_world.visible() == list(range(1203))
    connection.close()


def test_many_that_create_the_tables_at_once_all_succeed(sql_world: Any) -> None:
    """Losing the race is success, whatever the database calls it."""
    failures: list[BaseException] = []
    gate = threading.Barrier(4)
    names = {f"race_{sql_world.table}_{n}": f"CREATE TABLE IF NOT EXISTS race_{sql_world.table}_{n} (id BIGINT)" for n in range(3)}

    def create() -> None:
        connection = connect(sql_world.url)
        try:
            gate.wait()
            connection.ensure_tables(names)
        except BaseException as error:
            failures.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for name in names:
        sql_world.run(f"DROP TABLE {name}")


MOMENT = dt.datetime(2024, 2, 29, 23, 59, 58, 123456, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30)))
EXACT: dict[str, tuple[str, dict[str, str], Any]] = {
    "number": ("NUMERIC(30, 10)", {"sqlite": "TEXT"}, Decimal("12345678901234567890.0123456789")),
    "large": ("BIGINT", {}, 2**63 - 1),
    "half": ("DOUBLE PRECISION", {}, 0.1),
    "raw": ("BLOB", {"postgresql": "BYTEA"}, bytes(range(256))),
    "words": ("VARCHAR(200)", {}, "naïve 💧 'quoted' \"%s\" ? \\ back`tick"),
    "absent": ("BIGINT", {}, None),
    "flag": ("BOOLEAN", {}, True),
    "day": ("DATE", {"sqlite": "TEXT"}, dt.date(1969, 12, 31)),
    "at": ("DATETIME(6)", {"postgresql": "TIMESTAMPTZ", "sqlite": "TEXT"}, MOMENT),
    "ident": ("CHAR(36)", {"postgresql": "UUID"}, uuid.UUID(int=7)),
}


def test_values_reach_the_table_exactly_through_staging_and_commit(sql_world: Any) -> None:
    """Decimals, bytes, None, large integers, instants with an offset, quotes and percent signs arrive as they were."""
    dialect = sql_world.reader.dialect.name
    table = f"exact_{sql_world.table}"
    sql_world.run(f"CREATE TABLE {table} ({', '.join(f'{name} {others.get(dialect, kind)}' for name, (kind, others, _) in EXACT.items())})")
    row = {name: value for name, (_, _, value) in EXACT.items()}
    writer = SqlAppendSink(sql_world.url, table, list(EXACT)).open(sql_world.context())
    writer.write([row, dict.fromkeys(EXACT)], None)
    assert writer.commit(writer.prepare_commit(1)).result is CommitResult.COMMITTED
    found = sql_world.run(f"SELECT {', '.join(EXACT)} FROM {table} WHERE words IS NOT NULL")[0]
    got = dict(zip(EXACT, found))
    utc = MOMENT.astimezone(dt.UTC)
    expected = dict(row)
    if dialect == "sqlite":
        expected |= {"number": str(row["number"]), "day": "1969-12-31", "at": utc.isoformat(" "), "ident": str(row["ident"])}
    elif dialect == "mysql":
        expected |= {"at": utc.replace(tzinfo=None), "ident": str(row["ident"])}
    assert got == expected
    assert sql_world.run(f"SELECT COUNT(*) FROM {table} WHERE {' AND '.join(f'{name} IS NULL' for name in EXACT)}") == [(1,)]
    writer.close()
    sql_world.run(f"DROP TABLE {table}")


def test_a_row_the_table_refuses_fails_for_good_and_leaves_nothing(sql_world: Any) -> None:
    """FAILED with the database's reason; neither rows nor marker of that committable, and the staging stays."""
    table = f"strict_{sql_world.table}"
    sql_world.run(f"CREATE TABLE {table} (id BIGINT PRIMARY KEY, name VARCHAR(100))")
    writer = SqlAppendSink(sql_world.url, table, ["id", "name"]).open(sql_world.context())
    writer.write([(1, "a"), (2, "b"), (1, "c")], None)
    answer = writer.commit(writer.prepare_commit(1))
    assert answer.result is CommitResult.FAILED
    assert f"{sql_world.job}:sink:0:1" in answer.detail
    assert sql_world.run(f"SELECT COUNT(*) FROM {table}") == [(0,)]
    assert sql_world.run("SELECT COUNT(*) FROM millstream_committed WHERE job = ?", sql_world.job) == [(0,)]
    assert sql_world.staged() == 1
    writer.close()
    sql_world.run(f"DROP TABLE {table}")


def test_a_busy_target_asks_for_another_try_and_order_is_kept(sql_world: Any) -> None:
    """T-01, T-31: a commit that meets a lock answers RETRY, nothing behind it is committed, and the repeat does all."""
    writer = SqlAppendSink(sql_world.url, sql_world.table, ["id", "name"], lock_timeout=0.1).open(sql_world.context())
    committables = []
    for epoch in (3, 4):
        writer.write(records(epoch), None)
        committables += writer.prepare_commit(epoch)
    assert writer.commit(committables[:0]).result is CommitResult.ALREADY_COMMITTED
    with sql_world.reader.transaction() as holder:
        holder.execute(statements.insert_committer(holder.dialect), [sql_world.job, "sink", 0])
        assert writer.commit(committables).result is CommitResult.RETRY
    assert sql_world.visible() == []
    assert writer.commit(committables).result is CommitResult.COMMITTED
    assert sql_world.visible() == [3, 4]
    writer.close()


def test_markers_are_bounded_and_what_was_pruned_stays_known(sql_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A savepoint restored long after: its committables are still known to be committed."""
    monkeypatch.setattr(sql, "_KEPT_MARKERS", 3)
    writer = sql_world.open()
    everything = []
    for epoch in range(1, 9):
        writer.write(records(epoch), None)
        committables = writer.prepare_commit(epoch)
        everything += committables
        assert writer.commit(committables).result is CommitResult.COMMITTED
    assert sql_world.run("SELECT COUNT(*) FROM millstream_committed WHERE job = ?", sql_world.job) == [(3,)]
    later = sql_world.open(generation=2)
    assert later.commit(everything).result is CommitResult.ALREADY_COMMITTED
    assert sql_world.visible() == list(range(1, 9))


def test_large_records_are_cut_into_chunks_that_the_database_takes(sql_world: Any) -> None:
    """A batch of megabytes is staged in several chunks, each below the packet limit."""
    table = f"wide_{sql_world.table}"
    sql_world.run(f"CREATE TABLE {table} (id BIGINT, body {'LONGTEXT' if sql_world.reader.dialect.name == 'mysql' else 'TEXT'})")
    writer = SqlAppendSink(sql_world.url, table, ["id", "body"]).open(sql_world.context())
    writer.write([(number, chr(97 + number) * 1_500_000) for number in range(5)], None)
    committables = writer.prepare_commit(1)
    chunks = sql_world.run("SELECT COUNT(*) FROM millstream_staging WHERE job = ?", sql_world.job)
    assert chunks[0][0] > 1
    assert writer.commit(committables).result is CommitResult.COMMITTED
    assert sql_world.run(f"SELECT id, LENGTH(body), MIN(body) FROM {table} GROUP BY id, body ORDER BY id")[4][:2] == (4, 1_500_000)
    writer.close()
    sql_world.run(f"DROP TABLE {table}")


@pytest.mark.mariadb
def test_a_server_that_does_not_flush_its_commits_is_refused(mariadb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says that STRICT is refused and what to set; without ``durable`` the same server is accepted."""

    class Cursor:
        def __init__(self) -> None:
            self.statements: list[str] = []

        def execute(self, statement: str) -> None:
            self.statements.append(statement)

        def fetchone(self) -> tuple[str, int]:
            return "10.11.6-MariaDB", 2

    target = parse_url(mariadb_url)
    with pytest.raises(ConfigurationError, match=r"STRICT.*refused.*Set it to 1"):
        door._mysql_session(Cursor(), target, True, 3)
    lenient = Cursor()
    door._mysql_session(lenient, target, False, 3)
    assert any("idle_transaction_timeout = 3" in statement for statement in lenient.statements)
    durable = connect(mariadb_url)
    with durable.transaction() as transaction:
        assert transaction.fetch("SELECT @@innodb_flush_log_at_trx_commit") == [(1,)]
    durable.close()


@pytest.mark.mariadb
def test_a_table_without_transactions_is_refused(mariadb_url: str) -> None:
    """A commit into MyISAM is not atomic."""
    connection = connect(mariadb_url)
    with connection.transaction() as transaction:
        transaction.execute("CREATE TABLE unsafe (id BIGINT) ENGINE=MyISAM")
    connection.close()
    context = World().context()
    with pytest.raises(ConfigurationError, match="InnoDB"):
        SqlAppendSink(mariadb_url, "unsafe", ["id"]).open(context)


@pytest.mark.postgres
def test_a_table_that_a_crash_empties_is_refused_and_commits_are_synchronous(postgres_url: str) -> None:
    """UNLOGGED tables do not keep what was committed; the session overrides a lax default."""
    connection = connect(postgres_url)
    with connection.transaction() as transaction:
        transaction.execute("CREATE UNLOGGED TABLE unsafe (id BIGINT)")
        assert transaction.fetch("SELECT current_setting('synchronous_commit'), current_setting('lock_timeout')") == [("on", "3s")]
        assert transaction.fetch("SELECT current_setting('transaction_isolation')") == [("read committed",)]
    connection.close()
    with pytest.raises(ConfigurationError, match="UNLOGGED"):
        SqlAppendSink(postgres_url, "unsafe", ["id"]).open(World().context())


def test_sqlite_commits_are_flushed_to_the_device(tmp_path: Any) -> None:
    """WAL and synchronous=FULL (2) are set, whatever the file was."""
    connection = connect(f"sqlite:///{tmp_path / 'x.db'}")
    with connection.transaction() as transaction:
        assert transaction.fetch("PRAGMA journal_mode") == [("wal",)]
        assert transaction.fetch("PRAGMA synchronous") == [(2,)]
    connection.close()


@pytest.mark.parametrize(
    ("url", "dialect", "redacted"),
    [
        ("sqlite:///a/b.db", "sqlite", "sqlite:///a/b.db"),
        ("sqlite:////a/b.db", "sqlite", "sqlite:////a/b.db"),
        ("postgresql+psycopg://u:p%40ss@h:6/d?sslmode=require", "postgresql", "postgresql://u@h:6/d"),
        ("mariadb+pymysql://root:p%40ss@h/d", "mysql", "mysql://root@h/d"),
        ("mysql://h/d", "mysql", "mysql://h/d"),
    ],
)
def test_a_url_is_taken_apart_and_shown_without_its_secrets(url: str, dialect: str, redacted: str) -> None:
    """Passwords are decoded for the driver and never shown."""
    parsed = parse_url(url)
    assert (parsed.dialect, parsed.redacted()) == (dialect, redacted)
    assert "p@ss" not in repr(parsed)
    assert parsed.scrub("login with p@ss or p%40ss failed") == (
        "login with *** or *** failed" if parsed.password else "login with p@ss or p%40ss failed"
    )


@pytest.mark.parametrize(
    "url",
    ["", "nonsense", "oracle://u:hunter2@h/d", "sqlite://", "sqlite:///:memory:", "postgresql://u:hunter2@h", "mysql://u:hunter2@h:port/d"],
)
def test_a_url_that_cannot_be_used_is_refused_with_an_example_and_without_its_password(url: str) -> None:
    """The message says what to write and repeats nothing secret."""
    with pytest.raises(ConfigurationError) as caught:
        connect(url)
    assert "://" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://u:hunter2@127.0.0.1:1/d", "mysql://u:hunter2@127.0.0.1:1/d", "sqlite:////proc/none.db"])
def test_a_target_that_cannot_be_reached_is_unavailable_without_its_password(url: str) -> None:
    """Nothing was done; the error and its causes keep the secret."""
    connection = connect(url)
    with pytest.raises(StoreUnavailable) as caught, connection.transaction():
        pytest.fail("there is no such database")
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__cause__


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())
def test_names_that_are_not_plain_identifiers_never_reach_a_statement(dialect: Any) -> None:
    """No quoting trick gets through, in any database."""
    for name in ("", "a b", 'a"b', "a`b", "a;b", "a--", "1a", "a.b", "ä", "a" * 64, "a\n", "a%s", "a?"):
        with pytest.raises(ConfigurationError):
            dialect.identifier(name)
    for name in ("a.b.c", ".a", "a.", "a b.c"):
        with pytest.raises(ConfigurationError):
            dialect.table(name)
    assert dialect.table("s.t").count(dialect.quote) == 4


def test_values_that_a_database_would_change_are_refused() -> None:
    """NaN as NULL, infinities, lists: an error, not another value."""
    nan, infinity = float("nan"), float("inf")
    refused: dict[str, list[Any]] = {
        "sqlite": [nan, Decimal("NaN"), [1], {}],
        "mysql": [nan, infinity, Decimal("Infinity"), [1]],
        "postgresql": [[1], {}],
    }
    for name, values in refused.items():
        for value in values:
            with pytest.raises(TargetRefused):
                DIALECTS[name].bindable([(1, value)])
