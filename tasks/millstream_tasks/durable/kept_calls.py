"""Outcomes of calls to the outside that attempts know and have not written down yet, kept beside their worker's session: a process that is killed meanwhile takes none along.

Filled by the pools, written by the host once the attempt is over or not its own any more. What must never happen here: an outcome that is dropped before the database has
answered for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import structlog

from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.errors import CommitUnknown, StoreUnavailable
from millstream_schema.store import intents
from millstream_schema.store.database import Database

log = structlog.get_logger(__name__)
AGAIN = 5.0
"""Seconds after which an outcome that the database refuses is tried again."""
Know = Callable[[str, int, IntentId, KnownCall | None], None]
"""Task, fence, which call, what is known of it; None: its attempt has written it. Thread-safe."""


class _Kept(msgspec.Struct, eq=False):
    """``until``: the database refused it, and is not asked again before this instant of the monotonic clock."""

    call: KnownCall
    until: float | None = None


class KeptCalls:
    """``add`` is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], dict[IntentId, _Kept]] = {}

    def __len__(self) -> int:
        """Attempts of which something is not written."""
        return len(self._known)

    def add(self, task: str, fence: int, intent: IntentId, call: KnownCall | None) -> None:
        with self._lock:
            if call is not None:
                self._known.setdefault((task, fence), {})[intent] = _Kept(call)
            else:
                self._drop((task, fence), intent)

    def write(self, database: Database, runs: Callable[[str, int], bool], now: float) -> None:
        """Those of attempts that do not run here any more; ``now``: of the monotonic clock. One that is refused is kept, tried again later, and holds up no other.

        Raises StoreUnavailable, CommitUnknown: the next call writes them again, which changes nothing.
        """
        with self._lock:
            left = [(key, intent, kept) for key, calls in self._known.items() if not runs(*key) for intent, kept in calls.items()]
        for key, intent, kept in left:
            if kept.until is not None and now < kept.until:
                continue
            try:
                database.run(lambda tx, i=intent, c=kept.call: intents.write_known(tx, i, c))  # type: ignore[misc]
            except (StoreUnavailable, CommitUnknown):
                raise
            except Exception as exc:  # also a defect of ours, or a row that this version cannot read: it is this call's alone
                if kept.until is None:
                    log.error(
                        "the outcome of a call by ctx.external cannot be stored; it is kept and tried again",
                        task=key[0],
                        intent=str(intent),
                        error=f"{type(exc).__name__}: {exc}",
                    )
                kept.until = now + AGAIN
                continue
            with self._lock:
                if self._known.get(key, {}).get(intent) is kept:
                    self._drop(key, intent)

    def _drop(self, key: tuple[str, int], intent: IntentId) -> None:
        calls = self._known.get(key, {})
        calls.pop(intent, None)
        if not calls:
            self._known.pop(key, None)
