"""``place``: all subtasks of a job get a slot, or none does."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.coordinator.rows import node_row

from millstream_coordinator.placement import place
from millstream_schema.plan import Subtask


def subtasks(**vertices: int) -> list[Subtask]:
    return [Subtask(v, i) for v, n in vertices.items() for i in range(n)]


def test_all_or_none() -> None:
    """Exactly as many slots as subtasks are enough; one less places nobody."""
    wanted = subtasks(a=2, b=3)
    nodes = [node_row("x", 2), node_row("y", 3)]
    placed = place(wanted, nodes, {})
    assert placed is not None and set(placed) == {s.id for s in wanted}
    assert place(wanted, nodes, {"node-x": 1}) is None
    assert place(wanted, [], {}) is None
    assert place([], [], {}) == {}


def test_each_vertex_is_spread_over_the_nodes() -> None:
    """Two readers on two nodes, though one of them had room for both."""
    placed = place(subtasks(a=2, b=2), [node_row("x", 8), node_row("y", 3)], {})
    assert placed is not None
    assert {placed["a:0"], placed["a:1"]} == {placed["b:0"], placed["b:1"]} == {"node-x", "node-y"}


def test_a_node_that_is_over_its_slots_gets_nothing() -> None:
    """Slots may have been taken away meanwhile: less than none is none."""
    placed = place(subtasks(a=2), [node_row("x", 2), node_row("y", 2)], {"node-x": 5})
    assert placed == {"a:0": "node-y", "a:1": "node-y"}


@given(
    slots=st.lists(st.integers(0, 4), max_size=5),
    used=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    wanted=st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), max_size=3),
)
@settings(deadline=None, max_examples=100)
def test_no_node_gets_more_than_its_free_slots(slots: list[int], used: list[int], wanted: dict[str, int]) -> None:
    """And whoever is refused really did not fit; the order of the nodes does not matter."""
    nodes = [node_row(str(i), n) for i, n in enumerate(slots)]
    taken = {n.id: used[i] for i, n in enumerate(nodes)}
    tasks = subtasks(**wanted)
    free = {n.id: max(0, n.slots - taken[n.id]) for n in nodes}
    placed = place(tasks, nodes, taken)
    assert place(tasks, list(reversed(nodes)), taken) == placed
    if placed is None:
        assert sum(free.values()) < len(tasks)
    else:
        assert set(placed) == {s.id for s in tasks}
        assert all(free[node] >= n for node, n in Counter(placed.values()).items())
