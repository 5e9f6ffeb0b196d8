"""Looking up operations: all tasks of one order, page by page, with their attempts, and why one is not running.

Shows
    ``business_key`` names what a task is about; several tasks may have the same one. ``find`` gives bounded pages and a cursor for the next
    one, which holds for this question alone. ``attempts`` is the history of one task, ``why`` one line on what it waits for.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``pages`` below. On the command line: ``millstream tasks list --business-key order-7``, ``tasks show ID``, ``tasks why ID``.

Command
    ``python -m examples.tasks.operation_lookup [--directory DIR]``

Input
    Five tasks of order 7 and one of order 8.

Expected output
    order-7, page 1: notify SCHEDULED, ship READY
    order-7, page 2: pay SUCCEEDED, reserve SUCCEEDED
    order-7, page 3: check FAILED
    failed: check: 2 attempts, ValueError, ValueError
    why is ship not running: no live worker serves queue 'warehouse'; of other queues 1 live worker serves handler 'ship'
    why is notify not running: it is due
    created in the last hour: 6, in the hour before: 0
    the cursor for another order: TokenRefused
    somebody else's namespace: 0 tasks

Failure path
    The last two lines: a cursor that was made for one question is refused for another one, and so is one that somebody made up. Who works
    in another namespace finds nothing of this one.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

from millstream import Handlers, Installation, TaskFailed, TaskFilter, Tasks, TaskState, TaskWorker, TokenRefused

from .workplace import workplace

handlers = Handlers()
HOUR = dt.timedelta(hours=1)


@handlers.task(name="check", effects="idempotent", attempts=2, delay=0.05)
def check(order: int) -> None:
    raise ValueError(f"order {order} has no address")


@handlers.task(name="reserve", effects="idempotent")
def reserve(order: int) -> str:
    return "reserved"


@handlers.task(name="pay", effects="idempotent")
def pay(order: int) -> str:
    return "paid"


@handlers.task(name="ship", queue="warehouse", effects="idempotent")
def ship(order: int) -> str:
    return "shipped"


@handlers.task(name="notify", effects="idempotent")
def notify(order: int) -> str:
    return "told"


def pages(tasks: Tasks, where: TaskFilter, size: int) -> Iterator[tuple[str, str]]:
    """What each page holds, and the cursor that leads to the next one."""
    cursor = ""
    while True:
        page = tasks.find(where, limit=size, cursor=cursor)
        if page.tasks:
            yield ", ".join(f"{task.handler} {task.state}" for task in page.tasks), page.cursor
        cursor = page.cursor
        if not cursor:
            return


def work(tasks: Tasks) -> None:
    """What is to be looked up."""
    for handler in (check, reserve, pay):
        try:
            tasks.wait(tasks.submit(handler, 7, business_key="order-7"), timeout=20)
        except TaskFailed:
            pass
    tasks.submit(ship, 7, business_key="order-7")
    tasks.submit(notify, 7, business_key="order-7", delay=3600)
    tasks.submit(reserve, 8, business_key="order-8")


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with TaskWorker(installation, handlers, queues=("default",)) as worker:  # nobody serves the queue "warehouse"
        tasks = worker.tasks
        work(tasks)
        order = TaskFilter(business_key="order-7")
        cursor = ""
        for number, (line, following) in enumerate(pages(tasks, order, size=2), start=1):
            print(f"order-7, page {number}:", line)
            cursor = cursor or following

        [failed] = tasks.find(TaskFilter(business_key="order-7", states=(TaskState.FAILED,))).tasks
        attempts = tasks.attempts(failed.id)
        print(f"failed: {failed.handler}: {len(attempts)} attempts, {', '.join(a.detail.partition(':')[0] for a in attempts)}")
        for handler in ("ship", "notify"):
            [waiting] = tasks.list(handler=handler)
            print(f"why is {handler} not running:", tasks.why(waiting.id).partition(" at ")[0])

        now = dt.datetime.now(dt.UTC)
        recent, before = (tasks.find(TaskFilter(created_from=now - h * HOUR, created_until=now - (h - 1) * HOUR)).tasks for h in (1, 2))
        print(f"created in the last hour: {len(recent)}, in the hour before: {len(before)}")

        try:
            tasks.find(TaskFilter(business_key="order-8"), cursor=cursor)
        except TokenRefused as refused:
            print("the cursor for another order:", type(refused).__name__)
    with Tasks(installation, handlers, namespace="somebody-else") as others:
        print(f"somebody else's namespace: {len(others.find(order).tasks)} tasks")


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
