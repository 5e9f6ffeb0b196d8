"""Statements that freeze the ends of tasks as events, and find whose they are.

An end is written as an event in its own transaction, if a subscription is there that could take it. Whoever settles many asks with :func:`clock`, which costs nothing more than the
time, and freezes them together by :func:`record`. What a transaction did not see because the subscription was committed meanwhile, :func:`catch_up` finds afterwards in the
rows of tasks.
What must never happen here: work found by how far somebody has come in ids or times; an event of a task that has not ended, or two of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from ..durable.deliveries import CatchUp, DeliveryState, EndRow, SubscriptionRow, SubscriptionState, due_for, next_window, wants
from .database import ClockQuery, Query, Transaction
from .rows import to
from .subscriptions import lock, lock_gate
from .tables import Tables

_FROZEN = (
    "id", "namespace", "handler", "key", "queue", "business_key", "state", "cause", "reason", "result", "error", "origin", "root", "retry_of", "superseded_by",
    "created_us", "settled_us",
)  # fmt: skip
_LOOKED_AT = ("id", "namespace", "handler", "queue", "business_key", "state", "settled_us")


def clock(tx: Transaction) -> tuple[int, bool]:
    """The database's time, and whether anybody subscribes to anything: one statement, for whoever is about to end tasks.

    A subscription that is committed later than this looks is the same as one committed later than :func:`record`: it catches up.
    """
    tx.brief = True
    row = tx.row(_CLOCK)
    assert row is not None
    return int(row["now"]), bool(row["heard"])


def _clock(t: Tables, now: sa.ColumnElement[int], _dialect: str) -> sa.Select[tuple[int, int]]:
    s = t.subscription
    heard = sa.exists(sa.select(sa.literal_column("1")).select_from(s).where(s.c.live_name.is_not(None)))
    return sa.select(now.label("now"), sa.case((heard, 1), else_=0).label("heard"))


def _record(t: Tables, *, seen: sa.ColumnElement[int] | None = None) -> sa.Insert:
    """Freeze these tasks: ``seen`` by the subscriptions that are there; or, for one that catches up, by none."""
    e, c, s = t.event, t.task.c, t.subscription.c
    columns = [*(c[name] for name in _FROZEN)]
    ids: sa.BindParameter[object] = sa.bindparam("ids", expanding=True)
    where: list[sa.ColumnElement[bool]] = [c.id.in_(ids), c.settled_us > 0, ~sa.exists().where(e.c.id == c.id)]
    if seen is None:
        newest = (
            sa.select(sa.func.max(s.seq)).where(s.namespace == c.namespace, s.live_name.is_not(None)).correlate(t.task).scalar_subquery()
        )
        alike = [sa.or_(s[f] == sa.literal_column("''"), s[f] == c[f]) for f in ("handler", "queue", "business_key")]
        taken = sa.exists().where(s.namespace == c.namespace, s.live_name.is_not(None), *alike)
        values = [newest, sa.literal_column("1")]
        where += [c.settled_us == sa.bindparam("now"), taken]
    else:
        values = [seen, sa.null()]
    return sa.insert(e).from_select([*_FROZEN, "seen", "pending"], sa.select(*columns, *values).where(*where))


_CLOCK = ClockQuery(_clock)
_RECORD = Query(_record)
_FREEZE = Query(lambda t: _record(t, seen=sa.literal_column("0", sa.BigInteger())))
_PENDING = Query(
    lambda t: (
        sa.select(*(t.event.c[name] for name in _LOOKED_AT), t.event.c.seen)
        .where(t.event.c.pending.is_not(None))
        .order_by(t.event.c.pending, t.event.c.settled_us)
        .limit(sa.bindparam("count"))
        .with_for_update(skip_locked=True)
    )
)
_DONE = Query(
    lambda t: (
        sa.update(t.event).where(t.event.c.id.in_(sa.bindparam("ids", expanding=True)), t.event.c.pending.is_not(None)).values(pending=None)
    )
)


def record(tx: Transaction, ids: Sequence[str], now: int) -> None:
    """Freeze those of these tasks that this transaction has ended at ``now`` and somebody may want. One statement; a repeat adds nothing."""
    tx.brief = True
    if ids:
        tx.changed(_RECORD, ids=list(ids), now=now)


def fan_out(tx: Transaction, limit: int) -> int:
    """Make the deliveries of pending events; how many events there were. Those that somebody else is at are passed over.

    Subscriptions are kept from being deleted meanwhile: what is removed with one must be all there is.
    """
    ends = [to(EndRow, r) for r in tx.rows(_PENDING, count=limit)]
    if not ends:
        return 0
    s = tx.t.subscription
    alive = sa.select(s).where(s.c.live_name.is_not(None)).order_by(s.c.id).with_for_update(read=True)
    there = [to(SubscriptionRow, r) for r in tx.rows(alive)]
    now = tx.now_us()
    made = [_delivery(sub, end.id, now) for end in ends for sub in there if due_for(sub, end)]
    tx.insert_many(tx.t.delivery, made)
    tx.changed(_DONE, ids=[end.id for end in ends])
    return len(ends)


def _delivery(s: SubscriptionRow, event: str, now: int) -> dict[str, object]:
    return {
        "subscription": s.id, "event": event, "state": DeliveryState.PENDING, "attempts": 0, "due_us": now, "lease": "", "reason": "", "actor": "",
        "created_us": now, "changed_us": now, "rev": 0,
    }  # fmt: skip


def catching_up(tx: Transaction) -> list[str]:
    """Subscriptions that have a window to look through now."""
    s = tx.t.subscription
    waiting = sa.select(s.c.id).where(s.c.live_name.is_not(None), s.c.catch_up != CatchUp.DONE, s.c.ready_us <= tx.now())
    return [r["id"] for r in tx.rows(waiting)]


def catch_up(tx: Transaction, subscription: str, limit: int) -> bool:
    """Look through the next part of a subscription's window; whether it has to be asked again. The window is closed: nothing can be added to it any more.

    Whose transaction saw the subscription has, or will get, its delivery from the pending event; all others in the window get theirs here. One at a time: two that freeze the
    same end would be in each other's way.
    """
    lock_gate(tx)
    s = lock(tx, subscription)
    now = tx.now_us()
    if s is None or s.state is SubscriptionState.DELETED or s.catch_up is CatchUp.DONE or s.ready_us > now:
        return False
    ends = _in_window(tx, s, limit)
    wanted = [end.id for end in ends if wants(s, end)]
    if wanted:
        tx.changed(_FREEZE, ids=wanted)
        e = tx.t.event
        others = {r["id"] for r in tx.rows(sa.select(e.c.id).where(e.c.id.in_(wanted), e.c.seen >= s.seq))}
        mine = [_delivery(s, event, now) for event in wanted if event not in others]
        if mine:
            tx.insert_those_new(tx.t.delivery, None, mine)
    _go_on(tx, s, ends[-1] if len(ends) == limit else None)
    return True


def _in_window(tx: Transaction, s: SubscriptionRow, limit: int) -> list[EndRow]:
    c = tx.t.task.c
    after = sa.or_(c.settled_us > s.cursor_us, sa.and_(c.settled_us == s.cursor_us, c.id > s.cursor_id))
    where = [c.namespace == s.namespace, c.settled_us > 0, c.settled_us >= max(s.from_us, s.cursor_us), c.settled_us <= s.until_us, after]
    found = sa.select(*(c[name] for name in _LOOKED_AT)).where(*where).order_by(c.settled_us, c.id).limit(limit)
    return [to(EndRow, r) for r in tx.rows(found)]


def _go_on(tx: Transaction, s: SubscriptionRow, last: EndRow | None) -> None:
    """Remember how far it is; or begin the next window. What had passed before the subscription was there is of use no longer than it catches up."""
    t = tx.t.subscription
    where = [t.c.id == s.id, t.c.rev == s.rev]
    if last is not None:
        done = tx.update(t, *where, cursor_us=last.settled_us, cursor_id=last.id)
    else:
        w = next_window(s)
        done = tx.update(
            t, *where, catch_up=w.catch_up, from_us=w.from_us, until_us=w.until_us, ready_us=w.ready_us, cursor_us=0, cursor_id=""
        )
        if w.catch_up is CatchUp.DONE:
            d = tx.t.delivery
            tx.delete(d, d.c.subscription == s.id, d.c.state == DeliveryState.PASSED)
    if done != 1:
        raise AssertionError(f"subscription {s.id} changed under its lock")
