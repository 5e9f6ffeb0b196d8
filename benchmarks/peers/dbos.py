"""DBOS's workflows of one no-op step on PostgreSQL: a queue burnt down by one process, and one workflow at a time.

    .data/venvs/dbos/bin/python -m benchmarks.peers.dbos --case burn --n 1000

Every workflow is looked for in its table at the end.
"""

# mypy: disable-error-code="import-not-found, misc, no-untyped-call, untyped-decorator, no-any-return, unused-ignore"

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version

import psycopg
from dbos import DBOS

ADMIN = os.environ.get("MILLSTREAM_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/test").replace(
    "postgresql+psycopg://", "postgresql://"
)
NAME = f"millstream_benchmark_dbos_{os.getpid()}"
OURS = ADMIN.rsplit("/", 1)[0] + "/" + NAME


@DBOS.step()
def step() -> int:
    return 1


@DBOS.workflow()
def workflow() -> int:
    return step()


def done() -> int:
    with psycopg.connect(OURS) as connection:
        row = connection.execute("SELECT count(*) FROM dbos.workflow_status WHERE status = 'SUCCESS'").fetchone()
        return int(row[0]) if row else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("burn", "latency"), default="burn")
    parser.add_argument("--n", type=int, default=1000)
    args = parser.parse_args()
    with psycopg.connect(ADMIN, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {NAME}")
    try:
        url = OURS.replace("postgresql://", "postgresql+psycopg://")
        DBOS(config={"name": "benchmark", "system_database_url": url, "log_level": "ERROR", "run_admin_server": False})
        DBOS.launch()
        queue = DBOS.register_queue("benchmark", polling_interval_sec=0.1)
        assert workflow() == 1
        before, waits = done(), []
        began = time.perf_counter()
        if args.case == "burn":
            for _ in range(args.n):
                queue.enqueue(workflow)
            while done() - before < args.n:
                time.sleep(0.05)
        else:
            for _ in range(args.n):
                at = time.perf_counter()
                assert workflow() == 1
                waits.append((time.perf_counter() - at) * 1000)
        seconds = time.perf_counter() - began
        DBOS.destroy()
    finally:
        with psycopg.connect(ADMIN, autocommit=True) as admin:
            admin.execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")
    waits.sort()
    found = {"case": f"tasks/{args.case}", "system": "dbos", "n": args.n, "seconds": seconds, "rate": round(args.n / seconds)}
    found["notes"] = f"dbos {version('dbos')}, PostgreSQL, one process"
    if waits:
        found |= {"p50_ms": waits[len(waits) // 2], "p99_ms": waits[int(len(waits) * 0.99)]}
    print(json.dumps(found), flush=True)
    os._exit(0)  # its threads keep the interpreter


if __name__ == "__main__":
    sys.exit(main())
