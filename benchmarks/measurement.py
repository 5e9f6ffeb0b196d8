"""What every case shares: one result type, the one-core rule, percentiles, and the output as JSON lines and as a table.

Used by the cases and by ``__main__``. What must never happen here: a figure without its verdict, or one of a run whose output was not checked.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / ".data"


@dataclass
class Result:
    """One figure. ``rate`` in records per second of wall time, ``cpu_rate`` per second of CPU time of the measured processes (for noisy machines); ``target`` is what the
    project asks for and ``met`` whether this run reached it (None: no target, or a run too small to judge).
    """

    case: str
    system: str = "millstream"
    n: int = 0
    seconds: float | None = None
    rate: float | None = None
    cpu_rate: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    target: str = ""
    met: bool | None = None
    notes: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v not in (None, "", {})})

    @classmethod
    def parse(cls, line: str) -> Result:
        return cls(**json.loads(line))


def rate_of(n: int, seconds: float, *, once: bool) -> int | None:
    """Records per second; None for ``--once``, whose runs are shorter than what start-up varies by."""
    return None if once or seconds <= 0 else round(n / seconds)


def show(result: Result) -> None:
    """One JSON line on standard output, at once: a case that dies later has still told what it found."""
    print(result.line(), flush=True)


def options(description: str | None, n: int) -> argparse.ArgumentParser:
    """The options every case takes. ``--once`` keeps a case small enough for CI: it shows that the case works, its figures mean nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=n, help=f"records (default {n:,})")
    parser.add_argument("--iterations", type=int, default=3, help="runs per figure; the median is reported, all are listed (default 3)")
    parser.add_argument("--once", action="store_true", help="one small run")
    return parser


def quiet() -> None:
    """Without the log of every step."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30), logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def one_core() -> str:
    """Keep this process, its threads and its children on one CPU; its number. The last one: interrupts tend to be served by the first."""
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    return f"one CPU (number {cpu})"


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory on the disk the repository is on, not in memory: what has to be flushed is flushed. Removed afterwards."""
    (DATA / "bench").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DATA / "bench") as directory:
        yield Path(directory)


@dataclass(frozen=True)
class Timing:
    """Wall and CPU seconds of one run."""

    wall: float
    cpu: float

    def minus(self, other: Timing) -> Timing:
        return Timing(self.wall - other.wall, self.cpu - other.cpu)


@contextmanager
def timed(into: list[Timing]) -> Iterator[None]:
    """Append the time of the block, all threads of this process."""
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    into.append(Timing(time.perf_counter() - wall, time.process_time() - cpu))


def net(run: Callable[[int], Timing], n: int, iterations: int) -> tuple[Timing, Timing, list[int | None]]:
    """(median run of ``n`` records less start-up, start-up, all rates). Start-up is the quickest of three runs over one record."""
    boots = [run(1) for _ in range(3)]
    boot = min(boots, key=lambda t: t.wall)
    runs = [run(n).minus(boot) for _ in range(iterations)]
    return sorted(runs, key=lambda t: t.wall)[len(runs) // 2], boot, [rate_of(n, t.wall, once=False) for t in runs]


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank over all values; they need not be sorted."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def peak_mib() -> int:
    """Highest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def rss_mib(pid: int | str = "self") -> float:
    """Resident set of a process now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def table(results: Sequence[Result]) -> str:
    """All results as aligned text."""
    rows = [("case", "system", "n", "records/s", "p50 ms", "p99 ms", "target", "", "notes")]
    for r in results:
        verdict = "" if r.met is None else "ok" if r.met else "MISSED"
        rows.append((r.case, r.system, _number(r.n), _number(r.rate), _number(r.p50_ms), _number(r.p99_ms), r.target, verdict, r.notes))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)) + "  " + row[-1] for row in rows)


def _number(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
