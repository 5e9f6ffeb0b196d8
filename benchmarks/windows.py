"""Embedded keyed tumbling-window sum on one CPU: 1,000 keys, records up to 2 s out of order, windows of 10 s; epochs every second, durable checkpoints.

    python -m benchmarks windows --n 2000000

Two densities: 10,000 records per event-second (100 per key and window) and 100 (1.6: windows dominate). The records are those of ``inputs.py``, for
the peers too. STRICT_EXACTLY_ONCE into a two-phase sink; every (key, window, sum) is compared afterwards.
"""

from __future__ import annotations

import gc
import sys

from millstream.embedded import EmbeddedCluster
from millstream.pipelines import Pipelines
from millstream_tasks.sinks.memory import CollectSink, CollectTarget
from millstream_tasks.sources.memory import CollectionSource

from .inputs import DISORDER, WINDOW, Record, records, sums
from .measurement import Result, Timing, net, one_core, options, quiet, rate_of, scratch, show, timed

TARGET = 500_000


def run(items: list[Record], epochs: list[int]) -> Timing:
    """One job over ``items``; raises AssertionError when a window is missing, doubled or wrong."""
    pipelines, target = Pipelines(), CollectTarget()
    source = CollectionSource(items)

    @pipelines.define("windows")
    def windows(job, config):  # type: ignore[no-untyped-def]
        stream = job.source(source, uid="records").assign_timestamps(lambda record: record[1], out_of_orderness_ms=DISORDER, uid="time")
        keyed = stream.key_by(lambda record: record[0]).tumbling(WINDOW)
        keyed.aggregate(int, lambda total, record: total + record[2], uid="sum").sink_to(CollectSink("sums", target), uid="out")

    times: list[Timing] = []
    gc.collect()
    with scratch() as directory, EmbeddedCluster(pipelines, directory=directory) as cluster:
        with timed(times):
            row = cluster.run("windows", timeout=600)
        epochs.append(row.newest_durable)
    got = target.values("sums")
    expected = sums(items)
    assert len(got) == len(expected), f"{len(got)} windows came out, {len(expected)} exist"
    assert {(key, start): total for key, start, _, total in got} == expected, "a window's sum is wrong"
    return times[0]


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__, 2_000_000)
    args = parser.parse_args(argv)
    n, iterations = (20_000, 1) if args.once else (args.n, args.iterations)
    quiet()
    where = one_core()
    for density in (10_000, 100):
        items = records(n, density)
        epochs: list[int] = []
        mid, boot, rates = net(lambda k, items=items, epochs=epochs: run(items[:k], epochs), n, iterations)  # type: ignore[misc]
        rate = rate_of(n, mid.wall, once=args.once)
        show(
            Result(
                f"windows {density:,}/s", n=n, seconds=round(mid.wall, 3), rate=rate, cpu_rate=rate_of(n, mid.cpu, once=args.once), target=f">= {TARGET:,}/s",
                met=None if rate is None else rate >= TARGET,
                notes=f"STRICT, output compared, {where}, {max(epochs)} epochs, start-up {boot.wall * 1e3:.0f} ms subtracted, runs {rates}",
            )
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
