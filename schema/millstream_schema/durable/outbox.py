"""An outbox entry's states and what becomes of it: pure functions of the entry, what its sending gave, and its own database's time.

::

    WAITING ──▶ SENDING ──▶ SENT
       ▲ ▲         │ └────▶ PARKED
       │ └─────────┘           │
       └───────────────────────┘ a person says so: the same key, the same content

Called by the relay and by the statements on the entries. What must never happen here: a new key for an old request; an entry dropped; a clock, SQL.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

DAY_US = 86_400 * 1_000_000


class EntryState(enum.StrEnum):
    WAITING = "WAITING"
    """To be sent when it is due."""
    SENDING = "SENDING"
    """A relay has it, until its lease ends."""
    SENT = "SENT"
    """The installation has accepted it; ``task`` says as what."""
    PARKED = "PARKED"
    """It is not sent any more until a person says so."""


E = EntryState
ENTRY_TRANSITIONS: Mapping[EntryState, frozenset[EntryState]] = {
    E.WAITING: frozenset({E.SENDING, E.PARKED}),
    E.SENDING: frozenset({E.SENDING, E.SENT, E.WAITING, E.PARKED}),
    E.SENT: frozenset(),
    E.PARKED: frozenset({E.WAITING}),
}


class EntryCause(enum.StrEnum):
    """Why an entry waits again or is parked."""

    NONE = ""
    AWAY = "away"
    """The installation's database could not be reached, or its answer was lost."""
    THROTTLED = "throttled"
    """It takes no more at the moment."""
    CONFLICT = "conflict"
    """The key is known there with other content."""
    INVALID = "invalid"
    """What is kept cannot be a request."""
    REFUSED = "refused"
    """Its database refused: a missing right, a broken rule, or something nobody expected, which is tried again."""
    SENDS = "sends"
    """It was sent as often as is allowed."""
    OLD = "old"
    """So old that the installation may have forgotten its key: sent again it could run twice."""
    PERSON = "person"
    """A person had it sent again."""


class EntryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. ``generation`` only grows: it is raised by whoever takes the entry to send it. ``tries``: how often it was sent since it was
    put in or a person had it sent again; ``sends``: ever. ``since_us``: from when its age counts: its creation, or a person's word."""

    id: str
    target: str
    namespace: str
    handler: str
    key: str
    digest: str
    request: str
    state: EntryState
    cause: EntryCause
    reason: str
    task: str
    sends: int
    tries: int
    failures: int
    owner: str
    claim: str
    generation: int
    lease_us: int
    due_us: int
    since_us: int
    created_us: int
    sent_us: int
    changed_us: int
    actor: str
    rev: int


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How an entry is sent. ``first_ms``: pause after a failure, doubled up to ``longest_ms``; ``sends``: how often at most; ``oldest_us``: up to which age (the
    installation's retention less a day); ``lease_ms``: how long a relay may take for what it took."""

    first_ms: int = 500
    longest_ms: int = 300_000
    sends: int = 1_000
    oldest_us: int = 29 * DAY_US
    lease_ms: int = 30_000


class Sending(msgspec.Struct, frozen=True, tag=True):
    """Root of what sending an entry gave."""


class Accepted(Sending, frozen=True, tag=True):
    """It is a task now, or was already: a replayed receipt is a success."""

    task: str


class Failed(Sending, frozen=True, tag=True):
    """It is not known to be one; the same request may be sent again. ``after_us``: not before then."""

    cause: EntryCause
    message: str
    after_us: int = 0


class Refused(Sending, frozen=True, tag=True):
    """It will never be one as it is."""

    cause: EntryCause
    message: str


AnySending = Accepted | Failed | Refused


class EntryDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to write."""

    state: EntryState
    cause: EntryCause = EntryCause.NONE
    reason: str = ""
    task: str = ""
    due_us: int = 0
    failures: int = 0


def on_claim(entry: EntryRow, limits: Limits, now: int) -> EntryDecision:
    """Whether an entry that is due is sent. One that is too old or was sent too often is parked before, not after."""
    if now - entry.since_us >= limits.oldest_us:
        return EntryDecision(
            state=E.PARKED,
            cause=EntryCause.OLD,
            reason="it is about as old as the installation keeps keys; sent again it could run twice: look there for its key first",
        )
    if entry.tries >= limits.sends:
        return EntryDecision(
            state=E.PARKED, cause=EntryCause.SENDS, reason=f"sent {entry.tries} times; the last time: {entry.reason or 'no answer'}"
        )
    return EntryDecision(state=E.SENDING, cause=entry.cause, reason=entry.reason)


def on_sent(entry: EntryRow, limits: Limits, sending: AnySending, now: int, chance: float) -> EntryDecision:
    """What becomes of an entry that was sent. ``chance`` in [0, 1) decides the jitter of the pause."""
    match sending:
        case Accepted(task=task):
            return EntryDecision(state=E.SENT, task=task)
        case Refused(cause=cause, message=message):
            return EntryDecision(state=E.PARKED, cause=cause, reason=message)
        case Failed(cause=cause, message=message, after_us=after_us):
            pause = max(pause_us(limits, entry.failures, chance), after_us)
            return EntryDecision(state=E.WAITING, cause=cause, reason=message, due_us=now + pause, failures=1)


def pause_us(limits: Limits, failures: int, chance: float) -> int:
    """Pause after failure number ``failures`` + 1."""
    longest = min(limits.first_ms << min(failures, 30), limits.longest_ms) * 1000
    return int(longest * (1.0 - 0.2 * chance))


def retried(entry: EntryRow) -> str:
    """Why a person may not have an entry sent again; empty: he may. It keeps its key and content."""
    if entry.state is not E.PARKED:
        return f"it is {entry.state}: only a parked entry is sent again"
    if entry.cause is EntryCause.OLD and entry.sends:
        return "it was sent before and the installation may have forgotten its key: it could run twice. Look there for the key; submit anew if it never ran"
    if entry.cause in (EntryCause.CONFLICT, EntryCause.INVALID):
        return f"it would be refused again ({entry.cause}): {entry.reason}"
    return ""
