"""Contract of the Redis stream source against a real server: exact resumption, and every loss found."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from millstream_schema.connectors import ConnectorContext, Json, Source, Split, SplitReader
from millstream_schema.errors import RecordError, SourceError, SourceUnavailable
from millstream_tasks.sources.redis_streams import Position, RedisStreamSource, check_loss

URL = "redis://127.0.0.1:6379/0"
CONTEXT = ConnectorContext("job", "source", 0, 1, 1, lambda: None, lambda: 0)


class Streams:
    def __init__(self) -> None:
        self.client = redis.Redis.from_url(URL)
        self.prefix = f"ms-source-{uuid.uuid4().hex[:12]}"
        self.key = f"{self.prefix}:a"

    def add(self, *numbers: int, key: str | None = None) -> None:
        for number in numbers:
            self.client.xadd(key or self.key, {"n": number}, id=f"{number}-1")

    def open(self, cursor: Json = None, **options: Any) -> SplitReader:
        source = RedisStreamSource(URL, [self.key], poll_interval=0, **options)
        assert source.problems() == []
        (split,) = source.discover(frozenset())
        return source.open(split, cursor, CONTEXT)


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    yield made
    for key in made.client.scan_iter(match=f"{made.prefix}*"):
        made.client.delete(key)
    made.client.close()


def numbers(reader: SplitReader, limit: int = 100) -> list[int]:
    """All that is there now."""
    found: list[int] = []
    while values := reader.poll(limit).values:
        found += [int(value["n"]) for value in values]
    return found


def kept(reader: SplitReader) -> Json:
    cursor: Json = json.loads(json.dumps(reader.cursor()))
    reader.close()
    return cursor


@pytest.mark.redis
def test_reading_to_any_cut_and_reopening_there_gives_exactly_the_rest(streams: Streams) -> None:
    """Property: for every cut, prefix + reopened rest = the stream, new entries included."""
    streams.add(*range(1, 9))
    for cut in range(9):
        reader = streams.open(id_timestamps=True)
        before = []
        for _ in range(cut):
            read = reader.poll(1)
            assert read.timestamps == [int(read.values[0]["n"])]
            before += [int(read.values[0]["n"])]
        rest = streams.open(kept(reader))
        assert before + numbers(rest, 3) == list(range(1, 9))
        rest.close()
    reader = streams.open()
    assert numbers(reader) == list(range(1, 9))
    streams.add(9)
    assert numbers(reader) == [9]
    reader.close()


@pytest.mark.redis
@pytest.mark.parametrize("keep", range(9))
def test_a_trim_is_a_loss_exactly_when_it_took_unread_entries(streams: Streams, keep: int) -> None:
    """Property: of 8 entries 5 were read; trimming to ``keep`` ≥ 3 is no loss, below it is an error that says how many."""
    streams.add(*range(1, 9))
    reader = streams.open()
    for _ in range(5):
        reader.poll(1)
    cursor = kept(reader)
    streams.client.xtrim(streams.key, maxlen=keep, approximate=False)
    again = streams.open(cursor)
    if keep >= 3:
        assert numbers(again) == [6, 7, 8]
    else:
        with pytest.raises(SourceError, match=f"lost {3 - keep} entries after 5-1"):
            again.poll(10)
    again.close()


@pytest.mark.redis
def test_a_loss_while_reading_is_found_too(streams: Streams) -> None:
    """Property: a running reader that is overtaken by a trim stops."""
    streams.add(1, 2)
    reader = streams.open()
    assert numbers(reader) == [1, 2]
    streams.add(3, 4)
    streams.client.xtrim(streams.key, maxlen=1, approximate=False)
    with pytest.raises(SourceError, match="lost 1 entries"):
        reader.poll(10)
    reader.close()


@pytest.mark.redis
def test_what_was_trimmed_before_the_first_read_is_no_loss(streams: Streams) -> None:
    """Property: the beginning is the first entry that is there; counting starts from it."""
    streams.add(1, 2, 3, 4)
    streams.client.xtrim(streams.key, maxlen=2, approximate=False)
    reader = streams.open()
    assert numbers(reader) == [3, 4]
    assert kept(reader) == {"id": "4-1", "entries_read": 4}


@pytest.mark.redis
def test_entries_deleted_on_purpose_do_not_become_a_loss_later(streams: Streams) -> None:
    """Property: XDEL of unread entries, then reading to the end, then a trim of all that was read: no false alarm."""
    streams.add(*range(1, 7))
    reader = streams.open()
    reader.poll(2)
    cursor = kept(reader)
    streams.client.xdel(streams.key, "6-1")
    reader = streams.open(cursor)
    assert numbers(reader) == [3, 4, 5]
    streams.client.xtrim(streams.key, maxlen=0, approximate=False)
    streams.add(7)
    again = streams.open(kept(reader))
    assert numbers(again) == [7]
    again.close()


@pytest.mark.redis
def test_a_stream_that_was_deleted_or_made_anew_is_an_error(streams: Streams) -> None:
    """Property: an empty answer of another stream is not taken for "nothing new"."""
    streams.add(5, 6)
    reader = streams.open()
    assert numbers(reader) == [5, 6]
    cursor = kept(reader)
    streams.client.delete(streams.key)
    for match, entries in (("is gone", []), ("was made anew", [1])):
        streams.add(*entries)
        again = streams.open(cursor)
        with pytest.raises(SourceError, match=match):
            again.poll(10)
        again.close()


@pytest.mark.redis
def test_a_stream_that_appears_later_is_read_from_its_beginning(streams: Streams) -> None:
    """Property: new streams under the pattern are found, and one that does not exist yet is waited for and read from its first entry."""
    waiting = streams.open()
    assert waiting.poll(10).values == []
    cursor = kept(waiting)
    streams.add(1, 2)
    later = streams.open(cursor)
    assert numbers(later) == [1, 2]
    later.close()
    source: Source = RedisStreamSource(URL, match=f"{streams.prefix}:*", poll_interval=0)
    first = source.discover(frozenset())
    assert [s.split_id for s in first] == [streams.key]
    streams.client.set(f"{streams.prefix}:no-stream", "x")
    streams.add(3, 4, key=f"{streams.prefix}:b")
    (new,) = source.discover(frozenset(s.split_id for s in first))
    assert new.split_id == f"{streams.prefix}:b"
    reader = source.open(new, None, CONTEXT)
    assert numbers(reader) == [3, 4]
    reader.close()


@pytest.mark.redis
def test_poison_follows_the_policy_and_the_cursor_stays_exact(streams: Streams) -> None:
    """Property: skip counts, dead-letter names the entry, fail hands out what came before and stays in front of it (T-59)."""
    streams.add(1)
    streams.client.xadd(streams.key, {"n": b"\xff"}, id="2-1")
    streams.add(3)
    skipping = streams.open(poison="skip")
    read = skipping.poll(10)
    assert (read.values, read.skipped) == ([{"n": "1"}, {"n": "3"}], 1)
    skipping.close()
    dead = streams.open(poison="dead-letter")
    ((position, raw, reason),) = dead.poll(10).dead
    assert position == f"{streams.key} 2-1"
    assert raw == b"\x92\xc4\x01n\xc4\x01\xff"
    assert "UnicodeDecodeError" in reason
    dead.close()
    failing = streams.open()
    assert failing.poll(10).values == [{"n": "1"}]
    cursor = failing.cursor()
    with pytest.raises(RecordError, match="2-1"):
        failing.poll(10)
    assert failing.cursor() == cursor
    failing.close()
    mended = streams.open(cursor, decode=None)
    assert mended.poll(10).values == [{b"n": b"\xff"}, {b"n": b"3"}]
    mended.close()
    parsed = streams.open(parse=lambda fields: int(fields["n"]) * 10, decode="latin-1", poison="skip")
    assert parsed.poll(10).values == [10, 30]
    parsed.close()


@pytest.mark.redis
def test_a_key_that_is_no_stream_is_an_error(streams: Streams) -> None:
    """Property: WRONGTYPE is raised at once and names the key."""
    streams.client.set(streams.key, "x")
    reader = streams.open()
    with pytest.raises(SourceError, match="cannot be read"):
        reader.poll(10)
    reader.close()


def test_an_older_server_is_judged_by_its_first_entry() -> None:
    """Property: without counters, a kept last entry proves that nothing was lost; else the source stops."""
    info: dict[str, Any] = {"length": 2, "last-generated-id": b"9-1", "first-entry": (b"5-1", {})}
    assert check_loss("s", info, None) == Position("0-0", None)
    assert check_loss("s", info, Position("5-1", None)) == Position("5-1", None)
    with pytest.raises(SourceError, match="may be lost"):
        check_loss("s", info, Position("4-1", None))
    empty = {"length": 0, "last-generated-id": b"9-1", "first-entry": None}
    assert check_loss("s", empty, Position("9-1", None)) == Position("9-1", None)
    with pytest.raises(SourceError, match="may be lost"):
        check_loss("s", empty, Position("8-1", None))


def test_an_unreachable_server_is_an_empty_read_and_then_an_error() -> None:
    """Property: an outage does not block a poll, and ends in an error after give_up."""
    for give_up in (60, 0):
        source = RedisStreamSource("redis://127.0.0.1:1/0", ["s"], give_up=give_up)
        reader = source.open(Split("s"), None, CONTEXT)
        if give_up:
            assert reader.poll(10).values == []
            assert reader.cursor() is None
        else:
            with pytest.raises(SourceUnavailable, match="could not be reached"):
                reader.poll(10)
        reader.close()


def test_looking_for_streams_on_an_unreachable_server_is_an_outage_and_a_pattern_is_not_needed_for_named_ones() -> None:
    """Property: SourceUnavailable, which the runner waits out for give_up seconds; named streams are known without asking; no secrets."""
    source = RedisStreamSource("redis://u:s3cret@127.0.0.1:1/0", [], match="orders:*", give_up=7)
    with pytest.raises(SourceUnavailable, match=r"orders:\*.*127\.0\.0\.1") as caught:
        source.discover(frozenset())
    assert "s3cret" not in str(caught.value)
    assert source.give_up == 7
    named = RedisStreamSource("redis://127.0.0.1:1/0", ["s"])
    assert named.discover(frozenset()) == [Split("s")]


def test_wrong_options_are_listed_and_the_password_is_nowhere() -> None:
    """Property: problems() lists everything; config() identifies without secrets; a foreign cursor is refused."""
    assert len(RedisStreamSource("http://x", [], decode="no", poison="no", give_up=-1).problems()) == 5
    source = RedisStreamSource("redis://u:s3cret@h:6379/3", "orders")
    assert source.problems() == []
    assert source.config()["redis"] == "redis://h:6379/3"
    assert "s3cret" not in json.dumps(source.config())
    for cursor in (5, {"id": "x", "entries_read": 1}, {"id": "1-1", "entries_read": "1"}):
        with pytest.raises(SourceError, match="not a cursor"):
            source.open(Split("orders"), cursor, CONTEXT)
