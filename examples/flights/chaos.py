"""Flights on two Celery workers and beat, broken on purpose: ``python -m examples.flights.chaos --broker rabbitmq|redis [--faults 5]``.

Starts a broker and a PostgreSQL of its own and touches only those. The job is ``celery -A examples.flights worker`` twice and ``beat``; while it runs a worker is killed with -9,
the coordinator's worker, beat, a whole worker is stopped past its lease and woken, and the broker is restarted. Exit code 0 only when the sink is then equal to the answer computed
apart, and what the woken worker held was refused.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from examples.flights.jobs import COLUMNS
from examples.flights.reference import CREATE, SELECT, Row, answer, difference
from rich.console import Console
from tests.support.celery_cluster import CeleryCluster, eventually, settings
from tests.support.instances import InstanceFailed, PostgresInstance, RabbitMQInstance, RedisInstance

from millstream import ConnectorContext, Fenced, SqlAppendSink

MONTH = Path(__file__).parents[1] / "data" / "flights-2013-01.csv.gz"
RECORDS = 27_004
SECONDS_PER_FAULT = 10
console = Console(highlight=False, width=140)


class Failure(Exception):
    """The run shows that a promise was not kept."""


class Chaos:
    """One run: the job, and the faults in their order."""

    def __init__(self, cluster: CeleryCluster, broker: RedisInstance | RabbitMQInstance, job: str, target: str) -> None:
        self.cluster = cluster
        self.broker = broker
        self.job = job
        self.target = target
        self.faults: list[Callable[[], str]] = [
            self.kill_worker,
            self.stop_worker,
            self.kill_coordinator,
            self.restart_broker,
            self.kill_beat,
        ]

    def _busy(self) -> str:
        return (self.cluster.running_workers() or self.cluster.worker_names)[0]

    def _kill_tree(self, name: str) -> None:
        for process in self.cluster.tree(name):
            self.cluster.kill(process)

    def kill_worker(self) -> str:
        name = self._busy()
        self._kill_tree(name)
        return f"kill -9 of worker {name}, its node process and its subtasks"

    def kill_coordinator(self) -> str:
        name = self.cluster.leader()
        self._kill_tree(name)
        return f"kill -9 of worker {name}, whose node process coordinates"

    def kill_beat(self) -> str:
        self.cluster.kill(self.cluster.main("beat"))
        return "kill -9 of beat"

    def restart_broker(self) -> str:
        self.broker.restart()
        return f"restart of {self.broker.kind}"

    def stop_worker(self) -> str:
        """SIGSTOP of everything of a worker that has subtasks until another generation has made an epoch durable, then SIGCONT."""
        cluster, name = self.cluster, self._busy()
        hosted = f"{name}@{cluster.prefix}"
        node, generation, subtasks = cluster.node_ids()[hosted], cluster.row(self.job).generation, cluster.subtasks(name)
        with cluster.stopped(cluster.tree(name)):
            eventually("another generation takes over", lambda: cluster.row(self.job).generation > generation)
            cluster.durable(self.job, cluster.row(self.job).newest_durable)
            self._stale_write(generation)
        eventually("the stale subtasks end", lambda: not any(p.is_running() and p.status() != "zombie" for p in subtasks))
        eventually("the woken node registers anew", lambda: cluster.node_ids().get(hosted, node) != node)
        return f"SIGSTOP of worker {name} ({len(subtasks)} subtasks) past its lease, SIGCONT: generation {generation} was refused, its node got a new id"

    def _stale_write(self, generation: int) -> None:
        """What a woken subtask that did not stop by itself would do: write under its old generation. The target must refuse it."""
        stale = ConnectorContext(self.job, "result", 0, 2, generation, lambda: None, lambda: 0)
        with suppress(Fenced):
            SqlAppendSink(self.target, "flights_per_day", COLUMNS, patience=5.0).open(stale).close()
            raise Failure(f"the target admitted a writer of generation {generation}, which is over")

    def run(self, count: int) -> None:
        """Each fault comes when the last one's recovery has made an epoch durable."""
        epoch = self.cluster.durable(self.job, 1)
        for number in range(count):
            if self.cluster.row(self.job).state.ended:
                raise Failure(f"the job ended before fault {number + 1}: slow it down with a larger --seconds-per-fault")
            began = time.monotonic()
            what = self.faults[number % len(self.faults)]()
            epoch = self.cluster.durable(self.job, max(epoch, self.cluster.row(self.job).next_epoch - 1), timeout=120)
            console.print(f"[red]{what}[/]: epoch {epoch} is durable {time.monotonic() - began:.1f} s later")


def run(broker_kind: str, faults: int, seconds: float, home: Path) -> int:
    table = home / "flights-2013-01.csv"
    table.write_bytes(gzip.decompress(MONTH.read_bytes()))
    kind = {"redis": RedisInstance, "rabbitmq": RabbitMQInstance}[broker_kind]
    began = time.monotonic()
    with PostgresInstance() as database, kind() as broker:
        target = database.url.replace("+psycopg", "")
        with psycopg.connect(target) as connection:
            connection.execute(CREATE)
        with CeleryCluster(home, broker.url, database.url) as cluster:
            console.print(f"two workers and beat run over {broker_kind} and PostgreSQL of their own ({time.monotonic() - began:.1f} s)")
            pace = min(1_000_000, int(max(1, faults) * seconds * 1e6 / (RECORDS / 2)))
            config: dict[str, Any] = {"path": str(table), "target": target, "pace_us": pace}
            job = cluster.jobs.submit("flights", config=config, settings=settings(source_batch=20)).id
            Chaos(cluster, broker, job, target).run(faults)
            cluster.finished(job, timeout=faults * seconds + 300)
            status = cluster.jobs.status(job)
        with psycopg.connect(target) as connection:
            rows: list[Row] = connection.execute(SELECT).fetchall()
    wrong = difference(rows, answer(table))
    for line in wrong[:20]:
        console.print(f"[red]{line}[/]")
    console.print(
        f"state {status['state']}, generation {status['generation']}, recoveries {status['restarts']} {status['causes']}, {time.monotonic() - began:.0f} s"
    )
    verdict = f"[red]{len(wrong)} differences[/]" if wrong else "[green]equal[/]"
    console.print(f"sink against the answer computed apart ({len(rows)} windows, {sum(r[3] for r in rows)} flights): {verdict}")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.flights.chaos", description=__doc__)
    parser.add_argument("--broker", choices=["rabbitmq", "redis"], required=True)
    parser.add_argument("--faults", type=int, default=5, help="how many; the five kinds come in turn (default 5)")
    parser.add_argument("--seconds-per-fault", type=float, default=SECONDS_PER_FAULT, help="how long the job shall read for each fault")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="millstream-chaos-", ignore_cleanup_errors=True) as home:
        try:
            return run(args.broker, args.faults, args.seconds_per_fault, Path(home))
        except (Failure, AssertionError, TimeoutError, InstanceFailed) as exc:
            console.print(str(exc), style="red", markup=False)
            return 1


if __name__ == "__main__":
    sys.exit(main())
