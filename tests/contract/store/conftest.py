"""The SQL store on each database it supports; empty before each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.store.stores import Opened

from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

KINDS = [
    pytest.param("sqlite", id="sqlite"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgres),
    pytest.param("mariadb", id="mariadb", marks=pytest.mark.mariadb),
]


@pytest.fixture(scope="module", params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A database with the schema; ``open()`` gives further ones on it with timeouts and faults of their own."""
    kind: str = request.param
    if kind == "sqlite":
        path: Path = tmp_path_factory.mktemp("store") / "store.db"
        url = f"sqlite:///{path}"
    else:
        url = request.getfixturevalue(f"{kind}_url")
    found = Opened(kind, url, Database(url, SystemClock()))
    create_schema(found.db)
    yield found
    found.close()


@pytest.fixture
def store(opened: Opened) -> Iterator[Opened]:
    """The same, without a row in any table."""
    opened.empty()
    yield opened
    opened.close_others()


@pytest.fixture
def db(store: Opened) -> Database:
    return store.db
