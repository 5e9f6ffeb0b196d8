"""Ends of tasks published to queues of a real broker: by a worker's task process, again after the broker lost them, never counted as tried when they did not leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kombu import Connection
from tests.support.forwarding import Forwarder

from millstream.handlers import Handlers
from millstream.installation import Installation
from millstream.publications import Publications
from millstream.subscriptions import Subscriptions
from millstream.tasks import Tasks
from millstream_coordinator.delivery_sweep import DeliverySweep
from millstream_schema.durable.deliveries import DeliveryState
from millstream_schema.errors import DeliveryNotFound
from millstream_schema.ports import SystemChance, SystemClock, SystemIds
from millstream_schema.store import events, settling
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

BROKERS = [pytest.param("redis", id="redis", marks=pytest.mark.redis), pytest.param("rabbitmq", id="rabbitmq", marks=pytest.mark.rabbitmq)]
MODULE = """
import os
from celery import Celery
from millstream import Handlers
app = Celery("shop", broker=os.environ["BROKER"])
handlers = Handlers()

@handlers.task(name="add", effects="idempotent")
def add(a: int, b: int) -> int:
    return a + b
"""
handlers = Handlers()


@handlers.task(name="add", effects="idempotent")
def add(a: int, b: int) -> int:
    return a + b


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        pause.wait(0.02)
    return found


class Rig:
    """An installation on SQLite, its clients, and a consumer on the broker."""

    def __init__(self, path: Path, broker: str) -> None:
        self.path = path
        self.broker = broker
        self.installation = Installation.local(path, lease_ms=1_500, poll_ms=50)
        self.database = Database(self.installation.database, SystemClock(), prefix=self.installation.table_prefix)
        create_schema(self.database)
        self.tasks = Tasks(self.installation, handlers, database=self.database)
        self.subscriptions = Subscriptions(self.installation, database=self.database)
        self.connection = Connection(broker)
        self._queues: dict[str, Any] = {}

    def received(self, queue: str, timeout: float = 30.0) -> Any:
        """The next message's body, acknowledged to the broker."""
        message = self.message(queue, timeout)
        return message.payload

    def message(self, queue: str, timeout: float = 30.0) -> Any:
        message = self._queue(queue).get(timeout=timeout)
        message.ack()
        return message

    def _queue(self, name: str) -> Any:
        """One consumer for each queue: what it has fetched ahead would be lost with it until its channel closes."""
        if name not in self._queues:
            self._queues[name] = self.connection.SimpleQueue(name)
        return self._queues[name]

    def purge(self, queue: str) -> None:
        """What an operator or a restart without persistence does."""
        self._close_queues()
        self.connection.close()  # what it has fetched ahead goes back first
        self.connection = Connection(self.broker)
        if self.broker.startswith("redis"):
            client = redis.Redis.from_url(self.broker)
            client.flushdb()
            client.close()
        else:
            with self.connection.channel() as channel:
                channel.queue_purge(queue)

    def ended(self, *sums: tuple[int, int]) -> list[str]:
        """Tasks that are cancelled before they run: ends without a worker."""
        ids = [self.tasks.submit(add, a, b).task for a, b in sums]
        for task in ids:
            self.database.run(lambda tx, t=task: settling.cancel(tx, t))  # type: ignore[misc]
        return ids

    def attempts(self, name: str) -> list[tuple[str, int]]:
        return sorted((d.state.value, d.attempts) for d in self.subscriptions.deliveries(name))

    def close(self) -> None:
        self._close_queues()
        self.connection.close()
        self.database.close()

    def _close_queues(self) -> None:
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()


class Sweeper:
    """A coordinator's sweep with the real door to the broker, on a thread."""

    def __init__(self, rig: Rig, app: Celery) -> None:
        self.publications = Publications(app, "millstream")
        self._sweep = DeliverySweep(rig.database, SystemClock(), SystemChance(), SystemIds(), self.publications)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self._sweep.sweep()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.publications.close()


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def rig(tmp_path: Path, broker: str) -> Iterator[Rig]:
    made = Rig(tmp_path, broker)
    yield made
    made.close()


@pytest.fixture
def sweeping(rig: Rig) -> Iterator[Callable[..., Sweeper]]:
    made: list[Sweeper] = []

    def start(url: str = "", **settings: Any) -> Sweeper:
        app = Celery("shop", broker=url or rig.broker)
        app.conf.update(settings)
        made.append(Sweeper(rig, app))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.processes
def test_a_worker_publishes_each_end_until_it_is_acknowledged(rig: Rig) -> None:
    """A small message that names the delivery; what the task returned is in its row; acknowledged, it does not come again; lost with the whole broker, it does."""
    (rig.path / "shop_tasks.py").write_text(MODULE)
    environment = {
        **os.environ, **rig.installation.environment(), "PYTHONPATH": str(rig.path), "BROKER": rig.broker, "MILLSTREAM_LOG": "error",
    }  # fmt: skip
    rig.subscriptions.create("ends", handler="add", publish_to="ends-q", lease=2.0, delay=0.1, max_delay=0.1)
    command = [
        sys.executable,
        "-m",
        "millstream.task_process",
        "--handlers",
        "shop_tasks:handlers",
        "--celery",
        "shop_tasks:app",
        "--name",
        "w",
    ]
    worker = subprocess.Popen([*command, "--processes", "1"], env=environment, stdin=subprocess.PIPE)
    try:
        first, second = rig.tasks.submit(add, 1, 2, key="first").task, rig.tasks.submit(add, 3, 4, key="second").task
        bodies: dict[str, Any] = {}
        while set(bodies) != {first, second}:  # on a busy machine one may come again before the other
            found = rig.received("ends-q")
            bodies.setdefault(found["event"], found)
        body = bodies[first]
        assert body == {
            "namespace": "default", "subscription": "ends", "event": first, "attempt": 1, "handler": "add", "key": "first", "business_key": "", "state": "SUCCEEDED",
        }  # fmt: skip
        assert len(json.dumps(body)) < 512
        delivery = rig.subscriptions.received(body)
        assert (delivery.result, delivery.key, delivery.attempt) == (3, "first", 1)
        rig.subscriptions.acknowledge(delivery)
        rig.purge("ends-q")
        again = rig.received("ends-q")
        assert (again["event"], again["attempt"] > 1) == (second, True)
        rig.subscriptions.acknowledge(rig.subscriptions.received(again))
        with pytest.raises(DeliveryNotFound, match="acknowledged"):
            rig.subscriptions.received(bodies[first])
        assert rig.subscriptions.counts("ends") == {"ACKNOWLEDGED": 2}
    finally:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait(30)


def test_celery_t09_what_the_broker_loses_is_published_again(rig: Rig, sweeping: Callable[..., Sweeper]) -> None:
    """Flushed or purged with everything in it: when the lease is over, it comes."""
    rig.subscriptions.create("ends", publish_to="lost-q", lease=0.6, delay=0.05, max_delay=0.05)
    ids = rig.ended((1, 1), (2, 2), (3, 3))
    sweeping()
    until(lambda: rig.attempts("ends") == [("LEASED", 1)] * 3, "all published")
    rig.purge("lost-q")
    seen: set[str] = set()
    while seen != set(ids):
        delivery = rig.subscriptions.received(rig.received("lost-q"))
        seen.add(delivery.event)
        rig.subscriptions.acknowledge(delivery)
    assert rig.subscriptions.counts("ends") == {"ACKNOWLEDGED": 3}


@pytest.mark.rabbitmq
def test_celery_t10_what_the_broker_never_got_is_published_again(tmp_path: Path, rabbitmq_url: str) -> None:
    """The connection takes the message and is cut before it arrives. Celery's own call is the control: it says that all is well, and its message is nowhere.

    A delivery counts as out when the broker has confirmed it: this one is given back, uncharged, and comes."""
    rig = Rig(tmp_path, rabbitmq_url)
    broker = urlsplit(rabbitmq_url)
    with Forwarder(broker.port or 5672) as way, ExitStack() as stack:
        stack.callback(rig.close)
        through = broker._replace(netloc=f"{broker.username or 'guest'}:{broker.password or 'guest'}@127.0.0.1:{way.port}").geturl()
        plain = Celery("control", broker=through)
        stack.callback(plain.close)
        plain.send_task("control.first", queue="t10-plain")
        assert rig.message("t10-plain").headers["task"] == "control.first"
        way.deaf = True
        assert plain.send_task("control.lost", queue="t10-plain").id
        assert way.swallowed.wait(10)
        way.deaf = False
        way.cut()
        plain.send_task("control.next", queue="t10-plain")
        assert rig.message("t10-plain").headers["task"] == "control.next", "the one before is lost"

        rig.subscriptions.create("ends", publish_to="t10-ends", attempts=1, lease=60.0)
        sweeper = Sweeper(rig, Celery("shop", broker=through))
        stack.callback(sweeper.close)
        until(lambda: sweeper.publications.room(), "the publisher is connected")
        way.swallowed.clear()
        way.deaf = True
        (task,) = rig.ended((1, 1))
        assert way.swallowed.wait(10)
        way.deaf = False
        way.cut()
        assert rig.received("t10-ends")["event"] == task
        assert rig.attempts("ends") == [("LEASED", 1)], "the one that did not leave counts for nothing"


def test_nothing_is_tried_while_the_broker_cannot_be_reached(rig: Rig, sweeping: Callable[..., Sweeper]) -> None:
    """No attempt is counted and nothing is parked; when it is back, it goes out."""
    rig.subscriptions.create("ends", publish_to="away-q", attempts=1, lease=30.0)
    (task,) = rig.ended((1, 1))
    away = sweeping("redis://127.0.0.1:1/0" if rig.broker.startswith("redis") else "amqp://guest:guest@127.0.0.1:1//")
    until(lambda: rig.attempts("ends") == [("PENDING", 0)], "its delivery made")
    threading.Event().wait(0.5)
    assert rig.attempts("ends") == [("PENDING", 0)]
    away.close()
    sweeping()
    assert rig.received("away-q")["event"] == task
    assert rig.attempts("ends") == [("LEASED", 1)]


def test_a_delivery_can_be_the_call_of_a_celery_task(rig: Rig, sweeping: Callable[..., Sweeper]) -> None:
    """Any Celery worker on that queue runs it with the message as its argument."""
    rig.subscriptions.create("ends", publish_to="calls-q", celery_task="shop.on_end")
    (task,) = rig.ended((1, 1))
    sweeping()
    message = rig.message("calls-q")
    args, kwargs, _ = message.payload
    assert message.headers["task"] == "shop.on_end" and kwargs == {}
    assert (args[0]["event"], args[0]["state"]) == (task, "CANCELLED")
    rig.subscriptions.acknowledge(rig.subscriptions.received(args[0]))


def test_a_queue_that_cannot_be_used_holds_up_no_other(rig: Rig, sweeping: Callable[..., Sweeper]) -> None:
    """What goes to a queue that is declared otherwise, or may not be made, waits and counts no attempt."""
    settings: dict[str, Any] = {"task_create_missing_queues": False, "task_queues": {"good-q": {}, "bad-q": {}}}
    if rig.broker.startswith("redis"):
        del settings["task_queues"]["bad-q"]
    else:
        with rig.connection.channel() as channel:
            channel.queue_declare("bad-q", durable=True, auto_delete=False, arguments={"x-max-length": 7})
    rig.subscriptions.create("bad", publish_to="bad-q", attempts=1)
    rig.subscriptions.create("good", publish_to="good-q")
    ids = rig.ended((1, 1), (2, 2))
    rig.database.run(lambda tx: events.fan_out(tx, 10))
    sweeping(**settings)
    bodies = [rig.received("good-q") for _ in ids]
    assert {b["event"] for b in bodies} == set(ids)
    until(lambda: rig.attempts("bad") == [("PENDING", 0)] * 2, "those to the bad queue given back")
    assert all(d.state is DeliveryState.LEASED for d in rig.subscriptions.deliveries("good"))
