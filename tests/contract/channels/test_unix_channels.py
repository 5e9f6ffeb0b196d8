"""AF_UNIX channels: admission, death of either side, pushing back through the socket, and the files they leave."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
from tests.contract.channels.harness import Carrier, Pair, make_carrier, raises, take, until

from millstream_schema.channels import ChannelId, Frame
from millstream_schema.errors import ChannelBroken, ChannelLost, ChannelMissing, ConfigurationError
from millstream_tasks.channels.unix import UnixTransport
from millstream_tasks.channels.unix_wire import HEADER, HELLO_PRODUCE, hello, socket_name

CHANNEL = ChannelId("job", 3, "edge", 0, 1)

PRODUCER = """
import sys
from millstream_schema.channels import ChannelId, Frame
from millstream_tasks.channels.unix import UnixTransport
transport = UnixTransport(sys.argv[1])
writer = transport.connect(ChannelId("job", 3, "edge", 0, 1), 8)
for number in (1, 2, 3):
    writer.put(Frame(number, b"f%d" % number))
print("put", flush=True)
transport.wait(60)
"""

CONSUMER = """
import sys
from millstream_schema.channels import ChannelId
from millstream_tasks.channels.unix import UnixTransport
transport = UnixTransport(sys.argv[1])
reader = transport.create(ChannelId("job", 3, "edge", 0, 1), 8)
print("created", flush=True)
while reader.take() is None:
    transport.wait(60)
reader.processed(1)
transport.wait(0)
print("taken", flush=True)
transport.wait(60)
"""


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    yield from make_carrier("unix")


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[UnixTransport]:
    transport = UnixTransport(tmp_path)
    yield transport
    transport.close()


def process(script: str, runtime_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, str(runtime_dir)], stdout=subprocess.PIPE, text=True)


def line(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    return peer.stdout.readline().strip()


def kill(peer: subprocess.Popen[str]) -> None:
    peer.kill()
    peer.wait()
    assert peer.stdout is not None
    peer.stdout.close()


def raw_producer(tmp_path: Path, name: str, generation: int) -> socket.socket:
    """A peer that speaks the protocol by hand."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(str(tmp_path / socket_name(CHANNEL.name())))
    peer.sendall(hello(HELLO_PRODUCE, generation, name))
    return peer


def test_a_killed_producer_is_a_lost_channel_after_its_complete_frames(tmp_path: Path, transport: UnixTransport) -> None:
    """kill -9 of the producing process: the reader hands out what came whole, then raises ChannelLost."""
    reader = transport.create(CHANNEL, 8)
    peer = process(PRODUCER, tmp_path)
    try:
        assert line(peer) == "put"
    finally:
        kill(peer)
    assert [frame.data for frame in take(reader, 3, transport)] == [b"f1", b"f2", b"f3"]
    assert "producer" in raises(ChannelLost, reader.take, transport)


def test_a_killed_consumer_is_a_lost_channel_and_its_file_does_not_hinder_the_next(tmp_path: Path, transport: UnixTransport) -> None:
    """kill -9 of the consuming process: the writer raises ChannelLost; connecting again finds nothing; creating works."""
    peer = process(CONSUMER, tmp_path)
    try:
        assert line(peer) == "created"
        writer = transport.connect(CHANNEL, 8)
        writer.put(Frame(1, b"x"))
        assert line(peer) == "taken"
        until(lambda: writer.reported == 1, transport)
    finally:
        kill(peer)
    numbers = iter(range(2, 1000))
    assert "consumer" in raises(ChannelLost, lambda: writer.put(Frame(next(numbers), b"x")), transport)
    with pytest.raises(ChannelLost):
        _ = writer.reported
    with pytest.raises(ChannelMissing):
        transport.connect(CHANNEL, 8)
    assert (tmp_path / socket_name(CHANNEL.name())).exists()
    reader = transport.create(CHANNEL, 8)
    transport.connect(CHANNEL, 8).put(Frame(1, b"new"))
    assert take(reader, 1, transport) == [Frame(1, b"new")]


def test_an_unfinished_frame_of_a_dead_producer_is_not_handed_out(tmp_path: Path, transport: UnixTransport) -> None:
    """Half a frame, then the end of the connection: ChannelLost, not half a frame."""
    reader = transport.create(CHANNEL, 8)
    with raw_producer(tmp_path, CHANNEL.name(), 3) as peer:
        peer.sendall(HEADER.pack(1, 3) + b"abc" + HEADER.pack(2, 100) + b"half")
    assert take(reader, 1, transport) == [Frame(1, b"abc")]
    raises(ChannelLost, reader.take, transport)


def test_a_second_producer_is_refused_and_the_first_goes_on(carrier: Carrier) -> None:
    """One producer per channel: the newcomer is told so, the older connection does not notice."""
    pair = Pair(carrier, 8)
    pair.writer.put(Frame(1, b"first"))
    assert take(pair.reader, 1, *pair.both) == [Frame(1, b"first")]
    other = carrier.transport()
    newcomer = other.connect(pair.channel, 8)
    numbers = iter(range(1, 1000))
    assert "refused" in raises(ChannelLost, lambda: newcomer.put(Frame(next(numbers), b"second")), pair.consumer, other)
    pair.writer.put(Frame(2, b"first"))
    assert take(pair.reader, 1, *pair.both) == [Frame(2, b"first")]
    assert pair.reader.take() is None


@pytest.mark.parametrize(("name", "generation"), [("millstream.job.3.edge.0.2", 3), ("millstream.job.3.edge.0.1", 2)])
def test_a_producer_that_means_another_channel_or_generation_is_refused(
    tmp_path: Path, transport: UnixTransport, name: str, generation: int
) -> None:
    """The file name is a hash, so the hello decides: none of such a producer's frames is handed out."""
    reader = transport.create(CHANNEL, 8)
    with raw_producer(tmp_path, name, generation) as peer:
        peer.settimeout(0.01)
        peer.sendall(HEADER.pack(1, 1) + b"x")
        ended: list[bytes] = []

        def refused() -> bool:
            assert reader.take() is None
            try:
                ended.append(peer.recv(8))
            except TimeoutError:
                return False
            except ConnectionResetError:
                ended.append(b"")
            return ended[-1] == b""

        until(refused, transport)
    transport.connect(CHANNEL, 8).put(Frame(1, b"right"))
    assert take(reader, 1, transport) == [Frame(1, b"right")]


def test_strangers_that_say_nothing_or_nonsense_do_not_disturb(tmp_path: Path, transport: UnixTransport) -> None:
    """Silent and talking strangers are bounded and dismissed; a producer still gets in."""
    reader = transport.create(CHANNEL, 8)
    path = str(tmp_path / socket_name(CHANNEL.name()))
    strangers = []
    for index in range(40):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(path)
        if index % 2:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers.append(stranger)
        transport.wait(0.001)
        assert reader.take() is None
    transport.connect(CHANNEL, 8).put(Frame(1, b"x"))
    assert take(reader, 1, transport) == [Frame(1, b"x")]
    for stranger in strangers:
        stranger.close()


def test_a_full_window_stops_reading_the_socket(tmp_path: Path, transport: UnixTransport) -> None:
    """A held or slow channel pushes back: what a producer can send is bounded by window, buffers, and no more."""
    capacity, size = 4, 64 * 1024
    reader = transport.create(CHANNEL, capacity)
    with raw_producer(tmp_path, CHANNEL.name(), 3) as peer:
        peer.setblocking(False)
        bound = capacity * size + 2 * peer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + 512 * 1024
        sent = number = taken = 0
        rest = b""
        deadline = monotonic() + 0.5
        while monotonic() < deadline:
            if not rest:
                number += 1
                rest = HEADER.pack(number, size) + bytes(size)
            try:
                count = peer.send(rest)
                rest = rest[count:]
                sent += count
            except BlockingIOError:
                if taken == capacity and not select.select([], [peer], [], 0.05)[1]:
                    break
            taken += reader.take() is not None
            transport.wait(0)
        assert taken == capacity
        assert capacity * size < sent <= bound


def test_frames_above_max_frame_are_refused_on_both_ends(tmp_path: Path) -> None:
    """The writer names the setting; a reader that gets one all the same breaks off instead of allocating."""
    transport = UnixTransport(tmp_path, max_frame=1000)
    try:
        reader = transport.create(CHANNEL, 8)
        writer = transport.connect(CHANNEL, 8)
        with pytest.raises(ConfigurationError, match="max_frame"):
            writer.put(Frame(1, bytes(1001)))
        writer.put(Frame(1, bytes(1000)))
        assert take(reader, 1, transport) == [Frame(1, bytes(1000))]
        writer.close()
        reader = transport.create(CHANNEL, 8)
        with raw_producer(tmp_path, CHANNEL.name(), 3) as peer:
            peer.sendall(HEADER.pack(1, 2**31))
            assert "max_frame" in raises(ChannelBroken, reader.take, transport)
    finally:
        transport.close()


def test_close_removes_the_socket_file_but_not_that_of_a_successor(tmp_path: Path, transport: UnixTransport) -> None:
    """Nothing is left in the directory; an old consumer that closes late does not cut off a new one."""
    path = tmp_path / socket_name(CHANNEL.name())
    old = transport.create(CHANNEL, 8)
    assert path.exists()
    path.unlink()
    other = UnixTransport(tmp_path)
    try:
        successor = other.create(CHANNEL, 8)
        old.close()
        assert path.exists()
        transport.connect(CHANNEL, 8).put(Frame(1, b"x"))
        assert take(successor, 1, other, transport) == [Frame(1, b"x")]
    finally:
        other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_channel_with_a_living_consumer_cannot_be_taken_over(tmp_path: Path, transport: UnixTransport) -> None:
    """create beside a living consumer raises and leaves that one alone."""
    reader = transport.create(CHANNEL, 8)
    other = UnixTransport(tmp_path)
    try:
        with pytest.raises(ChannelLost, match="living consumer"):
            other.create(CHANNEL, 8)
    finally:
        other.close()
    transport.connect(CHANNEL, 8).put(Frame(1, b"x"))
    assert take(reader, 1, transport) == [Frame(1, b"x")]


def test_a_directory_that_is_too_long_for_socket_addresses_is_refused_at_once(tmp_path: Path) -> None:
    """The error says how long it may be, before any job runs."""
    with pytest.raises(ConfigurationError, match="too long"):
        UnixTransport(tmp_path / ("d" * 100))


def test_the_directory_is_private(tmp_path: Path) -> None:
    """A directory made by the transport can be entered by its user alone."""
    UnixTransport(tmp_path / "run").close()
    assert os.stat(tmp_path / "run").st_mode & 0o777 == 0o700
