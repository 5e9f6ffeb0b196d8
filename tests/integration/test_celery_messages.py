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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.celery_project import Project, until

from millstream import TaskConflict, TaskInvalid, TaskState

pytestmark = pytest.mark.processes
PROJECT = """
import os, time
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

@handlers.task(name="lasts", effects="idempotent")
def lasts(seconds: float) -> float:
    time.sleep(seconds)
    return seconds

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


@pytest.fixture(params=CASES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    broker, pool = request.param
    made = Project(tmp_path, request.getfixturevalue(f"{broker}_url"), PROJECT)
    made.start(pool)
    try:
        yield made
    finally:
        made.close(warm=15)


def imported(made: Project, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's module in this process."""
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(made.path))
    sys.modules.pop("project", None)
    return importlib.import_module("project")


@pytest.mark.parametrize("project", [CASES[0], CASES[2]], indirect=True)
def test_who_waits_is_told_of_the_end(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are minutes apart here: without a word from the worker neither wait would end in time."""
    module = imported(project, monkeypatch)
    try:
        assert module.tasks.wait(module.tasks.submit(module.lasts, 0.0).task, 30) == 0.0
        monkeypatch.setattr("millstream.results._QUICKEST_POLL", 300.0)
        monkeypatch.setattr("millstream.results._SLOWEST_POLL", 300.0)
        long, longer = (module.tasks.submit(module.lasts, seconds).task for seconds in (1.0, 1.5))
        with ThreadPoolExecutor(2) as both:
            assert list(both.map(lambda task: module.tasks.wait(task, 100), (long, longer))) == [1.0, 1.5]
    finally:
        module.tasks.close()


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
    made = Project(tmp_path, redis_url, PROJECT)
    made.start()
    module = imported(made, monkeypatch)
    try:
        for n in range(60):
            module.app.send_task("add", args=[n], task_id=f"m{n}")
            if n in (10, 40):
                os.kill(task_process(made, starts=1 + (n > 10)), signal.SIGKILL)
        until(lambda: len({r.key for r in made.rows() if r.state is TaskState.SUCCEEDED}) == 60, "all became tasks\n" + made.text(), 60)
        assert sorted(r.key for r in made.rows()) == sorted(f"m{n}" for n in range(60))
    finally:
        made.close()
        module.tasks.close()
        module.app.close()
