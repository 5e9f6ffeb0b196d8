"""The sweep over durable tasks: lost sessions, due work, what may not start any more, what is parked under something that is over.

Bounded in each part; a failing item is set aside and stops nothing.
Run by the holder of the coordinator's lease, as often as it ticks: the fast path is the claims of workers, this is the net under it. What must never happen here: a session
judged by an outage of the database; user code.
"""

from __future__ import annotations

from millstream_schema.ports import Chance, Clock
from millstream_schema.store import blockers, claims, gates, quotas, settling, sweeps
from millstream_schema.store.database import Database

from .setting_aside import SettingAside

CHUNK = 200
CHUNKS = 50
BLOCKERS = 200
"""Reasons for which tasks are parked that one sweep looks at."""


class TaskSweep:
    """``lease_ms``: of worker sessions; ``margin_ms``: how long after its end a lease is taken for over, for clocks that differ a little."""

    def __init__(self, database: Database, clock: Clock, chance: Chance, lease_ms: int, margin_ms: int) -> None:
        self._db = database
        self._clock = clock
        self._chance = chance
        self._lease_us = lease_ms * 1000
        self._margin_us = margin_ms * 1000
        self._seen: tuple[int, float] | None = None
        self._aside = SettingAside(clock)
        self._after = ""
        self.guarded = False

    @property
    def set_aside(self) -> int:
        """How often an item failed."""
        return self._aside.count

    def sweep(self) -> None:
        """Everything that is due. Raises StoreError when the database is away; the next call goes on."""
        guard = self._db.run(lambda tx: sweeps.mark_sweep(tx, self._lease_us, distrust=self._diverged(tx.now_us())))
        self.guarded = guard.closed
        if not guard.closed:
            for session in self._db.read(settling.holding_sessions):
                self._aside.each(f"session {session}", lambda s=session: self._session(s))  # type: ignore[misc]
        for _ in range(CHUNKS):
            if self._db.run(lambda tx: claims.wake_due(tx, CHUNK)) < CHUNK:
                break
        for _ in range(CHUNKS):
            if self._db.run(lambda tx: claims.expire_late(tx, CHUNK)) < CHUNK:
                break
        self._blockers()
        self._db.run(lambda tx: quotas.forget(tx, CHUNK))

    def _diverged(self, now_us: int) -> bool:
        """Whether the database's clock and ours went apart by half a lease since the last sweep: one of them was set."""
        mono = self._clock.monotonic()
        before, self._seen = self._seen, (now_us, mono)
        return before is not None and abs((now_us - before[0]) - (mono - before[1]) * 1e6) > self._lease_us / 2

    def _session(self, session: str) -> None:
        if not self._db.run(lambda tx: settling.expire_session(tx, session, self._margin_us)):
            return
        for _ in range(CHUNKS):
            if self._db.run(lambda tx: settling.take_back(tx, session, lambda: self._chance.uniform(0.0, 1.0), CHUNK)) < CHUNK:
                break

    def _blockers(self) -> None:
        """What blocks tasks: the next in line of a free permit may have been passed over while somebody held its row, a pause or a rate may be over.

        So many at once; the next sweep goes on where this one stopped.
        """
        for _ in range(BLOCKERS):
            found = self._db.read(lambda tx: blockers.following(tx, self._after))
            self._after = found or ""
            if found is None:
                return
            self._aside.each(found, lambda b=found: self._blocker(b))  # type: ignore[misc]

    def _blocker(self, blocker: str) -> None:
        for _ in range(CHUNKS):
            if self._db.run(lambda tx: gates.relieve(tx, blocker, CHUNK)) < CHUNK:
                break
