"""A stream job as one process holds it: the model, and the live functions, sources and sinks it names.

Built by a registered factory (``millstream.Pipelines.define``) in the submitting process and again on every node; only the model travels.
What must never happen here: code that is looked up by anything but a registered name, a plan that runs although it is not the one that
was submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .connectors import Json, Sink, Source
from .errors import ConfigurationError, FingerprintMismatch, UnknownFactory
from .model import Override, StreamModel, with_overrides
from .plan import PartitionedPlan, compile_plan
from .values import TypeRegistry


@dataclass(frozen=True)
class Pipeline:
    """A model with what it needs to run. ``functions`` is keyed by (operator id, role)."""

    model: StreamModel
    functions: Mapping[tuple[str, str], Callable[..., Any]]
    sources: Mapping[str, Source]
    sinks: Mapping[str, Sink]
    types: TypeRegistry
    problems: tuple[str, ...] = ()

    def function(self, operator: str, role: str) -> Callable[..., Any]:
        return self.functions[operator, role]


PipelineFactory = Callable[[dict[str, Json]], Pipeline]
"""Builds the pipeline of a job from its config."""


class FactoryRegistry:
    """Factories by name, as registered by the user's application in this process. Names come from data, code never does."""

    def __init__(self) -> None:
        self._factories: dict[str, PipelineFactory] = {}

    def register(self, name: str, factory: PipelineFactory) -> None:
        if name in self._factories:
            raise ConfigurationError(f"a pipeline named {name!r} is registered already: choose another name")
        self._factories[name] = factory

    def names(self) -> list[str]:
        return sorted(self._factories)

    def build(self, name: str, config: dict[str, Json]) -> Pipeline:
        factory = self._factories.get(name)
        if factory is None:
            known = ", ".join(self.names()) or "none"
            raise UnknownFactory(f"no pipeline named {name!r} is registered here (registered: {known}); import the module that defines it")
        return factory(config)


def planned(pipeline: Pipeline, parallelism: int | None, overrides: dict[str, Override]) -> tuple[StreamModel, PartitionedPlan]:
    """Apply plan-time changes and plan. Raises JobInvalid."""
    model = with_overrides(pipeline.model, parallelism, overrides)
    return model, compile_plan(model)


def rebuilt(
    registry: FactoryRegistry, factory: str, config: dict[str, Json], parallelism: int | None, overrides: dict[str, Override], expected: str
) -> tuple[Pipeline, StreamModel, PartitionedPlan]:
    """Build and plan a submitted job again in this process and compare fingerprints. Raises FingerprintMismatch showing both."""
    pipeline = registry.build(factory, config)
    model, plan = planned(pipeline, parallelism, overrides)
    if plan.fingerprint() != expected:
        raise FingerprintMismatch(
            f"pipeline {factory!r} planned here has fingerprint {plan.fingerprint()}, it was submitted with {expected}: "
            "deploy the same code (and the factory's version) to submitter and nodes"
        )
    return pipeline, model, plan
