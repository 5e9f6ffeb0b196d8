"""Bad input: whatever is wrong is told before anything runs, by name and with what to do, and leaves nothing half done in the database."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
import structlog
from typer.testing import CliRunner

from millstream.builder import DataStream, JobBuilder
from millstream.cli import main
from millstream.client import Jobs
from millstream.embedded import EmbeddedCluster
from millstream.installation import Installation
from millstream.pipelines import Pipelines
from millstream_coordinator.operations import Operations, Submission
from millstream_schema.connectors import PROOF, SourceCapability
from millstream_schema.errors import (
    ChannelError,
    ConfigurationError,
    JobConflict,
    JobFailed,
    JobInvalid,
    JobNotFound,
    MillstreamError,
    SchemaMismatch,
    StorageError,
    StoreUnavailable,
    UnknownFactory,
)
from millstream_schema.model import EdgeConfig, EdgeSpec, OperatorSpec, Override, Partitioning
from millstream_schema.pipeline import Pipeline
from millstream_schema.ports import SystemClock
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import JobState
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import check_schema, create_schema
from millstream_schema.store.tables import SCHEMA_VERSION
from millstream_tasks.opening import open_storage, open_transport
from millstream_tasks.requirements import unmet
from millstream_tasks.sinks.memory import CollectSink, CollectTarget, PrintSink
from millstream_tasks.sinks.upsert import SqlUpsertSink
from millstream_tasks.sources.memory import CollectionSource, GeneratorSource
from millstream_tasks.sources.sql import SqlKeySource

pipelines = Pipelines()
Build = Callable[[JobBuilder], None]


def sink() -> CollectSink:
    return CollectSink("out", CollectTarget())


def numbers(job: JobBuilder) -> DataStream:
    return job.source(CollectionSource([1, 2, 3]), uid="numbers")


class Size(pydantic.BaseModel):
    """What the pipeline ``sized`` takes."""

    model_config = pydantic.ConfigDict(extra="forbid")
    size: int = pydantic.Field(ge=1)


@pipelines.define("plain")
def plain(job: JobBuilder, config: dict[str, Any]) -> None:
    numbers(job).map(int, uid="same").sink_to(sink(), uid="out")


@pipelines.define("sized", config=Size)
def sized(job: JobBuilder, config: Size) -> None:
    numbers(job).sink_to(sink(), uid="out")


@pipelines.define("keyed")
def keyed(job: JobBuilder, config: dict[str, Any]) -> None:
    numbers(job).map(lambda n: config["factor"] * n, uid="times").sink_to(sink(), uid=f"out-{config['factor']}")


def content(url: str) -> dict[str, list[Any]]:
    """Every row of every table of the SQLite database."""
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in names}


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with the schema, made once."""
    directory = tmp_path_factory.mktemp("migrated")
    with opened(Installation.local(directory)) as database:
        create_schema(database)
    return directory / "millstream.db"


@pytest.fixture
def installation(tmp_path: Path, migrated: Path) -> Installation:
    """An installation below a directory, with its schema."""
    shutil.copy(migrated, tmp_path)
    return Installation.local(tmp_path)


@contextlib.contextmanager
def opened(installation: Installation) -> Iterator[Database]:
    database = Database(installation.database, SystemClock(), prefix=installation.table_prefix)
    try:
        yield database
    finally:
        database.close()


@pytest.fixture
def jobs(installation: Installation) -> Iterator[Jobs]:
    with Jobs(installation, pipelines) as found:
        yield found


@contextlib.contextmanager
def quiet(directory: Path) -> Iterator[None]:
    """Events go to a file."""
    with (directory / "log").open("w") as log:
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(log))
        try:
            yield
        finally:
            structlog.reset_defaults()


@contextlib.contextmanager
def refused(installation: Installation, kind: type[MillstreamError], *told: str) -> Iterator[None]:
    """The block raises ``kind``, whose text has every part of ``told``, and leaves the database as it was."""
    before = content(installation.database)
    with pytest.raises(kind) as caught:
        yield
    missing = [t for t in told if t not in str(caught.value)]
    assert missing == [], str(caught.value)
    assert content(installation.database) == before


def submit(installation: Installation, build: Build, guarantee: str = "STRICT_EXACTLY_ONCE", **submission: Any) -> None:
    """Submit what ``build`` makes."""
    here = Pipelines()
    here.define("job", guarantee=guarantee)(lambda job, _config: build(job))
    with Jobs(installation, here) as found:
        found.submit("job", **submission)


def submit_model(installation: Installation, change: Callable[[Pipeline], dict[str, Any]]) -> None:
    """Submit the model of ``plain`` with some of its fields exchanged, as a build of another version or another program might."""
    pipeline = pipelines.build("plain")
    changed = msgspec.structs.replace(pipeline.model, **change(pipeline))
    with opened(installation) as database:
        Operations(database).submit(
            Submission(job="job-1", name="plain", factory="plain"),
            Pipeline(changed, pipeline.functions, pipeline.sources, pipeline.sinks, pipeline.types),
        )


# -- the pipeline and its config


def test_an_unknown_factory_is_refused(jobs: Jobs, installation: Installation) -> None:
    """The error names the factory and those that exist."""
    with refused(installation, UnknownFactory, "'nothing'", "keyed, plain, sized", "import the module that defines it"):
        jobs.submit("nothing")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"size": 0}, "config of pipeline 'sized': size: Input should be greater than or equal to 1"),
        ({"size": "many"}, "config of pipeline 'sized': size: Input should be a valid integer"),
        ({}, "config of pipeline 'sized': size: Field required"),
        ({"size": 1, "sise": 2}, "config of pipeline 'sized': sise: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_config_is_refused(jobs: Jobs, installation: Installation, config: dict[str, Any], told: str) -> None:
    """The error names pipeline and field."""
    with refused(installation, JobInvalid, told):
        jobs.submit("sized", config=config)


def test_an_error_in_the_pipeline_function_is_told_as_such(jobs: Jobs, installation: Installation) -> None:
    """What the user's function raised is named, with the pipeline and the config's keys."""
    with refused(installation, JobInvalid, "'keyed'", "['faktor']", "KeyError: 'factor'"):
        jobs.submit("keyed", config={"faktor": 2})


@pytest.mark.parametrize("name", ["a b", "", "../etc", "ünïcode", "-x", "x" * 64, "a/b", "a.b", "x\n"])
def test_a_job_name_with_illegal_characters_is_refused(jobs: Jobs, installation: Installation, name: str) -> None:
    """Names become parts of keys and paths: the error shows the name and what may be in it."""
    with refused(installation, ConfigurationError, repr(name), "letters, digits"):
        jobs.submit("plain", name=name)


def test_a_namespace_with_illegal_characters_is_refused(installation: Installation) -> None:
    """As for names."""
    with refused(installation, ConfigurationError, "'a/b'", "letters, digits"):
        Jobs(installation, pipelines, "a/b")


def test_a_name_that_is_live_is_refused(jobs: Jobs, installation: Installation) -> None:
    """One live job of a name; the error names the one that is there."""
    first = jobs.submit("plain")
    with refused(installation, JobConflict, "'plain'", first.id, "choose another name"):
        jobs.submit("plain")


def test_a_savepoint_that_does_not_exist_is_refused(jobs: Jobs, installation: Installation) -> None:
    """Nothing is submitted from a savepoint nobody took."""
    with refused(installation, JobNotFound, "'yesterday'", "millstream jobs savepoints"):
        jobs.submit("plain", savepoint="yesterday")


@pytest.mark.parametrize("savepoint", ["../x", "a/b", "", "a b", "..", "x" * 200])
def test_a_savepoint_id_with_illegal_characters_is_refused(jobs: Jobs, installation: Installation, savepoint: str) -> None:
    """Savepoint ids become parts of storage keys."""
    jobs.submit("plain")
    with refused(installation, ConfigurationError, repr(savepoint), "storage keys"):
        jobs.savepoint("plain", savepoint)
    with refused(installation, ConfigurationError, repr(savepoint), "storage keys"):
        jobs.suspend("plain", savepoint)


def test_a_savepoint_id_that_is_taken_is_refused(jobs: Jobs, installation: Installation) -> None:
    """Another job's savepoint is never taken for one's own."""
    jobs.submit("plain")
    with opened(installation) as database:
        values = {
            "id": "s1",
            "job": "job-0",
            "epoch": 1,
            "body": "",
            "checksum": "",
            "model": "",
            "state": "COMPLETE",
            "error": "",
            "rev": 0,
        }
        database.run(lambda tx: tx.insert(tx.t.savepoint, **values))
    with refused(installation, JobConflict, "'s1'", "job-0", "choose another id"):
        jobs.savepoint("plain", "s1")
    with refused(installation, JobConflict, "'s1'", "job-0", "choose another id"):
        jobs.suspend("plain", "s1")


# -- what the job is made of


class Forgetful(CollectionSource):
    """A source that cannot be read again."""

    capability = SourceCapability.NONE


def weak_source(job: JobBuilder) -> None:
    job.source(Forgetful([1]), uid="mail").sink_to(sink(), uid="out")


def unsettled_source(job: JobBuilder) -> None:
    job.source(SqlKeySource("sqlite:////tmp/none.db", "t", "id", ["id"]), uid="rows").sink_to(sink(), uid="out")


def weak_sink(job: JobBuilder) -> None:
    numbers(job).sink_to(PrintSink(), uid="screen")


def upsert_sink(job: JobBuilder) -> None:
    numbers(job).sink_to(SqlUpsertSink("sqlite:////tmp/none.db", "t", ["id"], ["id", "n"]), uid="table")


def unkeyed(job: JobBuilder) -> None:
    job.add("reduce", [numbers(job)], uid="sum", functions={"reduce": max}).sink_to(sink(), uid="out")


def duplicate_uid(job: JobBuilder) -> None:
    numbers(job).map(int, uid="same").map(int, uid="same").sink_to(sink(), uid="out")


def missing_uid(job: JobBuilder) -> None:
    numbers(job).key_by(int).reduce(max).sink_to(sink(), uid="out")


def illegal_uid(job: JobBuilder) -> None:
    numbers(job).map(int, uid="a:b").sink_to(sink(), uid="out")


def no_watermarks(job: JobBuilder) -> None:
    numbers(job).key_by(int).tumbling(10).reduce(max, uid="window").sink_to(sink(), uid="out")


def unknown_type(job: JobBuilder) -> None:
    numbers(job).typed("Flight").rebalance().map(int, uid="same").sink_to(sink(), uid="out")


def no_sink(job: JobBuilder) -> None:
    numbers(job).map(int, uid="same")


def no_source(job: JobBuilder) -> None:
    """Nothing is built."""


def too_parallel(job: JobBuilder) -> None:
    numbers(job).key_by(int).reduce(max, uid="max", parallelism=129).sink_to(sink(), uid="out", parallelism=1)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (weak_source, ("source 'mail' is NONE", "STRICT_EXACTLY_ONCE needs one of REPLAYABLE, TRANSACTIONAL_READ")),
        (unsettled_source, ("source 'rows' is NONE", "needs one of REPLAYABLE")),
        (weak_sink, ("sink 'screen' is NONE", "needs one of OUTBOX_EPOCH_LOG, STAGED_ATOMIC_COMMIT, TWO_PHASE_COMMIT")),
        (upsert_sink, ("sink 'table' is UPSERT_BY_KEY", "STRICT_EXACTLY_ONCE needs one of")),
        (unkeyed, ("'sum'", "needs key_by before it")),
        (duplicate_uid, ("'same' is used twice", "its own uid")),
        (missing_uid, ("'reduce-1' keeps state and has no uid", "give it uid=...")),
        (illegal_uid, ("'a:b' must match",)),
        (no_watermarks, ("window 'window' works on event time", ".assign_timestamps(...)")),
        (unknown_type, ("value type 'Flight'", "register_type")),
        (no_sink, ("the job has no sink", ".sink_to(...)")),
        (no_source, ("the job has no source",)),
        (too_parallel, ("'max': parallelism 129 exceeds shard_count 128",)),
    ],
)
def test_a_job_that_cannot_keep_its_guarantee_is_refused(installation: Installation, build: Build, told: tuple[str, ...]) -> None:
    """The operator is named, and what it needs."""
    with refused(installation, JobInvalid, *told):
        submit(installation, build)


def test_everything_wrong_is_told_at_once(installation: Installation) -> None:
    """One submission lists all problems: of the model, the settings and the changes."""

    def build(job: JobBuilder) -> None:
        job.source(Forgetful([1]), uid="mail").key_by(int).reduce(max).sink_to(PrintSink(), uid="screen")

    with refused(
        installation, JobInvalid, "'mail'", "'reduce-1'", "'screen'", "epoch_interval_ms", "parallelism must be at least 1, not -1"
    ):
        submit(installation, build, settings=StreamSettings(epoch_interval_ms=0), parallelism=-1)


@pytest.mark.parametrize("guarantee", ["exactly-once", "", "STRICT"])
def test_an_unknown_guarantee_is_refused(guarantee: str) -> None:
    """When defined; the known ones are named."""
    with pytest.raises(ConfigurationError, match=rf"unknown guarantee '{guarantee}'; known: STRICT_EXACTLY_ONCE, EFFECTIVELY_ONCE"):
        Pipelines().define("job", guarantee=guarantee)


def test_an_unknown_requirement_is_refused(installation: Installation) -> None:
    """A predicate this build cannot check is not passed over."""

    def build(job: JobBuilder) -> None:
        numbers(job).sink_to(sink(), uid="out")
        job.require("holy_water")

    with refused(installation, JobInvalid, "unknown requirement 'holy_water'", "shared_storage"):
        submit(installation, build)


def cyclic(p: Pipeline) -> dict[str, Any]:
    return {"edges": [EdgeSpec("numbers", "a", Partitioning.FORWARD), EdgeSpec("b", "a", Partitioning.FORWARD), EdgeSpec("a", "b", Partitioning.FORWARD),
                      EdgeSpec("a", "out", Partitioning.FORWARD)],
            "operators": [o for o in p.model.operators if o.id != "same"] + [OperatorSpec("a", "union", True), OperatorSpec("b", "map", True)]}  # fmt: skip


def edges(p: Pipeline, **changes: Any) -> dict[str, Any]:
    return {"edges": [msgspec.structs.replace(e, **changes) for e in p.model.edges]}


def kinds(p: Pipeline, kind: str) -> dict[str, Any]:
    return {"operators": [msgspec.structs.replace(o, kind=kind) if o.id == "same" else o for o in p.model.operators]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cyclic, ("cycle through a, b", "not supported")),
        (lambda p: edges(p, partitioning="ZIGZAG"), ("'numbers->same': unknown partitioning 'ZIGZAG'", "REBALANCE")),
        (lambda p: edges(p, value_type="Flight"), ("value type 'Flight'", "register_type")),
        (lambda p: edges(p, source="nowhere"), ("there is no operator 'nowhere'",)),
        (lambda p: edges(p, config=EdgeConfig(codec="pickle")), ("unknown codec 'pickle'", "msgpack, json")),  # type: ignore[arg-type]  # wrong on purpose
        (lambda p: edges(p, config=EdgeConfig(compression="rar")), ("unknown compression 'rar'", "zstd")),  # type: ignore[arg-type]  # wrong on purpose
        (lambda p: kinds(p, "teleport"), ("'same': unknown kind 'teleport'", "flat_map")),
        (lambda _: {"shard_count": 0}, ("shard_count must be at least 1, not 0",)),
        (lambda _: {"name": "a b"}, ("job name 'a b' must match",)),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(
    installation: Installation, change: Callable[[Pipeline], dict[str, Any]], told: tuple[str, ...]
) -> None:
    """Also one that no builder of this version makes: partitioner, kind, codec and type are names that are checked."""
    with refused(installation, JobInvalid, *told):
        submit_model(installation, change)


# -- sizes


def sizes(job: JobBuilder) -> DataStream:
    return numbers(job).assign_timestamps(int, uid="time")


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda job: sizes(job).key_by(int).tumbling(0), "window size_ms must be a positive whole number of milliseconds, not 0"),
        (lambda job: sizes(job).key_by(int).tumbling(-5), "window size_ms must be a positive whole number of milliseconds, not -5"),
        (lambda job: sizes(job).key_by(int).tumbling(1.5), "window size_ms must be a positive whole number of milliseconds, not 1.5"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda job: sizes(job).key_by(int).sliding(10, 0), "window slide_ms must be a positive whole number of milliseconds, not 0"),
        (lambda job: sizes(job).key_by(int).sliding(10, -1), "window slide_ms must be a positive whole number of milliseconds, not -1"),
        (lambda job: sizes(job).key_by(int).session(0), "session gap_ms must be a positive whole number of milliseconds, not 0"),
        (lambda job: sizes(job).key_by(int).session(-1), "session gap_ms must be a positive whole number of milliseconds, not -1"),
        (lambda job: sizes(job).key_by(int).tumbling(10, lateness_ms=-1), "lateness_ms must not be negative, not -1"),
        (lambda job: sizes(job).key_by(int).tumbling(10, time="lunar"), "time must be 'event' or 'processing', not 'lunar'"),
        (lambda job: numbers(job).assign_timestamps(int, out_of_orderness_ms=-1), "out_of_orderness_ms must not be negative"),
        (lambda job: numbers(job).assign_timestamps(int, idle_ms=0), "idle_ms must be positive"),
        (lambda job: numbers(job).edge(capasity=1), "an edge has no setting 'capasity'; known: capacity"),
        (lambda job: numbers(job).edge(capacity="big"), "an edge setting has a wrong value"),
        (lambda job: job.edges(mode="TELEPATHY"), "an edge setting has a wrong value"),
        (lambda job: numbers(job).map(int, uid=7), "uid of a map must be a text, not 7"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda job: numbers(job).map(int, uid="m", parallelism="2"), "parallelism of map 'm' must be a whole number, not '2'"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda job: job.source(sink(), uid="s"), "is not a source"),
        (lambda job: numbers(job).sink_to(print, uid="s"), "is not a sink"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_a_wrong_argument_is_refused_where_it_is_written(installation: Installation, build: Build, told: str) -> None:
    """Sizes, slides, gaps and the like are refused when the job is built, by the call that has them."""
    with refused(installation, ConfigurationError, told):
        submit(installation, build)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda job: numbers(job).map(int, uid="m", parallelism=0), "'m': parallelism must be at least 1, not 0"),
        (lambda job: numbers(job).map(int, uid="m", parallelism=-2), "'m': parallelism must be at least 1, not -2"),
        (lambda job: numbers(job).edge(capacity=0).map(int, uid="m"), "'numbers->m': capacity must be at least 1, not 0"),
        (lambda job: numbers(job).edge(batch_records=0).map(int, uid="m"), "'numbers->m': batch_records must be at least 1, not 0"),
        (lambda job: numbers(job).edge(batch_bytes=-1).map(int, uid="m"), "'numbers->m': batch_bytes must be at least 1, not -1"),
        (lambda job: numbers(job).edge(batch_bytes=1 << 21).map(int, uid="m"), "'numbers->m': batch_bytes must not exceed 1 MiB"),
        (lambda job: numbers(job).edge(linger_ms=-1).map(int, uid="m"), "'numbers->m': linger_ms must not be negative, not -1"),
        (lambda job: job.source(CollectionSource([1], splits=0), uid="n"), "source 'n': splits must be an integer of at least 1, not 0"),
        (lambda job: job.source(GeneratorSource(lambda s, a, n: None, rate=0), uid="n"), "source 'n'"),
    ],
)
def test_a_size_below_one_is_refused_when_submitted(installation: Installation, build: Build, told: str) -> None:
    """Parallelism, capacity, batch, linger, splits: the operator or edge is named, with the value."""
    with refused(installation, JobInvalid, told):
        submit(installation, build)


@pytest.mark.parametrize(
    "field",
    [f for f in StreamSettings.__struct_fields__ if f.endswith("_ms") and f not in ("min_pause_ms", "epoch_interval_ms")]
    + ["retained", "source_batch"],
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_setting_below_one_is_refused(jobs: Jobs, installation: Installation, field: str, value: int) -> None:
    """Each duration and count of the settings, by name and value."""
    with refused(installation, JobInvalid, f"{field} must be positive, not {value}"):
        jobs.submit("plain", settings=msgspec.structs.replace(StreamSettings(), **{field: value}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (StreamSettings(alignment_ms=700_000), ("alignment_ms must be below epoch_timeout_ms",)),
        (StreamSettings(epoch_timeout_ms=3_600_000), ("epoch_timeout_ms must be below one hour",)),
        (StreamSettings(retained=10**30), ("retained must be at most 2147483647 epochs",)),
        (StreamSettings(commit_deadline_ms=1 << 63), ("commit_deadline_ms must be at most 2678400000 ms (31 days)",)),
        (StreamSettings(restart=RestartPolicy(stalls=1 << 64)), ("restart.stalls must be at most 2147483647 restarts",)),
        (StreamSettings(min_pause_ms=-1), ("min_pause_ms must not be negative",)),
        (StreamSettings(restart=RestartPolicy(kind="never")), ("unknown restart kind 'never'", "fixed, exponential, rate")),
        (StreamSettings(restart=RestartPolicy(failures=-1)), ("restart budgets must not be negative",)),
        (StreamSettings(restart=RestartPolicy(delay_ms=20_000)), ("delay_ms must be between 0 and max_delay_ms",)),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    jobs: Jobs, installation: Installation, settings: StreamSettings, told: tuple[str, ...]
) -> None:
    """Both settings are named."""
    with refused(installation, JobInvalid, *told):
        jobs.submit("plain", settings=settings)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallelism": 0}, "parallelism must be at least 1, not 0"),
        ({"parallelism": 10**30}, "parallelism must be at most 10000, not a number of 100 bits"),
        ({"config": {"a": [{"b": 10**5000}]}}, "config.a[0].b is a whole number of 16610 bits"),
        ({"parallelism": -3}, "parallelism must be at least 1, not -3"),
        (
            {"overrides": {"nobody": Override(parallelism=2)}},
            "override for operator 'nobody': there is no such operator; known: numbers, same, out",
        ),
        ({"overrides": {"same": Override(parallelism=0)}}, "'same': parallelism must be at least 1, not 0"),
        (
            {"overrides": {"same": Override(edge={"capasity": 3})}},
            "override for operator 'same': an edge has no setting 'capasity'; known: capacity",
        ),
        ({"overrides": {"same": Override(edge={"capacity": 0})}}, "'numbers->same': capacity must be at least 1, not 0"),
        ({"overrides": {"same": Override(edge={"capacity": "big"})}}, "override for operator 'same': an edge setting has a wrong value"),
    ],
)
def test_a_wrong_change_is_refused(jobs: Jobs, installation: Installation, changes: dict[str, Any], told: str) -> None:
    """Plan-time changes are checked as the model is."""
    with refused(installation, JobInvalid, told):
        jobs.submit("plain", **changes)


def test_every_wrong_edge_setting_is_told_once(jobs: Jobs) -> None:
    """Of several operators, of one that no edge ends at, and together with what else is wrong."""
    overrides = {
        "numbers": Override(edge={"colour": 1}),
        "same": Override(edge={"capasity": 3, "size": 1}),
        "out": Override(edge={"capacity": "big"}),
    }
    with pytest.raises(JobInvalid) as caught:
        jobs.submit("plain", overrides=overrides, parallelism=0)
    wrong, *edges = caught.value.problems
    assert wrong == "parallelism must be at least 1, not 0"
    begins = (
        "override for operator 'numbers': an edge has no setting 'colour'; known: capacity",
        "override for operator 'same': an edge has no setting 'capasity', 'size'; known: capacity",
        "override for operator 'out': an edge setting has a wrong value: ",
    )
    assert all(told.startswith(begin) for told, begin in zip(edges, begins, strict=True))


# -- the installation


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"database": "not a url"}, ("database (MILLSTREAM_DATABASE)", "postgresql+psycopg://")),
        ({"transport": "carrier-pigeon://x"}, ("transport (MILLSTREAM_TRANSPORT)", "unix:///, redis:// or amqp://")),
        ({"prefix": "Bad-Prefix"}, ("prefix (MILLSTREAM_PREFIX)",)),
        ({"lease_ms": 0}, ("lease_ms (MILLSTREAM_LEASE_MS)",)),
        ({"renew_ms": 5_000}, ("renew_ms (5000)", "lease_ms / 3")),
        ({"idle_in_transaction_ms": 4_000}, ("idle_in_transaction_ms (4000)", "lease_ms / 3")),
        ({"liveness_ms": 10_000}, ("liveness_ms (10000)", "below lease_ms")),
        ({"channel_expiry_ms": 60_000}, ("channel_expiry_ms (MILLSTREAM_CHANNEL_EXPIRY_MS)",)),
        ({"poll_ms": -1}, ("poll_ms (MILLSTREAM_POLL_MS)",)),
        ({"colour": "red"}, ("colour",)),
    ],
)
def test_a_wrong_installation_is_refused(tmp_path: Path, changes: dict[str, Any], told: tuple[str, ...]) -> None:
    """The field and its variable are named; nothing is opened."""
    with pytest.raises(ConfigurationError) as caught:
        Installation.local(tmp_path, **changes)
    assert [t for t in told if t not in str(caught.value)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:hunter22@127.0.0.1:1/db",
        "mysql+pymysql://me:hunter22@127.0.0.1:1/db",
        "sqlite:////nowhere/at/all/x.db",
    ],
)
def test_an_unreachable_database_is_told_with_what_to_do(url: str, tmp_path: Path) -> None:
    """The database is named without its password, and that it is safe to try again."""
    installation = Installation(database=url, transport="unix://", checkpoints=tmp_path.as_uri())
    kind = SchemaMismatch if url.startswith("sqlite") else StoreUnavailable
    with pytest.raises(kind) as caught:
        Jobs(installation)
    told = ("/nowhere/at/all/x.db", "millstream up") if kind is SchemaMismatch else ("127.0.0.1:1/db", "nothing was done", "try again")
    assert [t for t in told if t not in str(caught.value)] == []
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("command", [("up",), ("jobs", "list"), ("node", "--pipelines", "tests.integration.test_bad_input")])
def test_an_unreachable_database_exits_five(command: tuple[str, ...], tmp_path: Path) -> None:
    """Each command says it on one line."""
    url = "postgresql+psycopg://me:hunter22@127.0.0.1:1/db"
    result = CliRunner().invoke(
        main, [*command, "--database", url, "--transport", f"unix://{tmp_path}", "--checkpoints", tmp_path.as_uri()]
    )
    assert (result.exit_code, result.stdout) == (5, "")
    assert "127.0.0.1:1/db" in result.stderr and "hunter22" not in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("url", ["redis://:hunter22@127.0.0.1:1", "amqp://me:hunter22@127.0.0.1:1//"])
def test_an_unreachable_broker_is_told(url: str) -> None:
    """Opening the transport names the broker, without its password."""
    with pytest.raises(ChannelError) as caught:
        open_transport(url, "millstream")
    assert "127.0.0.1:1" in str(caught.value)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://:hunter22@127.0.0.1:1", "amqp://me:hunter22@127.0.0.1:1//"])
def test_a_node_does_not_start_without_its_broker(
    installation: Installation, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``millstream node`` exits 5 and registers nothing."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "empty_pipelines.py").write_text("from millstream import Pipelines\n\npipelines = Pipelines()\n")
    monkeypatch.chdir(tmp_path)
    before = content(installation.database)
    result = CliRunner().invoke(main, ["node", "--pipelines", "empty_pipelines", "--local", str(tmp_path), "--transport", url])
    assert (result.exit_code, "127.0.0.1:1" in result.stderr, "hunter22" in result.stderr) == (5, True, False)
    assert content(installation.database) == before


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://bucket", "checkpoint storage 's3' is not known: use file:///shared/directory or a database URL"),
        ("file://host/directory", "write file:///absolute/directory"),
        ("file:relative", "write file:///absolute/directory"),
    ],
)
def test_a_checkpoint_url_that_is_no_place_is_refused(url: str, told: str) -> None:
    """What may be written instead is named."""
    with pytest.raises(ConfigurationError) as caught:
        open_storage(url)
    assert told in str(caught.value)


def test_a_node_does_not_start_on_a_checkpoint_directory_it_cannot_write(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``millstream node`` names the directory and registers nothing."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "empty_pipelines.py").write_text("from millstream import Pipelines\n\npipelines = Pipelines()\n")
    monkeypatch.chdir(tmp_path)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory should be")
    before = content(installation.database)
    arguments = ["node", "--pipelines", "empty_pipelines", "--local", str(tmp_path), "--checkpoints", (blocked / "snapshots").as_uri()]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code != 0, str(blocked) in result.stderr, "Traceback" in result.stderr) == (True, True, False)
    assert content(installation.database) == before


def test_a_checkpoint_directory_that_cannot_be_written_is_named() -> None:
    """The error shows the path."""
    with pytest.raises(StorageError, match="/proc/nothing"):
        open_storage("file:///proc/nothing").put("a/b", b"x")


def test_a_private_directory_is_not_taken_for_shared_storage(tmp_path: Path) -> None:
    """A node that does not find what the coordinator wrote is on another disk: the storage is named, and what every node must reach."""
    build = Pipelines()
    build.define("job")(lambda job, _config: numbers(job).sink_to(sink(), uid="out"))
    model = build.build("job").model
    shared, private = (open_storage((tmp_path / name).as_uri()) for name in ("shared", "private"))
    shared.put(f"{PROOF}/job-1", b"job-1")
    assert unmet(model, "job-1", shared, "unix") == []
    (problem,) = unmet(model, "job-1", private, "unix")
    assert private.url in problem and "mount one shared directory everywhere" in problem


def test_a_requirement_the_node_cannot_meet_fails_the_job(tmp_path: Path) -> None:
    """A job that requires a broker does not run over another transport: it fails with the requirement and the variable to set."""
    here = Pipelines()

    @here.define("job")
    def job(job: JobBuilder, config: dict[str, Any]) -> None:
        numbers(job).sink_to(sink(), uid="out")
        job.require("broker_transport")

    with quiet(tmp_path), EmbeddedCluster(here, directory=tmp_path) as cluster, pytest.raises(JobFailed) as caught:
        cluster.run("job", settings=StreamSettings(commit_deadline_ms=200), timeout=30)
    assert "broker transport is required" in str(caught.value) and "MILLSTREAM_TRANSPORT" in str(caught.value)


def test_a_job_whose_checkpoints_cannot_be_written_shows_the_directory(tmp_path: Path) -> None:
    """It is not deployed, its reason shows the path, and it goes on by itself once the directory can be written."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory should be")
    target = CollectTarget()
    here = Pipelines()

    @here.define("job")
    def job(job: JobBuilder, config: dict[str, Any]) -> None:
        numbers(job).key_by(int).reduce(max, uid="max").sink_to(CollectSink("out", target), uid="out")

    with quiet(tmp_path), EmbeddedCluster(here, directory=tmp_path) as cluster:
        submitted = cluster.submit("job", settings=StreamSettings(checkpoints=(blocked / "c").as_uri()))
        with pytest.raises(TimeoutError) as caught:
            cluster.wait(submitted, 0.5)
        assert target.values("out") == []
        blocked.unlink()
        assert cluster.wait(submitted, 30).state is JobState.FINISHED
    assert str(blocked) in str(caught.value)
    assert sorted(target.values("out")) == [1, 2, 3]


# -- the schema


def rewrite_schema(installation: Installation, **values: Any) -> None:
    with opened(installation) as database:
        database.run(lambda tx: tx.update(tx.t.schema, tx.t.schema.c.id == 1, **values))


def test_a_database_without_schema_is_refused(tmp_path: Path) -> None:
    """An empty database: ``millstream up`` is named, and nothing is created."""
    installation = Installation.local(tmp_path)
    sqlite3.connect(tmp_path / "millstream.db").close()
    with opened(installation) as database, refused(installation, SchemaMismatch, "no Millstream schema", "millstream up"):
        check_schema(database)


def test_a_newer_schema_is_refused(installation: Installation) -> None:
    """By every start, and by ``millstream up`` too: both versions are named."""
    rewrite_schema(installation, version=SCHEMA_VERSION + 1)
    told = (f"schema {SCHEMA_VERSION + 1}", f"knows {SCHEMA_VERSION}", "upgrade Millstream")
    with refused(installation, SchemaMismatch, *told):
        Jobs(installation)
    with opened(installation) as database, refused(installation, SchemaMismatch, *told):
        create_schema(database)
    result = CliRunner().invoke(main, ["up", "--database", installation.database])
    assert (result.exit_code, "upgrade Millstream" in result.stderr) == (4, True)


def test_an_older_schema_is_refused_until_it_is_migrated(installation: Installation) -> None:
    """``millstream up`` is named."""
    rewrite_schema(installation, version=SCHEMA_VERSION - 1)
    with refused(installation, SchemaMismatch, f"schema {SCHEMA_VERSION - 1}", f"needs {SCHEMA_VERSION}", "millstream up"):
        Jobs(installation)


def test_a_half_done_migration_is_refused_until_it_is_repeated(installation: Installation) -> None:
    """A migration that died: nothing starts on it, ``millstream up`` repeats what is missing."""
    rewrite_schema(installation, state="MIGRATING")
    with opened(installation) as database:
        database.tables.history.drop(database.engine)
        with database.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM millstream_alembic")
        with refused(installation, SchemaMismatch, "was not finished", "millstream up"):
            check_schema(database)
    assert CliRunner().invoke(main, ["up", "--database", installation.database]).exit_code == 0
    with Jobs(installation, pipelines) as found:
        assert found.submit("plain").name == "plain"


# -- the command line


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--config", "{size: 1}"), 2, ("--config is not JSON", "line 1 column 2", "@file.json")),
        (("--config", "[1]"), 2, ("JSON array, not an object",)),
        (("--config", ""), 2, ("--config is not JSON",)),
        (("--config", "@missing.json"), 2, ("--config @missing.json", "/missing.json cannot be read", "No such file")),
        (("--config", '{"size": 0}'), 4, ("config of pipeline 'sized': size", "greater than or equal to 1")),
        (("--setting", "epoch_interval_ms"), 2, ("--setting 'epoch_interval_ms'", "key=value")),
        (("--setting", "epoch_intervall_ms=5"), 2, ("no setting 'epoch_intervall_ms'", "epoch_interval_ms")),
        (("--setting", "epoch_interval_ms=soon"), 2, ("epoch_interval_ms is 'soon'", "whole number of milliseconds, 0 or more")),
        (("--setting", "retained=1", "--setting", "retained=2"), 2, ("'retained' is given twice",)),
        (("--setting", "epoch_interval_ms=0"), 4, ("epoch_interval_ms is 0", "BEST_EFFORT")),
        (("--setting", "restart.kind=never"), 4, ("unknown restart kind 'never'",)),
        (("--override", "same=3"), 2, ("--override 'same'", "operator.field=value")),
        (("--override", "same.colour=3"), 2, ("--override 'same.colour'", "capacity")),
        (("--override", "same.parallelism=many"), 2, ("--override same.parallelism is 'many'", "whole number of subtasks, at least 1")),
        (("--override", "nobody.parallelism=2"), 4, ("'nobody'", "no such operator")),
        (("--rename", "old"), 2, ("--rename 'old'", "key=value")),
        (("--name", "a b"), 2, ("'a b'", "letters, digits")),
        (("--namespace", "a b"), 2, ("'a b'", "letters, digits")),
        (("--savepoint", "yesterday"), 3, ("'yesterday'", "millstream jobs savepoints")),
        (("--parallelism", "0"), 2, ("--parallelism",)),
        (("--timeout", "-1"), 2, ("--timeout",)),
    ],
)
def test_bad_arguments_are_told_with_their_exit_code(
    installation: Installation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    told: tuple[str, ...],
) -> None:
    """Malformed JSON, settings and overrides: what is wrong, what to write, and nothing submitted."""
    monkeypatch.setenv("COLUMNS", "400")
    given = () if "--config" in arguments else ("--config", json.dumps({"size": 1}))
    before = content(installation.database)
    command = ["jobs", "submit", "sized", "--pipelines", "tests.integration.test_bad_input", "--local", str(tmp_path), *given, *arguments]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    assert [t for t in told if t not in result.stderr] == [], result.stderr
    assert "Traceback" not in result.stderr
    assert content(installation.database) == before


def test_the_working_directory_is_not_needed(installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bad argument the same command submits: the refusals above are the arguments'."""
    assert os.getcwd() != str(tmp_path)
    command = [
        "jobs",
        "submit",
        "sized",
        "--pipelines",
        "tests.integration.test_bad_input",
        "--local",
        str(tmp_path),
        "--config",
        '{"size": 1}',
    ]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, "submitted sized" in result.stdout) == (0, True), result.stderr
