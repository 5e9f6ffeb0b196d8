"""Periodic data sync: every second what is new at a source is copied; a source that is away for a while is caught up with.

Shows
    A schedule declared beside its handler: published when a worker starts, one task a fire however many workers there are,
    ``overlap="skip"`` so that no two runs copy at once. The handler goes on behind the last row it has, so the next run makes up for one
    that failed.

Set-up
    ``pip install millstream``. No broker and no beat: everything is in SQLite files.

Source
    ``sync`` and ``handlers.schedule(…)`` below.

Command
    ``python -m examples.tasks.periodic_sync [--directory DIR]``

Input
    A source that the example plays: two rows at first, three more later; it is away when the second run asks.

Expected output
    run 1: copied 2
    run 2: FAILED: ConnectionError: the source is away
    run 3: copied 3
    the copy: [1, 2, 3, 4, 5]
    paused: PAUSED, every fire has a task of its own: True
    triggered twice with one request: FIRED, copied 0, one task: True

Failure path
    The second run: its task has failed (it has one attempt: the next fire is as good as a retry), stays in the history with its reason, and
    nothing is missed or copied twice.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

import datetime as dt
import queue
import sqlite3
from contextlib import closing
from pathlib import Path

from millstream import Handlers, Installation, TaskContext, TaskFailed, Tasks, TaskWorker

from .workplace import workplace

handlers = Handlers()
began: queue.Queue[str] = queue.Queue()  # tasks, as they begin


class Source:
    """Played by the example."""

    def __init__(self) -> None:
        self.asked = 0

    def rows_behind(self, last: int) -> list[int]:
        self.asked += 1
        if self.asked == 2:
            raise ConnectionError("the source is away")
        return [row for row in ([1, 2] if self.asked == 1 else [1, 2, 3, 4, 5]) if row > last]


source = Source()


@handlers.task(name="sync", effects="idempotent", attempts=1)
def sync(ctx: TaskContext, target: str) -> str:
    """Rows have ids that grow, and the target's key refuses a second one of the same id: doing it again changes nothing."""
    began.put(ctx.task_id)
    with closing(sqlite3.connect(target)) as copy, copy:
        copy.execute("CREATE TABLE IF NOT EXISTS copied (id INTEGER PRIMARY KEY)")
        [last] = copy.execute("SELECT coalesce(max(id), 0) FROM copied").fetchone()
        rows = source.rows_behind(last)
        copy.executemany("INSERT OR IGNORE INTO copied VALUES (?)", [(row,) for row in rows])
    return f"copied {len(rows)}"


def end(tasks: Tasks, task: str) -> str:
    try:
        return str(tasks.wait(task, timeout=10))
    except TaskFailed as failure:
        return f"{failure.state}: {failure.reason.partition(' (at ')[0]}"


def main(directory: Path) -> None:
    target = str(directory / "copy.db")
    handlers.schedule("sync", sync, dt.timedelta(seconds=1), args=(target,), overlap="skip")

    with TaskWorker(Installation.local(directory / "data"), handlers) as worker:
        for number in (1, 2, 3):
            print(f"run {number}:", end(worker.tasks, began.get(timeout=10)))
        with closing(sqlite3.connect(target)) as copy:
            print("the copy:", [row for [row] in copy.execute("SELECT id FROM copied ORDER BY id")])

        state = worker.schedules.pause("sync", reason="end of the example").state
        fired = [fire.task for fire in worker.schedules.fires("sync") if fire.task]
        print(f"paused: {state}, every fire has a task of its own: {len(fired) == len(set(fired))}")
        for task in fired:
            end(worker.tasks, task)  # overlap="skip": a fire beside a run that is not over would not run

        first = worker.schedules.trigger("sync", request="by-hand-1")
        again = worker.schedules.trigger("sync", request="by-hand-1")
        print(f"triggered twice with one request: {first.state}, {end(worker.tasks, first.task)}, one task: {first.task == again.task}")


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
