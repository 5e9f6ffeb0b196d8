"""The sweep over schedules: fires what is due, starts what was queued, records what was missed. Bounded; a schedule it fails on is HELD with the reason, and stops no other.

Run by the holder of the coordinator's lease, woken at the next due instant; two at once do no harm: a fire is consumed by compare-and-set. An unknown COMMIT is resolved by
the next sweep, which finds the fire consumed or does it again. What must never happen here: a fire decided by this machine's clock; user code.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from millstream_schema.durable.recurrence import SECOND
from millstream_schema.errors import CommitUnknown, MillstreamError, StoreUnavailable
from millstream_schema.ports import Clock, Ids
from millstream_schema.store import fires, schedules
from millstream_schema.store.database import Database, Transaction

log = structlog.get_logger(__name__)
TOGETHER = 200
"""Schedules that one look at the table gives."""
PARTS = 20
"""Transactions of one schedule before the next one gets its turn."""
LONGEST = 1.0
"""Seconds after which a sweep ends, with work left or not: the lease has to be renewed."""
HELD_US = 30 * SECOND
"""When a held schedule is looked at again."""
UPKEEP_EVERY = 300.0
KEPT_US = 30 * 86_400 * SECOND
"""How long what is over stays: a manual trigger's request is one fire at least that long."""


class ScheduleSweep:
    """``fired``: told of each queue that got a task; it may neither wait nor fail. ``poll``: seconds between two looks for queued fires."""

    def __init__(self, database: Database, clock: Clock, ids: Ids, poll: float, fired: Callable[[str], None] | None = None) -> None:
        self._db = database
        self._clock = clock
        self._ids = ids
        self._poll = poll
        self._fired = fired
        self._waiting_at = 0.0
        self._upkeep_at = 0.0
        self._aside: dict[tuple[str, str], float] = {}
        self.set_aside = 0

    def sweep(self) -> float:
        """Everything that is due, at most :data:`LONGEST`; seconds until something will be. Raises StoreError when the database is away; the next call goes on."""
        ends = self._clock.monotonic() + LONGEST
        if self._clock.monotonic() >= self._waiting_at:
            self._waiting_at = self._clock.monotonic() + self._poll
            for namespace, name in self._db.read(lambda tx: schedules.with_waiting(tx, TOGETHER)):
                self._each(namespace, name, lambda n=namespace, m=name: self._release(n, m))  # type: ignore[misc]
        while True:
            now, found = self._db.read(lambda tx: schedules.upcoming(tx, TOGETHER + 1))
            due = [(namespace, name) for namespace, name, at in found if at <= now]
            for namespace, name in due:
                self._each(namespace, name, lambda n=namespace, m=name: self._fire(n, m))  # type: ignore[misc]
                if self._clock.monotonic() >= ends:
                    return 0.0
            if not due:
                self._upkeep()
                return min([self._poll, *((at - now) / SECOND for _, _, at in found[:1])])
            if not any(self._clock.monotonic() >= self._aside.get(key, 0.0) for key in due):
                return self._poll

    def _fire(self, namespace: str, name: str) -> None:
        for _ in range(PARTS):
            advanced = fires.advance(self._db, namespace, name, self._new_id)
            if advanced is None:
                return
            self._tell(advanced)

    def _release(self, namespace: str, name: str) -> None:
        advanced = self._db.run(lambda tx: fires.release(tx, namespace, name, self._new_id))
        if advanced is not None:
            self._tell(advanced)

    def _new_id(self) -> str:
        return self._ids.new("task", 10)

    def _tell(self, advanced: fires.Advanced) -> None:
        if self._fired is not None:
            for queue in advanced.queues:
                self._fired(queue)

    def _each(self, namespace: str, name: str, work: Callable[[], None]) -> None:
        """One schedule. A database that is away is the caller's matter; whatever else fails is this schedule's."""
        now = self._clock.monotonic()
        if self._aside.get((namespace, name), 0.0) > now:
            return
        self._aside.pop((namespace, name), None)
        try:
            work()
        except (StoreUnavailable, CommitUnknown):
            raise
        except Exception as exc:  # also a defect of ours: it must not keep the schedules behind this one waiting
            if isinstance(exc, MillstreamError | msgspec.MsgspecError):
                log.error("schedule held", namespace=namespace, schedule=name, error=str(exc))
            else:
                log.exception("schedule held by a defect", namespace=namespace, schedule=name)
            self.set_aside += 1
            self._aside[namespace, name] = now + HELD_US / SECOND  # also if its row cannot be written
            why = f"{type(exc).__name__}: {exc}"
            self._hold(namespace, name, why)

    def _hold(self, namespace: str, name: str, why: str) -> None:
        def work(tx: Transaction) -> None:
            schedules.hold(tx, namespace, name, why, HELD_US)

        try:
            self._db.run(work)
        except (StoreUnavailable, CommitUnknown):
            raise
        except Exception:  # the row itself may be what is damaged
            log.exception("reason not recorded", namespace=namespace, schedule=name)

    def _upkeep(self) -> None:
        """What is over is marked, what is old is removed: some at each call."""
        now = self._clock.monotonic()
        if now < self._upkeep_at:
            return
        marked = self._db.run(fires.mark_settled)
        forgotten = self._db.run(lambda tx: fires.forget(tx, tx.now_us() - KEPT_US))
        more = max(marked, forgotten) >= fires.CHUNK
        self._upkeep_at = now + (self._poll if more else UPKEEP_EVERY)
