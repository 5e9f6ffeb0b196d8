"""What an epoch costs: a keyed sum over 1,000,000 str → int entries, parallelism 1, with epochs every second and without.

    python -m benchmarks epochs --n 20000000

First every key is put once (not measured), then ``--n`` updates of random keys come: uniform or Zipf 1.1, at 300,000 a second or as fast as they are taken. ``ratio`` is
the rate with epochs over the rate without, target 0.85; ``pause`` the longest time the subtask's thread stood still: its own counter of the synchronous part of a
snapshot (``longest_cut``), and the longest gap between two batches asked of the source, which also contains waiting for the interpreter lock; target 50 ms. The last
state is compared with what the updates give, and every record must have been committed once (STRICT_EXACTLY_ONCE into a two-phase sink that counts).
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Any

from millstream.embedded import EmbeddedCluster
from millstream.pipelines import Pipelines
from millstream_schema.settings import StreamSettings
from millstream_tasks.sources.memory import GeneratorSource

from .counting import CommittedCountSink
from .measurement import Result, one_core, options, peak_mib, quiet, scratch, show

OFFERED = 300_000
RATIO = 0.85
PAUSE_MS = 50.0
CYCLE = 1_000_000
"""Updates are drawn once and come again after this many, each time shifted to other keys."""


def draw(keys: int, zipf: bool) -> list[int]:
    """Key numbers of one cycle of updates, seed 7."""
    chance = random.Random(7)
    if not zipf:
        return [chance.randrange(keys) for _ in range(CYCLE)]
    bounds = list(itertools.accumulate(1 / rank**1.1 for rank in range(1, keys + 1)))
    shuffled = list(range(keys))
    chance.shuffle(shuffled)
    return [shuffled[bisect_left(bounds, chance.random() * bounds[-1])] for _ in range(CYCLE)]


class Feed:
    """The generator: all keys once, then updates; notes when it was asked for what. Shared with the measuring thread, which reads only."""

    def __init__(self, names: list[str], drawn: list[int], n: int, rate: float | None) -> None:
        self._names = names
        self._updates = [names[i] for i in drawn]
        self._n = n
        self._rate = rate
        self._begin: float | None = None
        self._last = 0.0
        self._offered = 0
        self.began = self.ended = 0.0
        self.cpu_began = self.cpu_ended = 0.0
        self.gaps: list[float] = []

    def __call__(self, split: int, position: int, limit: int) -> list[str] | None:
        now = time.perf_counter()
        keys = len(self._names)
        if position < keys:
            return self._names[position : position + limit]
        if self._begin is None:
            self._begin = self.began = now
            self.cpu_began = time.process_time()
        else:
            self.gaps.append(now - self._last)
        at = position - keys
        if at >= self._n:
            self.ended, self.cpu_ended = now, time.process_time()
            return None
        room = min(limit, self._n - at)
        if self._rate is not None:
            room = min(room, int((now - self._begin) * self._rate) - at)
        start = at % CYCLE
        batch = self._updates[start : start + max(room, 0)]
        self._last = time.perf_counter()
        return batch

    def expected(self) -> Counter[str]:
        """The last sum of each key."""
        whole, rest = divmod(self._n, CYCLE)
        total = Counter(dict.fromkeys(self._names, 1))
        for name, count in Counter(self._updates).items():
            total[name] += count * whole
        total.update(self._updates[:rest])
        return total


@dataclass
class Outcome:
    rate: float
    cpu_rate: float
    longest_cut_ms: float
    longest_gap_ms: float
    epochs: list[dict[str, Any]]


def run(names: list[str], drawn: list[int], n: int, rate: float | None, interval_ms: int) -> Outcome:
    """One job; raises AssertionError when a key's sum is wrong."""
    feed, sink, pipelines = Feed(names, drawn, n, rate), CommittedCountSink(), Pipelines()

    @pipelines.define("sums")
    def sums(job, config):  # type: ignore[no-untyped-def]
        stream = job.source(GeneratorSource(feed, name="updates"), uid="updates")
        stream.key_by(lambda name: name).aggregate(int, lambda total, _: total + 1, uid="sum").sink_to(sink, uid="out")

    gc.collect()
    settings = StreamSettings(epoch_interval_ms=interval_ms, retained=2)
    with scratch() as directory, EmbeddedCluster(pipelines, directory=directory) as cluster:
        job = cluster.submit("sums", settings=settings)
        cluster.wait(job, 600)
        status = cluster.operations.status(job)
        runner = next(child._runner for child in cluster._launcher._children if child._runner is not None)
    assert sink.count == len(names) + n, f"{sink.count} records were committed of {len(names) + n}"
    state = runner.chain.operators[0].tables["value"].panes[None]
    assert state == feed.expected(), "a key's sum is wrong"
    cut = runner.longest_cut * 1000
    seconds, cpu = feed.ended - feed.began, feed.cpu_ended - feed.cpu_began
    return Outcome(n / seconds, n / cpu, cut, max(feed.gaps) * 1000, status["epochs"])


def main(argv: list[str] | None = None) -> int:
    parser = options(__doc__, 20_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--only", choices=["uniform", "zipf"], help="one distribution only")
    parser.add_argument("--unthrottled", action="store_true", help="without the runs at the offered rate")
    args = parser.parse_args(argv)
    n, keys = (50_000, 20_000) if args.once else (args.n, args.keys)
    quiet()
    where = one_core()
    names = [f"key-{i:07d}" for i in range(keys)]
    for distribution in [args.only] if args.only else ["uniform", "zipf"]:
        drawn = draw(keys, distribution == "zipf")
        for rate in (None,) if args.unthrottled else (OFFERED, None):
            count = n if rate is None else min(n, rate * 20)
            with_epochs = run(names, drawn, count, rate, 1000)
            without = run(names, drawn, count, rate, 3_000_000)
            ratio = with_epochs.rate / without.rate
            pause = max(with_epochs.longest_cut_ms, 0.0)
            sizes = [e["size"] for e in with_epochs.epochs if e.get("size")]
            show(
                Result(
                    f"epochs {distribution} {'unthrottled' if rate is None else f'{rate:,}/s offered'}", n=count, rate=round(with_epochs.rate),
                    cpu_rate=round(with_epochs.cpu_rate), target=f"ratio >= {RATIO}, pause <= {PAUSE_MS:.0f} ms",
                    met=None if args.once else ratio >= RATIO and pause <= PAUSE_MS,
                    notes=f"ratio {ratio:.3f} (by CPU time {with_epochs.cpu_rate / without.cpu_rate:.3f}; {without.rate:,.0f}/s without epochs), longest cut "
                    f"{pause:.1f} ms, longest gap {with_epochs.longest_gap_ms:.0f} ms (without epochs {without.longest_gap_ms:.0f} ms), "
                    f"{len(with_epochs.epochs)}+ epochs, sums compared, {where}, peak {peak_mib()} MiB",
                    more={"ratio": round(ratio, 4), "longest_cut_ms": round(pause, 1), "longest_gap_ms": round(with_epochs.longest_gap_ms, 1), "sizes": sizes[:6],
                          "durations_ms": [e.get("duration_ms") for e in with_epochs.epochs][:6]},
                )
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
