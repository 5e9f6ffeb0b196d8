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
    """Safe to use from several threads: each may look for itself."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db = database
        self._clock = clock
        self._quotas: dict[str, tuple[float, Mapping[str, Quota]]] = {}
        self._counted: dict[str, _Counted] = {}

    def refused(self, news: Sequence[NewTask]) -> dict[str, Refused]:
        """Those of these requests, by id, that may not come in: in the order of their keys the first ones may, as far as there is room. What is known already may."""
        limited = [namespace for namespace in sorted({n.namespace for n in news}) if self._set(namespace)]
        if not limited:
            return {}
        found: dict[str, Refused] = {}
        left: dict[str, Room] = {}
        wanted = len(news)
        for new in sorted(news, key=lambda n: (n.namespace, n.handler, n.key)):
            rooms = {q.id: left.get(q.id) or self._room(q, wanted) for q in self._of(new)}
            full = next((r for r in rooms.values() if r.count < 1), None)
            if full is None:
                left |= {key: msgspec.structs.replace(r, count=r.count - 1) for key, r in rooms.items()}
            elif not self._db.read(lambda tx, n=new: tasks.is_known(tx, n)):  # type: ignore[misc]
                found[new.id] = Refused(full.why, full.retry_us / 1e6)
        return found

    def note(self, tx: Transaction, news: Sequence[NewTask], accepted: Sequence[str]) -> None:
        """Within the transaction that accepts them: for windows that count acceptances. ``accepted``: ids of those that are new."""
        fresh = set(accepted)
        by_quota: dict[str, list[str]] = {}
        counting = set()
        for new in news:
            for quota in self._of(new) if new.id in fresh else ():
                by_quota.setdefault(quota.id, []).append(new.id)
                if quota.accept:
                    counting.add(quota.id)
        for key, ids in sorted(by_quota.items()):
            if key in counting:
                quotas.note(tx, key, min(ids), len(ids))
            if key in self._counted:
                self._counted[key].since += len(ids)

    def _set(self, namespace: str) -> bool:
        """Whether any quota is set in the namespace."""
        now = self._clock.monotonic()
        until, known = self._quotas.get(namespace, (0.0, {}))
        if now >= until:
            known = {q.queue: q for q in self._db.read(lambda tx: quotas.of_namespace(tx, namespace))}
            self._quotas[namespace] = (now + KEPT, known)
        return bool(known)

    def _of(self, new: NewTask) -> list[Quota]:
        """Its namespace's and its queue's, as they were read."""
        _until, known = self._quotas.get(new.namespace, (0.0, {}))
        return [known[name] for name in ("", new.queue) if name in known]

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
