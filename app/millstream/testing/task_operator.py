"""Somebody who pauses, resumes, limits and widens while simulated workers run, and dies or loses his answer at any transaction of it.

Used by simulation tests of admission; what he did, and when by the database's clock, is kept for whoever judges the run. What must never happen here: a pause without its end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from millstream_schema.durable.gates import GateKind, gate_id, pause_blocker, permit_blocker, rate_blocker
from millstream_schema.errors import StoreError
from millstream_schema.store import gates, permits
from millstream_schema.store.database import Transaction

from .task_simulation import TaskSimulation
from .world import EPOCH_0, Crash

NAMESPACE = "default"
T = TypeVar("T")


class Paused(msgspec.Struct):
    """An interval in which nothing may be claimed: from when it was stored until its end was first asked for, µs by the database's clock."""

    kind: GateKind
    name: str
    from_us: int
    until_us: int | None = None


class Operator:
    """Acts until each of his acts is answered; what he has no answer to he repeats as it was."""

    def __init__(self, sim: TaskSimulation) -> None:
        self.sim = sim
        self.pauses: list[Paused] = []

    def nap(self, where: str) -> None:
        self.sim.world.nap(self.sim.world.rng.random() * 2)

    def pause(self, kind: GateKind, name: str, seconds: float) -> None:
        """For about so long."""
        w = self.sim.world

        def work(tx: Transaction) -> int:
            return gates.pause(tx, kind, NAMESPACE, name, actor="operator", reason="simulated").paused_us

        def done(paused_us: int) -> None:
            w.probes[f"paused: {kind.value}"] += 1
            same = [
                p for p in self.pauses if (p.kind, p.name, p.from_us) == (kind, name, paused_us)
            ]  # two pauses of one thing are one pause
            interval = Paused(kind, name, paused_us, next((p.until_us for p in same if p.until_us is not None), None))
            self.pauses.append(interval)
            w.at(seconds, lambda: self.resume(interval))

        self._until_answered(work, done)

    def resume(self, paused: Paused) -> None:
        """Its end, and what waits is moved up a few at a time; if he dies on the way the sweep does the rest."""
        w = self.sim.world

        def work(tx: Transaction) -> None:
            for other in self.pauses:  # of the same thing: it may end any of them
                if (other.kind, other.name, other.until_us) == (paused.kind, paused.name, None):
                    other.until_us = int(w.now * 1e6) + EPOCH_0
            gates.resume(tx, paused.kind, NAMESPACE, paused.name, actor="operator")

        def done(_: None) -> None:
            key = gate_id(paused.kind, NAMESPACE, paused.name)
            self._relieve([pause_blocker(key), *([permit_blocker(f"{NAMESPACE}/{paused.name}")] if paused.kind is GateKind.PERMIT else [])])

        self._until_answered(work, done)

    def capacity(self, key: str, count: int) -> None:
        def work(tx: Transaction) -> None:
            permits.set_capacity(tx, f"{NAMESPACE}/{key}", count, actor="operator")

        self._until_answered(work, lambda _: None)
        self.sim.world.probes["capacity changed"] += 1

    def rate(self, kind: GateKind, name: str, number: int, per_us: int, burst: int) -> None:
        """0: none any more."""

        def work(tx: Transaction) -> None:
            gates.set_rate(tx, kind, NAMESPACE, name, number, per_us, burst, actor="operator")

        self._until_answered(work, lambda _: None if number else self._relieve([rate_blocker(gate_id(kind, NAMESPACE, name))]))

    def _moved(self, blocker: str) -> int:
        return self.sim.database.run(lambda tx: gates.relieve(tx, blocker, 3))

    def _relieve(self, blockers: list[str]) -> None:
        w = self.sim.world
        for blocker in blockers:
            while True:
                try:
                    moved = w.act(self, partial(self._moved, blocker))
                except (StoreError, Crash):
                    w.probes["died while he moved tasks up"] += 1
                    return
                if moved < 3:
                    break

    def _until_answered(self, work: Callable[[Transaction], T], done: Callable[[T], None]) -> None:
        w = self.sim.world
        try:
            answer = w.act(self, lambda: self.sim.database.run(work))
        except (StoreError, Crash):
            w.at(0.2 + w.rng.random(), lambda: self._until_answered(work, done))
            return
        done(answer)
