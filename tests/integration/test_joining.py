"""``Tasks.submit(session=)`` and ``enlist``: with a worker that runs what is committed, and wake-ups that come after the commit."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import millstream
from millstream import Handlers, Installation, Tasks, TaskWorker, enlist
from millstream.tasks import Item
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError, ForeignSession, TaskConflict

handlers = Handlers()


@handlers.task(effects="idempotent")
def double(number: int) -> int:
    return number * 2


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation.local(tmp_path, poll_ms=10_000)


@pytest.fixture
def worker(installation: Installation) -> Iterator[TaskWorker]:
    with TaskWorker(installation, handlers) as worker:
        yield worker


@pytest.fixture
def woken() -> list[str]:
    return []


@pytest.fixture
def tasks(installation: Installation, worker: TaskWorker, woken: list[str]) -> Iterator[Tasks]:
    """A client whose wake-ups are seen, and do not reach the worker."""
    with Tasks(installation, handlers, wake=woken.append) as tasks:
        yield tasks


@pytest.fixture
def engine(installation: Installation) -> Iterator[sa.Engine]:
    engine = sa.create_engine(installation.database)
    yield engine
    engine.dispose()


def test_a_task_of_a_callers_transaction_runs_after_its_commit_at_once(worker: TaskWorker, engine: sa.Engine) -> None:
    """The worker polls every ten seconds: it is the wake-up after the commit that it hears."""
    with Session(engine) as session:
        receipt = worker.tasks.submit(double, 4, session=session)
        session.commit()
    assert worker.tasks.wait(receipt.task, 5) == 8


def test_wake_ups_wait_for_the_commit_and_go_with_the_rollback(tasks: Tasks, woken: list[str], engine: sa.Engine) -> None:
    """Of one submission and of many."""
    with Session(engine) as session:
        tasks.submit(double, 1, session=session)
        tasks.submit_many(double, [Item(args=(2,)), Item(args=(3,), key="c")], session=session)
        assert woken == []
        session.rollback()
        assert woken == [] and tasks.list() == []
        receipt = tasks.submit(double, 1, session=session)
        session.commit()
    assert woken == ["default"] and receipt.state is TaskState.READY
    tasks.submit(double, 5)
    assert woken == ["default"] * 2


def test_a_plain_connection_tells_nobody_and_its_receipt_can(tasks: Tasks, woken: list[str], installation: Installation) -> None:
    """``receipt.hint()`` after the commit; without it the poll finds the task."""
    raw = sqlite3.connect(installation.database.removeprefix("sqlite:///"))
    receipt = tasks.submit(double, 1, key="k", session=raw)
    again = tasks.submit(double, 1, key="k", session=raw)
    assert (again.task, again.replayed) == (receipt.task, True)
    raw.commit()
    assert woken == []
    receipt.hint()
    assert woken == ["default"]
    raw.close()


def test_enlisted_submissions_join_and_others_do_not(tasks: Tasks, engine: sa.Engine) -> None:
    """The innermost block counts; None in it leaves; another thread is in none; a session that is named wins."""
    other: list[str] = []
    with Session(engine) as session, enlist(session):
        with enlist(None):
            thread = threading.Thread(target=lambda: other.append(tasks.submit(double, 1, key="thread").task))
            thread.start()
            thread.join(20)
            tasks.submit(double, 1, key="own")
        tasks.submit(double, 1, key="enlisted")
        session.rollback()
        assert {r.key for r in tasks.list()} == {"thread", "own"}
    with Session(engine) as session, enlist("no session at all"):
        tasks.submit(double, 1, key="named", session=session)
        session.commit()
        with pytest.raises(ConfigurationError, match="session is a str"):
            tasks.submit(double, 1)
    assert len(other) == 1 and "named" in {r.key for r in tasks.list()}


def test_a_conflict_in_a_callers_transaction_leaves_it_whole(tasks: Tasks, engine: sa.Engine) -> None:
    """It is an answer, not an error of the database."""
    tasks.submit(double, 1, key="k")
    with Session(engine) as session:
        tasks.submit(double, 1, key="a", session=session)
        with pytest.raises(TaskConflict):
            tasks.submit(double, 2, key="k", session=session)
        tasks.submit(double, 1, key="b", session=session)
        session.commit()
    assert {r.key for r in tasks.list()} == {"k", "a", "b"}


def test_a_session_of_another_installation_is_refused(tasks: Tasks, tmp_path: Path) -> None:
    """Of the same kind and name elsewhere: the id tells."""
    other = Installation.local(tmp_path / "other")
    (tmp_path / "other").mkdir()
    with TaskWorker(other, handlers), Session(sa.create_engine(other.database)) as session:
        with pytest.raises(ForeignSession, match="Outbox"):
            tasks.submit(double, 1, session=session)
        engine = session.get_bind()
    assert isinstance(engine, sa.Engine)
    engine.dispose()


def test_the_names_are_public() -> None:
    """What a user catches and calls."""
    assert {"enlist", "RetryTransaction", "ForeignSession", "TaskReceipt"} <= set(millstream.__all__)
