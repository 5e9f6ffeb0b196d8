"""The coordinator: the lease, the sweep over jobs, durable tasks and schedules, and when storage is looked after.

Driven by a shell (a thread in embedded mode and beside a worker, beat's tick, the simulator): :meth:`Coordinator.sweep` now and then, :meth:`Coordinator.look` when a hint names a
job. Only the holder of the lease sweeps; a hint is handled by whoever gets it. One failing job is set aside for a while and stops nothing. What must never happen here: a live
lease taken over, a read error taken for absence, a wait for checkpoint storage: that is reached in lanes only (:mod:`millstream_coordinator.upkeep`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from millstream_schema.connectors import SnapshotStorage
from millstream_schema.errors import MillstreamError, StoreError
from millstream_schema.hints import Hints
from millstream_schema.ports import Chance, Clock
from millstream_schema.store import jobs, registry
from millstream_schema.store.database import Database, Transaction

from .lanes import Lanes
from .reconciler import Reconciler
from .schedule_sweep import ScheduleSweep
from .sweeping import Sweep
from .upkeep import Upkeep

log = structlog.get_logger(__name__)
DEFECT = "the coordinator failed on this job, please report it"
HELD = 5.0
"""Seconds a job whose handling failed is left alone."""
COLLECT_EVERY = 10.0
FORGET_EVERY = 600.0
NODES_KEPT_US = 24 * 3600 * 1_000_000
"""How long the row of a node that is gone stays, for whoever looks for the cause of a failure."""
MIN_TICK_US = 500_000
TAKE_OVER_US = 20_000


class Coordinator:
    """One coordinator. ``holder`` is new at each start; ``storage`` opens checkpoint storage by the URL in a job's settings."""

    def __init__(
        self,
        database: Database,
        hints: Hints,
        clock: Clock,
        chance: Chance,
        storage: Callable[[str], SnapshotStorage],
        holder: str,
        lease_ms: int,
        poll: float = 1.0,
        tasks: Sweep | None = None,
        schedules: ScheduleSweep | None = None,
    ) -> None:
        self._db = database
        self._clock = clock
        self._upkeep = Upkeep(database, clock, storage)
        self._holder = holder
        self._poll = poll
        self._tasks = tasks
        self._tasks_at = 0.0
        self._schedules = schedules
        self._schedules_at = 0.0
        self._lease_us = lease_ms * 1000
        self._reconciler = Reconciler(database, hints, chance)
        self._due: dict[str, float] = {}
        self._held: dict[str, float] = {}
        self._renew_at = 0.0
        self._forget_at = clock.monotonic() + FORGET_EVERY
        self._collect_at: dict[str, float] = {}
        self._told: dict[str, tuple[str, str]] = {}
        """Job → the reason :meth:`_tell` wrote, and the one it stands over; two empty texts when nothing is told."""
        self.leading = False
        self.term = 0
        self.set_aside = 0
        self._defects = 0

    @property
    def defects(self) -> int:
        """Failures that are ours."""
        return self._defects + self._upkeep.defects

    def work_in(self, lanes: Lanes) -> None:
        """Where storage work runs from now on; before this, inline. Called by the shell before it drives."""
        self._upkeep.lanes = lanes

    def counts(self) -> dict[str, int]:
        """What failed here, for metrics: jobs, tasks and schedules set aside, defects of ours. May be called from another thread."""
        tasks = 0 if self._tasks is None else self._tasks.set_aside
        schedules = 0 if self._schedules is None else self._schedules.set_aside
        return {"set_aside": self.set_aside, "defects": self.defects, "tasks_set_aside": tasks, "schedules_held": schedules}

    def renew(self) -> bool:
        """Renew the lease, or take it over when it has expired; whether it is held."""
        wait = self._lease_us / 3
        try:
            self.term, self.leading, left = self._db.run(lambda tx: registry.take_lease(tx, self._holder, self._lease_us))
            if not self.leading:
                wait = min(wait, left + TAKE_OVER_US)  # the moment another's lease runs out, its jobs need somebody
        except StoreError as exc:
            log.warning("coordinator lease not renewed", error=str(exc))
            self.leading = False
        self._renew_at = self._clock.monotonic() + wait / 1e6
        return self.leading

    def tick(self) -> bool:
        """Beat's tick (or another worker's): renew, and take over if the lease has expired. One younger than half a second after the last is passed over."""
        try:
            counts = self._db.run(lambda tx: registry.mark_tick(tx, MIN_TICK_US))
        except StoreError as exc:
            log.warning("tick not recorded", error=str(exc))
            return False
        if counts:
            self.renew()
        return counts

    def release(self) -> None:
        """Give the lease back at a clean shut-down, so that another takes over at once."""
        if self.leading:
            self._db.run(lambda tx: registry.release_lease(tx, self._holder))
            self.leading = False

    def sweep(self) -> float:
        """Renew when it is time, then everything that is due; seconds until the next call is needed."""
        now = self._clock.monotonic()
        if now >= self._renew_at:
            self.renew()
        self._upkeep.settle()  # whoever leads by now: what was written to storage is there
        if not self.leading:
            return max(0.01, self._renew_at - now)
        try:
            live = self._db.read(jobs.live_job_ids)
        except StoreError as exc:
            log.warning("jobs could not be read; nothing is stopped on a read error", error=str(exc))
            return 1.0
        self._due = {j: at for j, at in self._due.items() if j in set(live)}
        self._upkeep.forget(set(live))
        self._told = {j: told for j, told in self._told.items() if j in set(live)}
        for job in self._upkeep.take_ready():
            if self._held.get(job, 0.0) <= now:
                self._due.pop(job, None)
        for job in live:
            if self._due.get(job, 0.0) <= now and self._held.get(job, 0.0) <= now:
                self.look(job)
        self._upkeep.copy_savepoints()
        self._forget_nodes(now)
        upcoming = [*(self._due[j] for j in live if j in self._due), self._renew_at]
        if self._tasks is not None:
            upcoming.append(self._sweep_tasks(now, self._tasks))
        if self._schedules is not None:
            upcoming.append(self._sweep_schedules(self._schedules))
        return 0.0 if self._upkeep.waiting else max(0.0, min(upcoming) - self._clock.monotonic())

    def _sweep_tasks(self, now: float, tasks: Sweep) -> float:
        """Durable tasks, once a poll; when it is due again."""
        if now >= self._tasks_at:
            self._tasks_at = now + self._poll
            try:
                tasks.sweep()
            except StoreError as exc:
                log.warning("the task sweep did not end; the next one goes on", error=str(exc))
        return self._tasks_at

    def _sweep_schedules(self, schedules: ScheduleSweep) -> float:
        """Schedules, at the instant the next one is due and once a poll; when that is."""
        if self._clock.monotonic() >= self._schedules_at:
            wait = self._poll
            try:
                wait = schedules.sweep()
            except StoreError as exc:
                log.warning("the sweep over schedules did not end; the next one goes on", error=str(exc))
            self._schedules_at = self._clock.monotonic() + wait
        return self._schedules_at

    def _forget_nodes(self, now: float) -> None:
        """A node's id is new at each start: rows of those gone for long would pile up."""
        if now < self._forget_at:
            return
        self._forget_at = now + FORGET_EVERY
        try:
            self._db.run(lambda tx: registry.forget_nodes(tx, tx.now_us() - NODES_KEPT_US))
        except StoreError as exc:
            log.warning("old nodes not forgotten", error=str(exc))

    def look(self, job: str) -> None:
        """Advance one job and remember when to look again; whatever fails is held, not raised."""
        now = self._clock.monotonic()
        try:
            proved = self._upkeep.proved(job)
            wait = self._reconciler.advance(job) if proved else None
            if proved:
                self._untell(job)
        except MillstreamError as exc:
            log.error("job set aside", job=job, error=str(exc))
            self._hold(job, now + (0.5 if isinstance(exc, StoreError) else HELD))
            if not isinstance(exc, StoreError):
                self._tell(job, str(exc))
            return
        except Exception as exc:  # a defect of ours: it must not keep the jobs behind this one waiting
            log.exception("job set aside by a defect", job=job)
            self._defects += 1
            self._hold(job, now + HELD)
            self._tell(job, f"{DEFECT}: {type(exc).__name__}: {exc}")
            return
        self._due[job] = now + (self._poll if wait is None else min(wait, self._poll))
        if now >= self._collect_at.get(job, 0.0):
            self._collect_at[job] = now + COLLECT_EVERY
            self._upkeep.collect(job)

    def _hold(self, job: str, until: float) -> None:
        """Leave a job alone for a while; the sweep sleeps meanwhile."""
        self.set_aside += 1
        self._held[job] = self._due[job] = until

    def _tell(self, job: str, why: str) -> None:
        """Show in the job's row what keeps it from going on, until :meth:`_untell` or a transition with a reason of its own."""
        shown = why[:20_000]

        def work(tx: Transaction) -> str | None:
            row = jobs.lock_job(tx, job)
            if row is None or row.reason == shown:
                return None
            jobs.update_job(tx, row, reason=shown)
            return row.reason

        try:
            before = self._db.run(work)
        except (StoreError, msgspec.ValidationError) as exc:  # the row itself may be what is damaged
            log.warning("reason not recorded", job=job, error=str(exc))
            return
        told, stood = self._told.get(job, ("", ""))
        if before is not None:
            self._told[job] = (shown, stood if told and before == told else "" if before.startswith(DEFECT) else before)

    def _untell(self, job: str) -> None:
        """The job goes on: what :meth:`_tell` showed is over, also a defect's text of a coordinator before this one; the reason it stood over is back. Any other stays."""
        told = self._told.get(job)
        if told is None:
            row = self._db.read(lambda tx: jobs.read_job(tx, job))
            if row is None or not row.reason.startswith(DEFECT):
                told = self._told[job] = ("", "")
        if told == ("", ""):
            return

        def work(tx: Transaction) -> None:
            row = jobs.lock_job(tx, job)
            if row is not None and told is not None and row.reason == told[0]:
                jobs.update_job(tx, row, reason=told[1])
            elif row is not None and row.reason.startswith(DEFECT):
                jobs.update_job(tx, row, reason="")

        self._db.run(work)
        self._told[job] = ("", "")
