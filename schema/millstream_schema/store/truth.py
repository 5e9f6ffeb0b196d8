"""What a node is told by its rows: the answer to each lease renewal, and what a subtask is deployed with.

Called by nodes. Read-only. What must never happen here: a deployment of a generation that is not the job's, or one with part of its state.
"""

from __future__ import annotations

import msgspec

from ..control import Deployment, DeployMode, EpochKind
from ..manifest import EpochManifest, Renames, SplitState, SubtaskSnapshot
from ..plan import PartitionedPlan, Subtask
from ..settings import StreamSettings
from ..states import EpochState, JobState, SplitOwner
from . import epochs, jobs, registry
from .database import Transaction
from .rows import AssignmentRow, JobRow, SplitRow


class JobTruth(msgspec.Struct, frozen=True):
    """What a node must know of one job it hosts a part of."""

    job: JobRow
    plan: PartitionedPlan
    running: bool
    trigger: tuple[int, EpochKind] | None
    durable: int
    aborted: list[int]
    splits: list[SplitRow]
    complete: dict[str, bool]

    def owned(self, subtask: Subtask) -> list[SplitState]:
        """Splits of a source subtask, in a stable order."""
        operators = self.plan.vertex(subtask.vertex).operators
        return [epochs.split_state(s) for s in self.splits if s.operator in operators and s.owner == subtask.index]

    def all_assigned(self, subtask: Subtask) -> bool:
        """No split will come any more: discovery is over and every split has an owner or is finished."""
        operator = self.plan.vertex(subtask.vertex).operators[0]
        return self.complete.get(operator, False) and not any(
            s.operator == operator and s.state is SplitOwner.UNASSIGNED for s in self.splits
        )


def node_truth(tx: Transaction, node: str) -> tuple[list[AssignmentRow], dict[str, JobTruth]]:
    """Assignments of a node and the truth of each of their jobs."""
    rows = registry.current_assignments(tx, node)
    truths = {}
    for job_id in sorted({a.job for a in rows}):
        job = jobs.read_job(tx, job_id)
        if job is not None:
            truths[job_id] = job_truth(tx, job)
    return rows, truths


def job_truth(tx: Transaction, job: JobRow) -> JobTruth:
    running = job.state is JobState.RUNNING
    trigger = None
    if running and job.in_flight:
        epoch = epochs.read_epoch(tx, job.id, job.in_flight)
        if epoch is not None and epoch.state is EpochState.TRIGGERED and epoch.generation == job.generation:
            trigger = (epoch.epoch, EpochKind(epoch.kind))
    plan = _plan(job.plan)
    return JobTruth(
        job=job,
        plan=plan,
        running=running,
        trigger=trigger,
        durable=job.newest_durable,
        aborted=epochs.aborted_since(tx, job.id, job.generation, max(job.newest_durable, job.restore_epoch)) if running else [],
        splits=epochs.splits(tx, job.id),
        complete=epochs.discoveries(tx, job.id, job.generation),
    )


def _plan(text: str) -> PartitionedPlan:
    return msgspec.json.decode(text, type=PartitionedPlan)


def load_deployment(tx: Transaction, assignment: AssignmentRow, attempt: str) -> Deployment | None:
    """What to start an attempt with; None when the generation has moved on. Raises SnapshotMissing or SnapshotUnreadable."""
    job = jobs.read_job(tx, assignment.job)
    if job is None or job.generation != assignment.generation:
        return None
    plan = _plan(job.plan)
    subtask = Subtask.parse(assignment.subtask)
    operators = plan.vertex(subtask.vertex).operators
    manifest = epochs.restored_manifest(tx, job)
    given = msgspec.json.decode(job.renames, type=Renames)
    renames = given.names if manifest is not None and given.epoch == manifest.epoch else {}
    rows = epochs.splits(tx, job.id)
    restored = [] if manifest is None else [s for s in manifest.subtasks if set(s.operators) & set(operators)]
    done = 0 if manifest is None else jobs.committed_epoch(tx, job, manifest.job)
    return Deployment(
        job=job.id,
        factory=job.factory,
        config=msgspec.json.decode(job.config),
        parallelism=job.parallelism,
        overrides=msgspec.json.decode(job.overrides),
        plan_fingerprint=job.plan_fingerprint,
        generation=job.generation,
        attempt=attempt,
        subtask=assignment.subtask,
        mode=DeployMode(job.mode),
        settings=msgspec.json.decode(job.settings, type=StreamSettings),
        restore_epoch=manifest.epoch if manifest else 0,
        restored=uncommitted(needed(restored, plan, subtask, manifest), done),
        splits=[epochs.split_state(s) for s in rows if s.operator in operators and s.owner == subtask.index],
        known_splits={o: [s.split for s in rows if s.operator == o] for o in operators if any(s.operator == o for s in rows)},
        rescaled=_reshaped(manifest, plan, subtask) or bool(renames),
        lenient=bool(job.lenient),
        renames=renames,
        old_channels=epochs.old_channels(tx, job.id, job.generation)
        if subtask == plan.subtasks()[0] or job.mode == DeployMode.FINALIZE
        else [],
    )


def needed(
    restored: list[SubtaskSnapshot], plan: PartitionedPlan, subtask: Subtask, manifest: EpochManifest | None
) -> list[SubtaskSnapshot]:
    """At the same shape, only this subtask's own snapshot is needed; after a change, all that hold its operators."""
    if manifest is not None and not _reshaped(manifest, plan, subtask):
        return [s for s in restored if s.subtask == subtask.id]
    return restored


def uncommitted(snapshots: list[SubtaskSnapshot], done: int) -> list[SubtaskSnapshot]:
    """Without the committables of epochs up to ``done``, which the job's row proves committed. They need no commit any more, and the job may write to another target by now."""
    return [msgspec.structs.replace(s, committables=[c for c in s.committables if c.epoch > done]) for s in snapshots]


def _reshaped(manifest: EpochManifest | None, plan: PartitionedPlan, subtask: Subtask) -> bool:
    """Whether the vertex had another parallelism or other operators when the epoch was taken."""
    if manifest is None:
        return False
    vertex = plan.vertex(subtask.vertex)
    old = [s for s in manifest.subtasks if Subtask.parse(s.subtask).vertex == subtask.vertex]
    mixed = any(set(s.operators) & set(vertex.operators) for s in manifest.subtasks if s not in old)
    return mixed or len(old) != vertex.parallelism or any(s.operators != vertex.operators for s in old)
