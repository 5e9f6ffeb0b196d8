"""What is watched of durable tasks, as Prometheus metrics: read from the rows, like those of jobs and schedules.

Registered by ``metrics``. What must never happen here: a label made from a task's data; a scrape whose cost grows with the number of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millstream_schema.store.census import census
from millstream_schema.store.database import Database

COUNTED = 100_000
"""Open tasks one scrape counts."""


class TaskMetrics(Collector):
    """Open tasks of a namespace by queue and state; those in review are among them."""

    def __init__(self, database: Database, namespace: str = "default", limit: int = COUNTED) -> None:
        self._db = database
        self._namespace = namespace
        self._limit = limit

    def collect(self) -> Iterable[Metric]:
        found = self._db.read(lambda tx: census(tx, self._namespace, self._limit))
        tasks = GaugeMetricFamily("millstream_tasks", "Tasks that are not over, by queue and state", labels=["queue", "state"])
        for (queue, state), count in sorted(found.open.items()):
            tasks.add_metric([queue, state], count)
        waiting = GaugeMetricFamily("millstream_tasks_waiting_seconds", "How long the first task in line has been due", labels=["queue"])
        for queue, micros in sorted(found.waiting_us.items()):
            waiting.add_metric([queue], micros / 1e6)
        truncated = GaugeMetricFamily(
            "millstream_tasks_truncated", "1 when there are more tasks than one scrape counts", value=float(not found.whole)
        )
        yield from (tasks, waiting, truncated)
