"""Forgetting: settled tasks past their time with all that is kept of them, delivered ends, handlers nobody serves any more, old operations. So much at once; the next tick goes on.

A part of the coordinator's sweeps. What must never happen here: a task that something refers to; a tick held up by a large table; a permit's sequence.
"""

from __future__ import annotations

import structlog

from millstream_schema.durable.finding import Place
from millstream_schema.durable.retention import DEFAULT_US, RetentionRule, keep_us, shortest_us
from millstream_schema.ports import Clock
from millstream_schema.store import catalogue, deliveries, operations, retention
from millstream_schema.store.database import Database

from .setting_aside import SettingAside

log = structlog.get_logger(__name__)
CHUNK = 500
CHUNKS = 10
"""Parts of one tick."""
OPERATIONS_US = 365 * 24 * 3600 * 1_000_000
"""How long is kept who did what to many tasks."""
PAUSE = 60.0
"""Seconds until the settled tasks are looked through anew."""


class RetentionSweep:
    """Walks the namespaces one after the other, each by the index of settled tasks from the oldest end."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db = database
        self._clock = clock
        self._aside = SettingAside(clock)
        self._namespace = ""
        self._after: Place | None = None
        self._next_at = 0.0
        self.purged = 0

    @property
    def set_aside(self) -> int:
        return self._aside.count

    def sweep(self) -> None:
        """The next parts, unless all was looked through a moment ago. Raises StoreError."""
        if self._clock.monotonic() < self._next_at:
            return
        for _ in range(CHUNKS):
            if not self._part():
                self._namespace, self._after = "", None
                self._next_at = self._clock.monotonic() + PAUSE
                self._aside.each("ends and handlers", self._others)
                return

    def _part(self) -> bool:
        """One part of one namespace; False: that was the last."""
        rules = self._db.read(retention.rules)
        if not self._namespace or self._after is None:
            found = self._db.read(lambda tx: retention.next_namespace(tx, self._namespace))
            if found is None:
                return False
            self._namespace = found
        namespace, after = self._namespace, self._after
        shortest = shortest_us(rules, namespace)
        if shortest is None:
            self._after = None
            return True
        now = self._db.read(lambda tx: tx.now_us())
        rows = self._db.read(lambda tx: retention.settled_before(tx, namespace, now - shortest, after, CHUNK))
        self._after = rows[-1].place if len(rows) == CHUNK else None
        over = [r.id for r in rows if _is_over(r, rules, namespace, now)]
        if over:
            self._aside.each(f"tasks of {namespace}", lambda: self._purge(namespace, over))
        return True

    def _purge(self, namespace: str, over: list[str]) -> None:
        gone = self._db.run(lambda tx: retention.purge(tx, namespace, over))
        self.purged += gone
        if gone:
            log.info("settled tasks were purged", namespace=namespace, tasks=gone)

    def _others(self) -> None:
        now = self._db.read(lambda tx: tx.now_us())
        for _ in range(CHUNKS):
            if not self._db.run(lambda tx: deliveries.purge(tx, now - DEFAULT_US, CHUNK)):
                break
        self._db.run(lambda tx: catalogue.forget(tx, now - DEFAULT_US))
        self._db.run(lambda tx: operations.forget(tx, now - OPERATIONS_US))


def _is_over(row: retention.Settled, rules: list[RetentionRule], namespace: str, now: int) -> bool:
    keep = keep_us(rules, namespace, row.queue, row.handler)
    return keep > 0 and row.settled_us < now - keep
