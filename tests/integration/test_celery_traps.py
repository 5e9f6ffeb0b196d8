"""Known complaints about Celery that need a broker to be seen: each with Celery's own behaviour as the control beside it. ``celery_tNN`` is the complaint's number."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import bind_queue_to_native_delayed_delivery_exchange as bind_to_delays
from kombu.transport.native_delayed_delivery import declare_native_delayed_delivery_exchanges_and_queues as declare_delays
from kombu.transport.native_delayed_delivery import level_name
from tests.support.celery_project import BLOCKING, Project, submitted, until
from tests.support.forwarding import Forwarder

from millstream import Handlers, Installation, Millstream, Schedules, TaskState, TaskWorker

LEVELS = 28


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
    stack.callback(lambda: [connection.default_channel.queue_delete(name) for name in [*delays, "t11"]])
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


# -- with workers


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Callable[..., Project]]:
    made: list[Project] = []

    def make(broker: str, **changes: object) -> Project:
        made.append(Project(tmp_path, broker, BLOCKING, lease_ms=1_500, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.processes
@pytest.mark.rabbitmq
def test_celery_t19_a_lost_connection_ends_no_task_that_runs(rabbitmq_url: str, project: Callable[..., Project], stack: ExitStack) -> None:
    """Celery's late-acknowledged task is the control: its worker cancels it when the broker's connection breaks, and it begins again. A durable one runs on, and once."""
    broker = urlsplit(rabbitmq_url)
    way = stack.enter_context(Forwarder(broker.port or 5672))
    made = project(broker._replace(netloc=f"{broker.username or 'guest'}:{broker.password or 'guest'}@127.0.0.1:{way.port}").geturl())
    app = stack.enter_context(Celery("control", broker=rabbitmq_url))
    made.start(concurrency=2)
    task = submitted(made, "blocks", "durable")
    app.send_task("plain_blocks", args=["plain"], queue=f"{made.installation.prefix}.plain")
    until(lambda: made.noted("began durable") and made.noted("began plain"), "both run\n" + made.text())
    way.cut()
    until(lambda: made.noted("began plain") > 1, "Celery's begins again\n" + made.text())
    made.path.joinpath("go").touch()
    assert made.tasks.wait(task, 30) == "durable"
    row = made.tasks.get(task)
    assert (row.starts, row.losses, row.crashes, made.noted("began durable")) == (1, 0, 0, 1)


@pytest.mark.processes
@pytest.mark.redis
@pytest.mark.postgres
def test_celery_t25_two_that_never_end_on_a_worker_of_two_hold_up_nothing_else(
    redis_url: str, postgres_url: str, project: Callable[..., Project], stack: ExitStack
) -> None:
    """They keep their leases and can be cancelled; schedules fire, retries and what was due later run on the worker that comes. Celery's countdown is the control: the worker
    without a free slot has it, and whoever is idle cannot get it."""
    made = project(redis_url, database=postgres_url)
    app = stack.enter_context(Celery("control", broker=redis_url))
    plain = f"{made.installation.prefix}.plain"
    made.start(name="full", concurrency=2)
    held = [submitted(made, "blocks", f"hour {i}") for i in range(2)]
    for i in range(2):
        app.send_task("plain_blocks", args=[f"plain {i}"], queue=plain)
    words = [f"began {kind} {i}" for kind in ("hour", "plain") for i in range(2)]
    until(lambda: all(made.noted(word) for word in words), "both workers' slots are taken\n" + made.text("full"))
    late, again = made.tasks.submit("quick", "later", delay=0.5).task, made.tasks.submit("retries").task
    captive = app.send_task("plain_quick", args=["captive"], queue=plain, countdown=0.5)
    until(lambda: captive.id in made.text("full"), "the full worker has taken Celery's")
    with Schedules(made.installation) as schedules:
        schedules.publish("often", "quick", dt.timedelta(seconds=1), ["fire"])
        made.start(name="idle", concurrency=2)
        assert made.tasks.wait(late, 60) == "later"
        assert made.tasks.wait(again, 60) == 3
        until(lambda: made.noted("did fire") >= 4, "fires\n" + made.text("idle"))  # more than two leases
        made.tasks.cancel(held[0])
        until(lambda: made.tasks.get(held[0]).state.settled, "the cancel reaches the one that runs")
        schedules.pause("often", "enough")
    assert not made.noted("did captive"), "Celery's would be done by whoever is idle: the control controls nothing"
    made.path.joinpath("go").touch()
    assert made.tasks.wait(held[1], 30) == "hour 1"
    assert {(r.starts, r.losses, r.fence) for r in map(made.tasks.get, held)} == {(1, 0, 1)}
    until(lambda: made.noted("did captive"), "Celery's runs when its worker is free")
