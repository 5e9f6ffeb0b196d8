"""A TCP forwarder to a server, which can be cut, or made to swallow what its clients send.

Called by the partition scenario, where it listens at an address that a network namespace reaches, and by tests whose broker or database goes away for one client alone. What must
never happen here: a byte changed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class Pipe:
    """One client and its connection to the server."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near = near
        self.far = far

    def cut(self, *ends: socket.socket) -> None:
        """These ends, or both."""
        for end in ends or (self.near, self.far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Forwarder:
    """Accepts on ``address`` and copies both ways to ``target``. Daemon threads; ends with the context.

    ``deaf``: what clients send does not arrive, and they are not told; ``swallowed`` is set when that happened.
    """

    pipe: Callable[[socket.socket, socket.socket], Any] = Pipe

    def __init__(self, target: int, address: str = "127.0.0.1", host: str = "127.0.0.1") -> None:
        self._target = (host, target)
        self._listener = socket.create_server((address, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pipes: list[Any] = []
        self._threads: list[threading.Thread] = []
        self.deaf = False
        self.swallowed = threading.Event()

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        with self._lock:
            pipes, threads = list(self._pipes), list(self._threads)
        for thread in threads:
            thread.join(10)
        for pipe in pipes:
            pipe.near.close()
            pipe.far.close()
        self._listener.close()

    def cut(self) -> None:
        """End every connection there is; new ones are accepted."""
        with self._lock:
            pipes = list(self._pipes)
        for pipe in pipes:
            pipe.cut()

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="forwarder", daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(self._target)
            except OSError:  # the server is down just now
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pipe = self.pipe(near, far)
            with self._lock:
                self._pipes.append(pipe)
            self._spawn(self._requests, pipe)
            self._spawn(self._answers, pipe)

    def _requests(self, pipe: Any) -> None:
        with contextlib.suppress(OSError):
            while data := pipe.near.recv(1 << 16):
                if not self.request(pipe, data):
                    return
        pipe.cut()

    def _answers(self, pipe: Any) -> None:
        with contextlib.suppress(OSError):
            while data := pipe.far.recv(1 << 16):
                self.answer(pipe, data)
        pipe.cut()
        self.over(pipe)

    # -- what those that do more than copy say otherwise

    def request(self, pipe: Any, data: bytes) -> bool:
        """Something a client has sent; whether more of it is read."""
        if self.deaf:
            self.swallowed.set()
        else:
            pipe.far.sendall(data)
        return True

    def answer(self, pipe: Any, data: bytes) -> None:
        """Something the server has sent."""
        pipe.near.sendall(data)

    def over(self, pipe: Any) -> None:
        """The server has said all that it will."""
