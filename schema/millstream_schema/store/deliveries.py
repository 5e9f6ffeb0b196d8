"""Statements on deliveries: handed out under a lease, acknowledged, refused, redelivered, removed when done.

Called by the client and by the delivery sweep. Every write names the state it was decided from. What must never happen here: a delivery handed to two consumers under two live
leases; an
acknowledgement that is refused because of whose lease it came under.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from ..durable.deliveries import (
    ACKNOWLEDGEABLE,
    CatchUp,
    Change,
    DeliveryRow,
    DeliveryState,
    EventRow,
    Handed,
    SubscriptionRow,
    SubscriptionState,
    on_failure,
)
from .columns import not_empty
from .database import Query, Transaction
from .rows import to
from .subscriptions import lock_gate
from .tables import Tables

TEXT_KEPT = 2_000
LEASE_OVER = "its lease ran out"
_TURNS = 5
_EVENTS = Query(lambda t: sa.select(t.event).where(t.event.c.id.in_(sa.bindparam("ids", expanding=True))))


def _due(t: Tables, *, skip_locked: bool) -> Any:
    d = t.delivery
    where = [d.c.subscription == sa.bindparam("subscription"), d.c.due_us <= sa.bindparam("now")]
    first = sa.select(d).where(*where).order_by(d.c.due_us, d.c.event).limit(sa.bindparam("count"))
    return first.with_for_update(skip_locked=skip_locked)


_DUE = Query(lambda t: _due(t, skip_locked=True))
_DUE_AND_WAITED_FOR = Query(lambda t: _due(t, skip_locked=False))


def lease(
    tx: Transaction, s: SubscriptionRow, limit: int, token: str, lease_us: int, chance: Callable[[], float], *, again: bool
) -> list[Handed]:
    """Hand out up to ``limit`` deliveries that are due. ``token`` is made before the first try; ``again``: its outcome is unknown, what it gave is given once more.

    Deliveries whose lease is over are not handed out at once: they wait, or are parked.
    """
    d = tx.t.delivery
    if again:
        # The earlier try may still be on its way to its COMMIT, on a connection that is lost: test_lost_answers.
        tx.rows(_DUE_AND_WAITED_FOR, subscription=s.id, now=tx.now_us(), count=limit)
        given = tx.rows(sa.select(d).where(d.c.subscription == s.id, d.c.lease == token, not_empty(d.c.lease)))
        if given:
            return _with_events(tx, [to(DeliveryRow, r) for r in given])
    alive = tx.row(sa.select(tx.t.subscription.c.state).where(tx.t.subscription.c.id == s.id))
    if alive is None or alive["state"] != SubscriptionState.ACTIVE:
        return []
    now = tx.now_us()
    handed: list[DeliveryRow] = []
    for _ in range(_TURNS):
        due = [to(DeliveryRow, r) for r in tx.rows(_DUE, subscription=s.id, now=now, count=limit - len(handed))]
        for row in due:
            if row.state is DeliveryState.LEASED:
                _change(tx, row, on_failure(s, row, now, chance()), LEASE_OVER, now)
        fresh = [row for row in due if row.state is DeliveryState.PENDING]
        if fresh:
            where = [d.c.subscription == s.id, d.c.event.in_([row.event for row in fresh]), d.c.state == DeliveryState.PENDING]
            values = {
                "state": DeliveryState.LEASED,
                "attempts": d.c.attempts + 1,
                "lease": token,
                "due_us": now + lease_us,
                "changed_us": now,
            }
            if tx.update(d, *where, **values) != len(fresh):
                raise AssertionError(f"lease {token}: fewer of {len(fresh)} locked deliveries were given")
        handed += fresh
        if len(fresh) == len(due) or len(handed) >= limit:
            break
    if not handed:
        return []
    return _with_events(
        tx, [to(DeliveryRow, r) for r in tx.rows(sa.select(d).where(d.c.subscription == s.id, d.c.event.in_([h.event for h in handed])))]
    )


def _with_events(tx: Transaction, rows: Sequence[DeliveryRow]) -> list[Handed]:
    """In the order in which their tasks ended."""
    events = {r["id"]: to(EventRow, r) for r in tx.rows(_EVENTS, ids=[row.event for row in rows])}
    found = [Handed(row, events[row.event]) for row in rows if row.event in events]
    return sorted(found, key=lambda h: (h.event.settled_us, h.event.id))


def _change(tx: Transaction, row: DeliveryRow, change: Change, reason: str, now: int) -> bool:
    d = tx.t.delivery
    where = [
        d.c.subscription == row.subscription,
        d.c.event == row.event,
        d.c.state == row.state,
        d.c.lease == row.lease,
        d.c.rev == row.rev,
    ]
    values = {"state": change.state, "due_us": change.due_us, "lease": "", "reason": reason[:TEXT_KEPT], "changed_us": now}
    return tx.update(d, *where, **values) == 1


def expire(tx: Transaction, s: SubscriptionRow, limit: int, chance: Callable[[], float]) -> int:
    """Deliveries whose lease is over wait for their next attempt, or are parked; how many there were."""
    d = tx.t.delivery
    now = tx.now_us()
    over = (
        sa.select(d).where(d.c.subscription == s.id, d.c.due_us <= now, d.c.state == DeliveryState.LEASED).order_by(d.c.due_us, d.c.event)
    )
    rows = [to(DeliveryRow, r) for r in tx.rows(over.limit(limit).with_for_update(skip_locked=True))]
    for row in rows:
        _change(tx, row, on_failure(s, row, now, chance()), LEASE_OVER, now)
    return len(rows)


def acknowledge(tx: Transaction, s: SubscriptionRow, events: Sequence[str], actor: str) -> list[str]:
    """Take them as done, whatever state and lease they are under; those of which there is no delivery. A repeat is taken, too."""
    d = tx.t.delivery
    wanted = sorted(set(events))
    mine = [d.c.subscription == s.id, d.c.event.in_(wanted)]
    done = {"state": DeliveryState.ACKNOWLEDGED, "due_us": None, "lease": "", "changed_us": tx.now_us(), "actor": actor}
    if tx.update(d, *mine, d.c.state.in_(tuple(sorted(ACKNOWLEDGEABLE))), **done) == len(wanted):
        return []
    known = {r["event"] for r in tx.rows(sa.select(d.c.event).where(*mine, d.c.state == DeliveryState.ACKNOWLEDGED))}
    return [event for event in wanted if event not in known]


def refuse(
    tx: Transaction, s: SubscriptionRow, event: str, token: str, reason: str, after_us: int | None, chance: float
) -> DeliveryRow | None:
    """Its consumer could not do it: it waits or is parked. Only under the lease it was handed out by; None: that is over. As it is afterwards."""
    d = tx.t.delivery
    held = sa.select(d).where(d.c.subscription == s.id, d.c.event == event, d.c.lease == token, not_empty(d.c.lease)).with_for_update()
    row = tx.row(held)
    if row is None:
        return None
    now = tx.now_us()
    before = to(DeliveryRow, row)
    _change(tx, before, on_failure(s, before, now, chance, after_us), reason, now)
    return one(tx, s, event)


def give_back(tx: Transaction, s: SubscriptionRow, events: Sequence[str], token: str, after_us: int) -> int:
    """They never left: as if they had not been leased, and due again later; how many."""
    d = tx.t.delivery
    now = tx.now_us()
    where = [d.c.subscription == s.id, d.c.event.in_(sorted(events)), d.c.lease == token, d.c.state == DeliveryState.LEASED]
    return tx.update(d, *where, state=DeliveryState.PENDING, attempts=d.c.attempts - 1, lease="", due_us=now + after_us, changed_us=now)


def redeliver(tx: Transaction, s: SubscriptionRow, events: Sequence[str], actor: str) -> int:
    """Begin again with them, whatever became of them, all attempts theirs; how many there are. What they bring is what it was."""
    d = tx.t.delivery
    now = tx.now_us()
    again = {"state": DeliveryState.PENDING, "attempts": 0, "due_us": now, "lease": "", "reason": "", "changed_us": now, "actor": actor}
    return tx.update(d, d.c.subscription == s.id, d.c.event.in_(sorted(set(events))), d.c.state != DeliveryState.PASSED, **again)


def one(tx: Transaction, s: SubscriptionRow, event: str) -> DeliveryRow | None:
    d = tx.t.delivery
    row = tx.row(sa.select(d).where(d.c.subscription == s.id, d.c.event == event, d.c.state != DeliveryState.PASSED))
    return None if row is None else to(DeliveryRow, row)


def handed(tx: Transaction, s: SubscriptionRow, event: str) -> Handed | None:
    """A delivery with what it brings, as it is now."""
    row = one(tx, s, event)
    found = [] if row is None else _with_events(tx, [row])
    return found[0] if found else None


def listed(tx: Transaction, s: SubscriptionRow, state: DeliveryState | None, limit: int) -> list[DeliveryRow]:
    """Deliveries of a subscription, those that changed last first."""
    d = tx.t.delivery
    where = [d.c.subscription == s.id, d.c.state == state if state else d.c.state != DeliveryState.PASSED]
    return [to(DeliveryRow, r) for r in tx.rows(sa.select(d).where(*where).order_by(d.c.changed_us.desc(), d.c.event).limit(limit))]


def counts(tx: Transaction, s: SubscriptionRow) -> dict[str, int]:
    """How many are in each state."""
    d = tx.t.delivery
    found = (
        sa.select(d.c.state, sa.func.count().label("n"))
        .where(d.c.subscription == s.id, d.c.state != DeliveryState.PASSED)
        .group_by(d.c.state)
    )
    return {r["state"]: int(r["n"]) for r in tx.rows(found)}


def leased(tx: Transaction, s: SubscriptionRow, most: int) -> int:
    """How many are on their way, counted up to ``most``."""
    d = tx.t.delivery
    inner = sa.select(d.c.event).where(d.c.subscription == s.id, d.c.state == DeliveryState.LEASED).limit(most).subquery()
    return int(tx.execute(sa.select(sa.func.count()).select_from(inner)).scalar_one())


def existing(tx: Transaction, pairs: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Of these (subscription, event) those of which there is a delivery, in whatever state: it can still be sent, or be sent again."""
    d = tx.t.delivery
    found = sa.select(d.c.subscription, d.c.event).where(d.c.event.in_(sorted({event for _, event in pairs})))
    return {(r["subscription"], r["event"]) for r in tx.rows(found)} & set(pairs)


def purge(tx: Transaction, before: int, limit: int) -> int:
    """Remove up to ``limit`` acknowledged deliveries and as many events nobody needs any more, done before this instant; how many rows went.

    What is parked, pending or leased stays, with its event; so does everything of a subscription that is catching up. Called by retention until it gives 0.
    """
    lock_gate(tx)
    d, e, s = tx.t.delivery, tx.t.event, tx.t.subscription
    gone = 0
    settled = [r["id"] for r in tx.rows(sa.select(s.c.id).where(s.c.catch_up == CatchUp.DONE))]
    for subscription in settled:
        done = [d.c.subscription == subscription, d.c.state == DeliveryState.ACKNOWLEDGED, d.c.changed_us < before]
        events = [r["event"] for r in tx.rows(sa.select(d.c.event).where(*done).order_by(d.c.changed_us).limit(limit - gone))]
        if events:
            gone += tx.delete(d, *done, d.c.event.in_(events))
        if gone >= limit:
            break
    needed = sa.exists().where(d.c.event == e.c.id)
    unneeded = [e.c.settled_us < before, e.c.pending.is_(None), ~needed]
    ids = [r["id"] for r in tx.rows(sa.select(e.c.id).where(*unneeded).order_by(e.c.settled_us).limit(limit))]
    if ids:
        gone += tx.delete(e, e.c.id.in_(ids), e.c.pending.is_(None), ~needed)
    return gone
