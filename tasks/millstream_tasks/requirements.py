"""Checks a job's requirements on the node, before anything of it runs there. Compile time has checked them already; a node may differ.

Called by the runner when it starts. What must never happen here: a requirement that is passed over because nobody knows it.
"""

from __future__ import annotations

from millstream_schema.connectors import PROOF, SnapshotStorage
from millstream_schema.errors import StorageError
from millstream_schema.model import Guarantee, StreamModel, StreamRequirement


def unmet(model: StreamModel, job: str, storage: SnapshotStorage, transport: str) -> list[str]:
    """What this node cannot give, one sentence each."""
    return [problem for r in model.requirements if (problem := _unmet(r, model, job, storage, transport))]


def _unmet(requirement: StreamRequirement, model: StreamModel, job: str, storage: SnapshotStorage, transport: str) -> str:
    match requirement.name:
        case "guarantee":
            return "" if model.guarantee is Guarantee(str(requirement.value)) else f"guarantee {requirement.value} is required"
        case "durable_checkpoint_storage" | "shared_storage":
            return _unproved(job, storage)
        case "event_time":
            timed = any(o.kind == "assign_timestamps" for o in model.operators)
            return "" if timed else "event time is required and nothing assigns timestamps"
        case "broker_transport":
            brokers = ("redis", "rediss", "amqp", "amqps", "pyamqp")
            return "" if transport in brokers else f"a broker transport is required, this node uses {transport!r}: set MILLSTREAM_TRANSPORT"
    return f"requirement {requirement.name!r} is not known to this build: upgrade this node"


def _unproved(job: str, storage: SnapshotStorage) -> str:
    key = f"{PROOF}/{job}"
    try:
        there = key in storage.keys(key)
    except StorageError as exc:
        return f"checkpoint storage cannot be read here: {exc}"
    if there:
        return ""
    return (
        f"checkpoint storage {storage.url} does not hold here what the coordinator wrote there ({key}): "
        "every node must reach the same storage; mount one shared directory everywhere, or use a database URL"
    )
