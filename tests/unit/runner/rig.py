"""One subtask runner whose neighbours the test plays: node, channels, storage, background lanes and clock.

Used by the tests beside it. What must never happen here: a wait, or a rule of the runner said over again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.unit.tasks.parts import HandChannel, HandLanes, HandTransport, at_ease, output_edge, quiet_world

from millstream import JobBuilder, Pipelines
from millstream.testing.outside import SimStorage
from millstream.testing.world import SimClock
from millstream_schema.channels import Frame
from millstream_schema.connectors import PROOF
from millstream_schema.control import Ack, Deployment, DeployMode, EpochKind, NodeMessage, Run, SubtaskMessage, Trigger
from millstream_schema.manifest import SplitState, SubtaskSnapshot
from millstream_schema.model import Partitioning
from millstream_schema.pipeline import planned
from millstream_schema.plan import Subtask
from millstream_schema.settings import StreamSettings
from millstream_tasks.operators.base import Batch
from millstream_tasks.runner.environment import Environment
from millstream_tasks.runner.outputs import Outputs
from millstream_tasks.runner.subtask import SubtaskRunner

Define = Callable[[JobBuilder], None]
M = TypeVar("M")


class Rig:
    """A runner of subtask ``subtask`` of the pipeline that ``define`` builds; ``splits`` are those it owns from the start."""

    def __init__(
        self,
        define: Define,
        subtask: str,
        *,
        splits: Sequence[SplitState] = (),
        restored: SubtaskSnapshot | None = None,
        epoch: int = 0,
        generation: int = 1,
        parallelism: int | None = None,
        guarantee: str = "STRICT_EXACTLY_ONCE",
        source_batch: int = 5,
        transport: HandTransport | None = None,
    ) -> None:
        pipelines = Pipelines()
        pipelines.define("job", guarantee=guarantee)(lambda job, _config: define(job))
        pipeline = pipelines.build("job")
        model, self.plan = planned(pipeline, parallelism, {})
        self.world = quiet_world()
        self.lanes = HandLanes()
        self.transport = transport or HandTransport()
        self.reports: list[SubtaskMessage] = []
        self.splits = list(splits)
        deployment = Deployment(
            job="j", factory="job", config={}, parallelism=parallelism, overrides={}, plan_fingerprint="", generation=generation, attempt="a",
            subtask=subtask, mode=DeployMode.RUN, settings=StreamSettings(source_batch=source_batch), restore_epoch=epoch, restored=[] if restored is None else [restored],
            splits=self.splits, known_splits={},
        )  # fmt: skip
        storage = SimStorage(self.world)
        storage.put(f"{PROOF}/j", b"the coordinator's")
        environment = Environment(self.transport, storage, SimClock(self.world), self.lanes, self.reports.append, lambda: None, "memory")
        self.runner = SubtaskRunner(deployment, pipeline, model, self.plan, environment)

    def downstream(self) -> list[HandChannel]:
        """The channels that begin here, which whoever reads them has made; in the order of the plan."""
        here = Subtask.parse(self.runner.deployment.subtask)
        mine = {e.id for e, _ in self.plan.outputs(here)}
        channels = [c for c in self.plan.channels("j", self.runner.deployment.generation) if c.edge in mine and c.source == here.index]
        return [self.transport.channels.setdefault(c.name(), HandChannel()) for c in channels]

    def upstream(self) -> list[HandChannel]:
        """The channels that end here, once it has started."""
        return [self.transport.channels[c.channel.name()] for c in self.runner.inputs]

    def running(self) -> Rig:
        """Started, READY, told to run."""
        self.downstream()
        self.runner.start()
        self.runner.step()
        self.tell(Run())
        return self

    def tell(self, *messages: NodeMessage) -> None:
        """Messages of the node, and the step that takes them."""
        for message in messages:
            self.runner.control(message)
        self.runner.step()

    def trigger(self, epoch: int, kind: EpochKind = EpochKind.CHECKPOINT, complete: bool = False) -> None:
        self.tell(Trigger(epoch, kind, self.splits, complete))

    def background(self) -> None:
        """Everything that waits on a lane, and the step that takes the results."""
        while self.lanes.waiting:
            self.lanes.run()
        self.runner.step()

    def after(self, seconds: float) -> None:
        """Time passes, then a step."""
        self.world.now += seconds
        self.runner.step()

    def said(self, kind: type[M]) -> list[M]:
        """Reports of one kind, oldest first."""
        return [r for r in self.reports if isinstance(r, kind)]

    def snapshot(self, epoch: int) -> SubtaskSnapshot:
        return next(a.snapshot for a in self.said(Ack) if a.epoch == epoch)


def split(name: str, cursor: Any = None, operator: str = "in") -> SplitState:
    return SplitState(operator, name, None, cursor, False)


def spoken(seed: str, epochs: int = 5) -> list[Frame]:
    """What one sender says: records, watermarks, statuses and barriers in any order, as the product's own outputs number and encode them."""
    rng, transport = random.Random(seed), HandTransport()
    outputs = Outputs(
        [output_edge(Partitioning.REBALANCE, 1, transport=transport, objects=False, capacity=10_000, batch_records=3)], at_ease
    )
    mark = epoch = 0
    for n in range(60):
        what = rng.choice("rrrrwwsb")
        if what == "r":
            outputs.emit(Batch([n], [n]))
        elif what == "w":
            mark += rng.randint(1, 5)
            outputs.emit_watermark(mark)
        elif what == "s":
            outputs.emit_status(rng.random() < 0.7)
        elif epoch < epochs:
            epoch += 1
            outputs.barrier(epoch, "checkpoint")
    while epoch < epochs:
        epoch += 1
        outputs.barrier(epoch, "checkpoint")
    outputs.flush()
    outputs.pump()
    (wire,) = transport.channels.values()
    return list(wire.sent)
