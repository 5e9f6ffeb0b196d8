"""The test run, tier by tier, with the time each took.

Called by ``make test``, ``make lint``, ``make soak``, ``make chaos`` and ``make test-docker``. What must never happen here: a tier that
counts as passed because it held no tests. All tiers run, also after a failure, so that one run shows everything that is wrong.

Run: ``python -m tests.support.tiers TIER... [-- PYTEST OPTIONS]``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.support.processes import kill_tree
from tests.support.services import read_env

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NO_TESTS = 5  # pytest's exit code for "nothing was collected"


@dataclass(frozen=True)
class Tier:
    """One group of tests: its directory, xdist's processes (0: one process), pytest options of its own, and when it is given up.

    ``limit`` is in seconds (None: never): a test whose framework catches the timeout, as Hypothesis does, would otherwise run for ever.
    """

    folder: str
    processes: int = 0
    options: tuple[str, ...] = ()
    limit: float | None = 1200


NOT_DOCKER = ("-m", "not docker")
TIERS: Mapping[str, Tier] = {
    "architecture": Tier("tests/architecture"),
    "unit": Tier("tests/unit", processes=2),
    "contract": Tier("tests/contract", processes=2, options=NOT_DOCKER),
    "simulation": Tier("tests/simulation", processes=2),
    "migration": Tier("tests/migration", processes=2),
    "integration": Tier("tests/integration", processes=2, options=NOT_DOCKER),
    # Real processes with kills and leases: two at once on a small machine would test its scheduler.
    "acceptance": Tier("tests/acceptance", options=NOT_DOCKER),
    "soak": Tier("tests/soak", options=("--timeout=0", "-s"), limit=None),
    "chaos": Tier("tests/chaos", options=("--timeout=900",), limit=None),
    "docker": Tier("tests", options=("-m", "docker", "--timeout=900"), limit=None),
}
LINT: Sequence[tuple[str, Sequence[str]]] = (
    ("ruff check", ["ruff", "check", "--quiet", "--output-format", "concise", "."]),
    ("ruff format", ["ruff", "format", "--check", "--quiet", "."]),
    ("mypy", ["mypy"]),
    ("mypy tests", ["mypy", "tests", "examples", "benchmarks"]),
    ("import arrows", ["lint-imports", "--no-logo"]),
)


def run_tier(name: str, options: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run one tier; empty when it passed, else what went wrong."""
    tier = TIERS[name]
    if not (ROOT / tier.folder).is_dir():
        return f"{tier.folder}/ is missing"
    # loadfile: a module's fixtures (a database of its own) live in one process.
    parallel = ["-n", str(tier.processes), "--dist", "loadfile"] if tier.processes else []
    command = [sys.executable, "-m", "pytest", "-p", "no:celery", "-q", *parallel, *tier.options, *options, tier.folder]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as run:
        started = psutil.Process(run.pid).create_time()
        try:
            code = run.wait(tier.limit)
        except subprocess.TimeoutExpired:
            kill_tree(run.pid, started)
            return f"not over after {tier.limit:.0f} s, given up"
    return {0: "", NO_TESTS: "no tests"}.get(code, f"pytest ended with {code}")


def run_lint(environment: Mapping[str, str]) -> str:
    """Run every check; empty when all passed, else the names of those that did not."""
    failed = []
    for title, command in LINT:
        done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, env=environment, capture_output=True, text=True)
        print(f"  {title:<14} {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode:
            failed.append(title)
            print(done.stdout + done.stderr, flush=True)
    return ", ".join(failed)


def main(arguments: Sequence[str]) -> int:
    """Entry point: 0 when every tier asked for passed."""
    names, options = list(arguments), []
    if "--" in names:
        cut = names.index("--")
        names, options = names[:cut], names[cut + 1 :]
    unknown = [name for name in names if name != "lint" and name not in TIERS]
    if unknown or not names:
        print(f"no tier {', '.join(unknown) or 'given'}; there are: lint, {', '.join(TIERS)}", file=sys.stderr)
        return 2
    environment = {**os.environ, **read_env()}
    results: list[tuple[str, float, str]] = []
    for name in names:
        print(f"\n== {name}", flush=True)
        started = time.monotonic()
        problem = run_lint(environment) if name == "lint" else run_tier(name, options, environment)
        results.append((name, time.monotonic() - started, problem))
    print()
    for name, seconds, problem in results:
        print(f"  {name:<14}{seconds:8.1f} s  {'FAILED: ' + problem if problem else 'passed'}")
    print(f"  {'total':<14}{sum(seconds for _, seconds, _ in results):8.1f} s", flush=True)
    return 1 if any(problem for *_, problem in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
