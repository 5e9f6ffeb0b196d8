"""Time, events, chance and faults of a simulated run.

Used by everything in :mod:`millstream.testing`. What must never happen here: a real clock, a real random source, a thread, an order that depends on a hash.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

EPOCH_0 = 1_700_000_000_000_000
"""Simulated wall clock at the start, µs."""


class Crash(BaseException):
    """The actor that is running dies here."""


@dataclass(frozen=True)
class Faults:
    """Probabilities of faults until ``until`` simulated seconds have passed.

    Per opportunity: ``store`` (a transaction fails, its actor dies, or COMMIT's answer is lost), ``hint`` (lost, twice, late), ``frame`` (lost, twice, out of order),
    ``storage`` (a snapshot cannot be written or read), ``target`` (staging or a commit fails before or after its effect), ``nap`` (an actor stands still in the middle of what it
    does, past its lease or not). Per second: ``crash``, ``pause`` (per actor), ``cut`` (one data channel breaks), ``away`` (the target, the storage or the SQL database cannot be
    reached for a while). ``skew_ms``: wall clocks of nodes are off by as much, and are set anew now and then.
    """

    until: float = 20.0
    store: float = 0.0
    hint: float = 0.0
    frame: float = 0.0
    storage: float = 0.0
    target: float = 0.0
    nap: float = 0.0
    crash: float = 0.0
    pause: float = 0.0
    cut: float = 0.0
    away: float = 0.0
    skew_ms: int = 0

    @property
    def calm(self) -> bool:
        """Whether nothing ever goes wrong."""
        return self == Faults(until=self.until)

    @staticmethod
    def drawn(seed: int, until: float, strength: float = 1.0) -> Faults:
        """A mix of faults that depends on the seed: a run with few kinds goes deeper into each than a run with all of them."""
        rng = random.Random(f"faults-{seed}")

        def p(top: float) -> float:
            return top * strength * rng.choice((0.0, 0.0, 0.3, 1.0))

        return Faults(
            until=until, store=p(0.006), hint=p(0.2), frame=p(0.002), storage=p(0.04), target=p(0.04), nap=p(0.003), crash=p(0.06), pause=p(0.05),
            cut=p(0.1), away=p(0.08), skew_ms=rng.choice((0, 60_000)),
        )  # fmt: skip


class Actor(Protocol):
    """Whoever can be stopped in the middle of something."""

    def nap(self, where: str) -> None:
        """Stand still for a while; the rest of the world goes on. Raises :class:`Crash` when it was killed meanwhile."""
        ...


class World:
    """Time, events and chance."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.probes: Counter[str] = Counter()
        self.current: Actor | None = None
        self.away: dict[str, float] = {}
        """What cannot be reached, and until when."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = 0
        self._asleep = False
        self._broken: BaseException | None = None

    def at(self, delay: float, event: Callable[[], None]) -> None:
        self._seq += 1
        heapq.heappush(self._events, (self.now + max(delay, 0.0), self._seq, event))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Run events until the condition holds; False at the limit (simulated seconds)."""
        while self._events:
            if until():
                return True
            if self._events[0][0] > limit:
                return False
            self._next()
        return until()

    def _next(self) -> None:
        when, _, event = heapq.heappop(self._events)
        self.now = max(self.now, when)
        event()
        if self._broken is not None:  # the product's own handlers must not swallow what the simulator found wrong
            raise self._broken

    def nap(self, seconds: float) -> None:
        """The rest of the world goes on for a while. The caller stands still: it sees that none of its own events run. One at a time: within another's, no time passes."""
        if self._asleep:
            return
        end = self.now + seconds
        current, self.current, self._asleep = self.current, None, True
        try:
            while self._events and self._events[0][0] <= end:
                self._next()
        except AssertionError as exc:
            self._broken = exc
            raise
        finally:
            self.now = max(self.now, end)
            self.current, self._asleep = current, False

    def strikes(self, probability: float, probe: str) -> bool:
        """Whether a fault happens now."""
        if probability <= 0.0 or self.now >= self.faults.until or self.rng.random() >= probability:
            return False
        self.probes[probe] += 1
        return True

    def stumble(self, where: str, weight: float = 1.0) -> None:
        """The running actor may stand still here, between having looked and doing. One at a time. ``weight``: above 1 for what is rare."""
        actor = self.current
        if actor is not None and not self._asleep and self.strikes(self.faults.nap * weight, f"nap: {where}"):
            actor.nap(where)

    def reachable(self, what: str) -> bool:
        return self.now >= self.away.get(what, 0.0)

    def act(self, actor: Actor, work: Callable[[], Any]) -> Any:
        """Run ``work`` as ``actor``: only then do faults strike."""
        previous, self.current = self.current, actor
        try:
            return work()
        finally:
            self.current = previous


class SimClock:
    """A node's clocks: true monotonic time, a wall clock that is off by ``skew_ms``."""

    def __init__(self, world: World, skew_ms: int = 0) -> None:
        self._world = world
        self.skew_ms = skew_ms

    def now_us(self) -> int:
        return EPOCH_0 + int(self._world.now * 1e6) + self.skew_ms * 1000

    def now_ms(self) -> int:
        return self.now_us() // 1000

    def monotonic(self) -> float:
        return self._world.now


class SimIds:
    """Ids in order of asking."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._n = 0

    def new(self, kind: str, size: int = 6) -> str:
        self._n += 1
        return f"{kind}-{self._world.seed}-{self._n}"


class SimChance:
    """Jitter from the run's seed."""

    def __init__(self, world: World) -> None:
        self._world = world

    def uniform(self, low: float, high: float) -> float:
        return self._world.rng.uniform(low, high)
