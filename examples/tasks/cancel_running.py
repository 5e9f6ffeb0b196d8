"""Cancel while running: the wish is stored, the handler is told, and its own end decides.

Shows
    ``tasks.cancel`` is durable when it returns: no worker has to be there to hear it. What does not run yet ends at once. A handler that
    runs sees ``ctx.cancelled``, puts its things in order and raises ``Cancel``. The first end wins: one that is done already, or finishes
    all the same, has succeeded.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``export`` below: it looks between two parts, when it can stop without leaving a mess.

Command
    ``python -m examples.tasks.cancel_running [--directory DIR]``

Input
    An export without an end, and short ones.

Expected output
    running: RUNNING, its end is asked for
    the handler: stopped between two parts, its file is removed
    the task: CANCELLED: stopped by request
    not yet due: CANCELLED at once
    already over: SUCCEEDED, the cancel came too late
    finished all the same: SUCCEEDED: 3 parts

Failure path
    The last two lines: a cancel that comes too late. The caller is told the state that stands; work that is done is not called cancelled.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import threading
from pathlib import Path

from millstream import Cancel, Handlers, Installation, TaskContext, TaskFailed, TaskWorker

from .workplace import workplace

handlers = Handlers()
begun = threading.Event()
go_on = threading.Event()


@handlers.task(name="export", effects="idempotent")
def export(ctx: TaskContext, target: str) -> None:
    """Writes part after part until it is asked to stop."""
    with Path(target).open("w") as file:
        while not ctx.cancelled:
            file.write("part\n")
            begun.set()
            go_on.wait(0.01)  # the time a part takes
    Path(target).unlink()
    raise Cancel("stopped by request")


@handlers.task(name="short_export", effects="idempotent")
def short_export(parts: int) -> str:
    """Too short to look whether somebody asks."""
    begun.set()
    go_on.wait(20)
    return f"{parts} parts"


def main(directory: Path) -> None:
    installation = Installation.local(directory / "data", lease_ms=2_000)  # a handler is told within a quarter of the lease
    target = directory / "export.txt"
    with TaskWorker(installation, handlers) as worker:
        tasks = worker.tasks
        endless = tasks.submit(export, str(target))
        begun.wait(20)
        print(f"running: {tasks.cancel(endless.task)}, its end is asked for")
        try:
            tasks.wait(endless, timeout=20)
        except TaskFailed as failure:
            print("the handler: stopped between two parts,", "its file is left" if target.exists() else "its file is removed")
            print(f"the task: {failure.state}: {failure.reason}")

        later = tasks.submit(short_export, 1, delay=3600)
        print(f"not yet due: {tasks.cancel(later.task)} at once")

        begun.clear()
        finishing = tasks.submit(short_export, 3)
        begun.wait(20)
        tasks.cancel(finishing.task)
        go_on.set()
        answer = tasks.wait(finishing, timeout=20)
        print(f"already over: {tasks.cancel(finishing.task)}, the cancel came too late")
        print(f"finished all the same: {tasks.get(finishing.task).state}: {answer}")


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
