"""RabbitMQ channels: what is declared, who may consume, the memory alarm, and how a lost connection shows."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import urlsplit

import amqp
import pytest
from tests.contract.channels.harness import PREFIX, Carrier, Pair, make_carrier, raises, take, until
from tests.unit.runner.rig import spoken
from tests.unit.tasks.parts import HandChannel

from millstream_schema.channels import ChannelId, Frame, Transport
from millstream_schema.envelope import decode_envelope
from millstream_schema.errors import ChannelLost, ChannelMissing, ConfigurationError
from millstream_schema.values import TypeRegistry
from millstream_tasks.channels.rabbitmq import HOUR_MS, RabbitTransport
from millstream_tasks.channels.rabbitmq_io import Lane
from millstream_tasks.channels.rabbitmq_link import NUMBER, connection_options
from millstream_tasks.runner.inputs import InputChannel

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
def carrier(rabbitmq_url: str) -> Iterator[Carrier]:
    yield from make_carrier("rabbitmq", rabbitmq_url)


@pytest.fixture
def broker(rabbitmq_url: str) -> Iterator[Any]:
    """An AMQP channel of the test's own."""
    with amqp.Connection(**connection_options(rabbitmq_url)) as connection:
        yield connection.channel()


def waiting(broker: Any, name: str) -> int:
    """Messages in the queue that no consumer holds."""
    return int(broker.queue_declare(name, passive=True).message_count)


def lane(transport: Transport, side: str) -> Lane:
    return cast(Lane, getattr(transport, f"_{side}"))


def cut(transport: Transport, side: str) -> None:
    """End the connection's socket as a broken network would."""
    lane(transport, side).link.sock.shutdown(socket.SHUT_RDWR)


def test_T56_both_queues_are_durable_classic_ones_that_expire_after_an_hour_or_more(carrier: Carrier, broker: Any) -> None:
    """T-56: no quorum queue whose delivery limit could drop a frame; reports keep the newest only; frames have no limit."""
    pair = Pair(carrier, 8)
    name = pair.channel.name(PREFIX)
    expire = {"x-expires": 2 * HOUR_MS}
    same = {"x-queue-type": "classic", **expire}
    broker.queue_declare(name, durable=True, auto_delete=False, arguments=same)
    broker.queue_declare(name + ".r", durable=True, auto_delete=False, arguments={**same, "x-max-length": 1, "x-overflow": "drop-head"})
    for other in ({"x-queue-type": "quorum", **expire}, {**same, "x-max-length": 8}, {"x-queue-type": "classic"}):
        with pytest.raises(amqp.PreconditionFailed):
            broker.queue_declare(name, durable=True, auto_delete=False, arguments=other)


@pytest.mark.parametrize("side", ["publisher", "consumer"])
def test_T57_a_lost_connection_is_channel_lost_and_the_local_buffer_dies_with_it(carrier: Carrier, broker: Any, side: str) -> None:
    """T-57: after the loss nothing is handed out or acknowledged; the broker has every unprocessed frame again."""
    pair = Pair(carrier, 8)
    for number in (1, 2, 3):
        pair.writer.put(Frame(number, b"x"))
    take(pair.reader, 1, *pair.both)
    until(lambda: waiting(broker, pair.channel.name(PREFIX)) == 0, *pair.both)
    cut(pair.consumer, side)
    raises(ChannelLost, lambda: pair.consumer.create(carrier.channel(), 8), *pair.both)
    with pytest.raises(ChannelLost):
        pair.reader.take()
    pair.reader.processed(3)
    until(lambda: waiting(broker, pair.channel.name(PREFIX)) == 3, *pair.both)
    pair.consumer.close()
    cut(pair.producer, side)
    numbers = iter(range(4, 100_000))
    raises(ChannelLost, lambda: pair.writer.put(Frame(next(numbers), b"x")), *pair.both)
    with pytest.raises(ChannelLost):
        _ = pair.writer.reported


def test_the_broker_keeps_what_is_above_the_window(carrier: Carrier, broker: Any) -> None:
    """Of forty published frames a consumer with a window of five fetches five; each processed one lets one more through."""
    pair = Pair(carrier, 5)
    name = pair.channel.name(PREFIX)
    for number in range(1, 41):
        pair.writer.put(Frame(number, b"x"))
    taken = take(pair.reader, 5, *pair.both)
    until(lambda: waiting(broker, name) == 35, *pair.both)
    assert pair.reader.take() is None
    pair.reader.processed(taken[1].number)
    assert [frame.number for frame in take(pair.reader, 2, *pair.both)] == [6, 7]
    until(lambda: waiting(broker, name) == 33, *pair.both)


def test_a_second_producer_is_refused(carrier: Carrier) -> None:
    """The reports have one consumer: a twin of the producer learns at connect that it is one too many."""
    pair = Pair(carrier, 8)
    other = carrier.transport()
    with pytest.raises(ChannelLost, match="another"):
        other.connect(pair.channel, 8)
    pair.writer.put(Frame(1, b"a"))
    assert take(pair.reader, 1, *pair.both) == [Frame(1, b"a")]


def test_a_published_frame_that_is_returned_raises_channel_missing(carrier: Carrier, broker: Any) -> None:
    """RabbitMQ confirms a publish to a missing queue; the return that precedes the confirm is what counts."""
    pair = Pair(carrier, 8)
    name = pair.channel.name(PREFIX)
    writer = pair.writer
    broker.queue_delete(name)  # the queue of reports stays: only the return can tell
    numbers = iter(range(1, 100_000))
    raises(ChannelMissing, lambda: writer.put(Frame(next(numbers), b"x")), *pair.both)
    raises(ChannelLost, pair.reader.take, *pair.both)


def test_T24_what_the_broker_delivers_again_brings_nothing_out_of_its_place(carrier: Carrier, broker: Any) -> None:
    """T-24: frames given back by a lost consumer, read again from the queue: those that were taken are passed over, the others come as they were said."""
    pair, frames, wire = Pair(carrier, 64), spoken("given-back"), HandChannel()
    for frame in frames:
        pair.writer.put(frame)
    receiving = InputChannel(pair.channel, wire, TypeRegistry())
    wire.frames.extend(take(pair.reader, 25, *pair.both))
    heard = [receiving.take() for _ in range(25)]
    pair.reader.processed(10)
    name = pair.channel.name(PREFIX)
    until(lambda: pair.writer.reported == 10 and waiting(broker, name) == 0, *pair.both)
    cut(pair.consumer, "consumer")
    until(lambda: waiting(broker, name) == len(frames) - 10, pair.producer)
    while (message := broker.basic_get(name, no_ack=True)) is not None:
        assert message.delivery_info["redelivered"]
        (number,) = NUMBER.unpack_from(message.body)
        wire.frames.append(Frame(number, message.body[NUMBER.size :]))
    while (envelope := receiving.take()) is not None:
        heard.append(envelope)
    assert heard == [decode_envelope(f.data, TypeRegistry(), "c") for f in frames]
    assert receiving.repeats == 15


def test_T55_a_blocked_connection_stalls_publishing_only(carrier: Carrier, broker: Any) -> None:
    """T-55: between connection.blocked and unblocked nothing is published, consuming and acknowledging go on, nothing is lost."""
    pair = Pair(carrier, 8)
    name = pair.channel.name(PREFIX)
    for number in (1, 2, 3):
        pair.writer.put(Frame(number, b"x"))
    take(pair.reader, 3, *pair.both)
    publisher = lane(pair.producer, "publisher")
    publisher.link.blocked = True
    for number in (4, 5):
        pair.writer.put(Frame(number, b"x"))
    pair.reader.processed(3)
    until(lambda: pair.writer.reported == 3, *pair.both)
    assert waiting(broker, name) == 0
    assert pair.reader.take() is None
    publisher.link.blocked = False
    publisher.poke()
    assert [frame.number for frame in take(pair.reader, 2, *pair.both)] == [4, 5]


def test_nothing_is_left_after_delete(carrier: Carrier, broker: Any) -> None:
    """Both queues go, by their exact names."""
    pair = Pair(carrier, 8)
    name = pair.channel.name(PREFIX)
    assert waiting(broker, name + ".r") == 0
    carrier.transport().delete([pair.channel])
    for queue in (name, name + ".r"):
        with pytest.raises(amqp.NotFound):
            waiting(broker, queue)


@pytest.mark.parametrize("url", ["amqp://nobody:s3cr%25et@127.0.0.1:1//", "amqp://nobody:s3cr%25et@{address}//"])
def test_no_error_text_holds_the_password(rabbitmq_url: str, url: str) -> None:
    """Neither a refused connection nor a refused login shows it."""
    address = urlsplit(rabbitmq_url).netloc.rsplit("@", 1)[-1]
    with pytest.raises(ChannelLost) as caught:
        RabbitTransport(url.format(address=address))
    assert "s3cr" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_wrong_settings_are_refused_with_what_to_write(carrier: Carrier) -> None:
    """Wrong scheme, too short an expiry, too long a name, too large a window: ConfigurationError, and no queue."""
    with pytest.raises(ConfigurationError, match="amqp"):
        RabbitTransport("redis://127.0.0.1")
    with pytest.raises(ConfigurationError, match="expire_ms"):
        RabbitTransport("amqp://127.0.0.1", expire_ms=1000)
    transport = carrier.transport()
    with pytest.raises(ConfigurationError, match="longer"):
        transport.create(ChannelId("j" * 300, 1, "e", 0, 0), 8)
    with pytest.raises(ConfigurationError, match="65535"):
        transport.create(carrier.channel(), 70_000)
