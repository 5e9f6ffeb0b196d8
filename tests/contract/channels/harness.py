"""One harness per carrier, so that the same properties are shown for all four."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from time import monotonic

from millstream_schema.channels import ChannelId, ChannelReader, ChannelWriter, Frame, Transport
from millstream_tasks.channels.memory import MemoryBroker, MemoryTransport
from millstream_tasks.channels.rabbitmq import RabbitTransport
from millstream_tasks.channels.redis import RedisTransport
from millstream_tasks.channels.unix import UnixTransport

PREFIX = "mstest"


class Carrier:
    """Makes transports and channel names of one carrier; everything made is closed and deleted at the end."""

    def __init__(self, kind: str, make: Callable[[], Transport]) -> None:
        self.kind = kind
        self._make = make
        self._transports: list[Transport] = []
        self._channels: list[ChannelId] = []
        self._job = "job-" + uuid.uuid4().hex
        self._edges = count(1)

    def transport(self) -> Transport:
        transport = self._make()
        self._transports.append(transport)
        return transport

    def channel(self, generation: int = 1, edge: str | None = None) -> ChannelId:
        channel = ChannelId(self._job, generation, edge or f"e{next(self._edges)}", 0, 0)
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        sweeper = self._make()
        sweeper.delete(self._channels)
        sweeper.close()


def make_carrier(kind: str, url: str = "") -> Iterator[Carrier]:
    """A carrier of ``kind``; ``url`` for those that have a broker."""
    directory: str | None = None
    make: Callable[[], Transport]
    if kind == "memory":
        broker = MemoryBroker()
        make = lambda: MemoryTransport(broker)  # noqa: E731
    elif kind == "unix":
        directory = runtime_dir = tempfile.mkdtemp(prefix="ms-")
        make = lambda: UnixTransport(runtime_dir)  # noqa: E731
    elif kind == "redis":
        make = lambda: RedisTransport(url, PREFIX)  # noqa: E731
    else:
        make = lambda: RabbitTransport(url, PREFIX)  # noqa: E731
    carrier = Carrier(kind, make)
    try:
        yield carrier
    finally:
        carrier.close()
        if directory is not None:
            shutil.rmtree(directory)


def until(condition: Callable[[], bool], *transports: Transport, seconds: float = 20) -> None:
    """Drive transports on this thread until ``condition`` holds; fails the test after ``seconds``."""
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, "the condition did not come true in time"
        for transport in transports:
            transport.wait(0.002)


def take(reader: ChannelReader, amount: int, *transports: Transport) -> list[Frame]:
    """Exactly ``amount`` frames, none of them reported as processed."""
    frames: list[Frame] = []

    def enough() -> bool:
        while len(frames) < amount and (frame := reader.take()) is not None:
            frames.append(frame)
        return len(frames) == amount

    until(enough, *transports)
    return frames


def raises(error: type[Exception], action: Callable[[], object], *transports: Transport) -> str:
    """Repeat ``action`` until it raises ``error`` (failures may become known late); returns the message."""
    caught: list[str] = []

    def attempt() -> bool:
        try:
            action()
        except error as exc:
            caught.append(str(exc))
        return bool(caught)

    until(attempt, *transports)
    return caught[0]


class Pair:
    """Both ends of one channel, each on its own transport."""

    def __init__(self, carrier: Carrier, capacity: int, channel: ChannelId | None = None) -> None:
        self.channel = channel or carrier.channel()
        self.capacity = capacity
        self.consumer = carrier.transport()
        self.producer = carrier.transport()
        self.reader: ChannelReader = self.consumer.create(self.channel, capacity)
        self.writer: ChannelWriter = self.producer.connect(self.channel, capacity)

    @property
    def both(self) -> tuple[Transport, Transport]:
        return self.producer, self.consumer
