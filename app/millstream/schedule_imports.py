"""Celery's ``beat_schedule`` as declarations of schedules. What cannot be honoured is refused by name, each entry for itself.

Used by ``millstream schedules import``. What must never happen here: an entry that is taken and fires at other times, or otherwise, than Celery's documentation says of it.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.schedules import crontab, schedule

from millstream_schema.durable.recurrence import Cron, Interval, Spec
from millstream_schema.durable.requests import Options
from millstream_schema.durable.schedules import Declaration
from millstream_schema.errors import ScheduleInvalid, TaskInvalid

from .celery_options import translated
from .schedule_terms import Terms, declaration

OURS = frozenset({"millstream-tick"})
"""Entries that Millstream itself adds."""
_FIELDS = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
_ALL = {"minute": 60, "hour": 24, "day_of_month": 31, "month_of_year": 12, "day_of_week": 7}


def beat_declarations(app: Celery) -> tuple[list[Declaration], dict[str, str]]:
    """(what can be scheduled here, entry → why it cannot). Whether there are such handlers, and whether they take these arguments, is seen when they are published."""
    found: list[Declaration] = []
    refused: dict[str, str] = {}
    names: dict[str, str] = {}
    for entry, values in dict(app.conf.beat_schedule or {}).items():
        if entry in OURS:
            continue
        try:
            declared = _declared(entry, values, str(app.timezone))
            if declared.name in names:
                raise ScheduleInvalid(f"its name here would be {declared.name!r}, like that of {names[declared.name]!r}")
        except ScheduleInvalid as exc:
            refused[entry] = str(exc)
            continue
        names[declared.name] = entry
        found.append(declared)
    return found, refused


def _declared(entry: str, values: Mapping[str, Any], zone: str) -> Declaration:
    if not isinstance(values, Mapping) or "task" not in values or "schedule" not in values:
        raise ScheduleInvalid("it is no mapping with task and schedule")
    unknown = sorted(set(values) - {"task", "schedule", "args", "kwargs", "options", "relative"})
    if unknown:
        raise ScheduleInvalid(f"{', '.join(unknown)}: no such field is known")
    if values.get("relative"):
        raise ScheduleInvalid("relative: intervals here count from a fixed start, not from when beat was started; give a cron expression")
    name = re.sub(r"[^A-Za-z0-9_.:-]+", "-", entry).strip("-_.:")[:63]
    # As beat does: what was not fired in time fires once, and two runs may overlap.
    terms = Terms(misfire="once", overlap="allow")
    return declaration(
        name,
        str(values["task"]),
        spec_of_celery(values["schedule"], zone),
        tuple(values.get("args") or ()),
        values.get("kwargs"),
        _options(values.get("options") or {}),
        terms,
    )


def spec_of_celery(given: Any, zone: str) -> Spec:
    """A crontab, an interval in seconds, a timedelta or a schedule object as what it means here. Raises ScheduleInvalid."""
    match given:
        case bool():
            raise ScheduleInvalid(f"a schedule cannot be {given!r}")
        case int() | float():
            return Interval(every_us=round(given * 1e6))
        case dt.timedelta():
            return Interval(every_us=given // dt.timedelta(microseconds=1))
        case crontab():
            if type(given) is not crontab:
                raise ScheduleInvalid(f"{type(given).__name__} is a class of your own: write its times as a cron expression")
            return Cron(expression=_expression(given), zone=zone)
        case schedule():
            if type(given) is not schedule:
                raise ScheduleInvalid(f"{type(given).__name__} is a class of your own: write its times as a cron expression or an interval")
            if given.relative:
                raise ScheduleInvalid("relative: intervals here count from a fixed start; give a cron expression")
            return Interval(every_us=given.run_every // dt.timedelta(microseconds=1))
        case _:
            raise ScheduleInvalid(
                f"schedules of kind {type(given).__name__} (solar and the like) are not known here: only crontab and intervals are"
            )


def _expression(tab: Any) -> str:
    """A crontab as an expression: from the sets it means, so that names, wrapped ranges and lists of any kind come over."""
    sets = {field: sorted(getattr(tab, field)) for field in _FIELDS}
    every = {field: len(sets[field]) == _ALL[field] for field in _FIELDS}
    if not every["day_of_month"] and not every["day_of_week"]:
        raise ScheduleInvalid(
            "Celery's crontab wants both day_of_month and day_of_week to match, cron either of them: write e.g. MON#1 (the first Monday) or L (the last day)"
        )
    parts = []
    for field in _FIELDS:
        written = str(getattr(tab, f"_orig_{field}")).replace(" ", "")
        if every[field]:
            parts.append("*")
        elif field in ("minute", "hour") and re.fullmatch(r"\*/\d+", written):
            parts.append(written)  # stepped: it follows elapsed time
        else:
            parts.append(",".join(str(n) for n in sets[field]))
    return " ".join(parts)


def _options(given: Mapping[str, Any]) -> Options:
    """As those of ``apply_async``, but those that name one instant or one request."""
    expires = given.get("expires")
    if isinstance(expires, dt.timedelta):
        given = {**given, "expires": expires.total_seconds()}
    try:
        found = translated(given)
    except TaskInvalid as exc:
        raise ScheduleInvalid(f"options: {exc}") from exc
    if found.key or found.options.due_at is not None or found.options.expires_at is not None:
        raise ScheduleInvalid("options: task_id, eta and an instant as expires name one task: a schedule makes many")
    return found.options
