"""The pipe between a node and its subtask processes: frames in pieces, and a child that does not read."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from millstream_schema.control import Deployment, DeployMode, Failed, Lease, SubtaskMessage, encode
from millstream_schema.settings import StreamSettings
from millstream_tasks.shell import wire
from millstream_tasks.shell.processes import ProcessChild, _Process
from millstream_tasks.shell.wire import FrameTooLong, Unpacked, Unsent, pack, receive

DEPLOYMENT = Deployment(
    job="j",
    factory="f",
    config={},
    parallelism=None,
    overrides={},
    plan_fingerprint="p",
    generation=1,
    attempt="a",
    subtask="s:0",
    mode=DeployMode.RUN,
    settings=StreamSettings(),
    restore_epoch=0,
    restored=[],
    splits=[],
    known_splits={},
)


def test_a_frame_that_comes_in_pieces_survives_a_timeout_in_its_middle() -> None:
    """SO_RCVTIMEO raises BlockingIOError on a blocking socket; once a frame has begun its rest is waited for."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 20_000))
        frame = pack(b"x" * 1000)
        theirs.sendall(frame[:7])
        late = threading.Timer(0.15, theirs.sendall, [frame[7:] + pack(b"next")])
        late.start()
        assert receive(ours) == b"x" * 1000
        assert receive(ours) == b"next"
        late.join()


PIECE = 1 << 10


def test_a_large_frame_in_many_small_pieces_comes_out_whole_with_those_round_it() -> None:
    """Were each piece to cost what has come before it, this would not end within the test's time."""
    large = bytes(range(256)) * (64 << 12)
    data = pack(b"before") + pack(large) + pack(b"") + pack(b"after") + pack(b"late")[:3]
    unpacked = Unpacked()
    found = [frame for at in range(0, len(data), PIECE) for frame in unpacked.feed(data[at : at + PIECE])]
    assert [len(frame) for frame in found] == [6, len(large), 0, 5] and found[1] == large
    assert list(unpacked.feed(pack(b"late")[3:])) == [b"late"]


def test_frames_come_out_the_same_wherever_they_are_cut() -> None:
    """One byte at a time, all at once, and every two pieces."""
    frames = [b"", b"a", b"bc" * 300, b"", b"d"]
    data = b"".join(map(pack, frames))
    for size in (1, 2, 3, 5, 7, 64, len(data)):
        unpacked = Unpacked()
        assert [f for at in range(0, len(data), size) for f in unpacked.feed(data[at : at + size])] == frames
    for cut in range(len(data)):
        unpacked = Unpacked()
        assert [*unpacked.feed(data[:cut]), *unpacked.feed(data[cut:])] == frames


class Slow:
    """A socket that takes a little at a time, and now and then nothing."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.calls = 0

    def send(self, data: memoryview) -> int:
        self.calls += 1
        if self.calls % 100 == 0:
            raise BlockingIOError
        self.got.append(bytes(data[:PIECE]))
        return len(self.got[-1])


def test_a_large_frame_goes_out_whole_through_a_socket_that_takes_little() -> None:
    """Were each piece to cost what is left, this would not end within the test's time."""
    large, slow, unsent = bytes(range(256)) * (64 << 12), Slow(), Unsent()
    unsent.add(pack(large))
    unsent.add(pack(b"after"))
    while unsent:
        unsent.push(slow)  # type: ignore[arg-type]
    assert b"".join(slow.got) == pack(large) + pack(b"after")


class Deaf(_Process):
    """A process that never reads its pipe."""

    def __init__(self) -> None:
        self.sock, self.other_end = socket.socketpair()
        self.popen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_sending_to_a_child_that_does_not_read_does_not_hold_up_its_node() -> None:
    """More than the pipe holds is queued; killing the child ends it all."""
    process, ended = Deaf(), threading.Event()
    child = ProcessChild(process, DEPLOYMENT, lambda message: ended.set() if message is None else None, lambda: None)
    began = time.monotonic()
    for n in range(100_000):
        child.send(Lease(float(n)))
    assert time.monotonic() - began < 10
    child.kill()
    process.other_end.close()
    assert ended.wait(10)
    assert process.popen.wait(10) != 0


@pytest.mark.parametrize("said", [pack(b"\xc1 not of ours"), struct.pack("<I", wire.MAX + 1) + b"x"], ids=["undecodable", "too long"])
def test_a_child_that_cannot_be_understood_counts_as_dead_and_is_killed(said: bytes) -> None:
    """What it said before is delivered; the node is told, and does not keep a subtask it can no longer hear."""
    process, ended = Deaf(), threading.Event()
    heard: list[SubtaskMessage | None] = []

    def deliver(message: SubtaskMessage | None) -> None:
        heard.append(message)
        if message is None:
            ended.set()

    child = ProcessChild(process, DEPLOYMENT, deliver, lambda: None)
    failed = Failed("channel", "lost")
    process.other_end.sendall(pack(encode(failed)) + said)
    assert ended.wait(10)
    assert heard == [failed, None]
    assert process.popen.wait(10) != 0
    child.kill()
    process.other_end.close()


def test_a_message_that_no_pipe_takes_ends_the_child_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deployment would never reach it, and the node would wait for a child that does nothing."""
    monkeypatch.setattr(wire, "MAX", 16)
    process, ended = Deaf(), threading.Event()
    child = ProcessChild(process, DEPLOYMENT, lambda message: ended.set() if message is None else None, lambda: None)
    assert process.popen.wait(10) != 0
    process.other_end.close()
    assert ended.wait(10)
    child.kill()


def test_a_frame_above_the_bound_is_an_error_at_both_ends_and_no_end_of_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender says how large it was; the receiver that it is out of step."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(pack(b"x" * 17))
        monkeypatch.setattr(wire, "MAX", 16)
        with pytest.raises(FrameTooLong, match="17 bytes is too large"):
            pack(b"x" * 17)
        with pytest.raises(FrameTooLong, match="17 bytes, at most 16"):
            receive(ours)
