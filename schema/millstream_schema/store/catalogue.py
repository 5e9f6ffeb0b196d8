"""Statements on the catalogue of handlers and on what live worker sessions serve.

Written when a session registers, read by clients that submit by name and by whoever explains why nothing happens. What must never happen here: a session's start that waits for
another's because both tell of the same handlers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from ..durable.catalogue import HandlerEntry, Served
from ..states import NodeState
from . import registry
from .database import Query, Transaction
from .rows import to

FRESH_US = 600_000_000
"""An entry seen within so long is not written again."""

_NAMED = Query(lambda t: sa.select(t.handler).where(t.handler.c.name == sa.bindparam("name")))


def enter(tx: Transaction, session: str, name: str, lease_us: int, served: Served, told: Sequence[HandlerEntry]) -> None:
    """A worker session begins: its row, and what it tells of its handlers. A repeat after an unknown outcome changes nothing."""
    if told:
        _record(tx, told)
    registry.register_node(tx, session, name, 0, lease_us, msgspec.json.encode(served).decode())


def _record(tx: Transaction, entries: Sequence[HandlerEntry]) -> None:
    """Entries that are known and fresh are not touched."""
    t = tx.t.handler
    now = tx.now_us()
    known = tx.rows(sa.select(t.c.name, t.c.version, t.c.seen_us).where(t.c.name.in_([e.name for e in entries])))
    seen = {(r["name"], r["version"]): int(r["seen_us"]) for r in known}
    for e in sorted(entries, key=lambda e: (e.name, e.version)):
        at = seen.get((e.name, e.version))
        if at is None:
            tx.insert_or_nothing(t, **{**msgspec.structs.asdict(e), "since_us": now, "seen_us": now})
        elif at < now - FRESH_US:
            tx.update(t, t.c.name == e.name, t.c.version == e.version, t.c.seen_us < now, seen_us=now)


def versions(tx: Transaction, name: str) -> list[HandlerEntry]:
    """All known versions of a handler."""
    return [to(HandlerEntry, r) for r in tx.rows(_NAMED, name=name)]


def names(tx: Transaction, limit: int) -> list[str]:
    """Known handlers."""
    t = tx.t.handler
    return [r["name"] for r in tx.rows(sa.select(t.c.name).distinct().order_by(t.c.name).limit(limit))]


def queues(tx: Transaction) -> set[str]:
    """Queues that known handlers declare."""
    t = tx.t.handler
    return {r["queue"] for r in tx.rows(sa.select(t.c.queue).distinct())}


def live_sessions(tx: Transaction) -> dict[str, Served]:
    """What the worker sessions serve whose lease holds, by session."""
    t = tx.t.node
    live = [t.c.slots == 0, t.c.state == NodeState.ACTIVE, t.c.expires_us > tx.now()]
    return {r["id"]: msgspec.json.decode(r["info"], type=Served) for r in tx.rows(sa.select(t.c.id, t.c.info).where(*live))}


def forget(tx: Transaction, before_us: int) -> int:
    """Versions of handlers that no session served since; how many went. What is served now has been seen now."""
    t = tx.t.handler
    now = tx.now_us()
    serving = {found for s in live_sessions(tx).values() for found in s.handlers.items()}
    stale = [(r["name"], r["version"]) for r in tx.rows(sa.select(t.c.name, t.c.version).where(t.c.seen_us < now - FRESH_US))]
    for name, version in sorted(stale):
        if (name, version) in serving:
            tx.update(t, t.c.name == name, t.c.version == version, seen_us=now)
    return tx.delete(t, t.c.seen_us < before_us)
