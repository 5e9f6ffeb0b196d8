"""The producing end of an AF_UNIX channel.

Made by :class:`millstream_tasks.channels.unix.UnixTransport`, used by the subtask's thread. What must never happen here:
waiting (but for the bounded flush at close), or a frame sent in two halves with another between them.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable

from millstream_schema.channels import Frame
from millstream_schema.errors import ChannelError, ChannelLost, ChannelMissing, ConfigurationError

from .unix_wire import BYE_LENGTH, HEADER, REPORT, REPORT_GONE, REPORT_REFUSED

SEND_BUFFER = 4 * 1024 * 1024
MAX_BUFFERS = 64
"""Buffers handed to one sendmsg; Linux allows 1024, more than 64 gains nothing."""


class UnixWriter:
    """See :class:`millstream_schema.channels.ChannelWriter`."""

    def __init__(
        self,
        name: str,
        capacity: int,
        max_frame: int,
        peer: socket.socket,
        greeting: bytes,
        selector: selectors.BaseSelector,
        monotonic: Callable[[], float],
        flush_seconds: float,
    ) -> None:
        self._name = name
        self._half_window = capacity / 2
        self._max_frame = max_frame
        self._peer = peer
        self._selector = selector
        self._monotonic = monotonic
        self._flush_seconds = flush_seconds
        self._queue: deque[bytes | memoryview] = deque([greeting])
        self._sent = 0
        self._reported = 0
        self._reports = bytearray()
        self._failure: ChannelError | None = None
        self._want_write = False
        self.closed = False
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # the kernel caps it at net.core.wmem_max
        selector.register(peer, selectors.EVENT_READ, self._on_ready)
        self._flush()

    def put(self, frame: Frame) -> None:
        if self._failure is not None:
            raise self._failure
        number, data = frame
        if len(data) > self._max_frame:
            raise ConfigurationError(
                f"a frame of {len(data)} bytes does not fit channel {self._name}: raise max_frame (now {self._max_frame}) on both ends"
            )
        self._sent = number
        self._queue.append(HEADER.pack(number, len(data)))
        self._queue.append(data)
        self._flush()
        if self._failure is not None:
            raise self._failure

    @property
    def reported(self) -> int:
        # Reports are read in ``wait``; a caller that runs short of credit looks for itself rather than pay for a wait.
        if self._failure is None and self._sent - self._reported >= self._half_window:
            self._read_reports()
        if self._failure is not None:
            raise self._failure
        return self._reported

    def close(self) -> None:
        self.close_by(self._monotonic() + self._flush_seconds)

    def close_by(self, deadline: float) -> None:
        """Send what is queued until ``deadline`` (monotonic seconds), say good-bye, close."""
        if self.closed:
            return
        self.closed = True
        if self._failure is None:
            self._queue.append(HEADER.pack(0, BYE_LENGTH))
            self._flush()
            self._drain(deadline)
        if self._peer.fileno() >= 0:
            self._drop()
        self._failure = ChannelLost(f"the writer of channel {self._name} is closed")

    def _drain(self, deadline: float) -> None:
        if self._failure is not None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._peer, selectors.EVENT_WRITE)
            while self._queue and self._failure is None:
                remaining = deadline - self._monotonic()
                if remaining <= 0:
                    return
                if selector.select(remaining):
                    self._flush()

    def _drop(self) -> None:
        self._selector.unregister(self._peer)
        self._peer.close()
        self._queue.clear()

    def _fail(self, failure: ChannelError) -> None:
        if self._failure is None:
            self._failure = failure
            self._drop()

    def _flush(self) -> None:
        """Send as much as the socket takes; ask for a write event when something is left."""
        queue = self._queue
        try:
            while queue:
                buffers = list(queue) if len(queue) <= MAX_BUFFERS else [queue[i] for i in range(MAX_BUFFERS)]
                sent = self._peer.sendmsg(buffers)
                while queue and sent >= len(queue[0]):
                    sent -= len(queue.popleft())
                if sent:
                    queue[0] = memoryview(queue[0])[sent:]
        except BlockingIOError:
            pass
        except OSError as exc:
            self._read_reports()  # the consumer may have said why
            self._fail(self._lost(exc))
            return
        if bool(queue) != self._want_write:
            self._want_write = bool(queue)
            events = selectors.EVENT_READ | selectors.EVENT_WRITE if queue else selectors.EVENT_READ
            self._selector.modify(self._peer, events, self._on_ready)

    def _read_reports(self) -> bool:
        """Take the newest report; True when there was one, or the connection ended."""
        if self._failure is not None:
            return False
        data = self._reports
        end: ChannelError | None = None
        try:
            while True:
                chunk = self._peer.recv(4096)
                if not chunk:
                    end = self._lost(None)
                    break
                data += chunk
        except BlockingIOError:
            pass
        except OSError as exc:
            end = self._lost(exc)
        whole = len(data) // REPORT.size * REPORT.size
        for (value,) in REPORT.iter_unpack(bytes(data[:whole])):
            if value == REPORT_REFUSED:
                end = ChannelLost(f"channel {self._name} refused this producer: it has another one, or another name or generation")
            elif value == REPORT_GONE:
                end = ChannelMissing(f"channel {self._name} is gone: its consumer closed or deleted it")
            elif value > self._reported:
                self._reported = value
        del data[:whole]
        if end is not None:
            self._fail(end)
        return bool(whole) or end is not None

    def _lost(self, exc: OSError | None) -> ChannelLost:
        return ChannelLost(f"channel {self._name} lost its consumer: {exc.strerror if exc is not None else 'the connection was closed'}")

    def _on_ready(self, mask: int) -> bool:
        noteworthy = self._read_reports() if mask & selectors.EVENT_READ else False
        if mask & selectors.EVENT_WRITE and self._failure is None:
            self._flush()
        return noteworthy or self._failure is not None
