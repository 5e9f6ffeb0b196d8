"""The operators of one subtask, fused into one function over batches.

Built by :func:`build_chain` from the plan; driven by the runner with batches, watermarks and time. What must never happen here: knowledge of channels,
epochs or leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from millstream_schema.connectors import SinkWriter
from millstream_schema.errors import KeyRefused, MillstreamError, OperatorError
from millstream_schema.model import OperatorSpec, StreamModel
from millstream_schema.pipeline import Pipeline
from millstream_schema.plan import Vertex
from millstream_schema.reasons import one_line

from .calls import make_all
from .operators.base import MAX_WATERMARK, Batch, Operator
from .operators.process import Process
from .operators.rolling import Aggregate, Reduce
from .operators.session import SessionWindow
from .operators.stateless import AssignTimestamps, Filter, FlatMap, Map, Union
from .operators.windows import SlidingWindow, TumblingWindow


class ChainOutput(Protocol):
    """Where a chain's output goes: the runner's edges."""

    def emit(self, batch: Batch) -> None: ...

    def emit_side(self, operator: str, tag: str, batch: Batch) -> None: ...

    def emit_watermark(self, watermark: int) -> None: ...


class SinkOperator(Operator):
    """The end of a chain: hands batches to the sink's writer."""

    def __init__(self, spec: OperatorSpec, writer: SinkWriter) -> None:
        super().__init__(spec)
        self.writer = writer
        self.records = 0

    def process(self, batch: Batch) -> Batch | None:
        self.writer.write(batch.values, batch.timestamps)
        self.records += len(batch.values)
        return None

    def close(self) -> None:
        self.writer.close()


class Chain:
    """Runs batches through the operators in order. ``assigner`` is the operator that makes watermarks here, if one does."""

    def __init__(self, operators: list[Operator], output: ChainOutput) -> None:
        self.operators = operators
        self.output = output
        self.assigner = next((o for o in operators if isinstance(o, AssignTimestamps)), None)
        self._after_assigner = operators.index(self.assigner) + 1 if self.assigner else 0
        self._timed = [(i, o) for i, o in enumerate(operators) if type(o).next_time is not Operator.next_time]
        self.watermark = self.assigner.current if self.assigner else -MAX_WATERMARK

    def push(self, batch: Batch | None, start: int = 0) -> None:
        """Send a batch through the operators from ``start`` on. Raises OperatorError naming the operator whose user code failed."""
        operators = self.operators
        for i in range(start, len(operators)):
            if batch is None or not batch.values:
                return
            op = operators[i]
            try:
                batch = op.process(batch)
            except KeyRefused as exc:
                raise KeyRefused(f"operator {op.id!r}: {exc}") from exc
            except MillstreamError:
                raise
            except Exception as exc:
                raise _failed(op, exc) from exc
            if op.sides:
                self._flush_sides(op)
        if batch is not None and batch.values:
            self.output.emit(batch)

    def assign_watermark(self) -> None:
        """Send on what the assigner has reached since the last call."""
        if self.assigner is not None:
            mark = self.assigner.watermark()
            if mark > self.watermark:
                self.advance(mark, self._after_assigner)

    def advance(self, watermark: int, start: int = 0) -> None:
        """The watermark rose: fire what is due, operator by operator, then pass it on. A lower or equal one is passed over."""
        if self.assigner is not None and start == 0 and watermark < MAX_WATERMARK:
            return
        if watermark <= self.watermark:
            return
        self.watermark = watermark
        for i in range(start, len(self.operators)):
            op = self.operators[i]
            fired = self._call(op, op.on_watermark, watermark)
            self.push(fired, i + 1)
        self.output.emit_watermark(watermark)

    def on_time(self, now_ms: int) -> None:
        """Run what is due by the node's clock."""
        for i, op in self._timed:
            due = op.next_time()
            if due is not None and due <= now_ms:
                self.push(self._call(op, op.on_time, now_ms), i + 1)

    def next_time(self) -> int | None:
        """When :meth:`on_time` is due next, ms of the node's clock."""
        times = [t for _, op in self._timed if (t := op.next_time()) is not None]
        return min(times) if times else None

    def _call(self, op: Operator, hook: Callable[[int], Batch | None], argument: int) -> Batch | None:
        try:
            fired = hook(argument)
        except MillstreamError:
            raise
        except Exception as exc:
            raise _failed(op, exc) from exc
        if op.sides:
            self._flush_sides(op)
        return fired

    def _flush_sides(self, op: Operator) -> None:
        sides, op.sides = op.sides, {}
        for tag, batch in sides.items():
            self.output.emit_side(op.id, tag, batch)

    def sinks(self) -> list[SinkOperator]:
        return [o for o in self.operators if isinstance(o, SinkOperator)]

    def close(self) -> None:
        make_all(op.close for op in self.operators)


def _failed(op: Operator, error: Exception) -> OperatorError:
    """What user code raised, as the reason of a failure: the traceback stays with the cause."""
    return OperatorError(f"operator {op.id!r} failed: {type(error).__name__}: {one_line(str(error))}")


def key_function(model: StreamModel, pipeline: Pipeline, operator: str) -> Callable[[Any], Any]:
    """The key function that routes to, and keys the state of, ``operator``: one function for both."""
    return pipeline.function(operator, "key")


def build_chain(
    model: StreamModel,
    vertex: Vertex,
    pipeline: Pipeline,
    writers: Mapping[str, SinkWriter],
    output: ChainOutput,
    now_ms: Callable[[], int],
) -> Chain:
    """Fresh operators for one subtask of ``vertex``; nothing is shared with another subtask but the user's functions."""
    operators = [
        _operator(model.operator(o), model, pipeline, writers, now_ms) for o in vertex.operators if model.operator(o).kind != "source"
    ]
    return Chain(operators, output)


def _operator(
    spec: OperatorSpec, model: StreamModel, pipeline: Pipeline, writers: Mapping[str, SinkWriter], now_ms: Callable[[], int]
) -> Operator:
    functions = pipeline.functions

    def fn(role: str) -> Callable[..., Any]:
        return functions[spec.id, role]

    def optional(role: str) -> Callable[..., Any] | None:
        return functions.get((spec.id, role))

    match spec.kind:
        case "map":
            return Map(spec, fn("map"))
        case "filter":
            return Filter(spec, fn("filter"))
        case "flat_map":
            return FlatMap(spec, fn("flat_map"))
        case "union":
            return Union(spec)
        case "assign_timestamps":
            return AssignTimestamps(spec, optional("timestamp"))
        case "reduce":
            return Reduce(spec, fn("key"), fn("reduce"))
        case "aggregate":
            return Aggregate(spec, fn("key"), fn("create"), fn("add"), optional("result"))
        case "sink":
            return SinkOperator(spec, writers[spec.id])
    op = _timed_operator(spec, fn, optional)
    op.now_ms = now_ms
    return op


def _timed_operator(
    spec: OperatorSpec, fn: Callable[[str], Callable[..., Any]], optional: Callable[[str], Callable[..., Any] | None]
) -> Process | SessionWindow | SlidingWindow | TumblingWindow:
    if spec.kind == "process":
        return Process(spec, fn("key"), fn("process")())
    functions = {role: f for role in ("create", "add", "result", "merge", "reduce", "function") if (f := optional(role)) is not None}
    match spec.kind:
        case "tumbling_window":
            return TumblingWindow(spec, fn("key"), **functions)
        case "sliding_window":
            return SlidingWindow(spec, fn("key"), **functions)
        case "session_window":
            return SessionWindow(spec, fn("key"), **functions)
    raise OperatorError(f"operator {spec.id!r}: kind {spec.kind!r} cannot be built; upgrade this node")
