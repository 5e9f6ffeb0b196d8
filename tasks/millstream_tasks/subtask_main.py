"""A subtask process. Started by its node, ahead of need where it can be; imports neither Celery nor SQLAlchemy.

The main thread drives the runner; a control thread reads the pipe. At end of file (the node died) or past the lease's deadline the process exits at once, whatever
the main thread is doing. What must never happen here: a subtask that outlives its node's lease.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

import msgspec
import structlog

from millstream_schema.channels import Transport
from millstream_schema.control import Deployment, Failed, Lease, SubtaskMessage, decode_to_subtask, encode
from millstream_schema.errors import ChannelLost, ConfigurationError
from millstream_schema.pipeline import FactoryRegistry
from millstream_schema.ports import SystemClock

from .loading import loaded
from .opening import open_storage, open_transport
from .runner.environment import Environment
from .runner.subtask import SubtaskRunner
from .shell.background import ThreadBackground, yield_thread
from .shell.driving import drive, make_runner
from .shell.wire import Boot, pack, receive

log = structlog.get_logger(__name__)
EXIT_LOST_NODE = 3
EXIT_LEASE = 4
BROKER_PAUSE = 0.25
"""Seconds between two tries to reach a broker that is away."""


class Link:
    """The subtask's end of the pipe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def report(self, message: SubtaskMessage) -> None:
        """Send to the node; a node that is gone ends this process. Raises FrameTooLong."""
        frame = pack(encode(message))
        try:
            with self._lock:
                self._sock.sendall(frame)
        except OSError:
            os._exit(EXIT_LOST_NODE)

    def receive(self) -> bytes | None:
        return receive(self._sock)

    def gone(self, seconds: float) -> bool:
        """Whether the node closes its end within ``seconds``; messages stay where they are."""
        poller = select.poll()
        poller.register(self._sock, 0)  # a hang-up is reported without being asked for
        return bool(poller.poll(seconds * 1000))

    def timeout(self, seconds: float | None) -> None:
        """Bounds receiving only: a report waits for the node however long that takes."""
        self._sock.settimeout(None)
        if seconds is not None:
            whole = int(seconds)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(whole, int((seconds - whole) * 1e6)))


def _timeval(seconds: int, micros: int) -> bytes:
    return seconds.to_bytes(8, sys.byteorder) + micros.to_bytes(8, sys.byteorder)


def load_registry(target: str) -> FactoryRegistry:
    """The registry of ``module:attribute``, as the node's own command line named it."""
    found = loaded(target, "pipelines", "pipelines")
    registry = getattr(found, "registry", found)
    if not isinstance(registry, FactoryRegistry):
        raise ConfigurationError(f"{target!r} is not a Pipelines object")
    return registry


def _obey(link: Link, runner: SubtaskRunner, clock: SystemClock) -> None:
    """The control thread: hand messages in, answer pings, end the process when the node or its lease is gone."""
    try:
        while True:
            left = runner.deadline - clock.monotonic()
            if not _hear(link, runner, min(max(left, 0.001), 5.0)) and left <= 0:
                os._exit(EXIT_LEASE)
    except BaseException:  # without this thread nobody would watch the lease
        log.exception("the node cannot be understood; this process ends", subtask=runner.subtask.id)
        os._exit(EXIT_LOST_NODE)


def _hear(link: Link, runner: SubtaskRunner, seconds: float) -> bool:
    """Take one message; False when none came within ``seconds``. What waits in the pipe is heard before a passed lease is judged: the next message may have renewed it."""
    link.timeout(seconds)
    try:
        data = link.receive()
    except (TimeoutError, BlockingIOError):
        return False
    if data is None:
        os._exit(EXIT_LOST_NODE)
    message = decode_to_subtask(data)
    if isinstance(message, Deployment):
        return True
    runner.control(message)
    if isinstance(message, Lease):
        link.report(runner.stats())
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A Millstream subtask process; started by a node, not by hand.")
    parser.add_argument("--fd", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(0.001)  # the background thread shall not keep records waiting
    link = Link(socket.socket(fileno=args.fd))
    clock = SystemClock()
    data = link.receive()
    if data is None:
        return EXIT_LOST_NODE
    boot = msgspec.msgpack.decode(data, type=Boot)
    problem = ""
    registry = FactoryRegistry()
    try:
        registry = load_registry(boot.pipelines)
    except Exception as exc:
        problem = f"{type(exc).__name__}: {exc}"
    data = link.receive()  # a spare waits here
    if data is None:
        return EXIT_LOST_NODE
    deployment = decode_to_subtask(data)
    assert isinstance(deployment, Deployment)
    if problem:
        link.report(Failed("factory", problem))
        return 1
    return _run(link, registry, deployment, boot, clock)


def _reached(link: Link, connect: Callable[[], Transport], clock: SystemClock, patience: float) -> Transport:
    """Connect, waiting for a broker that restarts for as long as the job may take to start: each attempt that failed at once would cost restart budget. Raises ChannelLost."""
    deadline = clock.monotonic() + patience
    while True:
        try:
            return connect()
        except ChannelLost:
            if clock.monotonic() >= deadline:
                raise
        if link.gone(BROKER_PAUSE):
            os._exit(EXIT_LOST_NODE)


def _run(link: Link, registry: FactoryRegistry, deployment: Deployment, boot: Boot, clock: SystemClock) -> int:
    lock_timeout = boot.idle_in_transaction_ms / 1000
    try:
        transport = _reached(
            link,
            lambda: open_transport(boot.transport, boot.prefix, boot.channel_expiry_ms),
            clock,
            deployment.settings.start_limit_ms / 1000,
        )
        storage = open_storage(deployment.settings.checkpoints or boot.checkpoints, lock_timeout)
    except Exception as exc:
        link.report(Failed("start", f"{type(exc).__name__}: {exc}"))
        return 1
    background = ThreadBackground("subtask")
    kind = boot.transport.partition(":")[0]
    environment = Environment(transport, storage, clock, background, link.report, yield_thread, kind, lock_timeout=lock_timeout)
    runner = make_runner(registry, deployment, environment)
    if runner is None:
        return 1
    while _hear(link, runner, 0.001):
        continue  # all that came while this process imported: the oldest lease in it may have passed long ago
    threading.Thread(target=_obey, args=(link, runner, clock), name="control", daemon=True).start()
    drive(runner, transport, lambda: False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
