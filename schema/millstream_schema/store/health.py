"""Facts on the state of an installation, for whoever judges whether something is wrong: read, never locked, each look bounded.

Called by ``doctor``. What must never happen here: a look whose cost grows with what is finished; an opinion.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from ..durable.catalogue import Served
from ..durable.states import TaskState
from ..states import NodeState
from . import catalogue, deliveries, registry, schedules, subscriptions
from .database import Transaction
from .sweeps import SWEEP

MOST = 1_000
"""Of everything that is counted."""
LANES = 200


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. Counts end at ``MOST``. ``waiting``: lane → handlers of the first tasks that wait there; ``expired``: sessions that hold tasks without a lease.

    ``swept_us``, ``ticked_us``: the last sweep over tasks and the last tick of a coordinator, 0: never.
    """

    now_us: int
    sessions: Mapping[str, Served]
    waiting: Mapping[str, Mapping[str, int]]
    in_review: Mapping[str, int]
    oldest_review_us: int
    expired: int
    swept_us: int
    ticked_us: int
    late_schedules: Mapping[str, int]
    parked_deliveries: Mapping[str, int]
    unfinished: int
    settings: Mapping[str, str]


def health(tx: Transaction) -> Health:
    """Look once."""
    now = tx.now_us()
    review, oldest = _in_review(tx)
    lease = registry.read_lease(tx)
    t = tx.t.coordinator
    swept = tx.row(sa.select(t.c.ticked_us).where(t.c.id == SWEEP))
    o = tx.t.operation
    unfinished = tx.rows(sa.select(o.c.id).where(o.c.over == 0, o.c.changed_us < now - 60_000_000).limit(MOST))
    return Health(
        now_us=now, sessions=catalogue.live_sessions(tx), waiting=_waiting(tx), in_review=review, oldest_review_us=oldest, expired=_expired(tx, now),
        swept_us=int(swept["ticked_us"]) if swept else 0, ticked_us=int(lease["ticked_us"]) if lease else 0,
        late_schedules={f"{b.namespace}/{b.name}": b.late_us for b in schedules.late(tx)}, parked_deliveries=_parked(tx), unfinished=len(unfinished),
        settings=_settings(tx),
    )  # fmt: skip


def _waiting(tx: Transaction) -> dict[str, dict[str, int]]:
    """Handlers of the first tasks of each lane that could be claimed."""
    t = tx.t.task
    found: dict[str, dict[str, int]] = {}
    after = ""
    for _ in range(LANES):
        row = tx.row(sa.select(sa.func.min(t.c.ready_lane).label("lane")).where(t.c.ready_lane > after))
        if row is None or row["lane"] is None:
            break
        after = str(row["lane"])
        handlers = found[after] = {}
        for r in tx.rows(sa.select(t.c.handler).where(t.c.ready_lane == after).order_by(t.c.rank).limit(MOST)):
            handlers[r["handler"]] = handlers.get(r["handler"], 0) + 1
    return found


def _in_review(tx: Transaction) -> tuple[dict[str, int], int]:
    """By namespace; and since when the first one is."""
    t = tx.t.task
    found: dict[str, int] = {}
    oldest = 0
    after = ""
    for _ in range(LANES):
        row = tx.row(sa.select(sa.func.min(t.c.namespace).label("name")).where(t.c.namespace > after, t.c.amiss_us.is_not(None)))
        if row is None or row["name"] is None:
            break
        after = str(row["name"])
        amiss = (
            sa.select(t.c.state, t.c.changed_us)
            .where(t.c.namespace == after, t.c.amiss_us.is_not(None))
            .order_by(t.c.amiss_us.desc())
            .limit(MOST)
        )
        since = [int(r["changed_us"]) for r in tx.rows(amiss) if r["state"] == TaskState.UNKNOWN]
        if since:
            found[after] = len(since)
            oldest = min([*since, oldest or since[0]])
    return found, oldest


def _expired(tx: Transaction, now: int) -> int:
    """Sessions without a lease that still hold tasks."""
    t, n = tx.t.task, tx.t.node
    gone = sa.select(n.c.id).where((n.c.state == NodeState.GONE) | (n.c.expires_us < now))
    ids = [r["id"] for r in tx.rows(gone.where(n.c.slots == 0).limit(MOST))]
    held = (tx.row(sa.select(t.c.id).where(t.c.session == i, t.c.session != "").limit(1)) for i in ids)
    return sum(row is not None for row in held)


def _parked(tx: Transaction) -> dict[str, int]:
    """By subscription."""
    counted = {f"{s.namespace}/{s.name}": deliveries.counts(tx, s).get("PARKED", 0) for s in subscriptions.everywhere(tx)}
    return {name: count for name, count in counted.items() if count}


def _settings(tx: Transaction) -> dict[str, str]:
    """What the server does with a commit when the power goes."""
    if tx.dialect == "postgresql":
        names = ("fsync", "full_page_writes", "synchronous_commit")
        return {name: str(tx.execute(sa.text(f"SHOW {name}")).scalar_one()) for name in names}
    if tx.dialect == "mysql":
        row = tx.row(
            sa.text(
                "SELECT @@innodb_flush_log_at_trx_commit AS innodb_flush_log_at_trx_commit, @@sync_binlog AS sync_binlog, @@log_bin AS log_bin"
            )
        )
        return {} if row is None else {name: str(value) for name, value in row.items()}
    return {
        "journal_mode": str(tx.execute(sa.text("PRAGMA journal_mode")).scalar_one()),
        "synchronous": str(tx.execute(sa.text("PRAGMA synchronous")).scalar_one()),
    }
