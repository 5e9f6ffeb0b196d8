"""One RabbitMQ connection that never blocks its thread on the socket: py-amqp's protocol over our own frames.

Called by the RabbitMQ carrier only, from exactly one I/O thread per connection; the one module of this package that imports
``amqp`` and ``kombu``. py-amqp does what is rare (handshake,
declaring, consuming, errors); what comes by the thousand (deliver, publish, ack) is packed and parsed here, since py-amqp
needs nine system calls for a delivery, waits for the socket inside a publish, and gives a connection one second to live
(TCP_USER_TIMEOUT) once a memory alarm makes the broker stop reading. The hooks used are its constructor's ``frame_writer``
and ``blocking_read``.

What must never happen here: a blocking write, a reconnect, or a password in an error text.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from time import monotonic
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, AMQPError, NotFound, UnexpectedFrame
from kombu.utils.url import parse_url

from millstream_schema.errors import ConfigurationError

__all__ = ["TRANSIENT", "AMQPError", "AccessRefused", "AmqpLink", "NotFound", "connection_options"]

FRAME_HEAD = struct.Struct(">BHI")
FRAME_END = b"\xce"
NUMBER = struct.Struct(">Q")
DELIVER = struct.pack(">HH", *spec.Basic.Deliver)
ACK = struct.Struct(">BHIHHQBB")
CONTENT = struct.Struct(">BHIHHQHBB")
"""Content header frame with one property, the delivery mode."""
HAS_DELIVERY_MODE = 0x1000
TRANSIENT = 1
"""Delivery mode of messages that do not outlive the broker."""
BUFFER = 512 * 1024
MAX_BUFFERS = 64

Deliver = Callable[[int, int, int, bytes], None]
"""Called with AMQP channel, delivery tag, number, data."""


class _Delivery:
    """A message whose body has not come completely."""

    __slots__ = ("missing", "parts", "tag")

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self.missing = 0
        self.parts: list[bytes] = []


def connection_options(url: str) -> dict[str, Any]:
    """Arguments for :class:`AmqpLink` from ``amqp://`` or ``amqps://``. Raises :class:`ConfigurationError`."""
    message = "the RabbitMQ URL cannot be read: write amqp[s]://[user:password@]host[:port]/[vhost]"
    try:
        parts = parse_url(url)
    except ValueError:
        raise ConfigurationError(message) from None
    if parts["transport"] not in ("amqp", "amqps", "pyamqp"):
        raise ConfigurationError(message)
    tls = parts["transport"] == "amqps"
    host = parts["hostname"] or "localhost"
    return {
        "host": f"{host}:{parts['port'] or (5671 if tls else 5672)}",
        "userid": parts["userid"] or "guest",
        "password": parts["password"] or "guest",
        "virtual_host": parts["virtual_host"] or "/",
        "ssl": {"server_hostname": host} if tls else False,
    }


class AmqpLink(amqp.Connection):  # type: ignore[misc]  # py-amqp has no types
    """A connection owned by one thread. Raises py-amqp's errors and ``OSError``; the lane turns them into ours."""

    def __init__(
        self, options: Mapping[str, Any], *, heartbeat: float, connect_timeout: float, io_timeout: float, on_delivery: Deliver
    ) -> None:
        super().__init__(
            **options,
            heartbeat=heartbeat,
            connect_timeout=connect_timeout,
            confirm_publish=False,
            frame_writer=_frame_writer,
            on_blocked=self._alarm_on,
            on_unblocked=self._alarm_off,
            # 0: the kernel's own limit. py-amqp's second would end every connection that an alarm stalls.
            socket_settings={socket.TCP_USER_TIMEOUT: 0} if hasattr(socket, "TCP_USER_TIMEOUT") else None,
        )
        self.selector = selectors.DefaultSelector()
        self.blocked = False
        self.queued_bytes = 0
        self.io_timeout = io_timeout
        self._on_delivery = on_delivery
        self._deliveries: dict[int, _Delivery] = {}
        self._queue: deque[bytes | memoryview] = deque()
        self._progress_at = monotonic()
        self._buffer = bytearray(BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._socket: socket.socket | None = None
        self._wants_write = False

    def _alarm_on(self, reason: str) -> None:
        self.blocked = True

    def _alarm_off(self) -> None:
        self.blocked = False
        self._progress_at = monotonic()

    # ------------------------------------------------------------------ out

    def publish_head(self, amqp_channel: int, queue: str) -> bytes:
        """Method frame of a mandatory publish to ``queue`` over the default exchange."""
        name = queue.encode()
        method = struct.pack(">HHHBB", *spec.Basic.Publish, 0, 0, len(name)) + name + b"\x01"
        return FRAME_HEAD.pack(1, amqp_channel, len(method)) + method + FRAME_END

    def publish(self, amqp_channel: int, head: bytes, delivery_mode: int, number: int, data: bytes) -> None:
        """Queue one message: ``number`` and ``data``. Nothing is sent before :meth:`flush`."""
        size = NUMBER.size + len(data)
        chunk = self.frame_max - 8
        first = min(size, chunk)
        parts: list[bytes | memoryview] = [
            head
            + CONTENT.pack(2, amqp_channel, 15, 60, 0, size, HAS_DELIVERY_MODE, delivery_mode, 0xCE)
            + FRAME_HEAD.pack(3, amqp_channel, first)
            + NUMBER.pack(number)
        ]
        if size == first:
            parts.append(data)
        else:
            view = memoryview(data)
            offset = first - NUMBER.size
            parts.append(view[:offset])
            while offset < len(data):
                body = view[offset : offset + chunk]
                parts.append(FRAME_END + FRAME_HEAD.pack(3, amqp_channel, len(body)))
                parts.append(body)
                offset += len(body)
        parts.append(FRAME_END)
        self._enqueue(parts)

    def ack(self, amqp_channel: int, tag: int) -> None:
        """Queue an acknowledgement of every delivery of this AMQP channel up to ``tag``."""
        self._enqueue([ACK.pack(1, amqp_channel, 13, *spec.Basic.Ack, tag, 1, 0xCE)])

    def _enqueue(self, parts: list[bytes | memoryview]) -> None:
        if not self._queue:
            self._progress_at = monotonic()
        self._queue.extend(parts)
        self.queued_bytes += sum(map(len, parts))
        self.bytes_sent += 1

    def flush(self) -> None:
        """Send as much as the socket takes."""
        sock, queue = self._socket, self._queue
        if sock is None:
            return
        try:
            while queue:
                buffers = list(islice(queue, MAX_BUFFERS))
                sent = sock.send(b"".join(buffers)) if isinstance(sock, ssl.SSLSocket) else sock.sendmsg(buffers)
                self.queued_bytes -= sent
                self._progress_at = monotonic()
                while queue and sent >= len(queue[0]):
                    sent -= len(queue.popleft())
                if sent:
                    queue[0] = memoryview(queue[0])[sent:]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        if bool(queue) != self._wants_write:
            self._wants_write = bool(queue)
            events = selectors.EVENT_READ | selectors.EVENT_WRITE if queue else selectors.EVENT_READ
            self.selector.modify(sock, events)

    def tick(self, write_timeout: float) -> None:
        """Heartbeats and the write timeout; called about once a second. Raises when the broker is gone."""
        self.heartbeat_tick()
        if self._queue and not self.blocked and monotonic() - self._progress_at > write_timeout:
            raise TimeoutError(f"RabbitMQ has read nothing for {write_timeout:g} s")

    # ------------------------------------------------------------------ in

    def blocking_read(self, timeout: float | None = None) -> bool:
        """py-amqp's hook while it waits for an answer: at least one frame, within ``timeout`` seconds."""
        deadline = monotonic() + (self.io_timeout if timeout is None else timeout)
        while True:
            remaining = deadline - monotonic()
            if self.step(max(0.0, remaining)):
                return True
            if remaining <= 0:
                raise TimeoutError("RabbitMQ did not answer in time")

    def step(self, timeout: float) -> bool:
        """Send, wait at most ``timeout`` seconds for something to happen, dispatch; True when a frame was dispatched."""
        if self._socket is None:
            self._socket = self.sock
            self._socket.setblocking(False)
            self.selector.register(self._socket, selectors.EVENT_READ)
        self.flush()
        if self._dispatch():
            return True
        for key, mask in self.selector.select(timeout):
            if key.data is not None:
                key.data(mask)
                continue
            if mask & selectors.EVENT_WRITE:
                self.flush()
            if mask & selectors.EVENT_READ:
                self._receive()
        return self._dispatch()

    def _receive(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < BUFFER // 4:
            rest = bytes(self._view[self._start : self._end])
            if len(rest) > BUFFER // 2:  # the broker's frames are larger than agreed
                raise UnexpectedFrame(f"a frame of more than {BUFFER // 2} bytes")
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        assert self._socket is not None
        try:
            while self._end < len(self._buffer):
                count = self._socket.recv_into(self._view[self._end :])
                if not count:
                    raise ConnectionResetError("RabbitMQ closed the connection")
                self._end += count
                if not isinstance(self._socket, ssl.SSLSocket) or not self._socket.pending():
                    return
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass

    def _dispatch(self) -> bool:
        """Handle the complete frames that are here. A handler may raise, or read on by itself: state is kept per frame."""
        some = False
        while True:
            start = self._start
            if self._end - start < FRAME_HEAD.size:
                return some
            kind, channel, size = FRAME_HEAD.unpack_from(self._buffer, start)
            start += FRAME_HEAD.size
            stop = start + size
            if self._end <= stop:
                return some
            if self._buffer[stop] != 0xCE:
                raise UnexpectedFrame("a frame does not end where it should")
            self._start = stop + 1
            some = True
            if not self._deliver(kind, channel, start, stop):
                self.on_inbound_frame((kind, channel, bytes(self._view[start:stop])))

    def _deliver(self, kind: int, channel: int, start: int, stop: int) -> bool:
        """True when the frame belongs to a delivery, which needs none of py-amqp."""
        buffer = self._buffer
        if kind == 1:
            if buffer[start : start + 4] != DELIVER:
                return False
            (tag,) = NUMBER.unpack_from(buffer, start + 5 + buffer[start + 4])
            self._deliveries[channel] = _Delivery(tag)
        else:
            delivery = self._deliveries.get(channel)
            if delivery is None or kind not in (2, 3):
                return False
            if kind == 2:
                (delivery.missing,) = NUMBER.unpack_from(buffer, start + 4)
                if delivery.missing < NUMBER.size:
                    raise UnexpectedFrame("a message that is no frame of a channel")
            else:
                delivery.missing -= stop - start
                delivery.parts.append(bytes(self._view[start:stop]))
                if delivery.missing <= 0:
                    del self._deliveries[channel]
                    parts = delivery.parts
                    body = parts[0] if len(parts) == 1 else b"".join(parts)
                    self._on_delivery(channel, delivery.tag, NUMBER.unpack_from(body)[0], body[NUMBER.size :])
        self.bytes_recv += 1
        return True

    def break_off(self) -> None:
        """Close the socket without a word. Idempotent."""
        self.selector.close()
        self._queue.clear()
        self._socket = None
        self.collect()


def _frame_writer(connection: AmqpLink, transport: object) -> Callable[..., None]:
    """py-amqp's hook for the frames it writes: methods and heartbeats."""

    def write_frame(kind: int, channel: int, method: tuple[int, int] | None, args: bytes | str | None, content: object) -> None:
        if content is not None:
            raise NotImplementedError("messages are written by AmqpLink.publish")
        payload = b""
        if method is not None:
            payload = struct.pack(">HH", *method) + (args.encode() if isinstance(args, str) else args or b"")
        connection._enqueue([FRAME_HEAD.pack(kind, channel, len(payload)) + payload + FRAME_END])
        connection.flush()

    return write_frame
