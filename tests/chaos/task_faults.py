"""Durable tasks on a cluster that is broken: the load, the faults, the check. Called by the chaos test and by its short version.

What must never happen here: a signal to a process or server that the test did not start; a task whose acceptance nobody knows taken for accepted.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from millstream.messages import wake_queue
from millstream.tasks import Refusal, Request
from millstream_schema.durable.requests import Options
from millstream_schema.errors import StoreError

PART = 100
EXTERNAL_EVERY = 40
"""So many tasks that write a row come with one of each external handler."""
EXTERNAL = ("outside", "charge", "ask")
OVER = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "UNKNOWN")
FIRST = Options(priority=1_000)
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
def task_cluster(
    home: Path, broker: Broker, database_url: str, *, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[TaskCluster]:
    """Workers whose application has durable tasks alone: beat has nothing to send for them. ``options``: of the cluster."""
    chosen = {"workers": 2, "beats": (), "lease_ms": 2000, "slots": 2, **options}
    cluster = TaskCluster(
        home, broker.url, database_url, application="tests.acceptance.task_application", pipelines="tests.acceptance.pipelines:pipelines",
        environment={"MILLSTREAM_CHAOS_HOME": str(home), **(environment or {})}, **chosen,
    )  # fmt: skip
    with cluster:
        yield cluster


class Load:
    """``count`` tasks that each write a row, submitted by key until every one is known to be accepted; beside them, for each fortieth, one of each handler that reaches outside."""

    def __init__(self, cluster: TaskCluster, count: int) -> None:
        self.cluster = cluster
        self.count = count
        self.total = count + len(EXTERNAL) * len(range(0, count, EXTERNAL_EVERY))
        self.tasks = Tasks(cluster.installation, handlers)
        self.accepted = 0
        for name in ("outside", "calls", "back", "asked"):
            (cluster.home / f"{name}.txt").touch()
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
                reaching = [Request(handler=name, args=(n,), key=str(n)) for n in numbers if n % EXTERNAL_EVERY == 0 for name in EXTERNAL]
                self._submit([*(Request(handler="write", args=(n,), key=str(n)) for n in numbers), *reaching])
                self.accepted = numbers[-1] + 1
        except BaseException as exc:
            self._errors.append(exc)

    def _submit(self, requests: list[Request]) -> None:
        """Again after whatever the database says: a repeat of a key is one task."""
        while not self._stop.is_set():
            try:
                answers = self.tasks.accept(requests)
            except StoreError:
                self._stop.wait(0.1)
                continue
            assert not any(isinstance(a, Refusal) for a in answers), answers
            return

    def standing(self, *calls: tuple[str, str]) -> list[int]:
        """More tasks, each (handler, where): their numbers. Claimed before all others; each stands still before or after its call until :meth:`go_on`, or until it is killed."""
        numbers = list(range(self.total, self.total + len(calls)))
        found = [
            Request(handler=name, args=(n,), kwargs={"stand": where}, key=str(n), options=FIRST)
            for n, (name, where) in zip(numbers, calls, strict=True)
        ]
        self.total += len(calls)
        self._submit(found)
        return numbers

    def stands(self, number: int) -> psutil.Process:
        """The handler process that stands in this call, once one does."""
        told = self.cluster.home / f"stands-{number}"

        def look() -> psutil.Process | None:
            pid = int(told.read_text())
            return next((p for name in self.cluster.worker_names for p in self.cluster.handler_processes(name) if p.pid == pid), None)

        found: psutil.Process = eventually(f"task {number} stands in its call", look)
        return found

    def go_on(self, number: int) -> None:
        (self.cluster.home / f"go-{number}").touch()

    def settled(self) -> Counter[str]:
        """Its tasks by state."""
        t = self.tasks.database.tables.task
        counted = sa.select(t.c.state, sa.func.count().label("n")).where(t.c.handler.in_(("write", *EXTERNAL))).group_by(t.c.state)
        found = self.tasks.database.read(lambda tx: tx.rows(counted))
        return Counter({r["state"]: int(r["n"]) for r in found})

    def over(self) -> Counter[str] | None:
        """Tasks by state once every one is over or in review."""
        assert not self._errors, self._errors
        states = self.settled()
        return states if sum(states[s] for s in OVER) == self.total else None

    def finished(self, timeout: float) -> Counter[str]:
        """Until every task is over or in review."""
        try:
            found: Counter[str] = eventually(f"all {self.total} tasks are over", self.over, timeout, every=0.5)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc}; accepted {self.accepted}, {self.settled()}\n{self.cluster.diagnosis('')}") from None
        return found

    def check(self, states: Counter[str]) -> dict[str, Any]:
        """Each task's row is there once; outside nothing happened twice but by leave of a hook; what is in doubt is in review and nothing else is.

        Then every review is decided by what the outside knows, and each call was made once.
        """
        with engine_of(self.cluster.database_url) as engine, engine.connect() as connection:
            rows, distinct = connection.exec_driver_sql("SELECT count(*), count(DISTINCT number) FROM written").one()
        assert (rows, distinct) == (self.count, self.count), f"rows {rows}, distinct {distinct}"
        reviews = {"outside": self._check_outside(), "charge": self._check_calls()}
        in_review = sum(reviews.values())
        assert states == Counter({"SUCCEEDED": self.total - in_review, "UNKNOWN": in_review}) - Counter(), states
        self._decide()
        return {"rows": rows, "external": self.total - self.count, "in review": reviews}

    def _of(self, *names: str) -> list[Any]:
        t = self.tasks.database.tables.task
        return list(self.tasks.database.read(lambda tx: tx.rows(sa.select(t).where(t.c.handler.in_(names)))))

    def lines(self, name: str) -> Counter[str]:
        return Counter((self.cluster.home / f"{name}.txt").read_text().splitlines())

    def _check_outside(self) -> int:
        """``external`` without ``ctx.external``: never repeated, whatever became of it; how many are in review."""
        lines, found = self.lines("outside"), self._of("outside")
        assert not [n for n, times in lines.items() if times > 1], "an external effect happened twice"
        assert all(r["state"] in ("SUCCEEDED", "UNKNOWN") and r["starts"] == 1 for r in found), "an external task was repeated or given up"
        assert {r["key"] for r in found if r["state"] == "SUCCEEDED"} <= set(lines) <= {r["key"] for r in found}, (
            "a success without its effect"
        )
        return sum(1 for r in found if r["state"] == "UNKNOWN")

    def intents(self) -> dict[str, Any]:
        i = self.tasks.database.tables.intent
        return {r["root"]: r for r in self.tasks.database.read(lambda tx: tx.rows(sa.select(i)))}

    def _check_calls(self) -> int:
        """``ctx.external``: a task is in review exactly when its call is in doubt and nobody can be asked; how many are."""
        made, asked, intents = self.lines("calls"), self.lines("asked"), self.intents()
        for row in self._of("charge", "ask"):
            intent = intents[row["root"]]
            key = intent["idempotency_key"]
            assert made[key] <= 1 + asked[f"{key} not-done"], f"called {made[key]} times: {row['handler']} {row['key']}"
            if row["state"] == "SUCCEEDED":
                assert intent["state"] == "DONE" and made[key], f"a success without its call: {row['handler']} {row['key']}"
            else:
                assert (row["handler"], row["state"], row["cause"]) == ("charge", "UNKNOWN", "intent"), dict(row)
                assert intent["state"] == "OPEN" or intent["closed_by"], dict(intent)
        return sum(1 for r in self._of("charge") if r["state"] == "UNKNOWN")

    def _decide(self) -> None:
        """As a person does who looks outside."""
        made, intents = self.lines("calls"), self.intents()
        for row in self._of("charge"):
            if row["state"] == "UNKNOWN":
                task = self.tasks.get(row["id"])
                if made[intents[row["root"]]["idempotency_key"]]:
                    self.tasks.review_done(task, result=int(row["key"]), reason="the outside knows it")
                else:
                    self.tasks.review_retry(task, reason="the outside does not know it")
                    self.total += 1
        self.finished(timeout=60)
        made, asked = self.lines("calls"), self.lines("asked")
        for root, intent in self.intents().items():
            key = intent["idempotency_key"]
            assert intent["state"] == "DONE" and 1 <= made[key] <= 1 + asked[f"{key} not-done"], (root, dict(intent), made[key])
        assert sum(made.values()) <= len(intents) + sum(n for line, n in asked.items() if line.endswith("not-done"))

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


def _kill_callers(load: Load) -> None:
    """Processes that stand in a call, right before the outside hears of it and right after: nobody can tell the two apart, but the outside."""
    places = [(name, where) for name in ("charge", "ask") for where in ("before", "after")]
    for number in load.standing(*places):
        load.cluster.kill(load.stands(number))


def _flush(cluster: TaskCluster, servers: Servers) -> None:
    """Every message is gone: rows are the truth."""
    broker = servers["broker"]
    if isinstance(broker, RedisInstance):
        with redis.Redis.from_url(broker.url) as client:
            client.flushall()
        return
    found = [line.strip() for line in broker.ctl("list_queues", "name").splitlines() if line.startswith(cluster.prefix)]
    assert wake_queue(cluster.prefix, "default") in found, found
    for name in found:
        broker.ctl("purge_queue", name)


def _database_away(load: Load, servers: Servers) -> None:
    """For longer than two leases: nobody can renew, and that tells of the database, not of the workers. Calls that come back meanwhile cannot be written down."""
    calls = load.standing(("charge", "after"), ("ask", "after"))
    for number in calls:
        load.stands(number)
    servers["database"].kill()  # at once: the lease goes on
    for number in calls:
        load.go_on(number)
    time.sleep(load.cluster.lease_ms / 1000 * 2.2)
    servers["database"].start()


FAULTS: dict[str, Callable[[Load, Servers, random.Random], None]] = {
    "kill-worker": lambda load, s, r: load.cluster.kill(load.cluster.main(_any(load.cluster, r))),
    "kill-task-process": lambda load, s, r: load.cluster.kill(load.cluster.task_process(_any(load.cluster, r))),
    "kill-handlers": lambda load, s, r: _kill_handlers(load.cluster, r),
    "kill-callers": lambda load, s, r: _kill_callers(load),
    "stop-worker": lambda load, s, r: _stop(load.cluster, load.cluster.tree(_any(load.cluster, r)), r.uniform(1.2, 2.0)),
    "stop-handler": lambda load, s, r: _stop(load.cluster, load.cluster.handler_processes(_any(load.cluster, r))[:1], r.uniform(0.2, 1.4)),
    "flush-broker": lambda load, s, r: _flush(load.cluster, s),
    "restart-broker": lambda load, s, r: s["broker"].restart(),
    "kill-broker": lambda load, s, r: (s["broker"].kill(), s["broker"].start())[0],
    "restart-database": lambda load, s, r: s["database"].restart(),
    "kill-database": lambda load, s, r: (s["database"].kill(), s["database"].start())[0],
    "database-away": lambda load, s, r: _database_away(load, s),
}


def charged(load: Load) -> dict[str, str]:
    """Tasks that a crash is counted of, or that are in review, with what is told of them. A loss is no crash: what was cut off runs again; killed in its call, it is in doubt."""
    t, a = load.tasks.database.tables.task, load.tasks.database.tables.attempt
    some = sa.select(t).where(sa.or_(t.c.crashes > 0, t.c.state == "UNKNOWN"))
    found, ended = load.tasks.database.read(lambda tx: (tx.rows(some), tx.rows(sa.select(a).order_by(a.c.task, a.c.fence))))
    back, intents = load.lines("back"), load.intents()
    told: dict[str, list[str]] = {}
    for r in ended:
        told.setdefault(r["task"], []).append(f"{r['fence']} {r['outcome']} {r['detail'][:300]} {r['started_us']}-{r['ended_us']}")
    return {
        r["id"]: f"{r['handler']} {r['key']}: {r['crashes']} crashes{', in review' * (r['state'] == 'UNKNOWN')}; "
        + "; ".join(told.get(r["id"], []))
        for r in found
        if r["crashes"] or r["handler"] != "charge" or back[intents[r["root"]]["idempotency_key"]]
    }


def calmed(load: Load) -> dict[str, str]:
    """Likewise, once nothing is left of the faults before: every session that holds tasks has renewed since."""
    database, lease_us = load.tasks.database, load.cluster.lease_ms * 1000
    t, n = database.tables.task, database.tables.node
    holding = sa.select(n.c.expires_us).where(n.c.id.in_(sa.select(t.c.session).where(t.c.session != "")))
    since = eventually("the database answers", lambda: database.read(lambda tx: tx.now_us()))
    eventually(
        "no lost session holds tasks", lambda: all(r["expires_us"] > since + lease_us for r in database.read(lambda tx: tx.rows(holding)))
    )
    return charged(load)


def drawn(chance: random.Random, rounds: int) -> list[str]:
    """Each fault once in every round, in any order."""
    return [kind for _ in range(rounds) for kind in chance.sample(sorted(FAULTS), len(FAULTS))]


MORE = 100
"""Tasks that succeed between two faults."""


def progressed(load: Load, before: int) -> bool:
    """Whether enough has succeeded since, or nothing is left to."""
    return load.settled()["SUCCEEDED"] >= before + MORE or load.over() is not None


def survive(servers: Servers, load: Load, faults: list[str], chance: random.Random, *, least: int | None = None) -> None:
    """One fault after the other, each when tasks have succeeded after the last; those past ``least`` while tasks are left. An outage of the database is charged to nobody."""
    for number, kind in enumerate(faults, 1):
        if least is not None and number > least and load.over() is not None:
            return
        began = time.monotonic()
        calm = calmed(load) if kind == "database-away" else None
        FAULTS[kind](load, servers, chance)
        before: int = eventually("the database answers", lambda: load.settled() or Counter({"": 1}))["SUCCEEDED"]
        eventually(f"tasks succeed after {kind}", partial(progressed, load, before), 60)
        if calm is not None:
            since = charged(load)
            assert since == calm, f"{kind} was charged to tasks: " + "\n".join(
                f"{since[i]} (before: {calm.get(i)})" for i in since if since[i] != calm.get(i)
            )
        print(f"{number:3d} {kind:<18} {load.settled()['SUCCEEDED']:6d} done, {time.monotonic() - began:5.1f} s", flush=True)
