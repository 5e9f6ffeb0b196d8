"""What may come in: quotas of a queue of a namespace, or of a whole namespace (an application), as pure functions.

A quota limits the tasks that are not over (``backlog``), those accepted in a window of time (``accept`` in ``per_us``), and may refuse all (``accepting``). It applies to
submissions from outside; what tasks, schedules and workflows submit is counted in the backlog and never refused. What must never happen here: a clock, SQL.
"""

from __future__ import annotations

import msgspec

LARGEST_ACCEPT = 10_000
"""Acceptances of a window that are counted one by one: for more, give a shorter window."""
LONGEST_WINDOW_US = 3_600_000_000
BACKLOG_RETRY_US = 5_000_000
"""After so long a full backlog is worth another look; nobody knows when it has room."""
CLOSED_RETRY_US = 60_000_000


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """``queue``: empty for the whole namespace. 0: no such limit."""

    id: str
    namespace: str
    queue: str
    accepting: int = 1
    backlog: int = 0
    accept: int = 0
    per_us: int = 0
    changed_by: str = ""
    changed_us: int = 0
    rev: int = 0

    @property
    def limits(self) -> bool:
        """Whether it says anything."""
        return bool(self.backlog or self.accept or not self.accepting)

    @property
    def of(self) -> str:
        """Whose it is, for people."""
        return f"queue {self.queue!r}" if self.queue else f"namespace {self.namespace!r}"


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted, each up to its limit. ``free_us``: when the oldest acceptance that counts leaves the window."""

    now_us: int
    open: int = 0
    accepted: int = 0
    free_us: int = 0


class Room(msgspec.Struct, frozen=True):
    """How many more may come in; if not as many as asked: why, and after how long to ask again."""

    count: int
    why: str = ""
    retry_us: int = 0


def quota_id(namespace: str, queue: str) -> str:
    """A namespace holds no slash."""
    return f"{namespace}/{queue}"


def room(quota: Quota, use: Use, wanted: int) -> Room:
    """What one quota lets in."""
    if not quota.accepting:
        return Room(0, f"{quota.of} does not accept tasks just now", CLOSED_RETRY_US)
    found = Room(wanted)
    if quota.backlog and quota.backlog - use.open < found.count:
        found = Room(
            max(0, quota.backlog - use.open), f"{quota.of} has {quota.backlog} tasks that are not over: that is its quota", BACKLOG_RETRY_US
        )
    if quota.accept and quota.accept - use.accepted < found.count:
        said = f"{quota.of} accepts {quota.accept} tasks in {quota.per_us / 1e6:g} s: that is its quota"
        found = Room(max(0, quota.accept - use.accepted), said, max(1, use.free_us - use.now_us))
    return found
