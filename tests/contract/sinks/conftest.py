"""Fixtures: the same sinks over every target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.contract.sinks.worlds import CollectWorld, FileWorld, SqlWorld, World, records

from millstream_schema.connectors import Committable, CommittingWriter

SQL = [
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.postgres),
    pytest.param("mariadb", marks=pytest.mark.mariadb),
]


def url_of(kind: str, request: pytest.FixtureRequest, directory: Path) -> str:
    """URL of an own database of that kind."""
    if kind == "sqlite":
        return f"sqlite:///{directory / 'target.db'}"
    return str(request.getfixturevalue(f"{kind}_url"))


@pytest.fixture(params=["collect", "files", *SQL])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Each target in turn."""
    made: World
    if request.param == "collect":
        made = CollectWorld()
    elif request.param == "files":
        made = FileWorld(tmp_path)
    else:
        made = SqlWorld(url_of(request.param, request, tmp_path))
    yield made
    made.close()


@pytest.fixture(params=SQL)
def sql_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlWorld]:
    """Each database in turn."""
    made = SqlWorld(url_of(request.param, request, tmp_path))
    yield made
    made.close()


Sealed = Callable[..., list[Committable]]


@pytest.fixture
def sealed() -> Sealed:
    """Write ids and seal them for an epoch."""

    def seal(writer: CommittingWriter, epoch: int, *ids: int) -> list[Committable]:
        writer.write(records(*ids), None)
        return writer.prepare_commit(epoch)

    return seal
