"""Brings one job forward: lock its row, read, decide, write; again until there is nothing to do. Hints go out after each commit.

Called for a job whenever a hint names it and by the lease holder's sweep. Any coordinator may run it: the row lock serialises, the term read under it is
written with everything. What must never happen here: I/O other than the store inside the transaction, a decision from anything that was not read under the lock.
"""

from __future__ import annotations

import msgspec
import structlog

from millstream_schema.connectors import Committable
from millstream_schema.control import EpochKind
from millstream_schema.errors import CommitUnknown, SnapshotMissing, SnapshotUnreadable
from millstream_schema.hints import Hints, NodeHint
from millstream_schema.manifest import EpochManifest
from millstream_schema.model import StreamModel
from millstream_schema.plan import PartitionedPlan, Subtask
from millstream_schema.ports import Chance
from millstream_schema.settings import StreamSettings
from millstream_schema.states import AssignmentState, Desired, EpochState, JobState, SplitOwner, may
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.rows import EpochRow, JobRow

from . import decisions as d
from .manifests import compose, restored_splits
from .placement import place

log = structlog.get_logger(__name__)
PENDING_UNKNOWN = '["unknown"]'
"""Pending commits of a job whose newest manifest cannot be read: some may be, nobody can say which."""
STEPS = 50
"""Steps of one call: a bound against a decision that does not settle."""


class Reconciler:
    """Carries out decisions."""

    def __init__(self, database: Database, hints: Hints, chance: Chance) -> None:
        self._db = database
        self._hints = hints
        self._chance = chance

    def advance(self, job_id: str) -> float | None:
        """Do everything that can be done for a job now; seconds until it is to be looked at again, None: when something happens."""
        for _ in range(STEPS):
            outbox: list[NodeHint] = []

            def work(tx: Transaction, outbox: list[NodeHint] = outbox) -> tuple[d.Step, int]:
                outbox.clear()
                return self._one(tx, job_id, outbox)

            try:
                step, now = self._db.run(work)
            except CommitUnknown:
                continue  # decided again from what the rows now say
            for hint in outbox:
                self._hints.to_node(hint)
            if isinstance(step, d.Wait):
                return max(0.0, (step.until - now) / 1e6) if step.until else None
        log.warning("job did not settle", job=job_id, steps=STEPS)
        return 1.0

    def _one(self, tx: Transaction, job_id: str, outbox: list[NodeHint]) -> tuple[d.Step, int]:
        job = jobs.lock_job(tx, job_id)
        if job is None:
            return d.Wait(), 0
        view = self.view(tx, job)
        step = d.next_step(view)
        if not isinstance(step, d.Wait):
            log.debug("step", job=job.name, step=step)
        return self._apply(tx, view, step, outbox), view.now

    def view(self, tx: Transaction, job: JobRow) -> d.JobView:
        """All that a decision may look at, read under the lock."""
        rows = registry.assignments(tx, job.id, job.generation)
        live = registry.live_node_ids(tx, {a.node for a in rows})
        if any(a.node not in live and a.state not in (AssignmentState.FINISHED, AssignmentState.FAILED) for a in rows):
            # A node may have handed back and left between the two statements: that is no lost node.
            rows = registry.assignments(tx, job.id, job.generation)
        epoch = epochs.read_epoch(tx, job.id, job.in_flight) if job.in_flight else None
        newest = epochs.read_epoch(tx, job.id, job.newest_durable) if job.newest_durable else None
        copying = False
        if newest is not None and newest.kind == EpochKind.SUSPEND and newest.savepoint:
            saved = epochs.read_savepoint(tx, newest.savepoint)
            copying = saved is not None and saved["state"] == "COPYING"
        return d.JobView(
            now=tx.now_us(),
            job=job,
            plan=msgspec.json.decode(job.plan, type=PartitionedPlan),
            settings=msgspec.json.decode(job.settings, type=StreamSettings),
            assignments=rows,
            live_nodes=frozenset(live),
            epoch=epoch,
            acks=epochs.ack_marks(tx, job.id, epoch.epoch) if epoch else [],
            newest=newest,
            uncommitted=epochs.uncommitted(tx, job.id),
            splits=epochs.splits(tx, job.id),
            discovered=epochs.discoveries(tx, job.id, job.generation),
            savepoint_copying=copying,
        )

    # -- carrying out -----------------------------------------------------------------------------------------------------------------

    def _apply(self, tx: Transaction, view: d.JobView, step: d.Step, outbox: list[NodeHint]) -> d.Step:
        match step:
            case d.Wait():
                return step
            case d.Deploy():
                return self._deploy(tx, view, step.finalize, outbox)
            case d.BecomeRunning():
                self._to(tx, view, JobState.RUNNING, "", epoch_us=view.now, aborts=0)
                self._tell(view, outbox, "run")
            case d.Restart():
                self._restart(tx, view, step, outbox)
            case d.Finalize():
                self._fence(tx, view, outbox, step.reason)
                extra = {"mode": "finalize", "target": step.target, "stopping_us": view.now, "deployed_us": 0}
                self._to(tx, view, JobState.STOPPING, step.reason, generation=view.job.generation + 1, in_flight=0, **extra)
                jobs.add_history(tx, view.job.id, "stopping", step.reason)
            case d.End():
                self._end(tx, view, step, outbox)
            case d.TriggerEpoch():
                self._trigger(tx, view, step, outbox)
            case d.AbortEpoch():
                self._abort(tx, view, step.reason)
                self._to(tx, view, view.job.state, step.reason, in_flight=0, aborts=view.job.aborts + 1, epoch_us=view.now)
                self._tell(view, outbox, "abort")
            case d.Precommit():
                assert view.epoch is not None
                self._move(tx, view.job, view.epoch, EpochState.PRECOMMITTED)
            case d.MakeDurable():
                self._durable(tx, view, outbox)
            case d.MarkCommitted():
                epochs.commit_epochs(tx, view.job.id, step.epoch)
                self._to(tx, view, view.job.state, view.job.reason, newest_committed=step.epoch)
            case d.OwnSplits():
                refused = epochs.own_splits(tx, view.job.id, {(o, s): i for o, s, i in step.owners})
                if refused:
                    raise AssertionError(f"splits of {view.job.id} are not there to be handed out: {refused[:5]}")
                self._to(tx, view, view.job.state, view.job.reason, splits_rev=view.job.splits_rev + 1)
                self._tell(view, outbox, "splits")
        return step

    def _to(self, tx: Transaction, view: d.JobView, state: JobState, reason: str, **values: object) -> None:
        """The guarded write of the job's row: from the state and revision that were read, under the term in force."""
        if not may(view.job.state, state):
            raise AssertionError(f"job {view.job.id}: {view.job.state} may not become {state}")
        term = max(registry.read_term(tx), view.job.term)
        if not jobs.update_job(tx, view.job, state=state, reason=reason, term=term, **values):
            raise AssertionError(f"job {view.job.id} changed under its lock")

    def _tell(self, view: d.JobView, outbox: list[NodeHint], what: str, nodes: set[str] | None = None) -> None:
        for node in sorted(nodes if nodes is not None else {a.node for a in view.assignments}):
            outbox.append(NodeHint(node, view.job.id, view.job.generation, view.job.term, what))

    def _fence(self, tx: Transaction, view: d.JobView, outbox: list[NodeHint], reason: str) -> None:
        """Nothing of the present generation counts any more."""
        self._abort(tx, view, reason)
        self._tell(view, outbox, "fence")

    def _abort(self, tx: Transaction, view: d.JobView, reason: str) -> None:
        if view.epoch is not None:
            self._move(tx, view.job, view.epoch, EpochState.ABORTED, reason=reason[:20_000])

    def _move(self, tx: Transaction, job: JobRow, epoch: EpochRow, after: EpochState, **values: object) -> None:
        """Of the epoch in flight, read under the lock: zero rows are a defect."""
        if not epochs.move_epoch(tx, job.id, epoch.epoch, after, **values):
            raise AssertionError(f"epoch {epoch.epoch} of {job.id} is {epoch.state}: it may not become {after}")

    def _restart(self, tx: Transaction, view: d.JobView, step: d.Restart, outbox: list[NodeHint]) -> None:
        job, policy = view.job, view.settings.restart
        self._fence(tx, view, outbox, step.detail)
        delay = step.delay_us
        if policy.kind == "exponential" and delay:
            delay = int(delay * self._chance.uniform(0.5, 1.0))
        causes = msgspec.json.decode(job.causes, type=dict[str, int])
        causes[step.cause] = causes.get(step.cause, 0) + 1
        self._to(
            tx,
            view,
            JobState.RESTARTING,
            f"{step.cause}: {step.detail}"[:20_000],
            generation=job.generation + 1,
            in_flight=0,
            aborts=0,
            restarts=job.restarts + 1,
            recent_restarts=d.with_restart(view, step),
            causes=msgspec.json.encode(causes).decode(),
            failures=job.failures + (not step.stall and not step.free),
            stalls=job.stalls + step.stall,
            due_us=view.now + delay,
            restarted_us=view.now,
        )
        jobs.add_history(tx, job.id, "restart", f"{step.cause}: {step.detail}")

    def _deploy(self, tx: Transaction, view: d.JobView, finalize: bool, outbox: list[NodeHint]) -> d.Step:
        """All slots in this transaction, or none."""
        job = view.job
        registry.lock_capacity(tx)
        subtasks = [s for s in view.plan.subtasks() if not finalize or s.id in set(view.plan.committers)]
        placed = place(subtasks, registry.active_nodes(tx), registry.used_slots(tx))
        if placed is None:
            if not finalize and job.state is not JobState.WAITING_FOR_RESOURCES:
                self._to(tx, view, JobState.WAITING_FOR_RESOURCES, f"{len(subtasks)} slots wanted, fewer are free")
            return d.Wait(view.now + 500_000)
        generation = job.generation + 1
        try:
            manifest = epochs.restored_manifest(tx, job)
            splits = restored_splits(view.plan, manifest)
        except (SnapshotMissing, SnapshotUnreadable) as exc:
            pending = PENDING_UNKNOWN if job.newest_durable > job.newest_committed else "[]"
            self._to(tx, view, JobState.FAILED, str(exc), ended=1, live_name=None, pending_commits=pending)
            jobs.add_history(tx, job.id, "failed", str(exc))
            return d.Wait()
        epoch = manifest.epoch if manifest else 0
        if not finalize:
            epochs.reset_splits(tx, job.id, splits)
            epochs.write_channels(tx, view.plan.channels(job.id, generation))
        registry.assign(tx, job.id, generation, placed, 0)  # nothing is known to be committed before it is reported
        registry.delete_assignments(tx, job.id, generation - 20)
        state = JobState.STOPPING if finalize else JobState.DEPLOYING
        mode = "finalize" if finalize else "run"
        self._to(
            tx,
            view,
            state,
            job.reason if finalize else "",
            generation=generation,
            mode=mode,
            deployed_us=view.now,
            restore_epoch=epoch,
            in_flight=0,
        )
        if not (finalize and job.deployed_us):  # tries of a sink that stays away would push everything else out of the history
            jobs.add_history(tx, job.id, "deploy", f"generation {generation} from epoch {epoch}" + (" (finalize)" if finalize else ""))
        moved = msgspec.structs.replace(view, job=msgspec.structs.replace(job, generation=generation))
        self._tell(moved, outbox, "deploy", set(placed.values()))
        return d.Deploy(finalize)

    def _trigger(self, tx: Transaction, view: d.JobView, step: d.TriggerEpoch, outbox: list[NodeHint]) -> None:
        """The epoch's row first, with the copied split rows; then the sources hear of it."""
        job = view.job
        epoch = job.next_epoch
        copied = [epochs.split_state(s) for s in view.splits]
        epochs.trigger(tx, job.id, epoch, job.generation, job.term, step.kind, step.savepoint, copied)
        self._to(tx, view, job.state, job.reason, next_epoch=epoch + 1, in_flight=epoch, epoch_us=view.now, wants_epoch=0)
        sources = {a.node for a in view.assignments if Subtask.parse(a.subtask).vertex in view.plan.sources}
        self._tell(view, outbox, "trigger", sources)

    def _durable(self, tx: Transaction, view: d.JobView, outbox: list[NodeHint]) -> None:
        """One transaction writes the manifest and marks the epoch DURABLE; only then do sinks hear of it."""
        job, epoch = view.job, view.epoch
        assert epoch is not None
        snapshots = epochs.ack_snapshots(tx, job.id, epoch.epoch)
        model = msgspec.json.decode(job.model, type=StreamModel)
        manifest = compose(job, epoch, model, view.plan, snapshots, view.now)
        epochs.write_manifest(tx, manifest)
        size = sum(h.size for h in manifest.handles())
        self._move(tx, job, epoch, EpochState.DURABLE, durable_us=view.now, size=size)
        over = {(s.operator, s.split) for s in view.splits if s.state is SplitOwner.FINISHED}
        refused = epochs.finish_splits(tx, job.id, [s for s in manifest.splits if s.finished and (s.operator, s.split_id) not in over])
        if refused:
            raise AssertionError(f"splits of {job.id} were finished by a reader and have no row: {refused[:5]}")
        values: dict[str, object] = {"newest_durable": epoch.epoch, "in_flight": 0, "aborts": 0}
        if view.now - job.restarted_us > view.settings.restart.interval_ms * 1000:
            values |= {"failures": 0, "stalls": 0}
        if epoch.savepoint:
            self._save(tx, job, epoch, manifest)
            if job.wanted_savepoint == epoch.savepoint:
                values["wanted_savepoint"] = ""
        self._to(tx, view, job.state, job.reason, **values)
        self._tell(view, outbox, "durable")

    def _save(self, tx: Transaction, job: JobRow, epoch: EpochRow, manifest: EpochManifest) -> None:
        """The savepoint that was asked for; under an id of its own if another job took the id meanwhile: nothing that was asked for is lost."""
        if epochs.write_savepoint(tx, epoch.savepoint, manifest, job.model):
            return
        own = f"{epoch.savepoint[:40]}-{job.id}-e{epoch.epoch}"
        if not epochs.write_savepoint(tx, own, manifest, job.model):
            raise AssertionError(f"savepoint {own} exists before its epoch is durable")
        if not epochs.rename_savepoint(tx, job.id, epoch.epoch, own):
            raise AssertionError(f"epoch {epoch.epoch} of {job.id} is not durable")
        jobs.add_history(tx, job.id, "savepoint", f"{epoch.savepoint} is another job's by now: saved as {own}")

    def _end(self, tx: Transaction, view: d.JobView, step: d.End, outbox: list[NodeHint]) -> None:
        """An ending is never held up by what cannot be read: what is pending is unknown then, and the reason says so."""
        job, reason = view.job, step.reason
        self._fence(tx, view, outbox, reason)
        pending = "[]"
        if step.pending and job.newest_durable > job.newest_committed:
            try:
                pending = msgspec.json.encode(_pending(view, epochs.read_manifest(tx, job.id, job.newest_durable))).decode()
            except (SnapshotMissing, SnapshotUnreadable) as exc:
                log.error("pending commits cannot be listed", job=job.id, error=str(exc))
                pending = PENDING_UNKNOWN
                reason = f"{reason}; which commits are pending is unknown: {exc}"
        values: dict[str, object] = {}
        if not step.pending and job.newest_durable > job.newest_committed:
            epochs.commit_epochs(tx, job.id, job.newest_durable)
            values["newest_committed"] = job.newest_durable
        desired = Desired.RUN if step.state is JobState.FAILED else job.desired
        self._to(
            tx,
            view,
            step.state,
            reason[:20_000],
            ended=1,
            live_name=None,
            in_flight=0,
            pending_commits=pending,
            generation=job.generation + (view.assignments != []),
            desired=desired,
            **values,
        )
        jobs.add_history(tx, job.id, step.state.lower(), reason)


def _pending(view: d.JobView, manifest: EpochManifest) -> list[Committable]:
    """Of the newest durable epoch, what no committer has reported."""
    done = {a.subtask: a.committed for a in view.assignments}
    left = [c for c in manifest.committables() if c.epoch > view.job.newest_committed]
    return [c for c in left if done.get(_committer(view.plan, c), 0) < manifest.epoch]


def _committer(plan: PartitionedPlan, committable: Committable) -> str:
    """Who commits it in this generation: original subtask j belongs to j mod the present parallelism."""
    vertex = next((v for v in plan.vertices if committable.operator in v.operators), None)
    return "" if vertex is None else Subtask(vertex.id, committable.subtask % vertex.parallelism).id
