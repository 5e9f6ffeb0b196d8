"""The collect and print sinks: output inside this process.

``CollectSink`` writes into a :class:`CollectTarget`, an object the caller makes and keeps: the outside world of tests, of the simulator and
of embedded runs. It outlives every subtask, so it has what a real target has: a fence, staging, markers, and one lock. What must never
happen here: a global registry (two jobs would share it), or a value that is visible before its epoch committed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO

from millstream_schema.connectors import CommitAnswer, CommitResult, Committable, ConnectorContext, Json, SinkCapability
from millstream_schema.errors import Fenced
from millstream_tasks.sinks.segments import Answers, Missing, Segment, missing_answer, missing_problems


class CollectTarget:
    """Committed values by sink name; safe to use from any thread. Lives in one process and dies with it.

    Values are kept as they were emitted, not copied: an operator that changes a value after emitting it changes what is seen here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fences: dict[tuple[str, str], int] = {}
        self._staging: dict[Segment, list[Any]] = {}
        self._markers: dict[str, Segment] = {}
        self._values: dict[str, list[Any]] = {}

    def values(self, name: str) -> list[Any]:
        """What the sink ``name`` has committed so far, in order of commit (a copy)."""
        with self._lock:
            return list(self._values.get(name, ()))

    def committed(self) -> list[str]:
        """Ids of all committables made visible, each once, in order of commit."""
        with self._lock:
            return list(self._markers)

    def staged(self) -> dict[Segment, int]:
        """Number of values per segment that is staged and not committed."""
        with self._lock:
            return {segment: len(values) for segment, values in self._staging.items()}

    def generation(self, job: str, operator: str) -> int:
        """The fence of (job, operator); 0 when none was raised."""
        with self._lock:
            return self._fences.get((job, operator), 0)

    def raise_fence(self, job: str, operator: str, generation: int) -> None:
        """Admit ``generation`` and shut out older ones. Raises :class:`Fenced` when a newer one was admitted."""
        with self._lock:
            self._check(job, operator, generation)
            self._fences[(job, operator)] = generation

    def stage(self, segment: Segment, values: Sequence[Any]) -> None:
        """Append to an open segment."""
        with self._lock:
            self._check(segment.job, segment.operator, segment.generation)
            self._staging.setdefault(segment, []).extend(values)

    def commit(self, name: str, committable: Committable, context: ConnectorContext, missing: Missing) -> CommitAnswer:
        """Make one committable visible unless it already is."""
        segment = Segment.of(committable)
        with self._lock:
            self._check(context.job, context.operator, context.generation)
            marker = self._markers.get(committable.id)
            if marker is not None:
                if marker != segment:
                    return CommitAnswer(CommitResult.FAILED, f"{committable.id}: another content was committed under this id")
                self._staging.pop(segment, None)
                return CommitAnswer(CommitResult.ALREADY_COMMITTED)
            values = self._staging.get(segment)
            if values is None:
                return missing_answer(committable, missing, "this process's collection")
            if len(values) != committable.rows:
                return CommitAnswer(CommitResult.FAILED, f"{committable.id}: {committable.rows} rows sealed, {len(values)} staged")
            self._values.setdefault(name, []).extend(values)
            self._markers[committable.id] = segment
            del self._staging[segment]
            return CommitAnswer(CommitResult.COMMITTED)

    def clean(self, context: ConnectorContext, keep: Sequence[Committable]) -> None:
        """Delete staging of older generations that ``keep`` does not name."""
        kept = {Segment.of(committable) for committable in keep}
        with self._lock:
            self._check(context.job, context.operator, context.generation)
            for segment in list(self._staging):
                if segment.left_behind(context) and segment not in kept:
                    del self._staging[segment]

    def _check(self, job: str, operator: str, generation: int) -> None:
        fence = self._fences.get((job, operator), 0)
        if fence > generation:
            raise Fenced(f"generation {generation} of {job}/{operator} is stale: the target is fenced at {fence}")


class CollectSink:
    """TWO_PHASE_COMMIT into a :class:`CollectTarget` of this process.

    ``missing`` says what becomes of a restored committable whose values died with an earlier process: ``fail`` or ``warn``
    (answered as committed, with the loss in the detail).
    """

    kind = "collect"
    version = 1

    def __init__(self, name: str, target: CollectTarget, *, missing: Missing = "fail") -> None:
        self.name = name
        self.target = target
        self.missing: Missing = missing

    @property
    def capability(self) -> SinkCapability:
        return SinkCapability.TWO_PHASE_COMMIT

    def config(self) -> dict[str, Json]:
        return {"name": self.name, "missing": self.missing}

    def problems(self) -> list[str]:
        name = f"collect sink {self.name!r}"
        return ([] if self.name else [f"{name}: name is empty; give it one to read its values by"]) + missing_problems(self.missing, name)

    def open(self, context: ConnectorContext) -> CollectWriter:
        self.target.raise_fence(context.job, context.operator, context.generation)
        return CollectWriter(self, context)


class CollectWriter:
    """One subtask's end of a collection."""

    def __init__(self, sink: CollectSink, context: ConnectorContext) -> None:
        self._sink = sink
        self._context = context
        self._open = Segment.first(context)
        self._rows = 0

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        if not values:
            return
        self._context.guard()
        self._sink.target.stage(self._open, values)
        self._rows += len(values)

    def flush(self) -> None:
        """Nothing is held back: :meth:`write` stages at once."""

    def close(self) -> None:
        """Nothing to release: the target is the caller's."""

    def prepare_commit(self, epoch: int) -> list[Committable]:
        if not self._rows:
            return []
        segment, rows = self._open, self._rows
        self._open, self._rows = segment.next(), 0
        return [segment.seal(epoch, rows, "")]

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        answers = Answers()
        for committable in committables:
            self._context.guard()
            if not answers.add(self._sink.target.commit(self._sink.name, committable, self._context, self._sink.missing)):
                break
        return answers.answer

    def clean(self, keep: Sequence[Committable]) -> None:
        self._sink.target.clean(self._context, keep)


class PrintSink:
    """Prints each value on a line of its own as it comes; promises nothing: a recovery prints again.

    ``stream`` is standard output unless given.
    """

    kind = "print"
    version = 1

    def __init__(self, stream: TextIO | None = None, *, prefix: str = "") -> None:
        self._stream = stream
        self.prefix = prefix

    @property
    def capability(self) -> SinkCapability:
        return SinkCapability.NONE

    def config(self) -> dict[str, Json]:
        return {"prefix": self.prefix}

    def problems(self) -> list[str]:
        return []

    def open(self, context: ConnectorContext) -> PrintWriter:
        return PrintWriter(sys.stdout if self._stream is None else self._stream, self.prefix, context)


class PrintWriter:
    """One subtask's printing; a batch is one write, so that lines of parallel subtasks do not mix within a batch."""

    def __init__(self, stream: TextIO, prefix: str, context: ConnectorContext) -> None:
        self._stream = stream
        self._prefix = prefix
        self._context = context

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        self._context.guard()
        self._stream.write("".join(f"{self._prefix}{value}\n" for value in values))

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """The stream is the caller's."""
        self._stream.flush()
