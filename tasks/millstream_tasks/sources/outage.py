"""How long a reader puts up with a system it cannot reach.

Called by the sources that have a connection (SQL, Redis, RabbitMQ): they return empty reads while an outage lasts, so that barriers
still pass, and raise when it lasted too long. What must never happen here: a wait inside a poll.
"""

from __future__ import annotations

import time

from millstream_schema.errors import SourceUnavailable

FIRST_WAIT = 0.05
LONGEST_WAIT = 2.0


class Outage:
    """Tries again with a wait that doubles from 50 ms to 2 s, gives up ``give_up`` seconds after the first failure in a row."""

    def __init__(self, what: str, give_up: float) -> None:
        self._what = what
        self._give_up = give_up
        self._since: float | None = None
        self._wait = FIRST_WAIT
        self._next = 0.0

    def may_try(self) -> bool:
        """Whether the wait is over."""
        return self._since is None or time.monotonic() >= self._next

    def over(self) -> None:
        """It answered."""
        self._since = None
        self._wait = FIRST_WAIT

    def failed(self, error: BaseException) -> None:
        """It did not. Raises :class:`SourceUnavailable` once it has not answered for ``give_up`` seconds."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since >= self._give_up:
            raise SourceUnavailable(
                f"{self._what} could not be reached for {self._give_up:g} s: {error}. Check that it runs and that this node may reach it."
            ) from error
        self._next = now + self._wait
        self._wait = min(self._wait * 2, LONGEST_WAIT)


def negative_problems(**seconds: float) -> list[str]:
    """One sentence for each of these options that is below 0 s."""
    return [f"{name} must be at least 0 s, not {value!r}" for name, value in seconds.items() if value < 0]
