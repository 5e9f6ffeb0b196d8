"""Memory under lasting load: two node processes, parallelism 2, STRICT_EXACTLY_ONCE, 20,000 records a second over 1,000 keys.

    python -m benchmarks soak --minutes 30

The resident sets of all nodes and subtasks are sampled every two seconds. Reported: the slope of their sum over the last two thirds, in percent of its mean per ten minutes;
target 1 %. A run of a few minutes still shows caches filling, so only runs of 30 minutes and more are judged. The job is drained and its counts are compared.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence

import psutil

from millstream.dev import DevCluster
from millstream_schema.states import Desired, JobState

from .measurement import Result, options, quiet, scratch, show
from .tally import read_tally

TARGET = 1.0
RATE = 20_000


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Least squares through (seconds, MiB): percent of the mean per ten minutes."""
    n = len(samples)
    mean_t = sum(t for t, _ in samples) / n
    mean = sum(v for _, v in samples) / n
    rise = sum((t - mean_t) * (v - mean) for t, v in samples) / sum((t - mean_t) ** 2 for t, _ in samples)
    return rise * 600 / mean * 100


def resident(cluster: DevCluster) -> dict[str, float]:
    """MiB now, by role."""
    found: dict[str, float] = defaultdict(float)
    for node in cluster.nodes.values():
        try:
            process = psutil.Process(node.pid)
            found["nodes"] += process.memory_info().rss / 2**20
            for child in process.children(recursive=True):
                found["subtasks"] += child.memory_info().rss / 2**20
        except psutil.Error:
            continue  # it ended between two looks
    return found


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__, 0)
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args(argv)
    minutes = 0.25 if args.once else args.minutes
    quiet()
    with scratch() as directory:
        out = directory / "out"
        out.mkdir()
        samples: list[tuple[float, dict[str, float]]] = []
        with DevCluster("benchmarks.process_jobs:pipelines", directory=directory, nodes=2, lease_ms=10_000) as cluster:
            job = cluster.submit("counting", config={"n": 0, "rate": RATE, "directory": str(out)})
            cluster.wait(job, 60, JobState.RUNNING)
            began = time.monotonic()
            while (now := time.monotonic() - began) < minutes * 60:
                samples.append((now, resident(cluster)))
                time.sleep(min(2.0, minutes * 6))
            status = cluster.operations.status(job)
            cluster.operations.stop(job, Desired.DRAIN)
            row = cluster.wait(job, 60)
            assert row.state is JobState.FINISHED, f"the job ended as {row.state}: {row.reason}"
        tally = read_tally(out)
        kept = sum(f.stat().st_size for f in (directory / "checkpoints").rglob("*") if f.is_file()) / 2**20
        base = sum(f.stat().st_size for f in directory.glob("millstream.db*")) / 2**20
    assert tally.rows == sum(tally.highest.values()), f"{tally.rows} rows were committed, the counts say {sum(tally.highest.values())}"
    last = samples[len(samples) // 3 :]
    total = slope([(t, sum(v.values())) for t, v in last])
    roles = {role: round(slope([(t, v[role]) for t, v in last]), 2) for role in ("nodes", "subtasks")}
    show(
        Result(
            f"soak {minutes:g} min", n=tally.rows, rate=round(tally.rows / (minutes * 60)), target=f"<= {TARGET:g} % / 10 min", met=total <= TARGET if minutes >= 30 else None,
            notes=f"RSS {total:+.2f} % / 10 min over the last two thirds (nodes {roles['nodes']:+.2f}, subtasks {roles['subtasks']:+.2f}), "
            f"{sum(samples[0][1].values()):.0f} -> {sum(samples[-1][1].values()):.0f} MiB, {row.newest_durable} epochs, {status['restarts']} restarts, "
            f"checkpoints {kept:.1f} MiB, database {base:.1f} MiB, counts compared",
            more={"slope_percent": round(total, 3), **roles},
        )
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
