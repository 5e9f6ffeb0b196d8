"""A place of its own for each group of tests on a shared server: a database, a Redis database number, a virtual host.

Called by the fixtures in ``tests/conftest.py``. What must never happen here: dropping or flushing what a test did not make. Names carry
the time they were made, so that what a killed run left is dropped by a later one after six hours, and nothing younger is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
import redis
from psycopg import sql
from tests.support.services import open_mariadb

PREFIX = "millstream_test"
STALE_SECONDS = 6 * 3600
_serial = itertools.count()


def fresh_name() -> str:
    """``millstream_test_{seconds since 1970}_{pid}_{n}``: unique on this machine, also across xdist's workers."""
    return f"{PREFIX}_{int(time.time())}_{os.getpid()}_{next(_serial)}"


def is_stale(name: str) -> bool:
    """Whether a name was made by :func:`fresh_name` so long ago that its run is over."""
    parts = name.removeprefix(PREFIX + "_").split("_")
    return name.startswith(PREFIX + "_") and parts[0].isdigit() and int(parts[0]) < time.time() - STALE_SECONDS


def _with_path(url: str, path: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=path))


@contextlib.contextmanager
def postgres_database(url: str) -> Iterator[str]:
    """A new PostgreSQL database, dropped afterwards with the connections that are still open to it."""
    name = fresh_name()
    with psycopg.connect(url.replace("postgresql+psycopg://", "postgresql://"), autocommit=True) as admin:
        for (old,) in admin.execute("SELECT datname FROM pg_database WHERE datname LIKE %s", [PREFIX + "%"]).fetchall():
            if is_stale(old):
                admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(old)))
        # template0: nobody can be connected to it, which would refuse the copy
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8'").format(sql.Identifier(name)))
        try:
            yield _with_path(url, "/" + name)
        finally:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@contextlib.contextmanager
def mariadb_database(url: str) -> Iterator[str]:
    """A new MariaDB database, dropped afterwards."""
    name = fresh_name()
    with open_mariadb(url) as admin, admin.cursor() as cursor:
        cursor.execute("SHOW DATABASES LIKE %s", [PREFIX + "%"])
        for (old,) in cursor.fetchall():
            if is_stale(old):
                cursor.execute(f"DROP DATABASE IF EXISTS `{old}`")
        cursor.execute(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
    plain = _with_path(url, "/" + name)
    try:
        # The driver would read all of the system's certificates for each connection: twenty times what the rest of it costs.
        yield plain if urlsplit(plain).query else plain + "?ssl_disabled=true"
    finally:
        # A connection of its own: the server may have restarted or timed the first one out meanwhile.
        with open_mariadb(url) as admin, admin.cursor() as cursor:
            cursor.execute(f"SET STATEMENT lock_wait_timeout=5 FOR DROP DATABASE IF EXISTS `{name}`")


@contextlib.contextmanager
def redis_database(url: str) -> Iterator[str]:
    """An empty Redis database number of the server, claimed for up to six hours and flushed afterwards.

    Number 0 is never given. A number counts as free when it is empty or its content carries our mark, and nobody holds its claim.
    """
    base = redis.Redis.from_url(_with_path(url, "/0"))
    mark = f"{PREFIX}:owner"
    with contextlib.closing(base):
        for number in range(1, int(base.config_get("databases")["databases"] or 16)):
            claim = f"{PREFIX}:claim:{number}"
            token = fresh_name()
            if not base.set(claim, token, nx=True, ex=STALE_SECONDS):
                continue
            own = redis.Redis.from_url(_with_path(url, f"/{number}"))
            with contextlib.closing(own):
                if own.dbsize() and not own.exists(mark):
                    base.delete(claim)
                    continue
                own.flushdb()
                own.set(mark, token)
                try:
                    yield _with_path(url, f"/{number}")
                finally:
                    own.flushdb()
                    base.delete(claim)
            return
    raise RuntimeError(f"every Redis database from 1 on is in use; flush one by hand, or delete stale {PREFIX}:claim:* keys in database 0")


@contextlib.contextmanager
def rabbitmq_vhost(url: str) -> Iterator[str]:
    """A new virtual host with all permissions for the URL's user, deleted afterwards with its queues.

    AMQP itself cannot make one, so ``rabbitmqctl`` must reach the server; else RuntimeError says so.
    """
    name = fresh_name()
    user = urlsplit(url).username or "guest"
    for old in _rabbitmqctl("list_vhosts", "name").split():
        if is_stale(old):
            _rabbitmqctl("delete_vhost", old)
    _rabbitmqctl("add_vhost", name)
    try:
        _rabbitmqctl("set_permissions", "-p", name, user, ".*", ".*", ".*")
        yield _with_path(url, "/" + quote(name, safe=""))
    finally:
        _rabbitmqctl("delete_vhost", name)


def _rabbitmqctl(*arguments: str) -> str:
    own = json.loads(os.environ.get("MILLSTREAM_TEST_RABBITMQCTL", "{}"))
    program = own.pop("program", None) or shutil.which("rabbitmqctl") or shutil.which("rabbitmqctl", path="/usr/sbin")
    if program is None:
        raise RuntimeError(
            "rabbitmqctl is not installed here; a test that needs a virtual host of its own cannot run against a remote RabbitMQ"
        )
    done = subprocess.run([program, "--quiet", *arguments], env=own or None, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout
