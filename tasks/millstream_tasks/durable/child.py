"""One handler process as the task process sees it: its pipe, what it has been handed, and leave to begin.

Used by the process pool, from its thread alone. What must never happen here: a wait on the process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec

from millstream_schema.durable.records import Policy, TaskRow
from millstream_schema.durable.states import Cause

from ..shell.wire import AT_ONCE, Unpacked, Unsent, pack
from .frames import FromChild, Run, TaskBoot, decode_from_child, encode
from .leave import Granter

LOOKED_AGAIN, REAPED_AGAIN = 1.0, 0.02
"""Seconds between looks at whether a process has ended, and at one that was killed."""


class Handed(msgspec.Struct):
    """An attempt that a process was handed."""

    task: TaskRow
    policy: Policy
    at: float
    began: float = 0.0
    kill_at: float = 0.0
    why: Cause = Cause.NONE
    quiet: bool = False
    """Its report does not matter any more."""


class Child:
    """``line``: what it runs, and what it was handed behind that, in order. ``silent``: it let something be taken back that it should have begun, and has not been heard since."""

    def __init__(self, boot: TaskBoot, now: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undone:
            undone.callback(ours.close)
            self._leave = Granter()
            undone.callback(self._leave.close)
            command = [
                sys.executable,
                "-m",
                "millstream_tasks.task_main",
                "--fd",
                str(theirs.fileno()),
                "--leave",
                str(self._leave.reading),
            ]
            inherited = [theirs.fileno(), self._leave.reading]
            self.popen = subprocess.Popen(command, pass_fds=inherited, start_new_session=True, stdin=subprocess.DEVNULL)
            undone.pop_all()
        ours.setblocking(False)
        self.sock = ours
        self.ready = False
        self.silent = False
        self.gone = False
        """Its pipe is closed; it may still have to be waited for."""
        self.killed = False
        self.awaited = False
        """Whether somebody waits for its pipe to take more."""
        self.seen = now
        self.patience = 0.0
        """Seconds it has to begin something, if more than usual: it did not come to it before."""
        self._look_at = now
        self.line: deque[Handed] = deque()
        self._unpacked = Unpacked()
        self._unsent = Unsent()
        self.send(boot)

    @property
    def running(self) -> Handed | None:
        """What it runs or is about to begin."""
        return self.line[0] if self.line else None

    @property
    def free(self) -> bool:
        """Whether an attempt would begin at once."""
        return self.ready and not (self.line or self.silent or self.gone or self.killed)

    @property
    def writing(self) -> bool:
        """Whether more is to be sent as soon as its pipe takes it."""
        return bool(self._unsent)

    def hand(self, task: TaskRow, policy: Policy, now: float) -> None:
        if not self.line:
            self.seen = now
        self.line.append(Handed(task, policy, now))
        self.send(Run(task, self._leave.grant()))

    def take_back(self) -> list[Handed]:
        """What has not begun, and now will not."""
        if self.closed:
            return []
        count = self._leave.take_back()
        back = [self.line.pop() for _ in range(min(count, len(self.line)))]
        if back and not self.line:
            self.silent = True
        return back[::-1]

    def send(self, frame: msgspec.Struct) -> None:
        if self.gone:
            return
        self._unsent.add(pack(encode(frame)))
        self.push()

    def push(self) -> None:
        """Send what its pipe takes now. One that is gone tells so by its end of file."""
        try:
            self._unsent.push(self.sock)
        except OSError:
            self._unsent.clear()

    def heard(self) -> Iterator[FromChild]:
        """What it has said; at its end of file, or when it is out of step, it is gone: whatever it still does has no one to tell."""
        while not self.gone:
            try:
                data = self.sock.recv(AT_ONCE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.leave()
                return
            try:
                for frame in self._unpacked.feed(data):
                    yield decode_from_child(frame)
            except (OSError, msgspec.MsgspecError):
                self.leave()
            if len(data) < AT_ONCE:
                return

    def ended(self, now: float) -> bool:
        """Whether it has ended, looked at now and then: what its handlers have started and left behind may hold its pipe open. What it has said is there to be heard by now."""
        if self.gone or now < self._look_at:
            return False
        self._look_at = now + (REAPED_AGAIN if self.killed else LOOKED_AGAIN)
        return self.popen.poll() is not None

    def leave(self) -> None:
        """Whatever it still does, and what it has started, has no one to tell."""
        self.gone = True
        self.kill()

    def kill(self) -> None:
        """SIGKILL, which ends a stopped process, too; with whatever is in its group: what a handler has started must not outlive the lease either."""
        self.killed, self._look_at = True, 0.0
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nothing is left of it; the second where only its own entry is
            return

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def close(self) -> None:
        if not self.closed:
            self.sock.close()
            self._leave.close()
