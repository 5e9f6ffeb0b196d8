"""The row of the task sweep: when the last good one was, and until when nothing expires because the database was away."""

from __future__ import annotations

import msgspec

from .database import Transaction
from .single_rows import lock_single

SWEEP = "task-sweep"


class Guard(msgspec.Struct, frozen=True):
    """``now_us``: the database's time; ``until_us``: before that no lease of a session is judged."""

    now_us: int
    until_us: int

    @property
    def closed(self) -> bool:
        return self.now_us < self.until_us


def mark_sweep(tx: Transaction, lease_us: int, *, distrust: bool) -> Guard:
    """Record a sweep. If the last good one is older than a lease, or the caller distrusts the clock, nothing expires for one full lease.

    While the database is away nobody can renew: those leases tell of the outage, not of their workers.
    """
    t = tx.t.coordinator
    row = lock_single(tx, SWEEP)
    now = tx.now_us()
    until = int(row["expires_us"])
    if distrust or now - int(row["ticked_us"]) > lease_us:
        until = now + lease_us
    tx.update(t, t.c.id == SWEEP, t.c.rev == row["rev"], ticked_us=max(now, int(row["ticked_us"])), expires_us=until)
    return Guard(now, until)
