"""The parts of one subtask, made from its deployment and the plan.

Used by the runner while it starts. What must never happen here: a record read, a channel connected; anything that another subtask shares but the user's
functions.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream_schema.channels import ChannelId
from millstream_schema.connectors import Committable, CommittingWriter, ConnectorContext, SinkWriter
from millstream_schema.control import Deployment
from millstream_schema.errors import JobInvalid
from millstream_schema.model import EdgeMode, StreamModel
from millstream_schema.pipeline import Pipeline
from millstream_schema.plan import PartitionedPlan, PlanEdge, Subtask

from ..chain import Chain, build_chain, key_function
from ..requirements import unmet
from .discovery import Discovery
from .environment import Environment
from .feeding import SourceFeed
from .inputs import Alignment, InputChannel
from .outputs import OutputChannel, OutputEdge, Outputs
from .participants import SinkParticipants, writer_problems
from .reading import SourceDriver
from .restoring import load_operators, restored_committables, restored_participants, same_shape
from .snapshotting import Snapshotter


class Assembly:
    """Makes each part once, in the order in which the runner asks. ``guard`` raises LeaseExpired."""

    def __init__(
        self,
        deployment: Deployment,
        pipeline: Pipeline,
        model: StreamModel,
        plan: PartitionedPlan,
        environment: Environment,
        guard: Callable[[], None],
    ) -> None:
        self.subtask = Subtask.parse(deployment.subtask)
        self.vertex = plan.vertex(self.subtask.vertex)
        self._deployment = deployment
        self._pipeline = pipeline
        self._model = model
        self._plan = plan
        self._env = environment
        self._guard = guard

    def problems(self) -> list[str]:
        """What the job requires and this node does not have."""
        return [f"{self.subtask.id}: {p}" for p in unmet(self._model, self._deployment.job, self._env.storage, self._env.transport_kind)]

    def context(self, operator: str) -> ConnectorContext:
        d = self._deployment
        return ConnectorContext(
            d.job,
            operator,
            self.subtask.index,
            self.vertex.parallelism,
            d.generation,
            self._guard,
            self._env.clock.now_ms,
            self._env.lock_timeout,
        )

    def writers(self) -> dict[str, SinkWriter]:
        """The sinks' writers, opened, which raises the fences of their targets."""
        sinks = [o for o in self.vertex.operators if self._model.operator(o).kind == "sink"]
        return {o: self._pipeline.sinks[o].open(self.context(o)) for o in sinks}

    def writer_problems(self, writers: dict[str, SinkWriter]) -> list[str]:
        """What the sinks claim and their writers cannot do."""
        return writer_problems(self._model, writers)

    def taking(self, writers: dict[str, SinkWriter]) -> SinkParticipants:
        """The writers that take part in epochs, given back what they had saved."""
        d = self._deployment
        made = SinkParticipants(writers, self.subtask.index, self.vertex.parallelism)
        made.restore(d.restore_epoch, restored_participants(d))
        return made

    def committables(self, writers: dict[str, CommittingWriter]) -> list[Committable]:
        """Those of the restored epoch that fall to this subtask."""
        return restored_committables(self._deployment, self.vertex, set(writers))

    def outputs(self) -> Outputs:
        """The edges that begin here. Raises JobInvalid for one that this environment cannot carry."""
        d = self._deployment
        edges = []
        for edge, targets in self._plan.outputs(self.subtask):
            ids = [ChannelId(d.job, d.generation, edge.id, self.subtask.index, t) for t in targets]
            objects = self._passes_objects(edge)
            channels = [OutputChannel(c, edge, self._pipeline.types, objects) for c in ids]
            key = key_function(self._model, self._pipeline, edge.spec.target) if edge.spec.partitioning == "HASH" else None
            edges.append(OutputEdge(edge, channels, key, self._plan.shard_count))
        return Outputs(edges, self._guard)

    def _passes_objects(self, edge: PlanEdge) -> bool:
        """Whether the edge hands objects over instead of encoding them. Raises JobInvalid for a queue between processes."""
        config = edge.spec.config
        if config.mode is EdgeMode.BLOCKING_QUEUE and self._env.transport_kind != "memory":
            raise JobInvalid([f"edge {edge.spec.id!r}: mode BLOCKING_QUEUE needs both ends in one process; use CREDIT_BASED"])
        return self._env.objects and not config.verify_serialization and config.mode is not EdgeMode.CREDIT_BASED

    def chain(self, writers: dict[str, SinkWriter], outputs: Outputs) -> Chain:
        return build_chain(self._model, self.vertex, self._pipeline, writers, outputs, self._env.clock.now_ms)

    def restored(self, chain: Chain) -> Chain:
        """``chain`` with the state of the restored epoch; its watermark starts where the restored assigner is."""
        load_operators(chain.operators, self._deployment, self._plan, self._env.storage, self._pipeline.types)
        return Chain(chain.operators, chain.output)

    def snapshotter(self, chain: Chain) -> Snapshotter:
        d = self._deployment
        made = Snapshotter(
            chain.operators,
            self._env,
            self._pipeline.types,
            d.settings,
            self._plan.shards(self.subtask),
            self._plan.shard_count,
            d.job,
            f"{self.subtask.vertex}-{self.subtask.index}",
        )
        if (own := same_shape(d)) is not None:
            made.restored(own.segments)
        return made

    def feed(self, chain: Chain, outputs: Outputs, counters: dict[str, int]) -> SourceFeed | None:
        """The source; None when none is read here."""
        head = self._model.operator(self.vertex.operators[0])
        if head.kind != "source":
            return None
        d = self._deployment
        source = self._pipeline.sources[head.id]
        driver = SourceDriver(head, source, self.context(head.id), restored_participants(d), d.restore_epoch)
        discovery = None
        if self.subtask.index == 0:
            known = set(d.known_splits.get(head.id, ()))
            discovery = Discovery(head.id, source, known, self._env, d.settings.discovery_interval_ms / 1000)
        return SourceFeed(driver, discovery, chain, outputs, self._env, d.settings, counters)

    def inputs(self) -> list[InputChannel]:
        """The channels that end here, created."""
        d = self._deployment
        made = []
        for edge, index in self._plan.inputs(self.subtask):
            channel = ChannelId(d.job, d.generation, edge.id, index, self.subtask.index)
            reader = self._env.transport.create(channel, edge.spec.config.capacity)
            made.append(InputChannel(channel, reader, self._pipeline.types))
        return made

    def alignment(self, inputs: list[InputChannel]) -> Alignment:
        return Alignment(inputs, self._model.guarantee.aligned, self._deployment.restore_epoch, self._env.clock)
