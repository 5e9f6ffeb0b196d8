"""What a stream job is, before anything runs: ``StreamModel``, its components and requirements.

Built by the app's builder, validated and planned by :mod:`millstream_schema.plan`, rebuilt on every node from the registered factory and compared by
fingerprint. Plain frozen values that survive a JSON round trip. What must never happen here: a live object, a function's code, a secret.
"""

from __future__ import annotations

import enum
import re
from typing import Any, Literal

import msgspec

from .canonical import fingerprint
from .connectors import Json
from .errors import ConfigurationError, JobInvalid

MODEL_FORMAT = 1
SHARD_COUNT = 128
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
"""Operator ids, job names and state names: they become parts of queue names, keys and paths."""


class Guarantee(enum.StrEnum):
    """What an outside reader may rely on."""

    STRICT_EXACTLY_ONCE = "STRICT_EXACTLY_ONCE"
    EFFECTIVELY_ONCE = "EFFECTIVELY_ONCE"
    AT_LEAST_ONCE = "AT_LEAST_ONCE"
    BEST_EFFORT = "BEST_EFFORT"

    @property
    def aligned(self) -> bool:
        """Whether channels that have the barrier are held until all have it."""
        return self in (Guarantee.STRICT_EXACTLY_ONCE, Guarantee.EFFECTIVELY_ONCE)


class Partitioning(enum.StrEnum):
    """How records travel along an edge."""

    FORWARD = "FORWARD"
    HASH = "HASH"
    REBALANCE = "REBALANCE"
    BROADCAST = "BROADCAST"
    UNION = "UNION"
    SINGLETON = "SINGLETON"


class EdgeMode(enum.StrEnum):
    """Where the bound of an edge is kept."""

    BLOCKING_QUEUE = "BLOCKING_QUEUE"
    CREDIT_BASED = "CREDIT_BASED"


class EdgeConfig(msgspec.Struct, frozen=True):
    """Settings of one distributed edge. ``mode``: None chooses by placement; BLOCKING_QUEUE hands objects over and needs both ends in one process,
    CREDIT_BASED sends envelopes through the codec even there. ``capacity`` counts envelopes (each ≤ 1 MiB); ``linger_ms`` bounds how long a record waits for company."""

    capacity: int = 8
    batch_records: int = 1000
    batch_bytes: int = 1 << 20
    linger_ms: int = 5
    mode: EdgeMode | None = None
    compression: Literal["zstd"] | None = None
    codec: Literal["msgpack", "json"] = "msgpack"
    verify_serialization: bool = False


class OperatorSpec(msgspec.Struct, frozen=True):
    """One operator. ``functions`` maps a role (``map``, ``key``, ``add`` …) to ``module:qualname`` or ``lambda@{id}``."""

    id: str
    kind: str
    uid: bool
    config: dict[str, Json] = {}
    functions: dict[str, str] = {}
    states: dict[str, Json] = {}
    parallelism: int | None = None
    capability: str | None = None


class EdgeSpec(msgspec.Struct, frozen=True):
    """One edge. ``side`` names the side output it carries, or None for the main output."""

    source: str
    target: str
    partitioning: Partitioning
    value_type: str = "any"
    side: str | None = None
    config: EdgeConfig = EdgeConfig()

    @property
    def id(self) -> str:
        return f"{self.source}->{self.target}" + (f"#{self.side}" if self.side else "")


class Component(msgspec.Struct, frozen=True):
    """A connector, function, codec, value type or state schema the model uses; a plan may name nothing else."""

    kind: str
    name: str
    version: int = 1
    config: Json = None


class StreamComponents(msgspec.Struct, frozen=True):
    """Registry of every component of a model."""

    components: list[Component] = []

    def has(self, kind: str, name: str) -> bool:
        return any(c.kind == kind and c.name == name for c in self.components)


class StreamRequirement(msgspec.Struct, frozen=True):
    """A predicate checked when the job is compiled and on each node before it starts; recorded in the manifest."""

    name: str
    value: Json = None


class StreamModel(msgspec.Struct, frozen=True):
    """The whole of a stream job's intent."""

    name: str
    version: int
    guarantee: Guarantee
    operators: list[OperatorSpec]
    edges: list[EdgeSpec]
    components: StreamComponents
    requirements: list[StreamRequirement]
    shard_count: int = SHARD_COUNT
    parallelism: int = 1
    format: int = MODEL_FORMAT

    def operator(self, operator_id: str) -> OperatorSpec:
        for op in self.operators:
            if op.id == operator_id:
                return op
        raise KeyError(operator_id)

    def fingerprint(self) -> str:
        """Hash of the model's canonical JSON, 32 hex digits."""
        return fingerprint(msgspec.to_builtins(self))


class Override(msgspec.Struct, frozen=True):
    """A plan-time change, applied to the model by operator id: nothing patches running objects."""

    parallelism: int | None = None
    edge: dict[str, Any] | None = None
    """Fields of :class:`EdgeConfig` for the edges that end at the operator."""


def changed_edge(config: EdgeConfig, changes: dict[str, Any]) -> EdgeConfig:
    """An edge's settings with some of them changed. Raises ConfigurationError for one that does not exist or has the wrong type: a misspelt one must not be passed over."""
    unknown = sorted(set(changes) - set(EdgeConfig.__struct_fields__))
    if unknown:
        wrong, known = ", ".join(map(repr, unknown)), ", ".join(EdgeConfig.__struct_fields__)
        raise ConfigurationError(f"an edge has no setting {wrong}; known: {known}")
    try:
        return msgspec.convert({**msgspec.to_builtins(config), **changes}, EdgeConfig)
    except msgspec.ValidationError as exc:
        raise ConfigurationError(f"an edge setting has a wrong value: {exc}") from exc


def _overridden(edge: EdgeSpec, override: Override | None) -> EdgeSpec:
    if override is None or not override.edge:
        return edge
    return msgspec.structs.replace(edge, config=changed_edge(edge.config, override.edge))


def _edge_problems(overrides: dict[str, Override]) -> list[str]:
    """Edge settings that do not exist or have a wrong type, of all operators: also of one that no edge ends at."""
    found = []
    for operator_id, override in overrides.items():
        try:
            changed_edge(EdgeConfig(), override.edge or {})
        except ConfigurationError as exc:
            found.append(f"override for operator {operator_id!r}: {exc}")
    return found


def with_overrides(model: StreamModel, parallelism: int | None, overrides: dict[str, Override]) -> StreamModel:
    """The model with its changes applied. Raises KeyError for an operator that does not exist, JobInvalid with every edge setting that does not."""
    for operator_id in overrides:
        model.operator(operator_id)
    if problems := _edge_problems(overrides):
        raise JobInvalid(problems)
    operators = [
        msgspec.structs.replace(op, parallelism=o.parallelism) if (o := overrides.get(op.id)) and o.parallelism is not None else op
        for op in model.operators
    ]
    edges = [_overridden(e, overrides.get(e.target)) for e in model.edges]
    chosen = model.parallelism if parallelism is None else parallelism
    return msgspec.structs.replace(model, operators=operators, edges=edges, parallelism=chosen)
