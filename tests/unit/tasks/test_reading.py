"""The source of a subtask: cuts between two records, splits that end, and what draining does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.unit.tasks.parts import context

from millstream_schema.connectors import Committable, ConnectorContext, Json, Read, Source, SourceCapability, Split
from millstream_schema.manifest import SplitState
from millstream_schema.model import OperatorSpec
from millstream_tasks.runner.reading import SourceDriver, dead_letters
from millstream_tasks.sources.memory import CollectionSource

SPEC = OperatorSpec("in", "source", True)


class Reader:
    """Gives positions up to ``end``; can be drained when ``drains``."""

    def __init__(self, name: str, at: int, end: int) -> None:
        self.name, self.at, self.end = name, at, end
        self.closed = False

    def poll(self, limit: int) -> Read:
        assert not self.closed, "a closed reader is read"
        stop = min(self.at + limit, self.end)
        values = [(self.name, i) for i in range(self.at, stop)]
        self.at = stop
        return Read(values, exhausted=stop >= self.end)

    def cursor(self) -> Json:
        return self.at

    def close(self) -> None:
        self.closed = True


class Draining(Reader):
    """Takes two more records after it was told to end."""

    def truncate_for_drain(self) -> None:
        self.end = min(self.end, self.at + 2)


class Taking(Reader):
    """Takes part in epochs, as a queue's reader does."""

    wants_epoch = False

    def __init__(self, name: str, at: int, end: int) -> None:
        super().__init__(name, at, end)
        self.restored: list[tuple[int, Json]] = []

    def save_state(self, epoch: int) -> Json:
        return self.at

    def prepare_commit(self, epoch: int) -> list[Committable]:
        return []

    def finish_commit(self, epoch: int, success: bool) -> None:
        """Nothing is acknowledged."""

    def restore_from_epoch(self, epoch: int, state: Json) -> None:
        self.restored.append((epoch, state))


class Numbers:
    """Splits by name; ``of`` says what reads them."""

    kind, version, bounded = "numbers", 1, True
    capability = SourceCapability.REPLAYABLE

    def __init__(self, of: type[Reader] = Reader, end: int = 10) -> None:
        self.of, self.end = of, end
        self.readers: dict[str, Reader] = {}

    def config(self) -> dict[str, Json]:
        return {}

    def problems(self) -> list[str]:
        return []

    def discover(self, known: frozenset[str]) -> list[Split]:
        return []

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> Reader:
        assert split.split_id not in self.readers, "a split is opened twice"
        reader = self.readers[split.split_id] = self.of(split.split_id, cursor if isinstance(cursor, int) else 0, self.end)
        return reader


def state(name: str, cursor: Any = None, finished: bool = False, operator: str = "in") -> SplitState:
    return SplitState(operator, name, {"n": name}, cursor, finished)


def driver(source: Source, restored: dict[str, Json] | None = None) -> SourceDriver:
    return SourceDriver(SPEC, source, context(), restored or {}, 4)


def cursors(d: SourceDriver, epoch: int = 1) -> dict[str, tuple[Any, bool]]:
    return {s.split_id: (s.cursor, s.finished) for s in d.cut(epoch)}


def test_t13_t15_a_cut_is_the_next_record_to_emit() -> None:
    """Exclusive of all that were emitted, whatever the size of the polls: each split's cut is a prefix."""
    rng = random.Random(3)
    d = driver(Numbers(end=50))
    d.assign([state("a"), state("b", 7)], True)
    emitted: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(40):
        found = d.poll(rng.randint(1, 5))
        if found is not None:
            for name, i in found[1].values:
                emitted[name].append(i)
        for name, (cursor, _) in cursors(d).items():
            first = 0 if name == "a" else 7
            assert emitted[name] == list(range(first, cursor))


def test_splits_are_read_in_turn_and_none_starves() -> None:
    """Each poll goes to the next split; one that ends does not make another be skipped or read twice."""
    d = driver(Numbers(end=3))
    d.assign([state("a"), state("b", 1), state("c")], True)
    order = []
    while (found := d.poll(1)) is not None:
        order.extend(found[1].values)
    assert order == [("a", 0), ("b", 1), ("c", 0), ("a", 1), ("b", 2), ("c", 1), ("a", 2), ("c", 2)]
    assert d.exhausted


def test_a_split_is_taken_once_and_only_its_own_operators() -> None:
    """Assignments repeat everything a reader owns; "complete" does not become untrue again."""
    source = Numbers()
    d = driver(source)
    assert d.assign([state("a"), state("x", operator="other")], False) == ["a"]
    d.poll(3)
    assert d.assign([state("a"), state("b")], True) == ["b"]
    assert d.assign([state("a"), state("b")], False) == []
    assert d.complete and set(source.readers) == {"a", "b"}
    assert cursors(d) == {"a": (3, False), "b": (0, False)}


def test_a_finished_split_stays_in_the_snapshot_until_a_durable_epoch_holds_it() -> None:
    """Else a restore would read it again; it is closed at once."""
    source = Numbers(end=2)
    d = driver(source)
    d.assign([state("a"), state("b", 0)], True)
    d.poll(5)
    assert source.readers["a"].closed
    assert cursors(d, 7) == {"a": (2, True), "b": (0, False)}
    d.poll(5)
    d.durable(6)
    assert cursors(d, 8) == {"a": (2, True), "b": (2, True)}
    d.durable(7)
    assert cursors(d, 9) == {"b": (2, True)}
    d.durable(8)
    assert cursors(d, 10) == {} and d.exhausted


def test_a_split_that_was_finished_when_it_was_restored_is_not_opened() -> None:
    """It is only carried along."""
    source = Numbers()
    d = driver(source)
    assert d.assign([state("a", 9, True)], True) == []
    assert source.readers == {} and d.exhausted and d.poll(5) is None
    assert cursors(d) == {"a": (9, True)}


def test_t64_a_reader_without_splits_is_exhausted_only_when_no_more_will_come() -> None:
    """Before that it is idle."""
    d = driver(Numbers())
    d.assign([], False)
    assert not d.exhausted and d.poll(5) is None and d.active() == []
    d.assign([], True)
    assert d.exhausted


def test_drain_stops_readers_where_they_are() -> None:
    """A reader that cannot be drained is read no longer and its cursor is where it stopped; it is not finished: new input may follow."""
    source = Numbers()
    d = driver(source)
    d.assign([state("a"), state("b")], True)
    d.poll(4)
    d.truncate()
    d.truncate()
    assert d.exhausted and d.poll(5) is None
    assert cursors(d) == {"a": (4, False), "b": (0, False)}


def test_drain_lets_a_truncatable_reader_give_what_it_has_taken() -> None:
    """It ends by itself, with its last records."""
    d = driver(Numbers(Draining))
    d.assign([state("a")], False)
    d.poll(4)
    d.truncate()
    assert not d.exhausted
    found = d.poll(100)
    assert found is not None and [i for _, i in found[1].values] == [4, 5] and d.exhausted
    assert cursors(d) == {"a": (6, True)}


def test_a_participant_is_restored_once_and_kept_open_after_its_end() -> None:
    """A queue's reader has to acknowledge after the epoch is durable, when nothing more is read."""
    source = Numbers(Taking, end=2)
    d = driver(source, {"in/a": {"ids": [1]}})
    d.assign([state("a", 0)], True)
    reader: Any = source.readers["a"]
    assert reader.restored == [(4, {"ids": [1]})]
    d.poll(5)
    assert not reader.closed and d.exhausted
    assert [name for name, _ in d.participants()] == ["in/a"]
    cursors(d, 1)
    d.durable(5)
    assert [name for name, _ in d.participants()] == ["in/a"]
    d.close()
    assert reader.closed


def test_a_full_window_is_told() -> None:
    """``wants_epoch`` of any reader that is still read."""
    source = Numbers(Taking)
    d = driver(source)
    d.assign([state("a"), state("b")], True)
    assert not d.wants_epoch
    source.readers["b"].wants_epoch = True  # type: ignore[attr-defined]
    assert d.wants_epoch


def test_closing_closes_every_reader() -> None:
    """F14: descriptors and connections are given back."""
    source = Numbers()
    d = driver(source)
    d.assign([state("a"), state("b")], True)
    d.close()
    assert all(r.closed for r in source.readers.values())


def test_t59_dead_letters_say_where_and_why() -> None:
    """Position, raw bytes and reason, as records."""
    assert dead_letters([("f:7", b"\xff", "not JSON")]) == [{"position": "f:7", "raw": b"\xff", "reason": "not JSON"}]


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_cuts_and_restores_reads_each_record_once(seed: int) -> None:
    """Restart at each cut: what was emitted before it and what comes after is everything, once."""
    rng = random.Random(seed)
    source = CollectionSource(range(100), splits=4)
    splits = [state(s.split_id) for s in source.discover(frozenset())]
    bodies = {s.split_id: s.body for s in source.discover(frozenset())}
    states = [SplitState("in", s.split_id, bodies[s.split_id], None, False) for s in splits]
    kept: list[int] = []
    for epoch in range(1, 100):
        d = driver(source)
        d.assign(states, True)
        since: list[int] = []
        for _ in range(rng.randint(0, 6)):
            found = d.poll(rng.randint(1, 9))
            since += found[1].values if found else []
        states = d.cut(epoch)
        kept += since
        d.poll(5)  # emitted behind the cut: lost with the crash and read again
        if all(s.finished for s in states):
            break
    assert sorted(kept) == list(range(100))
