"""An embedded cluster whose rows and blobs a test looks at, and one pipeline on it.

Used by the tests beside it. What must never happen here: a wait that is not for something the rows say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from millstream import EmbeddedCluster, JobBuilder, Pipelines
from millstream_coordinator.operations import Submission
from millstream_schema.manifest import EpochManifest
from millstream_schema.plan import PartitionedPlan
from millstream_schema.settings import StreamSettings
from millstream_schema.states import Desired
from millstream_schema.store import epochs, jobs
from millstream_schema.store.rows import JobRow
from millstream_schema.values import TypeRegistry
from millstream_tasks.opening import open_storage
from millstream_tasks.segments import Segment
from millstream_tasks.sinks.memory import CollectSink, CollectTarget
from millstream_tasks.sources.memory import CollectionSource, GeneratorSource

FAST = StreamSettings(epoch_interval_ms=30)
WORDS = [f"w{i % 7}" for i in range(300)]


class Cluster(EmbeddedCluster):
    """An embedded cluster whose rows and blobs a test looks at."""

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
        """Wait for what the rows come to say."""
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
            pause.wait(0.01)

    def row(self, job: str) -> JobRow:
        found = self.database.read(lambda tx: jobs.read_job(tx, job))
        assert found is not None
        return found

    def plan(self, job: str) -> PartitionedPlan:
        return msgspec.json.decode(self.row(job).plan, type=PartitionedPlan)

    def manifest(self, job: str, epoch: int = 0) -> EpochManifest:
        wanted = epoch or self.row(job).newest_durable
        return self.database.read(lambda tx: epochs.read_manifest(tx, job, wanted))

    def segments(self, manifest: EpochManifest) -> Iterator[tuple[str, Segment]]:
        """(subtask, opened segment) of an epoch."""
        storage = open_storage((self._directory / "checkpoints").as_uri())
        for snapshot in manifest.subtasks:
            for handle in snapshot.segments:
                yield snapshot.subtask, Segment(storage.get(handle), handle.key, TypeRegistry())

    def durable(self, job: str, epochs_: int = 1) -> None:
        at = self.row(job).newest_durable
        self.until(lambda: self.row(job).newest_durable >= at + epochs_, "a durable epoch")

    def stop(self, job: str, desired: Desired, savepoint: str = "") -> JobRow:
        self.operations.stop(job, desired, savepoint)
        self.hint(job)
        return self.wait(job, 20)

    def resume(self, job: str, pipelines: Pipelines, **changes: Any) -> None:
        row = self.row(job)
        self.operations.resume(
            job, pipelines.build(row.factory), Submission(job=job, name=row.name, factory=row.factory, settings=FAST, **changes)
        )
        self.hint(job)


class Job:
    """One pipeline, its target and its cluster."""

    def __init__(
        self, path: Path, define: Callable[[JobBuilder, CollectTarget], None], *, target: CollectTarget | None = None, **options: Any
    ) -> None:
        self.target = target or CollectTarget()
        self.pipelines = Pipelines()
        self.pipelines.define("job", **options)(lambda job, _config: define(job, self.target))
        self.cluster = Cluster(self.pipelines, directory=path, encode=True)

    @property
    def out(self) -> list[Any]:
        return self.target.values("out")

    def submit(self, **changes: Any) -> str:
        return self.cluster.submit("job", **{"settings": FAST, **changes})


def counted(job: JobBuilder, target: CollectTarget) -> None:
    """Words to rolling counts."""
    words = job.source(CollectionSource(WORDS, splits=3), uid="words")
    words.key_by(str).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(CollectSink("out", target), uid="out")


EXPECTED = sorted((w, n + 1) for w in set(WORDS) for n in range(WORDS.count(w)))


def endless(rate: float = 2000.0, splits: int = 2) -> GeneratorSource:
    """Positions for ever."""
    return GeneratorSource(
        lambda split, at, limit: [(split, i) for i in range(at, at + limit)], splits, "endless", rate=rate, bounded=False
    )


def saved(cluster: Cluster, job: str) -> Sequence[tuple[str, str]]:
    return [(s["id"], s["state"]) for s in cluster.database.read(lambda tx: epochs.savepoints(tx, job))]
