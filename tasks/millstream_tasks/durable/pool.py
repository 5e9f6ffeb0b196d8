"""Where handlers run: Celery's pool, threads, or the simulator, behind one port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from millstream_schema.durable.outcomes import Reported
from millstream_schema.durable.records import NewTask, TaskRow

Report = Callable[[str, int, Reported, tuple[NewTask, ...], float], None]
"""Task, fence, how it ended, what it submits, how many seconds it ran. An attempt whose own transaction settled it is reported as that at once, and again at its end."""

Back = Callable[[str, int], None]
"""Task, fence: handed over and taken back before it began. It is the host's again."""


class Pool(Protocol):
    """Runs attempts. A pool that can be taken along runs one at a time in each process, so that a death is charged to what ran and to nothing else.

    Calls nobody back: what it has to say goes through the host's thread-safe method ``ended``."""

    def free(self) -> int:
        """Slots in which an attempt would begin at once."""
        ...

    def ahead(self) -> int:
        """How many attempts could be handed over beyond the free slots now. They wait in the pool, and a slot need not ask for its next one."""
        ...

    def waiting(self) -> int:
        """How many have been handed over like this and have not begun."""
        ...

    def start(self, task: TaskRow) -> None:
        """Run the attempt, the row as it was claimed, in a free slot, or behind another if :meth:`ahead` allows. Reports its end once, or gives it back to the host
        when it has not begun, whatever happens to it."""
        ...

    def give_back(self) -> None:
        """Give back what has not begun."""
        ...

    def cancel(self, task: str, fence: int) -> None:
        """Let its handler know that its end is asked for; killed after its grace."""
        ...

    def lease(self, deadline: float) -> None:
        """The session's lease holds until this instant of the monotonic clock."""
        ...

    def tick(self) -> float:
        """Called at each step of the host; seconds until the pool wants it again."""
        ...

    def kill(self, task: str, fence: int) -> None:
        """End it at once where the pool can; its report does not matter any more."""
        ...
