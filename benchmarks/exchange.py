"""Two node processes, parallelism 2, a hash edge between four subtask processes: STRICT_EXACTLY_ONCE, epochs every second, over each transport.

    python -m benchmarks exchange --n 6000000

Rate: ``n`` over the time from submit to FINISHED (all committed), less that of a run over two records. Rows and the last count of each word are compared.
"""

from __future__ import annotations

import sys
import time
import uuid
from pathlib import Path

from millstream.dev import DevCluster
from millstream_schema.states import JobState

from .measurement import Result, options, quiet, rate_of, scratch, show
from .process_jobs import expected_counts
from .services import transports
from .tally import read_tally

TARGET = 250_000


def run(cluster: DevCluster, n: int, directory: Path) -> tuple[float, int]:
    """(seconds, epochs) of one job; raises AssertionError when its output is not exactly what it must be."""
    name = uuid.uuid4().hex[:8]
    out = directory / name
    out.mkdir()
    started = time.perf_counter()
    row = cluster.wait(cluster.submit("counting", name=name, config={"n": n, "directory": str(out)}), 300)
    seconds = time.perf_counter() - started
    assert row.state is JobState.FINISHED, f"the job ended as {row.state}: {row.reason}"
    tally = read_tally(out)
    assert tally.rows == n, f"{tally.rows} rows were committed of {n}"
    assert tally.highest == expected_counts(n), "a word's count is wrong"
    return seconds, row.newest_durable


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__, 6_000_000)
    parser.add_argument("--transport", choices=["unix", "redis", "rabbitmq"])
    args = parser.parse_args(argv)
    n, iterations = (20_000, 1) if args.once else (args.n, args.iterations)
    quiet()
    for name, url in transports():
        if args.transport not in (None, name):
            continue
        with (
            scratch() as directory,
            DevCluster(
                "benchmarks.process_jobs:pipelines", directory=directory, nodes=2, transport=url, lease_ms=10_000, spares=2
            ) as cluster,
        ):
            boot = 0.0
            if not args.once:
                run(cluster, 2, directory)  # the nodes are up, and imports done
                boot = min(run(cluster, 2, directory)[0] for _ in range(2))
            runs = sorted((run(cluster, n, directory) for _ in range(iterations)), key=lambda r: r[0])
        seconds, epochs = runs[len(runs) // 2]
        rate = rate_of(n, seconds - boot, once=args.once)
        show(
            Result(
                f"exchange {name}", n=n, seconds=round(seconds - boot, 3), rate=rate, target=f">= {TARGET:,}/s", met=None if rate is None else rate >= TARGET,
                notes=f"STRICT, output compared, 2 nodes, parallelism 2, {epochs} epochs, start-up {boot:.2f} s subtracted, "
                f"runs {[rate_of(n, s - boot, once=False) for s, _ in runs]}",
            )
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
