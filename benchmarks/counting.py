"""Sinks that keep only the number of records, in this process.

``CountingSink`` promises nothing, as what peers' benchmarks write into: for AT_LEAST_ONCE jobs. ``CommittedCountSink`` counts what epochs have committed: for STRICT jobs whose
output would not fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream_schema.connectors import CommitAnswer, CommitResult, Committable, ConnectorContext, Json, SinkCapability


class CountingSink:
    """Counts records in ``count``; in-process, so embedded runs only."""

    kind = "benchmark-count"
    version = 1
    capability = SinkCapability.NONE

    def __init__(self) -> None:
        self.count = 0

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def open(self, context: ConnectorContext) -> CountingWriter:
        return CountingWriter(self)


class CountingWriter:
    """The writer of a :class:`CountingSink`."""

    def __init__(self, sink: CountingSink) -> None:
        self._sink = sink

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self._sink.count += len(values)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is held."""


class CommittedCountSink:
    """TWO_PHASE_COMMIT: ``counts`` holds the rows of every committable that was committed, by its id."""

    kind = "benchmark-committed-count"
    version = 1
    capability = SinkCapability.TWO_PHASE_COMMIT

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def open(self, context: ConnectorContext) -> CommittedCountWriter:
        return CommittedCountWriter(self, context)


class CommittedCountWriter:
    """The writer of a :class:`CommittedCountSink`."""

    def __init__(self, sink: CommittedCountSink, context: ConnectorContext) -> None:
        self._sink = sink
        self._context = context
        self._rows = 0

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self._context.guard()
        self._rows += len(values)

    def flush(self) -> None:
        """Nothing is held back."""

    def prepare_commit(self, epoch: int) -> list[Committable]:
        c, rows = self._context, self._rows
        self._rows = 0
        return [Committable(f"{c.job}:{c.operator}:{c.subtask}:{epoch}", c.operator, c.subtask, epoch, rows, "")]

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        self._context.guard()
        self._sink.counts.update({c.id: c.rows for c in committables})
        return CommitAnswer(CommitResult.COMMITTED)

    def clean(self, keep: Sequence[Committable]) -> None:
        """Staged counts die with their writer."""

    def close(self) -> None:
        """Nothing is held."""
