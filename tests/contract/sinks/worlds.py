"""Targets of sinks as worlds: a world holds what is outside the job and says what an outside reader sees. Called by the tests beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millstream_schema.connectors import CommittingWriter, ConnectorContext, Sink
from millstream_schema.target.connection import connect
from millstream_tasks.sinks.files import FileSink
from millstream_tasks.sinks.memory import CollectSink, CollectTarget
from millstream_tasks.sinks.sql import SqlAppendSink

_serial = itertools.count(1)


def allow() -> None:
    """A guard whose lease never passes."""


class World:
    """One target. ``visible`` is what a reader sees; ``staged`` how many segments lie hidden."""

    name = ""

    def __init__(self) -> None:
        number = next(_serial)
        self.job = f"job-{number}"
        self.table = f"out_{number}"
        self._writers: list[CommittingWriter] = []

    def sink(self, **options: Any) -> Sink:
        raise NotImplementedError

    def visible(self) -> list[int]:
        raise NotImplementedError

    def staged(self) -> int:
        raise NotImplementedError

    def lose_staging(self) -> None:
        """What an expired or damaged target looks like."""
        raise NotImplementedError

    def context(
        self, *, generation: int = 1, subtask: int = 0, parallelism: int = 1, operator: str = "sink", guard: Callable[[], None] = allow
    ) -> ConnectorContext:
        return ConnectorContext(self.job, operator, subtask, parallelism, generation, guard, lambda: 0)

    def open(self, sink: Sink | None = None, **about: Any) -> CommittingWriter:
        """A writer of one subtask, closed at the end of the test."""
        writer = (sink or self.sink()).open(self.context(**about))
        assert isinstance(writer, CommittingWriter)
        self._writers.append(writer)
        return writer

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class CollectWorld(World):
    name = "collect"

    def __init__(self) -> None:
        super().__init__()
        self.target = CollectTarget()

    def sink(self, **options: Any) -> Sink:
        return CollectSink("out", self.target, **options)

    def visible(self) -> list[int]:
        return sorted(value["id"] for value in self.target.values("out"))

    def staged(self) -> int:
        return len(self.target.staged())

    def lose_staging(self) -> None:
        self.target._staging.clear()


class FileWorld(World):
    name = "files"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def sink(self, **options: Any) -> Sink:
        return FileSink(self.directory, patience=2, **options)

    def visible(self) -> list[int]:
        found = [path for path in self.directory.iterdir() if not path.name.startswith(".")]
        return sorted(json.loads(line)["id"] for path in found for line in path.read_text().splitlines())

    def staged(self) -> int:
        return len([path for path in (self.directory / ".millstream").iterdir() if path.suffix in (".open", ".sealed")])

    def lose_staging(self) -> None:
        for path in (self.directory / ".millstream").iterdir():
            if path.suffix in (".open", ".sealed"):
                path.unlink()


class SqlWorld(World):
    name = "sql"

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.reader = connect(url)
        self.run(f"CREATE TABLE {self.table} (id BIGINT, name VARCHAR(100))")

    def run(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self.reader.transaction() as transaction:
            return transaction.fetch(statement, parameters)

    def sink(self, **options: Any) -> Sink:
        return SqlAppendSink(self.url, self.table, ["id", "name"], **{"patience": 2, **options})

    def visible(self) -> list[int]:
        return [row[0] for row in self.run(f"SELECT id FROM {self.table} ORDER BY id")]

    def staged(self) -> int:
        return len(self.run("SELECT DISTINCT operator, subtask, generation, n FROM millstream_staging WHERE job = ?", self.job))

    def lose_staging(self) -> None:
        self.run("DELETE FROM millstream_staging WHERE job = ?", self.job)

    def close(self) -> None:
        super().close()
        self.run(f"DROP TABLE {self.table}")
        self.reader.close()


def records(*ids: int) -> list[dict[str, Any]]:
    """Records with these ids."""
    return [{"id": number, "name": f"n{number}"} for number in ids]
