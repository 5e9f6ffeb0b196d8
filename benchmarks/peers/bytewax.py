"""Bytewax on the inputs of the word-count and window cases: one worker in one process, recovery on with epochs of one second.

    .data/venvs/bytewax/bin/python -m benchmarks.peers.bytewax --case wordcount --n 1000000

``python -m benchmarks --peers`` makes the environment and runs it. The output is checked as Millstream's is; what differs is told in the notes.
"""

# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bytewax.operators as op
import bytewax.operators.windowing as win
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import run_main

from benchmarks.inputs import DISORDER, START, WINDOW, records, running_counts, sums, words

BATCH = 1000


class Part(StatefulSourcePartition):
    def __init__(self, items: list[Any], at: int | None) -> None:
        self.items, self.at = items, at or 0

    def next_batch(self) -> Iterable[Any]:
        if self.at >= len(self.items):
            raise StopIteration
        batch = self.items[self.at : self.at + BATCH]
        self.at += len(batch)
        return batch

    def snapshot(self) -> int:
        return self.at


class Source(FixedPartitionedSource):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def list_parts(self) -> list[str]:
        return ["0"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Part:
        return Part(self.items, resume_state)


class Collect(StatelessSinkPartition):
    def __init__(self, out: list[Any]) -> None:
        self.out = out

    def write_batch(self, items: list[Any]) -> None:
        self.out.extend(items)


class Sink(DynamicSink):
    def __init__(self, out: list[Any]) -> None:
        self.out = out

    def build(self, step_id: str, worker_index: int, worker_count: int) -> Collect:
        return Collect(self.out)


def wordcount(items: list[str], out: list[Any]) -> Dataflow:
    flow = Dataflow("wordcount")
    keyed = op.key_on("key", op.input("in", flow, Source(items)), lambda word: word)
    op.output("out", op.stateful_map("count", keyed, lambda count, _: ((count or 0) + 1,) * 2), Sink(out))
    return flow


def windows(items: list[Any], out: list[Any]) -> Dataflow:
    flow = Dataflow("windows")
    keyed = op.input("in", flow, Source(items))
    # Its event clock also advances with the time that processing takes, so a wait of exactly the disorder drops records as late.
    clock = win.EventClock(ts_getter=lambda value: value[0], wait_for_system_duration=timedelta(milliseconds=2 * DISORDER))
    windower = win.TumblingWindower(length=timedelta(milliseconds=WINDOW), align_to=datetime.fromtimestamp(START / 1000, UTC))
    summed = win.fold_window("sum", keyed, clock, windower, lambda: 0, lambda total, value: total + value[1], lambda a, b: a + b)
    op.output("out", summed.down, Sink(out))
    return flow


def run(build: Any, items: list[Any], out: list[Any]) -> float:
    directory = Path(tempfile.mkdtemp(prefix="bytewax-", dir=Path(".data/bench")))
    init_db_dir(directory, 1)
    flow = build(items, out)
    started = time.perf_counter()
    run_main(flow, recovery_config=RecoveryConfig(directory), epoch_interval=timedelta(seconds=1))
    seconds = time.perf_counter() - started
    shutil.rmtree(directory)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=["wordcount", "windows"], required=True)
    parser.add_argument("--per-second", type=int, default=10_000)
    parser.add_argument("--n", type=int, default=1_000_000)
    args = parser.parse_args()
    Path(".data/bench").mkdir(parents=True, exist_ok=True)
    out: list[Any] = []
    if args.case == "wordcount":
        plain: list[Any] = words(args.n)
        build, items, name = wordcount, plain, "wordcount"
    else:
        plain = records(args.n, args.per_second)
        items = [(key, (datetime.fromtimestamp(at / 1000, UTC), value)) for key, at, value in plain]
        build, name = windows, f"windows {args.per_second:,}/s"
    boot = min(run(build, items[:1], []) for _ in range(3))
    seconds = run(build, items, out) - boot
    if args.case == "wordcount":
        verdict = "counts right" if sorted(out) == sorted(running_counts(plain)) else "COUNTS WRONG"
    else:
        expected = sums(plain)
        got: dict[tuple[str, int], int] = {}
        for key, (window, total) in out:
            cell = (key, START + window * WINDOW)
            got[cell] = got.get(cell, 0) + total
        verdict = "sums right" if got == expected else "SUMS WRONG"
        verdict += f", {len(out)} outputs for {len(expected)} windows"
    notes = f"bytewax {version('bytewax')}, recovery on, epochs 1 s, {verdict}, start-up {boot * 1e3:.0f} ms subtracted"
    print(
        json.dumps(
            {"case": name, "system": "bytewax", "n": args.n, "seconds": round(seconds, 3), "rate": round(args.n / seconds), "notes": notes}
        )
    )


if __name__ == "__main__":
    main()
