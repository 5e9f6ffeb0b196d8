"""What the tests of subscriptions and deliveries share."""

from __future__ import annotations

from typing import Any

from tests.contract.store.task_rows import fresh

from millstream_schema.durable.deliveries import DeliveryState, EventRow, Handed, SubscriptionRow
from millstream_schema.durable.states import TaskState
from millstream_schema.store import deliveries, events, subscriptions
from millstream_schema.store.database import Database
from millstream_schema.store.rows import to
from millstream_schema.store.subscriptions import NewSubscription

MINUTE_US = 60_000_000
FROZEN = (
    "namespace", "handler", "key", "queue", "business_key", "state", "cause", "reason", "result", "error", "origin", "root", "retry_of", "superseded_by",
    "created_us", "settled_us",
)  # fmt: skip


def asked_for(name: str = "s", **changes: Any) -> NewSubscription:
    values: dict[str, Any] = {"attempts": 3, "delay_ms": 0, "max_delay_ms": 0, **changes}
    return NewSubscription(id=fresh("subscription"), namespace=values.pop("namespace", "default"), name=name, **values)


def subscribed(db: Database, name: str = "s", *, longest_us: int = 0, **changes: Any) -> SubscriptionRow:
    wanted = asked_for(name, **changes)
    return db.run(lambda tx: subscriptions.create(tx, wanted, longest_us))


def frozen(db: Database) -> dict[str, EventRow]:
    """Every event, by its task's key."""
    names = EventRow.__struct_fields__
    rows = db.read(lambda tx: tx.rows(tx.t.event.select()))
    return {r["key"]: to(EventRow, {n: r[n] for n in names}) for r in rows}


def fanned(db: Database, limit: int = 200) -> int:
    return db.run(lambda tx: events.fan_out(tx, limit))


def pulled(
    db: Database, s: SubscriptionRow, limit: int = 100, *, token: str = "", lease_us: int = MINUTE_US, again: bool = False
) -> list[Handed]:
    wanted = token or fresh("lease")
    return db.run(lambda tx: deliveries.lease(tx, s, limit, wanted, lease_us, lambda: 0.0, again=again))


def keys(handed: list[Handed]) -> list[str]:
    return sorted(h.event.key for h in handed)


def delivered(db: Database, s: SubscriptionRow) -> dict[str, DeliveryState]:
    """What there is for a subscription, by the task's key."""
    names = {e.id: key for key, e in frozen(db).items()}
    return {names[d.event]: d.state for d in db.read(lambda tx: deliveries.listed(tx, s, None, 10_000))}


def caught_up(db: Database, s: SubscriptionRow, limit: int = 200) -> int:
    """Look through every window that is ready; how many parts it took."""
    turns = 0
    while s.id in db.read(events.catching_up):
        db.run(lambda tx: events.catch_up(tx, s.id, limit))
        turns += 1
    return turns


def outcomes_agree(db: Database) -> None:
    """Every event is what its task's row says."""
    rows = db.read(lambda tx: {r["key"]: r for r in tx.rows(tx.t.task.select())})
    for key, event in frozen(db).items():
        assert TaskState(rows[key]["state"]).settled
        assert {name: getattr(event, name) for name in FROZEN} == {name: rows[key][name] for name in FROZEN}, key
