"""A process that runs handlers of durable tasks, one at a time. Started by a worker's task process.

The main thread runs handlers, where Python delivers signals and most libraries expect to be; a control thread reads the pipe, another one beats. At end of file (the worker died)
or past the lease the process ends at once, whatever the handler is doing. What must never happen here: a handler that outlives its worker's lease.
"""

from __future__ import annotations

import argparse
import importlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import NoReturn

import msgspec
import structlog

from millstream_schema.durable.records import TaskRow
from millstream_schema.errors import ConfigurationError
from millstream_schema.ports import SystemClock, SystemIds

from .durable.databases import HandlerDatabases
from .durable.execution import execute
from .durable.frames import Beat, Began, EndAsked, Ended, Known, Ready, Run, Said, Settled, Until, decode_boot, decode_to_child, encode
from .durable.handlers import HandlerRegistry
from .durable.leave import Taker
from .durable.progress import Telling
from .durable.surroundings import Surroundings
from .loading import loaded, watched
from .logs import log_through_celery, log_to_stderr
from .shell.wire import AT_ONCE, Unpacked, pack, receive

log = structlog.get_logger(__name__)
EXIT_LOST_WORKER = 3
EXIT_LEASE = 4


def end(code: int) -> NoReturn:
    """This process at once, and what handlers have started in its group: nothing of theirs outlives the lease."""
    if os.getpgrp() == os.getpid():  # a group of its own, as the pool starts it
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


class Pipe:
    """The child's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.cut = False
        """Whether this process is a copy that a handler has made."""

    def cut_off(self) -> None:
        """What this process says from now on is nobody's word."""
        self.cut = True
        self._sock.close()

    def send(self, *frames: msgspec.Struct) -> None:
        if self.cut:
            return
        data = b"".join(pack(encode(frame)) for frame in frames)
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError:
            end(EXIT_LOST_WORKER)

    def receive(self) -> bytes | None:
        """The first frame."""
        return receive(self._sock)

    def frames(self) -> Iterator[bytes]:
        """All that follow, until the worker is gone."""
        unpacked = Unpacked()
        while True:
            try:
                data = self._sock.recv(AT_ONCE)
            except ConnectionError:
                return
            if not data:
                return
            yield from unpacked.feed(data)


def load_handlers(target: str) -> HandlerRegistry:
    """The registry of ``module:attribute``, as the worker's own configuration named it. Raises ConfigurationError."""
    found = loaded(target, "handlers", "handlers")
    registry = getattr(found, "registry", found)
    if not isinstance(registry, HandlerRegistry):
        raise ConfigurationError(f"{target!r} is not a Handlers object")
    return registry


class Control:
    """What the worker has said: attempts to run, ends asked for, how long the lease holds."""

    def __init__(self, pipe: Pipe, clock: SystemClock, beat: float) -> None:
        self._pipe = pipe
        self._clock = clock
        self._beat = beat
        self._told: set[tuple[str, int]] = set()
        self._deadline = 0.0
        self._busy = False
        self._telling: Telling | None = None
        self.runs: queue.SimpleQueue[Run] = queue.SimpleQueue()

    def start(self) -> None:
        for name, target in (("control", self._listen), ("beat", self._beating)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def asked(self, task: str, fence: int) -> bool:
        return (task, fence) in self._told

    @property
    def over(self) -> bool:
        """Whether the lease is over, as far as it was told."""
        return bool(self._deadline) and self._clock.monotonic() >= self._deadline

    def busy(self, run: Run, telling: Telling) -> None:
        self._busy, self._telling = True, telling

    def idle(self) -> None:
        self._busy, self._telling = False, None
        self._told.clear()  # also what was told of it too late: nothing is told of another one before that has leave to begin

    def _listen(self) -> None:
        for data in self._pipe.frames():
            match decode_to_child(data):
                case Run() as run:
                    self.runs.put(run)
                case EndAsked(task=task, fence=fence):
                    self._told.add((task, fence))
                case Until(deadline=deadline):
                    self._deadline = deadline
        end(EXIT_LOST_WORKER)

    def _beating(self) -> None:
        """Beats while a handler runs; the lease is judged here, too."""
        pause = threading.Event()  # never set: whoever waited for a handler to begin would contend with it for the interpreter
        while not pause.wait(self._beat):
            if self._busy and self.over:
                end(EXIT_LEASE)  # before anything is sent: a worker that stands still does not read
            if self._busy:
                self._pipe.send(Beat())
                telling = self._telling
                if telling is not None:
                    telling.flush()


def said(ended: Ended | None) -> tuple[Ended, ...]:
    return () if ended is None else (ended,)


def _log(celery: str) -> None:
    """Import the application, and log as its workers do; without one, to standard error. Raises what its module raises."""
    log_to_stderr(os.environ.get("MILLSTREAM_LOG", "info"))
    if not celery:
        return
    module, _, attribute = celery.partition(":")
    with watched(module):
        app = getattr(importlib.import_module(module), attribute or "app", None)
    if hasattr(app, "log"):
        log_through_celery(app, "MillstreamHandler", "", os.environ)


def _told_of(task: TaskRow, error: BaseException) -> None:
    """The one place where a traceback is seen: rows keep its ends."""
    log.warning("a handler raised", handler=task.handler, task=task.id, attempt=task.starts, exc_info=error)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A Millstream handler process; started by a worker, not by hand.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--leave", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in (args.fd, args.leave):
        os.set_inheritable(descriptor, False)  # what handlers start shall not hold them
    pipe, leave = Pipe(socket.socket(fileno=args.fd)), Taker(args.leave)
    os.register_at_fork(after_in_child=pipe.cut_off)
    os.register_at_fork(after_in_child=leave.close)
    data = pipe.receive()
    if data is None:
        return EXIT_LOST_WORKER
    boot = decode_boot(data)
    try:
        _log(boot.celery)
        registry = load_handlers(boot.handlers)
    except Exception as exc:
        pipe.send(Ready(f"{type(exc).__name__}: {exc}"))
        return 1
    ids, clock, pause = SystemIds(), SystemClock(), threading.Event()
    databases = HandlerDatabases(boot.database, boot.prefix, boot.timeout_ms, clock, registry.databases)
    control = Control(pipe, clock, boot.beat_ms / 1000)
    control.start()
    sys.setswitchinterval(0.001)  # the control thread shall hear of a cancel soon
    pipe.send(Ready())
    ended: Ended | None = None
    """Of the attempt before: sent together with the next one's begin, or by itself when there is none at hand; never later than code of the next one runs."""
    while True:
        try:
            run = control.runs.get_nowait()
        except queue.Empty:
            if ended is not None:
                pipe.send(ended)
                ended = None
            run = control.runs.get()
        if not leave.take(run.leave):
            pipe.send(*said(ended), Beat())  # taken back; the process lives
            ended = None
            continue
        if control.over:
            pipe.send(*said(ended))
            end(EXIT_LEASE)
        task = run.task
        telling = Telling(clock, lambda told, t=task: pipe.send(Said(t.id, t.fence, told)))  # type: ignore[misc]
        control.busy(run, telling)
        pipe.send(*said(ended), Began(task.id, task.fence))
        began = clock.monotonic()
        around = Surroundings(
            ids=ids,
            clock=clock,
            told=partial(control.asked, task.id, task.fence),
            databases=databases,
            committed=lambda t=task, b=began: pipe.send(Settled(t.id, t.fence, clock.monotonic() - b)),  # type: ignore[misc]
            wait=pause.wait,
            telling=telling,
            raised=partial(_told_of, task),
            known=lambda i, c, t=task: pipe.send(Known(t.id, t.fence, i, c)),  # type: ignore[misc]
        )
        outcome, submits = execute(task, registry, around)
        if pipe.cut:
            os._exit(0)  # a handler forked and both returned: the end is told by the one that was asked
        control.idle()
        ended = Ended(task.id, task.fence, outcome, submits, clock.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
