"""``millstream tasks find|list|retry|cancel|purge|operations``, ``why`` and ``retention``: what is shown, what is asked for, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.command_line import CommandLine, plain_environment
from typer.testing import CliRunner

from millstream.cli import main
from millstream.handlers import Handlers
from millstream.installation import Installation
from millstream.tasks import Tasks
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.requests import Options
from millstream_schema.ports import SystemClock
from millstream_schema.store import claims, registry, settling
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.settling import Settlement


class Program(CommandLine):
    """``millstream`` on an installation with tasks in many states, and no worker."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        installation = Installation.local(directory)
        self.database = Database(installation.database, SystemClock(), prefix=installation.table_prefix)
        create_schema(self.database)
        handlers = Handlers()

        @handlers.task(name="pay", effects="idempotent", attempts=1)
        def pay(amount: int) -> None: ...

        self.tasks = Tasks(installation, handlers, database=self.database)
        self.ids = {f"k{i}": self.tasks.submit("pay", i, key=f"k{i}", business_key="b" if i < 2 else "").task for i in range(6)}
        self.database.run(self._ended)

    def _ended(self, tx: Transaction) -> None:
        registry.register_node(tx, "s", "worker-1", 0, 60_000_000, "{}")
        claimed = claims.claim(tx, "s", "c", "t", {"default/default": 4}, ["pay"], 4, again=False)
        assert claimed is not None
        ends: list[o.AnyOutcome] = [o.Raised("ValueError", "no"), o.Raised("KeyError", "no"), o.Succeeded("[1]")]
        settling.settle(
            tx, [Settlement(task=r.id, fence=r.fence, token=r.token, outcome=e) for r, e in zip(claimed.tasks[:3], ends, strict=True)]
        )

    def found(self, *arguments: str) -> list[str]:
        return [t["key"] for t in self.data("tasks", "find", *arguments)["tasks"]]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    plain_environment(monkeypatch)
    return Program(tmp_path)


def test_every_filter_is_an_option(program: Program) -> None:
    """Alone and together; ages and instants."""
    assert program.found() == ["k5", "k4", "k3", "k2", "k1", "k0"]
    assert program.found("--state", "failed", "--state", "succeeded") == ["k2", "k1", "k0"]
    assert program.found("--error-class", "KeyError") == ["k1"]
    assert program.found("--business-key", "b", "--created-from", "1h") == ["k1", "k0"]
    assert program.found("--handler", "pay", "--queue", "default", "--origin", "direct", "--settled-from", "2020-01-01T00:00:00+00:00") == [
        "k2",
        "k1",
        "k0",
    ]
    assert program.found("--created-until", "1h") == program.found("--settled-until", "1h") == program.found("--retry-of", "x") == []
    code, said = program.refused("tasks", "find", "--created-from", "2020-01-01")
    assert code == 2 and "has no offset" in said
    assert program.refused("tasks", "find", "--settled-until", "yesterday")[0] == 2
    assert program.refused("tasks", "list", "--state", "LOST")[0] == 2


def test_a_cursor_gives_the_next_page_of_the_same_question(program: Program) -> None:
    """In the text and in JSON; another question is refused with 4."""
    page = program.data("tasks", "find", "--limit", "4")
    assert [t["key"] for t in page["tasks"]] == ["k5", "k4", "k3", "k2"]
    assert page["cursor"] and f"--cursor {page['cursor']}" in program.done("tasks", "list", "--limit", "4")
    rest = program.data("tasks", "find", "--limit", "4", "--cursor", page["cursor"])
    assert ([t["key"] for t in rest["tasks"]], rest["cursor"]) == (["k1", "k0"], "")
    code, said = program.refused("tasks", "find", "--handler", "pay", "--cursor", page["cursor"])
    assert code == 4 and "other filters" in said


def test_why_is_a_command_of_its_own(program: Program) -> None:
    """Without a worker it says so."""
    assert program.done("why", program.ids["k5"]) == program.done("tasks", "why", program.ids["k5"])
    assert "no live worker serves queue" not in program.done("why", program.ids["k3"])
    assert program.refused("why", "nobody")[0] == 3


def test_one_task_is_done_again(program: Program) -> None:
    """With a reason alone; a repeat names the same."""
    task = program.ids["k0"]
    assert program.refused("tasks", "retry", task)[0] == 2
    first = program.data("tasks", "retry", task, "--reason", "nothing was booked")
    assert first["retry_of"] == task and not first["replayed"]
    assert first["task"] in program.done("tasks", "retry", task, "--reason", "again")
    assert program.refused("tasks", "retry", program.ids["k2"], "--reason", "r")[0] == 4
    assert "nothing was booked" in program.done("tasks", "operations")
    assert program.found("--retry-of", task) == [f"{task}/retry"]


def test_many_are_acted_on_by_a_dry_runs_token(program: Program) -> None:
    """The dry run changes nothing; the token does what was counted, once; it is for its own act."""
    plan = program.data("tasks", "retry", "--dry-run", "--state", "FAILED")
    assert plan["count"] == 2 and len(program.found()) == 6
    assert "would reach 2 tasks" in program.done("tasks", "retry", "--dry-run")
    assert program.refused("tasks", "cancel", "--token", plan["token"])[0] == 4
    assert program.refused("tasks", "retry", "--token", plan["token"])[0] == 2
    operation = program.data("tasks", "retry", "--token", plan["token"], "--reason", "the bank was down")
    assert (operation["expected"], operation["done"], operation["over"]) == (2, 2, True)
    assert (
        "2 of 2" in program.done("tasks", "retry", "--token", plan["token"], "--reason", "the bank was down") and len(program.found()) == 8
    )
    assert (
        program.data("tasks", "cancel", "--token", program.data("tasks", "cancel", "--dry-run", "--origin", "retry")["token"])["done"] == 2
    )
    (last, *_) = program.data("tasks", "operations")
    assert last["act"] == "cancel" and last["filter"]["origin"] == "retry" and last["actor"].startswith("cli:")


@pytest.mark.parametrize(
    "arguments",
    [
        ("cancel",), ("purge",), ("retry", "--reason", "r"), ("cancel", "--state", "READY"), ("cancel", "id", "--dry-run"), ("cancel", "id", "--state", "READY"),
        ("purge", "--dry-run", "--token", "x"), ("purge", "--dry-run", "--older-than", "soon"), ("retry", "--dry-run", "--state", "RUNNING"),
        ("purge", "--dry-run", "--older-than", "1d", "--settled-until", "2d"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_half_said_does_nothing(program: Program, arguments: tuple[str, ...]) -> None:
    """Exit 2 and the way to say it."""
    assert program.refused("tasks", *arguments)[0] == 2
    assert program.data("tasks", "operations") == [] and len(program.found()) == 6


def test_purging_by_age(program: Program) -> None:
    """Only settled tasks, only old ones."""
    assert program.data("tasks", "purge", "--older-than", "30d", "--dry-run")["count"] == 0
    plan = program.data("tasks", "purge", "--older-than", "0s", "--dry-run", "--state", "SUCCEEDED")
    assert plan["count"] == 1
    assert program.data("tasks", "purge", "--token", plan["token"])["done"] == 1
    assert program.found() == ["k5", "k4", "k3", "k1", "k0"]


def test_retention_is_set_for_all_a_queue_or_a_handler(program: Program) -> None:
    """And dropped again."""
    assert "30 days" in program.done("retention", "list")
    program.done("retention", "set", "7d")
    program.done("retention", "set", "6h", "--queue", "fast", "--everywhere")
    program.done("retention", "set", "forever", "--handler", "pay")
    rules = {(r["namespace"], r["scope"], r["name"]): r["keep_us"] for r in program.data("retention", "list")}
    assert rules == {("default", "", ""): 7 * 86_400_000_000, ("", "queue", "fast"): 6 * 3_600_000_000, ("default", "handler", "pay"): 0}
    assert "handler pay for ever" in program.done("retention", "list")
    program.done("retention", "drop", "--handler", "pay")
    assert "no such setting" in program.done("retention", "drop", "--handler", "pay")
    for wrong in (("set", "soon"), ("set", "5s"), ("set", "7d", "--queue", "a", "--handler", "b"), ("set", "7d", "--queue", "a b")):
        assert program.refused("retention", *wrong)[0] == 2


def test_late_and_conflicting_evidence_is_shown(program: Program) -> None:
    """What an attempt reports after its task has ended otherwise."""
    task = program.ids["k0"]
    row = program.tasks.get(task)
    late: list[o.AnyOutcome] = [o.Succeeded("[2]"), o.GaveUp("other words")]
    program.database.run(lambda tx: settling.settle(tx, [Settlement(task=task, fence=row.fence, token="other", outcome=e) for e in late]))
    shown = program.data("tasks", "show", task)["attempts"]
    assert {a["outcome"]: (a["late"], a["conflicts"]) for a in shown} == {
        "Raised": (False, False),
        "Succeeded": (True, True),
        "GaveUp": (True, False),
    }
    assert "Succeeded (late, conflicts with the end that counts)" in program.done("tasks", "show", task)


def test_changed_parameters_are_found_by_the_business_key(program: Program) -> None:
    """A new task with the same business key; the old one keeps its input and is no retry's."""
    task = program.tasks.submit_with("pay", (99,), key="k0-corrected", options=Options(business_key="b")).task
    assert program.found("--business-key", "b") == ["k0-corrected", "k1", "k0"]
    shown = {t: program.data("tasks", "show", t) for t in (task, program.ids["k0"])}
    assert shown[task]["args"] == "[99]" and shown[program.ids["k0"]]["args"] == "[0]" and not shown[task]["retry_of"]


def test_doctor_says_what_is_wrong_and_exits_with_1(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks wait and no worker serves them; with --celery the application's settings, too, also without a database."""
    code, out, _ = program("doctor", "--json")
    found = {f["about"]: f for f in json.loads(out)}
    assert code == 1 and found["queues without workers"]["gravity"] == "wrong" and found["schema"]["gravity"] == "fine"
    code, out, _ = program("doctor")
    assert code == 1 and "start workers that serve them" in " ".join(out.split())
    text = "from celery import Celery\napp = Celery('t', broker='redis://nobody', set_as_current=False)\napp.conf.accept_content = ['pickle']\n"
    (program.directory / "trapped_app.py").write_text(text)
    monkeypatch.syspath_prepend(str(program.directory))
    result = CliRunner().invoke(main, ["doctor", "--celery", "trapped_app:app", "--json"])
    assert result.exit_code == 1 and {f["about"] for f in json.loads(result.stdout)} >= {"pickle"} and "schema" not in result.stdout
    assert program.refused("doctor", "--celery", "nowhere:app")[0] == 2


def test_doctor_names_a_schema_that_is_not_there(tmp_path: Path) -> None:
    """And nothing else."""
    (tmp_path / "millstream.db").touch()
    result = CliRunner().invoke(main, ["doctor", "--json", "--local", str(tmp_path)])
    (found,) = json.loads(result.stdout)
    assert (result.exit_code, found["about"], found["cure"]) == (1, "schema", "millstream up, or upgrade Millstream")
