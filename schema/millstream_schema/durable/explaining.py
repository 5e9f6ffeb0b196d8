"""One line that says why a task is not running: a pure function of its row and of facts gathered about it.

Used by clients. It names only what belongs to the task's namespace, and the workers. What must never happen here: another tenant's task, key or number in a line; a guess
told as a fact.
"""

from __future__ import annotations

import datetime as dt

import msgspec

from ..reasons import one_line
from .gates import Gate, available_us, filled, rate_text, tokens
from .progress import ProgressRow, told
from .records import AttemptRow, PermitRow, TaskRow
from .states import TaskState

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The worker session that holds the task. ``gone``: its lease was taken away."""

    name: str
    expires_us: int
    gone: bool


class WhyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked up for one task. ``now_us``: the database's time. ``serving``: live sessions that serve its queue, ``able``: those of them that have its handler,
    ``elsewhere``: sessions that have the handler and serve other queues. ``ahead``: tasks of its lane that are taken before it, as far as they were counted.
    ``gate``: what blocks it, or stands before its queue. ``progress``: what its attempt told last.
    ``open_calls``: calls by ``ctx.external`` that were begun and whose outcome is not known.
    """

    now_us: int
    holder: Holder | None = None
    permit: PermitRow | None = None
    gate: Gate | None = None
    open_calls: tuple[str, ...] = ()
    serving: int = 0
    able: int = 0
    elsewhere: int = 0
    ahead: int = 0
    progress: ProgressRow | None = None


def why(task: TaskRow, facts: WhyFacts) -> str:
    """Why it is not running, or what it is doing."""
    match task.state:
        case TaskState.SCHEDULED:
            return _due(task, facts)
        case TaskState.RETRY_WAIT:
            return f"{_due(task, facts)}: {_after(task)}{_open(facts)}"
        case TaskState.READY if task.ending is not None:
            return f"its end is decided ({task.cause}); a worker asks database {task.marker!r} first whether an attempt has committed there"
        case TaskState.READY if task.blocked_by:
            return _blocked(task, facts)
        case TaskState.READY:
            return _ready(task, facts)
        case TaskState.DISPATCHED | TaskState.RUNNING:
            return _held(task, facts)
        case TaskState.UNKNOWN:
            said = f": {one_line(task.reason)}" if task.reason else ""
            return f"it is in review since {instant(task.changed_us)} ({task.cause or 'unknown'}){said}{_told(facts)}{_open(facts)}"
        case _:
            replaced = f"; task {task.superseded_by} followed it" if task.superseded_by else ""
            return f"it is over since {instant(task.settled_us)}: {task.state}" + (f" ({task.cause})" if task.cause else "") + replaced


def _due(task: TaskRow, facts: WhyFacts) -> str:
    left = (task.wake_us or 0) - facts.now_us
    if left <= 0:
        return f"it was due at {instant(task.wake_us or 0)} and the next sweep or claim takes it up: is a worker running?"
    return f"it is due at {instant(task.wake_us or 0)}, in {_seconds(left)}"


def _open(facts: WhyFacts) -> str:
    return f"; not known is whether these were called: {', '.join(facts.open_calls)}" if facts.open_calls else ""


def _after(task: TaskRow) -> str:
    return f"attempt {task.starts + 1} follows after {one_line(task.reason) or task.cause or 'a pause'}"


def _blocked(task: TaskRow, facts: WhyFacts) -> str:
    """By what, without the namespace it is told in."""
    kind, _, key = (task.blocked_by or "").partition(":")
    own = key.replace(f"{task.namespace}/", "", 1)
    gate = facts.gate
    if gate is not None and gate.paused:
        return _paused(gate)
    if kind in ("pause", "rate"):
        return (
            _metered(gate, facts.now_us)
            if gate is not None and gate.limits
            else f"what kept it is over ({kind} of {own}): the next sweep moves it up"
        )
    if kind == "permit" and facts.permit is not None:
        p = facts.permit
        return f"permit {own!r} is paused" if p.paused else f"it waits for permit {own!r}: {p.held} of {p.capacity} are held"
    return f"it waits for {kind} {own!r}"


def _paused(gate: Gate) -> str:
    said = f": {one_line(gate.paused_why)}" if gate.paused_why else ""
    return f"{gate.kind.value} {gate.name!r} is paused by {gate.paused_by} since {instant(gate.paused_us)}{said}"


def _metered(gate: Gate, now_us: int) -> str:
    left = max(0, available_us(filled(gate, now_us)) - now_us)
    return f"{gate.kind.value} {gate.name!r} starts {rate_text(gate)}: the next token is there in {_seconds(left)}"


def _ready(task: TaskRow, facts: WhyFacts) -> str:
    gate = facts.gate
    if gate is not None and gate.paused:
        return _paused(gate)
    if gate is not None and gate.limits and not tokens(filled(gate, facts.now_us)):
        return _metered(gate, facts.now_us)
    if not facts.serving:
        others = f"; of other queues {_workers(facts.elsewhere)} handler {task.handler!r}" if facts.elsewhere else ""
        return f"no live worker serves queue {task.queue!r}{others}"
    if not facts.able:
        return f"{_workers(facts.serving)} queue {task.queue!r}, and none has handler {task.handler!r}"
    waits = f"it waits for its turn since {instant(task.changed_us)}: {_workers(facts.able)} its queue and handler"
    return f"{waits}, ahead of it in its queue: {facts.ahead}" if facts.ahead else waits


def _held(task: TaskRow, facts: WhyFacts) -> str:
    began = task.state is TaskState.RUNNING
    what = f"it runs since {instant(task.started_us)}" if began else f"it was claimed at {instant(task.claimed_us)} and has not begun"
    asked = ("; its end is asked for" if task.cancel else "") + _told(facts)
    h = facts.holder
    if h is None:
        return f"{what}; its session {task.session} is unknown: the sweep takes it back{asked}"
    if h.gone or h.expires_us <= facts.now_us:
        return (
            f"{what} at {h.name} (session {task.session}), whose lease ran out at {instant(h.expires_us)}: the sweep takes it back{asked}"
        )
    return f"{what} at {h.name} (session {task.session}), whose lease holds for {_seconds(h.expires_us - facts.now_us)}{asked}"


def _told(facts: WhyFacts) -> str:
    row = facts.progress
    return "" if row is None else f"; {told(row)}, told {_seconds(max(0, facts.now_us - row.at_us))} ago"


def conflicts(attempt: AttemptRow, task: TaskRow) -> bool:
    """Whether what an attempt reported too late is another end than the one that counts: two runs may both have had their effect."""
    if not attempt.late or attempt.outcome == "Reviewed" or not (task.state.settled or task.state is TaskState.UNKNOWN):
        return False
    succeeded = task.state is TaskState.SUCCEEDED
    if attempt.outcome != "Succeeded" or not succeeded:
        return (attempt.outcome == "Succeeded") != succeeded
    try:
        return bool(msgspec.json.decode(attempt.detail)["result"] != task.result)
    except (msgspec.DecodeError, KeyError, TypeError):
        return True  # cut off: it cannot be told to be the same


def _workers(count: int) -> str:
    return "1 live worker serves" if count == 1 else f"{count} live workers serve"


def instant(us: int) -> str:
    """UTC, to the second."""
    return (_EPOCH + dt.timedelta(microseconds=us)).strftime("%Y-%m-%d %H:%M:%S UTC")


def _seconds(us: int) -> str:
    seconds = us / 1e6
    return f"{seconds:.1f} s" if seconds < 120 else str(dt.timedelta(seconds=round(seconds)))
