"""What the coordinator does in checkpoint storage: the proof of which one it is, copies of savepoints, collecting what no manifest needs.

Driven by :class:`Coordinator <millstream_coordinator.coordinator.Coordinator>`, on whose thread rows are read and written and results are taken; storage itself is opened
and used in lanes only. What must never happen here: storage reached from the coordinator's thread, a blob deleted that a kept manifest names, a read error taken for absence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import structlog

from millstream_schema.connectors import PROOF, Handle, SnapshotStorage
from millstream_schema.errors import MillstreamError, StoreError
from millstream_schema.manifest import EpochManifest, open_manifest
from millstream_schema.ports import Clock
from millstream_schema.settings import StreamSettings
from millstream_schema.states import JobState
from millstream_schema.store import epochs, jobs
from millstream_schema.store.database import Database, Transaction

from .lanes import InlineLanes, Lanes

log = structlog.get_logger(__name__)
T = TypeVar("T")
EPOCHS_KEPT = 100
PROVE_AGAIN = 5.0
"""Seconds until a proof that could not be written is tried again."""
COPY_AGAIN = 1.0
PROOFS, BULK = "proofs", "bulk"
"""The lanes: a new job's start does not wait behind the copy of another's savepoint."""


class Upkeep:
    """Hands work to lanes, one piece per job or savepoint at a time, and takes what became of it."""

    def __init__(self, database: Database, clock: Clock, storage: Callable[[str], SnapshotStorage]) -> None:
        self.lanes: Lanes = InlineLanes()
        self.defects = 0
        self._db = database
        self._clock = clock
        self._storage = storage
        self._busy: set[tuple[str, str]] = set()
        self._results: deque[tuple[str, Callable[[], None]]] = deque()
        """Filled by lanes; (job, what to do with what came out)."""
        self._ready: set[str] = set()
        self._proved: set[str] = set()
        self._unproved: dict[str, Exception] = {}
        self._prove_at: dict[str, float] = {}
        self._copy_at: dict[str, float] = {}

    def settle(self) -> None:
        """Take all results that are there."""
        while self._results:
            job, result = self._results.popleft()
            result()
            self._ready.add(job)

    def take_ready(self) -> set[str]:
        """Jobs for which something has come out since the last call: they are to be looked at."""
        ready, self._ready = self._ready, set()
        return ready

    @property
    def waiting(self) -> bool:
        """Whether there are results to settle."""
        return bool(self._results)

    def forget(self, live: set[str]) -> None:
        """Jobs that are not live any more; one that is resumed may have other storage, and proves it anew."""
        self._proved &= live
        self._unproved = {j: e for j, e in self._unproved.items() if j in live}
        self._prove_at = {j: at for j, at in self._prove_at.items() if j in live}

    def _submit(
        self,
        lane: str,
        key: tuple[str, str],
        job: str,
        work: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Run ``work`` in a lane and ``then`` or ``failed`` in a later :meth:`settle`. ``failed`` also gets what ``then`` raises."""

        def settled(answer: Callable[[], T]) -> None:
            self._busy.discard(key)
            try:
                then(answer())
            except Exception as exc:
                failed(exc)

        def run() -> None:
            try:
                value = work()
            except Exception as exc:
                error = exc  # the name bound by except is gone once the block is left

                def fail() -> T:
                    raise error

                self._results.append((job, lambda: settled(fail)))
            else:
                self._results.append((job, lambda: settled(lambda: value)))

        self._busy.add(key)
        self.lanes.submit(lane, run)

    def _defect(self, exc: Exception, **fields: str) -> None:
        if not isinstance(exc, MillstreamError):
            self.defects += 1
            log.error("storage work failed by a defect", exc_info=exc, **fields)

    # -- the proof ----------------------------------------------------------------------------------------------------------------------

    def proved(self, job_id: str) -> bool:
        """Whether a job may be advanced. One that is to start waits until storage shows which one it is: nodes refuse to start on another.

        Once per job and coordinator. One that runs was proved before it was started: it goes on while its storage is slow. Raises what kept the proof
        of a job that waits for it from being written.
        """
        if job_id in self._proved:
            return True
        row = self._db.read(lambda tx: jobs.read_job(tx, job_id))
        if row is None:
            return True
        key = ("prove", job_id)
        if key not in self._busy and self._clock.monotonic() >= self._prove_at.get(job_id, 0.0):
            url = msgspec.json.decode(row.settings, type=StreamSettings).checkpoints
            work = lambda: self._storage(url).put(f"{PROOF}/{job_id}", job_id.encode())  # noqa: E731
            self._submit(PROOFS, key, job_id, work, lambda _: self._proved.add(job_id), lambda exc: self._not_proved(job_id, exc))
            self.settle()
        starts = row.state in (JobState.PENDING, JobState.WAITING_FOR_RESOURCES)
        error = self._unproved.pop(job_id, None)
        if error is not None and starts:
            raise error
        return job_id in self._proved or not starts

    def _not_proved(self, job_id: str, exc: Exception) -> None:
        log.warning("checkpoint storage not proved yet", job=job_id, error=str(exc))
        self._unproved[job_id] = exc
        self._prove_at[job_id] = self._clock.monotonic() + PROVE_AGAIN

    # -- savepoints -------------------------------------------------------------------------------------------------------------------

    def copy_savepoints(self) -> None:
        """Copy durable epochs whole into their protected namespace, also those of jobs that have ended; no transaction is open meanwhile."""
        try:
            waiting = self._db.read(epochs.copying_savepoints)
        except StoreError as exc:
            log.warning("savepoints to copy could not be read", error=str(exc))
            return
        now = self._clock.monotonic()
        for row in waiting:
            if ("copy", row["id"]) not in self._busy and now >= self._copy_at.get(row["id"], 0.0):
                self._copy(row)

    def _copy(self, row: dict[str, Any]) -> None:
        savepoint: str = row["id"]

        def failed(exc: Exception) -> None:
            self._not_copied(savepoint, exc)

        try:
            manifest = open_manifest(row["body"], row["checksum"], f"savepoint {savepoint}")
            job = self._db.read(lambda tx: jobs.read_job(tx, manifest.job))
        except MillstreamError as exc:
            failed(exc)
            return
        url = msgspec.json.decode(job.settings, type=StreamSettings).checkpoints if job else ""
        work = lambda: copied(self._storage(url), savepoint, manifest)  # noqa: E731
        self._submit(BULK, ("copy", savepoint), row["job"], work, lambda m: self._complete(savepoint, m), failed)

    def _complete(self, savepoint: str, manifest: EpochManifest) -> None:
        """Guarded: a copy that ends after the lease was lost is as good as another's, or comes too late and changes nothing."""
        if not self._db.run(lambda tx: epochs.complete_savepoint(tx, savepoint, manifest)):
            log.info("savepoint was completed by another coordinator", savepoint=savepoint)
        self._copy_at.pop(savepoint, None)

    def _not_copied(self, savepoint: str, exc: Exception) -> None:
        log.error("savepoint not copied yet", savepoint=savepoint, error=str(exc))
        self._defect(exc, savepoint=savepoint)
        self._copy_at[savepoint] = self._clock.monotonic() + COPY_AGAIN
        try:
            if not self._db.run(lambda tx: epochs.fail_savepoint(tx, savepoint, str(exc))):
                log.info("savepoint was completed by another coordinator", savepoint=savepoint)
        except StoreError:
            log.warning("savepoint error could not be recorded", savepoint=savepoint)

    # -- collecting -------------------------------------------------------------------------------------------------------------------

    def collect(self, job_id: str) -> None:
        """Delete manifests beyond those retained, then blobs that no kept manifest and no epoch in flight references.

        Listing and deleting take as long as they take, and epochs become durable meanwhile. What is deleted is of an epoch below the newest durable one at the moment of
        the decision, and not in its manifest: later manifests hold blobs of that one and of later epochs only. What is kept is read once more before anything is deleted.
        """
        key = ("collect", job_id)
        if key in self._busy:
            return

        def failed(exc: Exception) -> None:
            log.warning("nothing was collected", job=job_id, error=str(exc))
            self._defect(exc, job=job_id)

        try:
            settings, newest, kept = self._db.run(lambda tx: _trim(tx, job_id))
        except MillstreamError as exc:
            failed(exc)
            return
        if settings is None or not newest:
            return
        url = settings.checkpoints

        def dead() -> list[str]:
            return [k for k in self._storage(url).keys(f"{job_id}/") if k not in kept and _epoch_of(k) < newest]

        def delete(found: list[str]) -> None:
            if found:
                _, _, still = self._db.run(lambda tx: _trim(tx, job_id))
                left = [k for k in found if k not in still]
                self._submit(BULK, key, job_id, lambda: self._storage(url).delete(left), lambda _: None, failed)

        self._submit(BULK, key, job_id, dead, delete, failed)


def copied(storage: SnapshotStorage, savepoint: str, manifest: EpochManifest) -> EpochManifest:
    """A manifest whose segments lie in the savepoint's own namespace. A repeat writes the same."""

    def moved(handle: Handle) -> Handle:
        return storage.copy(handle, f"savepoints/{savepoint}/{handle.key}")

    subtasks = [msgspec.structs.replace(s, segments=[moved(h) for h in s.segments]) for s in manifest.subtasks]
    return msgspec.structs.replace(manifest, subtasks=subtasks)


def _trim(tx: Transaction, job_id: str) -> tuple[StreamSettings | None, int, set[str]]:
    """Delete what is beyond those retained; (settings, newest durable epoch, keys that are needed)."""
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
