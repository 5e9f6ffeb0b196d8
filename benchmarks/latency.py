"""Source to upsert sink at 1,000 records a second: two node processes, parallelism 2, a hash edge, an SQL upsert, over each transport.

    python -m benchmarks latency --n 20000

A record's age is taken when the transaction that holds it has committed, from the moment it was *due* at the source, not from when it was read: a pause counts against all
records that were due meanwhile. The first two seconds are left out. The newest row of each key is compared. ``--once``: over one transport, AF_UNIX unless another is given.
"""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.dev import DevCluster
from millstream_schema.connectors import Json
from millstream_schema.states import JobState
from millstream_schema.target.connection import connect

from .measurement import Result, options, percentile, quiet, scratch, show
from .process_jobs import KEYS, SPLITS, ages
from .services import POSTGRES, answers, transports

RATE = 1000
TARGET_MS = 15.0


@contextmanager
def target_table(directory: Path) -> Iterator[tuple[str, str, str]]:
    """(database, URL, table): PostgreSQL where there is one, else a file; dropped afterwards."""
    server = answers(POSTGRES)
    url = POSTGRES if server else f"sqlite:///{directory / 'target.db'}"
    table = f"bench_latency_{uuid.uuid4().hex[:8]}"
    connection = connect(url)
    try:
        with connection.transaction() as transaction:
            transaction.execute(f"CREATE TABLE {table} (name VARCHAR(40) PRIMARY KEY, position BIGINT, due DOUBLE PRECISION)")
        yield "PostgreSQL" if server else "SQLite", url, table
        with connection.transaction() as transaction:
            transaction.execute(f"DROP TABLE {table}")
    finally:
        connection.close()


def check(url: str, table: str, n: int) -> None:
    """Raises AssertionError when a key's row is not its newest record."""
    connection = connect(url)
    try:
        with connection.transaction() as transaction:
            found: dict[str, int] = dict(transaction.fetch(f"SELECT name, position FROM {table}"))
    finally:
        connection.close()
    newest = {f"{split}-{i % KEYS}": i for split in range(SPLITS) for i in range(n // SPLITS)}
    assert found == newest, f"{len(found)} rows, {sum(found.get(k) != i for k, i in newest.items())} of {len(newest)} wrong"


def run(transport: str | None, n: int, *, settle: float, leave_out: float) -> tuple[list[float], str]:
    """Ages in ms, in no order, and the database's name. Records are due ``settle`` seconds after submission; those of the first ``leave_out`` seconds are not told."""
    with scratch() as directory, tempfile.TemporaryDirectory(dir=directory) as out, target_table(directory) as (database, url, table):
        with DevCluster(
            "benchmarks.process_jobs:pipelines", directory=directory, nodes=2, transport=transport, lease_ms=10_000, spares=2
        ) as cluster:
            start = time.monotonic() + settle
            config: dict[str, Json] = {"start": start, "rate": RATE, "n": n, "url": url, "table": table, "directory": out}
            row = cluster.wait(cluster.submit("upserts", config=config), n / RATE + 120)
            assert row.state is JobState.FINISHED, f"the job ended as {row.state}: {row.reason}"
            assert not row.restarts, f"the job was restarted {row.restarts} times: no latency can be told"
            check(url, table, n)
        noted = [ages(file) for file in sorted(Path(out).iterdir())]
        assert sum(map(len, noted)) == n, f"{sum(map(len, noted))} records of {n} were written"
        found = [age for one in noted for age in one[int(leave_out * RATE / len(noted)) :]]
    return [age * 1000 for age in found], database


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__, 20_000)
    parser.add_argument("--transport", choices=["unix", "redis", "rabbitmq"])
    args = parser.parse_args(argv)
    n = 1_000 if args.once else args.n
    wanted = args.transport or ("unix" if args.once else None)
    quiet()
    for name, url in transports():
        if wanted not in (None, name):
            continue
        found, database = run(url, n, settle=3.0 if args.once else 8.0, leave_out=0.0 if args.once else 2.0)
        p50, p99 = percentile(found, 0.5), percentile(found, 0.99)
        show(
            Result(
                f"latency {name}", n=n, p50_ms=round(p50, 2), p99_ms=round(p99, 2), target=f"p50 <= {TARGET_MS:.0f} ms", met=None if args.once else p50 <= TARGET_MS,
                notes=f"{RATE}/s, EFFECTIVELY_ONCE, upsert into {database}, 2 nodes, parallelism 2, epochs 1 s, age from due to committed, highest {max(found):.0f} ms",
            )
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
