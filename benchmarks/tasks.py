"""Durable no-op tasks beside raw Celery on the same workers, in the same run: throughput with submission, burn-down, latency of one task.

    python -m benchmarks tasks --n 20000

One ``celery worker -c 2`` over Redis (results there, too) and over RabbitMQ (results in Redis), PostgreSQL for the rows. Every task is looked for at the end: none lost, none run
twice. Celery submits with ``delay()``, as its users do; durable tasks come in parts of 500 by ``submit_many``, and one by one where that is said.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

from .measurement import ROOT, Result, options, percentile, quiet, show
from .services import POSTGRES, RABBITMQ, REDIS, answers

PART = 500
PROCESSES = 2
TIMES_CELERY = 5.0
LATENCY_TIMES = 1.5


@contextmanager
def database(prefix: str) -> Iterator[str]:
    """URL of a PostgreSQL database with a schema of its own prefix, whose tables are dropped afterwards."""
    url = POSTGRES.replace("postgresql://", "postgresql+psycopg://", 1)
    opened = Database(url, SystemClock(), prefix=f"{prefix}_")
    try:
        create_schema(opened)
        yield url
    finally:
        with opened.engine.begin() as connection:
            opened.tables.metadata.drop_all(connection)
            connection.execute(sa.text(f"DROP TABLE IF EXISTS {prefix}_alembic"))
        opened.close()


@contextmanager
def worker(environment: dict[str, str]) -> Iterator[None]:
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.task_app:app", "worker", "-c", str(PROCESSES), "--loglevel", "ERROR"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def latencies(once: Callable[[], Any], n: int) -> list[float]:
    """Milliseconds of ``n`` calls, one after another."""
    found = []
    for _ in range(n):
        began = time.perf_counter()
        once()
        found.append((time.perf_counter() - began) * 1000)
    return found


class Measured:
    """Both systems over one broker, seen from one client."""

    def __init__(self) -> None:
        from . import task_app  # reads its environment when it is imported

        self.app = task_app
        self.tasks = task_app.millstream.tasks(task_app.handlers)

    def ready(self) -> None:
        self.tasks.wait(self.tasks.submit(self.app.noop).task, 60)
        self.app.raw_noop.delay().get(timeout=60)

    def durable(self, n: int, *, single: bool) -> float:
        """Seconds from the first submission until the last of ``n`` is settled."""
        from millstream.tasks import Item

        began = time.perf_counter()
        if single:
            ids = [self.tasks.submit(self.app.noop).task for _ in range(n)]
        else:
            parts = [self.tasks.submit_many(self.app.noop, [Item() for _ in range(min(PART, n - at))]) for at in range(0, n, PART)]
            ids = [r.task for part in parts for r in part]  # type: ignore[union-attr]  # a refusal has no task and fails here
        for task in ids[-PROCESSES * 2 :]:
            self.tasks.wait(task, 300)
        while self._left():
            time.sleep(0.01)
        return time.perf_counter() - began

    def _left(self) -> int:
        table = self.tasks.database.tables.task
        count = sa.select(sa.func.count()).where(table.c.state != "SUCCEEDED")
        return int(self.tasks.database.read(lambda tx: tx.execute(count).scalar_one()))

    def check(self) -> None:
        """Raises AssertionError when a task did not run exactly once."""
        table = self.tasks.database.tables.task
        wrong = sa.select(sa.func.count()).where(sa.or_(table.c.starts != 1, table.c.state != "SUCCEEDED"))
        found = self.tasks.database.read(lambda tx: tx.execute(wrong).scalar_one())
        assert found == 0, f"{found} tasks did not run exactly once"

    def celery(self, n: int) -> float:
        began = time.perf_counter()
        results = [self.app.raw_noop.delay() for _ in range(n)]
        for result in results:
            result.get(timeout=300)
        return time.perf_counter() - began


def run(name: str, broker: str, n: int, iterations: int, *, once: bool) -> None:
    prefix = f"bench{uuid.uuid4().hex[:8]}"
    results = REDIS.rsplit("/", 1)[0] + "/14"
    with database(prefix) as url:
        environment = {"BENCH_BROKER": broker, "BENCH_RESULTS": results, "BENCH_DATABASE": url, "BENCH_PREFIX": prefix}
        os.environ.update(environment)
        with worker(environment):
            measured = Measured()
            measured.ready()
            ours, single, peers = [], [], []
            for _ in range(iterations):  # beside each other, so that a noisy minute is everybody's
                ours.append(n / measured.durable(n, single=False))
                single.append(n // 5 / measured.durable(n // 5, single=True))
                peers.append(n // 4 / measured.celery(n // 4))
            few = 20 if once else 300
            waits = latencies(lambda: measured.tasks.wait(measured.tasks.submit(measured.app.noop).task, 60), few)
            peer_waits = latencies(lambda: measured.app.raw_noop.delay().get(timeout=60), few)
            measured.check()
            measured.tasks.close()
    report(name, n, (ours, single, peers), (waits, peer_waits), once=once)


def report(
    name: str, n: int, rates: tuple[list[float], list[float], list[float]], waits: tuple[list[float], list[float]], *, once: bool
) -> None:
    ours, single, peer = (percentile(r, 0.5) for r in rates)
    mine, theirs = percentile(waits[0], 0.5), percentile(waits[1], 0.5)
    judged = not once
    show(
        Result(
            f"tasks/{name}", n=n, rate=None if once else round(ours), target=f">= {TIMES_CELERY:g} x Celery", met=ours >= TIMES_CELERY * peer if judged else None,
            notes=f"submit_many + run; {ours / peer:.1f} x Celery; all runs {[round(r) for r in rates[0]]}",
        )
    )  # fmt: skip
    show(
        Result(
            f"tasks/{name}", n=n // 5, rate=None if once else round(single), notes=f"submit one by one + run; {single / peer:.1f} x Celery"
        )
    )
    show(
        Result(
            f"tasks/{name}",
            "celery",
            n=n // 4,
            rate=None if once else round(peer),
            notes=f"delay + get; all runs {[round(r) for r in rates[2]]}",
        )
    )
    show(
        Result(
            f"tasks/{name} latency", n=len(waits[0]), p50_ms=mine, p99_ms=percentile(waits[0], 0.99), target=f"<= {LATENCY_TIMES:g} x Celery",
            met=mine <= LATENCY_TIMES * theirs if judged else None, notes=f"submit + wait; {mine / theirs:.1f} x Celery",
        )
    )  # fmt: skip
    show(Result(f"tasks/{name} latency", "celery", n=len(waits[1]), p50_ms=theirs, p99_ms=percentile(waits[1], 0.99), notes="delay + get"))


def main() -> int:
    parser = options(__doc__, 20_000)
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), help="one of them alone, in the process that is started")
    args = parser.parse_args()
    quiet()
    n, iterations = (200, 1) if args.once else (args.n, args.iterations)
    if not answers(POSTGRES) or not answers(REDIS):
        print("tasks: skipped: it needs PostgreSQL and Redis", file=sys.stderr)
        return 0
    if args.broker:
        broker = REDIS.rsplit("/", 1)[0] + "/13" if args.broker == "redis" else RABBITMQ
        run(args.broker, broker, n, iterations, once=args.once)
        return 0
    found = [b for b, u in (("redis", REDIS), ("rabbitmq", RABBITMQ)) if answers(u)][: 1 if args.once else 2]
    codes = [subprocess.call([sys.executable, "-m", "benchmarks.tasks", *sys.argv[1:], "--broker", b], cwd=ROOT) for b in found]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
