"""Outcomes of calls to the outside that attempts know and have not written down yet, kept beside their worker's session: a process that is killed meanwhile takes none along.

Filled by the pools, written by the host once the attempt is over or not its own any more. What must never happen here: an outcome that is dropped before the database has
answered for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.errors import CommitUnknown, StoreError, StoreUnavailable
from millstream_schema.store import intents
from millstream_schema.store.database import Database

log = structlog.get_logger(__name__)
Know = Callable[[str, int, IntentId, KnownCall | None], None]
"""Task, fence, which call, what is known of it; None: its attempt has written it. Thread-safe."""


class KeptCalls:
    """``add`` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], dict[IntentId, KnownCall]] = {}

    def __len__(self) -> int:
        """Attempts of which something is not written."""
        return len(self._known)

    def add(self, task: str, fence: int, intent: IntentId, call: KnownCall | None) -> None:
        with self._lock:
            calls = self._known.setdefault((task, fence), {})
            if call is not None:
                calls[intent] = call
            else:
                calls.pop(intent, None)
            if not calls:
                del self._known[task, fence]

    def write(self, database: Database, runs: Callable[[str, int], bool]) -> None:
        """Those of attempts that do not run here any more. Raises StoreUnavailable, CommitUnknown: the next call writes them again, which changes nothing."""
        with self._lock:
            left = [(key, dict(calls)) for key, calls in self._known.items() if not runs(*key)]
        for (task, fence), calls in left:
            for intent, call in calls.items():
                try:
                    database.run(lambda tx, i=intent, c=call: intents.write_known(tx, i, c))  # type: ignore[misc]
                except (StoreUnavailable, CommitUnknown):
                    raise
                except StoreError as exc:
                    log.error(
                        "the outcome of a call by ctx.external cannot be stored: it stays in doubt",
                        task=task,
                        intent=str(intent),
                        error=str(exc),
                    )
                self.add(task, fence, intent, None)
