"""The whole system in one thread on a simulated clock, from a seed: coordinators, nodes, subtasks, channels, hints, storage and the outside world, with faults at every step.

A run is workload + faults + one invariant + a seed; a failing run prints the seed and replays. The code under test is the product's own: coordinator, node and
subtask runner with the real store on SQLite. What must never happen here: a real clock, a real random source, a thread.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millstream.pipelines import Pipelines
from millstream_coordinator.operations import Operations, Submission
from millstream_schema.control import Deployment
from millstream_schema.model import Override, StreamModel
from millstream_schema.pipeline import Pipeline, rebuilt
from millstream_schema.plan import PartitionedPlan
from millstream_schema.states import JobState
from millstream_schema.store import jobs, registry
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.rows import JobRow

from .actors import SETTINGS, SimCoordinator, SimHints, SimNode
from .network import SimNetwork
from .outside import SimDatabase, SimStorage, SimTarget, UpsertSink, UpsertTarget
from .world import Crash, Faults, SimChance, SimClock, SimIds, World


class Simulation:
    """A cluster. ``pipelines`` must be deterministic; the outside world (sinks' targets, sources' data) is theirs."""

    def __init__(self, seed: int, pipelines: Pipelines, faults: Faults, *, nodes: int = 2, slots: int = 8, coordinators: int = 2) -> None:
        self.world = World(seed, faults)
        self.pipelines = pipelines
        self.slots = slots
        self.ids = SimIds(self.world)
        self.database = SimDatabase(self.world, SimClock(self.world))
        create_schema(self.database)
        self.network = SimNetwork(self.world)
        self.storage = SimStorage(self.world)
        self.nodes: list[SimNode] = []
        self.coordinators: list[SimCoordinator] = []
        self.hints = SimHints(self)
        self.operations = Operations(self.database)
        self._rebuilt: dict[bytes, tuple[Pipeline, StreamModel, PartitionedPlan]] = {}
        self.coordinators += [SimCoordinator(self, f"coordinator{i}") for i in range(coordinators)]
        self.nodes += [SimNode(self, f"n{i}") for i in range(nodes)]
        self.world.at(1.0, self._chaos)

    def _chaos(self) -> None:
        """Once a simulated second: crash or stop an actor, break a connection, take something away, set a clock."""
        w = self.world
        for node in self.nodes:
            if node.node is None or node.paused:
                continue
            if w.strikes(w.faults.crash, "crash: node"):
                node.crash()
            elif w.strikes(w.faults.pause, "pause: node"):
                self._pause(node)
            elif node.children and w.strikes(w.faults.crash, "crash: subtask"):
                w.rng.choice(node.children).die()
            if w.faults.skew_ms and w.strikes(0.1, "clock set"):
                node.set_clock()
        for coordinator in self.coordinators:
            if coordinator.coordinator is None or coordinator.paused:
                continue
            if w.strikes(w.faults.crash, "crash: coordinator"):
                coordinator.crash()
            elif w.strikes(w.faults.pause, "pause: coordinator"):
                self._pause(coordinator)
        self.network.sweep()
        if w.strikes(w.faults.cut, "channel cut"):
            self.network.cut()
        for what, longest in (("target", 6.0), ("storage", 4.0), ("store", 5.0)):
            if w.reachable(what) and w.strikes(w.faults.away, f"away: {what}"):
                w.away[what] = w.now + 0.3 + w.rng.random() * longest
        if w.now < w.faults.until:
            w.at(1.0, self._chaos)

    def _pause(self, actor: SimNode | SimCoordinator) -> None:
        actor.paused = True
        self.world.at(0.5 + self.world.rng.random() * 8, lambda: setattr(actor, "paused", False))

    # -- jobs ---------------------------------------------------------------------------------------------------------------------------

    def rebuilt(self, deployment: Deployment) -> tuple[Pipeline, StreamModel, PartitionedPlan]:
        """The pipeline by its factory, compared by fingerprint. Built once per kind: operators are made per subtask from it."""
        d = deployment
        key = msgspec.msgpack.encode([d.factory, d.config, d.parallelism, d.overrides, d.plan_fingerprint])
        found = self._rebuilt.get(key)
        if found is None:
            overrides = {o: Override(**v) for o, v in d.overrides.items()}
            found = rebuilt(self.pipelines.registry, d.factory, d.config, d.parallelism, overrides, d.plan_fingerprint)
            self._rebuilt[key] = found
        return found

    def submit(self, submission: Submission) -> str:
        pipeline = self.pipelines.build(submission.factory, submission.config)
        return self.operations.submit(submission, pipeline).id

    def resume(self, job: str, changes: Submission) -> None:
        pipeline = self.pipelines.build(changes.factory, changes.config)
        self.operations.resume(job, pipeline, changes)

    def job(self, job: str) -> JobRow:
        row = self.database.read(lambda tx: jobs.read_job(tx, job))
        assert row is not None
        return row

    def state(self, job: str) -> JobState:
        return self.job(job).state

    def term(self) -> int:
        """The coordinators' term in force."""
        current, self.world.current = self.world.current, None
        try:
            return self.database.read(registry.read_term)
        finally:
            self.world.current = current

    # -- running --------------------------------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Run; False when the condition did not come true by ``limit`` (simulated seconds since the start)."""
        return self.world.run(until, limit)

    def run_for(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.run(lambda: self.world.now >= end, end)

    def run_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Run until the condition, looked at every fifth of a second, holds. Raises AssertionError naming ``what`` when it does not within ``seconds``."""
        last = [-1.0]

        def holds() -> bool:
            if self.world.now - last[0] < 0.2:
                return False
            last[0] = self.world.now
            return condition()

        if not self.run(holds, self.world.now + seconds) and not condition():
            raise AssertionError(f"seed {self.world.seed}: {what} did not happen within {seconds} simulated seconds")

    def run_to_end(self, job: str, seconds: float = 400.0, check: Callable[[], None] | None = None) -> JobState:
        """Run until the job has ended; checks an invariant at every second."""
        last = [-1.0]

        def ended() -> bool:
            if self.world.now - last[0] < 1.0:
                return False
            last[0] = self.world.now
            if check is not None:
                check()
            return self.state(job).ended

        if not self.run(ended, self.world.now + seconds) and not self.state(job).ended:
            status = self.operations.status(job)
            raise AssertionError(f"seed {self.world.seed}: job is {self.state(job)} after {seconds} simulated seconds: {status}")
        return self.state(job)

    def close(self) -> None:
        self.database.close()


__all__ = [
    "SETTINGS", "Crash", "Faults", "SimChance", "SimTarget", "Simulation", "UpsertSink", "UpsertTarget", "World",
]  # fmt: skip
