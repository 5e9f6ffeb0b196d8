"""``python -m benchmarks [case ...] [--n N] [--iterations K] [--once] [--peers]``: runs cases, each in a process of its own.

One JSON line per result on standard output as it comes, a table at the end on standard error. Exit code 1 when a case failed (its output was wrong, or it crashed);
a missed target is told in the table and is no failure: machines differ.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from .environments import PEERS, STORED, run_peer
from .measurement import ROOT, Result, show, table

CASES = ("wordcount", "windows", "epochs", "exchange", "latency", "recovery", "tasks", "embedded_tasks", "claims", "statements", "soak")
DEFAULT = CASES[:-1]


def run_case(case: str, arguments: list[str]) -> tuple[list[Result], int]:
    """Results of one case, shown as they come, and its exit code."""
    results = []
    with subprocess.Popen([sys.executable, "-m", f"benchmarks.{case}", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                results.append(Result.parse(line))
                show(results[-1])
    return results, process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"any of {', '.join(CASES)}; default: all but soak")
    parser.add_argument("--n", type=int, help="records, in place of each case's own number")
    parser.add_argument("--iterations", type=int, help="runs per figure")
    parser.add_argument("--once", action="store_true", help="one small run of each case: shows that it works")
    parser.add_argument("--peers", action="store_true", help="run the peers, too, in environments made under .data/venvs")
    args = parser.parse_args()
    unknown = set(args.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    passed = [f"--{name}={value}" for name in ("n", "iterations") if (value := getattr(args, name)) is not None]
    passed += ["--once"] if args.once else []
    results: list[Result] = []
    failed = []
    for case in args.cases or DEFAULT:
        found, code = run_case(case, passed)
        results += found
        if code:
            failed.append(case)
        if args.peers:
            for package, arguments in PEERS.get(case, []):
                results.append(run_peer(package, arguments, once=args.once))
                show(results[-1])
            results += STORED.get(case, [])
    print("\n" + table(results), file=sys.stderr)
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
