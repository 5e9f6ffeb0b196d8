"""What callers give, checked before anything is done: rules for values, and ``checked``, which holds a function's arguments against them.

Called by the clients' public methods. What must never happen here: a value that reaches a statement and is refused there, by each database in its own way; a message that repeats
a megabyte of what was wrong.
"""

from __future__ import annotations

import datetime as dt
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from .errors import ConfigurationError, MillstreamError
from .reasons import storable

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[Any], str]
"""What is wrong with a value, as it goes on after its name: ``must be …``. Empty: nothing."""
LONGEST_TEXT = 200
MOST_ROWS = 100_000
"""Rows that one look may ask for."""
_SHOWN = 80
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LAST = dt.datetime(9000, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


def shown(value: object) -> str:
    """A wrong value, shortened."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[:_SHOWN]
    try:
        found = repr(value)
    except Exception:  # of the caller's own making
        found = f"a {type(value).__name__}"
    return found if len(found) <= _SHOWN else f"{found[: _SHOWN - 3]}..."


def checked(error: type[MillstreamError] = ConfigurationError, /, **rules: Rule) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse a call whose arguments break their rules, naming all that do. A default is not checked."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs).arguments
            wrong = [f"{name} {said}" for name, rule in rules.items() if name in given and (said := rule(given[name]))]
            if wrong:
                raise error("; ".join(wrong))
            return function(*args, **kwargs)

        return run

    return wrap


def require(name: str, value: object, rule: Rule, error: type[MillstreamError] = ConfigurationError) -> None:
    """One value against its rule."""
    said = rule(value)
    if said:
        raise error(f"{name} {said}")


def is_text(value: object, most: int = LONGEST_TEXT) -> bool:
    """Whether every database takes it as it is."""
    return isinstance(value, str) and len(value) <= most and storable(value) == value


def text(value: object) -> str:
    """Ids, keys: whatever could be stored."""
    return (
        "" if is_text(value) else f"must be text of at most {LONGEST_TEXT} characters without NUL and half characters, not {shown(value)}"
    )


def whole_text(most: int) -> Rule:
    """Text of a length of its own: cursors, tokens."""

    def rule(value: object) -> str:
        return "" if is_text(value, most) else f"must be text as it was given out, not {shown(value)}"

    return rule


def nothing(value: object) -> str:
    return "" if value is None else f"must be None, not {shown(value)}"


def words(value: object) -> str:
    """What a person says: shortened and made storable where it is kept."""
    return "" if isinstance(value, str) else f"must be text, not {shown(value)}"


def reason(value: object) -> str:
    return (
        "" if isinstance(value, str) and value.strip() else f"must be text that says why: it is kept with what is done, not {shown(value)}"
    )


def named(pattern: re.Pattern[str], *, optional: bool = False) -> Rule:
    """A name; ``optional``: or empty text."""

    def rule(value: object) -> str:
        if isinstance(value, str) and (pattern.match(value) or (optional and not value)):
            return ""
        return f"{shown(value)} must match {pattern.pattern}"

    return rule


def whole(least: int, most: int, *, optional: bool = False) -> Rule:
    def rule(value: object) -> str:
        if (optional and value is None) or (type(value) is int and least <= value <= most):
            return ""
        return f"must be between {least} and {most}, a whole number, not {shown(value)}"

    return rule


ROWS = whole(1, MOST_ROWS)


def seconds(most: float = math.inf, *, above: bool = False, optional: bool = False) -> Rule:
    """A time; ``above``: 0 is too short."""

    def rule(value: object) -> str:
        if optional and value is None:
            return ""
        if is_number(value) and 0 <= value <= most and not (above and not value):  # type: ignore[operator]
            return ""
        ends = f"{'above' if above else 'from'} 0" + ("" if most == math.inf else f" and at most {most:.0f}")
        return f"must be a number of seconds {ends}, not {shown(value)}"

    return rule


def is_number(value: object) -> bool:
    """Whether it is a finite number that a float can be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def instant(value: object) -> str:
    """An aware datetime that can be shown in every zone."""
    if not isinstance(value, dt.datetime) or value.utcoffset() is None:
        return f"{shown(value)} has no time zone: give an aware datetime, e.g. datetime.now(UTC)"
    return "" if EPOCH <= value < _LAST else f"{shown(value)} must lie between the years {EPOCH.year} and {_LAST.year}"


def micros(moment: dt.datetime) -> int:
    """UTC µs of an aware datetime."""
    return (moment - EPOCH) // _MICROSECOND


def flag(value: object) -> str:
    return "" if isinstance(value, bool) else f"must be True or False, not {shown(value)}"


def function(value: object) -> str:
    return "" if callable(value) else f"must be a function, not {shown(value)}"


def a(*kinds: type, optional: bool = False) -> Rule:
    """An instance of one of these."""

    def rule(value: object) -> str:
        if isinstance(value, kinds) or (optional and value is None):
            return ""
        return f"must be a {' or a '.join(k.__name__ for k in kinds)}, not {shown(value)}"

    return rule


def several(item: Rule, *, optional: bool = False) -> Rule:
    """Values each of which keeps a rule: a list, a tuple, a set."""

    def rule(value: object) -> str:
        if optional and value is None:
            return ""
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            return f"must be a list, not {shown(value)}"
        return next((f"holds what it must not: each {said}" for one in value if (said := item(one))), "")

    return rule


def either(*rules: Rule) -> Rule:
    """One that any of these lets through; else what the last one says."""

    def rule(value: object) -> str:
        said = ""
        for one in rules:
            said = one(value)
            if not said:
                return ""
        return said

    return rule
