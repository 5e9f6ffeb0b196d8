"""The port behind every stream edge: named channels that carry numbered frames, and the credit they report.

Called by the subtask runner; implemented in ``millstream_tasks.channels`` (memory, unix, redis, rabbitmq), all held to
one contract suite. What must never happen here: a bound enforced by refusing or dropping frames. The bound is the
producer's credit window (``number - reported <= capacity``), kept by the caller of :meth:`ChannelWriter.put`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec


class Frame(NamedTuple):
    """One envelope on the wire: ``number`` counts from 1 without gaps per channel, ``data`` is the encoded envelope."""

    number: int
    data: bytes


class ChannelId(msgspec.Struct, frozen=True, array_like=True):
    """One channel per (edge, source subtask, target subtask) of one generation of a job."""

    job: str
    generation: int
    edge: str
    source: int
    target: int

    def name(self, prefix: str = "millstream") -> str:
        """Name of the queue, key or socket: ``{prefix}.{job}.{generation}.{edge}.{source}.{target}``."""
        return f"{prefix}.{self.job}.{self.generation}.{self.edge}.{self.source}.{self.target}"


class ChannelReader(Protocol):
    """The consuming end. Frames come in the order they were put; repeats may occur and are the caller's to drop."""

    def take(self) -> Frame | None:
        """Next frame, or None when none has arrived. Never blocks. Raises :class:`ChannelLost`."""
        ...

    def processed(self, number: int) -> None:
        """Report every frame up to ``number`` as processed: flow control only. Never blocks."""
        ...

    def close(self) -> None:
        """Stop consuming. The channel itself stays until it is deleted or expires."""
        ...


class ChannelWriter(Protocol):
    """The producing end."""

    def put(self, frame: Frame) -> None:
        """Queue a frame for sending. Never blocks; raises :class:`ChannelLost` or :class:`ChannelMissing` at once or
        from a later call once the failure is known."""
        ...

    @property
    def reported(self) -> int:
        """Highest number the consumer has reported as processed; 0 before the first. Raises like :meth:`put`."""
        ...

    def close(self) -> None:
        """Send what is queued (bounded: 5 s) and close."""
        ...


class Transport(Protocol):
    """All channels of one subtask. Only :meth:`wake` may be called from other threads."""

    def create(self, channel: ChannelId, capacity: int) -> ChannelReader:
        """Make the channel exist, empty, and consume from it; at most ``capacity`` frames are fetched ahead."""
        ...

    def connect(self, channel: ChannelId, capacity: int) -> ChannelWriter:
        """Open the producing end. Raises :class:`ChannelMissing` when no consumer created it."""
        ...

    def wait(self, timeout: float) -> None:
        """Return when a frame or report arrived, :meth:`wake` was called, or after ``timeout`` seconds."""
        ...

    def wake(self) -> None:
        """Make a running or the next :meth:`wait` return at once. Thread-safe."""
        ...

    def delete(self, channels: Iterable[ChannelId]) -> None:
        """Delete channels by exact name; those that do not exist are passed over."""
        ...

    def close(self) -> None:
        """Close every reader, writer and connection."""
        ...
