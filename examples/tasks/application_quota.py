"""Quota of an application: what one application may have under way in all its queues, and nobody beside it notices.

Shows
    Applications that share an installation have a namespace each. A quota of a namespace counts what is not over in all its queues
    together; a quota of one queue counts beside it. What running tasks submit is counted and never refused, since it belongs to work that
    was accepted. The other applications' submissions neither count nor wait.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``queues.set_quota(…)`` and ``offered`` below. On the command line: ``millstream queues quota``.

Command
    ``python -m examples.tasks.application_quota [--directory DIR]``

Input
    Six reports of two kinds of one application, two orders of another.

Expected output
    reports: quota of 4 tasks in all queues
    offered 3 daily, 3 yearly: accepted 4, refused 2
    refused: namespace 'reports' has 4 tasks that are not over: that is its quota
    the shop meanwhile: order 1 packed, order 2 packed
    what the reports submit is not refused: 4 sent
    offered again under the same keys: replayed 4, accepted 2
    closed for a while: 6 refused: namespace 'reports' does not accept tasks just now

Failure path
    An application offers more than it may have under way: the rest is refused with a reason that names its own quota and nobody else's,
    nothing of it is stored, and offering all of it again is safe, since what was accepted is known by its key.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import threading
from pathlib import Path

from millstream import Handlers, Installation, Queues, QuotaExceeded, TaskContext, TaskReceipt, Tasks, TaskState, TaskWorker

from .workplace import workplace

handlers = Handlers()
go_on = threading.Event()


@handlers.task(name="send", effects="idempotent")
def send(what: str) -> str:
    return f"{what} sent"


@handlers.task(name="daily", queue="daily", effects="idempotent")
def daily(ctx: TaskContext, number: int) -> None:
    go_on.wait(30)
    ctx.submit(send, f"daily report {number}")


@handlers.task(name="yearly", queue="yearly", effects="idempotent")
def yearly(ctx: TaskContext, number: int) -> None:
    go_on.wait(30)
    ctx.submit(send, f"yearly report {number}")


@handlers.task(name="pack", effects="idempotent")
def pack(order: int) -> str:
    return f"order {order} packed"


def offered(tasks: Tasks, kind: str) -> tuple[list[TaskReceipt], list[str]]:
    """Three reports of each kind: receipts, and why the others were refused."""
    receipts, refused = [], []
    for handler in (daily, yearly):
        for number in (1, 2, 3):
            try:
                receipts.append(tasks.submit(handler, number, key=f"{kind}-{number}"))
            except QuotaExceeded as full:
                refused.append(str(full).partition(";")[0])
    return receipts, refused


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with (
        TaskWorker(installation, handlers, slots=8),
        Tasks(installation, handlers, namespace="reports") as reports,
        Tasks(installation, handlers, namespace="shop") as shop,
        Queues(installation, namespace="reports", actor="ann") as queues,
    ):
        quota = queues.set_quota(backlog=4)
        print(f"reports: quota of {quota.backlog} tasks in all queues")
        receipts, refused = offered(reports, "report")
        print(f"offered 3 daily, 3 yearly: accepted {len(receipts)}, refused {len(refused)}")
        print("refused:", refused[0])
        print("the shop meanwhile:", ", ".join(shop.wait(shop.submit(pack, order), timeout=30) for order in (1, 2)))

        go_on.set()
        for receipt in receipts:
            reports.wait(receipt, timeout=30)
        sent = reports.list(handler="send")
        for task in sent:
            reports.wait(task.id, timeout=30)
        print(f"what the reports submit is not refused: {len(reports.list(handler='send', state=TaskState.SUCCEEDED))} sent")

        with Tasks(installation, handlers, namespace="reports") as again:  # one that is open believes a count for up to two seconds
            receipts, _ = offered(again, "report")
        replayed = sum(receipt.replayed for receipt in receipts)
        print(f"offered again under the same keys: replayed {replayed}, accepted {len(receipts) - replayed}")

        queues.set_quota(accepting=False)
        with Tasks(installation, handlers, namespace="reports") as late:
            _, refused = offered(late, "late")
            print(f"closed for a while: {len(refused)} refused: {refused[0]}")


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
