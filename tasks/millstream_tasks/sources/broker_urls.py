"""Broker URLs without their secrets.

Called by the Redis and RabbitMQ sources for ``config()`` and errors. What must never happen here: a password in a plan, an error or a log.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from millstream_schema.errors import ConfigurationError


def split_url(url: str, schemes: tuple[str, ...], example: str) -> SplitResult:
    """Take ``url`` apart. Raises :class:`ConfigurationError`, which does not repeat it."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in schemes and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"the URL cannot be read; write one such as {example}")
    return parts


def redacted(parts: SplitResult) -> str:
    """Scheme, host, port and path: what identifies the broker."""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
