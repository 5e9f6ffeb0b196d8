"""The whole system in one thread on a simulated clock, from a seed: coordinators, nodes, subtasks, channels, hints, storage and the outside world, with faults at every step.

A run is workload + faults + one invariant + a seed; a failing run prints the seed and replays. The code under test is the product's own: coordinator, node and
subtask runner with the real store on SQLite. What must never happen here: a real clock, a real random source, a thread.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.pipelines import Pipelines
from millstream_coordinator.coordinator import Coordinator
from millstream_coordinator.operations import Operations, Submission
from millstream_schema.channels import ChannelId, ChannelReader, ChannelWriter, Frame
from millstream_schema.connectors import CommitAnswer, Committable, CommittingWriter, ConnectorContext, Handle, Json, Sink, SinkCapability, SinkWriter
from millstream_schema.control import Deployment, Lease, NodeMessage, SubtaskMessage, decode_to_node, encode
from millstream_schema.errors import (
    ChannelLost,
    ChannelMissing,
    CommitUnknown,
    MillstreamError,
    SnapshotMissing,
    StorageUnavailable,
    StoreUnavailable,
)
from millstream_schema.hints import JobHint, NodeHint
from millstream_schema.model import Override
from millstream_schema.pipeline import rebuilt
from millstream_schema.states import JobState
from millstream_schema.store import jobs
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_tasks.node import NoEvents, Node, NodeSettings
from millstream_tasks.runner.environment import Environment, LeaseExpired
from millstream_tasks.runner.subtask import SubtaskRunner

EPOCH_0 = 1_700_000_000_000_000
"""Simulated wall clock at the start, µs."""


class Crash(BaseException):
    """The actor that is running dies here."""


@dataclass(frozen=True)
class Faults:
    """Probabilities per opportunity, while ``until`` (simulated seconds) has not passed.

    ``store``: a transaction fails, its actor dies, or COMMIT's answer is lost. ``hint``: lost, twice or late. ``frame``: lost, twice or out of order. ``storage``: a snapshot write
    fails. ``target``: a commit fails before or after its effect. ``crash``, ``pause``: per second and actor. ``skew_ms``: wall clocks of nodes.
    """

    until: float = 20.0
    store: float = 0.0
    hint: float = 0.0
    frame: float = 0.0
    storage: float = 0.0
    target: float = 0.0
    crash: float = 0.0
    pause: float = 0.0
    skew_ms: int = 0


class World:
    """Time, events and chance."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = 0
        self.probes: Counter[str] = Counter()

    def at(self, delay: float, event: Callable[[], None]) -> None:
        self._seq += 1
        heapq.heappush(self._events, (self.now + max(delay, 0.0), self._seq, event))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Run events until the condition holds; False at the limit (simulated seconds)."""
        while self._events:
            if until():
                return True
            when, _, event = heapq.heappop(self._events)
            if when > limit:
                return False
            self.now = when
            event()
        return until()

    def strikes(self, probability: float, probe: str) -> bool:
        """Whether a fault happens now."""
        if self.now >= self.faults.until or probability <= 0.0 or self.rng.random() >= probability:
            return False
        self.probes[probe] += 1
        return True


class SimClock:
    """A node's clocks: true monotonic time, a wall clock that is off by ``skew_ms``."""

    def __init__(self, world: World, skew_ms: int = 0) -> None:
        self._world = world
        self._skew = skew_ms

    def now_us(self) -> int:
        return EPOCH_0 + int(self._world.now * 1e6) + self._skew * 1000

    def now_ms(self) -> int:
        return self.now_us() // 1000

    def monotonic(self) -> float:
        return self._world.now


class SimIds:
    def __init__(self, world: World) -> None:
        self._world = world
        self._n = 0

    def new(self, kind: str) -> str:
        self._n += 1
        return f"{kind}-{self._world.seed}-{self._n}"


class SimChance:
    def __init__(self, world: World) -> None:
        self._world = world

    def uniform(self, low: float, high: float) -> float:
        return self._world.rng.uniform(low, high)


class StoreFaults:
    """Stands in the way of transactions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.active = False

    def before_commit(self) -> None:
        if not self.active:
            return
        p = self._world.faults.store
        if self._world.strikes(p, "store: unavailable"):
            raise StoreUnavailable("simulated")
        if self._world.strikes(p, "store: crash before commit"):
            raise Crash

    def after_commit(self) -> None:
        if not self.active:
            return
        p = self._world.faults.store
        if self._world.strikes(p, "store: commit unknown"):
            raise CommitUnknown("simulated")
        if self._world.strikes(p, "store: crash after commit"):
            raise Crash


# -- channels


@dataclass
class SimQueue:
    """One channel: frames with their delivery times, in order of sending."""

    frames: deque[tuple[float, Frame]] = field(default_factory=deque)
    reported: int = 0
    alive: bool = True


class SimNetwork:
    """All channels. Delivery is delayed at random; faults repeat, lose or swap frames."""

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


class SimReader:
    def __init__(self, network: SimNetwork, queue: SimQueue) -> None:
        self._network = network
        self._queue = queue

    def take(self) -> Frame | None:
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
        if not self._queue.alive:
            raise ChannelLost("the consumer is gone")
        if frame.number > self._queue.reported + self._capacity:
            raise AssertionError("an envelope above the credit window was sent")
        self._network.send(self._queue, frame)

    @property
    def reported(self) -> int:
        if not self._queue.alive:
            raise ChannelLost("the consumer is gone")
        return self._queue.reported

    def close(self) -> None:
        """Frames that were put are on their way."""


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
        """Steps are scheduled by the simulator."""

    def delete(self, channels: Iterable[ChannelId]) -> None:
        for channel in channels:
            self._network.queues.pop(channel.name(), None)

    def close(self) -> None:
        for queue in self._mine:
            queue.alive = False


# -- storage and target


class SimStorage:
    """Checkpoint storage that outlives everything."""

    url = "sim://"

    def __init__(self, world: World) -> None:
        self._world = world
        self.blobs: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> Handle:
        if self._world.strikes(self._world.faults.storage, "storage: full"):
            raise StorageUnavailable(f"{key}: no space left (simulated)")
        self.blobs[key] = data
        return Handle(key, len(data), str(hash(data)))

    def get(self, handle: Handle) -> bytes:
        if handle.key not in self.blobs:
            raise SnapshotMissing(f"{handle.key} is not there")
        return self.blobs[handle.key]

    def copy(self, handle: Handle, key: str) -> Handle:
        self.blobs[key] = self.get(handle)
        return Handle(key, handle.size, handle.checksum)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.blobs.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        return sorted(k for k in self.blobs if k.startswith(prefix))


class FaultySink:
    """A two-phase sink whose commits fail before or after their effect."""

    version = 1

    def __init__(self, inner: Sink, world: World) -> None:
        self._inner = inner
        self._world = world
        self.kind = inner.kind

    @property
    def capability(self) -> SinkCapability:
        return self._inner.capability

    def config(self) -> dict[str, Json]:
        return self._inner.config()

    def problems(self) -> list[str]:
        return self._inner.problems()

    def open(self, context: ConnectorContext) -> SinkWriter:
        return FaultyWriter(self._inner.open(context), self._world)


class FaultyWriter:
    def __init__(self, inner: SinkWriter, world: World) -> None:
        assert isinstance(inner, CommittingWriter)
        self._inner = inner
        self._world = world

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self._inner.write(values, timestamps)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()

    def prepare_commit(self, epoch: int) -> list[Committable]:
        return self._inner.prepare_commit(epoch)

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        p = self._world.faults.target
        if self._world.strikes(p, "target: unavailable"):
            raise StoreUnavailable("simulated")
        answer = self._inner.commit(committables)
        if self._world.strikes(p, "target: answer lost"):
            raise CommitUnknown("simulated")
        return answer

    def clean(self, keep: Sequence[Committable]) -> None:
        self._inner.clean(keep)


# -- actors


class SimBackground:
    """Runs work at a later simulated moment, unless its subtask has died by then."""

    def __init__(self, child: SimChild) -> None:
        self._child = child

    def submit(self, lane: str, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        def run() -> None:
            child = self._child
            if child.dead:
                return
            if child.paused:
                child.world.at(0.5, run)
                return
            result, error = None, None
            try:
                result = work()
            except Exception as exc:
                error = exc
            except LeaseExpired as exc:
                error = exc
            done(result, error)
            child.schedule(0.0)

        self._child.world.at(self._child.world.rng.random() * 0.3, run)


class SimChild:
    """A subtask process."""

    def __init__(self, sim: Simulation, node: SimNode, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> None:
        self.sim = sim
        self.world = sim.world
        self.node = node
        self.dead = False
        self._deliver = deliver
        self._scheduled = False
        self._zombie = False
        self._inbox: list[NodeMessage] = []
        self._outbox: list[SubtaskMessage] = []
        overrides = {o: Override(**v) for o, v in deployment.overrides.items()}
        pipeline, model, plan = rebuilt(
            sim.pipelines.registry, deployment.factory, deployment.config, deployment.parallelism, overrides, deployment.plan_fingerprint
        )
        transport = SimTransport(sim.network)
        self.transport = transport
        environment = Environment(transport, sim.storage, node.clock, SimBackground(self), self._report, lambda: None)
        self.runner = SubtaskRunner(deployment, pipeline, model, plan, environment)
        self._started = False
        self.schedule(self.world.rng.random() * 0.2)

    @property
    def paused(self) -> bool:
        return self.node.paused

    def _report(self, message: SubtaskMessage) -> None:
        self._outbox.append(decode_to_node(encode(message)))

    def schedule(self, delay: float) -> None:
        if not self._scheduled and not self.dead:
            self._scheduled = True
            self.world.at(delay, self._step)

    def _step(self) -> None:
        self._scheduled = False
        if self.dead:
            return
        if self.paused:
            self._zombie = True
            self.schedule(0.5)
            return
        wait = 0.02
        was, self._zombie = self._zombie, False
        if was:  # stopped after it had looked at its deadline: the step it was in goes on
            self.sim.world.probes["zombie step"] += 1
            self.runner.deadline = float("inf")
        try:
            if not self._started:
                self.runner.start()
                self._started = True
            else:
                wait = self.runner.step()
        except (LeaseExpired, MillstreamError, OSError) as exc:
            self.runner.fail(exc)
        except Crash:
            self.die()
            return
        if was:
            self.runner.deadline = self._deadline
        self._flush()
        if self.runner.over:
            self.die()
            return
        self._report_stats()
        self.schedule(max(wait, 0.002) + self.world.rng.random() * 0.01)

    def _report_stats(self) -> None:
        self._deliver(self.runner.stats())

    def _flush(self) -> None:
        for message in self._outbox:
            self._deliver(message)
        self._outbox.clear()

    _deadline = float("inf")

    def send(self, message: NodeMessage) -> None:
        if isinstance(message, Lease):
            self._deadline = message.deadline
        self.runner.control(message)
        self.schedule(self.world.rng.random() * 0.01)

    def kill(self) -> None:
        """kill -9 from the node. One that is stopped dies when it is woken; it may finish the step it was in."""
        if self.node.paused:
            self.world.at(30.0, self.die)
            return
        self.die()

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            self.transport.close()
            self._deliver(None)


class SimNode:
    """A node process with its children; restarted after a crash."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim = sim
        self.name = name
        self.paused = False
        self.children: list[SimChild] = []
        skew = sim.world.faults.skew_ms
        self.clock = SimClock(sim.world, sim.world.rng.randint(-skew, skew) if skew else 0)
        self.node: Node
        self._boot()

    def _boot(self) -> None:
        settings = NodeSettings(name=self.name, slots=self.sim.slots, lease_ms=3000, renew_ms=800, poll_ms=300, liveness_ms=2500, ping_ms=500)
        self.children = []
        self.node = Node(self.sim.database, self.sim.hints, self.clock, self.sim.ids, self, settings, {}, NoEvents())
        self.sim.world.at(0.0, lambda n=self.node: self._step(n))  # type: ignore[misc]

    def launch(self, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> SimChild:
        child = SimChild(self.sim, self, deployment, deliver)
        self.children.append(child)
        return child

    def _step(self, node: Node) -> None:
        if node is not self.node:
            return
        if self.paused:
            self.sim.world.at(0.5, lambda: self._step(node))
            return
        try:
            with self.sim.faulty():
                wait = node.step()
        except Crash:
            self.crash()
            return
        self.sim.world.at(min(max(wait, 0.005), 0.3), lambda: self._step(node))

    def crash(self) -> None:
        """kill -9: the children die with their pipe."""
        for child in self.children:
            child.die()
        self.node = None  # type: ignore[assignment]
        self.sim.world.at(0.5 + self.sim.world.rng.random() * 3, self._boot)

    def poke(self, hint: NodeHint) -> None:
        if self.node is not None and not self.paused:
            self.node.hint(hint)


class SimCoordinator:
    """A coordinator process."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim = sim
        self.name = name
        self.paused = False
        self.coordinator: Coordinator
        self._boot()

    def _boot(self) -> None:
        sim = self.sim
        holder = sim.ids.new(self.name)
        self.coordinator = Coordinator(sim.database, sim.hints, SimClock(sim.world), SimChance(sim.world), lambda _: sim.storage, holder, 2000)
        sim.world.at(sim.world.rng.random(), lambda c=self.coordinator: self._step(c))  # type: ignore[misc]

    def _step(self, coordinator: Coordinator) -> None:
        if coordinator is not self.coordinator:
            return
        if self.paused:
            self.sim.world.at(0.5, lambda: self._step(coordinator))
            return
        try:
            with self.sim.faulty():
                wait = coordinator.sweep()
        except Crash:
            self.crash()
            return
        self.sim.world.at(min(max(wait, 0.01), 0.2), lambda: self._step(coordinator))

    def look(self, job: str) -> None:
        if self.coordinator is None or self.paused:
            return
        try:
            with self.sim.faulty():
                self.coordinator.look(job)
        except Crash:
            self.crash()

    def crash(self) -> None:
        self.coordinator = None  # type: ignore[assignment]
        self.sim.world.at(0.5 + self.sim.world.rng.random() * 3, self._boot)


class SimHints:
    """Hints over a network that loses, repeats and delays."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def _send(self, deliver: Callable[[], None]) -> None:
        w = self._sim.world
        if w.strikes(w.faults.hint, "hint: lost"):
            return
        w.at(w.rng.random() * 0.02, deliver)
        if w.strikes(w.faults.hint, "hint: twice"):
            w.at(w.rng.random() * 3, deliver)

    def to_node(self, hint: NodeHint) -> None:
        for node in self._sim.nodes:
            self._send(lambda n=node: n.poke(hint))  # type: ignore[misc]

    def to_coordinator(self, hint: JobHint) -> None:
        if not hint.job:
            return
        chosen = self._sim.world.rng.choice(self._sim.coordinators)
        self._send(lambda: chosen.look(hint.job))


class Simulation:
    """A cluster. ``pipelines`` must be deterministic; the outside world (sinks' targets, sources' data) is theirs."""

    def __init__(self, seed: int, pipelines: Pipelines, faults: Faults, *, nodes: int = 2, slots: int = 8, coordinators: int = 2) -> None:
        self.world = World(seed, faults)
        self.pipelines = pipelines
        self.slots = slots
        self.ids = SimIds(self.world)
        self._store_faults = StoreFaults(self.world)
        self.database = Database("sqlite://", SimClock(self.world), faults=self._store_faults)
        create_schema(self.database)
        self.network = SimNetwork(self.world)
        self.storage = SimStorage(self.world)
        self.nodes: list[SimNode] = []
        self.coordinators: list[SimCoordinator] = []
        self.hints = SimHints(self)
        self.operations = Operations(self.database)
        self.coordinators += [SimCoordinator(self, f"coordinator{i}") for i in range(coordinators)]
        self.nodes += [SimNode(self, f"n{i}") for i in range(nodes)]
        self._chaos()

    def faulty(self) -> _Faulty:
        return _Faulty(self._store_faults)

    def _chaos(self) -> None:
        """Once a simulated second: crash or stop an actor."""
        w = self.world
        for actor in [*self.nodes, *self.coordinators]:
            alive = actor.node is not None if isinstance(actor, SimNode) else actor.coordinator is not None
            if alive and not actor.paused and w.strikes(w.faults.crash, f"crash: {type(actor).__name__}"):
                actor.crash()
            elif alive and not actor.paused and w.strikes(w.faults.pause, f"pause: {type(actor).__name__}"):
                actor.paused = True
                w.at(0.5 + w.rng.random() * 8, lambda a=actor: setattr(a, "paused", False))  # type: ignore[misc]
            if isinstance(actor, SimNode) and alive and actor.children and w.strikes(w.faults.crash, "crash: subtask"):
                w.rng.choice(actor.children).die()
        if w.now < w.faults.until:
            w.at(1.0, self._chaos)

    def submit(self, submission: Submission) -> str:
        pipeline = self.pipelines.build(submission.factory, submission.config)
        return self.operations.submit(submission, pipeline).id

    def state(self, job: str) -> JobState:
        row = self.database.read(lambda tx: jobs.read_job(tx, job))
        assert row is not None
        return row.state

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Run; False when the condition did not come true within ``limit`` simulated seconds."""
        return self.world.run(until, limit)

    def run_to_end(self, job: str, limit: float = 400.0, check: Callable[[], None] | None = None) -> JobState:
        """Run until the job has ended; checks an invariant at every half second."""
        last = [-1.0, JobState.PENDING]

        def ended() -> bool:
            if self.world.now - float(last[0]) >= 0.5:  # type: ignore[arg-type]
                last[0] = self.world.now
                last[1] = self.state(job)
                if check is not None:
                    check()
            return JobState(last[1]).ended  # type: ignore[arg-type]

        if not self.run(ended, limit):
            raise AssertionError(f"seed {self.world.seed}: job is {self.state(job)} after {limit} simulated seconds: {self.operations.status(job)}")
        return self.state(job)

    def close(self) -> None:
        self.database.close()


class _Faulty:
    """Store faults apply inside this block only: not to the simulation's own reads and writes."""

    def __init__(self, faults: StoreFaults) -> None:
        self._faults = faults

    def __enter__(self) -> None:
        self._faults.active = True

    def __exit__(self, *_: object) -> None:
        self._faults.active = False
