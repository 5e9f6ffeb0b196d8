"""Reliable subscription to results: another system learns how each task ended, and books it once, whatever dies in between.

Shows
    A subscription keeps a delivery for every end that matches, with the outcome frozen as it was. The consumer's ``Inbox`` commits a marker
    with its own rows, so that a delivery that comes again does nothing again. An acknowledgement is valid whenever it comes.

Set-up
    ``pip install millstream``. No broker: the tasks are in one SQLite file, the consumer's books in another.

Source
    ``consume`` below: a marker, your own statement, one transaction.

Command
    ``python -m examples.tasks.result_inbox [--directory DIR]``

Input
    Three payments, one of which is refused.

Expected output
    delivered: payment-1 SUCCEEDED 10, payment-2 FAILED card refused, payment-3 SUCCEEDED 30
    booked 3, in all 40; the consumer dies before it acknowledges
    delivered again: 3, attempt 2; booked 0, in all 40
    left to deliver: 0
    by hand once more: payment-1 SUCCEEDED 10; booked 0, in all 40
    refused at every attempt: PARKED, the auditor is out
    redelivered when he is back: payment-2 FAILED card refused

Failure path
    The consumer dies after its commit and before its acknowledgement: everything comes again, and the inbox knows it. And a consumer that
    refuses a delivery until no attempt is left: it is parked with the reason, until somebody has it delivered again.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from millstream import Delivery, Fail, Handlers, Inbox, Installation, Subscriptions, TaskFailed, TaskWorker

from .workplace import workplace

handlers = Handlers()
inbox = Inbox()


@handlers.task(name="pay", effects="idempotent")
def pay(amount: int) -> int:
    if amount == 20:
        raise Fail("card refused")
    return amount


def consume(books: sqlite3.Connection, delivery: Delivery) -> bool:
    """Book it, with its marker, in one transaction; whether it was new."""
    with books:
        if not inbox.accept(books, delivery):
            return False
        books.execute("INSERT INTO booked VALUES (?, ?)", (delivery.key, delivery.result or 0))
        return True


def consumed(books: sqlite3.Connection, deliveries: Sequence[Delivery]) -> str:
    new = sum(consume(books, delivery) for delivery in deliveries)
    [total] = books.execute("SELECT sum(amount) FROM booked").fetchone()
    return f"booked {new}, in all {total}"


def said(delivery: Delivery) -> str:
    return f"{delivery.key} {delivery.state} {delivery.reason or delivery.result}"


def book(subscriptions: Subscriptions, books: sqlite3.Connection) -> None:
    first = subscriptions.pull("booking", lease=0.1)
    print("delivered:", ", ".join(map(said, first)))
    print(f"{consumed(books, first)}; the consumer dies before it acknowledges")

    again: list[Delivery] = []
    while len(again) < len(first):
        again += subscriptions.pull("booking", wait=20)
    print(f"delivered again: {len(again)}, attempt {max(d.attempt for d in again)}; {consumed(books, again)}")
    subscriptions.acknowledge(*again)
    print("left to deliver:", len(subscriptions.pull("booking")))

    subscriptions.redeliver("booking", first[0].event)
    for delivery in subscriptions.pull("booking", wait=20):
        print(f"by hand once more: {said(delivery)}; {consumed(books, [delivery])}")
        subscriptions.acknowledge(delivery)


def audit(subscriptions: Subscriptions) -> None:
    for _ in range(2):
        [delivery] = subscriptions.pull("audit", wait=20)
        subscriptions.refuse(delivery, "the auditor is out")
    [parked] = subscriptions.deliveries("audit")
    print(f"refused at every attempt: {parked.state}, {parked.reason}")

    subscriptions.redeliver("audit", parked.event)
    [delivery] = subscriptions.pull("audit", wait=20)
    subscriptions.acknowledge(delivery)
    print("redelivered when he is back:", said(delivery))


def main(directory: Path) -> None:
    installation = Installation.local(directory / "data")
    with TaskWorker(installation, handlers) as worker, Subscriptions(installation) as subscriptions:
        subscriptions.create("booking", handler="pay", delay=0)
        subscriptions.create("audit", handler="pay", states=["FAILED"], attempts=2, delay=0)
        for number in (1, 2, 3):
            try:
                worker.tasks.wait(worker.tasks.submit(pay, number * 10, key=f"payment-{number}"), timeout=20)
            except TaskFailed:
                pass  # the consumer is told of it, too

        with closing(sqlite3.connect(directory / "books.db")) as books:
            inbox.create(books)
            books.execute("CREATE TABLE booked (payment TEXT, amount INTEGER)")
            book(subscriptions, books)
        audit(subscriptions)


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
