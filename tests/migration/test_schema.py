"""The schema: made whole, made once, refused when it is not this build's; two installations in one database do not meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from tests.contract.store.stores import job_values

from millstream_coordinator.coordinator import Coordinator
from millstream_schema.durable.records import NewTask
from millstream_schema.durable.requests import HandlerSpec, Options, encode_arguments
from millstream_schema.durable.requests import new_task as new_task_of
from millstream_schema.errors import ConfigurationError, SchemaMismatch, StoreUnavailable
from millstream_schema.hints import NoHints
from millstream_schema.ports import SystemChance, SystemClock
from millstream_schema.store import jobs, migrate, registry, settling, tasks
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import check_schema, create_schema
from millstream_schema.store.tables import SCHEMA_VERSION, tables

KINDS = [
    pytest.param("sqlite", id="sqlite"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgres),
    pytest.param("mariadb", id="mariadb", marks=pytest.mark.mariadb),
]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database; tests take prefixes of their own in it."""
    kind: str = request.param
    return f"sqlite:///{tmp_path / 'm.db'}" if kind == "sqlite" else str(request.getfixturevalue(f"{kind}_url"))


_serial = iter(range(10**6))


@contextmanager
def opened(url: str, prefix: str = "") -> Iterator[Database]:
    db = Database(url, SystemClock(), prefix=prefix or f"m{next(_serial)}_")
    try:
        yield db
    finally:
        db.close()


def names(db: Database) -> set[str]:
    return {n for n in sa.inspect(db.engine).get_table_names() if n.startswith(db.tables.prefix)}


def set_ledger(db: Database, **values: Any) -> None:
    t = db.tables.schema
    db.run(lambda tx: tx.update(t, t.c.id == 1, **values))


def test_a_fresh_database_gets_every_table_and_a_repeat_changes_nothing(url: str) -> None:
    """Rows that are there when it is repeated stay."""
    with opened(url) as db:
        with pytest.raises(SchemaMismatch, match="millstream up"):
            check_schema(db)
        create_schema(db)
        check_schema(db)
        assert names(db) == {t.name for t in db.tables.metadata.tables.values()} | {f"{db.tables.prefix}alembic"}
        db.run(lambda tx: jobs.insert_job(tx, **job_values()))
        create_schema(db)
        check_schema(db)
        assert db.read(jobs.live_job_ids) == ["job-1"]


def test_migrations_make_exactly_the_tables_that_are_described(url: str) -> None:
    """Nothing is missing, nothing is too much, no type differs, and the tables are held together by no foreign key."""
    with opened(url) as db:
        create_schema(db)
        mine = db.tables.prefix

        def ours(name: str | None, kind: str, parent: Any) -> bool:
            return kind != "table" or ((name or "").startswith(mine) and name != f"{mine}alembic")

        with db.engine.connect() as connection:
            options = {"include_name": ours, "compare_type": True, "compare_server_default": True}
            found = compare_metadata(MigrationContext.configure(connection, opts=options), db.tables.metadata)
        assert found == []
        inspector = sa.inspect(db.engine)
        assert {n: keys for n in names(db) if (keys := inspector.get_foreign_keys(n))} == {}


def test_every_identifier_compares_byte_by_byte(url: str) -> None:
    """On MariaDB by utf8mb4_nopad_bin, on PostgreSQL by C: also in tables added later."""
    with opened(url) as db:
        create_schema(db)
        if db.dialect == "sqlite":
            return  # SQLite compares by bytes unless told otherwise
        wrong = []
        for name in names(db) - {f"{db.tables.prefix}alembic"}:
            for column in sa.inspect(db.engine).get_columns(name):
                kind = column["type"]
                if str(kind).startswith("VARCHAR") and getattr(kind, "collation", None) not in ("C", "utf8mb4_nopad_bin"):
                    wrong.append(f"{name}.{column['name']}: {getattr(kind, 'collation', None)}")
        assert wrong == []


def test_long_texts_have_no_small_bound(url: str) -> None:
    """On MariaDB TEXT ends at 64 KiB: every text that is no identifier is LONGTEXT there."""
    with opened(url) as db:
        create_schema(db)
        kinds = {str(c["type"]).split(" ")[0] for n in names(db) for c in sa.inspect(db.engine).get_columns(n) if "TEXT" in str(c["type"])}
        assert kinds <= {"LONGTEXT", "TEXT"}
        if db.dialect == "mysql":
            assert kinds == {"LONGTEXT"}


def test_a_newer_schema_is_refused_by_every_start(url: str) -> None:
    """An old build on a new database stops and says to upgrade Millstream; nothing is changed."""
    with opened(url) as db:
        create_schema(db)
        set_ledger(db, version=SCHEMA_VERSION + 1)
        for start in (check_schema, create_schema):
            with pytest.raises(SchemaMismatch, match=f"schema {SCHEMA_VERSION + 1}.*upgrade Millstream"):
                start(db)
        assert db.read(lambda tx: tx.row(sa.select(db.tables.schema.c.version))) == {"version": SCHEMA_VERSION + 1}


def test_an_older_schema_is_refused_with_the_command_named(url: str) -> None:
    """``millstream up`` brings it to this version."""
    with opened(url) as db:
        create_schema(db)
        set_ledger(db, version=SCHEMA_VERSION - 1)
        with pytest.raises(SchemaMismatch, match="run `millstream up`"):
            check_schema(db)
        create_schema(db)
        check_schema(db)


def test_a_half_done_migration_is_named_and_can_be_repeated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start finds MIGRATING and says what to run; running it again makes what is missing."""
    with opened(url) as db:

        def killed(_db: Database) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(migrate, "_upgrade", killed)
            with pytest.raises(KeyboardInterrupt):
                create_schema(db)
        with pytest.raises(SchemaMismatch, match="not finished: run `millstream up` again"):
            check_schema(db)
        db.tables.job.create(db.engine)
        create_schema(db)
        check_schema(db)
        assert db.read(jobs.live_job_ids) == []


def test_c2_processes_that_migrate_at_one_moment_all_find_it_whole(url: str) -> None:
    """Several starts of a new installation: each returns with the schema there, none fails."""
    prefix = f"m{next(_serial)}_"
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def up() -> None:
        with opened(url, prefix) as db:
            start.wait(10)
            try:
                create_schema(db)
                check_schema(db)
            except BaseException as exc:
                failures.append(exc)

    threads = [threading.Thread(target=up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    with opened(url, prefix) as db:
        check_schema(db)
        assert db.run(lambda tx: registry.take_lease(tx, "a", 1))[:2] == (1, True)


def test_two_installations_in_one_database_do_not_meet(url: str) -> None:
    """Other tables, other leases, other jobs; taking one down leaves the other."""
    with opened(url) as one, opened(url) as other:
        create_schema(one)
        with pytest.raises(SchemaMismatch):
            check_schema(other)
        create_schema(other)
        assert names(one).isdisjoint(names(other)) and len(names(one)) == len(names(other))
        one.run(lambda tx: jobs.insert_job(tx, **job_values("same")))
        assert other.read(jobs.live_job_ids) == []
        other.run(lambda tx: jobs.insert_job(tx, **job_values("same")))
        coordinators = [
            Coordinator(db, NoHints(), SystemClock(), SystemChance(), lambda _url: pytest.fail("no storage is needed"), f"c{i}", 60_000)
            for i, db in enumerate((one, other))
        ]
        assert [c.renew() for c in coordinators] == [True, True]
        one.tables.metadata.drop_all(one.engine)
        check_schema(other)
        assert other.read(jobs.live_job_ids) == ["same"]


@pytest.mark.parametrize("prefix", ["Mill_", "1x_", "a-b_", "a b", "", 'x"; DROP TABLE y; --', "x" * 22, "a.b_", "ü_"])
def test_a_prefix_that_is_no_identifier_is_refused(prefix: str) -> None:
    """Before any SQL is made of it."""
    with pytest.raises(ConfigurationError):
        tables(prefix)


def test_every_revision_has_one_successor_and_the_ledger_names_the_last() -> None:
    """The migrations are one line without branches."""
    script = ScriptDirectory(str(Path(migrate.__file__).parents[1] / "migrations"))
    assert len(script.get_heads()) == 1
    revisions = [r.revision for r in script.walk_revisions()]
    assert len(revisions) == SCHEMA_VERSION and revisions[0] == f"{SCHEMA_VERSION:04d}"


@pytest.mark.parametrize("url", ["postgresql+psycopg://u:secret@127.0.0.1:1/x", "mysql+pymysql://u:secret@127.0.0.1:1/x"])
def test_a_database_that_cannot_be_reached_is_no_missing_schema(url: str) -> None:
    """Checking says that it is away, not that there is no schema; the password is not shown."""
    with opened(url) as db:
        for start in (check_schema, create_schema):
            with pytest.raises(StoreUnavailable) as caught:
                start(db)
            assert "secret" not in str(caught.value)


def test_tables_of_the_build_before_get_what_came_later(url: str) -> None:
    """A database of schema 2 with a task in it: columns and indexes are added, the row keeps its values."""
    with opened(url) as db:
        create_schema(db)
        t = db.tables
        db.run(lambda tx: tasks.submit(tx, new_task()))
        db.run(lambda tx: settling.cancel(tx, "task-1"))
        with db.engine.begin() as connection:
            for index in ("open", "settled", "retry", "amiss"):
                on = f" ON {t.task.name}" if db.dialect == "mysql" else ""
                connection.exec_driver_sql(f"DROP INDEX {t.prefix}task_{index}_i{on}")
            for column in ("marker", "ending", "error_class", "amiss_us"):
                connection.exec_driver_sql(f"ALTER TABLE {t.task.name} DROP COLUMN {column}")
            connection.exec_driver_sql(f"DROP TABLE {t.installation.name}")
            connection.exec_driver_sql(f"UPDATE {t.prefix}alembic SET version_num = '0002'")
        set_ledger(db, version=2)
        with pytest.raises(SchemaMismatch, match="millstream up"):
            check_schema(db)
        create_schema(db)
        check_schema(db)
        found = db.read(lambda tx: tasks.read_task(tx, "task-1"))
        assert found is not None and (found.handler, found.marker, found.ending, found.amiss_us) == ("work", "", None, found.created_us)
        assert db.read(migrate.installation_secret).startswith("secret-")
        assert db.read(migrate.installation_id).startswith("installation-")


def new_task() -> NewTask:
    arguments = encode_arguments((), {})
    return new_task_of(HandlerSpec(name="work"), "default", "task-1", "k", arguments, Options(), permit="", actor="", origin="direct")
