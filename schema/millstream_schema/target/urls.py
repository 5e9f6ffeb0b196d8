"""A database URL taken apart, and texts without its password.

Called by the connection door and by the sinks' ``config()``. What must never happen here: a password in an error, a log or a plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from millstream_schema.errors import ConfigurationError

SCHEMES: Final = {
    "sqlite": "sqlite",
    "postgresql": "postgresql",
    "postgresql+psycopg": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mysql+pymysql": "mysql",
    "mariadb": "mysql",
    "mariadb+pymysql": "mysql",
}
_EXAMPLES: Final = "sqlite:///file.db, postgresql://user@host/database or mysql://user@host/database"


@dataclass(frozen=True)
class TargetUrl:
    """Where a database is. ``dialect`` is sqlite, postgresql or mysql (which MariaDB is as well); ``options`` are the driver's own."""

    dialect: str
    database: str
    host: str | None = None
    port: int | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def redacted(self) -> str:
        """The URL without password and options: what identifies the database."""
        if self.dialect == "sqlite":
            return f"sqlite:///{self.database}"
        user = f"{quote(self.user, safe='')}@" if self.user else ""
        port = f":{self.port}" if self.port else ""
        return f"{self.dialect}://{user}{self.host or ''}{port}/{self.database}"

    def scrub(self, text: str) -> str:
        """``text`` with every secret of this URL replaced: drivers put what they were given into their messages."""
        secrets = [self.password, *(value for name, value in self.options if "pass" in name.lower() or "key" in name.lower())]
        for secret in filter(None, secrets):
            text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
        return text


def parse_url(url: str) -> TargetUrl:
    """Take a URL apart. Raises :class:`ConfigurationError`, which does not repeat the URL: it may hold a password."""
    scheme, separator, rest = url.partition("://")
    dialect = SCHEMES.get(scheme)
    if not separator or dialect is None:
        raise ConfigurationError(f"a database URL must look like {_EXAMPLES}; this one starts with {scheme.partition(':')[0][:20]!r}")
    if dialect == "sqlite":
        path = unquote(rest.partition("?")[0].removeprefix("/"))
        if not rest.startswith("/") or not path or path == ":memory:":
            raise ConfigurationError(
                "a SQLite target must be a file that every connection shares: write sqlite:///relative.db or sqlite:////absolute.db"
            )
        return TargetUrl("sqlite", path)
    try:
        parts = urlsplit(f"db://{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"a database URL has a host or port that cannot be read; write {_EXAMPLES}") from error
    database = unquote(parts.path.removeprefix("/"))
    if not database:
        raise ConfigurationError(f"a database URL names no database; write {_EXAMPLES}")
    return TargetUrl(
        dialect,
        database,
        host,
        port,
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        tuple(parse_qsl(parts.query, keep_blank_values=True)),
    )
