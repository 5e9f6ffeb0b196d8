"""Statements on subscriptions: made, paused, deleted, one at a time.

Called by the client and by the sweep that catches up. What must never happen here: a subscription that is there for one transaction and has a number that another gave before.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.deliveries import DeliveryState, Mode, SubscriptionRow, SubscriptionState, first_window
from .database import Transaction
from .rows import to
from .single_rows import lock_single

GATE = "subscriptions"


class NewSubscription(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks for; the fields as in :class:`~millstream_schema.durable.deliveries.SubscriptionRow`."""

    id: str
    namespace: str
    name: str
    mode: Mode = Mode.PULL
    target: str = ""
    celery_task: str = ""
    handler: str = ""
    queue: str = ""
    business_key: str = ""
    states: str = ""
    attempts: int = 20
    delay_ms: int = 1_000
    max_delay_ms: int = 3_600_000
    lease_ms: int = 60_000
    since_us: int = 0
    actor: str = ""

    def same_as(self, row: SubscriptionRow) -> list[str]:
        """Fields that differ from what is stored, but for who made it."""
        given = msgspec.structs.asdict(self)
        return [name for name, value in given.items() if name not in ("id", "actor") and getattr(row, name) != value]


def lock_gate(tx: Transaction) -> int:
    """Lock the row all subscriptions are made, caught up and purged under; the number given last. It is locked before their rows."""
    return int(lock_single(tx, GATE)["term"])


def create(tx: Transaction, new: NewSubscription, longest_us: int) -> SubscriptionRow:
    """Make it, or give what stands under its name. ``longest_us``: how long a transaction that ends tasks may last, 0 where writers wait for each other.

    Numbers follow the order of commits: whoever sees a number sees all before it. What has ended and is seen here has ended before: it is marked as passed, for the time of
    catching up.
    """
    seq = lock_gate(tx) + 1
    known = read(tx, new.namespace, new.name)
    if known is not None:
        return known
    now = tx.now_us()
    window = first_window(new.since_us, now, longest_us)
    given = {k: v for k, v in msgspec.structs.asdict(new).items() if k != "id"}
    tx.insert(
        tx.t.subscription, id=new.id, live_name=_live(new.namespace, new.name), seq=seq, state=SubscriptionState.ACTIVE, catch_up=window.catch_up,
        from_us=window.from_us, until_us=window.until_us, ready_us=window.ready_us, cursor_us=0, cursor_id="", longest_us=longest_us, created_us=now,
        changed_us=now, rev=0, **given,
    )  # fmt: skip
    tx.update(tx.t.coordinator, tx.t.coordinator.c.id == GATE, term=seq)
    if longest_us:
        _pass_over(tx, new, now, longest_us)
    made = read(tx, new.namespace, new.name)
    assert made is not None
    return made


def _live(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def _pass_over(tx: Transaction, new: NewSubscription, now: int, longest_us: int) -> None:
    """Mark what had ended in the window that will be looked through for what was ending."""
    c, d = tx.t.task.c, tx.t.delivery
    where = [c.namespace == new.namespace, c.settled_us > 0, c.settled_us >= now - longest_us]
    where += [c[f] == getattr(new, f) for f in ("handler", "queue", "business_key") if getattr(new, f)]
    if new.since_us:
        where.append(c.settled_us < new.since_us)
    values: dict[str, Any] = {
        "subscription": sa.literal(new.id), "event": c.id, "state": sa.literal(DeliveryState.PASSED.value), "attempts": sa.literal(0), "due_us": sa.null(),
        "lease": sa.literal(""), "reason": sa.literal(""), "actor": sa.literal(""), "created_us": sa.literal(now, sa.BigInteger()),
        "changed_us": sa.literal(now, sa.BigInteger()), "rev": sa.literal(0),
    }  # fmt: skip
    tx.execute(sa.insert(d).from_select(list(values), sa.select(*values.values()).where(*where)))


def read(tx: Transaction, namespace: str, name: str) -> SubscriptionRow | None:
    s = tx.t.subscription
    row = tx.row(sa.select(s).where(s.c.live_name == _live(namespace, name), s.c.namespace == namespace))
    return None if row is None else to(SubscriptionRow, row)


def listed(tx: Transaction, namespace: str) -> list[SubscriptionRow]:
    """Those of a namespace, by name."""
    s = tx.t.subscription
    return [
        to(SubscriptionRow, r)
        for r in tx.rows(sa.select(s).where(s.c.namespace == namespace, s.c.live_name.is_not(None)).order_by(s.c.name))
    ]


def everywhere(tx: Transaction) -> list[SubscriptionRow]:
    """Those of all namespaces, also deleted ones whose deliveries are being removed."""
    s = tx.t.subscription
    return [to(SubscriptionRow, r) for r in tx.rows(sa.select(s).order_by(s.c.seq))]


def lock(tx: Transaction, subscription: str) -> SubscriptionRow | None:
    s = tx.t.subscription
    row = tx.row(sa.select(s).where(s.c.id == subscription).with_for_update())
    return None if row is None else to(SubscriptionRow, row)


def set_state(tx: Transaction, namespace: str, name: str, state: SubscriptionState, actor: str) -> SubscriptionRow | None:
    """Pause, resume or delete; as it is afterwards, None: there is none of that name. A name that was deleted is free at once."""
    found = read(tx, namespace, name)
    row = None if found is None else lock(tx, found.id)
    if row is None or row.live_name is None:
        return None
    if row.state is not state:
        s = tx.t.subscription
        live = None if state is SubscriptionState.DELETED else row.live_name
        tx.update(s, s.c.id == row.id, s.c.rev == row.rev, state=state, live_name=live, changed_us=tx.now_us(), actor=actor)
    return msgspec.structs.replace(row, state=state)


def remove(tx: Transaction, subscription: str, limit: int) -> bool:
    """Remove up to ``limit`` deliveries of a deleted subscription, and with the last of them itself; whether it is gone."""
    row = lock(tx, subscription)
    if row is None or row.state is not SubscriptionState.DELETED:
        return row is None
    d, s = tx.t.delivery, tx.t.subscription
    events = [r["event"] for r in tx.rows(sa.select(d.c.event).where(d.c.subscription == subscription).limit(limit))]
    if events:
        tx.delete(d, d.c.subscription == subscription, d.c.event.in_(events))
    if len(events) < limit:
        return tx.delete(s, s.c.id == subscription, s.c.rev == row.rev) == 1
    return False
