"""Snapshots: whatever was aborted, declined or compacted in between, a durable epoch restores exactly the state of its cut."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from tests.unit.tasks.parts import REGISTRY, SHARDS, Holder, environment, quiet_world

from millstream.testing.outside import SimStorage
from millstream_schema.connectors import Handle
from millstream_schema.errors import SnapshotMissing, SnapshotUnreadable, StorageUnavailable
from millstream_schema.settings import StreamSettings
from millstream_tasks.runner.snapshotting import Capture, Snapshotter
from millstream_tasks.segments import Segment
from millstream_tasks.state import KeyedTable

State = dict[tuple[str, Any, Any], Any]


class Subtask:
    """Two tables of one operator, their snapshots, and what each cut held."""

    def __init__(self, **settings: Any) -> None:
        self.operator = Holder("op", "plain", "window")
        self.world = quiet_world()
        self.storage = SimStorage(self.world)
        self.snapshotter = Snapshotter(
            [self.operator], environment(self.storage), REGISTRY, StreamSettings(**settings), range(SHARDS), SHARDS, "job", "v-0"
        )
        self.held: dict[int, State] = {}
        self.handles: dict[int, list[Handle]] = {}

    @property
    def plain(self) -> KeyedTable:
        return self.operator.tables["plain"]

    @property
    def window(self) -> KeyedTable:
        return self.operator.tables["window"]

    def cut(self, epoch: int) -> Capture:
        self.held[epoch] = copy.deepcopy(state_of(self.operator))
        return self.snapshotter.cut(epoch)

    def store(self, capture: Capture) -> None:
        handles = self.snapshotter.store(capture)
        self.snapshotter.stored(capture, handles)
        self.handles[capture.epoch] = handles

    def take(self, epoch: int) -> Capture:
        """Cut and store."""
        capture = self.cut(epoch)
        self.store(capture)
        return capture

    def durable(self, epoch: int) -> None:
        """Durable, and right."""
        self.snapshotter.durable(epoch)
        assert self.restored(epoch) == self.held[epoch], f"epoch {epoch}"

    def restored(self, epoch: int) -> State:
        fresh = Holder("op", "plain", "window")
        for handle in self.handles[epoch]:
            Segment(self.storage.get(handle), handle.key, REGISTRY).apply("op", fresh.tables, range(SHARDS))
        return state_of(fresh)


def state_of(operator: Holder) -> State:
    return {(name, ns, k): v for name, t in operator.tables.items() for ns, pane in t.panes.items() for k, v in pane.items()}


def test_the_second_snapshot_holds_only_what_changed() -> None:
    """An increment relative to the last durable epoch: changes, removals, dropped windows."""
    s = Subtask()
    for i in range(100):
        s.plain.put(i, i)
        s.window.put(i, i, ns=0)
    assert s.take(1).full
    s.durable(1)
    s.plain.put(5, 50)
    s.plain.remove(6)
    s.window.drop(0)
    s.window.put("late", 1, ns=0)
    second = s.take(2)
    assert not second.full and second.entries == 4
    s.durable(2)
    assert len(s.handles[2]) == 2 and s.handles[2][:1] == s.handles[1]
    third = s.take(3)
    assert third.entries == 0 and s.handles[3] == s.handles[2]
    s.durable(3)


def test_t88_what_an_aborted_epoch_had_cut_is_in_the_next_increment() -> None:
    """Two aborted increments in a row, with a removal and a drop between them."""
    s = Subtask()
    for i in range(20):
        s.plain.put(i, i)
        s.window.put(i, i, ns=i % 2)
    s.take(1)
    s.durable(1)
    s.plain.put(1, "two")
    s.plain.put("new", 1)
    s.window.drop(0)
    assert not s.take(2).full
    s.plain.remove("new")
    s.plain.put(1, "three")
    s.window.put("again", 1, ns=0)
    assert not s.take(3).full
    s.plain.put(2, "four")
    fourth = s.take(4)
    assert not fourth.full
    s.durable(4)
    assert [h.key for h in s.handles[4]] == ["job/e1/v-0", "job/e4/v-0"]


def test_after_an_aborted_full_snapshot_comes_a_full_one() -> None:
    """An increment on top of a full one that was never durable would not know what it removed."""
    s = Subtask()
    for i in range(20):
        s.plain.put(i, i)
    assert s.take(1).full
    s.plain.remove(3)
    assert s.take(2).full
    s.durable(2)
    assert not s.take(3).full


def test_a_declined_snapshot_loses_nothing() -> None:
    """Storage failed in the background: the change is in the next one, and the key of the lost one is never referenced."""
    s = Subtask()
    s.plain.put("a", 1)
    s.take(1)
    s.durable(1)
    s.plain.put("a", 2)
    lost = s.cut(2)
    s.world.away["storage"] = 1e9
    with pytest.raises(StorageUnavailable):
        s.snapshotter.store(lost)
    s.world.away.clear()
    s.take(3)
    s.durable(3)
    assert [h.key for h in s.handles[3]] == ["job/e1/v-0", "job/e3/v-0"]


def test_a_late_notice_builds_on_what_was_durable_when_it_was_cut() -> None:
    """Epoch 3 is cut before the subtask hears that 2 is durable: it holds both changes on the base of 1."""
    s = Subtask()
    s.plain.put("a", 1)
    s.take(1)
    s.durable(1)
    s.plain.put("b", 2)
    s.take(2)
    s.plain.put("c", 3)
    third = s.take(3)
    s.durable(2)
    s.durable(3)
    assert [h.key for h in third.base] == ["job/e1/v-0"]
    s.snapshotter.durable(2)
    s.plain.put("d", 4)
    s.take(4)
    s.durable(4)


def test_the_chain_of_segments_is_bounded() -> None:
    """At ``max_segments`` a full one is taken, also when it is aborted once."""
    s = Subtask(max_segments=3)
    for epoch in range(1, 12):
        for i in range(100):
            if epoch == 1 or i == epoch:
                s.plain.put(i, epoch)
        s.take(epoch)
        if epoch != 4:
            s.durable(epoch)
        assert len(s.handles[epoch]) <= 3


def test_increments_that_outgrow_the_state_are_compacted() -> None:
    """One key written in each epoch must not cost more and more to restore."""
    s = Subtask(max_segments=1000)
    for epoch in range(1, 40):
        s.plain.put("a", epoch)
        s.take(epoch)
        s.durable(epoch)
    assert max(map(len, s.handles.values())) < 10


def test_without_increments_every_snapshot_is_full() -> None:
    """``incremental=False`` means it."""
    s = Subtask(incremental=False)
    for epoch in (1, 2, 3):
        s.plain.put(epoch, epoch)
        assert s.take(epoch).full
        s.durable(epoch)
        assert len(s.handles[epoch]) == 1


def test_g5_a_snapshot_is_a_copy_also_of_values_that_change_in_place() -> None:
    """A list that grows between cut and storing is stored as it was; immutable ones are encoded later all the same."""
    s = Subtask()
    values = [1]
    s.plain.put("list", values)
    s.window.put("atom", 1, ns=0)
    capture = s.cut(1)
    values.append(2)
    s.plain.put("list", values)
    s.window.put("atom", 2, ns=0)
    s.store(capture)
    s.durable(1)
    assert s.restored(1) == {("plain", None, "list"): [1], ("window", 0, "atom"): 1}
    s.take(2)
    s.durable(2)


@pytest.mark.parametrize("seed", range(25))
def test_any_history_restores_to_the_state_of_its_cut(seed: int) -> None:
    """Random puts, removals, drops and in-place changes; epochs durable, aborted, declined, late; restarts from a durable one."""
    rng = random.Random(seed)
    options = {"max_segments": rng.choice((1, 2, 4)), "incremental": rng.random() < 0.9}
    s = Subtask(**options)
    newest = 0
    for epoch in range(1, 30):
        for _ in range(rng.randrange(30)):
            table, ns, key = rng.choice((s.plain, s.window)), None, rng.choice([*range(20), "k", ("t", 1)])
            if table is s.window:
                ns = rng.randrange(3)
            match rng.randrange(6):
                case 0:
                    table.remove(key, ns)
                case 1 if table is s.window:
                    table.drop(ns)
                case 2:
                    held = table.get(key, None, ns)
                    held = held if isinstance(held, list) else []
                    held.append(epoch)
                    table.put(key, held, ns)
                case _:
                    table.put(key, rng.randrange(1000), ns)
        capture = s.cut(epoch)
        if rng.random() < 0.15:
            continue  # declined
        s.store(capture)
        if rng.random() < 0.7:
            s.durable(epoch)
            newest = epoch
    assert newest > 0


def test_t87_state_goes_on_from_restored_segments() -> None:
    """The first snapshot after a restore of the same shape builds on what was restored."""
    first = Subtask()
    for i in range(50):
        first.plain.put(i, i)
    first.take(1)
    first.durable(1)
    second = Subtask()
    second.storage = first.storage
    second.snapshotter = Snapshotter(
        [second.operator], environment(first.storage), REGISTRY, StreamSettings(), range(SHARDS), SHARDS, "job", "v-0"
    )
    for handle in first.handles[1]:
        Segment(first.storage.get(handle), handle.key, REGISTRY).apply("op", second.operator.tables, range(SHARDS))
    second.snapshotter.restored(first.handles[1])
    second.plain.remove(7)
    assert not second.take(2).full
    second.durable(2)
    assert len(second.handles[2]) == 2 and ("plain", None, 7) not in second.restored(2)


@pytest.mark.parametrize("damage", ["bit", "missing"])
def test_t90_a_damaged_segment_is_an_error_that_names_it(damage: str) -> None:
    """A flipped bit anywhere, or a blob that is gone."""
    rng = random.Random(1)
    s = Subtask()
    s.plain.put("a", 1)
    s.take(1)
    key = s.handles[1][0].key
    whole = s.storage.blobs[key]
    for _ in range(50):
        if damage == "missing":
            del s.storage.blobs[key]
            with pytest.raises(SnapshotMissing, match=key):
                s.restored(1)
        else:
            at = rng.randrange(len(whole))
            s.storage.blobs[key] = whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
            with pytest.raises(SnapshotUnreadable, match=key):
                s.restored(1)
        s.storage.blobs[key] = whole


@pytest.mark.parametrize("data", [b"", b"MSG", b"MSG1", b"MSG1\xff\xff\xff\xff", b"MSG1\x02\x00\x00\x00ab", b"X" * 40])
def test_a_blob_that_is_no_segment_is_unreadable(data: bytes) -> None:
    """Whatever it is: one kind of error, with its name, not an empty state."""
    with pytest.raises(SnapshotUnreadable, match="the-name"):
        Segment(data, "the-name", REGISTRY)
