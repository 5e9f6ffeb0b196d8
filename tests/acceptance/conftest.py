"""Servers and clusters of the acceptance tests: of our own, because they are broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.acceptance.traffic import celery_cluster, fresh_database, need
from tests.support.celery_cluster import CeleryCluster, eventually
from tests.support.instances import PostgresInstance, RabbitMQInstance, RedisInstance


@pytest.fixture(scope="session")
def own_postgres() -> Iterator[PostgresInstance]:
    need(PostgresInstance)
    with PostgresInstance() as server:
        yield server


@pytest.fixture(scope="session")
def own_redis() -> Iterator[RedisInstance]:
    need(RedisInstance)
    with RedisInstance() as server:
        yield server


@pytest.fixture(scope="session")
def own_rabbitmq() -> Iterator[RabbitMQInstance]:
    need(RabbitMQInstance)
    with RabbitMQInstance() as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster(
    tmp_path_factory: pytest.TempPathFactory, own_postgres: PostgresInstance, own_redis: RedisInstance
) -> Iterator[CeleryCluster]:
    """Two workers and beat over Redis and PostgreSQL, shared by the tests: each has a job of its own. Unacknowledged task messages are redelivered after 2 s (T-50)."""
    home = tmp_path_factory.mktemp("redis-cluster")
    with celery_cluster(home, own_redis, fresh_database(own_postgres), environment={"MILLSTREAM_VISIBILITY_TIMEOUT": "2"}) as cluster:
        yield cluster


@pytest.fixture
def redis_cluster(shared_cluster: CeleryCluster) -> Iterator[CeleryCluster]:
    """The shared cluster, whole: everything runs, and no job of an earlier test takes its slots."""
    for name in shared_cluster.programs:
        shared_cluster.up(name)
    shared_cluster.await_nodes(shared_cluster.workers)
    yield shared_cluster
    for row in shared_cluster.jobs.list():
        if not row.state.ended:
            shared_cluster.jobs.cancel(row.id)
            eventually(f"job {row.name} is cancelled", lambda job=row.id: shared_cluster.row(job).state.ended)  # type: ignore[misc]
