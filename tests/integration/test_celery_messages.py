"""Celery's own ways to a durable task, with real workers: ``send_task``, ``celery call``, ``delay``, a chain; and what cannot be honoured.

Each message becomes a submission under its id and is acknowledged after the commit, with every pool. SQLite; Redis and RabbitMQ.
"""

from __future__ import annotations

import datetime as dt
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millstream import Installation, TaskConflict, TaskInvalid, Tasks, TaskState
from millstream_schema.durable.records import TaskRow
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

pytestmark = pytest.mark.processes
PROJECT = """
import os
from celery import Celery
from millstream import Handlers, Installation, Millstream

app = Celery("project", broker=os.environ["BROKER"], backend="file://" + os.environ["RESULTS"])
app.conf.update(task_default_queue=os.environ["MILLSTREAM_PREFIX"] + ".plain", broker_connection_retry_on_startup=True)
handlers = Handlers()
millstream = Millstream(app, Installation.from_environment(os.environ), celery_app="project:app", handlers="project:handlers", tick=60.0)
tasks = millstream.tasks(handlers)

@handlers.task(name="add", effects="idempotent")
def add(a: int, b: int = 0) -> int:
    return a + b

@app.task(name="plain", shared=False)
def plain(a, b):
    return a + b
"""
CASES = [
    pytest.param(("redis", "prefork"), id="redis-prefork", marks=pytest.mark.redis),
    pytest.param(("redis", "threads"), id="redis-threads", marks=pytest.mark.redis),
    pytest.param(("rabbitmq", "prefork"), id="rabbitmq-prefork", marks=pytest.mark.rabbitmq),
    pytest.param(("rabbitmq", "solo"), id="rabbitmq-solo", marks=pytest.mark.rabbitmq),
]


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        pause.wait(0.02)


class Project:
    """A user's project with one Celery worker; the test is another process of it."""

    def __init__(self, path: Path, broker: str, pool: str) -> None:
        (path / "project.py").write_text(PROJECT)
        (path / "results").mkdir()
        self.path = path
        self.installation = Installation.local(path / "data", prefix=f"c{os.getpid()}t{time.monotonic_ns() % 10**6}")
        (path / "data").mkdir()
        database = Database(self.installation.database, SystemClock(), prefix=self.installation.table_prefix)
        create_schema(database)
        database.close()
        self.environment = {
            **os.environ, **self.installation.environment(), "BROKER": broker, "RESULTS": str(path / "results"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        self.celery = [sys.executable, "-m", "celery", "-A", "project:app"]
        self.log = path / "worker.log"
        self.pool = pool
        self.tasks = Tasks(self.installation)

    def start(self) -> subprocess.Popen[bytes]:
        command = [*self.celery, "worker", "-P", self.pool, "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle"]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=self.environment, cwd=self.path, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def rows(self) -> list[TaskRow]:
        return self.tasks.list(limit=1000)

    def of_key(self, key: str) -> TaskRow | None:
        return next((r for r in self.rows() if r.key == key), None)

    def succeeded(self, key: str) -> bool:
        row = self.of_key(key)
        return row is not None and row.state is TaskState.SUCCEEDED

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture(params=CASES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    broker, pool = request.param
    made = Project(tmp_path, request.getfixturevalue(f"{broker}_url"), pool)
    worker = made.start()
    try:
        yield made
    finally:
        tree = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)] if worker.poll() is None else []
        worker.terminate()
        try:
            worker.wait(15)
        except subprocess.TimeoutExpired:
            pass
        for process in tree:
            if process.is_running():
                process.kill()
        worker.wait(5)
        made.tasks.close()


def imported(made: Project, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's module in this process."""
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(made.path))
    sys.modules.pop("project", None)
    return importlib.import_module("project")


def test_every_way_of_celery_reaches_a_durable_task(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """send_task, the command line, delay, apply_async, a chain; a repeat of an id is one task; what cannot be honoured is refused by name, and its sender is told."""
    module = imported(project, monkeypatch)
    app = module.app
    try:
        app.send_task("add", args=[1], kwargs={"b": 2}, task_id="sent")
        app.send_task("add", args=[1], kwargs={"b": 2}, task_id="sent")
        later = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
        app.send_task("add", args=[3], task_id="later", eta=later, expires=later + dt.timedelta(hours=1))
        app.send_task("add", args=["no number"], task_id="unfit")
        app.send_task("add", args=[1], task_id="linked", link=app.signature("plain", (1,)))
        called = subprocess.run(
            [*project.celery, "call", "add", "--args=[20, 1]"], env=project.environment, cwd=project.path, capture_output=True, text=True, timeout=60
        )  # fmt: skip
        (app.signature("plain", (1, 2)) | app.tasks["add"].s(4)).apply_async(task_id="in-chain")
        direct = module.add.delay(7, b=1)
        optioned = module.add.apply_async((8,), {"b": 2}, countdown=0.01, task_id="optioned", expires=60, priority=3, retry=True)
        until(lambda: project.succeeded("sent"), "the sent task succeeded\n" + project.text())
        until(lambda: project.succeeded(called.stdout.strip().splitlines()[-1]), f"the called task succeeded: {called}")
        assert direct.get(timeout=30) == 8
        assert optioned.get(timeout=30) == 10
        assert not optioned.receipt.replayed
        until(
            lambda: any(r.state is TaskState.SUCCEEDED and r.result and module.tasks.wait(r.id, 1) == 7 for r in project.rows()),
            "the chain's end",
        )
        until(lambda: app.AsyncResult("unfit").failed() and app.AsyncResult("linked").failed(), "the senders are told")
        assert "a: " in str(app.AsyncResult("unfit").result)
        assert "ctx.submit" in str(app.AsyncResult("linked").result)
        row = project.of_key("later")
        assert row is not None
        assert (row.state, row.due_us, row.start_by_us - row.due_us) == (
            TaskState.SCHEDULED,
            int(later.timestamp() * 1e6 + 0.5),
            3_600_000_000,
        )
        assert len([r for r in project.rows() if r.key == "sent"]) == 1
        assert {r.origin for r in project.rows() if r.key in ("sent", "later")} == {"celery"}
        assert project.of_key("unfit") is None and project.of_key("linked") is None
        with pytest.raises(TaskInvalid, match=r"link: .*ctx\.submit"):
            module.add.apply_async((1,), link=app.signature("plain", (1,)))
        with pytest.raises(TaskInvalid, match="routing_key"):
            module.add.apply_async((1,), routing_key="r", chord={"task": "plain"})
        with pytest.raises(TaskConflict, match="digest"):
            module.add.apply_async((9,), task_id="optioned")
    finally:
        module.tasks.close()
        app.close()


def task_process(made: Project, starts: int) -> int:
    """The pid of the worker's task process after it was started so often."""
    until(lambda: made.text().count("task process started") == starts, "the task process started")
    return int(made.text().rpartition("task process started")[2].partition("pid=")[2].split()[0])


@pytest.mark.redis
def test_messages_wait_for_their_submission_and_outlive_the_task_process(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task process is killed while messages come: each becomes exactly one task; nothing is acknowledged before."""
    made = Project(tmp_path, redis_url, "prefork")
    worker = made.start()
    module = imported(made, monkeypatch)
    try:
        for n in range(60):
            module.app.send_task("add", args=[n], task_id=f"m{n}")
            if n in (10, 40):
                os.kill(task_process(made, starts=1 + (n > 10)), signal.SIGKILL)
        until(lambda: len({r.key for r in made.rows() if r.state is TaskState.SUCCEEDED}) == 60, "all became tasks\n" + made.text(), 60)
        assert sorted(r.key for r in made.rows()) == sorted(f"m{n}" for n in range(60))
    finally:
        for process in [*psutil.Process(worker.pid).children(recursive=True), psutil.Process(worker.pid)]:
            process.kill()
        worker.wait(10)
        module.tasks.close()
        module.app.close()
        made.tasks.close()
