"""Transactional outbox: an order and the request to ship it are committed together in the shop's own database, and a relay brings the request to the platform once.

Shows
    The shop's database knows nothing of the platform's. The request is a row beside the order: there with it, or not at all. A relay sends
    it under its own key until the platform has accepted it; a relay that dies in between sends the same request again and gets the first
    receipt.

Set-up
    ``pip install millstream``. No broker: the shop's rows are in one SQLite file, the platform's in another.

Source
    ``place`` below, and the relay: in production ``millstream outbox relay --forever``.

Command
    ``python -m examples.tasks.outbox [--directory DIR]``

Input
    Four orders, one of which is rolled back.

Expected output
    order 1: rolled back; orders 0, requests 0
    order 2: committed; the platform knows nothing yet: True
    relay: 1 accepted; order 2 shipped
    placed again: replayed, SENT, the same task
    a relay that died after sending: 1 accepted, shipped once: True
    order 4: 0 accepted, PARKED
    orders in the shop: 2, 3, 4

Failure path
    A roll-back leaves neither order nor request. A relay that died between sending and noting it: its successor sends again, and nothing is
    shipped twice. And a request the platform refuses, because somebody took its key for something else: it is parked and kept for a person
    to look at, never sent under another key.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from millstream import Handlers, Installation, Outbox, OutboxReceipt, OutboxRelay, TaskWorker

from .workplace import workplace

handlers = Handlers()
shipped: Counter[int] = Counter()


@handlers.task(name="ship", effects="idempotent")
def ship(order: int, to: str) -> str:
    shipped[order] += 1
    return f"order {order} shipped"


def place(shop: sqlite3.Connection, outbox: Outbox, order: int) -> OutboxReceipt:
    """The order and what is to be done about it. The caller commits, or does not."""
    shop.execute("INSERT OR IGNORE INTO orders VALUES (?)", (order,))
    return outbox.submit(shop, ship, order, "Berlin", key=f"order-{order}")


def orders(shop: sqlite3.Connection) -> list[int]:
    return [number for [number] in shop.execute("SELECT id FROM orders ORDER BY id")]


def main(directory: Path) -> None:
    url = f"sqlite:///{directory / 'shop.db'}"
    installation = Installation.local(directory / "platform")
    Outbox.create(url)
    with TaskWorker(installation, handlers) as worker, closing(sqlite3.connect(directory / "shop.db")) as shop:
        tasks = worker.tasks
        shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        outbox = Outbox(handlers, target=tasks.installation_id)

        place(shop, outbox, 1)
        shop.rollback()
        [kept] = shop.execute("SELECT count(*) FROM millstream_outbox").fetchone()
        print(f"order 1: rolled back; orders {len(orders(shop))}, requests {kept}")

        place(shop, outbox, 2)
        shop.commit()
        print("order 2: committed; the platform knows nothing yet:", not tasks.list())
        relay = OutboxRelay(installation, url)
        accepted = relay.once()
        [task] = tasks.list()
        print(f"relay: {accepted} accepted; {tasks.wait(task.id, timeout=20)}")
        again = place(shop, outbox, 2)
        shop.commit()
        print(
            f"placed again: {'replayed' if again.replayed else 'new'}, {again.state}, {'the same' if again.task == task.id else 'another'} task"
        )

        place(shop, outbox, 3)
        shop.commit()
        tasks.wait(tasks.submit(ship, 3, "Berlin", key="order-3"), timeout=20)  # what a relay did that died before it noted it
        print(f"a relay that died after sending: {relay.once()} accepted, shipped once: {shipped[3] == 1}")

        tasks.submit(ship, 4, "Paris", key="order-4")  # somebody took the key
        place(shop, outbox, 4)
        shop.commit()
        accepted = relay.once()
        parked = place(shop, outbox, 4)
        shop.commit()
        print(f"order 4: {accepted} accepted, {parked.state}")
        relay.close()
        print("orders in the shop:", ", ".join(map(str, orders(shop))))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
