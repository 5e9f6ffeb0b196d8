"""Redis channels: what is in the server, what it takes to be usable, and how a lost connection shows."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import cast

import pytest
import redis
from tests.contract.channels.harness import PREFIX, Carrier, Pair, make_carrier, raises, take, until

from millstream_schema.channels import ChannelId, Frame
from millstream_schema.errors import ChannelLost, ConfigurationError
from millstream_tasks.channels.redis import HOUR_MS, RedisTransport
from millstream_tasks.channels.redis_link import RedisLink, check_server

pytestmark = pytest.mark.redis


@pytest.fixture
def carrier(redis_url: str) -> Iterator[Carrier]:
    yield from make_carrier("redis", redis_url)


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as server:
        yield server


def kill(server: redis.Redis, role: str) -> int:
    """CLIENT KILL every connection of that role in this database; returns how many."""
    database = str(server.connection_pool.connection_kwargs["db"])
    own = [client for client in server.client_list() if client["name"] == f"{PREFIX}.{role}" and client["db"] == database]
    for client in own:
        server.client_kill_filter(_id=client["id"])
    return len(own)


@pytest.mark.parametrize("role", ["incoming", "outgoing"])
def test_a_killed_connection_is_channel_lost_on_both_ends_and_nobody_reconnects(carrier: Carrier, server: redis.Redis, role: str) -> None:
    """CLIENT KILL: every reader and writer of the transport raises from then on, and close does not hang."""
    pair = Pair(carrier, 8)
    pair.writer.put(Frame(1, b"a"))
    take(pair.reader, 1, *pair.both)
    assert kill(server, role) == 2
    numbers = iter(range(2, 100_000))
    raises(ChannelLost, lambda: pair.writer.put(Frame(next(numbers), b"b")), *pair.both)

    def report_and_take() -> None:
        pair.reader.processed(next(numbers))
        while pair.reader.take() is not None:
            pass

    raises(ChannelLost, report_and_take, *pair.both)
    with pytest.raises(ChannelLost):
        _ = pair.writer.reported
    with pytest.raises(ChannelLost):
        pair.consumer.create(carrier.channel(), 8)
    started = monotonic()
    pair.producer.close()
    pair.consumer.close()
    assert monotonic() - started < 2
    assert [kill(server, each) for each in ("incoming", "outgoing")] == [0, 0]


def test_entries_carry_generation_and_number_without_groups_and_expire_after_an_hour_or_more(carrier: Carrier, server: redis.Redis) -> None:
    """The stream's ids are {generation}-{number}; both keys expire late enough; no consumer group stays."""
    pair = Pair(carrier, 8, carrier.channel(generation=7))
    key = pair.channel.name(PREFIX)
    for number in (1, 2):
        pair.writer.put(Frame(number, b"d%d" % number))
    take(pair.reader, 2, *pair.both)
    assert server.xrange(key) == [(b"7-1", {b"d": b"d1"}), (b"7-2", {b"d": b"d2"})]
    assert server.xinfo_groups(key) == []
    for name in (key, key + ".r"):
        assert server.pttl(name) >= HOUR_MS - 60_000


def test_processed_frames_are_trimmed_and_progress_is_one_entry(carrier: Carrier, server: redis.Redis) -> None:
    """Memory in Redis is bounded by the window, whatever went through."""
    pair = Pair(carrier, 4)
    key = pair.channel.name(PREFIX)
    for number in range(1, 41):
        until(lambda number=number: number - pair.writer.reported <= 4, *pair.both)  # type: ignore[misc]
        pair.writer.put(Frame(number, b"x"))
        take(pair.reader, 1, *pair.both)
        pair.reader.processed(number)
        assert server.xlen(key) <= 5
    until(lambda: pair.writer.reported == 40, *pair.both)
    until(lambda: server.xlen(key) == 0, *pair.both)
    assert server.xrange(key + ".r") == [(b"7-40" if pair.channel.generation == 7 else b"1-40", {b"n": b""})]


def test_T57_sending_the_same_entries_again_changes_nothing(carrier: Carrier, server: redis.Redis) -> None:
    """T-57: after a lost answer a producer may send a burst again; Redis refuses what it has and keeps the order."""
    pair = Pair(carrier, 8)
    for number in (1, 2, 3, 1, 2, 3, 4):
        pair.writer.put(Frame(number, b"%d" % number))
    assert [frame.number for frame in take(pair.reader, 4, *pair.both)] == [1, 2, 3, 4]
    assert server.xlen(pair.channel.name(PREFIX)) == 4
    assert pair.reader.take() is None


def test_a_deleted_channel_is_noticed_by_its_reader_when_it_reports(carrier: Carrier, server: redis.Redis) -> None:
    """XREAD says nothing about a missing stream, so the report must."""
    pair = Pair(carrier, 8)
    pair.writer.put(Frame(1, b"a"))
    take(pair.reader, 1, *pair.both)
    carrier.transport().delete([pair.channel])
    pair.reader.processed(1)
    assert "deleted" in raises(ChannelLost, pair.reader.take, *pair.both)
    assert not server.exists(pair.channel.name(PREFIX), pair.channel.name(PREFIX) + ".r")


def test_nothing_is_left_after_delete_and_close(redis_url: str, server: redis.Redis) -> None:
    """No stream, no report, no wake-up key."""
    before = set(server.scan_iter())
    transport = RedisTransport(redis_url, "mstest-left")
    channels = [ChannelId("left", 1, "e", 0, target) for target in range(3)]
    for channel in channels:
        transport.create(channel, 8)
        transport.connect(channel, 8)
    until(lambda: len(set(server.scan_iter()) - before) == 7, transport)
    transport.delete(channels)
    transport.close()
    assert set(server.scan_iter()) == before


def test_expiry_is_renewed_while_the_channel_lives(carrier: Carrier, server: redis.Redis) -> None:
    """The renewal that is due lifts both keys' expiry again."""
    pair = Pair(carrier, 8)
    key = pair.channel.name(PREFIX)
    for name in (key, key + ".r"):
        server.pexpire(name, 50_000)
    transport = cast(RedisTransport, pair.consumer)
    transport._outgoing._renew_at = 0.0
    transport._shared.poke()
    until(lambda: all(server.pttl(name) > HOUR_MS for name in (key, key + ".r")), *pair.both)


class Server:
    """A link that answers INFO as a server with other settings would."""

    def __init__(self, **values: str) -> None:
        self._info = "".join(f"{name}:{value}\r\n" for name, value in values.items())

    def run(self, commands: list[bytes]) -> list[bytes]:
        return [self._info.encode()]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"redis_version": "6.0.16", "maxmemory_policy": "noeviction"}, "6.2"),
        ({"redis_version": "7.0.15", "maxmemory_policy": "allkeys-lru"}, "noeviction"),
        ({"redis_version": "7.0.15"}, "noeviction"),
        ({"redis_version": "7.0.15", "maxmemory_policy": "noeviction", "cluster_enabled": "1"}, "cluster"),
    ],
)
def test_a_server_that_could_lose_frames_is_refused_with_what_to_set(values: dict[str, str], says: str) -> None:
    """Too old, evicting, or a cluster: ConfigurationError at construction."""
    with pytest.raises(ConfigurationError, match=says):
        check_server(cast(RedisLink, Server(**values)))


def test_a_server_as_it_should_be_is_accepted() -> None:
    """6.2 with noeviction is enough; so is 10."""
    check_server(cast(RedisLink, Server(redis_version="6.2.0", maxmemory_policy="noeviction")))
    check_server(cast(RedisLink, Server(redis_version="10.1.2", maxmemory_policy="noeviction", cluster_enabled="0")))


@pytest.mark.parametrize("url", ["redis://:s3cr%25et@127.0.0.1:1/0", "redis://nobody:s3cr%25et@{address}/0"])
def test_no_error_text_holds_the_password(redis_url: str, url: str) -> None:
    """Neither a refused connection nor a refused login shows it, in the message or in a chained one."""
    address = redis_url.split("//", 1)[1].rsplit("@", 1)[-1].split("/", 1)[0]
    with pytest.raises(ChannelLost) as caught:
        RedisTransport(url.format(address=address))
    chain: BaseException | None = caught.value
    while chain is not None:
        assert "s3cr" not in str(chain)
        chain = chain.__cause__


@pytest.mark.parametrize("arguments", [{"url": "http://x"}, {"url": "redis://127.0.0.1:6379/0", "expire_ms": 1000}])
def test_wrong_settings_are_refused_with_what_to_write(arguments: dict[str, object]) -> None:
    """A wrong scheme or too short an expiry never gets as far as a connection."""
    with pytest.raises(ConfigurationError):
        RedisTransport(**arguments)  # type: ignore[arg-type]
