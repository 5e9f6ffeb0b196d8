"""Handlers in processes of their own, which can be killed: one attempt at a time each, so that a death is charged to what ran and to nothing else.

Started by exec under a worker's task process, never forked from Celery's: no lock or connection of another process is inherited, and Celery's pool, which drops jobs when its
connection to the broker breaks, holds nothing of ours. What must never happen here: a death that is not reported; a handler that outlives the lease.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import structlog

from millstream_schema.durable.outcomes import AnyOutcome, Committed, Crashed, Killed, Unstarted
from millstream_schema.durable.records import Policy, TaskRow
from millstream_schema.durable.states import Cause
from millstream_schema.ports import Clock

from ..shell.wire import pack, receive
from .frames import Beat, Began, EndAsked, Ended, FromChild, Ready, Run, Said, Settled, TaskBoot, Until, decode_from_child, encode
from .pool import Report
from .progress import Tell

log = structlog.get_logger(__name__)
FIRST_PAUSE, LAST_PAUSE = 0.2, 10.0
"""Seconds before a process that could not start is started again."""


class _Running(msgspec.Struct):
    """The attempt a process has."""

    task: TaskRow
    policy: Policy
    began: float = 0.0
    kill_at: float = 0.0
    why: Cause = Cause.NONE
    quiet: bool = False
    """Its report does not matter any more."""


class _Child:
    """One handler process. Its reader thread only puts into the pool's inbox."""

    def __init__(self, boot: TaskBoot, inbox: Callable[[_Child, FromChild | None], None]) -> None:
        ours, theirs = socket.socketpair()
        try:
            command = [sys.executable, "-m", "millstream_tasks.task_main", "--fd", str(theirs.fileno())]
            self.popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self.popen.pid
        self.ready = False
        self.seen = 0.0
        self.running: _Running | None = None
        self._sock = ours
        self._inbox = inbox
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        self.send(boot)
        for name, target in (("to", self._write), ("from", self._read)):
            threading.Thread(target=target, name=f"{name}-handler-{self.pid}", daemon=True).start()

    def send(self, frame: msgspec.Struct) -> None:
        """At once when the pipe takes it, which spares a switch between threads; else by the writer, in order."""
        data = pack(encode(frame))
        with self._lock:
            if not self._queued:
                try:
                    data = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # it is gone, which its reader reports
            if data:
                self._queued += 1
                self._outgoing.put(data)

    def kill(self) -> None:
        """SIGKILL ends a stopped process, too."""
        self.popen.kill()

    def close(self) -> None:
        self._outgoing.put(None)
        self._sock.close()

    def _write(self) -> None:
        while (data := self._outgoing.get()) is not None:
            try:
                self._sock.sendall(data)
            except OSError:
                return
            with self._lock:
                self._queued -= 1

    def _read(self) -> None:
        while True:
            try:
                data = receive(self._sock)
            except OSError:
                data = None
            if data is None:
                self.popen.kill()  # its pipe is broken: whatever it still does has no one to tell
                self.popen.wait()
                self._inbox(self, None)
                return
            self._inbox(self, decode_from_child(data))


class ProcessPool:
    """``size`` handler processes, started again when they die. All methods but the children's reports are called from the host's thread."""

    def __init__(self, boot: TaskBoot, clock: Clock, size: int, report: Report, wake: Callable[[], None], tell: Tell) -> None:
        self._boot = boot
        self._clock = clock
        self._size = size
        self._report = report
        self._wake = wake
        self._tell = tell
        self._inbox: queue.SimpleQueue[tuple[_Child, FromChild | None]] = queue.SimpleQueue()
        self._children: list[_Child] = []
        self._until = Until(0.0)
        self._start_at = 0.0
        self._pause = FIRST_PAUSE
        self._closed = False

    # -- the port

    def free(self) -> int:
        return sum(1 for c in self._children if c.ready and c.running is None)

    def start(self, task: TaskRow) -> None:
        child = next(c for c in self._children if c.ready and c.running is None)
        child.running = _Running(task, msgspec.json.decode(task.policy, type=Policy))
        child.seen = self._clock.monotonic()
        child.send(Run(task))

    def cancel(self, task: str, fence: int) -> None:
        """Told, and killed after its grace."""
        child = self._of(task, fence)
        if child is not None and child.running is not None:
            child.send(EndAsked(task, fence))
            self._kill_later(child.running, child.running.policy.grace_ms / 1000, Cause.CANCELLED)

    def kill(self, task: str, fence: int) -> None:
        child = self._of(task, fence)
        if child is not None and child.running is not None:
            child.running.quiet = True
            child.kill()

    def lease(self, deadline: float) -> None:
        """The lease was renewed."""
        self._until = Until(deadline)
        for child in self._children:
            child.send(self._until)

    def tick(self) -> float:
        """Take reports, judge limits and heartbeats, start what is missing; seconds until there may be more."""
        while True:
            try:
                child, frame = self._inbox.get_nowait()
            except queue.Empty:
                break
            self._heard(child, frame)
        now = self._clock.monotonic()
        while not self._closed and len(self._children) < self._size and now >= self._start_at:
            self._children.append(_Child(self._boot, self._put))
        waits = [self._judged(c, now) for c in self._children]
        if len(self._children) < self._size:
            waits.append(max(0.0, self._start_at - now))
        return min(waits, default=1.0)

    def close(self) -> None:
        self._closed = True
        for child in self._children:
            child.kill()
            child.close()

    # -- the children

    def _put(self, child: _Child, frame: FromChild | None) -> None:
        self._inbox.put((child, frame))
        if not isinstance(frame, Beat | Began | Said):  # none of these gives the host anything to do
            self._wake()

    def _of(self, task: str, fence: int) -> _Child | None:
        for child in self._children:
            running = child.running
            if running is not None and running.task.id == task and running.task.fence == fence:
                return child
        return None

    def _heard(self, child: _Child, frame: FromChild | None) -> None:
        child.seen = self._clock.monotonic()
        match frame:
            case None:
                self._died(child)
            case Ready(problem=problem):
                if problem:
                    log.error("a handler process cannot start", problem=problem)
                    child.kill()
                else:
                    child.ready = True
                    child.send(self._until)
            case Began():
                running = child.running
                if running is not None:
                    running.began = child.seen
                    if running.policy.run_ms:
                        self._kill_later(running, (running.policy.run_ms + running.policy.grace_ms) / 1000, Cause.LIMIT)
            case Settled(task=task, fence=fence, seconds=seconds):
                running = child.running
                if running is not None and not running.quiet:
                    running.quiet = True  # whatever becomes of it, its end is written
                    self._report(task, fence, Committed(), (), seconds)
            case Ended(task=task, fence=fence, outcome=outcome, submits=submits, seconds=seconds):
                running, child.running = child.running, None
                self._pause = FIRST_PAUSE
                if running is not None and not running.quiet:
                    self._report(task, fence, outcome, submits, seconds)
            case Said(task=task, fence=fence, told=told):
                self._tell(task, fence, told)
            case Beat():
                pass

    def _died(self, child: _Child) -> None:
        """What it ran, and nothing else, is reported: killed for a reason, or crashed."""
        child.close()
        self._children.remove(child)
        running = child.running
        if running is None or not running.began:
            self._start_at = self._clock.monotonic() + self._pause
            self._pause = min(self._pause * 2, LAST_PAUSE)
        if running is None or running.quiet:
            return
        task, code = running.task, child.popen.returncode
        outcome: AnyOutcome
        if not running.began:
            outcome = Unstarted()
        elif running.why:
            outcome = Killed(running.why, f"killed: {running.why}")
        else:
            outcome = Crashed(f"its process ended with code {code}")
            log.warning("a handler process died", task=task.id, handler=task.handler, code=code)
        self._report(task.id, task.fence, outcome, (), 0.0)

    def _kill_later(self, running: _Running, seconds: float, why: Cause) -> None:
        at = self._clock.monotonic() + seconds
        if not running.kill_at or at < running.kill_at:
            running.kill_at, running.why = at, why

    def _judged(self, child: _Child, now: float) -> float:
        """Kill what is over its limit or silent; seconds until it is to be judged again."""
        running = child.running
        if running is None:
            return 1.0
        silent_at = child.seen + running.policy.heartbeat_ms / 1000
        if running.kill_at and now >= running.kill_at:
            child.kill()
            running.kill_at = now + 3600.0
            return 1.0
        if now >= silent_at:
            running.why = Cause.LIMIT
            child.kill()
            child.seen = now + 3600.0
            return 1.0
        limits = [silent_at - now, *([running.kill_at - now] if running.kill_at else [])]
        return max(0.01, min(limits))
