"""A node as a process of its own: ``millstream node``, started by ``millstream dev``, by a Celery worker's step, or by hand.

It hosts subtask processes, and (unless told not to) a coordinator beside them, which works only while it holds the lease. It ends when its standard input ends, so that it
never outlives who started it.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from millstream_coordinator.coordinator import Coordinator
from millstream_coordinator.delivery_sweep import Publisher
from millstream_coordinator.loop import CoordinatorLoop
from millstream_coordinator.schedule_sweep import ScheduleSweep
from millstream_schema.errors import ChannelError, StorageError
from millstream_schema.hints import Hints, JobHint, NodeHint, NoHints
from millstream_schema.ports import SystemChance, SystemClock, SystemIds
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import check_schema
from millstream_tasks.node import Node, NodeEvents, NodeSettings, NoEvents
from millstream_tasks.opening import open_storage, open_transport
from millstream_tasks.shell.node_loop import NodeLoop
from millstream_tasks.shell.processes import ProcessLauncher
from millstream_tasks.shell.wire import Boot

from .installation import Installation, address_of
from .kept import kept
from .sweeps import task_sweeps

log = structlog.get_logger("millstream.node_process")  # not __name__: this module is run as __main__


class Messages(Protocol):
    """A carrier of hints for one process: sends, and delivers what arrives from a thread of its own."""

    @property
    def hints(self) -> Hints: ...

    @property
    def events(self) -> NodeEvents: ...

    @property
    def dropped(self) -> int:
        """Hints and events that were not sent: the broker was away for too long."""

    def wake(self, queue: str) -> None:
        """Say that a queue of durable tasks may hold something; neither waits nor fails."""

    def start(
        self, node_name: str, to_node: Callable[[NodeHint], None], to_coordinator: Callable[[JobHint], None], node_id: Callable[[], str]
    ) -> None: ...

    def close(self) -> None: ...


class PublishingThread(Publisher, Protocol):
    """The broker's door for deliveries, with a thread to be ended."""

    def close(self) -> None: ...


class NoMessages:
    """Control by rows alone: one machine, or no broker."""

    hints: Hints = NoHints()
    events: NodeEvents = NoEvents()
    dropped = 0

    def wake(self, queue: str) -> None:
        """Nothing is told: workers poll."""

    def start(
        self, node_name: str, to_node: Callable[[NodeHint], None], to_coordinator: Callable[[JobHint], None], node_id: Callable[[], str]
    ) -> None:
        """Nothing arrives: rows are polled."""

    def close(self) -> None:
        """Nothing was opened."""


class NodeProcess:
    """Wires a node (and a coordinator) to an installation and runs until stopped."""

    def __init__(
        self,
        installation: Installation,
        pipelines: str,
        *,
        name: str,
        slots: int,
        spares: int = 1,
        coordinate: bool = True,
        messages: Messages | None = None,
        publications: PublishingThread | None = None,
    ) -> None:
        self._publications = publications
        self._installation = installation
        self._messages = messages or NoMessages()
        self._name = name
        self._stopping = False
        clock, ids, chance = SystemClock(), SystemIds(), SystemChance()
        i = installation
        self._database = Database(i.database, clock, prefix=i.table_prefix, timeout_ms=i.idle_in_transaction_ms)
        try:
            check_schema(self._database)
            self._database.check_durability()
            self._loop = NodeLoop()
            boot = Boot(pipelines, i.transport, i.checkpoints, i.prefix, i.channel_expiry_ms, i.idle_in_transaction_ms)
            self._launcher = ProcessLauncher(boot, self._loop.wake, spares)
            settings = NodeSettings(
                name=name, slots=slots, lease_ms=i.lease_ms, renew_ms=i.renew_ms, poll_ms=i.poll_ms, liveness_ms=i.liveness_ms,
                ping_ms=max(50, i.lease_ms // 10),
            )  # fmt: skip
            info = {"pipelines": pipelines, "pid": str(os.getpid()), "host": os.uname().nodename}
            self._counts: Callable[[], dict[str, int]] = dict
            self._node = Node(
                self._database, self._messages.hints, clock, ids, self._launcher, settings, info, self._messages.events,
                lambda: {"hints_dropped": self._messages.dropped, **self._counts()},
            )  # fmt: skip
            self._loop.node = self._node
            self._coordinator: CoordinatorLoop | None = None
            if coordinate:
                holder = f"{ids.new('coordinator')}-{os.getpid()}"  # the pid leads to the node's row, and so to whose worker coordinates
                coordinator = Coordinator(
                    self._database, self._messages.hints, clock, chance,
                    lambda url: open_storage(url or i.checkpoints, i.idle_in_transaction_ms / 1000),
                    holder,
                    i.lease_ms, i.poll_ms / 1000, task_sweeps(self._database, clock, chance, ids, i.lease_ms, publications),
                    ScheduleSweep(self._database, clock, ids, i.poll_ms / 1000, self._messages.wake),
                )  # fmt: skip
                self._counts = coordinator.counts
                self._coordinator = CoordinatorLoop(coordinator, i.poll_ms / 1000)
        except BaseException:
            self._database.close()
            raise

    def run(self) -> None:
        """Until :meth:`stop`, a signal, or the end of standard input."""
        coordinator = self._coordinator
        thread = None
        if coordinator is not None:
            thread = threading.Thread(target=coordinator.run, name="millstream-coordinator", daemon=True)
            thread.start()
        to_coordinator = coordinator.hint if coordinator is not None else _ignore
        self._messages.start(self._name, self._loop.hint, to_coordinator, lambda: self._node.id)
        log.info("node started", name=self._name, pid=os.getpid())
        try:
            parent = os.getppid()
            # The pipe may be held open by processes the parent forked; its death shows in the parent's pid all the same.
            self._loop.run(self._node, lambda: os.getppid() == parent)
        finally:
            if coordinator is not None and thread is not None:
                coordinator.stop()
                thread.join(5)
            self._messages.close()
            if self._publications is not None:
                self._publications.close()
            self._launcher.close()
            self._database.close()

    def stop(self) -> None:
        """Thread-safe and signal-safe."""
        self._loop.stop()


def _ignore(_hint: JobHint) -> None:
    """Nothing to do: this process does not coordinate."""


def celery_messages(app: Any, prefix: str, hostname: str) -> Messages:
    """The carrier over the broker of a Celery application."""
    from .messages import CeleryMessages  # optional: a node without a broker needs no Celery

    return CeleryMessages(app, prefix, hostname)


def celery_publications(app: Any, prefix: str) -> PublishingThread:
    """The door for deliveries to queues of a Celery application's broker."""
    from .publications import Publications  # optional, likewise

    return Publications(app, prefix)


def prove(installation: Installation) -> None:
    """What a node needs can be reached from here: refuse now rather than fail every job. Raises StorageError, ChannelError, ConfigurationError."""
    storage = open_storage(installation.for_streams().checkpoints)
    key = f"proof/{SystemIds().new('node')}"
    try:
        storage.get(storage.put(key, b"millstream"))
        storage.delete([key])
    except StorageError as exc:
        raise type(exc)(
            f"{exc}; the checkpoint storage is {address_of(installation.checkpoints)}: it must be a directory this user can write, or a database that runs"
        ) from exc
    try:
        open_transport(installation.transport, installation.prefix).close()
    except ChannelError as exc:
        raise type(exc)(
            f"{str(exc).rstrip('.')}; the transport is {address_of(installation.transport)}: start that server, or correct the transport's URL "
            "(MILLSTREAM_TRANSPORT, or transport= of the Installation), then try again"
        ) from exc


def main(argv: list[str] | None = None) -> int:
    """``python -m millstream.node_process``: what a supervisor starts."""
    parser = argparse.ArgumentParser(prog="millstream node")
    parser.add_argument("--pipelines", required=True, help="module:attribute of the Pipelines object")
    parser.add_argument("--name", required=True)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--no-coordinator", action="store_true")
    parser.add_argument("--celery", help="module:attribute of the Celery application whose broker carries hints")
    args = parser.parse_args(argv)

    def made(installation: Installation, app: Any) -> NodeProcess:
        prove(installation)
        return NodeProcess(
            installation,
            args.pipelines,
            name=args.name,
            slots=args.slots,
            spares=args.spares,
            coordinate=not args.no_coordinator,
            messages=None if app is None else celery_messages(app, installation.prefix, args.name),
            publications=None if app is None else celery_publications(app, installation.prefix),
        )

    return kept(log, "MillstreamNode", args.name, args.celery, made)


if __name__ == "__main__":
    sys.exit(main())
