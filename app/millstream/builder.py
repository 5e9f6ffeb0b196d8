"""The builder: how users write a stream job. ``JobBuilder.source(...)`` gives a :class:`DataStream`; everything else is a method on it.

Called by registered pipeline functions, in the submitting process and on every node. Builds a model and keeps the live functions beside it; opens nothing. What must
never happen here: a mistake that is noticed only when records flow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from millstream_schema.connectors import Json, Sink, Source
from millstream_schema.errors import ConfigurationError
from millstream_schema.model import (
    Component,
    EdgeConfig,
    EdgeSpec,
    Guarantee,
    OperatorSpec,
    Partitioning,
    StreamComponents,
    StreamModel,
    StreamRequirement,
    changed_edge,
)
from millstream_schema.pipeline import Pipeline
from millstream_schema.values import TypeRegistry
from millstream_tasks.operators.keyed_state import OperatorListState, StateSpec
from millstream_tasks.operators.process import ProcessFunction

Fn = Callable[..., Any]


class JobBuilder:
    """Collects the operators and edges of one job."""

    def __init__(self, name: str, version: int, guarantee: Guarantee, parallelism: int = 1, shard_count: int = 128) -> None:
        self.name = name
        self.version = version
        self.guarantee = guarantee
        self.parallelism = parallelism
        self.shard_count = shard_count
        self.types = TypeRegistry()
        self._types: list[str] = []
        self._operators: list[OperatorSpec] = []
        self._edges: list[EdgeSpec] = []
        self._functions: dict[tuple[str, str], Fn] = {}
        self._sources: dict[str, Source] = {}
        self._sinks: dict[str, Sink] = {}
        self._requirements: list[StreamRequirement] = []
        self._problems: list[str] = []
        self._counts: dict[str, int] = {}
        self._edge_defaults = EdgeConfig()

    # -- settings of the whole job

    def register_type(self, name: str, type_: type) -> None:
        """Make ``type_`` (dataclass, msgspec Struct, NamedTuple, Enum, pydantic model) a value type that may travel and be kept in state under ``name``."""
        self.types.register(name, type_)
        self._types.append(name)

    def edges(self, **config: Any) -> None:
        """Defaults of every edge: fields of EdgeConfig."""
        self._edge_defaults = self.edge_config(config)

    def require(self, name: str, value: Json = None) -> None:
        """A predicate checked when the job is compiled and on each node before it starts."""
        self._requirements.append(StreamRequirement(name, value))

    # -- entry

    def source(self, source: Source, *, uid: str, parallelism: int | None = None) -> DataStream:
        """Read from ``source``."""
        if not isinstance(source, Source):
            raise ConfigurationError(f"{source!r} is not a source: it lacks a member of millstream.Source")
        _identity("source", uid, parallelism)
        self._problems += [f"source {uid!r}: {p}" for p in source.problems()]
        spec = OperatorSpec(
            id=uid, kind="source", uid=True, config={"connector": source.kind, **_jsonable(uid, source.config())}, parallelism=parallelism,
            capability=source.capability.value,
        )  # fmt: skip
        self._operators.append(spec)
        self._sources[uid] = source
        return DataStream(self, uid)

    # -- used by the streams

    def add(
        self,
        kind: str,
        inputs: list[DataStream],
        *,
        uid: str | None,
        config: dict[str, Json] | None = None,
        functions: dict[str, Fn] | None = None,
        partitioning: Partitioning | None = None,
        states: dict[str, Json] | None = None,
        parallelism: int | None = None,
        capability: str | None = None,
    ) -> DataStream:
        _identity(kind, uid, parallelism)
        operator = uid if uid is not None else self._fresh(kind)
        given = functions or {}
        self._operators.append(
            OperatorSpec(
                id=operator, kind=kind, uid=uid is not None, config=config or {}, functions={r: _reference(operator, f) for r, f in given.items()},
                states=states or {}, parallelism=parallelism, capability=capability,
            )
        )  # fmt: skip
        for role, function in given.items():
            self._functions[operator, role] = function
        for stream in inputs:
            self._edges.append(stream.edge_to(operator, partitioning, parallelism))
        return DataStream(self, operator)

    def add_sink(self, stream: DataStream, sink: Sink, uid: str, parallelism: int | None) -> None:
        if not isinstance(sink, Sink):
            raise ConfigurationError(f"{sink!r} is not a sink: it lacks a member of millstream.Sink")
        self._problems += [f"sink {uid!r}: {p}" for p in sink.problems()]
        self._sinks[uid] = sink
        config: dict[str, Json] = {"connector": sink.kind, **_jsonable(uid, sink.config())}
        self.add("sink", [stream], uid=uid, config=config, parallelism=parallelism, capability=sink.capability.value)

    def parallelism_of(self, operator: str) -> int:
        spec = next(o for o in self._operators if o.id == operator)
        return spec.parallelism if spec.parallelism is not None else self.parallelism

    def edge_config(self, changes: dict[str, Any]) -> EdgeConfig:
        """The defaults with ``changes``. Raises ConfigurationError for a field that does not exist or has a wrong type."""
        return changed_edge(self._edge_defaults, changes)

    def _fresh(self, kind: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}-{self._counts[kind]}"

    def build(self) -> Pipeline:
        """The pipeline as built so far, with everything that is wrong with its connectors."""
        components = [Component("function", f"{o.id}.{r}", self.version, ref) for o in self._operators for r, ref in o.functions.items()]
        components += [Component("source", i, s.version, s.kind) for i, s in self._sources.items()]
        components += [Component("sink", i, s.version, s.kind) for i, s in self._sinks.items()]
        components += [Component("codec", c) for c in sorted({e.config.codec for e in self._edges} | {"msgpack"})]
        components += [Component("value_type", t) for t in self._types]
        components += [Component("state", f"{o.id}.{n}", self.version, s) for o in self._operators for n, s in o.states.items()]
        requirements = [StreamRequirement("guarantee", self.guarantee.value), *self._requirements]
        if self.guarantee is not Guarantee.BEST_EFFORT:
            requirements.append(StreamRequirement("durable_checkpoint_storage"))
        if any("window" in o.kind and o.config.get("time") == "event" for o in self._operators):
            requirements.append(StreamRequirement("event_time"))
        model = StreamModel(
            name=self.name, version=self.version, guarantee=self.guarantee, operators=list(self._operators), edges=list(self._edges),
            components=StreamComponents(components), requirements=requirements, shard_count=self.shard_count, parallelism=self.parallelism,
        )  # fmt: skip
        return Pipeline(model, dict(self._functions), dict(self._sources), dict(self._sinks), self.types, tuple(self._problems))


class DataStream:
    """A stream of records. Methods add an operator and give the stream behind it."""

    def __init__(self, job: JobBuilder, operator: str, side: str | None = None, partitioning: Partitioning | None = None) -> None:
        self._job = job
        self._operator = operator
        self._side = side
        self._partitioning = partitioning
        self._edge: dict[str, Any] = {}
        self._value_type = "any"

    def edge_to(self, target: str, partitioning: Partitioning | None, parallelism: int | None) -> EdgeSpec:
        """The edge from here to ``target``."""
        chosen = partitioning or self._partitioning
        if chosen is None:
            there = parallelism if parallelism is not None else self._job.parallelism
            same = self._job.parallelism_of(self._operator) == there
            chosen = Partitioning.FORWARD if same else Partitioning.SINGLETON if there == 1 else Partitioning.REBALANCE
        return EdgeSpec(self._operator, target, chosen, self._value_type, self._side, self._job.edge_config(self._edge))

    def edge(self, **config: Any) -> DataStream:
        """Settings of the edge that leaves here (fields of EdgeConfig)."""
        self._job.edge_config(config)
        self._edge |= config
        return self

    def typed(self, name: str) -> DataStream:
        """Name the registered value type that travels from here."""
        self._value_type = name
        return self

    def side_output(self, tag: str) -> DataStream:
        """The side output ``tag`` of this operator: late records, dead letters, or what ``ctx.side`` sent."""
        return DataStream(self._job, self._operator, tag)

    def rebalance(self) -> DataStream:
        """The next edge deals records round robin."""
        return self._routed(Partitioning.REBALANCE)

    def broadcast(self) -> DataStream:
        """The next edge sends every record to every subtask."""
        return self._routed(Partitioning.BROADCAST)

    def _routed(self, partitioning: Partitioning) -> DataStream:
        stream = DataStream(self._job, self._operator, self._side, partitioning)
        stream._edge, stream._value_type = dict(self._edge), self._value_type
        return stream

    def map(self, function: Fn, *, uid: str | None = None, parallelism: int | None = None) -> DataStream:
        """``function(record) -> record``."""
        return self._job.add("map", [self], uid=uid, functions={"map": function}, parallelism=parallelism)

    def filter(self, function: Fn, *, uid: str | None = None, parallelism: int | None = None) -> DataStream:
        """Keep records for which ``function(record)`` is true."""
        return self._job.add("filter", [self], uid=uid, functions={"filter": function}, parallelism=parallelism)

    def flat_map(self, function: Fn, *, uid: str | None = None, parallelism: int | None = None) -> DataStream:
        """``function(record) -> iterable of records``."""
        return self._job.add("flat_map", [self], uid=uid, functions={"flat_map": function}, parallelism=parallelism)

    def assign_timestamps(
        self, function: Fn | None = None, *, out_of_orderness_ms: int = 0, idle_ms: int | None = None, uid: str | None = None
    ) -> DataStream:
        """``function(record) -> UTC ms``; without one, the timestamps the source gave.

        Watermarks trail the highest timestamp by ``out_of_orderness_ms``; a source that brings nothing for ``idle_ms`` is passed over.
        """
        if out_of_orderness_ms < 0 or (idle_ms is not None and idle_ms <= 0):
            raise ConfigurationError("out_of_orderness_ms must not be negative and idle_ms must be positive")
        config: dict[str, Json] = {"out_of_orderness_ms": out_of_orderness_ms, "idle_ms": idle_ms}
        return self._job.add("assign_timestamps", [self], uid=uid, config=config, functions={"timestamp": function} if function else {})

    def union(self, *others: DataStream, uid: str | None = None) -> DataStream:
        """The records of all streams as one."""
        return self._job.add("union", [self, *others], uid=uid, partitioning=Partitioning.UNION)

    def key_by(self, function: Fn) -> KeyedStream:
        """Group by ``function(record)``: keyed operators see all records of a key in one place, in order per source."""
        return KeyedStream(self._job, self, function)

    def sink_to(self, sink: Sink, *, uid: str, parallelism: int | None = None) -> None:
        """Write to ``sink``."""
        self._job.add_sink(self, sink, uid, parallelism)


class KeyedStream:
    """A stream with a key."""

    def __init__(self, job: JobBuilder, stream: DataStream, key: Fn) -> None:
        self._job = job
        self._stream = stream
        self._key = key

    def keyed(
        self,
        kind: str,
        uid: str | None,
        functions: dict[str, Fn | None],
        config: dict[str, Json],
        states: dict[str, Json],
        parallelism: int | None,
    ) -> DataStream:
        given = {"key": self._key, **{r: f for r, f in functions.items() if f is not None}}
        return self._job.add(
            kind,
            [self._stream],
            uid=uid,
            config=config,
            functions=given,
            partitioning=Partitioning.HASH,
            states=states,
            parallelism=parallelism,
        )

    def reduce(self, function: Fn, *, uid: str | None = None, parallelism: int | None = None) -> DataStream:
        """``function(old, record) -> new``; emits the new value after each record."""
        return self.keyed("reduce", uid, {"reduce": function}, {}, {"value": {"kind": "reducing"}}, parallelism)

    def aggregate(
        self, create: Fn, add: Fn, result: Fn | None = None, *, uid: str | None = None, parallelism: int | None = None
    ) -> DataStream:
        """``create() -> acc``, ``add(acc, record) -> acc``; emits ``result(key, acc)``, or ``(key, acc)``, after each record."""
        functions = {"create": create, "add": add, "result": result}
        return self.keyed("aggregate", uid, functions, {}, {"value": {"kind": "aggregating"}}, parallelism)

    def process(self, function: type[ProcessFunction], *, uid: str | None = None, parallelism: int | None = None) -> DataStream:
        """A :class:`ProcessFunction` class: state, timers, side outputs."""
        states: dict[str, Json] = {}
        for name, spec in function.states.items():
            if not isinstance(spec, StateSpec | OperatorListState):
                raise ConfigurationError(f"state {name!r} of {function.__qualname__} is {spec!r}: use ValueState, ListState, MapState ...")
            states[name] = spec.describe()
        return self.keyed("process", uid, {"process": function}, {}, states, parallelism)

    def tumbling(
        self, size_ms: int, *, offset_ms: int = 0, lateness_ms: int = 0, late_tag: str | None = None, time: str = "event"
    ) -> WindowedStream:
        """Windows ``[start, start + size)``."""
        _positive("window size_ms", size_ms)
        config: dict[str, Json] = {"size": size_ms, "offset": offset_ms}
        return WindowedStream(self, "tumbling_window", config | _window(lateness_ms, late_tag, time))

    def sliding(
        self, size_ms: int, slide_ms: int, *, offset_ms: int = 0, lateness_ms: int = 0, late_tag: str | None = None, time: str = "event"
    ) -> WindowedStream:
        """Windows of ``size`` that begin every ``slide``."""
        _positive("window size_ms", size_ms)
        _positive("window slide_ms", slide_ms)
        config: dict[str, Json] = {"size": size_ms, "slide": slide_ms, "offset": offset_ms}
        return WindowedStream(self, "sliding_window", config | _window(lateness_ms, late_tag, time))

    def session(self, gap_ms: int, *, lateness_ms: int = 0, late_tag: str | None = None, time: str = "event") -> WindowedStream:
        """Windows that last until nothing came for ``gap``; they merge."""
        _positive("session gap_ms", gap_ms)
        return WindowedStream(self, "session_window", {"gap": gap_ms, **_window(lateness_ms, late_tag, time)})


class WindowedStream:
    """A keyed stream cut into windows; one more call says what becomes of each."""

    def __init__(self, keyed: KeyedStream, kind: str, config: dict[str, Json]) -> None:
        self._keyed = keyed
        self._kind = kind
        self._config = config

    def _add(self, uid: str | None, parallelism: int | None, **functions: Fn | None) -> DataStream:
        return self._keyed.keyed(self._kind, uid, functions, self._config, {"windows": {"kind": "window"}}, parallelism)

    def aggregate(
        self,
        create: Fn,
        add: Fn,
        result: Fn | None = None,
        *,
        merge: Fn | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> DataStream:
        """``result(key, window, acc)``, or ``(key, start, end, acc)``. Sessions need ``merge(acc, acc)``."""
        return self._add(uid, parallelism, create=create, add=add, result=result, merge=merge)

    def reduce(self, function: Fn, result: Fn | None = None, *, uid: str | None = None, parallelism: int | None = None) -> DataStream:
        """``function(record, record) -> record``."""
        return self._add(uid, parallelism, reduce=function, result=result)

    def apply(self, function: Fn, *, uid: str | None = None, parallelism: int | None = None) -> DataStream:
        """``function(key, window, records)``; keeps all records of a window."""
        return self._add(uid, parallelism, function=function)


def _window(lateness_ms: int, late_tag: str | None, time: str) -> dict[str, Json]:
    if lateness_ms < 0:
        raise ConfigurationError(f"lateness_ms must not be negative, not {lateness_ms}")
    if time not in ("event", "processing"):
        raise ConfigurationError(f"time must be 'event' or 'processing', not {time!r}")
    return {"lateness_ms": lateness_ms, "late_tag": late_tag, "time": time}


def _identity(kind: str, uid: object, parallelism: object) -> None:
    """Types only, so that what comes after can compare; values are checked with the model."""
    if uid is not None and type(uid) is not str:
        raise ConfigurationError(f"uid of a {kind} must be a text, not {uid!r}")
    if parallelism is not None and type(parallelism) is not int:
        raise ConfigurationError(f"parallelism of {kind} {uid!r} must be a whole number, not {parallelism!r}")


def _positive(name: str, value: int) -> None:
    if type(value) is not int or value <= 0:
        raise ConfigurationError(f"{name} must be a positive whole number of milliseconds, not {value!r}")


def _reference(operator: str, function: Fn) -> str:
    """How a function enters the fingerprint: module and qualified name; a lambda by its operator."""
    name = getattr(function, "__qualname__", None)
    if name is None:
        return f"{type(function).__module__}:{type(function).__qualname__}"
    if "<" in name:
        return f"lambda@{operator}"
    return f"{getattr(function, '__module__', '?')}:{name}"


def _jsonable(operator: str, config: dict[str, Json]) -> dict[str, Json]:
    try:
        decoded: dict[str, Json] = msgspec.json.decode(msgspec.json.encode(config))
    except (TypeError, msgspec.MsgspecError) as exc:
        raise ConfigurationError(f"config of {operator!r} is not JSON: {exc}") from exc
    return decoded


__all__ = ["DataStream", "JobBuilder", "KeyedStream", "WindowedStream"]
