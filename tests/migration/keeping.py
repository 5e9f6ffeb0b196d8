"""What a version leaves behind: an installation with rows of every kind, and messages, kept so that later versions must read them.

Run once for a version, from its sources, and never again: ``python -m tests.migration.keeping v0.1`` writes ``tests/migration/kept/v0.1.sql`` (an SQLite dump) and
``tests/migration/kept/v0.1.json`` (messages, and what is to be read from both). ``test_kept`` reads them.
"""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from tests.migration.test_kept import KEPT, VALUES

from millstream import (
    Handlers,
    Inbox,
    Installation,
    NeedsReview,
    Outbox,
    Permits,
    Queues,
    Retry,
    Subscriptions,
    TaskContext,
    TaskFailed,
    TaskFilter,
    TaskWorker,
)
from millstream.intake import Arrived, encode
from millstream_schema.durable.requests import Options, encode_arguments
from millstream_schema.hints import JobHint, NodeHint

SECONDS = 20
handlers = Handlers()
gate, begun = threading.Event(), threading.Event()


@handlers.task(name="echo", effects="idempotent")
def echo(value: Any) -> Any:
    return value


@handlers.task(name="fail", effects="idempotent", attempts=1)
def fail() -> None:
    raise ValueError("kept for later versions")


@handlers.task(name="again", effects="idempotent")
def again() -> None:
    raise Retry("not this year", after=300 * 86_400)


@handlers.task(name="call", effects="external", queue="calls")
def call(ctx: TaskContext, number: int) -> Any:
    value = ctx.external("known", lambda key: number)
    if number == 2:
        ctx.external("doubted", lambda key: 1 / 0)
    raise NeedsReview(f"asked for {value}")


@handlers.task(name="book", effects="transactional", permit="account:{number}")
def book(ctx: TaskContext, number: int) -> None:
    with ctx.transaction() as tx:
        tx.result({"booked": number, "permit": ctx.permit_seq})


@handlers.task(name="hold", effects="idempotent", queue="slow")
def hold(ctx: TaskContext) -> None:
    ctx.progress(1, 2, "half")
    ctx.note("noted")
    begun.set()
    gate.wait(SECONDS)


def end(worker: TaskWorker, *submitted: Any) -> None:
    for receipt in submitted:
        try:
            worker.tasks.wait(receipt, timeout=SECONDS)
        except TaskFailed:
            pass


def fill(installation: Installation, outbox: Path) -> dict[str, Any]:
    """Rows of every kind; the messages."""
    far = dt.datetime(2099, 1, 1, tzinfo=dt.UTC)
    with TaskWorker(installation, handlers) as worker, Subscriptions(installation) as subscriptions, Queues(installation) as queues:
        tasks = worker.tasks
        subscriptions.create("ends", handler="echo", delay=0)
        end(worker, *[tasks.submit(echo, value, key=f"value-{at}", business_key="values") for at, value in enumerate(VALUES)])
        end(worker, tasks.submit(fail, key="failed"), tasks.submit(call, 1, key="known"), tasks.submit(call, 2, key="doubted"))
        end(worker, *[tasks.submit(book, 7, key=f"book-{number}") for number in range(2)])
        held = tasks.submit(hold, key="held")
        begun.wait(SECONDS)
        tasks.submit(again, key="waits")
        tasks.submit(echo, 1, key="scheduled", due_at=far)
        tasks.cancel(tasks.submit(echo, 1, key="cancelled", due_at=far).task)
        [failed] = tasks.list(handler="fail")
        tasks.submit(echo, 1, key="expired", start_by=0.001, delay=0.01)
        worker.schedules.publish("yearly", echo, "0 0 1 1 *", args=(1,), zone="Europe/Berlin")
        worker.schedules.trigger("yearly", request="by-hand")
        queues.pause("idle", reason="kept")
        queues.set_rate("slow", rate="10/s")
        queues.set_weight("slow", 3)
        queues.set_quota("slow", backlog=1000)
        with Permits(installation) as permits:
            permits.set_capacity("account:7", 2)
        tasks.retry(failed.id, reason="kept")
        queues.pause("later", reason="kept")
        gate.set()
        end(worker, held)
        page = tasks.find(TaskFilter(business_key="values"), limit=2)
        [delivery, *_] = subscriptions.pull("ends", wait=SECONDS)
        with closing(sqlite3.connect(outbox)) as theirs, theirs:
            Outbox.create(f"sqlite:///{outbox}")
            Outbox(handlers, target=tasks.installation_id).submit(theirs, echo, "from the outbox", key="outbox")
            inbox = Inbox()
            inbox.create(theirs)
            inbox.accept(theirs, delivery)
        body = {"namespace": "default", "subscription": "ends", "event": subscriptions.deliveries("ends")[-1].event}
    return {
        "cursor": page.cursor,
        "publication": body,
        "arrived": encode(Arrived("id-1", "echo", encode_arguments((1,), {}), Options(business_key="b"), "celery")).hex(),
        "node hint": msgspec.json.encode(NodeHint("node-1", "job-1", 3, 2, "assigned")).decode(),
        "job hint": msgspec.json.encode(JobHint("job-1")).decode(),
    }


def dump(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return "\n".join(connection.iterdump()) + "\n"


def main(version: str) -> None:
    KEPT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        installation = Installation.local(directory / "data")
        messages = fill(installation, directory / "theirs.db")
        [store] = (directory / "data").glob("*.db")
        (KEPT / f"{version}.sql").write_text(dump(store))
        (KEPT / f"{version}.outbox.sql").write_text(dump(directory / "theirs.db"))
    (KEPT / f"{version}.json").write_text(json.dumps(messages, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
