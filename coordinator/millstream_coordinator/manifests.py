"""Composing manifests from acknowledgements, and reading from them what a new generation starts with. Pure.

Called by the reconciler. What must never happen here: a copied split row that wins over its reader's own entry, a split given to two readers.
"""

from __future__ import annotations

import msgspec

from millstream_schema.errors import SnapshotUnreadable
from millstream_schema.manifest import EpochManifest, SplitState, SubtaskSnapshot
from millstream_schema.model import StreamModel
from millstream_schema.plan import PartitionedPlan, Subtask
from millstream_schema.store.rows import EpochRow, JobRow


def compose(
    job: JobRow, epoch: EpochRow, model: StreamModel, plan: PartitionedPlan, snapshots: list[SubtaskSnapshot], now: int
) -> EpochManifest:
    """The manifest of an epoch every subtask has acknowledged. Readers' split states win over the copied rows."""
    copied = msgspec.json.decode(epoch.splits, type=list[SplitState])
    read = {(s.operator, s.split_id): s for snap in snapshots for s in snap.splits}
    merged = {(s.operator, s.split_id): s for s in copied} | read
    operators = {
        op.id: {"kind": op.kind, "states": op.states, "parallelism": plan.vertex_of(op.id).parallelism, "stateful": bool(op.states)}
        for op in model.operators
    }
    return EpochManifest(
        job=job.id,
        epoch=epoch.epoch,
        kind=epoch.kind,
        generation=job.generation,
        term=job.term,
        model_fingerprint=plan.model_fingerprint,
        plan_fingerprint=job.plan_fingerprint,
        shard_count=plan.shard_count,
        requirements=[msgspec.to_builtins(r) for r in model.requirements],
        operators=operators,
        subtasks=sorted(snapshots, key=lambda s: Subtask.parse(s.subtask)),
        splits=[merged[k] for k in sorted(merged)],
        triggered_us=epoch.triggered_us,
        durable_us=now,
    )


def restored_splits(plan: PartitionedPlan, manifest: EpochManifest | None) -> list[tuple[SplitState, int]]:
    """(split, owner) for a new generation. A reader's splits go to j mod the new parallelism; those no reader had are unassigned."""
    if manifest is None:
        return []
    owner: dict[tuple[str, str], int] = {}
    for snapshot in manifest.subtasks:
        for s in snapshot.splits:
            key = (s.operator, s.split_id)
            if key in owner:
                raise SnapshotUnreadable(f"split {s.split_id!r} of {s.operator!r} is in two readers' snapshots of epoch {manifest.epoch}")
            owner[key] = Subtask.parse(snapshot.subtask).index
    known = {o for v in plan.vertices for o in v.operators}
    result = []
    for s in manifest.splits:
        if s.operator not in known:
            continue
        index = owner.get((s.operator, s.split_id), -1)
        parallelism = plan.vertex_of(s.operator).parallelism
        result.append((s, -1 if s.finished or index < 0 else index % parallelism))
    return result
