"""Incoming channels of a subtask: order, fencing, watermarks, and the alignment of barriers.

Pure: frames go in, what they mean comes out; the runner acts on it. What must never happen here: an envelope of another generation adopted, a gap passed
over, an alignment that waits for an older epoch's barrier.
"""

from __future__ import annotations

from collections import deque

from millstream_schema.channels import ChannelId, ChannelReader, Frame
from millstream_schema.envelope import Envelope, Kind, decode_envelope
from millstream_schema.errors import ChannelBroken, Fenced
from millstream_schema.ports import Clock
from millstream_schema.values import TypeRegistry

from ..operators.base import MAX_WATERMARK, MIN_WATERMARK

TIMES_KEPT = 10
"""Epochs whose alignment time is remembered: as many as a status shows."""


class InputChannel:
    """The receiving end of one channel."""

    def __init__(self, channel: ChannelId, reader: ChannelReader, registry: TypeRegistry) -> None:
        self.channel = channel
        self.reader = reader
        self._registry = registry
        self.number = 0
        self.held = False
        self.ended = False
        self.final = False
        self.idle = False
        self.watermark = MIN_WATERMARK
        self.repeats = 0
        self.fenced = 0
        self.bytes_in = 0

    def take(self) -> Envelope | None:
        """Next envelope in order, or None. Repeats and older generations are dropped and counted.

        Raises ChannelBroken for a gap, Fenced for a newer generation (this subtask is the stale one), CodecError for what cannot be read.
        """
        while (frame := self.reader.take()) is not None:
            envelope = self._open(frame)
            if envelope.generation > self.channel.generation:
                raise Fenced(f"channel {self.channel.name()}: generation {envelope.generation} is sending, this subtask is of an older one")
            if envelope.generation < self.channel.generation:
                self.fenced += 1
                continue
            if envelope.number <= self.number:
                self.repeats += 1
                continue
            if envelope.number != self.number + 1:
                raise ChannelBroken(
                    f"channel {self.channel.name()}: envelope {envelope.number} after {self.number}, those between are lost"
                )
            if self.ended:
                raise ChannelBroken(f"channel {self.channel.name()}: {envelope.kind} after END")
            self.number = envelope.number
            return envelope
        return None

    def _open(self, frame: Frame) -> Envelope:
        if isinstance(frame.data, Envelope):
            return frame.data
        self.bytes_in += len(frame.data)
        return decode_envelope(frame.data, self._registry, self.channel.name())

    def end(self) -> None:
        """END arrived. Raises ChannelBroken when it does not follow a final barrier."""
        if not self.final:
            raise ChannelBroken(f"channel {self.channel.name()}: END before the final barrier")
        self.ended = True


class Alignment:
    """Which channels have the barrier of which epoch.

    ``hold``: channels that have it are not read until all have it (STRICT, EFFECTIVELY_ONCE).
    """

    def __init__(self, inputs: list[InputChannel], hold: bool, last: int, clock: Clock) -> None:
        self._inputs = inputs
        self._hold = hold
        self.done = last
        """Newest epoch snapshotted, aborted or overtaken."""
        self.epoch = 0
        self._have: set[int] = set()
        self.dropped = 0
        self._clock = clock
        self._began = 0.0
        self._times: deque[tuple[int, float]] = deque(maxlen=TIMES_KEPT)

    def barrier(self, index: int, epoch: int) -> bool:
        """A barrier arrived on input ``index``; whether the alignment of ``epoch`` is complete now."""
        if epoch <= self.done or (self.epoch and epoch < self.epoch):
            self.dropped += 1
            return False
        if epoch > self.epoch:
            self._release()
            self.epoch = epoch
            self._began = self._clock.monotonic()
        if index in self._have:
            self.dropped += 1
            return False
        self._have.add(index)
        if len(self._have) == len(self._inputs):
            self._times.append((epoch, round((self._clock.monotonic() - self._began) * 1000, 3)))
            self.finish(epoch)
            return True
        if self._hold:
            self._inputs[index].held = True
        return False

    def finish(self, epoch: int) -> None:
        """The epoch is over here, by snapshot or by abort. An epoch that this subtask never heard of is noted, too: its barrier comes late."""
        self.done = max(self.done, epoch)
        if self.epoch and self.epoch <= self.done:
            self._release()

    def times(self) -> list[tuple[int, float]]:
        """Of the newest epochs that aligned here: ms from the first barrier to the last, oldest first. May be called from another thread."""
        return list(self._times)

    def _release(self) -> None:
        for channel in self._inputs:
            channel.held = False
        self._have.clear()
        self.epoch = 0


def low_watermark(inputs: list[InputChannel]) -> int:
    """Minimum over active channels; a channel that is idle does not count unless all are. MAX only when every channel has reached it."""
    active = [c.watermark for c in inputs if not c.idle or c.watermark >= MAX_WATERMARK]
    finite = [w for w in active if w < MAX_WATERMARK]
    if finite:
        return min(finite)
    if active and len(active) == len(inputs):
        return MAX_WATERMARK
    return MIN_WATERMARK


def idle(inputs: list[InputChannel]) -> bool:
    """Whether nothing comes from here for now: every channel is idle or has ended, and not all have ended."""
    open_ = [c for c in inputs if c.watermark < MAX_WATERMARK]
    return bool(open_) and all(c.idle for c in open_)


__all__ = ["Alignment", "InputChannel", "Kind", "idle", "low_watermark"]
