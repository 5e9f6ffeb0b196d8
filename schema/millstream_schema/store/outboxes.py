"""Statements on an outbox: entries come in in users' transactions, relays take them under a lease, write what became of them, people look and decide.

:func:`put` runs in a caller's transaction, everything else in the relay's own on the same database, by that database's clock. What must never happen here: a decision; a write by a
relay whose lease is over; an entry that goes before it was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ..durable.outbox import EntryCause, EntryDecision, EntryRow, EntryState
from ..durable.records import NewTask
from ..errors import ConfigurationError
from .callers import Home
from .database import Query, Transaction
from .outbox_table import outbox_table
from .rows import Row, left_alone, parted, to
from .tables import Tables

TEXT_KEPT = 2_000
MANY = 10_000


class Put(msgspec.Struct, frozen=True):
    """Answer to a submission: the entry under the key. ``conflict``: the digest it has, when the content differs."""

    entry: str
    state: EntryState
    task: str
    replayed: bool
    conflict: str


def _by_key(prefix: str) -> sa.Select[Any]:
    c = outbox_table(prefix).c
    names = ("target", "namespace", "handler", "key")
    return sa.select(c.id, c.state, c.task, c.digest).where(*[c[n] == sa.bindparam(n) for n in names])


_BY_KEY = Query(lambda t: _by_key(t.prefix))
_BY_KEY_LOCKED = Query(lambda t: _by_key(t.prefix).with_for_update(read=True, key_share=True))


def create(tx: Transaction) -> None:
    """The table, unless it is there."""
    tx.create_table(outbox_table(tx.t.prefix))


def home(tables_: Tables) -> Home:
    """What a caller's session must lead to."""
    table = outbox_table(tables_.prefix)
    how = f"there is no table {table.name}: create it with `millstream outbox init` or Outbox.create(url)"
    return Home(
        tables=tables_, known_by=table, written=table, missing=lambda _: ConfigurationError(f"the session's database has no outbox: {how}")
    )


def exists(tx: Transaction) -> bool:
    return tx.has_table(outbox_table(tx.t.prefix).name)


def put(tx: Transaction, target: str, new: NewTask) -> Put:
    """Keep a request, complete as it is now, or answer with what is kept under its key."""
    now = tx.now()
    times = dict.fromkeys(("due_us", "since_us", "created_us", "changed_us"), now)
    values: dict[str, Any] = {
        "id": new.id, "target": target, "namespace": new.namespace, "handler": new.handler, "key": new.key, "digest": new.digest,
        "request": msgspec.json.encode(new).decode(), "state": EntryState.WAITING, "cause": "", "reason": "", "task": "", "sends": 0, "tries": 0, "failures": 0,
        "owner": "", "claim": "", "generation": 0, "lease_us": 0, "sent_us": 0, "actor": new.actor, "rev": 0,
    }  # fmt: skip
    if tx.insert_or_nothing(outbox_table(tx.t.prefix), times, **values):
        return Put(new.id, EntryState.WAITING, "", False, "")
    key = {"target": target, "namespace": new.namespace, "handler": new.handler, "key": new.key}
    known = tx.row(_BY_KEY, **key) or tx.row(_BY_KEY_LOCKED, **key)
    if known is None:
        raise AssertionError(f"outbox entry {new.id} exists under another key")
    mine, same = known["id"] == new.id, known["digest"] == new.digest
    return Put(known["id"], EntryState(known["state"]), known["task"], same and not mine, "" if same else known["digest"])


def claim(
    tx: Transaction, target: str, owner: str, claim_id: str, count: int, lease_us: int, judge: Callable[[EntryRow, int], EntryDecision]
) -> list[EntryRow]:
    """Take entries that are due, or whose relay is gone, the longest due first; each gets a new generation. Executed again after a lost answer it gives the same ones.

    ``judge`` says of each whether it is sent or parked.
    """
    t = outbox_table(tx.t.prefix)
    mine = [t.c.claim == claim_id, t.c.owner == owner, t.c.state == EntryState.SENDING]
    now = tx.now_us()
    before = tx.rows(sa.select(t).where(t.c.target == target, t.c.lease_us > now, *mine))
    if before:
        return _readable(before)[0]
    found: list[EntryRow] = []
    for state, due in ((EntryState.SENDING, t.c.lease_us), (EntryState.WAITING, t.c.due_us)):
        wanted = (
            sa.select(t).where(t.c.target == target, t.c.state == state, due <= now).order_by(t.c.due_us, t.c.id).limit(count - len(found))
        )
        entries, others = _readable(tx.rows(wanted.with_for_update(skip_locked=True)))
        if others:
            entries, _ = _readable(tx.rows(wanted.where(_known_here(t)).with_for_update(skip_locked=True)))
        found += entries
    taken = []
    for entry in found:
        decision = judge(entry, now)
        if decision.state is EntryState.PARKED:
            _write(tx, entry, decision, now)
            continue
        _update(
            tx, entry, state=EntryState.SENDING, owner=owner, claim=claim_id, generation=entry.generation + 1, lease_us=now + lease_us,
            sends=entry.sends + 1, tries=entry.tries + 1, changed_us=now,
        )  # fmt: skip
        taken.append(
            msgspec.structs.replace(
                entry, state=EntryState.SENDING, owner=owner, claim=claim_id, generation=entry.generation + 1, sends=entry.sends + 1
            )
        )
    return taken


def settle(tx: Transaction, entry: EntryRow, decide: Callable[[EntryRow, int], EntryDecision]) -> bool:
    """Write what became of an entry; False: too late, it is no longer this relay's. Executed again after a lost answer it is True."""
    t = outbox_table(tx.t.prefix)
    row = tx.row(sa.select(t).where(t.c.id == entry.id).with_for_update())
    if row is None:
        return False
    now, at = tx.now_us(), to(EntryRow, row)
    if at.generation == entry.generation and at.state is not EntryState.SENDING and at.claim == entry.claim:
        return True  # written before, by this same claim
    if at.generation != entry.generation or at.owner != entry.owner or at.state is not EntryState.SENDING or at.lease_us <= now:
        return False
    _write(tx, at, decide(at, now), now)
    return True


def _write(tx: Transaction, entry: EntryRow, decision: EntryDecision, now: int) -> None:
    _update(
        tx, entry, state=decision.state, cause=decision.cause, reason=decision.reason[:TEXT_KEPT], task=decision.task, owner="", lease_us=0,
        due_us=decision.due_us or entry.due_us, failures=entry.failures + decision.failures,
        sent_us=now if decision.state is EntryState.SENT else 0, changed_us=now,
    )  # fmt: skip


def _update(tx: Transaction, entry: EntryRow, **values: Any) -> None:
    t = outbox_table(tx.t.prefix)
    where = [t.c.id == entry.id, t.c.state == entry.state, t.c.generation == entry.generation, t.c.rev == entry.rev]
    if tx.update(t, *where, **values) != 1:
        raise AssertionError(f"outbox entry {entry.id} changed under its lock")


def _readable(rows: Sequence[Row]) -> tuple[list[EntryRow], list[Row]]:
    return parted(rows, lambda row: to(EntryRow, row))


def _known_here(t: sa.Table) -> sa.ColumnElement[bool]:
    """What those have in common that this version can read."""
    return t.c.cause.in_([cause.value for cause in EntryCause])


def next_due(tx: Transaction, target: str) -> int | None:
    """Microseconds until an entry is due, or the lease of one ends; None: nothing waits."""
    t = outbox_table(tx.t.prefix)
    known = [_known_here(t)] if left_alone() else []
    instants = [
        tx.rows(sa.select(sa.func.min(due).label("at")).where(t.c.target == target, t.c.state == state, *known))[0]["at"]
        for state, due in ((EntryState.WAITING, t.c.due_us), (EntryState.SENDING, t.c.lease_us))
    ]
    due = [int(i) for i in instants if i is not None]
    return max(0, min(due) - tx.now_us()) if due else None


def read(tx: Transaction, entry: str) -> EntryRow | None:
    t = outbox_table(tx.t.prefix)
    row = tx.row(sa.select(t).where(t.c.id == entry))
    return None if row is None else to(EntryRow, row)


def find(tx: Transaction, state: EntryState, limit: int) -> list[EntryRow]:
    """The oldest in a state."""
    t = outbox_table(tx.t.prefix)
    return _readable(tx.rows(sa.select(t).where(t.c.state == state).order_by(t.c.created_us, t.c.id).limit(limit)))[0]


def counts(tx: Transaction) -> list[dict[str, Any]]:
    """How many in which state for which cause, and the age of the oldest in µs."""
    t = outbox_table(tx.t.prefix)
    n, oldest = sa.func.count().label("entries"), (tx.now() - sa.func.min(t.c.created_us)).label("oldest_us")
    return tx.rows(sa.select(t.c.state, t.c.cause, n, oldest).group_by(t.c.state, t.c.cause).order_by(t.c.state, t.c.cause))


def retry(tx: Transaction, entry: str, why: str, refusal: Callable[[EntryRow], str]) -> str | None:
    """Have a parked entry sent again under its own key; why not, or empty. None: there is no such entry."""
    t = outbox_table(tx.t.prefix)
    row = tx.row(sa.select(t).where(t.c.id == entry).with_for_update())
    if row is None:
        return None
    at = to(EntryRow, row)
    if at.state is EntryState.WAITING and at.cause is EntryCause.PERSON and at.reason == why[:TEXT_KEPT]:
        return ""  # asked before
    refused = refusal(at)
    if refused:
        return refused
    now = tx.now_us()
    _update(
        tx, at, state=EntryState.WAITING, cause=EntryCause.PERSON, reason=why[:TEXT_KEPT], tries=0, failures=0,
        due_us=now, since_us=at.since_us if at.sends else now, changed_us=now,
    )  # fmt: skip
    return ""


def forget_sent(tx: Transaction, target: str, older_us: int, limit: int) -> int:
    """Remove entries that were accepted so long ago; how many. What was not accepted stays."""
    t = outbox_table(tx.t.prefix)
    old = sa.select(t.c.id).where(t.c.target == target, t.c.state == EntryState.SENT, t.c.sent_us < tx.now() - older_us).limit(limit)
    ids: Sequence[str] = [r["id"] for r in tx.rows(old)]
    return tx.delete(t, t.c.id.in_(ids), t.c.state == EntryState.SENT) if ids else 0
