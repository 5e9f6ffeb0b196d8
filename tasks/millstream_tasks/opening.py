"""Opens transports and checkpoint storages by URL; each drags in only what it needs.

Called by subtask processes, nodes and coordinators. What must never happen here: a password in an error, a driver imported that the URL does not ask for.
"""

from __future__ import annotations

from millstream_schema.channels import Transport
from millstream_schema.connectors import LOCK_TIMEOUT, SnapshotStorage
from millstream_schema.errors import ConfigurationError

from .channels.unix import UnixTransport
from .snapshots.files import FileSnapshots

EXPIRY_MS = 7_200_000
"""Channels nobody uses go after this long."""


def open_transport(url: str, prefix: str, expiry_ms: int = EXPIRY_MS) -> Transport:
    """``unix:///directory``, ``redis://…``, ``amqp://…``. Raises ConfigurationError naming what is missing."""
    scheme = url.partition(":")[0]
    if scheme == "unix":
        return UnixTransport(url.removeprefix("unix://"))
    try:
        if scheme in ("redis", "rediss"):
            from .channels.redis import RedisTransport

            return RedisTransport(url, prefix=prefix, expire_ms=expiry_ms)
        if scheme in ("amqp", "amqps", "pyamqp"):
            from .channels.rabbitmq import RabbitTransport

            return RabbitTransport(url, prefix=prefix, expire_ms=expiry_ms)
    except ImportError as exc:
        raise ConfigurationError(
            f"transport {scheme!r} needs a driver ({exc.name}): install millstream[redis] or millstream[rabbitmq]"
        ) from exc
    raise ConfigurationError(f"transport {scheme!r} is not known: use unix:///directory, redis://host or amqp://host")


def open_storage(url: str, lock_timeout: float = LOCK_TIMEOUT) -> SnapshotStorage:
    """``file:///directory`` or a database URL, whose sessions wait ``lock_timeout`` seconds at most for a lock. Raises ConfigurationError."""
    if not url:
        raise ConfigurationError(
            "the installation names no checkpoint storage: set MILLSTREAM_CHECKPOINTS, or checkpoints= of the Installation, wherever workers start: any of them may coordinate"
        )
    scheme = url.partition(":")[0]
    if scheme == "file" or url.startswith("/"):
        return FileSnapshots(url)
    if scheme.split("+")[0] in ("sqlite", "postgresql", "mysql", "mariadb"):
        from .snapshots.sql import SqlSnapshots

        return SqlSnapshots(url, lock_timeout=lock_timeout)
    raise ConfigurationError(f"checkpoint storage {scheme!r} is not known: use file:///shared/directory or a database URL")
