"""Durable tasks on threads of this process: a worker and a coordinator, for embedded mode and tests of users' programs. The same code as under Celery.

::

    with TaskWorker(installation, handlers) as worker:
        worker.tasks.submit("send_invoice", 7, key="invoice-7")
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import sqlalchemy as sa
import structlog

from millstream_coordinator.coordinator import Coordinator
from millstream_coordinator.loop import CoordinatorLoop
from millstream_coordinator.schedule_sweep import ScheduleSweep
from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.durable.outcomes import Reported
from millstream_schema.durable.progress import Told
from millstream_schema.durable.records import NewTask
from millstream_schema.errors import ConfigurationError
from millstream_schema.hints import NoHints
from millstream_schema.ports import SystemChance, SystemClock, SystemIds
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_tasks.durable.databases import HandlerDatabases
from millstream_tasks.durable.host import HostSettings, TaskHost
from millstream_tasks.durable.threads import ThreadPool
from millstream_tasks.opening import open_storage

from .handlers import Handlers
from .installation import Installation
from .schedules import Schedules
from .sweeps import task_sweeps
from .tasks import Tasks

log = structlog.get_logger(__name__)


class TaskWorker:
    """One worker session on threads. ``slots``: handlers at once; ``queues``: which it serves (the queues of its handlers, if none are given)."""

    def __init__(
        self,
        installation: Installation,
        handlers: Handlers,
        *,
        slots: int = 4,
        queues: tuple[str, ...] = (),
        namespace: str = "default",
        name: str = "embedded",
    ) -> None:
        if slots < 1:
            raise ConfigurationError(f"slots must be at least 1, not {slots}: nothing could run")
        registry = handlers.registry
        if not registry.names():
            raise ConfigurationError("no handler is registered: decorate one with @handlers.task before the worker starts")
        self._installation = installation
        self._handlers = handlers
        self._slots = slots
        self._queues = queues or registry.queues()
        self._namespace = namespace
        self._name = name
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        clock, ids, chance = SystemClock(), SystemIds(), SystemChance()
        inst = self._installation
        _make_directory(inst)
        self.database = Database(inst.database, clock, prefix=inst.table_prefix, timeout_ms=inst.idle_in_transaction_ms)
        try:
            self._start(clock, ids, chance)
        except BaseException:  # whoever fails to enter does not come to __exit__
            self.database.close()
            raise
        return self

    def _start(self, clock: SystemClock, ids: SystemIds, chance: SystemChance) -> None:
        inst = self._installation
        create_schema(self.database)
        self._databases = HandlerDatabases(
            inst.database, inst.table_prefix, inst.idle_in_transaction_ms, clock, self._handlers.registry.databases
        )
        self._pool = ThreadPool(self._handlers.registry, clock, ids, self._slots, self._ended, self._databases, self._told, self._known)
        settings = HostSettings(
            name=self._name, queues=self._queues, handlers=self._handlers.registry.names(), lease_ms=inst.lease_ms,
            margin_ms=inst.lease_ms // 10, renew_ms=inst.renew_ms, poll_ms=inst.poll_ms, slots=self._slots, prefetch=self._slots * 50,
            told=self._handlers.registry.entries(),
        )  # fmt: skip
        self._host = TaskHost(self.database, self._pool, clock, ids, chance, settings, lambda: self._coordinating.counts())
        sweep = task_sweeps(self.database, clock, chance, ids, inst.lease_ms)
        self._coordinating = coordinator = Coordinator(
            self.database, NoHints(), clock, chance,
            lambda url: open_storage(url or inst.checkpoints, inst.idle_in_transaction_ms / 1000),
            ids.new("coordinator"), inst.lease_ms,
            inst.poll_ms / 1000, sweep, ScheduleSweep(self.database, clock, ids, inst.poll_ms / 1000, self.wake),
        )  # fmt: skip
        self._coordinator = CoordinatorLoop(coordinator, inst.poll_ms / 1000)
        self.tasks = Tasks(
            inst, self._handlers, self._namespace, clock=clock, ids=ids, database=self.database, changed=self._changed, wake=self.wake
        )
        self.schedules = Schedules(inst, self._handlers, self._namespace, clock=clock, ids=ids, database=self.database, wake=self.wake)
        self.schedules.sync()
        for name, target in (("tasks", self._serve), ("coordinator", self._coordinator.run)):
            thread = threading.Thread(target=target, name=f"millstream-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give back what has not begun, wait for what runs, settle it."""
        self._stopping.set()
        self._coordinator.stop()
        self._wake.set()
        for thread in self._threads:
            thread.join(self._installation.lease_ms / 1000)
        self._pool.close()
        self._databases.close()
        self.database.close()

    def wake(self, queue: str) -> None:
        """There may be work in a queue."""
        self._host.wake()
        self._wake.set()

    def _ended(self, task: str, fence: int, outcome: Reported, submits: tuple[NewTask, ...], seconds: float) -> None:
        self._host.ended(task, fence, outcome, submits, seconds)
        self._wake.set()

    def _told(self, task: str, fence: int, said: Told) -> None:
        self._host.told(task, fence, said)

    def _known(self, task: str, fence: int, intent: IntentId, call: KnownCall | None) -> None:
        self._host.known(task, fence, intent, call)

    def _serve(self) -> None:
        host = self._host
        while not (host.draining and not host.holding):
            if self._stopping.is_set() and not host.draining:
                host.drain()
            settled = sum(host.answers.values())
            wait = self._step()
            if sum(host.answers.values()) != settled:
                self._changed.set()
            if wait > 0 and (host.holding or not host.draining):
                self._wake.wait(wait)
            self._wake.clear()

    def _step(self) -> float:
        """A failing step is logged and tried again: the thread never dies silently."""
        try:
            return self._host.step()
        except Exception:
            log.exception("a step of the task host failed; it is tried again")
            return 1.0


def _make_directory(installation: Installation) -> None:
    """For a file of SQLite, as ``millstream up`` makes it."""
    url = sa.make_url(installation.database)
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
