"""Durable tasks when COMMITs lose their answer, when everything happens at once, and when tables are large."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
import sqlalchemy as sa
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import (
    HOUR,
    LANE,
    LEASE,
    POLICY,
    asked,
    consistent,
    ending,
    every,
    new,
    session,
    submit,
)

from millstream_schema.durable import outcomes as o
from millstream_schema.durable.quotas import Quota
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.durable.states import Effects, TaskState
from millstream_schema.errors import CommitUnknown, StoreUnavailable
from millstream_schema.ports import SystemClock
from millstream_schema.store import blockers, census, claims, gates, lanes, permits, quotas, registry, settling, sweeps, tasks
from millstream_schema.store.claims import Claimed
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.settling import Settlement

R = TypeVar("R")
T = TaskState


# -- COMMITs whose answer is lost


class Fault:
    """Loses the answer to commit number ``at``, or fails before it."""

    def __init__(self, at: int, *, before: bool = False) -> None:
        self.count = 0
        self.struck = False
        self._at = at
        self._before = before

    def before_commit(self) -> None:
        self.count += 1
        if self._before and self.count == self._at:
            self.struck = True
            raise StoreUnavailable("injected")

    def after_commit(self) -> None:
        if not self._before and self.count == self._at:
            self.struck = True
            raise CommitUnknown("injected")


class Life:
    """Every operation on tasks once; each is executed again as it was until it is answered. What was answered, and the rows at the end, are what an outsider sees."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.said: list[Any] = []
        self._n = itertools.count(1)

    def do(self, work: Callable[[Transaction, bool], R]) -> R:
        for again in (False, True):
            try:
                return self.db.run(lambda tx, again=again: work(tx, again))  # type: ignore[misc]
            except (CommitUnknown, StoreUnavailable):
                continue
        raise AssertionError("it never came through")

    def new(self, key: str, **changes: Any) -> NewTask:
        return new(key, id=f"task-{next(self._n)}", policy=msgspec.structs.replace(POLICY, losses=9), **changes)

    def submit(self, *news: NewTask) -> None:
        for one in news:
            self.said.append(self.do(lambda tx, _, one=one: tasks.submit(tx, one)))  # type: ignore[misc]

    def claim(self, who: str, claim: str, count: int = 20, **options: Any) -> dict[str, TaskRow]:
        found = self.do(lambda tx, again: asked(tx, who, count, claim=claim, again=again, **options))
        assert found is not None
        self.said.append([(r.key, r.state, r.fence, r.token, r.permit_seq) for r in found.tasks])
        return {r.key: r for r in found.tasks}

    def settle(self, *ends: Settlement) -> None:
        answers = self.do(lambda tx, _: settling.settle(tx, ends))
        assert set(answers.values()) <= {settling.Answer.APPLIED, settling.Answer.DUPLICATE, settling.Answer.STALE}

    def cancel(self, row: TaskRow) -> None:
        self.said.append(self.do(lambda tx, _: settling.cancel(tx, row.id)))

    def review(self, key: str, **given: Any) -> None:
        row = every(self.db)[key]
        values: dict[str, Any] = {"done": False, "result": "", "reason": "I looked", "actor": "me", **given}
        answer = self.do(lambda tx, _: settling.review(tx, row.id, row.rev, **values))
        assert not isinstance(answer, settling.ReviewRefused), answer
        self.said.append(answer)

    def lived(self) -> None:
        """From the first submission to the last review."""
        for who in ("a", "b"):
            self.do(lambda tx, _, who=who: registry.register_node(tx, who, who, 0, LEASE, "{}"))  # type: ignore[misc]
        self.submit(self.new("good"), self.new("raised"), self.new("ext", effects=Effects.EXTERNAL), self.new("late", delay_us=HOUR))
        many = [self.new(k) for k in ("with more", "given back", "held")] + [self.new(f"p{i}", permit="p") for i in range(3)]
        self.said.append(self.do(lambda tx, _: tasks.submit_many(tx, many)))
        self.submit(self.new("ext lost", effects=Effects.EXTERNAL), self.new("ext asks", effects=Effects.EXTERNAL), self.new("unwanted"))
        self.cancel(every(self.db)["unwanted"])
        rows = self.claim("a", "c1")
        for key in ("ext", "ext lost", "ext asks"):
            r = rows[key]
            self.said.append(self.do(lambda tx, _, r=r: claims.begin(tx, "a", r.id, r.fence, r.token)))  # type: ignore[misc]
        self.cancel(rows["held"])
        more = (self.new("next 1"), self.new("next 2", delay_us=HOUR))
        self.settle(
            ending(rows["good"]), ending(rows["with more"], submits=more), ending(rows["raised"], o.RetryAsked(0, "later")),
            ending(rows["given back"], o.Unstarted()), ending(rows["p0"]), ending(rows["ext"], o.AskedForReview("no")),
        )  # fmt: skip
        self.settle(ending(rows["ext asks"], o.AskedForReview("look")))
        self.do(lambda tx, _: claims.wake_due(tx, 10))
        second = self.claim("b", "c2")
        self.do(lambda tx, _: sweeps.mark_sweep(tx, HOUR, distrust=False))
        n = self.db.tables.node
        self.do(lambda tx, _: tx.update(n, n.c.id == "a", expires_us=1))
        self.said.append(self.do(lambda tx, _: settling.expire_session(tx, "a", 0)))
        while self.do(lambda tx, _: settling.take_back(tx, "a", lambda: 0.5, 1)):
            pass
        self.do(lambda tx, _: permits.refill(tx, "default/p"))
        self.review("ext", successor=self.new("ext/retry"))
        self.review("ext lost", done=True, result="[7]")
        self.review("ext asks")
        self.settle(*[ending(r) for r in second.values()])
        for turn in range(3, 9):
            self.settle(*[ending(r) for r in self.claim("b", f"c{turn}").values()])

    def seen(self) -> Any:
        """All that was answered and stored, without times and without how often a row was written."""
        dull = re.compile(r".*_us|rev|rank")

        def stored(tx: Transaction, table: str) -> list[dict[str, Any]]:
            found = tx.rows(getattr(tx.t, table).select())
            return sorted(({k: v for k, v in row.items() if not dull.fullmatch(k)} for row in found), key=repr)

        rows = self.db.read(lambda tx: {table: stored(tx, table) for table in ("task", "attempt", "permit")})
        return self.said, rows


def lived(store: Opened, fault: Fault) -> Any:
    store.empty()
    life = Life(store.open(faults=fault))
    life.lived()
    consistent(store.db)
    seen = life.seen()
    store.close_others()
    return seen


def test_celery_t35_losing_the_answer_to_any_commit_changes_nothing(store: Opened) -> None:
    """Each commit of every operation in turn: executed again, it gives the same answer, and the rows and the evidence are the same to the last column."""
    counted = Fault(0)
    said, rows = lived(store, counted)
    states = {r["key"]: r["state"] for r in rows["task"]}
    assert set(states.values()) == {T.SUCCEEDED, T.FAILED, T.CANCELLED, T.SCHEDULED}, states
    assert (states["ext lost"], states["ext asks"], states["ext"], states["ext/retry"]) == (T.SUCCEEDED, T.FAILED, T.FAILED, T.SUCCEEDED)
    first, step = {"sqlite": (1, 1), "postgres": (1, 3), "mariadb": (2, 3)}[store.kind]
    for at in range(first, counted.count + 1, step):
        fault = Fault(at)
        assert lived(store, fault) == (said, rows), f"commit {at}"
        assert fault.struck


def test_failing_before_any_commit_changes_nothing(store: Opened) -> None:
    """Nothing was done, so that trying again is safe."""
    counted = Fault(0)
    reference = lived(store, counted)
    for at in range(2, counted.count + 1, 3 if store.kind == "sqlite" else 6):
        fault = Fault(at, before=True)
        assert lived(store, fault) == reference, f"commit {at}"
        assert fault.struck


# -- everything at once


def test_claims_ends_cancels_losses_and_submissions_at_once_leave_rows_that_agree(store: Opened) -> None:
    """Permits over two queues, ordered and not, sessions that are lost while they settle: no deadlock comes out, nothing is lost, permits say what is held."""
    seconds = 1.3 if store.kind != "sqlite" else 0.6
    clock, stop = SystemClock(), threading.Event()
    end = clock.monotonic() + seconds
    keys = itertools.count()
    lanes = [LANE, "default/slow"]
    done: Counter[str] = Counter()
    policy = msgspec.structs.replace(POLICY, attempts=50, losses=10**6, crashes=10**6, permit_capacity=2)

    def going() -> bool:
        """Until the time is over and everybody has had a turn: on a busy machine SQLite's one writer may be late for it."""
        now = clock.monotonic()
        idle = min(done["submitted"], done["settled"], done["cancels"]) == 0
        return (now < end or (idle and now < end + 20)) and not stop.is_set()

    def drawn(rng: random.Random) -> NewTask:
        permit = rng.choice(["", "", "p", "q", "r"])
        return new(
            f"k{next(keys)}", permit=permit, ordered=permit == "r", queue=rng.choice(["default", "slow"]), policy=policy, delay_us=rng.choice([0, 0, 0, 2000]),
            effects=rng.choice([Effects.IDEMPOTENT, Effects.IDEMPOTENT, Effects.EXTERNAL]),
        )  # fmt: skip

    def submits(db: Database) -> None:
        rng = random.Random(1)
        while going():
            news = [drawn(rng) for _ in range(8)]
            db.run(lambda tx, n=news: tasks.submit_many(tx, n))  # type: ignore[misc]
            one = rng.choice(news)
            db.run(lambda tx, n=one: tasks.submit(tx, n))  # type: ignore[misc]
            done["submitted"] += len(news)

    def works(db: Database, name: str) -> None:
        rng = random.Random(name)
        who = ""
        for turn in itertools.count():
            if not going():
                return
            if not who:
                who = session(db, f"{name}-{turn}")
            claimed: Claimed | None = db.run(lambda tx, w=who: asked(tx, w, 4, lanes=lanes, starting=3))  # type: ignore[misc]
            if claimed is None:
                who = ""
                continue
            for row in claimed.tasks:
                if row.effects is Effects.EXTERNAL:
                    db.run(lambda tx, r=row: claims.begin(tx, r.session, r.id, r.fence, r.token))  # type: ignore[misc]
            ends = []
            for row in claimed.tasks:
                kinds: list[o.AnyOutcome] = [
                    o.Succeeded(row.id),
                    o.Succeeded("[1]"),
                    o.RetryAsked(0),
                    o.Snoozed(500),
                    o.Unstarted(),
                    o.GaveUp(),
                    o.Crashed(),
                    o.Raised("E", ""),
                ]
                more = (drawn(rng),) if rng.random() < 0.1 else ()
                ends.append(ending(row, rng.choice(kinds), submits=more))
            if rng.random() < 0.1:
                db.run(lambda tx, w=who: tx.update(tx.t.node, tx.t.node.c.id == w, expires_us=1))  # type: ignore[misc]
            db.run(lambda tx, e=ends: settling.settle(tx, e))  # type: ignore[misc]
            done["settled"] += len(ends)

    def sweeps_and_cancels(db: Database) -> None:
        rng = random.Random(3)
        while going():
            for name in db.read(settling.holding_sessions):
                if db.run(lambda tx, n=name: settling.expire_session(tx, n, 0)):  # type: ignore[misc]
                    done["taken back"] += db.run(lambda tx, n=name: settling.take_back(tx, n, lambda: 0.5, 100))  # type: ignore[misc]
            db.run(lambda tx: claims.wake_due(tx, 20))
            blocked = db.read(lambda tx: blockers.following(tx, ""))
            if blocked is not None:
                db.run(lambda tx, b=blocked: gates.relieve(tx, b, 100))  # type: ignore[misc]
            rows = [r for r in every(db).values() if not r.state.settled]
            for row in rng.sample(rows, min(3, len(rows))):
                db.run(lambda tx, r=row: settling.cancel(tx, r.id))  # type: ignore[misc]
                done["cancels"] += 1
            consistent(snapshots)

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            stop.set()
            raise

    dbs, snapshots = [store.open() for _ in range(5)], store.open()
    if store.kind != "sqlite":
        snapshots.engine = snapshots.engine.execution_options(isolation_level="REPEATABLE READ")
    found = together(
        lambda: guarded(lambda: submits(dbs[0])),
        lambda: guarded(lambda: sweeps_and_cancels(dbs[1])),
        *[lambda i=i: guarded(lambda: works(dbs[i], f"w{i}")) for i in (2, 3, 4)],
    )
    assert found == [None] * 5, (found, done)
    assert min(done["submitted"], done["settled"], done["cancels"]) > 0, done
    consistent(store.db)
    assert len(every(store.db)) >= done["submitted"]


# -- large tables


LARGE = 20_000


@pytest.fixture(scope="module")
def large(opened: Opened) -> Opened:
    """20,000 finished, 20,000 blocked and 20,000 future tasks, and ten that are ready behind 500 of another handler in the same namespace's other queue."""
    opened.empty()
    template = new("template", permit="p", business_key="b")
    submit(opened.db, template)
    t = opened.db.tables.task
    numbers = sa.select(sa.literal(1).label("i")).cte("numbers", recursive=True)
    numbers = numbers.union_all(sa.select(numbers.c.i + 1).where(numbers.c.i < LARGE))
    kinds: dict[str, dict[str, Any]] = {
        "finished": {"state": T.SUCCEEDED, "ready_lane": None, "settled_us": 1},
        "blocked": {"ready_lane": None, "blocked_by": "permit:default/p"},
        "future": {"state": T.SCHEDULED, "ready_lane": None, "wake_us": t.c.wake_us},
    }

    def fill(tx: Transaction) -> None:
        if opened.kind == "mariadb":
            tx.execute(sa.text(f"SET SESSION max_recursive_iterations = {LARGE}"))
        for kind, changes in kinds.items():
            name = sa.literal(f"{kind}-") + sa.cast(numbers.c.i, sa.String(20))
            values: dict[str, Any] = {c.name: c for c in t.c} | {"id": name, "key": name, "rank": t.c.rank - 10**9 + numbers.c.i} | changes
            if kind == "future":
                values["wake_us"] = t.c.due_us + HOUR + numbers.c.i
            columns = [
                sa.literal(v, t.c[k].type).label(k) if v is None or isinstance(v, str | int) else v.label(k) for k, v in values.items()
            ]
            tx.execute(
                sa.insert(t).from_select(
                    list(values), sa.select(*columns).select_from(t.join(numbers, sa.true())).where(t.c.id == template.id)
                )
            )

    opened.db.run(fill)
    opened.db.run(lambda tx: tx.update(t, t.c.id == template.id, state=T.CANCELLED, ready_lane=None, settled_us=1))
    opened.db.run(lambda tx: permits.ensure(tx, "default/p", 1))
    opened.db.run(lambda tx: permits.take(tx, permits.lock(tx, "default/p"), 1, 0))  # type: ignore[arg-type]
    assert len(opened.db.read(lambda tx: tx.rows(sa.select(t.c.id)))) == 3 * LARGE + 1
    return opened


class Examined:
    """How many rows of the task table statements look at: by the server's own counts; on SQLite by the plans of the statements executed."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def of(self, work: Callable[[Transaction], Any]) -> int:
        if self._opened.kind == "sqlite":
            return self._sqlite(work)
        counts = {"postgres": self._postgres, "mariadb": self._mariadb}[self._opened.kind]

        def counted(tx: Transaction) -> int:
            before = counts(tx)  # what the connection did before is counted, too
            work(tx)
            return counts(tx) - before

        return self._opened.db.run(counted)

    @staticmethod
    def _postgres(tx: Transaction) -> int:
        counts = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = :name"
        return int(tx.execute(sa.text(counts), {"name": tx.t.task.name}).scalar_one())

    @staticmethod
    def _mariadb(tx: Transaction) -> int:
        found: list[Any] = list(tx.execute(sa.text("SHOW SESSION STATUS LIKE 'Handler_read%'")))
        return sum(int(r[1]) for r in found)

    def _sqlite(self, work: Callable[[Transaction], Any]) -> int:
        """0 where every look at the task table is a search of an index, and no set of rows has to be sorted; all rows otherwise."""
        executed: list[tuple[str, Any]] = []

        def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
            executed.append((statement, parameters))

        sa.event.listen(self._opened.db.engine, "before_cursor_execute", note)
        try:
            self._opened.db.run(work)
        finally:
            sa.event.remove(self._opened.db.engine, "before_cursor_execute", note)
        table = self._opened.db.tables.task.name
        plans: list[str] = []
        with self._opened.db.engine.connect() as connection:
            for statement, parameters in executed:
                if table in statement:
                    plans += [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
        assert any(table in statement for statement, _ in executed), "the table was not looked at"
        bad = [p for p in plans if p.startswith(f"SCAN {table}") or p.endswith("B-TREE FOR ORDER BY")]
        return 3 * LARGE * len(bad)


def examined_by_each(large: Opened, turn: str) -> dict[str, int]:
    """What a claim and everything else that happens often looks at."""
    who = session(large.db, f"s-{turn}")
    submit(large.db, *[new(f"ready-{turn}-{i}") for i in range(10)])
    examined, found, rows = Examined(large), dict[str, int](), list[TaskRow]()

    def claim(tx: Transaction) -> None:
        claimed = asked(tx, who, 10)
        assert claimed is not None
        rows.extend(claimed.tasks)

    found["claim"] = examined.of(claim)
    assert sorted(r.key for r in rows) == [f"ready-{turn}-{i}" for i in range(10)]
    submit(large.db, new(f"with permit {turn}", permit="p"))
    operations: dict[str, Callable[[Transaction], Any]] = {
        "claim that parks": lambda tx: asked(tx, who, 10),
        "idle claim": lambda tx: asked(tx, who, 10),
        "lanes": lambda tx: claims.ready_lanes(tx, ["default"]),
        "load": lambda tx: lanes.held(tx, but=who),
        "heartbeat": lambda tx: settling.flags(tx, who),
        "sessions": settling.holding_sessions,
        "next due": lambda tx: claims.next_wake(tx, 0),
        "due": lambda tx: claims.wake_due(tx, 100),
        "blockers": lambda tx: blockers.following(tx, ""),
        "first in line": lambda tx: permits.first_in_line(tx, "default", "p", 2),
        "settle": lambda tx: settling.settle(tx, [ending(r) for r in rows[:4]] + [ending(r, o.GaveUp()) for r in rows[4:8]]),
        "cancel": lambda tx: settling.cancel(tx, rows[8].id),
        "take back": lambda tx: settling.take_back(tx, who, lambda: 0.5, 100),
        "submit": lambda tx: tasks.submit(tx, new(f"one more {turn}")),
        "submit again": lambda tx: tasks.submit(tx, new(f"one more {turn}")),
        "release": lambda tx: permits.release(tx, "default/p"),
        "refill": lambda tx: permits.refill(tx, "default/p"),
    }
    found |= {name: examined.of(work) for name, work in operations.items()}
    large.db.run(lambda tx: permits.take(tx, permits.lock(tx, "default/p"), 1, 0))  # type: ignore[arg-type]
    large.db.run(lambda tx: tx.update(tx.t.task, tx.t.task.c.ready_lane.is_not(None), state=T.CANCELLED, ready_lane=None, settled_us=1))
    return found


def test_nothing_that_happens_often_is_slowed_by_what_is_finished_blocked_or_due_later(large: Opened) -> None:
    """60,000 rows that no claim can have: each operation looks at about as many as it takes, before and after the server has counted the table."""
    analyze = {"sqlite": "ANALYZE", "postgres": "ANALYZE {}", "mariadb": "ANALYZE TABLE {}"}[large.kind].format(large.db.tables.task.name)
    few, many = 150, dict[str, int]()
    for turn in ("fresh", "analyzed"):
        found = examined_by_each(large, turn)
        many |= {f"{name} ({turn})": n for name, n in found.items() if n > few}
        large.db.run(lambda tx: tx.execute(sa.text(analyze)).close())
    assert many == {}


@pytest.fixture(scope="module")
def crowded(large: Opened) -> Opened:
    """Likewise, and 20,000 of another queue that could be claimed."""
    t = large.db.tables.task
    changes = {
        "id": sa.literal("ready-") + t.c.id,
        "key": sa.literal("ready-") + t.c.key,
        "ready_lane": "default/slow",
        "blocked_by": None,
        "queue": "slow",
    }
    values: dict[str, Any] = {c.name: c for c in t.c} | {
        k: sa.literal(v, t.c[k].type) if v is None or isinstance(v, str) else v for k, v in changes.items()
    }
    rows = sa.select(*[v.label(k) for k, v in values.items()]).where(t.c.blocked_by == "permit:default/p", t.c.id.like("blocked-%"))
    large.db.run(lambda tx: tx.execute(sa.insert(t).from_select(list(values), rows)))
    return large


def test_what_is_parked_moved_up_and_counted_costs_as_much_as_was_asked_for(crowded: Opened) -> None:
    """Of 80,000 rows some hundreds are looked at, by whatever statistics: rows are moved by their ids, and counted by the index of what is open up to the limit."""
    n = 300
    ready, blocked = ([f"{kind}-{i}" for i in range(5_000, 5_000 + n)] for kind in ("ready-blocked", "blocked"))
    of_queue = Quota(id="default/slow", namespace="default", queue="slow", backlog=n)
    permit = "permit:default/p"
    operations: dict[str, Callable[[Transaction], Any]] = {
        "queue": lambda tx: lanes.standing(tx, "default", "default", n),
        "other queue": lambda tx: lanes.standing(tx, "default", "slow", n),
        "queues": lambda tx: lanes.names(tx, "default", 100),
        "quota of a queue": lambda tx: quotas.use(tx, of_queue),
        "quota": lambda tx: quotas.use(tx, msgspec.structs.replace(of_queue, id="default/", queue="", backlog=n)),
        "metrics": lambda tx: census.census(tx, "default", n),
        "permit": lambda tx: permits.line(tx, "default", "p", n),
        "park": lambda tx: blockers.park(tx, "pause:handler:default/work", ready),
        "move up": lambda tx: blockers.move_up(tx, "pause:handler:default/work", n),
        "park in bulk": lambda tx: blockers.park_line(tx, "default/slow", "pause:handler:", ready),
        "move up again": lambda tx: blockers.move_up(tx, "pause:handler:default/work", n),
        "call up": lambda tx: blockers.call_up(tx, permit, blocked),
        "park back": lambda tx: blockers.park(tx, permit, blocked),
    }
    analyze = {"sqlite": "ANALYZE", "postgres": "ANALYZE {}", "mariadb": "ANALYZE TABLE {}"}[crowded.kind]
    many, before = dict[str, int](), revisions(crowded, ready + blocked)
    for turn in ("fresh", "analyzed"):
        examined = Examined(crowded)
        found = {f"{name} ({turn})": examined.of(work) for name, work in operations.items()}
        many |= {name: count for name, count in found.items() if count > 3 * n + 100}
        crowded.db.run(lambda tx: tx.execute(sa.text(analyze.format(tx.t.task.name))).close())
    assert many == {}
    after = revisions(crowded, ready + blocked)
    assert {i: after[i] - before[i] for i in after} == dict.fromkeys(ready, 8) | dict.fromkeys(blocked, 4)


def revisions(crowded: Opened, tasks_: list[str]) -> dict[str, int]:
    c = crowded.db.tables.task.c
    return {r["id"]: r["rev"] for r in crowded.db.read(lambda tx: tx.rows(sa.select(c.id, c.rev).where(c.id.in_(tasks_))))}
