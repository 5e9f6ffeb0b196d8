"""Statements on epochs, acknowledgements, manifests, savepoints, channels and splits.

Called by the coordinator under the job's row lock; by nodes :func:`acknowledge`, :func:`discover` (which takes the lock) and
:func:`forget_channels`. What must never happen here: an acknowledgement taken for an epoch that is over, a state that goes back, "none"
answered where something is unreadable.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from ..channels import ChannelId
from ..connectors import Split
from ..errors import SnapshotMissing, SnapshotUnreadable
from ..manifest import EpochManifest, Renames, SplitState, SubtaskSnapshot, open_manifest, renamed, seal
from ..states import EpochState, SplitOwner, before_epoch
from .database import Query, Transaction
from .rows import AckMark, EpochRow, JobRow, SplitRow, to

# -- epochs


def trigger(tx: Transaction, job: str, epoch: int, generation: int, term: int, kind: str, savepoint: str, splits: list[SplitState]) -> None:
    """The row of a new epoch, with the copied split rows."""
    tx.insert(
        tx.t.epoch,
        job=job, epoch=epoch, generation=generation, term=term, kind=kind, state=EpochState.TRIGGERED, reason="", savepoint=savepoint,
        splits=msgspec.json.encode(splits).decode(), size=0, triggered_us=tx.now_us(), durable_us=0, committed_us=0, rev=0,
    )  # fmt: skip


_EPOCH = Query(lambda t: sa.select(t.epoch).where(t.epoch.c.job == sa.bindparam("job"), t.epoch.c.epoch == sa.bindparam("epoch")))


def read_epoch(tx: Transaction, job: str, epoch: int) -> EpochRow | None:
    row = tx.row(_EPOCH, job=job, epoch=epoch)
    return None if row is None else to(EpochRow, row)


def list_epochs(tx: Transaction, job: str, limit: int) -> list[EpochRow]:
    t = tx.t.epoch
    return [to(EpochRow, r) for r in tx.rows(sa.select(t).where(t.c.job == job).order_by(t.c.epoch.desc()).limit(limit))]


def aborted_since(tx: Transaction, job: str, generation: int, above: int) -> list[int]:
    """Aborted epochs of a generation above an epoch, oldest first."""
    t = tx.t.epoch
    found = tx.rows(
        sa.select(t.c.epoch)
        .where(t.c.job == job, t.c.generation == generation, t.c.epoch > above, t.c.state == EpochState.ABORTED)
        .order_by(t.c.epoch)
    )
    return [int(r["epoch"]) for r in found]


def move_epoch(tx: Transaction, job: str, epoch: int, after: EpochState, **values: Any) -> bool:
    """From a state that the table of transitions allows; False: it is in none of them."""
    t = tx.t.epoch
    return tx.update(t, t.c.job == job, t.c.epoch == epoch, t.c.state.in_(before_epoch(after)), state=after, **values) == 1


def rename_savepoint(tx: Transaction, job: str, epoch: int, savepoint: str) -> bool:
    """The id under which a durable epoch was saved, where it is not the one asked for."""
    t = tx.t.epoch
    return tx.update(t, t.c.job == job, t.c.epoch == epoch, t.c.state == EpochState.DURABLE, savepoint=savepoint) == 1


def commit_epochs(tx: Transaction, job: str, upto: int) -> int:
    """DURABLE → COMMITTED for every epoch up to ``upto`` (subsuming)."""
    t = tx.t.epoch
    return tx.update(
        t,
        t.c.job == job,
        t.c.epoch <= upto,
        t.c.state.in_(before_epoch(EpochState.COMMITTED)),
        state=EpochState.COMMITTED,
        committed_us=tx.now_us(),
    )


def uncommitted(tx: Transaction, job: str) -> int:
    """Durable epochs that are not committed."""
    t = tx.t.epoch
    return int(tx.execute(sa.select(sa.func.count()).where(t.c.job == job, t.c.state == EpochState.DURABLE)).scalar_one())


def delete_epochs(tx: Transaction, job: str, below: int) -> None:
    """Forget old epochs and their acknowledgements."""
    t, a = tx.t.epoch, tx.t.ack
    tx.delete(t, t.c.job == job, t.c.epoch < below, t.c.state.in_((EpochState.COMMITTED, EpochState.ABORTED)))
    tx.delete(a, a.c.job == job, a.c.epoch < below)


# -- acknowledgements


def acknowledge(
    tx: Transaction, job: str, epoch: int, generation: int, subtask: str, attempt: str, snapshot: SubtaskSnapshot | None, declined: str
) -> bool:
    """A node's row for one subtask of one epoch. A repeat, or one for an epoch that is over or of another generation, changes nothing and frees nothing."""
    t = tx.t.epoch
    open_ = tx.row(
        sa.select(t.c.epoch).where(t.c.job == job, t.c.epoch == epoch, t.c.generation == generation, t.c.state == EpochState.TRIGGERED)
    )
    if open_ is None:
        return False
    return tx.insert_or_nothing(
        tx.t.ack,
        job=job, epoch=epoch, subtask=subtask, generation=generation, attempt=attempt,
        snapshot="" if snapshot is None else msgspec.json.encode(snapshot).decode(), declined=declined[:20_000], acked_us=tx.now_us(),
    )  # fmt: skip


def ack_marks(tx: Transaction, job: str, epoch: int) -> list[AckMark]:
    t = tx.t.ack
    found = tx.rows(
        sa.select(t.c.subtask, t.c.generation, t.c.attempt, t.c.declined).where(t.c.job == job, t.c.epoch == epoch).order_by(t.c.subtask)
    )
    return [to(AckMark, r) for r in found]


def ack_snapshots(tx: Transaction, job: str, epoch: int) -> list[SubtaskSnapshot]:
    t = tx.t.ack
    found = tx.rows(sa.select(t.c.snapshot).where(t.c.job == job, t.c.epoch == epoch, t.c.declined == "").order_by(t.c.subtask))
    return [msgspec.json.decode(r["snapshot"], type=SubtaskSnapshot) for r in found]


# -- manifests


def write_manifest(tx: Transaction, manifest: EpochManifest) -> None:
    sealed = seal(manifest)
    tx.insert(
        tx.t.manifest,
        job=manifest.job,
        epoch=manifest.epoch,
        kind=manifest.kind,
        body=sealed.body,
        checksum=sealed.checksum,
        created_us=tx.now_us(),
    )


def read_manifest(tx: Transaction, job: str, epoch: int) -> EpochManifest:
    """Raises SnapshotMissing or SnapshotUnreadable naming job and epoch."""
    t = tx.t.manifest
    row = tx.row(sa.select(t).where(t.c.job == job, t.c.epoch == epoch))
    if row is None:
        raise SnapshotMissing(f"manifest of job {job}, epoch {epoch} is not in the database although the epoch is durable")
    return open_manifest(row["body"], row["checksum"], f"{job}/{epoch}")


def manifest_epochs(tx: Transaction, job: str) -> list[int]:
    t = tx.t.manifest
    return [int(r["epoch"]) for r in tx.rows(sa.select(t.c.epoch).where(t.c.job == job).order_by(t.c.epoch))]


def delete_manifests(tx: Transaction, job: str, epochs: list[int]) -> None:
    t = tx.t.manifest
    if epochs:
        tx.delete(t, t.c.job == job, t.c.epoch.in_(epochs))


# -- savepoints


def write_savepoint(tx: Transaction, savepoint: str, manifest: EpochManifest, model: str) -> bool:
    """A durable epoch that is to be copied into its protected namespace; False when the id is another's."""
    sealed = seal(manifest)
    return tx.insert_or_nothing(
        tx.t.savepoint,
        id=savepoint, job=manifest.job, epoch=manifest.epoch, body=sealed.body, checksum=sealed.checksum, model=model, state="COPYING", error="",
        created_us=tx.now_us(), rev=0,
    )  # fmt: skip


def complete_savepoint(tx: Transaction, savepoint: str, manifest: EpochManifest) -> bool:
    t = tx.t.savepoint
    sealed = seal(manifest)
    return (
        tx.update(t, t.c.id == savepoint, t.c.state == "COPYING", body=sealed.body, checksum=sealed.checksum, state="COMPLETE", error="")
        == 1
    )


def fail_savepoint(tx: Transaction, savepoint: str, error: str) -> bool:
    """Note what keeps it from being copied; False: it is not being copied any more."""
    t = tx.t.savepoint
    return tx.update(t, t.c.id == savepoint, t.c.state == "COPYING", error=error[:20_000]) == 1


def read_savepoint(tx: Transaction, savepoint: str) -> dict[str, Any] | None:
    return tx.row(sa.select(tx.t.savepoint).where(tx.t.savepoint.c.id == savepoint))


def savepoint_wanted_by(tx: Transaction, savepoint: str) -> str | None:
    """The live job that wants this id, or whose epoch in flight will have it."""
    j, e = tx.t.job, tx.t.epoch
    wanted = tx.row(sa.select(j.c.id).where(j.c.ended == 0, j.c.wanted_savepoint == savepoint).limit(1))
    if wanted is None:
        open_ = (EpochState.TRIGGERED, EpochState.PRECOMMITTED)
        wanted = tx.row(sa.select(e.c.job.label("id")).where(e.c.savepoint == savepoint, e.c.state.in_(open_)).limit(1))
    return None if wanted is None else str(wanted["id"])


def copying_savepoints(tx: Transaction) -> list[dict[str, Any]]:
    t = tx.t.savepoint
    return tx.rows(sa.select(t).where(t.c.state == "COPYING").order_by(t.c.created_us, t.c.id))


def savepoints(tx: Transaction, job: str) -> list[dict[str, Any]]:
    t = tx.t.savepoint
    return tx.rows(
        sa.select(t.c.id, t.c.epoch, t.c.state, t.c.error, t.c.created_us).where(t.c.job == job).order_by(t.c.created_us, t.c.id)
    )


def restored_manifest(tx: Transaction, job: JobRow) -> EpochManifest | None:
    """What a new generation starts from: the newest durable epoch, else the savepoint it was submitted with, else nothing.

    Raises SnapshotMissing or SnapshotUnreadable: "unreadable" is never taken for "none".
    """
    if job.newest_durable:
        return _under_new_names(job, read_manifest(tx, job.id, job.newest_durable))
    if job.restore_from:
        row = read_savepoint(tx, job.restore_from)
        if row is None:
            raise SnapshotMissing(f"savepoint {job.restore_from} does not exist: list them with `millstream jobs savepoints`")
        if row["state"] != "COMPLETE":
            raise SnapshotUnreadable(f"savepoint {job.restore_from} is {row['state']}, not COMPLETE: {row['error'] or 'wait for it'}")
        return _under_new_names(job, open_manifest(row["body"], row["checksum"], f"savepoint {job.restore_from}"))
    return None


def _under_new_names(job: JobRow, manifest: EpochManifest) -> EpochManifest:
    """Renames hold for the one epoch they were given for: later manifests have the new names already."""
    renames = msgspec.json.decode(job.renames, type=Renames)
    return renamed(manifest, renames.names) if renames.names and renames.epoch == manifest.epoch else manifest


# -- channels


def write_channels(tx: Transaction, channels: list[ChannelId]) -> None:
    """The channels of a new generation, so that they can be deleted by exact name once it is over."""
    rows = [{"job": c.job, "generation": c.generation, "edge": c.edge, "source": c.source, "target": c.target} for c in channels]
    tx.insert_many(tx.t.channel, rows)


def old_channels(tx: Transaction, job: str, below: int) -> list[ChannelId]:
    """Channels of generations below the job's."""
    t = tx.t.channel
    found = tx.rows(sa.select(t).where(t.c.job == job, t.c.generation < below).order_by(t.c.generation, t.c.edge, t.c.source, t.c.target))
    return [ChannelId(r["job"], r["generation"], r["edge"], r["source"], r["target"]) for r in found]


def forget_channels(tx: Transaction, job: str, below: int) -> None:
    """They were deleted."""
    t = tx.t.channel
    tx.delete(t, t.c.job == job, t.c.generation < below)


# -- splits


def discover(tx: Transaction, job: str, generation: int, operator: str, splits: list[Split], complete: bool) -> bool:
    """Rows for newly found splits (those known are passed over), and whether discovery is over. Refused for a generation that is not the job's."""
    j = tx.t.job
    if tx.row(sa.select(j.c.id).where(j.c.id == job, j.c.generation == generation).with_for_update()) is None:
        return False
    for s in splits:
        tx.insert_or_nothing(
            tx.t.split,
            job=job, operator=operator, split=s.split_id, body=_text(s.body), cursor="null", state=SplitOwner.UNASSIGNED, owner=-1, rev=0,
        )  # fmt: skip
    t = tx.t.source
    tx.insert_or_nothing(t, job=job, operator=operator, complete=0, generation=generation, rev=0)
    tx.update(t, t.c.job == job, t.c.operator == operator, complete=int(complete), generation=generation)
    tx.update(j, j.c.id == job, splits_rev=j.c.splits_rev + 1)
    return True


_SPLITS = Query(lambda t: sa.select(t.split).where(t.split.c.job == sa.bindparam("job")).order_by(t.split.c.operator, t.split.c.split))
_DISCOVERIES = Query(
    lambda t: sa.select(t.source).where(t.source.c.job == sa.bindparam("job"), t.source.c.generation == sa.bindparam("generation"))
)


def splits(tx: Transaction, job: str) -> list[SplitRow]:
    return [to(SplitRow, r) for r in tx.rows(_SPLITS, job=job)]


def discoveries(tx: Transaction, job: str, generation: int) -> dict[str, bool]:
    """Operator → whether its discovery is over, for sources that have reported in this generation."""
    return {r["operator"]: bool(r["complete"]) for r in tx.rows(_DISCOVERIES, job=job, generation=generation)}


def own_splits(tx: Transaction, job: str, owners: dict[tuple[str, str], int]) -> list[tuple[str, str]]:
    """UNASSIGNED → ASSIGNED to the subtask index given; those that were not UNASSIGNED, which is a defect under the job's lock."""
    t = tx.t.split
    refused = []
    for (operator, split), owner in owners.items():
        where = [t.c.job == job, t.c.operator == operator, t.c.split == split, t.c.state == SplitOwner.UNASSIGNED]
        if tx.update(t, *where, state=SplitOwner.ASSIGNED, owner=owner) != 1:
            refused.append((operator, split))
    return refused


def finish_splits(tx: Transaction, job: str, finished: list[SplitState]) -> list[tuple[str, str]]:
    """Splits a durable manifest holds as finished; those that had no row, or were finished before: a defect under the job's lock if their rows said otherwise."""
    t = tx.t.split
    refused = []
    for s in finished:
        where = [t.c.job == job, t.c.operator == s.operator, t.c.split == s.split_id, t.c.state != SplitOwner.FINISHED]
        if tx.update(t, *where, state=SplitOwner.FINISHED, cursor=_text(s.cursor)) != 1:
            refused.append((s.operator, s.split_id))
    return refused


def reset_splits(tx: Transaction, job: str, states: list[tuple[SplitState, int]]) -> None:
    """Put every split row back to what a manifest says: (state, owner); -1 for unassigned. Rows the manifest does not know become unassigned."""
    t = tx.t.split
    tx.update(t, t.c.job == job, state=SplitOwner.UNASSIGNED, owner=-1, cursor="null")
    for s, owner in states:
        state = SplitOwner.FINISHED if s.finished else SplitOwner.ASSIGNED if owner >= 0 else SplitOwner.UNASSIGNED
        values = {"body": _text(s.body), "cursor": _text(s.cursor), "state": state, "owner": owner}
        if not tx.insert_or_nothing(t, job=job, operator=s.operator, split=s.split_id, rev=0, **values):
            tx.update(t, t.c.job == job, t.c.operator == s.operator, t.c.split == s.split_id, **values)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def split_state(row: SplitRow) -> SplitState:
    return SplitState(
        row.operator, row.split, msgspec.json.decode(row.body), msgspec.json.decode(row.cursor), row.state is SplitOwner.FINISHED
    )
