"""A source and a sink of one's own: files of fixed-size records, and a two-phase commit into an SQLite file."""

import contextlib
import json
import pathlib
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from millstream import (
    CommitAnswer,
    CommitResult,
    Committable,
    ConnectorContext,
    EmbeddedCluster,
    Fenced,
    JobBuilder,
    Pipelines,
    Read,
    SinkCapability,
    SinkError,
    SourceCapability,
    SourceError,
    Split,
    StreamSettings,
)

RECORD = struct.Struct("<qd")  # UTC milliseconds, measured value


class SensorFiles:
    """Closed files of fixed-size records, one split a file."""

    kind = "sensor-files"
    version = 1
    bounded = True
    capability = SourceCapability.REPLAYABLE  # a file that is closed can be read again from any record

    def __init__(self, directory: str) -> None:
        self.directory = pathlib.Path(directory)

    def config(self) -> dict[str, Any]:
        return {"directory": str(self.directory)}

    def problems(self) -> list[str]:
        return [] if self.directory.is_dir() else [f"{self.directory} is not a directory"]

    def discover(self, known: frozenset[str]) -> list[Split]:
        names = sorted(p.name for p in self.directory.glob("*.bin"))
        return [Split(name) for name in names if name not in known]

    def open(self, split: Split, cursor: Any, context: ConnectorContext) -> "SensorReader":
        return SensorReader(self.directory / split.split_id, cursor or 0)


class SensorReader:
    """Reads one file."""

    def __init__(self, path: pathlib.Path, records: int) -> None:
        self.path, self.records = path, records
        self.file = path.open("rb")
        if path.stat().st_size < records * RECORD.size:
            raise SourceError(f"{path} is shorter than it was: {records} records had been read")
        self.file.seek(records * RECORD.size)

    def poll(self, limit: int) -> Read:
        data = self.file.read(limit * RECORD.size)
        if len(data) % RECORD.size:
            raise SourceError(f"{self.path} ends within a record: it is still being written, or damaged")
        found = list(RECORD.iter_unpack(data))
        self.records += len(found)
        return Read([(self.path.stem, value) for _, value in found], [ms for ms, _ in found], exhausted=len(found) < limit)

    def cursor(self) -> int:
        return self.records  # the next record: behind all that were returned

    def close(self) -> None:
        self.file.close()


TABLES = """
CREATE TABLE IF NOT EXISTS fence (job, operator, generation INTEGER, PRIMARY KEY (job, operator));
CREATE TABLE IF NOT EXISTS staging (job, operator, subtask INTEGER, generation INTEGER, n INTEGER, body);
CREATE TABLE IF NOT EXISTS committed (id PRIMARY KEY, line_count INTEGER);
CREATE TABLE IF NOT EXISTS ledger (body);
"""
SEGMENT = "job = ? AND operator = ? AND subtask = ? AND generation = ? AND n = ?"


class LedgerSink:
    """Lines of JSON: staged before a barrier is acknowledged, moved into the ledger when the epoch commits."""

    kind = "ledger"
    version = 1
    capability = SinkCapability.TWO_PHASE_COMMIT

    def __init__(self, path: str) -> None:
        self.path = path

    def config(self) -> dict[str, Any]:
        return {"path": self.path}

    def problems(self) -> list[str]:
        return []

    def open(self, context: ConnectorContext) -> "LedgerWriter":
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(TABLES)
        writer = LedgerWriter(self.path, context)
        writer.raise_fence()
        return writer


class LedgerWriter:
    """One subtask's end."""

    def __init__(self, path: str, context: ConnectorContext) -> None:
        self.path, self.context = path, context
        self.owner = (context.job, context.operator)
        self.buffer: list[str] = []
        self.rows, self.n = 0, 1

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction, on a connection of its own: ``commit`` runs on another thread than the rest."""
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None, timeout=2)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            fence = connection.execute("SELECT generation FROM fence WHERE job = ? AND operator = ?", self.owner).fetchone()
            if fence is not None and fence[0] > self.context.generation:
                raise Fenced(f"generation {self.context.generation} is stale: the ledger is fenced at {fence[0]}")
            yield connection  # an exception closes the connection, which rolls back
            self.context.guard()  # not a moment after the lease
            connection.execute("COMMIT")

    def raise_fence(self) -> None:
        with self.transaction() as t:
            t.execute("INSERT OR REPLACE INTO fence VALUES (?, ?, ?)", (*self.owner, self.context.generation))

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self.buffer += [json.dumps(value) for value in values]
        if len(self.buffer) >= 1000:
            self.flush()

    def flush(self) -> None:
        if not self.buffer:
            return
        segment = (*self.owner, self.context.subtask, self.context.generation, self.n)
        with self.transaction() as t:
            t.executemany("INSERT INTO staging VALUES (?, ?, ?, ?, ?, ?)", [(*segment, body) for body in self.buffer])
        self.rows += len(self.buffer)
        self.buffer = []

    def close(self) -> None:
        """Every transaction has a connection of its own: nothing is held."""

    def prepare_commit(self, epoch: int) -> list[Committable]:
        self.flush()
        if not self.rows:
            return []
        c = self.context
        where: dict[str, Any] = {"job": c.job, "generation": c.generation, "n": self.n}  # where the rows lie, whoever commits them
        sealed = Committable(f"{c.job}:{c.operator}:{c.subtask}:{epoch}", c.operator, c.subtask, epoch, self.rows, "", where)
        self.rows, self.n = 0, self.n + 1
        return [sealed]

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        try:
            for sealed in committables:
                self.commit_one(sealed)
        except sqlite3.OperationalError as error:
            return CommitAnswer(CommitResult.RETRY, str(error))
        except SinkError as error:
            return CommitAnswer(CommitResult.FAILED, str(error))
        return CommitAnswer(CommitResult.COMMITTED)

    def commit_one(self, sealed: Committable) -> None:
        segment = segment_of(sealed)
        with self.transaction() as t:
            if t.execute("SELECT 1 FROM committed WHERE id = ?", (sealed.id,)).fetchone():
                return
            moved = t.execute(f"INSERT INTO ledger SELECT body FROM staging WHERE {SEGMENT}", segment).rowcount
            if moved != sealed.rows:
                raise SinkError(f"{sealed.id}: {sealed.rows} rows were sealed, {moved} are staged")
            t.execute("INSERT INTO committed VALUES (?, ?)", (sealed.id, sealed.rows))
            t.execute(f"DELETE FROM staging WHERE {SEGMENT}", segment)

    def clean(self, keep: Sequence[Committable]) -> None:
        kept = {segment_of(sealed) for sealed in keep}
        older = "SELECT DISTINCT job, operator, subtask, generation, n FROM staging WHERE job = ? AND operator = ? AND generation < ?"
        with self.transaction() as t:
            for segment in t.execute(older, (*self.owner, self.context.generation)).fetchall():
                if segment[2] % self.context.parallelism == self.context.subtask and segment not in kept:
                    t.execute(f"DELETE FROM staging WHERE {SEGMENT}", segment)


def segment_of(sealed: Committable) -> tuple[Any, ...]:
    """Where the rows of a committable lie: taken from it, never computed from the present job or generation."""
    return sealed.body["job"], sealed.operator, sealed.subtask, sealed.body["generation"], sealed.body["n"]


pipelines = Pipelines()
failures: list[Any] = []


def fragile(measured: tuple[str, float]) -> list[Any]:
    if measured == ("b", 900.0) and not failures:
        failures.append(measured)
        raise RuntimeError("fails once")
    return list(measured)


@pipelines.define("measurements", parallelism=2)
def measurements(job: JobBuilder, config: dict[str, Any]) -> None:
    read = job.source(SensorFiles(config["sensors"]), uid="sensors")
    read.map(fragile, uid="fragile").sink_to(LedgerSink(config["ledger"]), uid="ledger")


if __name__ == "__main__":
    for name in ("a", "b"):
        pathlib.Path(f"{name}.bin").write_bytes(b"".join(RECORD.pack(i * 1000, float(i)) for i in range(1000)))
    with EmbeddedCluster(pipelines) as cluster:
        settings = StreamSettings(epoch_interval_ms=50, source_batch=50)
        job = cluster.run("measurements", config={"sensors": ".", "ledger": "ledger.db"}, settings=settings, timeout=60)
    with contextlib.closing(sqlite3.connect("ledger.db")) as connection:
        lines = sorted(json.loads(body) for (body,) in connection.execute("SELECT body FROM ledger"))
    assert lines == [[name, float(i)] for name in ("a", "b") for i in range(1000)]
    assert failures and job.restarts == 1
    print(f"failed once: {len(lines)} lines in the ledger, each once")
