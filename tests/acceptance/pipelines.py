"""The jobs of the acceptance and chaos tests, and the answers computed apart.

Built on every node from ``tests.acceptance.pipelines:pipelines``. What must never happen here: the reference sharing code with the job, beyond the function that makes the input.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream import (
    CommitAnswer,
    CommitResult,
    Committable,
    ConnectorContext,
    FileSink,
    FileSource,
    GeneratorSource,
    JobBuilder,
    Pipelines,
    SqlAppendSink,
)

pipelines = Pipelines()
KEYS = 20
STEP_MS = 10
"""Event time between two records of a split."""
WINDOW_MS = 1000
Record = dict[str, Any]


def record(split: int, position: int) -> Record:
    """The input: record ``position`` of ``split``."""
    mixed = (position * 2654435761 + split * 40503 + 12345) & 0xFFFFFFFF
    return {"split": split, "n": position, "key": f"k{(mixed >> 9) % KEYS}", "value": (mixed >> 5) % 1000, "at": position * STEP_MS}


def generated(count: int | None) -> Callable[[int, int, int], list[Record] | None]:
    """Records of each split up to ``count``; None: without end."""

    def traffic(split: int, position: int, limit: int) -> list[Record] | None:
        if count is not None and position >= count:
            return None
        end = position + limit if count is None else min(position + limit, count)
        return [record(split, n) for n in range(position, end)]

    return traffic


def nothing() -> tuple[int, int]:
    return (0, 0)


def add(sums: tuple[int, int], r: Record) -> tuple[int, int]:
    return sums[0] + 1, sums[1] + r["value"]


def merge(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    return left[0] + right[0], left[1] + right[1]


def rolling_row(key: tuple[int, str], sums: tuple[int, int]) -> tuple[Any, ...]:
    return (*key, *sums)


def window_row(key: str, window: Any, sums: tuple[int, int]) -> tuple[Any, ...]:
    return (key, window.start, *sums)


ROLLING = ("split", "word", "n", "total")
WINDOWS = ("word", "start_ms", "n", "total")


class DyingSink(SqlAppendSink):
    """An append sink whose process is killed right after its first commit was answered, before anybody heard of it."""

    flag = ""

    def open(self, context: ConnectorContext) -> Any:
        writer = super().open(context)
        commit = writer.commit

        def commit_and_die(committables: Sequence[Committable]) -> CommitAnswer:
            answer = commit(committables)
            if answer.result is CommitResult.COMMITTED and _first(self.flag, ",".join(c.id for c in committables)):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        writer.commit = commit_and_die  # type: ignore[method-assign]
        return writer


def _first(flag: str, text: str) -> bool:
    """Whether this call was the one that made the file."""
    try:
        with open(flag, "x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


@pipelines.define("traffic", version=1, guarantee="STRICT_EXACTLY_ONCE", parallelism=2)
def traffic(job: JobBuilder, config: Mapping[str, Any]) -> None:
    """``count`` (records a split; None: until drained), ``rate`` (records a second and split), ``target`` (URL), ``suffix`` of the tables, ``flag`` (for :class:`DyingSink`)."""
    suffix = config.get("suffix", "")
    count = config["count"]
    source = GeneratorSource(generated(count), splits=2, name=f"traffic-{count}", rate=config["rate"], bounded=count is not None)
    records = job.source(source, uid="traffic").assign_timestamps(lambda r: r["at"], uid="times")
    rolling = SqlAppendSink(config["target"], f"rolling{suffix}", ROLLING, lock_timeout=0.6)
    if config.get("flag"):
        rolling = DyingSink(config["target"], f"rolling{suffix}", ROLLING, lock_timeout=0.6)
        rolling.flag = config["flag"]
    records.key_by(lambda r: (r["split"], r["key"])).aggregate(nothing, add, rolling_row, uid="rolling").sink_to(rolling, uid="rolling-out")
    per_window = records.key_by(lambda r: r["key"]).tumbling(WINDOW_MS).aggregate(nothing, add, window_row, merge=merge, uid="windows")
    per_window.sink_to(SqlAppendSink(config["target"], f"windows{suffix}", WINDOWS, lock_timeout=0.6), uid="windows-out")


@pipelines.define("lines", version=1, guarantee="STRICT_EXACTLY_ONCE", parallelism=1)
def lines(job: JobBuilder, config: Mapping[str, Any]) -> None:
    """JSON lines of a directory: running sums to a table, what cannot be decoded by ``poison``, dead letters to files."""
    source = FileSource(config["path"], "jsonl", glob="*.jsonl", watch=config.get("watch", False), poison=config.get("poison", "fail"))
    read = job.source(source, uid="lines")
    if config.get("dead"):
        letters = read.side_output("dead-letter").map(lambda d: {"position": d["position"], "raw": d["raw"].decode()}, uid="letters")
        letters.sink_to(FileSink(config["dead"]), uid="dead")
    summed = read.key_by(lambda r: r["key"]).aggregate(nothing, add, lambda key, sums: (0, key, *sums), uid="sums")
    summed.sink_to(SqlAppendSink(config["target"], f"rolling{config.get('suffix', '')}", ROLLING, lock_timeout=0.6), uid="out")


def ddl(suffix: str = "") -> list[str]:
    """The tables of a ``traffic`` job, for PostgreSQL and MariaDB."""
    return [
        f"CREATE TABLE rolling{suffix} (split BIGINT NOT NULL, word VARCHAR(16) NOT NULL, n BIGINT NOT NULL, total BIGINT NOT NULL)",
        f"CREATE TABLE windows{suffix} (word VARCHAR(16) NOT NULL, start_ms BIGINT NOT NULL, n BIGINT NOT NULL, total BIGINT NOT NULL)",
    ]


Rows = list[tuple[Any, ...]]


def answer(ends: Mapping[int, int]) -> tuple[Rows, Rows]:
    """What the two tables must hold when split ``i`` was read up to ``ends[i]``: (rolling, windows), in no order."""
    rolling: Rows = []
    windows: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for split, end in ends.items():
        running: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for position in range(end):
            r = record(split, position)
            for sums in (running[r["key"]], windows[r["key"], r["at"] - r["at"] % WINDOW_MS]):
                sums[0] += 1
                sums[1] += r["value"]
            rolling.append((split, r["key"], *running[r["key"]]))
    return rolling, [(*key, *sums) for key, sums in windows.items()]


def differences(found: Rows, expected: Rows) -> list[str]:
    """Every row that is missing, too many, or should not be there; empty when the two are equal as multisets."""
    have, want = Counter(map(tuple, found)), Counter(map(tuple, expected))
    problems = [f"{row} is there {n} times, should be {want[row]}" for row, n in have.items() if n != want[row]]
    return problems + [f"{row} is missing" for row in want if row not in have]


def sink_directory_rows(directory: Path) -> list[str]:
    """Lines of all published files of a file sink."""
    return [line for path in sorted(directory.glob("*.jsonl")) for line in path.read_text().splitlines()]
