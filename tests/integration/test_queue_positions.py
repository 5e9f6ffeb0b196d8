"""A queue's own position, its acknowledgements, beside the job's: the first follows the second and is never asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amqp
import pytest
from tests.integration.embedded import Job

from millstream import JobBuilder, RabbitQueueSource
from millstream_schema.settings import StreamSettings
from millstream_schema.states import Desired, JobState
from millstream_tasks.channels.rabbitmq_link import connection_options
from millstream_tasks.sinks.memory import CollectSink, CollectTarget

pytestmark = pytest.mark.rabbitmq
QUEUE, MESSAGES = "positions", 90


@pytest.fixture
def broker(rabbitmq_url: str) -> Iterator[Any]:
    """An AMQP channel with an empty queue."""
    with amqp.Connection(**connection_options(rabbitmq_url)) as connection:
        channel = connection.channel()
        channel.queue_declare(QUEUE, durable=False, auto_delete=False)
        yield channel
        channel.queue_delete(QUEUE)


def publish(channel: Any, numbers: range) -> None:
    for n in numbers:
        channel.basic_publish(amqp.Message(json.dumps(n).encode(), message_id=f"m{n}"), routing_key=QUEUE)


def test_t65_a_queue_is_acknowledged_behind_the_durable_epoch_and_recovery_goes_by_the_manifest(
    tmp_path: Path, rabbitmq_url: str, broker: Any
) -> None:
    """What was taken and is not durable stays the broker's. It forgets every acknowledgement: the job goes on from its manifest, and each message counts once."""
    taken: set[int] = set()

    def body(message: dict[str, Any]) -> int:
        taken.add(message["body"])
        return int(message["body"])

    def define(job: JobBuilder, target: CollectTarget) -> None:
        job.source(RabbitQueueSource(rabbitmq_url, QUEUE, prefetch=10), uid="queue").map(body, uid="body").sink_to(
            CollectSink("out", target), uid="out"
        )

    def left() -> int:
        """Messages in the queue, once no consumer holds any; -1 before."""
        declared = broker.queue_declare(QUEUE, passive=True)
        return int(declared.message_count) if not declared.consumer_count else -1

    job = Job(tmp_path, define)
    with job.cluster as cluster:
        publish(broker, range(5))
        name = job.submit(settings=StreamSettings(epoch_interval_ms=60_000))
        cluster.until(lambda: len(taken) == 5, "five messages taken")
        assert cluster.stop(name, Desired.CANCEL).state is JobState.STOPPED
        cluster.until(lambda: left() >= 0, "the consumer gone")
        assert (left(), job.out) == (5, [])
        publish(broker, range(5, MESSAGES // 2))
        cluster.resume(name, job.pipelines)
        cluster.until(lambda: len(job.out) >= 20, "some messages committed")
        cluster.stop(name, Desired.CANCEL)
        cluster.until(lambda: left() >= 0, "the consumer gone")
        assert 0 < MESSAGES // 2 - left() <= len(job.out)
        broker.queue_purge(QUEUE)
        publish(broker, range(MESSAGES))
        cluster.resume(name, job.pipelines)
        cluster.until(lambda: len(job.out) >= MESSAGES, "every message committed")
        cluster.durable(name, 2)
        cluster.stop(name, Desired.DRAIN)
        cluster.until(lambda: left() == 0, "every message acknowledged")
    assert sorted(job.out) == list(range(MESSAGES))
