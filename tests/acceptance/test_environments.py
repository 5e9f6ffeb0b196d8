"""The same job where things are scarce or elsewhere: over RabbitMQ, in MariaDB, without disk for checkpoints, cut off from broker and database; and the demo."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.pipelines import ROLLING, answer, differences
from tests.acceptance.slow_pipelines import SECONDS
from tests.acceptance.traffic import Traffic, celery_cluster, fresh_database, make_tables, read_rows, sink_url
from tests.chaos.faults import Servers, survive
from tests.support.celery_cluster import ROOT, CeleryCluster, eventually, settings
from tests.support.forwarding import Forwarder
from tests.support.instances import PostgresInstance, RabbitMQInstance, RedisInstance

from millstream import RestartPolicy
from millstream.dev import DevCluster

pytestmark = [pytest.mark.processes]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT ROOT: a full disk and a cut network need mount and ip netns")


def _survives(cluster: CeleryCluster, servers: Servers, seed: int, faults: list[str]) -> None:
    job = Traffic(cluster, count=None, rate=200).submit()
    survive(cluster, servers, job, [(kind,) for kind in faults], seed)
    job.drain()
    job.check(job.ends())


@pytest.mark.rabbitmq
@pytest.mark.postgres
def test_job_over_rabbitmq_survives(tmp_path: Path, own_postgres: PostgresInstance, own_rabbitmq: RabbitMQInstance) -> None:
    """Over RabbitMQ: a worker killed, the broker killed, a subtask killed; the sink is exact."""
    with celery_cluster(tmp_path, own_rabbitmq, fresh_database(own_postgres)) as cluster:
        _survives(cluster, {"broker": own_rabbitmq, "database": own_postgres}, 11, ["kill-worker", "kill-broker", "kill-subtask"])


@pytest.mark.redis
@pytest.mark.mariadb
def test_job_with_mariadb_as_store_and_target_survives_kill_9(tmp_path: Path, own_redis: RedisInstance, mariadb_url: str) -> None:
    """Truth and sink in MariaDB: a node killed, the coordinator's process killed; the sink is exact."""
    url = mariadb_url if "+" in mariadb_url.partition(":")[0] else mariadb_url.replace("mysql://", "mysql+pymysql://")
    with celery_cluster(tmp_path, own_redis, url) as cluster:
        _survives(cluster, {"broker": own_redis}, 12, ["kill-node", "kill-coordinator"])


@pytest.mark.redis
@pytest.mark.postgres
@as_root
def test_full_checkpoint_disk_declines_epochs_and_the_job_goes_on_when_space_returns(redis_cluster: CeleryCluster, tmp_path: Path) -> None:
    """With no space for snapshots epochs are aborted, none becomes durable and nothing is lost; with space again epochs are durable and the sink is exact."""
    disk = tmp_path / "disk"
    disk.mkdir()
    _privileged("mount", "-t", "tmpfs", "-o", "size=2m", "millstream-test", str(disk))
    try:
        job = Traffic(redis_cluster, count=None).submit(checkpoints=disk.as_uri(), max_aborts=1000)
        job.running()
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)

        def refused() -> str:
            shown = redis_cluster.jobs.epochs(job.id)
            assert isinstance(shown, list)
            return next((e["reason"] for e in shown if e["state"] == "ABORTED" and "space" in e["reason"]), "")

        reason = eventually("an epoch is aborted for want of space", refused)
        assert "declined" in reason
        full = redis_cluster.row(job.id).newest_durable
        filler.unlink()
        redis_cluster.durable(job.id, full + 1)
        job.drain()
        job.check(job.ends())
    finally:
        for row in redis_cluster.jobs.list():
            if not row.state.ended:
                redis_cluster.jobs.cancel(row.id)
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _privileged(*words: str) -> None:
    """Run what root of a machine may and root of a container may not; then the test is skipped, and says so."""
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"NO {words[0]} ON THIS MACHINE")
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"NOT PRIVILEGED: {' '.join(words[:3])}: {exc.stderr.strip()}")


def _ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def _namespace() -> Iterator[tuple[str, str]]:
    """A network namespace with one wire to this one: its name, and the address of this side."""
    tag = secrets.token_hex(3)
    name, outside, inside = f"ms{tag}", f"mo{tag}", f"mi{tag}"
    third = 1 + secrets.randbelow(250)
    _privileged("ip", "netns", "add", name)
    try:
        _ip("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        _ip("ip", "address", "add", f"10.213.{third}.1/30", "dev", outside)
        _ip("ip", "link", "set", outside, "up")
        within = ("ip", "netns", "exec", name, "ip")
        _ip(*within, "address", "add", f"10.213.{third}.2/30", "dev", inside)
        _ip(*within, "link", "set", "lo", "up")
        _ip(*within, "link", "set", inside, "up")
        yield name, f"10.213.{third}.1"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def _wire(name: str, state: str) -> None:
    """Cut or mend the wire of a namespace, from its inside."""
    subprocess.run(["ip", "netns", "exec", name, "ip", "link", "set", f"mi{name[2:]}", state], check=True)


@pytest.mark.redis
@pytest.mark.postgres
@as_root
def test_worker_cut_off_from_broker_and_database_is_replaced_and_comes_back(
    tmp_path: Path, own_postgres: PostgresInstance, own_redis: RedisInstance
) -> None:
    """A partition for longer than the lease: another worker takes over; the cut-off one stops its subtasks and returns as another node."""
    with _namespace() as (name, address), Forwarder(own_postgres.port, address) as database, Forwarder(own_redis.port, address) as broker:
        local, far = fresh_database(own_postgres), f"{address}:{database.port}"
        there = {"MILLSTREAM_DATABASE": local.replace(f"127.0.0.1:{own_postgres.port}", far)}
        there |= {
            "MILLSTREAM_BROKER_URL": f"redis://{address}:{broker.port}/0",
            "MILLSTREAM_TRANSPORT": f"redis://{address}:{broker.port}/0",
        }
        places = {"w0": (["ip", "netns", "exec", name], there)}
        with celery_cluster(tmp_path, own_redis, local, places=places) as cluster:
            job = Traffic(cluster, count=None, target=there["MILLSTREAM_DATABASE"]).submit()
            epoch = job.running()
            if not cluster.subtasks("w0"):  # placed on the other worker: have it moved
                cluster.shut_down("w1")
                epoch = cluster.durable(job.id, epoch + 1)
                cluster.up("w1")
                cluster.await_nodes(2)
            cut_off, old, generation = cluster.subtasks("w0"), cluster.node_ids()[f"w0@{cluster.prefix}"], cluster.row(job.id).generation
            assert cut_off, "w0 runs no subtask, so cutting it off shows nothing"
            _wire(name, "down")
            try:
                eventually(
                    "the cut-off worker's subtasks have ended", lambda: not any(p.is_running() and p.status() != "zombie" for p in cut_off)
                )
                eventually("another generation runs", lambda: cluster.row(job.id).generation > generation)
                cluster.durable(job.id, epoch + 1)
            finally:
                _wire(name, "up")
            eventually("it is back under another id", lambda: cluster.node_ids().get(f"w0@{cluster.prefix}", old) != old)
            cluster.durable(job.id, cluster.row(job.id).newest_durable)
            job.drain()
            job.check(job.ends())


@pytest.mark.postgres
def test_subtasks_that_import_for_longer_than_the_lease_start(tmp_path: Path, own_postgres: PostgresInstance) -> None:
    """User code whose import takes longer than liveness and lease together is no dead subtask: the job starts and is exact."""
    target = sink_url(fresh_database(own_postgres))
    make_tables(target.replace("postgresql://", "postgresql+psycopg://"), "")
    config: dict[str, Any] = {"count": 50, "rate": 1000, "target": target}
    budget = RestartPolicy(kind="fixed", delay_ms=50, failures=0)
    assert SECONDS > 1.5
    with DevCluster("tests.acceptance.slow_pipelines:pipelines", directory=tmp_path, nodes=1, lease_ms=1500, spares=0, slots=6) as cluster:
        job = cluster.submit("traffic", config=config, settings=settings(restart=budget))
        row = cluster.wait(job, 60)
    assert row.state == "FINISHED", row.reason
    rolling, _ = answer({0: 50, 1: 50})
    assert not differences(read_rows(target.replace("postgresql://", "postgresql+psycopg://"), "rolling", ROLLING), rolling)


def test_demo_is_equal_and_quick() -> None:
    """``make demo`` survives what it breaks, finds the sink equal to the answer computed apart, and ends with 0 within two minutes."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "examples.flights"], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout
    assert time.monotonic() - began < 120
