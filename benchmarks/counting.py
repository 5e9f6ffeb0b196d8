"""A sink that keeps the number of records and promises nothing: what peers' benchmarks write into.

Used beside the strict sink, to tell what the output costs. Only AT_LEAST_ONCE and BEST_EFFORT jobs may have it.
"""

from __future__ import annotations

from typing import Any

from millstream_schema.connectors import ConnectorContext, Json, SinkCapability


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
