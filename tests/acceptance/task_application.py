"""The Celery application and durable handlers of the chaos tests. Where things are comes from the environment.

Files of one directory are the outside: nothing undoes a line in them. ``outside.txt``, ``calls.txt``: what was done, ``back.txt``: which calls came back, ``asked.txt``:
what reconcile hooks have answered.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable
from pathlib import Path

from celery import Celery

from millstream import Done, Handlers, Installation, Intent, Millstream, NotDone, TaskContext

prefix = os.environ.get("MILLSTREAM_PREFIX", "millstream")
app = Celery("chaos", broker=os.environ.get("MILLSTREAM_BROKER_URL"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    task_default_queue=f"{prefix}.tasks",
    event_queue_prefix=f"{prefix}.events",
)
if "MILLSTREAM_TEST_CLOCK" in os.environ:
    app.now = lambda: dt.datetime.fromtimestamp(time.time(), dt.UTC)  # what beat goes by
handlers = Handlers()


@handlers.task(name="write", effects="transactional", attempts=1_000, delay=0.05, max_delay=1.0, crashes=1_000, losses=1_000)
def write(ctx: TaskContext, number: int) -> int:
    """One row, which commits with the task's end. Its table has no unique key: a second row would be seen."""
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO written (number, fence) VALUES (:number, :fence)", {"number": number, "fence": ctx.fence})
        tx.result(number)
    return number


@handlers.task(name="quick", effects="idempotent")
def quick(number: int) -> int:
    return number


@handlers.task(name="holds", effects="idempotent")
def holds(number: int) -> int:
    """Takes a slot until it is told to go on."""
    _stood(number, True)
    return number


def _home() -> Path:
    return Path(os.environ["MILLSTREAM_CHAOS_HOME"])


def _append(name: str, line: str) -> None:
    descriptor = os.open(_home() / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


@handlers.task(name="outside", effects="external")
def outside(number: int) -> int:
    """One line of a file, in the middle of a moment in which this process may be killed."""
    time.sleep(0.005)
    _append("outside.txt", str(number))
    time.sleep(0.02)
    return number


def _called(number: int, stand: str) -> Callable[[str], int]:
    """What ``ctx.external`` is to call: the outside counts it by its idempotency key."""

    def call(key: str) -> int:
        time.sleep(0.005)
        _stood(number, stand == "before")
        _append("calls.txt", key)
        _stood(number, stand == "after")
        time.sleep(0.02)
        _append("back.txt", key)
        return number

    return call


def _stood(number: int, here: bool) -> None:
    """The first time it comes here, where it was asked to, it tells its process and waits to be told to go on, or to be killed."""
    told = _home() / f"stands-{number}"
    if not here or told.exists():
        return
    written = told.with_suffix(".new")
    written.write_text(str(os.getpid()))
    written.rename(told)
    while not (_home() / f"go-{number}").exists():
        time.sleep(0.01)


def _asked(intent: Intent) -> Done | NotDone:
    """The outside is asked whether it knows the key."""
    known = intent.idempotency_key in (_home() / "calls.txt").read_text().split()
    _append("asked.txt", f"{intent.idempotency_key} {'done' if known else 'not-done'}")
    return Done(intent.args[0]) if known else NotDone()


@handlers.task(name="charge", queue="calls", intents_only=True, attempts=1_000, delay=0.05, max_delay=1.0, crashes=1_000, losses=1_000)
def charge(ctx: TaskContext, number: int, stand: str = "") -> int:
    """Its call is in doubt when it is killed in it: nobody can be asked."""
    return int(ctx.external("charge", _called(number, stand)))


@handlers.task(
    name="ask", queue="calls", intents_only=True, attempts=1_000, delay=0.05, max_delay=1.0, crashes=1_000, losses=1_000, reconcile=_asked
)
def ask(ctx: TaskContext, number: int, stand: str = "") -> int:
    """Likewise, but the outside tells."""
    return int(ctx.external("charge", _called(number, stand)))


if "MILLSTREAM_DATABASE" in os.environ:
    millstream = Millstream(
        app,
        Installation.from_environment(os.environ),
        celery_app="tests.acceptance.task_application:app",
        handlers="tests.acceptance.task_application:handlers",
        pipelines=os.environ.get("MILLSTREAM_CHAOS_PIPELINES", ""),
        processes=int(os.environ["MILLSTREAM_SLOTS"]),
        tick=1.0,
    )
