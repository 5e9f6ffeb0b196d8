"""Rows of durable tasks as frozen values: what the statements give and the decisions take."""

from __future__ import annotations

import msgspec

from .states import Cause, Effects, TaskState


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How a handler's tasks are tried, kept with each task as it was when the task was submitted. Times in milliseconds.

    ``attempts``: how often it may raise; ``crashes``: how often it may take its process along; ``losses``: how often its worker may be lost under it before a person is asked;
    ``snoozes``: how often it may put itself off. ``delay_ms`` doubles with each failure up to ``max_delay_ms``; ``jitter`` is the part of a delay that chance decides.
    ``run_ms``, ``grace_ms``: the soft limit of one attempt and what is added until it is killed (0: none). ``heartbeat_ms``: how long its process may be silent.
    """

    attempts: int = 1
    delay_ms: int = 1_000
    max_delay_ms: int = 600_000
    jitter: float = 0.2
    crashes: int = 3
    losses: int = 20
    snoozes: int = 1_000
    run_ms: int = 0
    grace_ms: int = 5_000
    heartbeat_ms: int = 30_000
    permit_capacity: int = 1
    """Capacity of the permit it needs, if no claim has made that permit yet."""
    start_by_ms: int = 0
    deadline_ms: int = 0
    """As a submission may set them, for those that do not (0: none)."""
    intents_only: bool = False
    """All effects go through ``ctx.external``: an attempt that ended without an open intent had none that are unknown."""
    reconciles: bool = False
    """Its handler has a hook that can tell what became of an open intent: the next attempt asks it before anything else."""


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One durable task. Texts that hold JSON stay text: whoever needs them decodes them."""

    id: str
    namespace: str
    handler: str
    key: str
    digest: str
    queue: str
    business_key: str
    state: TaskState
    cause: Cause
    reason: str
    effects: Effects
    policy: str
    args: str
    priority: int
    fence: int
    token: str
    session: str
    claim: str
    failures: int
    crashes: int
    losses: int
    snoozes: int
    starts: int
    cancel: int
    permit: str
    ordered: int
    permit_held: int
    permit_seq: int
    blocked_by: str | None
    ready_lane: str | None
    rank: int
    wake_us: int | None
    due_us: int
    start_by_us: int
    deadline_us: int
    claimed_us: int
    started_us: int
    settled_us: int
    created_us: int
    changed_us: int
    result: str
    error: str
    origin: str
    root: str
    retry_of: str
    superseded_by: str
    actor: str
    rev: int
    marker: str = ""
    ending: str | None = None
    error_class: str = ""
    """Class of the exception it raised last."""
    amiss_us: int | None = None
    """When it was created, if it failed, was cancelled, expired or is in review: those are looked for, and rare."""
    tokens: int = 0
    """Of which gates it took a token when it was claimed, as bits."""
    limit_us: int | None = None
    """Until when it has to start, while nobody holds it and there is such a limit."""
    open_intents: int = 0
    """Calls by ``ctx.external`` that were begun by its attempts and whose outcome is not known. No task that is over has any."""

    @property
    def lane(self) -> str:
        return lane(self.namespace, self.queue)

    @property
    def permit_id(self) -> str:
        """Primary key of the permit it needs; empty: none."""
        return permit_id(self.namespace, self.permit) if self.permit else ""


def lane(namespace: str, queue: str) -> str:
    """Whom fairness is between: one queue of one namespace. Neither may hold a slash."""
    return f"{namespace}/{queue}"


def permit_id(namespace: str, key: str) -> str:
    """Permits of two namespaces never meet."""
    return f"{namespace}/{key}"


class NewTask(msgspec.Struct, frozen=True, kw_only=True):
    """A request, complete: what its submission stores. ``due_us``, ``expires_us``:
    instants; ``delay_us``, ``start_by_us``, ``deadline_us``: microseconds from acceptance; 0: none."""

    id: str
    namespace: str
    handler: str
    key: str
    digest: str
    queue: str
    args: str
    effects: Effects
    policy: Policy
    priority: int = 0
    delay_us: int = 0
    due_us: int = 0
    expires_us: int = 0
    start_by_us: int = 0
    deadline_us: int = 0
    permit: str = ""
    ordered: bool = False
    business_key: str = ""
    origin: str = ""
    root: str = ""
    retry_of: str = ""
    actor: str = ""


class Receipt(msgspec.Struct, frozen=True):
    """Answer to a submission. ``replayed``: the key was known with the same content; ``conflict``: the digest it is known with, when the content differs."""

    task: str
    state: TaskState
    digest: str
    replayed: bool = False
    conflict: str = ""


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One ended attempt, or what one reported too late: evidence, never a decision."""

    task: str
    fence: int
    number: int
    session: str
    outcome: str
    cause: Cause
    detail: str
    late: int
    started_us: int
    ended_us: int


class PermitRow(msgspec.Struct, frozen=True, kw_only=True):
    """A resource that ``capacity`` tasks may use at once. ``seq`` only grows: it is handed to the resource, which refuses older writes.

    ``changed_by``: who set the capacity last, and when; empty: nobody, it is the handler's.
    """

    id: str
    namespace: str
    key: str
    capacity: int
    held: int
    seq: int
    paused: int
    rev: int
    changed_by: str = ""
    changed_us: int = 0
