"""What may come in from outside: backlogs and windows, counted without a lock; what is refused says when to try again; repeats and what tasks submit are never refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import consistent, ending, every, external, new, session, settle, take

from millstream import Handlers, Installation, Queues, QuotaExceeded, Tasks
from millstream.tasks import Item, Refusal
from millstream_schema.durable.quotas import Quota
from millstream_schema.durable.requests import Options
from millstream_schema.durable.states import TaskState
from millstream_schema.store import quotas, tasks

handlers = Handlers()


@handlers.task(name="work", queue="default", effects="idempotent")
def work(number: int = 0) -> int:
    return number


INSTALLATION = Installation(database="sqlite:///unused", transport="unix://", checkpoints="file:///tmp")


@handlers.task(name="slow_work", queue="slow", effects="idempotent")
def slow_work(number: int = 0) -> int:
    return number


@pytest.fixture
def client(store: Opened) -> Iterator[Tasks]:
    with Tasks(INSTALLATION, handlers, database=store.db) as found:
        found._admission._quotas["default"] = (float("inf"), {})  # read again by `limited` alone
        yield found


def limited(store: Opened, client: Tasks, queue: str = "", **quota: object) -> Quota:
    with Queues(INSTALLATION, actor="me", database=store.db) as queues:
        found = queues.set_quota(queue, **quota)  # type: ignore[arg-type]
    client._admission._counted.clear()
    client._admission._quotas.clear()
    client._admission._set("default")
    client._admission._quotas["default"] = (float("inf"), client._admission._quotas["default"][1])
    return found


@pytest.mark.parametrize("queue", ["", "default"], ids=["application", "queue"])
def test_a_full_backlog_refuses_and_lets_in_again_what_there_is_room_for(store: Opened, client: Tasks, queue: str) -> None:
    """Counted are tasks that are not over, held and waiting ones, too; what is refused is not stored."""
    limited(store, client, queue, backlog=3)
    for i in range(3):
        client.submit("work", i, key=f"k{i}", delay=100.0 if i == 2 else 0.0)
    for _ in range(2):
        with pytest.raises(QuotaExceeded, match="3 tasks that are not over") as refused:
            client.submit("work", 3, key="k3")
        assert refused.value.retry_after == 5.0
    assert client.submit("work", 1, key="k1").replayed, "what is accepted stays accepted"
    session(store.db)
    rows = take(store.db)
    with pytest.raises(QuotaExceeded):
        client.submit("work", 3, key="k3")
    settle(store.db, ending(rows[0]))
    client._admission._counted.clear()
    assert not client.submit("work", 3, key="k3").replayed
    assert len(every(store.db)) == 4
    limited(store, client, queue)
    assert not client.submit("work", 4, key="k4").replayed and store.db.read(lambda tx: tx.rows(tx.t.quota.select())) == []


def test_a_quota_is_of_its_own_queue_and_namespace(store: Opened, client: Tasks) -> None:
    """Others come in."""
    limited(store, client, "slow", backlog=1)
    store.db.run(lambda tx: tasks.submit_many(tx, [new("a", queue="slow"), new("b", queue="slow"), new("c", namespace="other")]))
    client.submit("work", 1)
    client.submit("work", 2)
    with Tasks(INSTALLATION, handlers, "other", database=store.db) as theirs:
        theirs.submit("work", 3)
    with pytest.raises(QuotaExceeded, match="queue 'slow'"):
        client.submit_with("work", (4,), options=Options(queue="slow"))


def test_a_closed_door_is_closed_for_all_that_comes_from_outside(store: Opened, client: Tasks) -> None:
    """What is known already is answered; a task's own submissions, retries and reviews come in."""
    client.submit("work", 1, key="known")
    limited(store, client, accepting=False)
    with pytest.raises(QuotaExceeded, match="does not accept"):
        client.submit("work", 2)
    assert client.submit("work", 1, key="known").replayed
    session(store.db)
    (row,) = take(store.db)
    settle(store.db, ending(row, submits=(new("continuation"), external("more"))))
    assert set(every(store.db)) == {"known", "continuation", "more"}
    consistent(store.db)


def test_a_continuation_comes_into_a_queue_that_is_full(store: Opened, client: Tasks) -> None:
    """The queue holds all it may, nobody from outside gets in; the task that runs there ends with as many further ones as it likes, and they count."""
    client.submit("work", 1, key="first")
    limited(store, client, backlog=1)
    with pytest.raises(QuotaExceeded):
        client.submit("work", 2)
    session(store.db)
    (row,) = take(store.db)
    settle(store.db, ending(row, submits=tuple(new(f"more{i}") for i in range(3))))
    assert set(every(store.db)) == {"first", "more0", "more1", "more2"} and every(store.db)["first"].state is TaskState.SUCCEEDED
    client._admission._counted.clear()
    with pytest.raises(QuotaExceeded):
        client.submit("work", 3)
    consistent(store.db)


def test_a_window_counts_what_was_accepted_and_says_when_it_has_room(store: Opened, client: Tasks) -> None:
    """Repeats and refusals do not count; what leaves the window lets the next one in at that moment."""
    limited(store, client, "default", accept="3/s")
    for i in range(3):
        client._admission._counted.clear()
        client.submit("work", i, key=f"k{i}")
        client.submit("work", i, key=f"k{i}")
    client._admission._counted.clear()
    with pytest.raises(QuotaExceeded, match="accepts 3 tasks in 1 s") as refused:
        client.submit("work", 3, key="k3")
    assert 0 < refused.value.retry_after <= 1.0
    threading.Event().wait(refused.value.retry_after + 0.01)
    client._admission._counted.clear()
    assert not client.submit("work", 3, key="k3").replayed


def test_of_many_the_first_by_key_come_in_and_each_refusal_says_when(store: Opened, client: Tasks) -> None:
    """Up to the limit of both quotas; what is wrong is refused for good, what is known is answered."""
    client.submit("work", 9, key="k9")
    limited(store, client, backlog=4)
    limited(store, client, "default", accept="10/h")
    given = [Item(args=(i,), key=f"k{i}") for i in (5, 3, 9, 1, 4)] + [Item(args=("x", "y"), key="bad")]
    answers = client.submit_many("work", given)
    kinds = {i.key: (a.retry_after if isinstance(a, Refusal) else a.replayed) for i, a in zip(given, answers, strict=True)}
    assert kinds == {"k1": False, "k3": False, "k4": False, "k5": 5.0, "k9": True, "bad": 0.0}
    assert set(every(store.db)) == {"k1", "k3", "k4", "k9"}
    assert store.db.read(lambda tx: [r["number"] for r in tx.rows(tx.t.acceptance.select())]) == [3]


def test_acceptances_no_window_counts_are_forgotten(store: Opened, client: Tasks) -> None:
    """By the sweep, a part at a time."""
    limited(store, client, accept="100/m")
    for i in range(5):
        client.submit("work", i)
    a = store.db.tables.acceptance
    store.db.run(lambda tx: tx.update(a, a.c.quota == "default/", at_us=1))
    assert [store.db.run(lambda tx: quotas.forget(tx, 3)) for _ in range(3)] == [3, 2, 0]


def test_what_was_accepted_counts_once_when_the_answer_to_its_commit_was_lost(store: Opened, client: Tasks) -> None:
    """It is executed again as it was."""
    limited(store, client, accept="100/m")
    one = new("k")
    for _ in range(2):
        store.db.run(lambda tx: client._stored(tx, [one]))
    assert store.db.read(lambda tx: [r["number"] for r in tx.rows(tx.t.acceptance.select())]) == [1]


def test_without_a_quota_a_submission_executes_no_statement_more(store: Opened, client: Tasks) -> None:
    """Once a second it is looked whether there is one."""
    client.submit("work", 0)
    plain = statements(store, lambda: store.db.run(lambda tx: tasks.submit(tx, new("a"))))
    assert statements(store, lambda: client.submit("work", 1)) == plain
    client._admission._quotas.clear()
    assert statements(store, lambda: client.submit("work", 2)) > plain


def statements(store: Opened, act: object) -> int:
    import sqlalchemy as sa

    count = [0]

    def note(*_: object) -> None:
        count[0] += 1

    sa.event.listen(store.db.engine, "before_cursor_execute", note)
    try:
        act()  # type: ignore[operator]
    finally:
        sa.event.remove(store.db.engine, "before_cursor_execute", note)
    return count[0]
