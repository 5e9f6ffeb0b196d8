"""Metrics: each value that a row holds comes out under a bounded label, and one that it does not hold is left out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from tests.contract.store import task_rows
from tests.contract.store.stores import insert_job

from millstream.metrics import NODE_COUNTERS, StreamMetrics, render
from millstream.task_metrics import TaskMetrics
from millstream.testing.outside import SimDatabase
from millstream.testing.world import Faults, SimClock, World
from millstream_coordinator.status import epoch_lines
from millstream_schema.states import EpochState, JobState
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.migrate import create_schema

HOUR = 3_600_000_000


@pytest.fixture
def db() -> Iterator[SimDatabase]:
    world = World(0, Faults())
    made = SimDatabase(world, SimClock(world))
    create_schema(made)
    yield made
    made.close()


def node(db: SimDatabase, name: str, start: str, **counts: int) -> None:
    info = msgspec.json.encode({"host": "h", "counts": counts}).decode()
    db.run(lambda tx: registry.register_node(tx, start, name, 4, HOUR, info))


def samples(db: SimDatabase, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(s.labels.values()): s.value for m in StreamMetrics(db).collect() for s in m.samples if s.name == name}


def test_what_node_processes_count_is_shown_by_the_nodes_name(db: SimDatabase) -> None:
    """Ids are new at each start and would be labels without end; nodes of one name are added up."""
    node(db, "a", "node-1", stale_hints=2, hints_dropped=7, set_aside=1, defects=1)
    node(db, "a", "node-2", stale_hints=3)
    node(db, "b", "node-3")
    assert samples(db, "millstream_node_stale_hints_total") == {("a",): 5.0}
    assert samples(db, "millstream_node_hints_dropped_total") == {("a",): 7.0}
    assert samples(db, "millstream_node_defects_total") == {("a",): 1.0}
    text = render(db).decode()
    assert "node-1" not in text and all(f"millstream_node_{n}_total" in text for n in NODE_COUNTERS)


def test_a_renewal_shows_what_was_counted_since(db: SimDatabase) -> None:
    """And one that says nothing leaves the row as it was."""
    node(db, "a", "node-1", stale_hints=0)
    assert db.run(lambda tx: registry.renew_node(tx, "node-1", HOUR, '{"counts":{"stale_hints":4}}'))
    assert db.run(lambda tx: registry.renew_node(tx, "node-1", HOUR))
    assert samples(db, "millstream_node_stale_hints_total") == {("a",): 4.0}


def test_the_alignment_of_an_epoch_is_that_of_the_slowest_subtask(db: SimDatabase) -> None:
    """An epoch that nobody of the present generation aligned has none; source lag comes out where it is known."""
    insert_job(db, "j", JobState.RUNNING, generation=3)
    db.run(lambda tx: registry.assign(tx, "j", 3, {"in:0": "node-1", "count:0": "node-1", "count:1": "node-1"}, 0))
    said = {
        "in:0": {"source_lag_ms": 1200, "alignments": []},
        "count:0": {"source_lag_ms": None, "alignments": [[7, 20.5], [8, 1.0]]},
        "count:1": {"source_lag_ms": None, "alignments": [[7, 500.0]]},
    }
    t = db.read(lambda tx: tx.t.assignment)
    for subtask, stats in said.items():
        text = msgspec.json.encode(stats).decode()
        db.run(lambda tx, s=subtask, x=text: tx.update(t, t.c.job == "j", t.c.subtask == s, stats=x))  # type: ignore[misc]
    for epoch in (6, 7, 9):
        db.run(lambda tx, e=epoch: epochs.trigger(tx, "j", e, 3, 1, "checkpoint", "", []))  # type: ignore[misc]
    job = next(j for j in db.read(lambda tx: jobs.list_jobs(tx, "default")) if j.id == "j")
    lines = db.read(lambda tx: epoch_lines(tx, job, 10))
    assert {e["epoch"]: e["alignment_ms"] for e in lines} == {9: None, 7: 500.0, 6: None}
    assert EpochState.TRIGGERED.value in {e["state"] for e in lines}
    assert samples(db, "millstream_epoch_alignment_seconds") == {(job.name,): 0.5}
    assert samples(db, "millstream_subtask_source_lag_ms") == {(job.name, "in:0"): 1200.0}


def test_open_tasks_are_counted_by_queue_and_state_and_how_long_the_first_has_waited(db: SimDatabase) -> None:
    """Up to a bound, which is told; other namespaces are not seen."""
    task_rows.submit(
        db,
        *(task_rows.new(f"k{n}", queue="q") for n in range(3)),
        task_rows.new("later", delay_us=HOUR),
        task_rows.new("other", namespace="else"),
    )
    found = {(s.name, *s.labels.values()): s.value for m in TaskMetrics(db).collect() for s in m.samples}
    assert found[("millstream_tasks", "q", "READY")] == 3
    assert found[("millstream_tasks", "default", "SCHEDULED")] == 1
    assert found[("millstream_tasks_waiting_seconds", "q")] >= 0
    assert found[("millstream_tasks_truncated",)] == 0
    assert sum(v for k, v in found.items() if k[0] == "millstream_tasks") == 4
    assert {s.value for m in TaskMetrics(db, limit=2).collect() for s in m.samples if s.name == "millstream_tasks_truncated"} == {1.0}
