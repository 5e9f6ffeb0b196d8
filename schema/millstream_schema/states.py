"""States and their transitions, one table each; CHECK constraints, guards and docs derive from them.

A job::

    PENDING ──▶ DEPLOYING ──▶ RUNNING ──▶ FINISHED
       │  ▲       │   ▲          │  └────▶ STOPPING ──▶ STOPPED
       ▼  │       ▼   │          ▼             │
    WAITING_FOR_  RESTARTING ◀───┘             ▼
      RESOURCES       └──▶ STOPPING         FAILED

An epoch: ``TRIGGERED → PRECOMMITTED → DURABLE → COMMITTED``, or ``ABORTED`` before DURABLE.
An assignment: ``ASSIGNED → STARTED → READY → FINISHED``, or ``FAILED`` from any but FINISHED.

Read by the store's tables, the coordinator and the documentation. What must never happen here: a state without a row in its table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class JobState(enum.StrEnum):
    PENDING = "PENDING"
    WAITING_FOR_RESOURCES = "WAITING_FOR_RESOURCES"
    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FINISHED = "FINISHED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        return self in (JobState.STOPPED, JobState.FINISHED, JobState.FAILED)


class Desired(enum.StrEnum):
    """What the user wants of a job; apart from what is observed."""

    RUN = "RUN"
    CANCEL = "CANCEL"
    DRAIN = "DRAIN"
    SUSPEND = "SUSPEND"


class EpochState(enum.StrEnum):
    TRIGGERED = "TRIGGERED"
    PRECOMMITTED = "PRECOMMITTED"
    DURABLE = "DURABLE"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


class AssignmentState(enum.StrEnum):
    ASSIGNED = "ASSIGNED"
    STARTED = "STARTED"
    READY = "READY"
    FINISHED = "FINISHED"
    FAILED = "FAILED"


class NodeState(enum.StrEnum):
    ACTIVE = "ACTIVE"
    DRAINING = "DRAINING"
    GONE = "GONE"


class SplitOwner(enum.StrEnum):
    UNASSIGNED = "UNASSIGNED"
    ASSIGNED = "ASSIGNED"
    FINISHED = "FINISHED"


J, E, A = JobState, EpochState, AssignmentState
JOB_TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    J.PENDING: frozenset({J.WAITING_FOR_RESOURCES, J.DEPLOYING, J.STOPPING, J.STOPPED, J.FAILED}),
    J.WAITING_FOR_RESOURCES: frozenset({J.DEPLOYING, J.STOPPING, J.STOPPED, J.FAILED, J.RESTARTING}),
    J.DEPLOYING: frozenset({J.RUNNING, J.RESTARTING, J.STOPPING, J.FAILED, J.STOPPED}),
    J.RUNNING: frozenset({J.RESTARTING, J.STOPPING, J.FINISHED, J.STOPPED, J.FAILED}),
    J.RESTARTING: frozenset({J.DEPLOYING, J.WAITING_FOR_RESOURCES, J.STOPPING, J.FAILED, J.STOPPED}),
    J.STOPPING: frozenset({J.STOPPED, J.FAILED, J.FINISHED}),
    J.STOPPED: frozenset({J.PENDING, J.STOPPING}),
    J.FINISHED: frozenset({J.PENDING, J.STOPPING}),
    J.FAILED: frozenset({J.PENDING, J.STOPPING}),
}
EPOCH_TRANSITIONS: Mapping[EpochState, frozenset[EpochState]] = {
    E.TRIGGERED: frozenset({E.PRECOMMITTED, E.DURABLE, E.ABORTED}),
    E.PRECOMMITTED: frozenset({E.DURABLE, E.ABORTED}),
    E.DURABLE: frozenset({E.COMMITTED}),
    E.COMMITTED: frozenset(),
    E.ABORTED: frozenset(),
}
ASSIGNMENT_TRANSITIONS: Mapping[AssignmentState, frozenset[AssignmentState]] = {
    A.ASSIGNED: frozenset({A.STARTED, A.FAILED}),
    A.STARTED: frozenset({A.READY, A.FAILED, A.FINISHED}),
    A.READY: frozenset({A.FINISHED, A.FAILED}),
    A.FINISHED: frozenset(),
    A.FAILED: frozenset(),
}


def before_epoch(after: EpochState) -> tuple[EpochState, ...]:
    """States from which an epoch may go to ``after``."""
    return tuple(s for s, then in EPOCH_TRANSITIONS.items() if after in then)


def before_assignment(after: AssignmentState) -> tuple[AssignmentState, ...]:
    """States from which an assignment may go to ``after``."""
    return tuple(s for s, then in ASSIGNMENT_TRANSITIONS.items() if after in then)


def may(before: JobState, after: JobState) -> bool:
    """Whether a job may go from ``before`` to ``after``."""
    return before == after or after in JOB_TRANSITIONS[before]
