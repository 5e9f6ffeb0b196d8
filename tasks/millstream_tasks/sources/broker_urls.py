"""Broker URLs without their secrets.

Made by the Redis and RabbitMQ sources from what users write. What must never happen here: a password in a plan, an error or a log.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from millstream_schema.errors import ConfigurationError


class BrokerUrl:
    """``text`` as the user wrote it: looked at when it is asked about, so that a plan's problems can name it with all others."""

    def __init__(self, text: str, schemes: tuple[str, ...], example: str) -> None:
        self.text = text
        self._schemes = schemes
        self._example = example

    def parts(self) -> SplitResult:
        """Taken apart. Raises :class:`ConfigurationError`, which does not repeat it."""
        try:
            parts = urlsplit(self.text)
            usable = parts.scheme in self._schemes and (parts.port is None or parts.port > 0)
        except ValueError:
            usable = False
        if not usable:
            raise ConfigurationError(f"the URL cannot be read; write one such as {self._example}")
        return parts

    def redacted(self) -> str:
        """Scheme, host, port and path: what identifies the broker. Raises :class:`ConfigurationError`."""
        parts = self.parts()
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"

    def problems(self) -> list[str]:
        """One sentence when it cannot be read, else nothing."""
        try:
            self.parts()
        except ConfigurationError as error:
            return [str(error)]
        return []
