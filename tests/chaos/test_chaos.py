"""``make chaos``: servers, workers and processes broken under a running job, per broker; at the end the sink is exact.

50 faults from a seed, each after the recovery from the last one made an epoch durable, then 10 pairs at once. ``MILLSTREAM_CHAOS_SEED`` replays, ``MILLSTREAM_CHAOS_FAULTS`` and
``MILLSTREAM_CHAOS_DOUBLES`` change the numbers.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.acceptance.traffic import Traffic, celery_cluster, fresh_database, need
from tests.chaos.faults import drawn, survive
from tests.support.instances import PostgresInstance, RabbitMQInstance, RedisInstance

pytestmark = [pytest.mark.processes, pytest.mark.timeout(7200)]
BROKERS: dict[str, type[RedisInstance] | type[RabbitMQInstance]] = {"redis": RedisInstance, "rabbitmq": RabbitMQInstance}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=getattr(pytest.mark, k)) for k in BROKERS])
def test_sink_is_exact_after_random_faults(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers and beat over the broker and PostgreSQL, all of our own: whatever is broken, alone or in pairs, each record's effect is there once."""
    need(PostgresInstance, BROKERS[kind])
    seed = int(os.environ.get("MILLSTREAM_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
    count, doubles = int(os.environ.get("MILLSTREAM_CHAOS_FAULTS") or 50), int(os.environ.get("MILLSTREAM_CHAOS_DOUBLES") or 10)
    with capsys.disabled(), PostgresInstance() as database, BROKERS[kind]() as broker:
        print(f"\n{kind}: {count} faults and {doubles} pairs, MILLSTREAM_CHAOS_SEED={seed}", flush=True)
        with celery_cluster(tmp_path, broker, fresh_database(database)) as cluster:
            began = time.monotonic()
            job = Traffic(cluster, count=None, rate=200).submit()
            survive(cluster, {"broker": broker, "database": database}, job, drawn(random.Random(seed), count, doubles), seed)
            job.drain()
            ends = job.ends()
            job.check(ends)
            status = cluster.jobs.status(job.id)
    with capsys.disabled():
        print(
            f"{kind}: exact after {time.monotonic() - began:.0f} s, {sum(ends.values())} records, {status['restarts']} restarts {status['causes']}"
        )
