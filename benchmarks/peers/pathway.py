"""Pathway's word count over the words of the word-count case, as a CSV file (its reader has no in-memory source that persists), filesystem persistence every second.

    .data/venvs/pathway/bin/python -m benchmarks.peers.pathway --n 1000000

Pathway's engine is compiled and runs no Python per record; its output is one row per word and commit, not one per record, so the work is less than the word count's.
"""

# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

os.environ["PATHWAY_DISABLE_PROGRESS"] = "1"

from benchmarks.inputs import words


def run(n: int) -> float:
    import pathway as pw

    class Words(pw.Schema):
        word: str

    Path(".data/bench").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pathway-", dir=".data/bench") as directory:
        file = Path(directory) / "words.csv"
        file.write_text("word\n" + "\n".join(words(n)) + "\n")
        backend = pw.persistence.Backend.filesystem(str(Path(directory) / "state"))
        source = pw.io.csv.read(str(file), schema=Words, mode="static", name="words")
        pw.io.null.write(source.groupby(source.word).reduce(source.word, n=pw.reducers.count()))
        started = time.perf_counter()
        pw.run(monitoring_level=pw.MonitoringLevel.NONE, persistence_config=pw.persistence.Config(backend, snapshot_interval_ms=1000))
        return time.perf_counter() - started


def in_process(n: int) -> float:
    """One run in a process of its own: Pathway's graph is global."""
    command = [sys.executable, "-m", "benchmarks.peers.pathway", "--inner", "--n", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = [line for line in done.stdout.splitlines() if line.startswith("SECONDS ")]
    if not found:
        raise SystemExit(done.stdout[-500:] + done.stderr[-1500:])
    return float(found[0].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--inner", action="store_true")
    args = parser.parse_args()
    if args.inner:
        print("SECONDS", run(args.n), flush=True)
        return
    boot = min(in_process(1), in_process(1))
    seconds = in_process(args.n) - boot
    notes = f"pathway {version('pathway')}, persistence on, snapshots 1 s, static CSV, start-up {boot * 1e3:.0f} ms subtracted"
    line = {
        "case": "wordcount",
        "system": "pathway",
        "n": args.n,
        "seconds": round(seconds, 3),
        "rate": round(args.n / seconds),
        "notes": notes,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
