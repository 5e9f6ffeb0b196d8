"""When a schedule fires: cron expressions in a time zone, intervals, single instants. Pure functions of a spec and an instant.

An instant is UTC microseconds. A cron expression speaks of wall time; a wall time may not exist on a day whose clocks go forward, and exists twice when they go back:

- *Fixed* expressions name hours and minutes (``30 2 * * *``): ``gap`` says what becomes of a time that does not exist, ``fold`` which of two is meant.
- *Stepped and hourly* ones (a ``*`` or a ``/`` in the seconds, minutes or hours, or all 24 hours listed) follow elapsed time: they fire at every instant whose wall time matches.

Called by clients that publish or preview, and by the coordinator's sweep. What must never happen here: the local clock; an instant that is not later than the one before it.
"""

from __future__ import annotations

import datetime as dt
import enum
import zoneinfo
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec
from cronsim import CronSim, CronSimError

from .. import given
from ..errors import ScheduleInvalid

SECOND: Final = 1_000_000
_DAY: Final = 86_400
_EPOCH: Final = dt.datetime(1970, 1, 1)
_FIRST_YEAR, _LAST_YEAR = 1970, 2199
FIRST_US: Final = 0
LAST_US: Final = int((dt.datetime(_LAST_YEAR + 1, 1, 1) - _EPOCH).total_seconds()) * SECOND
"""Nothing fires from here on: the year 2200."""
LONGEST_EXPRESSION: Final = 200
SHORTEST_US: Final = SECOND
LONGEST_US: Final = 10 * 366 * _DAY * SECOND
MACROS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_PIECE: Final = _DAY
"""Seconds looked at together. No zone changes its clocks twice within a day and ends where it began: a test looks at all of them."""


class Gap(enum.StrEnum):
    """What becomes of a fixed wall time that does not exist."""

    SKIP = "skip"
    RUN_AFTER = "run_after"
    """It fires once, at the instant at which the clocks go forward."""


class Fold(enum.StrEnum):
    """Which of two instants a fixed wall time means that exists twice."""

    FIRST = "first"
    SECOND = "second"
    BOTH = "both"


class Cron(msgspec.Struct, frozen=True, kw_only=True, tag="cron"):
    """``minute hour day-of-month month day-of-week``, or six fields that begin with seconds, as Debian's cron reads them, in an IANA zone.

    Also ``L`` (last day), ``LW`` (last weekday), ``5L`` (last Friday), ``MON#2`` (second Monday), and ``@hourly`` … ``@yearly``.
    """

    expression: str
    zone: str = "UTC"
    gap: Gap = Gap.RUN_AFTER
    fold: Fold = Fold.FIRST


class Interval(msgspec.Struct, frozen=True, kw_only=True, tag="interval"):
    """Every ``every_us`` microseconds of elapsed time, counted from ``start_us``, which is the first."""

    every_us: int
    start_us: int = 0


class OneOff(msgspec.Struct, frozen=True, kw_only=True, tag="one-off"):
    """Once."""

    at_us: int


Spec = Cron | Interval | OneOff


def check(spec: Spec) -> None:
    """Raises ScheduleInvalid for a spec that cannot be followed or never fires."""
    match spec:
        case Cron():
            _sim(spec.expression, _EPOCH)
            zone_of(spec.zone)
            if next(instants(spec, FIRST_US + 30 * 365 * _DAY * SECOND), None) is None:
                raise ScheduleInvalid(f"cron {spec.expression!r} never fires: no such day comes")
        case Interval(every_us=every, start_us=start):
            if not SHORTEST_US <= every <= LONGEST_US:
                raise ScheduleInvalid(f"an interval must last between 1 second and 10 years, not {every / SECOND} s")
            if not FIRST_US <= start < LAST_US:
                raise ScheduleInvalid(f"an interval must start between the years {_FIRST_YEAR} and {_LAST_YEAR}")
        case OneOff(at_us=at):
            if not FIRST_US <= at < LAST_US:
                raise ScheduleInvalid(f"a one-off must lie between the years {_FIRST_YEAR} and {_LAST_YEAR}")


def next_after(spec: Spec, instant_us: int) -> int | None:
    """The first instant later than this one; None: there is none."""
    return next(instants(spec, instant_us), None)


def instants(spec: Spec, after_us: int) -> Iterator[int]:
    """Every instant later than ``after_us``, strictly increasing, below the year 2200."""
    match spec:
        case Cron():
            return _cron(spec, after_us)
        case Interval(every_us=every, start_us=start):
            first = start if after_us < start else start + ((after_us - start) // every + 1) * every
            return iter(range(first, LAST_US, every))
        case OneOff(at_us=at):
            return iter((at,) if at > after_us else ())


def expression_of(text: str) -> str:
    """A macro as the expression it stands for."""
    return MACROS.get(text.strip().lower(), text)


def _sim(text: str, at: dt.datetime) -> CronSim:
    """Matches later than ``at``, a naive wall time. Raises ScheduleInvalid."""
    if len(text) > LONGEST_EXPRESSION:
        raise ScheduleInvalid(f"a cron expression has at most {LONGEST_EXPRESSION} characters, this one has {len(text)}")
    try:
        return CronSim(expression_of(text), at)
    except (CronSimError, ValueError, IndexError, TypeError, AssertionError) as exc:  # the latter for mixtures such as 5L/2
        what = str(exc).lower() if isinstance(exc, CronSimError) else "not a cron expression"
        raise ScheduleInvalid(
            f"cron {given.shown(text)}: {what}: write minute hour day-of-month month day-of-week, with seconds in front if there are six fields"
        ) from None


def follows_elapsed_time(text: str) -> bool:
    """Whether it is stepped or hourly. Raises ScheduleInvalid."""
    sim = _sim(text, _EPOCH)
    return any("*" in part or "/" in part for part in sim.parts[:3]) or len(sim.hours) == 24


@lru_cache(maxsize=256)
def zone_of(name: str) -> dt.tzinfo:
    """An IANA zone. Raises ScheduleInvalid."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise ScheduleInvalid(
            f"time zone {given.shown(name)} is not known here: give an IANA name, e.g. Europe/Berlin ({type(exc).__name__})"
        ) from None


def local(instant_us: int, zone: dt.tzinfo) -> dt.datetime:
    """An instant as the zone's clocks show it."""
    seconds, rest = divmod(instant_us, SECOND)
    return (_EPOCH.replace(tzinfo=dt.UTC) + dt.timedelta(seconds=seconds)).astimezone(zone).replace(microsecond=rest)


def _offset(second: int, zone: dt.tzinfo) -> int:
    """Seconds that the zone's clocks are ahead of UTC."""
    found = (_EPOCH.replace(tzinfo=dt.UTC) + dt.timedelta(seconds=second)).astimezone(zone).utcoffset()
    assert found is not None
    return round(found.total_seconds())


def _wall(second: int) -> dt.datetime:
    return _EPOCH + dt.timedelta(seconds=second)


def _seconds(wall: dt.datetime) -> int:
    return round((wall - _EPOCH).total_seconds())


class _Piece(msgspec.Struct, frozen=True):
    """A stretch of time [start, end) with one offset; ``jump``: by how much the clocks go forward (or back) at its end. Seconds."""

    start: int
    end: int
    offset: int
    jump: int


def _piece(start: int, zone: dt.tzinfo) -> _Piece:
    """From ``start`` for a day, or to the next change of the clocks."""
    offset, end = _offset(start, zone), start + _PIECE
    after = _offset(end, zone)
    if after == offset:
        return _Piece(start, end, offset, 0)
    low, high = start, end  # offset(low) is the old one, offset(high) is another
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(middle, zone) == offset:
            low = middle
        else:
            high = middle
    return _Piece(start, high, offset, _offset(high, zone) - offset)


def _cron(spec: Cron, after_us: int) -> Iterator[int]:
    """Piece by piece of constant offset: within one, wall time and elapsed time go together."""
    zone, fixed = zone_of(spec.zone), not follows_elapsed_time(spec.expression)
    start = max(after_us, FIRST_US - 1) // SECOND + 1
    last = start - 1
    try:
        while start * SECOND < LAST_US:
            piece = _piece(start, zone)
            far: int | None = None
            for wall in _matches(spec.expression, start + piece.offset):
                far = wall - piece.offset
                if far >= piece.end:
                    break
                if fixed and not _meant(far, zone, spec.fold):
                    continue
                if far > last:
                    last = far
                    yield far * SECOND
            if fixed and spec.gap is Gap.RUN_AFTER and piece.jump > 0 and _falls_into(spec.expression, piece) and piece.end > last:
                last = piece.end
                yield last * SECOND
            if far is None:
                return
            # Nothing matches before ``far``, whatever the clocks do meanwhile: only its neighbourhood is looked at.
            start = piece.end if piece.jump else max(piece.end, far - 2 * _PIECE)
    except (OverflowError, ValueError):
        return  # past the last year that a date can hold


def _matches(text: str, wall_second: int) -> Iterator[int]:
    """Wall seconds that match, from this one on."""
    for wall in _sim(text, _wall(wall_second - 1)):
        yield _seconds(wall)


def _meant(second: int, zone: dt.tzinfo, fold: Fold) -> bool:
    """Whether an instant is one of those that its wall time means."""
    if fold is Fold.BOTH:
        return True
    here = local(second * SECOND, zone)
    if fold is Fold.FIRST:
        return here.fold == 0
    return here.fold == 1 or here.replace(fold=1).utcoffset() == here.utcoffset()


def _falls_into(text: str, piece: _Piece) -> bool:
    """Whether a match lies in the wall time that is left out at the end of the piece."""
    first = next(_matches(text, piece.end + piece.offset), None)
    return first is not None and first < piece.end + piece.offset + piece.jump


def describe(spec: Spec) -> str:
    """For people, on one line."""
    match spec:
        case Cron():
            rules = "" if follows_elapsed_time(spec.expression) else f", gap {spec.gap}, fold {spec.fold}"
            return f"{spec.expression} ({spec.zone}{rules})"
        case Interval(every_us=every, start_us=start):
            return f"every {every / SECOND:g} s from {local(start, dt.UTC).isoformat()}"
        case OneOff(at_us=at):
            return f"once at {local(at, dt.UTC).isoformat()}"
