"""How long settled tasks are kept. Pure.

Used by the sweep and by whoever shows the settings. What must never happen here: a rule for one tenant that shortens what another keeps.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

DEFAULT_US = 30 * 24 * 3600 * 1_000_000
SHORTEST_US = 60 * 1_000_000
"""A shorter time would purge what a worker may still report about."""


class Scope(enum.StrEnum):
    ALL = ""
    QUEUE = "queue"
    HANDLER = "handler"


class RetentionRule(msgspec.Struct, frozen=True, kw_only=True):
    """``namespace`` empty: of every one that has none of its own. ``keep_us`` 0: for ever."""

    namespace: str = ""
    scope: Scope = Scope.ALL
    name: str = ""
    keep_us: int = DEFAULT_US


def keep_us(rules: Sequence[RetentionRule], namespace: str, queue: str, handler: str) -> int:
    """How long a settled task is kept: the narrowest rule counts — handler before queue before all, the namespace's own before everybody's. 0: for ever."""
    names = {Scope.HANDLER: handler, Scope.QUEUE: queue, Scope.ALL: ""}
    found = {(r.scope, r.namespace): r.keep_us for r in rules if r.name == names[r.scope] and r.namespace in ("", namespace)}
    for scope in (Scope.HANDLER, Scope.QUEUE, Scope.ALL):
        for owner in (namespace, ""):
            if (scope, owner) in found:
                return found[scope, owner]
    return DEFAULT_US


def shortest_us(rules: Sequence[RetentionRule], namespace: str) -> int | None:
    """No settled task of the namespace goes before it is this old; None: none ever goes."""
    own = [r for r in rules if r.namespace in ("", namespace)]
    base = keep_us(rules, namespace, "\x00", "\x00")  # a queue and a handler without a rule
    times = [t for t in (base, *(r.keep_us for r in own if r.scope is not Scope.ALL)) if t]
    return min(times, default=None)
