"""What one claim may take: the first of each lane that has room, without what has expired or is blocked.

What is blocked is parked, and with it what stands behind it in the lane for the same reason, in bulk: each blocked row is seen once and not by every claim. The claim then looks
again at once, so that one call finds what is free behind thousands that wait. Called by ``claims.claim``, whose transaction this is. What must never happen here: a task given
that is not READY in its lane under a lock; a wait for a lock after the first round, when the order of locks can no longer be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.decisions import on_limit
from ..durable.gates import (
    Gate,
    Gatekeeper,
    GateKind,
    Verdict,
    available_us,
    filled,
    gate_id,
    gates_of,
    pause_blocker,
    permit_blocker,
    rate_blocker,
    tokens,
)  # fmt: skip
from ..durable.records import PermitRow, Policy, TaskRow
from ..durable.states import TaskState
from . import blockers, gates, permits
from .database import Query, Transaction
from .tables import Tables
from .tasks import apply, known_here, readable

ROUNDS = 4
"""How often one claim looks. What is left then is found by the next one, which is made at once."""
LOWEST = -(1 << 62)
"""Below every rank."""
PARKED_AT_ONCE = 1_000
"""Rows of a lane that are looked at when something in front was blocked."""


class Selected(msgspec.Struct):
    """``tasks``: locked, permitted, not yet given. ``more``: something was moved out of the way to the last, so there may be free tasks behind it.

    ``now_us``: when that was decided; ``next_us``: when a queue whose bucket is empty has a token.
    """

    tasks: list[TaskRow]
    now_us: int
    more: bool = False
    next_us: int | None = None


def candidates(t: Tables) -> sa.Select[tuple[object, ...]]:
    c = t.task.c
    handlers: sa.BindParameter[Any] = sa.bindparam("handlers", expanding=True)
    where = [c.ready_lane == sa.bindparam("lane"), c.rank >= sa.bindparam("floor"), c.handler.in_(handlers)]
    return sa.select(t.task).where(*where).order_by(c.rank, c.id).limit(sa.bindparam("count")).with_for_update(skip_locked=True)


def _further(t: Tables) -> sa.Select[tuple[object, ...]]:
    """Likewise, without those that were looked at before."""
    return candidates(t).where(t.task.c.id.not_in(sa.bindparam("seen", expanding=True)))


def _readable(t: Tables) -> sa.Select[tuple[object, ...]]:
    """Likewise, behind what this version cannot read."""
    return _further(t).where(known_here(t))


def _front(t: Tables) -> sa.Select[tuple[object, ...]]:
    c = t.task.c
    front = sa.select(c.id, c.namespace, c.handler, c.permit, c.permit_held).where(
        c.ready_lane == sa.bindparam("lane"), c.rank >= sa.bindparam("floor")
    )
    return front.order_by(c.rank, c.id).limit(PARKED_AT_ONCE)


def _mark(t: Tables) -> sa.Update:
    c = t.task.c
    where = [c.id.in_(sa.bindparam("ids", expanding=True)), c.state == TaskState.READY]
    return sa.update(t.task).where(*where).values(tokens=sa.bindparam("bits"), rev=c.rev + 1)


_CANDIDATES = Query(candidates)
_FURTHER = Query(_further)
_READABLE = Query(_readable)
_FRONT = Query(_front)
_MARK = Query(_mark)


def select(
    tx: Transaction, shares: Mapping[str, int], handlers: Sequence[str], now: int, *, gated: bool, floors: Mapping[str, int]
) -> Selected:
    """Up to ``shares[lane]`` tasks of each lane by rank; what one lane does not fill is given to those that have more. ``gated``: somebody has set a gate.

    ``floors``: lane → rank from which on to look; from the start if it is not named.
    """
    room = {lane: count for lane, count in sorted(shares.items()) if count > 0} if handlers else {}
    return _Scan(tx, room, handlers, now, gated=gated, floors=floors).run()


class _Scan:
    """One claim's look at its lanes. ``_held``: gates that are locked, with what was taken from them; written at the end."""

    def __init__(
        self, tx: Transaction, room: Mapping[str, int], handlers: Sequence[str], now: int, *, gated: bool, floors: Mapping[str, int]
    ) -> None:
        self._tx = tx
        self._floors = floors
        self._room = room
        self._handlers = list(handlers)
        self._now = now
        self._gated = gated
        self._waits = not (gated and gates.fill_up(tx, now))
        """Whether a lock is waited for: in the first round, unless gates, which come after permits, are locked already."""
        self._makes = True
        """Whether permits that are missing are made, which waits for whoever makes the same: in the first round. Who has made one waits for nothing more."""
        known = gates.of_applications(tx, [lane.partition("/")[0] for lane in room]) if gated and room else {}
        self._known: dict[str, Gate] = {key: filled(gate, now) for key, gate in known.items()}
        self._held: dict[str, Gate] = {}
        self._read: dict[str, Gate] = {}
        self._full: set[str] = set()
        self._roomy: set[str] = set()
        self._found: list[TaskRow] = []
        self._seen: list[str] = []
        self._moved = 0

    def run(self) -> Selected:
        total, room, more = sum(self._room.values()), self._open(self._room), False
        for _ in range(ROUNDS):
            if not room:
                break
            before = self._moved
            deep = self._round(room)
            left, moved = total - len(self._found), self._moved > before
            room = self._open(_split(left, deep)) if left and deep else {}
            more = bool(room) and moved
            if more:
                for lane in room:
                    self._clear(lane)
            self._waits = self._makes = False
        self._write()
        return Selected(sorted(self._found, key=lambda t: (t.rank, t.id)), self._now, more, self._next_token())

    def _open(self, room: Mapping[str, int]) -> dict[str, int]:
        """Without the lanes that are paused, and no more of the others than their buckets hold."""
        found = {}
        for lane, count in room.items():
            gate = self._gate(f"{GateKind.QUEUE.value}:{lane}")
            if gate is not None:
                count = 0 if gate.paused else min(count, tokens(gate)) if gate.limits else count
            if count:
                found[lane] = count
        return found

    def _gate(self, key: str) -> Gate | None:
        return self._held.get(key) or self._known.get(key)

    def _round(self, room: Mapping[str, int]) -> list[str]:
        """Look at the first of each lane; the lanes that may hold more."""
        wanted: list[TaskRow] = []
        deep = []
        for lane, count in room.items():
            values = {"lane": lane, "floor": self._floors.get(lane, LOWEST), "handlers": self._handlers, "count": count}
            rows = self._tx.rows(_FURTHER, seen=self._seen, **values) if self._seen else self._tx.rows(_CANDIDATES, **values)
            tasks, others = readable(rows)
            if others:
                self._seen += [row["id"] for row in others]
                tasks, others = readable(self._tx.rows(_READABLE, seen=self._seen, **values))
                self._seen += [row["id"] for row in others]
            wanted += tasks
            if len(tasks) + len(others) == count:
                deep.append(lane)
        in_time = self._in_time([t for t in wanted if t.ending is None])
        over = [t for t in wanted if t.ending is not None]  # no code of theirs runs any more: they need no permit and no token
        self._found += over
        self._seen += [t.id for t in over]
        if self._gated or any(t.permit or t.tokens for t in in_time):
            self._judge(in_time)
        else:
            self._found += in_time
            self._seen += [t.id for t in in_time]
        return deep

    def _in_time(self, tasks: list[TaskRow]) -> list[TaskRow]:
        """Those that may still start; the others expire here."""
        kept = []
        for task in tasks:
            late = on_limit(task, self._now)
            if late is not None:
                apply(self._tx, task, late, self._now)
                self._moved += 1
            else:
                kept.append(task)
        return kept

    # -- who may pass

    def _judge(self, tasks: Sequence[TaskRow]) -> None:
        """Lock what decides about these, decide, write it."""
        mine = self._permits(tasks)
        lines = {key: self._line(permit, tasks) for key, permit in mine.items()}
        passed = self._lock_gates(tasks)
        keeper = Gatekeeper(self._held, mine, lines)
        verdict = keeper.judge([t for t in tasks if t.id not in passed])
        self._held |= keeper.gates
        self._seen += [*passed, *verdict.passed, *(t.id for t, _ in verdict.granted)]
        self._park(verdict.parked)
        for key, permit in mine.items():
            refused = permit_blocker(key) in verdict.parked.values()
            (self._full if refused or keeper.room[key] <= 0 or permit.paused else self._roomy).add(key)
        self._call_up(lines, tasks, verdict)
        self._found += self._granted(mine, verdict)

    def _permits(self, tasks: Sequence[TaskRow]) -> dict[str, PermitRow]:
        """The permits they need, locked; made where there is none."""
        needed = {t.permit_id: t for t in tasks if t.permit}
        found = permits.lock_several(self._tx, list(needed), wait=self._waits)
        missing = sorted(needed.keys() - found.keys()) if self._makes else []
        new = sorted(set(missing) - permits.existing(self._tx, missing)) if missing else []
        for key in new:
            self._waits = False
            permits.ensure(self._tx, key, msgspec.json.decode(needed[key].policy, type=Policy).permit_capacity)
        return found | permits.lock_several(self._tx, new, wait=self._waits)

    def _line(self, permit: PermitRow, tasks: Sequence[TaskRow]) -> list[str]:
        """Who is first in line of a permit, if any of these tasks keeps its order."""
        room = 0 if permit.paused else permit.capacity - permit.held
        ordered = any(t.ordered and not t.permit_held and t.permit_id == permit.id for t in tasks)
        return permits.first_in_line(self._tx, permit.namespace, permit.key, room) if ordered and room > 0 else []

    def _lock_gates(self, tasks: Sequence[TaskRow]) -> set[str]:
        """Lock the gates before these tasks that are not locked yet; the tasks about whose gate somebody else decides just now."""
        if not self._gated:
            return set()
        asked = {gate_id(GateKind.PERMIT, t.namespace, t.permit) for t in tasks if t.permit}
        self._known |= gates.read(self._tx, sorted(asked - self._known.keys()))
        before = {t.id: [key for key in gates_of(t).values() if key in self._known] for t in tasks}
        wanted = {key for keys in before.values() for key in keys} - self._held.keys()
        fresh = gates.lock(self._tx, wanted, wait=self._waits)
        if any(gate.limits for gate in fresh.values()):
            self._now = max(
                self._now, self._tx.now_us()
            )  # tokens are counted by when they are taken, not by when they were first waited for
        self._read |= fresh
        self._held |= {key: filled(gate, self._now) for key, gate in fresh.items()}
        if self._waits:
            for gone in wanted - fresh.keys():
                del self._known[gone]
            return set()
        return {task for task, keys in before.items() if any(key not in self._held for key in keys)}

    # -- writing

    def _park(self, parked: Mapping[str, str]) -> None:
        by_blocker: dict[str, list[str]] = {}
        for task, blocker in parked.items():
            by_blocker.setdefault(blocker, []).append(task)
        for blocker, ids in sorted(by_blocker.items()):
            blockers.park(self._tx, blocker, ids)
            self._awaited(blocker)
        self._moved += len(parked)

    def _awaited(self, blocker: str) -> None:
        """Something waits for a token now: its gate says when to look again."""
        gate = self._held.get(blocker.removeprefix("rate:"))
        if gate is not None and blocker == rate_blocker(gate.id):
            at = max(available_us(gate), self._now + gates.NO_SOONER_US)
            self._held[gate.id] = msgspec.structs.replace(gate, wake_us=at if gate.wake_us is None else min(at, gate.wake_us))

    def _call_up(self, lines: Mapping[str, Sequence[str]], tasks: Sequence[TaskRow], verdict: Verdict) -> None:
        """Who is first in its line and was not looked at, because it is parked: its turn has come."""
        done = {t.id for t, _ in verdict.granted}
        here = {t.id for t in tasks}
        for permit, line in lines.items():
            head = next((task for task in line if task not in done), None)
            if head is not None and head not in here:
                blockers.call_up(self._tx, permit_blocker(permit), [head])

    def _granted(self, mine: Mapping[str, PermitRow], verdict: Verdict) -> list[TaskRow]:
        """Take the permits, and note of each task what it has taken."""
        result = []
        with_permit: dict[str, list[tuple[TaskRow, int]]] = {}
        marked: dict[int, list[TaskRow]] = {}
        for task, bits in verdict.granted:
            if task.permit:
                with_permit.setdefault(task.permit_id, []).append((task, bits))
            elif bits != task.tokens:
                marked.setdefault(bits, []).append(task)
            else:
                result.append(task)
        for bits, tasks in marked.items():
            self._tx.changed(_MARK, ids=[t.id for t in tasks], bits=bits)
            result += [msgspec.structs.replace(t, tokens=bits, rev=t.rev + 1) for t in tasks]
        for key in sorted(with_permit):
            result += self._take(mine[key], with_permit[key])
        return result

    def _take(self, permit: PermitRow, granted: Sequence[tuple[TaskRow, int]]) -> list[TaskRow]:
        kept = sum(t.permit_held for t, _ in granted)
        seq = permits.take(self._tx, permit, len(granted) - kept, kept)
        t = self._tx.t.task
        result = []
        for offset, (task, bits) in enumerate(granted):
            values = {"permit_held": 1, "permit_seq": seq + offset, "tokens": bits}
            self._tx.update(t, t.c.id == task.id, t.c.state == TaskState.READY, **values)
            result.append(msgspec.structs.replace(task, rev=task.rev + 1, **values))
        return result

    def _clear(self, lane: str) -> None:
        """Park what stands at the front of a lane and is blocked by what is locked here: whoever ends it afterwards sees what is parked."""
        chosen = {t.id for t in self._found}
        front = [row for row in self._tx.rows(_FRONT, lane=lane, floor=self._floors.get(lane, LOWEST)) if row["id"] not in chosen]
        wanted = {f"{r['namespace']}/{r['permit']}" for r in front if r["permit"]}
        self._full |= permits.lock_full(self._tx, sorted(wanted - self._full - self._roomy))
        by_kind: dict[str, list[str]] = {}
        for row in front:
            blocker = self._blocks(row)
            if blocker:
                by_kind.setdefault(blocker.partition(f"{row['namespace']}/")[0], []).append(row["id"])
                self._awaited(blocker)
        for kind, ids in sorted(by_kind.items()):
            blockers.park_line(self._tx, lane, kind, ids)

    def _blocks(self, row: Mapping[str, Any]) -> str:
        """What keeps a row that was not judged, as far as it is known; empty: perhaps nothing."""
        handler = self._held.get(gate_id(GateKind.HANDLER, row["namespace"], row["handler"]))
        if handler is not None and handler.paused:
            return pause_blocker(handler.id)
        permit = f"{row['namespace']}/{row['permit']}"
        if row["permit"] and not row["permit_held"] and permit in self._full:
            return permit_blocker(permit)
        for gate in (handler, self._held.get(f"{GateKind.PERMIT.value}:{permit}") if row["permit"] else None):
            if gate is not None and gate.limits and not tokens(gate):
                return rate_blocker(gate.id)
        return ""

    def _write(self) -> None:
        for key in sorted(self._read):
            if self._held[key] != filled(self._read[key], self._now):
                gates.write(self._tx, self._held[key])

    def _next_token(self) -> int | None:
        """When a lane that was asked for has a token again."""
        lanes = [self._gate(f"{GateKind.QUEUE.value}:{lane}") for lane in self._room]
        dry = [available_us(g) for g in lanes if g is not None and g.limits and not g.paused and not tokens(g)]
        return min(dry, default=None)


def _split(count: int, lanes: Sequence[str]) -> dict[str, int]:
    """As evenly as it goes."""
    each, more = divmod(count, len(lanes))
    return {lane: each + (at < more) for at, lane in enumerate(lanes) if each + (at < more)}


def soonest(*instants: int | None) -> int | None:
    """The first of these that there is."""
    return min((i for i in instants if i is not None), default=None)


__all__ = ["Selected", "candidates", "select", "soonest"]
