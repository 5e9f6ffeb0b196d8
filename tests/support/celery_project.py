"""A user's project with Celery workers, each a process as users start it; the test is another process of it.

Called by the tests of Celery's messages and of known complaints about Celery. What must never happen here: a worker left behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from millstream import Installation, Tasks, TaskState
from millstream_schema.durable.records import TaskRow
from millstream_schema.errors import UnknownHandler
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
    """Until it holds. AssertionError after so many seconds."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        pause.wait(0.02)


class Project:
    """``source`` becomes the module ``project``, whose Celery application is ``app``. ``changes``: of the installation, on SQLite below ``path``."""

    def __init__(self, path: Path, broker: str, source: str, **changes: object) -> None:
        (path / "project.py").write_text(source)
        (path / "results").mkdir()
        (path / "data").mkdir()
        self.path = path
        self.notes = path / "notes"
        self.installation = Installation.local(path / "data", **{"prefix": f"c{secrets.token_hex(4)}", **changes})
        database = Database(self.installation.database, SystemClock(), prefix=self.installation.table_prefix)
        create_schema(database)
        database.close()
        self.environment = {
            **os.environ, **self.installation.environment(), "BROKER": broker, "RESULTS": str(path / "results"), "NOTES": str(self.notes),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        self.celery = [sys.executable, "-m", "celery", "-A", "project:app"]
        self.tasks = Tasks(self.installation)
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self, pool: str = "prefork", *, name: str = "worker", concurrency: int = 1) -> subprocess.Popen[bytes]:
        """One more ``celery worker``."""
        options = ["-P", pool, "-c", str(concurrency), "-n", f"{name}@{self.installation.prefix}", "-l", "INFO"]
        with (self.path / f"{name}.log").open("ab") as log:
            worker = subprocess.Popen(
                [*self.celery, "worker", *options, "--without-gossip", "--without-mingle"], env=self.environment, cwd=self.path, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.workers.append(worker)
        return worker

    def close(self, warm: float = 0.0) -> None:
        """End the workers, those that are given the time by a warm shutdown, and all their processes."""
        trees = []
        for worker in self.workers:
            if worker.poll() is None:
                trees += [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
                if warm:
                    worker.terminate()
        for worker in self.workers:
            if warm:
                try:
                    worker.wait(warm)
                except subprocess.TimeoutExpired:
                    pass
        for process in trees:
            if process.is_running():
                process.kill()
        for worker in self.workers:
            worker.wait(10)
        self.tasks.close()

    def rows(self) -> list[TaskRow]:
        return self.tasks.list(limit=1000)

    def of_key(self, key: str) -> TaskRow | None:
        return next((r for r in self.rows() if r.key == key), None)

    def succeeded(self, key: str) -> bool:
        row = self.of_key(key)
        return row is not None and row.state is TaskState.SUCCEEDED

    def noted(self, word: str) -> int:
        """How often tasks have written this line into ``NOTES``."""
        return self.notes.read_text().splitlines().count(word) if self.notes.exists() else 0

    def text(self, name: str = "worker") -> str:
        """What a worker has said."""
        log = self.path / f"{name}.log"
        return log.read_text(errors="replace") if log.exists() else ""


def submitted(made: Project, handler: str, *args: object, **options: Any) -> str:
    """By name, once a worker has told what it serves."""
    found: list[str] = []

    def submit() -> bool:
        with contextlib.suppress(UnknownHandler):
            found.append(made.tasks.submit(handler, *args, **options).task)
        return bool(found)

    until(submit, f"a worker serves {handler}\n" + made.text())
    return found[0]


BLOCKING = """
import os, time
from pathlib import Path
from celery import Celery
from millstream import Handlers, Installation, Millstream, Retry

app = Celery("project", broker=os.environ["BROKER"])
app.conf.update(
    task_default_queue=os.environ["MILLSTREAM_PREFIX"] + ".plain", broker_connection_retry_on_startup=True, task_acks_late=True,
    worker_prefetch_multiplier=10, worker_cancel_long_running_tasks_on_connection_loss=True, worker_enable_prefetch_count_reduction=False,
)
handlers = Handlers()
millstream = Millstream(app, Installation.from_environment(os.environ), celery_app="project:app", handlers="project:handlers", tick=60.0)
NOTES = Path(os.environ["NOTES"])

def note(word):
    with NOTES.open("a") as file:
        file.write(word + "\\n")

def told_to_go_on():
    return NOTES.with_name("go").exists()

@handlers.task(name="blocks", effects="idempotent")
def blocks(ctx, word: str) -> str:
    note("began " + word)
    while not (told_to_go_on() or ctx.cancelled):
        time.sleep(0.02)
    ctx.cancelled and note("cancelled " + word)
    return word

@handlers.task(name="quick", effects="idempotent")
def quick(word: str) -> str:
    note("did " + word)
    return word

@handlers.task(name="retries", effects="idempotent", delay=0.2)
def retries(ctx) -> int:
    if ctx.attempt < 3:
        raise Retry()
    return ctx.attempt

@app.task(name="plain_blocks", shared=False)
def plain_blocks(word):
    note("began " + word)
    while not told_to_go_on():
        time.sleep(0.02)
    note("ended " + word)

@app.task(name="plain_quick", shared=False)
def plain_quick(word):
    note("did " + word)
"""
"""A project whose tasks run until they are told to go on, those of Celery's own beside durable ones."""
