"""What a subtask runs in: the ports its shell hands it, and the signals that end it.

The shells are a thread (embedded), a process (under a node) and the simulator. What must never happen here: a port with a default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from millstream_schema.channels import Transport
from millstream_schema.connectors import LOCK_TIMEOUT, SnapshotStorage
from millstream_schema.control import SubtaskMessage
from millstream_schema.ports import Clock


class LeaseExpired(BaseException):
    """The node's lease has passed: this subtask may own nothing any more and stops at once. Control flow, caught by the shell."""


class Background(Protocol):
    """Runs slow work beside the subtask's thread. One lane is served in order; lanes do not wait for each other."""

    def submit(self, lane: str, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run ``work`` and then, on the background thread, ``done(result, error)``."""
        ...


@dataclass(frozen=True)
class Environment:
    """Ports of one subtask. ``objects``: in-process channels pass batches without encoding them. ``lock_timeout``: see ConnectorContext."""

    transport: Transport
    storage: SnapshotStorage
    clock: Clock
    background: Background
    report: Callable[[SubtaskMessage], None]
    yield_thread: Callable[[], None]
    transport_kind: str
    objects: bool = False
    lock_timeout: float = LOCK_TIMEOUT
