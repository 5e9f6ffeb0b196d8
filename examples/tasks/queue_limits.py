"""Rate limit and backpressure of a queue: a mail provider that takes four mails a second, and a queue that refuses more than it can hold.

Shows
    A rate holds for all workers together, since its tokens are a row. A quota refuses submissions from outside with the number of seconds
    after which to try again: the caller slows down, instead of a backlog that grows. A pause has a reason, and whoever asks why nothing
    runs is told it. All three are set while workers run.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    The calls of ``queues``, and ``patiently``. On the command line: ``millstream queues rate|quota|pause|resume``.

Command
    ``python -m examples.tasks.queue_limits [--directory DIR]``

Input
    Four mails and a batch of two.

Expected output
    accepted: 3
    the fourth: QuotaExceeded, try again in 5 s
    one of the three again: replayed
    a batch of two: Refusal, Refusal
    why is nothing sent: paused by ann: the provider is away
    resumed: mail 1 sent, mail 2 sent, mail 3 sent
    at most 4 a second: True
    the fourth now: mail 4 sent

Failure path
    The provider is away, so nothing leaves the queue, and its callers are told at the door: the fourth mail and the batch are refused and
    nothing of them is stored. What was accepted before is known and gives its first receipt. When the queue has room the fourth comes in
    under the same key.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

from millstream import Handlers, Installation, Item, Queues, QuotaExceeded, TaskReceipt, Tasks, TaskWorker

from .workplace import workplace

handlers = Handlers()


@handlers.task(name="send_mail", queue="mail", effects="idempotent")
def send_mail(number: int) -> str:
    return f"mail {number} sent"


def patiently(tasks: Tasks, number: int) -> TaskReceipt:
    """What a caller does that is told to slow down: it waits as it is told, here no longer than suits an example, and asks under the same key."""
    while True:
        try:
            return tasks.submit(send_mail, number, key=f"mail-{number}")
        except QuotaExceeded as full:
            threading.Event().wait(min(full.retry_after, 0.2))


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with TaskWorker(installation, handlers) as worker, Queues(installation, actor="ann") as queues:
        tasks = worker.tasks
        queues.set_quota("mail", backlog=3)
        queues.set_rate("mail", rate="4/s", burst=1)
        queues.pause("mail", reason="the provider is away")

        mails = [tasks.submit(send_mail, number, key=f"mail-{number}") for number in (1, 2, 3)]
        print("accepted:", len(mails))
        try:
            tasks.submit(send_mail, 4, key="mail-4")
        except QuotaExceeded as full:
            print(f"the fourth: {type(full).__name__}, try again in {full.retry_after:.0f} s")
        print("one of the three again:", "replayed" if tasks.submit(send_mail, 1, key="mail-1").replayed else "new")
        answers = tasks.submit_many(send_mail, [Item(args=(number,), key=f"mail-{number}") for number in (5, 6)])
        print("a batch of two:", ", ".join(type(answer).__name__ for answer in answers))
        who, _, reason = tasks.why(mails[0].task).removeprefix("queue 'mail' is ").partition(" since ")
        print(f"why is nothing sent: {who}: {reason.rpartition(': ')[2]}")

        queues.resume("mail")
        print("resumed:", ", ".join(tasks.wait(mail, timeout=20) for mail in mails))
        started = sorted(tasks.get(mail.task).started_us for mail in mails)
        print("at most 4 a second:", all(after - before > 200_000 for before, after in pairwise(started)))
        print("the fourth now:", tasks.wait(patiently(tasks, 4), timeout=20))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
