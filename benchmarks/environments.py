"""Throw-away environments for peers, under ``.data/venvs``, and running a peer in one."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

from .measurement import DATA, ROOT, Result

PEERS = {
    "wordcount": [("bytewax", ["--case", "wordcount", "--n", "1000000"]), ("pathway", ["--n", "1000000"])],
    "windows": [
        ("bytewax", ["--case", "windows", "--per-second", "10000", "--n", "300000"]),
        ("bytewax", ["--case", "windows", "--per-second", "100", "--n", "300000"]),
    ],
    "tasks": [
        ("huey", ["--case", "burn", "--n", "5000"]),
        ("huey", ["--case", "latency", "--n", "300"]),
        ("dbos", ["--case", "burn", "--n", "1000"]),
        ("dbos", ["--case", "latency", "--n", "300"]),
    ],
}
REQUIREMENTS = {"huey": ("huey", "redis", "hiredis"), "dbos": ("dbos", "psycopg[binary]")}
"""What a peer needs beside the package of its own name."""
ALL_CPUS = ("huey", "dbos")
"""Peers of cases that run in several processes, and are not kept on one CPU."""
"""Peers by case, with their arguments. Fewer records than Millstream where a peer would take minutes; a rate does not depend on it much."""

STORED = {
    "wordcount": [
        Result(
            "wordcount", "flink sql", 5_000_000, 8.19, 611_000,
            notes="STORED figure, not of this run: apache-flink 2.3.0 needs Java 17; SQL count over generated rows, parallelism 1, checkpoints 1 s, 2 vCPU",
        ),
    ],
}  # fmt: skip
"""Figures that cannot be taken here without installing more than pip packages."""


def environment(package: str) -> Path:
    """The interpreter of a virtual environment that has ``package``; made when missing. Raises CalledProcessError when pip cannot install it."""
    directory = DATA / "venvs" / package
    python = directory / "bin" / "python"
    if not (directory / ".ready").exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        venv.create(directory, clear=True, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS.get(package, (package,))],
            check=True,
            timeout=600,
        )
        (directory / ".ready").touch()
    return python


def run_peer(package: str, arguments: list[str], *, once: bool) -> Result:
    """One peer, on one CPU where the case is; a result that says why when it cannot be run."""
    cpu = max(os.sched_getaffinity(0))
    pinned = [] if package in ALL_CPUS else ["taskset", "-c", str(cpu)]
    if once:
        arguments = [*arguments[:-1], "10000" if pinned else "50"]
    try:
        command = [*pinned, str(environment(package)), "-m", f"benchmarks.peers.{package}", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    except (subprocess.SubprocessError, OSError) as error:
        return Result(package, package, notes=f"not run: {error}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return Result(package, package, notes=f"not run: {done.stderr.strip()[-300:]}")
    result = Result.parse(lines[-1])
    if pinned:
        result.notes += f", one CPU (number {cpu})"
    return result
