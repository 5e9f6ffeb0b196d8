"""Outgoing edges of a subtask: partitioning, batching into envelopes, and the credit window of each channel.

Called by the chain (``emit``) and the runner (``flush``, ``barrier``, ``pump``). What must never happen here: an envelope above the window handed to the
transport, or a barrier that overtakes records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from millstream_schema.canonical import owner_of, shard_of
from millstream_schema.channels import ChannelId, ChannelWriter, Frame, Transport
from millstream_schema.envelope import Barrier, Envelope, Kind, encode_batches, encode_envelope
from millstream_schema.envelope import Batch as WireBatch
from millstream_schema.errors import ChannelError, KeyRefused, MillstreamError, OperatorError
from millstream_schema.model import EdgeConfig, Partitioning
from millstream_schema.plan import PlanEdge
from millstream_schema.reasons import one_line
from millstream_schema.values import TypeRegistry

from ..operators.base import Batch, refuse_unhashable

ROUTES = 1 << 20
"""Keys whose route is remembered per edge; beyond it the memory is emptied."""


class OutputChannel:
    """The sending end of one channel: numbers envelopes, keeps those that wait for credit."""

    def __init__(self, channel: ChannelId, edge: PlanEdge, registry: TypeRegistry, objects: bool) -> None:
        self.channel = channel
        self.config: EdgeConfig = edge.spec.config
        self.values: list[Any] = []
        self.times: list[int] | None = None
        self._value_type = edge.spec.value_type
        self._registry = registry
        self._objects = objects
        self._waiting: deque[Frame] = deque()
        self._writer: ChannelWriter | None = None
        self._number = 0
        self._epoch = 0
        self.ended = False
        self.bytes_out = 0

    def connect(self, transport: Transport) -> None:
        self._writer = transport.connect(self.channel, self.config.capacity)

    def add(self, values: list[Any], times: list[int] | None) -> None:
        """Buffer records; sends what fills a batch."""
        if times is not None and self.times is None:
            if self.values:
                self.flush()
            self.times = []
        elif times is None and self.times is not None:
            self.flush()
            self.times = None
        self.values.extend(values)
        if self.times is not None and times is not None:
            self.times.extend(times)
        if len(self.values) >= self.config.batch_records:
            self.flush()

    def flush(self) -> None:
        """Turn the buffered records into envelopes."""
        if not self.values:
            return
        values, times = self.values, self.times
        self.values = []
        if times is not None:
            self.times = []
        limit = self.config.batch_records
        for at in range(0, len(values), limit):
            part = values[at : at + limit]
            part_times = None if times is None else times[at : at + limit]
            if self._objects:
                self._send(Kind.RECORDS, WireBatch(part, part_times))
            else:
                for batch in encode_batches(part, part_times, self._registry, codec=self.config.codec, max_bytes=self.config.batch_bytes):
                    self._send(Kind.RECORDS, batch)

    def send(self, kind: Kind, payload: Any) -> None:
        """Flush, then send something that is not records."""
        self.flush()
        if kind is Kind.BARRIER:
            self._epoch = payload.epoch
        self._send(kind, payload)
        if kind is Kind.END:
            self.ended = True

    def _send(self, kind: Kind, payload: Any) -> None:
        self._number += 1
        envelope = Envelope(self.channel.generation, self._number, self._epoch, kind, payload, self._value_type)
        data: Any = (
            envelope
            if self._objects
            else encode_envelope(envelope, self._registry, codec=self.config.codec, compression=self.config.compression)
        )
        if not self._objects:
            self.bytes_out += len(data)
        self._waiting.append(Frame(self._number, data))

    def pump(self) -> int:
        """Hand over what the window admits; how many envelopes still wait."""
        waiting = self._waiting
        writer = self._writer
        if writer is not None and waiting:
            top = writer.reported + self.config.capacity
            while waiting and waiting[0].number <= top:
                writer.put(waiting.popleft())
        return len(waiting)

    def credit(self) -> int:
        """Envelopes that may be sent before the consumer reports."""
        return 0 if self._writer is None else self._writer.reported + self.config.capacity - self._number

    def status(self) -> dict[str, Any]:
        """Depth (envelopes sent and not yet reported, and those that wait for credit) and credit. Never raises: it is only looked at."""
        try:
            credit = self.credit()
        except ChannelError:
            credit = 0
        waiting = len(self._waiting)
        return {"channel": self.channel.name(""), "depth": self.config.capacity - credit, "waiting": waiting, "credit": credit}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class OutputEdge:
    """One edge leaving this subtask, with a channel per target."""

    def __init__(self, edge: PlanEdge, channels: list[OutputChannel], key: Callable[[Any], Any] | None, shard_count: int) -> None:
        self.edge = edge
        self.channels = channels
        self._key = key
        self._shards = shard_count
        self._turn = 0
        self._routes: dict[Any, int] = {}
        partitioning = edge.spec.partitioning
        if len(channels) == 1:
            self.write: Callable[[Batch], None] = self._single
        elif partitioning is Partitioning.HASH:
            self.write = self._hash
        elif partitioning is Partitioning.BROADCAST:
            self.write = self._broadcast
        else:
            self.write = self._rebalance

    def _single(self, batch: Batch) -> None:
        self.channels[0].add(batch.values, batch.timestamps)

    def _broadcast(self, batch: Batch) -> None:
        for channel in self.channels:
            channel.add(batch.values, batch.timestamps)

    def _rebalance(self, batch: Batch) -> None:
        n = len(self.channels)
        values, times = batch.values, batch.timestamps
        for i in range(min(n, len(values))):
            channel = self.channels[(self._turn + i) % n]
            channel.add(values[i::n], None if times is None else times[i::n])
        self._turn = (self._turn + len(values)) % n

    def _hash(self, batch: Batch) -> None:
        targets = self._targets(batch.values)
        parts: list[list[Any]] = [[] for _ in self.channels]
        appends = [p.append for p in parts]
        for target, value in zip(targets, batch.values):
            appends[target](value)
        times: list[list[int]] | None = None
        if batch.timestamps is not None:
            times = [[] for _ in self.channels]
            appends = [t.append for t in times]
            for target, stamp in zip(targets, batch.timestamps):
                appends[target](stamp)
        for i, part in enumerate(parts):
            if part:
                self.channels[i].add(part, None if times is None else times[i])

    def _targets(self, values: list[Any]) -> list[int]:
        """Target of each record. Raises KeyRefused or OperatorError naming the operator whose key it is."""
        assert self._key is not None
        try:
            keys = list(map(self._key, values))
            try:
                targets = list(map(self._routes.get, keys))
            except TypeError:
                for key in keys:
                    refuse_unhashable(key)
                raise
            return [self._route(k) for k in keys] if None in targets else targets  # type: ignore[return-value]  # none is None
        except KeyRefused as exc:
            raise KeyRefused(f"operator {self.edge.spec.target!r}: {exc}") from exc
        except MillstreamError:
            raise
        except Exception as exc:
            raise OperatorError(f"operator {self.edge.spec.target!r}: its key failed: {type(exc).__name__}: {one_line(str(exc))}") from exc

    def _route(self, key: Any) -> int:
        """Target of a key: the owner of its shard. Raises KeyRefused."""
        target = self._routes.get(key)
        if target is None:
            if len(self._routes) >= ROUTES:
                self._routes.clear()
            target = owner_of(shard_of(key, self._shards), len(self.channels), self._shards)
            self._routes[key] = target
        return target


class Outputs:
    """All outgoing edges of a subtask; what a chain emits into. ``guard`` raises LeaseExpired."""

    def __init__(self, edges: list[OutputEdge], guard: Callable[[], None]) -> None:
        self.edges = edges
        self._guard = guard
        self.channels = [c for e in edges for c in e.channels]
        self._main = [e.write for e in edges if e.edge.spec.side is None]
        self._sides: dict[tuple[str, str], list[OutputEdge]] = {}
        for e in edges:
            if e.edge.spec.side is not None:
                self._sides.setdefault((e.edge.spec.source, e.edge.spec.side), []).append(e)
        self.records = 0
        self.unflushed = False
        self._idle = False

    def emit(self, batch: Batch) -> None:
        self.records += len(batch.values)
        self.unflushed = True
        for write in self._main:
            write(batch)

    def emit_side(self, operator: str, tag: str, batch: Batch) -> None:
        self.unflushed = True
        for edge in self._sides.get((operator, tag), ()):
            edge.write(batch)

    def emit_watermark(self, watermark: int) -> None:
        for channel in self.channels:
            channel.send(Kind.WATERMARK, watermark)

    def emit_status(self, idle: bool) -> None:
        """Whether anything comes from here for now; said when it changes."""
        if idle != self._idle:
            self._idle = idle
            for channel in self.channels:
                channel.send(Kind.STATUS, idle)

    def barrier(self, epoch: int, kind: str) -> None:
        """Records first, then the barrier on every channel."""
        for channel in self.channels:
            channel.send(Kind.BARRIER, Barrier(epoch, kind))

    def end(self) -> None:
        for channel in self.channels:
            channel.send(Kind.END, None)

    def flush(self) -> None:
        self.unflushed = False
        for channel in self.channels:
            channel.flush()

    def linger_ms(self) -> int:
        return min((c.config.linger_ms for c in self.channels), default=0)

    def pump(self) -> int:
        """Send what the windows admit; envelopes that still wait. Above 0 the subtask takes no more input.

        A subtask that slept since its last look may have lost its lease meanwhile: it looks before each publish.
        """
        self._guard()
        return sum([c.pump() for c in self.channels])

    def connect(self, transport: Transport) -> None:
        for channel in self.channels:
            channel.connect(transport)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
