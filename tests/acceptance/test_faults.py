"""Two Celery workers and beat over Redis and PostgreSQL: whatever is killed or stopped, an outside reader sees each record's effect once."""

from __future__ import annotations

import time

import pytest
from tests.acceptance.traffic import Traffic
from tests.support.celery_cluster import CeleryCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.redis]


def test_job_over_redis_is_exact(redis_cluster: CeleryCluster) -> None:
    """Undisturbed, the sink holds exactly what the input makes."""
    job = Traffic(redis_cluster, count=1500, rate=1000).submit()
    redis_cluster.finished(job.id)
    job.check()


@pytest.mark.parametrize("victim", ["worker", "node", "subtask", "coordinator", "beat"])
def test_kill_9_is_survived(redis_cluster: CeleryCluster, victim: str) -> None:
    """kill -9 of any one process: the job recovers by itself and the sink is exact."""
    job = Traffic(redis_cluster, count=1500).submit()
    epoch = job.running(2)
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
        assert redis_cluster.coordinator()["term"] > term, "no other coordinator took over"
    redis_cluster.finished(job.id)
    job.check()
