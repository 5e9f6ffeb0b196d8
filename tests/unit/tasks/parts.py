"""Small honest parts for the tests of the runner's pieces: storage, lanes run by hand, channels with a window, edges."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from millstream.testing.outside import SimStorage
from millstream.testing.world import Faults, SimClock, World
from millstream_schema.channels import ChannelId, ChannelReader, ChannelWriter, Frame
from millstream_schema.connectors import ConnectorContext
from millstream_schema.errors import ChannelMissing
from millstream_schema.model import EdgeConfig, EdgeSpec, OperatorSpec, Partitioning
from millstream_schema.plan import PlanEdge
from millstream_schema.values import TypeRegistry
from millstream_tasks.operators.base import Batch, Operator
from millstream_tasks.runner.environment import Environment
from millstream_tasks.runner.outputs import OutputChannel, OutputEdge

REGISTRY = TypeRegistry()
SHARDS = 128


def quiet_world() -> World:
    """A world without faults."""
    return World(0, Faults())


def at_ease() -> None:
    """A guard whose lease never passes."""


class HandLanes:
    """Background work that is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, Callable[[], Any], Callable[[Any, BaseException | None], None]]] = deque()

    def submit(self, lane: str, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.waiting.append((lane, work, done))

    def run(self) -> None:
        """The oldest piece of work."""
        _, work, done = self.waiting.popleft()
        try:
            result = work()
        except BaseException as exc:
            done(None, exc)
        else:
            done(result, None)


class HandChannel:
    """One channel as both ends see it; the test is the wire."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.sent: list[Frame] = []
        self.reported = 0

    def take(self) -> Frame | None:
        return self.frames.popleft() if self.frames else None

    def processed(self, number: int) -> None:
        self.reported = max(self.reported, number)

    def put(self, frame: Frame) -> None:
        self.sent.append(frame)

    def close(self) -> None:
        """Nothing is held."""


class HandTransport:
    """Channels by name."""

    def __init__(self) -> None:
        self.channels: dict[str, HandChannel] = {}

    def create(self, channel: ChannelId, capacity: int) -> ChannelReader:
        return self.channels.setdefault(channel.name(), HandChannel())

    def connect(self, channel: ChannelId, capacity: int) -> ChannelWriter:
        if channel.name() not in self.channels:
            raise ChannelMissing(channel.name())
        return self.channels[channel.name()]

    def wait(self, timeout: float) -> None:
        raise AssertionError("these tests never block")

    def wake(self) -> None:
        """Nothing waits."""

    def delete(self, channels: Any) -> None:
        for channel in channels:
            self.channels.pop(channel.name(), None)

    def close(self) -> None:
        """Nothing is held."""


def environment(
    storage: Any = None, transport: Any = None, lanes: Any = None, report: Callable[[Any], None] = lambda _m: None
) -> Environment:
    world = quiet_world()
    return Environment(
        transport or HandTransport(), storage or SimStorage(world), SimClock(world), lanes or HandLanes(), report, lambda: None, "hand"
    )  # fmt: skip


class Holder(Operator):
    """An operator that holds tables and does nothing."""

    def __init__(self, name: str, *tables: str) -> None:
        super().__init__(OperatorSpec(name, "process", True))
        for table in tables:
            self.table(table)

    def process(self, batch: Batch) -> Batch:
        return batch


def context(subtask: int = 0, parallelism: int = 1, generation: int = 1, job: str = "j", operator: str = "out") -> ConnectorContext:
    return ConnectorContext(job, operator, subtask, parallelism, generation, lambda: None, lambda: 0)


def output_edge(
    how: Partitioning,
    targets: int,
    key: Callable[[Any], Any] | None = None,
    *,
    transport: HandTransport | None = None,
    objects: bool = True,
    **config: Any,
) -> OutputEdge:
    """An edge from subtask 0 with ``targets`` channels; connected when there is a transport."""
    spec = EdgeSpec("a", "b", how, config=EdgeConfig(**config))
    edge = PlanEdge("e0", spec, "a", "b")
    ids = [ChannelId("j", 1, "e0", 0, t) for t in range(targets)]
    channels = [OutputChannel(c, edge, REGISTRY, objects) for c in ids]
    if transport is not None:
        for c, channel in zip(ids, channels):
            transport.create(c, spec.config.capacity)
            channel.connect(transport)
    return OutputEdge(edge, channels, key, SHARDS)
