"""Durable no-op tasks in one process on SQLite, each commit flushed (``synchronous=FULL``): throughput with submission, latency of one task.

    python -m benchmarks embedded_tasks --n 5000

A ``TaskWorker`` with two threads beside the submitting one. Every task is looked for at the end: none lost, none run twice.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa

from millstream import Handlers, Installation
from millstream.task_worker import TaskWorker
from millstream.tasks import Item

from .measurement import Result, options, percentile, quiet, show
from .tasks import PART, PROCESSES, latencies

TARGET = 1_000.0


def main() -> int:
    args = options(__doc__, 5_000).parse_args()
    quiet()
    n, iterations, few = (200, 1, 20) if args.once else (args.n, args.iterations, 300)
    handlers = Handlers()

    @handlers.task(name="noop", effects="idempotent")
    def noop() -> None:
        """Nothing: what is measured is everything around it."""

    with tempfile.TemporaryDirectory() as directory, TaskWorker(Installation.local(Path(directory)), handlers, slots=PROCESSES) as worker:
        tasks = worker.tasks
        table = tasks.database.tables.task
        left = sa.select(sa.func.count()).where(table.c.settled_us == 0)
        rates = []
        for _ in range(iterations):
            began = time.perf_counter()
            for at in range(0, n, PART):
                tasks.submit_many(noop, [Item() for _ in range(min(PART, n - at))])
            while tasks.database.read(lambda tx: tx.execute(left).scalar_one()):
                time.sleep(0.02)
            rates.append(n / (time.perf_counter() - began))
        waits = latencies(lambda: tasks.wait(tasks.submit(noop).task, 60), few)
        wrong = sa.select(sa.func.count()).where(sa.or_(table.c.starts != 1, table.c.state != "SUCCEEDED"))
        found = tasks.database.read(lambda tx: tx.execute(wrong).scalar_one())
        assert found == 0, f"{found} tasks did not run exactly once"
    rate = percentile(rates, 0.5)
    show(
        Result(
            "tasks/embedded", n=n, rate=None if args.once else round(rate), target=f">= {TARGET:g} tasks/s", met=None if args.once else rate >= TARGET,
            notes=f"submit_many + run, SQLite, synchronous=FULL; all runs {[round(r) for r in rates]}",
        )
    )  # fmt: skip
    show(Result("tasks/embedded latency", n=few, p50_ms=percentile(waits, 0.5), p99_ms=percentile(waits, 0.99), notes="submit + wait"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
