"""What the tests of durable tasks' statements share: requests, sessions, claims, and what must hold of the rows at any time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from millstream_schema.durable import outcomes as o
from millstream_schema.durable.records import NewTask, PermitRow, Policy, Receipt, TaskRow
from millstream_schema.durable.states import Effects, TaskState
from millstream_schema.store import claims, registry, settling, tasks
from millstream_schema.store.claims import Claimed
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.rows import to
from millstream_schema.store.settling import Answer, Settlement

LEASE = 60_000_000
SECOND = 1_000_000
HOUR = 3600 * SECOND
LANE = "default/default"
POLICY = Policy(attempts=3, delay_ms=0, max_delay_ms=0, losses=3)
_serial = itertools.count(1)


def fresh(kind: str = "x") -> str:
    return f"{kind}-{next(_serial)}"


def new(key: str = "k", **changes: Any) -> NewTask:
    """A request of handler ``work``; its id is its own."""
    base = NewTask(
        id=fresh("task"), namespace="default", handler="work", key=key, digest=f"1:{key}", queue="default", args='[[],[["l"],["k"]]]',
        effects=Effects.IDEMPOTENT, policy=POLICY,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def external(key: str = "k", **changes: Any) -> NewTask:
    return new(key, effects=Effects.EXTERNAL, **changes)


def submit(db: Database, *news: NewTask) -> list[Receipt]:
    return [db.run(lambda tx, n=n: tasks.submit(tx, n)) for n in news]  # type: ignore[misc]


def read(db: Database, task: str) -> TaskRow:
    row = db.read(lambda tx: tasks.read_task(tx, task))
    assert row is not None
    return row


def every(db: Database) -> dict[str, TaskRow]:
    """All tasks by key."""
    return db.read(lambda tx: {r["key"]: to(TaskRow, r) for r in tx.rows(tx.t.task.select())})


def states(db: Database) -> dict[str, TaskState]:
    return {key: row.state for key, row in every(db).items()}


def permit(db: Database, key: str = "default/p") -> PermitRow:
    found = db.read(lambda tx: {r["id"]: to(PermitRow, r) for r in tx.rows(tx.t.permit.select())})
    return found[key]


def session(db: Database, name: str = "s", lease_us: int = LEASE) -> str:
    db.run(lambda tx: registry.register_node(tx, name, name, 0, lease_us, "{}"))
    return name


def asked(
    tx: Transaction, who: str, count: int = 10, *, claim: str = "", lanes: Sequence[str] = (LANE,), handlers: Sequence[str] = ("work",),
    starting: int = 100, again: bool = False,
) -> Claimed | None:  # fmt: skip
    claim = claim or fresh("claim")
    return claims.claim(tx, who, claim, f"token-{claim}", dict.fromkeys(lanes, count), handlers, starting, again=again)


def take(db: Database, who: str = "s", count: int = 10, **options: Any) -> list[TaskRow]:
    """Claim tasks for a session that has a lease."""
    claimed = db.run(lambda tx: asked(tx, who, count, **options))
    assert claimed is not None
    return claimed.tasks


def taken(db: Database, *news: NewTask, who: str = "s", **options: Any) -> list[TaskRow]:
    """Submit these, register the session and claim them all; in the order given."""
    submit(db, *news)
    session(db, who)
    rows = {r.key: r for r in take(db, who, len(news), lanes=sorted({f"{n.namespace}/{n.queue}" for n in news}), **options)}
    assert set(rows) == {n.key for n in news}
    return [rows[n.key] for n in news]


def ending(row: TaskRow, outcome: o.AnyOutcome | None = None, **changes: Any) -> Settlement:
    s = Settlement(task=row.id, fence=row.fence, token=row.token, outcome=outcome or o.Succeeded("[1]"))
    return msgspec.structs.replace(s, **changes)


def settle(db: Database, *settlements: Settlement) -> list[Answer]:
    answers = db.run(lambda tx: settling.settle(tx, settlements))
    return [answers[s.task] for s in settlements]


def begin(db: Database, row: TaskRow, **changes: Any) -> bool:
    r = msgspec.structs.replace(row, **changes)
    return db.run(lambda tx: claims.begin(tx, r.session, r.id, r.fence, r.token))


def evidence(db: Database, task: str) -> list[tuple[int, str, int]]:
    """Fence, outcome and lateness of what is kept of its attempts."""
    return [(a.fence, a.outcome, a.late) for a in db.read(lambda tx: tasks.attempts(tx, task))]


def consistent(db: Database) -> None:
    """What must hold of the rows at any time: permits are held by as many tasks as they say, what is over holds nothing."""

    def work(tx: Transaction) -> tuple[list[TaskRow], list[PermitRow]]:
        return [to(TaskRow, r) for r in tx.rows(tx.t.task.select())], [to(PermitRow, r) for r in tx.rows(tx.t.permit.select())]

    rows, permits = db.run(work)
    held = Counter(r.permit_id for r in rows if r.permit_held)
    assert {p.id: p.held for p in permits} == {p.id: held.get(p.id, 0) for p in permits}
    assert all(p.held <= p.capacity for p in permits)
    for row in rows:
        over = row.state.settled or row.state is TaskState.UNKNOWN
        assert not (over and (row.permit_held or row.ready_lane or row.blocked_by or row.wake_us)), row
        assert bool(row.session) == row.state.held, row
        assert (row.ready_lane is None) == (row.state is not TaskState.READY or row.blocked_by is not None), row
        assert (row.settled_us > 0) == row.state.settled, row
