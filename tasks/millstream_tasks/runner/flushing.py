"""When what was written is sent on: at once while there is nothing to do, after a while under load.

Called by the runner at the end of each turn. What must never happen here: a record that waits for the next one to come; a sink that commits flushed between
barriers for no reason.
"""

from __future__ import annotations

from millstream_schema.connectors import CommittingWriter

from ..chain import SinkOperator
from .outputs import Outputs

SHORTEST_LINGER_MS = 5


class Flusher:
    """Flushes a subtask's outputs, and those of its sinks that write at once."""

    def __init__(self, outputs: Outputs, sinks: list[SinkOperator]) -> None:
        self._outputs = outputs
        self._sinks = [op for op in sinks if not isinstance(op.writer, CommittingWriter)]
        self._unflushed_since: float | None = None

    def turn(self, now: float, worked: bool) -> None:
        """Flush when there is nothing to wait for, or a record has waited long enough."""
        if not worked:
            if self._outputs.unflushed:
                self._outputs.flush()
                self._unflushed_since = None
            self._flush_sinks()
            return
        if self._unflushed_since is None:
            self._unflushed_since = now
        elif (now - self._unflushed_since) * 1000 >= max(self._outputs.linger_ms(), SHORTEST_LINGER_MS):
            self._outputs.flush()
            self._flush_sinks()
            self._unflushed_since = None

    def _flush_sinks(self) -> None:
        for op in self._sinks:
            if op.records:
                op.records = 0
                op.writer.flush()
