"""Rows as frozen values: what the statements give and the decisions take.

Made by the statement modules. What must never happen here: a column with another meaning than the table's, a row that fits no struct and is passed on.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ..states import AssignmentState, Desired, EpochState, JobState, NodeState, SplitOwner


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job. Texts that hold JSON stay text: whoever needs them decodes them."""

    id: str
    namespace: str
    name: str
    factory: str
    config: str
    parallelism: int | None
    overrides: str
    settings: str
    plan: str
    model: str
    plan_fingerprint: str
    state: JobState
    reason: str
    desired: Desired
    mode: str
    generation: int
    term: int
    next_epoch: int
    in_flight: int
    newest_durable: int
    newest_committed: int
    restore_epoch: int
    target: str
    restore_from: str
    lenient: int
    renames: str
    aborts: int
    failures: int
    stalls: int
    restarts: int
    causes: str
    wanted_savepoint: str
    wants_epoch: int
    pending_commits: str
    splits_rev: int
    deployed_us: int
    due_us: int
    epoch_us: int
    restarted_us: int
    stopping_us: int
    created_us: int
    changed_us: int
    rev: int
    ended: int
    live_name: str | None
    recent_restarts: str = "[]"


class AssignmentRow(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask of one generation and who runs it."""

    job: str
    generation: int
    subtask: str
    node: str
    attempt: str
    state: AssignmentState
    cause: str
    detail: str
    committed: int
    commit_detail: str
    exhausted: int
    progress: int
    progressed_us: int
    stats: str
    changed_us: int
    rev: int


class EpochRow(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    epoch: int
    generation: int
    term: int
    kind: str
    state: EpochState
    reason: str
    savepoint: str
    splits: str
    size: int
    triggered_us: int
    durable_us: int
    committed_us: int
    rev: int


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    slots: int
    state: NodeState
    info: str
    started_us: int
    renewed_us: int
    expires_us: int
    rev: int


class SplitRow(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    operator: str
    split: str
    body: str
    cursor: str
    state: SplitOwner
    owner: int
    rev: int


class AckMark(msgspec.Struct, frozen=True, kw_only=True):
    """That a subtask acknowledged or declined an epoch, without the snapshot."""

    subtask: str
    generation: int
    attempt: str
    declined: str


S = TypeVar("S")


def to(kind: type[S], row: dict[str, Any]) -> S:
    """A row's mapping as its struct."""
    return msgspec.convert(row, kind)
