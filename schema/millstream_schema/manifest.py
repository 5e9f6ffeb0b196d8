"""What an epoch leaves behind: subtask snapshots, and the manifest that makes them the truth.

Written by the coordinator in the transaction that marks the epoch DURABLE; read for every deployment. What must never happen here: a manifest that is
read without its checksum, or "none" taken for "unreadable".
"""

from __future__ import annotations

from typing import Any

import msgspec

from .canonical import canonical_json, fingerprint
from .connectors import Committable, Handle, Json
from .errors import SnapshotUnreadable

MANIFEST_FORMAT = 1


class SplitState(msgspec.Struct, frozen=True):
    """A reader's split at the cut. ``cursor`` is exclusive: the next record to emit."""

    operator: str
    split_id: str
    body: Json
    cursor: Json
    finished: bool


class SubtaskSnapshot(msgspec.Struct, frozen=True):
    """What one subtask acknowledged for one epoch."""

    subtask: str
    operators: list[str]
    segments: list[Handle]
    """Blobs to apply in order: a full one, then increments relative to durable epochs."""
    splits: list[SplitState] = []
    committables: list[Committable] = []
    """All that are not known to be committed, older epochs' included."""
    participants: dict[str, Json] = {}
    """``operator`` or ``operator/split`` → what a checkpoint participant saved."""
    meta: dict[str, Json] = {}
    """Operator → its state without key: last finite watermark, operator list state."""
    exhausted: bool = False
    records: int = 0


class EpochManifest(msgspec.Struct, frozen=True):
    """Everything needed to restore a job at one epoch."""

    job: str
    epoch: int
    kind: str
    generation: int
    term: int
    model_fingerprint: str
    plan_fingerprint: str
    shard_count: int
    requirements: list[Any]
    operators: dict[str, Any]
    """Operator id → its kind, states and parallelism: what a restore is checked against."""
    subtasks: list[SubtaskSnapshot]
    splits: list[SplitState]
    """The copied split rows of the moment the epoch was triggered; readers' own entries win."""
    triggered_us: int
    durable_us: int
    format: int = MANIFEST_FORMAT

    def handles(self) -> list[Handle]:
        return [h for s in self.subtasks for h in s.segments]

    def committables(self) -> list[Committable]:
        return [c for s in self.subtasks for c in s.committables]


class Renames(msgspec.Struct, frozen=True):
    """Old operator id → new one, for the restore of one epoch."""

    epoch: int = 0
    names: dict[str, str] = {}


def renamed(manifest: EpochManifest, renames: dict[str, str]) -> EpochManifest:
    """The manifest with operators under their new ids. Segments and committables keep the ids they were written with."""

    def new(operator: str) -> str:
        return renames.get(operator, operator)

    def split(s: SplitState) -> SplitState:
        return msgspec.structs.replace(s, operator=new(s.operator))

    def participant(name: str) -> str:
        operator, slash, rest = name.partition("/")
        return new(operator) + slash + rest

    subtasks = [
        msgspec.structs.replace(
            s,
            operators=[new(o) for o in s.operators],
            splits=[split(x) for x in s.splits],
            participants={participant(n): v for n, v in s.participants.items()},
            meta={new(o): v for o, v in s.meta.items()},
        )
        for s in manifest.subtasks
    ]
    operators = {new(o): v for o, v in manifest.operators.items()}
    return msgspec.structs.replace(manifest, subtasks=subtasks, splits=[split(s) for s in manifest.splits], operators=operators)


class SealedManifest(msgspec.Struct, frozen=True):
    """A manifest's text with its checksum, as the row holds it."""

    body: str
    checksum: str


def seal(manifest: EpochManifest) -> SealedManifest:
    builtins = msgspec.to_builtins(manifest)
    return SealedManifest(canonical_json(builtins).decode(), fingerprint(builtins))


def open_manifest(body: str, checksum: str, name: str) -> EpochManifest:
    """Verify and decode. Raises SnapshotUnreadable naming the manifest."""
    try:
        raw = msgspec.json.decode(body)
        if fingerprint(raw) != checksum:
            raise SnapshotUnreadable(f"manifest {name} does not match its checksum: restore the database or start from a savepoint")
        if raw.get("format") != MANIFEST_FORMAT:
            raise SnapshotUnreadable(
                f"manifest {name} has format {raw.get('format')}, this build reads {MANIFEST_FORMAT}: upgrade Millstream"
            )
        return msgspec.convert(raw, EpochManifest)
    except (msgspec.MsgspecError, AttributeError) as exc:
        raise SnapshotUnreadable(f"manifest {name} cannot be decoded: {exc}") from exc
