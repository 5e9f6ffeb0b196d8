"""What is said of a job that does not go on follows from nodes, slots and lease, and names the next step."""

from __future__ import annotations

import pytest
from tests.unit.coordinator.rows import job_row, node_row

from millstream.obstacles import NO_COORDINATOR, NO_NODE, obstacle
from millstream_schema.states import JobState

LIVE = [s for s in JobState if not s.ended]


@pytest.mark.parametrize("state", LIVE)
def test_without_a_node_every_live_job_is_told_what_to_start(state: JobState) -> None:
    """PENDING or RUNNING on paper: nobody is there to do it."""
    said = obstacle(job_row(state), 4, [], {}, True)
    assert said == NO_NODE
    assert "celery -A" in said and "millstream dev" in said


@pytest.mark.parametrize("state", LIVE)
def test_without_a_coordinator_every_live_job_is_told_so(state: JobState) -> None:
    """Nodes that only run subtasks deploy nothing."""
    assert obstacle(job_row(state), 1, [node_row("a", 4)], {}, False) == NO_COORDINATOR


@pytest.mark.parametrize("state", [s for s in JobState if s.ended])
def test_an_ended_job_has_no_obstacle(state: JobState) -> None:
    """Whatever is alive."""
    assert obstacle(job_row(state), 9, [], {}, False) == ""


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.WAITING_FOR_RESOURCES, JobState.RESTARTING])
def test_too_few_slots_are_counted(state: JobState) -> None:
    """Wanted, free and there; slots that others use are not free, and a node that is over-full does not take from another."""
    nodes = [node_row("a", 4), node_row("b", 2)]
    said = obstacle(job_row(state), 3, nodes, {"node-a": 2, "node-b": 3}, True)
    assert "wants 3 slots and 2 of 6 are free on 2 nodes" in said and "--slots" in said
    assert obstacle(job_row(state), 2, nodes, {"node-a": 2, "node-b": 3}, True) == ""
    assert "wants 1 slot and 0 of 1 are free on 1 node:" in obstacle(job_row(state), 1, [node_row("a", 1)], {"node-a": 1}, True)


@pytest.mark.parametrize("state", [JobState.DEPLOYING, JobState.RUNNING, JobState.STOPPING])
def test_a_job_that_has_its_slots_is_not_told_that_none_are_left(state: JobState) -> None:
    """What it uses itself leaves nothing free, and that is as it should be."""
    assert obstacle(job_row(state), 4, [node_row("a", 4)], {"node-a": 4}, True) == ""
