"""The sweep over events and deliveries: whose an event is, what a new subscription still has to catch up with, leases that are over, messages to publish, what deleted ones
left behind.

Run by the holder of the coordinator's lease behind the task sweep, as often as that. Bounded in each part; a failing subscription is set aside and stops no other. What must
never happen
here: a wait for the broker; a message for a delivery that is not leased in a committed row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from millstream_schema.durable.deliveries import Handed, Mode, SubscriptionRow, SubscriptionState
from millstream_schema.errors import CommitUnknown
from millstream_schema.ports import Chance, Clock, Ids
from millstream_schema.store import deliveries, events, subscriptions
from millstream_schema.store.database import Database, Transaction

from .setting_aside import SettingAside

CHUNK = 200
CHUNKS = 50
ON_THEIR_WAY = 1_000
"""Messages of one subscription that are out and not acknowledged, at most."""
UNSENT_PAUSE_US = 2_000_000
"""How long what the broker did not take waits; no attempt is counted."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery to be published. ``target``: the broker's queue; ``celery_task``: the task it calls there, if any; ``expires_s``: how long it is of use."""

    subscription: str
    event: str
    lease: str
    target: str
    celery_task: str
    body: dict[str, Any]
    expires_s: float


class Publisher(Protocol):
    """The broker's door. Nothing in it waits."""

    def room(self) -> int:
        """How many messages it takes now; 0 while the broker cannot be reached."""
        ...

    def publish(self, messages: list[Message]) -> None: ...

    def unsent(self) -> list[Message]:
        """Those the broker did not take, since the last call."""
        ...


class NoPublisher:
    """Where there is no broker: deliveries to queues stay in their rows."""

    def room(self) -> int:
        return 0

    def publish(self, messages: list[Message]) -> None:
        """Nothing to publish: there was no room."""

    def unsent(self) -> list[Message]:
        return []


class DeliverySweep:
    """``publisher``: the broker's door, or :class:`NoPublisher`."""

    def __init__(self, database: Database, clock: Clock, chance: Chance, ids: Ids, publisher: Publisher) -> None:
        self._db = database
        self._chance = chance
        self._ids = ids
        self._publisher = publisher
        self._aside = SettingAside(clock)

    @property
    def set_aside(self) -> int:
        return self._aside.count

    def sweep(self) -> None:
        """Everything that is due. Raises StoreError when the database is away; the next call goes on."""
        self._repeat(lambda: self._db.run(lambda tx: events.fan_out(tx, CHUNK)) == CHUNK)
        there = self._db.read(subscriptions.everywhere)
        if not there:
            return
        for subscription in self._db.read(events.catching_up):
            self._aside.each(f"subscription {subscription}", lambda s=subscription: self._catch_up(s))  # type: ignore[misc]
        unsent = self._publisher.unsent()
        for s in there:
            mine = [m for m in unsent if m.subscription == s.id]
            self._aside.each(f"deliveries of {s.namespace}/{s.name}", lambda s=s, m=mine: self._subscription(s, m))  # type: ignore[misc]

    def _repeat(self, work: Callable[[], bool]) -> None:
        """As long as there is more, within bounds."""
        for _ in range(CHUNKS):
            if not work():
                return

    def _catch_up(self, subscription: str) -> None:
        self._repeat(lambda: self._db.run(lambda tx: events.catch_up(tx, subscription, CHUNK)))

    def _subscription(self, s: SubscriptionRow, unsent: list[Message]) -> None:
        if s.state is SubscriptionState.DELETED:
            self._repeat(lambda: not self._db.run(lambda tx: subscriptions.remove(tx, s.id, CHUNK)))
            return
        for lease in sorted({m.lease for m in unsent}):
            back = [m.event for m in unsent if m.lease == lease]
            self._db.run(lambda tx, e=back, lease=lease: deliveries.give_back(tx, s, e, lease, UNSENT_PAUSE_US))  # type: ignore[misc]
        self._repeat(lambda: self._db.run(lambda tx: deliveries.expire(tx, s, CHUNK, self._draw)) == CHUNK)
        if s.mode is Mode.QUEUE and s.state is SubscriptionState.ACTIVE:
            self._publish(s)

    def _draw(self) -> float:
        return self._chance.uniform(0.0, 1.0)

    def _publish(self, s: SubscriptionRow) -> None:
        """Lease what is due, then hand it over: what is lost on the way is due again when its lease is over."""
        room = min(self._publisher.room(), CHUNK)
        if room <= 0:
            return
        room = min(room, ON_THEIR_WAY - self._db.read(lambda tx: deliveries.leased(tx, s, ON_THEIR_WAY)))
        if room > 0:
            handed = self._leased(s, room)
            if handed:
                self._publisher.publish([message(s, h) for h in handed])

    def _leased(self, s: SubscriptionRow, room: int) -> list[Handed]:
        """An unknown outcome is resolved at once, by the same lease; if that is not possible, what was leased is due again when the lease is over."""
        token = self._ids.new("lease", 10)

        def work(tx: Transaction, again: bool) -> list[Handed]:
            return deliveries.lease(tx, s, room, token, s.lease_ms * 1000, self._draw, again=again)

        try:
            return self._db.run(lambda tx: work(tx, False))
        except CommitUnknown:
            return self._db.run(lambda tx: work(tx, True))


def message(s: SubscriptionRow, handed: Handed) -> Message:
    """A small message that names the delivery: what it brings is in its row."""
    e = handed.event
    body = {
        "namespace": s.namespace, "subscription": s.name, "event": e.id, "attempt": handed.delivery.attempts, "handler": e.handler, "key": e.key,
        "business_key": e.business_key, "state": e.state.value,
    }  # fmt: skip
    return Message(
        subscription=s.id,
        event=e.id,
        lease=handed.delivery.lease,
        target=s.target,
        celery_task=s.celery_task,
        body=body,
        expires_s=s.lease_ms / 1000,
    )
