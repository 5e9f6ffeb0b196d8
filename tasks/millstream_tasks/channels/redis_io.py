"""The two I/O threads of a Redis transport and the state they share.

Made by :class:`millstream_tasks.channels.redis.RedisTransport`. What must never happen here: an error that ends a thread
without being told to every reader and writer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic

from millstream_schema.channels import Frame
from millstream_schema.errors import ChannelError, ChannelLost, ChannelMissing

from .broker_ends import BrokerEnds
from .redis_ends import RedisReader, RedisWriter
from .redis_link import Answer, RedisLink, ResponseError, command

BATCH_BYTES = 8 * 1024 * 1024
"""Bytes of frames in one pipeline; the rest waits for the next, so that reports are not held up for long."""

WAKE_EXPIRE_MS = b"3600000"


class Shared(BrokerEnds[RedisReader, RedisWriter]):
    """What the subtask's thread and the two I/O threads have in common."""

    def __init__(self, wake_key: bytes, block_seconds: float) -> None:
        super().__init__()
        self.wake_key = wake_key
        self.block_ms = b"%d" % int(block_seconds * 1000)
        self.work = threading.Event()
        self.wake_requests = 0
        self.stopping = False

    def poke(self) -> None:
        """There is something to send."""
        if not self.work.is_set():
            self.work.set()

    def check(self) -> None:
        """Raise the failure that ended this transport, if one did."""
        if self.failure is not None:
            raise self.failure
        if self.stopping:
            raise ChannelLost("the Redis transport is closed")

    def add_reader(self, reader: RedisReader) -> None:
        with self._lock:
            self.readers = (*self.readers, reader)
            self._adopt(reader)

    def add_writer(self, writer: RedisWriter) -> None:
        with self._lock:
            self.writers = (*self.writers, writer)
            self._adopt(writer)

    def _adopt(self, end: RedisReader | RedisWriter) -> None:
        end.failure = self.failure
        self.wake_requests += 1
        self.poke()

    def forget(self, gone: set[RedisReader | RedisWriter]) -> None:
        """Drop ends that are closed or failed."""
        if gone:
            with self._lock:
                self.readers = tuple(reader for reader in self.readers if reader not in gone)
                self.writers = tuple(writer for writer in self.writers if writer not in gone)

    def stop(self) -> None:
        """End both threads after what is pending has been sent."""
        self.stopping = True
        self.poke()

    def fail(self, failure: ChannelError) -> None:
        super().fail(failure)
        self.work.set()


class Outgoing(threading.Thread):
    """Sends everything pending of all channels as one pipeline, again and again."""

    def __init__(self, shared: Shared, link: RedisLink, expire: bytes, renew_seconds: float) -> None:
        super().__init__(name="millstream-redis-outgoing", daemon=True)
        self._shared = shared
        self._link = link
        self._expire = expire
        self._renew_seconds = renew_seconds
        self._renew_at = monotonic() + renew_seconds
        self._wakes_sent = 0

    def run(self) -> None:
        shared = self._shared
        try:
            while shared.failure is None:
                shared.work.wait(max(0.0, self._renew_at - monotonic()))
                shared.work.clear()
                stopping = shared.stopping
                self._round(stopping)
                if stopping and not any(writer.pending for writer in shared.writers):
                    return
        except ChannelError as exc:
            shared.fail(exc)
        except Exception as exc:  # a defect here must end the subtask, not hang it
            shared.fail(ChannelLost(f"the sending thread failed: {self._link.describe(exc)}"))

    def _round(self, stopping: bool) -> None:
        shared = self._shared
        renew = monotonic() >= self._renew_at
        if renew:
            self._renew_at = monotonic() + self._renew_seconds
        commands: list[bytes] = []
        reports: list[tuple[RedisReader, int, bool, int]] = []
        gone: set[RedisReader | RedisWriter] = {writer for writer in shared.writers if writer.closed and writer.failure is not None}
        requests = shared.wake_requests
        wake, self._wakes_sent = stopping or requests != self._wakes_sent, requests
        for reader in shared.readers:
            number = reader.done
            if reader.closing:
                gone.add(reader)
            if number > reader.told or renew:
                wake = wake or reader.full
                batch = reader.report_commands(number, self._expire if renew else None)
                reports.append((reader, number, number > reader.told, len(batch)))
                commands += batch
        if wake or renew:
            commands.append(command(b"XADD", shared.wake_key, b"MAXLEN", b"1", b"*", b"w", b""))
            commands.append(command(b"PEXPIRE", shared.wake_key, WAKE_EXPIRE_MS))
        frames = list(self._frames())
        commands += (writer.encode(frame) for writer, frame in frames)
        self._link.send(commands)
        for reader, number, told, count in reports:
            self._settle_report(reader, number, told, [self._link.receive() for _ in range(count)])
        if wake or renew:
            self._link.receive()
            self._link.receive()
        for writer, _ in frames:
            self._settle_frame(writer, self._link.receive())
        shared.forget(gone)
        if frames or gone:
            shared.answered()

    def _frames(self) -> Iterator[tuple[RedisWriter, Frame]]:
        """Pending frames, in order per channel, of all channels in turn; a bounded batch."""
        shared = self._shared
        size = 0
        for writer in shared.writers:
            pending = writer.pending
            while pending and writer.failure is None:
                if size >= BATCH_BYTES:
                    shared.poke()
                    return
                frame = pending.popleft()
                size += len(frame.data)
                yield writer, frame

    def _settle_report(self, reader: RedisReader, number: int, told: bool, answers: list[Answer]) -> None:
        """A report that found no stream, or an expiry that found no key, means that the channel was deleted."""
        missing = (answers[1] is None if told else answers[-1] == 0) and not reader.closing
        errors = [answer for answer in answers if isinstance(answer, ResponseError)]
        if missing:
            reader.failure = ChannelLost(f"channel {reader.name} was deleted under its reader")
        elif errors:
            reader.failure = ChannelLost(f"channel {reader.name} cannot be reported on: {self._link.describe(errors[0])}")
        reader.told = max(reader.told, number)
        if reader.failure is not None:
            self._shared.arrived.set()

    def _settle_frame(self, writer: RedisWriter, answer: Answer) -> None:
        writer.answered += 1
        failure: ChannelError
        if answer is None:
            failure = ChannelMissing(f"channel {writer.name} does not exist any more; a newer generation of the job may exist")
        elif isinstance(answer, ResponseError):
            if "equal or smaller" in str(answer):  # a repeat: the stream has it already
                return
            failure = ChannelLost(f"channel {writer.name} cannot be written: {self._link.describe(answer)}")
        else:
            return
        if writer.failure is None:
            writer.failure = failure
            self._shared.arrived.set()


class Incoming(threading.Thread):
    """Waits in one XREAD for frames of readers with room, for reports to writers, and for the wake-up key."""

    def __init__(self, shared: Shared, link: RedisLink) -> None:
        super().__init__(name="millstream-redis-incoming", daemon=True)
        self._shared = shared
        self._link = link
        self._woken = b"0-0"

    def run(self) -> None:
        shared = self._shared
        try:
            while shared.failure is None and not shared.stopping:
                self._round()
        except ChannelError as exc:
            if not shared.stopping:
                shared.fail(exc)
        except Exception as exc:  # a defect here must end the subtask, not hang it
            shared.fail(ChannelLost(f"the receiving thread failed: {self._link.describe(exc)}"))

    def _round(self) -> None:
        shared = self._shared
        keys = [shared.wake_key]
        ids = [self._woken]
        by_key: dict[bytes, tuple[RedisReader, int] | RedisWriter] = {}
        most = 1
        for reader in shared.readers:
            room = 0 if reader.closing or reader.failure is not None else reader.room()
            if room > 0:
                most = max(most, room)
                by_key[reader.key] = (reader, room)
                keys.append(reader.key)
                ids.append(b"%d-%d" % (reader.generation, reader.fetched))
        for writer in shared.writers:
            by_key[writer.progress_key] = writer
            keys.append(writer.progress_key)
            ids.append(b"%d-%d" % (writer.generation, writer.progress))
        self._link.send([command(b"XREAD", b"COUNT", b"%d" % most, b"BLOCK", shared.block_ms, b"STREAMS", *keys, *ids)])
        answer = self._link.receive()
        if isinstance(answer, ResponseError):
            raise ChannelLost(f"Redis refused to read the channels: {self._link.describe(answer)}")
        for key, entries in answer or ():
            self._distribute(key, entries, by_key.get(key))

    def _distribute(self, key: bytes, entries: list[tuple[bytes, list[bytes]]], end: tuple[RedisReader, int] | RedisWriter | None) -> None:
        if end is None:
            self._woken = bytes(entries[-1][0])
            return
        if isinstance(end, RedisWriter):
            end.progress = max(end.progress, _number(entries[-1][0]))
        else:
            reader, room = end
            # COUNT is one number for all channels: what exceeds this one's room is left in the stream and read again.
            for identity, fields in entries[:room]:
                number = _number(identity)
                reader.fetched = number
                reader.frames.append(Frame(number, fields[1]))
        self._shared.arrived.set()


def _number(identity: bytes) -> int:
    return int(identity[identity.index(b"-") + 1 :])
