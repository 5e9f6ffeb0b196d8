"""Subtasks as processes under a node, with spares kept warm so that a recovery does not wait for imports.

Used by node processes. What must never happen here: a node that waits for a child, a child that outlives its pipe.
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

from millstream_schema.control import Deployment, NodeMessage, SubtaskMessage, decode_to_node, encode

from .wire import Boot, FrameTooLong, pack, receive

log = structlog.get_logger(__name__)
Deliver = Callable[[SubtaskMessage | None], None]


class _Process:
    """One started process and its pipe; idle until it is given a deployment."""

    def __init__(self, boot: Boot) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        try:
            command = [sys.executable, "-m", "millstream_tasks.subtask_main", "--fd", str(theirs.fileno())]
            self.popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.sock = ours
        self.send(msgspec.msgpack.encode(boot))

    def send(self, data: bytes) -> bool:
        """Whether the pipe took it. Raises FrameTooLong."""
        frame = pack(data)
        try:
            self.sock.sendall(frame)
        except OSError:
            return False
        return True

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.sock.close()


class ProcessChild:
    """A running subtask process."""

    def __init__(self, process: _Process, deployment: Deployment, deliver: Deliver, wake: Callable[[], None]) -> None:
        self._process = process
        self._deliver = deliver
        self._wake = wake
        self.pid = process.popen.pid
        process.sock.settimeout(None)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outgoing.put(encode(deployment))
        threading.Thread(target=self._write, name=f"to-child-{self.pid}", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name=f"child-{self.pid}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            message = self._next()
            self._deliver(message)
            self._wake()
            if message is None:
                return

    def _next(self) -> SubtaskMessage | None:
        """What the child says next; None when it is dead, or taken for dead: whoever cannot be understood is killed."""
        try:
            data = receive(self._process.sock)
            return None if data is None else decode_to_node(data)
        except FrameTooLong as exc:
            log.error("a subtask's pipe is out of step; its process is killed", pid=self.pid, error=str(exc))
        except OSError:
            return None  # it ended in the middle of a message, or this end was closed
        except Exception:
            log.exception("a subtask's message cannot be decoded; its process is killed", pid=self.pid)
        self._process.popen.kill()
        return None

    def _write(self) -> None:
        """The pipe holds a few hundred kilobytes: a child that is stopped, or still importing, must not hold up its node."""
        while (data := self._outgoing.get()) is not None:
            try:
                if not self._process.send(data):
                    return
            except FrameTooLong as exc:
                log.error("a message to a subtask cannot be sent; its process is killed", pid=self.pid, error=str(exc))
                self._process.popen.kill()
                return

    def send(self, message: NodeMessage) -> None:
        self._outgoing.put(encode(message))

    def kill(self) -> None:
        """SIGKILL ends a stopped process, too. Reaped on a thread of its own."""
        self._process.popen.kill()
        self._outgoing.put(None)
        threading.Thread(target=self._reap, daemon=True).start()

    def _reap(self) -> None:
        self._process.popen.wait()
        self._reader.join(5)
        self._process.sock.close()


class ProcessLauncher:
    """Starts subtask processes; ``spares`` are kept ready."""

    def __init__(self, boot: Boot, wake: Callable[[], None], spares: int = 1) -> None:
        self._boot = boot
        self._wake = wake
        self._wanted = spares
        self._spares: list[_Process] = []
        self._lock = threading.Lock()
        self._closed = False
        self._refill()

    def launch(self, deployment: Deployment, deliver: Deliver) -> ProcessChild:
        """A process with this deployment; whatever is raised, none is left behind."""
        with self._lock:
            process = self._spares.pop() if self._spares else None
        if process is None or process.popen.poll() is not None:
            process = _Process(self._boot)
        try:
            child = ProcessChild(process, deployment, deliver, self._wake)
        except BaseException:  # one that cannot be encoded, no thread to be had
            process.end()
            raise
        threading.Thread(target=self._refill, daemon=True).start()
        return child

    def _refill(self) -> None:
        with self._lock:
            while not self._closed and len(self._spares) < self._wanted:
                self._spares.append(_Process(self._boot))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._spares:
                process.end()
            self._spares.clear()
