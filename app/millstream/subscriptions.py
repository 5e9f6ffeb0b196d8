"""``Subscriptions``: who wants to know how tasks ended, and what has been told them.

::

    subscriptions.create("billing", handler="send_invoice")
    for delivery in subscriptions.pull("billing"):
        with Session.begin() as session:
            if inbox.accept(session, delivery):
                session.add(Invoice(delivery.key, delivery.result))
        subscriptions.acknowledge(delivery)

Called by user code and by the CLI. Each operation is one guarded transaction, repeated as it was when the answer to its COMMIT is lost. What must never happen here: a
delivery taken
for done before its consumer says so.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from millstream_schema import given
from millstream_schema.durable.deliveries import (
    ENDS,
    LONGEST_DELAY_MS,
    DeliveryRow,
    DeliveryState,
    Handed,
    Mode,
    SubscriptionRow,
    SubscriptionState,
)
from millstream_schema.durable.requests import HANDLER, NAME, decode_result
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import (
    ConfigurationError,
    DeliveryNotFound,
    SubscriptionConflict,
    SubscriptionNotFound,
)
from millstream_schema.ports import Chance, Clock, Ids, SystemChance, SystemIds
from millstream_schema.reasons import storable
from millstream_schema.store import deliveries, events, subscriptions
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.subscriptions import NewSubscription

from .installation import Installation
from .opened import OpenedNamespace

MOST = 1_000
"""Deliveries that one call takes."""
_QUICKEST_LOOK, _SLOWEST_LOOK = 0.02, 1.0
"""Seconds between two looks of a :meth:`Subscriptions.pull` that waits."""
_DELAY = given.seconds(LONGEST_DELAY_MS / 1000)
_LEASE = given.seconds(LONGEST_DELAY_MS / 1000, above=True)


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one task, handed to one subscription. ``event`` is the task's id, ``attempt`` counts from 1, ``lease`` names what it was handed out under.

    ``state``, ``cause``, ``reason``, ``error`` and :attr:`result` are frozen: what they were when the task ended. Times in UTC µs.
    """

    subscription: str
    name: str
    event: str
    attempt: int
    lease: str
    namespace: str
    handler: str
    key: str
    queue: str
    business_key: str
    state: TaskState
    cause: str
    reason: str
    error: str
    root: str
    retry_of: str
    superseded_by: str
    created_us: int
    settled_us: int
    value: str

    @property
    def result(self) -> Any:
        """What the handler returned, with its exact types; None for a task that did not succeed."""
        return decode_result(self.value)


def _delivery(s: SubscriptionRow, handed: Handed) -> Delivery:
    e, d = handed.event, handed.delivery
    return Delivery(
        subscription=s.id, name=s.name, event=e.id, attempt=d.attempts, lease=d.lease, namespace=e.namespace, handler=e.handler, key=e.key, queue=e.queue,
        business_key=e.business_key, state=e.state, cause=e.cause, reason=e.reason, error=e.error, root=e.root, retry_of=e.retry_of,
        superseded_by=e.superseded_by, created_us=e.created_us, settled_us=e.settled_us, value=e.result,
    )  # fmt: skip


def _pair(value: object) -> str:
    whole = isinstance(value, tuple | list) and len(value) == 2 and all(map(given.is_text, value))
    return "" if whole else f"must be a subscription's id and a task's, not {given.shown(value)}"


class Subscriptions(OpenedNamespace):
    """The subscriptions of one namespace of an installation. Also a context manager; :meth:`close` gives its connections back.

    ``actor``: who acts, kept with what is done. ``database``: one that is open already, and stays its owner's to close. Raises SchemaMismatch, StoreUnavailable.
    """

    def __init__(
        self,
        installation: Installation,
        namespace: str = "default",
        *,
        actor: str = "",
        clock: Clock | None = None,
        ids: Ids | None = None,
        chance: Chance | None = None,
        database: Database | None = None,
    ) -> None:
        super().__init__(installation, namespace, clock=clock, database=database, actor=actor)
        self._ids = ids or SystemIds()
        self._chance = chance or SystemChance()

    # -- subscriptions

    @given.checked(
        states=given.several(given.a(str)),
        delay=_DELAY,
        max_delay=_DELAY,
        lease=_LEASE,
        since=given.either(given.nothing, given.instant),
        attempts=given.whole(1, 1_000_000),
    )
    def create(
        self,
        name: str,
        *,
        handler: str = "",
        queue: str = "",
        business_key: str = "",
        states: Iterable[str] = (),
        publish_to: str = "",
        celery_task: str = "",
        attempts: int = 20,
        delay: float = 1.0,
        max_delay: float = 3600.0,
        lease: float = 60.0,
        since: dt.datetime | None = None,
    ) -> SubscriptionRow:
        """Subscribe to every end of a task that is committed after this is; with ``since``, an aware datetime, also to those from then on that are still stored.

        ``handler``, ``queue``, ``business_key``: only tasks with exactly these. ``states``: only these ends (SUCCEEDED, FAILED, CANCELLED, EXPIRED). ``publish_to``: a queue of
        the Celery broker each is published to, as a message or as a call of ``celery_task``; without it consumers :meth:`pull`. ``attempts``: how often one is handed out
        before it is parked, with pauses of ``delay`` seconds, doubled up to ``max_delay``. ``lease``: seconds a consumer has until its delivery counts as not done.

        The same name with the same definition is the same subscription. Raises ConfigurationError, SubscriptionConflict, StoreUnavailable.
        """
        wanted = NewSubscription(
            id=self._ids.new("subscription", 10), namespace=self.namespace, name=name, mode=Mode.QUEUE if publish_to else Mode.PULL, target=publish_to,
            celery_task=celery_task, handler=handler, queue=queue, business_key=business_key, states=",".join(sorted({str(s) for s in states})),
            attempts=attempts, delay_ms=_ms(delay), max_delay_ms=_ms(max_delay), lease_ms=_ms(lease),
            since_us=0 if since is None else max(1, given.micros(since)), actor=self._actor,
        )  # fmt: skip
        problems = _problems(wanted, self.database.read(lambda tx: tx.now_us()))
        if problems:
            raise ConfigurationError(f"subscription {given.shown(name)}: " + "; ".join(problems))
        row = self._run(lambda tx: subscriptions.create(tx, wanted, self.database.longest_us))
        differs = wanted.same_as(row)
        if differs:
            raise SubscriptionConflict(
                f"there is a subscription {name!r} with another {', '.join(differs)}: choose another name, or delete it first"
            )
        return row

    def list(self) -> list[SubscriptionRow]:
        """All of this namespace, by name."""
        return self.database.read(lambda tx: subscriptions.listed(tx, self.namespace))

    @given.checked(name=given.text)
    def get(self, name: str) -> SubscriptionRow:
        """One as it is now. Raises SubscriptionNotFound."""
        return self.database.read(lambda tx: self._found(tx, name))

    def _found(self, tx: Transaction, name: str) -> SubscriptionRow:
        row = subscriptions.read(tx, self.namespace, name)
        if row is None:
            raise SubscriptionNotFound(f"there is no subscription {name!r} in namespace {self.namespace!r}")
        return row

    @given.checked(name=given.text)
    def counts(self, name: str) -> Mapping[str, int]:
        """How many of its deliveries are in each state. Raises SubscriptionNotFound."""
        return self.database.read(lambda tx: deliveries.counts(tx, self._found(tx, name)))

    @given.checked(name=given.text)
    def pause(self, name: str) -> SubscriptionRow:
        """Hand out nothing until :meth:`resume`; deliveries are made and kept meanwhile. Raises SubscriptionNotFound."""
        return self._set(name, SubscriptionState.PAUSED)

    @given.checked(name=given.text)
    def resume(self, name: str) -> SubscriptionRow:
        """Hand out again. Raises SubscriptionNotFound."""
        return self._set(name, SubscriptionState.ACTIVE)

    @given.checked(name=given.text)
    def delete(self, name: str) -> None:
        """Subscribe no more; its deliveries go, acknowledged or not. Raises SubscriptionNotFound."""
        self.get(name)

        def work(tx: Transaction, again: bool) -> bool:
            return subscriptions.set_state(tx, self.namespace, name, SubscriptionState.DELETED, self._actor) is not None or again

        if not self._repeated(work):
            raise SubscriptionNotFound(f"there is no subscription {name!r} any more in namespace {self.namespace!r}")

    def _set(self, name: str, state: SubscriptionState) -> SubscriptionRow:
        row = self._run(lambda tx: subscriptions.set_state(tx, self.namespace, name, state, self._actor))
        if row is None:
            raise SubscriptionNotFound(f"there is no subscription {name!r} in namespace {self.namespace!r}")
        return row

    # -- consuming

    @given.checked(
        name=given.text, limit=given.whole(1, MOST), lease=given.seconds(LONGEST_DELAY_MS / 1000, above=True, optional=True), wait=_DELAY
    )
    def pull(self, name: str, limit: int = 10, *, lease: float | None = None, wait: float = 0.0) -> Sequence[Delivery]:
        """Take up to ``limit`` deliveries that are due. Each is this caller's for ``lease`` seconds (the subscription's), then somebody may get it again.

        ``wait``: if there is none, so many seconds for the first one to come. In the order in which their tasks ended, as far as they are here: no order is promised. Raises
        SubscriptionNotFound, ConfigurationError.
        """
        until = self._clock.monotonic() + _ms(wait) / 1000
        pause = _QUICKEST_LOOK
        while not (found := self._pulled(name, limit, lease)) and (left := until - self._clock.monotonic()) > 0:
            threading.Event().wait(min(pause, left))
            pause = min(pause * 2, _SLOWEST_LOOK)
        return found

    def _pulled(self, name: str, limit: int, lease: float | None) -> Sequence[Delivery]:
        s = self.get(name)
        lease_ms = s.lease_ms if lease is None else _ms(lease)
        token = self._ids.new("lease", 10)
        self._run(lambda tx: events.fan_out(tx, MOST))  # nobody waits for the sweep

        def work(tx: Transaction, again: bool) -> list[Handed]:
            return deliveries.lease(tx, s, limit, token, lease_ms * 1000, self._draw, again=again)

        return [_delivery(s, h) for h in self._repeated(work)]

    @given.checked(body=given.a(Mapping))
    def received(self, body: Mapping[str, Any]) -> Delivery:
        """The delivery that a published message names. Raises DeliveryNotFound when it is acknowledged or gone: the message is an old one, to be passed over."""
        name, event = body.get("subscription"), body.get("event")
        if (
            not isinstance(name, str)
            or not isinstance(event, str)
            or not given.is_text(name + event)
            or body.get("namespace") != self.namespace
        ):
            raise ConfigurationError(
                f"this is no message of a subscription in namespace {self.namespace!r}: give the body as it was received"
            )

        def work(tx: Transaction) -> tuple[SubscriptionRow, Handed | None]:
            s = self._found(tx, name)
            return s, deliveries.handed(tx, s, event)

        s, found = self.database.read(work)
        if found is None or found.delivery.state is DeliveryState.ACKNOWLEDGED:
            raise DeliveryNotFound(
                f"the end of task {event} is not to be delivered to subscription {name!r}: acknowledged, or removed since"
            )
        return _delivery(s, found)

    @given.checked(done=given.several(given.a(Delivery)))
    def acknowledge(self, *done: Delivery) -> None:
        """It is done. Valid whatever has become of the lease it came under. Raises DeliveryNotFound for what there is no delivery of; the others are acknowledged all the same."""
        by_name: dict[tuple[str, str], list[str]] = {}
        for delivery in done:
            by_name.setdefault((delivery.subscription, delivery.name), []).append(delivery.event)
        missing: list[str] = []
        for (subscription, name), ids in by_name.items():
            missing += self._acknowledge(subscription, name, ids)
        if missing:
            raise DeliveryNotFound(f"there is no delivery (any more) of {', '.join(missing[:10])}")

    @given.checked(name=given.text, ids=given.several(given.text))
    def acknowledge_by_id(self, name: str, *ids: str) -> None:
        """Likewise, by the ids of the tasks. Raises SubscriptionNotFound, DeliveryNotFound."""
        missing = self._acknowledge(self.get(name).id, name, list(ids))
        if missing:
            raise DeliveryNotFound(f"subscription {name!r} has no delivery (any more) of {', '.join(missing[:10])}")

    def _acknowledge(self, subscription: str, name: str, ids: Sequence[str]) -> Sequence[str]:
        def work(tx: Transaction) -> Sequence[str]:
            s = subscriptions.read(tx, self.namespace, name)
            if s is None or s.id != subscription:
                return ids
            return deliveries.acknowledge(tx, s, ids, self._actor)

        return self._run(work)

    @given.checked(delivery=given.a(Delivery), reason=given.words, after=given.seconds(LONGEST_DELAY_MS / 1000, optional=True))
    def refuse(self, delivery: Delivery, reason: str = "", *, after: float | None = None) -> bool:
        """It could not be done: again after the back-off, or ``after`` seconds; parked when no attempt is left. False: its lease is over, somebody else may be at it."""
        return self.refuse_by_id(delivery.name, delivery.event, delivery.lease, reason, after=after) is not None

    @given.checked(
        name=given.text, event=given.text, lease=given.text, reason=given.words, after=given.seconds(LONGEST_DELAY_MS / 1000, optional=True)
    )
    def refuse_by_id(self, name: str, event: str, lease: str, reason: str = "", *, after: float | None = None) -> DeliveryRow | None:
        """Likewise, by the task's id and the lease; as it is afterwards. Raises SubscriptionNotFound."""
        after_us = None if after is None else _ms(after) * 1000

        def work(tx: Transaction, again: bool) -> DeliveryRow | None:
            s = self._found(tx, name)
            done = deliveries.refuse(tx, s, event, lease, storable(reason), after_us, self._draw())
            return deliveries.one(tx, s, event) if done is None and again else done

        return self._repeated(work)

    def _draw(self) -> float:
        return self._chance.uniform(0.0, 1.0)

    # -- looking after

    @given.checked(name=given.text, state=given.a(DeliveryState, optional=True), limit=given.ROWS)
    def deliveries(self, name: str, *, state: DeliveryState | None = None, limit: int = 50) -> Sequence[DeliveryRow]:
        """Those that changed last, and are in this state. Raises SubscriptionNotFound."""
        return self.database.read(lambda tx: deliveries.listed(tx, self._found(tx, name), state, limit))

    @given.checked(name=given.text, ids=given.several(given.text))
    def redeliver(self, name: str, *ids: str) -> int:
        """Deliver the ends of these tasks again, whatever became of that before; how many. What they bring is what it was. Raises SubscriptionNotFound, DeliveryNotFound."""
        wanted = sorted(set(ids))
        if not wanted:
            self.get(name)
            return 0
        found = self._run(lambda tx: deliveries.redeliver(tx, self._found(tx, name), wanted, self._actor))
        if found < len(wanted):
            raise DeliveryNotFound(
                f"subscription {name!r} has a delivery of {found} of these {len(wanted)} tasks; those are delivered again"
            )
        return found

    @given.checked(pairs=given.several(_pair))
    def existing(self, pairs: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
        """Of these (subscription id, task id) those that can still be delivered, or be delivered again."""
        return self.database.read(lambda tx: deliveries.existing(tx, pairs))


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _problems(new: NewSubscription, now_us: int) -> list[str]:
    found = []
    if not isinstance(new.name, str) or not NAME.match(new.name):
        found.append(f"its name must match {NAME.pattern}")
    if new.handler != "" and not (isinstance(new.handler, str) and HANDLER.match(new.handler)):
        found.append(f"handler {given.shown(new.handler)} must match {HANDLER.pattern}")
    if new.queue != "" and not (isinstance(new.queue, str) and NAME.match(new.queue)):
        found.append(f"queue {given.shown(new.queue)} must match {NAME.pattern}")
    for field in ("business_key", "target", "celery_task"):
        text = getattr(new, field)
        if said := given.text(text):
            found.append(f"{field} {said}")
    wrong = [s for s in new.states.split(",") if s and s not in ENDS]
    if wrong:
        found.append(f"states must be ends of a task ({', '.join(ENDS)}), not {given.shown(', '.join(wrong))}")
    if new.delay_ms > new.max_delay_ms:
        found.append(f"delay must not exceed max_delay, which is {new.max_delay_ms / 1000} s")
    if new.lease_ms < 1:
        found.append("lease must be above 0: a consumer needs time")
    if new.celery_task and not new.target:
        found.append("celery_task needs publish_to: the queue its call goes to")
    if new.since_us > now_us:
        found.append("since lies in the future: what ends later comes by itself")
    return found
