"""Durable no-op tasks beside raw Celery on the same workers, in the same run: throughput with submission, burn-down, latency of one task.

    python -m benchmarks tasks --n 20000

Also at a fixed rate, half of what was burnt down (open loop), and burnt down while the worker's task process is killed every few seconds.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import sqlalchemy as sa

from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

from .measurement import ROOT, Result, options, percentile, quiet, show
from .services import POSTGRES, RABBITMQ, REDIS, answers

PART, AHEAD = 500, 5_000
"""Tasks that are submitted together, and those that wait while the worker is killed."""
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
def worker(environment: dict[str, str]) -> Iterator[int]:
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.task_app:app", "worker", "-c", str(PROCESSES), "--loglevel", "ERROR"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
    try:
        yield process.pid
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

    def killed(self, worker_pid: int, every: float, times: int) -> tuple[int, float, int]:
        """How many were submitted and settled, in how many seconds, while the worker's task process was killed `XX ``every`` seconds; and how many kills."""
        from millstream.tasks import Item

        began, n, kills = time.perf_counter(), 0, 0
        next_kill = began + every / 2
        while (left := self._left()) or kills < times:
            if kills < times and left < AHEAD:
                self.tasks.submit_many(self.app.noop, [Item() for _ in range(PART)])
                n += PART
                continue
            time.sleep(0.02)
            if kills < times and time.perf_counter() >= next_kill:
                next_kill += every
                for child in psutil.Process(worker_pid).children():
                    if "millstream.task_process" in child.cmdline():
                        child.kill()
                        kills += 1
        return n, time.perf_counter() - began, kills

    def open_loop(self, rate: float, seconds: float) -> tuple[list[float], list[float]]:
        """Milliseconds from acceptance to the settled end of each of ours, and from sending to running of each of Celery's, at a fixed rate, one system after the other."""
        ids = [r.task for r in self._paced(rate, seconds, lambda: self.tasks.submit(self.app.noop))]
        while self._left():
            time.sleep(0.05)
        t = self.tasks.database.tables.task
        wanted = sa.select(t.c.id, (t.c.settled_us - t.c.created_us).label("us"))
        took = {r["id"]: int(r["us"]) / 1000 for r in self.tasks.database.read(lambda tx: tx.rows(wanted))}
        sent = self._paced(rate, seconds, lambda: (time.time(), self.app.raw_clock.delay()))
        theirs = [(result.get(timeout=60) - at) * 1000 for at, result in sent]
        return [took[i] for i in ids], theirs

    @staticmethod
    def _paced(rate: float, seconds: float, once: Callable[[], Any]) -> list[Any]:
        """Call at a fixed rate, from as many threads as it takes; what is late is made up for."""
        due = [i / rate for i in range(int(rate * seconds))]
        began = time.perf_counter()

        def at(instant: float) -> Any:
            time.sleep(max(0.0, began + instant - time.perf_counter()))
            return once()

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(at, due))

    def _left(self) -> int:
        table = self.tasks.database.tables.task
        count = sa.select(sa.func.count()).where(
            table.c.settled_us == 0
        )  # an index has only these: the look costs those that are finished nothing
        return int(self.tasks.database.read(lambda tx: tx.execute(count).scalar_one()))

    def check(self) -> None:
        """Raises AssertionError when a task did not run exactly once."""
        table = self.tasks.database.tables.task
        wrong = sa.select(sa.func.count()).where(sa.or_(table.c.starts != 1, table.c.state != "SUCCEEDED"))
        found = self.tasks.database.read(lambda tx: tx.execute(wrong).scalar_one())
        assert found == 0, f"{found} tasks did not run exactly once"

    def check_ends(self) -> None:
        """Raises AssertionError when a task was lost; those whose process was killed under them may have begun again."""
        table = self.tasks.database.tables.task
        found = self.tasks.database.read(lambda tx: tx.execute(sa.select(sa.func.count()).where(table.c.state != "SUCCEEDED")).scalar_one())
        assert found == 0, f"{found} tasks did not succeed"

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
        if once:
            environment["BENCH_LEASE_MS"] = "3000"  # what a killed process held is given back after so long
        os.environ.update(environment)
        with worker(environment) as pid:
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
            rate = 20.0 if once else min(percentile(single, 0.5), percentile(peers, 0.5)) / 2
            loop = measured.open_loop(rate, 1 if once else 15)
            kill = measured.killed(pid, *((1.0, 1) if once else (10.0, 3)))
            measured.check_ends()
            measured.tasks.close()
    report_faults(name, rate, loop, kill, once=once)
    report(name, n, (ours, single, peers), (waits, peer_waits), once=once)


def report_faults(name: str, rate: float, loop: tuple[list[float], list[float]], kill: tuple[int, float, int], *, once: bool) -> None:
    for system, waits in (("millstream", loop[0]), ("celery", loop[1])):
        show(
            Result(
                f"tasks/{name} open loop", system, n=len(waits), rate=None if once else round(rate), p50_ms=percentile(waits, 0.5), p99_ms=percentile(waits, 0.99),
                notes="one by one at a fixed rate; acceptance to settled end" if system == "millstream" else "sending to running",
            )
        )  # fmt: skip
    n, seconds, kills = kill
    show(
        Result(
            f"tasks/{name} killed", n=n, seconds=seconds, rate=None if once else round(n / seconds),
            notes=f"submit_many + run, the worker's task process killed {kills} times: lost 0, every task succeeded once",
        )
    )  # fmt: skip


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
