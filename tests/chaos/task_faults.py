"""Durable tasks on a cluster that is broken: the load, the faults, the check. Called by the chaos test and by its short version.

What must never happen here: a signal to a process or server that the test did not start; a task whose acceptance nobody knows taken for accepted.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import redis
import sqlalchemy as sa
from tests.acceptance.task_application import handlers
from tests.acceptance.traffic import Broker, engine_of
from tests.support.celery_cluster import CeleryCluster, eventually
from tests.support.instances import MariaDBInstance, PostgresInstance, RedisInstance

from millstream import Tasks
from millstream.tasks import Item, Refusal
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import StoreError

PART = 100
EXTERNAL_EVERY = 40
"""One of so many tasks is external."""
DatabaseServer = PostgresInstance | MariaDBInstance


class TaskCluster(CeleryCluster):
    """Celery workers with durable handlers, and no stream jobs."""

    def task_process(self, name: str) -> psutil.Process:
        def look() -> psutil.Process | None:
            return next((p for p in self.main(name).children() if "millstream.task_process" in p.cmdline()), None)

        found: psutil.Process = eventually(f"task process of {name} runs", look)
        return found

    def handler_processes(self, name: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            found = self.task_process(name).children()
        return found


@contextlib.contextmanager
def task_cluster(home: Path, broker: Broker, database_url: str, workers: int = 2) -> Iterator[TaskCluster]:
    cluster = TaskCluster(
        home, broker.url, database_url, application="tests.acceptance.task_application", pipelines="tests.acceptance.pipelines:pipelines", workers=workers,
        lease_ms=2000, slots=2, environment={"MILLSTREAM_CHAOS_FILE": str(home / "outside.txt")},
    )  # fmt: skip
    with cluster:
        yield cluster


class Load:
    """``count`` tasks, submitted by key until every one is known to be accepted: each writes a row, every fortieth a line outside."""

    def __init__(self, cluster: TaskCluster, count: int) -> None:
        self.cluster = cluster
        self.count = count
        self.tasks = Tasks(cluster.installation, handlers)
        self.accepted = 0
        with engine_of(cluster.database_url) as engine, engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE written (number BIGINT NOT NULL, fence BIGINT NOT NULL)")
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._submit_all, name="load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _submit_all(self) -> None:
        try:
            for start in range(0, self.count, PART):
                numbers = range(start, min(start + PART, self.count))
                for name in ("write", "outside"):
                    part = [n for n in numbers if (n % EXTERNAL_EVERY == 0) == (name == "outside")]
                    self._submit(name, [Item(args=(n,), key=str(n)) for n in part])
                self.accepted = numbers[-1] + 1
        except BaseException as exc:
            self._errors.append(exc)

    def _submit(self, name: str, items: list[Item]) -> None:
        """Again after whatever the database says: a repeat of a key is one task."""
        while not self._stop.is_set():
            try:
                answers = self.tasks.submit_many(name, items)
            except StoreError:
                self._stop.wait(0.1)
                continue
            assert not any(isinstance(a, Refusal) for a in answers), answers
            return

    def settled(self) -> Counter[str]:
        """Tasks by state."""
        t = self.tasks.database.tables.task
        found = self.tasks.database.read(lambda tx: tx.rows(sa.select(t.c.state, sa.func.count().label("n")).group_by(t.c.state)))
        return Counter({r["state"]: int(r["n"]) for r in found})

    def finished(self, timeout: float) -> Counter[str]:
        """Until every task is over or in review."""
        over = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "UNKNOWN")

        def look() -> Counter[str] | None:
            assert not self._errors, self._errors
            states = self.settled()
            return states if sum(states[s] for s in over) == self.count else None

        try:
            found: Counter[str] = eventually(f"all {self.count} tasks are over", look, timeout, every=0.5)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc}; accepted {self.accepted}, {self.settled()}\n{self.cluster.diagnosis('')}") from None
        return found

    def check(self, states: Counter[str]) -> dict[str, Any]:
        """Every task's row is there once, from the attempt that is recorded; what is outside happened at most once, and what is in doubt is in review and nothing else is."""
        external = len(range(0, self.count, EXTERNAL_EVERY))
        with engine_of(self.cluster.database_url) as engine, engine.connect() as connection:
            rows, distinct = connection.exec_driver_sql("SELECT count(*), count(DISTINCT number) FROM written").one()
        assert (rows, distinct) == (self.count - external, self.count - external), f"rows {rows}, distinct {distinct}"
        lines = Counter(int(n) for n in (self.cluster.home / "outside.txt").read_text().split())
        assert not [n for n, times in lines.items() if times > 1], "an external effect happened twice"
        t = self.tasks.database.tables.task
        found = self.tasks.database.read(
            lambda tx: tx.rows(sa.select(t.c.key, t.c.handler, t.c.state, t.c.starts).where(t.c.handler == "outside"))
        )
        happened = {int(r["key"]) for r in found if r["state"] == TaskState.SUCCEEDED}
        assert happened <= set(lines), "a success without its effect"
        assert {int(r["key"]) for r in found if int(r["key"]) in lines} <= {
            int(r["key"]) for r in found if r["state"] in ("SUCCEEDED", "UNKNOWN")
        }
        assert all(r["state"] in ("SUCCEEDED", "UNKNOWN") and r["starts"] == 1 for r in found), "an external task was repeated or given up"
        in_review = sum(1 for r in found if r["state"] == "UNKNOWN")
        assert states == Counter({"SUCCEEDED": self.count - in_review, "UNKNOWN": in_review}) - Counter(), states
        return {"rows": rows, "external": external, "in review": in_review}

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self.tasks.close()


Servers = dict[str, Any]


def _any(cluster: TaskCluster, chance: random.Random) -> str:
    return chance.choice(cluster.worker_names)


def _stop(cluster: TaskCluster, processes: list[psutil.Process], leases: float) -> None:
    with cluster.stopped(processes):
        time.sleep(cluster.lease_ms / 1000 * leases)


def _kill_handlers(cluster: TaskCluster, chance: random.Random) -> None:
    """Several deaths in a row: whatever runs is charged, nothing else."""
    for _ in range(5):
        for process in cluster.handler_processes(_any(cluster, chance))[:1]:
            cluster.kill(process)
        time.sleep(0.1)


def _flush(cluster: TaskCluster, servers: Servers) -> None:
    """Every message is gone: rows are the truth."""
    broker = servers["broker"]
    if isinstance(broker, RedisInstance):
        with redis.Redis.from_url(broker.url) as client:
            client.flushall()
        return
    for line in broker.ctl("list_queues", "--quiet", "name").splitlines():
        if line.startswith(f"{cluster.prefix}.tasks."):
            with contextlib.suppress(subprocess.SubprocessError, RuntimeError):
                broker.ctl("purge_queue", line.strip())


def _database_away(cluster: TaskCluster, servers: Servers) -> None:
    """For longer than two leases: nobody can renew, and that tells of the database, not of the workers."""
    servers["database"].stop()
    time.sleep(cluster.lease_ms / 1000 * 2.2)
    servers["database"].start()


FAULTS: dict[str, Callable[[TaskCluster, Servers, random.Random], None]] = {
    "kill-worker": lambda c, s, r: c.kill(c.main(_any(c, r))),
    "kill-task-process": lambda c, s, r: c.kill(c.task_process(_any(c, r))),
    "kill-handlers": lambda c, s, r: _kill_handlers(c, r),
    "kill-beat": lambda c, s, r: c.kill(c.main("beat")),
    "stop-worker": lambda c, s, r: _stop(c, c.tree(_any(c, r)), r.uniform(1.2, 2.0)),
    "stop-handler": lambda c, s, r: _stop(c, c.handler_processes(_any(c, r))[:1], r.uniform(0.2, 1.4)),
    "flush-broker": lambda c, s, r: _flush(c, s),
    "restart-broker": lambda c, s, r: s["broker"].restart(),
    "kill-broker": lambda c, s, r: (s["broker"].kill(), s["broker"].start())[0],
    "restart-database": lambda c, s, r: s["database"].restart(),
    "kill-database": lambda c, s, r: (s["database"].kill(), s["database"].start())[0],
    "database-away": lambda c, s, r: _database_away(c, s),
}


def counted(load: Load) -> tuple[int, int]:
    """(crashes and losses charged, tasks in review)."""
    t = load.tasks.database.tables.task
    in_review = sa.case((t.c.state == "UNKNOWN", 1), else_=0)
    found = load.tasks.database.read(
        lambda tx: tx.rows(sa.select(sa.func.sum(t.c.crashes + t.c.losses).label("c"), sa.func.sum(in_review).label("r")))
    )
    return int(found[0]["c"] or 0), int(found[0]["r"] or 0)


def drawn(chance: random.Random, rounds: int) -> list[str]:
    """Each fault once in every round, in any order."""
    return [kind for _ in range(rounds) for kind in chance.sample(sorted(FAULTS), len(FAULTS))]


MORE = 100
"""Tasks that succeed between two faults."""


def progressed(load: Load, before: int) -> bool:
    """Whether enough has succeeded since, or nothing is left to."""
    states = load.settled()
    return states["SUCCEEDED"] >= before + MORE or states["SUCCEEDED"] + states["UNKNOWN"] == load.count


def survive(cluster: TaskCluster, servers: Servers, load: Load, faults: list[str], chance: random.Random) -> None:
    """One fault after the other, each when tasks have succeeded after the last; a database that was away charges nobody with it."""
    for number, kind in enumerate(faults, 1):
        began = time.monotonic()
        calm = counted(load) if kind == "database-away" else None
        FAULTS[kind](cluster, servers, chance)
        before: int = eventually("the database answers", lambda: load.settled() or Counter({"": 1}))["SUCCEEDED"]
        eventually(f"tasks succeed after {kind}", partial(progressed, load, before), 60)
        if calm is not None:
            assert counted(load) == calm, f"{kind} was charged to tasks: {calm} became {counted(load)}"
        print(f"{number:3d}/{len(faults)} {kind:<18} {load.settled()['SUCCEEDED']:6d} done, {time.monotonic() - began:5.1f} s", flush=True)
