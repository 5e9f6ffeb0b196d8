"""Health check: is there a worker that takes a task, runs it and gives the answer back in time?

Shows
    A probe is a task like any other: it goes through submission, claim, handler and result, so its answer says that all of them work.
    Without an answer, ``why`` says what is missing. ``start_by`` keeps old probes from piling up.

Set-up
    ``pip install millstream``. No broker: everything is in one SQLite file.

Source
    ``probe`` and ``health`` below are what you would copy. On Celery, ``tasks`` is ``millstream.tasks(handlers)`` of your project.

Command
    ``python -m examples.tasks.health_check [--directory DIR]``

Input
    None.

Expected output
    with a worker: healthy, disk writable
    without one: NOT healthy: no live worker serves queue 'default'
    the old probe: EXPIRED (start_by)
    with a worker again: healthy, disk writable

Failure path
    The second line: the worker has stopped, nobody answers within a second, and the check says why. The probe that was not answered
    expires; it is not run late.

Clean-up
    A temporary directory removes itself; ``rm -r DIR`` otherwise.
"""

from __future__ import annotations

from pathlib import Path

from millstream import Handlers, Installation, TaskFailed, Tasks, TaskWorker

from .workplace import workplace

handlers = Handlers()


@handlers.task(name="probe", effects="idempotent", attempts=1)
def probe(directory: str) -> str:
    """What the work of this installation needs, tried out."""
    trial = Path(directory) / "probe"
    trial.write_text("probe")
    trial.unlink()
    return "disk writable"


def health(tasks: Tasks, directory: Path, within: float) -> str:
    """One line for a monitoring system."""
    receipt = tasks.submit(probe, str(directory), start_by=within)
    try:
        return f"healthy, {tasks.wait(receipt, timeout=within)}"
    except TaskFailed as failure:
        return f"NOT healthy: {failure.reason}"
    except TimeoutError:
        return f"NOT healthy: {tasks.why(receipt.task)}"


def main(directory: Path) -> None:
    installation = Installation.local(directory)
    with TaskWorker(installation, handlers) as worker:
        print("with a worker:", health(worker.tasks, directory, within=10))

    with Tasks(installation, handlers) as tasks:
        print("without one:", health(tasks, directory, within=1))

    with TaskWorker(installation, handlers) as worker:
        [unanswered] = [row for row in worker.tasks.list(handler="probe") if not row.started_us]
        try:
            worker.tasks.wait(unanswered.id, timeout=10)
        except TaskFailed as failure:
            print(f"the old probe: {failure.state} ({failure.cause})")
        print("with a worker again:", health(worker.tasks, directory, within=10))


if __name__ == "__main__":
    with workplace(__doc__) as directory:
        main(directory)
