"""Hints: messages that hasten what rows already say. Every one may be lost, repeated, late or out of order.

A node's hint says "look at your rows" and carries the fences it was sent under, so that an old coordinator's is seen and counted; the coordinator's hint names
a job to look at. What must never happen here: a hint that is the only carrier of anything.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class NodeHint(msgspec.Struct, frozen=True, tag="node"):
    """Coordinator → node: something changed for you. A node ignores one of a lower term than it has seen."""

    node: str
    job: str
    generation: int
    term: int
    what: str


class JobHint(msgspec.Struct, frozen=True, tag="job"):
    """Node or client → coordinator: look at this job."""

    job: str


class Hints(Protocol):
    """Sends hints; never blocks for long, never raises: what is lost costs latency only."""

    def to_node(self, hint: NodeHint) -> None: ...

    def to_coordinator(self, hint: JobHint) -> None: ...


class NoHints:
    """Control by rows alone."""

    def to_node(self, hint: NodeHint) -> None:
        """Nothing needs to be said: rows are polled."""

    def to_coordinator(self, hint: JobHint) -> None:
        """Nothing needs to be said: rows are polled."""
