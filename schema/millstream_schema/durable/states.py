"""States of a durable task and their transitions, one table; CHECK constraints, guards and docs derive from it.

::

    SCHEDULED ──▶ READY ──▶ DISPATCHED ──▶ RUNNING ──▶ SUCCEEDED
        │          │ ▲ ▲        │             │ ├────▶ FAILED
        │          │ │ └────────┘ given back  │ ├────▶ CANCELLED
        │          │ └── RETRY_WAIT ◀─────────┘ └────▶ UNKNOWN ──▶ SUCCEEDED | FAILED
        └──────────┴──▶ CANCELLED | EXPIRED

READY and RETRY_WAIT become UNKNOWN, too, where a call by ``ctx.external`` is in doubt and nobody can be asked about it any more: cancelled, or too late to start.
DISPATCHED is claimed and not known to have started; its effects are still impossible or, for an attempt whose start is folded into the claim, harmless to repeat. UNKNOWN is in
review: nobody knows whether the effect happened, so nothing happens by itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class TaskState(enum.StrEnum):
    SCHEDULED = "SCHEDULED"
    READY = "READY"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    RETRY_WAIT = "RETRY_WAIT"
    UNKNOWN = "UNKNOWN"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

    @property
    def settled(self) -> bool:
        """Whether the task is over. UNKNOWN is not."""
        return self in SETTLED

    @property
    def held(self) -> bool:
        """Whether a worker session holds it."""
        return self in HELD

    @property
    def waiting(self) -> bool:
        """Whether it waits for an instant."""
        return self in WAITING


T = TaskState
SETTLED = frozenset({T.SUCCEEDED, T.FAILED, T.CANCELLED, T.EXPIRED})
HELD = frozenset({T.DISPATCHED, T.RUNNING})
AMISS = frozenset({T.FAILED, T.CANCELLED, T.EXPIRED, T.UNKNOWN})
WAITING = frozenset({T.SCHEDULED, T.RETRY_WAIT})
_ENDS = frozenset({T.READY, T.RETRY_WAIT, T.SUCCEEDED, T.FAILED, T.CANCELLED, T.EXPIRED, T.UNKNOWN})

TASK_TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = {
    T.SCHEDULED: frozenset({T.READY, T.CANCELLED, T.EXPIRED}),
    T.READY: frozenset({T.DISPATCHED, T.RUNNING, T.CANCELLED, T.EXPIRED, T.UNKNOWN}),
    T.DISPATCHED: _ENDS | {T.RUNNING},
    T.RUNNING: _ENDS,
    T.RETRY_WAIT: frozenset({T.READY, T.CANCELLED, T.EXPIRED, T.UNKNOWN}),
    T.UNKNOWN: frozenset({T.SUCCEEDED, T.FAILED}),
    T.SUCCEEDED: frozenset(),
    T.FAILED: frozenset(),
    T.CANCELLED: frozenset(),
    T.EXPIRED: frozenset(),
}


def may_become(before: TaskState, after: TaskState) -> bool:
    """Whether the table has this transition."""
    return after in TASK_TRANSITIONS[before]


class Effects(enum.StrEnum):
    """What repeating an attempt would do, as its author declares it."""

    IDEMPOTENT = "idempotent"
    """Doing it twice is doing it once."""
    TRANSACTIONAL = "transactional"
    """All it does commits with its result, or not at all."""
    EXTERNAL = "external"
    """It reaches outside: whether it happened cannot be told from here. What is undeclared is this."""


class Cause(enum.StrEnum):
    """Why a task or an attempt is in its state, apart from the state itself."""

    NONE = ""
    ERROR = "error"
    """The handler raised."""
    ATTEMPTS = "attempts"
    """It raised and no attempt is left."""
    HANDLER = "handler"
    """The handler said so: Fail, Cancel, Retry, Snooze, NeedsReview."""
    SNOOZED = "snoozed"
    """It put itself off more often than is allowed."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    """Its total deadline has passed."""
    START_BY = "start_by"
    """It did not start in time."""
    LIMIT = "limit"
    """It ran longer than its limit, or its heartbeat stopped, and was killed."""
    LOST = "lost"
    """Its worker's lease ran out."""
    CRASH = "crash"
    """Its process died while it ran."""
    POISON = "poison"
    """It took its process along too often."""
    DRAIN = "drain"
    """Its worker shut down before it was over."""
    MARKER = "marker"
    """The database its effects are in has to be asked first."""
    INTENT = "intent"
    """An external call was begun whose outcome is not known."""
    RESULT = "result"
    """Its result or a task it submitted cannot be stored."""
    REVIEWED = "reviewed"
    """A person decided."""
    GIVEN_BACK = "given_back"
    """It never started."""
