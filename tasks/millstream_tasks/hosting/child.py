"""A hosted subtask: its child, and what that child has been told of its job's truth.

Called by the node for every row it reads and every message that comes. What must never happen here: a trigger, an abort or an epoch told twice to one
attempt, anything but its splits told to a job that does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from millstream_schema.control import Abort, AssignSplits, Deployment, Durable, NodeMessage, Run, Stats, SubtaskMessage, Trigger
from millstream_schema.plan import Subtask
from millstream_schema.store import registry, truth

from .reports import Write


class Child(Protocol):
    """A running subtask, as its node sees it."""

    def send(self, message: NodeMessage) -> None:
        """Never blocks, never raises: a child that is gone is noticed by its end."""
        ...

    def kill(self) -> None:
        """End it now, whatever it does."""
        ...


class Launcher(Protocol):
    """Starts subtasks."""

    def launch(self, deployment: Deployment, deliver: Callable[[SubtaskMessage | None], None]) -> Child:
        """Start one. ``deliver`` may be called from any thread; None means that the child has ended."""
        ...


@dataclass
class Hosted:
    """One subtask a node runs. ``child`` is None once it has ended: the entry stays until the rows agree."""

    deployment: Deployment
    child: Child | None
    answered: float
    heard: bool = False
    """It has answered once. Before, it imports and restores, and the job's start limit bounds it."""
    ready: bool = False
    told_run: bool = False
    told_epoch: int = 0
    told_durable: int = 0
    told_splits: int = -1
    told_aborts: set[int] = field(default_factory=set)
    stats: Stats | None = None
    written: int = -1

    def send(self, message: NodeMessage) -> None:
        if self.child is not None:
            self.child.send(message)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    def follow(self, job: truth.JobTruth) -> None:
        """Tell the child what of its job's truth it has not heard yet."""
        child = self.child
        if child is None:
            return
        subtask = Subtask.parse(self.deployment.subtask)
        source = subtask.vertex in job.plan.sources
        if source and self.ready and self.told_splits != job.job.splits_rev:
            self.told_splits = job.job.splits_rev
            child.send(AssignSplits(job.owned(subtask), job.all_assigned(subtask)))
        if not job.running or not self.ready:
            return
        if not self.told_run:
            self.told_run = True
            child.send(Run())
        for epoch in job.aborted:
            if epoch not in self.told_aborts:
                self.told_aborts.add(epoch)
                child.send(Abort(epoch))
        if job.durable > self.told_durable:
            self.told_durable = job.durable
            child.send(Durable(job.durable))
        if source and job.trigger is not None and job.trigger[0] > self.told_epoch:
            self.told_epoch = job.trigger[0]
            child.send(Trigger(job.trigger[0], job.trigger[1], job.owned(subtask), job.all_assigned(subtask)))

    def progress(self) -> Write | None:
        """What was seen of the attempt since the last call. A busy one counts as progress: it is in user code."""
        s = self.stats
        if s is None:
            return None
        amount = self.written = s.progress if not s.busy else max(s.progress, self.written + 1)
        d, values = self.deployment, msgspec.json.encode(s.values).decode()
        return lambda tx: registry.progress_assignment(tx, d.job, d.generation, d.subtask, d.attempt, amount, values)
