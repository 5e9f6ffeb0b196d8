"""A user's project with Celery workers, each a process as users start it; the test is another process of it.

Called by the tests of Celery's messages and of known complaints about Celery. What must never happen here: a worker left behind.
"""

from __future__ import annotations

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
