"""The consuming end of an AF_UNIX channel: listens, admits one producer, parses frames, reports progress.

Made by :class:`millstream_tasks.channels.unix.UnixTransport`, used by the subtask's thread. What must never happen here: a
second producer admitted, or the socket read while ``capacity`` frames are unprocessed.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable

from millstream_schema.channels import Frame
from millstream_schema.errors import ChannelBroken, ChannelError, ChannelLost

from .unix_wire import (
    BYE_LENGTH,
    HEADER,
    HELLO_DELETE,
    HELLO_PRODUCE,
    REPORT,
    REPORT_GONE,
    REPORT_REFUSED,
    Hello,
    inode,
    parse_hello,
)

BUFFER = 256 * 1024
MAX_STRANGERS = 8
"""Connections that have not said hello yet; the oldest is closed beyond."""


class UnixReader:
    """See :class:`millstream_schema.channels.ChannelReader`."""

    def __init__(
        self,
        name: str,
        generation: int,
        capacity: int,
        max_frame: int,
        listener: socket.socket,
        path: str,
        selector: selectors.BaseSelector,
    ) -> None:
        self._name = name
        self._generation = generation
        self._capacity = capacity
        self._report_step = max(1, capacity // 2)
        self._max_frame = max_frame
        self._listener = listener
        self._path = path
        self._inode = inode(path)
        self._selector = selector
        self._producer: socket.socket | None = None
        self._strangers: dict[socket.socket, bytearray] = {}
        self._armed = False
        self._buffer = bytearray(BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._taken = 0
        self._processed = 0
        self._told = 0
        self._unsent = b""
        self._withheld = False
        self._released = False
        self._finished = False
        self._failure: ChannelError | None = None
        self._closed = False
        selector.register(listener, selectors.EVENT_READ, self._on_knock)

    # ------------------------------------------------------------------ the port

    def take(self) -> Frame | None:
        frame = self._parse()
        while frame is None:
            if self._taken - self._processed >= self._capacity:
                self._withheld = True
            if self._withheld or not self._fill():
                self._report()
                if self._failure is not None and not self._withheld:
                    raise self._failure
                return None
            frame = self._parse()
        self._taken = frame.number
        return frame

    def processed(self, number: int) -> None:
        if number <= self._processed:
            return
        self._processed = number
        if self._withheld:
            self._withheld = False
            self._released = True
        if number - self._told >= self._report_step:
            self._report()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._report()
        self._tear_down(ChannelLost(f"the reader of channel {self._name} is closed"))
        self._start = self._end = 0

    def deleted(self) -> None:
        """The channel was deleted: tell the producer, free the name; what has arrived can still be taken."""
        if self._failure is None:
            self._tear_down(ChannelLost(f"channel {self._name} was deleted under its reader"))

    # ------------------------------------------------------------------ called by the transport's wait

    def prepare_wait(self) -> bool:
        """Send what was not reported yet; True when there is something to take that no socket event would announce."""
        self._report()
        released, self._released = self._released, False
        return released

    @property
    def owes_report(self) -> bool:
        """True while a report could not be sent."""
        return self._producer is not None and (self._told != self._processed or bool(self._unsent))

    def _on_ready(self, mask: int) -> bool:
        # One announcement until the caller has emptied the socket: a held channel must not make every wait return.
        self._disarm()
        return True

    def _on_knock(self, mask: int) -> bool:
        self._accept()
        return self._producer is not None or self._failure is not None

    # ------------------------------------------------------------------ frames

    def _parse(self) -> Frame | None:
        start = self._start
        if self._end - start < HEADER.size:
            return None
        number, length = HEADER.unpack_from(self._buffer, start)
        if length > self._max_frame:
            if length == BYE_LENGTH:
                self._finished = True
                self._start = self._end = 0
                self._drop_producer()
                return None
            raise ChannelBroken(f"channel {self._name}: frame {number} of {length} bytes is above max_frame ({self._max_frame})")
        if number - self._processed > self._capacity:
            self._withheld = True
            return None
        end = start + HEADER.size + length
        if end > self._end:
            self._make_room(HEADER.size + length)
            return None
        self._start = end
        return Frame(number, bytes(self._view[start + HEADER.size : end]))

    def _make_room(self, need: int) -> None:
        """Move the unfinished frame to the front of a buffer that holds all of it."""
        start, end = self._start, self._end
        if start + need <= len(self._buffer):
            return
        rest = bytes(self._view[start:end])
        if need > len(self._buffer):
            self._buffer = bytearray(need + BUFFER)
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _fill(self) -> bool:
        """Read once; True when bytes came."""
        producer = self._producer
        if producer is None:
            if self._finished or self._failure is not None:
                return False
            self._accept()
            producer = self._producer
            if producer is None:
                return False
            if self._end > self._start:  # frames came along with the hello
                return True
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            self._make_room(len(self._buffer) - self._start + 1)
        try:
            count = producer.recv_into(self._view[self._end :])
        except BlockingIOError:
            self._arm(producer)
            return False
        except OSError as exc:
            self._lose(exc.strerror)
            return False
        if not count:
            self._lose("the connection was closed")
            return False
        self._end += count
        return True

    def _lose(self, why: str | None) -> None:
        self._drop_producer()
        self._failure = ChannelLost(f"channel {self._name} lost its producer: {why}")

    # ------------------------------------------------------------------ admission

    def _accept(self) -> None:
        while self._failure is None:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # nobody there, or gone before we looked
                break
            peer.setblocking(False)
            self._strangers[peer] = bytearray()
            self._selector.register(peer, selectors.EVENT_READ, self._stranger_handler(peer))
            if len(self._strangers) > MAX_STRANGERS:
                self._dismiss(next(iter(self._strangers)))
        for stranger in list(self._strangers):
            if stranger in self._strangers:
                self._listen_to(stranger)

    def _stranger_handler(self, peer: socket.socket) -> Callable[[int], bool]:
        def on_ready(mask: int) -> bool:
            if peer in self._strangers:
                self._listen_to(peer)
            return self._producer is peer or self._failure is not None

        return on_ready

    def _listen_to(self, peer: socket.socket) -> None:
        """Read a stranger's hello and admit, obey or refuse."""
        data = self._strangers[peer]
        try:
            chunk = peer.recv(BUFFER)
            if not chunk:
                self._dismiss(peer)
                return
            data += chunk
            words = parse_hello(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._dismiss(peer)
            return
        if words is None:
            return
        if (words.name, words.generation) != (self._name, self._generation):
            self._refuse(peer)
        elif words.kind == HELLO_DELETE:
            self.deleted()
        elif words.kind == HELLO_PRODUCE and self._producer is None and not self._finished:
            self._admit(peer, words, data)
        else:
            self._refuse(peer)

    def _admit(self, peer: socket.socket, words: Hello, data: bytearray) -> None:
        del self._strangers[peer]
        self._selector.unregister(peer)
        self._producer = peer
        rest = data[words.size :]
        if len(rest) > len(self._buffer):
            self._buffer = bytearray(len(rest) + BUFFER)
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _refuse(self, peer: socket.socket) -> None:
        try:
            peer.send(REPORT.pack(REPORT_REFUSED))
        except OSError:
            pass
        self._dismiss(peer)

    def _dismiss(self, peer: socket.socket) -> None:
        self._strangers.pop(peer, None)
        self._selector.unregister(peer)
        peer.close()

    # ------------------------------------------------------------------ reports and sockets

    def _report(self) -> None:
        """Tell the producer the newest number; what the socket does not take waits for the next call."""
        producer = self._producer
        if producer is None or not self.owes_report:
            return
        data = self._unsent or REPORT.pack(self._processed)
        try:
            sent = producer.send(data)
        except BlockingIOError:
            return
        except OSError:  # its frames are still read; the end shows there
            self._told = self._processed
            self._unsent = b""
            return
        if not self._unsent:
            self._told = self._processed
        self._unsent = data[sent:]

    def _arm(self, producer: socket.socket) -> None:
        if not self._armed:
            self._armed = True
            self._selector.register(producer, selectors.EVENT_READ, self._on_ready)

    def _disarm(self) -> None:
        if self._armed and self._producer is not None:
            self._armed = False
            self._selector.unregister(self._producer)

    def _drop_producer(self) -> None:
        self._disarm()
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _tear_down(self, failure: ChannelLost) -> None:
        if self._producer is not None:
            try:
                self._producer.send(self._unsent + REPORT.pack(REPORT_GONE))
            except OSError:
                pass
        self._drop_producer()
        for stranger in list(self._strangers):
            self._refuse(stranger)
        if self._listener.fileno() >= 0:
            # Compared while the listener still holds its inode: afterwards a successor's file may have the same number.
            if inode(self._path) == self._inode:
                os.unlink(self._path)
            self._selector.unregister(self._listener)
            self._listener.close()
        self._failure = failure
