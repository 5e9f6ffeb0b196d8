"""Which servers the tests use: PostgreSQL, MariaDB, Redis, RabbitMQ, found, started or installed, never silently missing.

Called by ``make test`` (``python -m tests.support.services ensure`` and ``stop``) and by ``tests/conftest.py``. For each service in turn:
the address in its environment variable, else the usual address when a login works there, else a server of our own from what is
installed, else ``apt-get install`` (as root on Debian), else the tests that need it are skipped and the service is named in capitals;
with ``CI=true`` a missing service is a failure. What must never happen here: a change to a server's own data. Tests get databases of
their own (:mod:`tests.support.tenancy`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import amqp
import psycopg
import pymysql
import redis
from tests.support import processes
from tests.support.instances import Instance, InstanceFailed, MariaDBInstance, PostgresInstance, RabbitMQInstance, RedisInstance

STATE = Path(__file__).resolve().parents[2] / ".data"
ENV_FILE = STATE / "test-services.env"
STARTED_FILE = STATE / "test-services.json"


def login_postgres(url: str) -> None:
    """Log in; raises when that is not possible. ``url`` as SQLAlchemy takes it."""
    with psycopg.connect(url.replace("postgresql+psycopg://", "postgresql://"), connect_timeout=3) as connection:
        connection.execute("SELECT 1")


def login_mariadb(url: str) -> None:
    """Log in; raises when that is not possible. ``url`` as SQLAlchemy takes it."""
    with open_mariadb(url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def open_mariadb(url: str) -> pymysql.Connection[pymysql.cursors.Cursor]:
    """A connection with autocommit to the database that ``url`` names."""
    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname or "127.0.0.1",
        port=parts.port or 3306,
        user=unquote(parts.username or "root"),
        password=unquote(parts.password or ""),
        database=parts.path.lstrip("/") or None,
        connect_timeout=3,
        autocommit=True,
    )


def login_redis(url: str) -> None:
    """Log in; raises when that is not possible."""
    with contextlib.closing(redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3, retry=None)) as client:
        client.ping()


def login_rabbitmq(url: str) -> None:
    """Log in; raises when that is not possible. The path is the virtual host; ``//`` and an empty path are ``/``."""
    parts = urlsplit(url)
    connection = amqp.Connection(
        f"{parts.hostname}:{parts.port or 5672}",
        userid=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        virtual_host=unquote(parts.path[1:]) or "/",
        connect_timeout=3,
    )
    connection.connect()
    connection.close()


@dataclass(frozen=True)
class Service:
    """One kind of server. ``port`` is its usual one; ``packages`` are Debian's."""

    name: str
    title: str
    usual: str
    port: int
    login: Callable[[str], None]
    instance: Callable[..., Instance]
    installed: Callable[[], str | None]
    packages: tuple[str, ...]

    @property
    def variable(self) -> str:
        return f"MILLSTREAM_TEST_{self.name.upper()}_URL"

    @property
    def absent_variable(self) -> str:
        """Holds the reason once it is known that there is none, so that xdist's workers do not look again."""
        return f"MILLSTREAM_TEST_{self.name.upper()}_ABSENT"


SERVICES: Mapping[str, Service] = {
    s.name: s
    for s in (
        Service(
            name="postgres",
            title="POSTGRESQL",
            usual="postgresql+psycopg://postgres@127.0.0.1:5432/test",
            port=5432,
            login=login_postgres,
            instance=PostgresInstance,
            installed=PostgresInstance.program,
            packages=("postgresql",),
        ),
        Service(
            name="mariadb",
            title="MARIADB",
            usual="mysql+pymysql://root@127.0.0.1:3306/test",
            port=3306,
            login=login_mariadb,
            instance=MariaDBInstance,
            installed=MariaDBInstance.program,
            packages=("mariadb-server",),
        ),
        Service(
            name="redis",
            title="REDIS",
            usual="redis://127.0.0.1:6379/0",
            port=6379,
            login=login_redis,
            instance=RedisInstance,
            installed=RedisInstance.program,
            packages=("redis-server",),
        ),
        Service(
            name="rabbitmq",
            title="RABBITMQ",
            usual="amqp://guest:guest@127.0.0.1:5672//",
            port=5672,
            login=login_rabbitmq,
            instance=RabbitMQInstance,
            installed=RabbitMQInstance.program,
            packages=("rabbitmq-server",),
        ),
    )
}


@dataclass(frozen=True)
class Found:
    """Where a service is, or why it is not. ``url`` is None when absent; ``how`` is for people."""

    service: Service
    url: str | None
    how: str


def in_ci(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a missing service fails the run."""
    return environ.get("CI", "").lower() in ("true", "1", "yes")


def probe(service: Service, environ: Mapping[str, str] = os.environ) -> Found:
    """Look without starting anything. An address that was given and does not answer is absent: the usual one is no substitute for it."""
    if reason := environ.get(service.absent_variable):
        return Found(service, None, reason)
    given = environ.get(service.variable)
    url = given or service.usual
    try:
        service.login(url)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return Found(service, None, f"no login at {redact(url)}{f' (from {service.variable})' if given else ''}: {reason[:200]}")
    return Found(service, url, f"from {service.variable}" if given else "answers at its usual address")


def redact(url: str) -> str:
    """The address without its password."""
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url


def ensure(service: Service, environ: Mapping[str, str] = os.environ) -> tuple[Found, Instance | None]:
    """Look, then start, then install and start. The instance, if any, belongs to the caller."""
    found = probe(service, environ)
    if found.url or environ.get(service.variable):
        return found, None
    reasons = [found.how]
    if not service.installed():
        reasons.append(_install(service))
        if service.installed() and (again := probe(service, environ)).url:
            return again, None  # the package started it
    if service.installed():
        try:
            instance = _start(service)
        except InstanceFailed as error:
            reasons.append(f"could not be started: {error}")
        else:
            return Found(service, instance.url, "started by us"), instance
    return Found(service, None, "; ".join(reasons)), None


def _start(service: Service) -> Instance:
    """At the usual port when it is free, so that a test which names that address by hand finds it; at another otherwise."""
    try:
        instance = service.instance(port=service.port)
    except InstanceFailed:
        instance = service.instance()
    try:
        return instance.start()
    except BaseException:
        instance.close()
        raise


def _install(service: Service) -> str:
    wanted = " ".join(service.packages)
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        return f"not installed (Debian: sudo apt-get install {wanted}), or set {service.variable}"
    print(f"{service.title}: installing {wanted} …", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *service.packages]
    for command in (install, ["apt-get", "update", "-q"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode == 0 and command is install:
            return f"installed {wanted}"
    return f"apt-get install {wanted} failed: {done.stderr.strip()[-300:]}"


def _write_env(founds: list[Found], control: Mapping[str, str]) -> None:
    STATE.mkdir(exist_ok=True)
    lines = ["# Written by: python -m tests.support.services ensure"]
    for found in founds:
        name, value = (found.service.variable, found.url) if found.url else (found.service.absent_variable, found.how)
        lines.append(f"{name}={shlex.quote(value)}")
    if control:
        lines.append(f"MILLSTREAM_TEST_RABBITMQCTL={shlex.quote(json.dumps(dict(control)))}")
    ENV_FILE.write_text("\n".join(lines) + "\n")


def read_env(path: Path = ENV_FILE) -> dict[str, str]:
    """What ``ensure`` wrote, empty when it was not run."""
    if not path.exists():
        return {}
    words = shlex.split(path.read_text(), comments=True)
    return dict(word.split("=", 1) for word in words)


def command_ensure() -> int:
    """Find or start all services, write their addresses to ``.data/test-services.env``. 1 when CI misses one."""
    command_stop()
    founds: list[Found] = []
    started: list[dict[str, object]] = []
    control: dict[str, str] = {}
    for service in SERVICES.values():
        found, instance = ensure(service)
        founds.append(found)
        if instance is not None:
            if isinstance(instance, RabbitMQInstance):
                control = {**instance.control_environment(), "program": instance.ctl_program()}
            started.append(instance.detach())
            STATE.mkdir(exist_ok=True)
            STARTED_FILE.write_text(json.dumps(started))
        print(f"  {service.title:<10} {redact(found.url) if found.url else 'ABSENT'}  ({found.how})", flush=True)
    _write_env(founds, control)
    absent = [f.service.title for f in founds if not f.url]
    if absent:
        print(
            f"\n  *** ABSENT: {', '.join(absent)} — {'failing, because CI is set' if in_ci() else 'TESTS THAT NEED THEM ARE SKIPPED'} ***\n"
        )
    return 1 if absent and in_ci() else 0


def command_stop() -> int:
    """End what ``ensure`` started and forget its addresses."""
    if STARTED_FILE.exists():
        for record in json.loads(STARTED_FILE.read_text()):
            processes.end_detached(record)
        STARTED_FILE.unlink()
    ENV_FILE.unlink(missing_ok=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.services", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["ensure", "stop"])
    chosen = parser.parse_args(arguments).command
    return command_ensure() if chosen == "ensure" else command_stop()


if __name__ == "__main__":
    sys.exit(main())
