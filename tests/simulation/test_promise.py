"""The promise of exactly-once, by seed: after any sequence of failures, what an outside reader can see equals a run in which every record was processed once.

``MILLSTREAM_SIM_SEEDS`` runs more seeds of each workload (soak); a failure prints the command that replays it.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from tests.simulation.replay import one
from tests.simulation.workloads import WORKLOADS

SEEDS = int(os.environ.get("MILLSTREAM_SIM_SEEDS", "0"))
RUNS = [(name, seed) for name, w in WORKLOADS.items() for seed in range(SEEDS or w.seeds)]


@pytest.mark.parametrize(("workload", "seed"), RUNS)
def test_what_is_visible_equals_a_run_without_failures(workload: str, seed: int) -> None:
    """For this workload and seed the output, at every moment and at the end, is what the batch reference says."""
    try:
        met: Counter[str] = one(workload, seed, 1.0)
    except AssertionError as exc:
        raise AssertionError(f"{exc}\nreplay: python -m tests.simulation.replay --workload {workload} --seed {seed} --trace") from exc
    assert met


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_without_failures_the_job_lives_long_enough_to_mean_something(workload: str) -> None:
    """Fifteen simulated seconds and eight epochs at least (the run asserts it), and no restart."""
    met = one(workload, 0, 0.0)
    assert not [probe for probe in met if probe.startswith("restart")]
