import contextlib
import json
import pathlib
import sqlite3
import struct

from millstream import (
    CommitAnswer,
    CommitResult,
    Committable,
    EmbeddedCluster,
    Fenced,
    Pipelines,
    Read,
    SinkCapability,
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

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)

    def config(self):
        return {"directory": str(self.directory)}

    def problems(self):
        return [] if self.directory.is_dir() else [f"{self.directory} is not a directory"]

    def discover(self, known):
        names = sorted(p.name for p in self.directory.glob("*.bin"))
        return [Split(name) for name in names if name not in known]

    def open(self, split, cursor, context):
        return SensorReader(self.directory / split.split_id, cursor or 0)


class SensorReader:
    def __init__(self, path, records):
        self.path, self.records = path, records
        self.file = path.open("rb")
        if path.stat().st_size < records * RECORD.size:
            raise SourceError(f"{path} is shorter than it was: {records} records had been read")
        self.file.seek(records * RECORD.size)

    def poll(self, limit):
        data = self.file.read(limit * RECORD.size)
        if len(data) % RECORD.size:
            raise SourceError(f"{self.path} ends within a record: it is still being written, or damaged")
        found = list(RECORD.iter_unpack(data))
        self.records += len(found)
        return Read([(self.path.stem, value) for _, value in found], [ms for ms, _ in found], exhausted=len(found) < limit)

    def cursor(self):
        return self.records  # of the next record: exclusive of all that were returned

    def close(self):
        self.file.close()


TABLES = """
CREATE TABLE IF NOT EXISTS fence (job, operator, generation INTEGER, PRIMARY KEY (job, operator));
CREATE TABLE IF NOT EXISTS staging (job, operator, subtask INTEGER, generation INTEGER, n INTEGER, body);
CREATE TABLE IF NOT EXISTS committed (id PRIMARY KEY, line_count INTEGER);
CREATE TABLE IF NOT EXISTS ledger (body);
"""


class LedgerSink:
    """Two-phase commit into an SQLite file: staged before a barrier is acknowledged, moved when the epoch commits."""

    kind = "ledger"
    version = 1
    capability = SinkCapability.TWO_PHASE_COMMIT

    def __init__(self, path):
        self.path = str(path)

    def config(self):
        return {"path": self.path}

    def problems(self):
        return []

    def open(self, context):
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(TABLES)
        writer = LedgerWriter(self.path, context)
        writer.raise_fence()
        return writer


class LedgerWriter:
    def __init__(self, path, context):
        self.path, self.context = path, context
        self.buffer, self.rows, self.n = [], 0, 1

    @contextlib.contextmanager
    def transaction(self):
        """One transaction on a connection of its own: :meth:`commit` runs on another thread than the rest."""
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None, timeout=2)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            fence = connection.execute("SELECT generation FROM fence WHERE job = ? AND operator = ?", self.owner).fetchone()
            if fence is not None and fence[0] > self.context.generation:
                raise Fenced(f"generation {self.context.generation} is stale: the ledger is fenced at {fence[0]}")
            yield connection  # an exception closes the connection, which rolls back
            self.context.guard()  # not a moment after the lease
            connection.execute("COMMIT")

    @property
    def owner(self):
        return self.context.job, self.context.operator

    def raise_fence(self):
        with self.transaction() as t:
            t.execute("INSERT OR REPLACE INTO fence VALUES (?, ?, ?)", (*self.owner, self.context.generation))

    def write(self, values, timestamps):
        self.buffer += [json.dumps(value) for value in values]
        if len(self.buffer) >= 1000:
            self.flush()

    def flush(self):
        if not self.buffer:
            return
        c = self.context
        with self.transaction() as t:
            t.executemany(
                "INSERT INTO staging VALUES (?, ?, ?, ?, ?, ?)",
                [(c.job, c.operator, c.subtask, c.generation, self.n, body) for body in self.buffer],
            )
        self.rows += len(self.buffer)
        self.buffer = []

    def close(self):
        """Every transaction has a connection of its own: nothing is held."""

    def prepare_commit(self, epoch):
        self.flush()
        if not self.rows:
            return []
        c = self.context
        body = {"job": c.job, "generation": c.generation, "n": self.n}  # where the rows lie, whoever commits them later
        sealed = Committable(f"{c.job}:{c.operator}:{c.subtask}:{epoch}", c.operator, c.subtask, epoch, self.rows, "", body)
        self.rows, self.n = 0, self.n + 1
        return [sealed]

    def commit(self, committables):
        try:
            for sealed in committables:
                answer = self.commit_one(sealed)
                if answer.result is CommitResult.FAILED:
                    return answer
        except sqlite3.OperationalError as error:
            return CommitAnswer(CommitResult.RETRY, str(error))
        return CommitAnswer(CommitResult.COMMITTED)

    def commit_one(self, sealed):
        where = (sealed.body["job"], sealed.operator, sealed.subtask, sealed.body["generation"], sealed.body["n"])
        matching = "job = ? AND operator = ? AND subtask = ? AND generation = ? AND n = ?"
        with self.transaction() as t:
            if t.execute("SELECT 1 FROM committed WHERE id = ?", (sealed.id,)).fetchone():
                return CommitAnswer(CommitResult.ALREADY_COMMITTED)
            moved = t.execute(f"INSERT INTO ledger SELECT body FROM staging WHERE {matching}", where).rowcount
            if moved != sealed.rows:
                t.execute("ROLLBACK")
                t.execute("BEGIN")
                return CommitAnswer(CommitResult.FAILED, f"{sealed.id}: {sealed.rows} rows were sealed, {moved} are staged")
            t.execute("INSERT INTO committed VALUES (?, ?)", (sealed.id, sealed.rows))
            t.execute(f"DELETE FROM staging WHERE {matching}", where)
        return CommitAnswer(CommitResult.COMMITTED)

    def clean(self, keep):
        c = self.context
        kept = {(k.body["generation"], k.body["n"], k.subtask) for k in keep if k.body["job"] == c.job}
        with self.transaction() as t:
            found = t.execute(
                "SELECT DISTINCT generation, n, subtask FROM staging WHERE job = ? AND operator = ? AND generation < ?",
                (*self.owner, c.generation),
            ).fetchall()
            for generation, n, subtask in found:
                if subtask % c.parallelism == c.subtask and (generation, n, subtask) not in kept:
                    t.execute(
                        "DELETE FROM staging WHERE job = ? AND operator = ? AND subtask = ? AND generation = ? AND n = ?",
                        (*self.owner, subtask, generation, n),
                    )


pipelines = Pipelines()
failures = []


@pipelines.define("measurements")
def measurements(job, config):
    def fragile(measured):
        if measured == ("b", 900.0) and not failures:
            failures.append(measured)
            raise ConnectionError("fails once")
        return list(measured)

    read = job.source(SensorFiles(config["sensors"]), uid="sensors", parallelism=2)
    read.map(fragile, uid="fragile", parallelism=2).sink_to(LedgerSink(config["ledger"]), uid="ledger", parallelism=2)


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
    print(f"failed once; {len(lines)} lines in the ledger, each once")
