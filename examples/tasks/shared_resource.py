"""A resource shared across queues: one holder at a time, and a number that lets the resource refuse whoever comes too late.

Shows
    Two handlers of two queues declare the same ``permit``: at most ``capacity`` of their tasks hold it at once, whatever worker runs them.
    Each holder gets ``ctx.permit_seq``, a number that only grows. The resource keeps the largest it has seen and refuses smaller ones: that
    is what stops a holder that was paused, lost its lease and wakes up.

Set-up
    ``pip install millstream``. No broker: everything is in SQLite files.

Source
    The two ``permit=`` options, and ``write``: the one statement that the resource needs.

Command
    ``python -m examples.tasks.shared_resource [--directory DIR]``

Input
    A stock file for the article "lamp", written by imports (queue ``imports``) and by sales (queue ``sales``).

Expected output
    the import holds the permit; the sale: it waits for permit 'stock:lamp': 1 of 1 are held
    another article is not held up: stock of chair is 4
    import: stock of lamp is 10
    sale: stock of lamp is 9
    the sale's number is larger: True
    an older write arrives late: refused, the stock has seen a newer holder
    stock of lamp: 9

Failure path
    The last two lines: a write of the import that was stuck on the way arrives after the sale. Without the number it would set the stock
    back to 10.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from millstream import Handlers, Installation, TaskContext, TaskWorker

from .workplace import workplace

handlers = Handlers()
holding, let_go = threading.Event(), threading.Event()
numbers: dict[str, int] = {}  # what each holder was given


@contextmanager
def stock(path: str) -> Iterator[sqlite3.Connection]:
    """The resource. It belongs to somebody else and knows nothing of tasks."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS stock (article TEXT PRIMARY KEY, amount INTEGER, seq INTEGER)")
        yield connection


def write(path: str, article: str, amount: int, seq: int) -> bool:
    """Whether the resource took it: not from a holder older than the last one."""
    with stock(path) as connection:
        connection.execute("INSERT OR IGNORE INTO stock VALUES (?, 0, 0)", (article,))
        changed = connection.execute("UPDATE stock SET amount = ?, seq = ? WHERE article = ? AND seq <= ?", (amount, seq, article, seq))
        return changed.rowcount == 1


def amount(path: str, article: str) -> int:
    with stock(path) as connection:
        row = connection.execute("SELECT amount FROM stock WHERE article = ?", (article,)).fetchone()
        return row[0] if row else 0


@handlers.task(name="import_stock", queue="imports", effects="idempotent", permit="stock:{article}", capacity=1)
def import_stock(ctx: TaskContext, path: str, article: str, count: int) -> str:
    numbers["import"] = ctx.permit_seq
    holding.set()
    let_go.wait(20)
    write(path, article, count, ctx.permit_seq)
    return f"stock of {article} is {amount(path, article)}"


@handlers.task(name="sell", queue="sales", effects="idempotent", permit="stock:{article}", capacity=1)
def sell(ctx: TaskContext, path: str, article: str, left: int) -> str:
    numbers["sale"] = ctx.permit_seq
    write(path, article, left, ctx.permit_seq)
    return f"stock of {article} is {amount(path, article)}"


def main(directory: Path) -> None:
    path = str(directory / "stock.db")
    with TaskWorker(Installation.local(directory / "data"), handlers) as worker:
        tasks = worker.tasks
        importing = tasks.submit(import_stock, path, "lamp", 10)
        holding.wait(20)
        selling = tasks.submit(sell, path, "lamp", 9)
        chair = tasks.wait(tasks.submit(sell, path, "chair", 4), timeout=20)  # behind it in its queue
        print("the import holds the permit; the sale:", tasks.why(selling.task))
        print("another article is not held up:", chair)
        let_go.set()
        print("import:", tasks.wait(importing, timeout=20))
        print("sale:", tasks.wait(selling, timeout=20))
        print("the sale's number is larger:", numbers["sale"] > numbers["import"])

        taken = write(path, "lamp", 10, numbers["import"])
        print("an older write arrives late:", "TAKEN" if taken else "refused, the stock has seen a newer holder")
        print("stock of lamp:", amount(path, "lamp"))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
