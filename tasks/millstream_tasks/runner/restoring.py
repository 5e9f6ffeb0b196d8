"""Bringing a subtask's operators back to an epoch, whatever the parallelism it was taken with.

Called once by the runner before the first record. What must never happen here: partial state, "some" subtask's state in place of a missing one, state loaded
for shards this subtask does not own.
"""

from __future__ import annotations

from typing import Any

from millstream_schema.connectors import Committable, Handle, Json, SnapshotStorage
from millstream_schema.control import Deployment
from millstream_schema.manifest import SubtaskSnapshot
from millstream_schema.plan import PartitionedPlan, Subtask, Vertex
from millstream_schema.values import TypeRegistry

from ..operators.base import Operator
from ..segments import Segment


def load_operators(
    operators: list[Operator], deployment: Deployment, plan: PartitionedPlan, storage: SnapshotStorage, registry: TypeRegistry
) -> None:
    """Tables by shard, then metas. Raises SnapshotMissing or SnapshotUnreadable naming the segment."""
    subtask = Subtask.parse(deployment.subtask)
    shards = plan.shards(subtask)
    parallelism = plan.vertex(subtask.vertex).parallelism
    by_id = {o.id: o for o in operators}
    metas: dict[str, list[dict[str, Json]]] = {}
    for snapshot in sorted(deployment.restored, key=lambda s: Subtask.parse(s.subtask)):
        wanted = [o for o in snapshot.operators if o in by_id and by_id[o].tables]
        if wanted:
            written = {new: old for old, new in deployment.renames.items()}
            names = {o: written.get(o, o) for o in wanted}
            _load_segments(snapshot.segments, names, by_id, shards, storage, registry, deployment.lenient)
        for operator, meta in snapshot.meta.items():
            if operator in by_id and isinstance(meta, dict):
                metas.setdefault(operator, []).append(meta)
    for op in operators:
        if deployment.restore_epoch:
            op.restore_meta(metas.get(op.id, []), subtask.index, parallelism)


def _load_segments(
    segments: list[Handle],
    names: dict[str, str],
    by_id: dict[str, Operator],
    shards: range,
    storage: SnapshotStorage,
    registry: TypeRegistry,
    lenient: bool,
) -> None:
    """Segments in order: a full one, then increments; ``names``: operator → the id it was written under. Each blob is read and verified whole before anything of it is applied."""
    for handle in segments:
        segment = Segment(storage.get(handle), handle.key, registry)
        for operator, written in names.items():
            segment.apply(written, by_id[operator].tables, shards, lenient=lenient)


def same_shape(deployment: Deployment) -> SubtaskSnapshot | None:
    """The snapshot this very subtask took, when nothing else of its state comes from elsewhere: increments may build on it."""
    if deployment.rescaled or len(deployment.restored) != 1:
        return None
    snapshot = deployment.restored[0]
    return snapshot if snapshot.subtask == deployment.subtask else None


def restored_committables(deployment: Deployment, vertex: Vertex, sinks: set[str]) -> list[Committable]:
    """Those this subtask must commit: original subtask j belongs to j mod the new parallelism."""
    index = Subtask.parse(deployment.subtask).index
    return [c for s in deployment.restored for c in s.committables if c.operator in sinks and c.subtask % vertex.parallelism == index]


def restored_participants(deployment: Deployment) -> dict[str, Any]:
    return {name: state for s in deployment.restored for name, state in s.participants.items()}
