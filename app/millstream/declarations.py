"""What an author says of a handler: the options of ``@handlers.task``, checked and put into the form tasks are submitted with.

Called by :mod:`.handlers` when a user's module is imported. What must never happen here: an option that is taken and not honoured.
"""

from __future__ import annotations

import inspect
import math
import re
import string
from collections.abc import Callable
from typing import Any

import msgspec

from millstream_schema.durable.records import Policy
from millstream_schema.durable.requests import HANDLER, LONGEST_DELAY_S, NAME, HandlerSpec
from millstream_schema.durable.states import Effects
from millstream_tasks.durable.handlers import CONTEXT, Errors

DEFAULT_ATTEMPTS = {Effects.IDEMPOTENT: 5, Effects.TRANSACTIONAL: 5, Effects.EXTERNAL: 1}
MOST = 1_000_000
LONGEST_PAUSE_S = 30 * 86_400
SHORTEST_SILENCE_S = 2
"""Handler processes beat every half second: less would kill those that live."""


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """What an author says of a handler, as it was given to :meth:`Handlers.task`; times in seconds."""

    name: str = ""
    queue: str = "default"
    effects: str = "external"
    attempts: int | None = None
    delay: float = 1.0
    max_delay: float = 600.0
    jitter: float = 0.2
    permit: str = ""
    capacity: int = 1
    ordered: bool = False
    run: float = 0.0
    grace: float = 5.0
    heartbeat: float = 30.0
    start_by: float = 0.0
    deadline: float = 0.0
    crashes: int = 3
    losses: int = 20
    snoozes: int = 1_000
    intents_only: bool = False
    reconcile: Any = None
    retry_on: Any = ()
    no_retry_on: Any = ()
    option_names: bool = False

    def problems(self, function: Callable[..., Any], name: str) -> list[str]:
        """One sentence for each thing that is wrong."""
        found = []
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            found.append("a generator is never run to its end: register a function, plain or a coroutine function, that returns its result")
        if not HANDLER.match(name):
            found.append(f"its name must match {HANDLER.pattern}: give name=")
        if not NAME.match(self.queue):
            found.append(f"queue {self.queue!r} must match {NAME.pattern}")
        if self.effects not in set(Effects):
            found.append(f"effects must be one of {', '.join(Effects)}, not {self.effects!r}")
        for what, least in (("attempts", 1), ("capacity", 1), ("crashes", 1), ("losses", 1), ("snoozes", 0)):
            value = getattr(self, what)
            if not (what == "attempts" and value is None) and (type(value) is not int or not least <= value <= MOST):
                found.append(f"{what} must be a whole number between {least} and {MOST}, not {value!r}")
        found += self._times() + self._parameters(inspect.signature(function))
        if self.ordered and not self.permit:
            found.append("ordered needs a permit: the order is that of the tasks that want the same one")
        if self.intents_only and self.effects != Effects.EXTERNAL:
            found.append("intents_only is for effects='external': it says that all of them go through ctx.external")
        if self.reconcile is not None and (not callable(self.reconcile) or inspect.iscoroutinefunction(self.reconcile)):
            found.append(f"reconcile must be a plain function of the Intent in doubt, not {self.reconcile!r}")
        for what in ("retry_on", "no_retry_on"):
            if not all(isinstance(e, type) and issubclass(e, BaseException) for e in classes(getattr(self, what))):
                found.append(f"{what} must be an exception class or a tuple of them, not {getattr(self, what)!r}")
        return found

    def _parameters(self, signature: inspect.Signature) -> list[str]:
        """What would not do at any submission."""
        names = [name for name in signature.parameters if name != CONTEXT]
        found = []
        if names[:1] == ["self"]:
            found.append("its first parameter is self: name it ctx to get the attempt; a method cannot be a handler")
        try:
            places = {re.split(r"[.\[]", field)[0] for _, field, _, _ in string.Formatter().parse(self.permit) if field is not None}
        except ValueError as exc:
            return [*found, f"permit {self.permit!r}: {exc}"]
        missing = sorted(places - set(names))
        if missing and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            found.append(
                f"permit {self.permit!r} has places that are no parameters: {', '.join(map(repr, missing))} (they are {', '.join(names) or 'none'})"
            )
        return found

    def _times(self) -> list[str]:
        bounds = {
            "jitter": (0, 1), "run": (0, LONGEST_PAUSE_S), "grace": (0, LONGEST_PAUSE_S), "heartbeat": (SHORTEST_SILENCE_S, LONGEST_PAUSE_S),
            "start_by": (0, LONGEST_DELAY_S), "deadline": (0, LONGEST_DELAY_S),
        }  # fmt: skip
        found = []
        for what, (low, high) in bounds.items():
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
                found.append(f"{what} must be a number between {low} and {high}, not {value!r}")
        if not 0 <= self.delay <= self.max_delay <= LONGEST_PAUSE_S:
            found.append(
                f"delay and max_delay must be seconds with 0 <= delay <= max_delay <= {LONGEST_PAUSE_S}, not {self.delay} and {self.max_delay}"
            )
        return found

    def spec(self, name: str) -> HandlerSpec:
        """As tasks of this handler are submitted with."""
        kind = Effects(self.effects)
        default = DEFAULT_ATTEMPTS[Effects.IDEMPOTENT if self.intents_only else kind]
        policy = Policy(
            attempts=default if self.attempts is None else self.attempts, delay_ms=_ms(self.delay), max_delay_ms=_ms(self.max_delay), jitter=self.jitter,
            crashes=self.crashes, losses=self.losses, snoozes=self.snoozes, run_ms=math.ceil(self.run * 1000), grace_ms=_ms(self.grace),
            heartbeat_ms=_ms(self.heartbeat), permit_capacity=self.capacity, start_by_ms=_ms(self.start_by),
            deadline_ms=_ms(self.deadline), intents_only=self.intents_only, reconciles=self.reconcile is not None,
        )  # fmt: skip
        return HandlerSpec(name=name, queue=self.queue, effects=kind, policy=policy, permit=self.permit, ordered=self.ordered)


def classes(given: Any) -> Errors:
    """One exception class or several, as a tuple."""
    return tuple(given) if isinstance(given, tuple | list | set | frozenset) else (given,)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
