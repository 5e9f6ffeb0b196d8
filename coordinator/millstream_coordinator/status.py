"""What is shown of a job: state, guarantee, epochs, subtasks; from an epoch one reaches its offsets, segments and committables.

Called by ``Jobs`` and the metrics. Read-only. What must never happen here: a value that was not read in the caller's one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from millstream_schema.model import Guarantee, StreamModel
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Transaction
from millstream_schema.store.rows import AssignmentRow, EpochRow, JobRow


def describe(tx: Transaction, job: JobRow, epochs_shown: int = 10) -> dict[str, Any]:
    """One job as JSON-able values. Times in UTC µs, durations in ms."""
    model = msgspec.json.decode(job.model, type=StreamModel)
    rows = _assignments(tx, job)
    uncommitted = epochs.uncommitted(tx, job.id)
    stats = {a.subtask: msgspec.json.decode(a.stats) for a in rows}
    return {
        "id": job.id,
        "namespace": job.namespace,
        "name": job.name,
        "factory": job.factory,
        "state": job.state.value,
        "desired": job.desired.value,
        "reason": job.reason,
        "guarantee": model.guarantee.value,
        "note": "epochs may be off: a lost tail is not noticed" if model.guarantee is Guarantee.BEST_EFFORT else "",
        "generation": job.generation,
        "term": job.term,
        "plan_fingerprint": job.plan_fingerprint,
        "restarts": job.restarts,
        "causes": msgspec.json.decode(job.causes),
        "newest_durable": job.newest_durable,
        "newest_committed": job.newest_committed,
        "uncommitted_epochs": uncommitted,
        "commits_waiting_for": sorted({a.commit_detail for a in rows if a.commit_detail}),
        "pending_commits": msgspec.json.decode(job.pending_commits),
        "epochs": epoch_lines(tx, job, epochs_shown),
        "subtasks": [
            {
                "subtask": a.subtask,
                "node": a.node,
                "attempt": a.attempt,
                "state": a.state.value,
                "detail": a.detail,
                "committed": a.committed,
                "stats": stats[a.subtask],
            }
            for a in rows
        ],
        "savepoints": epochs.savepoints(tx, job.id),
        "history": [{"event": h["event"], "detail": h["detail"], "at_us": h["at_us"]} for h in jobs.history(tx, job.id, 20)],
    }


def _assignments(tx: Transaction, job: JobRow) -> list[AssignmentRow]:
    """Of the present generation, or of the last one while there are none yet."""
    return registry.assignments(tx, job.id, job.generation) or registry.assignments(tx, job.id, job.generation - 1)


def epoch_lines(tx: Transaction, job: JobRow, limit: int) -> list[dict[str, Any]]:
    """The newest epochs of a job."""
    aligned = _alignments(msgspec.json.decode(a.stats) for a in _assignments(tx, job))
    return [_epoch_line(e, aligned.get(e.epoch)) for e in epochs.list_epochs(tx, job.id, limit)]


def _alignments(stats: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Alignment time in ms of the newest epochs: that of the subtask that took longest. Known while the generation that took the epoch is shown."""
    found: dict[int, float] = {}
    for values in stats:
        for epoch, ms in values.get("alignments", ()):
            found[epoch] = max(ms, found.get(epoch, 0.0))
    return found


def describe_nodes(tx: Transaction) -> list[dict[str, Any]]:
    """The live nodes that take work, with what their processes counted as of the last renewal."""
    return [
        {"id": n.id, "name": n.name, "slots": n.slots, "counts": msgspec.json.decode(n.info).get("counts", {})}
        for n in registry.active_nodes(tx)
    ]


def _epoch_line(e: EpochRow, alignment_ms: float | None) -> dict[str, Any]:
    return {
        "epoch": e.epoch,
        "generation": e.generation,
        "kind": e.kind,
        "state": e.state.value,
        "reason": e.reason,
        "savepoint": e.savepoint,
        "size": e.size,
        "duration_ms": round((e.durable_us - e.triggered_us) / 1000, 3) if e.durable_us else None,
        "alignment_ms": alignment_ms,
        "commit_ms": round((e.committed_us - e.durable_us) / 1000, 3) if e.committed_us else None,
        "triggered_us": e.triggered_us,
    }


def describe_epoch(tx: Transaction, job: JobRow, epoch: int) -> dict[str, Any]:
    """One durable epoch: its offsets, segments and committables. Raises SnapshotMissing."""
    manifest = epochs.read_manifest(tx, job.id, epoch)
    return {
        "epoch": manifest.epoch,
        "kind": manifest.kind,
        "generation": manifest.generation,
        "plan_fingerprint": manifest.plan_fingerprint,
        "requirements": manifest.requirements,
        "offsets": [{"operator": s.operator, "split": s.split_id, "cursor": s.cursor, "finished": s.finished} for s in manifest.splits],
        "segments": [{"subtask": s.subtask, "key": h.key, "size": h.size} for s in manifest.subtasks for h in s.segments],
        "committables": [msgspec.to_builtins(c) for c in manifest.committables()],
    }
