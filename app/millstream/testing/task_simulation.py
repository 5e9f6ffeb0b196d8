"""Workers, submitters and sweeps of durable tasks in one simulated world, with faults: the product's own code, driven step by step.

A handler's behaviour is written in its arguments (:class:`Script`), so that a test can say beforehand what must become of every task. What must never happen here: a step of an
actor that is paused or dead; a record of what ran that the product could see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from millstream_coordinator.task_sweep import TaskSweep
from millstream_schema.durable.effects import IntentId, IntentRow, KnownCall
from millstream_schema.durable.outcomes import AnyOutcome, Crashed, GaveUp, Raised, Reported, RetryAsked, Snoozed, Succeeded, Unstarted
from millstream_schema.durable.records import NewTask, Policy, Receipt, TaskRow
from millstream_schema.durable.states import Effects, TaskState
from millstream_schema.errors import CommitUnknown, StoreError
from millstream_schema.store import settling, tasks
from millstream_schema.store.database import Transaction
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.rows import to
from millstream_tasks.durable.host import HostSettings, TaskHost

from .outside import SimDatabase
from .outside_calls import CallingProcess, Calls, Outside
from .world import Crash, Faults, SimChance, SimClock, SimIds, World

LEASE_MS = 3000
MARGIN_MS = 400
HANDLERS = ("work",)
QUEUES = ("default", "other")


class Script(msgspec.Struct, frozen=True):
    """What a simulated handler does: runs about ``seconds``; raises in its first ``fails`` runs, snoozes in its first ``snoozes``; ``end``: how it ends at last.

    ``calls``: it calls the outside instead.
    """

    seconds: float = 0.1
    fails: int = 0
    snoozes: int = 0
    end: str = "return"
    crash: float = 0.0
    obeys: bool = True
    calls: Calls | None = None


class Ran(msgspec.Struct):
    """One run of a handler, as the world saw it."""

    task: str
    fence: int
    session: str
    began: float
    ended: float | None = None
    reported: str = ""
    permit_seq: int = 0
    claimed_us: int = 0


class SimPool:
    """Slots in which scripts run. Killed or crashed with its worker; a worker that is paused reports nothing."""

    def __init__(self, worker: SimWorker, slots: int) -> None:
        self._worker = worker
        self._slots = slots
        self._running: dict[tuple[str, int], Ran] = {}
        self._line: list[TaskRow] = []
        """Handed over beyond the slots."""
        self._deadline = 0.0

    def free(self) -> int:
        return 0 if self._line else self._slots - len(self._running)

    def ahead(self) -> int:
        return 0 if self.free() else self._slots - len(self._line)

    def waiting(self) -> int:
        return len(self._line)

    def give_back(self) -> None:
        line, self._line = self._line, []
        for task in reversed(line):
            self._worker.taken_back(task)

    def start(self, task: TaskRow) -> None:
        if self.free():
            self._begin(task)
        else:
            assert self.ahead() > 0
            self._line.append(task)

    def _next(self) -> None:
        """A slot is free: what was handed over for it begins without the host, unless the lease is over."""
        if not self._line or len(self._running) >= self._slots:
            return
        task = self._line.pop(0)
        if self._worker.sim.world.now < self._deadline:
            self._worker.sim.world.probes["began in the pool"] += 1
            self._begin(task)
        elif self._worker.host is not None:
            self._worker.host.ended(task.id, task.fence, Unstarted(), (), 0.0)

    def _begin(self, task: TaskRow) -> None:
        sim = self._worker.sim
        assert sim.world.now < self._deadline, f"{task.id} began past its lease"
        ran = Ran(task.id, task.fence, task.session, sim.world.now, permit_seq=task.permit_seq, claimed_us=task.claimed_us)
        sim.ran.append(ran)
        self._running[task.id, task.fence] = ran
        script = msgspec.json.decode(task.args, type=Script)
        seconds = script.seconds * (0.5 + sim.world.rng.random())
        sim.world.at(seconds, lambda: self._end(task, script, ran))

    def cancel(self, task: str, fence: int) -> None:
        """The script obeys at its end, or does not. One that has not begun is given back as such."""
        if self._left_line(task, fence):
            if self._worker.host is not None:
                self._worker.host.ended(task, fence, Unstarted(), (), 0.0)
            return
        self._worker.sim.world.probes["handler told to cancel"] += 1

    def lease(self, deadline: float) -> None:
        """What runs past it is killed by the host, or with the worker; nothing may begin past it."""
        self._deadline = deadline

    def tick(self) -> float:
        """A script keeps its own time."""
        return 1.0

    def kill(self, task: str, fence: int) -> None:
        if not self._left_line(task, fence):
            self._running.pop((task, fence), None)

    def _left_line(self, task: str, fence: int) -> bool:
        before = len(self._line)
        self._line = [t for t in self._line if (t.id, t.fence) != (task, fence)]
        return len(self._line) < before

    def dies(self) -> None:
        self._running.clear()
        self._line.clear()

    def _end(self, task: TaskRow, script: Script, ran: Ran) -> None:
        worker = self._worker
        if (task.id, task.fence) not in self._running or worker.host is None or worker.pool is not self:
            return
        if worker.paused:
            worker.sim.world.at(0.3, lambda: self._end(task, script, ran))
            return
        if script.calls is None:
            self._say(task, ran, self._outcome(task, script))
            return
        sim = worker.sim
        process = CallingProcess(
            sim.world,
            sim.outside,
            sim.database,
            sim.ids,
            lambda: (task.id, task.fence) in self._running,
            lambda i, c: self._know(task, i, c),
        )
        outcome = process.run(task, script.calls)
        if outcome is None and worker.pool is self and sim.world.faults.crash and sim.world.rng.random() < 0.5:
            worker.crash()  # and everything beside it
        else:
            self._say(task, ran, Crashed("exit code -9") if outcome is None else outcome)

    def _say(self, task: TaskRow, ran: Ran, outcome: Reported) -> None:
        """Report to the worker, if it is there still; also what a zombie has to say."""
        worker = self._worker
        if worker.host is None or worker.pool is not self:
            return
        if worker.paused:
            worker.sim.world.at(0.3, lambda: self._say(task, ran, outcome))
            return
        self._running.pop((task.id, task.fence), None)
        self._next()
        ran.ended = worker.sim.world.now
        ran.reported = type(outcome).__name__
        worker.host.ended(task.id, task.fence, outcome, (), ran.ended - ran.began)
        worker.poke()

    def _know(self, task: TaskRow, intent: IntentId, call: KnownCall | None) -> None:
        """On the pipe to the worker, which reads it when it goes on."""
        worker = self._worker
        if worker.host is not None and worker.pool is self:
            worker.sim.world.probes["a call's outcome is kept by its worker"] += call is not None
            worker.host.known(task.id, task.fence, intent, call)

    def _outcome(self, task: TaskRow, script: Script) -> AnyOutcome:
        w = self._worker.sim.world
        if script.crash and w.rng.random() < script.crash:
            return Crashed("exit code -11")
        if task.failures < script.fails:
            return Raised("ValueError", "not yet") if task.failures % 2 else RetryAsked(200_000, "later")
        if task.snoozes < script.snoozes:
            return Snoozed(300_000)
        if script.end == "raise":
            return Raised("ValueError", "never")
        if script.end == "fail":
            return GaveUp("for good")
        return Succeeded(msgspec.json.encode([task.id, task.fence]).decode())


class SimWorker:
    """A worker process; started again after a crash."""

    def __init__(self, sim: TaskSimulation, name: str, slots: int) -> None:
        self.sim = sim
        self.name = name
        self.slots = slots
        self.paused = False
        self.host: TaskHost | None = None
        self.pool = SimPool(self, slots)
        self._boot()

    def _boot(self) -> None:
        sim = self.sim
        self.pool = SimPool(self, self.slots)
        settings = HostSettings(
            name=self.name,
            queues=QUEUES,
            handlers=HANDLERS,
            lease_ms=LEASE_MS,
            margin_ms=MARGIN_MS,
            renew_ms=800,
            poll_ms=500,
            slots=self.slots,
            prefetch=2,
        )
        host = self.host = TaskHost(sim.database, self.pool, SimClock(sim.world), sim.ids, SimChance(sim.world), settings)
        sim.world.at(sim.world.rng.random() * 0.3, lambda: self._step(host))

    def taken_back(self, task: TaskRow) -> None:
        if self.host is not None:
            self.host.back(task.id, task.fence)

    def nap(self, where: str) -> None:
        self.paused = True
        self.sim.world.nap(self.sim.world.rng.random() * 8)
        self.paused = False

    def goes_on(self) -> None:
        self.paused = False

    def poke(self) -> None:
        host = self.host
        if host is not None:
            self.sim.world.at(0.006, lambda: self._now(host))

    def _now(self, host: TaskHost) -> None:
        self._once(host)

    def _once(self, host: TaskHost) -> float:
        if host is not self.host or self.paused:
            return 0.5
        before = host.session
        try:
            wait: float = self.sim.world.act(self, host.step)
        except Crash:
            self.crash()
            return 0.5
        self.sim.world.probes["session lost"] += bool(before) and host.session != before
        return wait

    def _step(self, host: TaskHost) -> None:
        if host is self.host:
            wait = self._once(host)
            self.sim.world.at(min(max(wait, 0.01), 0.5), lambda: self._step(host))

    def crash(self) -> None:
        """kill -9 with everything that runs in it."""
        if self.host is not None:
            self.sim.world.probes["worker died while tasks ran"] += self.pool.free() < self.slots
        self.host = None
        self.pool.dies()
        self.sim.world.at(0.5 + self.sim.world.rng.random() * 3, self._boot)

    def shut_down(self) -> None:
        """SIGTERM: what has not begun goes back, what runs is killed after a while; then the next one starts."""
        host = self.host
        if host is None or self.paused:
            return
        self.sim.world.probes["drain"] += 1
        host.drain()
        self.sim.world.at(0.4, lambda: self._abandon(host))

    def _abandon(self, host: TaskHost) -> None:
        if host is self.host:
            host.abandon("shut down")
            self.sim.world.at(0.5, lambda: self.crash() if host is self.host else None)


class SimSweeper:
    """A coordinator's sweep over tasks."""

    def __init__(self, sim: TaskSimulation) -> None:
        self.sim = sim
        self.paused = False
        self._boot()

    def _boot(self) -> None:
        sim = self.sim
        sweep = self.sweep = TaskSweep(sim.database, SimClock(sim.world), SimChance(sim.world), LEASE_MS, MARGIN_MS)
        sim.world.at(sim.world.rng.random(), lambda: self._step(sweep))

    def nap(self, where: str) -> None:
        self.paused = True
        self.sim.world.nap(self.sim.world.rng.random() * 6)
        self.paused = False

    def _step(self, sweep: TaskSweep) -> None:
        if sweep is not self.sweep:
            return
        if not self.paused:
            try:
                self.sim.world.act(self, sweep.sweep)
            except StoreError:
                self.sim.world.probes["sweep met an outage"] += 1
            except Crash:
                self.sim.world.at(0.5 + self.sim.world.rng.random() * 3, self._boot)
                return
            assert sweep.set_aside == 0, "the sweep set something aside: see its log"
            self.sim.world.probes["guard closed"] += sweep.guarded
        self.sim.world.at(0.5, lambda: self._step(sweep))


class Caller:
    """A user's process that submits and cancels: repeats what it has no answer to, with the same key."""

    def __init__(self, sim: TaskSimulation) -> None:
        self.sim = sim
        self.receipts: dict[str, Receipt] = {}

    def nap(self, where: str) -> None:
        self.sim.world.nap(self.sim.world.rng.random() * 2)

    def submit(self, new: NewTask) -> None:
        w = self.sim.world
        again = msgspec.structs.replace(new, id=self.sim.ids.new("task"))
        try:
            receipt: Receipt = w.act(self, lambda: self.sim.database.run(lambda tx: tasks.submit(tx, again)))
        except (StoreError, Crash):
            w.at(0.2 + w.rng.random(), lambda: self.submit(new))
            return
        assert not receipt.conflict
        known = self.receipts.setdefault(new.key, receipt)
        assert known.task == receipt.task, f"two tasks for key {new.key}"
        w.probes["submission replayed"] += receipt.replayed
        if w.strikes(0.1, "submitted twice"):
            w.at(w.rng.random() * 3, lambda: self.submit(new))

    def cancel(self, task: str) -> None:
        w = self.sim.world
        try:
            state = w.act(self, lambda: self.sim.database.run(lambda tx: settling.cancel(tx, task)))
        except (CommitUnknown, StoreError, Crash):
            w.at(0.3, lambda: self.cancel(task))
            return
        w.probes[f"cancel asked of {state}"] += 1


class TaskSimulation:
    """A cluster of task workers. ``ran``: everything that handlers did."""

    def __init__(self, seed: int, faults: Faults, *, workers: int = 3, slots: int = 3, sweepers: int = 2) -> None:
        self.world = World(seed, faults)
        self.ids = SimIds(self.world)
        self.database_clock = SimClock(self.world)
        self.database = SimDatabase(self.world, self.database_clock)
        create_schema(self.database)
        self.ran: list[Ran] = []
        self.outside = Outside(self.world)
        self.capacities: dict[str, int] = {}
        self.caller = Caller(self)
        self.workers = [SimWorker(self, f"w{i}", slots) for i in range(workers)]
        self.sweepers = [SimSweeper(self) for _ in range(sweepers)]
        self.world.at(1.0, self._chaos)

    def task(self, key: str, script: Script, **changes: Any) -> NewTask:
        """A request of handler ``work`` with a behaviour of its own."""
        base = NewTask(
            id="", namespace="default", handler="work", key=key, digest=f"1:{key}", queue="default", args=msgspec.json.encode(script).decode(),
            effects=Effects.IDEMPOTENT, policy=Policy(attempts=5, delay_ms=100, max_delay_ms=1000, losses=200),
        )  # fmt: skip
        return msgspec.structs.replace(base, **changes)

    def database_time(self) -> int:
        """The database's clock, µs."""
        return self.database_clock.now_us()

    def rows(self) -> dict[str, TaskRow]:
        """Every task by its key."""
        found: dict[str, TaskRow] = self._read(lambda tx: {r["key"]: to(TaskRow, r) for r in tx.rows(tx.t.task.select())})
        return found

    def intents(self) -> list[IntentRow]:
        """What is known of calls to the outside."""
        found: list[IntentRow] = self._read(lambda tx: [to(IntentRow, r) for r in tx.rows(tx.t.intent.select())])
        return found

    def _read(self, work: Callable[[Transaction], Any]) -> Any:
        current, self.world.current = self.world.current, None
        try:
            return self.database.read(work)
        finally:
            self.world.current = current

    def check(self) -> None:
        """What must hold at every moment: permits are held by as many tasks as they say, never more than the largest capacity they had; nothing that is over has an open call."""

        def work(tx: Transaction) -> None:
            t = tx.t.task
            over = tx.row(t.select().where(t.c.open_intents > 0, t.c.settled_us > 0))
            assert over is None, f"it is over with an open call: {over}"
            held: dict[str, int] = {}
            for row in tx.rows(t.select().where(t.c.permit_held == 1)):
                task = to(TaskRow, row)
                held[task.permit_id] = held.get(task.permit_id, 0) + 1
                assert not task.state.settled and task.state is not TaskState.UNKNOWN, f"{task.key} is {task.state} and holds a permit"
            for row in tx.rows(tx.t.permit.select()):
                assert row["held"] == held.get(row["id"], 0), f"permit {row['id']}: {row['held']}, tasks {held}"
                most = self.capacities[row["id"]] = max(row["capacity"], self.capacities.get(row["id"], 0))
                assert row["held"] <= most, f"permit {row['id']}: {row['held']} of {most}"

        self._read(work)

    def run(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Run until ``done``, looked at five times a second together with :meth:`check`; False at the limit."""
        last = [-1.0]

        def holds() -> bool:
            if self.world.now - last[0] < 0.2:
                return False
            last[0] = self.world.now
            self.check()
            return done()

        return self.world.run(holds, self.world.now + seconds) or done()

    def _chaos(self) -> None:
        """Once a simulated second."""
        w = self.world
        for worker in self.workers:
            if worker.host is None or worker.paused:
                continue
            if w.strikes(w.faults.crash, "crash: worker"):
                worker.crash()
            elif w.strikes(w.faults.pause, "pause: worker"):
                worker.paused = True
                w.at(0.5 + w.rng.random() * 8, worker.goes_on)
            elif w.strikes(w.faults.crash / 2, "shut-down: worker"):
                worker.shut_down()
        if w.reachable("store") and w.strikes(w.faults.away, "away: store"):
            w.away["store"] = w.now + 0.3 + w.rng.random() * 9
        if w.now < w.faults.until:
            w.at(1.0, self._chaos)
