"""Own servers keep what they acknowledged across SIGKILL, and end with their tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import amqp
import psutil
import psycopg
import pytest
import redis
from tests.support import processes, services, tenancy
from tests.support.instances import Instance, InstanceFailed, MariaDBInstance, PostgresInstance, RabbitMQInstance, RedisInstance
from tests.support.processes import PortLease

pytestmark = pytest.mark.processes


def _need(program: str | None, name: str) -> None:
    if program is None:
        message = f"{name} IS NOT INSTALLED: no server of our own can be started"
        pytest.fail(message, pytrace=False) if services.in_ci() else pytest.skip(message)


def _survives_kill(server: Instance, write: Callable[[], object], read: Callable[[], object]) -> object:
    """Write, SIGKILL, start at the same address, read; the tree that was killed must be gone and the new one another."""
    write()
    before = server.pid
    server.kill()
    assert not server.running
    assert not psutil.pid_exists(before) or psutil.Process(before).status() == psutil.STATUS_ZOMBIE
    server.start()
    assert server.pid != before
    return read()


@pytest.mark.postgres
def test_postgres_keeps_committed_rows_across_kill_and_orderly_restart() -> None:
    """A committed row is there after SIGKILL and after an orderly restart, at the same address."""
    _need(PostgresInstance.program(), "POSTGRESQL")
    with PostgresInstance() as server:
        address = server.url.replace("+psycopg", "")

        def write() -> None:
            with psycopg.connect(address) as connection:
                connection.execute("CREATE TABLE t AS SELECT 7 AS x")

        def read() -> object:
            with psycopg.connect(address) as connection:
                return connection.execute("SELECT x FROM t").fetchall()

        assert _survives_kill(server, write, read) == [(7,)]
        server.restart()
        assert read() == [(7,)]
        home = server.home
    assert not home.exists()


@pytest.mark.mariadb
def test_mariadb_keeps_committed_rows_across_kill_and_orderly_restart() -> None:
    """A committed row is there after SIGKILL and after an orderly restart, at the same address."""
    _need(MariaDBInstance.program(), "MARIADB")
    with MariaDBInstance() as server:

        def write() -> None:
            with services.open_mariadb(server.url) as connection, connection.cursor() as cursor:
                cursor.execute("CREATE TABLE t ENGINE=InnoDB AS SELECT 7 AS x")

        def read() -> object:
            with services.open_mariadb(server.url) as connection, connection.cursor() as cursor:
                cursor.execute("SELECT x FROM t")
                return cursor.fetchall()

        assert _survives_kill(server, write, read) == ((7,),)
        server.restart()
        assert read() == ((7,),)


@pytest.mark.redis
@pytest.mark.parametrize(("appendfsync", "kept"), [("always", b"7"), ("everysec", b"7"), (None, None)])
def test_redis_keeps_acknowledged_writes_across_kill_only_with_an_append_only_file(appendfsync: str | None, kept: bytes | None) -> None:
    """With an append-only file an acknowledged write survives SIGKILL; without one it does not, so tests can show both."""
    _need(RedisInstance.program(), "REDIS")
    with RedisInstance(appendfsync=appendfsync) as server, contextlib.closing(redis.Redis.from_url(server.url)) as client:
        assert _survives_kill(server, lambda: client.set("x", 7), lambda: client.get("x")) == kept


@pytest.mark.redis
def test_a_paused_server_answers_nothing_and_goes_on_when_resumed() -> None:
    """SIGSTOP keeps the connection and stops the answers; SIGCONT brings them back."""
    _need(RedisInstance.program(), "REDIS")
    with RedisInstance() as server, contextlib.closing(redis.Redis.from_url(server.url, socket_timeout=0.2, retry=None)) as client:
        client.set("x", 7)
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.get("x")
        server.resume()
        assert client.get("x") == b"7"


@pytest.mark.rabbitmq
def test_rabbitmq_keeps_confirmed_persistent_messages_across_kill() -> None:
    """A confirmed persistent message in a durable queue is there after SIGKILL of the node, and rabbitmqctl reaches our node alone."""
    _need(RabbitMQInstance.program(), "RABBITMQ")

    with RabbitMQInstance() as server:

        def connection() -> amqp.Connection:
            made = amqp.Connection(f"127.0.0.1:{server.port}", userid="guest", password="guest", confirm_publish=True)
            made.connect()
            return made

        def write() -> None:
            with connection() as link:
                channel = link.channel()
                channel.queue_declare("q", durable=True, auto_delete=False)
                channel.basic_publish_confirm(amqp.Message(b"7", delivery_mode=2), routing_key="q")

        def read() -> object:
            with connection() as link:
                return link.channel().basic_get("q", no_ack=True).body

        assert _survives_kill(server, write, read) in (b"7", "7")
        assert server.ctl("eval", "node().").strip() == f"'{server.node}'"


@pytest.mark.redis
def test_a_server_of_a_killed_test_run_is_swept_by_the_next(tmp_path: Path) -> None:
    """SIGKILL to the process that started a server leaves it running; the next instance ends it and removes its directory."""
    _need(RedisInstance.program(), "REDIS")
    script = (
        "from tests.support.instances import RedisInstance; import signal; s = RedisInstance().start(); "
        "print(s.pid, s.home, flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        pid, home = child.stdout.readline().split()
        os.kill(child.pid, signal.SIGKILL)
    orphan = psutil.Process(int(pid))
    assert orphan.is_running()
    processes.sweep()
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert not Path(home).exists()


@pytest.mark.redis
def test_sweeping_leaves_the_servers_of_living_runs_alone() -> None:
    """A second instance sweeps first; the first one, whose run lives, goes on."""
    _need(RedisInstance.program(), "REDIS")
    with RedisInstance() as first, RedisInstance() as second:
        assert first.running and second.running
        assert first.port != second.port


def test_a_server_that_cannot_start_says_why() -> None:
    """The error carries the server's own words, and nothing is left behind."""
    _need(RedisInstance.program(), "REDIS")
    server = RedisInstance()
    home = server.home
    server._command = lambda: [RedisInstance.program() or "redis-server", "--no-such-option", "1"]  # type: ignore[method-assign]
    with pytest.raises(InstanceFailed, match="no-such-option"), server:
        raise AssertionError("it must not start")
    assert not home.exists()


def test_two_leases_never_hold_one_port() -> None:
    """A leased port is not given again while the lease is held, though nothing listens there yet."""
    leases = [PortLease() for _ in range(20)]
    try:
        assert len({lease.port for lease in leases}) == 20
        with pytest.raises(InstanceFailed, match="no free port"):
            PortLease(leases[0].port)
    finally:
        for lease in leases:
            lease.release()


@pytest.mark.parametrize(
    ("name", "stale"),
    [
        ("millstream_test_1000_5_0", True),
        ("millstream_test_99999999999_5_0", False),
        ("millstream_test", False),
        ("test", False),
        ("orders_1", False),
    ],
)
def test_only_old_databases_of_ours_count_as_stale(name: str, stale: bool) -> None:
    """What is swept on a shared server was named by us, hours ago."""
    assert tenancy.is_stale(name) is stale


@pytest.mark.postgres
def test_each_test_database_is_new_and_dropped(postgres_url: str) -> None:
    """The fixture's database is empty and ours; one made beside it is another and is gone afterwards."""
    with tenancy.postgres_database(postgres_url) as other:
        assert other != postgres_url
        with psycopg.connect(other.replace("+psycopg", "")) as connection:
            assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(other.replace("+psycopg", ""))


@pytest.mark.mariadb
def test_each_mariadb_database_is_new_and_dropped(mariadb_url: str) -> None:
    """One made beside the fixture's is another and is gone afterwards."""
    with tenancy.mariadb_database(mariadb_url) as other:
        services.login_mariadb(other)
    with pytest.raises(Exception, match="Unknown database"):
        services.login_mariadb(other)


@pytest.mark.redis
def test_each_redis_database_is_empty_and_claimed_once(redis_url: str) -> None:
    """Two claims never share a number, and a database with foreign content is passed over."""
    with tenancy.redis_database(redis_url) as other, contextlib.closing(redis.Redis.from_url(other)) as client:
        assert other != redis_url
        assert client.keys() == [b"millstream_test:owner"]


@pytest.mark.rabbitmq
def test_the_virtual_host_is_our_own(rabbitmq_url: str) -> None:
    """A login to the new virtual host works, and it is not the shared one."""
    assert rabbitmq_url.rsplit("/", 1)[1].startswith("millstream_test_")
    services.login_rabbitmq(rabbitmq_url)


def test_a_missing_service_is_named_and_a_given_address_is_never_replaced() -> None:
    """An address from the environment that does not answer is absent, though the usual one may answer; the reason names the variable."""
    service = services.SERVICES["redis"]
    found, started = services.ensure(service, {service.variable: "redis://:secret@127.0.0.1:1/0"})
    assert (found.url, started) == (None, None)
    assert service.variable in found.how
    assert "secret" not in found.how
