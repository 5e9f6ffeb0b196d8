"""Known complaints about Celery that need a broker to be seen: each with Celery's own behaviour as the control beside it. ``celery_tNN`` is the complaint's number."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import bind_queue_to_native_delayed_delivery_exchange as bind_to_delays
from kombu.transport.native_delayed_delivery import declare_native_delayed_delivery_exchanges_and_queues as declare_delays
from kombu.transport.native_delayed_delivery import level_name

from millstream import Handlers, Installation, Millstream, TaskState, TaskWorker

LEVELS = 28


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        pause.wait(0.02)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def waiting(connection: Connection, *names: str) -> int:
    """Messages in queues of the broker."""
    with connection.channel() as channel:
        return sum(channel.queue_declare(name, passive=True).message_count for name in names)


@pytest.mark.rabbitmq
def test_celery_t11_what_is_due_later_is_not_in_the_broker(rabbitmq_url: str, tmp_path: Path, stack: ExitStack) -> None:
    """Celery's countdown on quorum queues is the control: a message in one of the broker's queues for delays, which no worker can be asked for. A durable one is a row."""
    app = Celery("t11", broker=rabbitmq_url)
    stack.callback(app.close)
    target = Queue("t11", Exchange("t11", type="topic"), routing_key="t11", queue_arguments={"x-queue-type": "quorum"})
    app.conf.update(
        task_queues=[target],
        task_default_queue="t11",
        task_default_exchange="t11",
        task_default_exchange_type="topic",
        task_default_routing_key="t11",
    )
    connection = stack.enter_context(app.connection_for_write())
    delays = [level_name(level) for level in range(LEVELS)]
    declare_delays(connection, "classic")
    with connection.channel() as channel:
        stack.callback(lambda: [channel.queue_delete(name) for name in [*delays, "t11"]])
    with connection.channel() as channel:
        target(channel).declare()
        bind_to_delays(connection, target)
    app.send_task("control", countdown=3600)
    until(lambda: waiting(connection, *delays) == 1, "it lies in a queue for delays")
    handlers = Handlers()

    @handlers.task(name="durable", effects="idempotent")
    def durable() -> None: ...

    with TaskWorker(Installation.local(tmp_path), handlers):
        client = stack.enter_context(
            Millstream(app, Installation.local(tmp_path), celery_app="t11:app", handlers="t11:handlers").tasks(handlers)
        )
        assert durable.apply_async(countdown=3600).task_state is TaskState.SCHEDULED
        assert client.list()[0].state is TaskState.SCHEDULED
    assert waiting(connection, *delays) == 1 and waiting(connection, "t11") == 0


@pytest.mark.redis
def test_celery_t13_the_shortest_timeout_of_a_shared_redis_is_nobody_elses_matter(redis_url: str, tmp_path: Path, stack: ExitStack) -> None:
    """Celery's control: what an application with an hour's timeout is at is given out again by one with a shorter. A durable task that runs meanwhile runs once."""
    patient, hasty = (Celery(name, broker=redis_url) for name in ("patient", "hasty"))
    patient.conf.broker_transport_options, hasty.conf.broker_transport_options = {"visibility_timeout": 3600}, {"visibility_timeout": 0.2}
    for app in (patient, hasty):
        stack.callback(app.close)
    holding, restoring = (stack.enter_context(app.connection_for_read()) for app in (patient, hasty))
    restored = 0

    def restores() -> int:
        """What the other application's worker does as long as it runs; how often."""
        nonlocal restored
        restoring.default_channel.qos.restore_visible(interval=1)
        restored += 1
        return restored

    mine = stack.enter_context(holding.SimpleQueue("t13"))
    patient.send_task("control", task_id="once", queue="t13")
    first = mine.get(timeout=10)  # and not acknowledged: it runs

    client = stack.enter_context(contextlib.closing(redis.Redis.from_url(redis_url)))
    until(lambda: restores() and client.llen("t13"), "the other application gives it out again")
    again = mine.get(timeout=10)
    assert first.headers["id"] == again.headers["id"] == "once"
    for message in (first, again):
        message.ack()

    handlers, began = Handlers(), threading.Event()
    leave, runs = threading.Event(), []

    @handlers.task(name="durable", effects="external")
    def durable() -> None:
        runs.append(1)
        began.set()
        assert leave.wait(30)

    installation = Installation.local(tmp_path)
    with TaskWorker(installation, handlers) as worker:
        stack.enter_context(Millstream(patient, installation, celery_app="t13:app", handlers="t13:handlers").tasks(handlers))
        result = durable.delay()
        assert began.wait(20)
        enough = restored + 30
        until(lambda: restores() > enough, "the other application looks again and again")
        leave.set()
        result.get(timeout=20)
        row = worker.tasks.get(result.id)
        assert (row.state, row.starts, runs) == (TaskState.SUCCEEDED, 1, [1])
