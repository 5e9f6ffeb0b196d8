"""Messages between a node and the subtasks it hosts, and what a subtask is deployed with.

They travel over a pipe (process), a deque (thread) or the simulated network, as msgpack. Every one may be repeated. What must never happen here: a
generation that is changed by anything but a new deployment.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from .channels import ChannelId
from .connectors import Json, Split
from .manifest import SplitState, SubtaskSnapshot
from .settings import StreamSettings


class EpochKind(enum.StrEnum):
    """Why an epoch was triggered. The last three are terminal: the sources emit nothing behind their barrier."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    SUSPEND = "suspend"
    DRAIN = "drain"
    FINAL = "final"

    @property
    def terminal(self) -> bool:
        return self in (EpochKind.SUSPEND, EpochKind.DRAIN, EpochKind.FINAL)

    @property
    def ends_input(self) -> bool:
        """Whether END follows the barrier."""
        return self in (EpochKind.DRAIN, EpochKind.FINAL)


class DeployMode(enum.StrEnum):
    """RUN processes records; FINALIZE only carries out commits and roll-backs of the restored epoch, then finishes."""

    RUN = "run"
    FINALIZE = "finalize"


class Deployment(msgspec.Struct, frozen=True, tag="deploy"):
    """Everything one subtask starts with."""

    job: str
    factory: str
    config: dict[str, Json]
    parallelism: int | None
    overrides: dict[str, Any]
    plan_fingerprint: str
    generation: int
    attempt: str
    subtask: str
    mode: DeployMode
    settings: StreamSettings
    restore_epoch: int
    """0: from the beginning."""
    restored: list[SubtaskSnapshot]
    """The snapshots, of whatever subtasks, that hold state of this subtask's operators."""
    splits: list[SplitState]
    known_splits: dict[str, list[str]]
    """Operator → ids of all its splits that have rows."""
    rescaled: bool = False
    lenient: bool = False
    renames: dict[str, str] = {}
    """Old operator id → new one: segments of the restored epoch hold the old ones."""
    old_channels: list[ChannelId] = []
    """Channels of older generations; the subtask that gets them deletes them."""


# node → subtask


class Run(msgspec.Struct, frozen=True, tag="run"):
    """All subtasks are READY: connect the outputs and begin."""


class Trigger(msgspec.Struct, frozen=True, tag="trigger"):
    """Take a barrier into the pending slot. ``splits`` are all that this reader owns."""

    epoch: int
    kind: EpochKind
    splits: list[SplitState]
    splits_complete: bool


class AssignSplits(msgspec.Struct, frozen=True, tag="splits"):
    """All splits this reader owns now; ``complete``: there will be no more."""

    splits: list[SplitState]
    complete: bool


class Durable(msgspec.Struct, frozen=True, tag="durable"):
    """Every epoch up to ``epoch`` that was not aborted is durable: commit."""

    epoch: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """``epoch`` was aborted."""

    epoch: int


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """The node's lease holds until ``deadline`` (seconds of CLOCK_BOOTTIME). Doubles as ping."""

    deadline: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop at once; nothing is fired, nothing committed."""


NodeMessage = Run | Trigger | AssignSplits | Durable | Abort | Lease | Stop


# subtask → node


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Restored, channels created, fences raised, restored commits done."""

    committed: int


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The snapshot of ``epoch`` is stored."""

    epoch: int
    snapshot: SubtaskSnapshot


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """No snapshot of ``epoch`` will come; the subtask goes on."""

    epoch: int
    reason: str


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """Every committable up to ``epoch`` is committed."""

    epoch: int


class CommitPending(msgspec.Struct, frozen=True, tag="commit-pending"):
    """A commit could not be finished yet and is tried again."""

    epoch: int
    result: str
    detail: str


class Discovered(msgspec.Struct, frozen=True, tag="discovered"):
    """Splits found by the source; ``complete``: discovery is over."""

    operator: str
    splits: list[Split]
    complete: bool


class Exhausted(msgspec.Struct, frozen=True, tag="exhausted"):
    """Every split of this reader has ended and no more will come."""


class WantsEpoch(msgspec.Struct, frozen=True, tag="wants-epoch"):
    """A queue source's window is full: only a durable epoch frees it."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The terminal epoch is committed, or the finalising is done."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The subtask ended by itself. ``cause`` is one word for the budget and metrics."""

    cause: str
    detail: str


class ChannelsDeleted(msgspec.Struct, frozen=True, tag="channels-deleted"):
    """The old channels of the deployment are gone."""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Counters and gauges of this attempt; doubles as pong. ``progress`` grows with everything that is done."""

    progress: int
    busy: bool
    values: dict[str, Any]


SubtaskMessage = (
    Ready | Ack | Declined | Committed | CommitPending | Discovered | Exhausted | WantsEpoch | Finished | Failed | ChannelsDeleted | Stats
)


_encoder = msgspec.msgpack.Encoder()
_to_subtask: msgspec.msgpack.Decoder[NodeMessage | Deployment] = msgspec.msgpack.Decoder(NodeMessage | Deployment)
_to_node: msgspec.msgpack.Decoder[SubtaskMessage] = msgspec.msgpack.Decoder(SubtaskMessage)


def encode(message: NodeMessage | Deployment | SubtaskMessage) -> bytes:
    return _encoder.encode(message)


def decode_to_subtask(data: bytes) -> NodeMessage | Deployment:
    return _to_subtask.decode(data)


def decode_to_node(data: bytes) -> SubtaskMessage:
    return _to_node.decode(data)
