"""When the outermost transaction of a caller's SQLAlchemy connection has been committed.

Used by ``callers`` for wake-ups. SQLAlchemy tells of a COMMIT before it sends it and not afterwards; that it is over shows when the session says so, when the transaction's
object is gone, or when the next one begins, whichever comes first. What must never happen here: an act before the commit, or after a rollback to a savepoint or of
the whole; an exception into the caller's commit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import structlog
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

log = structlog.get_logger(__name__)
Act = Callable[[], None]
_SESSION_KEY = "millstream_watch"
_watches: weakref.WeakKeyDictionary[Connection, Watch] = weakref.WeakKeyDictionary()


def acted(act: Act) -> None:
    """Do it; what it raises is logged: the caller's commit stands."""
    try:
        act()
    except Exception:
        log.exception("a wake-up after a commit failed; the poll finds the task")


class Watch:
    """Acts that wait for the commit of one connection's transaction."""

    def __init__(self, connection: Connection) -> None:
        self._waiting: list[Act | None] = []  # None: a savepoint was set there
        self._committing = False
        self._root: Callable[[], Any] = lambda: None
        for name, react in (
            ("begin", lambda _: self.ended()),
            ("commit", lambda _: self._commits()),
            ("commit_twophase", lambda *_: self._commits()),
            ("rollback", lambda _: self._rolled_back()),
            ("rollback_twophase", lambda *_: self._rolled_back()),
            ("savepoint", lambda _, __: self._waiting.append(None)),
            ("release_savepoint", lambda *_: self._released()),
            ("rollback_savepoint", lambda *_: self._back()),
        ):
            event.listen(connection, name, react)

    def add(self, connection: Connection, act: Act) -> None:
        root = connection.get_transaction()
        if root is not self._root():
            self._root = weakref.ref(root) if root is not None else lambda: None
            weakref.finalize(root, self.ended).atexit = False
        self._waiting.append(act)

    def ended(self) -> None:
        """The transaction is over, or was never begun."""
        if self._committing:
            self._committing = False
            acts, self._waiting = self._waiting, []
            for act in acts:
                if act is not None:
                    acted(act)

    def _commits(self) -> None:
        self._committing = True

    def _rolled_back(self) -> None:
        self._committing = False
        self._waiting.clear()

    def _innermost(self) -> int:
        """Where the last savepoint that is still open was set; before everything, if that was before this watch."""
        return next((i for i in range(len(self._waiting) - 1, -1, -1) if self._waiting[i] is None), -1)

    def _released(self) -> None:
        at = self._innermost()
        if at >= 0:
            del self._waiting[at]

    def _back(self) -> None:
        """Savepoints end from the inside out; where an outer one is undone alone, an act too many is left, which costs a look into the table."""
        del self._waiting[max(self._innermost(), 0) :]


def after_commit(connection: Connection, session: Session | None, act: Act) -> None:
    """Do ``act`` once the outermost transaction of ``connection`` is committed; never, if it is rolled back."""
    watch = _watches.get(connection)
    if watch is None:
        watch = _watches[connection] = Watch(connection)
    watch.add(connection, act)
    if session is not None:
        if _SESSION_KEY not in session.info:
            event.listen(session, "after_commit", _session_committed)
        session.info[_SESSION_KEY] = watch


def _session_committed(session: Session) -> None:
    """Also called at the end of a savepoint: then no COMMIT was sent and nothing is due."""
    session.info[_SESSION_KEY].ended()
