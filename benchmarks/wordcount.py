"""Embedded word count on one CPU: a running count per word, emitted for every word; epochs every second with durable checkpoints.

    python -m benchmarks wordcount --n 4000000

The words (``inputs.py``: 1,000 different ones) are in memory, for the peers too. ``strict`` is the headline: STRICT_EXACTLY_ONCE into
a two-phase sink, whose content is compared record by record afterwards. ``counting`` writes into a sink that only counts, under AT_LEAST_ONCE, as the peers do.
Time: from submit to FINISHED (all epochs durable and committed), less that of a run over one record.
"""

from __future__ import annotations

import gc
import sys

from millstream.embedded import EmbeddedCluster
from millstream.pipelines import Pipelines
from millstream_schema.model import Guarantee
from millstream_tasks.sinks.memory import CollectSink, CollectTarget
from millstream_tasks.sources.memory import CollectionSource

from .counting import CountingSink
from .inputs import running_counts, words
from .measurement import Result, Timing, net, one_core, options, quiet, rate_of, scratch, show, timed

TARGET = 1_200_000


def run(items: list[str], *, strict: bool, epochs: list[int]) -> Timing:
    """One job over ``items``; raises AssertionError when its output is not exactly what it must be."""
    pipelines, target, counter = Pipelines(), CollectTarget(), CountingSink()
    source = CollectionSource(items)

    @pipelines.define("wordcount", guarantee=Guarantee.STRICT_EXACTLY_ONCE if strict else Guarantee.AT_LEAST_ONCE)
    def wordcount(job, config):  # type: ignore[no-untyped-def]
        counts = job.source(source, uid="words").key_by(lambda word: word).aggregate(int, lambda count, _: count + 1, uid="count")
        counts.sink_to(CollectSink("counts", target) if strict else counter, uid="out")

    times: list[Timing] = []
    gc.collect()
    with scratch() as directory, EmbeddedCluster(pipelines, directory=directory) as cluster:
        with timed(times):
            row = cluster.run("wordcount", timeout=600)
        epochs.append(row.newest_durable)
    if strict:
        assert target.values("counts") == running_counts(items), "the counts are not what one pass over the words gives"
    else:
        assert counter.count == len(items), f"{counter.count} records came out of {len(items)}"
    return times[0]


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__, 4_000_000)
    args = parser.parse_args(argv)
    n, iterations = (20_000, 1) if args.once else (args.n, args.iterations)
    quiet()
    where = one_core()
    items = words(n)
    for strict in (True, False):
        epochs: list[int] = []
        mid, boot, rates = net(lambda k, strict=strict, epochs=epochs: run(items[:k], strict=strict, epochs=epochs), n, iterations)  # type: ignore[misc]
        rate = rate_of(n, mid.wall, once=args.once)
        show(
            Result(
                "wordcount" if strict else "wordcount counting sink", n=n, seconds=round(mid.wall, 3), rate=rate, cpu_rate=rate_of(n, mid.cpu, once=args.once),
                target=f">= {TARGET:,}/s" if strict else "", met=None if rate is None or not strict else rate >= TARGET,
                notes=f"{'STRICT, output compared' if strict else 'AT_LEAST_ONCE, output counted'}, {where}, {max(epochs)} epochs, "
                f"start-up {boot.wall * 1e3:.0f} ms subtracted, runs {rates}",
            )
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
