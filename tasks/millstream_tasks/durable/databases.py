"""The databases that a handler's code and our statements about its attempt reach, opened when they are first needed, in the process that runs handlers.

Made by that process, after exec: no connection is inherited. What must never happen here: a URL shown, which may hold a password.
"""

from __future__ import annotations

import threading

from millstream_schema.errors import TransactionRefused
from millstream_schema.ports import Clock
from millstream_schema.store.database import Database
from millstream_schema.store.handler_transactions import HeldDatabase


class HandlerDatabases:
    """``url``, ``prefix``, ``timeout_ms``: of the installation's own database."""

    def __init__(self, url: str, prefix: str, timeout_ms: int, clock: Clock) -> None:
        self._url = url
        self._prefix = prefix
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._short: Database | None = None
        self._held: Database | None = None

    def short(self) -> Database:
        """Ours, for statements about an attempt. Raises StoreUnavailable at the first use."""
        with self._lock:
            if self._short is None:
                self._short = Database(self._url, self._clock, prefix=self._prefix, timeout_ms=self._timeout_ms)
            return self._short

    def held(self) -> Database:
        """Ours, on connections that a handler's transaction may hold. Raises TransactionRefused for one in memory."""
        with self._lock:
            if self._held is None:
                found = HeldDatabase(self._url, self._clock, prefix=self._prefix, timeout_ms=self._timeout_ms)
                if found.dialect == "sqlite" and found.url.database in (None, "", ":memory:"):
                    raise TransactionRefused(
                        "ctx.transaction() needs a database in a file or on a server: one in memory has a single connection"
                    )
                self._held = found
            return self._held

    def close(self) -> None:
        with self._lock:
            for database in (self._short, self._held):
                if database is not None:
                    database.close()
            self._short = self._held = None
