"""Nodes, subtask processes and coordinators of a simulated run: the product's own code, driven step by step.

Each can crash at a transaction, be paused between steps, or stand still in the middle of one. What must never happen here: a step of an actor that is paused or dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from millstream_coordinator.coordinator import Coordinator
from millstream_schema.control import AssignSplits, Deployment, NodeMessage, SubtaskMessage, decode_to_node, decode_to_subtask, encode
from millstream_schema.errors import ChannelBroken, MillstreamError
from millstream_schema.hints import JobHint, NodeHint
from millstream_schema.model import StreamModel
from millstream_schema.pipeline import Pipeline
from millstream_schema.plan import PartitionedPlan
from millstream_schema.settings import StreamSettings
from millstream_tasks.node import Node, NodeSettings, NoEvents
from millstream_tasks.runner.environment import Environment, LeaseExpired
from millstream_tasks.runner.subtask import SubtaskRunner

from .network import SimNetwork, SimTransport
from .outside import SimDatabase, SimStorage
from .world import Crash, SimChance, SimClock, SimIds, World

LEASE_MS = 3000
COORDINATOR_LEASE_MS = 3000
STATS_EVERY = 0.25


class Cluster(Protocol):
    """What actors need of the simulation they live in."""

    world: World
    network: SimNetwork
    storage: SimStorage
    database: SimDatabase
    ids: SimIds
    hints: SimHints
    nodes: list[SimNode]
    coordinators: list[SimCoordinator]
    slots: int

    def rebuilt(self, deployment: Deployment) -> tuple[Pipeline, StreamModel, PartitionedPlan]: ...

    def term(self) -> int: ...


class SimBackground:
    """Runs work at a later simulated moment, lane by lane in order, unless its subtask has died by then."""

    def __init__(self, child: SimChild) -> None:
        self._child = child
        self._lanes: dict[str, deque[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]]] = {}

    def submit(self, lane: str, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append((work, done))
        if len(waiting) == 1:
            self._later(lane)

    def _later(self, lane: str) -> None:
        self._child.world.at(self._child.world.rng.random() * 0.3, lambda: self._run(lane))

    def _run(self, lane: str) -> None:
        child = self._child
        if child.dead:
            return
        if child.paused:
            child.world.at(0.5, lambda: self._run(lane))
            return
        work, done = self._lanes[lane][0]
        result, error = None, None
        try:
            result = child.world.act(child, work)
        except (Exception, LeaseExpired) as exc:
            error = exc
        except Crash:
            child.die()
            return
        done(result, error)
        self._lanes[lane].popleft()
        if self._lanes[lane]:
            self._later(lane)
        child.schedule(0.0)


class SimChild:
    """A subtask process."""

    def __init__(self, sim: Cluster, node: SimNode, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> None:
        self.world = sim.world
        self.node = node
        self.dead = False
        self.frozen = False
        self._deliver = deliver
        self._scheduled = False
        self._started = False
        self._stats_at = 0.0
        self._outbox: list[SubtaskMessage] = []
        pipeline, model, plan = sim.rebuilt(deployment)
        self.transport = SimTransport(sim.network)
        environment = Environment(self.transport, sim.storage, node.clock, SimBackground(self), self._report, lambda: None, "memory")
        self.runner = SubtaskRunner(deployment, pipeline, model, plan, environment)
        sim.world.probes["restored from an epoch"] += deployment.restore_epoch > 0
        sim.world.probes["restored at another parallelism"] += deployment.rescaled
        self.schedule(self.world.rng.random() * 0.2)

    @property
    def paused(self) -> bool:
        return self.frozen or self.node.paused

    def nap(self, where: str) -> None:
        """SIGSTOP of this process alone, or of its whole machine."""
        w = self.world
        seconds = w.rng.random() * 8
        if w.rng.random() < 0.7:
            self.node.nap(where)
        else:
            self.frozen = True
            w.nap(seconds)
            self.frozen = False
        if self.dead:
            raise Crash
        if w.now > self.runner.deadline:
            w.probes[f"zombie goes on {where}"] += 1

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
            self.schedule(0.5)
            return
        try:
            wait: float = self.world.act(self, self._work)
        except (LeaseExpired, MillstreamError, OSError) as exc:
            self.world.probes["lease expired in a subtask"] += isinstance(exc, LeaseExpired)
            self.world.probes["gap detected"] += isinstance(exc, ChannelBroken)
            self.runner.fail(exc)
            wait = 0.0
        except Crash:
            self.die()
            return
        self._flush()
        if self.runner.over:
            self.die()
            return
        self.schedule(0.002 + self.world.rng.random() * 0.02 if wait <= 0 else max(wait, 0.02) + self.world.rng.random() * 0.02)

    def _work(self) -> float:
        if self._started:
            return self.runner.step()
        self.runner.start()
        self._started = True
        return 0.0

    def _flush(self) -> None:
        for message in self._outbox:
            self._deliver(message)
        self._outbox.clear()
        if self.world.now >= self._stats_at:
            self._stats_at = self.world.now + STATS_EVERY
            self._deliver(self.runner.stats())

    def send(self, message: NodeMessage) -> None:
        if not self.dead:
            if isinstance(message, AssignSplits) and self.runner.deployment.restore_epoch:
                known = {(s.operator, s.split_id) for s in self.runner.deployment.splits}
                self.world.probes["split handed out after a restore"] += any((s.operator, s.split_id) not in known for s in message.splits)
            self.runner.control(decode_to_subtask(encode(message)))  # type: ignore[arg-type]
            self.schedule(self.world.rng.random() * 0.01)

    def kill(self) -> None:
        """kill -9: a stopped process dies of it, too."""
        self.die()

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            self.world.probes["repeat dropped"] += sum(c.repeats for c in self.runner.inputs)
            self.transport.close()
            self._deliver(None)


class SimNode:
    """A node process with its children; started again after a crash."""

    def __init__(self, sim: Cluster, name: str) -> None:
        self.sim = sim
        self.world = sim.world
        self.name = name
        self.paused = False
        self.children: list[SimChild] = []
        self.clock = SimClock(sim.world)
        self.node: Node | None = None
        self.set_clock()
        self._boot()

    def set_clock(self) -> None:
        skew = self.world.faults.skew_ms
        self.clock.skew_ms = self.world.rng.randint(-skew, skew) if skew else 0

    def _boot(self) -> None:
        settings = NodeSettings(
            name=self.name, slots=self.sim.slots, lease_ms=LEASE_MS, renew_ms=800, poll_ms=700, liveness_ms=2500, ping_ms=500
        )
        self.children = []
        node = self.node = Node(self.sim.database, self.sim.hints, self.clock, self.sim.ids, self, settings, {}, NoEvents())
        self.world.at(0.0, lambda: self._step(node))

    def launch(self, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> SimChild:
        child = SimChild(self.sim, self, deployment, deliver)
        self.children = [c for c in self.children if not c.dead]
        self.children.append(child)
        return child

    def nap(self, where: str) -> None:
        self.paused = True
        self.world.nap(self.world.rng.random() * 8)
        self.paused = False

    def _step(self, node: Node) -> None:
        if node is not self.node:
            return
        if self.paused:
            self.world.at(0.5, lambda: self._step(node))
            return
        before = node.id
        try:
            wait: float = self.world.act(self, node.step)
        except Crash:
            self.crash()
            return
        self.world.probes["node lease lost"] += bool(before) and node.id != before
        self.world.at(min(max(wait, 0.01), 0.5), lambda: self._step(node))

    def crash(self) -> None:
        """kill -9: the children die with their pipe; one that is busy notices only a little later."""
        for child in self.children:
            if self.world.rng.random() < 0.5:
                child.die()
            else:
                self.world.probes["orphaned subtask"] += not child.dead
                self.world.at(self.world.rng.random() * 5, child.die)
        self.node = None
        self.world.at(0.5 + self.world.rng.random() * 3, self._boot)

    def poke(self, hint: NodeHint) -> None:
        if self.node is not None and not self.paused:
            stale = self.node.stale_hints
            self.node.hint(hint)
            self.world.probes["stale hint ignored"] += self.node.stale_hints - stale


class SimLanes:
    """Runs a coordinator's storage work at a later simulated moment, lane by lane in order, unless the coordinator has died by then."""

    def __init__(self, process: SimCoordinator) -> None:
        self._process = process
        self._lanes: dict[str, deque[Callable[[], None]]] = {}

    def submit(self, lane: str, work: Callable[[], None]) -> None:
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(work)
        if len(waiting) == 1:
            self._later(lane)

    def _later(self, lane: str) -> None:
        self._process.world.at(self._process.world.rng.random() * 0.3, lambda: self._run(lane))

    def _run(self, lane: str) -> None:
        process = self._process
        if process.lanes is not self:
            return
        if process.paused:
            process.world.at(0.5, lambda: self._run(lane))
            return
        try:
            process.world.act(process, self._lanes[lane][0])
        except Crash:
            process.crash()
            return
        self._lanes[lane].popleft()
        if self._lanes[lane]:
            self._later(lane)


class SimCoordinator:
    """A coordinator process."""

    def __init__(self, sim: Cluster, name: str) -> None:
        self.sim = sim
        self.world = sim.world
        self.name = name
        self.paused = False
        self.hinted: set[str] = set()
        self.coordinator: Coordinator | None = None
        self.lanes: SimLanes | None = None
        self._boot()

    def _boot(self) -> None:
        sim = self.sim
        holder = sim.ids.new(self.name)
        coordinator = self.coordinator = Coordinator(
            sim.database, sim.hints, SimClock(sim.world), SimChance(sim.world), lambda _: sim.storage, holder, COORDINATOR_LEASE_MS
        )
        self.lanes = SimLanes(self)
        coordinator.work_in(self.lanes)
        sim.world.at(sim.world.rng.random(), lambda: self._step(coordinator))

    def nap(self, where: str) -> None:
        self.paused = True
        before = self.sim.term()
        self.world.nap(self.world.rng.random() * 6)
        self.paused = False
        if self.sim.term() > before:
            self.world.probes[f"old coordinator goes on {where}"] += 1

    def _step(self, coordinator: Coordinator) -> None:
        if coordinator is not self.coordinator:
            return
        if self.paused:
            self.world.at(0.5, lambda: self._step(coordinator))
            return
        led, term = coordinator.leading, coordinator.term
        try:
            wait: float = self.world.act(self, coordinator.sweep)
        except Crash:
            self.crash()
            return
        assert coordinator.defects == 0, "the coordinator failed on a job: see its log"
        self.world.probes["coordinator took over"] += coordinator.leading and coordinator.term > max(term, 1) and not led
        self.world.at(min(max(wait, 0.02), 0.7), lambda: self._step(coordinator))

    def look(self, job: str) -> None:
        coordinator = self.coordinator
        if coordinator is None or self.paused:
            return
        try:
            self.world.act(self, lambda: coordinator.look(job))
        except Crash:
            self.crash()
            return
        assert coordinator.defects == 0, "the coordinator failed on a job: see its log"

    def crash(self) -> None:
        self.coordinator = self.lanes = None
        self.world.at(0.5 + self.world.rng.random() * 3, self._boot)


class SimHints:
    """Hints over a network that loses, repeats and delays."""

    def __init__(self, sim: Cluster) -> None:
        self._sim = sim

    def _send(self, deliver: Callable[[], None]) -> None:
        w = self._sim.world
        if w.strikes(w.faults.hint, "hint: lost"):
            return
        w.at(w.rng.random() * 0.02, deliver)
        if w.strikes(w.faults.hint, "hint: twice"):
            w.at(w.rng.random() * 3, deliver)

    def to_node(self, hint: NodeHint) -> None:
        """To the node that is meant; now and then to another, which has to pass it over."""
        for node in self._sim.nodes:
            if (node.node is not None and node.node.id == hint.node) or self._sim.world.strikes(
                self._sim.world.faults.hint, "hint: astray"
            ):
                self._send(lambda n=node: n.poke(hint))  # type: ignore[misc]

    def to_coordinator(self, hint: JobHint) -> None:
        if not hint.job:
            return
        chosen = self._sim.world.rng.choice(self._sim.coordinators)
        if hint.job not in chosen.hinted:  # one look answers all hints of a moment
            chosen.hinted.add(hint.job)
            self._send(lambda: chosen.look(hint.job))
            self._sim.world.at(0.06, lambda: chosen.hinted.discard(hint.job))


SETTINGS = StreamSettings(
    epoch_interval_ms=500, alignment_ms=3000,
    epoch_timeout_ms=10000, start_limit_ms=8000, source_batch=5,
)  # fmt: skip
"""What the simulated clusters run jobs with: everything an order of magnitude faster than in production."""
