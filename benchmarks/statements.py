"""How many statements a worker sends to the database for one no-op task at saturation, BEGIN and COMMIT counted.

    python -m benchmarks statements --n 20000

PostgreSQL. One worker session in this process, its step machine as it runs beside a Celery worker, with a pool that ends every attempt at once; the tasks are there when it begins.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections import deque

import sqlalchemy as sa

from millstream_schema.durable.outcomes import Succeeded
from millstream_schema.durable.records import TaskRow
from millstream_schema.ports import SystemChance, SystemClock, SystemIds
from millstream_schema.store.database import Database
from millstream_tasks.durable.host import HostSettings, TaskHost

from .claims import Session
from .measurement import Result, options, quiet, show
from .services import POSTGRES, answers
from .tasks import PART, PROCESSES, database

TARGET = 0.2
PREFETCH = 200


class Instant:
    """A pool whose attempts are over when they begin: what is counted is the worker's alone."""

    def __init__(self) -> None:
        self.host: TaskHost | None = None
        self._begun: deque[TaskRow] = deque()

    def free(self) -> int:
        return PROCESSES - len(self._begun)

    def ahead(self) -> int:
        return 0

    def waiting(self) -> int:
        return 0

    def give_back(self) -> None:
        """Nothing waits."""

    def start(self, task: TaskRow) -> None:
        self._begun.append(task)

    def tick(self) -> float:
        while self._begun and self.host is not None:
            task = self._begun.popleft()
            self.host.ended(task.id, task.fence, Succeeded())
        return 0.0

    def cancel(self, task: str, fence: int) -> None:
        """Nothing runs for long enough."""

    def lease(self, deadline: float) -> None:
        """Nothing outlives it."""

    def kill(self, task: str, fence: int) -> None:
        """Nothing runs for long enough."""


def main() -> int:
    args = options(__doc__, 20_000).parse_args()
    quiet()
    if not answers(POSTGRES):
        print("statements: skipped: it needs PostgreSQL", file=sys.stderr)
        return 0
    n = 500 if args.once else args.n
    prefix = f"bench{uuid.uuid4().hex[:8]}"
    with database(prefix) as url:
        db = Database(url, SystemClock(), prefix=f"{prefix}_")
        try:
            measure(db, n, once=args.once)
        finally:
            db.close()
    return 0


def measure(db: Database, n: int, *, once: bool) -> None:
    session = Session(db)
    for at in range(0, n, PART):
        session.submit(min(PART, n - at))
    pool = Instant()
    settings = HostSettings(
        name="bench", queues=("default",), handlers=("noop",), slots=PROCESSES, prefetch=PROCESSES * PREFETCH, lease_ms=10_000, renew_ms=2_500
    )  # fmt: skip
    host = TaskHost(db, pool, SystemClock(), SystemIds(), SystemChance(), settings)
    pool.host = host
    sent = {"statements": 0, "BEGIN": 0, "COMMIT": 0}

    def count(what: str, _first: object) -> None:
        sent[what] += 1

    sa.event.listen(db.engine, "before_cursor_execute", lambda *_: count("statements", None))
    sa.event.listen(db.engine, "begin", lambda c: count("BEGIN", c))
    sa.event.listen(db.engine, "commit", lambda c: count("COMMIT", c))
    t = db.tables.task
    began = time.perf_counter()
    while sum(host.answers.values()) < n:
        host.step()
    seconds = time.perf_counter() - began
    with db.engine.connect() as connection:
        wrong = connection.execute(sa.select(sa.func.count()).where(sa.or_(t.c.state != "SUCCEEDED", t.c.starts != 1))).scalar_one()
    assert wrong == 0, f"{wrong} tasks did not run exactly once"
    each = sum(sent.values()) / n
    show(
        Result(
            "statements", n=n, rate=None if once else round(n / seconds), target=f"<= {TARGET} a task", met=None if once else each <= TARGET,
            notes=f"{each:.3f} a task ({', '.join(f'{v} {k}' for k, v in sent.items())}); prefetch {PREFETCH} a process",
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
