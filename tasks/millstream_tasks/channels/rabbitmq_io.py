"""The two I/O threads of a RabbitMQ transport: one owns the publishing connection, one the consuming connection.

Made by :class:`millstream_tasks.channels.rabbitmq.RabbitTransport`. The publishing one sends frames and reports and counts
confirms; a memory alarm stalls it and nothing else. The consuming one declares, receives frames and reports, acknowledges
and deletes. What must never happen here: a py-amqp call from any other thread, or an error that ends a thread without being
told to every reader and writer.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

from millstream_schema.channels import Frame
from millstream_schema.errors import ChannelError, ChannelLost, ChannelMissing

from .broker_ends import BrokerEnds
from .rabbitmq_ends import RabbitReader, RabbitWriter
from .rabbitmq_link import AmqpLink
from .unix_wire import WakePipe

End = RabbitReader | RabbitWriter
R = TypeVar("R")

QUEUED_BYTES = 4 * 1024 * 1024
"""Bytes handed to the publishing connection at once; the rest stays with its writers, so that channels take turns."""

TICK_SECONDS = 1.0

CLOSE_SECONDS = 2.0
"""How long the broker has to answer the good-bye."""


class Shared(BrokerEnds[RabbitReader, RabbitWriter]):
    """What the subtask's thread and the two I/O threads have in common."""

    def add(self, end: End) -> None:
        with self._lock:
            end.failure = self.failure
            if isinstance(end, RabbitReader):
                self.readers = (*self.readers, end)
            else:
                self.writers = (*self.writers, end)

    def forget(self, end: End) -> None:
        with self._lock:
            self.readers = tuple(reader for reader in self.readers if reader is not end)
            self.writers = tuple(writer for writer in self.writers if writer is not end)
        self.answered()

    def fail_one(self, end: End, failure: ChannelError) -> None:
        if end.failure is None:
            end.failure = failure
            self.arrived.set()
            self.answered()


class Lane(threading.Thread):
    """A thread that owns one connection: runs commands, works, waits on the socket, ticks heartbeats."""

    def __init__(self, name: str, shared: Shared, link: AmqpLink, describe: Callable[[BaseException], str], write_timeout: float) -> None:
        super().__init__(name=name, daemon=True)
        self.shared = shared
        self.link = link
        self._describe = describe
        self._write_timeout = write_timeout
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = WakePipe(link.selector)
        self._stopping = False
        self._ended = False
        self._commands_lock = threading.Lock()

    def poke(self) -> None:
        """There is something to do. Thread-safe."""
        self._wake.wake()

    def call(self, command: Callable[[], R], timeout: float) -> R:
        """Run ``command`` on this thread and return its result. Raises what it raises, :class:`ChannelLost` when it cannot run."""
        future: Future[R] = Future()
        with self._commands_lock:
            if self._ended:
                raise self.shared.failure or ChannelLost("the RabbitMQ transport is closed")
            self._commands.append((command, future))
        self.poke()
        try:
            return future.result(timeout)
        except TimeoutError:
            raise ChannelLost(f"RabbitMQ did not answer within {timeout:g} s") from None

    def stop(self) -> None:
        """Close the connection and end. Thread-safe."""
        self._stopping = True
        self.poke()

    @abstractmethod
    def work(self) -> None:
        """What there is to send; called after every event."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            self._loop()
        except Exception as exc:  # py-amqp raises of every kind; a defect here must end the subtask, too, and not hang it
            self.shared.fail(ChannelLost(f"the RabbitMQ connection failed, and with it the channels over it: {self._describe(exc)}"))
        finally:
            self.link.break_off()
            self._wake.close()
            with self._commands_lock:
                self._ended = True
            for _, future in self._commands:
                future.set_exception(self.shared.failure or ChannelLost("the RabbitMQ transport is closed"))

    def _loop(self) -> None:
        tick_at = monotonic() + TICK_SECONDS
        while not self._stopping and self.shared.failure is None:
            pokes = self._wake.count
            while self._commands:
                self._run_command(*self._commands.popleft())
            self.work()
            # Waiting for an answer inside a command or work swallows pokes: then there is more to do already.
            poked = self._wake.count != pokes
            self.link.step(0.0 if poked else max(0.0, tick_at - monotonic()))
            if monotonic() >= tick_at:
                tick_at = monotonic() + TICK_SECONDS
                self.link.tick(self._write_timeout)
        if not self.link.blocked:  # a stalled broker would not read the good-bye
            self.link.io_timeout = CLOSE_SECONDS
            self.work()
            self.link.close()

    def _run_command(self, command: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(command())
        except ChannelError as exc:
            future.set_exception(exc)
        except Exception as exc:
            future.set_exception(ChannelLost(f"RabbitMQ refused: {self._describe(exc)}"))
            raise


class Publisher(Lane):
    """Frames and reports out, confirms and returns in."""

    def __init__(self, *args: Any, delivery_mode: int) -> None:
        super().__init__("millstream-rabbitmq-publish", *args)
        self._delivery_mode = delivery_mode
        self._channel = self.link.channel()
        self._channel.confirm_select()
        self._channel.events["basic_ack"].add(self._on_ack)
        self._channel.events["basic_nack"].add(self._on_nack)
        self._channel.events["basic_return"].add(self._on_return)
        self._published = 0
        self._unconfirmed: dict[int, End] = {}
        self._report_heads: dict[RabbitReader, bytes] = {}

    def head(self, queue: str) -> bytes:
        """What :meth:`work` puts before each message to ``queue``."""
        return self.link.publish_head(self._channel.channel_id, queue)

    def work(self) -> None:
        link = self.link
        for reader in self.shared.readers:
            done = reader.done
            if done > reader.told and not link.blocked and reader.failure is None:
                head = self._report_heads.get(reader)
                if head is None:
                    head = self._report_heads[reader] = self.head(reader.name + ".r")
                self._publish(reader, head, Frame(done, b""))
                reader.told = done
            if reader.closing and (reader.told == reader.done or reader.failure is not None):
                self._report_heads.pop(reader, None)
                self.shared.forget(reader)
        for writer in self.shared.writers:
            pending = writer.pending
            while pending and writer.failure is None and not link.blocked and link.queued_bytes < QUEUED_BYTES:
                self._publish(writer, writer.head, pending.popleft())
        link.flush()
        if not link.blocked and link.queued_bytes < QUEUED_BYTES and any(w.pending and w.failure is None for w in self.shared.writers):
            self.poke()

    def _publish(self, end: End, head: bytes, frame: Frame) -> None:
        self._published += 1
        self._unconfirmed[self._published] = end
        self.link.publish(self._channel.channel_id, head, self._delivery_mode, frame.number, frame.data)

    def _settle(self, tag: int, multiple: bool) -> list[End]:
        """Ends whose messages the broker answered for; tags are in order in the dict, answers may not be."""
        unconfirmed = self._unconfirmed
        if not multiple:
            end = unconfirmed.pop(tag, None)
            return [] if end is None else [end]
        settled: list[End] = []
        while unconfirmed and (first := next(iter(unconfirmed))) <= tag:
            settled.append(unconfirmed.pop(first))
        return settled

    def _on_ack(self, tag: int, multiple: bool) -> None:
        closing = False
        for end in self._settle(tag, multiple):
            if isinstance(end, RabbitWriter):
                end.answered += 1
                closing = closing or end.closed
        if closing:
            self.shared.answered()

    def _on_nack(self, tag: int, multiple: bool) -> None:
        for end in self._settle(tag, multiple):
            self.shared.fail_one(end, ChannelLost(f"RabbitMQ could not keep a frame of channel {end.name}; its log says why"))

    def _on_return(self, error: Exception, exchange: str, queue: str, message: object) -> None:
        """Nobody took a mandatory message: the queue is not there."""
        for writer in self.shared.writers:
            if writer.name == queue:
                text = f"channel {queue} does not exist any more; a newer generation of the job may exist"
                self.shared.fail_one(writer, ChannelMissing(text))
        for reader in self.shared.readers:
            if reader.name + ".r" == queue and not reader.closing:
                self.shared.fail_one(reader, ChannelLost(f"channel {reader.name} was deleted under its reader"))


class Consumer(Lane):
    """Declarations; frames and reports in; acknowledgements out."""

    def __init__(self, *args: Any) -> None:
        super().__init__("millstream-rabbitmq-consume", *args)
        self.ends: dict[int, End] = {}

    def work(self) -> None:
        for amqp_channel, end in list(self.ends.items()):
            if isinstance(end, RabbitReader):
                if end.unacknowledged and (tag := end.acknowledge()):
                    self.link.ack(amqp_channel, tag)
                finished = end.closing
            else:
                finished = end.closed and end.failure is not None
                if finished:
                    self.shared.forget(end)
            if finished:
                del self.ends[amqp_channel]
                self.link.channel(amqp_channel).close()
        self.link.flush()

    def on_delivery(self, amqp_channel: int, tag: int, number: int, data: bytes) -> None:
        """A frame for a reader, or a report for a writer."""
        end = self.ends.get(amqp_channel)
        if isinstance(end, RabbitReader):
            end.unacknowledged.append((number, tag))
            end.frames.append(Frame(number, data))
        elif end is not None:
            end.progress = max(end.progress, number)
        self.shared.arrived.set()
