"""Schedules: their states, rows and rules, and pure decisions: what is due now, what overlaps, when is the next.

::

    schedule   ACTIVE ⇄ PAUSED          ACTIVE ⇄ HELD (the sweep failed on it; tried again)          ACTIVE ─▶ ENDED (no next fire)          any ─▶ DELETED
    fire       QUEUED ─▶ FIRED | SKIPPED          FIRED, SKIPPED, MISSED are ends: what becomes of the task is the task's own story

Called by the statements of ``store/schedules`` and ``store/fires``, under the schedule's row lock, and by the coordinator's sweep. What must never happen here: a clock, SQL; an
instant that is neither run nor recorded.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import xxhash

from .. import given
from ..errors import ScheduleInvalid
from .records import NewTask
from .recurrence import SECOND, Interval, Spec, check, instants, next_after
from .requests import NAME, Options
from .states import TaskState

EXAMINED = 10_000
"""Instants that one decision looks at."""
FIRES = 100
"""Fires that one transaction makes."""
DAY_US = 86_400 * SECOND
LARGEST_LIMIT = 1_000
LONGEST_WINDOW_US = 366 * DAY_US
LONGEST_JITTER_US = LONGEST_TOLERANCE_US = DAY_US


class ScheduleState(enum.StrEnum):
    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    HELD = "HELD"
    """The sweep failed on it; ``reason`` says how. It is tried again after a while and stops no other."""
    ENDED = "ENDED"
    """It has no next fire."""
    DELETED = "DELETED"
    """Its versions and fires are kept; its name can be published again."""


class FireState(enum.StrEnum):
    QUEUED = "QUEUED"
    """It waits for the end of the run before it."""
    FIRED = "FIRED"
    """Its task was submitted."""
    SKIPPED = "SKIPPED"
    """Another run was not over."""
    MISSED = "MISSED"
    """Nobody looked in time, and the misfire policy does not run it."""


S, F = ScheduleState, FireState
SCHEDULE_TRANSITIONS = {
    S.ACTIVE: frozenset({S.PAUSED, S.HELD, S.ENDED, S.DELETED}),
    S.PAUSED: frozenset({S.ACTIVE, S.ENDED, S.DELETED}),
    S.HELD: frozenset({S.ACTIVE, S.PAUSED, S.ENDED, S.DELETED}),
    S.ENDED: frozenset({S.ACTIVE, S.DELETED}),
    S.DELETED: frozenset({S.ACTIVE, S.ENDED}),
}
FIRE_TRANSITIONS = {F.QUEUED: frozenset({F.FIRED, F.SKIPPED}), F.FIRED: frozenset(), F.SKIPPED: frozenset(), F.MISSED: frozenset()}


class FireKind(enum.StrEnum):
    AUTO = "auto"
    MANUAL = "manual"
    BACKFILL = "backfill"


class Misfire(enum.StrEnum):
    """What becomes of fires that are later than the tolerance. What is not run is recorded as missed."""

    SKIP = "skip"
    ONCE = "once"
    """The newest runs, unless one that is in time runs anyway."""
    CATCH_UP = "catch_up"
    """The newest within limit and window run, oldest first."""


class Overlap(enum.StrEnum):
    """What becomes of a fire while a run of the same schedule is not over. A run in review (UNKNOWN) is not over."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE_ONE = "queue_one"
    """One waits for the end; further ones are skipped."""
    CANCEL_PREVIOUS = "cancel_previous"
    """The end of the earlier run is asked for; the fire waits for it, and a newer one takes its place."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """``tolerance_us``: how late a fire may be and still be in time. ``jitter_us``: each fire is put off by a part of it that its own identity decides."""

    misfire: Misfire = Misfire.ONCE
    limit: int = 10
    window_us: int = DAY_US
    overlap: Overlap = Overlap.ALLOW
    jitter_us: int = 0
    tolerance_us: int = 60 * SECOND


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """All that one version says. ``request``: the task of a fire; its id, key, digest and origin are made for each."""

    spec: Spec
    rules: Rules
    request: NewTask


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as code declares it, before anybody knows its handler."""

    name: str
    handler: str
    spec: Spec
    rules: Rules
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    options: Options = Options()


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """``next_us``: the instant that fires next; ``due_us``: when the sweep is to look, jitter added; ``last_us``: the newest instant that is behind it.

    ``waiting``: slot and request of the fire that is QUEUED. ``tail_us``: slot of the newest fire, if it is one that further ones of its kind are added to.
    """

    namespace: str
    name: str
    state: ScheduleState
    reason: str
    version: int
    digest: str
    next_us: int | None
    due_us: int | None
    last_us: int
    tolerance_us: int
    waiting: str | None
    tail_us: int
    tail_state: str
    fired: int
    skipped: int
    missed: int
    late: int
    actor: str
    created_us: int
    changed_us: int
    rev: int


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    name: str
    version: int
    definition: str
    digest: str
    actor: str
    created_us: int


class FireRow(msgspec.Struct, frozen=True, kw_only=True):
    """One fire, or ``times`` in a row that were not run, from ``instant_us`` to ``until_us``. ``unsettled``: its task may not be over."""

    namespace: str
    schedule: str
    kind: FireKind
    request: str
    slot: int
    instant_us: int
    until_us: int
    times: int
    version: int
    state: FireState
    reason: str
    task: str
    unsettled: int
    late: int
    actor: str
    recorded_us: int


class Missed(msgspec.Struct, frozen=True):
    """``count`` instants in a row, from ``first`` to ``last``."""

    first: int
    last: int
    count: int


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """``missed``, then ``runs``: everything from the schedule's next instant to before ``next_us``."""

    missed: Missed | None
    runs: tuple[int, ...]
    next_us: int | None


def check_definition(name: str, spec: Spec, rules: Rules) -> None:
    """Raises ScheduleInvalid, naming everything that is wrong."""
    check(spec)
    found = []
    if said := given.named(NAME)(name):
        found.append(f"name {said}")
    if not 1 <= rules.limit <= LARGEST_LIMIT:
        found.append(f"the limit of catch_up must be between 1 and {LARGEST_LIMIT}, not {rules.limit}")
    if not SECOND <= rules.window_us <= LONGEST_WINDOW_US:
        found.append("the window of catch_up must be between 1 second and 366 days")
    if not 0 <= rules.jitter_us <= LONGEST_JITTER_US:
        found.append("jitter must be between 0 and a day")
    if isinstance(spec, Interval) and rules.jitter_us >= spec.every_us:
        found.append("jitter must be shorter than the interval")
    if not SECOND <= rules.tolerance_us <= LONGEST_TOLERANCE_US:
        found.append("tolerance must be between 1 second and a day")
    if found:
        raise ScheduleInvalid(f"schedule {given.shown(name)}: " + "; ".join(found))


def jitter(namespace: str, name: str, instant_us: int, most_us: int) -> int:
    """By how much this fire is put off: the same in every process."""
    return xxhash.xxh64_intdigest(f"{namespace}/{name}/{instant_us}".encode()) % (most_us + 1) if most_us else 0


def due_us(namespace: str, name: str, instant_us: int | None, rules: Rules) -> int | None:
    """When the sweep is to fire this instant."""
    return None if instant_us is None else instant_us + jitter(namespace, name, instant_us, rules.jitter_us)


def first_next(spec: Spec, last_us: int, now: int) -> int | None:
    """The next fire after publishing or resuming: later than now and than everything behind."""
    return next_after(spec, max(last_us, now))


def is_late(instant_us: int, rules: Rules, now: int) -> bool:
    return instant_us + rules.jitter_us + rules.tolerance_us < now


def due(schedule: ScheduleRow, definition: Definition, now: int) -> Due | None:
    """What becomes of the instants that have come; None: none has. Of very many only the oldest are decided, so that no transaction is long: the next call goes on."""
    spec, rules = definition.spec, definition.rules
    first = schedule.next_us
    if first is None:
        return None
    chunk: list[int] = []
    following: int | None = None
    for instant in chain((first,), instants(spec, first)):
        if instant + jitter(schedule.namespace, schedule.name, instant, rules.jitter_us) > now or len(chunk) == EXAMINED:
            following = instant
            break
        chunk.append(instant)
    if not chunk:
        return None
    late = bisect_left(chunk, True, key=lambda i: not is_late(i, rules, now))
    if late == EXAMINED:  # there may be newer ones that are late, too: the last of these are decided with them
        kept = {Misfire.SKIP: 0, Misfire.ONCE: 1, Misfire.CATCH_UP: rules.limit}[rules.misfire]
        at = EXAMINED - kept
        return Due(missed=_missed(chunk[:at]), runs=(), next_us=chunk[at] if kept else following)
    begin = _first_run(rules, chunk, late, now)
    runs = chunk[begin:]
    if len(runs) > FIRES:
        following, runs = runs[FIRES], runs[:FIRES]
    return Due(missed=_missed(chunk[:begin]), runs=tuple(runs), next_us=following)


def _first_run(rules: Rules, chunk: list[int], late: int, now: int) -> int:
    """Index of the oldest that runs; the first ``late`` of them are late."""
    match rules.misfire:
        case Misfire.SKIP:
            return late
        case Misfire.ONCE:
            return late - 1 if late and late == len(chunk) else late
        case Misfire.CATCH_UP:
            return min(late, max(late - rules.limit, bisect_left(chunk, now - rules.window_us)))


def _missed(part: list[int]) -> Missed | None:
    return Missed(part[0], part[-1], len(part)) if part else None


class Running(msgspec.Struct, frozen=True):
    """A run of a schedule that is not over."""

    task: str
    state: TaskState


class Begin(enum.StrEnum):
    """What a fire does about those before it."""

    START = "start"
    QUEUE = "queue"
    SKIP = "skip"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """``replaces``: the fire that waits, if one does, is skipped for it."""

    begin: Begin
    reason: str = ""
    replaces: bool = False


def on_overlap(rules: Rules, running: Sequence[Running], waits: bool) -> Entry:
    """Whether a fire starts. ``running``: what is left after cancels were asked for; ``waits``: one is QUEUED already."""
    if rules.overlap is Overlap.ALLOW:
        return Entry(begin=Begin.START)
    if not running:
        return Entry(begin=Begin.START, replaces=waits)
    why = f"task {running[0].task} is {running[0].state}" + (f", and {len(running) - 1} more" if len(running) > 1 else "")
    if rules.overlap is Overlap.SKIP:
        return Entry(begin=Begin.SKIP, reason=why)
    if rules.overlap is Overlap.QUEUE_ONE and waits:
        return Entry(begin=Begin.SKIP, reason=f"{why}; one fire waits for it already")
    return Entry(begin=Begin.QUEUE, reason=why, replaces=waits)


def key(name: str, kind: FireKind, request: str, slot: int) -> str:
    """Key of a fire's task: made from the fire's identity, so that one fire never has two."""
    return f"schedule/{name}/{kind}/{request}/{slot}"


def origin(name: str, version: int, instant_us: int) -> str:
    """What a fire's task says of where it comes from."""
    return f"schedule:{name}:{version}:{instant_us}"
