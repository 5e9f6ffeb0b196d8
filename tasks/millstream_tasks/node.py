"""A node: hosts subtasks, renews their lease, and carries messages between them and the rows.

One step machine, driven by a shell (a thread, a process under a Celery worker, the simulator). Rows are the truth: every renewal is answered with what this node is to run;
hints only make it look sooner. What must never happen here: a subtask kept whose generation is not the job's, or one kept past the lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog

from millstream_schema.control import Deployment, Discovered, Failed, Finished, Lease, Ready, Stats, SubtaskMessage
from millstream_schema.errors import CommitUnknown, MillstreamError, StorageError, StoreError
from millstream_schema.hints import Hints, JobHint, NodeHint
from millstream_schema.ports import Clock, Ids
from millstream_schema.states import AssignmentState
from millstream_schema.store import registry, truth
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.rows import AssignmentRow

from .hosting.child import Hosted, Launcher
from .hosting.reports import Reports, write_of

log = structlog.get_logger(__name__)
Key = tuple[str, str]
"""(job id, subtask id)."""
MARGIN = 0.1
"""Part of the lease kept back: subtasks stop this much before the database would give their work away."""


class NodeEvents(Protocol):
    """Where attempts are shown (Flower's ``millstream.subtask`` task events)."""

    def attempt(self, state: str, job: str, deployment: Deployment, detail: str) -> None: ...


class NoEvents:
    def attempt(self, state: str, job: str, deployment: Deployment, detail: str) -> None:
        """Nothing to show: nobody watches."""


class NodeSettings(msgspec.Struct, frozen=True):
    """``slots``: subtasks at once. ``poll_ms``: how often the rows are read without a hint. The others as in StreamSettings."""

    name: str
    slots: int = 4
    lease_ms: int = 10_000
    renew_ms: int = 3_000
    poll_ms: int = 1_000
    liveness_ms: int = 8_000
    ping_ms: int = 1_000


class Node:
    """The step machine of a node. ``counted``: what else its process counts; shown in the node's row with each renewal, for metrics."""

    def __init__(
        self,
        database: Database,
        hints: Hints,
        clock: Clock,
        ids: Ids,
        launcher: Launcher,
        settings: NodeSettings,
        info: dict[str, str],
        events: NodeEvents,
        counted: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._db = database
        self._hints = hints
        self._clock = clock
        self._ids = ids
        self._launcher = launcher
        self._settings = settings
        self._info = info
        self._events = events
        self._counted = counted
        self.id = ""
        self.term = 0
        self.stale_hints = 0
        self.stopped = False
        self._inbox: deque[tuple[Key, str, SubtaskMessage | None]] = deque()
        self._hinted = False
        self._hosted: dict[Key, Hosted] = {}
        self._reports = Reports(database, hints)
        self._deadline = 0.0
        self._renew_at = 0.0
        self._poll_at = 0.0
        self._ping_at = 0.0
        self._retry_at = 0.0

    # -- handed in from other threads ---------------------------------------------------------------------------------------------------

    def hint(self, hint: NodeHint) -> None:
        """Look at the rows soon. A hint of a lower term is an old coordinator's: counted, not followed. Thread-safe."""
        if hint.term < self.term or hint.node != self.id:
            self.stale_hints += 1
            return
        self.term = hint.term
        self._hinted = True

    def poke(self) -> None:
        """Look at the rows soon. Thread-safe."""
        self._hinted = True

    # -- the step -----------------------------------------------------------------------------------------------------------------------

    def step(self) -> float:
        """Do what is due; seconds until there may be more."""
        now = self._clock.monotonic()
        if not self.id and not self._register(now):
            return 0.2
        if now >= self._deadline:
            self._lost(now)
            return 0.0
        while self._inbox:
            key, attempt, message = self._inbox.popleft()
            self._from_child(key, attempt, message)
        if now >= self._retry_at:
            self._flush()
        if self._hinted or now >= self._poll_at or now >= self._renew_at:
            self._sync(now)
        self._watch(now)
        if self._inbox or self._hinted:
            return 0.0
        upcoming = [self._renew_at, self._poll_at, self._ping_at, *([self._retry_at] if self._reports else [])]
        return max(0.0, min(upcoming) - self._clock.monotonic())

    def _register(self, now: float) -> bool:
        node = self._ids.new("node")
        s = self._settings
        info = self._shown()
        try:
            self._db.run(lambda tx: registry.register_node(tx, node, s.name, s.slots, s.lease_ms * 1000, info))
        except CommitUnknown:
            return False  # the next try takes a new id; this one expires unused
        except StoreError as exc:
            log.warning("node not registered", error=str(exc))
            return False
        self.id = node
        self._extend(now)
        self._poll_at = 0.0
        self._hints.to_coordinator(JobHint(""))
        return True

    def _shown(self) -> str:
        """The info of this node's row."""
        found: dict[str, Any] = {**self._info, "counts": {"stale_hints": self.stale_hints, **self._counted()}}
        return msgspec.json.encode(found).decode()

    def _extend(self, sent: float) -> None:
        """The lease holds from before the renewal was sent."""
        lease = self._settings.lease_ms / 1000
        self._deadline = sent + lease * (1 - MARGIN)
        self._renew_at = sent + self._settings.renew_ms / 1000
        for hosted in self._hosted.values():
            hosted.send(Lease(self._deadline))

    def _lost(self, now: float) -> None:
        """The lease has passed: everything ends, and the node starts anew under another id."""
        log.warning("node lease lost", node=self.id, subtasks=len(self._hosted))
        self._kill_all()
        self._reports.clear()
        self._inbox.clear()
        self.id = ""

    def _kill_all(self) -> None:
        for hosted in self._hosted.values():
            hosted.kill()
        self._hosted.clear()

    # -- rows to children -----------------------------------------------------------------------------------------------------------------

    def _sync(self, now: float) -> None:
        """Renew if due, read what this node is to run, and act on it."""
        self._hinted = False
        renew = now >= self._renew_at - self._settings.renew_ms / 4000
        try:
            if renew and not self._renew(now):
                return
            rows, truths = self._db.read(lambda tx: truth.node_truth(tx, self.id))
        except StoreError as exc:
            log.warning("rows not read; subtasks go on until the lease ends", node=self.id, error=str(exc))
            self._renew_at = self._poll_at = self._clock.monotonic() + 0.2
            return
        self._poll_at = self._clock.monotonic() + self._settings.poll_ms / 1000
        self.term = max([self.term, *(t.job.term for t in truths.values())])
        self._reap(rows)
        for row in rows:
            job = truths.get(row.job)
            if job is not None and job.job.generation == row.generation:
                self._follow(row, job)

    def _renew(self, sent: float) -> bool:
        writes = [write for hosted in self._hosted.values() if (write := hosted.progress()) is not None]
        info = self._shown()

        def work(tx: Transaction) -> bool:
            held = registry.renew_node(tx, self.id, self._settings.lease_ms * 1000, info)
            if held:
                for write in writes:
                    write(tx)
            return held

        try:
            held = self._db.run(work)
        except CommitUnknown:
            held = self._db.run(work)
        if not held:
            self._lost(sent)
            return False
        self._extend(sent)
        return True

    def _reap(self, rows: list[AssignmentRow]) -> None:
        """End what this node is not to run any more."""
        wanted = {(r.job, r.subtask): r.generation for r in rows}
        for key, hosted in list(self._hosted.items()):
            if wanted.get(key) != hosted.deployment.generation:
                if hosted.child is not None:
                    hosted.child.kill()
                    self._events.attempt("revoked", key[0], hosted.deployment, "generation over")
                del self._hosted[key]

    def _follow(self, row: AssignmentRow, job: truth.JobTruth) -> None:
        hosted = self._hosted.get((row.job, row.subtask))
        if hosted is not None:
            hosted.follow(job)
        elif row.state is AssignmentState.ASSIGNED:
            self._start(row)

    def _start(self, row: AssignmentRow) -> None:
        """ASSIGNED → STARTED by a guarded write, then the process. A second copy is refused by the row."""
        attempt = self._ids.new("attempt")
        key = (row.job, row.subtask)

        def claim(tx: Transaction) -> Deployment | None:
            if not registry.start_assignment(tx, row.job, row.generation, row.subtask, self.id, attempt):
                return None
            return truth.load_deployment(tx, row, attempt)

        try:
            try:
                deployment = self._db.run(claim)
            except CommitUnknown:
                deployment = self._db.run(claim)
        except StorageError as exc:
            self._refuse(row, attempt, "unreadable", str(exc))
            return
        except StoreError as exc:
            log.warning("assignment not started yet", subtask=row.subtask, error=str(exc))
            self._hinted = True
            return
        except Exception as exc:  # rows that cannot be decoded: the job must not wait for ever, nor the others with it
            log.exception("assignment refused", subtask=row.subtask)
            self._refuse(row, attempt, "start", f"{type(exc).__name__}: {exc}")
            return
        if deployment is None:
            return
        try:
            child = self._launcher.launch(deployment, lambda message: self._inbox.append((key, attempt, message)))
        except Exception as exc:  # also a deployment that cannot be encoded: a start that fails is a row, never silence
            if not isinstance(exc, (MillstreamError, OSError)):
                log.exception("attempt not launched", subtask=row.subtask)
            self._refuse(row, attempt, "start", f"{type(exc).__name__}: {exc}")
            return
        self._hosted[key] = Hosted(deployment, child, self._clock.monotonic(), told_durable=deployment.restore_epoch)
        child.send(Lease(self._deadline))
        self._events.attempt("started", row.job, deployment, "")

    def _refuse(self, row: AssignmentRow, attempt: str, cause: str, detail: str) -> None:
        def work(tx: Transaction) -> None:
            registry.start_assignment(tx, row.job, row.generation, row.subtask, self.id, attempt)
            registry.end_assignment(tx, row.job, row.generation, row.subtask, attempt, AssignmentState.FAILED, cause, detail)

        self._reports.add(row.job, work)

    # -- children to rows -----------------------------------------------------------------------------------------------------------------

    def _from_child(self, key: Key, attempt: str, message: SubtaskMessage | None) -> None:
        hosted = self._hosted.get(key)
        if hosted is None or hosted.deployment.attempt != attempt:
            return
        hosted.answered, hosted.heard = self._clock.monotonic(), True
        d = hosted.deployment
        match message:
            case Stats():
                hosted.stats = message
            case Ready():
                hosted.ready = True
            case Discovered():
                self._hinted = True
            case Finished():
                self._ended(key, hosted, AssignmentState.FINISHED, "", "")
            case Failed(cause=cause, detail=detail):
                self._ended(key, hosted, AssignmentState.FAILED, cause, detail)
            case None:
                if hosted.child is not None:
                    self._ended(key, hosted, AssignmentState.FAILED, "died", "the subtask's process ended without a word")
        if message is not None and (write := write_of(d, message)) is not None:
            self._reports.add(d.job, write)

    def _ended(self, key: Key, hosted: Hosted, state: AssignmentState, cause: str, detail: str) -> None:
        """A hosted subtask is over; its entry stays, without a child, until the rows agree."""
        d = hosted.deployment
        if state is AssignmentState.FAILED:
            hosted.kill()
        hosted.child = None
        self._reports.add(d.job, lambda tx: registry.end_assignment(tx, d.job, d.generation, d.subtask, d.attempt, state, cause, detail))
        self._events.attempt("succeeded" if state is AssignmentState.FINISHED else "failed", d.job, d, detail)
        if state is AssignmentState.FAILED:
            log.warning("subtask failed", job=d.job, subtask=d.subtask, generation=d.generation, cause=cause, detail=detail[:500])

    def _flush(self) -> None:
        """Write what children reported. A report that is refused for good ends the attempts of its job here."""
        refused = self._reports.flush()
        if self._reports:
            self._retry_at = self._clock.monotonic() + 0.2
        for job, why in refused.items():
            log.error("report refused for good", job=job, error=why)
            for key, hosted in list(self._hosted.items()):
                if key[0] == job and hosted.child is not None:
                    self._ended(key, hosted, AssignmentState.FAILED, "report", why)

    def _watch(self, now: float) -> None:
        """Ping the children; end those that do not answer."""
        if now < self._ping_at:
            return
        self._ping_at = now + self._settings.ping_ms / 1000
        limit = self._settings.liveness_ms / 1000
        for key, hosted in list(self._hosted.items()):
            if hosted.child is None:
                continue
            hosted.child.send(Lease(self._deadline))
            if hosted.heard and now - hosted.answered > limit:
                self._ended(key, hosted, AssignmentState.FAILED, "silent", f"the subtask did not answer for {limit:g} s")

    # -- shutting down --------------------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """A clean shut-down: hand everything back, which costs no restart budget, and leave the registry."""
        self.stopped = True
        given = [(h.deployment, h.child) for h in self._hosted.values()]
        self._kill_all()
        if not self.id:
            return
        node = self.id

        def work(tx: Transaction) -> None:
            registry.drain_node(tx, node)
            for d, child in given:
                if child is not None:
                    registry.end_assignment(
                        tx, d.job, d.generation, d.subtask, d.attempt, AssignmentState.FAILED, "handback", "the worker shuts down"
                    )
            registry.leave_node(tx, node)

        try:
            self._db.run(work)
        except StoreError as exc:
            log.warning("not handed back; the lease will expire", node=node, error=str(exc))
            return
        log.info("handed back", node=node, subtasks=sum(child is not None for _, child in given))
        for job in sorted({d.job for d, _ in given}):
            self._hints.to_coordinator(JobHint(job))

    def hosted(self) -> list[tuple[Key, Deployment]]:
        """What runs here now."""
        return [(k, h.deployment) for k, h in self._hosted.items() if h.child is not None]


__all__ = ["NoEvents", "Node", "NodeEvents", "NodeSettings"]
