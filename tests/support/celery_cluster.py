"""A Millstream installation as it runs in production, to be broken: Celery workers and beat as child processes, watched as a service manager would.

Called by the acceptance and chaos tests and by ``python -m examples.flights.chaos``. What must never happen here: a signal to a process that does not carry this cluster's mark,
or a process left behind.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import psutil
import sqlalchemy as sa
from celery import Celery

from millstream.client import Jobs
from millstream.installation import Installation
from millstream.pipelines import Pipelines
from millstream_schema.ports import SystemClock
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.store import registry
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.rows import JobRow

ROOT = Path(__file__).resolve().parents[2]
MARK = "MILLSTREAM_TEST_CLUSTER"
RESTART_PAUSE = 0.5


def settings(**changes: Any) -> StreamSettings:
    """Settings of jobs that are broken on purpose: short leases, frequent epochs, a budget that many faults do not use up."""
    values: dict[str, Any] = {
        "epoch_interval_ms": 300,
        "alignment_ms": 15_000,
        "restart": RestartPolicy(kind="fixed", delay_ms=100, failures=10_000, stalls=10_000),
    }
    return StreamSettings(**(values | changes)).checked()


def eventually(what: str, look: Callable[[], Any], timeout: float = 60.0, every: float = 0.05) -> Any:
    """The first true answer of ``look``; TimeoutError naming ``what`` and the last error. Errors are taken for "not yet"."""
    deadline = time.monotonic() + timeout
    problem = ""
    while time.monotonic() < deadline:
        try:
            found = look()
        except Exception as exc:  # a server is down just now
            problem = f"; last error {type(exc).__name__}: {exc}"
        else:
            problem = ""
            if found:
                return found
        time.sleep(every)
    raise TimeoutError(f"not within {timeout:.0f} s: {what}{problem}")


def marked() -> list[tuple[psutil.Process, str]]:
    """Every live process of any cluster, with its mark: ``{pid of its test run}:{when that started}:{random}``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
            if mark:
                found.append((process, mark))
    return found


def sweep() -> None:
    """End what a killed test run left behind; safe beside other runs."""
    for process, mark in marked():
        owner, started = mark.split(":")[:2] if mark.count(":") == 2 else ("0", "0")
        with contextlib.suppress(psutil.NoSuchProcess):
            if not psutil.pid_exists(int(owner)) or f"{psutil.Process(int(owner)).create_time():.2f}" != started:
                process.kill()


@dataclass
class Program:
    """One thing a service manager would keep running. ``down``: it is meant to be off."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    down: bool = True
    ended_at: float = 0.0
    starts: int = 0


@dataclass
class CeleryCluster:
    """``celery -A application worker`` × ``workers`` and each of ``beats`` over one installation. Times are in seconds.

    ``home``: logs, checkpoints and beat's schedule. ``broker``: Celery's; ``transport``: the channels' (the broker by default). ``application``: what ``-A`` gets; ``pipelines``:
    ``module:attribute``. ``supervise``: what dies is started again after half a second.
    """

    home: Path
    broker: str
    database_url: str
    application: str = "examples.flights"
    pipelines: str = "examples.flights.jobs:pipelines"
    transport: str = ""
    checkpoints: str = ""
    workers: int = 2
    beats: tuple[str, ...] = ("beat",)
    lease_ms: int = 2500
    slots: int = 8
    environment: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, tuple[list[str], Mapping[str, str]]] = field(default_factory=dict)
    """Program → what its command is put behind (``ip netns exec …``), and variables of its own."""
    prefix: str = field(default_factory=lambda: "m" + secrets.token_hex(3))

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.mark = f"{os.getpid()}:{psutil.Process().create_time():.2f}:{secrets.token_hex(4)}"
        self.installation = Installation(
            database=self.database_url, transport=self.transport or self.broker, checkpoints=self.checkpoints or (self.home / "checkpoints").as_uri(),
            prefix=self.prefix, lease_ms=self.lease_ms, poll_ms=200,
        )  # fmt: skip
        celery = [sys.executable, "-m", "celery", "-A", self.application]
        quiet = ["--without-gossip", "--without-mingle", "-c", "1", "-l", "INFO", "-Q", f"{self.prefix}.tasks"]
        self.programs = {
            f"w{i}": self._program(f"w{i}", [*celery, "worker", "-n", f"w{i}@{self.prefix}", *quiet]) for i in range(self.workers)
        }
        for name in self.beats:
            self.programs[name] = self._program(name, [*celery, "beat", "-s", str(self.home / f"{name}.db"), "-l", "INFO"])
        self._closing = threading.Event()
        self._lock = threading.RLock()
        self.database = Database(self.database_url, SystemClock(), prefix=self.installation.table_prefix)
        module, _, attribute = self.pipelines.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, Pipelines)
        self._registry = found

    def _program(self, name: str, command: list[str]) -> Program:
        return Program(name, command, self.home / f"{name}.log")

    # -- life

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start everything; returns when every worker's node has registered."""
        sweep()
        create_schema(self.database)
        self.jobs = Jobs(self.installation, self._registry)
        for name in self.programs:
            self.up(name)
        threading.Thread(target=self._supervise, name="cluster-supervisor", daemon=True).start()
        self.await_nodes(self.workers)
        return self

    def variables(self) -> dict[str, str]:
        """What describes this cluster to a child process."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return {
            **os.environ, **self.installation.environment(), **self.environment, "MILLSTREAM_BROKER_URL": self.broker, "MILLSTREAM_SLOTS": str(self.slots),
            "PYTHONPATH": path, MARK: self.mark,
        }  # fmt: skip

    def up(self, name: str) -> None:
        """Start one program, unless it runs."""
        with self._lock:
            program = self.programs[name]
            program.down = False
            if program.process is None or program.process.poll() is not None:
                self._spawn(program)

    def _spawn(self, program: Program) -> None:
        before, own = self.places.get(program.name, ([], {}))
        log: IO[bytes]
        with program.log.open("ab") as log:
            program.process = subprocess.Popen(
                [*before, *program.command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**self.variables(), **own}, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        program.starts += 1
        program.ended_at = 0.0

    def _supervise(self) -> None:
        while not self._closing.wait(0.1):
            with self._lock:
                for program in self.programs.values():
                    if program.down or self._closing.is_set() or program.process is None or program.process.poll() is None:
                        continue
                    program.ended_at = program.ended_at or time.monotonic()
                    if time.monotonic() >= program.ended_at + RESTART_PAUSE:
                        self._spawn(program)

    def off(self, name: str) -> None:
        """SIGKILL to one program; it stays off."""
        with self._lock:
            program = self.programs[name]
            program.down = True
            assert program.process is not None
            program.process.kill()
        program.process.wait(10)

    def shut_down(self, name: str, timeout: float = 30.0) -> int:
        """Warm shutdown (SIGTERM), as a deployment does it; the exit code. It stays off."""
        with self._lock:
            program = self.programs[name]
            program.down = True
            assert program.process is not None
            program.process.terminate()
        return program.process.wait(timeout)

    def close(self) -> None:
        """Kill everything that carries the mark. May be repeated."""
        with self._lock:
            self._closing.set()
            for program in self.programs.values():
                program.down = True
        for _ in range(3):  # a node process may be starting a spare
            for process in self.members():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for program in self.programs.values():
            if program.process is not None:
                program.process.wait(10)
        if hasattr(self, "jobs"):
            self.jobs.close()
        self.database.close()

    # -- who is who

    def members(self) -> list[psutil.Process]:
        """Every live process of this cluster: each inherits the mark."""
        return [process for process, mark in marked() if mark == self.mark]

    def main(self, name: str) -> psutil.Process:
        """The main process of a program, which runs."""

        def look() -> psutil.Process | None:
            process = self.programs[name].process
            return psutil.Process(process.pid) if process is not None and process.poll() is None else None

        found: psutil.Process = eventually(f"{name} runs", look)
        return found

    def node(self, name: str) -> psutil.Process:
        """The node process of a worker, which runs."""

        def look() -> psutil.Process | None:
            return next((p for p in self.main(name).children() if "millstream.node_process" in p.cmdline()), None)

        found: psutil.Process = eventually(f"node process of {name} runs", look)
        return found

    def subtasks(self, name: str) -> list[psutil.Process]:
        """Subtask processes of a worker that have work: a spare has but one thread."""
        found = []
        for process in self.node(name).children():
            with contextlib.suppress(psutil.Error):
                if "millstream_tasks.subtask_main" in process.cmdline() and process.num_threads() > 1:
                    found.append(process)
        return found

    def tree(self, name: str) -> list[psutil.Process]:
        """A worker's main process, its pool, its node process and all subtasks."""
        main = self.main(name)
        return [main, *main.children(recursive=True)]

    def leader(self) -> str:
        """Name of the worker whose node process holds the coordinator's lease."""

        def look() -> str | None:
            holder = self.coordinator()["holder"]
            return next((n for n in self.worker_names if holder.endswith(f"-{self.node(n).pid}")), None)

        found: str = eventually("a worker holds the coordinator's lease", look)
        return found

    @property
    def worker_names(self) -> list[str]:
        return [n for n in self.programs if n not in self.beats]

    def running_workers(self) -> list[str]:
        """Workers that have subtasks at work now."""
        return [n for n in self.worker_names if not self.programs[n].down and self.subtasks(n)]

    # -- rows

    def coordinator(self) -> dict[str, Any]:
        """The coordinator's row: holder, term."""
        t = self.database.tables.coordinator
        row = self.database.read(lambda tx: tx.row(sa.select(t).where(t.c.id == "coordinator")))
        return row or {"holder": "", "term": 0}

    def node_ids(self) -> dict[str, str]:
        """Registered name → newest id of its live node."""
        return {n.name: n.id for n in sorted(self.database.read(registry.active_nodes), key=lambda n: n.started_us)}

    def await_nodes(self, count: int, timeout: float = 60.0) -> None:
        eventually(f"{count} nodes are registered", lambda: len(self.node_ids()) >= count, timeout)

    def row(self, job: str) -> JobRow:
        """The job's row; asked again while the database is away."""
        found: JobRow = eventually(f"job {job} can be read", lambda: self.jobs.find(job))
        return found

    def durable(self, job: str, above: int, timeout: float = 90.0) -> int:
        """Until an epoch above ``above`` is durable (or the job has ended); the newest. AssertionError when the job failed."""

        def look() -> JobRow | None:
            row = self.jobs.find(job)
            return row if row.newest_durable > above or row.state.ended else None

        try:
            found: JobRow = eventually(f"an epoch above {above} of {job} is durable", look, timeout)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc}\n{self.diagnosis(job)}") from None
        assert found.state != "FAILED", f"{found.reason}\n{self.diagnosis(job)}"
        return found.newest_durable

    def finished(self, job: str, timeout: float = 90.0, state: str = "FINISHED") -> JobRow:
        """Until the job has ended, in ``state``."""

        def look() -> JobRow | None:
            row = self.jobs.find(job)
            return row if row.state.ended else None

        try:
            found: JobRow = eventually(f"job {job} ends", look, timeout)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc}\n{self.diagnosis(job)}") from None
        assert found.state == state, f"{found.state}: {found.reason}\n{self.diagnosis(job)}"
        return found

    def diagnosis(self, job: str) -> str:
        """What a failed test prints: history, subtasks, tails of logs."""
        lines = []
        with contextlib.suppress(Exception):
            status = self.jobs.status(job)
            lines += [f"{status['state']} generation {status['generation']} durable {status['newest_durable']}: {status['reason']}"]
            lines += [f"  {s['subtask']} {s['state']} {s['node']} {s['detail'][:200]}" for s in status["subtasks"]]
            lines += [f"  {h['at_us'] / 1e6:.2f} {h['event']} {h['detail'][:200]}" for h in reversed(status["history"])]
        for name, program in self.programs.items():
            tail = program.log.read_text(errors="replace")[-2500:] if program.log.exists() else ""
            lines.append(f"--- {name} ({program.starts} starts)\n{tail}")
        return "\n".join(lines)

    # -- faults

    @staticmethod
    def kill(process: psutil.Process) -> None:
        """SIGKILL to one process that was looked up here; one that is gone meanwhile is gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    @contextlib.contextmanager
    def stopped(self, processes: list[psutil.Process]) -> Iterator[None]:
        """SIGSTOP to all; SIGCONT at the end, children first, so that they go on before anybody can tell them not to."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in reversed(processes):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    # -- ordinary tasks

    def send(self, task: str, *args: Any) -> None:
        """Send a task to the workers' queue."""
        with Celery("cluster-client", broker=self.broker) as app:
            app.conf.update(task_serializer="json")
            app.send_task(task, args=args, queue=f"{self.prefix}.tasks", ignore_result=True)
