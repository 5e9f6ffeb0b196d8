"""A ``traffic`` job on a cluster, its tables, and the check of what an outside reader sees. Called by the acceptance and chaos tests."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.acceptance.pipelines import ROLLING, WINDOWS, Rows, answer, ddl, differences
from tests.support import services
from tests.support.celery_cluster import CeleryCluster, settings
from tests.support.instances import PostgresInstance, RabbitMQInstance, RedisInstance

_serial = itertools.count(1)
Broker = RedisInstance | RabbitMQInstance


def need(*kinds: type[PostgresInstance] | type[RedisInstance] | type[RabbitMQInstance]) -> None:
    """Skip by name (fail in CI) when a server that a test breaks cannot be started here."""
    missing = [kind.kind.upper() for kind in kinds if kind.program() is None]
    if missing:
        message = f"{', '.join(missing)} IS NOT INSTALLED: no server of our own can be started"
        pytest.fail(message, pytrace=False) if services.in_ci() else pytest.skip(message)


@contextlib.contextmanager
def engine_of(url: str) -> Iterator[sa.Engine]:
    """An engine whose connections are closed at the end."""
    engine = sa.create_engine(url, pool_pre_ping=True)
    try:
        yield engine
    finally:
        engine.dispose()


def make_tables(url: str, suffix: str) -> None:
    with engine_of(url) as engine, engine.begin() as connection:
        for statement in ddl(suffix):
            connection.exec_driver_sql(statement)


def read_rows(url: str, table: str, columns: tuple[str, ...]) -> Rows:
    """What an outside reader sees."""
    with engine_of(url) as engine, engine.connect() as connection:
        found = connection.exec_driver_sql(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
    return [tuple(row) for row in found]


class Traffic:
    """One job of pipeline ``traffic`` with tables of its own in the cluster's database (or in ``target``)."""

    def __init__(self, cluster: CeleryCluster, *, count: int | None, rate: float = 300.0, target: str = "", **config: Any) -> None:
        self.cluster = cluster
        self.target = target or cluster.database_url
        self.suffix = f"_{next(_serial)}"
        self.name = f"traffic{self.suffix}"
        make_tables(self.target, self.suffix)
        self.config: dict[str, Any] = {"count": count, "rate": rate, "target": sink_url(self.target), "suffix": self.suffix, **config}

    def submit(self, parallelism: int | None = None, savepoint: str = "", name: str = "", **changes: Any) -> Traffic:
        chosen = settings(**changes)
        self.name = name or self.name
        self.id = self.cluster.jobs.submit(
            "traffic", name=self.name, config=self.config, parallelism=parallelism, settings=chosen, savepoint=savepoint
        ).id
        return self

    def running(self, epochs: int = 1) -> int:
        """Until so many more epochs are durable; the newest."""
        newest = self.cluster.row(self.id).newest_durable
        for _ in range(epochs):
            newest = self.cluster.durable(self.id, newest)
        assert not self.cluster.row(self.id).state.ended, "the job ended before it could be broken: give it more records"
        return newest

    def drain(self, timeout: float = 90.0) -> None:
        self.cluster.jobs.drain(self.id)
        self.cluster.finished(self.id, timeout)

    def ends(self) -> dict[int, int]:
        """Split → records that the newest durable epoch has taken."""
        row = self.cluster.row(self.id)
        epoch = self.cluster.jobs.epochs(self.id, row.newest_durable)
        assert isinstance(epoch, dict)
        return {int(o["split"]): int(o["cursor"]) for o in epoch["offsets"]}

    def check(self, ends: dict[int, int] | None = None) -> None:
        """Both tables hold exactly what the input up to ``ends`` (default: ``count``) makes."""
        if ends is None:
            ends = dict.fromkeys((0, 1), self.config["count"])
        rolling, windows = answer(ends)
        wrong = differences(read_rows(self.target, f"rolling{self.suffix}", ROLLING), rolling)
        wrong += differences(read_rows(self.target, f"windows{self.suffix}", WINDOWS), windows)
        assert not wrong, f"{len(wrong)} differences: {wrong[:10]}\n{self.cluster.diagnosis(self.id)}"

    def repeated(self) -> Rows:
        """Rows that are visible more than once now."""
        columns = ", ".join(ROLLING)
        with engine_of(self.target) as engine, engine.connect() as connection:
            found = connection.exec_driver_sql(
                f"SELECT {columns} FROM rolling{self.suffix} GROUP BY {columns} HAVING COUNT(*) > 1"
            ).fetchall()
        return [tuple(row) for row in found]


def sink_url(url: str) -> str:
    """The same database as the sinks take it."""
    return url.replace("postgresql+psycopg://", "postgresql://").replace("mysql+pymysql://", "mysql://")


def fresh_database(server: PostgresInstance) -> str:
    """URL of a new database on a server of our own."""
    name = f"cluster{next(_serial)}"
    with engine_of(server.url) as engine, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return server.url.rpartition("/")[0] + "/" + name


@contextlib.contextmanager
def celery_cluster(home: Path, broker: Broker, database_url: str, **options: Any) -> Iterator[CeleryCluster]:
    """Two workers and beat with the jobs of the tests."""
    with CeleryCluster(
        home,
        broker.url,
        database_url,
        application="tests.acceptance.application:app",
        pipelines="tests.acceptance.pipelines:pipelines",
        **options,
    ) as cluster:
        yield cluster


__all__ = ["Broker", "Traffic", "celery_cluster", "engine_of", "fresh_database", "make_tables", "need", "read_rows", "sink_url"]
