"""The workloads: each a pipeline, its batch reference and what an outside reader may see at any moment.

Run by ``test_promise.py`` and ``replay.py``. What must never happen here: a reference that is computed by the code under test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from tests.simulation.base import Workload, counting, whole

from millstream.builder import JobBuilder
from millstream_schema.model import Guarantee
from millstream_tasks.sinks.memory import CollectSink


def visible_is_part_of(workload: Workload, reference: Counter[Any], sink: str = "out") -> None:
    """What is visible is a part of the reference: nothing twice, nothing wrong."""
    extra = Counter(workload.target.values(sink)) - reference
    assert not extra, f"seed {workload.seed}: visible and not in the reference, or too often: {sorted(extra.items())[:10]}"


def visible_is(workload: Workload, reference: Counter[Any], sink: str = "out") -> None:
    visible_is_part_of(workload, reference, sink)
    missing = reference - Counter(workload.target.values(sink))
    assert not missing, f"seed {workload.seed}: missing at the end: {sorted(missing.items())[:10]}"


class Rolling(Workload):
    """A keyed rolling count over three splits at parallelism two: per key exactly 1..n."""

    name = "rolling"
    splits: ClassVar[int] = 3
    per_split: ClassVar[int] = 300
    rate: ClassVar[float] = 20.0
    keys: ClassVar[int] = 7

    def value(self, split: int, position: int) -> tuple[str, int]:
        return f"k{(position * 5 + split) % self.keys}", position

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(self.splits, self.per_split, self.rate, self.value), uid="records")
        records.key_by(lambda r: r[0]).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(CollectSink("out", self.target), uid="out")

    @property
    def reference(self) -> Counter[Any]:
        totals = Counter(r[0] for r in whole(self.splits, self.per_split, self.value))
        return Counter((key, n) for key, total in totals.items() for n in range(1, total + 1))

    def verify(self) -> None:
        visible_is_part_of(self, self.reference)

    def final(self) -> None:
        visible_is(self, self.reference)


WORKLOADS: dict[str, type[Workload]] = {w.name: w for w in (Rolling,)}
_ = Guarantee
