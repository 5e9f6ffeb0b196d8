"""A file of requests accepted in one batch: every row has an identity and an answer of its own, and results come in part by part.

Shows
    ``submit_many`` takes hundreds of requests in one transaction and answers for each, in their order: accepted, replayed, or refused with
    the reason. What is refused holds up no other row. Keys come from the file, so that sending it again, or a corrected one, makes only
    what is new. ``business_key`` finds what belongs to the file.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``accept`` and ``report`` below.

Command
    ``python -m examples.tasks.batch_accept [--directory DIR]``

Input
    ``payments.csv`` with four rows, two of them wrong: one has no number as its amount, one an account that is closed. The example writes
    it, and a corrected one.

Expected output
    payments.csv: 3 accepted, 0 replayed, 1 refused
      row 3 refused: handler 'pay': amount: Input should be a valid integer, unable to parse string as an integer
    results: row 1 paid 10, row 2 paid 20, row 4 FAILED: account C is closed
    sent again: 0 accepted, 3 replayed, 1 refused
    corrected: 1 accepted, 2 replayed, 1 refused
      row 4 refused: key 'payments/4' of handler 'pay' is known with other content
    results: row 1 paid 10, row 2 paid 20, row 3 paid 30, row 4 FAILED: account C is closed

Failure path
    Three kinds of wrong rows: one that cannot be accepted is refused alone; one that is accepted and fails says so beside its neighbours'
    results; one that comes again under its name with another content is refused, because its name is taken.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

from millstream import Fail, Handlers, Installation, Item, Options, Refusal, TaskFailed, Tasks, TaskWorker

from .workplace import workplace

handlers = Handlers()


@handlers.task(name="pay", effects="idempotent")
def pay(account: str, amount: int) -> str:
    if account == "C":
        raise Fail(f"account {account} is closed")
    return f"paid {amount}"


def accept(tasks: Tasks, file: Path) -> str:
    """Submit every row; what became of each."""
    with file.open(newline="") as text:
        rows = list(csv.DictReader(text))
    items = [
        Item(
            args=(row["account"], int(row["amount"]) if row["amount"].isdecimal() else row["amount"]),
            key=f"{file.stem}/{row['row']}",
            options=Options(business_key=file.stem),
        )
        for row in rows
    ]
    answers = tasks.submit_many(pay, items)
    counts = Counter("refused" if isinstance(a, Refusal) else "replayed" if a.replayed else "accepted" for a in answers)
    lines = [", ".join(f"{counts[kind]} {kind}" for kind in ("accepted", "replayed", "refused"))]
    lines += [
        f"  row {row['row']} refused: {a.reason.partition(': task ')[0]}"
        for row, a in zip(rows, answers, strict=True)
        if isinstance(a, Refusal)
    ]
    return "\n".join(lines)


def report(tasks: Tasks, file: Path) -> str:
    """What there is so far of each row that was accepted."""
    lines = []
    for row in sorted(tasks.list(business_key=file.stem), key=lambda task: task.key):
        number = row.key.rpartition("/")[2]
        try:
            lines.append(f"row {number} {tasks.wait(row.id, timeout=20)}")
        except TaskFailed as failure:
            lines.append(f"row {number} {failure.state}: {failure.reason}")
    return ", ".join(lines)


def main(directory: Path) -> None:
    file = directory / "payments.csv"
    with TaskWorker(Installation.local(directory / "data"), handlers) as worker:
        tasks = worker.tasks
        file.write_text("row,account,amount\n1,A,10\n2,B,20\n3,A,ten\n4,C,40\n")
        print("payments.csv:", accept(tasks, file))
        print("results:", report(tasks, file))
        print("sent again:", accept(tasks, file).partition("\n")[0])
        file.write_text("row,account,amount\n1,A,10\n2,B,20\n3,A,30\n4,D,40\n")
        print("corrected:", accept(tasks, file))
        print("results:", report(tasks, file))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
