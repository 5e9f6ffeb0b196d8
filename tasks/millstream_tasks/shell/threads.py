"""Subtasks as threads of this process: embedded mode.

Used by the embedded cluster's node. What must never happen here: a thread that ends without a word to the node, or one that was killed and still reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from millstream_schema.connectors import LOCK_TIMEOUT, SnapshotStorage
from millstream_schema.control import Deployment, Failed, Lease, NodeMessage, Stop, SubtaskMessage
from millstream_schema.pipeline import FactoryRegistry
from millstream_schema.ports import Clock

from ..channels.memory import MemoryBroker, MemoryTransport
from ..runner.environment import Environment
from ..runner.subtask import SubtaskRunner
from .background import ThreadBackground, yield_thread
from .driving import drive, make_runner


class ThreadChild:
    """A subtask thread. It cannot be killed, only told: its deadline is taken away, and it stops at its next look."""

    def __init__(self, launcher: ThreadLauncher, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> None:
        self._launcher = launcher
        self._deployment = deployment
        self._deliver = deliver
        self._transport = MemoryTransport(launcher.broker)
        self._runner: SubtaskRunner | None = None
        self._early: list[NodeMessage] = []
        self._lock = threading.Lock()
        self._killed = False
        self._thread = threading.Thread(target=self._main, name=f"subtask-{deployment.subtask}", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        launcher = self._launcher
        background = ThreadBackground(f"subtask-{self._deployment.subtask}")
        try:
            environment = self._environment(background)
            runner = None if environment is None else make_runner(launcher.registry, self._deployment, environment)
            if runner is not None:
                with self._lock:
                    self._runner = runner
                    for message in self._early:
                        runner.control(message)
                drive(runner, self._transport, lambda: self._killed)
        finally:
            background.close()
            self._report(None)

    def _environment(self, background: ThreadBackground) -> Environment | None:
        """None after the failure was reported."""
        launcher = self._launcher
        try:
            storage = launcher.storage(self._deployment.settings.checkpoints)
        except Exception as exc:
            self._report(Failed("start", f"{type(exc).__name__}: {exc}"))
            return None
        return Environment(
            self._transport,
            storage,
            launcher.clock,
            background,
            self._report,
            yield_thread,
            "memory",
            not launcher.encode,
            launcher.lock_timeout,
        )

    def _report(self, message: SubtaskMessage | None) -> None:
        if not self._killed:
            self._deliver(message)
            self._launcher.wake()

    def send(self, message: NodeMessage) -> None:
        with self._lock:
            if self._runner is None:
                self._early.append(message)
                return
        self._runner.control(message)
        if isinstance(message, Lease) and self._thread.is_alive():
            self._report(self._runner.stats())

    def kill(self) -> None:
        self._killed = True
        with self._lock:
            if self._runner is not None:
                self._runner.deadline = float("-inf")
        self.send(Stop())

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)


class ThreadLauncher:
    """Starts subtasks as threads. ``encode``: channels go through the codec as between processes (on in tests)."""

    def __init__(
        self,
        registry: FactoryRegistry,
        clock: Clock,
        storage: Callable[[str], SnapshotStorage],
        wake: Callable[[], None],
        *,
        encode: bool,
        lock_timeout: float = LOCK_TIMEOUT,
    ) -> None:
        self.registry = registry
        self.clock = clock
        self.storage = storage
        self.wake = wake
        self.encode = encode
        self.lock_timeout = lock_timeout
        self.broker = MemoryBroker()
        self._children: list[ThreadChild] = []

    def launch(self, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> ThreadChild:
        child = ThreadChild(self, deployment, deliver)
        self._children = [c for c in self._children if c._thread.is_alive()]
        self._children.append(child)
        return child

    def close(self, timeout: float = 5.0) -> None:
        """Wait for the threads that were told to end."""
        for child in self._children:
            child.join(timeout)
