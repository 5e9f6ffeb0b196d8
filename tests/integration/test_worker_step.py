"""How a Celery worker ends the node process it keeps: by SIGTERM, so that the node hands its work back, and by force only when it does not answer."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from millstream.installation import Installation
from millstream.worker import Millstream, NodeKeeper
from millstream_schema.ports import SystemClock
from millstream_schema.states import NodeState
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

pytestmark = pytest.mark.processes
SCRIPT = """
import signal, sys
def note(word):
    with open(sys.argv[1], "a") as file:
        file.write(word + " ")
def handed_back(number, frame):
    note("handed-back")
    if sys.argv[2] == "obeys":
        sys.exit(0)
signal.signal(signal.SIGTERM, handed_back)
note("ready")
while True:
    signal.pause()
"""
"""A node process as its keeper sees it; it never looks at its standard input, as if pool children held the other end open."""
PIPELINES = """
from millstream import Pipelines
pipelines = Pipelines()
"""


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        pause.wait(0.01)


class Played:
    """The command of a played node process, and what it noted."""

    def __init__(self, file: Path, manners: str = "obeys") -> None:
        self.file = file
        self.command = [sys.executable, "-S", "-c", SCRIPT, str(file), manners]

    @property
    def noted(self) -> list[str]:
        return self.file.read_text().split() if self.file.exists() else []

    def ready(self) -> None:
        until(lambda: bool(self.noted), "the process ready")


@pytest.fixture
def kept() -> Iterator[Callable[[list[str]], NodeKeeper]]:
    """Starts a keeper of a command; whatever is left of its process is killed at the end."""
    made: list[NodeKeeper] = []

    def start(command: list[str], environment: dict[str, str] | None = None) -> NodeKeeper:
        keeper = NodeKeeper(command, environment or {})
        made.append(keeper)
        keeper.start()
        return keeper

    yield start
    for keeper in made:
        keeper.stop(0.0)


def test_a_node_process_is_told_to_end_and_waited_for(kept: Any, tmp_path: Path) -> None:
    """It gets SIGTERM, whoever holds its standard input open, and ends by itself; it is not started again, and a second stop is harmless."""
    played = Played(tmp_path / "noted")
    keeper = kept(played.command)
    played.ready()
    keeper.stop()
    assert keeper._process.returncode == 0
    keeper.stop()
    keeper._thread.join(10)
    assert not keeper._thread.is_alive()
    assert played.noted == ["ready", "handed-back"]


def test_a_node_process_that_does_not_end_is_killed(kept: Any, tmp_path: Path) -> None:
    """It had its chance; the worker does not wait for ever, and leaves nobody behind."""
    played = Played(tmp_path / "noted", "stays")
    keeper = kept(played.command)
    played.ready()
    keeper.stop(1.0)
    assert played.noted == ["ready", "handed-back"]
    assert keeper._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("ending", ["stop", "terminate"])
def test_a_warm_and_a_cold_shutdown_of_the_worker_both_end_the_node_by_signal(tmp_path: Path, ending: str) -> None:
    """The worker's step passes either on to its node process, and waits for it."""
    played = Played(tmp_path / "noted")

    class Scripted(Millstream):
        def commands(self, hostname: str, concurrency: int) -> list[list[str]]:
            return [played.command]

    app = Celery("proj", broker="memory://")
    Scripted(app, Installation.local(tmp_path), celery_app="proj:app", pipelines="proj:pipelines")
    (kind,) = [step for step in app.steps["worker"] if getattr(step, "name", "") == "millstream-node"]
    worker = SimpleNamespace(hostname="w1@here", concurrency=1)
    step = kind(worker)
    step.start(worker)
    try:
        played.ready()
        getattr(step, ending)(worker)
        assert step.keepers[0]._process.returncode == 0
        assert played.noted == ["ready", "handed-back"]
    finally:
        step.keepers[0].stop(0.0)


def test_a_node_that_is_ended_has_left_the_registry_at_once(kept: Any, tmp_path: Path) -> None:
    """The product's own node process, its standard input held open: it exits with 0 and its row says GONE, long before its lease is over."""
    (tmp_path / "proj.py").write_text(PIPELINES)
    installation = Installation.local(tmp_path, lease_ms=60_000, renew_ms=1_000)
    database = Database(installation.database, SystemClock(), prefix=installation.table_prefix)
    create_schema(database)

    def states() -> list[str]:
        return [row["state"] for row in database.read(lambda tx: tx.rows(tx.t.node.select()))]

    command = [
        sys.executable,
        "-m",
        "millstream.node_process",
        "--pipelines",
        "proj:pipelines",
        "--name",
        "w1",
        "--slots",
        "1",
        "--spares",
        "0",
    ]
    keeper = kept(command, {**installation.environment(), "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])})
    held = os.dup(keeper._process.stdin.fileno())
    try:
        until(lambda: states() == [NodeState.ACTIVE], "the node registered")
        keeper.stop()
        assert keeper._process.returncode == 0
        assert states() == [NodeState.GONE]
    finally:
        os.close(held)
        database.close()


def test_beat_ticks_only_where_node_processes_take_the_ticks(tmp_path: Path) -> None:
    """Where an application has durable tasks alone nobody reads the coordinator's queue: a broker like Redis would keep every tick for ever."""
    schedules, routes = {}, {}
    for what in ("handlers", "pipelines"):
        with Celery(what, set_as_current=False) as app:
            Millstream(app, Installation.local(tmp_path), celery_app="shop:app", **{what: f"shop:{what}"})  # type: ignore[arg-type]
            schedules[what], routes[what] = dict(app.conf.beat_schedule or {}), dict(app.conf.task_routes or {})
    assert (schedules["handlers"], routes["handlers"]) == ({}, {})
    assert list(schedules["pipelines"]) == ["millstream-tick"] and set(routes["pipelines"]) == {"millstream.tick", "millstream.advance"}
