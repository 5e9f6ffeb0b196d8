"""The crash table: each transaction on durable tasks, schedules, deliveries and outboxes, with what has to be there before it.

Read by ``test_crash_table``, which ends each before and after its COMMIT. What must never happen here: an id, a claim or an instant that differs from one run to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
from tests.contract.store.delivery_rows import MINUTE_US, asked_for, pulled, subscribed
from tests.contract.store.schedule_rows import come_again, definition, every_fire, publish, set_task
from tests.contract.store.schedule_rows import trigger as triggered
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import HOUR, LANE, LEASE, POLICY, SECOND, ending, every, new, settle, submit

from millstream_schema.canonical import fingerprint
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.bulk import Act, OperationRow
from millstream_schema.durable.catalogue import HandlerEntry, Served
from millstream_schema.durable.deliveries import SubscriptionState
from millstream_schema.durable.effects import IntentId, IntentRow, IntentState, KnownCall
from millstream_schema.durable.finding import Place
from millstream_schema.durable.gates import GateKind
from millstream_schema.durable.outbox import Accepted, EntryCause, EntryDecision, EntryRow, EntryState, Limits, on_claim, on_sent
from millstream_schema.durable.progress import Note, Told, progress_of
from millstream_schema.durable.quotas import Quota, quota_id
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.durable.recurrence import Interval
from millstream_schema.durable.retention import RetentionRule
from millstream_schema.durable.schedules import Overlap
from millstream_schema.durable.states import Effects, TaskState
from millstream_schema.ports import SystemClock
from millstream_schema.store import (
    catalogue,
    claims,
    deliveries,
    events,
    fires,
    gates,
    intents,
    lanes,
    operations,
    outboxes,
    permits,
    progress,
    quotas,
    registry,
    retention,
    schedules,
    settling,
    subscriptions,
    sweeps,
    tasks,
)
from millstream_schema.store.database import Database, Faults, Transaction
from millstream_schema.store.intents import Attempt
from millstream_schema.store.outbox_table import outbox_table
from millstream_schema.store.rows import to

OUTBOX_PREFIX = "crash_"
TARGET = "installation-1"
SAID = Told(progress_of(3, 4, 10, "rows"), (Note(1, "skipped", ""), Note(2, "", '{"n":1}')))
DAILY = Interval(every_us=86_400 * SECOND)
NEVER = 2**60
S = SubscriptionState
Prepare = Callable[[Database], Any]
Work = Callable[[Transaction, Any, bool], Any]


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """One transaction. ``prepare`` gives what ``act`` needs; its last argument says that an earlier try may have been committed. ``covers``: the statement functions it calls.

    ``through``: instead of ``act``, what opens its transaction itself. ``answer``: whether a repeat says the same (else only the rows are compared).
    ``touched``: tables whose rows a repeat may write anew, with the same content but for times. ``on``: whose tables.
    """

    covers: tuple[Callable[..., Any], ...]
    prepare: Prepare
    act: Work | None = None
    through: Callable[[Database], Any] | None = None
    answer: bool = True
    touched: frozenset[str] = frozenset()
    on: str = "installation"


def nothing(_db: Database) -> None:
    """Nothing has to be there."""


def opened(store: Opened, on: str, faults: Faults | None = None) -> Database:
    """Another process's way to the database. Its connections end with it; what was compiled for them is kept for the next one."""
    way = store.ways.get((on, faults is None))
    if way is None:
        prefix = OUTBOX_PREFIX if on == "outbox" else store.db.tables.prefix
        way = store.ways[on, faults is None] = Database(store.url, SystemClock(), prefix=prefix)
    way.faults = faults
    return way


# -- tasks


def task(key: str, **changes: Any) -> NewTask:
    """A request whose id is its key."""
    return new(key, id=key, **changes)


def session(db: Database, who: str = "s") -> None:
    db.run(lambda tx: registry.register_node(tx, who, who, 0, LEASE, "{}"))


def ask(
    tx: Transaction, _ready: Any, again: bool, *, claim: str = "c", count: int = 10, starting: int = 100, queues: tuple[str, ...] = (LANE,)
) -> Any:
    found = claims.claim(tx, "s", claim, f"token-{claim}", dict.fromkeys(queues, count), ["work"], starting, again=again)
    assert found is not None
    return [(r.key, r.state, r.fence, r.token, r.permit_seq) for r in found.tasks]


def claimed(*news: NewTask, starting: int = 100, after: Callable[[Database], Any] = nothing) -> Callable[[Database], dict[str, TaskRow]]:
    def work(db: Database) -> dict[str, TaskRow]:
        submit(db, *news)
        session(db)
        db.run(lambda tx: ask(tx, None, False, claim="before", starting=starting))
        after(db)
        return every(db)

    return work


def settled_as(outcome: o.AnyOutcome, news: tuple[NewTask, ...] = (), **changes: Any) -> Boundary:
    """The end of one attempt, with others behind its permit."""
    one = (task("a", permit="p", **changes), task("b", permit="p", **changes))
    return Boundary(
        covers=(settling.settle,),
        prepare=claimed(*one),
        act=lambda tx, rows, _: settling.settle(tx, [ending(rows["a"], outcome, submits=news, chance=0.5)]),
        answer=False,  # the first time it applies, then it is a duplicate
    )


def submitting(*news: NewTask, before: Prepare = nothing) -> Boundary:
    return Boundary(covers=(tasks.submit,), prepare=before, act=lambda tx, _ready, _: [tasks.submit(tx, n) for n in news])


def ready(*news: NewTask) -> Prepare:
    def work(db: Database) -> None:
        submit(db, *news)
        session(db)

    return work


def limited(kind: GateKind, name: str, *news: NewTask) -> Prepare:
    """One token an hour before these."""

    def work(db: Database) -> None:
        db.run(lambda tx: gates.set_rate(tx, kind, "default", name, 1, HOUR, 1, actor="me"))
        ready(*news)(db)

    return work


def due(*news: NewTask) -> Prepare:
    """Waiting tasks whose instant has come."""

    def work(db: Database) -> None:
        submit(db, *news)
        t = db.tables.task
        db.run(lambda tx: tx.update(t, t.c.state == TaskState.SCHEDULED, wake_us=1))

    return work


def late(db: Database) -> None:
    """May not start any more."""
    submit(db, task("a", start_by_us=HOUR), task("b", deadline_us=HOUR, permit="p", ordered=True), task("c", permit="p", ordered=True))
    t = db.tables.task
    db.run(lambda tx: tx.update(t, t.c.id.in_(["a", "b"]), limit_us=1, start_by_us=1, deadline_us=1))


def lost(db: Database) -> None:
    """The lease of the session is over."""
    n = db.tables.node
    db.run(lambda tx: tx.update(n, n.c.id == "s", expires_us=1))


def in_review(db: Database) -> TaskRow:
    row = claimed(task("a", effects=Effects.EXTERNAL))(db)["a"]
    db.run(lambda tx: claims.begin(tx, "s", row.id, row.fence, row.token))
    settle(db, ending(row, o.AskedForReview("look")))
    return every(db)["a"]


def reviewing(**given: Any) -> Boundary:
    values: dict[str, Any] = {"done": False, "result": "", "reason": "I looked", "actor": "me", **given}
    return Boundary(covers=(settling.review,), prepare=in_review, act=lambda tx, row, _: settling.review(tx, row.id, row.rev, **values))


def lost_for_good(db: Database) -> Any:
    rows = claimed(
        task("a"), task("b", effects=Effects.EXTERNAL), task("c", permit="p"), task("d", policy=msgspec.structs.replace(POLICY, losses=0))
    )(db)
    lost(db)
    db.run(lambda tx: settling.expire_session(tx, "s", 0))
    return rows


CLAIMING: dict[str, Boundary] = {
    "claim": Boundary(covers=(claims.claim,), prepare=ready(task("a"), task("b"), task("c", effects=Effects.EXTERNAL)), act=ask),
    "claim of some": Boundary(
        covers=(claims.claim,),
        prepare=ready(task("a"), task("b"), task("c")),
        act=lambda tx, ready, again: ask(tx, ready, again, count=2, starting=1),
    ),
    "claim with permits": Boundary(
        covers=(claims.claim,), prepare=ready(task("a", permit="p"), task("b", permit="p"), task("c", permit="q", ordered=True)), act=ask
    ),
    "claim with a token": Boundary(
        covers=(claims.claim,), prepare=limited(GateKind.QUEUE, "default", task("a"), task("b")), act=ask, touched=frozenset({"gate"})
    ),
    "claim that parks": Boundary(
        covers=(claims.claim,), prepare=limited(GateKind.HANDLER, "work", task("a"), task("b")), act=ask, touched=frozenset({"gate"})
    ),
    "start": Boundary(
        covers=(claims.begin,),
        prepare=claimed(task("a", effects=Effects.EXTERNAL)),
        act=lambda tx, rows, _: claims.begin(tx, "s", "a", rows["a"].fence, rows["a"].token),
    ),
    "what an attempt says": Boundary(
        covers=(progress.write,),
        prepare=claimed(task("a")),
        act=lambda tx, rows, _: progress.write(tx, {("a", rows["a"].fence): SAID}),
    ),
    "wake-up of due work": Boundary(
        covers=(claims.wake_due,),
        prepare=due(task("a", delay_us=HOUR), task("b", delay_us=HOUR, permit="p")),
        act=lambda tx, _ready, _: claims.wake_due(tx, 10),
        answer=False,
    ),
    "expiry of what may not start any more": Boundary(
        covers=(claims.expire_late,), prepare=late, act=lambda tx, _ready, _: claims.expire_late(tx, 10), answer=False
    ),
}
SUBMITTING: dict[str, Boundary] = {
    "submit": submitting(task("a")),
    "submit with everything": submitting(
        task("a", delay_us=HOUR, start_by_us=HOUR, deadline_us=HOUR, permit="p", priority=7, business_key="b")
    ),
    "submit of a known key": submitting(task("a"), before=lambda db: submit(db, new("a", id="first"))),
    "submit of a key with other content": submitting(task("a"), before=lambda db: submit(db, new("a", id="first", digest="1:other"))),
    "submit many": Boundary(
        covers=(tasks.submit_many,),
        prepare=lambda db: submit(db, new("b", id="first")),
        act=lambda tx, _ready, _: tasks.submit_many(tx, [task("a"), task("b"), task("c", delay_us=HOUR)]),
    ),
}
MORE = (task("next"), task("later", delay_us=HOUR))
SETTLING: dict[str, Boundary] = {
    "success": settled_as(o.Succeeded("[1]")),
    "success of several": Boundary(
        covers=(settling.settle,),
        prepare=claimed(task("a"), task("b"), task("c")),
        act=lambda tx, rows, _: settling.settle(tx, [ending(rows[k]) for k in "abc"]),
        answer=False,
    ),
    "success somebody hears of": Boundary(
        covers=(settling.settle, events.record),
        prepare=claimed(task("a"), after=lambda db: db.run(lambda tx: subscriptions.create(tx, asked("s"), 0))),
        act=lambda tx, rows, _: settling.settle(tx, [ending(rows["a"])]),
        answer=False,
    ),
    "success with continuations": settled_as(o.Succeeded("[1]"), MORE),
    "success whose continuation is refused": settled_as(o.Succeeded("[1]"), (task("next"), new("b", id="b2", digest="1:other"))),
    "failure": settled_as(o.GaveUp("no")),
    "exception": settled_as(o.Raised("ValueError", "no")),
    "retry": settled_as(o.RetryAsked(HOUR, "later")),
    "retry that keeps its place": settled_as(o.RetryAsked(HOUR, "later"), ordered=True),
    "snooze": settled_as(o.Snoozed(HOUR)),
    "cancelled by itself": settled_as(o.CancelledItself()),
    "crash": settled_as(o.Crashed("SIGKILL")),
    "never begun": settled_as(o.Unstarted()),
    "never begun, with its token": Boundary(
        covers=(settling.settle, gates.put_back),
        prepare=lambda db: (limited(GateKind.QUEUE, "default", task("a"))(db), claimed(task("b"))(db))[1],
        act=lambda tx, rows, _: settling.settle(tx, [ending(rows["a"], o.Unstarted())]),
        answer=False,
        touched=frozenset({"gate"}),
    ),
    "asked for review": settled_as(o.AskedForReview("look"), effects=Effects.EXTERNAL),
    "late report": Boundary(
        covers=(settling.settle, tasks.keep_attempt),
        prepare=lambda db: (rows := claimed(task("a"))(db), settle(db, ending(rows["a"], o.GaveUp("no"))))[0],
        act=lambda tx, rows, _: settling.settle(tx, [ending(rows["a"], o.Succeeded("[2]"))]),
        answer=False,
    ),
    "cancel of what waits": Boundary(
        covers=(settling.cancel,),
        prepare=ready(task("a", permit="p", ordered=True), task("b", permit="p", ordered=True)),
        act=lambda tx, _ready, _: settling.cancel(tx, "a"),
    ),
    "cancel of what runs": Boundary(
        covers=(settling.cancel,), prepare=claimed(task("a")), act=lambda tx, _ready, _: settling.cancel(tx, "a")
    ),
    "cancel of what is held and never began": Boundary(
        covers=(settling.cancel,),
        prepare=claimed(task("a", effects=Effects.EXTERNAL, permit="p"), task("b", permit="p")),
        act=lambda tx, _ready, _: settling.cancel(tx, "a"),
    ),
    "end of a lease": Boundary(
        covers=(settling.expire_session,),
        prepare=claimed(task("a"), after=lost),
        act=lambda tx, _rows, _: settling.expire_session(tx, "s", 0),
    ),
    "take-back": Boundary(
        covers=(settling.take_back,),
        prepare=lost_for_good,
        act=lambda tx, _rows, _: settling.take_back(tx, "s", lambda: 0.5, 100),
        answer=False,
    ),
    "review: done": reviewing(done=True, result="[7]"),
    "review: failed": reviewing(),
    "review: a new task": reviewing(successor=task("a/retry")),
}


# -- calls to the outside


CHARGE = IntentId("a", "charge")


def who(rows: dict[str, TaskRow]) -> Attempt:
    return Attempt("a", rows["a"].fence, rows["a"].token)


def called(state: IntentState = IntentState.OPEN) -> Callable[[Database], dict[str, TaskRow]]:
    """An attempt that was about to make a call, and what came of that."""

    def work(db: Database) -> dict[str, TaskRow]:
        rows = claimed(task("a"))(db)
        db.run(lambda tx: intents.open_intent(tx, who(rows), CHARGE, "before"))
        if state is IntentState.NOT_DONE:
            db.run(lambda tx: intents.deny(tx, CHARGE, "before", "refused", "me"))
        return every(db)

    return work


def told_of(row: IntentRow | None) -> Any:
    assert row is not None
    return row.state, row.opening, row.calls, row.result


def doubted(db: Database) -> TaskRow:
    rows = called()(db)
    settle(db, ending(rows["a"], o.InDoubt("timed out")))
    return every(db)["a"]


CALLING: dict[str, Boundary] = {
    "intent": Boundary(
        covers=(intents.open_intent,),
        prepare=claimed(task("a")),
        act=lambda tx, rows, _: told_of(intents.open_intent(tx, who(rows), CHARGE, "now")),
    ),
    "intent of a call that did not happen": Boundary(
        covers=(intents.open_intent,),
        prepare=called(IntentState.NOT_DONE),
        act=lambda tx, rows, _: told_of(intents.open_intent(tx, who(rows), CHARGE, "now")),
    ),
    "outcome of a call": Boundary(
        covers=(intents.record,), prepare=called(), act=lambda tx, _rows, _: told_of(intents.record(tx, CHARGE, "[1]", "", "me"))
    ),
    "outcome of a call, by the worker of its attempt": Boundary(
        covers=(intents.write_known, intents.record),
        prepare=called(),
        act=lambda tx, _rows, _: told_of(intents.write_known(tx, CHARGE, KnownCall("before", True, "[1]", "", "me"))),
    ),
    "call that did not happen, by the worker of its attempt": Boundary(
        covers=(intents.write_known, intents.deny),
        prepare=called(),
        act=lambda tx, _rows, _: told_of(intents.write_known(tx, CHARGE, KnownCall("before", False, None, "busy", "me"))),
    ),
    "another outcome of a call": Boundary(
        covers=(intents.record,),
        prepare=lambda db: (called()(db), db.run(lambda tx: intents.record(tx, CHARGE, "[1]", "", "me")))[0],
        act=lambda tx, _rows, _: told_of(intents.record(tx, CHARGE, "[2]", "", "zombie")),
    ),
    "call that did not happen": Boundary(
        covers=(intents.deny,), prepare=called(), act=lambda tx, rows, _: told_of(intents.deny(tx, CHARGE, "before", "no", "me", who(rows)))
    ),
    "what is known of a doubt": Boundary(
        covers=(intents.note,),
        prepare=called(),
        act=lambda tx, _rows, _: intents.note(tx, CHARGE, "before", "timed out"),
        touched=frozenset({"intent"}),
    ),
    "end in doubt": Boundary(
        covers=(settling.settle,),
        prepare=called(),
        act=lambda tx, rows, _: settling.settle(tx, [ending(rows["a"])]),
        answer=False,  # the first time it applies, then it is a duplicate
    ),
    "cancel in doubt": Boundary(
        covers=(settling.cancel,),
        prepare=lambda db: settle(db, ending(called()(db)["a"], o.Unstarted())),
        act=lambda tx, _ready, _: settling.cancel(tx, "a"),
    ),
    **{
        f"review of a doubt: {name}": Boundary(
            covers=(settling.review, intents.close_reviewed),
            prepare=doubted,
            act=lambda tx, row, _, given=given: settling.review(  # type: ignore[misc]
                tx, row.id, row.rev, **{"done": False, "result": "", "reason": "I looked", "actor": "me", **given}
            ),
        )
        for name, given in {
            "done": {"done": True, "result": "[7]"},
            "failed": {},
            "called, and the rest again": {"successor": task("a/retry", retry_of="a", root="a"), "known": {("charge", ""): "[8]"}},
        }.items()
    },
    "retention of intents": Boundary(
        covers=(retention.purge, intents.forget),
        prepare=lambda db: settle(db, ending(called(IntentState.NOT_DONE)(db)["a"])),
        act=lambda tx, _rows, _: retention.purge(tx, "default", ["a"]),
        answer=False,
    ),
}


# -- sessions, sweeps


def blocked(db: Database) -> None:
    """One of two has the permit; the other is parked; then the permit is free and nobody noticed."""
    rows = claimed(task("a", permit="p"), task("b", permit="p"))(db)
    t, p = db.tables.task, db.tables.permit
    db.run(lambda tx: tx.update(t, t.c.id == rows["a"].id, state=TaskState.SUCCEEDED, session="", permit_held=0, settled_us=1))
    db.run(lambda tx: tx.update(p, p.c.id == "default/p", held=0))


def paused(kind: GateKind, name: str) -> Prepare:
    def work(db: Database) -> None:
        ready(task("a", permit="p"), task("b", permit="p"))(db)
        db.run(lambda tx: gates.pause(tx, kind, "default", name, actor="me", reason="because"))
        db.run(lambda tx: ask(tx, None, False, claim="before"))

    return work


def relieved(db: Database) -> None:
    """A pause is over, what it parked is parked still."""
    paused(GateKind.HANDLER, "work")(db)
    db.run(lambda tx: gates.resume(tx, GateKind.HANDLER, "default", "work", actor="me"))


def token_there(db: Database) -> None:
    """A task waits for a token, and there is one again."""
    limited(GateKind.HANDLER, "work", task("a"), task("b"))(db)
    db.run(lambda tx: ask(tx, None, False, claim="before"))
    g = db.tables.gate
    db.run(lambda tx: tx.update(g, g.c.kind == GateKind.HANDLER, wake_us=1, level_us=1))


ENTRY = HandlerEntry(
    name="work", version="1", queue="default", effects=Effects.IDEMPOTENT, policy="{}", permit="", ordered=0, parameters="[]"
)
QUOTA = Quota(id=quota_id("default", "default"), namespace="default", queue="default", backlog=5)


def counted_long_ago(db: Database) -> None:
    db.run(lambda tx: quotas.note(tx, QUOTA.id, "a", 2))
    db.run(lambda tx: tx.update(tx.t.acceptance, at_us=1))


SWEEPING: dict[str, Boundary] = {
    "session": Boundary(
        covers=(catalogue.enter, registry.register_node),
        prepare=nothing,
        act=lambda tx, _ready, _: catalogue.enter(tx, "s", "s", LEASE, Served(("default",), {"work": "1"}), (ENTRY,)),
    ),
    "renewal": Boundary(
        covers=(registry.renew_node,),
        prepare=session,
        act=lambda tx, _ready, _: registry.renew_node(tx, "s", LEASE),
        touched=frozenset({"node"}),
    ),
    "sweep": Boundary(
        covers=(sweeps.mark_sweep,),
        prepare=nothing,
        act=lambda tx, _ready, _: sweeps.mark_sweep(tx, HOUR, distrust=False).closed,
        touched=frozenset({"coordinator"}),
    ),
    "permit that is free": Boundary(
        covers=(gates.relieve, permits.refill),
        prepare=blocked,
        act=lambda tx, _ready, _: gates.relieve(tx, "permit:default/p", 10),
        answer=False,
    ),
    "end of a pause reaches what it parked": Boundary(
        covers=(gates.relieve,),
        prepare=relieved,
        act=lambda tx, _ready, _: gates.relieve(tx, "pause:handler:default/work", 10),
        answer=False,
    ),
    "token that is there": Boundary(
        covers=(gates.relieve, gates.wake),
        prepare=token_there,
        act=lambda tx, _ready, _: gates.relieve(tx, "rate:handler:default/work", 10),
        answer=False,
        touched=frozenset({"gate"}),
    ),
    **{
        f"pause of a {kind}": Boundary(
            covers=(gates.pause,),
            prepare=claimed(task("a", permit="p"), task("b", permit="p")),
            act=lambda tx, _ready, _, kind=kind, name=name: gates.pause(tx, kind, "default", name, actor="me", reason="because").paused_by,  # type: ignore[misc]
            touched=frozenset({"lane"}),
        )
        for kind, name in ((GateKind.QUEUE, "default"), (GateKind.HANDLER, "work"), (GateKind.PERMIT, "p"))
    },
    **{
        f"resume of a {kind}": Boundary(
            covers=(gates.resume,),
            prepare=paused(kind, name),
            act=lambda tx, _ready, _, kind=kind, name=name: gates.resume(tx, kind, "default", name, actor="me"),  # type: ignore[misc]
            answer=False,
            touched=frozenset({"lane"}),
        )
        for kind, name in ((GateKind.QUEUE, "default"), (GateKind.HANDLER, "work"), (GateKind.PERMIT, "p"))
    },
    "rate": Boundary(
        covers=(gates.set_rate,),
        prepare=nothing,
        act=lambda tx, _ready, _: gates.set_rate(tx, GateKind.QUEUE, "default", "default", 5, SECOND, 2, actor="me").rate,
        touched=frozenset({"gate"}),
    ),
    "end of a rate": Boundary(
        covers=(gates.set_rate,),
        prepare=lambda db: db.run(lambda tx: gates.set_rate(tx, GateKind.QUEUE, "default", "default", 5, SECOND, 2, actor="me")),
        act=lambda tx, _ready, _: gates.set_rate(tx, GateKind.QUEUE, "default", "default", 0, SECOND, 2, actor="me").rate,
        touched=frozenset({"gate"}),
    ),
    "capacity of a permit": Boundary(
        covers=(permits.set_capacity,),
        prepare=claimed(task("a", permit="p"), task("b", permit="p")),
        act=lambda tx, _rows, _: permits.set_capacity(tx, "default/p", 2, actor="me"),
        answer=False,  # what it was before
        touched=frozenset({"permit"}),
    ),
    "quota": Boundary(
        covers=(quotas.set_quota,),
        prepare=nothing,
        act=lambda tx, _ready, _: quotas.set_quota(tx, QUOTA, actor="me"),
        touched=frozenset({"quota"}),
    ),
    "end of a quota": Boundary(
        covers=(quotas.set_quota,),
        prepare=lambda db: db.run(lambda tx: quotas.set_quota(tx, QUOTA, actor="me")),
        act=lambda tx, _ready, _: quotas.set_quota(tx, msgspec.structs.replace(QUOTA, backlog=0), actor="me"),
    ),
    "acceptance a quota counts": Boundary(
        covers=(quotas.note,), prepare=nothing, act=lambda tx, _ready, _: quotas.note(tx, QUOTA.id, "a", 2)
    ),
    "acceptances that are forgotten": Boundary(
        covers=(quotas.forget,), prepare=counted_long_ago, act=lambda tx, _ready, _: quotas.forget(tx, 10), answer=False
    ),
    "weight of a queue": Boundary(
        covers=(lanes.set_weight,),
        prepare=nothing,
        act=lambda tx, _ready, _: lanes.set_weight(tx, "default", "default", 3, actor="me"),
        touched=frozenset({"lane"}),
    ),
}


# -- acts on many, retention


ACT = {"id": "act", "namespace": "default", "expected": 2, "reason": "because", "actor": "me"}


def over(*keys: str) -> Prepare:
    """Tasks that failed."""

    def work(db: Database) -> dict[str, TaskRow]:
        rows = claimed(*[task(k) for k in keys])(db)
        settle(db, *[ending(rows[k], o.GaveUp("no")) for k in keys])
        return every(db)

    return work


def begun(act: Act, prepare: Prepare) -> Callable[[Database], OperationRow]:
    def work(db: Database) -> OperationRow:
        prepare(db)
        return db.run(lambda tx: operations.begin(tx, {**ACT, "act": act}))

    return work


def acting(act: Act, prepare: Prepare, place: Place | None = None) -> Boundary:
    """A part of it; with ``place`` others follow."""
    return Boundary(
        covers=(operations.part,),
        prepare=begun(act, prepare),
        act=lambda tx, before, _: operations.part(tx, before, ["a", "b"], place, lambda _row: True, counted("again")),
    )


def counted(name: str) -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"{name}-{next(numbers)}"


def unserved(db: Database) -> None:
    """A handler nobody serves any more."""
    db.run(lambda tx: catalogue.enter(tx, "s", "s", LEASE, Served((), {}), (ENTRY,)))
    db.run(lambda tx: tx.update(tx.t.handler, seen_us=1))


def ended_act(db: Database) -> None:
    begun(Act.CANCEL, nothing)(db)
    db.run(lambda tx: tx.update(tx.t.operation, over=1))


RULE = RetentionRule(namespace="default", keep_us=HOUR)
OPERATING: dict[str, Boundary] = {
    "begin of an act": Boundary(
        covers=(operations.begin,), prepare=nothing, act=lambda tx, _ready, _: operations.begin(tx, {**ACT, "act": Act.CANCEL})
    ),
    "cancel of many": acting(Act.CANCEL, claimed(task("a"), task("b", effects=Effects.EXTERNAL))),
    "cancel of many, and more follow": acting(Act.CANCEL, ready(task("a"), task("b")), Place(1, "b")),
    "retry of many": acting(Act.RETRY, over("a", "b")),
    "purge of many": acting(Act.PURGE, over("a", "b")),
    "retry by hand": Boundary(
        covers=(operations.retry,),
        prepare=over("a"),
        act=lambda tx, _rows, _: operations.retry(tx, "default", "a", {**ACT, "act": Act.RETRY}, "a/again"),
        touched=frozenset({"task"}),
    ),
    "acts that are forgotten": Boundary(
        covers=(operations.forget,), prepare=ended_act, act=lambda tx, _ready, _: operations.forget(tx, NEVER), answer=False
    ),
    "retention": Boundary(
        covers=(retention.purge,),
        prepare=over("a", "b"),
        act=lambda tx, _rows, _: retention.purge(tx, "default", ["a", "b"]),
        answer=False,
    ),
    "rule of retention": Boundary(
        covers=(retention.set_rule,),
        prepare=nothing,
        act=lambda tx, _ready, _: retention.set_rule(tx, RULE, "me"),
        touched=frozenset({"retention"}),
    ),
    "end of a rule of retention": Boundary(
        covers=(retention.drop_rule,),
        prepare=lambda db: db.run(lambda tx: retention.set_rule(tx, RULE, "me")),
        act=lambda tx, _ready, _: retention.drop_rule(tx, "default", RULE.scope, ""),
        answer=False,
    ),
    "handlers that are forgotten": Boundary(
        covers=(catalogue.forget,), prepare=unserved, act=lambda tx, _ready, _: catalogue.forget(tx, 1_000), answer=False
    ),
}


# -- schedules


def ids() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"fire-{next(numbers)}"


def scheduled(**rules: Any) -> Prepare:
    """A schedule whose instant has come."""

    def work(db: Database) -> None:
        publish(db, given=definition(DAILY, **rules))
        come_again(db)

    return work


def overlapped(overlap: Overlap, *, over: bool = False, entered: bool = False) -> Prepare:
    """Its first run goes on while the second instant has come; ``entered``: and was decided; ``over``: then the first run ends."""

    def work(db: Database) -> None:
        scheduled(overlap=overlap)(db)
        make = ids()
        advanced(db, make)
        (first,) = every_fire(db)
        set_task(db, first.task, TaskState.RUNNING)
        come_again(db)
        if entered:
            advanced(db, make)
        if over:
            set_task(db, first.task, TaskState.SUCCEEDED)

    return work


def advanced(db: Database, make: Callable[[], str]) -> Any:
    return fires.advance(db, "default", "s", make)


def fire(number: int = 1) -> Callable[[Database], Any]:
    """Decide and carry out what is due. New tasks of a repeat would show by their ids."""

    def work(db: Database) -> Any:
        numbers = itertools.count(number)
        return fires.advance(db, "default", "s", lambda: f"fire-{next(numbers)}")

    return work


def changed(db: Database) -> None:
    publish(db, given=definition(DAILY))


def publishing(args: str = "[]", *, force: bool = False) -> Work:
    d = definition(DAILY, args=args)

    def work(tx: Transaction, _ready: Any, _again: bool) -> Any:
        found = schedules.publish(tx, "s", d, fingerprint(msgspec.to_builtins(d)), "tester", force=force)
        assert found is not None
        return found.version, found.next_us is None

    return work


def held(db: Database) -> None:
    scheduled()(db)
    db.run(lambda tx: schedules.hold(tx, "default", "s", "broken", HOUR))


def held_and_due(db: Database) -> None:
    held(db)
    db.run(lambda tx: tx.update(tx.t.schedule, due_us=1))


def pausing(db: Database) -> None:
    changed(db)
    db.run(lambda tx: schedules.pause(tx, "default", "s", "me", "because"))


def fired_long_ago(db: Database) -> None:
    """Two fires whose tasks are over and that are old."""
    changed(db)
    for request in ("r1", "r2"):
        row = triggered(db, request=request)
        set_task(db, row.task, TaskState.SUCCEEDED)


def forgettable(db: Database) -> None:
    fired_long_ago(db)
    db.run(fires.mark_settled)
    db.run(lambda tx: tx.update(tx.t.fire, recorded_us=1))


SCHEDULING: dict[str, Boundary] = {
    "fire": Boundary(covers=(fires.advance,), prepare=scheduled(), through=fire(), answer=False),
    "fire that waits": Boundary(covers=(fires.advance,), prepare=overlapped(Overlap.QUEUE_ONE), through=fire(2), answer=False),
    "fire that is skipped": Boundary(covers=(fires.advance,), prepare=overlapped(Overlap.SKIP), through=fire(2), answer=False),
    "fire that ends the one before": Boundary(
        covers=(fires.advance,), prepare=overlapped(Overlap.CANCEL_PREVIOUS), through=fire(2), answer=False
    ),
    "release of what waited": Boundary(
        covers=(fires.release, fires.running),
        prepare=overlapped(Overlap.QUEUE_ONE, entered=True, over=True),
        act=lambda tx, _ready, _: fires.release(tx, "default", "s", lambda: "released"),
        answer=False,
    ),
    "fire by hand": Boundary(
        covers=(fires.trigger,), prepare=changed, act=lambda tx, _ready, _: fires.trigger(tx, "default", "s", "r", "me", lambda: "by-hand")
    ),
    "backfill": Boundary(
        covers=(fires.backfill,),
        prepare=changed,
        act=lambda tx, _ready, _: fires.backfill(tx, "default", "s", "r", [SECOND, 2 * SECOND], "me", ids()),
        touched=frozenset({"schedule"}),
    ),
    "fires that are over": Boundary(
        covers=(fires.mark_settled,), prepare=fired_long_ago, act=lambda tx, _ready, _: fires.mark_settled(tx), answer=False
    ),
    "fires that are forgotten": Boundary(
        covers=(fires.forget,), prepare=forgettable, act=lambda tx, _ready, _: fires.forget(tx, NEVER), answer=False
    ),
    "publish": Boundary(covers=(schedules.publish,), prepare=nothing, act=publishing()),
    "publish anew": Boundary(covers=(schedules.publish,), prepare=changed, act=publishing('[["l"],["k"]]')),
    "publish over what cannot be followed": Boundary(
        covers=(schedules.publish,),
        prepare=held_and_due,
        act=publishing('[["l"],["k"]]', force=True),
    ),
    "pause of a schedule": Boundary(
        covers=(schedules.pause,),
        prepare=changed,
        act=lambda tx, _ready, _: told(schedules.pause(tx, "default", "s", "me", "because")),
    ),
    "resume of a schedule": Boundary(
        covers=(schedules.resume,), prepare=pausing, act=lambda tx, _ready, _: told(schedules.resume(tx, "default", "s", "me"))
    ),
    "hold": Boundary(
        covers=(schedules.hold,),
        prepare=scheduled(),
        act=lambda tx, _ready, _: schedules.hold(tx, "default", "s", "broken", HOUR),
        touched=frozenset({"schedule"}),
    ),
    "deletion of a schedule": Boundary(
        covers=(schedules.delete,),
        prepare=overlapped(Overlap.QUEUE_ONE, entered=True),
        act=lambda tx, _ready, _: schedules.delete(tx, "default", "s", "me", "because"),
        answer=False,
    ),
}


def told(row: Any) -> Any:
    return row.state, row.reason, row.actor


# -- subscriptions and deliveries


def asked(name: str, **changes: Any) -> subscriptions.NewSubscription:
    return msgspec.structs.replace(asked_for(name, **changes), id=f"subscription-{name}")


def ended(*keys: str, fanned: bool = True) -> Prepare:
    """A subscription, and tasks that end after it was made."""

    def work(db: Database) -> Any:
        s = db.run(lambda tx: subscriptions.create(tx, asked("s"), 0))
        rows = claimed(*[task(k) for k in keys])(db)
        settle(db, *[ending(rows[k]) for k in keys])
        if fanned:
            db.run(lambda tx: events.fan_out(tx, 100))
        return s

    return work


def handed_out(*keys: str, over: bool = False) -> Prepare:
    def work(db: Database) -> Any:
        s = ended(*keys)(db)
        pulled(db, s, token="lease")
        if over:
            db.run(lambda tx: tx.update(tx.t.delivery, due_us=1))
        return s

    return work


def acknowledged(db: Database) -> Any:
    s = handed_out("a", "b")(db)
    db.run(lambda tx: deliveries.acknowledge(tx, s, ["a"], "me"))
    return s


def ended_before(db: Database) -> Any:
    """Tasks that ended before there was a subscription that wants them, too."""
    other = subscribed(db, "other")
    rows = claimed(task("a"), task("b"))(db)
    settle(db, ending(rows["a"]), ending(rows["b"]))
    since = db.read(lambda tx: tx.now_us()) - HOUR
    s = db.run(lambda tx: subscriptions.create(tx, asked("s", since_us=since), 0))
    db.run(lambda tx: tx.update(tx.t.subscription, tx.t.subscription.c.id == s.id, ready_us=1))
    assert other.id != s.id
    return s


def pull(tx: Transaction, s: Any, again: bool) -> Any:
    found = deliveries.lease(tx, s, 10, "lease", MINUTE_US, lambda: 0.0, again=again)
    return [(h.event.id, h.delivery.attempts, h.delivery.lease) for h in found]


def refused(tx: Transaction, s: Any, again: bool) -> Any:
    """As the client does it."""
    done = deliveries.refuse(tx, s, "a", "lease", "no", HOUR, 0.0)
    row = deliveries.one(tx, s, "a") if done is None and again else done
    return row and (row.state, row.attempts, row.reason)


def being_removed(db: Database) -> Any:
    s = ended("a", "b")(db)
    db.run(lambda tx: subscriptions.set_state(tx, "default", "s", S.DELETED, "me"))
    return s


DELIVERING: dict[str, Boundary] = {
    "subscription": Boundary(
        covers=(subscriptions.create,),
        prepare=lambda db: claimed(task("a"))(db),
        act=lambda tx, _ready, _: subscriptions.create(tx, asked("s"), HOUR).id,
    ),
    "making deliveries": Boundary(
        covers=(events.fan_out,), prepare=ended("a", "b", fanned=False), act=lambda tx, _s, _: events.fan_out(tx, 10), answer=False
    ),
    "catching up": Boundary(
        covers=(events.catch_up,), prepare=ended_before, act=lambda tx, s, _: events.catch_up(tx, s.id, 100), answer=False
    ),
    "pull": Boundary(covers=(deliveries.lease,), prepare=ended("a", "b"), act=pull),
    "acknowledgement": Boundary(
        covers=(deliveries.acknowledge,),
        prepare=handed_out("a", "b"),
        act=lambda tx, s, _: deliveries.acknowledge(tx, s, ["a"], "me"),
        touched=frozenset({"delivery"}),
    ),
    "refusal": Boundary(covers=(deliveries.refuse,), prepare=handed_out("a", "b"), act=refused),
    "end of a delivery's lease": Boundary(
        covers=(deliveries.expire,),
        prepare=handed_out("a", "b", over=True),
        act=lambda tx, s, _: deliveries.expire(tx, s, 10, lambda: 0.0),
        answer=False,
    ),
    "what the broker did not take": Boundary(
        covers=(deliveries.give_back,),
        prepare=handed_out("a", "b"),
        act=lambda tx, s, _: deliveries.give_back(tx, s, ["a"], "lease", HOUR),
        answer=False,
    ),
    "redelivery": Boundary(
        covers=(deliveries.redeliver,),
        prepare=acknowledged,
        act=lambda tx, s, _: deliveries.redeliver(tx, s, ["a"], "me"),
        touched=frozenset({"delivery"}),
    ),
    "retention of deliveries": Boundary(
        covers=(deliveries.purge,), prepare=acknowledged, act=lambda tx, _s, _: deliveries.purge(tx, NEVER, 100), answer=False
    ),
    **{
        f"subscription becomes {state}": Boundary(
            covers=(subscriptions.set_state,),
            prepare=ended("a"),
            act=lambda tx, _s, _, state=state: subscriptions.set_state(tx, "default", "s", state, "me"),  # type: ignore[misc]
            answer=False,  # of one that is deleted: that there is none
        )
        for state in (S.PAUSED, S.DELETED)
    },
    "removal of a deleted subscription": Boundary(
        covers=(subscriptions.remove,),
        prepare=being_removed,
        act=lambda tx, s, _: subscriptions.remove(tx, s.id, 10),
    ),
}


# -- outboxes in users' databases


def emptied(db: Database) -> None:
    db.run(outboxes.create)
    db.run(lambda tx: tx.delete(outbox_table(OUTBOX_PREFIX)))


def kept(*keys: str) -> Prepare:
    def work(db: Database) -> None:
        emptied(db)
        db.run(lambda tx: [outboxes.put(tx, TARGET, task(k)) for k in keys])

    return work


def take_entries(tx: Transaction, _ready: Any, _again: bool, *, limits: Limits | None = None) -> Any:
    own = limits or Limits()
    found = outboxes.claim(tx, TARGET, "relay", "c", 10, HOUR, lambda e, now: on_claim(e, own, now))
    return sorted((e.key, e.generation, e.sends) for e in found)


def leased_entries(*keys: str) -> Callable[[Database], dict[str, EntryRow]]:
    def work(db: Database) -> dict[str, EntryRow]:
        kept(*keys)(db)
        db.run(lambda tx: take_entries(tx, None, False))
        return db.read(lambda tx: {r["key"]: to(EntryRow, r) for r in tx.rows(outbox_table(OUTBOX_PREFIX).select())})

    return work


def parked_entry(db: Database) -> str:
    row = leased_entries("a")(db)["a"]
    parked = EntryDecision(state=EntryState.PARKED, cause=EntryCause.SENDS, reason="often")
    assert db.run(lambda tx: outboxes.settle(tx, row, lambda _e, _now: parked))
    return row.id


def sent_entry(db: Database) -> None:
    row = leased_entries("a", "b")(db)["a"]
    db.run(lambda tx: outboxes.settle(tx, row, lambda e, now: on_sent(e, Limits(), Accepted("t"), now, 0.0)))
    db.run(lambda tx: tx.update(outbox_table(OUTBOX_PREFIX), outbox_table(OUTBOX_PREFIX).c.key == "a", sent_us=1))


RELAYING: dict[str, Boundary] = {
    "outbox table": Boundary(covers=(outboxes.create,), prepare=emptied, act=lambda tx, _ready, _: outboxes.create(tx), on="outbox"),
    "outbox entry": Boundary(
        covers=(outboxes.put,),
        prepare=emptied,
        act=lambda tx, _ready, _: outboxes.put(tx, TARGET, task("a")),
        on="outbox",
    ),
    "lease of entries": Boundary(covers=(outboxes.claim,), prepare=kept("a", "b"), act=take_entries, on="outbox"),
    "entry is accepted": Boundary(
        covers=(outboxes.settle,),
        prepare=leased_entries("a", "b"),
        act=lambda tx, rows, _: outboxes.settle(tx, rows["a"], lambda e, now: on_sent(e, Limits(), Accepted("t"), now, 0.0)),
        on="outbox",
    ),
    "entry waits again": Boundary(
        covers=(outboxes.settle,),
        prepare=leased_entries("a"),
        act=lambda tx, rows, _: outboxes.settle(
            tx, rows["a"], lambda e, now: EntryDecision(state=EntryState.WAITING, due_us=now + HOUR, failures=1)
        ),
        on="outbox",
    ),
    "entry is sent again": Boundary(
        covers=(outboxes.retry,),
        prepare=parked_entry,
        act=lambda tx, entry, _: outboxes.retry(tx, entry, "I looked", lambda _e: ""),
        on="outbox",
    ),
    "entries that are forgotten": Boundary(
        covers=(outboxes.forget_sent,),
        prepare=sent_entry,
        act=lambda tx, _ready, _: outboxes.forget_sent(tx, TARGET, SECOND, 10),
        answer=False,
        on="outbox",
    ),
}
TABLE: dict[str, Boundary] = {
    **SUBMITTING,
    **CLAIMING,
    **SETTLING,
    **CALLING,
    **SWEEPING,
    **OPERATING,
    **SCHEDULING,
    **DELIVERING,
    **RELAYING,
}
