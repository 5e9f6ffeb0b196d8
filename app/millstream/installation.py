"""One installation: where its database, channels and checkpoints are. One frozen, validated value, built by the user or from the environment, passed down.

Environment variables (read by :meth:`Installation.from_environment` only): ``MILLSTREAM_DATABASE``, ``MILLSTREAM_TRANSPORT``, ``MILLSTREAM_CHECKPOINTS``, ``MILLSTREAM_PREFIX``,
``MILLSTREAM_LEASE_MS``, ``MILLSTREAM_POLL_MS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pydantic
import sqlalchemy as sa

from millstream_schema.errors import ConfigurationError

VARIABLES = {
    "database": "MILLSTREAM_DATABASE",
    "transport": "MILLSTREAM_TRANSPORT",
    "checkpoints": "MILLSTREAM_CHECKPOINTS",
    "prefix": "MILLSTREAM_PREFIX",
    "lease_ms": "MILLSTREAM_LEASE_MS",
    "poll_ms": "MILLSTREAM_POLL_MS",
}


class Installation(pydantic.BaseModel):
    """``database``: SQLAlchemy URL. ``transport``: ``unix:///dir``, ``redis://…`` or ``amqp://…``. ``checkpoints``: ``file:///shared`` or a database URL.

    ``prefix`` starts the name of every table, queue, key and channel: two installations in one database and broker do not meet. ``lease_ms``: a node or coordinator that
    could not renew for this long is taken for dead (default 10 s); ``poll_ms``: how often rows are read without a hint.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database: str
    transport: str
    checkpoints: str
    prefix: str = pydantic.Field(default="millstream", pattern=r"^[a-z][a-z0-9]{0,15}$")
    lease_ms: int = pydantic.Field(default=10_000, ge=600, le=600_000)
    poll_ms: int = pydantic.Field(default=1_000, ge=10, le=10_000)

    @pydantic.field_validator("database")
    @classmethod
    def _database(cls, value: str) -> str:
        try:
            sa.make_url(value)
        except sa.exc.ArgumentError:
            raise ValueError("not an SQLAlchemy URL: write e.g. postgresql+psycopg://user@host/name or sqlite:////path/file.db") from None
        return value

    @pydantic.field_validator("transport")
    @classmethod
    def _transport(cls, value: str) -> str:
        if value.partition(":")[0] not in ("unix", "redis", "rediss", "amqp", "amqps", "pyamqp"):
            raise ValueError("must start with unix:///, redis:// or amqp://")
        return value

    @classmethod
    def local(cls, directory: str | Path, **changes: object) -> Self:
        """Everything of one machine below ``directory``: SQLite, AF_UNIX channels, files."""
        root = Path(directory).absolute()
        values = {
            "database": f"sqlite:///{root / 'millstream.db'}",
            "transport": f"unix://{root / 'run'}",
            "checkpoints": (root / "checkpoints").as_uri(),
            "poll_ms": 50,
        }
        return cls.checked(values | changes)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """From the variables above. Raises ConfigurationError naming those that are missing or wrong."""
        return cls.checked({field: environ[name] for field, name in VARIABLES.items() if environ.get(name)})

    @classmethod
    def checked(cls, values: Mapping[str, object]) -> Self:
        """Validate; ConfigurationError says what to set. Values are not shown: a URL may hold a password."""
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as exc:
            wrong = "; ".join(
                f"{'.'.join(map(str, e['loc']))} ({VARIABLES.get(str(e['loc'][0]), 'no variable')}): {e['msg']}"
                for e in exc.errors(include_input=False)
            )
            raise ConfigurationError(f"the installation is not configured: {wrong}") from None

    def environment(self) -> dict[str, str]:
        """The variables that describe this installation to a child process."""
        return {name: str(getattr(self, field)) for field, name in VARIABLES.items()}

    @property
    def table_prefix(self) -> str:
        return f"{self.prefix}_"
