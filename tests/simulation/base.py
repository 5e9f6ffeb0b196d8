"""What every simulated workload has in common: a job, a batch reference, invariants that hold at every moment, and probes.

Used by the workloads of this tier and by the replay command. What must never happen here: an invariant that is looked at only at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from millstream.builder import JobBuilder
from millstream.pipelines import Pipelines
from millstream.testing.simulation import SETTINGS, Faults, SimTarget, Simulation
from millstream_coordinator import coordinator
from millstream_coordinator.operations import Submission
from millstream_schema.connectors import Committable
from millstream_schema.manifest import EpochManifest
from millstream_schema.model import Guarantee
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import Desired, JobState
from millstream_schema.store import epochs
from millstream_schema.store.database import Transaction
from millstream_schema.store.rows import EpochRow
from millstream_tasks.sources.memory import GeneratorSource

coordinator.COLLECT_EVERY = 2.0  # everything is an order of magnitude faster here, collecting too
NO_LIMIT = RestartPolicy(failures=1_000_000, stalls=1_000_000, delay_ms=50, max_delay_ms=400)
LIVE = 15.0
"""A run that ends earlier, in simulated seconds, has not met its faults."""


class Workload:
    """One seeded run of one job."""

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = Guarantee.STRICT_EXACTLY_ONCE
    parallelism: ClassVar[int] = 2
    nodes: ClassVar[int] = 2
    least_epochs: ClassVar[int] = 8
    least_under_faults: ClassVar[int] = 4
    seeds: ClassVar[int] = 30
    """How many seeds each run of the suite takes."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(f"{self.name}-{seed}")
        self.pipelines = Pipelines()
        self.pipelines.define(self.name, parallelism=self.parallelism, guarantee=self.guarantee)(lambda job, _config: self._build(job))
        self.sim = Simulation(seed, self.pipelines, faults or Faults.drawn(seed, 14.0), nodes=self.nodes, slots=12)
        self.target = SimTarget(self.sim.world, self._on_commit)
        self.settings = self.tuned(SETTINGS)
        self.job = f"{self.name}-{seed}"
        self._manifests: dict[tuple[str, int], set[str]] = {}
        self._seen = (0, 0, 0, 0)
        self._segments: dict[tuple[str, int], set[str]] = {}
        self._marks: dict[tuple[str, str], int] = {}
        self.prepare()

    # -- to be said by each workload -----------------------------------------------------------------------------------------------------

    def define(self, job: JobBuilder) -> None:
        """The pipeline."""
        raise NotImplementedError

    def prepare(self) -> None:
        """The batch reference."""
        raise NotImplementedError

    def verify(self) -> None:
        """What holds at every moment."""
        raise NotImplementedError

    def final(self) -> None:
        """What holds at the end."""
        raise NotImplementedError

    def live(self) -> None:
        """The life of the job."""
        self.start()
        self.finish()

    # -- running ---------------------------------------------------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """The whole run; what it met. Raises AssertionError when the promise is broken."""
        try:
            self.live()
            self.check()
            self.final()
            row = self.sim.job(self.job)
            assert self.sim.world.now >= LIVE, f"the job lived {self.sim.world.now} simulated seconds only"
            least = self.least_epochs if self.sim.world.faults.calm else self.least_under_faults  # while something is away there are none
            assert row.next_epoch > least, f"{row.next_epoch - 1} epochs only"
            self._rows_probes()
            assert not self.sim.world.probes["segment written twice with other content"]
        finally:
            self.sim.close()
        return +self.sim.world.probes

    def tuned(self, settings: StreamSettings) -> StreamSettings:
        """Settings of this seed: small windows, small batches, few retained manifests come up in some."""
        rng = self.rng
        return msgspec.structs.replace(
            settings, restart=NO_LIMIT, source_batch=rng.choice((1, 3, 5, 50)), retained=rng.choice((1, 2, 5)), max_segments=rng.choice((2, 4, 16)),
            epoch_interval_ms=rng.choice((500, 800, 1100)), max_uncommitted=rng.choice((2, 10)), incremental=rng.random() < 0.8,
        )  # fmt: skip

    def _build(self, job: JobBuilder) -> None:
        job.edges(capacity=2 + self.seed % 7, batch_records=1 + self.seed % 4, linger_ms=5)
        self.define(job)

    def submission(self, **changes: Any) -> Submission:
        return Submission(**{"job": self.job, "name": self.name, "factory": self.name, "settings": self.settings, **changes})

    def start(self, **changes: Any) -> None:
        self.sim.submit(self.submission(**changes))

    def finish(self, wanted: JobState = JobState.FINISHED) -> None:
        state = self.sim.run_to_end(self.job, check=self.check)
        assert state is wanted, f"seed {self.seed}: the job is {state}: {self.sim.job(self.job).reason}"
        self.settled()

    def settled(self) -> None:
        """A job that has ended with nothing pending has left no open transaction behind."""
        row = self.sim.job(self.job)
        if row.newest_committed == row.newest_durable:
            left = [s for s in self.target.staged() if s.job == self.job]
            assert not left, f"seed {self.seed}: {row.state} left staged output: {left}"

    def pass_time(self, moment: float, what: str) -> None:
        """Run to a moment, checking invariants."""

        def reached() -> bool:
            self.check()
            return self.sim.world.now >= moment

        self.sim.run_until(reached, moment - self.sim.world.now + 30, what)

    def stop(self, desired: Desired, savepoint: str = "") -> None:
        self.sim.operations.stop(self.job, desired, savepoint)

    # -- invariants ------------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants on rows, then the workload's own."""
        row = self.sim.job(self.job)
        now = (row.generation, row.term, row.newest_durable, row.newest_committed)
        assert all(a >= b for a, b in zip(now, self._seen)), (
            f"seed {self.seed}: generation, term, durable, committed went from {self._seen} to {now}"
        )
        assert row.newest_committed <= row.newest_durable < row.next_epoch
        self._seen = now
        kept = self.sim.database.read(self._kept)
        lost = [key for keys in kept for key in keys if key not in self.sim.storage.blobs]
        assert not lost, f"seed {self.seed}: a retained manifest references segments that were deleted: {lost}"
        self.verify()

    def _kept(self, tx: Transaction) -> list[set[str]]:
        """Keys of the segments of every retained manifest."""
        for epoch in (have := epochs.manifest_epochs(tx, self.job)):
            if (self.job, epoch) not in self._segments:
                self._segments[self.job, epoch] = {h.key for h in epochs.read_manifest(tx, self.job, epoch).handles()}
        return [self._segments[self.job, e] for e in have]

    def _on_commit(self, committable: Committable) -> None:
        """Nothing of an epoch is visible before a durable manifest lists it."""
        job = committable.id.split(":")[0]
        current, self.sim.world.current = self.sim.world.current, None
        try:
            known = self.sim.database.read(lambda tx: self._listed(tx, job))
        finally:
            self.sim.world.current = current
        self.sim.world.probes["aborted epoch subsumed by a later commit"] += (job, committable.epoch) not in known
        assert any(committable.id in ids for ids in known.values()), (
            f"seed {self.seed}: {committable.id} is committed and no durable manifest lists it"
        )

    def _listed(self, tx: Transaction, job: str) -> dict[tuple[str, int], set[str]]:
        """Ids of committables by durable epoch; those of manifests that were collected since are remembered."""
        for epoch in epochs.manifest_epochs(tx, job):
            if (job, epoch) not in self._manifests:
                manifest: EpochManifest = epochs.read_manifest(tx, job, epoch)
                self._manifests[job, epoch] = {c.id for c in manifest.committables()}
                self._watermarks(manifest)
        return self._manifests

    def _watermarks(self, manifest: EpochManifest) -> None:
        """Watermarks never go back from one durable epoch to a later one, recoveries between them or not."""
        for snapshot in manifest.subtasks:
            for operator, meta in snapshot.meta.items():
                mark = meta.get("watermark") if isinstance(meta, dict) else None
                if isinstance(mark, int):
                    key = (f"{manifest.job}/{len(manifest.subtasks)}/{snapshot.subtask}", operator)
                    before = self._marks.get(key, mark)
                    assert mark >= before, (
                        f"seed {self.seed}: watermark of {key} went back from {before} to {mark} in epoch {manifest.epoch}"
                    )
                    self._marks[key] = mark

    def _rows_probes(self) -> None:
        """What only the rows tell."""
        rows: list[EpochRow] = self.sim.database.read(lambda tx: epochs.list_epochs(tx, self.job, 1000))
        causes = msgspec.json.decode(self.sim.job(self.job).causes, type=dict[str, int])
        probes = self.sim.world.probes
        for cause, n in causes.items():
            probes[f"restart: {cause}"] += n
        for row in rows:
            if row.state == "ABORTED":
                acks = self.sim.database.read(lambda tx, e=row.epoch: epochs.ack_marks(tx, self.job, e))  # type: ignore[misc]
                probes["epoch aborted"] += 1
                probes["epoch aborted after some acknowledgements"] += any(not a.declined for a in acks)
                probes["epoch declined"] += any(a.declined for a in acks)
            probes[f"terminal epoch: {row.kind}"] += row.kind in ("final", "drain", "suspend")


def counting(
    splits: int,
    per_split: int,
    rate: float,
    value: Callable[[int, int], Any],
    *,
    bounded: bool = True,
    name: str = "count",
    timestamp: Any = None,
) -> GeneratorSource:
    """A paced source: ``value(split, position)`` for each position below ``per_split``."""

    def make(split: int, position: int, limit: int) -> list[Any] | None:
        if position >= per_split:
            return None if bounded else []
        return [value(split, i) for i in range(position, min(position + limit, per_split))]

    return GeneratorSource(make, splits, name, rate=rate, bounded=bounded, timestamp=timestamp)


def whole(splits: int, per_split: int, value: Callable[[int, int], Any]) -> list[Any]:
    """Everything such a source brings, for a batch reference."""
    return [value(s, i) for s in range(splits) for i in range(per_split)]
