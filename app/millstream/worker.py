"""Millstream inside Celery: ``Millstream(app, ...)`` installs the worker step, the beat entry and the routes; ``celery -A proj worker`` and ``beat`` are all that runs.

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

from .installation import Installation
from .messages import ADVANCE, TICK, coordinator_queue

log = logging.getLogger(__name__)  # Celery's own set-up shows it: this runs inside the worker
RESTART_PAUSE = 1.0
LONGEST_PAUSE = 8.0


class Millstream:
    """Installs Millstream into a Celery application.

    ``celery_app``: where the node process finds it again (``module:attribute``), ``pipelines``: likewise the Pipelines object. ``slots``: subtasks per worker. ``tick``: seconds
    between beat's ticks.
    """

    def __init__(
        self,
        app: Celery,
        installation: Installation,
        *,
        celery_app: str,
        pipelines: str,
        slots: int = 4,
        spares: int = 1,
        tick: float = 5.0,
    ) -> None:
        if slots < 0 or tick <= 0:
            raise ConfigurationError(f"slots must not be negative and tick must be positive, not {slots} and {tick}")
        self.app = app
        self.installation = installation
        self.celery_app = celery_app
        self.pipelines = pipelines
        self.slots = slots
        self.spares = spares
        self._install(tick)

    def _install(self, tick: float) -> None:
        app = self.app
        queue = coordinator_queue(self.installation.prefix)

        @app.task(name=TICK, ignore_result=True)  # type: ignore[untyped-decorator]  # Celery has no types
        def millstream_tick() -> None:
            """Nothing to do in a task pool: the coordinator's lane of a node process takes it."""

        @app.task(name=ADVANCE, ignore_result=True)  # type: ignore[untyped-decorator]  # Celery has no types
        def millstream_advance(job: str) -> None:
            """Nothing to do in a task pool: the coordinator's lane of a node process takes it."""

        routes = dict(app.conf.task_routes or {})
        app.conf.task_routes = {**routes, TICK: {"queue": queue}, ADVANCE: {"queue": queue}}
        entry = {"task": TICK, "schedule": tick, "options": {"queue": queue, "expires": 60.0, "ignore_result": True}}
        app.conf.beat_schedule = {**(app.conf.beat_schedule or {}), "millstream-tick": entry}
        app.steps["worker"].add(self._step())

    def _step(self) -> type[bootsteps.StartStopStep]:
        outer = self

        class MillstreamNode(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
            """Keeps the node process of this worker."""

            name = "millstream-node"

            def __init__(self, worker: Any, **kwargs: Any) -> None:
                super().__init__(worker, **kwargs)
                self.keeper: NodeKeeper | None = None

            def start(self, worker: Any) -> None:
                self.keeper = NodeKeeper(outer.command(str(worker.hostname)), outer.installation.environment())
                self.keeper.start()

            def stop(self, worker: Any) -> None:
                if self.keeper is not None:
                    self.keeper.stop()

            def terminate(self, worker: Any) -> None:
                self.stop(worker)

        return MillstreamNode

    def command(self, hostname: str) -> list[str]:
        """What the step executes."""
        return [
            sys.executable, "-m", "millstream.node_process", "--pipelines", self.pipelines, "--name", hostname, "--slots", str(self.slots),
            "--spares", str(self.spares), "--celery", self.celery_app,
        ]  # fmt: skip


class NodeKeeper:
    """Keeps one node process running: started again a second after it died, ended through its pipe."""

    def __init__(self, command: list[str], environment: dict[str, str], started: Callable[[int], None] | None = None) -> None:
        self._command = command
        self._environment = {**os.environ, **environment}
        self._started = started
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="millstream-keeper", daemon=True)

    def start(self) -> None:
        self._spawn()
        self._thread.start()

    def _spawn(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True)
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
            log.warning("Millstream's node process ended with %s; starting it again (next try after %s s)", process.returncode, pause)
            if not self._stopping.is_set():
                self._spawn()

    def stop(self, timeout: float = 10.0) -> None:
        """Hand everything back and end."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        process.terminate()  # pool children forked meanwhile may hold the pipe open
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
