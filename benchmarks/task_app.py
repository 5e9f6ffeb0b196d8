"""The Celery application the ``tasks`` case runs: a no-op as a durable task and as a plain Celery task, on the same workers."""

from __future__ import annotations

import os
import time

from celery import Celery

from millstream import Handlers, Installation, Millstream

app = Celery("benchmarks", broker=os.environ["BENCH_BROKER"], backend=os.environ["BENCH_RESULTS"])
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=4, worker_hijack_root_logger=False)
handlers = Handlers()


@handlers.task(name="noop", effects="idempotent")
def noop() -> None:
    """Nothing: what is measured is everything around it."""


@app.task(name="raw_noop", ignore_result=False)  # type: ignore[untyped-decorator]  # Celery has no types
def raw_noop() -> None:
    """The same for Celery."""


@app.task(name="raw_clock", ignore_result=False)  # type: ignore[untyped-decorator]  # Celery has no types
def raw_clock() -> float:
    """When it ran."""
    return time.time()


installation = Installation(
    database=os.environ["BENCH_DATABASE"],
    transport="unix:///tmp",
    checkpoints="file:///tmp",
    prefix=os.environ["BENCH_PREFIX"],
    lease_ms=int(os.environ.get("BENCH_LEASE_MS", "10000")),
)
millstream = Millstream(app, installation, celery_app="benchmarks.task_app:app", handlers="benchmarks.task_app:handlers")
