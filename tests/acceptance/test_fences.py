"""The four stale things (restarted subtask's old output, old coordinator's hint, repeated report, stale sink and transport writes), by somebody who does not stop by himself."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
import redis
from kombu import Connection, Producer
from tests.acceptance.pipelines import ROLLING
from tests.acceptance.traffic import Traffic
from tests.support.celery_cluster import CeleryCluster, eventually

from millstream import ConnectorContext, Fenced, SqlAppendSink
from millstream.messages import control_queue, coordinator_queue
from millstream_schema.hints import NodeHint
from millstream_schema.states import AssignmentState
from millstream_schema.store import epochs, registry
from millstream_schema.store.rows import AssignmentRow

pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.redis]


def test_stale_output_reports_and_hints_are_refused(redis_cluster: CeleryCluster) -> None:
    """A zombie of the last generation, without self-fencing, writes to the sink, the channels and the rows, and an old coordinator gives orders: nothing of it counts."""
    job = Traffic(redis_cluster, count=None).submit()
    job.running()
    old = redis_cluster.row(job.id).generation
    writer, sealed = _zombie(job, old)
    mine = _assignment(redis_cluster, job.id, old)
    channels = _channels(redis_cluster, job.id, old)
    redis_cluster.kill(redis_cluster.subtasks(redis_cluster.running_workers()[0])[0])
    eventually("a new generation runs", lambda: (row := redis_cluster.row(job.id)).generation > old and row.state == "RUNNING")
    job.running()

    writer.write([(0, "stale", 1, 1)], None)
    with pytest.raises(Fenced):
        writer.flush()
    with pytest.raises(Fenced):
        writer.commit(sealed)
    writer.close()
    _write_to_channels(redis_cluster, job.id, old, channels)
    _report(redis_cluster, job.id, mine)
    now = redis_cluster.row(job.id)
    _give_old_orders(redis_cluster, job.id, now.generation)

    job.running(2)
    job.drain()
    job.check(job.ends())


def _zombie(job: Traffic, generation: int) -> tuple[Any, Any]:
    """A writer of the sink under a generation that is in force just now, with output sealed and more to come. ``guard`` never stops it."""
    context = ConnectorContext(job.id, "rolling-out", 77, 2, generation, lambda: None, lambda: 0)
    writer = SqlAppendSink(job.config["target"], f"rolling{job.suffix}", ROLLING, lock_timeout=0.6, patience=2.0).open(context)
    writer.write([(0, "sealed", 1, 1)], None)
    return writer, writer.prepare_commit(1_000_000)


def _assignment(cluster: CeleryCluster, job: str, generation: int) -> AssignmentRow:
    return cluster.database.read(lambda tx: registry.assignments(tx, job, generation))[0]


def _channels(cluster: CeleryCluster, job: str, generation: int) -> list[str]:
    """Keys of a generation's channels on the broker."""
    with contextlib.closing(redis.Redis.from_url(cluster.installation.transport)) as client:
        found = [str(key, "utf-8") for key in client.keys(f"{cluster.prefix}.{job}.{generation}.*") if isinstance(key, bytes)]
    assert found, "the channels of a running job were not found on the broker"
    return found


def _write_to_channels(cluster: CeleryCluster, job: str, old: int, channels: list[str]) -> None:
    """What a stale subtask sends: to its own channels, and (worse than it can) under its old generation into the present ones."""
    generation = cluster.row(job).generation
    with contextlib.closing(redis.Redis.from_url(cluster.installation.transport)) as client:
        for key in channels:
            if client.type(key) == b"stream":
                client.xadd(key, {"d": b"stale"}, id=f"{old}-999999", nomkstream=True)
            present = key.replace(f".{job}.{old}.", f".{job}.{generation}.")
            if client.type(present) == b"stream":
                with pytest.raises(redis.ResponseError, match="equal or smaller"):
                    client.xadd(present, {"d": b"stale"}, id=f"{old}-999999", nomkstream=True)


def _report(cluster: CeleryCluster, job: str, old: AssignmentRow) -> None:
    """What the stale attempt's node writes: READY, an acknowledgement, and a failure that ends nothing but its own row."""
    generation, epoch = cluster.row(job).generation, cluster.row(job).next_epoch - 1
    who = (job, old.generation, old.subtask, old.attempt)
    assert not cluster.database.run(lambda tx: registry.ready_assignment(tx, *who, 1_000_000))
    assert not cluster.database.run(lambda tx: epochs.acknowledge(tx, job, epoch, old.generation, old.subtask, old.attempt, None, "stale"))
    assert not cluster.database.run(lambda tx: registry.start_assignment(tx, job, generation, old.subtask, old.node, "attempt-of-a-zombie"))
    cluster.database.run(lambda tx: registry.end_assignment(tx, *who, AssignmentState.FAILED, "stale", "a zombie"))


def _give_old_orders(cluster: CeleryCluster, job: str, generation: int) -> None:
    """Hints of a coordinator of another age, and messages that are none: to every node and to the coordinators."""
    with Connection(cluster.broker) as connection, connection.channel() as channel:
        producer = Producer(channel, serializer="json")
        for node in cluster.node_ids().values():
            for what in ("fence", "deploy", "abort"):
                stale = msgspec.to_builtins(NodeHint(node, job, generation - 1, 0, what))
                producer.publish(stale, exchange="", routing_key=control_queue(cluster.prefix, node))
            producer.publish({"type": "node", "nonsense": 1}, exchange="", routing_key=control_queue(cluster.prefix, node))
        producer.publish(
            {"nonsense": 1}, exchange="", routing_key=coordinator_queue(cluster.prefix), headers={"task": "millstream.advance"}
        )
