"""Rows as frozen values: what the statements give and the decisions take.

Made by the statement modules. What must never happen here: a column with another meaning than the table's, a row that fits no struct and is passed on; a row that this version
cannot read and that holds up the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import structlog

from ..errors import UnknownFormat
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
Row = dict[str, Any]
log = structlog.get_logger(__name__)
TOLD = 1_000
"""Ids of rows that cannot be read that a process remembers."""
_told: dict[str, None] = {}


def to(kind: type[S], row: Row) -> S:
    """A row's mapping as its struct. Raises UnknownFormat for one that this version cannot read."""
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError as exc:
        raise unreadable(kind, row, exc) from exc


def unreadable(kind: type[Any], row: Row, error: Exception) -> UnknownFormat:
    """What is said of it. ``error``: what does not fit."""
    name = row.get("id") or row.get("task") or row.get("name") or ""
    return UnknownFormat(
        f"{kind.__name__.removesuffix('Row').lower()} {name} holds what this version of Millstream does not know ({error}): a newer one has written it, "
        "and acts on it; upgrade this process to that version"
    )


def parted(rows: Iterable[Row], read: Callable[[Row], S]) -> tuple[list[S], list[Row]]:
    """Those that this version can read, and the others, which are left alone; each is told of once in a process as long as it stays so. ``read``: raises UnknownFormat."""
    found: list[S] = []
    others: list[Row] = []
    for row in rows:
        try:
            found.append(read(row))
        except UnknownFormat as exc:
            others.append(row)
            _tell(str(row["id"]), exc)
        else:
            if _told:
                _told.pop(str(row["id"]), None)  # whoever could read it has done something about it
    return found, others


def left_alone() -> list[str]:
    """The newest ids of rows that this process could not read."""
    return list(_told)


def _tell(name: str, error: UnknownFormat) -> None:
    if name in _told:
        return
    log.error("a row cannot be read by this version; it is left alone, and the others go on", id=name, error=str(error))
    while len(_told) >= TOLD:
        _told.pop(next(iter(_told)), None)
    _told[name] = None
