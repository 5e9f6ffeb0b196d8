"""Embedded mode: coordinator, node and subtasks as threads of this process, SQLite, no broker. The same code as in production.

::

    with EmbeddedCluster(pipelines) as cluster:
        cluster.run("wordcount")

What must never happen here: code that production does not run.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog

from millstream_coordinator.coordinator import Coordinator
from millstream_coordinator.loop import CoordinatorLoop
from millstream_coordinator.operations import Operations
from millstream_coordinator.schedule_sweep import ScheduleSweep
from millstream_schema.connectors import SnapshotStorage
from millstream_schema.errors import ConfigurationError
from millstream_schema.hints import JobHint, NodeHint
from millstream_schema.ports import SystemChance, SystemClock, SystemIds
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.rows import JobRow
from millstream_tasks.node import Node, NodeSettings, NoEvents
from millstream_tasks.opening import open_storage
from millstream_tasks.shell.node_loop import NodeLoop
from millstream_tasks.shell.threads import ThreadLauncher

from .client import Jobs
from .installation import Installation
from .pipelines import Pipelines
from .sweeps import task_sweeps


class _LocalHints:
    """Hints within the process: a call."""

    def __init__(self) -> None:
        self.node: NodeLoop | None = None
        self.coordinator: CoordinatorLoop | None = None
        self.changed = threading.Event()

    def to_node(self, hint: NodeHint) -> None:
        if self.node is not None:
            self.node.hint(hint)
        self.changed.set()

    def to_coordinator(self, hint: JobHint) -> None:
        if self.coordinator is not None:
            self.coordinator.hint(hint)
        self.changed.set()


class EmbeddedCluster:
    """A cluster of one process.

    ``directory`` holds the database and the checkpoints and may be used again to go on; without it a temporary one is made and removed. ``encode``: edges go through the codec
    as between processes. ``slots``: subtasks at once.
    """

    def __init__(
        self,
        pipelines: Pipelines,
        *,
        directory: str | Path | None = None,
        database: str | None = None,
        slots: int = 64,
        encode: bool = False,
    ) -> None:
        if slots < 1:
            raise ConfigurationError(f"slots must be at least 1, not {slots}: nothing could run")
        self._pipelines = pipelines
        self._temporary = tempfile.TemporaryDirectory(prefix="millstream-") if directory is None else None
        self._directory = Path(self._temporary.name if self._temporary else directory or "").absolute()
        self._installation = Installation.local(self._directory, **({} if database is None else {"database": database}))
        self._slots = slots
        self._encode = encode
        self._threads: list[threading.Thread] = []
        self._ids = SystemIds()

    def __enter__(self) -> EmbeddedCluster:
        self._directory.mkdir(parents=True, exist_ok=True)
        if not structlog.is_configured():  # the library's own default shows every debug line
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
        clock = SystemClock()
        i = self._installation
        self.database = Database(i.database, clock, prefix=i.table_prefix, timeout_ms=i.idle_in_transaction_ms)
        try:
            self._start(clock)
        except BaseException:  # whoever fails to enter does not come to __exit__
            self._close()
            raise
        return self

    def _start(self, clock: SystemClock) -> None:
        i = self._installation
        create_schema(self.database)
        self.operations = Operations(self.database)
        self._hints = _LocalHints()
        self.jobs = Jobs(
            self._installation,
            self._pipelines,
            hints=self._hints,
            clock=clock,
            ids=self._ids,
            database=self.database,
            changed=self._hints.changed,
        )
        chance = SystemChance()
        self._coordinator = Coordinator(
            self.database, self._hints, clock, chance, self._storage, self._ids.new("coordinator"), 10_000,
            tasks=task_sweeps(self.database, clock, chance, self._ids, 10_000),
            schedules=ScheduleSweep(self.database, clock, self._ids, i.poll_ms / 1000),
        )  # fmt: skip
        self._coordinator_loop = CoordinatorLoop(self._coordinator)
        self._node_loop = NodeLoop()
        self._launcher = ThreadLauncher(
            self._pipelines.registry,
            clock,
            self._storage,
            self._node_loop.wake,
            encode=self._encode,
            lock_timeout=i.idle_in_transaction_ms / 1000,
        )
        settings = NodeSettings(name="embedded", slots=self._slots)
        info, counts = {"mode": "embedded"}, self._coordinator.counts
        node = Node(self.database, self._hints, clock, self._ids, self._launcher, settings, info, NoEvents(), counts)
        self._node_loop.node = node
        self._hints.node, self._hints.coordinator = self._node_loop, self._coordinator_loop
        self._spawn("node", lambda: self._node_loop.run(node))
        self._spawn("coordinator", self._coordinator_loop.run)

    def _spawn(self, name: str, target: Any) -> None:
        thread = threading.Thread(target=target, name=f"millstream-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _storage(self, url: str) -> SnapshotStorage:
        return open_storage(url or self._installation.checkpoints, self._installation.idle_in_transaction_ms / 1000)

    def submit(self, pipeline: str, **submission: Any) -> str:
        """Submit a job; its id. Takes and raises what :meth:`millstream.client.Jobs.submit` does."""
        return self.jobs.submit(pipeline, **submission).id

    def hint(self, job: str) -> None:
        """Have the coordinator look at a job now."""
        self._hints.to_coordinator(JobHint(job))

    def wait(self, job: str, timeout: float | None = None) -> JobRow:
        """Until the job has ended. Raises JobFailed with the causes, also when commits are left pending; TimeoutError."""
        return self.jobs.wait(job, timeout=timeout)

    def run(self, pipeline: str, *, timeout: float | None = None, **submission: Any) -> JobRow:
        """Submit and wait."""
        return self.wait(self.submit(pipeline, **submission), timeout)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        """End the threads that were started, then give the connections back and remove a temporary directory."""
        if self._threads:
            self._node_loop.stop()
            self._coordinator_loop.stop()
            for thread in self._threads:
                thread.join(10)
            self._launcher.close()
        self.database.close()
        if self._temporary is not None:
            self._temporary.cleanup()
