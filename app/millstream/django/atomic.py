"""Django's open transactions, as ``Tasks(sessions=…)`` asks for them, and the address of a Django database.

Used by the application's configuration and by projects that make their own ``Tasks``. What must never happen here: a connection opened only to see that nothing is open on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from django.db import DEFAULT_DB_ALIAS, connections

from millstream_schema.errors import ConfigurationError

_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}


def transactions(alias: str = DEFAULT_DB_ALIAS) -> Callable[[], Any]:
    """For ``Tasks(sessions=…)``: the connection of this database while a transaction is open on it (``atomic``, ``ATOMIC_REQUESTS``, autocommit turned off), else None."""

    def open_one() -> Any:
        connection = connections[alias]
        by_hand = connection.connection is not None and not connection.autocommit
        return connection if connection.in_atomic_block or by_hand else None

    return open_one


def url_of(alias: str) -> str:
    """SQLAlchemy's address of a Django database. Raises ConfigurationError for a kind that Millstream does not use."""
    connection = connections[alias]
    driver = _DRIVERS.get(connection.vendor)
    if driver is None:
        raise ConfigurationError(
            f"Django's database {alias!r} is {connection.vendor}: name one of sqlite, postgresql or mysql as MILLSTREAM['ALIAS']"
        )
    given = connection.settings_dict
    name, host = str(given["NAME"]), str(given.get("HOST") or "")
    if driver == "sqlite":
        return sa.URL.create(driver, database=name).render_as_string(hide_password=False)
    socket = {"host": host} if host.startswith("/") and driver.startswith("postgresql") else {}
    if host.startswith("/") and driver.startswith("mysql"):
        socket = {"unix_socket": host}
    url = sa.URL.create(
        driver, username=given.get("USER") or None, password=given.get("PASSWORD") or None, host=None if socket else host or None,
        port=int(given["PORT"]) if given.get("PORT") else None, database=name, query=socket,
    )  # fmt: skip
    return url.render_as_string(hide_password=False)
