"""Servers of one's own for tests that break them: PostgreSQL, MariaDB, Redis and RabbitMQ as child processes.

Called by the chaos, soak and instance tests, and by :mod:`tests.support.services` when no server answers at its usual address. What must
never happen here: an address, port, cookie or name server shared with a server that is not ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import amqp
import psycopg
import pymysql
import redis
from tests.support.processes import Instance, InstanceFailed, PortLease, find_program

__all__ = ["Instance", "InstanceFailed", "MariaDBInstance", "PostgresInstance", "RabbitMQInstance", "RedisInstance"]


class PostgresInstance(Instance):
    """PostgreSQL with user ``postgres``, no password, database ``test``; ``synchronous_commit`` and ``fsync`` are on."""

    kind = "postgres"
    account = "postgres"
    stop_signal = signal.SIGINT  # "fast": SIGTERM would wait for every client to leave

    @classmethod
    def program(cls) -> str | None:
        return find_program("postgres", "/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/test"

    def _prepare(self) -> None:
        program = self.program()
        if program is None:
            raise InstanceFailed("PostgreSQL is not installed (Debian: apt-get install postgresql)")
        # initdb stands beside the server; a link on PATH may point elsewhere than the real directory.
        initdb = Path(program).resolve().with_name("initdb")
        data = ["-D", str(self.home / "data")]
        self._run([str(initdb), *data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"])

    def _command(self) -> list[str]:
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.home),
            "shared_buffers": "32MB",
            "max_connections": "100",
            "autovacuum": "off",
            "timezone": "UTC",
        }
        pairs = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [self.program() or "postgres", "-D", str(self.home / "data"), "-p", str(self.port), *pairs]

    def _login(self) -> None:
        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{self.port}/postgres", connect_timeout=2, autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = 'test'").fetchall():
                connection.execute("CREATE DATABASE test")


class MariaDBInstance(Instance):
    """MariaDB with user ``root``, no password, database ``test``; ``innodb_flush_log_at_trx_commit`` is 1."""

    kind = "mariadb"
    account = "mysql"

    @classmethod
    def program(cls) -> str | None:
        return find_program("mariadbd")

    @property
    def url(self) -> str:
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/test"

    def _prepare(self) -> None:
        install = find_program("mariadb-install-db")
        if install is None or self.program() is None:
            raise InstanceFailed("MariaDB is not installed (Debian: apt-get install mariadb-server)")
        own = ["--no-defaults", f"--datadir={self.home / 'data'}", f"--tmpdir={self.home}"]
        self._run([install, *own, "--auth-root-authentication-method=normal", "--skip-test-db", "--innodb-log-file-size=16M"])

    def _command(self) -> list[str]:
        return [
            self.program() or "mariadbd",
            "--no-defaults",
            f"--datadir={self.home / 'data'}",
            f"--tmpdir={self.home}",
            f"--socket={self.home / 'm.sock'}",
            f"--pid-file={self.home / 'm.pid'}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=16M",
            "--innodb-flush-log-at-trx-commit=1",
            "--performance-schema=OFF",
            "--character-set-server=utf8mb4",
        ]

    def _login(self) -> None:
        with pymysql.connect(host="127.0.0.1", port=self.port, user="root", connect_timeout=2) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW DATABASES LIKE 'test'")
            if not cursor.fetchall():
                cursor.execute("CREATE DATABASE test")


class RedisInstance(Instance):
    """Redis with ``noeviction``.

    ``appendfsync``: ``always`` keeps each acknowledged write across :meth:`kill` and power loss; ``everysec`` keeps them across
    :meth:`kill` (the operating system has them) and may lose a second at power loss; None keeps nothing at all.
    """

    kind = "redis"

    def __init__(self, *, port: int | None = None, appendfsync: str | None = "everysec") -> None:
        if appendfsync not in (None, "always", "everysec", "no"):
            raise ValueError(f"appendfsync is {appendfsync!r}; use 'always', 'everysec', 'no', or None for no append-only file")
        self.appendfsync = appendfsync
        super().__init__(port=port)

    @classmethod
    def program(cls) -> str | None:
        return find_program("redis-server") or find_program("valkey-server")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _prepare(self) -> None:
        if self.program() is None:
            raise InstanceFailed("Redis is not installed (Debian: apt-get install redis-server)")

    def _command(self) -> list[str]:
        durable = ["--appendonly", "yes", "--appendfsync", self.appendfsync] if self.appendfsync else ["--appendonly", "no"]
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.home)]
        return [self.program() or "redis-server", *where, *durable, "--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no"]

    def _login(self) -> None:
        with contextlib.closing(redis.Redis.from_url(self.url, socket_timeout=2, retry=None)) as client:
            client.ping()


class RabbitMQInstance(Instance):
    """RabbitMQ with user ``guest``/``guest`` and virtual host ``/``, its own node name, cookie and name server (epmd)."""

    kind = "rabbitmq"
    start_timeout = 90.0

    def __init__(self, *, port: int | None = None) -> None:
        super().__init__(port=port)
        self._leases += [PortLease(), PortLease()]
        self._distribution, self._epmd = (lease.port for lease in self._leases[1:])
        self.node = f"millstream-{self.port}@localhost"

    @classmethod
    def program(cls) -> str | None:
        # Not the wrapper on PATH: Debian's changes the account to one that cannot read this directory.
        return next((str(p) for p in sorted(Path("/usr/lib/rabbitmq").glob("**/bin/rabbitmq-server"))), None) or find_program(
            "rabbitmq-server"
        )

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def control_environment(self) -> dict[str, str]:
        """What ``rabbitmqctl`` needs in its environment to reach this node."""
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(self.home),
            "LC_ALL": "C.UTF-8",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_CONF_ENV_FILE": str(self.home / "env.conf"),
            "ERL_EPMD_PORT": str(self._epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def ctl_program(self) -> str:
        """``rabbitmqctl`` of the same installation."""
        return str(Path(self.program() or "rabbitmq-server").with_name("rabbitmqctl"))

    def ctl(self, *arguments: str, timeout: float = 30.0) -> str:
        """Run ``rabbitmqctl`` against this node; its output. Raises :class:`InstanceFailed` when it fails."""
        done = subprocess.run(
            [self.ctl_program(), "--quiet", *arguments], env=self.control_environment(), capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            raise InstanceFailed(f"rabbitmqctl {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _prepare(self) -> None:
        if self.program() is None or find_program("epmd", "/usr/lib/erlang/erts-*/bin") is None:
            raise InstanceFailed("RabbitMQ is not installed (Debian: apt-get install rabbitmq-server)")
        cookie = self.home / ".erlang.cookie"
        cookie.write_text(os.urandom(16).hex())
        cookie.chmod(0o400)
        for name in ("data", "log"):
            (self.home / name).mkdir()
        (self.home / "env.conf").write_text("")  # in place of the machine's, which belongs to the machine's own broker
        (self.home / "enabled_plugins").write_text("[].\n")
        (self.home / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = 127.0.0.1:{self.port}\n"
            "num_acceptors.tcp = 2\nlog.console = true\nlog.console.level = warning\nlog.file = false\n"
            "vm_memory_high_watermark.absolute = 1GB\ndisk_free_limit.absolute = 50MB\n"
        )

    def _environment(self) -> Mapping[str, str]:
        return self.control_environment() | {
            "RABBITMQ_CONFIG_FILE": str(self.home / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.home / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.home / "data"),
            "RABBITMQ_LOG_BASE": str(self.home / "log"),
            "RABBITMQ_PID_FILE": str(self.home / "rabbit.pid"),
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_MAX_NUMBER_OF_PROCESSES": "200000",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +SDcpu 1:1 +SDio 4 -kernel inet_dist_use_interface {127,0,0,1}",
            "RUNNING_UNDER_SYSTEMD": "true",  # no shell between us and the server: a signal reaches it, and its end is our child's end
        }

    def start(self) -> Self:
        if not self._extra:
            epmd = find_program("epmd", "/usr/lib/erlang/erts-*/bin")
            if epmd is not None:
                self._extra.append(self._spawn([epmd, "-port", str(self._epmd), "-address", "127.0.0.1"]))
        return super().start()

    def _command(self) -> list[str]:
        # 1024 open files, a common default, wedge the server once it holds some hundred queues.
        raise_limit = 'ulimit -n 20000 2>/dev/null || ulimit -n "$(ulimit -Hn)"; exec "$0" "$@"'
        return ["sh", "-c", raise_limit, self.program() or "rabbitmq-server"]

    def _login(self) -> None:
        connection = amqp.Connection(f"127.0.0.1:{self.port}", userid="guest", password="guest", connect_timeout=2)
        connection.connect()
        connection.close()
