"""The parts of the coordinator's work that is done by looking: one after the other, in the order given.

Put together by the app, driven by :class:`~millstream_coordinator.coordinator.Coordinator`. What must never happen here: a part that keeps those behind it waiting for long;
each is
bounded.
"""

from __future__ import annotations

from typing import Protocol


class Sweep(Protocol):
    """One part. ``set_aside``: how often an item of it failed."""

    @property
    def set_aside(self) -> int: ...

    def sweep(self) -> None:
        """Everything that is due. Raises StoreError when the database is away; the next call goes on."""
        ...


class Sweeps:
    """Several parts as one."""

    def __init__(self, *parts: Sweep) -> None:
        self._parts = parts

    @property
    def set_aside(self) -> int:
        return sum(part.set_aside for part in self._parts)

    def sweep(self) -> None:
        for part in self._parts:
            part.sweep()
