"""The pool of handler processes by itself: what was handed over and has not begun comes back, at once and in order, whatever its process does."""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import subprocess
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
from millstream_tasks.durable.processes import NOT_SHORT, ProcessPool

pytestmark = pytest.mark.processes
HANDLERS = """
import fcntl, os, signal, time
from millstream import Handlers
handlers = Handlers()

@handlers.task(name="leaves", effects="idempotent")
def leaves(lock: str, own_session: bool, stays: bool = False) -> None:
    # It dies, and what it has forked lives on with all it has inherited.
    for descriptor in range(3, 32):
        try:
            os.dup(descriptor)  # as a copy has all of them that Python does not know of
        except OSError:
            pass
    read, write = os.pipe()
    if not os.fork():
        if own_session:
            os.setsid()
        held = os.open(lock, os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(held, str(os.getpid()).encode())
        os.write(write, b"!")
        time.sleep(600)
    os.read(read, 1)
    time.sleep(600 * stays)
    os.kill(os.getpid(), signal.SIGKILL)

@handlers.task(name="splits", effects="idempotent")
def splits() -> int:
    return os.fork()

@handlers.task(name="work", effects="idempotent")
def work(seconds: float, end: str = "") -> str:
    time.sleep(seconds)
    if end:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"
"""


class Rig:
    """One process or several, and what the pool says of attempts."""

    def __init__(self, size: int = 1) -> None:
        boot = TaskBoot("pool_tasks:handlers", "", 100, "sqlite://", "millstream_", 3000)
        self.said: list[tuple[str, Any]] = []
        self.back: list[str] = []
        self.pool = ProcessPool(
            boot, SystemClock(), size, self._report, lambda task, fence: self.back.append(task), lambda *_: None, lambda *_: None
        )
        self.until(lambda: self.pool.free() == size)

    def _report(self, task: str, fence: int, outcome: Reported, submits: tuple[NewTask, ...], seconds: float) -> None:
        self.said.append((task, type(outcome)))

    @property
    def child(self) -> Child:
        (child,) = self.pool._children
        return child

    def start(self, task: str, *args: Any) -> None:
        self.submit("work", task, *args)

    def submit(self, handler: str, task: str, *args: Any) -> None:
        self.pool.start(task_row(id=task, handler=handler, args=encode_arguments(args, {}), fence=1))

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it does not come about"
            self.pool.wait(min(self.pool.tick(), 0.2))

    def began(self) -> None:
        self.until(lambda: bool(self.child.line) and self.child.line[0].began > 0)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Rig]:
    (tmp_path / "pool_tasks.py").write_text(HANDLERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "pool_tasks", raising=False)
    made = Rig(getattr(request, "param", 1))
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


def test_what_was_about_to_begin_when_its_process_died_comes_back(rig: Rig) -> None:
    """It had leave to begin, and its process did not come to say so, nor that the one before it was over."""
    rig.start("a", 20.0)
    rig.began()
    rig.start("b", 0.0)
    os.read(rig.child._leave.reading, 4)  # as its process does before it begins b
    rig.child.popen.send_signal(signal.SIGKILL)
    rig.until(lambda: bool(rig.said))
    assert rig.said == [("a", Crashed)] and rig.back == ["b"]


@pytest.mark.parametrize("own_session", [False, True])
def test_a_death_is_seen_though_what_the_handler_left_behind_holds_the_pipe(rig: Rig, tmp_path: Path, own_session: bool) -> None:
    """What is in the process's group goes with it; what has a session of its own is its own affair."""
    lock = tmp_path / "held"
    lock.touch()
    rig.submit("leaves", "a", str(lock), own_session)
    died = rig.child
    try:
        rig.until(lambda: bool(rig.said))
        assert rig.said == [("a", Crashed)]
        rig.until(lambda: rig.pool.free() == 1)
        assert rig.child is not died
        with lock.open("r+") as held:
            if own_session:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                fcntl.flock(held, fcntl.LOCK_EX)  # free as soon as its holder is gone
    finally:
        if own_session or not rig.said:
            os.kill(int(lock.read_text()), signal.SIGKILL)


def test_what_a_handler_has_started_ends_when_the_worker_is_gone(rig: Rig, tmp_path: Path) -> None:
    """Its process is alone then, and takes it along."""
    lock = tmp_path / "held"
    lock.touch()
    rig.submit("leaves", "a", str(lock), False, True)
    rig.until(lambda: bool(lock.read_text()))
    rig.child.sock.close()
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # free as soon as its holder is gone
    assert rig.said == []


@pytest.mark.parametrize("rig", [2], indirect=True)
def test_what_is_handed_over_ahead_goes_behind_a_short_one(rig: Rig) -> None:
    """Not behind one that lasts, where it would be taken back at once."""
    rig.start("long", 20.0)
    lasting, other = rig.pool._children if rig.pool._children[0].line else rig.pool._children[::-1]
    rig.until(lambda: lasting.line[0].began > 0)
    lasting.line[0].began -= 3600
    rig.start("short", 0.0)
    other.line[0].at += 3600
    rig.start("b", 0.0)
    assert [[h.task.id for h in child.line] for child in (lasting, other)] == [["long"], ["short", "b"]]


def test_what_is_handed_over_is_no_sign_of_life(rig: Rig) -> None:
    """Silence counts from when the process was heard last, or got something to do."""
    rig.start("a", 20.0)
    rig.began()
    heard = rig.child.seen
    rig.start("b", 0.0)
    assert rig.child.seen == heard


def test_a_process_that_is_being_killed_gets_nothing_more(rig: Rig) -> None:
    """However short what it ran has been."""
    rig.start("a", 20.0)
    rig.began()
    rig.child.line[0].began += 3600
    assert rig.pool.ahead() > 0
    rig.pool.kill("a", 1)
    assert (rig.pool.free(), rig.pool.ahead()) == (0, 0)


def test_a_machine_that_starts_no_process_keeps_those_it_has(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool goes on, and starts what is missing as soon as it can."""
    rig.pool._size = 2
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", _refused)
        rig.start("a", 0.0)
        rig.until(lambda: bool(rig.said))
    assert rig.said == [("a", Succeeded)]
    rig.until(lambda: rig.pool.free() == 2)


def _refused(*_: Any, **__: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


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


def test_one_that_has_not_begun_does_not_wait_for_a_process_that_stands_still(rig: Rig) -> None:
    """Though nothing waits behind it."""
    rig.child.popen.send_signal(signal.SIGSTOP)
    rig.start("a", 0.0)
    rig.until(lambda: rig.back == ["a"])
    assert rig.said == [] and rig.pool.free() == 0


def test_a_process_that_hardly_comes_to_run_begins_at_last(rig: Rig) -> None:
    """Each time something is taken back from it unbegun, it has longer for the next."""
    for turn in range(1, 4):
        rig.child.popen.send_signal(signal.SIGSTOP)
        rig.start("a", 0.0)
        rig.until(lambda turn=turn: len(rig.back) == turn)  # type: ignore[misc]
        rig.child.popen.send_signal(signal.SIGCONT)
        rig.until(lambda: rig.pool.free() == 1)
    patience = rig.child.patience
    rig.start("a", 0.0)
    rig.until(lambda: bool(rig.said))
    assert rig.said == [("a", Succeeded)] and patience > NOT_SHORT and rig.child.patience == 0.0


def test_a_copy_that_a_handler_makes_of_its_process_has_no_say(rig: Rig) -> None:
    """Not even when it returns from the handler: ends are told by the process itself, each once, and what follows runs once."""
    rig.submit("splits", "splits")
    names = [f"t{i}" for i in range(20)]
    for name in names:
        rig.start(name, 0.001)
    rig.until(lambda: len(rig.said) == 21)
    assert rig.said == [(name, Succeeded) for name in ("splits", *names)]


def test_a_pipe_that_has_taken_all_is_not_waited_for(rig: Rig) -> None:
    """Else each wait would end at once."""
    rig.child.popen.send_signal(signal.SIGSTOP)
    for name in ("large", "larger", "largest"):
        rig.start(name, 0.0, " " * 250_000)
    rig.pool.wait(0.0)
    rig.pool.give_back()
    rig.child.popen.send_signal(signal.SIGCONT)
    while rig.pool.free() == 0 or rig.child.writing:
        rig.pool.tick()
    rig.start("small", 0.0)
    rig.pool.wait(0.0)
    assert rig.pool._selector.get_key(rig.child.sock).events == selectors.EVENT_READ
