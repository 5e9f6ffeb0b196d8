"""Replays one simulated run: ``python -m tests.simulation.replay --workload rolling --seed 17 [--trace]``, or many: ``--seeds 0-999``.

What must never happen here: a run that differs from the one the test suite made of the same workload and seed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

import structlog
from tests.simulation.workloads import WORKLOADS

from millstream.testing.simulation import Faults


def quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def one(workload: str, seed: int, strength: float) -> Counter[str]:
    return WORKLOADS[workload](seed, Faults.drawn(seed, 14.0, strength)).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="all", choices=["all", *WORKLOADS])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0-9", help="a range, e.g. 0-999")
    parser.add_argument("--strength", type=float, default=1.0, help="factor on the probability of every fault")
    parser.add_argument("--trace", action="store_true", help="print what the product logs")
    args = parser.parse_args()
    if not args.trace:
        quiet()
    first, _, last = args.seeds.partition("-")
    seeds = [args.seed] if args.seed is not None else range(int(first), int(last or first) + 1)
    names = list(WORKLOADS) if args.workload == "all" else [args.workload]
    probes: Counter[str] = Counter()
    failed = 0
    for name in names:
        began = time.process_time()
        for seed in seeds:
            try:
                probes += one(name, seed, args.strength)
            except Exception as exc:
                failed += 1
                print(f"FAILED {name} seed {seed}: {type(exc).__name__}: {str(exc)[:600]}", flush=True)
                if args.seed is not None:
                    traceback.print_exc()
        print(f"{name}: {len(seeds)} seeds, {(time.process_time() - began) / len(seeds):.2f} s each", flush=True)
    if args.seed is None or args.trace:
        for probe, n in sorted(probes.items()):
            print(f"  {n:6} {probe}")
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
