"""The pipelines of the benchmarks that run in processes; node and subtask processes import this module.

All take ``directory`` in their config. Records come from a function of (split, position), so that a recovery replays them.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

from millstream.pipelines import Pipelines
from millstream_schema.connectors import ConnectorContext, Json, SinkCapability, SinkWriter
from millstream_schema.model import Guarantee
from millstream_tasks.sinks.upsert import SqlUpsertSink
from millstream_tasks.sources.memory import GeneratorSource

from .inputs import words
from .tally import TallySink

pipelines = Pipelines()
CYCLE = 100_000
SPLITS = 2
KEYS = 500
"""Keys of each split of ``upserts``."""


def counted(n: int, rate: float) -> GeneratorSource:
    """``n`` words over two splits, ``rate`` a second in all (0: as fast as they are taken); for ever when ``n`` is 0."""
    cycle = words(CYCLE)

    def generate(split: int, position: int, limit: int) -> list[str] | None:
        mine = (n + 1 - split) // SPLITS if n else 1 << 62
        if position >= mine:
            return None
        start = position % CYCLE
        return cycle[start : start + min(limit, mine - position)]

    return GeneratorSource(generate, SPLITS, f"words-{n}", rate=rate / SPLITS if rate else None, bounded=bool(n))


def expected_counts(n: int) -> dict[str, int]:
    """How often each word is among the first ``n`` of :func:`counted`."""
    cycle, counts = words(CYCLE), dict[str, int]()
    for split in range(SPLITS):
        mine = (n + 1 - split) // SPLITS
        whole, rest = divmod(mine, CYCLE)
        for times, part in ((whole, cycle), (1, cycle[:rest])):
            if times:
                for word in part:
                    counts[word] = counts.get(word, 0) + times
    return counts


@pipelines.define("counting", parallelism=2)
def counting(job: Any, config: dict[str, Any]) -> None:
    """Two sources, a hash edge, two running counts, each into its own two-phase sink."""
    stream = job.source(counted(config["n"], config.get("rate", 0)), uid="words")
    counts = stream.edge(**config.get("edge", {})).key_by(lambda word: word).aggregate(int, lambda count, _: count + 1, uid="count")
    counts.sink_to(TallySink(config["directory"]), uid="out")


@pipelines.define("upserts", parallelism=2, guarantee=Guarantee.EFFECTIVELY_ONCE)
def upserts(job: Any, config: dict[str, Any]) -> None:
    """A record every ``1 / rate`` s since ``start`` (monotonic clock), over a hash edge into an SQL upsert."""
    start, rate, n = config["start"], config["rate"] / SPLITS, config["n"] // SPLITS

    def generate(split: int, position: int, limit: int) -> list[tuple[str, int, float]] | None:
        if position >= n:
            return None
        due = min(int((time.monotonic() - start) * rate), n, position + limit)
        return [(f"{split}-{i % KEYS}", i, start + (i + 1) / rate) for i in range(position, due)]

    stream = job.source(GeneratorSource(generate, SPLITS, "paced"), uid="records").key_by(lambda record: record[0])
    newest = stream.reduce(lambda _, record: record, uid="newest")
    sink = SqlUpsertSink(config["url"], config["table"], ("name", "position", "due"), ("name",))
    newest.sink_to(TimedSink(sink, Path(config["directory"])), uid="out")


class TimedSink:
    """The upsert sink, with the age of each record noted when its transaction has committed."""

    kind = "benchmark-timed-upsert"
    version = 1
    capability = SinkCapability.UPSERT_BY_KEY

    def __init__(self, sink: SqlUpsertSink, directory: Path) -> None:
        self._sink = sink
        self._directory = directory

    def config(self) -> dict[str, Json]:
        return self._sink.config()

    def problems(self) -> list[str]:
        return self._sink.problems()

    def open(self, context: ConnectorContext) -> TimedWriter:
        return TimedWriter(self._sink.open(context), self._directory / f"ages-{context.subtask}")


class TimedWriter:
    """Its writer."""

    def __init__(self, writer: SinkWriter, file: Path) -> None:
        self._writer = writer
        self._file = file.open("ab", buffering=0)
        self._waiting: list[float] = []

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self._waiting.extend([due for _, _, due in values])
        self._writer.write(values, timestamps)

    def flush(self) -> None:
        self._writer.flush()
        now = time.monotonic()
        self._file.write(struct.pack(f"<{len(self._waiting)}d", *[now - due for due in self._waiting]))
        self._waiting.clear()

    def close(self) -> None:
        self._file.close()
        self._writer.close()


def ages(file: Path) -> list[float]:
    """All ages one writer noted, in seconds, in order."""
    data = file.read_bytes()
    return list(struct.unpack(f"<{len(data) // 8}d", data[: len(data) // 8 * 8]))
