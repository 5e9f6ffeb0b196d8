"""What keeps a live job from going on, as far as rows tell, and what to do about it. Pure; called by ``Jobs``, which reads the rows.

What must never happen here: a word about a job that goes on, or advice that the rows do not bear out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream_schema.states import JobState
from millstream_schema.store.rows import JobRow, NodeRow

NO_NODE = "no node is alive: start `celery -A … worker`, `millstream node` or `millstream dev`, over the same database and prefix"
NO_COORDINATOR = "no node coordinates: start one without --no-coordinator; one that was killed is replaced when its lease expires"
_UNPLACED = (JobState.PENDING, JobState.WAITING_FOR_RESOURCES, JobState.RESTARTING)


def obstacle(job: JobRow, wanted: int, nodes: Sequence[NodeRow], used: Mapping[str, int], coordinated: bool) -> str:
    """One sentence, or empty. ``wanted``: slots of the job's plan; ``nodes``: those that take work, with the slots ``used`` on each."""
    if job.state.ended:
        return ""
    if not nodes:
        return NO_NODE
    if not coordinated:
        return NO_COORDINATOR
    slots = sum(n.slots for n in nodes)
    free = sum(max(0, n.slots - used.get(n.id, 0)) for n in nodes)
    if job.state not in _UNPLACED or free >= wanted:
        return ""
    there = f"{free} of {slots} {'is' if free == 1 else 'are'} free on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    return (
        f"it wants {wanted} slot{'' if wanted == 1 else 's'} and {there}: start more nodes, give each more slots "
        "(`slots=` of Millstream, `--slots`), end another job, or submit it with less parallelism"
    )
