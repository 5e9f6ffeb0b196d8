"""What is watched of stream jobs, as Prometheus metrics: a fixed catalogue with bounded labels, read from the rows.

Called by ``millstream jobs metrics`` and by whoever mounts the collector. What must never happen here: a label made from user data, a value that was not read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millstream_coordinator.status import describe, describe_nodes
from millstream_schema.states import JobState
from millstream_schema.store import jobs
from millstream_schema.store.database import Database, Transaction

from .schedule_metrics import ScheduleMetrics
from .task_metrics import TaskMetrics

JOB_GAUGES = {
    "generation": "Generation of the job",
    "term": "Coordinator term the job was last written under",
    "newest_durable": "Newest durable epoch",
    "newest_committed": "Newest committed epoch",
    "uncommitted_epochs": "Durable epochs that are not committed",
}
SUBTASK_COUNTERS = {
    "records_in": "Records read or received",
    "records_out": "Records sent on",
    "bytes_in": "Bytes received",
    "bytes_out": "Bytes sent",
    "late": "Records past their allowed lateness",
    "fenced": "Envelopes of older generations, dropped",
    "dropped": "Repeated envelopes, and barriers of epochs that are over here: dropped",
    "dead_lettered": "Undecodable records sent to the dead-letter output",
    "skipped": "Undecodable records passed over",
    "busy_ms": "Milliseconds spent working",
    "idle_ms": "Milliseconds without input",
    "backpressured_ms": "Milliseconds waiting for credit",
    "snapshots": "Snapshots cut",
    "declined": "Snapshots that could not be stored",
}
SUBTASK_GAUGES = {
    "watermark": "Event-time watermark, UTC ms",
    "watermark_lag_ms": "Wall clock minus watermark, ms",
    "source_lag_ms": "Age of the newest record when it was read, ms; sources that stamp their records",
    "state_bytes": "Size of the newest snapshot, bytes",
    "longest_cut_ms": "Longest synchronous part of a snapshot, ms",
}
ALIGNMENT = "First barrier to last of the newest epoch that aligned, at the subtask that took longest"
NODE_COUNTERS = {
    "stale_hints": "Hints of an older coordinator, or for an earlier start of the node: not followed",
    "hints_dropped": "Hints and task events not sent, as the broker was away",
    "set_aside": "Jobs this process's coordinator set aside for a while, as handling them failed",
    "defects": "Of these, by an error that nobody foresaw: please report it",
    "tasks_set_aside": "Sessions and permits of durable tasks this process's coordinator set aside",
    "ends_applied": "Ends of attempts this worker session wrote",
    "ends_duplicate": "Ends that had been written already, as after an answer that was lost",
    "ends_stale": "Ends of attempts that were not the valid one any more: kept as evidence",
    "schedules_held": "Times this process's coordinator failed on a schedule and held it",
}


class StreamMetrics(Collector):
    """Reads every live job of a namespace at each scrape, at most ``limit``; a scrape that leaves jobs out says so."""

    def __init__(self, database: Database, namespace: str = "default", limit: int = 200) -> None:
        self._db = database
        self._namespace = namespace
        self._limit = limit

    def collect(self) -> Iterable[Metric]:
        described, nodes, truncated = self._db.read(self._read)
        yield GaugeMetricFamily("millstream_jobs_truncated", "Jobs left out of this scrape", value=truncated)
        yield from self._jobs(described)
        yield from self._subtasks(described)
        yield from self._nodes(nodes)

    def _read(self, tx: Transaction) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
        rows = [j for j in jobs.list_jobs(tx, self._namespace) if not j.state.ended]
        return [describe(tx, j) for j in rows[: self._limit]], describe_nodes(tx), max(0, len(rows) - self._limit)

    def _jobs(self, described: list[dict[str, Any]]) -> Iterable[Metric]:
        state = GaugeMetricFamily("millstream_job_state", "1 for the state the job is in", labels=["job", "state", "guarantee"])
        restarts = CounterMetricFamily("millstream_job_restarts", "Restarts by cause", labels=["job", "cause"])
        duration = GaugeMetricFamily("millstream_epoch_duration_seconds", "Trigger to durable of the newest durable epoch", labels=["job"])
        size = GaugeMetricFamily("millstream_epoch_size_bytes", "Size of the newest durable epoch", labels=["job"])
        aligned = GaugeMetricFamily("millstream_epoch_alignment_seconds", ALIGNMENT, labels=["job"])
        gauges = {n: GaugeMetricFamily(f"millstream_job_{n}", text, labels=["job"]) for n, text in JOB_GAUGES.items()}
        for job in described:
            for value in JobState:
                state.add_metric([job["name"], value.value, job["guarantee"]], float(job["state"] == value))
            for cause, count in job["causes"].items():
                restarts.add_metric([job["name"], cause], count)
            for name, family in gauges.items():
                family.add_metric([job["name"]], job[name])
            durable = next((e for e in job["epochs"] if e["duration_ms"] is not None), None)
            if durable is not None:
                duration.add_metric([job["name"]], durable["duration_ms"] / 1000)
                size.add_metric([job["name"]], durable["size"])
            known = next((e["alignment_ms"] for e in job["epochs"] if e["alignment_ms"] is not None), None)
            if known is not None:
                aligned.add_metric([job["name"]], known / 1000)
        yield from (state, restarts, duration, size, aligned, *gauges.values())

    def _subtasks(self, described: list[dict[str, Any]]) -> Iterable[Metric]:
        labels = ["job", "subtask"]
        counters = {n: CounterMetricFamily(f"millstream_subtask_{n}", text, labels=labels) for n, text in SUBTASK_COUNTERS.items()}
        gauges = {n: GaugeMetricFamily(f"millstream_subtask_{n}", text, labels=labels) for n, text in SUBTASK_GAUGES.items()}
        depth = GaugeMetricFamily("millstream_channel_depth", "Envelopes sent and not yet processed", labels=["job", "channel"])
        credit = GaugeMetricFamily("millstream_channel_credit", "Envelopes that may be sent", labels=["job", "channel"])
        for job in described:
            for subtask in job["subtasks"]:
                stats = subtask["stats"]
                for family in (counters, gauges):
                    for name, metric in family.items():
                        if stats.get(name) is not None:
                            metric.add_metric([job["name"], subtask["subtask"]], stats[name])
                for channel in stats.get("channels", ()):
                    name = channel["channel"].split(".", 3)[-1]
                    depth.add_metric([job["name"], name], channel["depth"])
                    credit.add_metric([job["name"], name], channel["credit"])
        yield from (*counters.values(), *gauges.values(), depth, credit)

    def _nodes(self, nodes: list[dict[str, Any]]) -> Iterable[Metric]:
        """Nodes of one name are added up: a name is chosen by whoever operates them, an id is new at each start."""
        for name, text in NODE_COUNTERS.items():
            sums: dict[str, int] = {}
            for node in nodes:
                if name in node["counts"]:
                    sums[node["name"]] = sums.get(node["name"], 0) + node["counts"][name]
            family = CounterMetricFamily(f"millstream_node_{name}", text, labels=["node"])
            for node_name, value in sums.items():
                family.add_metric([node_name], value)
            yield family


def render(database: Database, namespace: str = "default") -> bytes:
    """The exposition text."""
    registry = CollectorRegistry()
    registry.register(StreamMetrics(database, namespace))
    registry.register(ScheduleMetrics(database, namespace))
    registry.register(TaskMetrics(database, namespace))
    return generate_latest(registry)
