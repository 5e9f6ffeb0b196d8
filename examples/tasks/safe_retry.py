"""Safe retry with a limit: a service that is away for a moment, one that stays away, and a request that is wrong.

Shows
    The policy belongs to the handler: at most four attempts, pauses that double, and exceptions that are not worth another attempt;
    ``Retry(after=…)`` when the service says when. Attempts and pauses are rows: they go on counting when every process was stopped in
    between. Only effects that may be repeated are retried: a handler that declares none gets one attempt.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``fetch`` and its decorator below.

Command
    ``python -m examples.tasks.safe_retry [--directory DIR]``

Input
    A service that the example plays: ``/flaky`` fails twice, ``/busy`` always and says when to come again, ``/typo`` does not exist.

Expected output
    /flaky: ok at attempt 3
      attempt 1: ConnectionError: reset
      attempt 2: ConnectionError: reset
    /typo: FAILED (error) after 1 attempt: LookupError: no such page
    /busy: RETRY_WAIT after 1 attempt; every process stops
    /busy: FAILED (attempts) after 4 attempts: come again later

Failure path
    The last three lines: an error that another attempt cannot cure ends the task at once; one that may be cured ends it when the limit is
    reached, not before and not later, though the worker was stopped in between and another one went on.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

from millstream import Handlers, Installation, Retry, TaskContext, TaskFailed, Tasks, TaskWorker

from .workplace import workplace

handlers = Handlers()
calls: Counter[str] = Counter()  # what the service saw
busy = threading.Event()  # it has turned somebody away


@handlers.task(name="fetch", effects="idempotent", attempts=4, delay=0.2, max_delay=1, no_retry_on=LookupError)
def fetch(ctx: TaskContext, page: str) -> str:
    wait = service(page)
    if wait:
        raise Retry("come again later", after=wait)
    return f"ok at attempt {ctx.attempt}"


def service(page: str) -> float:
    """Seconds after which to come again; 0: here it is."""
    calls[page] += 1
    if page == "/busy":
        busy.set()
        return 1.5 if calls[page] == 1 else 0.1
    if page == "/flaky" and calls[page] <= 2:
        raise ConnectionError("reset")
    if page == "/typo":
        raise LookupError("no such page")
    return 0


def end(tasks: Tasks, task: str, page: str) -> str:
    try:
        return f"{page}: {tasks.wait(task, timeout=20)}"
    except TaskFailed as failure:
        starts = tasks.get(task).starts
        return (
            f"{page}: {failure.state} ({failure.cause}) after {starts} attempt{'s' if starts > 1 else ''}: {without_place(failure.reason)}"
        )


def without_place(reason: str) -> str:
    """Reasons say where it was raised, too: "(at service, tasks/safe_retry.py line 66)"."""
    return reason.partition(" (at ")[0]


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with TaskWorker(installation, handlers) as worker:
        flaky = worker.tasks.submit(fetch, "/flaky").task
        print(end(worker.tasks, flaky, "/flaky"))
        for attempt in worker.tasks.attempts(flaky):
            print(f"  attempt {attempt.fence}: {without_place(attempt.detail)}")
        print(end(worker.tasks, worker.tasks.submit(fetch, "/typo").task, "/typo"))
        waiting = worker.tasks.submit(fetch, "/busy").task
        busy.wait(10)

    with Tasks(installation) as tasks:
        row = tasks.get(waiting)
        print(f"/busy: {row.state} after {row.starts} attempt; every process stops")

    with TaskWorker(installation, handlers) as worker:
        print(end(worker.tasks, waiting, "/busy"))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
