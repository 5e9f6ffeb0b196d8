"""The Celery application and durable handlers of the chaos tests. Where things are comes from the environment."""

from __future__ import annotations

import os
import time

from celery import Celery

from millstream import Handlers, Installation, Millstream, TaskContext

prefix = os.environ.get("MILLSTREAM_PREFIX", "millstream")
app = Celery("chaos", broker=os.environ.get("MILLSTREAM_BROKER_URL"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    task_default_queue=f"{prefix}.tasks",
    event_queue_prefix=f"{prefix}.events",
)
handlers = Handlers()


@handlers.task(name="write", effects="transactional", attempts=1_000, delay=0.05, max_delay=1.0, crashes=1_000, losses=1_000)
def write(ctx: TaskContext, number: int) -> int:
    """One row, which commits with the task's end. Its table has no unique key: a second row would be seen."""
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO written (number, fence) VALUES (:number, :fence)", {"number": number, "fence": ctx.fence})
        tx.result(number)
    return number


@handlers.task(name="outside", effects="external")
def outside(number: int) -> int:
    """One line of a file, which nothing undoes, in the middle of a moment in which this process may be killed."""
    time.sleep(0.005)
    descriptor = os.open(os.environ["MILLSTREAM_CHAOS_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)
    time.sleep(0.02)
    return number


if "MILLSTREAM_DATABASE" in os.environ:
    millstream = Millstream(
        app,
        Installation.from_environment(os.environ),
        celery_app="tests.acceptance.task_application:app",
        handlers="tests.acceptance.task_application:handlers",
        processes=int(os.environ["MILLSTREAM_SLOTS"]),
        tick=1.0,
    )
