"""One installation: where its database, channels and checkpoints are. One frozen, validated value, built by the user or from the environment, passed down.

Environment variables (read by :meth:`Installation.from_environment` only): ``MILLSTREAM_DATABASE``, ``MILLSTREAM_TRANSPORT``, ``MILLSTREAM_CHECKPOINTS``, ``MILLSTREAM_PREFIX``,
``MILLSTREAM_LEASE_MS``, ``MILLSTREAM_POLL_MS`` and the others of :data:`VARIABLES`. What must never happen here: a URL shown, which may hold a password; a combination
of times under which a lease cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

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
    "renew_ms": "MILLSTREAM_RENEW_MS",
    "idle_in_transaction_ms": "MILLSTREAM_IDLE_IN_TRANSACTION_MS",
    "liveness_ms": "MILLSTREAM_LIVENESS_MS",
    "channel_expiry_ms": "MILLSTREAM_CHANNEL_EXPIRY_MS",
    "result_timeout_ms": "MILLSTREAM_RESULT_TIMEOUT_MS",
}
_URLS = ("database", "transport", "checkpoints")
_DRIVERS = ("sqlite", "sqlite+pysqlite", "postgresql+psycopg", "mysql+pymysql", "mariadb+pymysql")
_SPELLINGS = {"postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mysql+pymysql"}
_STORAGES = ("sqlite", "postgresql", "mysql", "mariadb")
_PREFIX = r"^[a-z][a-z0-9]{0,15}$"


class Installation(pydantic.BaseModel):
    """``database``: SQLAlchemy URL. ``transport``: ``unix:///dir``, ``redis://…`` or ``amqp://…``. ``checkpoints``: ``file:///shared`` (or the
    absolute path alone) or a database URL. These two are for stream jobs: with durable tasks alone they need not be given.

    ``prefix`` starts the name of every table, queue, key and channel: two installations in one database and broker do not meet. ``lease_ms``: a node or
    coordinator that could not renew for this long is taken for dead (default 10 s); ``poll_ms``: how often rows are read without a hint.

    Derived from the lease unless given: ``renew_ms`` ≤ lease/3 (a quarter: two renewals may be lost), ``idle_in_transaction_ms`` < lease/3 (a quarter: a
    stopped process must not keep a row), ``liveness_ms`` < lease (0.8: a subtask process that does not answer its node is killed).
    ``channel_expiry_ms``: broker channels nobody uses go after this long (default 2 h, at least one). ``result_timeout_ms``: how long a wait for a task's result lasts that
    gives no time of its own (default 5 min).
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database: str
    transport: str = ""
    checkpoints: str = ""
    prefix: str = pydantic.Field(default="millstream", pattern=_PREFIX)
    lease_ms: int = pydantic.Field(default=10_000, ge=600, le=600_000)
    poll_ms: int = pydantic.Field(default=1_000, ge=10, le=10_000)
    renew_ms: int = pydantic.Field(default=0, ge=0)
    idle_in_transaction_ms: int = pydantic.Field(default=0, ge=0)
    liveness_ms: int = pydantic.Field(default=0, ge=0)
    channel_expiry_ms: int = pydantic.Field(default=7_200_000, ge=3_600_000)
    result_timeout_ms: int = pydantic.Field(default=300_000, ge=1)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _derived(cls, values: Any) -> Any:
        """What depends on the lease and was not given."""
        if not isinstance(values, dict):
            return values
        try:
            lease = int(values.get("lease_ms", 10_000))
        except (TypeError, ValueError):
            return values  # refused by the field itself
        return {"renew_ms": lease // 4, "idle_in_transaction_ms": lease // 4, "liveness_ms": lease * 4 // 5, **values}

    @pydantic.model_validator(mode="after")
    def _lease(self) -> Self:
        if self.renew_ms * 3 > self.lease_ms or self.renew_ms < 1:
            raise ValueError(
                f"renew_ms ({self.renew_ms}) must be positive and at most lease_ms / 3 ({self.lease_ms // 3}): two lost renewals must not cost the lease"
            )
        if self.idle_in_transaction_ms * 3 >= self.lease_ms or self.idle_in_transaction_ms < 1:
            raise ValueError(
                f"idle_in_transaction_ms ({self.idle_in_transaction_ms}) must be positive and below lease_ms / 3: a stopped process must not keep a row"
            )
        if not 0 < self.liveness_ms < self.lease_ms:
            raise ValueError(f"liveness_ms ({self.liveness_ms}) must be positive and below lease_ms ({self.lease_ms})")
        return self

    @pydantic.field_validator("database")
    @classmethod
    def _database(cls, value: str) -> str:
        """The drivers whose errors are understood; SQLAlchemy itself would take others, or its own choice for ``mysql://``."""
        try:
            url = sa.make_url(value)
        except sa.exc.ArgumentError:
            raise ValueError("not an SQLAlchemy URL: write e.g. postgresql+psycopg://user@host/name or sqlite:////path/file.db") from None
        if url.drivername in _DRIVERS:
            return value
        spelling = _SPELLINGS.get(url.drivername.partition("+")[0])
        if spelling is None:
            raise ValueError(
                f"{url.drivername}:// is not supported: use postgresql+psycopg://, mysql+pymysql:// (MariaDB too) or sqlite:///"
            )
        raise ValueError(
            f"write {spelling}:// instead of {url.drivername}:// (the rest of the URL stays): Millstream uses that driver and no other"
        )

    @pydantic.field_validator("transport")
    @classmethod
    def _transport(cls, value: str) -> str:
        if value.partition(":")[0] not in ("unix", "redis", "rediss", "amqp", "amqps", "pyamqp"):
            raise ValueError("must start with unix:///, redis:// or amqp://")
        return value

    @pydantic.field_validator("checkpoints")
    @classmethod
    def _checkpoints(cls, value: str) -> str:
        """An absolute path is made the URL it stands for."""
        if value.startswith("/"):
            return Path(value).as_uri()
        scheme = value.partition(":")[0]
        if value.startswith(("file:///", "file://localhost/")) or (scheme != value and scheme.partition("+")[0] in _STORAGES):
            return value
        raise ValueError(
            "must be file:///directory or /directory (absolute, reached by every node), or a database URL (postgresql+psycopg://, mysql+pymysql://, sqlite:///)"
        )

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

    def __init__(self, **values: Any) -> None:
        """Raises ConfigurationError that says what to set. URLs are not shown: they may hold a password."""
        try:
            super().__init__(**values)
        except pydantic.ValidationError as exc:
            wrong = "; ".join(_said(e["type"], e["loc"], e["msg"], e["input"]) for e in exc.errors())
            raise ConfigurationError(f"the installation is not configured: {wrong}") from None

    @classmethod
    def checked(cls, values: Mapping[str, object]) -> Self:
        """From a mapping. Raises ConfigurationError."""
        return cls(**values)

    def environment(self) -> dict[str, str]:
        """The variables that describe this installation to a child process."""
        return {name: str(getattr(self, field)) for field, name in VARIABLES.items()}

    def for_streams(self) -> Self:
        """Itself. Raises ConfigurationError when it does not name what stream jobs need."""
        missing = self.missing_for_streams(self.model_dump())
        if missing:
            raise ConfigurationError(f"the installation is not configured for stream jobs: {missing}")
        return self

    @staticmethod
    def missing_for_streams(values: Mapping[str, object]) -> str:
        """What these settings lack that stream jobs need and durable tasks alone do not, and how to set it; empty: nothing."""
        return "; ".join(_said("missing", (field,), "", None) for field in ("transport", "checkpoints") if not values.get(field))

    @property
    def table_prefix(self) -> str:
        return f"{self.prefix}_"


def _said(kind: str, location: tuple[int | str, ...], message: str, value: object) -> str:
    """One problem: the field with its variable, its value where that cannot hold a password, and what to do."""
    message = message.removeprefix("Value error, ")
    if not location:
        return message  # a rule between fields, whose text names them
    field = ".".join(map(str, location))
    if field not in VARIABLES:
        return f"there is no setting {field!r}; known: {', '.join(VARIABLES)}"
    variable = VARIABLES[field]
    if kind == "missing":
        return f"{field} ({variable}): not given; set {variable}, or use --{field} or --local DIRECTORY on the command line"
    if field in _URLS:
        return f"{field} ({variable}): {message}"
    return f"{field} ({variable}) is {value!r}: {_allowed(field)}"


def _allowed(field: str) -> str:
    """What a field that is no URL may be."""
    if field == "prefix":
        return "write a lower-case letter, then up to 15 lower-case letters and digits"
    low, high = (next((getattr(m, a) for m in Installation.model_fields[field].metadata if hasattr(m, a)), None) for a in ("ge", "le"))
    return f"write a whole number of ms{f', at least {low}' if low is not None else ''}{f', at most {high}' if high is not None else ''}"


def address_of(url: str) -> str:
    """A broker's URL without user, password and options: what may be shown."""
    scheme, _, rest = url.partition("://")
    shown = re.sub(r"\?\w+=.*", "", rest).rpartition("@")[2].partition("?")[0]
    return f"{scheme}://{shown}"
