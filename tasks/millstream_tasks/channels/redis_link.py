"""One Redis connection that is never re-made: commands out in one write, answers back in order.

Called by the Redis carrier only; the one module of this package that imports ``redis``. What must never happen here: a
silent reconnect or retry (a re-sent burst would hide a lost one), or a password in an error text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.retry import Retry

from millstream_schema.errors import ChannelLost, ConfigurationError

WRITE_BLOCK = 1024 * 1024
"""Commands are joined into writes of about this many bytes: one system call for many small frames."""

ResponseError = redis.ResponseError
"""An error that Redis answered with; re-exported, so that the library comes in by this module alone."""

Answer = Any
"""What Redis answered: int, bytes, None, list; or a ``redis.ResponseError`` value."""


def command(*parts: bytes) -> bytes:
    """One command in the Redis protocol."""
    head = b"*%d\r\n" % len(parts)
    return head + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class RedisLink:
    """An open connection; owned by one thread at a time. Only :meth:`break_off` may be called from another."""

    def __init__(self, url: str, role: str, connect_timeout: float, io_timeout: float) -> None:
        """Connect. Raises :class:`ConfigurationError` for a malformed URL, :class:`ChannelLost` when Redis is away."""
        try:
            options = dict(parse_url(url))  # type: ignore[no-untyped-call]  # the library has no types here
        except ValueError:
            raise ConfigurationError("the Redis URL cannot be read: write redis://[user:password@]host[:port]/[db]") from None
        self._secrets = [str(options[name]) for name in ("password",) if options.get(name)]
        factory = options.pop("connection_class", Connection)
        options.update(
            client_name=re.sub(r"[^!-~]", "_", role),
            socket_connect_timeout=connect_timeout,
            socket_timeout=io_timeout,
            socket_read_size=1024 * 1024,
            retry=Retry(NoBackoff(), 0),
            retry_on_timeout=False,
            health_check_interval=0,
            decode_responses=False,
            protocol=2,
        )
        if "path" not in options:
            options["socket_keepalive"] = True
        self.closed = False
        try:
            self._connection = factory(**options)
            self._connection.connect()
        except TypeError:
            raise ConfigurationError("the Redis URL has a query option that is not known: remove it") from None
        except (redis.RedisError, OSError) as exc:
            raise ChannelLost(f"Redis cannot be reached: {self.describe(exc)}") from None

    def describe(self, exc: BaseException) -> str:
        """Text of an error without the password."""
        text = f"{type(exc).__name__}: {exc}"
        for secret in self._secrets:
            text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
        return text

    def send(self, commands: Iterable[bytes]) -> int:
        """Write commands; returns how many. Raises :class:`ChannelLost`."""
        count = size = 0
        block: list[bytes] = []
        try:
            for item in commands:
                count += 1
                block.append(item)
                size += len(item)
                if size >= WRITE_BLOCK:
                    self._write(block)
                    block, size = [], 0
            if block:
                self._write(block)
        except (redis.RedisError, OSError) as exc:
            raise self._lost(exc) from None
        return count

    def _write(self, block: list[bytes]) -> None:
        if self.closed:  # the library would quietly connect again
            raise redis.ConnectionError("the connection is closed")
        self._connection.send_packed_command([b"".join(block)], check_health=False)

    def receive(self) -> Answer:
        """Next answer; an error answer is returned, not raised. Raises :class:`ChannelLost`."""
        try:
            if self.closed:
                raise redis.ConnectionError("the connection is closed")
            return self._connection.read_response()
        except ResponseError as exc:
            return exc
        except (redis.RedisError, OSError, AttributeError, ValueError) as exc:
            # The latter two come out of the library when another thread breaks the connection off under a read.
            raise self._lost(exc) from None

    def run(self, commands: Sequence[bytes]) -> list[Answer]:
        """Send commands and collect their answers. Raises :class:`ChannelLost`."""
        return [self.receive() for _ in range(self.send(commands))]

    def check(self, commands: Sequence[bytes]) -> list[Answer]:
        """Like :meth:`run`, but an error answer raises :class:`ChannelLost` too."""
        answers = self.run(commands)
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise self._lost(answer)
        return answers

    def _lost(self, exc: BaseException) -> ChannelLost:
        return ChannelLost(f"the Redis connection failed, and with it the channels over it: {self.describe(exc)}")

    def break_off(self) -> None:
        """Close, under a blocked read too. Idempotent."""
        self.closed = True
        self._connection.disconnect()


def check_server(link: RedisLink) -> None:
    """Raise :class:`ConfigurationError` unless this server keeps what a channel puts into it."""
    (info,) = link.run([command(b"INFO")])
    if isinstance(info, ResponseError):
        raise ConfigurationError(f"Redis refuses INFO ({link.describe(info)}): allow it for this user (ACL SETUSER … +info)")
    values = dict(line.split(":", 1) for line in bytes(info).decode(errors="replace").splitlines() if ":" in line)
    version = values.get("redis_version", "0")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (6, 2):
        raise ConfigurationError(f"Redis {version} is too old for channels: XTRIM MINID and NOMKSTREAM need 6.2 or newer")
    policy = values.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        raise ConfigurationError(
            f"Redis runs with maxmemory-policy {policy} and may evict a channel: set it to noeviction "
            "(CONFIG SET maxmemory-policy noeviction, and in redis.conf)"
        )
    if values.get("cluster_enabled", "0") != "0":
        raise ConfigurationError("Redis runs in cluster mode, where one XREAD cannot span all channels: use a single primary")
