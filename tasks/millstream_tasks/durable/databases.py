"""The databases that a handler's code and our statements about its attempt reach, opened when they are first needed, in the process that runs handlers.

Made by that process, after exec: no connection is inherited. What must never happen here: a URL shown, which may hold a password.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TypeVar

from millstream_schema.errors import TransactionRefused
from millstream_schema.ports import Clock
from millstream_schema.store.database import Database
from millstream_schema.store.handler_transactions import HeldDatabase

from .handlers import Source

D = TypeVar("D", bound=Database)


class HandlerDatabases:
    """``url``, ``prefix``, ``timeout_ms``: of the installation's own database. ``others``: users' own, by the names their handlers use."""

    def __init__(self, url: str, prefix: str, timeout_ms: int, clock: Clock, others: Mapping[str, Source]) -> None:
        self._url = url
        self._prefix = prefix
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._others = others
        self._lock = threading.Lock()
        self._short: Database | None = None
        self._held: dict[str, Database] = {}

    def short(self) -> Database:
        """Ours, for statements about an attempt. Raises TransactionRefused for one in memory; StoreUnavailable at the first use."""
        with self._lock:
            if self._short is None:
                self._short = _shared(Database(self._url, self._clock, prefix=self._prefix, timeout_ms=self._timeout_ms))
            return self._short

    def held(self, name: str) -> Database:
        """Ours (``""``) or a user's, on connections that a handler's transaction may hold. Raises TransactionRefused for one in memory, or a name nobody gave."""
        with self._lock:
            if name not in self._held:
                found = HeldDatabase(self._address(name), self._clock, prefix=self._prefix, timeout_ms=self._timeout_ms)
                self._held[name] = _shared(found)
            return self._held[name]

    def _address(self, name: str) -> str:
        if not name:
            return self._url
        if name not in self._others:
            known = ", ".join(sorted(self._others)) or "none"
            raise TransactionRefused(f"there is no database {name!r} here (known: {known}): name it in Handlers(databases={{...}})")
        source = self._others[name]
        return source if isinstance(source, str) else source()

    def close(self) -> None:
        """Give the connections back."""
        with self._lock:
            for database in (self._short, *self._held.values()):
                if database is not None:
                    database.close()
            self._short = None
            self._held.clear()


def _shared(database: D) -> D:
    """One that a second connection leads to as well. Raises TransactionRefused."""
    if database.dialect == "sqlite" and database.url.database in (None, "", ":memory:"):
        raise TransactionRefused(
            "ctx.transaction() and ctx.external() need a database in a file or on a server: one in memory has a single connection"
        )
    return database
