"""Items of a sweep, one at a time: what fails is left alone for a while and stops nothing behind it.

Used by the sweeps. What must never happen here: a database that is away taken for the fault of one item.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from millstream_schema.errors import MillstreamError, StoreError
from millstream_schema.ports import Clock

log = structlog.get_logger(__name__)
HELD = 5.0
"""Seconds an item whose handling failed is left alone."""


class SettingAside:
    """``count``: how often something was set aside."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[str, float] = {}
        self.count = 0

    def each(self, what: str, work: Callable[[], None]) -> None:
        """Handle one item, unless it failed a moment ago. A database that is away is the caller's matter."""
        now = self._clock.monotonic()
        if self._held.get(what, 0.0) > now:
            return
        self._held.pop(what, None)
        try:
            work()
        except StoreError:
            raise
        except (MillstreamError, AssertionError):
            log.exception("set aside by the sweep", item=what)
            self._held[what] = now + HELD
            self.count += 1
