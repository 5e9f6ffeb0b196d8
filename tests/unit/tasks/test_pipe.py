"""The pipe between a node and its subtask processes: frames in pieces, and a child that does not read."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time

from millstream_schema.control import Deployment, DeployMode, Lease
from millstream_schema.settings import StreamSettings
from millstream_tasks.shell.processes import ProcessChild, _Process
from millstream_tasks.shell.wire import pack, receive

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
