"""``millstream tasks`` and ``millstream reviews`` against an installation whose tasks a worker runs: what is shown, what is decided, exit codes."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.support.command_line import CommandLine, plain_environment

from millstream.handlers import Handlers
from millstream.installation import Installation
from millstream.task_worker import TaskWorker
from millstream.tasks import Tasks
from millstream_schema.errors import TaskFailed
from millstream_schema.store import catalogue
from millstream_tasks.durable.context import TaskContext
from millstream_tasks.durable.verbs import NeedsReview

SECONDS = 20
LINE = {
    "id", "namespace", "handler", "key", "queue", "state", "cause", "reason", "starts", "failures", "created_us", "settled_us", "business_key",
    "retry_of", "superseded_by", "origin", "error_class",
}  # fmt: skip
SHOWN = LINE | {"why", "args", "kwargs", "result", "effects", "fence", "session", "attempts", "progress", "notes", "calls"}


class Program(CommandLine):
    """``millstream`` on one installation below a directory, the worker that serves it, and the gate its handler ``hold`` waits at."""

    def __init__(self, directory: Path, tasks: Tasks, begun: threading.Event, gate: threading.Event) -> None:
        super().__init__(directory)
        self.tasks = tasks
        self.begun = begun
        self.gate = gate

    def ended(self, handler: str, *args: Any, key: str = "", business_key: str = "") -> str:
        """A task that has come to its end or into review; its id."""
        task = self.tasks.submit(handler, *args, key=key, business_key=business_key).task
        try:
            self.tasks.wait(task, SECONDS)
        except TaskFailed:
            pass
        return task


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    plain_environment(monkeypatch)
    handlers, begun, gate = Handlers(), threading.Event(), threading.Event()

    @handlers.task(name="add", effects="idempotent")
    def add(a: int, b: int) -> int:
        return a + b

    @handlers.task(name="hold", queue="slow", effects="idempotent")
    def hold() -> str:
        begun.set()
        assert gate.wait(SECONDS)
        return "held"

    @handlers.task(name="refuse", effects="idempotent", attempts=1)
    def refuse(ctx: TaskContext) -> None:
        ctx.progress(3, 4, "rows")
        ctx.note("the last\none", account=7)
        raise ValueError("no such\naccount")

    @handlers.task(name="pay")
    def pay(amount: int) -> None:
        raise NeedsReview(f"did the bank take {amount}?")

    @handlers.task(name="charge", intents_only=True)
    def charge(ctx: TaskContext, amount: int) -> list[Any]:
        def call(_key: str) -> int:
            raise TimeoutError(f"the bank does not answer for {amount}")

        return [ctx.external("charge", call, key="1"), ctx.external("mail", lambda key: "sent")]

    installation = Installation.local(tmp_path)
    with (tmp_path / "worker.log").open("w") as log:
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(log))  # the program's own output is what is looked at
        try:
            with TaskWorker(installation, handlers) as worker:
                try:
                    known = worker.tasks.database
                    while not known.read(lambda tx: catalogue.names(tx, 1)):  # the program submits by what workers have told
                        begun.wait(0.01)
                    yield Program(tmp_path, worker.tasks, begun, gate)
                finally:
                    gate.set()
        finally:
            structlog.reset_defaults()


# -- tasks


def test_the_list_shows_the_newest_tasks_that_match(program: Program) -> None:
    """Each filter by itself and the bound; the state's name in any case; keys are stable."""
    added = program.ended("add", 1, 2, key="sum", business_key="b-1")
    failed = program.ended("refuse")
    program.tasks.submit("hold", key="h")
    assert program.begun.wait(SECONDS)
    everything = program.data("tasks", "list")
    assert {r["handler"] for r in everything} == {"add", "refuse", "hold"} and all(set(r) == LINE for r in everything)
    assert [r["id"] for r in program.data("tasks", "list", "--state", "failed")] == [failed]
    assert [r["id"] for r in program.data("tasks", "list", "--handler", "add")] == [added]
    assert [r["key"] for r in program.data("tasks", "list", "--queue", "slow")] == ["h"]
    (one,) = program.data("tasks", "list", "--business-key", "b-1")
    assert (one["id"], one["key"], one["state"], one["namespace"], one["queue"]) == (added, "sum", "SUCCEEDED", "default", "default")
    assert len(program.data("tasks", "list", "--limit", "1")) == 1
    assert program.data("tasks", "list", "--handler", "nobody") == []
    assert program.data("tasks", "list", "--namespace", "other") == []
    table = program.done("tasks", "list")
    assert added in table and failed in table and "SUCCEEDED" in table


def test_show_tells_all_of_a_task(program: Program) -> None:
    """Arguments, result and attempts; a reason of several lines stands on one."""
    added = program.data("tasks", "show", program.ended("add", 1, 2))
    assert set(added) == SHOWN
    assert (added["args"], added["kwargs"], added["result"], added["state"]) == ("[1, 2]", "{}", "3", "SUCCEEDED")
    failed = program.ended("refuse")
    found = program.data("tasks", "show", failed)
    assert (found["state"], found["result"], len(found["attempts"])) == ("FAILED", None, 1)
    assert "no such account" in found["reason"] and found["attempts"][0]["late"] is False
    text = program.done("tasks", "show", failed)
    assert failed in text and "attempt" in text and "no such account" in text
    assert "attempt 1: 3 of 4 done (rows)" in text and 'attempt 1: the last one {"account":7}' in text
    assert (found["progress"][0]["done"], found["notes"][0]["fields"]) == (3.0, {"account": 7})
    assert program.data("tasks", "of-key", found["handler"], found["key"]) == found


def test_why_is_one_line(program: Program) -> None:
    """For a task that is over, one that runs, one in review and one that is due later."""
    added, review = program.ended("add", 1, 2), program.ended("pay", 7)
    held, later = program.tasks.submit("hold").task, program.tasks.submit("add", 1, 1, delay=3600).task
    assert program.begun.wait(SECONDS)
    assert program.done("tasks", "why", added).endswith(": SUCCEEDED")
    assert "it is in review" in program.done("tasks", "why", review)
    assert program.done("tasks", "why", held).startswith("it runs since ")
    assert program.done("tasks", "why", later).startswith("it is due at ")


def test_cancel_ends_at_once_what_has_not_begun(program: Program) -> None:
    """One that runs is told, and its own end wins; one that is over stays as it ended."""
    later, held = program.tasks.submit("add", 1, 1, delay=3600).task, program.tasks.submit("hold").task
    assert program.begun.wait(SECONDS)
    assert program.done("tasks", "cancel", later) == f"{later} is CANCELLED"
    assert "its handler is told" in program.done("tasks", "cancel", held)
    program.gate.set()
    assert program.tasks.wait(held, SECONDS) == "held"
    assert program.done("tasks", "cancel", held) == f"{held} is SUCCEEDED"


def test_a_state_that_does_not_exist_is_wrong_usage(program: Program) -> None:
    """The text names those that do."""
    code, text = program.refused("tasks", "list", "--state", "sleeping")
    assert code == 2 and "'sleeping'" in text and "SUCCEEDED" in text


@pytest.mark.parametrize(
    "command",
    [
        ("tasks", "show"), ("tasks", "why"), ("tasks", "cancel"), ("reviews", "done", "--reason", "r"), ("reviews", "fail", "--reason", "r"),
        ("reviews", "retry", "--reason", "r"),
    ],
    ids=lambda c: " ".join(c[:2]),
)  # fmt: skip
def test_a_task_that_is_not_there_is_not_found(program: Program, command: tuple[str, ...]) -> None:
    """Exit code 3, also for one of another namespace."""
    added = program.ended("add", 1, 2)
    assert program.refused(*command, "nobody") == (3, "millstream: there is no task 'nobody' in namespace 'default'")
    assert program.refused(*command, added, "--namespace", "other")[0] == 3


# -- reviews


def test_a_review_is_listed_until_it_is_decided(program: Program) -> None:
    """With what was asked; a list of reviews shows nothing else."""
    program.ended("add", 1, 2)
    review = program.ended("pay", 7)
    (found,) = program.data("reviews", "list")
    assert set(found) == LINE | {"rev"}
    assert (found["id"], found["state"], found["reason"]) == (review, "UNKNOWN", "did the bank take 7?")
    assert review in program.done("reviews", "list")
    program.done("reviews", "fail", review, "--reason", "the bank says no")
    assert program.data("reviews", "list") == []


def test_done_gives_the_task_the_result_that_was_found_out(program: Program) -> None:
    """Whoever waits gets it; null if none is given; the reason and who decided are kept."""
    review, plain = program.ended("pay", 7), program.ended("pay", 8)
    assert program.done("reviews", "done", review, "--reason", "seen in the ledger", "--result", '{"entry": [1, null]}') == (
        f"{review} is SUCCEEDED by review"
    )
    assert program.tasks.wait(review, SECONDS) == {"entry": [1, None]}
    assert "seen in the ledger" in json.dumps(program.data("tasks", "show", review))
    program.done("reviews", "done", plain, "--reason", "seen")
    assert program.tasks.wait(plain, SECONDS) is None


def test_fail_ends_the_task(program: Program) -> None:
    """As FAILED, with the reason."""
    review = program.ended("pay", 7)
    assert program.done("reviews", "fail", review, "--reason", "the bank says no") == f"{review} is FAILED by review"
    found = program.data("tasks", "show", review)
    assert found["state"] == "FAILED" and "the bank says no" in json.dumps(found)


def test_retry_hands_over_to_a_new_task(program: Program) -> None:
    """Linked in both directions; it has the arguments of the first and goes into review of its own accord."""
    review = program.ended("pay", 7)
    said = program.done("reviews", "retry", review, "--reason", "the bank never saw it")
    new = said.removeprefix(f"{review} is taken over by ")
    with pytest.raises(TaskFailed):
        program.tasks.wait(new, SECONDS)
    old, found = program.data("tasks", "show", review), program.data("tasks", "show", new)
    assert (old["state"], old["superseded_by"]) == ("FAILED", new)
    assert (found["state"], found["retry_of"], found["args"], found["handler"]) == ("UNKNOWN", review, "[7]", "pay")


def test_compensate_submits_what_makes_up_for_it(program: Program) -> None:
    """With arguments as JSON; the first has failed and names it. Arguments that are no JSON, or do not fit, decide nothing."""
    review = program.ended("pay", 7, business_key="order-7")
    for args, code in (("{", 2), ('{"a": 1}', 2), ("[1]", 4)):
        assert program.refused("reviews", "compensate", review, "add", "--args", args, "--reason", "r")[0] == code
    assert [r["id"] for r in program.data("reviews", "list")] == [review]
    said = program.done("reviews", "compensate", review, "add", "--args", "[3]", "--kwargs", '{"b": 4}', "--reason", "paid twice")
    new = said.removeprefix(f"{review} is made up for by ")
    assert program.tasks.wait(new, SECONDS) == 7
    old, found = program.data("tasks", "show", review), program.data("tasks", "show", new)
    assert (old["state"], old["superseded_by"]) == ("FAILED", new)
    assert (found["origin"], found["business_key"], found["retry_of"]) == ("compensation", "order-7", "")


def test_submit_makes_one_task_of_one_key(program: Program) -> None:
    """Its arguments are checked against what the handler takes; nothing is submitted that would not run."""
    first = program.data("tasks", "submit", "add", "--args", "[1, 2]", "--key", "k", "--business-key", "order-8")
    assert program.tasks.wait(first["id"], SECONDS) == 3
    again = program.data("tasks", "submit", "add", "--args", "[1, 2]", "--key", "k", "--business-key", "order-8")
    assert again == {"id": first["id"], "state": "SUCCEEDED", "replayed": True}
    for code, *wrong in (
        (4, "add", "--args", '["x", 2]'),
        (2, "add", "--kwargs", "[]"),
        (3, "nobody"),
        (4, "add", "--args", "[1, 2]", "--delay", "nan"),
    ):
        assert program.refused("tasks", "submit", *wrong)[0] == code
    assert len(program.data("tasks", "list")) == 1


def test_a_call_whose_outcome_nobody_knows_is_shown_and_told(program: Program) -> None:
    """As evidence of the review, and in the line that says why; who retries tells what was called, and the new task goes on from there."""
    review = program.ended("charge", 7)
    found = program.data("reviews", "show", review)
    (call,) = found["calls"]
    assert (found["cause"], call["name"], call["key"], call["state"], call["result"]) == ("intent", "charge", "1", "OPEN", None)
    text = program.done("tasks", "show", review)
    assert "call charge/1: OPEN" in text and "TimeoutError: the bank does not answer for 7" in text and call["idempotency_key"] in text
    assert "not known is whether these were called: charge/1" in program.done("tasks", "why", review)
    retry = ("reviews", "retry", review, "--reason", "seen in the ledger", "--called")
    assert program.refused(*retry, "{broken")[0] == 2 and program.refused(*retry, '{"name": "charge", "keys": ""}')[0] == 2
    assert program.refused(*retry, '{"name": "charge"}')[0] == 4, "it has a key"
    said = program.done(*retry, '{"name": "charge", "key": "1", "result": 5}')
    new = said.removeprefix(f"{review} is taken over by ")
    assert program.tasks.wait(new, SECONDS) == [5, "sent"]
    assert "call charge/1: DONE with 5 by review: " in program.done("tasks", "show", new)


@pytest.mark.parametrize("verb", ["done", "fail", "retry"])
def test_what_is_not_in_review_is_not_decided(program: Program, verb: str) -> None:
    """Exit code 4, for a task that ran well and for a second decision; the first stands."""
    added, review = program.ended("add", 1, 2), program.ended("pay", 7)
    assert program.refused("reviews", verb, added, "--reason", "r")[0] == 4
    program.done("reviews", "fail", review, "--reason", "first")
    assert program.refused("reviews", verb, review, "--reason", "second")[0] == 4
    found = program.data("tasks", "show", review)
    assert found["state"] == "FAILED" and "second" not in json.dumps(found) and found["superseded_by"] == ""


def test_a_decision_without_reason_or_with_a_result_that_is_no_json_is_wrong_usage(program: Program) -> None:
    """Exit code 2; the review stays open."""
    review = program.ended("pay", 7)
    code, text = program.refused("reviews", "done", review, "--reason", "r", "--result", "{broken")
    assert code == 2 and "--result is no JSON" in text
    assert program.refused("reviews", "done", review, "--reason", " ")[0] == 2
    assert program("reviews", "fail", review)[0] == 2
    assert [r["id"] for r in program.data("reviews", "list")] == [review]


def test_marker_tables_are_made_in_the_databases_that_handlers_name(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them or those that are named, again without harm; a name that is not there is told."""
    home = program.directory
    (home / "proj_markers.py").write_text(
        "from millstream import Handlers\n"
        f"handlers = Handlers(databases={{'orders': 'sqlite:///{home / 'orders.db'}', 'billing': lambda: 'sqlite:///{home / 'billing.db'}'}})\n"
        "plain = Handlers()\n"
    )
    monkeypatch.syspath_prepend(str(home))
    for _ in range(2):
        said = program.done("markers", "init", "--handlers", "proj_markers:handlers")
        assert "orders has the marker table millstream_marker" in said and "billing has" in said
    assert "billing" not in program.done("markers", "init", "--handlers", "proj_markers:handlers", "orders")
    for name in ("orders", "billing"):
        with sqlite3.connect(home / f"{name}.db") as connection:
            assert connection.execute("SELECT count(*) FROM millstream_marker").fetchone() == (0,)
    code, said = program.refused("markers", "init", "--handlers", "proj_markers:handlers", "nowhere")
    assert code == 2 and "billing, orders" in said
    assert "none" in program.refused("markers", "init", "--handlers", "proj_markers:plain")[1]
