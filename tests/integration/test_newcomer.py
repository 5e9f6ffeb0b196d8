"""What somebody meets who uses Millstream for the first time: a job nobody runs, servers that are not there, a log in two formats. Each says what to do next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog
from celery import Celery
from typer.testing import CliRunner

from millstream import CollectionSource, CollectSink, CollectTarget, EmbeddedCluster, Installation, JobBuilder, Jobs, Pipelines
from millstream.cli import main
from millstream.dev import DevCluster
from millstream.formatting import show, status_parts
from millstream.messages import CeleryMessages
from millstream.obstacles import NO_COORDINATOR, NO_NODE
from millstream_schema.errors import JobConflict, JobFailed, JobInvalid
from millstream_schema.model import Override
from millstream_schema.ports import SystemClock
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import JobState
from millstream_schema.store import registry
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.integration.test_newcomer:pipelines"
pipelines = Pipelines()


@pipelines.define("plain")
def plain(job: JobBuilder, config: dict[str, Any]) -> None:
    numbers = job.source(CollectionSource([1, 2, config.get("last", 3)]), uid="numbers")
    numbers.map(abs, uid="same").sink_to(CollectSink("out", CollectTarget()), uid="out")


@pipelines.define("keyed")
def keyed(job: JobBuilder, config: dict[str, Any]) -> None:
    job.source(CollectionSource([config["orders"]]), uid="in").sink_to(CollectSink("out", CollectTarget()), uid="out")


@pipelines.define("selects")
def selects(job: JobBuilder, config: dict[str, Any]) -> None:
    def query(_number: int) -> None:
        with psycopg.connect(config["url"]) as connection:
            connection.execute("SELECT nothing FROM nowhere")

    job.source(CollectionSource([1]), uid="in").map(query, uid="query").sink_to(CollectSink("out", CollectTarget()), uid="out")


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    """Rows and nobody who runs what they hold."""
    for name in [n for n in os.environ if n.startswith("MILLSTREAM_") and "TEST" not in n]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    found = Installation.local(tmp_path)
    database = Database(found.database, SystemClock())
    create_schema(database)
    database.close()
    yield found


def program(*arguments: str) -> tuple[int, str, str]:
    """``millstream …``: exit code, stdout, stderr."""
    result = CliRunner().invoke(main, list(arguments))
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stdout, result.stderr


# -- the program by itself


@pytest.mark.parametrize("arguments", [(), ("jobs",)])
def test_without_a_command_the_help_is_shown_as_for_any_incomplete_line(arguments: tuple[str, ...]) -> None:
    """Exit code 2, as for wrong usage: 1 would say that something failed."""
    code, out, err = program(*arguments)
    assert (code, "Usage:" in out + err, "Commands" in out + err) == (2, True, True)


# -- a job that nobody runs


class Hasty(SystemClock):
    """A second passes with each look at the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1.0
        return self._now


def nodes(installation: Installation, *slots: int, coordinated: bool = True) -> None:
    """Nodes that are alive by the rows."""
    database = Database(installation.database, SystemClock())

    def work(tx: Any) -> None:
        for i, count in enumerate(slots):
            registry.register_node(tx, f"n{i}", f"n{i}", count, 60_000_000, "{}")
        if coordinated:
            registry.take_lease(tx, "somebody", 60_000_000)

    database.run(work)
    database.close()


def test_who_waits_for_a_job_that_nobody_runs_is_told_once_what_to_start(installation: Installation) -> None:
    """Not each time it looks; and the TimeoutError says it too."""
    said: list[str] = []
    with Jobs(installation, pipelines, clock=Hasty()) as jobs:
        job = jobs.submit("plain").id
        with pytest.raises(TimeoutError, match="no node is alive"):
            jobs.wait(job, timeout=20, told=said.append)
        with pytest.raises(TimeoutError, match="no node is alive"):
            jobs.wait_savepoint(job, jobs.savepoint(job), timeout=20)
    assert said == [f"job 'plain' is PENDING: {NO_NODE}"]


def test_what_changes_is_told_anew(installation: Installation) -> None:
    """A node comes and has too few slots: the second thing in the way is told after the first."""
    said: list[str] = []

    def told(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            nodes(installation, 1)

    with Jobs(installation, pipelines, clock=Hasty()) as jobs:
        job = jobs.submit("plain", parallelism=2).id
        with pytest.raises(TimeoutError, match=r"wants \d+ slots"):
            jobs.wait(job, timeout=30, told=told)
    assert [t.partition(": ")[2][:15] for t in said] == [NO_NODE[:15], "it wants 2 slots"[:15]]


def test_status_and_the_command_line_say_what_a_pending_job_waits_for(installation: Installation, tmp_path: Path) -> None:
    """``status`` for people and programs; ``--wait`` on standard error, so that ``--json`` stays one document."""
    here = ("--local", str(tmp_path))
    code, out, err = program("jobs", "submit", "plain", "--pipelines", MODULE, "--wait", "--timeout", "2.3", "--json", *here)
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == f"millstream: job 'plain' is PENDING: {NO_NODE}"
    assert NO_NODE in program("jobs", "status", "plain", *here)[1]
    assert json.loads(program("jobs", "status", "plain", "--json", *here)[1])["obstacle"] == NO_NODE
    nodes(installation, 64, coordinated=False)
    assert json.loads(program("jobs", "status", "plain", "--json", *here)[1])["obstacle"] == NO_COORDINATOR
    nodes(installation)
    assert json.loads(program("jobs", "status", "plain", "--json", *here)[1])["obstacle"] == ""


# -- dev


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("nothing",), 3, "no pipeline named 'nothing'"),
        (("keyed",), 4, "from an empty config: KeyError: 'orders'; give 'orders' in config="),
        (("keyed", "--config", '{"order": 1}'), 4, "from config ['order']: KeyError: 'orders'; give 'orders'"),
        (("plain", "--setting", "retained=0"), 4, "retained must be positive"),
        (("plain", "--name", "a b"), 2, "'a b'"),
        (("plain",), 4, "live already"),
    ],
)
def test_dev_refuses_a_job_before_it_starts_a_node(
    installation: Installation, tmp_path: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    """Nothing on standard output, no node's log, no row: also where the directory holds a live job of that name."""
    with Jobs(installation, pipelines) as jobs:
        before = jobs.submit("plain").id
        found, out, err = program("dev", MODULE, "--directory", str(tmp_path), "--run", *arguments)
        assert (found, out, told in err) == (code, "", True), err
        assert [row.id for row in jobs.list()] == [before]
    assert list(tmp_path.glob("*.log")) == []


def test_a_cluster_without_nodes_takes_jobs_and_says_that_nobody_runs_them(tmp_path: Path) -> None:
    """``DevCluster`` and ``Jobs`` are one: submitted through one, found through the other, refused alike."""
    with DevCluster(MODULE, directory=tmp_path, nodes=0, namespace="team") as cluster:
        job = cluster.submit("plain", name="mine", overrides={"same": Override(None, {"capacity": 2})}, settings=StreamSettings(retained=7))
        with pytest.raises(TimeoutError, match="no node is alive"):
            cluster.wait(job, 0)
        with pytest.raises(JobConflict):
            cluster.submit("plain", name="mine")
        assert cluster.wait(job, 5, JobState.PENDING).name == "mine"
        with Jobs(cluster.installation, pipelines, "team") as jobs:
            assert jobs.find("mine").id == job
            jobs.cancel(job)
        assert cluster.wait(job, 5).state is JobState.STOPPED


def test_an_embedded_cluster_offers_its_jobs_and_refuses_as_they_do(tmp_path: Path) -> None:
    """``submit`` takes what ``Jobs.submit`` takes; closing a ``Jobs`` that shares a database leaves it open."""
    with EmbeddedCluster(pipelines, directory=tmp_path) as cluster:
        with pytest.raises(JobInvalid, match="give 'orders'"):
            cluster.submit("keyed")
        job = cluster.submit("plain", name="mine", overrides={"same": Override(None, {"capacity": 2})})
        assert cluster.wait(job, 30).state is JobState.FINISHED
        with Jobs(Installation.local(tmp_path), pipelines, database=cluster.database) as shared:
            assert shared.find("mine").id == job
        assert cluster.jobs.status("mine")["obstacle"] == ""
        assert cluster.run("plain", name="again", timeout=30).state is JobState.FINISHED


# -- servers that are not there


@pytest.mark.parametrize(
    ("url", "address"),
    [("redis://me:hunter22@127.0.0.1:1/3", "redis://127.0.0.1:1/3"), ("amqp://me:hunter22@127.0.0.1:1//", "amqp://127.0.0.1:1//")],
)
def test_a_broker_that_is_away_is_named_by_its_address_with_the_next_step(
    installation: Installation, tmp_path: Path, url: str, address: str
) -> None:
    """By the node that cannot start; its password is not shown."""
    code, out, err = program("node", "--pipelines", MODULE, "--local", str(tmp_path), "--transport", url)
    assert (code, out, err.count("\n")) == (5, "", 1)
    assert address in err and "start that server, or correct the transport's URL (MILLSTREAM_TRANSPORT" in err
    assert "hunter22" not in err


def test_checkpoint_storage_that_is_no_directory_is_named(installation: Installation, tmp_path: Path) -> None:
    """A file where a directory should be."""
    (tmp_path / "file").touch()
    code, _, err = program("node", "--pipelines", MODULE, "--local", str(tmp_path), "--checkpoints", str(tmp_path / "file"))
    assert code != 0
    assert f"the checkpoint storage is {(tmp_path / 'file').as_uri()}: it must be a directory this user can write" in err


def test_hints_that_cannot_be_sent_are_told_with_the_brokers_address() -> None:
    """The Celery broker is away: a warning names it without its password, and says that jobs go on."""
    warned = threading.Event()
    events: list[dict[str, Any]] = []

    def record(_logger: Any, _method: str, event: Any) -> Any:
        events.append(dict(event))
        warned.set()
        raise structlog.DropEvent

    structlog.configure(processors=[record])
    messages = CeleryMessages(Celery("away", broker="redis://me:hunter22@127.0.0.1:1/0"), "m", "host")
    try:
        messages.start("node", lambda _hint: None, lambda _hint: None, lambda: "id")
        assert warned.wait(20)
    finally:
        messages.close()
        structlog.reset_defaults()
    assert events[0]["event"] == "the Celery broker cannot be reached; hints pause, jobs go on by rows"
    assert "127.0.0.1:1" in events[0]["broker"]
    assert "hunter22" not in str(events)


# -- logs and reasons


APPLICATION = """
from celery import Celery

app = Celery("logged", broker="memory://")
app.conf.worker_log_format = "CELERY %(levelname)s %(processName)s %(message)s"
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("own", "transport", "expected"),
    [
        ({}, "", "CELERY INFO MillstreamNode node started name='w1@here'"),
        ({"MILLSTREAM_LOG": "warning"}, "", ""),
        ({}, "redis://127.0.0.1:1/0", "CELERY ERROR MillstreamNode Redis cannot be reached"),
    ],
    ids=["info", "own level", "error"],
)
def test_a_node_under_celery_logs_as_celery_does(
    installation: Installation, tmp_path: Path, own: dict[str, str], transport: str, expected: str
) -> None:
    """The application's format, the worker's level and file (as it leaves them to its children); nothing beside them on a stream."""
    (tmp_path / "logged.py").write_text(APPLICATION)
    environment = {
        **os.environ, **installation.environment(), "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "CELERY_LOG_LEVEL": "20",
        "CELERY_LOG_FILE": str(tmp_path / "%n.log"), **own,
    }  # fmt: skip
    if transport:
        environment["MILLSTREAM_TRANSPORT"] = transport
    command = [
        sys.executable, "-m", "millstream.node_process", "--pipelines", MODULE, "--name", "w1@here", "--spares", "0", "--celery", "logged:app",
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1 if transport else 0, "", "")
    lines = (tmp_path / "w1.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("CELERY ")] == []
    assert any(line.startswith(expected) for line in lines) if expected else not any("node started" in line for line in lines)


@pytest.mark.postgres
def test_what_a_driver_draws_is_not_in_a_jobs_reason(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """psycopg repeats the statement with a caret below: what people are shown is one line, and the cause is in it."""
    url = postgres_url.replace("+psycopg", "")
    with EmbeddedCluster(pipelines) as cluster:
        job = cluster.submit("selects", config={"url": url}, settings=StreamSettings(restart=RestartPolicy(failures=0)))
        with pytest.raises(JobFailed) as failed:
            cluster.wait(job, 60)
        status = cluster.jobs.status(job)
    capsys.readouterr()
    show(*status_parts(status))
    for text in (str(failed.value), capsys.readouterr().out):
        assert 'relation "nowhere" does not exist' in text
        assert "LINE 1" not in text and "^" not in text
    assert "\n" not in str(failed.value)
