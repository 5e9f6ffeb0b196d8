"""Segments of keyed state: what is restored is what was written, whatever the number of subtasks before and after."""

from __future__ import annotations

import random
from typing import Any

import pytest

from millstream_schema.canonical import shard_of, shards_of
from millstream_schema.errors import SnapshotUnreadable
from millstream_schema.values import TypeRegistry
from millstream_tasks.segments import RUN, Segment, SegmentWriter
from millstream_tasks.state import KeyedTable, immutable

SHARDS = 128
REGISTRY = TypeRegistry()
State = dict[tuple[int | None, Any], Any]


def owner(key: Any, parallelism: int) -> int:
    return shard_of(key, SHARDS) * parallelism // SHARDS


def write(table: KeyedTable, index: int, parallelism: int, *, full: bool) -> bytes:
    writer = SegmentWriter(REGISTRY, shards_of(index, parallelism, SHARDS), SHARDS, full, lambda: None)
    writer.table("op", table.cut(full))
    return writer.finish()


def read(blobs: list[bytes], shards: range) -> State:
    table = KeyedTable("value")
    for n, blob in enumerate(blobs):
        Segment(blob, f"segment-{n}", REGISTRY).apply("op", {"value": table}, shards)
    return content(table)


def content(table: KeyedTable) -> State:
    return {(ns, key): value for ns, pane in table.panes.items() for key, value in pane.items()}


def churn(tables: list[KeyedTable], chance: random.Random, keys: int) -> None:
    """Puts, removals and dropped namespaces, each at the owner of its key."""
    for _ in range(keys):
        key, ns = f"k{chance.randrange(keys)}", chance.choice([None, 0, 10])
        table = tables[owner(key, len(tables))]
        if chance.random() < 0.2:
            table.remove(key, ns)
        else:
            table.put(key, chance.randrange(1000), ns)
    chance.choice(tables).drop(10)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_state_is_the_same_at_any_parallelism(before: int, after: int) -> None:
    """A full segment and increments of each old subtask, read by all new ones: every entry comes back once, at the owner of its key."""
    chance = random.Random(before * 10 + after)
    tables = [KeyedTable("value") for _ in range(before)]
    blobs: list[list[bytes]] = [[] for _ in tables]
    for turn in range(4):
        churn(tables, chance, 400)
        for i, table in enumerate(tables):
            blobs[i].append(write(table, i, before, full=turn == 0))
    expected = {entry: value for table in tables for entry, value in content(table).items()}
    restored: State = {}
    for j in range(after):
        mine = read([blob for chain in blobs for blob in chain], shards_of(j, after, SHARDS))
        assert all(owner(key, after) == j for _, key in mine)
        assert not restored.keys() & mine.keys()
        restored |= mine
    assert restored == expected


def test_a_window_dropped_by_one_subtask_stays_in_the_others() -> None:
    """By processing time one old subtask may have dropped a window that another still fills."""
    keys = [f"k{i}" for i in range(50)]
    tables = [KeyedTable("value"), KeyedTable("value")]
    for key in keys:
        tables[owner(key, 2)].put(key, 1, 10)
    full = [write(table, i, 2, full=True) for i, table in enumerate(tables)]
    tables[1].drop(10)
    increments = [write(table, i, 2, full=False) for i, table in enumerate(tables)]
    restored = read([full[0], increments[0], full[1], increments[1]], range(SHARDS))
    assert restored == {(10, key): 1 for key in keys if owner(key, 2) == 0}


def test_more_keys_than_one_run_come_back() -> None:
    """Keys are encoded in runs; removed ones may be in any of them."""
    table = KeyedTable("value")
    for i in range(2 * RUN + 17):
        table.put(i, (i, str(i)))
    full = write(table, 0, 1, full=True)
    for i in range(0, 2 * RUN, 2):
        table.remove(i)
    increment = write(table, 0, 1, full=False)
    assert read([full, increment], range(SHARDS)) == content(table)
    assert len(content(table)) == RUN + 17


def test_other_threads_get_their_turn_between_runs() -> None:
    """The writer pauses after every run, so no pause of the subtask's thread grows with the state."""
    table = KeyedTable("value")
    table.load(None, list(range(3 * RUN)), list(range(3 * RUN)))
    pauses = []
    writer = SegmentWriter(REGISTRY, range(SHARDS), SHARDS, True, lambda: pauses.append(1))
    writer.table("op", table.cut(True))
    assert len(pauses) == 3


def test_a_segment_with_another_number_of_keys_than_it_lists_is_refused() -> None:
    """A defect in the writer must not become wrong state."""
    table = KeyedTable("value")
    table.put("a", 1)
    segment = Segment(write(table, 0, 1, full=True), "job/e1/v-0", REGISTRY)
    (entry,) = segment.header.entries
    segment.header.entries[0] = type(entry)(entry.operator, entry.state, entry.op, None, 2, entry.keys, entry.values)
    with pytest.raises(SnapshotUnreadable, match="job/e1/v-0"):
        segment.apply("op", {"value": KeyedTable("value")}, range(SHARDS))


@pytest.mark.parametrize(
    ("values", "lasting"), [([1, "a", None], True), ([(1, ("b", 2.0))], True), ([[1]], False), ([(1, [2])], False), ([{}], False)]
)
def test_a_mutable_value_is_noticed_when_it_is_written(values: list[Any], lasting: bool) -> None:
    """``lasting`` is false for ever once a mutable value was written, however it came in: its snapshots are encoded at the cut."""
    assert immutable(values) is lasting
    for way in ("note", "put", "load"):
        table = KeyedTable("value")
        table.lasting = True
        if way == "note":
            table.note(values)
        elif way == "put":
            for i, value in enumerate(values):
                table.put(i, value)
        else:
            table.load(None, list(range(len(values))), values)
        table.note([1])
        assert table.lasting is lasting
        if way != "note":
            assert table.cut(full=way == "load").shareable() is lasting
