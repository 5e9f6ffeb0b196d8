"""Statements on gates: pauses and token buckets before queues, handlers and permit keys.

Read by every claim while somebody has set one, written by commands and by the claims that take tokens. Lock order: task rows, permits, then gates by id. What must never happen
here: a token taken without the gate's lock; a task parked under a gate that is not locked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import sqlalchemy as sa

from ..durable.gates import BITS, Gate, GateKind, available_us, filled, gate_id, gates_of, given_back, rate_blocker, rated, tokens
from ..durable.records import TaskRow
from ..errors import StoreUnavailable
from . import blockers, lanes, permits
from .database import Query, Transaction
from .rows import to
from .tables import Tables

DUE_AT_ONCE = 20
"""Gates with waiting tasks and a token for them that one claim looks at."""
NO_SOONER_US = 10_000
"""A bucket that fills faster is looked at so often."""


def _several(t: Tables) -> sa.Select[tuple[object, ...]]:
    return sa.select(t.gate).where(t.gate.c.id.in_(sa.bindparam("ids", expanding=True))).order_by(t.gate.c.id)


def _due(t: Tables) -> sa.Select[tuple[str]]:
    c = t.gate.c
    return sa.select(c.id).where(c.wake_us <= sa.bindparam("now")).order_by(c.wake_us).limit(DUE_AT_ONCE)


_READ = Query(_several)
_LOCKED = Query(lambda t: _several(t).with_for_update())
_LOCKED_IF_FREE = Query(lambda t: _several(t).with_for_update(skip_locked=True))
_DUE = Query(_due)
_OF_APPLICATIONS = Query(
    lambda t: sa.select(t.gate).where(t.gate.c.namespace.in_(sa.bindparam("namespaces", expanding=True)), t.gate.c.kind != GateKind.PERMIT)
)
_NEXT = Query(lambda t: sa.select(sa.func.min(t.gate.c.wake_us).label("next")))


def of_applications(tx: Transaction, namespaces: Iterable[str]) -> dict[str, Gate]:
    """Gates before queues and handlers of these namespaces, as they are; not locked."""
    return {r["id"]: to(Gate, r) for r in tx.rows(_OF_APPLICATIONS, namespaces=sorted(set(namespaces)))}


def read(tx: Transaction, ids: Sequence[str]) -> dict[str, Gate]:
    """Those of these that are there; not locked."""
    return {r["id"]: to(Gate, r) for r in tx.rows(_READ, ids=list(ids))} if ids else {}


def lock(tx: Transaction, ids: Iterable[str], *, wait: bool = True) -> dict[str, Gate]:
    """Those of these that are there, locked in the order of their ids. Without ``wait`` those somebody else holds are missing."""
    wanted = sorted(set(ids))
    return {r["id"]: to(Gate, r) for r in tx.rows(_LOCKED if wait else _LOCKED_IF_FREE, ids=wanted)} if wanted else {}


def write(tx: Transaction, gate: Gate) -> Gate:
    """A locked gate as it is now; as it is stored."""
    t = tx.t.gate
    values = {k: v for k, v in msgspec.structs.asdict(gate).items() if k not in ("id", "namespace", "kind", "name", "rev")}
    if tx.update(t, t.c.id == gate.id, t.c.rev == gate.rev, **values) != 1:
        raise AssertionError(f"gate {gate.id} changed under its lock")
    return msgspec.structs.replace(gate, rev=gate.rev + 1)


def fill_up(tx: Transaction, now: int) -> int:
    """Let as many of those that wait for a token be claimed as there are tokens; how many gates were due. What somebody else holds is passed over.

    Found, then locked by id: PostgreSQL keeps the lock on a row that it does not give because it has changed meanwhile, and a claim must know whether it holds gates.
    """
    due = [row["id"] for row in tx.rows(_DUE, now=now)]
    for gate in lock(tx, due, wait=False).values():
        if gate.wake_us is not None and gate.wake_us <= now:
            wake(tx, gate, now)
    return len(due)


def wake(tx: Transaction, gate: Gate, now: int) -> int:
    """Move up those for whom a locked gate has tokens; how many there were."""
    if not gate.limits:
        write(tx, msgspec.structs.replace(gate, wake_us=None))
        return 0
    gate = filled(gate, now)
    free = tokens(gate)
    moved = blockers.move_up(tx, rate_blocker(gate.id), free)
    more = not free or moved == free
    write(tx, msgspec.structs.replace(gate, wake_us=max(available_us(gate, free + 1), now + NO_SOONER_US) if more else None))
    return moved


def put_back(tx: Transaction, tasks: Sequence[TaskRow]) -> None:
    """Give the tokens back of tasks that never started."""
    taken: dict[str, list[int]] = {}
    for task in tasks:
        for kind, key in gates_of(task).items():
            if task.tokens & BITS[kind]:
                taken.setdefault(key, []).append(task.claimed_us)
    for gate in lock(tx, taken).values():
        if gate.limits:
            now = tx.now_us()
            back = filled(gate, now)
            for at in taken[gate.id]:
                back = given_back(back, at)
            write(tx, msgspec.structs.replace(back, wake_us=None if gate.wake_us is None else now))


def next_token(tx: Transaction) -> int | None:
    """When some bucket has a token for a task that waits for it."""
    row = tx.row(_NEXT)
    return None if row is None or row["next"] is None else int(row["next"])


def relieve(tx: Transaction, blocker: str, limit: int) -> int:
    """Move up what a blocker does not keep any more, by rank, at most so many; how many. Also what a permit or a bucket has let go of and nobody noticed."""
    kind, _, rest = blocker.partition(":")
    if kind == "permit":
        permits.refill(tx, rest)
        return 0
    gate = lock(tx, [rest]).get(rest)
    if gate is None or not (gate.paused if kind == "pause" else gate.limits):
        return blockers.move_up(tx, blocker, limit)
    if kind == "rate" and (gate.wake_us is None or gate.wake_us <= tx.now_us()):
        wake(tx, gate, tx.now_us())
    return 0


# -- commands


def pause(tx: Transaction, kind: GateKind, namespace: str, name: str, *, actor: str, reason: str) -> Gate:
    """Nothing passes from now on. Who paused it first, and why, is kept until it goes again; a repeat changes nothing."""
    _mirror(tx, kind, namespace, name, paused=1)
    gate = _made(tx, kind, namespace, name)
    if not gate.paused:
        now = tx.now_us()
        gate = msgspec.structs.replace(gate, paused=1, paused_by=actor, paused_why=reason, paused_us=now, changed_by=actor, changed_us=now)
        gate = write(tx, gate)
    return gate


def resume(tx: Transaction, kind: GateKind, namespace: str, name: str, *, actor: str) -> Gate | None:
    """It goes again; what was paused, None: nothing was. What is parked is moved by :func:`relieve`."""
    _mirror(tx, kind, namespace, name, paused=0)
    before = lock(tx, [gate_id(kind, namespace, name)]).get(gate_id(kind, namespace, name))
    if before is None or not before.paused:
        return None
    now = tx.now_us()
    wake = now if before.limits else None
    _keep(
        tx,
        msgspec.structs.replace(before, paused=0, paused_by="", paused_why="", paused_us=0, wake_us=wake, changed_by=actor, changed_us=now),
    )
    return before


def set_rate(tx: Transaction, kind: GateKind, namespace: str, name: str, rate: int, per_us: int, burst: int, *, actor: str) -> Gate:
    """At most ``rate`` starts in ``per_us``, ``burst`` of them at once; 0: as many as come. A repeat changes nothing but who set it."""
    gate = _made(tx, kind, namespace, name)
    now = tx.now_us()
    if (gate.rate, gate.per_us, gate.burst) != (rate, per_us, burst):
        gate = rated(gate, rate, per_us, burst, now)
    gate = msgspec.structs.replace(gate, changed_by=actor, changed_us=now)
    _keep(tx, gate)
    return gate


def _made(tx: Transaction, kind: GateKind, namespace: str, name: str) -> Gate:
    """The gate, locked."""
    key = gate_id(kind, namespace, name)
    for _ in range(3):  # somebody may take it away at the same moment
        tx.insert_or_nothing(tx.t.gate, **msgspec.structs.asdict(Gate(id=key, namespace=namespace, kind=kind, name=name)))
        found = lock(tx, [key]).get(key)
        if found is not None:
            return found
    raise StoreUnavailable(f"gate {key} is being changed by somebody else: try again")


def _keep(tx: Transaction, gate: Gate) -> None:
    """Write it, or take it away when nothing is set of it: claims pay only for what is set."""
    if gate.paused or gate.limits:
        write(tx, gate)
    else:
        tx.delete(tx.t.gate, tx.t.gate.c.id == gate.id)


def _mirror(tx: Transaction, kind: GateKind, namespace: str, name: str, *, paused: int) -> None:
    """A lane and a permit say themselves that they are paused: for who shares lanes out, and for who frees a permit."""
    own = f"{namespace}/{name}"
    if kind is GateKind.PERMIT:
        permit = permits.lock(tx, own)
        if permit is not None and permit.paused != paused:
            tx.update(tx.t.permit, tx.t.permit.c.id == own, paused=paused)
    elif kind is GateKind.QUEUE:
        lanes.ensure(tx, namespace, name)
        tx.update(tx.t.lane, tx.t.lane.c.id == own, paused=paused)


def of_namespace(tx: Transaction, namespace: str, kinds: Sequence[GateKind], after: str, limit: int) -> list[Gate]:
    """Gates of a namespace in the order of their ids."""
    t = tx.t.gate
    where = [t.c.namespace == namespace, t.c.kind.in_(list(kinds)), t.c.id > after]
    return [to(Gate, r) for r in tx.rows(sa.select(t).where(*where).order_by(t.c.id).limit(limit))]
