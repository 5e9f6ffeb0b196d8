"""Durable tasks in production's form while things break: the short version of ``make chaos``, and the scenarios that a cluster of our own is needed for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from tests.acceptance.traffic import fresh_database
from tests.chaos.task_faults import FAULTS, FIRST, Load, TaskCluster, survive, task_cluster
from tests.support.celery_cluster import eventually
from tests.support.celery_project import BLOCKING, Project, submitted
from tests.support.instances import PostgresInstance, RabbitMQInstance, RedisInstance

from millstream import TaskState
from millstream.messages import wake_queue
from millstream.tasks import Request
from millstream_schema.durable.records import Receipt, TaskRow

pytestmark = [pytest.mark.processes, pytest.mark.postgres]
SHORT = [
    "kill-worker",
    "kill-handlers",
    "kill-callers",
    "flush-broker",
    "stop-worker",
    "database-away",
    "kill-task-process",
    "restart-broker",
]


@pytest.fixture
def redis_tasks(tmp_path: Path, own_postgres: PostgresInstance, own_redis: RedisInstance) -> Iterator[TaskCluster]:
    with task_cluster(tmp_path, own_redis, fresh_database(own_postgres)) as cluster:
        yield cluster


@pytest.mark.redis
def test_celery_t09_every_task_has_its_effect_once_while_things_break(
    redis_tasks: TaskCluster, own_postgres: PostgresInstance, own_redis: RedisInstance
) -> None:
    """5,000 tasks that each write one row through ctx.transaction(): exactly that many rows; external ones in doubt are all in review; an outage of the database charges nobody."""
    assert set(SHORT) <= set(FAULTS)
    load = Load(redis_tasks, 5_000)
    try:
        load.start()
        survive({"broker": own_redis, "database": own_postgres}, load, SHORT, random.Random(1))
        found = load.check(load.finished(timeout=180))
        assert found["rows"] == 5_000 and found["in review"]["charge"] >= 2
    finally:
        load.close()


SLOTS, HELD = 4, 200


def cut_while_held(load: Load, cut: Callable[[], None]) -> list[TaskRow]:
    """Do it while the only worker holds at least HELD tasks beyond its slots, which are taken; these tasks, as they were then.

    It takes so many only of what takes it no time, as it has seen by now, and gives back what waits for a second: so it stands still while they are counted.
    """
    submit, numbers = load.tasks.accept, itertools.count(load.total)
    while True:
        for quick in submit([Request(handler="quick", args=(n,)) for n in range(300)]):
            assert isinstance(quick, Receipt)
            load.tasks.wait(quick, 30)
        holding = [next(numbers) for _ in range(SLOTS)]
        submit(
            [Request(handler="holds", args=(n,), options=FIRST) for n in holding]
            + [Request(handler="quick", args=(n,)) for n in range(300)]
        )
        for number in holding:
            load.stands(number)
        with load.cluster.stopped(load.cluster.tree("w0")):
            found = load.tasks.list(state=TaskState.DISPATCHED, handler="quick", limit=300)
            if len(found) >= HELD:
                cut()
        for number in holding:
            load.go_on(number)
        if len(found) >= HELD:
            return found


@pytest.mark.rabbitmq
def test_celery_t07_a_broker_that_is_away_holds_up_no_task_for_longer_than_a_lease(
    tmp_path: Path, own_postgres: PostgresInstance, own_rabbitmq: RabbitMQInstance
) -> None:
    """The broker is cut while 200 tasks and more are held ahead of the pool: each is over within a lease of its claim, at its first start; others end, too."""
    with task_cluster(tmp_path, own_rabbitmq, fresh_database(own_postgres), workers=1, slots=SLOTS, lease_ms=10_000) as cluster:
        load = Load(cluster, 200)
        wakes = wake_queue(cluster.prefix, "default")
        try:
            held = cut_while_held(load, own_rabbitmq.kill)
            for task in held:
                load.tasks.wait(task.id, 30)
            ended = [load.tasks.get(task.id) for task in held]
            assert {(r.state, r.starts, r.losses, r.crashes) for r in ended} == {(TaskState.SUCCEEDED, 1, 0, 0)}
            assert max(end.settled_us - task.claimed_us for task, end in zip(held, ended, strict=True)) < cluster.lease_ms * 1000
            load.start()
            load.check(load.finished(timeout=40))
            own_rabbitmq.start()
            with Celery("looks", broker=own_rabbitmq.url) as app, app.connection_for_read() as connection, connection.channel() as channel:
                eventually("the worker listens again", lambda: channel.queue_declare(wakes, passive=True).consumer_count)
        finally:
            if not own_rabbitmq.running:
                own_rabbitmq.start()
            load.close()


CONSUMER_TIMEOUT = "application:set_env(rabbit, consumer_timeout, {}), application:set_env(rabbit, channel_tick_interval, {})."


@pytest.mark.rabbitmq
def test_celery_t12_a_task_may_run_for_longer_than_the_brokers_consumer_timeout(tmp_path: Path, own_rabbitmq: RabbitMQInstance) -> None:
    """Half a second here. Celery's late-acknowledged task is the control: its channel is closed, and it is given out again while it runs. No message waits for a durable one."""
    own_rabbitmq.ctl("eval", CONSUMER_TIMEOUT.format(500, 200))
    made = []
    try:
        for name in ("durable", "control"):
            (tmp_path / name).mkdir()
            made.append(Project(tmp_path / name, own_rabbitmq.url, BLOCKING, lease_ms=1_500))
            made[-1].start()
        durable, control = made
        task = submitted(durable, "blocks", "durable")
        plain = f"{control.installation.prefix}.plain"
        with Celery("sender", broker=own_rabbitmq.url) as app, app.connection_for_write() as connection:
            app.send_task("plain_blocks", args=["plain"], queue=plain)
            eventually("both run", lambda: durable.noted("began durable") and control.noted("began plain"))
            eventually("the control's channel is closed", lambda: "PRECONDITION_FAILED" in control.text())
            with connection.channel() as channel:
                eventually(
                    "the control is there to be taken again, while it runs",
                    lambda: control.noted("began plain") > 1 or channel.queue_declare(plain, passive=True).message_count,
                )
        durable.path.joinpath("go").touch()
        assert durable.tasks.wait(task, 30) == "durable"
        row = durable.tasks.get(task)
        assert (row.starts, row.losses, durable.noted("began durable")) == (1, 0, 1)
        assert "PRECONDITION_FAILED" not in durable.text()
    finally:
        for one in made:
            one.close()
        own_rabbitmq.ctl("eval", CONSUMER_TIMEOUT.format(1_800_000, 60_000))
