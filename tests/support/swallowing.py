"""A TCP proxy before PostgreSQL or MariaDB that loses one COMMIT, or the answer to it, and with it the connection.

Called by the tests of lost answers. A client of one connection waits for the answer to its COMMIT, so that the request for it is a packet of its own: nothing else is understood
of what passes. What must never happen here: a byte changed.
"""

from __future__ import annotations

import enum
import re
import socket
import threading

import sqlalchemy as sa
from tests.support.forwarding import Forwarder, Pipe

COMMITS = {"postgresql": b"Q\x00\x00\x00\x0bCOMMIT\x00", "mysql": b"\x07\x00\x00\x00\x03COMMIT"}
"""The packet in which psycopg, and PyMySQL, ask for it."""
PORTS = {"postgresql": 5432, "mysql": 3306}
WRITES = re.compile(rb"INSERT |(?<!FOR )UPDATE |DELETE ")
LATER = 0.05
"""Seconds after which a COMMIT that hung in the network arrives."""


class Moment(enum.StrEnum):
    """What becomes of the COMMIT."""

    ANSWER = "its answer is lost"
    REQUEST = "it never arrives"
    LATE = "it arrives when its client has given it up"


class _Session(Pipe):
    """``writes``: whether its transaction has; ``mute``: its answers are lost."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        super().__init__(near, far)
        self.mute = False
        self.writes = False
        self.over = threading.Event()


class Swallowing(Forwarder):
    """Between a client and the server of ``url``. Clients use :attr:`url`."""

    pipe = _Session

    def __init__(self, url: str) -> None:
        server = sa.make_url(url)
        kind = "postgresql" if server.get_backend_name() == "postgresql" else "mysql"
        super().__init__(server.port or PORTS[kind], host=server.host or "127.0.0.1")
        self._commit = COMMITS[kind]
        self._hides_writes = kind == "postgresql"  # statements it knows have names; reads have no COMMIT there
        here = server.set(host="127.0.0.1", port=self.port)
        if kind == "postgresql":  # what is encrypted cannot be read here
            here = here.update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
        self.url = here.render_as_string(hide_password=False)
        self._at = 0
        self._moment = Moment.ANSWER
        self._commits = 0
        self._struck: _Session | None = None

    def arm(self, at: int, moment: Moment) -> None:
        """Strike at the ``at``-th COMMIT from now on, of those that something was written before (PostgreSQL: of all; reads have none there)."""
        with self._lock:
            self._at, self._moment, self._commits, self._struck = at, moment, 0, None

    def disarm(self) -> bool:
        """Strike no more; whether it did. What was on its way to the server has arrived, and been answered."""
        with self._lock:
            self._at, struck = 0, self._struck
        return struck is not None and struck.over.wait(10)

    def request(self, pipe: _Session, data: bytes) -> bool:
        if not data.endswith(self._commit):
            pipe.writes = pipe.writes or self._hides_writes or bool(WRITES.search(data))
        elif pipe.writes and self._strikes(pipe):
            self._strike(pipe, data)
            return False
        else:
            pipe.writes = False
        pipe.far.sendall(data)
        return True

    def _strikes(self, pipe: _Session) -> bool:
        with self._lock:
            self._commits += 1
            if self._commits != self._at:
                return False
            self._struck = pipe
            return True

    def _strike(self, pipe: _Session, data: bytes) -> None:
        if self._moment is Moment.REQUEST:
            pipe.cut()
            return
        pipe.mute = True
        if self._moment is Moment.LATE:
            pipe.cut(pipe.near)
            threading.Event().wait(LATER)
        pipe.far.sendall(data)

    def answer(self, pipe: _Session, data: bytes) -> None:
        if pipe.mute:
            pipe.cut()
        else:
            pipe.near.sendall(data)

    def over(self, pipe: _Session) -> None:
        pipe.over.set()
