"""Statements on quotas: what is set, what is in use, and the acceptances that a window counts.

Read by clients before they submit, on a connection of their own, so that nothing is locked in a caller's transaction. What must never happen here: a count without a bound.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from ..durable.quotas import LONGEST_WINDOW_US, Quota, Use, quota_id
from . import lanes
from .database import Transaction
from .rows import to

QUEUES = 1_000
"""Queues of a namespace whose backlogs are added up."""


def of_namespace(tx: Transaction, namespace: str) -> list[Quota]:
    """Every quota of a namespace."""
    t = tx.t.quota
    return [to(Quota, r) for r in tx.rows(sa.select(t).where(t.c.namespace == namespace).order_by(t.c.id))]


def set_quota(tx: Transaction, quota: Quota, *, actor: str) -> Quota:
    """What is set from now on; nothing set: the row goes."""
    t = tx.t.quota
    wanted = msgspec.structs.replace(quota, changed_by=actor, changed_us=tx.now_us())
    if not quota.limits:
        tx.delete(t, t.c.id == quota.id)
        return wanted
    values = {k: v for k, v in msgspec.structs.asdict(wanted).items() if k != "rev"}
    if not tx.insert_or_nothing(t, **values, rev=0):
        tx.update(t, t.c.id == quota.id, **{k: v for k, v in values.items() if k not in ("id", "namespace", "queue")})
    return wanted


def read(tx: Transaction, namespace: str, queue: str) -> Quota | None:
    """The quota of a queue, or of the namespace."""
    row = tx.row(sa.select(tx.t.quota).where(tx.t.quota.c.id == quota_id(namespace, queue)))
    return None if row is None else to(Quota, row)


def use(tx: Transaction, quota: Quota) -> Use:
    """What of it is in use, counted up to its limits. Without a lock: what others have not committed is not counted."""
    now = tx.now_us()
    accepted, free = _accepted(tx, quota, now) if quota.accept else (0, 0)
    return Use(now_us=now, open=_open(tx, quota) if quota.backlog else 0, accepted=accepted, free_us=free)


def _open(tx: Transaction, quota: Quota) -> int:
    """Tasks that are not over. Of a namespace queue by queue: the index leads through each queue to what is open."""
    names = [quota.queue] if quota.queue else lanes.with_open_tasks(tx, quota.namespace, QUEUES)
    found = 0
    for name in names:
        some = lanes.open_tasks(tx, quota.namespace, name, quota.backlog - found, tx.t.task.c.queue)
        found += int(tx.execute(sa.select(sa.func.count()).select_from(some)).scalar_one())
        if found >= quota.backlog:
            break
    return found


def _accepted(tx: Transaction, quota: Quota, now: int) -> tuple[int, int]:
    """How many were accepted within the window, and when the oldest of the last ``accept`` of them leaves it."""
    t = tx.t.acceptance
    newest = sa.select(t.c.number, t.c.at_us).where(t.c.quota == quota.id, t.c.at_us > now - quota.per_us).order_by(t.c.at_us.desc())
    total, oldest = 0, now
    for row in tx.rows(newest.limit(quota.accept)):
        total, oldest = total + int(row["number"]), int(row["at_us"])
        if total >= quota.accept:
            break
    return total, oldest + quota.per_us


def note(tx: Transaction, quota: str, task: str, count: int) -> None:
    """That tasks were accepted, under the id of the first, for a quota that counts acceptances. Nobody else's row is touched."""
    tx.insert_or_nothing(tx.t.acceptance, quota=quota, task=task, at_us=tx.now_us(), number=count)


def forget(tx: Transaction, limit: int) -> int:
    """Acceptances no window counts any more; how many."""
    t = tx.t.acceptance
    old = sa.select(t.c.quota, t.c.task).where(t.c.at_us < tx.now_us() - LONGEST_WINDOW_US).order_by(t.c.at_us).limit(limit)
    rows = tx.rows(old)
    for row in rows:
        tx.delete(t, t.c.quota == row["quota"], t.c.task == row["task"])
    return len(rows)
