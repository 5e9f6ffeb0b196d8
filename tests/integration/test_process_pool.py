"""The pool of handler processes by itself: what was handed over and has not begun comes back, at once and in order, whatever its process does."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.durable.rows import task_row

from millstream_schema.durable.outcomes import Crashed, Reported, Succeeded, Unstarted
from millstream_schema.durable.records import NewTask
from millstream_schema.durable.requests import encode_arguments
from millstream_schema.ports import SystemClock
from millstream_tasks.durable.child import Child
from millstream_tasks.durable.frames import TaskBoot
from millstream_tasks.durable.processes import ProcessPool

pytestmark = pytest.mark.processes
HANDLERS = """
import os, signal, time
from millstream import Handlers
handlers = Handlers()

@handlers.task(name="work", effects="idempotent")
def work(seconds: float, end: str = "") -> str:
    time.sleep(seconds)
    if end:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"
"""


class Rig:
    """One process, and what the pool says of attempts."""

    def __init__(self) -> None:
        boot = TaskBoot("pool_tasks:handlers", "", 100, "sqlite://", "millstream_", 3000)
        self.said: list[tuple[str, Any]] = []
        self.back: list[str] = []
        self.pool = ProcessPool(
            boot, SystemClock(), 1, self._report, lambda task, fence: self.back.append(task), lambda *_: None, lambda *_: None
        )
        self.until(lambda: self.pool.free() == 1)

    def _report(self, task: str, fence: int, outcome: Reported, submits: tuple[NewTask, ...], seconds: float) -> None:
        self.said.append((task, type(outcome)))

    @property
    def child(self) -> Child:
        (child,) = self.pool._children
        return child

    def start(self, task: str, *args: Any) -> None:
        self.pool.start(task_row(id=task, handler="work", args=encode_arguments(args, {}), fence=1))

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it does not come about"
            self.pool.wait(min(self.pool.tick(), 0.2))

    def began(self) -> None:
        self.until(lambda: bool(self.child.line) and self.child.line[0].began > 0)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    (tmp_path / "pool_tasks.py").write_text(HANDLERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "pool_tasks", raising=False)
    made = Rig()
    yield made
    made.pool.close()


def test_what_waits_behind_one_that_lasts_comes_back_in_its_order(rig: Rig) -> None:
    """As soon as it has lasted: each is put in front of what the host has. Handed over again it runs."""
    for task, seconds in (("long", 0.6), ("b", 0.0), ("c", 0.0), ("d", 0.0)):
        rig.start(task, seconds)
    assert (rig.pool.free(), rig.pool.waiting()) == (0, 3) and rig.pool.ahead() > 0
    rig.until(lambda: len(rig.back) == 3)
    assert rig.back == ["d", "c", "b"]
    assert rig.said == [] and (rig.pool.waiting(), rig.pool.ahead()) == (0, 0)
    rig.until(lambda: bool(rig.said))
    assert rig.said == [("long", Succeeded)] and rig.pool.free() == 1
    rig.start("b", 0.0)
    rig.until(lambda: len(rig.said) == 2)
    assert rig.said[1] == ("b", Succeeded)


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_one_that_has_not_begun_is_ended_without_its_neighbours(rig: Rig, how: str) -> None:
    """Cancelled: it never began. Killed: nobody wants to hear of it."""
    rig.start("runs", 0.3)
    rig.began()
    rig.start("b", 0.0)
    rig.start("c", 0.0)
    getattr(rig.pool, how)("b", 1)
    assert rig.said == ([("b", Unstarted)] if how == "cancel" else []) and rig.back == ["c"]
    rig.said.clear()
    rig.until(lambda: bool(rig.said))
    assert rig.said == [("runs", Succeeded)]


def test_a_death_is_charged_to_what_ran(rig: Rig) -> None:
    """What was handed over behind it comes back."""
    rig.start("dies", 0.02, "at once")
    rig.start("b", 0.0)
    rig.start("c", 0.0)
    rig.until(lambda: bool(rig.said))
    assert rig.said == [("dies", Crashed)] and rig.back == ["c", "b"]


def test_a_process_that_stands_still_gets_nothing_more_until_it_is_heard(rig: Rig) -> None:
    """What it had not begun is taken back though it cannot answer; when it goes on it does not begin it."""
    rig.child.popen.send_signal(signal.SIGSTOP)
    rig.start("a", 0.0)
    rig.start("b", 0.0)
    rig.pool.give_back()
    assert rig.back == ["b", "a"] and (rig.pool.free(), rig.pool.ahead()) == (0, 0)
    rig.child.popen.send_signal(signal.SIGCONT)
    rig.until(lambda: rig.pool.free() == 1)
    rig.start("c", 0.0)
    rig.until(lambda: bool(rig.said))
    assert rig.said == [("c", Succeeded)]


def test_a_call_from_another_thread_ends_the_wait(rig: Rig) -> None:
    """Also one that came before it."""
    rig.pool.wake()
    began = time.monotonic()
    while rig.pool._called:
        rig.pool.wait(60)
    assert time.monotonic() - began < 50
