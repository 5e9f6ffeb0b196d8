"""``next_step`` on views nobody thought of: it never raises, proposes only transitions of the table, and settles."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.coordinator.rows import LOOSE, NOW, PLAN, SECOND, SUBTASKS, ack, assignment, epoch_row, job_row, split_row, view

from millstream_coordinator import decisions as d
from millstream_schema.control import EpochKind
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import AssignmentState, Desired, EpochState, JobState, SplitOwner, may

J = JobState
TIMES = st.sampled_from([0, NOW - 3600 * SECOND, NOW - 31 * SECOND, NOW - SECOND, NOW, NOW + SECOND])
SMALL = st.sampled_from([0, 1, 2, 3, 4, 10, 10**6])
CAUSES = st.sampled_from(["", "operator", "channel", "stall", "handback", "restore", "unreadable", "nonsense"])
EPOCHS = st.integers(0, 9)
KINDS = st.sampled_from([k.value for k in EpochKind])


@st.composite
def assignment_rows(draw: st.DrawFn) -> list[Any]:
    chosen = draw(st.sets(st.sampled_from(SUBTASKS)))
    return [
        assignment(
            s,
            draw(st.sampled_from(AssignmentState)),
            node=draw(st.sampled_from(["node-a", "node-b"])),
            cause=draw(CAUSES),
            committed=draw(EPOCHS),
            exhausted=draw(st.integers(0, 1)),
            progressed_us=draw(TIMES),
            changed_us=draw(TIMES),
        )
        for s in sorted(chosen)
    ]


@st.composite
def epochs(draw: st.DrawFn) -> Any:
    return epoch_row(
        draw(EPOCHS),
        draw(st.sampled_from(EpochState)),
        kind=draw(KINDS),
        generation=draw(st.integers(2, 3)),
        triggered_us=draw(TIMES),
        durable_us=draw(TIMES),
    )


@st.composite
def views(draw: st.DrawFn) -> d.JobView:
    durable = draw(EPOCHS)
    job = job_row(
        draw(st.sampled_from(JobState)), desired=draw(st.sampled_from(Desired)), mode=draw(st.sampled_from(["run", "finalize"])),
        generation=draw(st.sampled_from([0, 3])), newest_durable=durable, newest_committed=draw(st.integers(0, durable)),
        target=draw(st.sampled_from(["STOPPED", "FINISHED", "FAILED"])), aborts=draw(SMALL), failures=draw(SMALL), stalls=draw(SMALL), due_us=draw(TIMES),
        deployed_us=draw(TIMES), epoch_us=draw(TIMES), stopping_us=draw(TIMES), wants_epoch=draw(st.integers(0, 1)), wanted_savepoint=draw(st.sampled_from(["", "sp"])),
        recent_restarts=json.dumps(draw(st.lists(st.tuples(TIMES, st.sampled_from(["failure", "stall"])), max_size=6))),
    )  # fmt: skip
    acks = [ack(s, draw(st.sampled_from(["", "no"])), draw(st.integers(2, 3))) for s in sorted(draw(st.sets(st.sampled_from(SUBTASKS))))]
    splits = [
        split_row(f"s{i}", draw(st.sampled_from(SplitOwner)), draw(st.integers(-1, 9)), draw(st.sampled_from(["in", "gone"])))
        for i in range(draw(st.integers(0, 4)))
    ]
    policy = RestartPolicy(
        kind=draw(st.sampled_from(["fixed", "exponential", "rate"])), failures=draw(st.integers(0, 4)), stalls=draw(st.integers(0, 4))
    )
    return view(
        job, draw(st.sampled_from([PLAN, LOOSE])), assignments=draw(assignment_rows()), live_nodes=draw(st.sampled_from([frozenset(), frozenset({"node-a"})])),
        epoch=draw(st.none() | epochs()), newest=draw(st.none() | epochs()), acks=acks, uncommitted=draw(SMALL), splits=splits,
        discovered=draw(st.sampled_from([{}, {"in": False}, {"in": True}])), savepoint_copying=draw(st.booleans()),
        settings=StreamSettings(restart=policy),
    )  # fmt: skip


def reached(v: d.JobView, step: d.Step) -> JobState:
    """The state a step takes the job to."""
    match step:
        case d.Deploy(finalize=finalize):
            return J.STOPPING if finalize else J.DEPLOYING
        case d.BecomeRunning():
            return J.RUNNING
        case d.Restart():
            return J.RESTARTING
        case d.Finalize():
            return J.STOPPING
        case d.End(state=state):
            return state
        case _:
            return v.job.state


@given(v=views())
@settings(deadline=None, max_examples=200)
def test_any_view_has_a_decision_that_the_table_allows(v: d.JobView) -> None:
    """Never an exception, never a transition that ``states.may`` refuses, never a deadline that has passed."""
    step = d.next_step(v)
    after = reached(v, step)
    assert may(v.job.state, after), f"{v.job.state} → {after} by {step}"
    if isinstance(step, d.Deploy) and not step.finalize:
        assert may(v.job.state, J.WAITING_FOR_RESOURCES), v.job.state
        assert may(v.job.state, J.FAILED)
    if isinstance(step, d.Wait):
        assert step.until == 0 or step.until > v.now, f"waits for {step.until}, which is over"


@given(v=views())
@settings(deadline=None, max_examples=80)
def test_a_decision_depends_on_nothing_but_its_view(v: d.JobView) -> None:
    """Two coordinators that read the same rows decide the same."""
    assert d.next_step(v) == d.next_step(v)


@given(v=views())
@settings(deadline=None, max_examples=120)
def test_nothing_is_committed_or_triggered_against_the_rules(v: d.JobView) -> None:
    """No commit above the newest durable epoch, no second epoch in flight, none while too many wait, no hand-out meanwhile; an ended job is left alone."""
    step = d.next_step(v)
    if v.job.state.ended:
        assert step == d.Wait()
    if isinstance(step, d.MarkCommitted):
        assert v.job.newest_committed < step.epoch <= v.job.newest_durable
    if isinstance(step, d.TriggerEpoch | d.OwnSplits) and v.job.state is J.RUNNING:
        assert v.epoch is None
    if isinstance(step, d.TriggerEpoch) and not step.kind.terminal:
        assert v.uncommitted < v.settings.max_uncommitted
    if isinstance(step, d.MakeDurable | d.Precommit):
        assert {a.subtask for a in v.acks if not a.declined and a.generation == v.job.generation} >= set(SUBTASKS)
    if isinstance(step, d.OwnSplits):
        free = {s.split for s in v.splits if s.state is SplitOwner.UNASSIGNED and s.operator == "in"}
        assert {split for _, split, _ in step.owners} == free
        assert all(0 <= owner < 2 for *_, owner in step.owners)


@given(v=views())
@settings(deadline=None, max_examples=80)
def test_c8_a_restart_stays_within_its_budget(v: d.JobView) -> None:
    """And its delay within its bounds."""
    step = d.next_step(v)
    if isinstance(step, d.Restart) and not step.free:
        policy = v.settings.restart
        used, budget = (v.job.stalls, policy.stalls) if step.stall else (v.job.failures, policy.failures)
        if policy.kind == "rate":
            kind = "stall" if step.stall else "failure"
            used = sum(k == kind and at > v.now - policy.interval_ms * 1000 for at, k in json.loads(v.job.recent_restarts))
        assert used < budget
        assert 0 <= step.delay_us <= v.settings.restart.max_delay_ms * 1000
