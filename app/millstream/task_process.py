"""A worker's task process: claims durable tasks, has them run by handler processes, settles them. Kept by a Celery worker's step, or started by hand.

Beside it works a coordinator, while it holds the lease. It ends when its standard input ends, so that it never outlives who started it. What must never happen here: a handler of a
user's in this process; work that waits for the broker.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from collections.abc import Collection
from typing import Any

import structlog

from millstream_coordinator.coordinator import Coordinator
from millstream_coordinator.loop import CoordinatorLoop
from millstream_coordinator.schedule_sweep import ScheduleSweep
from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.durable.outcomes import Reported
from millstream_schema.durable.progress import Told
from millstream_schema.durable.records import NewTask
from millstream_schema.hints import NoHints
from millstream_schema.ports import SystemChance, SystemClock, SystemIds
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import check_schema
from millstream_tasks.durable.frames import TaskBoot
from millstream_tasks.durable.handlers import HandlerRegistry
from millstream_tasks.durable.host import HostSettings, TaskHost
from millstream_tasks.durable.processes import ProcessPool
from millstream_tasks.opening import open_storage
from millstream_tasks.task_main import load_handlers

from .installation import Installation
from .intake import Intake
from .kept import kept
from .messages import TaskMessages
from .opened import reachable
from .publications import Publications
from .schedules import Schedules
from .sweeps import task_sweeps
from .tasks import Tasks

log = structlog.get_logger("millstream.task_process")  # not __name__: this module is run as __main__
PREFETCH = 200
"""Tasks claimed ahead for each handler process, at most; only short ones are."""
SLOWEST_BEAT_MS = 500
"""Handler processes beat at least so often: a handler may ask to be killed after two seconds of silence, however long the lease."""
DRAIN_SECONDS = 20.0
"""How long a shut-down waits for what runs, before it is ended by its declared effects; below the platform's kill."""


def queues_of(registry: HandlerRegistry, given: tuple[str, ...]) -> tuple[str, ...]:
    """Queues to serve: those given, else those of the handlers."""
    return given or registry.queues()


class TaskProcess:
    """Wires a host, its handler processes and a coordinator to an installation, and runs until stopped."""

    def __init__(
        self,
        installation: Installation,
        registry: HandlerRegistry,
        *,
        handlers: str,
        celery: str,
        name: str,
        processes: int,
        queues: tuple[str, ...],
        drain: float = DRAIN_SECONDS,
        messages: TaskMessages | None = None,
        namespace: str = "default",
        intake: socket.socket | None = None,
        publications: Publications | None = None,
    ) -> None:
        self._publications = publications
        self._drain = drain
        self._messages = messages
        self._queues = queues_of(registry, queues)
        clock, ids, chance, i = SystemClock(), SystemIds(), SystemChance(), installation
        self._clock = clock
        self._database = Database(i.database, clock, prefix=i.table_prefix, timeout_ms=i.idle_in_transaction_ms)
        try:
            with reachable(self._database.url):
                check_schema(self._database)
            self._database.check_durability()
            Schedules(i, registry, namespace, actor=f"worker:{name}", clock=clock, ids=ids, database=self._database).sync()
            self._stopping = threading.Event()
            client = Tasks(i, registry, namespace, clock=clock, ids=ids, database=self._database, wake=self._submitted)
            self._intake = None if intake is None else Intake(intake, client)
            boot = TaskBoot(
                handlers, celery, min(max(100, i.lease_ms // 10), SLOWEST_BEAT_MS), i.database, i.table_prefix, i.idle_in_transaction_ms
            )
            self._pool = ProcessPool(boot, clock, processes, self._ended, self._back, self._told, self._known)
            settings = HostSettings(
                name=name, queues=self._queues, handlers=registry.names(), lease_ms=i.lease_ms, margin_ms=i.lease_ms // 10, renew_ms=i.renew_ms,
                poll_ms=i.poll_ms, slots=processes, prefetch=processes * PREFETCH, told=registry.entries(),
            )  # fmt: skip
            self._host = TaskHost(self._database, self._pool, clock, ids, chance, settings, self._counts, self._settled)
            self._coordinating = coordinator = Coordinator(
                self._database, NoHints(), clock, chance,
                lambda url: open_storage(url or i.checkpoints, i.idle_in_transaction_ms / 1000),
                f"{ids.new('coordinator')}-{os.getpid()}",
                i.lease_ms, i.poll_ms / 1000, task_sweeps(self._database, clock, chance, ids, i.lease_ms, publications),
                ScheduleSweep(self._database, clock, ids, i.poll_ms / 1000, self._submitted),
            )  # fmt: skip
            self._coordinator = CoordinatorLoop(coordinator, i.poll_ms / 1000)
        except BaseException:
            self._database.close()
            raise

    def run(self) -> None:
        """Until :meth:`stop`, then until what runs has ended or the drain's time is over."""
        thread = threading.Thread(target=self._coordinator.run, name="millstream-coordinator", daemon=True)
        thread.start()
        if self._messages is not None:
            self._messages.listen(self._queues, self.woken)
        if self._intake is not None:
            self._intake.start()
        log.info("task process started", queues=self._queues, pid=os.getpid())
        parent = os.getppid()
        try:
            while not self._stopping.is_set() and os.getppid() == parent:
                self._step()
            self._end()
        finally:
            if self._intake is not None:
                self._intake.close()
            self._coordinator.stop()
            thread.join(5)
            self._pool.close()
            if self._messages is not None:
                self._messages.close()
            if self._publications is not None:
                self._publications.close()
            self._database.close()

    def stop(self) -> None:
        """Thread-safe and signal-safe."""
        self._stopping.set()
        self._pool.wake()

    def woken(self) -> None:
        """There may be work. Thread-safe."""
        self._host.wake()
        self._pool.wake()

    def _counts(self) -> dict[str, int]:
        """What this process counts beside its host."""
        dropped = {} if self._messages is None else {"hints_dropped": self._messages.dropped}
        return {**dropped, **self._coordinating.counts()}

    def _settled(self, tasks: Collection[str]) -> None:
        """Their ends are written: who waits for them looks at once."""
        if self._messages is not None:
            self._messages.ended(tasks)

    def _submitted(self, queue: str) -> None:
        """A message, or a schedule's fire, became a task: this worker looks at once, if it is one of its queues; others are told."""
        if queue in self._queues:
            self.woken()
        if self._messages is not None:
            self._messages.wake(queue)

    def _ended(self, task: str, fence: int, outcome: Reported, submits: tuple[NewTask, ...], seconds: float) -> None:
        self._host.ended(task, fence, outcome, submits, seconds)

    def _back(self, task: str, fence: int) -> None:
        self._host.back(task, fence)

    def _told(self, task: str, fence: int, said: Told) -> None:
        self._host.told(task, fence, said)

    def _known(self, task: str, fence: int, intent: IntentId, call: KnownCall | None) -> None:
        self._host.known(task, fence, intent, call)

    def _step(self) -> None:
        """A failing step is logged and tried again: the loop never dies silently."""
        try:
            wait = self._host.step()
        except Exception:
            log.exception("a step of the task host failed; it is tried again")
            self._stopping.wait(1.0)
            wait = 0.0
        self._pool.wait(min(wait, 1.0))

    def _end(self) -> None:
        """Give back at once what has not begun; wait for the rest, the lease renewed meanwhile; then end it by its declared effects."""
        host = self._host
        host.drain()
        self._pool.wake()
        self._step()  # also with nothing in hand: the session's row then says that it takes nothing more
        deadline = self._clock.monotonic() + self._drain
        while host.holding and self._clock.monotonic() < deadline:
            self._step()
        host.abandon("its worker shut down")
        deadline = self._clock.monotonic() + 2.0
        while host.holding and self._clock.monotonic() < deadline:
            self._step()


def main(argv: list[str] | None = None) -> int:
    """``python -m millstream.task_process``: what a supervisor starts."""
    parser = argparse.ArgumentParser(prog="millstream task process")
    parser.add_argument("--handlers", required=True, help="module:attribute of the Handlers object")
    parser.add_argument("--name", required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--queue", action="append", default=[])
    parser.add_argument("--drain", type=float, default=DRAIN_SECONDS)
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--messages", type=int, default=-1, help="descriptor of the socket over which plain Celery messages come")
    parser.add_argument("--celery", default="", help="module:attribute of the Celery application whose broker carries wake-ups")
    args = parser.parse_args(argv)

    def made(installation: Installation, app: Any) -> TaskProcess:
        registry = load_handlers(args.handlers)
        return TaskProcess(
            installation, registry, handlers=args.handlers, celery=args.celery, name=args.name, processes=args.processes, queues=tuple(args.queue),
            drain=args.drain, messages=None if app is None else TaskMessages(app, installation.prefix), namespace=args.namespace,
            intake=None if args.messages < 0 else socket.socket(fileno=args.messages),
            publications=None if app is None else Publications(app, installation.prefix),
        )  # fmt: skip

    return kept(log, "MillstreamTasks", args.name, args.celery, made)


if __name__ == "__main__":
    sys.exit(main())
