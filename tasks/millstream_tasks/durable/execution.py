"""Running one attempt: a pipe of named steps (find, decode, call, encode), and the one place where exceptions become outcomes.

Called by the pools, in whatever process or thread they run handlers. What must never happen here: an exception that gets past, an outcome that says more than was seen.
"""

from __future__ import annotations

import math
from typing import Any

import structlog

from millstream_schema.durable.decisions import LONGEST_RETRY_US
from millstream_schema.durable.outcomes import (
    Absent,
    AnyOutcome,
    AskedForReview,
    CancelledItself,
    Committed,
    GaveUp,
    InDoubt,
    Overran,
    Raised,
    Reported,
    RetryAsked,
    Snoozed,
    Succeeded,
    Unfit,
    Unreached,
    Unstarted,
)
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.durable.requests import decode_arguments, encode_result
from millstream_schema.errors import CodecError, ExternalRefused, Fenced, StoreError, TaskInvalid, TransactionRefused, UnknownHandler

from .context import TaskContext
from .external import InDoubt as InDoubtSignal
from .handlers import Handler, HandlerRegistry
from .surroundings import Surroundings
from .texts import text_of, where_of
from .transactions import MarkerSays, before
from .verbs import Cancel, Fail, NeedsReview, Retry, Snooze

log = structlog.get_logger(__name__)


def execute(task: TaskRow, registry: HandlerRegistry, around: Surroundings) -> tuple[Reported, tuple[NewTask, ...]]:
    """One attempt, to its end."""
    try:
        return _execute(task, registry, around)
    finally:
        around.telling.close()


def _execute(task: TaskRow, registry: HandlerRegistry, around: Surroundings) -> tuple[Reported, tuple[NewTask, ...]]:
    if task.marker:
        found = _before(task, around)
        if found is not None:
            return found
    try:
        handler = registry.get(task.handler)
        args, kwargs = handler.decode(*decode_arguments(task.args))
        context = TaskContext(task, registry, around)
    except UnknownHandler:
        return Unstarted(), ()
    except (TaskInvalid, CodecError) as exc:
        return GaveUp(text_of(exc)), ()
    except BaseException as exc:  # a validator of the user's own may raise anything
        return outcome_of(exc), ()
    doubted = _asked(context)
    if doubted is not None:
        return doubted, ()
    try:
        value = handler.run(context, args, kwargs)
    except BaseException as exc:
        if not context.settled and context.calls.doubt is None:
            outcome = _failed(exc, handler, around.told(), context.overdue)
            if isinstance(outcome, Raised):
                around.raised(exc)
            return outcome, ()
        if context.settled and not isinstance(exc, MarkerSays):
            log.warning("a handler raised after its transaction had committed; its task has succeeded", task=task.id, error=text_of(exc))
    if context.work.committed:
        return Committed(), ()
    if context.work.sealed is not None:
        return context.work.sealed, context.work.sealed_submits
    if context.work.unknown is not None:
        return outcome_of(context.work.unknown), ()  # it may have committed: what the handler made of that is no end
    if context.calls.doubt is not None:
        return outcome_of(context.calls.doubt), ()  # likewise
    try:
        return Succeeded(encode_result(value)), tuple(context.submits)
    except TaskInvalid as exc:
        return Unfit(text_of(exc)), ()


def _before(task: TaskRow, around: Surroundings) -> tuple[AnyOutcome, tuple[NewTask, ...]] | None:
    """What the marker says of a task that went to another database before; None: its code is to run."""
    try:
        succeeded, submits = before(task, around)
    except Fenced:
        return Unreached("a later attempt is there already"), ()
    except Exception as exc:
        return Unreached(text_of(exc)), ()
    if succeeded is not None:
        return succeeded, submits
    return (Absent(), ()) if task.ending is not None else None


def _asked(context: TaskContext) -> AnyOutcome | None:
    """What became of calls to the outside that earlier attempts began is asked before the handler's code runs; None: nothing is in doubt."""
    try:
        context.calls.settle_doubts()
    except StoreError as exc:
        log.warning("what became of a call cannot be asked now; the task is given back", task=context.task_id, error=text_of(exc))
        return Unstarted()
    except BaseException as exc:
        return outcome_of(exc)
    return None


def _failed(error: BaseException, handler: Handler, told: bool, overdue: bool) -> AnyOutcome:
    """What an exception out of the handler means, with what its author declared and what the attempt was told."""
    if isinstance(error, Cancel) and overdue and not told:
        return Overran(text_of(error))  # it obeyed its limit: nobody wants the task cancelled
    outcome = outcome_of(error)
    if isinstance(outcome, Raised) and not handler.retries(error):
        return Raised(outcome.error, outcome.message, retryable=False)
    return outcome


def outcome_of(error: BaseException) -> AnyOutcome:
    """The one place where an exception becomes an outcome. It never raises, and what it gives can be sent and stored."""
    said = text_of(error)
    match error:
        case Retry() | Snooze():
            asked = getattr(error, "seconds" if isinstance(error, Snooze) else "after", None)
            micros = _micros(asked)
            if isinstance(error, Retry) and (asked is None or micros is not None):
                return RetryAsked(micros, said)
            if micros is not None:
                return Snoozed(micros)
            return Raised("ValueError", f"{type(error).__name__} needs a finite number of seconds, not {text_of(asked)}")
        case Fail():
            return GaveUp(said)
        case Cancel():
            return CancelledItself(said)
        case NeedsReview():
            return AskedForReview(said)
        case InDoubtSignal():
            return InDoubt(said)
        case TaskInvalid():
            return Unfit(said)  # what it submits or gives cannot be stored: the same at every attempt
        case _:
            wanted = not isinstance(error, TransactionRefused | ExternalRefused)
            return Raised(type(error).__name__, f"{said}{where_of(error)}", retryable=wanted)


def _micros(seconds: Any) -> int | None:
    """Seconds as microseconds that fit a column; None for what is no finite number."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return None
    return int(max(-1.0, min(seconds, LONGEST_RETRY_US / 1e6)) * 1e6)
