"""Handlers in processes of their own, which can be killed: one attempt at a time each, so that a death is charged to what ran and to nothing else.

Started by exec under a worker's task process, never forked from Celery's: no lock or connection of another process is inherited, and Celery's pool, which drops jobs when its
connection to the broker breaks, holds nothing of ours. What must never happen here: a death that is not reported; a handler that outlives the lease.
"""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Iterable

import msgspec
import structlog

from millstream_schema.durable.outcomes import AnyOutcome, Committed, Crashed, Killed, Unstarted
from millstream_schema.durable.records import Policy, TaskRow
from millstream_schema.durable.states import Cause
from millstream_schema.ports import Clock

from .child import REAPED_AGAIN, Child, Handed
from .frames import Beat, Began, EndAsked, Ended, FromChild, Known, Ready, Said, Settled, TaskBoot, Until
from .kept_calls import Know
from .pool import Back, Report
from .progress import Tell

log = structlog.get_logger(__name__)
FIRST_PAUSE, LAST_PAUSE = 0.2, 10.0
"""Seconds before a process that could not start is started again."""
AHEAD = 64
"""Attempts that a process is handed behind the one it runs, at most: a few milliseconds' worth of those that do nothing."""
NOT_SHORT = 0.1
"""Seconds after which an attempt is not short any more, and what was handed over behind it is taken back."""
SILENT_SECONDS = 30.0
"""How long a process may leave unanswered that something was taken back which it should have begun."""
REAPED_SECONDS = 2.0
"""How long a killed process is waited for at the end."""


class ProcessPool:
    """``size`` handler processes, started again when they die. All methods but :meth:`wake` are called from the host's thread, callbacks are called on it."""

    def __init__(self, boot: TaskBoot, clock: Clock, size: int, report: Report, back: Back, tell: Tell, know: Know) -> None:
        self._boot = boot
        self._clock = clock
        self._size = size
        self._report = report
        self._back = back
        self._tell = tell
        self._know = know
        self._children: list[Child] = []
        self._until = Until(0.0)
        self._start_at = 0.0
        self._pause = FIRST_PAUSE
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._called = False

    # -- waiting

    def wake(self) -> None:
        """End the present or the next :meth:`wait`. Thread-safe and signal-safe."""
        if not self._called and not self._closed:
            self._called = True
            os.write(self._waker, b"!")

    def wait(self, seconds: float) -> None:
        """Until a process has said something, :meth:`wake` was called, or the time is over."""
        for child in self._children:
            if child.writing != child.awaited and not child.gone:
                child.awaited = child.writing
                self._selector.modify(child.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if child.writing else 0))
        self._selector.select(max(0.0, seconds))
        self._called = False  # before the pipe is emptied: a call in between is not lost, what it is about is looked at after this
        try:
            os.read(self._woken, 64)
        except BlockingIOError:
            return

    # -- the port

    def free(self) -> int:
        return sum(1 for c in self._children if c.free)

    def ahead(self) -> int:
        return sum(AHEAD - len(c.line) for c in self._children if self._takes_more(c))

    def waiting(self) -> int:
        return sum(max(0, len(c.line) - 1) for c in self._children)

    def start(self, task: TaskRow) -> None:
        free = next((c for c in self._children if c.free), None)
        child = free or min((c for c in self._children if c.line and not c.gone), key=lambda c: (not self._takes_more(c), len(c.line)))
        child.hand(task, msgspec.json.decode(task.policy, type=Policy), self._clock.monotonic())

    def cancel(self, task: str, fence: int) -> None:
        """One that runs is told, and killed after its grace; one that has not begun is given back as such."""
        child, handed = self._of(task, fence)
        if child is None or handed is None:
            return
        self._taken_back(child, unstarted=(handed,))
        if handed in child.line:
            child.send(EndAsked(task, fence))
            self._kill_later(handed, handed.policy.grace_ms / 1000, Cause.CANCELLED)

    def kill(self, task: str, fence: int) -> None:
        child, handed = self._of(task, fence)
        if child is not None and handed is not None:
            handed.quiet = True
            self._taken_back(child)
            if handed in child.line:
                child.kill()

    def give_back(self) -> None:
        for child in self._children:
            self._taken_back(child)

    def lease(self, deadline: float) -> None:
        """The lease was renewed."""
        self._until = Until(deadline)
        for child in self._children:
            child.send(self._until)

    def tick(self) -> float:
        """Take reports, judge limits and heartbeats, start what is missing; seconds until there may be more."""
        now = self._clock.monotonic()
        for child in list(self._children):
            child.push()
            ended = child.ended(now)
            for frame in child.heard():
                self._heard(child, frame, now)
            if ended and not child.gone:
                child.leave()
            if child.gone:
                self._gone(child)
        while not self._closed and len(self._children) < self._size and now >= self._start_at:
            self._start(now)
        waits = [self._judged(c, now) for c in self._children]
        if len(self._children) < self._size:
            waits.append(max(0.0, self._start_at - now))
        return min(waits, default=1.0)

    def close(self) -> None:
        """Kill what there is, and wait for it, not for ever."""
        self._closed = True
        for child in self._children:
            child.kill()
        for child in self._children:
            child.close()
            try:
                child.popen.wait(REAPED_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("a killed handler process does not end", pid=child.popen.pid)
        self._selector.close()
        os.close(self._woken)
        os.close(self._waker)

    # -- the children

    def _start(self, now: float) -> None:
        """One more. Without it the others go on: a machine that has no process or memory left for now is no reason to lose what they run."""
        try:
            child = Child(self._boot, now)
        except OSError as exc:
            log.error("a handler process cannot be started", error=str(exc))
            self._wait_longer()
            return
        self._children.append(child)
        self._selector.register(child.sock, selectors.EVENT_READ)

    def _wait_longer(self) -> None:
        self._start_at = self._clock.monotonic() + self._pause
        self._pause = min(self._pause * 2, LAST_PAUSE)

    def _takes_more(self, child: Child) -> bool:
        running = child.running
        if running is None or child.gone or child.killed:
            return False
        return len(child.line) < AHEAD and self._clock.monotonic() - (running.began or running.at) < NOT_SHORT

    def _of(self, task: str, fence: int) -> tuple[Child | None, Handed | None]:
        for child in self._children:
            for handed in child.line:
                if handed.task.id == task and handed.task.fence == fence:
                    return child, handed
        return None, None

    def _taken_back(self, child: Child, unstarted: Iterable[Handed] = ()) -> None:
        """Whatever it has not begun goes back to the host, the last first, so that their order is kept there; or is reported as never begun."""
        for handed in reversed(child.take_back()):
            if handed.quiet:
                continue
            if handed in unstarted:
                self._report(handed.task.id, handed.task.fence, Unstarted(), (), 0.0)
            else:
                self._back(handed.task.id, handed.task.fence)

    def _heard(self, child: Child, frame: FromChild, now: float) -> None:
        child.seen, child.silent = now, False
        running = child.running
        match frame:
            case Ready(problem=problem):
                if problem:
                    log.error("a handler process cannot start", problem=problem)
                    child.kill()
                else:
                    child.ready = True
                    child.send(self._until)
            case Began():
                if running is not None:
                    running.began = now
                    child.patience = 0.0
                    if running.policy.run_ms:
                        self._kill_later(running, (running.policy.run_ms + running.policy.grace_ms) / 1000, Cause.LIMIT)
            case Settled(task=task, fence=fence, seconds=seconds):
                if running is not None and not running.quiet:
                    running.quiet = True  # whatever becomes of it, its end is written
                    self._report(task, fence, Committed(), (), seconds)
            case Ended(task=task, fence=fence, outcome=outcome, submits=submits, seconds=seconds):
                self._pause = FIRST_PAUSE
                if running is not None:
                    child.line.popleft()
                    if not running.quiet:
                        self._report(task, fence, outcome, submits, seconds)
            case Said(task=task, fence=fence, told=told):
                self._tell(task, fence, told)
            case Known(task=task, fence=fence, intent=intent, call=call):
                self._know(task, fence, intent, call)
            case Beat():
                pass

    def _gone(self, child: Child) -> None:
        """Its pipe is closed, and it is killed: what it had not begun is the host's again. The rest when it is certain that no code of it runs any more."""
        if not child.closed:
            self._taken_back(child)
            self._selector.unregister(child.sock)
            child.close()
        code = child.popen.poll()
        if code is not None:
            self._children.remove(child)
            self._died(child, code)

    def _died(self, child: Child, code: int) -> None:
        """What it ran, and nothing else, is reported: killed for a reason, or crashed. What had leave to begin, and did not come to it, is the host's again."""
        for handed in list(child.line)[:0:-1]:
            if not handed.quiet:
                self._back(handed.task.id, handed.task.fence)
        running = child.running
        if running is None or not running.began:
            self._wait_longer()
        if running is None or running.quiet:
            return
        task = running.task
        outcome: AnyOutcome
        if not running.began:
            outcome = Unstarted()
        elif running.why:
            outcome = Killed(running.why, f"killed: {running.why}")
        else:
            outcome = Crashed(f"its process ended with code {code}")
            log.warning("a handler process died", task=task.id, handler=task.handler, code=code)
        self._report(task.id, task.fence, outcome, (), 0.0)

    def _kill_later(self, running: Handed, seconds: float, why: Cause) -> None:
        at = self._clock.monotonic() + seconds
        if not running.kill_at or at < running.kill_at:
            running.kill_at, running.why = at, why

    def _judged(self, child: Child, now: float) -> float:
        """Kill what is over its limit or silent, take back what has not begun behind something slow or in a process that stands still; seconds until it is to be judged again."""
        if child.gone or child.killed:
            return REAPED_AGAIN
        if len(child.line) > 1 or (child.line and not child.line[0].began):
            first = child.line[0]
            slow_at = first.began + NOT_SHORT if first.began else first.at + max(NOT_SHORT, child.patience)
            if now < slow_at:
                return slow_at - now
            if not first.began:
                child.patience = 2 * max(NOT_SHORT, child.patience)  # on a machine so busy something shall begin at last
            self._taken_back(child)
        running = child.running
        if running is None:
            if child.silent and now >= child.seen + SILENT_SECONDS:
                child.kill()
                return REAPED_AGAIN
            return 1.0
        silent_at = child.seen + running.policy.heartbeat_ms / 1000
        if running.kill_at and now >= running.kill_at:
            child.kill()
            return REAPED_AGAIN
        if now >= silent_at:
            running.why = Cause.LIMIT
            child.kill()
            return REAPED_AGAIN
        limits = [silent_at - now, *([running.kill_at - now] if running.kill_at else [])]
        return max(0.01, min(limits))
