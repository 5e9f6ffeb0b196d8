"""Acts on many tasks and retries by hand, on three databases: planned, interrupted anywhere, gone on with, repeated — each task once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import HOUR, consistent, ending, every, new, read, settle, states, submit, taken

from millstream import bulk_acts
from millstream.installation import Installation
from millstream.tasks import Tasks
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.bulk import Act, OperationRow
from millstream_schema.durable.finding import TaskFilter
from millstream_schema.durable.records import Policy
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError, ReviewConflict, TaskNotFound, TokenRefused

T = TaskState
ONCE = Policy(attempts=1)
Client = Callable[..., Tasks]


class Killed(BaseException):
    """The process dies here."""


@dataclasses.dataclass
class DiesAt:
    """Dies before or after the n-th commit."""

    commit: int
    before: bool
    seen: int = 0

    def before_commit(self) -> None:
        self.seen += 1
        if self.before and self.seen == self.commit:
            raise Killed

    def after_commit(self) -> None:
        if not self.before and self.seen == self.commit:
            raise Killed


@pytest.fixture
def client(store: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    store.db.run(lambda tx: tx.insert_or_nothing(tx.t.installation, id=1, uid="installation-1", secret="secret-1"))
    monkeypatch.setattr(bulk_acts, "PART", 3)
    return lambda namespace="default", database=None, wake=None: Tasks(
        Installation.local(tmp_path), None, namespace, actor="anna", database=database or store.db, wake=wake
    )


def failed(store: Opened, count: int, **changes: object) -> list[str]:
    rows = taken(store.db, *[new(f"f{i}", policy=ONCE, **changes) for i in range(count)])
    settle(store.db, *[ending(r, o.Raised("ValueError", "no")) for r in rows])
    return [r.id for r in rows]


def did(operation: OperationRow) -> tuple[int, int, int, int]:
    return operation.expected, operation.seen, operation.done, operation.over


# -- planning


def test_a_dry_run_counts_and_changes_nothing(store: Opened, client: Client) -> None:
    """It reaches only states in which the act can do something; others are refused by name."""
    failed(store, 3)
    submit(store.db, new("ready"), new("later", delay_us=HOUR), new("foreign", namespace="other"))
    before = every(store.db)
    tasks = client()
    assert {act: tasks.plan(act).count for act in Act} == {Act.CANCEL: 2, Act.RETRY: 3, Act.PURGE: 3}
    assert tasks.plan("retry", TaskFilter(error_class="KeyError")).count == 0
    with pytest.raises(ConfigurationError, match="reaches no task in state SUCCEEDED"):
        tasks.plan("retry", TaskFilter(states=(T.SUCCEEDED,)))
    with pytest.raises(ConfigurationError, match="no act 'explode'"):
        tasks.plan("explode")
    assert every(store.db) == before and tasks.operations() == []


def test_only_what_was_there_and_still_matches_is_reached(store: Opened, client: Client) -> None:
    """Neither what came in after the dry run, nor what has changed since, nor another namespace's."""
    tasks = client()
    submit(store.db, *[new(f"k{i}") for i in range(5)], new("foreign", namespace="other"))
    plan = tasks.plan("cancel")
    submit(store.db, new("newer"))
    tasks.cancel(every(store.db)["k2"].id)
    assert did(tasks.carry_out(plan.token, reason="wrong batch")) == (5, 4, 4, 1)
    left = {k for k, s in states(store.db).items() if s is T.READY}
    assert left == {"newer", "foreign"}
    (operation,) = tasks.operations()
    assert (operation.act, operation.actor, operation.reason) == (Act.CANCEL, "anna", "wrong batch")
    assert list(client("other").operations()) == []


def test_a_token_is_of_one_namespace_and_installation(store: Opened, client: Client) -> None:
    """Changed, of elsewhere, a cursor, or a day old: refused, and nothing is done."""
    submit(store.db, *[new(f"k{i}") for i in range(4)])
    tasks = client()
    token = tasks.plan("cancel").token
    with pytest.raises(TokenRefused, match="another namespace"):
        client("other").carry_out(token)
    for text in (token[:-1] + ("A" if token[-1] != "A" else "B"), tasks.find(limit=1).cursor, ""):
        with pytest.raises(TokenRefused):
            tasks.carry_out(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bulk_acts, "TOKEN_US", -1)
        with pytest.raises(TokenRefused, match="a day old"):
            tasks.carry_out(token)
    assert set(states(store.db).values()) == {T.READY}


def test_a_retry_needs_its_reason(store: Opened, client: Client) -> None:
    """It says why it is safe."""
    (task,) = failed(store, 1)
    tasks = client()
    token = tasks.plan("retry").token
    for call in (lambda: tasks.carry_out(token, reason=" "), lambda: tasks.retry(task, reason="")):
        with pytest.raises(ConfigurationError, match="why it is safe"):
            call()
    assert len(every(store.db)) == 1


# -- carrying out


@pytest.mark.parametrize("act", list(Act))
@pytest.mark.parametrize("before", [True, False], ids=["before commits", "after commits"])
def test_an_act_that_dies_at_any_transaction_is_gone_on_with(store: Opened, client: Client, act: Act, before: bool) -> None:
    """By the same token, in another process: every task is acted on once, the count is right, a repeat does nothing more."""
    for commit in range(1, 30):
        store.empty()
        store.db.run(lambda tx: tx.insert_or_nothing(tx.t.installation, id=1, uid="installation-1", secret="secret-1"))
        if act is Act.CANCEL:
            submit(store.db, *[new(f"f{i}") for i in range(7)])
        else:
            failed(store, 7)
        tasks = client()
        token = tasks.plan(act).token
        dying = store.open(faults=DiesAt(commit, before))
        try:
            client(database=dying).carry_out(token, reason="safe")
            died = False
        except Killed:
            died = True
        finally:
            dying.close()
        assert did(tasks.carry_out(token, reason="safe")) == did(tasks.carry_out(token, reason="safe")) == (7, 7, 7, 1)
        rows = every(store.db).values()
        found = Counter(r.state for r in rows)
        if act is Act.CANCEL:
            assert found == {T.CANCELLED: 7}
        elif act is Act.PURGE:
            assert found == {} and store.db.read(lambda tx: tx.rows(tx.t.attempt.select())) == []
        else:
            assert found == {T.FAILED: 7, T.READY: 7}
            assert Counter(r.retry_of for r in rows if r.state is T.READY) == {r.id: 1 for r in rows if r.state is T.FAILED}
        consistent(store.db)
        if not died:
            assert commit > 3
            return
    raise AssertionError("it never came to an end")


def test_two_processes_with_one_token_do_it_once(store: Opened, client: Client) -> None:
    """Each part by whoever is first."""
    failed(store, 10)
    token = client().plan("retry").token
    others = [client(database=store.open()) for _ in range(3)]
    answers = together(*[lambda t=t: t.carry_out(token, reason="safe") for t in others])
    assert [did(a) if isinstance(a, OperationRow) else a for a in answers] == [(10, 10, 10, 1)] * 3
    assert Counter(states(store.db).values()) == {T.FAILED: 10, T.READY: 10}


def test_cancelling_many_frees_their_permits_and_tells_what_runs(store: Opened, client: Client) -> None:
    """What runs keeps running until it hears; what is in review is not reached."""
    running, review = taken(store.db, new("running", permit="p"), new("review"))
    settle(store.db, ending(review, o.AskedForReview("?")))
    submit(store.db, *[new(f"w{i}", permit="p") for i in range(4)])
    tasks = client()
    assert did(tasks.carry_out(tasks.plan("cancel").token)) == (5, 5, 5, 1)
    assert read(store.db, running.id).cancel == 1 and read(store.db, review.id).state is T.UNKNOWN
    assert Counter(states(store.db).values()) == {T.CANCELLED: 4, T.RUNNING: 1, T.UNKNOWN: 1}
    consistent(store.db)


# -- one by hand


def test_a_retry_by_hand_is_one_linked_task_with_the_old_content(store: Opened, client: Client) -> None:
    """Same arguments, root and business key; the old one stays as it was and names it; asked again: the same; who and why is kept."""
    (old,) = failed(store, 1, business_key="b", args="given", permit="p")
    tasks = client()
    receipt = tasks.retry(old, reason="the bank confirmed that nothing was booked")
    again = tasks.retry(old, reason="again")
    assert (again.task, again.replayed) == (receipt.task, True)
    was, row = read(store.db, old), read(store.db, receipt.task)
    assert (row.retry_of, row.root, row.args, row.business_key, row.permit, row.state) == (old, old, "given", "b", "p", T.READY)
    assert (was.state, was.superseded_by) == (T.FAILED, row.id) and row.origin.startswith("retry:operation-") and row.actor == "anna"
    assert (
        [r.id for r in tasks.find(TaskFilter(retry_of=old)).tasks]
        == [row.id]
        == [r.id for r in tasks.find(TaskFilter(origin="retry")).tasks]
    )
    (operation,) = tasks.operations()
    assert (operation.task, operation.reason, operation.actor, did(operation)) == (
        old,
        "the bank confirmed that nothing was booked",
        "anna",
        (1, 1, 1, 1),
    )
    assert operation.id == row.origin.removeprefix("retry:")


def test_a_retry_of_a_retry_keeps_the_root(store: Opened, client: Client) -> None:
    """However long the chain."""
    (first,) = failed(store, 1)
    tasks = client()
    second = tasks.retry(first, reason="r").task
    tasks.cancel(second)
    third = tasks.retry(second, reason="r").task
    assert read(store.db, third).root == first and read(store.db, third).retry_of == second


def test_what_cannot_be_retried_is_refused(store: Opened, client: Client) -> None:
    """What goes on, what succeeded, what is in review, what is not there."""
    done, review = taken(store.db, new("done"), new("review"))
    settle(store.db, ending(done), ending(review, o.AskedForReview("?")))
    submit(store.db, new("ready"), new("foreign", namespace="other"))
    tasks, rows = client(), every(store.db)
    for key, said in (("done", "is SUCCEEDED"), ("review", "decide its review"), ("ready", "is READY")):
        with pytest.raises(ReviewConflict, match=said):
            tasks.retry(rows[key].id, reason="r")
    for task in (rows["foreign"].id, "nobody"):
        with pytest.raises(TaskNotFound):
            tasks.retry(task, reason="r")
    assert tasks.operations() == [] and len(every(store.db)) == 4


def test_whoever_waits_for_work_is_told_of_retries_once_they_are_committed(store: Opened, client: Client) -> None:
    """After each part its queues, and after a retry by hand; not of a cancel."""
    failed(store, 4)
    told: list[tuple[str, int]] = []
    tasks = client(wake=lambda queue: told.append((queue, [*states(store.db).values()].count(T.READY))))
    tasks.carry_out(tasks.plan("retry").token, reason="safe")
    assert told == [("default", 3), ("default", 4)]
    tasks.carry_out(tasks.plan("cancel").token)
    assert len(told) == 2
    (cancelled, *_) = tasks.list(state=T.CANCELLED)
    tasks.retry(cancelled.id, reason="safe")
    assert told[2:] == [("default", 1)]
