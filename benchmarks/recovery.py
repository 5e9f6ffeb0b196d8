"""How long until records flow again: two node processes, parallelism 2, STRICT_EXACTLY_ONCE, 2,000 records a second.

    python -m benchmarks recovery --iterations 10

``node``: one node gets SIGKILL; time from the expiry of its lease (by the row that holds it) until the first record of the new generation reached both sinks. ``subtask``: one
sink's process gets SIGKILL while its node lives; time from the kill. Both by the machine's clock. The job is drained at the end and its counts are compared.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import sqlalchemy as sa

from millstream.dev import DevCluster
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import Desired, JobState
from millstream_schema.store.database import Database

from .measurement import Result, options, percentile, quiet, scratch, show
from .tally import Arrival, arrivals, read_tally

TARGET_S = 2.0
LEASE_MS = 3_000
ONCE_LEASE_MS = 1_500
RATE = 2_000


def first_records(cluster: DevCluster, job: str, out: Path, above: int, timeout: float = 60.0) -> list[Arrival]:
    """First arrival at each of the two sinks in a generation above ``above``, the newest such generation that has both. Raises TimeoutError with the job's state."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = arrivals(out)
        newest = max((a.generation for a in found), default=0)
        both = {a.subtask: a for a in found if a.generation == newest}
        if newest > above and len(both) == 2:
            return list(both.values())
        time.sleep(0.005)
    status = cluster.operations.status(job)
    last = [f"{h['event']}: {h['detail']}" for h in status["history"][:6]]
    raise TimeoutError(
        f"no records of a generation above {above} after {timeout} s; job {status['state']} ({status['reason']}), newest first: {last}"
    )


def lease_expiry(database: Database, node: str) -> float:
    """UTC seconds at which the lease of the node of this name expires or expired."""
    table = database.tables.node
    with database.engine.connect() as connection:
        return float(connection.execute(sa.select(sa.func.max(table.c.expires_us)).where(table.c.name == node)).scalar_one()) / 1e6


def kill_node(cluster: DevCluster, job: str, out: Path, turn: int) -> float:
    """Seconds from the lease's expiry to the first record."""
    generation = max(a.generation for a in arrivals(out))
    name = sorted(cluster.nodes)[turn % 2]
    victim = cluster.nodes[name]
    victim.kill()
    victim.wait()
    expiry = lease_expiry(cluster.database, name)
    cluster.start_node(name)
    return max(a.at for a in first_records(cluster, job, out, generation)) / 1e9 - expiry


def kill_subtask(cluster: DevCluster, job: str, out: Path, turn: int) -> float:
    """Seconds from the kill to the first record."""
    newest = max(a.generation for a in arrivals(out))
    victim = next(a for a in arrivals(out) if a.generation == newest and a.subtask == turn % 2)
    killed = time.time_ns()
    os.kill(victim.pid, signal.SIGKILL)
    return (max(a.at for a in first_records(cluster, job, out, newest)) - killed) / 1e9


Kill = Callable[[DevCluster, str, Path, int], float]
KILLS: Mapping[str, Kill] = {"subtask": kill_subtask, "node": kill_node}


def settle(cluster: DevCluster, job: str, epochs: int) -> None:
    """Until some more epochs are durable: each kill finds the job at work, and its restart budget filled up."""
    wanted = cluster.operations.find(job).newest_durable + epochs
    deadline = time.monotonic() + 60
    while cluster.operations.find(job).newest_durable < wanted:
        assert time.monotonic() < deadline, "no epoch became durable for 60 s"
        time.sleep(0.05)


def measure(kills: Sequence[Kill], lease_ms: int = LEASE_MS, between: int = 2) -> list[float]:
    """One job, killed in these ways one after the other, ``between`` durable epochs apart; raises AssertionError when its counts are wrong in the end."""
    with scratch() as directory:
        out = directory / "out"
        out.mkdir()
        with DevCluster(
            "benchmarks.process_jobs:pipelines", directory=directory, nodes=2, lease_ms=lease_ms, restart=False, spares=4
        ) as cluster:
            settings = StreamSettings(restart=RestartPolicy(kind="fixed", delay_ms=50, failures=100, stalls=100, interval_ms=1000))
            job = cluster.submit("counting", config={"n": 0, "rate": RATE, "directory": str(out)}, settings=settings)
            first_records(cluster, job, out, 0)
            found = []
            for turn, kill in enumerate(kills):
                settle(cluster, job, between)
                found.append(kill(cluster, job, out, turn))
            settle(cluster, job, between)
            cluster.operations.stop(job, Desired.DRAIN)
            row = cluster.wait(job, 60)
            assert row.state is JobState.FINISHED, f"the job ended as {row.state}: {row.reason}"
        tally = read_tally(out)
        assert tally.rows == sum(tally.highest.values()), f"{tally.rows} rows were committed, the counts say {sum(tally.highest.values())}"
    return found


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__, 10)
    parser.set_defaults(iterations=10)
    parser.add_argument("--only", choices=["node", "subtask"])
    args = parser.parse_args(argv)
    wanted = {name: kill for name, kill in KILLS.items() if args.only in (None, name)}
    quiet()
    # once: each way to die once, in one job
    once = dict(zip(wanted, measure(list(wanted.values()), ONCE_LEASE_MS, 1))) if args.once else {}
    for name, kill in wanted.items():
        found = [once[name]] if args.once else measure([kill] * args.iterations)
        median = statistics.median(found)
        since = f"lease expiry ({ONCE_LEASE_MS if args.once else LEASE_MS} ms lease)" if name == "node" else "SIGKILL"
        show(
            Result(
                f"recovery {name}", n=len(found), p50_ms=round(median * 1000), p99_ms=round(percentile(found, 0.99) * 1000), target=f"median <= {TARGET_S:.0f} s",
                met=None if args.once else median <= TARGET_S,
                notes=f"STRICT, from {since} to the first record at both sinks, restart delay 50 ms, counts compared, all (s): {[round(f, 2) for f in found]}",
            )
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
