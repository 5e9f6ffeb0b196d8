"""Millstream inside Celery: ``Millstream(app, ...)`` installs the worker step and, for stream jobs, the beat entry and
the routes; ``celery -A proj worker`` and ``beat`` are all that runs.

The step belongs to the *Worker* blueprint (a Consumer step would stop at each broker blip). It keeps one node process alive: exec'd, joined by a pipe, no thread of ours where
Celery forks. What must never happen here: coordinator work in the task pool, a node process that outlives its worker.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery, bootsteps

from millstream_schema.errors import ConfigurationError
from millstream_tasks.task_main import load_handlers

from .celery_tasks import register
from .frameworks import FrameworkTasks
from .handlers import Handlers
from .installation import Installation
from .intake import IntakeLink, SelfPipe
from .messages import ADVANCE, TICK, TaskMessages, coordinator_queue
from .tasks import Tasks

log = logging.getLogger(__name__)  # Celery's own set-up shows it: this runs inside the worker
TASK_PROCESS = "millstream.task_process"
RESTART_PAUSE = 1.0
LONGEST_PAUSE = 8.0


class Millstream:
    """Installs Millstream into a Celery application.

    ``celery_app``: where the processes beside a worker find it again (``module:attribute``). ``pipelines``, ``handlers``: likewise the Pipelines object (stream jobs) and the
    Handlers object (durable tasks); at least one. ``slots``: subtasks per worker. ``processes``: handlers at once per worker (its concurrency, if not given);
    ``queues``: which it serves (those of its handlers). ``namespace``: whose tasks :meth:`tasks` and plain Celery
    messages submit. ``drain``: seconds a shut-down waits for running handlers. ``tick``: seconds between beat's ticks, for ``pipelines``.
    """

    def __init__(
        self,
        app: Celery,
        installation: Installation,
        *,
        celery_app: str,
        pipelines: str = "",
        handlers: str = "",
        slots: int = 4,
        spares: int = 1,
        processes: int | None = None,
        queues: tuple[str, ...] = (),
        drain: float = 20.0,
        tick: float = 5.0,
        namespace: str = "default",
    ) -> None:
        if slots < 0 or tick <= 0:
            raise ConfigurationError(f"slots must not be negative and tick must be positive, not {slots} and {tick}")
        if not pipelines and not handlers:
            raise ConfigurationError("neither pipelines nor handlers are given: name the module:attribute of what the workers are to run")
        if (processes is not None and processes < 1) or drain < 0:
            raise ConfigurationError(f"processes must be at least 1 and drain must not be negative, not {processes} and {drain}")
        self.app = app
        self.installation = installation.for_streams() if pipelines else installation
        self.celery_app = celery_app
        self.pipelines = pipelines
        self.slots = slots
        self.spares = spares
        self.handlers = handlers
        self.processes = processes
        self.queues = queues
        self.drain = drain
        self.namespace = namespace
        self.intake = IntakeLink()
        self._pipe: SelfPipe | None = None
        self._install(tick)

    def _install(self, tick: float) -> None:
        if self.pipelines:
            self._tick(tick)
        self.app.steps["worker"].add(self._step())
        if self.handlers:
            self.app.on_after_finalize.connect(self._offer, weak=False)

    def _tick(self, tick: float) -> None:
        """For node processes alone: a broker without them would keep every tick, as Redis knows no end of a message."""
        app = self.app
        queue = coordinator_queue(self.installation.prefix)

        @app.task(name=TICK, ignore_result=True, shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
        def millstream_tick() -> None:
            """Nothing to do in a task pool: the coordinator's lane of a node process takes it."""

        @app.task(name=ADVANCE, ignore_result=True, shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
        def millstream_advance(job: str) -> None:
            """Nothing to do in a task pool: the coordinator's lane of a node process takes it."""

        routes = dict(app.conf.task_routes or {})
        app.conf.task_routes = {**routes, TICK: {"queue": queue}, ADVANCE: {"queue": queue}}
        entry = {"task": TICK, "schedule": tick, "options": {"queue": queue, "expires": 60.0, "ignore_result": True}}
        app.conf.beat_schedule = {**(app.conf.beat_schedule or {}), "millstream-tick": entry}

    def _offer(self, **_sender: Any) -> None:
        """Make the handlers known as Celery tasks, where their module can be imported by now; a worker insists on it when it starts."""
        try:
            self.register()
        except ConfigurationError as exc:
            log.debug("handlers are not registered as Celery tasks yet: %s", exc)

    def register(self) -> None:
        """Make every handler a Celery task of its name. Raises ConfigurationError: the handlers cannot be loaded, or a plain task has the name of one."""
        register(self.app, load_handlers(self.handlers), self)

    def intake_pipe(self, make: Callable[[], SelfPipe]) -> SelfPipe:
        """The one that wakes this process's event loop when messages were answered."""
        if self._pipe is None:
            self._pipe = make()
        return self._pipe

    def _step(self) -> type[bootsteps.StartStopStep]:
        outer = self

        class MillstreamNode(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
            """Keeps the processes beside this worker: its node, its task process."""

            name = "millstream-node"

            def __init__(self, worker: Any, **kwargs: Any) -> None:
                super().__init__(worker, **kwargs)
                self.keepers: list[NodeKeeper] = []

            def start(self, worker: Any) -> None:
                if outer.handlers:
                    outer.register()
                for command in outer.commands(str(worker.hostname), int(worker.concurrency or 1)):
                    intake = outer.intake if TASK_PROCESS in command else None
                    keeper = NodeKeeper(command, outer.installation.environment(), intake=intake)
                    self.keepers.append(keeper)
                    keeper.start()

            def stop(self, worker: Any) -> None:
                stop_all(self.keepers, outer.drain + 5.0)

            def terminate(self, worker: Any) -> None:
                self.stop(worker)

        return MillstreamNode

    def commands(self, hostname: str, concurrency: int) -> list[list[str]]:
        """What the step executes."""
        found = []
        if self.pipelines:
            found.append(
                [
                    sys.executable, "-m", "millstream.node_process", "--pipelines", self.pipelines, "--name", hostname, "--slots", str(self.slots),
                    "--spares", str(self.spares), "--celery", self.celery_app,
                ]
            )  # fmt: skip
        if self.handlers:
            served = [part for queue in self.queues for part in ("--queue", queue)]
            found.append(
                [
                    sys.executable, "-m", TASK_PROCESS, "--namespace", self.namespace, "--handlers", self.handlers, "--name", hostname,
                    "--processes", str(self.processes or concurrency), "--drain", str(self.drain), "--celery", self.celery_app, *served,
                ]
            )  # fmt: skip
        return found

    def bind(self, handlers: Handlers) -> None:
        """Have ``.delay()`` and ``.apply_async()`` of these handlers submit by a client that is made at their first use: nothing is opened while modules are imported."""
        FrameworkTasks(lambda: self.installation, handlers, self.namespace, lambda: None, self)

    def tasks(self, handlers: Handlers, *, actor: str = "", sessions: Callable[[], Any] | None = None) -> Tasks:
        """A client whose submissions wake the workers; the handlers' ``.delay()`` and ``.apply_async()`` submit by it. One for a process, made once: it keeps connections.

        ``sessions``: gives the transaction that a submission joins which names none, e.g. ``millstream.django.transactions("default")``.
        """
        client = self.client(handlers, actor=actor, sessions=sessions)
        handlers.bind(client)
        return client

    def client(self, handlers: Handlers, *, actor: str = "", sessions: Callable[[], Any] | None = None) -> Tasks:
        """Likewise, beside whatever the handlers submit by."""
        messages = TaskMessages(self.app, self.installation.prefix)
        return Tasks(
            self.installation,
            handlers,
            self.namespace,
            actor=actor,
            wake=messages.wake,
            sessions=sessions,
            closing=messages.close,
            hear=messages.hear,
        )


class NodeKeeper:
    """Keeps one process beside the worker running: started again a second after it died, ended through its pipe."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        started: Callable[[int], None] | None = None,
        intake: IntakeLink | None = None,
    ) -> None:
        self._intake = intake
        self._command = command
        self._environment = {**os.environ, **environment}
        self._started = started
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._what = "task process" if TASK_PROCESS in command else "node process"
        self._thread = threading.Thread(target=self._keep, name="millstream-keeper", daemon=True)

    def start(self) -> None:
        self._spawn()
        self._thread.start()

    def _spawn(self) -> None:
        command, fds = self._command, []
        theirs = None if self._intake is None else self._intake.connected()
        if theirs is not None:
            fds = [theirs.fileno()]
            command = [*command, "--messages", str(fds[0])]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True, pass_fds=fds)
        finally:
            if theirs is not None:
                theirs.close()
        if self._started is not None:
            self._started(self._process.pid)

    def _keep(self) -> None:
        pause = RESTART_PAUSE
        while not self._stopping.wait(pause):
            process = self._process
            if process is None or process.poll() is None:
                pause = RESTART_PAUSE
                continue
            pause = min(pause * 2, LONGEST_PAUSE)  # a node that cannot start says why each time; not every second
            log.warning("Millstream's %s ended with %s; starting it again (next try after %s s)", self._what, process.returncode, pause)
            if not self._stopping.is_set():
                try:
                    self._spawn()
                except OSError as exc:  # no process or memory left for now: the keeper itself must live on
                    log.warning("Millstream's %s cannot be started: %s", self._what, exc)

    def ask(self) -> None:
        """Tell it to hand everything back and end; :meth:`stop` waits for it."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        process = self._process
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            process.terminate()  # pool children forked meanwhile may hold the pipe open

    def stop(self, timeout: float = 10.0) -> None:
        """Hand everything back and end, within ``timeout`` seconds."""
        self.ask()
        process = self._process
        if process is None:
            return
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stop_all(keepers: list[NodeKeeper], timeout: float) -> None:
    """All are told first, so that their times to end do not add up."""
    for keeper in keepers:
        keeper.ask()
    for keeper in keepers:
        keeper.stop(timeout)
