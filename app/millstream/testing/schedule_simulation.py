"""Schedules in the simulated world of durable tasks: several coordinators that all fire, one user who publishes, pauses and triggers; the product's own code with faults.

Extends :mod:`millstream.testing.task_simulation`. What must never happen here: a step of an actor that is paused or dead; a look at the world's time by anything of the product's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from millstream_coordinator.schedule_sweep import ScheduleSweep
from millstream_schema.canonical import fingerprint
from millstream_schema.durable.recurrence import Spec
from millstream_schema.durable.schedules import Definition, FireRow, Overlap, Rules, ScheduleRow
from millstream_schema.errors import StoreError
from millstream_schema.store import fires, schedules
from millstream_schema.store.database import Transaction
from millstream_schema.store.rows import to
from millstream_schema.store.schedules import Published

from .task_simulation import Script, TaskSimulation
from .world import Crash, Faults, SimClock

POLL = 1.0


class SimScheduler:
    """A coordinator that thinks it holds the lease, whether others do or not; its wall clock is off."""

    def __init__(self, sim: ScheduleSimulation, skew_ms: int) -> None:
        self.sim = sim
        self.skew_ms = skew_ms
        self.paused = False
        self.sweep: ScheduleSweep | None = None
        self._boot()

    def _boot(self) -> None:
        sim = self.sim
        sweep = self.sweep = ScheduleSweep(sim.database, SimClock(sim.world, self.skew_ms), sim.ids, POLL)
        sim.world.at(sim.world.rng.random(), lambda: self._step(sweep))

    def nap(self, where: str) -> None:
        self.paused = True
        self.sim.world.nap(self.sim.world.rng.random() * 6)
        self.paused = False

    def goes_on(self) -> None:
        self.paused = False

    def crash(self) -> None:
        """kill -9; another one starts after a while."""
        self.sweep = None
        self.sim.world.at(0.5 + self.sim.world.rng.random() * 4, self._boot)

    def _step(self, sweep: ScheduleSweep) -> None:
        if sweep is not self.sweep:
            return
        wait, w = 0.3, self.sim.world
        if not self.paused:
            try:
                wait = w.act(self, sweep.sweep)
            except StoreError:
                w.probes["schedules: sweep met an outage"] += 1
                wait = POLL
            except Crash:
                self.crash()
                return
            assert sweep.set_aside == 0, "a schedule was held: see its row"
        w.at(min(max(wait, 0.001), POLL), lambda: self._step(sweep))


class Planner:
    """A user's process that publishes, triggers, pauses: repeats what it has no answer to."""

    def __init__(self, sim: ScheduleSimulation) -> None:
        self.sim = sim
        self.published: list[tuple[str, Published]] = []
        self.triggered: dict[tuple[str, str], FireRow] = {}
        self.pauses: list[tuple[float, float]] = []

    def nap(self, where: str) -> None:
        self.sim.world.nap(self.sim.world.rng.random() * 2)

    def _insist(self, work: Callable[[Transaction], Any], answered: Callable[[Any], None]) -> None:
        w = self.sim.world
        try:
            found = w.act(self, lambda: self.sim.database.run(work))
        except (StoreError, Crash):
            w.at(0.2 + w.rng.random(), lambda: self._insist(work, answered))
            return
        answered(found)

    def publish(self, name: str, definition: Definition) -> None:
        digest = fingerprint(msgspec.to_builtins(definition))

        def answered(published: Published | None) -> None:
            if published is not None:
                self.published.append((name, published))
                return
            self.sim.world.probes["schedules: published while one was due"] += 1
            self._decide_first(name, lambda: self.publish(name, definition))

        self._insist(lambda tx: schedules.publish(tx, name, definition, digest, "planner"), answered)

    def _decide_first(self, name: str, then: Callable[[], None]) -> None:
        w = self.sim.world
        try:
            w.act(self, lambda: fires.advance(self.sim.database, "default", name, self._new_id, early=True))
        except (StoreError, Crash):
            pass
        w.at(0.1, then)

    def trigger(self, name: str, request: str) -> None:
        def answered(fire: FireRow | None) -> None:
            assert fire is not None
            known = self.triggered.setdefault((name, request), fire)
            assert (known.instant_us, known.task or fire.task) == (fire.instant_us, fire.task), f"request {request} fired twice"

        self._insist(lambda tx: fires.trigger(tx, "default", name, request, "planner", self._new_id), answered)

    def pause(self, name: str, seconds: float) -> None:
        """From when it is answered for so long, as the world sees it: from then on until :meth:`resume` is asked for nothing fires by itself."""
        w = self.sim.world

        def answered(_row: ScheduleRow | None) -> None:
            self.pauses.append((w.now, w.now + seconds))
            w.at(seconds, lambda: self.resume(name))

        self._insist(lambda tx: schedules.pause(tx, "default", name, "planner", ""), answered)

    def resume(self, name: str) -> None:
        self._insist(lambda tx: schedules.resume(tx, "default", name, "planner"), lambda _row: None)

    def _new_id(self) -> str:
        return self.sim.ids.new("task")


class ScheduleSimulation(TaskSimulation):
    """A cluster of task workers, and ``schedulers`` that all fire."""

    def __init__(self, seed: int, faults: Faults, *, schedulers: int = 2, **parts: int) -> None:
        super().__init__(seed, faults, **parts)
        skews = (0, faults.skew_ms, -faults.skew_ms)
        self.planner = Planner(self)
        self.schedulers = [SimScheduler(self, skews[i % 3]) for i in range(schedulers)]
        self.world.at(1.0, self._trouble)

    def definition(self, spec: Spec, script: Script | None = None, **rules: Any) -> Definition:
        """What a version says; its tasks follow the script."""
        return Definition(spec=spec, rules=Rules(**rules), request=self.task("schedule", script or Script(), id="schedule"))

    def set_database_clock(self, skew_ms: int) -> None:
        """Somebody sets the clock of the database's machine."""
        self.database_clock.skew_ms = skew_ms

    def schedules(self) -> dict[str, ScheduleRow]:
        """Every schedule by its name."""
        found: dict[str, ScheduleRow] = self._read(lambda tx: {r["name"]: to(ScheduleRow, r) for r in tx.rows(tx.t.schedule.select())})
        return found

    def fires(self, name: str) -> list[FireRow]:
        """All of a schedule, by instant."""

        def work(tx: Transaction) -> list[FireRow]:
            t = tx.t.fire
            rows = tx.rows(t.select().where(t.c.schedule == name).order_by(t.c.instant_us))
            return [to(FireRow, {k: v for k, v in r.items() if k != "rev"}) for r in rows]

        found: list[FireRow] = self._read(work)
        return found

    def versions(self, name: str) -> list[tuple[int, Definition]]:
        """When each version was published, µs, and what it says."""
        rows = self._read(lambda tx: schedules.versions(tx, "default", name))
        return [(v.created_us, msgspec.json.decode(v.definition, type=Definition)) for v in rows]

    def check(self) -> None:
        """What must hold at every moment: of a schedule that allows no overlap at most one run is not over."""
        super().check()
        open_runs: dict[str, list[str]] = {}
        for key, origin, state in self._read(self._open_runs):
            open_runs.setdefault(origin.split(":")[1], []).append(f"{key} is {state}")
        for name, runs in open_runs.items():
            assert len(runs) == 1 or not self._alone(name), f"seed {self.world.seed}: runs of {name} overlap: {runs}"

    def _open_runs(self, tx: Transaction) -> list[tuple[str, str, str]]:
        t = tx.t.task
        found = tx.rows(t.select().where(t.c.settled_us == 0, t.c.origin.startswith("schedule:")))
        return [(r["key"], r["origin"], r["state"]) for r in found]

    def _alone(self, name: str) -> bool:
        """Whether no version of it allows overlaps; asked for when there is one."""
        return all(d.rules.overlap is not Overlap.ALLOW for _, d in self.versions(name))

    def _trouble(self) -> None:
        """Once a simulated second."""
        w = self.world
        for scheduler in self.schedulers:
            if scheduler.sweep is None or scheduler.paused:
                continue
            if w.strikes(w.faults.crash, "crash: scheduler"):
                scheduler.crash()
            elif w.strikes(w.faults.pause, "pause: scheduler"):
                scheduler.paused = True
                w.at(0.5 + w.rng.random() * 8, scheduler.goes_on)
        if w.now < w.faults.until:
            w.at(1.0, self._trouble)
