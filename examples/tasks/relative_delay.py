"""Relative delay: a reminder that runs some seconds after it was accepted, by the database's clock.

Shows
    ``delay`` counts from acceptance. Submitting the same request again neither restarts the clock nor makes a second task: it gives the
    first receipt. Meanwhile nothing is held in a worker's memory or in a broker: any worker that is there when the task is due takes it.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``remind`` and the three calls of ``submit`` below. With Celery's words: ``remind.apply_async((7,), countdown=1)``.

Command
    ``python -m examples.tasks.relative_delay [--directory DIR]``

Input
    None.

Expected output
    accepted: SCHEDULED
    the same again: replayed, due at the same instant
    another delay under the same key: TaskConflict
    not before its time: reminder of order 7
    started within a second of being due: True
    the worker was stopped meanwhile: reminder of order 8

Failure path
    The third line: the same key with another delay is another request under a name that is taken. It is refused, and the first one stays as
    it is. And the last line: a worker that stops while a task waits loses nothing; the next one runs it when it is due.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

from pathlib import Path

from millstream import Handlers, Installation, TaskConflict, TaskWorker

from .workplace import workplace

handlers = Handlers()
SECOND = 1_000_000  # rows hold microseconds


@handlers.task(name="remind", effects="idempotent")
def remind(order: int) -> str:
    return f"reminder of order {order}"


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with TaskWorker(installation, handlers) as worker:
        tasks = worker.tasks
        receipt = tasks.submit(remind, 7, key="remind-7", delay=1)
        due = tasks.get(receipt.task).due_us
        print("accepted:", receipt.state)

        again = tasks.submit(remind, 7, key="remind-7", delay=1)
        print(
            "the same again:",
            "replayed," if again.replayed else "new,",
            "due at the same instant" if tasks.get(again.task).due_us == due else "moved",
        )
        try:
            tasks.submit(remind, 7, key="remind-7", delay=60)
        except TaskConflict as conflict:
            print("another delay under the same key:", type(conflict).__name__)

        answer = tasks.wait(receipt, timeout=10)
        row = tasks.get(receipt.task)
        print("not before its time:" if row.started_us >= row.created_us + SECOND else "TOO EARLY:", answer)
        print("started within a second of being due:", row.started_us - due < SECOND)
        later = tasks.submit(remind, 8, key="remind-8", delay=1)

    with TaskWorker(installation, handlers) as worker:
        print("the worker was stopped meanwhile:", worker.tasks.wait(later, timeout=10))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
