"""Benchmarks never rot: one small run of each case, its output compared, nothing timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ("wordcount", "windows", "epochs")
PROCESSES = ("exchange", "latency", "recovery", "soak", "tasks", "claims", "statements")


@pytest.mark.parametrize("case", [*EMBEDDED, *PROCESSES])
def test_one_run_of_the_case_is_right(case: str) -> None:
    """It ends with exit code 0, which it does only when its output was right, and gives at least one result."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", case, "--once"], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert results
    assert all(r["n"] > 0 for r in results)
