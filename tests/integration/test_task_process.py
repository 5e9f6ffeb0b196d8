"""Durable tasks in real processes: handlers that die, hang, are cancelled, and a worker that is killed or told to end. SQLite, no broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from millstream import Installation, Tasks, TaskState
from millstream.tasks import Item
from millstream_schema.durable.states import Cause
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_tasks.durable.handlers import HandlerRegistry
from millstream_tasks.task_main import load_handlers

pytestmark = pytest.mark.processes
HANDLERS = """
import asyncio, os, signal, sys, time
from pathlib import Path
from millstream import Cancel, Done, Handlers, NotDone
handlers = Handlers()
NOTES = Path(os.environ["NOTES"])

def note(word):
    with NOTES.open("a") as file:
        file.write(word + "\\n")

@handlers.task(name="add", effects="idempotent")
def add(a: int, b: int) -> int:
    return a + b

@handlers.task(name="adds", effects="idempotent")
async def adds(a: int, b: int) -> int:
    await asyncio.sleep(0.01)
    return a + b

@handlers.task(name="dies", effects="idempotent", delay=0.05)
def dies(times: int, file: str) -> str:
    path = NOTES.with_name(file)
    done = int(path.read_text()) if path.exists() else 0
    path.write_text(str(done + 1))
    if done < times:
        os.kill(os.getpid(), signal.SIGSEGV if times > 2 else signal.SIGKILL)
    return f"alive after {done}"

@handlers.task(name="waits", effects="idempotent")
def waits(seconds: float, word: str) -> str:
    note("began " + word)
    time.sleep(seconds)
    return word

@handlers.task(name="outside")
def outside(seconds: float, word: str) -> str:
    note("began " + word)
    time.sleep(seconds)
    return word

@handlers.task(name="limited", effects="idempotent", attempts=1, run=0.3, grace=0.3)
def limited(ctx, polite: bool) -> str:
    note("began limited")
    while not (polite and ctx.cancelled):
        time.sleep(0.01)
    note(f"left {ctx.time_left}")
    raise Cancel("as told")

@handlers.task(name="picky", effects="idempotent", delay=0.01, no_retry_on=KeyError)
def picky(word: str) -> str:
    note("tried " + word)
    raise {"key": KeyError, "value": ValueError}[word]("no")

@handlers.task(name="moves", effects="transactional", delay=0.05, heartbeat=2)
def moves(ctx, word: str, seconds: float) -> None:
    with ctx.transaction() as tx:
        tx.execute("INSERT INTO moved (word, fence) VALUES (:word, :fence)", {"word": word, "fence": ctx.fence})
        n = NOTES.read_text().count("inside") + 1 if NOTES.exists() else 1
        note(f"inside {word} {n} {os.getpid()}")
        if n == 1:
            time.sleep(seconds)
        tx.result(word)
    note(f"behind {word} {n}")

@handlers.task(name="tells")
def tells(ctx) -> None:
    for i in range(20_000):
        ctx.progress(i + 1, 20_000, "rows")
    ctx.note("counted", rows=20_000)
    while not NOTES.with_name("die").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

def sent(word):
    return word in NOTES.read_text().splitlines() if NOTES.exists() else False

def bank(word, how):
    def call(key):
        note("called " + word)
        note("key " + key)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return 5
    return call

def asked(intent):
    note("asked " + intent.args[0])
    return Done(5) if sent("key " + intent.idempotency_key) else NotDone()

@handlers.task(name="doubts", intents_only=True, delay=0.05)
def doubts(ctx, word: str, how: str) -> int:
    return ctx.external("charge", bank(word, how))

@handlers.task(name="knows", intents_only=True, delay=0.05, reconcile=asked)
def knows(ctx, word: str, how: str) -> int:
    return ctx.external("charge", bank(word, how))

@handlers.task(name="obeys", effects="idempotent")
def obeys(ctx) -> str:
    note("began obeys")
    while not ctx.cancelled:
        time.sleep(0.01)
    raise Cancel("as asked")
"""


ROUND = int(os.environ.get("MILLSTREAM_TEST_ROUND") or 200)
"""Tasks between two looks at the memory of a worker; 250,000 make a million."""
PART = 1_000


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        pause.wait(0.01)


class Rig:
    """An installation, its handlers as a user's module, and worker processes."""

    def __init__(self, path: Path, database: str = "") -> None:
        self.path = path
        (path / "proj_tasks.py").write_text(HANDLERS)
        self.installation = Installation.local(path, lease_ms=1_500, poll_ms=50, **({"database": database} if database else {}))
        opened = Database(self.installation.database, SystemClock(), prefix=self.installation.table_prefix)
        create_schema(opened)
        with opened.engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE IF EXISTS moved")
            connection.exec_driver_sql("CREATE TABLE moved (word VARCHAR(40), fence INTEGER)")
        opened.close()
        self.notes = path / "notes"
        self.environment = {
            **os.environ,
            **self.installation.environment(),
            "NOTES": str(self.notes),
            "PYTHONPATH": str(path),
            "MILLSTREAM_LOG": "error",
        }
        self.workers: list[subprocess.Popen[bytes]] = []
        self.tasks = Tasks(self.installation, self._handlers())

    def _handlers(self) -> HandlerRegistry:
        os.environ["NOTES"] = str(self.notes)
        sys.path.insert(0, str(self.path))
        try:
            sys.modules.pop("proj_tasks", None)
            return load_handlers("proj_tasks:handlers")
        finally:
            sys.path.remove(str(self.path))
            del os.environ["NOTES"]

    def worker(self, processes: int = 2, drain: float = 5.0, namespace: str = "default") -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "millstream.task_process", "--handlers", "proj_tasks:handlers", "--name", f"w{len(self.workers)}",
            "--processes", str(processes), "--drain", str(drain), "--namespace", namespace,
        ]  # fmt: skip
        worker = subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE)
        self.workers.append(worker)
        return worker

    def moved(self) -> list[tuple[str, int]]:
        """What transactions of handlers have committed."""
        with self.tasks.database.engine.begin() as connection:
            return [(str(w), int(f)) for w, f in connection.exec_driver_sql("SELECT word, fence FROM moved")]

    def inside(self, word: str) -> int:
        """Process of the attempt that is in its transaction, once it is."""
        start = f"inside {word} 1 "
        until(lambda: self.notes.exists() and start in self.notes.read_text(), start)
        return int(self.notes.read_text().split(start)[1].split()[0])

    def noted(self, word: str) -> bool:
        return self.notes.exists() and word in self.notes.read_text().splitlines()

    def ended(self, task: str) -> TaskState:
        """Its state once it is settled or in review."""
        until(lambda: self.tasks.get(task).state.settled or self.tasks.get(task).state is TaskState.UNKNOWN, f"the end of {task}")
        return self.tasks.get(task).state

    def close(self) -> None:
        self.tasks.close()
        for worker in self.workers:
            family = [worker, *psutil.Process(worker.pid).children(recursive=True)] if worker.poll() is None else []
            for one in family:
                one.kill()
            worker.wait()
            assert worker.stdin is not None
            worker.stdin.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.fixture(
    params=[
        pytest.param("sqlite", id="sqlite"),
        pytest.param("postgres", id="postgres", marks=pytest.mark.postgres),
        pytest.param("mariadb", id="mariadb", marks=pytest.mark.mariadb),
    ]
)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """A rig on each database."""
    made = Rig(tmp_path, "" if request.param == "sqlite" else str(request.getfixturevalue(f"{request.param}_url")))
    yield made
    made.close()


def test_a_process_that_dies_in_a_call_leaves_it_to_a_person_or_to_what_its_hook_finds_out(rig: Rig) -> None:
    """Between intent and outcome: no second call. With a hook, the next attempt asks, and goes on with what happened."""
    rig.worker()
    doubts, knows = (rig.tasks.submit(name, name, "killed").task for name in ("doubts", "knows"))
    fine = rig.tasks.submit("doubts", "fine", "").task
    assert (rig.ended(doubts), rig.tasks.get(doubts).cause) == (TaskState.UNKNOWN, Cause.INTENT)
    assert (rig.tasks.wait(fine, 20), rig.tasks.wait(knows, 20)) == (5, 5)
    said = rig.notes.read_text().splitlines()
    assert sorted(line for line in said if line.startswith(("called", "asked"))) == [
        "asked knows",
        "called doubts",
        "called fine",
        "called knows",
    ]
    (call,) = rig.tasks.intents(doubts)
    assert call.open and f"key {call.idempotency_key}" in said and "not known is whether these were called: charge" in rig.tasks.why(doubts)
    assert rig.tasks.get(knows).crashes == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_process_that_dies_or_stands_still_inside_its_transaction_has_done_nothing(served: Rig, how: signal.Signals) -> None:
    """What it had written is undone, the next attempt does it once; one that stands still is killed for its silence. Neighbours go on."""
    served.worker(2)
    task = served.tasks.submit("moves", "w", 60.0).task
    os.kill(served.inside("w"), how)
    assert served.tasks.wait(task, 40) == "w"
    row = served.tasks.get(task)
    assert served.moved() == [("w", row.fence)]
    until(lambda: served.noted("behind w 2"), "its code behind the block")
    assert served.tasks.wait(served.tasks.submit("add", 1, 1).task, 20) == 2


def test_code_behind_the_block_runs_on_though_the_task_has_succeeded(served: Rig) -> None:
    """A renewal that no longer finds the task kills nobody."""
    served.worker(1)
    task = served.tasks.submit("moves", "w", 0.0).task
    assert served.tasks.wait(task, 20) == "w" and served.moved() == [("w", served.tasks.get(task).fence)]
    until(lambda: served.noted("behind w 1"), "its code behind the block")
    (worker,) = served.workers
    children = {c.pid for c in psutil.Process(worker.pid).children()}
    assert served.tasks.wait(served.tasks.submit("add", 1, 1).task, 20) == 2
    assert {c.pid for c in psutil.Process(worker.pid).children()} == children
    assert served.tasks.attempts(task) == []


def test_a_worker_killed_with_a_handler_inside_its_transaction_leaves_no_effect(served: Rig) -> None:
    """kill -9 of the worker: its handler's process ends with it, the session is rolled back, another worker does it once."""
    first = served.worker(1)
    task = served.tasks.submit("moves", "w", 60.0).task
    served.inside("w")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    served.worker(1)
    assert served.tasks.wait(task, 40) == "w"
    assert served.moved() == [("w", served.tasks.get(task).fence)]
    command = " ".join(c for p in served.workers if p.poll() is None for q in psutil.Process(p.pid).children() for c in q.cmdline())
    assert "task_main" in command and served.installation.database not in command


def test_many_tasks_run_in_processes_and_give_their_results(rig: Rig) -> None:
    """Each once, whatever the order, coroutine functions among them; a repeat of the whole submission changes nothing."""
    rig.worker()
    assert rig.tasks.wait(rig.tasks.submit("adds", 3, 4).task, 30) == 7
    items = [Item(args=(i, 1), key=f"k{i}") for i in range(300)]
    receipts: list[Any] = rig.tasks.submit_many("add", items)
    assert [rig.tasks.wait(r.task, 30) for r in receipts] == [i + 1 for i in range(300)]
    again: list[Any] = rig.tasks.submit_many("add", items)
    assert [(r.task, r.replayed) for r in again] == [(r.task, True) for r in receipts]
    assert all(rig.tasks.get(r.task).starts == 1 for r in receipts)


def test_celery_t05_a_process_that_dies_is_charged_to_what_ran_and_to_nothing_else(rig: Rig) -> None:
    """One that is killed twice succeeds at last; one that always segfaults is in review after three deaths; the fifty neighbours of their batch notice nothing."""
    twice = rig.tasks.submit("dies", 2, "twice").task
    always = rig.tasks.submit("dies", 99, "always").task
    others: list[Any] = rig.tasks.submit_many("add", [Item(args=(i, 0)) for i in range(50)])
    rig.worker()
    assert rig.tasks.wait(twice, 30) == "alive after 2"
    assert rig.ended(always) is TaskState.UNKNOWN and rig.tasks.get(always).cause is Cause.POISON
    assert (rig.path / "always").read_text() == "3"
    assert [rig.tasks.wait(o.task, 30) for o in others] == list(range(50))
    assert {rig.tasks.get(o.task).crashes for o in others} == {0}


def test_what_was_handed_to_a_process_that_stands_still_runs_elsewhere(rig: Rig) -> None:
    """Short tasks wait in the processes themselves. Of those, only the one that had begun waits for the stopped process; none runs twice."""
    worker = rig.worker(2)
    rig.tasks.wait(rig.tasks.submit("add", 0, 0).task, 20)
    receipts: list[Any] = rig.tasks.submit_many("add", [Item(args=(i, 1)) for i in range(500)])
    stopped = next(p for p in psutil.Process(worker.pid).children() if "millstream_tasks.task_main" in p.cmdline())
    stopped.suspend()

    def open_ones() -> list[str]:
        return [r.task for r in receipts if not rig.tasks.get(r.task).state.settled]

    until(lambda: len(open_ones()) <= 1, "the end of all that had not begun")
    stopped.resume()
    assert [rig.tasks.wait(r.task, 20) for r in receipts] == [i + 1 for i in range(500)]
    assert {(t.starts, t.crashes, t.losses) for t in (rig.tasks.get(r.task) for r in receipts)} == {(1, 0, 0)}


@pytest.mark.postgres
def test_celery_t23_memory_does_not_grow_with_the_tasks_that_were_run(tmp_path: Path, postgres_url: str) -> None:
    """Of the task process and its handler processes, once they have warmed up. On SQLite their page caches grow with its file, up to a bound."""
    rig = Rig(tmp_path, postgres_url)
    worker = rig.worker()

    def run(name: str) -> None:
        for start in range(0, ROUND, PART):
            numbers = range(start, min(start + PART, ROUND))
            receipts: list[Any] = rig.tasks.submit_many("add", [Item(args=(i, 1), key=f"{name}-{i}") for i in numbers])
            assert [rig.tasks.wait(r.task, 60) for r in receipts] == [i + 1 for i in numbers]

    def resident() -> float:
        """MiB."""
        main = psutil.Process(worker.pid)
        return sum(int(p.memory_info().rss) for p in [main, *main.children(recursive=True)]) / 2**20

    run("warm")
    sizes = [resident()]
    for turn in range(3):
        run(f"more {turn}")
        sizes.append(resident())
    rig.close()
    grown = [after - before for before, after in pairwise(sizes)]
    print(f"{(turn + 2) * ROUND} tasks, MiB resident: {sizes}")
    assert min(grown) < min(ROUND / 1024, 2.0), f"a kilobyte for each task, or two megabytes, in every round: {grown}"


def test_a_worker_that_is_killed_loses_nothing_and_repeats_nothing_that_may_not_be(rig: Rig) -> None:
    """kill -9 of worker and children: what is idempotent runs again elsewhere, what reaches outside is in review, never guessed at."""
    first = rig.worker()
    safe, unsafe = rig.tasks.submit("waits", 1.0, "safe").task, rig.tasks.submit("outside", 30.0, "unsafe").task
    until(lambda: rig.noted("began safe") and rig.noted("began unsafe"), "both running")
    for one in [*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid)]:
        one.kill()
    first.wait()
    rig.worker()
    assert rig.tasks.wait(safe, 30) == "safe"
    assert rig.ended(unsafe) is TaskState.UNKNOWN and rig.tasks.get(unsafe).cause is Cause.LOST
    assert rig.notes.read_text().splitlines().count("began unsafe") == 1
    retry = rig.tasks.review_retry(rig.tasks.get(unsafe), reason="looked: nothing happened outside")
    assert rig.tasks.get(retry.task).retry_of == unsafe and rig.tasks.get(unsafe).state is TaskState.FAILED


def test_cancel_ends_a_handler_that_obeys_and_one_that_does_not(rig: Rig) -> None:
    """The first ends by itself, the second is killed after its grace; both are CANCELLED, being idempotent."""
    rig.worker()
    polite, rude = rig.tasks.submit("obeys").task, rig.tasks.submit("waits", 60.0, "rude").task
    until(lambda: rig.noted("began obeys") and rig.noted("began rude"), "both running")
    rig.tasks.cancel(polite)
    rig.tasks.cancel(rude)
    assert rig.ended(polite) is TaskState.CANCELLED
    assert rig.ended(rude) is TaskState.CANCELLED
    assert rig.tasks.wait(rig.tasks.submit("add", 2, 2).task, 20) == 4


def test_an_attempt_past_its_limit_is_told_and_then_killed(rig: Rig) -> None:
    """One obeys, one does not; both are failed attempts, with the cause in the evidence."""
    rig.worker()
    polite, rude = rig.tasks.submit("limited", True).task, rig.tasks.submit("limited", False).task
    assert rig.ended(polite) is TaskState.FAILED and rig.ended(rude) is TaskState.FAILED
    assert rig.noted("left 0.0")
    assert [a.outcome for a in rig.tasks.attempts(polite)] == ["Overran"] and [a.outcome for a in rig.tasks.attempts(rude)] == ["Killed"]
    assert "limit" in rig.tasks.get(rude).reason


def test_what_a_handler_says_is_seen_while_it_runs_and_kept_when_its_process_dies(rig: Rig) -> None:
    """However often it says something; in review it is evidence."""
    rig.worker(processes=1)
    task = rig.tasks.submit("tells").task
    until(lambda: bool(rig.tasks.notes(task)), "the note")
    (note,), (far,) = rig.tasks.notes(task), rig.tasks.progress(task)
    assert rig.tasks.get(task).state is TaskState.RUNNING
    assert (note.text, note.fields, far.done, far.number, far.fence) == ("counted", '{"rows":20000}', 20_000, 20_000, note.fence)
    assert "; 20000 of 20000 done (rows), told " in rig.tasks.why(task)
    rig.notes.with_name("die").touch()
    assert rig.ended(task) is TaskState.UNKNOWN
    assert "; 20000 of 20000 done (rows), told " in rig.tasks.why(task)
    assert note in rig.tasks.notes(task)


def test_which_errors_are_tried_again_is_decided_by_their_class_in_the_handlers_process(rig: Rig) -> None:
    """One class is not; the others are, up to the attempts."""
    rig.worker()
    never, often = rig.tasks.submit("picky", "key").task, rig.tasks.submit("picky", "value").task
    assert rig.ended(never) is TaskState.FAILED and rig.ended(often) is TaskState.FAILED
    words = rig.notes.read_text().splitlines()
    assert (words.count("tried key"), words.count("tried value")) == (1, 5)
    assert (rig.tasks.get(never).cause, rig.tasks.get(often).cause) == (Cause.ERROR, Cause.ATTEMPTS)


def test_celery_t22_a_worker_told_to_end_gives_back_what_has_not_begun_and_finishes_the_rest(rig: Rig) -> None:
    """SIGTERM: the one that runs ends here; those behind it go to another worker, no attempt counted."""
    first = rig.worker(1, drain=10.0)
    running = rig.tasks.submit("waits", 1.5, "running").task
    until(lambda: rig.noted("began running"), "it running")
    waiting: list[Any] = rig.tasks.submit_many("add", [Item(args=(i, i)) for i in range(20)])
    first.terminate()
    second = rig.worker(1)
    assert [rig.tasks.wait(w.task, 30) for w in waiting] == [2 * i for i in range(20)]
    assert rig.tasks.wait(running, 30) == "running"
    first.wait(20)
    assert rig.tasks.get(running).starts == 1 and {rig.tasks.get(w.task).starts for w in waiting} == {1}
    assert second.poll() is None


def test_celery_t17_a_handler_process_that_stands_still_past_the_lease_is_no_longer_valid(served: Rig) -> None:
    """SIGSTOP of the worker past its lease: its task runs elsewhere; woken, it stops what it had, and its answer changes nothing."""
    if served.installation.database.startswith("sqlite"):
        pytest.skip("a process that stands still in a write keeps a SQLite file")
    first = served.worker(1)
    task = served.tasks.submit("waits", 2.0, "slow").task
    until(lambda: served.noted("began slow"), "it running")
    os.kill(first.pid, signal.SIGSTOP)
    served.worker(1)
    assert served.tasks.wait(task, 30) == "slow"
    fence = served.tasks.get(task).fence
    os.kill(first.pid, signal.SIGCONT)
    again = served.tasks.submit("add", 1, 2).task
    assert served.tasks.wait(again, 20) == 3
    assert fence > 1 and served.tasks.get(task).fence == fence
