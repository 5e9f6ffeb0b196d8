"""``Pipelines``: the one object a user builds to name stream jobs, passed down to everything that runs them.

Imported by subtask processes: nothing heavy here. What must never happen here: a pipeline built by anything but its registered function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pydantic

from millstream_schema.connectors import Json
from millstream_schema.errors import ConfigurationError, JobInvalid
from millstream_schema.model import Guarantee
from millstream_schema.pipeline import FactoryRegistry, Pipeline

from .builder import JobBuilder

PipelineFunction = Callable[[JobBuilder, Any], None]


class Pipelines:
    """Pipeline functions by name.

    ::

        pipelines = Pipelines()

        @pipelines.define("wordcount", version=1)
        def wordcount(job, config):
            words = job.source(CollectionSource(["to", "be"]), uid="words")
            words.key_by(str).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(PrintSink(), uid="out")
    """

    def __init__(self) -> None:
        self.registry = FactoryRegistry()

    def define(
        self,
        name: str,
        *,
        version: int = 1,
        guarantee: Guarantee | str = Guarantee.STRICT_EXACTLY_ONCE,
        parallelism: int = 1,
        shard_count: int = 128,
        config: type[pydantic.BaseModel] | None = None,
    ) -> Callable[[PipelineFunction], PipelineFunction]:
        """Register the decorated ``function(job, config)`` under ``name``. ``config``: a pydantic model the job's config is validated by; without it a dict.

        Raises ConfigurationError for an unknown guarantee or a name that is taken.
        """
        try:
            chosen = Guarantee(guarantee)
        except ValueError:
            raise ConfigurationError(f"unknown guarantee {guarantee!r}; known: {', '.join(Guarantee)}") from None

        def register(function: PipelineFunction) -> PipelineFunction:
            if not inspect.isfunction(function):
                raise ConfigurationError(f"{function!r} is not a function")

            def factory(values: dict[str, Json]) -> Pipeline:
                job = JobBuilder(name, version, chosen, parallelism, shard_count)
                function(job, _validated(name, config, values))
                return job.build()

            self.registry.register(name, factory)
            return function

        return register

    def build(self, name: str, config: dict[str, Json] | None = None) -> Pipeline:
        """Build a pipeline here; raises UnknownFactory, JobInvalid, ConfigurationError."""
        return self.registry.build(name, config or {})


def _validated(name: str, model: type[pydantic.BaseModel] | None, values: dict[str, Json]) -> Any:
    if model is None:
        return values
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as exc:
        problems = [
            f"config of pipeline {name!r}: {'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in exc.errors(include_input=False)
        ]
        raise JobInvalid(problems) from None
