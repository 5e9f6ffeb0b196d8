"""Data channels of a simulated run: delivery is delayed; faults repeat, lose or swap frames and break connections.

Created by :class:`millstream.testing.simulation.Simulation`; one :class:`SimTransport` per subtask. What must never happen here: an order or a loss that a real transport cannot
show (frames of one channel stay in order unless a fault says otherwise).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from millstream_schema.channels import ChannelId, ChannelReader, ChannelWriter, Frame
from millstream_schema.errors import ChannelLost, ChannelMissing

from .world import World


@dataclass
class SimQueue:
    """One channel: frames with their delivery times, in order of sending."""

    frames: deque[tuple[float, Frame]] = field(default_factory=deque)
    reported: int = 0
    alive: bool = True
    broken: bool = False


class SimNetwork:
    """All channels by name."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.queues: dict[str, SimQueue] = {}

    def send(self, queue: SimQueue, frame: Frame) -> None:
        w = self.world
        at = w.now + w.rng.random() * 0.02
        if queue.frames:
            at = max(at, queue.frames[-1][0])
        if w.strikes(w.faults.frame, "frame: lost"):
            return
        queue.frames.append((at, frame))
        if w.strikes(w.faults.frame * 3, "frame: twice"):
            queue.frames.append((at, frame))
        if len(queue.frames) > 1 and w.strikes(w.faults.frame, "frame: out of order"):
            queue.frames[-1], queue.frames[-2] = queue.frames[-2], queue.frames[-1]

    def cut(self) -> None:
        """One connection breaks, at both ends."""
        live = [name for name, q in self.queues.items() if q.alive and not q.broken]
        if live:
            self.queues[self.world.rng.choice(live)].broken = True

    def sweep(self) -> None:
        """Forget channels nobody reads any more."""
        self.queues = {name: q for name, q in self.queues.items() if q.alive}


class SimReader:
    def __init__(self, network: SimNetwork, queue: SimQueue) -> None:
        self._network = network
        self._queue = queue

    def take(self) -> Frame | None:
        if self._queue.broken:
            self._network.world.probes["channel lost by its reader"] += 1
            raise ChannelLost("the connection broke (simulated)")
        frames = self._queue.frames
        if frames and frames[0][0] <= self._network.world.now:
            return frames.popleft()[1]
        return None

    def processed(self, number: int) -> None:
        self._queue.reported = max(self._queue.reported, number)

    def close(self) -> None:
        self._queue.alive = False


class SimWriter:
    def __init__(self, network: SimNetwork, queue: SimQueue, capacity: int) -> None:
        self._network = network
        self._queue = queue
        self._capacity = capacity

    def put(self, frame: Frame) -> None:
        self._network.world.stumble("before an envelope is sent")
        self._look()
        if frame.number > self._queue.reported + self._capacity:
            raise AssertionError("an envelope above the credit window was sent")
        self._network.send(self._queue, frame)

    def _look(self) -> None:
        if not self._queue.alive:
            self._network.world.probes["envelope to a consumer that is gone refused"] += 1
            raise ChannelLost("the consumer is gone (simulated)")
        if self._queue.broken:
            self._network.world.probes["channel lost by its writer"] += 1
            raise ChannelLost("the connection broke (simulated)")

    @property
    def reported(self) -> int:
        self._look()
        return self._queue.reported

    def close(self) -> None:
        """Nothing to send: frames that were put are on their way."""


class SimTransport:
    """Channels of one simulated subtask."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self._mine: list[SimQueue] = []

    def create(self, channel: ChannelId, capacity: int) -> ChannelReader:
        queue = SimQueue()
        self._network.queues[channel.name()] = queue
        self._mine.append(queue)
        return SimReader(self._network, queue)

    def connect(self, channel: ChannelId, capacity: int) -> ChannelWriter:
        queue = self._network.queues.get(channel.name())
        if queue is None or not queue.alive:
            raise ChannelMissing(f"channel {channel.name()} does not exist")
        return SimWriter(self._network, queue, capacity)

    def wait(self, timeout: float) -> None:
        raise AssertionError("the simulator never blocks")

    def wake(self) -> None:
        """Nothing to do: steps are scheduled by the simulator."""

    def delete(self, channels: Iterable[ChannelId]) -> None:
        for channel in channels:
            self._network.queues.pop(channel.name(), None)

    def close(self) -> None:
        for queue in self._mine:
            queue.alive = False
