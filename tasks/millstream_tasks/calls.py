"""Calls that must all be made, whatever becomes of one.

Called where several things of a subtask hear the same or are closed. What must never happen here: an error that is swallowed, or one that keeps the rest from its call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def make_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call in order, then raise the first error there was. Signals that end the attempt (no ``Exception``) go through at once."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as exc:  # raised below
            first = first or exc
    if first is not None:
        raise first
