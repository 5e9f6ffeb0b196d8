"""Plain Celery messages for durable tasks become submissions: the end beside the worker (:class:`IntakeLink`) and the end in its task process (:class:`Intake`).

The worker's consumer hands each message over a socket to the task process, which submits it under the message's id and answers when that is committed; only then the message
is acknowledged. What must never happen here: a message acknowledged before the commit; a wait of the consumer on the database; a database connection where Celery forks.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from millstream_schema.durable.requests import Options, decode_arguments
from millstream_schema.errors import CodecError, StoreError
from millstream_tasks.shell.wire import pack, receive

from .tasks import Refusal, Request, Tasks

log = structlog.get_logger(__name__)
TOGETHER = 200
"""Messages one transaction takes."""
FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0


class Arrived(msgspec.Struct, frozen=True):
    """A message: ``id`` is Celery's task id and becomes the key; ``arguments`` as :func:`encode_arguments` made them."""

    id: str
    handler: str
    arguments: str
    options: Options
    actor: str = ""


class Answered(msgspec.Struct, frozen=True):
    """``problem`` empty: it is committed; else why it never will be."""

    id: str
    problem: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_arrived = msgspec.msgpack.Decoder(Arrived).decode
decode_answered = msgspec.msgpack.Decoder(Answered).decode


class _Waiting(msgspec.Struct):
    frame: bytes
    done: Callable[[str], None]
    answered: threading.Event


class IntakeLink:
    """The worker's end. Its threads only read and write the socket; answers are acted on in the consumer's thread, by :meth:`deliver`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._answers: deque[Answered] = deque()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sock: socket.socket | None = None
        self.notify: Callable[[], None] = lambda: None
        """Called from a thread of the link when there is something to deliver."""

    def connected(self) -> socket.socket:
        """The end for a new task process, which its keeper closes after starting it; what still waits for an answer is sent again: it is submitted under the same key."""
        ours, theirs = socket.socketpair()
        with self._lock:
            old, self._sock = self._sock, ours
            self._outgoing.put(None)
            self._outgoing = queue.SimpleQueue()
            for waiting in self._waiting.values():
                self._outgoing.put(waiting.frame)
            outgoing = self._outgoing
        if old is not None:
            old.close()
        for name, target, args in (("to", self._write, (ours, outgoing)), ("from", self._read, (ours,))):
            threading.Thread(target=target, args=args, name=f"millstream-intake-{name}", daemon=True).start()
        return theirs

    def send(self, message: Arrived, done: Callable[[str], None]) -> threading.Event:
        """Hand a message over; ``done`` is called with the problem or an empty text by :meth:`deliver`. The event is set when there is an answer."""
        waiting = _Waiting(encode(message), done, threading.Event())
        with self._lock:
            self._waiting[message.id] = waiting
            self._outgoing.put(waiting.frame)
        return waiting.answered

    def deliver(self) -> None:
        """Act on the answers that have come. In the consumer's thread: acknowledgements go out on its connection."""
        while True:
            try:
                answer = self._answers.popleft()
            except IndexError:
                return
            with self._lock:
                waiting = self._waiting.pop(answer.id, None)
            if waiting is not None:
                waiting.done(answer.problem)

    def _write(self, sock: socket.socket, outgoing: queue.SimpleQueue[bytes | None]) -> None:
        while (frame := outgoing.get()) is not None:
            try:
                sock.sendall(pack(frame))
            except OSError:
                return  # the process is gone: its successor gets what waits

    def _read(self, sock: socket.socket) -> None:
        while True:
            try:
                data = receive(sock)
            except OSError:
                return
            if data is None:
                return
            answer = decode_answered(data)
            self._answers.append(answer)
            with self._lock:
                waiting = self._waiting.get(answer.id)
            if waiting is not None:
                waiting.answered.set()
            self.notify()


class SelfPipe:
    """Wakes an event loop from another thread. ``descriptor`` is what the loop reads."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        for end in (self.descriptor, self._write):
            os.set_blocking(end, False)

    def wake(self) -> None:
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # it has not been read: the loop wakes anyway

    def drain(self) -> None:
        try:
            while os.read(self.descriptor, 4096):
                pass
        except BlockingIOError:
            pass


class Intake:
    """The task process's end: a thread reads, another one submits, many messages in one transaction."""

    def __init__(self, sock: socket.socket, tasks: Tasks) -> None:
        self._sock = sock
        self._tasks = tasks
        self._arrived: queue.SimpleQueue[Arrived | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"millstream-intake-{name}", daemon=True)
            for name, target in (("read", self._read), ("submit", self._submit_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Messages that were not answered stay with their broker."""
        self._stopping.set()
        self._arrived.put(None)
        self._threads[1].join(3)
        self._sock.close()

    def _read(self) -> None:
        while True:
            try:
                data = receive(self._sock)
            except OSError:
                data = None
            if data is None:
                self._arrived.put(None)
                return
            self._arrived.put(decode_arrived(data))

    def _submit_all(self) -> None:
        while (first := self._arrived.get()) is not None:
            batch = [first]
            while len(batch) < TOGETHER and not self._arrived.empty():
                another = self._arrived.get()
                if another is None:
                    return
                batch.append(another)
            answers = self._answers(batch)
            try:
                self._sock.sendall(b"".join(pack(encode(answer)) for answer in answers))
            except OSError:
                return  # the worker is gone; the broker has the messages, and their keys are known

    def _answers(self, batch: list[Arrived]) -> list[Answered]:
        """An answer for each; none for one that nobody expected to fail: its broker keeps it, and it holds up no other."""
        try:
            return self._accepted(batch)
        except Exception:
            if len(batch) == 1:
                log.exception("a message could not be submitted; it stays with its broker until this worker is gone", message=batch[0].id)
                return []
            return [answer for message in batch for answer in self._answers([message])]

    def _accepted(self, batch: list[Arrived]) -> list[Answered]:
        """An answer for each. While the database is away, or a quota is used up, they wait: their broker keeps them."""
        answers: list[Answered] = []
        waiting: dict[str, Request] = {}
        for message in batch:
            try:
                args, kwargs = decode_arguments(message.arguments)
            except CodecError as exc:
                answers.append(Answered(message.id, str(exc)))
                continue
            waiting[message.id] = Request(
                handler=message.handler, args=tuple(args), kwargs=kwargs, key=message.id, options=message.options, origin="celery", actor=message.actor
            )  # fmt: skip
        pause = FIRST_PAUSE
        while waiting and not self._stopping.is_set():
            try:
                found = self._tasks.accept(list(waiting.values()))
            except StoreError as exc:
                log.warning("messages wait for the database", messages=len(waiting), error=str(exc))
                found = []
            for key, answer in zip(list(waiting), found, strict=False):
                if isinstance(answer, Refusal) and answer.retry_after:
                    continue  # a quota: later
                answers.append(Answered(key, answer.reason if isinstance(answer, Refusal) else ""))
                del waiting[key]
            if waiting:
                self._stopping.wait(pause)
                pause = min(pause * 2, LAST_PAUSE)
        return answers
