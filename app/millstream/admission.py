"""What may come in, as a client finds out: quotas of its queue and of its namespace, looked at before a request is stored.

Used by :class:`millstream.tasks.Tasks`. That nothing is set is believed for a second, so that who has no quota pays nothing; a count is believed the longer, the longer it
took. What must never happen here: a lock in a caller's transaction; a repeat of what is accepted already that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from millstream_schema.durable.quotas import Quota, Room, Use, room
from millstream_schema.durable.records import NewTask
from millstream_schema.ports import Clock
from millstream_schema.store import quotas, tasks
from millstream_schema.store.database import Database, Transaction

KEPT = 1.0
"""Seconds for which what is set is believed."""
COST = 20
"""A count is good for so many times as long as it took: a large backlog is not counted at each submission."""
LONGEST_COUNT = 2.0


class Refused(msgspec.Struct, frozen=True):
    """Why a request may not come in, and after how many seconds to try again."""

    why: str
    retry_after: float


class _Counted(msgspec.Struct):
    use: Use
    until: float
    since: int = 0


class Admission:
    """For one namespace. Safe to use from several threads: each may look for itself."""

    def __init__(self, database: Database, clock: Clock, namespace: str) -> None:
        self._db = database
        self._clock = clock
        self._namespace = namespace
        self._until = 0.0
        self._quotas: Mapping[str, Quota] = {}
        self._counted: dict[str, _Counted] = {}

    def refused(self, news: Sequence[NewTask]) -> dict[str, Refused]:
        """Those of these requests, by id, that may not come in: in the order of their keys the first ones may, as far as there is room. What is known already may."""
        if not self._set():
            return {}
        found: dict[str, Refused] = {}
        left: dict[str, Room] = {}
        wanted = len(news)
        for new in sorted(news, key=lambda n: (n.namespace, n.handler, n.key)):
            rooms = {q.id: left.get(q.id) or self._room(q, wanted) for q in self._of(new.queue)}
            full = next((r for r in rooms.values() if r.count < 1), None)
            if full is None:
                left |= {key: msgspec.structs.replace(r, count=r.count - 1) for key, r in rooms.items()}
            elif not self._db.read(lambda tx, n=new: tasks.is_known(tx, n)):  # type: ignore[misc]
                found[new.id] = Refused(full.why, full.retry_us / 1e6)
        return found

    def note(self, tx: Transaction, news: Sequence[NewTask], accepted: Sequence[str]) -> None:
        """Within the transaction that accepts them: for windows that count acceptances. ``accepted``: ids of those that are new."""
        if not self._quotas:
            return
        fresh = set(accepted)
        by_queue: dict[str, list[str]] = {}
        for new in news:
            if new.id in fresh:
                by_queue.setdefault(new.queue, []).append(new.id)
        for queue, ids in sorted(by_queue.items()):
            counting = [q.id for q in self._of(queue) if q.accept]
            if counting:
                quotas.note(tx, counting, min(ids), len(ids))
            for q in self._of(queue):
                if q.id in self._counted:
                    self._counted[q.id].since += len(ids)

    def _set(self) -> bool:
        """Whether any quota is set in the namespace."""
        now = self._clock.monotonic()
        if now >= self._until:
            self._quotas = {q.queue: q for q in self._db.read(lambda tx: quotas.of_namespace(tx, self._namespace))}
            self._until = now + KEPT
        return bool(self._quotas)

    def _of(self, queue: str) -> list[Quota]:
        return [self._quotas[name] for name in ("", queue) if name in self._quotas]

    def _room(self, quota: Quota, wanted: int) -> Room:
        now = self._clock.monotonic()
        counted = self._counted.get(quota.id)
        if counted is None or now >= counted.until:
            use = self._db.read(lambda tx: quotas.use(tx, quota))
            after = self._clock.monotonic()
            counted = self._counted[quota.id] = _Counted(use, after + min(LONGEST_COUNT, (after - now) * COST))
        use = counted.use
        more = msgspec.structs.replace(use, open=use.open + counted.since, accepted=use.accepted + counted.since)
        return room(quota, more, wanted)
