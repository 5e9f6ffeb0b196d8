"""Contract of the collection and generator sources: replayable by position, the same on every node."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_schema.connectors import ConnectorContext, Read, Source, SourceCapability, Split, SplitReader
from millstream_schema.errors import SourceError
from millstream_tasks.sources.memory import CollectionSource, GeneratorSource


def context(now_ms: int = 0) -> ConnectorContext:
    return ConnectorContext("job", "source", 0, 1, 1, lambda: None, lambda: now_ms)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000

    def context(self) -> ConnectorContext:
        return ConnectorContext("job", "source", 0, 1, 1, lambda: None, lambda: self.now)


def drain(reader: SplitReader, limit: int) -> list[Any]:
    values: list[Any] = []
    while True:
        read = reader.poll(limit)
        assert len(read.values) <= limit
        values += read.values
        if read.exhausted:
            return values


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(), max_size=30), st.integers(1, 5), st.integers(1, 7), st.data())
def test_reading_to_any_cut_and_reopening_there_gives_exactly_the_rest(
    values: list[int], splits: int, limit: int, data: st.DataObject
) -> None:
    """Property: for every split and every cut, prefix + reopened rest = the split, and the splits in order = the collection."""
    source = CollectionSource(values, timestamps=[v % 1000 for v in values], splits=splits)
    everything: list[int] = []
    for split in source.discover(frozenset()):
        whole = drain(source.open(split, None, context()), 1000)
        reader = source.open(split, None, context())
        cut = data.draw(st.integers(0, len(whole)))
        before = []
        for _ in range(cut):
            read = reader.poll(1)
            assert read.timestamps == [v % 1000 for v in read.values]
            before += read.values
        rest = drain(source.open(split, reader.cursor(), context()), limit)
        assert before + rest == whole
        everything += whole
    assert everything == values


def test_an_empty_collection_is_exhausted_at_the_first_poll() -> None:
    """Property: no values means exhausted, never a wait."""
    source = CollectionSource([])
    (split,) = source.discover(frozenset())
    assert source.open(split, None, context()).poll(10) == Read([], None, True)


def test_discovery_names_only_splits_that_are_not_known() -> None:
    """Property: discover(known) and known are disjoint and together the whole."""
    source = CollectionSource(range(10), splits=3)
    assert [s.split_id for s in source.discover(frozenset({"1"}))] == ["0", "2"]
    assert source.discover(frozenset({"0", "1", "2"})) == []


def test_a_cursor_beyond_the_collection_is_refused() -> None:
    """Property: a changed collection is an error that says so, not silence."""
    (split,) = CollectionSource(range(10)).discover(frozenset())
    with pytest.raises(SourceError, match="not the one that was read before"):
        CollectionSource(range(5)).open(split, 7, context())
    with pytest.raises(SourceError, match="must be a position"):
        CollectionSource(range(10)).open(split, True, context())


def test_the_caller_may_change_his_list_afterwards() -> None:
    """Property: the source reads what it was built with."""
    values = [1, 2, 3]
    source = CollectionSource(values)
    before = source.config()
    values.append(4)
    (split,) = source.discover(frozenset())
    assert drain(source.open(split, None, context()), 10) == [1, 2, 3]
    assert CollectionSource([1, 2, 3]).config() == before


def test_the_digest_is_the_same_in_every_process() -> None:
    """Property: PYTHONHASHSEED does not enter the fingerprint; content does."""
    code = (
        "from millstream_tasks.sources.memory import CollectionSource as C;"
        "print(C([{'a', 'b', 'c'}, {(1, 2): 'x', None: 2**80}, frozenset({1, 'z'}), {'k': b'v'}]).config()['digest'])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert seen != {"None"}
    assert CollectionSource([1]).config()["digest"] != CollectionSource(["1"]).config()["digest"]
    assert CollectionSource([object()]).config()["digest"] is None


def test_wrong_arguments_are_listed_all_at_once() -> None:
    """Property: problems() names each, and a right configuration has none."""
    assert len(CollectionSource([1], timestamps=[1, 2], splits=0).problems()) == 2
    assert len(GeneratorSource(lambda s, p, n: None, splits=0, rate=0).problems()) == 2
    assert CollectionSource([1], timestamps=[1]).problems() == []
    assert GeneratorSource(lambda s, p, n: None, rate=0.5).problems() == []


def count_to_20(split: int, position: int, limit: int) -> list[int] | None:
    values = list(range(position, min(position + limit, 20)))
    return [split * 100 + v for v in values] or None


@pytest.mark.parametrize("cut", range(21))
def test_a_generator_resumes_at_any_position(cut: int) -> None:
    """Property: for every cut, prefix + reopened rest = the whole, in each split."""
    source = GeneratorSource(count_to_20, splits=2, timestamp=lambda v: v * 10)
    for index, split in enumerate(source.discover(frozenset())):
        reader = source.open(split, None, context())
        before = [v for _ in range(cut) for v in reader.poll(1).values]
        assert before + drain(source.open(split, reader.cursor(), context()), 7) == [index * 100 + v for v in range(20)]


def test_an_empty_answer_is_not_the_end() -> None:
    """Property: [] means nothing now, None means the end."""
    source = GeneratorSource(lambda s, p, n: [] if p == 0 else None, bounded=False)
    (split,) = source.discover(frozenset())
    assert source.open(split, None, context()).poll(5) == Read([])
    assert source.open(split, 1, context()).poll(5) == Read([], exhausted=True)


def test_more_records_than_asked_for_are_an_error() -> None:
    """Property: the function's contract is checked, not trusted."""
    source = GeneratorSource(lambda s, p, n: [0] * (n + 1))
    (split,) = source.discover(frozenset())
    with pytest.raises(SourceError, match="at most 3"):
        source.open(split, None, context()).poll(3)


def test_the_rate_is_kept_by_the_nodes_clock() -> None:
    """Property: no more than rate × time, at most one second of it caught up, also when the clock is set back."""
    clock = Clock()
    source = GeneratorSource(lambda s, p, n: list(range(p, p + n)), rate=100)
    (split,) = source.discover(frozenset())
    reader = source.open(split, None, clock.context())
    assert reader.poll(1000).values == []
    clock.now += 100
    assert reader.poll(1000).values == list(range(10))
    clock.now += 3_600_000
    assert len(reader.poll(1000).values) == 100
    clock.now -= 5_000
    assert reader.poll(1000).values == []
    clock.now += 50
    assert len(reader.poll(1000).values) == 5


def test_both_are_sources_of_the_port() -> None:
    """Property: the port's shape, replayable, and a foreign split is refused."""
    sources: list[Source] = [CollectionSource([1]), GeneratorSource(count_to_20)]
    for source in sources:
        assert isinstance(source, Source)
        assert source.capability is SourceCapability.REPLAYABLE
        with pytest.raises(SourceError, match="not made by this source"):
            source.open(Split("0", None), None, context())
