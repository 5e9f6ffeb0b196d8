"""Subscriptions to the ends of tasks, and what becomes of their deliveries: states, records, pure decisions.

::

    PENDING ──▶ LEASED ──▶ ACKNOWLEDGED
       ▲          │ ▲            │
       │          │ └ due        │ redelivered by hand
       ├──────────┘ refused, lease over, attempts left
       │          └──▶ PARKED ───┤
       └─────────────────────────┘

PENDING waits for its instant. LEASED is with a consumer (pulled), or on its way to one (published), until its instant. An acknowledgement is taken in every state and whatever
lease it
came under: the consumer has done it. PASSED marks what had ended before its subscription was there; it is never delivered and goes when the subscription has caught up. What must
never happen here: a clock, chance, SQL; a delivery that is given up by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

import msgspec

from .states import SETTLED, TaskState

ENDS = tuple(sorted(SETTLED))
LONGEST_DELAY_MS = 30 * 86_400_000


class SubscriptionState(enum.StrEnum):
    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    """Deliveries are made and kept; none is handed out."""
    DELETED = "DELETED"
    """Nothing more is made; what is left of its deliveries is being removed."""


class Mode(enum.StrEnum):
    PULL = "pull"
    """Consumers ask for deliveries."""
    QUEUE = "queue"
    """A message for each is published to a queue of the broker, again until it is acknowledged."""


class DeliveryState(enum.StrEnum):
    PENDING = "PENDING"
    LEASED = "LEASED"
    ACKNOWLEDGED = "ACKNOWLEDGED"
    PARKED = "PARKED"
    """Not acknowledged in as many attempts as its subscription allows: a person redelivers it."""
    PASSED = "PASSED"


D = DeliveryState
DELIVERY_TRANSITIONS: Mapping[DeliveryState, frozenset[DeliveryState]] = {
    D.PENDING: frozenset({D.LEASED, D.ACKNOWLEDGED, D.PENDING}),
    D.LEASED: frozenset({D.ACKNOWLEDGED, D.PENDING, D.PARKED}),
    D.ACKNOWLEDGED: frozenset({D.PENDING}),
    D.PARKED: frozenset({D.PENDING, D.ACKNOWLEDGED}),
    D.PASSED: frozenset(),
}
ACKNOWLEDGEABLE = frozenset(state for state, after in DELIVERY_TRANSITIONS.items() if D.ACKNOWLEDGED in after)


class CatchUp(enum.StrEnum):
    """Which closed window of finished tasks a subscription still has to look through; what ends after its own commit needs none."""

    SINCE = "SINCE"
    """What ended from ``since`` until it was made."""
    RACE = "RACE"
    """What was ending in a transaction of ours when it was made, which did not see it: looked for when every such transaction is over."""
    DONE = "DONE"


class SubscriptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One subscription. Empty filters take everything; ``states``: the ends it takes, separated by commas.

    ``from_us`` to ``until_us``: the window it looks through, from ``ready_us`` on; ``cursor``: how far. ``longest_us``: how long a transaction of ours may last there.
    """

    id: str
    namespace: str
    name: str
    live_name: str | None
    seq: int
    state: SubscriptionState
    mode: Mode
    target: str
    celery_task: str
    handler: str
    queue: str
    business_key: str
    states: str
    attempts: int
    delay_ms: int
    max_delay_ms: int
    lease_ms: int
    since_us: int
    catch_up: CatchUp
    from_us: int
    until_us: int
    ready_us: int
    cursor_us: int
    cursor_id: str
    longest_us: int
    created_us: int
    changed_us: int
    actor: str
    rev: int


class Ended(Protocol):
    """What a filter looks at: a task's or an event's row."""

    @property
    def handler(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def business_key(self) -> str: ...
    @property
    def state(self) -> TaskState: ...


class EndRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task that has ended, or its event, as far as deciding needs it. ``seen``: the newest subscription its transaction saw."""

    id: str
    namespace: str
    handler: str
    queue: str
    business_key: str
    state: TaskState
    settled_us: int
    seen: int = 0


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """The frozen outcome of one task: no later decision, no retry and no retention changes it."""

    id: str
    namespace: str
    handler: str
    key: str
    queue: str
    business_key: str
    state: TaskState
    cause: str
    reason: str
    result: str
    error: str
    origin: str
    root: str
    retry_of: str
    superseded_by: str
    created_us: int
    settled_us: int


class DeliveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One event on its way to one subscription. ``due_us``: when it may be handed out, or its lease ends."""

    subscription: str
    event: str
    state: DeliveryState
    attempts: int
    due_us: int | None
    lease: str
    reason: str
    actor: str
    created_us: int
    changed_us: int
    rev: int


class Handed(msgspec.Struct, frozen=True):
    """A delivery that was leased, with what it brings."""

    delivery: DeliveryRow
    event: EventRow


class Change(msgspec.Struct, frozen=True):
    """What becomes of a delivery."""

    state: DeliveryState
    due_us: int | None = None


def wants(s: SubscriptionRow, end: Ended) -> bool:
    """Whether its filters take this end."""
    taken = (not s.handler or s.handler == end.handler) and (not s.queue or s.queue == end.queue)
    return taken and (not s.business_key or s.business_key == end.business_key) and (not s.states or end.state in s.states.split(","))


def due_for(s: SubscriptionRow, event: EndRow) -> bool:
    """Whether a pending event is this subscription's: it was there for the transaction that ended the task. Older ones are found by its catching up, if they are its at all."""
    return s.state is not SubscriptionState.DELETED and s.namespace == event.namespace and s.seq <= event.seen and wants(s, event)


def backoff_us(s: SubscriptionRow, attempts: int, chance: float) -> int:
    """Pause after this many attempts: doubled with each, up to a fifth shorter by ``chance`` in [0, 1). Never overflows: the exponent is capped."""
    delay = min(s.delay_ms << min(max(attempts - 1, 0), 30), s.max_delay_ms) * 1000
    return int(delay * (1.0 - 0.2 * chance))


def on_failure(s: SubscriptionRow, d: DeliveryRow, now: int, chance: float, after_us: int | None = None) -> Change:
    """It was handed out and not acknowledged: refused by its consumer, or its lease is over. ``after_us``: when the consumer wants it again."""
    if d.attempts >= s.attempts:
        return Change(D.PARKED)
    delay = backoff_us(s, d.attempts, chance) if after_us is None else max(0, min(after_us, LONGEST_DELAY_MS * 1000))
    return Change(D.PENDING, now + delay)


class Window(msgspec.Struct, frozen=True):
    """A part of a catch-up: ends from ``from_us`` to ``until_us``, looked through from ``ready_us`` on."""

    catch_up: CatchUp
    from_us: int = 0
    until_us: int = 0
    ready_us: int = 0


def first_window(since_us: int, created_us: int, longest_us: int) -> Window:
    """Where a new subscription begins. ``longest_us`` 0: writers wait for each other, none can miss it."""
    if since_us:
        return Window(CatchUp.SINCE, since_us, created_us, created_us)
    return _race(created_us, longest_us)


def next_window(s: SubscriptionRow) -> Window:
    """Where it goes on when a window is looked through."""
    return _race(s.created_us, s.longest_us) if s.catch_up is CatchUp.SINCE else Window(CatchUp.DONE)


def _race(created_us: int, longest_us: int) -> Window:
    """It was committed at most ``longest_us`` after its instant; who did not see it had begun before that, and is over as long again later."""
    if not longest_us:
        return Window(CatchUp.DONE)
    return Window(CatchUp.RACE, created_us - longest_us, created_us + longest_us, created_us + 2 * longest_us)
