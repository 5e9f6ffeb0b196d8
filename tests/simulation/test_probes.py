"""The suite meets what it claims to test: every listed situation is reached by a run of it; and a run replays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.simulation.replay import one
from tests.simulation.workloads import WORKLOADS

REACHED = (
    "away: store",
    "away: target",
    "channel lost by its reader",
    "channel lost by its writer",
    "commit repeated",
    "coordinator took over",
    "ending: cancel",
    "ending: drain",
    "ending: move",
    "ending: suspend",
    "envelope to a consumer that is gone refused",
    "epoch aborted after some acknowledgements",
    "epoch declined",
    "gap detected",
    "lease expired in a subtask",
    "node lease lost",
    "orphaned subtask",
    "repeat dropped",
    "restart: died",
    "restart: node",
    "restart: target",
    "restored at another parallelism",
    "restored from an epoch",
    "split handed out after a restore",
    "stale hint ignored",
    "store: commit unknown",
    "target: answer lost",
    "terminal epoch: drain",
    "terminal epoch: final",
    "terminal epoch: suspend",
    "zombie goes on before an envelope is sent",
)
AT_LEAST_ONE_OF = (
    ("old coordinator goes on ",),
    ("zombie fenced at target: ",),
)
RUNS = 55
FIRST = 5000


@pytest.mark.timeout(900)
def test_every_interesting_situation_is_reached() -> None:
    """Runs of all workloads with strong faults, until each listed situation has come up; those that never did are named."""
    met: Counter[str] = Counter()
    names = [*WORKLOADS, "lives", "discovered", "lives"]

    def missing() -> list[str]:
        groups = [prefix for (prefix,) in AT_LEAST_ONE_OF if not any(p.startswith(prefix) for p in met)]
        return [p for p in REACHED if not met[p]] + groups

    for i in range(RUNS):
        if not missing():
            return
        met += one(names[i % len(names)], FIRST + i, 2.0)
    assert not missing(), f"never reached in {RUNS} runs"


def test_a_run_replays_whatever_the_hash_seed() -> None:
    """The same workload and seed meet the same things in other processes: nothing depends on a hash or on the real clock."""
    script = "from tests.simulation.replay import one, quiet; quiet(); print(sorted(one('lives', 3, 2.0).items()))"
    root = Path(__file__).resolve().parents[2]

    def run(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", script], cwd=root, env=env, capture_output=True, text=True, check=True, timeout=100
        ).stdout

    first = run("1")
    assert first == run("2")
    assert "restored" in first
