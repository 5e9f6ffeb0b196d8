"""Which brokers and databases the process benchmarks can use here; set the variables to use others."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

REDIS = os.environ.get("MILLSTREAM_REDIS_URL", "redis://127.0.0.1:6379/0")
RABBITMQ = os.environ.get("MILLSTREAM_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//")
POSTGRES = os.environ.get("MILLSTREAM_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/test")


def answers(url: str) -> bool:
    """Whether something listens where ``url`` points."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 0), 1).close()
    except OSError:
        return False
    return True


def transports() -> list[tuple[str, str | None]]:
    """(name, URL) of those that can be used; None is AF_UNIX."""
    return [("unix", None)] + [(name, url) for name, url in (("redis", REDIS), ("rabbitmq", RABBITMQ)) if answers(url)]
