"""``Queues`` and ``Permits``: what operators set of durable tasks' queues, handlers and permit keys, and how these stand.

Called by user code and by the CLI. Each command is one guarded transaction, repeated as it was when the answer to its COMMIT is lost; what it lets go is moved up in bounded
chunks, the rest by the sweep. What must never happen here: a command without its actor; a look whose cost grows with a backlog.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import structlog

from millstream_schema import given
from millstream_schema.durable.gates import Gate, GateKind, gate_id, pause_blocker, permit_blocker, rate_blocker, rate_of
from millstream_schema.durable.quotas import LARGEST_ACCEPT, Quota, quota_id
from millstream_schema.durable.records import PermitRow, permit_id
from millstream_schema.durable.requests import HANDLER, NAME
from millstream_schema.errors import ConfigurationError, PermitNotFound
from millstream_schema.ports import Clock
from millstream_schema.reasons import storable
from millstream_schema.store import gates, lanes, permits, quotas
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.lanes import Standing
from millstream_schema.store.permits import Line

from .installation import Installation
from .opened import OpenedNamespace

log = structlog.get_logger(__name__)
CHUNK, CHUNKS = 500, 20
"""Rows a command moves up in one transaction, and how many such it makes; the sweep does the rest."""
LOOKED_AT = 10_000
"""Tasks of a queue, or that wait for a permit, that are counted."""
LARGEST = 1_000_000
_QUEUE, _HANDLER = given.named(NAME, optional=True), given.named(HANDLER, optional=True)


def _key(key: object) -> str:
    """A permit's key."""
    return "must be text: a permit has a name" if key == "" else given.text(key)


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue of the namespace: what is set of it and how it stands. ``gate``: its pause and its rate.

    ``weighed_by``, ``weighed_us``: who set its weight and when (UTC µs); empty and 0: nobody has.
    """

    queue: str
    weight: int
    weighed_by: str
    weighed_us: int
    gate: Gate | None
    quota: Quota | None
    standing: Standing


class PermitView(msgspec.Struct, frozen=True, kw_only=True):
    """A permit: its row, pause and rate, who holds it and who waits."""

    permit: PermitRow
    gate: Gate | None
    line: Line


class _Commands(OpenedNamespace):
    """What queues, handlers and permits have in common."""

    def __init__(
        self,
        installation: Installation,
        namespace: str = "default",
        *,
        actor: str = "",
        clock: Clock | None = None,
        database: Database | None = None,
        wake: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(installation, namespace, clock=clock, database=database, actor=actor or "unnamed")
        self._wake = wake

    def _set(self, what: str, name: str, **values: object) -> None:
        """Told in the log, with who did it."""
        log.info("admission changed", of=what, namespace=self.namespace, name=name, actor=self._actor, **values)
        if self._wake is not None and what == "queue":
            self._wake(name)

    def _pause(self, kind: GateKind, name: str, reason: str) -> Gate:
        gate = self._run(lambda tx: gates.pause(tx, kind, self.namespace, name, actor=self._actor, reason=storable(reason)))
        self._set(kind.value, name, paused=True, reason=reason)
        return gate

    def _resume(self, kind: GateKind, name: str) -> bool:
        """Whether it was paused. Moves up in chunks what waited; harmless to repeat."""
        before = self._run(lambda tx: gates.resume(tx, kind, self.namespace, name, actor=self._actor))
        self._relieve(pause_blocker(gate_id(kind, self.namespace, name)))
        if kind is GateKind.PERMIT:
            self._relieve(permit_blocker(permit_id(self.namespace, name)))
        self._set(kind.value, name, paused=False)
        return before is not None

    def _rate(self, kind: GateKind, name: str, rate: str | None, burst: int | None) -> Gate:
        number, per_us = (0, 0) if rate is None else rate_of(rate)
        size = number if burst is None else burst
        if rate is not None and not 1 <= size <= LARGEST:
            raise ConfigurationError(f"burst must be between 1 and {LARGEST}, not {size}")
        size = 0 if rate is None else size
        gate = self._run(lambda tx: gates.set_rate(tx, kind, self.namespace, name, number, per_us, size, actor=self._actor))
        if rate is None:
            self._relieve(rate_blocker(gate.id))
        self._set(kind.value, name, rate=rate or "none", burst=size)
        return gate

    def _relieve(self, blocker: str) -> None:
        for _ in range(CHUNKS):
            if self._run(lambda tx: gates.relieve(tx, blocker, CHUNK)) < CHUNK:
                return


class Queues(_Commands):
    """Queues and handlers of a namespace: pauses, weights, rates, quotas. Also a context manager; :meth:`close` gives its connections back.

    ``actor``: who acts, kept with what is done. ``wake``: told of a queue after it was changed. Raises SchemaMismatch, StoreUnavailable; ConfigurationError for what cannot be set.
    """

    @given.checked(queue=_QUEUE, handler=_HANDLER, reason=given.reason)
    def pause(self, queue: str = "", *, handler: str = "", reason: str) -> Gate:
        """No task of the queue, or of the handler, is claimed until it is resumed; what runs goes on. Deadlines go on, too. A second pause changes nothing."""
        return self._pause(*_named(queue, handler), reason)

    @given.checked(queue=_QUEUE, handler=_HANDLER)
    def resume(self, queue: str = "", *, handler: str = "") -> bool:
        """It goes on, by rank; whether it was paused."""
        return self._resume(*_named(queue, handler))

    @given.checked(queue=_QUEUE, handler=_HANDLER, rate=given.a(str, optional=True), burst=given.whole(1, LARGEST, optional=True))
    def set_rate(self, queue: str = "", *, handler: str = "", rate: str | None, burst: int | None = None) -> Gate:
        """At most so many starts in a time, over all workers, e.g. ``"100/m"``; ``burst``: at once (the number of the rate). None: as many as come."""
        return self._rate(*_named(queue, handler), rate, burst)

    @given.checked(queue=given.named(NAME), weight=given.whole(1, LARGEST))
    def set_weight(self, queue: str, weight: int) -> None:
        """Its share of the slots beside other queues and other namespaces, which weigh 1."""
        self._run(lambda tx: lanes.set_weight(tx, self.namespace, queue, weight, actor=self._actor))
        self._set("queue", queue, weight=weight)

    @given.checked(queue=_QUEUE, backlog=given.whole(0, 10 * LARGEST), accept=given.a(str, optional=True), accepting=given.flag)
    def set_quota(self, queue: str = "", *, backlog: int = 0, accept: str | None = None, accepting: bool = True) -> Quota:
        """What may come in to a queue, or without one to the namespace. ``backlog``: tasks that are not over; ``accept``: in a window, e.g. ``"100/m"``; 0 and None: no limit."""
        number, per_us = (0, 0) if accept is None else rate_of(accept)
        if number > LARGEST_ACCEPT:
            raise ConfigurationError(
                f"at most {LARGEST_ACCEPT} acceptances are counted in a window, not {number}: give them for a shorter time"
            )
        wanted = Quota(
            id=quota_id(self.namespace, queue), namespace=self.namespace, queue=queue, accepting=int(accepting), backlog=backlog, accept=number, per_us=per_us,
        )  # fmt: skip
        quota = self._run(lambda tx: quotas.set_quota(tx, wanted, actor=self._actor))
        self._set("quota", queue or self.namespace, backlog=backlog, accept=accept or "none", accepting=accepting)
        return quota

    @given.checked(limit=given.ROWS)
    def list(self, *, limit: int = 100) -> list[QueueView]:
        """Queues with tasks that are not over, or of which something is set."""

        def work(tx: Transaction) -> list[QueueView]:
            named = {g.name for g in gates.of_namespace(tx, self.namespace, [GateKind.QUEUE], "", limit)}
            named |= {q.queue for q in quotas.of_namespace(tx, self.namespace) if q.queue} | set(lanes.names(tx, self.namespace, limit))
            return [self._view(tx, name) for name in sorted(named)[:limit]]

        return self.database.read(work)

    @given.checked(queue=given.named(NAME))
    def show(self, queue: str) -> QueueView:
        """One of them, whether there is anything or not."""
        return self.database.read(lambda tx: self._view(tx, queue))

    def quota(self) -> Quota | None:
        """The namespace's own."""
        return self.database.read(lambda tx: quotas.read(tx, self.namespace, ""))

    @given.checked(limit=given.ROWS)
    def handlers(self, *, limit: int = 100) -> Sequence[Gate]:
        """Pauses and rates of handlers."""
        return self.database.read(lambda tx: gates.of_namespace(tx, self.namespace, [GateKind.HANDLER], "", limit))

    def _view(self, tx: Transaction, queue: str) -> QueueView:
        key, weight = gate_id(GateKind.QUEUE, self.namespace, queue), lanes.weight(tx, self.namespace, queue)
        return QueueView(
            queue=queue, weight=weight.weight, weighed_by=weight.changed_by, weighed_us=weight.changed_us,
            gate=gates.read(tx, [key]).get(key), quota=quotas.read(tx, self.namespace, queue), standing=lanes.standing(tx, self.namespace, queue, LOOKED_AT),
        )  # fmt: skip


class Permits(_Commands):
    """Permits of a namespace: capacities, pauses, rates, who holds them. Likewise."""

    @given.checked(key=_key, capacity=given.whole(1, LARGEST))
    def set_capacity(self, key: str, capacity: int) -> None:
        """How many tasks may hold it at once from now on. Those beyond a smaller one keep theirs until they end."""
        self._run(lambda tx: permits.set_capacity(tx, permit_id(self.namespace, key), capacity, actor=self._actor))
        self._set("permit", key, capacity=capacity)

    @given.checked(key=_key, reason=given.reason)
    def pause(self, key: str, *, reason: str) -> Gate:
        """Nobody gets it until it is resumed; who holds it goes on."""
        return self._pause(GateKind.PERMIT, key, reason)

    @given.checked(key=_key)
    def resume(self, key: str) -> bool:
        """It is given again, by rank; whether it was paused."""
        return self._resume(GateKind.PERMIT, key)

    @given.checked(key=_key, rate=given.a(str, optional=True), burst=given.whole(1, LARGEST, optional=True))
    def set_rate(self, key: str, *, rate: str | None, burst: int | None = None) -> Gate:
        """At most so many starts in a time of tasks that need it, e.g. ``"5/s"``. None: as many as come."""
        return self._rate(GateKind.PERMIT, key, rate, burst)

    @given.checked(after=given.text, limit=given.ROWS)
    def list(self, *, after: str = "", limit: int = 100) -> list[PermitRow]:
        """In the order of their keys, those after a key."""
        return self.database.read(lambda tx: permits.of_namespace(tx, self.namespace, after, limit))

    @given.checked(key=given.text)
    def show(self, key: str) -> PermitView:
        """Who holds it and who waits. Raises PermitNotFound for one no task has needed yet and nobody has set."""
        own = gate_id(GateKind.PERMIT, self.namespace, key)

        def work(tx: Transaction) -> PermitView | None:
            row = permits.read(tx, permit_id(self.namespace, key))
            if row is None:
                return None
            return PermitView(permit=row, gate=gates.read(tx, [own]).get(own), line=permits.line(tx, self.namespace, key, LOOKED_AT))

        found = self.database.read(work)
        if found is None:
            raise PermitNotFound(f"there is no permit {key!r} in namespace {self.namespace!r}: no task that needs it has been claimed yet")
        return found


def _named(queue: str, handler: str) -> tuple[GateKind, str]:
    """Before what a gate is meant to stand."""
    if bool(queue) == bool(handler):
        raise ConfigurationError("name either a queue or a handler")
    return (GateKind.QUEUE, queue) if queue else (GateKind.HANDLER, handler)
