"""What is watched of schedules, as Prometheus metrics: read from the rows, like those of jobs.

Registered by ``metrics``. What must never happen here: a label made from a task's data; a value that was not read.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millstream_schema.durable.schedules import ScheduleRow, ScheduleState
from millstream_schema.store import fires, schedules
from millstream_schema.store.database import Database, Transaction

SCHEDULE_COUNTERS = {
    "fired": "Fires whose task was submitted",
    "skipped": "Fires not run as another run was not over",
    "missed": "Fires not run as nobody looked in time",
    "late": "Fires that ran later than their tolerance",
}
BEHIND = "Seconds since the fire that should have come; 0 while fires are in time"
IN_REVIEW = "Runs in review: they count as running for the overlap rule"


class ScheduleMetrics(Collector):
    """Reads the schedules of a namespace at each scrape, at most ``limit``."""

    def __init__(self, database: Database, namespace: str = "default", limit: int = 500) -> None:
        self._db = database
        self._namespace = namespace
        self._limit = limit

    def collect(self) -> Iterable[Metric]:
        rows, behind, review = self._db.read(self._read)
        state = GaugeMetricFamily("millstream_schedule_state", "1 for the state the schedule is in", labels=["schedule", "state"])
        late = GaugeMetricFamily("millstream_schedule_behind_seconds", BEHIND, labels=["schedule"])
        unknown = GaugeMetricFamily("millstream_schedule_in_review", IN_REVIEW, labels=["schedule"])
        counters = {n: CounterMetricFamily(f"millstream_schedule_{n}", text, labels=["schedule"]) for n, text in SCHEDULE_COUNTERS.items()}
        for row in rows:
            for value in ScheduleState:
                state.add_metric([row.name, value.value], float(row.state is value))
            late.add_metric([row.name], behind.get(row.name, 0) / 1e6)
            unknown.add_metric([row.name], review.get(row.name, 0))
            for name, family in counters.items():
                family.add_metric([row.name], getattr(row, name))
        yield from (state, late, unknown, *counters.values())

    def _read(self, tx: Transaction) -> tuple[list[ScheduleRow], dict[str, int], dict[str, int]]:
        behind = {b.name: b.late_us for b in schedules.late(tx, self._limit) if b.namespace == self._namespace}
        return schedules.every(tx, self._namespace, self._limit), behind, fires.in_review(tx, self._namespace)
