"""Memory under lasting load: bounded by capacity and state, not by time. ``make soak`` runs it for MINUTES (30 and more are judged)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JUDGED_MINUTES = 30.0


def test_resident_memory_stays_where_it_is_under_load() -> None:
    """The job's counts are exact after the run; after 30 minutes and more, the last two thirds grow by at most 1 % in ten minutes."""
    minutes = float(os.environ.get("MILLSTREAM_SOAK_MINUTES", "30"))
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--minutes", str(minutes)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    sys.stdout.write(run.stderr)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["n"] > 0
    if minutes >= JUDGED_MINUTES:
        assert result["more"]["slope_percent"] <= 1.0, result["notes"]
