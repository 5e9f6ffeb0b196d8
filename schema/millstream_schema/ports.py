"""Time, chance and ids as small ports, and their real implementations.

Everything that needs one takes it as an argument, without a default, so that a whole system can be run from a seed. This is the one module where
the operating system's clock and random source are read for what anything decides on. What must never happen here: a wall clock that a lease is judged by.
"""

from __future__ import annotations

import random
import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Clocks of one process."""

    def now_ms(self) -> int:
        """Wall clock, UTC milliseconds since the epoch. For event time and display, never for leases."""
        ...

    def now_us(self) -> int:
        """Wall clock, UTC microseconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that only grow and go on while the machine is suspended or the process stopped (CLOCK_BOOTTIME)."""
        ...


class Chance(Protocol):
    """Randomness for jitter; never for identity."""

    def uniform(self, low: float, high: float) -> float: ...


class Ids(Protocol):
    """Fresh identifiers."""

    def new(self, kind: str, size: int = 6) -> str:
        """A new id ``{kind}-{random}`` of [a-z0-9-] only, with ``size`` random bytes: 6 are unique among thousands, 10 among thousands of millions."""
        ...


class SystemClock:
    """The operating system's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class SystemChance:
    """The interpreter's random generator."""

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)


class SystemIds:
    """Ids from the operating system's random source."""

    def new(self, kind: str, size: int = 6) -> str:
        return f"{kind}-{secrets.token_hex(size)}"
