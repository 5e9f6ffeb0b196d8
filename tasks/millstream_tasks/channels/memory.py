"""Channels between the threads of one process: a deque per channel, an event per transport.

Called by the embedded runner (one :class:`MemoryTransport` per subtask thread, one :class:`MemoryBroker` for all) and by
tests. What must never happen here: a lock held on the path of a frame, or a frame copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from millstream_schema.channels import ChannelId, Frame
from millstream_schema.errors import ChannelError, ChannelLost, ChannelMissing


class _Channel:
    """State shared by both ends. Each field has one writing thread, or is written once (``deleted``)."""

    __slots__ = ("consumer", "deleted", "frames", "name", "producer", "reported")

    def __init__(self, name: str, consumer: threading.Event) -> None:
        self.name = name
        self.frames: deque[Frame] = deque()
        self.reported = 0
        self.deleted = False
        self.consumer: threading.Event | None = consumer
        self.producer: threading.Event | None = None

    def delete(self) -> None:
        self.deleted = True
        for event in (self.consumer, self.producer):
            if event is not None:
                event.set()


class MemoryBroker:
    """All in-process channels of one process, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[str, _Channel] = {}

    def names(self) -> list[str]:
        """Names of the channels that exist, sorted."""
        with self._lock:
            return sorted(self._channels)

    def _create(self, name: str, consumer: threading.Event) -> _Channel:
        channel = _Channel(name, consumer)
        with self._lock:
            old = self._channels.get(name)
            self._channels[name] = channel
        if old is not None:
            old.delete()
        return channel

    def _connect(self, name: str, producer: threading.Event) -> _Channel:
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                raise ChannelMissing(f"channel {name} does not exist: its consumer has to create it first")
            if channel.producer is not None:
                raise ChannelLost(f"channel {name} already has a producer; a second one is refused")
            channel.producer = producer
        return channel

    def _release(self, channel: _Channel, *, consumer: bool) -> None:
        """One end let go. When both have, nothing can ever read the channel again (create empties it), so it goes."""
        with self._lock:
            if consumer:
                channel.consumer = None
                channel.frames.clear()
            else:
                channel.producer = None
            if channel.consumer is None and channel.producer is None and self._channels.get(channel.name) is channel:
                del self._channels[channel.name]

    def _delete(self, name: str) -> None:
        with self._lock:
            channel = self._channels.pop(name, None)
        if channel is not None:
            channel.delete()


class MemoryReader:
    """Consuming end of an in-process channel; see :class:`millstream_schema.channels.ChannelReader`."""

    def __init__(self, broker: MemoryBroker, channel: _Channel, capacity: int, event: threading.Event) -> None:
        self._broker = broker
        self._channel = channel
        self._frames = channel.frames
        self._capacity = capacity
        self._event = event
        self._withheld = False
        self._closed = False

    def take(self) -> Frame | None:
        frames = self._frames
        if frames:
            if frames[0].number - self._channel.reported > self._capacity:
                self._withheld = True
                return None
            return frames.popleft()
        if self._closed:
            raise ChannelLost(f"the reader of channel {self._channel.name} is closed")
        if self._channel.deleted:
            raise ChannelLost(f"channel {self._channel.name} was deleted under its reader")
        return None

    def processed(self, number: int) -> None:
        channel = self._channel
        if number <= channel.reported:
            return
        channel.reported = number
        if self._withheld:  # a frame this thread was refused is free now: the next wait must not sleep over it
            self._withheld = False
            self._event.set()
        producer = channel.producer
        if producer is not None and not producer.is_set():
            producer.set()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._broker._release(self._channel, consumer=True)


class MemoryWriter:
    """Producing end of an in-process channel; see :class:`millstream_schema.channels.ChannelWriter`."""

    def __init__(self, broker: MemoryBroker, channel: _Channel) -> None:
        self._broker = broker
        self._channel = channel
        self._closed = False

    def put(self, frame: Frame) -> None:
        channel = self._channel
        if channel.deleted or self._closed:
            raise self._error()
        consumer = channel.consumer
        if consumer is None:  # nobody will ever read it; the channel stays, as with a broker
            return
        channel.frames.append(frame)
        if not consumer.is_set():
            consumer.set()

    def _error(self) -> ChannelError:
        if self._closed:
            return ChannelLost(f"the writer of channel {self._channel.name} is closed")
        return ChannelMissing(f"channel {self._channel.name} was deleted; a newer generation of the job may exist")

    @property
    def reported(self) -> int:
        if self._channel.deleted or self._closed:
            raise self._error()
        return self._channel.reported

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._broker._release(self._channel, consumer=False)


class MemoryTransport:
    """All in-process channels of one subtask thread; see :class:`millstream_schema.channels.Transport`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        # Set by the other ends after they changed something, cleared here before the caller looks: nothing is slept over.
        self._event = threading.Event()
        self._ends: list[MemoryReader | MemoryWriter] = []

    def create(self, channel: ChannelId, capacity: int) -> MemoryReader:
        reader = MemoryReader(self._broker, self._broker._create(channel.name(), self._event), capacity, self._event)
        self._ends.append(reader)
        return reader

    def connect(self, channel: ChannelId, capacity: int) -> MemoryWriter:
        writer = MemoryWriter(self._broker, self._broker._connect(channel.name(), self._event))
        self._ends.append(writer)
        return writer

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()

    def delete(self, channels: Iterable[ChannelId]) -> None:
        for channel in channels:
            self._broker._delete(channel.name())

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self._ends.clear()
