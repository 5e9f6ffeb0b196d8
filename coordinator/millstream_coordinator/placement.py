"""Which node gets which subtask: a pure decision over free slots.

Called by the reconciler under the lock on capacity. What must never happen here: half a placement, or more subtasks on a node than it has slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream_schema.plan import Subtask
from millstream_schema.store.rows import NodeRow


def place(subtasks: Sequence[Subtask], nodes: Sequence[NodeRow], used: Mapping[str, int]) -> dict[str, str] | None:
    """Subtask id → node id, spreading each vertex over the nodes with most free slots; None when they do not all fit."""
    free = {n.id: n.slots - used.get(n.id, 0) for n in nodes}
    placed: dict[str, str] = {}
    here: dict[tuple[str, str], int] = {}
    for subtask in subtasks:
        candidates = [n for n in free if free[n] > 0]
        if not candidates:
            return None
        best = min(candidates, key=lambda n: (here.get((subtask.vertex, n), 0), -free[n], n))
        free[best] -= 1
        here[subtask.vertex, best] = here.get((subtask.vertex, best), 0) + 1
        placed[subtask.id] = best
    return placed
