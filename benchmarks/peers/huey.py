"""Huey's no-op tasks over Redis with two worker processes: burn-down, and one task at a time.

    .data/venvs/huey/bin/python -m benchmarks.peers.huey --case burn --n 5000

The consumer is a process of its own. Results are stored and every one is read: what is counted has run.
"""

# mypy: disable-error-code="import-not-found, misc, no-untyped-call, untyped-decorator, no-any-return, unused-ignore"

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import redis
from huey import RedisHuey

ROOT = Path(__file__).resolve().parents[2]
URL = os.environ.get("MILLSTREAM_REDIS_URL", "redis://127.0.0.1:6379/0").rsplit("/", 1)[0] + "/12"
huey = RedisHuey("millstream-benchmark", url=URL)


@huey.task()
def noop() -> int:
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("burn", "latency"), default="burn")
    parser.add_argument("--n", type=int, default=5000)
    args = parser.parse_args()
    redis.Redis.from_url(URL).flushdb()
    noop = importlib.import_module("benchmarks.peers.huey").noop  # under the name by which the consumer knows it, not __main__
    consumer = [sys.executable, "-m", "huey.bin.huey_consumer", "benchmarks.peers.huey.huey", "-k", "process", "-w", "2", "-q"]
    process = subprocess.Popen(consumer, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    try:
        assert noop()(blocking=True, timeout=60) == 1
        waits = []
        began = time.perf_counter()
        if args.case == "burn":
            results = [noop() for _ in range(args.n)]
            assert all(r(blocking=True, timeout=300, backoff=1.0, max_delay=0.02) == 1 for r in results)
        else:
            for _ in range(args.n):
                at = time.perf_counter()
                assert noop()(blocking=True, timeout=60, backoff=1.0, max_delay=0.0005) == 1
                waits.append((time.perf_counter() - at) * 1000)
        seconds = time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(30)
        redis.Redis.from_url(URL).flushdb()
    waits.sort()
    found = {"case": f"tasks/{args.case}", "system": "huey", "n": args.n, "seconds": seconds, "rate": round(args.n / seconds)}
    found["notes"] = f"huey {version('huey')}, two processes"
    if waits:
        found |= {"p50_ms": waits[len(waits) // 2], "p99_ms": waits[int(len(waits) * 0.99)]}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
