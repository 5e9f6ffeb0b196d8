"""Two Celery workers and beat over Redis and PostgreSQL: whatever is killed or stopped, an outside reader sees each record's effect once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from tests.acceptance.traffic import Traffic
from tests.chaos.faults import drawn, survive
from tests.support.celery_cluster import CeleryCluster, eventually
from tests.support.instances import PostgresInstance, RedisInstance

from millstream import RestartPolicy

OUTAGE = 8.0
"""Seconds without a broker: many more attempts than the budget allows would fail if each ended at the first refused connection."""
pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.redis]


def test_job_over_redis_is_exact(redis_cluster: CeleryCluster) -> None:
    """Undisturbed, the sink holds exactly what the input makes."""
    job = Traffic(redis_cluster, count=1000, rate=1000).submit()
    redis_cluster.finished(job.id)
    job.check()


@pytest.mark.parametrize("victim", ["worker", "node", "subtask", "coordinator", "beat"])
def test_kill_9_is_survived(redis_cluster: CeleryCluster, victim: str) -> None:
    """kill -9 of any one process: the job recovers by itself, another coordinator takes over, the sink is exact."""
    job = Traffic(redis_cluster, count=900).submit()
    epoch = job.running()
    term = redis_cluster.coordinator()["term"]
    name = redis_cluster.leader() if victim == "coordinator" else redis_cluster.running_workers()[0]
    process = {
        "worker": lambda: redis_cluster.main(name),
        "node": lambda: redis_cluster.node(name),
        "coordinator": lambda: redis_cluster.node(name),
        "subtask": lambda: redis_cluster.subtasks(name)[0],
        "beat": lambda: redis_cluster.main("beat"),
    }[victim]()
    redis_cluster.kill(process)
    redis_cluster.durable(job.id, epoch + 1)
    if victim == "coordinator":
        eventually("another coordinator takes over", lambda: redis_cluster.coordinator()["term"] > term)
    redis_cluster.finished(job.id)
    job.check()


def test_worker_stopped_past_its_lease_is_fenced_when_it_wakes(redis_cluster: CeleryCluster) -> None:
    """SIGSTOP of a whole worker past its lease: another takes over; awake, the old node gets a new id, its subtasks are gone and what they held was refused."""
    job = Traffic(redis_cluster, count=None).submit()
    epoch = job.running()
    name = redis_cluster.running_workers()[0]
    hosted = f"{name}@{redis_cluster.prefix}"
    before, generation, stopped = redis_cluster.node_ids()[hosted], redis_cluster.row(job.id).generation, redis_cluster.subtasks(name)
    with redis_cluster.stopped(redis_cluster.tree(name)):
        redis_cluster.durable(job.id, epoch + 2)
        eventually("another generation runs", lambda: redis_cluster.row(job.id).generation > generation)
        redis_cluster.durable(job.id, redis_cluster.row(job.id).newest_durable)
        asleep = redis_cluster.row(job.id)
    eventually("the old subtasks are gone", lambda: not any(p.is_running() and p.status() != "zombie" for p in stopped))
    eventually("the node is registered anew", lambda: redis_cluster.node_ids().get(hosted, before) != before)
    redis_cluster.durable(job.id, asleep.newest_durable + 1)
    job.drain()
    job.check(job.ends())


def test_commit_that_was_answered_but_not_reported_is_not_repeated(redis_cluster: CeleryCluster, tmp_path: Path) -> None:
    """The sink's process is killed between the target's COMMIT and the report: the commit is carried out again and changes nothing."""
    flag = tmp_path / "died"
    job = Traffic(redis_cluster, count=900, flag=str(flag)).submit()
    redis_cluster.finished(job.id)
    assert ":rolling-out:" in flag.read_text(), "no process was killed after its commit"
    job.check()


def test_broker_and_database_restarts_lose_and_repeat_nothing(
    redis_cluster: CeleryCluster, own_redis: RedisInstance, own_postgres: PostgresInstance, tmp_path: Path
) -> None:
    """T-50: the broker is away for some seconds, which costs little of the restart budget; the database is killed: the job goes on, and ordinary tasks are consumed afterwards."""
    job = Traffic(redis_cluster, count=None).submit(restart=RestartPolicy(kind="fixed", delay_ms=50, failures=5))
    epoch = job.running()
    own_redis.kill()
    try:
        time.sleep(OUTAGE)
    finally:
        own_redis.start()
    epoch = redis_cluster.durable(job.id, epoch + 1)
    own_postgres.kill()
    own_postgres.start()
    redis_cluster.durable(job.id, epoch + 1)
    job.drain()
    job.check(job.ends())
    _echoed(redis_cluster, tmp_path / "echo")


def test_random_faults_over_redis_leave_the_sink_exact(
    redis_cluster: CeleryCluster, own_redis: RedisInstance, own_postgres: PostgresInstance
) -> None:
    """`make chaos` in short: faults drawn from a printed seed, each after the recovery from the last; then drained and compared."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    job = Traffic(redis_cluster, count=None, rate=200).submit()
    survive(redis_cluster, {"broker": own_redis, "database": own_postgres}, job, drawn(random.Random(seed), 3), seed)
    job.drain()
    job.check(job.ends())


def _echoed(cluster: CeleryCluster, path: Path) -> None:
    """An ordinary task runs; sent by the application, as users do."""
    cluster.send("tests.acceptance.echo", str(path))
    eventually("an ordinary task runs", path.exists)
