"""Which tasks are looked for, and where a page ended: filters, cursors, and the choice of the index that is walked. Pure.

Used by clients and by bulk acts. What must never happen here: a cursor taken for another question than it was given for; a filter that means two things.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .. import given
from ..canonical import fingerprint
from ..errors import ConfigurationError, TokenRefused
from .states import AMISS, HELD, TaskState
from .tokens import Seal

CURSOR_VERSION = 2
OLDEST_CURSOR = 1
LARGEST_PAGE = 1_000


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tasks with all of these; what is not given does not matter.

    ``created_from`` ≤ created < ``created_until``, and likewise for ``settled``: aware datetimes. ``origin``: how the task came in, by its first parts: ``direct``, ``batch``,
    ``task`` (submitted by another task) or ``task:ID``, ``schedule:NAME``, ``retry``, … ``error_class``: of the exception it raised last. ``retry_of``: what it is a retry of.
    """

    states: tuple[TaskState, ...] = ()
    handler: str = ""
    queue: str = ""
    business_key: str = ""
    created_from: dt.datetime | None = None
    created_until: dt.datetime | None = None
    settled_from: dt.datetime | None = None
    settled_until: dt.datetime | None = None
    origin: str = ""
    error_class: str = ""
    retry_of: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigurationError."""
        wrong = [f"there is no state {given.shown(s)}: use {', '.join(TaskState)}" for s in self.states if s not in set(TaskState)]
        for name in ("created_from", "created_until", "settled_from", "settled_until"):
            moment = getattr(self, name)
            if moment is not None and (said := given.instant(moment)):
                wrong.append(f"{name} {said}")
        for name in ("handler", "queue", "business_key", "origin", "error_class", "retry_of"):
            if said := given.text(getattr(self, name)):
                wrong.append(f"{name} {said}")
        if wrong:
            raise ConfigurationError("; ".join(wrong))


VERSION_1 = frozenset({"states", "handler", "queue", "business_key"})
"""Filters that cursors of version 1 know."""
_KNOWN: Mapping[int, frozenset[str]] = {1: VERSION_1, 2: frozenset(TaskFilter.__struct_fields__)}


class Walk(enum.StrEnum):
    """By what the candidates are found. The first three are walked in the order of creation, the others hold few."""

    CREATED = "created"
    AMISS = "amiss"
    BUSINESS = "business"
    HELD = "held"
    RETRIES = "retries"

    @property
    def few(self) -> bool:
        """Whether all candidates are read at once."""
        return self in (Walk.HELD, Walk.RETRIES)


def walk_of(f: TaskFilter) -> Walk:
    """The narrowest way to what the filter lets through."""
    if f.retry_of:
        return Walk.RETRIES
    if f.business_key:
        return Walk.BUSINESS
    if f.states and set(f.states) <= HELD:
        return Walk.HELD
    return Walk.AMISS if f.states and set(f.states) <= AMISS else Walk.CREATED


def micros(moment: dt.datetime | None, otherwise: int) -> int:
    """UTC µs."""
    return otherwise if moment is None else given.micros(moment)


LAST = 2**62
"""Later than every instant."""


def matching(f: TaskFilter) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a row's columns match."""
    equal = {c: v for c, v in (("handler", f.handler), ("queue", f.queue), ("business_key", f.business_key)) if v}
    equal |= {c: v for c, v in (("error_class", f.error_class), ("retry_of", f.retry_of)) if v}
    states = frozenset(str(s) for s in f.states)
    created, settled = bounds(f)
    origin = f.origin.rstrip(":")
    looks_settled = f.settled_from is not None or f.settled_until is not None

    def matches(row: Mapping[str, Any]) -> bool:
        return (
            all(row[c] == v for c, v in equal.items())
            and (not states or row["state"] in states)
            and created[0] <= row["created_us"] < created[1]
            and (not looks_settled or (row["settled_us"] > 0 and settled[0] <= row["settled_us"] < settled[1]))
            and (not origin or row["origin"] == origin or row["origin"].startswith(origin + ":"))
        )

    return matches


def bounds(f: TaskFilter) -> tuple[tuple[int, int], tuple[int, int]]:
    """From and until of creation and of the end, µs. Nothing ends before it is created."""
    settled = (micros(f.settled_from, 0), micros(f.settled_until, LAST))
    return (micros(f.created_from, 0), min(micros(f.created_until, LAST), settled[1])), settled


class Place(msgspec.Struct, frozen=True):
    """Behind which task a page goes on: newest first, ties by id."""

    created_us: int
    id: str


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    """``question``: the namespace and the filters that its version knows, as a fingerprint."""

    version: int
    namespace: str
    question: str
    created_us: int
    id: str


def _question(f: TaskFilter, version: int) -> str:
    known = msgspec.to_builtins(f)
    values = {k: v for k, v in known.items() if k in _KNOWN[version]}
    for name in ("created_from", "created_until", "settled_from", "settled_until"):
        if name in values:
            values[name] = micros(getattr(f, name), 0)
    values["states"] = sorted(set(values.get("states", ())))
    return fingerprint(values)


def cursor(seal: Seal, namespace: str, f: TaskFilter, place: Place, version: int = CURSOR_VERSION) -> str:
    """Text from which the next page goes on."""
    return seal.close(_Cursor(version, fingerprint(namespace), _question(f, version), place.created_us, place.id))


def place_of(seal: Seal, namespace: str, f: TaskFilter, text: str) -> Place:
    """Where a cursor points. Raises TokenRefused for one of another question, another namespace, another installation, or a version that cannot answer this question.

    Version 1 knew fewer filters: its cursors go on where no other is used.
    """
    found = seal.open(text, _Cursor)
    if found.version > CURSOR_VERSION:
        raise TokenRefused(
            f"the cursor has version {found.version}, this build knows {CURSOR_VERSION}: upgrade Millstream, or begin without it"
        )
    if found.version < OLDEST_CURSOR:
        raise TokenRefused(f"the cursor has version {found.version}, the oldest that is taken is {OLDEST_CURSOR}: begin without it")
    if found.namespace != fingerprint(namespace):
        raise TokenRefused("the cursor is of another namespace: begin without it")
    newer = set(msgspec.to_builtins(f)) - _KNOWN[found.version]
    if newer:
        raise TokenRefused(f"the cursor has version {found.version}, which does not know {', '.join(sorted(newer))}: begin without it")
    if found.question != _question(f, found.version):
        raise TokenRefused("the cursor was given for other filters: repeat those, or begin without it")
    return Place(found.created_us, found.id)
