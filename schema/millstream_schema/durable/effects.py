"""Intents: what is known of calls to the outside that handlers make by ``ctx.external``. States, identity and decisions, pure.

::

    ──▶ OPEN ──▶ DONE ◀── NOT_DONE
         │ ▲                │ ▲
         │ └────────────────┘ │
         └────────────────────┘

An intent is written, OPEN, before its call. While it is OPEN nobody knows whether the call happened; whoever does not know leaves it so. DONE is final: an outcome that is
recorded is never replaced, and never called for again. It is taken from whoever reports it, also from an attempt that is not the valid one any more: it is a fact about the
outside, and the successor sent the same key. That the call did *not* happen is taken only from whoever opened it, from a reconcile hook in a valid attempt, or from a person.

What must never happen here: a guess about what is OPEN; a recorded outcome that is written over; an idempotency key that depends on the attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from ..canonical import fingerprint
from ..errors import ExternalRefused
from ..reasons import storable
from .requests import LONGEST_KEY, NAME

KEY_RULE = 1
"""Number of the rule by which idempotency keys are made; the key is stored with its intent, so that a new rule changes none that was sent."""
DETAIL_KEPT = 20_000
"""Characters of what is said about an intent."""


class IntentState(enum.StrEnum):
    OPEN = "OPEN"
    """Its call was about to be made; what became of it is not known."""
    DONE = "DONE"
    """The call happened; its outcome is recorded, or that it cannot be stored."""
    NOT_DONE = "NOT_DONE"
    """The call certainly did not happen, or a person has made up for it; it may be made again."""


S = IntentState
INTENT_TRANSITIONS: Mapping[IntentState, frozenset[IntentState]] = {
    S.OPEN: frozenset({S.DONE, S.NOT_DONE}),
    S.NOT_DONE: frozenset({S.OPEN, S.DONE}),
    S.DONE: frozenset(),
}


class IntentId(msgspec.Struct, frozen=True):
    """Which call: the same for every attempt of a task, and for the tasks that do it again. ``root``: the first of these tasks."""

    root: str
    name: str
    key: str = ""

    @property
    def idempotency_key(self) -> str:
        """What the receiver is to tell repeats by."""
        return f"millstream-{KEY_RULE}-{fingerprint([self.root, self.name, self.key])}"

    def __str__(self) -> str:
        return f"{self.name}/{self.key}" if self.key else self.name


class KnownCall(msgspec.Struct, frozen=True):
    """What the caller of an intent knows of its call, until it is written down. ``happened``: else it certainly did not; ``result``: encoded, None: it cannot be stored."""

    opening: str
    happened: bool
    result: str | None
    detail: str
    who: str


class IntentRow(msgspec.Struct, frozen=True, kw_only=True):
    """One intent. ``opening``: made anew for each call; ``task``, ``fence``: the attempt that made the newest one; ``calls``: how often it was opened.

    ``result``: encoded; None also for one that is DONE and whose outcome cannot be stored, or is known to a person alone. ``closed_by``: who said how it ended.
    """

    root: str
    name: str
    key: str
    idempotency_key: str
    state: IntentState
    task: str
    fence: int
    opening: str
    calls: int
    result: str | None
    detail: str
    closed_by: str
    opened_us: int
    closed_us: int
    rev: int

    @property
    def id(self) -> IntentId:
        return IntentId(self.root, self.name, self.key)

    @property
    def open(self) -> bool:
        return self.state is IntentState.OPEN


class Recorded(msgspec.Struct, frozen=True):
    """What to write of an outcome that was reported. ``detail``: of a conflicting one, as evidence."""

    state: IntentState | None = None
    detail: str | None = None


def identified(root: str, name: Any, key: Any) -> IntentId:
    """The identity of a call. Raises ExternalRefused for a name or a key that cannot be one."""
    if not isinstance(name, str) or not NAME.match(name):
        raise ExternalRefused(f"ctx.external: its name must match {NAME.pattern}, not {name!r:.80}")
    if not isinstance(key, str) or len(key) > LONGEST_KEY or storable(key) != key:
        raise ExternalRefused(
            f"ctx.external({name!r}): its key must be text of at most {LONGEST_KEY} characters without NUL and half characters, not {key!r:.80}"
        )
    return IntentId(root, name, key)


def may_open(row: IntentRow | None) -> bool:
    """Whether a call may be made: there was none, or it certainly did not happen."""
    return row is None or row.state is IntentState.NOT_DONE


def on_outcome(row: IntentRow, result: str | None, who: str) -> Recorded:
    """An outcome is reported, by whomever. The first that is recorded stays; another one is kept as evidence beside it."""
    if row.state is not IntentState.DONE:
        return Recorded(IntentState.DONE)
    if row.result == result:
        return Recorded()
    said = f"{who} reported another outcome: {'one that cannot be stored' if result is None else result}"
    return Recorded(None, row.detail if said in row.detail else kept(f"{row.detail}; {said}" if row.detail else said))


def on_denial(row: IntentRow, opening: str) -> bool:
    """Whether that its call did not happen is to be written: only of the opening it was said of."""
    return row.open and row.opening == opening


def kept(text: str) -> str:
    """As much of it as is stored, as every database takes it."""
    return storable(text[:DETAIL_KEPT])
