"""Priority and isolation: what is urgent goes first, and an application that submits two hundred reports at once does not hold up another one's orders.

Shows
    Each application works in a namespace of its own. A worker takes from the application that has the least running, so the backlog of one
    does not stand before the work of another. Within one, ``priority`` moves a task ahead by as many seconds of waiting: what is less
    urgent comes later and never starves.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    The two clients with ``namespace=``, and ``priority=``.

Command
    ``python -m examples.tasks.priority_isolation [--directory DIR]``

Input
    200 reports, then three orders, the last of which is urgent; one worker with one slot.

Expected output
    two applications: orders 3, 1, 2; all done before the reports were half through: True
    one application: orders 3, 1, 2; all done before the reports were half through: False
    nothing starved: 200 reports, 200 reports

Failure path
    The second line: orders and reports in one application. The urgent order passes the reports, since its priority is worth ten minutes of
    waiting; the ordinary ones stand in line behind all 200.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import threading
from pathlib import Path

from millstream import Handlers, Installation, Tasks, TaskWorker

from .workplace import workplace

handlers = Handlers()
begun, go_on = threading.Event(), threading.Event()
done: list[str] = []  # in the order in which it was done


@handlers.task(name="block", effects="idempotent")
def block() -> None:
    """Keeps the only slot until all is submitted."""
    begun.set()
    go_on.wait(30)


@handlers.task(name="report", effects="idempotent")
def report(number: int) -> None:
    done.append("report")
    threading.Event().wait(0.01)  # the time a report takes


@handlers.task(name="order", effects="idempotent")
def order(number: int) -> None:
    done.append(f"order {number}")


def flood(reports: Tasks, shop: Tasks) -> str:
    """Submit all, let it run; how the orders fared."""
    done.clear()
    begun.clear()
    go_on.clear()
    reports.submit(block)
    begun.wait(30)
    submitted = [reports.submit(report, number) for number in range(200)]
    ordered = [shop.submit(order, 1), shop.submit(order, 2), shop.submit(order, 3, priority=600)]
    go_on.set()
    for receipt in ordered:
        shop.wait(receipt, timeout=60)
    for receipt in submitted:
        reports.wait(receipt, timeout=60)
    orders = [what.split()[1] for what in done if what.startswith("order")]
    last = max(at for at, what in enumerate(done) if what.startswith("order"))
    return f"orders {', '.join(orders)}; all done before the reports were half through: {done[:last].count('report') < 100}"


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with (
        TaskWorker(installation, handlers, slots=1) as worker,
        Tasks(installation, handlers, namespace="reports") as reports,
        Tasks(installation, handlers, namespace="shop") as shop,
    ):
        print("two applications:", flood(reports, shop))
        first = done.count("report")
        print("one application:", flood(worker.tasks, worker.tasks))
        print(f"nothing starved: {first} reports, {done.count('report')} reports")


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
