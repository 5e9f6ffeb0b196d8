"""What a claim costs when the table is full of what it must not touch: finished, blocked and future tasks by the million, and what an old snapshot keeps from being vacuumed.

    python -m benchmarks claims --n 1000000

PostgreSQL. One session claims and settles 50 tasks at a time, as a worker does; the figure is the median of both together, and how many times that on an empty table it
is; ``rows`` is what PostgreSQL says its candidate scan read for 50 tasks.
"""

from __future__ import annotations

import sys
import time
import uuid
from typing import Any

from millstream_schema.durable.outcomes import Succeeded
from millstream_schema.durable.requests import HandlerSpec, Options, encode_arguments, new_task
from millstream_schema.durable.states import Effects
from millstream_schema.ports import SystemClock, SystemIds
from millstream_schema.store import claims, registry, selection, settling, tasks
from millstream_schema.store.database import Database
from millstream_tasks.durable.floors import Floors

from .measurement import Result, options, percentile, quiet, show
from .services import POSTGRES, answers
from .tasks import database

PART = 50
ROUNDS = 60
TIMES = 2.0
LANE = "default/default"


class Session:
    """One worker session on a table of its own."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.ids, self.clock = SystemIds(), SystemClock()
        self.floors = Floors()
        self.name = self.ids.new("session", 10)
        self.spec = HandlerSpec(name="noop", effects=Effects.IDEMPOTENT)
        self.arguments = encode_arguments((), {})
        db.run(lambda tx: registry.register_node(tx, self.name, "bench", 0, 3_600_000_000, "{}"))

    def submit(self, n: int) -> list[str]:
        ids = [self.ids.new("task", 10) for _ in range(n)]
        made = [new_task(self.spec, "default", i, "", self.arguments, Options(), permit="", actor="", origin="direct") for i in ids]
        self.db.run(lambda tx: tasks.submit_many(tx, made))
        return ids

    def round(self) -> None:
        """Claim and settle; raises AssertionError when fewer came than there were."""
        claim, token = self.ids.new("claim", 10), self.ids.new("token", 10)
        began = self.clock.monotonic()
        floors = dict(self.floors.at(began))
        found = self.db.run(lambda tx: claims.claim(tx, self.name, claim, token, {LANE: PART}, ["noop"], PART, again=False, floors=floors))
        self.floors.learn(began, self.clock.monotonic() - began, [] if found is None else found.tasks)
        assert found is not None and len(found.tasks) == PART, "a claim gave fewer tasks than there were"
        ends = [settling.Settlement(task=t.id, fence=t.fence, token=t.token, outcome=Succeeded()) for t in found.tasks]
        answered = self.db.run(lambda tx: settling.settle(tx, ends))
        assert set(answered.values()) == {settling.Answer.APPLIED}

    def timed(self, rounds: int) -> float:
        """Median milliseconds of a claim of 50 with its settle; the submissions between are not counted."""
        spent = []
        for _ in range(rounds):
            self.submit(PART)
            began = time.perf_counter()
            self.round()
            spent.append((time.perf_counter() - began) * 1000)
        return percentile(spent, 0.5)

    def fill(self, n: int, label: str, **changed: str) -> None:
        """``n`` copies of a finished task with other values, by one statement of the database; the statistics are brought up to date, as autovacuum does."""
        table = self.db.tables.task
        (template,) = self.submit(1)
        values: dict[str, Any] = {c.name: f"t.{c.name}" for c in table.c}
        values |= {"id": f"'{label}-' || g", "key": f"'{label}-' || g", "root": f"'{label}-' || g", "ready_lane": "NULL", **changed}
        statement = f"INSERT INTO {table.name} ({', '.join(values)}) SELECT {', '.join(values.values())} FROM {table.name} t, generate_series(1, {n}) g WHERE t.id = '{template}'"
        with self.db.engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            connection.exec_driver_sql(statement)
            connection.exec_driver_sql(f"DELETE FROM {table.name} WHERE id = '{template}'")
        with self.db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(f"VACUUM ANALYZE {table.name}")

    def rows_read(self) -> int:
        """Rows that the scan for candidates of one claim reads, filtered ones included."""
        self.submit(PART)
        query = selection.candidates(self.db.tables)
        with self.db.engine.begin() as connection:
            bound = query.limit(PART).params(lane=LANE, handlers=["noop"], floor=selection.LOWEST)
            text = str(bound.compile(connection, compile_kwargs={"literal_binds": True}))
            plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {text.replace('%%', '%')}").scalar_one()
        self.round()
        return _read(plan[0]["Plan"])


def _read(node: dict[str, Any]) -> int:
    inner = [_read(child) for child in node.get("Plans", [])]
    return sum(inner) if inner else int(node["Actual Rows"]) + int(node.get("Rows Removed by Filter", 0))


def main() -> int:
    args = options(__doc__, 1_000_000).parse_args()
    quiet()
    if not answers(POSTGRES):
        print("claims: skipped: it needs PostgreSQL", file=sys.stderr)
        return 0
    n, rounds = (1_000, 3) if args.once else (args.n, ROUNDS)
    prefix = f"bench{uuid.uuid4().hex[:8]}"
    with database(prefix) as url:
        db = Database(url, SystemClock(), prefix=f"{prefix}_", timeout_ms=600_000)
        try:
            measure(Session(db), n, rounds, once=args.once)
        finally:
            db.close()
    return 0


def measure(session: Session, n: int, rounds: int, *, once: bool) -> None:
    def told(what: str, count: int, ms: float, notes: str = "") -> None:
        met = None if once else ms <= TIMES * base
        show(
            Result(
                f"claims/{what}", n=count, p50_ms=ms, target=f"<= {TIMES:g} x empty", met=met,
                notes=f"{ms / base:.2f} x empty; {session.rows_read()} rows read for {PART}{notes}",
            )
        )  # fmt: skip

    session.timed(rounds)
    base = session.timed(rounds)
    told("empty", rounds * PART, base)
    session.fill(n // 10, "future", state="'SCHEDULED'", wake_us="t.created_us + 3600000000")
    told("future", n // 10, session.timed(rounds))
    session.fill(n, "finished", state="'SUCCEEDED'", settled_us="t.created_us")
    told("finished", n, session.timed(rounds))
    session.fill(n, "blocked", blocked_by="'permit:default/one'", permit="'one'")
    told("blocked", n, session.timed(rounds))
    with session.db.engine.connect().execution_options(isolation_level="REPEATABLE READ") as old, old.begin():
        old.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        old.exec_driver_sql("SELECT 1").scalar_one()  # its snapshot keeps every version from now on
        churn = 2 if once else max(rounds, n // (PART * 10))
        session.timed(churn)
        told("open transaction", churn * PART, session.timed(rounds), f"; an older snapshot open while {churn * PART} tasks ran")


if __name__ == "__main__":
    sys.exit(main())
