"""From model to running: validation, ``JobGraph`` (chains), ``PartitionedPlan`` and ``DeploymentPlan``.

Called by the submitting process, by every node (which must reach the same fingerprint) and by the coordinator. The partitioned plan alone decides
parallelism, partitioning, which subtask owns a key, which channels exist and who must acknowledge an epoch. What must never happen here: anything
that depends on the process it runs in.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from .canonical import fingerprint, owner_of, shards_of
from .channels import ChannelId
from .connectors import SinkCapability, SourceCapability
from .errors import JobInvalid
from .model import (
    NAME,
    EdgeSpec,
    Guarantee,
    OperatorSpec,
    Partitioning,
    StreamModel,
)
from .settings import LONGEST_MS, MOST, shown

KINDS = frozenset(
    {
        "source", "map", "filter", "flat_map", "assign_timestamps", "reduce", "aggregate", "process", "union",
        "tumbling_window", "sliding_window", "session_window", "sink",
    }
)  # fmt: skip
STATEFUL = frozenset({"reduce", "aggregate", "process", "tumbling_window", "sliding_window", "session_window"})
WINDOWS = frozenset({"tumbling_window", "sliding_window", "session_window"})
KNOWN_REQUIREMENTS = frozenset({"guarantee", "durable_checkpoint_storage", "shared_storage", "event_time", "broker_transport"})
SOURCE_OK = {
    Guarantee.STRICT_EXACTLY_ONCE: {SourceCapability.REPLAYABLE, SourceCapability.TRANSACTIONAL_READ},
    Guarantee.EFFECTIVELY_ONCE: {SourceCapability.REPLAYABLE},
    Guarantee.AT_LEAST_ONCE: {SourceCapability.REPLAYABLE},
    Guarantee.BEST_EFFORT: set(SourceCapability),
}
SINK_OK = {
    Guarantee.STRICT_EXACTLY_ONCE: {
        SinkCapability.TWO_PHASE_COMMIT,
        SinkCapability.STAGED_ATOMIC_COMMIT,
        SinkCapability.OUTBOX_EPOCH_LOG,
    },
    Guarantee.EFFECTIVELY_ONCE: set(SinkCapability) - {SinkCapability.NONE},
    Guarantee.AT_LEAST_ONCE: set(SinkCapability),
    Guarantee.BEST_EFFORT: set(SinkCapability),
}
MAX_PARALLELISM = 10_000
MIN_BATCH_BYTES = 1024
COMMITTING = frozenset({SinkCapability.TWO_PHASE_COMMIT, SinkCapability.STAGED_ATOMIC_COMMIT, SinkCapability.OUTBOX_EPOCH_LOG})


class Vertex(msgspec.Struct, frozen=True):
    """A chain of operators that run as one function. ``id`` is the first operator's."""

    id: str
    operators: list[str]
    parallelism: int


class PlanEdge(msgspec.Struct, frozen=True):
    """An edge between two chains."""

    id: str
    spec: EdgeSpec
    source: str
    target: str


class Subtask(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One of the ``parallelism`` copies of a vertex."""

    vertex: str
    index: int

    @property
    def id(self) -> str:
        return f"{self.vertex}:{self.index}"

    @staticmethod
    def parse(text: str) -> Subtask:
        vertex, _, index = text.rpartition(":")
        return Subtask(vertex, int(index))


class JobGraph(msgspec.Struct, frozen=True):
    """Chains and the edges between them."""

    vertices: list[Vertex]
    edges: list[PlanEdge]


class PartitionedPlan(msgspec.Struct, frozen=True):
    """The only source of parallelism, partitioning, state routing, channels and the set that must acknowledge an epoch."""

    model_fingerprint: str
    shard_count: int
    vertices: list[Vertex]
    edges: list[PlanEdge]
    sources: list[str]
    committers: list[str]
    """Ids of the subtasks with a committing sink: an epoch is COMMITTED when all of them have confirmed."""
    guarantee: Guarantee

    def vertex(self, vertex_id: str) -> Vertex:
        for v in self.vertices:
            if v.id == vertex_id:
                return v
        raise KeyError(vertex_id)

    def vertex_of(self, operator: str) -> Vertex:
        for v in self.vertices:
            if operator in v.operators:
                return v
        raise KeyError(operator)

    def subtasks(self) -> list[Subtask]:
        """All subtasks in plan order: whoever must acknowledge an epoch."""
        return [Subtask(v.id, i) for v in self.vertices for i in range(v.parallelism)]

    def owner(self, vertex_id: str, shard: int) -> int:
        """Index of the subtask of ``vertex_id`` that owns ``shard``; the same rule routes records."""
        return owner_of(shard, self.vertex(vertex_id).parallelism, self.shard_count)

    def shards(self, subtask: Subtask) -> range:
        """Shards whose keyed state ``subtask`` owns."""
        return shards_of(subtask.index, self.vertex(subtask.vertex).parallelism, self.shard_count)

    def targets(self, edge: PlanEdge, source_index: int) -> list[int]:
        """Target subtasks that source subtask ``source_index`` has a channel to, in order."""
        n = self.vertex(edge.target).parallelism
        if edge.spec.partitioning in (Partitioning.FORWARD, Partitioning.UNION):
            return [source_index]
        if edge.spec.partitioning is Partitioning.SINGLETON:
            return [0]
        return list(range(n))

    def inputs(self, subtask: Subtask) -> list[tuple[PlanEdge, int]]:
        """(edge, source subtask index) of every channel that ends at ``subtask``."""
        return [
            (e, i)
            for e in self.edges
            if e.target == subtask.vertex
            for i in range(self.vertex(e.source).parallelism)
            if subtask.index in self.targets(e, i)
        ]

    def outputs(self, subtask: Subtask) -> list[tuple[PlanEdge, list[int]]]:
        """(edge, target indexes) of every edge that starts at ``subtask``."""
        return [(e, self.targets(e, subtask.index)) for e in self.edges if e.source == subtask.vertex]

    def channels(self, job: str, generation: int) -> list[ChannelId]:
        """Every channel of one generation."""
        return [ChannelId(job, generation, e.id, i, s.index) for s in self.subtasks() for e, i in self.inputs(s)]

    def fingerprint(self) -> str:
        return fingerprint(msgspec.to_builtins(self))


class DeploymentPlan(msgspec.Struct, frozen=True):
    """Which node runs which subtask of one generation."""

    job: str
    generation: int
    plan_fingerprint: str
    nodes: dict[str, str]
    """Subtask id → node id."""


def validate(model: StreamModel) -> list[str]:
    """Everything wrong with a model, one sentence each; empty when it can be planned. Connector problems are added by the builder."""
    problems: list[str] = []
    ids = [op.id for op in model.operators]
    if not NAME.match(model.name):
        problems.append(f"job name {model.name!r} must match {NAME.pattern}")
    if model.shard_count < 1:
        problems.append(f"shard_count must be at least 1, not {model.shard_count}")
    if model.parallelism < 1:
        problems.append(f"parallelism must be at least 1, not {model.parallelism}")
    problems += [f"operator id {i!r} is used twice: give each operator its own uid" for i in sorted({i for i in ids if ids.count(i) > 1})]
    for op in model.operators:
        problems += _operator_problems(model, op)
    known = set(ids)
    for edge in model.edges:
        problems += _edge_problems(edge, known)
    if not any(op.kind == "source" for op in model.operators):
        problems.append("the job has no source")
    if not any(op.kind == "sink" for op in model.operators):
        problems.append("the job has no sink: end each stream with .sink_to(...)")
    if len(known) == len(ids) and all(e.source in known and e.target in known for e in model.edges):
        problems += _shape_problems(model)
    problems += _component_problems(model)
    return problems


def _operator_problems(model: StreamModel, op: OperatorSpec) -> list[str]:
    problems = []
    if not NAME.match(op.id):
        problems.append(f"operator id {op.id!r} must match {NAME.pattern}")
    if op.kind not in KINDS:
        problems.append(f"operator {op.id!r}: unknown kind {op.kind!r}; known: {', '.join(sorted(KINDS))}")
    p = op.parallelism if op.parallelism is not None else model.parallelism
    if p < 1:
        problems.append(f"operator {op.id!r}: parallelism must be at least 1, not {p}")
    if p > MAX_PARALLELISM:
        problems.append(f"operator {op.id!r}: parallelism must be at most {MAX_PARALLELISM}, not {shown(p)}")
    if p > model.shard_count and op.kind in STATEFUL:
        problems.append(f"operator {op.id!r}: parallelism {shown(p)} exceeds shard_count {model.shard_count}")
    if op.kind in STATEFUL and not op.uid and model.guarantee is Guarantee.STRICT_EXACTLY_ONCE:
        problems.append(
            f"operator {op.id!r} keeps state and has no uid: under STRICT give it uid=..., or its state is lost when the graph changes"
        )
    if op.kind == "source" and op.capability not in SOURCE_OK[model.guarantee]:
        problems.append(
            f"source {op.id!r} is {op.capability}, {model.guarantee} needs one of {', '.join(sorted(SOURCE_OK[model.guarantee]))}"
        )
    if op.kind == "sink" and op.capability not in SINK_OK[model.guarantee]:
        problems.append(f"sink {op.id!r} is {op.capability}, {model.guarantee} needs one of {', '.join(sorted(SINK_OK[model.guarantee]))}")
    return problems


def _edge_problems(edge: EdgeSpec, known: set[str]) -> list[str]:
    problems = [f"edge {edge.id!r}: there is no operator {end!r}" for end in (edge.source, edge.target) if end not in known]
    if edge.partitioning not in set(Partitioning):
        problems.append(f"edge {edge.id!r}: unknown partitioning {edge.partitioning!r}; known: {', '.join(Partitioning)}")
    c = edge.config
    for name, value in (("capacity", c.capacity), ("batch_records", c.batch_records), ("batch_bytes", c.batch_bytes)):
        if value < 1:
            problems.append(f"edge {edge.id!r}: {name} must be at least 1, not {value}")
        if value > MOST:
            problems.append(f"edge {edge.id!r}: {name} must be at most {MOST}, not {shown(value)}")
    if c.linger_ms < 0:
        problems.append(f"edge {edge.id!r}: linger_ms must not be negative, not {c.linger_ms}")
    if c.linger_ms > LONGEST_MS:
        problems.append(f"edge {edge.id!r}: linger_ms must be at most {LONGEST_MS} ms (31 days), not {shown(c.linger_ms)}")
    if 1 <= c.batch_bytes < MIN_BATCH_BYTES:
        problems.append(
            f"edge {edge.id!r}: batch_bytes must be at least {MIN_BATCH_BYTES}, not {c.batch_bytes}: an envelope's head needs room, too"
        )
    if c.batch_bytes > 1 << 20:
        problems.append(f"edge {edge.id!r}: batch_bytes must not exceed 1 MiB")
    if c.compression not in (None, "zstd"):
        problems.append(f"edge {edge.id!r}: unknown compression {c.compression!r}; known: zstd")
    if c.codec not in ("msgpack", "json"):
        problems.append(f"edge {edge.id!r}: unknown codec {c.codec!r}; known: msgpack, json")
    return problems


def _component_problems(model: StreamModel) -> list[str]:
    problems = []
    for op in model.operators:
        if op.kind in ("source", "sink") and not model.components.has(op.kind, op.id):
            problems.append(f"{op.kind} {op.id!r} is not in the components registry")
        for role in op.functions:
            if not model.components.has("function", f"{op.id}.{role}"):
                problems.append(f"function {op.id}.{role} is not in the components registry")
        for state in op.states:
            if not model.components.has("state", f"{op.id}.{state}"):
                problems.append(f"state {op.id}.{state} is not in the components registry")
    for edge in model.edges:
        if not model.components.has("codec", edge.config.codec):
            problems.append(f"edge {edge.id!r}: codec {edge.config.codec!r} is not in the components registry")
        if edge.value_type != "any" and not model.components.has("value_type", edge.value_type):
            problems.append(
                f"edge {edge.id!r}: value type {edge.value_type!r} is not in the components registry: job.register_type(...) it"
            )
    for req in model.requirements:
        if req.name not in KNOWN_REQUIREMENTS:
            problems.append(f"unknown requirement {req.name!r}; known: {', '.join(sorted(KNOWN_REQUIREMENTS))}")
        if req.name == "guarantee" and req.value != model.guarantee:
            problems.append(f"the job requires guarantee {req.value}, it is declared {model.guarantee}")
    return problems


def _shape_problems(model: StreamModel) -> list[str]:
    problems = []
    incoming: dict[str, list[EdgeSpec]] = defaultdict(list)
    outgoing: dict[str, list[EdgeSpec]] = defaultdict(list)
    for e in model.edges:
        incoming[e.target].append(e)
        outgoing[e.source].append(e)
    for op in model.operators:
        if op.kind == "source" and incoming[op.id]:
            problems.append(f"source {op.id!r} cannot have an input")
        if op.kind != "source" and not incoming[op.id]:
            problems.append(f"operator {op.id!r} has no input")
        if op.kind not in ("source", "union") and len(incoming[op.id]) > 1:
            problems.append(f"operator {op.id!r} has {len(incoming[op.id])} inputs: join them with union first")
        if op.kind == "sink" and outgoing[op.id]:
            problems.append(f"sink {op.id!r} cannot have an output")
        if op.kind in STATEFUL and any(e.partitioning is not Partitioning.HASH for e in incoming[op.id]):
            problems.append(f"operator {op.id!r} keeps keyed state and needs key_by before it")
    order = _topological(model)
    if len(order) < len(model.operators):
        rest = sorted({o.id for o in model.operators} - set(order))
        return [*problems, f"the graph has a cycle through {', '.join(rest)}; cycles are not supported"]
    for op in model.operators:
        if op.kind in WINDOWS and op.config.get("time", "event") == "event" and not _has_watermarks(model, op.id, incoming):
            problems.append(f"window {op.id!r} works on event time and nothing before it assigns timestamps: add .assign_timestamps(...)")
        if op.kind == "assign_timestamps" and op.config.get("idle_ms") is not None and not _behind_source(model, op, incoming):
            problems.append(
                f"{op.id!r} has idle_ms and is not right behind a source of its parallelism: only there can silence be told from waiting; "
                "call assign_timestamps on the source itself, and give both the same parallelism"
            )
    for e in model.edges:
        if e.partitioning in (Partitioning.FORWARD, Partitioning.UNION) and _parallelism(model, e.source) != _parallelism(model, e.target):
            problems.append(f"edge {e.id!r}: {e.partitioning} needs equal parallelism at both ends; use rebalance()")
        if e.partitioning is Partitioning.SINGLETON and _parallelism(model, e.target) != 1:
            problems.append(f"edge {e.id!r}: SINGLETON needs parallelism 1 at its target")
    return problems


def _behind_source(model: StreamModel, spec: OperatorSpec, incoming: dict[str, list[EdgeSpec]]) -> bool:
    """Whether nothing but a call lies between the operator and a source."""
    edges = incoming[spec.id]
    if len(edges) != 1 or edges[0].partitioning is not Partitioning.FORWARD:
        return False
    source = model.operator(edges[0].source)
    alone = sum(1 for e in model.edges if e.source == source.id) == 1
    return alone and source.kind == "source" and _parallelism(model, source.id) == _parallelism(model, spec.id)


def _has_watermarks(model: StreamModel, operator: str, incoming: dict[str, list[EdgeSpec]]) -> bool:
    """Whether every path from a source to ``operator`` passes something that assigns timestamps."""
    spec = model.operator(operator)
    if spec.kind == "assign_timestamps":
        return True
    if spec.kind == "source":
        return False
    return all(_has_watermarks(model, e.source, incoming) for e in incoming[operator])


def _parallelism(model: StreamModel, operator: str) -> int:
    return model.operator(operator).parallelism or model.parallelism


def _topological(model: StreamModel) -> list[str]:
    """Operator ids, each after its inputs, in the model's order where free; shorter than the model when there is a cycle."""
    waiting = {op.id: sum(1 for e in model.edges if e.target == op.id) for op in model.operators}
    order: list[str] = []
    while True:
        ready = next((op.id for op in model.operators if op.id in waiting and waiting[op.id] == 0), None)
        if ready is None:
            return order
        del waiting[ready]
        order.append(ready)
        for e in model.edges:
            if e.source == ready and e.target in waiting:
                waiting[e.target] -= 1


def job_graph(model: StreamModel) -> JobGraph:
    """Fuse operators into chains: FORWARD with one producer and one consumer of equal parallelism, and HASH 1 → 1, which runs as a call."""
    fused: dict[str, str] = {}
    for e in model.edges:
        single = sum(1 for x in model.edges if x.source == e.source) == 1 and sum(1 for x in model.edges if x.target == e.target) == 1
        p, q = _parallelism(model, e.source), _parallelism(model, e.target)
        by_call = e.partitioning is Partitioning.FORWARD or (e.partitioning is Partitioning.HASH and p == 1)
        if single and e.side is None and p == q and by_call and model.operator(e.target).kind != "union":
            fused[e.target] = e.source
    chains: dict[str, list[str]] = {}
    head: dict[str, str] = {}
    for op in _topological(model):
        head[op] = head[fused[op]] if op in fused else op
        chains.setdefault(head[op], []).append(op)
    vertices = [Vertex(h, ops, _parallelism(model, h)) for h, ops in chains.items()]
    cross = [e for e in model.edges if fused.get(e.target) != e.source]
    edges = [PlanEdge(f"e{i}", e, head[e.source], head[e.target]) for i, e in enumerate(cross)]
    return JobGraph(vertices, edges)


def compile_plan(model: StreamModel) -> PartitionedPlan:
    """The partitioned plan of a valid model. Raises :class:`JobInvalid` listing everything wrong at once."""
    problems = validate(model)
    if problems:
        raise JobInvalid(problems)
    graph = job_graph(model)
    kinds = {op.id: op for op in model.operators}
    committing = [v for v in graph.vertices if any(kinds[o].capability in COMMITTING for o in v.operators if kinds[o].kind == "sink")]
    return PartitionedPlan(
        model_fingerprint=model.fingerprint(),
        shard_count=model.shard_count,
        vertices=graph.vertices,
        edges=graph.edges,
        sources=[v.id for v in graph.vertices if kinds[v.operators[0]].kind == "source"],
        committers=[Subtask(v.id, i).id for v in committing for i in range(v.parallelism)],
        guarantee=model.guarantee,
    )
