"""Statements that forget settled tasks with all that belongs to them, and the settings of how long they are kept.

Called by the retention sweep and by bulk purges. What must never happen here: a task purged that something still refers to — a retry of it, an end not delivered yet, an unsettled
fire; a permit's sequence set back (permits are not purged at all).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.deliveries import DeliveryState
from ..durable.finding import Place
from ..durable.retention import RetentionRule
from ..durable.states import SETTLED
from . import intents
from .columns import not_empty
from .database import Transaction
from .rows import to


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What retention looks at. ``created_us`` of a :class:`Place` is here the instant of its end."""

    id: str
    queue: str
    handler: str
    settled_us: int

    @property
    def place(self) -> Place:
        return Place(self.settled_us, self.id)


def rules(tx: Transaction) -> list[RetentionRule]:
    t = tx.t.retention
    return [to(RetentionRule, r) for r in tx.rows(sa.select(t.c.namespace, t.c.scope, t.c.name, t.c.keep_us))]


def set_rule(tx: Transaction, rule: RetentionRule, actor: str) -> None:
    """How long tasks are kept from now on, also those that are settled already."""
    t = tx.t.retention
    values = {"keep_us": rule.keep_us, "actor": actor, "changed_us": tx.now_us()}
    key = {"namespace": rule.namespace, "scope": rule.scope, "name": rule.name}
    if not tx.insert_or_nothing(t, **key, **values):
        tx.update(t, *[t.c[k] == v for k, v in key.items()], **values)


def drop_rule(tx: Transaction, namespace: str, scope: str, name: str) -> bool:
    """Back to the wider rule; whether there was one."""
    t = tx.t.retention
    return tx.delete(t, t.c.namespace == namespace, t.c.scope == scope, t.c.name == name) == 1


def next_namespace(tx: Transaction, after: str) -> str | None:
    """The first namespace after this one with settled tasks: one short index look-up."""
    t = tx.t.task
    settled = sa.select(sa.func.min(t.c.namespace)).where(t.c.namespace > after, t.c.settled_us > 0)
    found = tx.execute(settled).scalar()
    return None if found is None else str(found)


def settled_before(tx: Transaction, namespace: str, before_us: int, after: Place | None, limit: int) -> list[Settled]:
    """Tasks that ended before an instant, the oldest first, by the index of settled ones."""
    t = tx.t.task
    where: list[Any] = [t.c.namespace == namespace, t.c.settled_us > 0, t.c.settled_us < before_us]
    if after is not None:
        where += [t.c.settled_us >= after.created_us, sa.or_(t.c.settled_us > after.created_us, t.c.id > after.id)]
    asked = sa.select(t.c.id, t.c.queue, t.c.handler, t.c.settled_us).where(*where).order_by(t.c.settled_us, t.c.id).limit(limit)
    for dialect in ("mysql", "mariadb"):
        asked = asked.with_hint(t, f"FORCE INDEX ({t.name}_settled_i)", dialect)
    return [to(Settled, r) for r in tx.rows(asked)]


def purge(tx: Transaction, namespace: str, ids: Sequence[str]) -> int:
    """Forget those of these tasks that are settled and that nothing refers to any more; how many went. A repeat finds nothing."""
    t = tx.t.task
    if not ids:
        return 0
    columns = [t.c.id, t.c.retry_of]
    there = sa.select(*columns).where(t.c.id.in_(sorted(ids)), t.c.namespace == namespace, t.c.state.in_(tuple(SETTLED)))
    found = {r["id"]: r["retry_of"] for r in tx.rows(there.order_by(t.c.id).with_for_update())}
    kept = _undelivered(tx, found) | _retried(tx, found) | _fired(tx, namespace, found)
    for task in list(kept):  # and what those are retries of
        while (task := found.get(task, "")) in found and task not in kept:
            kept.add(task)
    gone = [task for task in found if task not in kept]
    if gone:
        for table in (tx.t.attempt, tx.t.progress, tx.t.note):
            tx.delete(table, table.c.task.in_(gone))
        intents.forget(tx, gone)
        tx.delete(t, t.c.id.in_(gone))
    return len(gone)


def _retried(tx: Transaction, found: dict[str, str]) -> set[str]:
    """Those of which a retry remains: it shares their intents, and who follows the link must find it."""
    t = tx.t.task
    links = tx.rows(sa.select(t.c.id, t.c.retry_of).where(t.c.retry_of.in_(list(found)), not_empty(t.c.retry_of)))
    return {r["retry_of"] for r in links if r["id"] not in found}


def _fired(tx: Transaction, namespace: str, found: dict[str, str]) -> set[str]:
    """Those whose schedule has not taken notice of their end."""
    f = tx.t.fire
    asked = sa.select(f.c.task).where(f.c.unsettled == 1, f.c.namespace == namespace, f.c.task.in_(list(found)))
    return {r["task"] for r in tx.rows(asked)}


def _undelivered(tx: Transaction, found: dict[str, str]) -> set[str]:
    """Those whose end somebody has yet to take."""
    e, d = tx.t.event, tx.t.delivery
    ids = list(found)
    pending = tx.rows(sa.select(e.c.id).where(e.c.id.in_(ids), e.c.pending.is_not(None)))
    open_ = tx.rows(
        sa.select(d.c.event).where(d.c.event.in_(ids), d.c.state.in_((DeliveryState.PENDING, DeliveryState.LEASED, DeliveryState.PARKED)))
    )
    return {r["id"] for r in pending} | {r["event"] for r in open_}
