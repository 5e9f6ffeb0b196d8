"""The inputs of a subtask in turn: what each envelope means to the chain.

Called by the runner, once a step. What must never happen here: an envelope taken from a held channel, one reported as processed before it was, more taken
than a turn's share while other channels wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream_schema.envelope import Barrier, Envelope, Kind
from millstream_schema.errors import CodecError

from ..chain import Chain
from ..operators.base import MAX_WATERMARK, Batch
from .inputs import InputChannel, idle, low_watermark
from .outputs import Outputs

FRAMES_PER_TURN = 16
"""Envelopes taken from one channel before the next has its turn."""


class Receiver:
    """Reads the channels that end at one subtask. ``barrier`` is called with index, channel and barrier; it may hold channels."""

    def __init__(
        self,
        channels: list[InputChannel],
        chain: Chain,
        outputs: Outputs,
        counters: dict[str, int],
        barrier: Callable[[int, InputChannel, Barrier], None],
    ) -> None:
        self._channels = channels
        self._chain = chain
        self._outputs = outputs
        self._counters = counters
        self._barrier = barrier
        self._first = 0
        if chain.assigner is not None:  # not fused with a source: each channel is to it what a split is there
            chain.assigner.begin([str(i) for i in range(len(channels))])

    def turn(self) -> bool:
        """One bounded turn over the channels that are not held; whether there was anything. A held channel stops fetching."""
        worked = self._take()
        if worked:
            self._chain.assign_watermark()
        return worked

    def _take(self) -> bool:
        worked = False
        n = len(self._channels)
        for i in range(n):
            index = (self._first + i) % n
            channel = self._channels[index]
            taken = 0
            while not channel.held and taken < FRAMES_PER_TURN:
                envelope = channel.take()
                if envelope is None:
                    break
                taken += 1
                self._envelope(index, channel, envelope)
                channel.reader.processed(channel.number)
                worked = True
                if self._outputs.pump():
                    self._first = (index + 1) % n
                    return True
        self._first = (self._first + 1) % n
        return worked

    def _envelope(self, index: int, channel: InputChannel, envelope: Envelope) -> None:
        payload: Any = envelope.payload
        match envelope.kind:
            case Kind.RECORDS:
                self._counters["records_in"] += len(payload.values)
                if self._chain.assigner is not None:
                    self._chain.assigner.select(str(index))
                self._chain.push(Batch(payload.values, payload.timestamps))
            case Kind.BARRIER:
                self._barrier(index, channel, payload)
            case Kind.WATERMARK:
                channel.watermark = max(channel.watermark, payload)
                self._hold(index, channel.watermark < MAX_WATERMARK)
                self._merge_watermarks()
            case Kind.STATUS:
                channel.idle = payload
                self._hold(index, not channel.idle)
                self._merge_watermarks()
            case Kind.END:
                channel.end()
            case _:
                raise CodecError(
                    f"channel {channel.channel.name()}: envelope {envelope.number} of kind {envelope.kind} has no place on a data channel"
                )

    def _hold(self, index: int, holds: bool) -> None:
        """Whether a channel holds back the watermarks that are made here: not when it is idle or exhausted."""
        assigner = self._chain.assigner
        if assigner is not None and holds:
            assigner.begin([str(index)])
        elif assigner is not None:
            assigner.finish(str(index))

    def _merge_watermarks(self) -> None:
        self._chain.advance(low_watermark(self._channels))
        self._outputs.emit_status(idle(self._channels))
