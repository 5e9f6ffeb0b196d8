"""Rows and views for the decisions' tests: a job of two readers, a keyed count and a committing sink, in any state.

What must never happen here: a rule of the product computed a second time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millstream_coordinator.decisions import JobView
from millstream_schema.connectors import SinkCapability, SourceCapability
from millstream_schema.model import Component, EdgeSpec, Guarantee, OperatorSpec, Partitioning, StreamComponents, StreamModel
from millstream_schema.plan import PartitionedPlan, compile_plan
from millstream_schema.settings import StreamSettings
from millstream_schema.states import AssignmentState, Desired, EpochState, JobState, NodeState, SplitOwner
from millstream_schema.store.rows import AckMark, AssignmentRow, EpochRow, JobRow, NodeRow, SplitRow

NOW = 1_700_000_000_000_000
SECOND = 1_000_000


def model(
    sink: SinkCapability = SinkCapability.TWO_PHASE_COMMIT, guarantee: Guarantee = Guarantee.STRICT_EXACTLY_ONCE, p: int = 2
) -> StreamModel:
    operators = [
        OperatorSpec("in", "source", True, capability=SourceCapability.REPLAYABLE.value),
        OperatorSpec("count", "aggregate", True, functions={"key": "m:key"}, states={"value": {"kind": "aggregating"}}),
        OperatorSpec("out", "sink", True, capability=sink.value),
    ]
    edges = [EdgeSpec("in", "count", Partitioning.HASH), EdgeSpec("count", "out", Partitioning.FORWARD)]
    components = [
        Component("codec", "msgpack"),
        Component("source", "in"),
        Component("sink", "out"),
        Component("function", "count.key"),
        Component("state", "count.value"),
    ]
    return StreamModel("job", 1, guarantee, operators, edges, StreamComponents(components), [], parallelism=p)


PLAN = compile_plan(model())
LOOSE = compile_plan(model(SinkCapability.NONE, Guarantee.AT_LEAST_ONCE))
"""The same job with a sink that commits nothing."""
SUBTASKS = [s.id for s in PLAN.subtasks()]
SOURCES = [s for s in SUBTASKS if s.startswith("in:")]
COMMITTERS = PLAN.committers
SETTINGS = StreamSettings()


def job_row(state: JobState = JobState.RUNNING, **changes: Any) -> JobRow:
    row = JobRow(
        id="job-1", namespace="default", name="job", factory="job", config="{}", parallelism=None, overrides="{}", settings="{}", plan="{}", model="{}",
        plan_fingerprint="f", state=state, reason="", desired=Desired.RUN, mode="run", generation=3, term=2, next_epoch=8, in_flight=0, newest_durable=0,
        newest_committed=0, restore_epoch=0, target="", restore_from="", lenient=0, aborts=0, failures=0, stalls=0, restarts=0, causes="{}",
        wanted_savepoint="", wants_epoch=0, pending_commits="[]", splits_rev=1, deployed_us=NOW, due_us=0, epoch_us=NOW, restarted_us=0, stopping_us=NOW,
        created_us=NOW, changed_us=NOW, rev=9, ended=int(state.ended), live_name=None if state.ended else "default/job",
        **({"renames": "{}"} if "renames" in JobRow.__struct_fields__ else {}),
    )  # fmt: skip
    return msgspec.structs.replace(row, **changes)


def assignment(subtask: str, state: AssignmentState = AssignmentState.READY, **changes: Any) -> AssignmentRow:
    row = AssignmentRow(
        job="job-1", generation=3, subtask=subtask, node="node-a", attempt="a-1", state=state, cause="", detail="", committed=0, commit_detail="",
        exhausted=0, progress=0, progressed_us=NOW, stats="{}", changed_us=NOW, rev=1,
    )  # fmt: skip
    return msgspec.structs.replace(row, **changes)


def assignments(state: AssignmentState = AssignmentState.READY, **changes: Any) -> list[AssignmentRow]:
    return [assignment(s, state, **changes) for s in SUBTASKS]


def epoch_row(epoch: int = 7, state: EpochState = EpochState.TRIGGERED, **changes: Any) -> EpochRow:
    row = EpochRow(
        job="job-1", epoch=epoch, generation=3, term=2, kind="checkpoint", state=state, reason="", savepoint="", splits="[]", size=0, triggered_us=NOW,
        durable_us=0, committed_us=0, rev=0,
    )  # fmt: skip
    return msgspec.structs.replace(row, **changes)


def ack(subtask: str, declined: str = "", generation: int = 3) -> AckMark:
    return AckMark(subtask=subtask, generation=generation, attempt="a-1", declined=declined)


def split_row(name: str, state: SplitOwner = SplitOwner.UNASSIGNED, owner: int = -1, operator: str = "in") -> SplitRow:
    return SplitRow(job="job-1", operator=operator, split=name, body="null", cursor="null", state=state, owner=owner, rev=0)


def node_row(name: str, slots: int) -> NodeRow:
    return NodeRow(
        id=f"node-{name}",
        name=name,
        slots=slots,
        state=NodeState.ACTIVE,
        info="{}",
        started_us=NOW,
        renewed_us=NOW,
        expires_us=NOW + SECOND,
        rev=0,
    )


def view(job: JobRow, plan: PartitionedPlan = PLAN, **changes: Any) -> JobView:
    """A view in which nothing is wrong: every subtask READY on a live node, discovery over, one split each."""
    fields: dict[str, Any] = {
        "now": NOW,
        "job": job,
        "plan": plan,
        "settings": SETTINGS,
        "assignments": [] if job.state in (JobState.PENDING, JobState.WAITING_FOR_RESOURCES, JobState.RESTARTING) else assignments(),
        "live_nodes": frozenset({"node-a"}),
        "epoch": None,
        "acks": [],
        "newest": None,
        "uncommitted": 0,
        "splits": [split_row("s0", SplitOwner.ASSIGNED, 0), split_row("s1", SplitOwner.ASSIGNED, 1)],
        "discovered": {"in": True},
    }
    return JobView(**{**fields, **changes})
