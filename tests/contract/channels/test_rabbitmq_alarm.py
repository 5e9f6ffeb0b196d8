"""RabbitMQ channels while a broker of one's own has a memory alarm, is paused, or dies."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

import amqp
import pytest
from tests.contract.channels.harness import raises, take, until
from tests.support import services
from tests.support.instances import RabbitMQInstance

from millstream_schema.channels import ChannelId, Frame
from millstream_schema.errors import ChannelLost, ChannelMissing
from millstream_tasks.channels.rabbitmq import RabbitTransport
from millstream_tasks.channels.rabbitmq_link import connection_options

pytestmark = [pytest.mark.rabbitmq, pytest.mark.processes]


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQInstance]:
    if RabbitMQInstance.program() is None:
        message = "RABBITMQ IS NOT INSTALLED: no broker of our own can be started"
        pytest.fail(message, pytrace=False) if services.in_ci() else pytest.skip(message)
    with RabbitMQInstance() as server:
        yield server


def test_T55_a_memory_alarm_stalls_the_producer_for_longer_than_every_timeout_and_loses_nothing(server: RabbitMQInstance) -> None:
    """T-55: frames far beyond the socket's buffers wait out the alarm, while the consumer takes and acknowledges what is there."""
    capacity, size = 400, 64 * 1024
    channel = ChannelId("alarm", 1, "edge", 0, 0)
    consumer = RabbitTransport(server.url)
    producer = RabbitTransport(server.url, heartbeat=1.0, write_timeout=0.5)
    try:
        reader = consumer.create(channel, capacity)
        writer = producer.connect(channel, capacity)
        for number in range(1, 11):
            writer.put(Frame(number, b"before"))
        take(reader, 1, consumer, producer)
        server.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
        for number in range(11, capacity + 1):  # in one burst: more than the sockets and the broker's window can hold
            writer.put(Frame(number, number.to_bytes(8) + bytes(size)))
        until(lambda: producer._publisher.link.blocked, producer)
        assert producer._publisher.link.queued_bytes > 0 or any(w.pending for w in producer._publisher.shared.writers)
        taken = 1 + len(take(reader, 9, consumer))
        reader.processed(taken)
        stalled = monotonic()
        until(lambda: monotonic() - stalled > 4, producer, consumer)  # heartbeat 1 s, write timeout 0.5 s
        assert writer.reported == 0  # the report of the consumer's transport waits, too: it publishes as well
        assert producer._publisher.link.blocked
        with amqp.Connection(**connection_options(server.url)) as connection:
            assert connection.channel().queue_declare(channel.name(), passive=True).message_count == 0
        server.ctl("set_vm_memory_high_watermark", "absolute", "1GB")
        rest = take(reader, capacity - 10, consumer, producer)
        assert [frame.number for frame in rest] == list(range(11, capacity + 1))
        assert all(frame.data[:8] == frame.number.to_bytes(8) for frame in rest)
        reader.processed(capacity)
        until(lambda: writer.reported == capacity, producer, consumer)
    finally:
        server.ctl("set_vm_memory_high_watermark", "absolute", "1GB")
        consumer.delete([channel])
        producer.close()
        consumer.close()


def test_a_broker_that_stops_answering_is_channel_lost_by_missed_heartbeats(server: RabbitMQInstance) -> None:
    """SIGSTOP of the broker: no error comes over the sockets, the heartbeats notice, and close does not hang."""
    channel = ChannelId("paused", 1, "edge", 0, 0)
    transport = RabbitTransport(server.url, heartbeat=1.0, io_timeout=1.0)
    try:
        reader = transport.create(channel, 8)
        writer = transport.connect(channel, 8)
        server.pause()
        try:
            raises(ChannelLost, reader.take, transport)
            numbers = iter(range(1, 100_000))
            raises(ChannelLost, lambda: writer.put(Frame(next(numbers), b"x")), transport)
            started = monotonic()
            transport.close()
            assert monotonic() - started < 6
        finally:
            server.resume()
    finally:
        transport.close()


def test_a_killed_broker_is_channel_lost_at_once_and_its_queues_can_be_made_anew(server: RabbitMQInstance) -> None:
    """kill -9 of the broker ends both ends; after its restart the old name has no frames until it is created again."""
    channel = ChannelId("killed", 1, "edge", 0, 0)
    old = RabbitTransport(server.url)
    try:
        reader, writer = old.create(channel, 8), old.connect(channel, 8)
        writer.put(Frame(1, b"lost"))
        server.kill()
        raises(ChannelLost, reader.take, old)
        numbers = iter(range(2, 100_000))
        raises(ChannelLost, lambda: writer.put(Frame(next(numbers), b"x")), old)
    finally:
        old.close()
    server.start()
    new = RabbitTransport(server.url)
    try:
        with pytest.raises(ChannelMissing):
            new.connect(ChannelId("killed", 2, "edge", 0, 0), 8)
        again = new.create(channel, 8)
        new.connect(channel, 8).put(Frame(1, b"new"))
        assert take(again, 1, new) == [Frame(1, b"new")]
        new.delete([channel])
    finally:
        new.close()
