"""Waiting for tasks' results: rows are looked at, whatever happens to who would have told of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import begin, ending, every, external, new, session, settle, submit, take, taken

from millstream.handlers import Handlers
from millstream.installation import Installation
from millstream.results import REFUSED, TaskResult
from millstream.tasks import Tasks
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.records import Receipt
from millstream_schema.durable.requests import encode_result
from millstream_schema.durable.states import Cause, TaskState
from millstream_schema.errors import (
    CommitUnknown,
    ConfigurationError,
    ReviewConflict,
    StoreUnavailable,
    TaskFailed,
    TaskNotFound,
    UnknownHandler,
)
from millstream_schema.store import settling
from millstream_schema.store.database import Database, Transaction

T = TypeVar("T")


@pytest.fixture
def tasks(store: Opened) -> Iterator[Tasks]:
    """A client on the store, without anybody who would wake it."""
    installation = Installation(database=store.url, transport="unix://", checkpoints="file:///", result_timeout_ms=20_000)
    with Tasks(installation, database=store.db) as client:
        yield client


def soon(work: Callable[[], object], seconds: float = 0.2) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer


def test_celery_t33_a_wait_ends_though_nobody_tells_of_the_end(store: Opened, tasks: Tasks) -> None:
    """Whoever would have woken the waiters is cut off: many of them, in threads, each look for themselves; none without an end to its time."""
    rows = taken(store.db, *[new(f"k{i}") for i in range(6)])
    timers = [soon(lambda i=i: settle(store.db, ending(rows[i], returned(i))), 0.1 * i) for i in range(6)]  # type: ignore[misc]
    found = together(*[lambda r=r: tasks.result(r.id).get() for r in rows])
    assert found == list(range(6))
    for timer in timers:
        timer.join()
    submit(store.db, new("never"))
    with pytest.raises(TimeoutError, match=r"is READY after 0\.1 s: "):
        tasks.result(every(store.db)["never"].id).get(0.1)


def returned(value: Any) -> o.Succeeded:
    return o.Succeeded(encode_result(value))


def kill_connections(store: Opened) -> None:
    """As a restart of the server does to whoever is connected."""
    if store.kind == "sqlite":
        return

    def work(tx: Transaction) -> None:
        if store.kind == "postgres":
            tx._connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return
        ids = tx._connection.exec_driver_sql(
            "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        ).fetchall()
        for (one,) in ids:
            tx._connection.exec_driver_sql(f"KILL {int(one)}")

    with contextlib.suppress(StoreUnavailable, CommitUnknown):  # two of them may meet
        store.open().run(work)


def test_celery_t35_a_result_is_found_through_connections_that_were_closed(store: Opened, tasks: Tasks) -> None:
    """The database drops every connection between an end and its answer, again and again, while somebody waits: the end is stored, the wait ends with it."""
    (row,) = taken(store.db, new())
    worker = store.open()
    timers = [soon(lambda: kill_connections(store), 0.1 * i) for i in range(1, 4)]

    def settles() -> None:
        for _ in range(20):
            try:
                worker.run(lambda tx: settling.settle(tx, [ending(row, returned("stored"))]))
                return
            except (StoreUnavailable, CommitUnknown):
                threading.Event().wait(0.05)

    timers.append(soon(settles, 0.35))
    assert tasks.result(row.id).get(15) == "stored"
    for timer in timers:
        timer.join()
    assert tasks.result(row.id).get(10) == "stored"
    store.db.engine.dispose()  # the next test is to find whole connections


class Away(Database):
    """The store, which cannot be reached for so many looks."""

    looks = 0

    def read(self, work: Callable[[Transaction], T]) -> T:
        if self.looks > 0:
            self.looks -= 1
            raise StoreUnavailable("it restarts")
        return super().read(work)


def test_a_wait_outlasts_a_database_that_is_away_and_no_longer_than_its_time(store: Opened, tasks: Tasks) -> None:
    """Away for a moment: nothing is noticed. Away at the end of the time: that is what is raised, not that the task is late."""
    (row,) = taken(store.db, new())
    settle(store.db, ending(row, returned(1)))
    db = Away(store.url, tasks._clock)
    with Tasks(Installation(database="sqlite://", transport="unix://", checkpoints="file:///"), database=db) as client:
        db.looks = 5
        assert client.result(row.id).get(10) == 1
        db.looks = 10_000
        with pytest.raises(StoreUnavailable, match="it restarts"):
            client.result(row.id).get(0.2)
    db.close()


def test_a_result_answers_by_the_names_of_celerys(store: Opened, tasks: Tasks) -> None:
    """For each kind of end, for what goes on, for what is in review, for what is not there."""
    rows = {r.key: r for r in taken(store.db, new("good"), new("bad"), new("again"), external("open"), new("runs"))}
    submit(store.db, new("unwanted"))
    begin(store.db, rows["open"])
    settle(
        store.db, ending(rows["good"], returned(7)), ending(rows["bad"], o.GaveUp("no such account")), ending(rows["again"], o.RetryAsked(10**9)),
        ending(rows["open"], o.AskedForReview("look")),
    )  # fmt: skip
    of = {key: tasks.result(row.id) for key, row in every(store.db).items()}
    assert of["unwanted"].revoke() is TaskState.CANCELLED
    states = {"good": "SUCCESS", "bad": "FAILURE", "again": "RETRY", "open": "UNKNOWN", "runs": "STARTED", "unwanted": "REVOKED"}
    assert {k: r.state for k, r in of.items()} == {k: r.status for k, r in of.items()} == states
    assert {k for k, r in of.items() if r.ready()} == {"good", "bad", "unwanted"}
    assert {k for k, r in of.items() if r.failed()} == {"bad"}
    assert of["good"].successful() and not of["bad"].successful()
    with pytest.raises(ValueError, match="is not over: it is RUNNING"):
        of["runs"].successful()
    assert isinstance(of["bad"].result, TaskFailed) and "no such account" in str(of["bad"].info) and of["runs"].result is None
    assert (of["bad"].traceback, of["good"].traceback) == ("no such account", None)
    assert (of["good"].name, of["good"].args, of["good"].kwargs, of["good"].queue, of["bad"].retries) == ("work", [], {}, "default", 1)
    assert of["good"].date_done is not None and of["runs"].date_done is None and of["good"].exists()
    with pytest.raises(TaskFailed, match="FAILED"):
        of["bad"].get()
    assert isinstance(of["bad"].get(propagate=False), TaskFailed) and isinstance(of["unwanted"].wait(propagate=False), TaskFailed)
    with pytest.raises(TaskFailed, match="is UNKNOWN"):
        of["open"].get(100, propagate=False)
    with pytest.raises(TaskFailed):
        of["bad"].maybe_throw()
    assert of["runs"].maybe_reraise() is None
    assert str(of["good"]) == of["good"].id == of["good"].task_id and of["good"] == tasks.result(of["good"].id) and of["good"] != of["bad"]


def test_an_id_nobody_knows_is_an_error_and_never_pending(store: Opened, tasks: Tasks) -> None:
    """Nor is one of another namespace known."""
    submit(store.db, new(namespace="other"))
    for unknown in (tasks.result("task-nowhere"), tasks.result(every(store.db)["k"].id)):
        for ask in (unknown.get, unknown.ready, unknown.failed, unknown.revoke, unknown.maybe_throw):
            with pytest.raises(TaskNotFound):
                ask()
        for name in ("state", "status", "result", "info", "traceback", "date_done", "name", "task_state"):
            with pytest.raises(TaskNotFound):
                getattr(unknown, name)
        assert not unknown.exists()


def test_every_name_of_celerys_is_honoured_or_refused_with_its_reason(tasks: Tasks) -> None:
    """Nothing of AsyncResult is missing without a word, and no option of get and revoke is passed over."""
    from celery.result import AsyncResult

    result = tasks.result("task-x")
    public = {n for n in dir(AsyncResult) if not n.startswith("_")}
    assert {n for n in public if n not in dir(TaskResult)} - set(REFUSED) == {"id", "task_id"} - set(dir(TaskResult))
    for name, reason in REFUSED.items():
        with pytest.raises(AttributeError, match=f"TaskResult does not offer {name}: ") as caught:
            getattr(result, name)
        assert str(caught.value).endswith(reason)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        result.nonsense  # noqa: B018
    for option in ("callback", "on_message", "on_interval", "no_ack", "follow_parents", "EXCEPTION_STATES", "PROPAGATE_STATES", "nonsense"):
        with pytest.raises(ConfigurationError, match=f"does not take {option}: "):
            result.get(**{option: None})  # type: ignore[arg-type]
    for given in ({"terminate": True}, {"signal": "SIGKILL"}, {"connection": object()}):
        with pytest.raises(ConfigurationError, match="revoke"):
            result.revoke(**given)


def test_following_a_review_leads_to_the_task_that_took_over(store: Opened, tasks: Tasks) -> None:
    """Without it a task in review is told at once; with it the wait goes on through the decision and the retry."""
    (row,) = taken(store.db, external())
    begin(store.db, row)
    settle(store.db, ending(row, o.AskedForReview("look")))
    receipt = Receipt(row.id, TaskState.RUNNING, "")

    def decides() -> None:
        seen = tasks.get(row.id)
        retry = tasks.review_retry(seen, reason="nothing happened")
        session(store.db, "other")
        (again,) = take(store.db, "other")
        assert again.id == retry.task and begin(store.db, again)
        settle(store.db, ending(again, returned("done")))

    with pytest.raises(TaskFailed, match="UNKNOWN"):
        tasks.wait(receipt, 10)
    timer = soon(decides)
    assert (tasks.wait(receipt, 20, follow=True), tasks.result(receipt).get(20, follow=True)) == ("done", "done")
    timer.join()
    with pytest.raises(TaskFailed, match="FAILED"):
        tasks.wait(receipt)


def test_what_makes_up_for_a_task_in_review_is_submitted_with_the_decision(store: Opened, tasks: Tasks) -> None:
    """One task, however often it is asked for; who follows the result gets the failure and not what the other one returned; another namespace decides nothing."""
    (row,) = taken(store.db, external(business_key="order-7"))
    begin(store.db, row)
    settle(store.db, ending(row, o.AskedForReview("look")))
    seen = tasks.get(row.id)

    @Handlers().task(name="refund", effects="idempotent")
    def refund(number: int) -> None: ...

    with pytest.raises(TaskNotFound):
        tasks.review_compensate(msgspec.structs.replace(seen, namespace="other"), refund, (1,), reason="x")
    with pytest.raises(UnknownHandler):
        tasks.review_compensate(seen, "nobody-knows-it", reason="x")
    before = every(store.db)
    with pytest.raises(ConfigurationError, match="says why"):
        tasks.review_compensate(seen, refund, (1,), reason=" ")
    assert every(store.db) == before
    made = tasks.review_compensate(seen, refund, (1,), reason="the customer was charged twice")
    assert tasks.review_compensate(seen, refund, (1,), reason="the customer was charged twice").task == made.task  # its answer was lost
    old, other = tasks.get(row.id), tasks.get(made.task)
    assert (old.state, old.superseded_by, old.cause) == (TaskState.FAILED, made.task, Cause.REVIEWED)
    assert (other.origin, other.business_key, other.retry_of, other.root) == ("compensation", "order-7", "", made.task)
    with pytest.raises(ReviewConflict):
        tasks.review_compensate(seen, refund, (2,), reason="again")
    with pytest.raises(TaskFailed, match="FAILED"):
        tasks.wait(Receipt(row.id, TaskState.RUNNING, ""), 10, follow=True)


def test_a_key_that_is_taken_leaves_the_review_open(store: Opened, tasks: Tasks) -> None:
    """Somebody has used the key of what would make up for it: nothing is decided, and the refusal says so."""
    (row,) = taken(store.db, external())
    begin(store.db, row)
    settle(store.db, ending(row, o.AskedForReview("look")))

    @Handlers().task(name="refund", effects="idempotent")
    def refund(number: int) -> None: ...

    tasks.submit(refund, 9, key=f"{row.id}/compensation")
    before = every(store.db)
    with pytest.raises(ReviewConflict, match="is known with other content"):
        tasks.review_compensate(tasks.get(row.id), refund, (1,), reason="twice")
    assert every(store.db) == before


def test_following_goes_on_when_the_database_is_away_between_two_looks(
    store: Opened, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old task is read, the one that does it again is not: its failure is not taken for the end."""
    (row,) = taken(store.db, external())
    begin(store.db, row)
    settle(store.db, ending(row, o.AskedForReview("look")))
    again = tasks.review_retry(tasks.get(row.id), reason="nothing happened")
    session(store.db, "other")
    (next_,) = take(store.db, "other")
    begin(store.db, next_)
    settle(store.db, ending(next_, returned("done")))
    look, away = tasks.get, [True]

    def get(task: str) -> Any:
        if task == again.task and away[0]:
            away[0] = False
            raise StoreUnavailable("away")
        return look(task)

    monkeypatch.setattr(tasks, "get", get)
    assert tasks.wait(row.id, 20, follow=True) == "done" and away == [False]
