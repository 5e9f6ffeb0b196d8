"""``millstream dev``: node processes of one machine over AF_UNIX channels and SQLite, control by rows alone. No broker.

The supervisor starts the nodes, starts again those that die, and ends with them: they hang on its pipe. What must never happen here: a node
process that outlives its supervisor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog

from millstream_coordinator.operations import Operations
from millstream_schema.ports import SystemClock
from millstream_schema.states import JobState
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.rows import JobRow
from millstream_tasks.subtask_main import load_registry

from .client import Jobs
from .installation import Installation

log = structlog.get_logger(__name__)


class DevCluster:
    """Nodes of one machine, started and watched.

    ``pipelines``: ``module:attribute``. ``directory`` holds database, sockets and checkpoints, and may be used again; a temporary one by default. ``transport``: AF_UNIX sockets by
    default, or a broker's URL. ``nodes``: how many are started at once; 0 where a job is to be accepted first (:meth:`start_nodes`). ``namespace``: that of ``jobs``.
    ``restart``: nodes that die are started again after a second.
    """

    def __init__(
        self,
        pipelines: str,
        *,
        directory: str | Path | None = None,
        nodes: int = 2,
        slots: int = 8,
        transport: str | None = None,
        database: str | None = None,
        lease_ms: int = 3_000,
        restart: bool = True,
        spares: int = 1,
        namespace: str = "default",
    ) -> None:
        self._namespace = namespace
        self._pipelines = pipelines
        self._temporary = None if directory is not None else tempfile.mkdtemp(prefix="millstream-")
        self.directory = Path(directory or self._temporary or "").absolute()
        changes: dict[str, object] = {"lease_ms": lease_ms}
        changes |= {k: v for k, v in (("transport", transport), ("database", database)) if v is not None}
        self.directory.mkdir(parents=True, exist_ok=True)
        self.installation = Installation.local(self.directory, **changes)
        self._count = nodes
        self._slots = slots
        self._restart = restart
        self._spares = spares
        self._clock = SystemClock()
        self._closing = threading.Event()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> DevCluster:
        i = self.installation
        self.database = Database(i.database, self._clock, prefix=i.table_prefix, timeout_ms=i.idle_in_transaction_ms)
        try:
            create_schema(self.database)
            self.operations = Operations(self.database)
            self.registry = load_registry(self._pipelines)
            self.jobs = Jobs(self.installation, self.registry, self._namespace, database=self.database)
            self.start_nodes(self._count)
            threading.Thread(target=self._supervise, name="millstream-dev", daemon=True).start()
        except BaseException:  # whoever fails to enter does not come to __exit__
            self.close()
            raise
        return self

    def start_nodes(self, count: int) -> None:
        """Start so many more nodes."""
        for i in range(len(self.nodes), len(self.nodes) + count):
            self.start_node(f"node{i}")

    def start_node(self, name: str) -> None:
        """Start a node process; its standard input is the pipe it hangs on."""
        command = [
            sys.executable, "-m", "millstream.node_process", "--pipelines", self._pipelines, "--name", name, "--slots", str(self._slots),
            "--spares", str(self._spares),
        ]  # fmt: skip
        environment = {**os.environ, **self.installation.environment()}
        log_file = (self.directory / f"{name}.log").open("ab")
        self.nodes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file, env=environment, start_new_session=True
        )
        log_file.close()

    def _supervise(self) -> None:
        while not self._closing.wait(1.0):
            for name, process in list(self.nodes.items()):
                if process.poll() is not None and self._restart and not self._closing.is_set():
                    log.warning("node died; starting it again", name=name, code=process.returncode)
                    try:
                        self.start_node(name)
                    except OSError as exc:  # tried again in a second: the supervisor itself must live on
                        log.warning("node cannot be started", name=name, error=str(exc))

    def submit(self, pipeline: str, **submission: Any) -> str:
        """Submit a job; its id. Takes and raises what :meth:`millstream.client.Jobs.submit` does."""
        return self.jobs.submit(pipeline, **submission).id

    def wait(self, job: str, timeout: float, *states: JobState) -> JobRow:
        """Until the job has ended, FAILED or not, or is in one of ``states``. Raises TimeoutError."""
        return self.jobs.wait(job, (*states, JobState.FAILED), timeout)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the nodes that were started, then give the connections back and remove a temporary directory."""
        self._closing.set()
        for process in self.nodes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self.nodes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.database.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
