"""A TCP proxy before PostgreSQL or MariaDB that loses one COMMIT, or the answer to it, and with it the connection.

Called by the tests of lost answers. A client of one connection waits for the answer to its COMMIT, so that the request for it is a packet of its own: nothing else is understood
of what passes. What must never happen here: a byte changed.
"""

from __future__ import annotations

import contextlib
import enum
import re
import socket
import threading
from types import TracebackType
from typing import Self

import sqlalchemy as sa

COMMITS = {"postgresql": b"Q\x00\x00\x00\x0bCOMMIT\x00", "mysql": b"\x07\x00\x00\x00\x03COMMIT"}
"""The packet in which psycopg, and PyMySQL, ask for it."""
WRITES = re.compile(rb"INSERT |(?<!FOR )UPDATE |DELETE ")
LATER = 0.05
"""Seconds after which a COMMIT that hung in the network arrives."""


class Moment(enum.StrEnum):
    """What becomes of the COMMIT."""

    ANSWER = "its answer is lost"
    REQUEST = "it never arrives"
    LATE = "it arrives when its client has given it up"


class _Pipe:
    """One client and its connection to the server."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near = near
        self.far = far
        self.mute = False
        self.writes = False
        self.over = threading.Event()

    def cut(self, *ends: socket.socket) -> None:
        for end in ends or (self.near, self.far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Swallowing:
    """Between a client and the server of ``url``. Clients use :attr:`url`."""

    def __init__(self, url: str) -> None:
        server = sa.make_url(url)
        self._commit = COMMITS["mysql" if server.get_backend_name() in ("mysql", "mariadb") else "postgresql"]
        self._hides_reads = server.get_backend_name() == "postgresql"  # statements it knows have names; reads have no COMMIT there
        self._server = (server.host or "127.0.0.1", server.port or {"postgresql": 5432}.get(server.get_backend_name(), 3306))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        here = server.set(host="127.0.0.1", port=self._listener.getsockname()[1])
        if server.get_backend_name() == "postgresql":  # what is encrypted cannot be read here
            here = here.update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
        self.url = here.render_as_string(hide_password=False)
        self._lock = threading.Lock()
        self._pipes: list[_Pipe] = []
        self._threads: list[threading.Thread] = []
        self._at = 0
        self._moment = Moment.ANSWER
        self._commits = 0
        self._struck: _Pipe | None = None

    def arm(self, at: int, moment: Moment) -> None:
        """Strike at the ``at``-th COMMIT from now on, of those that something was written before (PostgreSQL: of all; reads have none there)."""
        with self._lock:
            self._at, self._moment, self._commits, self._struck = at, moment, 0, None

    def disarm(self) -> bool:
        """Strike no more; whether it did. What was on its way to the server has arrived, and been answered."""
        with self._lock:
            self._at, struck = 0, self._struck
        return struck is not None and struck.over.wait(10)

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            pipes, threads = list(self._pipes), list(self._threads)
        for pipe in pipes:
            pipe.cut()
        for thread in threads:
            thread.join(10)
        for pipe in pipes:
            pipe.near.close()
            pipe.far.close()
        self._listener.close()

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="swallowing", daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            pipe = _Pipe(near, socket.create_connection(self._server))
            for end in (pipe.near, pipe.far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pipes.append(pipe)
            self._spawn(self._requests, pipe)
            self._spawn(self._answers, pipe)

    def _requests(self, pipe: _Pipe) -> None:
        with contextlib.suppress(OSError):
            while data := pipe.near.recv(1 << 16):
                if not data.endswith(self._commit):
                    pipe.writes = pipe.writes or self._hides_reads or bool(WRITES.search(data))
                elif pipe.writes and self._strikes(pipe):
                    self._strike(pipe, data)
                    return
                else:
                    pipe.writes = False
                pipe.far.sendall(data)
        pipe.cut()

    def _strikes(self, pipe: _Pipe) -> bool:
        with self._lock:
            self._commits += 1
            if self._commits != self._at:
                return False
            self._struck = pipe
            return True

    def _strike(self, pipe: _Pipe, data: bytes) -> None:
        if self._moment is Moment.REQUEST:
            pipe.cut()
            return
        pipe.mute = True
        if self._moment is Moment.LATE:
            pipe.cut(pipe.near)
            threading.Event().wait(LATER)
        pipe.far.sendall(data)  # its answer ends the pipe

    def _answers(self, pipe: _Pipe) -> None:
        with contextlib.suppress(OSError):
            while (data := pipe.far.recv(1 << 16)) and not pipe.mute:
                pipe.near.sendall(data)
        pipe.cut()
        pipe.over.set()
