"""A two-phase sink for benchmarks whose jobs run in processes: per epoch one small file with the number of rows and the last value of each key.

It costs a dictionary update per batch and one flushed file per epoch, so that a benchmark measures the channels and not the output; what it promises is the same as what the
file sink does. Its arrivals file tells when each attempt's first record came.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_schema.connectors import CommitAnswer, CommitResult, Committable, ConnectorContext, Json, SinkCapability


class TallySink:
    """TWO_PHASE_COMMIT into ``directory``. Records are (key, value) pairs."""

    kind = "benchmark-tally"
    version = 1
    capability = SinkCapability.TWO_PHASE_COMMIT

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def config(self) -> dict[str, Json]:
        return {"directory": str(self.directory)}

    def problems(self) -> list[str]:
        return []

    def open(self, context: ConnectorContext) -> TallyWriter:
        (self.directory / "staged").mkdir(parents=True, exist_ok=True)
        (self.directory / "committed").mkdir(exist_ok=True)
        return TallyWriter(self.directory, context)


class TallyWriter:
    """The writer of one subtask."""

    def __init__(self, directory: Path, context: ConnectorContext) -> None:
        self._directory = directory
        self._context = context
        self._rows = 0
        self._last: dict[str, Any] = {}
        self._first = True

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self._context.guard()
        if self._first:
            self._first = False
            with (self._directory / "arrivals").open("a") as file:
                file.write(f"{self._context.generation} {self._context.subtask} {os.getpid()} {time.time_ns()}\n")
        self._rows += len(values)
        self._last.update(values)

    def flush(self) -> None:
        """Nothing leaves before the barrier."""

    def prepare_commit(self, epoch: int) -> list[Committable]:
        if not self._rows:
            return []
        c = self._context
        name = f"{c.subtask}-{c.generation}-{epoch}.json"
        with (self._directory / "staged" / name).open("w") as file:
            json.dump({"rows": self._rows, "last": self._last}, file)
            file.flush()
            os.fsync(file.fileno())
        made = Committable(f"{c.job}:{c.operator}:{c.subtask}:{epoch}", c.operator, c.subtask, epoch, self._rows, "", {"file": name})
        self._rows, self._last = 0, {}
        return [made]

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        answer = CommitResult.ALREADY_COMMITTED
        for committable in committables:
            self._context.guard()
            name = str(committable.body["file"])
            try:
                (self._directory / "staged" / name).rename(self._directory / "committed" / name)
                answer = CommitResult.COMMITTED
            except FileNotFoundError:
                if not (self._directory / "committed" / name).exists():
                    return CommitAnswer(CommitResult.FAILED, f"{name} was staged and is gone")
        return CommitAnswer(answer)

    def clean(self, keep: Sequence[Committable]) -> None:
        """What a dead attempt staged stays where it is and is never counted."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Tally:
    """What all epochs committed: rows, and the highest value of each key (counts only grow)."""

    rows: int
    highest: dict[str, Any]


def read_tally(directory: Path) -> Tally:
    rows, highest = 0, dict[str, Any]()
    for file in (directory / "committed").glob("*.json"):
        content = json.loads(file.read_text())
        rows += content["rows"]
        for key, value in content["last"].items():
            highest[key] = max(value, highest.get(key, value))
    return Tally(rows, highest)


@dataclass(frozen=True)
class Arrival:
    """First record of one attempt of the sink's subtask; ``at`` in UTC ns."""

    generation: int
    subtask: int
    pid: int
    at: int


def arrivals(directory: Path) -> list[Arrival]:
    file = directory / "arrivals"
    if not file.exists():
        return []
    return [Arrival(*map(int, line.split())) for line in file.read_text().splitlines() if line.count(" ") == 3]
