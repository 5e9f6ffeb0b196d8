"""Running one attempt: a pipe of named steps (find, decode, call, encode), and the one place where exceptions become outcomes.

Called by the pools, in whatever process or thread they run handlers. What must never happen here: an exception that gets past, an outcome that says more than was seen.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any

import structlog

from millstream_schema.durable.decisions import LONGEST_RETRY_US
from millstream_schema.durable.outcomes import (
    AnyOutcome,
    AskedForReview,
    CancelledItself,
    GaveUp,
    Raised,
    RetryAsked,
    Snoozed,
    Succeeded,
    Unfit,
    Unstarted,
)
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.durable.requests import Options, decode_arguments, encode_result
from millstream_schema.errors import CodecError, TaskInvalid, UnknownHandler
from millstream_schema.ports import Ids

from .handlers import Handler, HandlerRegistry

log = structlog.get_logger(__name__)
TEXT_KEPT = 20_000
"""Characters of an exception's text that are kept."""


class Verb(Exception):
    """Root of what a handler raises to say how its attempt ends."""


class Retry(Verb):
    """Try again ``after`` seconds, or by the policy's back-off; counts as a failed attempt."""

    def __init__(self, message: str = "", *, after: float | None = None) -> None:
        self.after = after
        super().__init__(message)


class Snooze(Verb):
    """Put off for ``seconds``; no attempt counts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"for {seconds} s")


class Fail(Verb):
    """The task has failed for good."""


class Cancel(Verb):
    """The task is cancelled."""


class NeedsReview(Verb):
    """A person has to look: nothing more happens by itself."""


class TaskContext:
    """What a handler may know of its attempt and ask of it. ``permit_seq``: hand it to the guarded resource, which refuses smaller ones."""

    def __init__(self, task: TaskRow, registry: HandlerRegistry, ids: Ids, told: Callable[[], bool]) -> None:
        self._task = task
        self._told = told
        self._registry = registry
        self._ids = ids
        self.submits: list[NewTask] = []

    @property
    def task_id(self) -> str:
        return self._task.id

    @property
    def key(self) -> str:
        return self._task.key

    @property
    def attempt(self) -> int:
        """Number of this start, from 1."""
        return max(1, self._task.starts)

    @property
    def fence(self) -> int:
        """Only grows: a later attempt's is larger."""
        return self._task.fence

    @property
    def cancelled(self) -> bool:
        """Whether this attempt's end is asked for; ``raise Cancel`` obeys."""
        return self._told()

    @property
    def permit_seq(self) -> int:
        return self._task.permit_seq

    def submit(self, handler: str | Handler, /, *args: Any, key: str = "", options: Options | None = None, **kwargs: Any) -> str:
        """Another task, which comes in when this attempt succeeds and not otherwise; its id. Without ``key`` it is this task's key and a number."""
        found = handler if isinstance(handler, Handler) else self._registry.get(handler)
        task_id = self._ids.new("task", 10)
        own = key or f"{self._task.id}/{len(self.submits)}"
        origin = f"task:{self._task.id}"
        self.submits.append(
            found.request(self._task.namespace, task_id, own, args, kwargs, options or Options(), actor=self._task.actor, origin=origin)
        )
        return task_id


def execute(
    task: TaskRow, registry: HandlerRegistry, ids: Ids, told: Callable[[], bool] = lambda: False
) -> tuple[AnyOutcome, tuple[NewTask, ...]]:
    """One attempt, to its end. ``told``: whether its end is asked for."""
    try:
        handler = registry.get(task.handler)
        args, kwargs = handler.decode(*decode_arguments(task.args))
    except UnknownHandler:
        return Unstarted(), ()
    except (TaskInvalid, CodecError) as exc:
        return GaveUp(_text(exc)), ()
    except BaseException as exc:  # a validator of the user's own may raise anything
        return outcome_of(exc), ()
    context = TaskContext(task, registry, ids, told)
    try:
        value = handler.function(context, *args, **kwargs) if handler.wants_context else handler.function(*args, **kwargs)
    except BaseException as exc:
        return outcome_of(exc), ()
    try:
        return Succeeded(encode_result(value)), tuple(context.submits)
    except TaskInvalid as exc:
        return Unfit(_text(exc)), ()


def outcome_of(error: BaseException) -> AnyOutcome:
    """The one place where an exception becomes an outcome. It never raises, and what it gives can be sent and stored."""
    said = _text(error)
    match error:
        case Retry() | Snooze():
            asked = getattr(error, "seconds" if isinstance(error, Snooze) else "after", None)
            micros = _micros(asked)
            if isinstance(error, Retry) and (asked is None or micros is not None):
                return RetryAsked(micros, said)
            if micros is not None:
                return Snoozed(micros)
            return Raised("ValueError", f"{type(error).__name__} needs a finite number of seconds, not {_text(asked)}")
        case Fail():
            return GaveUp(said)
        case Cancel():
            return CancelledItself(said)
        case NeedsReview():
            return AskedForReview(said)
        case _:
            where = traceback.extract_tb(error.__traceback__)
            at = f" (at {where[-1].name}, line {where[-1].lineno})" if where else ""
            return Raised(type(error).__name__, f"{said}{at}")


def _micros(seconds: Any) -> int | None:
    """Seconds as microseconds that fit a column; None for what is no finite number."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return None
    return int(max(-1.0, min(seconds, LONGEST_RETRY_US / 1e6)) * 1e6)


def _text(value: Any) -> str:
    """What it says, as every database takes it: no NUL, no half characters, not too long. Its own ``__str__`` may raise anything."""
    try:
        said = str(value)
    except Exception:
        return f"({type(value).__name__} whose text cannot be had)"
    return said[:TEXT_KEPT].encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
