"""Acts on many tasks at once, and the link from a task to the one that does it again. Pure.

An act is planned first: a dry run counts what it would reach and gives a signed token; the token alone carries it out. What must never happen here: an act that reaches a task
which came in after its dry run; a retry that is not linked to what it repeats.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from ..canonical import fingerprint
from ..errors import ConfigurationError, TokenRefused
from .finding import TaskFilter
from .records import NewTask, Policy, TaskRow
from .states import HELD, SETTLED, TaskState
from .tokens import Seal

TOKEN_VERSION = 1
TOKEN_US = 24 * 3600 * 1_000_000
"""How long a dry run's token can begin its act. One that has begun can always be ended with it."""
T = TaskState


class Act(enum.StrEnum):
    CANCEL = "cancel"
    RETRY = "retry"
    PURGE = "purge"


REACHES: Mapping[Act, frozenset[TaskState]] = {
    Act.CANCEL: frozenset({T.SCHEDULED, T.READY, T.RETRY_WAIT}) | HELD,
    Act.RETRY: frozenset({T.FAILED, T.CANCELLED, T.EXPIRED}),
    Act.PURGE: SETTLED,
}
"""States in which an act can do something. UNKNOWN is for a review."""


class OperationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One act, by whom and why, how far it is. ``task``: of an act on one; ``filter``: of one on many, as JSON.

    ``instant_us``: when its dry run was; ``expected``: what that counted. ``seen``: tasks looked at so far; ``done``: acted on, the others had changed or are still needed.
    ``after_us``, ``after_id``: behind which task it goes on.
    """

    id: str
    namespace: str
    act: Act
    task: str
    filter: str
    instant_us: int
    expected: int
    reason: str
    actor: str
    after_us: int
    after_id: str
    seen: int
    done: int
    over: int
    created_us: int
    changed_us: int
    rev: int


class Dry(msgspec.Struct, frozen=True, array_like=True):
    """What a token says. ``id``: of the operation it begins."""

    version: int
    id: str
    namespace: str
    act: Act
    filter: bytes
    instant_us: int
    expected: int


def reached(act: Act, f: TaskFilter) -> TaskFilter:
    """The filter cut to the states in which the act can do something. Raises ConfigurationError when none is left."""
    states = tuple(sorted(set(f.states) & REACHES[act] if f.states else REACHES[act]))
    if not states:
        raise ConfigurationError(f"{act} reaches no task in state {', '.join(f.states)}: it does {', '.join(sorted(REACHES[act]))}")
    return msgspec.structs.replace(f, states=states)


def dry_token(seal: Seal, operation: str, namespace: str, act: Act, f: TaskFilter, instant_us: int, expected: int) -> str:
    """Text that carries the act out."""
    return seal.close(Dry(TOKEN_VERSION, operation, fingerprint(namespace), act, msgspec.json.encode(f), instant_us, expected))


def dry_of(seal: Seal, namespace: str, token: str) -> tuple[Dry, TaskFilter]:
    """What a token says. Raises TokenRefused."""
    dry = seal.open(token, Dry)
    if dry.version != TOKEN_VERSION:
        raise TokenRefused(f"the token has version {dry.version}, this build knows {TOKEN_VERSION}: make a new dry run")
    if dry.namespace != fingerprint(namespace):
        raise TokenRefused("the token is of another namespace: make a dry run in this one")
    return dry, msgspec.json.decode(dry.filter, type=TaskFilter)


def linked_retry(task: TaskRow, task_id: str, *, origin: str, actor: str) -> NewTask:
    """The task that does a settled one again: same content and root, linked. Its key makes it one however often it is asked for. Times of the old one do not bind it."""
    return NewTask(
        id=task_id, namespace=task.namespace, handler=task.handler, key=f"{task.id}/retry", digest=task.digest, queue=task.queue, args=task.args, effects=task.effects,
        policy=msgspec.json.decode(task.policy, type=Policy), priority=task.priority, permit=task.permit, ordered=bool(task.ordered),
        business_key=task.business_key, origin=origin, actor=actor, root=task.root, retry_of=task.id,
    )  # fmt: skip


def compensation(task: TaskRow, wanted: NewTask) -> NewTask:
    """The task that makes up for one whose review says so: of any handler, found under the same business key. Its key makes it one however often it is asked for."""
    return msgspec.structs.replace(
        wanted, key=f"{task.id}/compensation", business_key=wanted.business_key or task.business_key, origin="compensation"
    )
