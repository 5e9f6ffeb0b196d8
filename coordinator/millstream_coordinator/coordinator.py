"""The coordinator: the lease, the sweep over jobs and durable tasks, copying savepoints, collecting what no manifest needs.

Driven by a shell (a thread in embedded mode and beside a worker, beat's tick, the simulator): :meth:`Coordinator.sweep` now and then, :meth:`Coordinator.look` when a hint names a
job. Only the holder of the lease sweeps; a hint is handled by whoever gets it. One failing job is set aside for a while and stops nothing. What must never happen here: a live
lease taken over, a read error taken for absence, a blob deleted that a kept manifest names.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from millstream_schema.connectors import PROOF, Handle, SnapshotStorage
from millstream_schema.errors import MillstreamError, StoreError
from millstream_schema.hints import Hints
from millstream_schema.manifest import EpochManifest, open_manifest
from millstream_schema.ports import Chance, Clock
from millstream_schema.settings import StreamSettings
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Database, Transaction

from .reconciler import Reconciler
from .task_sweep import TaskSweep

log = structlog.get_logger(__name__)
HELD = 5.0
"""Seconds a job whose handling failed is left alone."""
COLLECT_EVERY = 10.0
EPOCHS_KEPT = 100
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
        tasks: TaskSweep | None = None,
    ) -> None:
        self._db = database
        self._clock = clock
        self._storage = storage
        self._holder = holder
        self._poll = poll
        self._tasks = tasks
        self._tasks_at = 0.0
        self._lease_us = lease_ms * 1000
        self._reconciler = Reconciler(database, hints, chance)
        self._due: dict[str, float] = {}
        self._held: dict[str, float] = {}
        self._renew_at = 0.0
        self._forget_at = clock.monotonic() + FORGET_EVERY
        self._collect_at: dict[str, float] = {}
        self._proved: set[str] = set()
        self.leading = False
        self.term = 0
        self.set_aside = 0
        self.defects = 0

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
        if not self.leading:
            return max(0.01, self._renew_at - now)
        try:
            live = self._db.read(jobs.live_job_ids)
        except StoreError as exc:
            log.warning("jobs could not be read; nothing is stopped on a read error", error=str(exc))
            return 1.0
        self._due = {j: at for j, at in self._due.items() if j in set(live)}
        for job in live:
            if self._due.get(job, 0.0) <= now and self._held.get(job, 0.0) <= now:
                self.look(job)
        self._copy_savepoints()
        self._forget_nodes(now)
        upcoming = [*(self._due[j] for j in live if j in self._due), self._renew_at]
        if self._tasks is not None:
            upcoming.append(self._sweep_tasks(now, self._tasks))
        return max(0.0, min(upcoming) - self._clock.monotonic())

    def _sweep_tasks(self, now: float, tasks: TaskSweep) -> float:
        """Durable tasks, once a poll; when it is due again."""
        if now >= self._tasks_at:
            self._tasks_at = now + self._poll
            try:
                tasks.sweep()
            except StoreError as exc:
                log.warning("the task sweep did not end; the next one goes on", error=str(exc))
        return self._tasks_at

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
            self._prove(job)
            wait = self._reconciler.advance(job)
        except MillstreamError as exc:
            log.error("job set aside", job=job, error=str(exc))
            self._hold(job, now + (0.5 if isinstance(exc, StoreError) else HELD))
            if not isinstance(exc, StoreError):
                self._tell(job, str(exc))
            return
        except Exception as exc:  # a defect of ours: it must not keep the jobs behind this one waiting
            log.exception("job set aside by a defect", job=job)
            self.defects += 1
            self._hold(job, now + HELD)
            self._tell(job, f"the coordinator failed on this job, please report it: {type(exc).__name__}: {exc}")
            return
        self._due[job] = now + (self._poll if wait is None else min(wait, self._poll))
        if now >= self._collect_at.get(job, 0.0):
            self._collect_at[job] = now + COLLECT_EVERY
            self._collect(job)

    def _hold(self, job: str, until: float) -> None:
        """Leave a job alone for a while; the sweep sleeps meanwhile."""
        self.set_aside += 1
        self._held[job] = self._due[job] = until

    def _tell(self, job: str, why: str) -> None:
        """Show in the job's row what keeps it from going on; its next transition writes a reason of its own."""

        def work(tx: Transaction) -> None:
            row = jobs.lock_job(tx, job)
            if row is not None and row.reason != why[:20_000]:
                jobs.update_job(tx, row, reason=why[:20_000])

        try:
            self._db.run(work)
        except StoreError as exc:
            log.warning("reason not recorded", job=job, error=str(exc))

    def _prove(self, job: str) -> None:
        """Show in checkpoint storage which one it is: nodes refuse to start on another. Once per job and coordinator."""
        if job in self._proved:
            return
        row = self._db.read(lambda tx: jobs.read_job(tx, job))
        if row is not None:
            url = msgspec.json.decode(row.settings, type=StreamSettings).checkpoints
            self._storage(url).put(f"{PROOF}/{job}", job.encode())
            self._proved.add(job)

    # -- savepoints -------------------------------------------------------------------------------------------------------------------

    def _copy_savepoints(self) -> None:
        """Copy durable epochs whole into their protected namespace; no transaction is open meanwhile."""
        try:
            waiting = self._db.read(epochs.copying_savepoints)
        except StoreError as exc:
            log.warning("savepoints to copy could not be read", error=str(exc))
            return
        for row in waiting:
            try:
                copied = self._copied(row["id"], open_manifest(row["body"], row["checksum"], f"savepoint {row['id']}"))
                self._db.run(lambda tx, i=row["id"], m=copied: epochs.complete_savepoint(tx, i, m))  # type: ignore[misc]
            except MillstreamError as exc:
                log.error("savepoint not copied yet", savepoint=row["id"], error=str(exc))
                self._note_savepoint(row["id"], str(exc))
            self._due.pop(row["job"], None)

    def _note_savepoint(self, savepoint: str, error: str) -> None:
        try:
            self._db.run(lambda tx: epochs.fail_savepoint(tx, savepoint, error))
        except StoreError:
            log.warning("savepoint error could not be recorded", savepoint=savepoint)

    def _copied(self, savepoint: str, manifest: EpochManifest) -> EpochManifest:
        job = self._db.read(lambda tx: jobs.read_job(tx, manifest.job))
        storage = self._storage(msgspec.json.decode(job.settings, type=StreamSettings).checkpoints if job else "")

        def moved(handle: Handle) -> Handle:
            return storage.copy(handle, f"savepoints/{savepoint}/{handle.key}")

        subtasks = [msgspec.structs.replace(s, segments=[moved(h) for h in s.segments]) for s in manifest.subtasks]
        return msgspec.structs.replace(manifest, subtasks=subtasks)

    # -- collecting -------------------------------------------------------------------------------------------------------------------

    def _collect(self, job_id: str) -> None:
        """Delete manifests beyond those retained, then blobs that no kept manifest and no epoch in flight references."""
        try:
            settings, newest, kept = self._db.run(lambda tx: self._trim(tx, job_id))
            if settings is None or not newest:
                return
            storage = self._storage(settings.checkpoints)
            dead = [k for k in storage.keys(f"{job_id}/") if k not in kept and _epoch_of(k) < newest]
            storage.delete(dead)
        except MillstreamError as exc:
            log.warning("nothing was collected", job=job_id, error=str(exc))

    def _trim(self, tx: Transaction, job_id: str) -> tuple[StreamSettings | None, int, set[str]]:
        job = jobs.lock_job(tx, job_id)
        if job is None:
            return None, 0, set()
        settings = msgspec.json.decode(job.settings, type=StreamSettings)
        have = epochs.manifest_epochs(tx, job_id)
        keep = have[-settings.retained :]
        epochs.delete_manifests(tx, job_id, [e for e in have if e not in keep])
        if keep:
            epochs.delete_epochs(tx, job_id, keep[0] - EPOCHS_KEPT)
        kept = {h.key for e in keep for h in epochs.read_manifest(tx, job_id, e).handles()}
        for row in epochs.copying_savepoints(tx):
            if row["job"] == job_id:
                kept |= {h.key for h in open_manifest(row["body"], row["checksum"], row["id"]).handles()}
        return settings, job.newest_durable, kept


def _epoch_of(key: str) -> int:
    """Epoch of a segment's key ``{job}/e{epoch}/...``; above every epoch for a key of another form, which is left alone."""
    part = key.split("/")[1] if key.count("/") >= 2 else ""
    return int(part[1:]) if part.startswith("e") and part[1:].isdigit() else 1 << 62
