"""A cluster that fails to come up leaves nothing open: whoever catches the error and tries again must not pile up connections."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from millstream.dev import DevCluster
from millstream.embedded import EmbeddedCluster
from millstream.pipelines import Pipelines
from millstream_schema.errors import MillstreamError, SchemaMismatch


def opened(directory: Path) -> set[str]:
    """Files below a directory that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.add(os.readlink(descriptor))
        except OSError:  # the one that reads the directory
            continue
    return {name for name in found if name.startswith(f"{directory}/")}


def database_of(directory: Path) -> Path:
    (found,) = [p for p in directory.iterdir() if p.is_file() and p.read_bytes()[:15] == b"SQLite format 3"]
    return found


def test_an_embedded_cluster_that_meets_a_newer_schema_closes_its_database(tmp_path: Path) -> None:
    """And can be entered once the schema fits again."""
    cluster = EmbeddedCluster(Pipelines(), directory=tmp_path)
    with cluster:
        assert opened(tmp_path), "nothing to see: the test would prove nothing"
    file = database_of(tmp_path)

    def version(change: int) -> None:
        connection = sqlite3.connect(file)
        connection.execute("UPDATE millstream_schema SET version = version + ?", (change,))
        connection.commit()
        connection.close()

    version(100)
    with pytest.raises(SchemaMismatch):
        EmbeddedCluster(Pipelines(), directory=tmp_path).__enter__()
    assert opened(tmp_path) == set()
    version(-100)
    with EmbeddedCluster(Pipelines(), directory=tmp_path) as again:
        assert again.jobs.list() == []


def test_a_dev_cluster_whose_pipelines_cannot_be_loaded_closes_its_database(tmp_path: Path) -> None:
    """The module is looked for when the database is open already; no node is started."""
    cluster = DevCluster("no_such_module:pipelines", directory=tmp_path)
    with pytest.raises(MillstreamError, match="no_such_module"):
        cluster.__enter__()
    assert database_of(tmp_path).exists() and opened(tmp_path) == set() and cluster.nodes == {}


def test_a_dev_cluster_that_fails_removes_its_temporary_directory() -> None:
    """As it does when it is left."""
    cluster = DevCluster("no_such_module:pipelines")
    assert cluster.directory.is_dir()
    with pytest.raises(MillstreamError):
        cluster.__enter__()
    assert not cluster.directory.exists()
