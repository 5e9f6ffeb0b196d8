"""The demo: a month (or the year) of flights through a stream job on two node processes; one is killed with -9 in the middle, one subtask is stopped and woken.

Prints epochs, recoveries and counts, and compares the sink with an answer computed apart. Exit code 0 only when they are equal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from examples.data.fetch_full import FetchFailed, fetch
from examples.flights.prepare import unpack
from examples.flights.reference import CREATE, SELECT, Row, answer, difference
from rich.console import Console
from rich.table import Table

from millstream import RestartPolicy, StreamSettings
from millstream.dev import DevCluster

SETTINGS = StreamSettings(
    epoch_interval_ms=1000,
    source_batch=200,
    restart=RestartPolicy(failures=10),
)
console = Console()


def subtask_processes(node: int) -> list[int]:
    """Pids of the subtask processes below a node."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            command = (status.parent / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue  # it ended meanwhile
        at_work = int(fields.get("Threads", "1")) > 1  # a spare waits on its only thread
        if fields.get("PPid", "").strip() == str(node) and b"subtask_main" in command and at_work:
            found.append(int(status.parent.name))
    return found


def until_durable(cluster: DevCluster, job: str, above: int, timeout: float = 60.0) -> int:
    """Wait until an epoch above ``above`` is durable; its number (or the newest when the job ended first)."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        row = cluster.operations.find(job)
        if row.newest_durable > above or row.state.ended:
            return row.newest_durable
        time.sleep(0.05)
    raise TimeoutError(f"no epoch above {above} became durable within {timeout:.0f} s")


def until_restarted(cluster: DevCluster, job: str, timeout: float = 60.0) -> None:
    """Wait until the job has recovered from what was done to it: a new generation is running."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        row = cluster.operations.find(job)
        if row.restarts > 0 and (row.state == "RUNNING" or row.state.ended):
            return
        time.sleep(0.05)
    raise TimeoutError(f"the job did not recover within {timeout:.0f} s")


def break_things(cluster: DevCluster, job: str) -> None:
    """kill -9 of a node; then, after its recovery made an epoch durable, a subtask stopped for a while and woken."""
    epoch = until_durable(cluster, job, 1)
    name = next(n for n, process in sorted(cluster.nodes.items()) if subtask_processes(process.pid))
    node = cluster.nodes[name]
    hit = len(subtask_processes(node.pid))
    console.print(f"epoch {epoch} is durable: [red]kill -9[/] of {name} (pid {node.pid}) and with it {hit} subtasks")
    node.send_signal(signal.SIGKILL)
    until_restarted(cluster, job)
    epoch = until_durable(cluster, job, cluster.operations.find(job).newest_durable)
    victims = [pid for process in cluster.nodes.values() for pid in subtask_processes(process.pid)]
    if not victims:
        return
    console.print(f"recovered, epoch {epoch} is durable: [yellow]SIGSTOP[/] of a subtask (pid {victims[0]}) for 1.5 s")
    os.kill(victims[0], signal.SIGSTOP)
    try:
        time.sleep(1.5)
    finally:
        try:
            os.kill(victims[0], signal.SIGCONT)
        except ProcessLookupError:
            console.print("the stopped subtask was ended by its node meanwhile")


def report(status: dict[str, Any], rows: int, seconds: float) -> None:
    table = Table("epoch", "generation", "kind", "state", "size", "duration ms", "commit ms")
    for e in reversed(status["epochs"]):
        table.add_row(*(str(e[k]) for k in ("epoch", "generation", "kind", "state", "size", "duration_ms", "commit_ms")))
    console.print(table)
    read = sum(s["stats"].get("records_in", 0) for s in status["subtasks"] if s["subtask"].startswith("table"))
    late = sum(s["stats"].get("late", 0) for s in status["subtasks"])
    console.print(
        f"state {status['state']}, generation {status['generation']}, recoveries {status['restarts']} {status['causes']}, "
        f"late {late}, records read since the last recovery {read}, rows in the sink {rows}, {seconds:.1f} s"
    )


def run(table: Path, directory: Path, pace_us: int, calm: bool) -> int:
    target = directory / "result.db"
    with closing(sqlite3.connect(target)) as connection:
        connection.execute(CREATE)
        connection.commit()
    began = time.monotonic()
    with DevCluster("examples.flights.jobs:pipelines", directory=directory, nodes=2, slots=8) as cluster:
        config: dict[str, Any] = {"path": str(table), "target": f"sqlite:///{target}", "pace_us": pace_us}
        job = cluster.submit("flights", config=config, settings=SETTINGS)
        if not calm:
            break_things(cluster, job)
        row = cluster.wait(job, 900)
        status = cluster.operations.status(job)
    with closing(sqlite3.connect(target)) as connection:
        rows: list[Row] = connection.execute(SELECT).fetchall()
    report(status, len(rows), time.monotonic() - began)
    if row.state != "FINISHED":
        console.print(f"[red]the job ended as {row.state}: {row.reason}[/]")
        return 1
    if not calm and row.restarts == 0:
        console.print("[red]nothing was recovered from: the kill did not hit the job[/]")
        return 1
    wrong = difference(rows, answer(table))
    for line in wrong[:20]:
        console.print(f"[red]{line}[/]")
    verdict = f"[red]{len(wrong)} differences[/]" if wrong else "[green]equal[/]"
    console.print(f"sink against the answer computed apart ({len(rows)} windows): {verdict}")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.flights", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the whole year, 336,776 rows, fetched from the package index")
    parser.add_argument("--calm", action="store_true", help="break nothing")
    parser.add_argument("--pace-us", type=int, default=None, help="pause per record in microseconds (default 500; 0 with --full)")
    parser.add_argument("--directory", type=Path, help="keep database, checkpoints and logs here")
    args = parser.parse_args(argv)
    directory = args.directory or Path(tempfile.mkdtemp(prefix="millstream-flights-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        if args.full:
            table = fetch(calendar=True)
        else:
            table = unpack(directory)
        pace = args.pace_us if args.pace_us is not None else 0 if args.full else 500
        return run(table, directory, pace, args.calm)
    except (FetchFailed, TimeoutError) as exc:
        console.print(f"[red]{exc}[/]")
        return 1
    finally:
        if args.directory is None:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
