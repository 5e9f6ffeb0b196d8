"""The command line as people and programs use it: output, exit codes, and one clear text for an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from millstream.cli import main
from millstream.client import Jobs
from millstream.dev import DevCluster
from millstream.embedded import EmbeddedCluster
from millstream.installation import Installation
from millstream.program import EPILOG
from millstream_schema.errors import SchemaMismatch
from millstream_schema.ports import SystemClock
from millstream_schema.states import JobState
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema
from millstream_tasks.subtask_main import load_registry

MODULE = "cli_pipelines"
SOURCE = """
from millstream import CollectionSource, FileSink, GeneratorSource, Pipelines

pipelines = Pipelines()


@pipelines.define("wordcount")
def wordcount(job, config):
    words = job.source(CollectionSource(["to", "be", "or", "not", "to", "be"]), uid="words")
    words.key_by(str).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(FileSink(config["out"]), uid="out")


@pipelines.define("endless")
def endless(job, config):
    numbers = job.source(GeneratorSource(lambda split, at, limit: list(range(at, at + min(limit, 5))), name="numbers", rate=500, bounded=False), uid="numbers")
    numbers.map(int, uid="same").sink_to(FileSink(config["out"]), uid="out")


@pipelines.define("failing")
def failing(job, config):
    job.source(CollectionSource([1, 0]), uid="numbers").map(lambda n: 1 // n, uid="inverse").sink_to(FileSink(config["out"]), uid="out")
"""
ONE_TRY = ("--setting", "restart.failures=0", "--setting", "epoch_interval_ms=50")


class Program:
    """``millstream`` in this process, on one installation below a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.out = directory / "out"
        self.config = json.dumps({"out": str(self.out)})

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        result = CliRunner().invoke(main, list(arguments))
        assert "Traceback" not in result.stderr or "--debug" in arguments
        return result.exit_code, result.stdout, result.stderr

    def local(self, *arguments: str) -> tuple[int, str, str]:
        return self(*arguments, "--local", str(self.directory))

    def submit(self, pipeline: str, *arguments: str) -> tuple[int, str, str]:
        return self.local("jobs", "submit", pipeline, "--pipelines", f"{MODULE}:pipelines", "--config", self.config, *arguments)

    def data(self, *arguments: str) -> Any:
        """The JSON document a command that must succeed gives."""
        code, out, err = self.local(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """The program in a directory with a module of pipelines, its schema not made yet."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [n for n in os.environ if n.startswith("MILLSTREAM_") and "TEST" not in n]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    yield Program(tmp_path)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def ready(program: Program) -> Program:
    """The same with its schema."""
    assert program.local("up")[0] == 0
    return program


@pytest.fixture
def cluster(ready: Program) -> Iterator[Program]:
    """The same with nodes that run what is submitted."""
    sys.path.insert(0, str(ready.directory))
    pipelines: Any = type("Registered", (), {"registry": load_registry(f"{MODULE}:pipelines")})()
    with (ready.directory / "cluster.log").open("w") as log:
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(log))  # the program's own output is what is looked at
        try:
            with EmbeddedCluster(pipelines, directory=ready.directory):
                yield ready
        finally:
            structlog.reset_defaults()


def lines(directory: Path) -> list[Any]:
    return [json.loads(line) for part in sorted(directory.glob("part-*")) for line in part.read_text().splitlines()]


# -- help


def test_help_documents_every_exit_code() -> None:
    """A program that calls ``millstream`` learns from ``--help`` what an exit code means."""
    out = CliRunner().invoke(main, ["--help"]).stdout
    assert [f"{code} " in EPILOG for code in range(6)] == [True] * 6
    for command in ("up", "node", "dev", "jobs", "Exit codes", "not found", "conflict", "cannot be reached"):
        assert command in out


@pytest.mark.parametrize(
    "command", ["submit", "list", "status", "epochs", "cancel", "drain", "suspend", "resume", "commit", "savepoint", "savepoints"]
)
def test_every_operation_on_jobs_is_a_command_with_json(command: str) -> None:
    """What people can do with a job, programs can: each command has ``--json``."""
    result = CliRunner().invoke(main, ["jobs", command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_version_is_shown() -> None:
    """``--version`` names the installed version and ends."""
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.stdout.strip()[:1].isdigit()) == (0, True)


# -- running jobs


def test_a_job_is_submitted_waited_for_and_looked_at(cluster: Program) -> None:
    """``submit --wait`` exits 0 when the job has finished; list, status and epochs show it, from epoch to offsets and committables."""
    code, out, err = cluster.submit("wordcount", "--wait", "--timeout", "60")
    assert code == 0, err
    assert "wordcount is FINISHED" in out
    assert dict(lines(cluster.out)) == {"to": 2, "be": 2, "or": 1, "not": 1}
    status = cluster.data("jobs", "status", "wordcount")
    assert (status["state"], status["guarantee"], status["newest_committed"]) == (
        "FINISHED",
        "STRICT_EXACTLY_ONCE",
        status["newest_durable"],
    )
    assert cluster.data("jobs", "list") == []
    (job,) = cluster.data("jobs", "list", "--all")
    assert (job["name"], job["state"], job["pipeline"]) == ("wordcount", "FINISHED", "wordcount")
    newest = cluster.data("jobs", "epochs", "wordcount")[0]
    epoch = cluster.data("jobs", "epochs", "wordcount", str(newest["epoch"]))
    assert [(o["operator"], o["cursor"], o["finished"]) for o in epoch["offsets"]] == [("words", 6, True)]
    for command in (("list", "--all"), ("status", "wordcount"), ("epochs", "wordcount"), ("epochs", "wordcount", str(newest["epoch"]))):
        code, out, err = cluster.local("jobs", *command)
        assert (code, err) == (0, "")
        assert out.strip()


def test_a_failed_job_exits_one_with_its_cause(cluster: Program) -> None:
    """``submit --wait`` of a job that fails exits 1 and names operator and error."""
    code, _, err = cluster.submit("failing", "--wait", "--timeout", "60", *ONE_TRY)
    assert code == 1
    assert "failing" in err and "inverse" in err and "ZeroDivisionError" in err


def test_a_job_is_suspended_with_a_savepoint_resumed_and_drained(cluster: Program) -> None:
    """Savepoint, suspend, resume and drain through the command line; the output has no gap and no repeat."""
    cluster.submit("endless", "--name", "numbers", "--setting", "epoch_interval_ms=50")
    with Jobs(Installation.local(cluster.directory)) as jobs:
        jobs.wait("numbers", (JobState.RUNNING,), timeout=30)
    taken = cluster.data("jobs", "savepoint", "numbers", "--id", "first", "--wait", "--timeout", "30")
    assert (taken["id"], taken["state"]) == ("first", "COMPLETE")
    suspended = cluster.data("jobs", "suspend", "numbers", "--wait", "--timeout", "30")
    assert (suspended["state"], suspended["savepoint"].startswith("savepoint-")) == ("STOPPED", True)
    assert [s["id"] for s in cluster.data("jobs", "savepoints", "numbers")] == ["first", suspended["savepoint"]]
    code, out, err = cluster.local("jobs", "resume", "numbers", "--pipelines", MODULE)
    assert (code, "goes on" in out, err) == (0, True, "")
    with Jobs(Installation.local(cluster.directory)) as jobs:
        jobs.wait("numbers", (JobState.RUNNING,), timeout=30)
    drained = cluster.data("jobs", "drain", "numbers", "--wait", "--timeout", "30")
    assert (drained["state"], drained["pending_commits"]) == ("FINISHED", [])
    written = lines(cluster.out)
    assert written == list(range(len(written)))


def test_a_savepoint_starts_another_job(cluster: Program) -> None:
    """``submit --savepoint`` begins where the savepoint was taken."""
    cluster.submit("endless", "--name", "one", "--setting", "epoch_interval_ms=50")
    with Jobs(Installation.local(cluster.directory)) as jobs:
        jobs.wait("one", (JobState.RUNNING,), timeout=30)
    chosen = cluster.data("jobs", "suspend", "one", "--savepoint", "handover", "--wait", "--timeout", "30")["savepoint"]
    code, _, err = cluster.submit("endless", "--name", "two", "--savepoint", chosen)
    assert (code, err) == (0, "")
    with Jobs(Installation.local(cluster.directory)) as jobs:
        jobs.wait("two", (JobState.RUNNING,), timeout=30)
    assert cluster.local("jobs", "cancel", "two", "--wait", "--timeout", "30")[0] == 0


# -- operations on rows, nobody running


def test_submitting_changes_rows_as_told(ready: Program) -> None:
    """Name, parallelism, settings and overrides reach the job's row."""
    code, _, err = ready.submit(
        "wordcount", "--name", "mine", "--setting", "retained=7", "--setting", "restart.kind=fixed", "--override", "count.parallelism=3", "--override", "out.parallelism=3",
        "--override", "count.capacity=2", "--namespace", "team",
    )  # fmt: skip
    assert code == 0, err
    with Jobs(Installation.local(ready.directory), namespace="team") as jobs:
        row = jobs.find("mine")
    assert (row.namespace, json.loads(row.settings)["retained"], json.loads(row.settings)["restart"]["kind"]) == ("team", 7, "fixed")
    plan = json.loads(row.plan)
    assert {v["id"]: v["parallelism"] for v in plan["vertices"]}["count"] == 3
    assert [e["spec"]["config"]["capacity"] for e in plan["edges"] if e["target"] == "count"] == [2]


def test_config_comes_from_a_file_too(ready: Program) -> None:
    """``--config @file`` reads a JSON object."""
    (ready.directory / "config.json").write_text(ready.config)
    code, _, err = ready.local("jobs", "submit", "wordcount", "--pipelines", MODULE, "--config", "@config.json")
    assert (code, err) == (0, "")


def test_pipelines_come_from_the_environment_too(ready: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """``MILLSTREAM_PIPELINES`` stands for ``--pipelines``."""
    monkeypatch.setenv("MILLSTREAM_PIPELINES", f"{MODULE}:pipelines")
    assert ready.local("jobs", "submit", "wordcount", "--config", ready.config)[0] == 0


def test_the_installation_comes_from_the_environment_and_options_override_it(
    ready: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``MILLSTREAM_DATABASE`` is enough for commands on rows; ``--database`` goes before it, wherever it stands."""
    ready.submit("wordcount")
    monkeypatch.setenv("MILLSTREAM_DATABASE", f"sqlite:///{ready.directory}/millstream.db")
    code, out, _ = ready("jobs", "list", "--json")
    assert (code, len(json.loads(out))) == (0, 1)
    other = f"sqlite:///{tmp_path}/other.db"
    assert ready("up", "--database", other)[0] == 0
    for line in (("--database", other, "jobs", "list", "--json"), ("jobs", "list", "--json", f"--database={other}")):
        code, out, _ = ready(*line)
        assert (code, json.loads(out)) == (0, [])


def test_two_prefixes_in_one_database_do_not_meet(ready: Program) -> None:
    """``--prefix`` names another installation in the same database."""
    ready.submit("wordcount")
    assert ready.local("up", "--prefix", "other")[0] == 0
    code, out, _ = ready.local("jobs", "list", "--json", "--prefix", "other")
    assert (code, json.loads(out)) == (0, [])


def test_a_repeated_operation_is_harmless(ready: Program) -> None:
    """Asked twice, a job is suspended once, under the first savepoint's id."""
    ready.submit("wordcount")
    first = ready.data("jobs", "suspend", "wordcount")["savepoint"]
    assert ready.data("jobs", "suspend", "wordcount")["savepoint"] == first
    assert ready.data("jobs", "status", "wordcount")["desired"] == "SUSPEND"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("jobs", "status", "nobody"), 3, ("nobody", "millstream jobs list")),
        (("jobs", "epochs", "wordcount", "9"), 3, ("epoch 9", "none yet")),
        (("jobs", "submit", "nothing", "--pipelines", MODULE), 3, ("nothing", "wordcount", "import the module")),
        (("jobs", "submit", "wordcount", "--pipelines", MODULE, "--config", '{"out": "o"}'), 4, ("live already", "another name")),
        (("jobs", "commit", "wordcount"), 4, ("PENDING",)),
        (("jobs", "savepoint", "wordcount", "--id", "../x"), 2, ("../x", "must match")),
        (("jobs", "submit", "wordcount"), 2, ("--pipelines module:attribute", "MILLSTREAM_PIPELINES")),
        (("jobs", "submit", "wordcount", "--pipelines", "no_such_module"), 2, ("no_such_module", "module:attribute")),
        (("jobs", "submit", "wordcount", "--pipelines", f"{MODULE}:wordcount"), 2, ("not a Pipelines object",)),
        (("jobs", "submit"), 2, ()),
        (("jobs", "nonsense"), 2, ("nonsense",)),
        (("node", "--slots", "0"), 2, ("--slots",)),
        (("dev", MODULE, "--nodes", "0"), 2, ("--nodes",)),
        (("jobs", "submit", "wordcount", "--parallelism", "0"), 2, ("--parallelism",)),
    ],
)
def test_an_error_is_told_with_its_exit_code(ready: Program, arguments: tuple[str, ...], code: int, told: tuple[str, ...]) -> None:
    """Each kind of error has its documented exit code, says what is wrong on stderr, and shows nothing on stdout."""
    ready.submit("wordcount")
    found, out, err = ready.local(*arguments)
    assert (found, out) == (code, ""), err
    assert [t for t in told if t not in " ".join(err.split())] == []


def test_a_module_that_cannot_be_imported_is_told_in_one_line(ready: Program) -> None:
    """The user's own error and its line are named; how it came there is shown by ``--debug`` only."""
    (ready.directory / "broken_pipelines.py").write_text("pipelines = undefined_name\n")
    code, _, err = ready.local("jobs", "submit", "wordcount", "--pipelines", "broken_pipelines")
    assert (code, err.count("\n")) == (2, 1)
    assert "broken_pipelines" in err and "undefined_name" in err and "broken_pipelines.py, line 1" in err
    assert "Traceback" in ready.local("jobs", "submit", "wordcount", "--pipelines", "broken_pipelines", "--debug")[2]


def test_without_a_schema_the_next_step_is_named(program: Program) -> None:
    """Looking at a database that is not there says ``millstream up`` and creates nothing."""
    code, _, err = program.local("jobs", "list")
    assert (code, "millstream up" in err) == (4, True)
    assert not (program.directory / "millstream.db").exists()


def test_without_an_installation_the_variables_are_named(program: Program) -> None:
    """Nothing configured: the message names the variable to set."""
    code, _, err = program("jobs", "list")
    assert (code, "MILLSTREAM_DATABASE" in err, "MILLSTREAM_TRANSPORT" in err) == (2, True, False)
    code, _, err = program("node", "--pipelines", MODULE)
    assert (code, "MILLSTREAM_TRANSPORT" in err, "MILLSTREAM_CHECKPOINTS" in err) == (2, True, True)


def test_waiting_ends_at_its_timeout(ready: Program) -> None:
    """``--wait --timeout`` exits 1 with the state the job is in; the job is left alone."""
    code, _, err = ready.submit("wordcount", "--wait", "--timeout", "0")
    assert (code, "PENDING" in err) == (1, True)
    assert ready.data("jobs", "status", "wordcount")["desired"] == "RUN"


# -- passwords


@pytest.mark.parametrize(
    "url", ["postgresql+psycopg://me:hunter22@127.0.0.1:1/db", "mysql+pymysql://me:hunter22@127.0.0.1:1/db", "nonsense://me:hunter22@h/db"]
)
def test_no_error_shows_a_password(program: Program, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given by option or variable, with or without ``--debug``: the password is on no stream."""
    monkeypatch.setenv("MILLSTREAM_TRANSPORT", "redis://:hunter22@127.0.0.1:1")
    for arguments in (("jobs", "list", "--database", url), ("up", "--database", url), ("--debug", "jobs", "list", "--database", url)):
        code, out, err = program(*arguments)
        assert code in (2, 5)
        assert "hunter22" not in out + err


# -- real processes


def start(*arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("millstream")), *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


@pytest.mark.processes
def test_dev_runs_a_pipeline_and_ends(program: Program) -> None:
    """``millstream dev … --run`` starts nodes, runs the pipeline to its end and exits 0, without a broker."""
    arguments = ("dev", MODULE, "--nodes", "1", "--directory", "cluster", "--run", "wordcount", "--config", program.config)
    with start(*arguments, cwd=program.directory) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "wordcount is FINISHED" in out
    assert len(lines(program.out)) == 6


@pytest.mark.processes
def test_what_is_logged_is_not_in_what_a_command_gives(ready: Program) -> None:
    """Events go to standard error, so that a program can read standard output; ``MILLSTREAM_LOG`` says from which level."""
    set_ = ("permits", "set", "box", "--capacity", "2", "--local", ".")
    for level, logged in (("info", True), ("warning", False)):
        with start(*set_, cwd=ready.directory, environment={"MILLSTREAM_LOG": level}) as process:
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "permit box: 2 at once\n"), err
        assert ("admission changed" in err) == logged and (logged or err == "")


@pytest.mark.processes
@pytest.mark.parametrize("end", [lambda p: p.stdin.close(), lambda p: p.send_signal(signal.SIGTERM)], ids=["stdin", "SIGTERM"])
def test_a_node_ends_with_its_parent_and_by_signal(ready: Program, end: Callable[[subprocess.Popen[str]], None]) -> None:
    """``millstream node --with-parent`` ends when its standard input does, and on SIGTERM, exiting 0."""
    with start(
        "node", "--pipelines", MODULE, "--local", ".", "--with-parent", "--slots", "1", "--spares", "0", cwd=ready.directory
    ) as process:
        assert process.stderr is not None
        try:
            assert any("node started" in line for line in process.stderr)
            end(process)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.postgres
def test_the_python_api_does_the_same_on_postgres(postgres_url: str, program: Program) -> None:
    """``Jobs``: schema first, then submit, list, status, cancel, on a server."""
    installation = Installation(database=postgres_url, transport="unix://", checkpoints=program.directory.as_uri())
    with pytest.raises(SchemaMismatch, match="millstream up"):
        Jobs(installation)
    database = Database(postgres_url, SystemClock())
    create_schema(database)
    database.close()
    sys.path.insert(0, str(program.directory))
    with Jobs(installation, load_registry(MODULE)) as jobs:
        row = jobs.submit("wordcount", config={"out": str(program.out)})
        assert [r.id for r in jobs.list()] == [row.id]
        assert jobs.status("wordcount")["state"] == "PENDING"
        with pytest.raises(TimeoutError, match="PENDING"):
            jobs.wait("wordcount", timeout=0)
        assert jobs.cancel(row.id).desired.value == "CANCEL"  # never deployed: it ends at once, without a node
        assert jobs.wait("wordcount", timeout=0).state.value == "STOPPED"
        assert jobs.submit("wordcount", config={"out": str(program.out)}).id != row.id


def test_resume_repeats_effects_only_when_told_to(cluster: Program) -> None:
    """Another job went on from its savepoint and committed more: the old one is refused, and goes on with --repeat-effects."""
    code, _, err = cluster.submit("endless", "--setting", "epoch_interval_ms=50")
    assert code == 0, err
    code, _, err = cluster.local("jobs", "suspend", "endless", "--savepoint", "s1", "--wait", "--timeout", "30")
    assert code == 0, err
    code, _, err = cluster.submit("endless", "--name", "other", "--savepoint", "s1", "--setting", "epoch_interval_ms=50")
    assert code == 0, err
    code, _, err = cluster.local("jobs", "drain", "other", "--wait", "--timeout", "30")
    assert code == 0, err
    resume = ("jobs", "resume", "endless", "--pipelines", f"{MODULE}:pipelines")
    code, out, err = cluster.local(*resume)
    assert (code, out) == (4, "") and "--repeat-effects" in err
    assert cluster.data("jobs", "status", "endless")["state"] == "STOPPED"
    code, _, err = cluster.local(*resume, "--repeat-effects")
    assert code == 0, err
    code, _, err = cluster.local("jobs", "drain", "endless", "--wait", "--timeout", "30")
    assert code == 0, err


def test_status_and_metrics_show_what_nodes_count_and_how_long_epochs_align(cluster: Program) -> None:
    """The node's row is written anew with each renewal; what nobody counted is not shown."""
    code, _, err = cluster.submit("endless", "--setting", "epoch_interval_ms=50")
    assert code == 0, err
    code, _, err = cluster.local("jobs", "savepoint", "endless", "--wait", "--timeout", "30")
    assert code == 0, err
    status = cluster.data("jobs", "status", "endless")
    assert [sorted(n["counts"]) for n in status["nodes"]] == [["defects", "schedules_held", "set_aside", "stale_hints", "tasks_set_aside"]]
    assert all("alignment_ms" in e for e in status["epochs"])
    code, out, err = cluster.local("jobs", "metrics")
    assert code == 0, err
    assert 'millstream_node_defects_total{node="embedded"} 0.0' in out
    assert "millstream_node_hints_dropped_total{" not in out
    code, _, err = cluster.local("jobs", "cancel", "endless", "--wait", "--timeout", "30")
    assert code == 0, err


def test_a_node_process_shows_its_own_counts_and_those_of_the_coordinator_beside_it(program: Program) -> None:
    """Also what its messages dropped, with or without a broker."""
    sys.path.insert(0, str(program.directory))
    with DevCluster(f"{MODULE}:pipelines", directory=program.directory, nodes=1, spares=0) as dev:
        dev.wait(dev.submit("wordcount", config={"out": str(program.out)}), 60)
        (node,) = program.data("jobs", "status", "wordcount")["nodes"]
    assert node["name"] == "node0"
    assert node["counts"] == {"defects": 0, "hints_dropped": 0, "schedules_held": 0, "set_aside": 0, "stale_hints": 0, "tasks_set_aside": 0}
