"""``make chaos``: workers, handler processes, broker and database broken under 100,000 durable tasks, per broker; at the end every effect is there once.

Every kind of fault comes up once in each round, from a seed, for as long as tasks are left. ``MILLSTREAM_CHAOS_SEED`` replays,
``MILLSTREAM_CHAOS_TASKS`` and ``MILLSTREAM_CHAOS_ROUNDS`` (at most so many) change the numbers.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.acceptance.traffic import fresh_database, need
from tests.chaos.task_faults import FAULTS, Load, drawn, survive, task_cluster
from tests.support.instances import PostgresInstance, RabbitMQInstance, RedisInstance

pytestmark = [pytest.mark.processes, pytest.mark.timeout(7200)]
BROKERS: dict[str, type[RedisInstance] | type[RabbitMQInstance]] = {"redis": RedisInstance, "rabbitmq": RabbitMQInstance}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=getattr(pytest.mark, k)) for k in BROKERS])
def test_every_task_has_its_effect_once_after_random_faults(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers over the broker and PostgreSQL, all of our own; external tasks that are in doubt are in review, and nothing else is."""
    need(PostgresInstance, BROKERS[kind])
    seed = int(os.environ.get("MILLSTREAM_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
    count, rounds = int(os.environ.get("MILLSTREAM_CHAOS_TASKS") or 100_000), int(os.environ.get("MILLSTREAM_CHAOS_ROUNDS") or 20)
    chance = random.Random(seed)
    with capsys.disabled(), PostgresInstance() as database, BROKERS[kind]() as broker:
        print(f"\n{kind}: {count} tasks, {rounds} rounds of faults, MILLSTREAM_CHAOS_SEED={seed}", flush=True)
        with task_cluster(tmp_path, broker, fresh_database(database)) as cluster:
            began = time.monotonic()
            load = Load(cluster, count)
            try:
                load.start()
                survive({"broker": broker, "database": database}, load, drawn(chance, rounds), chance, least=len(FAULTS))
                found = load.check(load.finished(timeout=1800))
            finally:
                load.close()
            print(f"{kind}: exact after {time.monotonic() - began:.0f} s: {found}", flush=True)
