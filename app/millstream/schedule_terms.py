"""From what users write of a schedule to the frozen values that are stored: one declaration, checked at once.

Called by :class:`millstream.handlers.Handlers`, :class:`millstream.schedules.Schedules` and the import of Celery's beat schedule. What must never happen here: a term that is taken
and not honoured.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from millstream_schema import given
from millstream_schema.durable.recurrence import SECOND, Cron, Fold, Gap, Interval, OneOff, Spec
from millstream_schema.durable.requests import NAME, Options, plain_call, require_options
from millstream_schema.durable.schedules import Declaration, Misfire, Overlap, Rules, check_definition
from millstream_schema.errors import ScheduleInvalid

E = TypeVar("E", bound=enum.StrEnum)
When = str | dt.timedelta | dt.datetime | Spec
"""A cron expression, an interval, an instant, or one of the values they become."""
_MICROSECOND = dt.timedelta(microseconds=1)


class Terms(TypedDict, total=False):
    """How a schedule behaves; seconds where a time is meant.

    Of cron expressions: ``zone`` (IANA; ``UTC``), ``gap`` (``run_after`` | ``skip``), ``fold`` (``first`` | ``second`` | ``both``). Of intervals: ``start``, the
    first instant (midnight of 1 January 1970 UTC). ``misfire``: ``once`` | ``skip`` | ``catch_up`` with ``limit`` (10) and ``window`` (a day); ``overlap``: ``allow`` |
    ``skip`` | ``queue_one`` | ``cancel_previous``; ``jitter`` (0); ``tolerance``: how late is in time (60).
    """

    zone: str
    gap: str
    fold: str
    start: dt.datetime
    misfire: str
    limit: int
    window: float
    overlap: str
    jitter: float
    tolerance: float


def declaration(
    name: str, handler: str, when: When, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Options | None, terms: Terms
) -> Declaration:
    """Raises ScheduleInvalid."""
    given.require("the schedule's name", name, given.named(NAME), ScheduleInvalid)
    unknown = sorted(set(terms) - set(Terms.__annotations__))
    if unknown:
        raise ScheduleInvalid(f"schedule {name!r}: {', '.join(unknown)}: no such term; known: {', '.join(sorted(Terms.__annotations__))}")
    chosen = Options() if options is None else options
    require_options(chosen)
    by_position, by_name = plain_call(args, {} if kwargs is None else kwargs)
    if chosen.due_at is not None or chosen.expires_at is not None:
        raise ScheduleInvalid(
            f"schedule {name!r}: due_at and expires_at are single instants: a schedule has its own; give start_by or deadline in seconds"
        )
    spec, rules = _spec(name, when, terms), _rules(name, terms)
    check_definition(name, spec, rules)
    return Declaration(name=name, handler=handler, spec=spec, rules=rules, args=by_position, kwargs=by_name, options=chosen)


def instant(moment: dt.datetime, what: str) -> int:
    """UTC µs. Raises ScheduleInvalid for one without a zone."""
    given.require(what, moment, given.instant, ScheduleInvalid)
    return given.micros(moment)


def _spec(name: str, when: When, terms: Terms) -> Spec:
    of_cron, of_interval = {"zone", "gap", "fold"} & set(terms), {"start"} & set(terms)
    match when:
        case str():
            wrong = of_interval
            spec: Spec = Cron(
                expression=when, zone=_zone(name, terms.get("zone", "UTC")), gap=_one(name, "gap", Gap, terms.get("gap", Gap.RUN_AFTER)),
                fold=_one(name, "fold", Fold, terms.get("fold", Fold.FIRST)),
            )  # fmt: skip
        case dt.timedelta():
            wrong = of_cron
            spec = Interval(every_us=when // _MICROSECOND, start_us=instant(terms["start"], "start") if "start" in terms else 0)
        case dt.datetime():
            wrong = of_cron | of_interval
            spec = OneOff(at_us=instant(when, "the instant"))
        case Cron() | Interval() | OneOff():
            wrong, spec = of_cron | of_interval, when
        case _:
            raise ScheduleInvalid(f"schedule {name!r}: give a cron expression, a timedelta or an aware datetime, not {given.shown(when)}")
    if wrong:
        raise ScheduleInvalid(f"schedule {name!r}: {', '.join(sorted(wrong))} means nothing for {type(spec).__name__}: leave it out")
    return spec


def _zone(name: str, zone: object) -> str:
    if not isinstance(zone, str) or not given.is_text(zone):
        raise ScheduleInvalid(f"schedule {name!r}: zone must be an IANA name, e.g. Europe/Berlin, not {given.shown(zone)}")
    return zone


def _rules(name: str, terms: Terms) -> Rules:
    default = Rules()
    limit = terms.get("limit", default.limit)
    if type(limit) is not int:
        raise ScheduleInvalid(f"schedule {name!r}: limit must be a whole number, not {given.shown(limit)}")
    misfire = _one(name, "misfire", Misfire, terms.get("misfire", default.misfire))
    if misfire is not Misfire.CATCH_UP and {"limit", "window"} & set(terms):
        raise ScheduleInvalid(f'schedule {name!r}: limit and window belong to misfire="catch_up"')
    return Rules(
        misfire=misfire, limit=limit, window_us=_us(name, "window", terms.get("window", default.window_us / SECOND)),
        overlap=_one(name, "overlap", Overlap, terms.get("overlap", default.overlap)), jitter_us=_us(name, "jitter", terms.get("jitter", 0.0)),
        tolerance_us=_us(name, "tolerance", terms.get("tolerance", default.tolerance_us / SECOND)),
    )  # fmt: skip


def _one(name: str, what: str, kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise ScheduleInvalid(f"schedule {name!r}: {what} must be one of {', '.join(kind)}, not {given.shown(value)}") from None


def _us(name: str, what: str, seconds: float) -> int:
    given.require(f"schedule {name!r}: {what}", seconds, given.seconds(1e9), ScheduleInvalid)
    return round(seconds * SECOND)
