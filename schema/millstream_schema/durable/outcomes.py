"""How an attempt ended, as whoever saw it end reports it. Closed and frozen: they cross from workers to the store."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """Root of all ends of an attempt."""


class Succeeded(Outcome, frozen=True, tag=True):
    """The handler returned; ``result`` is its encoded value."""

    result: str = "null"


class Raised(Outcome, frozen=True, tag=True):
    """It raised something that is none of the verbs."""

    error: str
    message: str
    retryable: bool = True


class RetryAsked(Outcome, frozen=True, tag=True):
    """``raise Retry(after)``; ``None``: by the policy's back-off."""

    after_us: int | None = None
    message: str = ""


class Snoozed(Outcome, frozen=True, tag=True):
    """``raise Snooze(for)``: put off; no attempt counts."""

    for_us: int


class GaveUp(Outcome, frozen=True, tag=True):
    """``raise Fail``: never to be tried again."""

    message: str = ""


class CancelledItself(Outcome, frozen=True, tag=True):
    """``raise Cancel``, or it obeyed a request to."""

    message: str = ""


class Overran(Outcome, frozen=True, tag=True):
    """It ended itself because its time was over, as it was told."""

    message: str = ""


class AskedForReview(Outcome, frozen=True, tag=True):
    """``raise NeedsReview(reason)``."""

    message: str = ""


class InDoubt(Outcome, frozen=True, tag=True):
    """A call by ``ctx.external`` was begun, and nobody can say whether it happened: what the handler made of that is no end."""

    message: str = ""


class Unstarted(Outcome, frozen=True, tag=True):
    """It was claimed and never began: no attempt, no crash."""


class Unfit(Outcome, frozen=True, tag=True):
    """Its result, or a task it submitted, cannot be stored."""

    message: str = ""


class Absent(Outcome, frozen=True, tag=True):
    """The marker in the other database has no result, and no earlier attempt can write one any more."""


class Unreached(Outcome, frozen=True, tag=True):
    """The marker in the other database could not be asked; the handler's code has not run."""

    message: str = ""


class Lost(Outcome, frozen=True, tag=True):
    """The lease of its worker ran out. ``started``: whether it is known to have begun."""

    started: bool = True


class Crashed(Outcome, frozen=True, tag=True):
    """Its own process died while it, and no other, ran."""

    message: str = ""


class Killed(Outcome, frozen=True, tag=True):
    """It was killed: over its limit or without a heartbeat (``limit``), past the grace of a cancel (``cancelled``), or by a drain (``drain``)."""

    why: str
    message: str = ""


AnyOutcome = (
    Succeeded
    | Raised
    | RetryAsked
    | Snoozed
    | GaveUp
    | CancelledItself
    | Overran
    | AskedForReview
    | InDoubt
    | Unstarted
    | Unfit
    | Absent
    | Unreached
    | Lost
    | Crashed
    | Killed
)


class Committed(Outcome, frozen=True, tag=True):
    """It succeeded, and its end is written already: with its effect, in its handler's own transaction. Nothing is left to settle."""


Reported = AnyOutcome | Committed
"""What a pool may say of an attempt."""
UNCHOSEN = (Lost, Crashed, Killed)
"""Ends the handler did not choose: what becomes of the task depends on its declared effects."""
