"""A RabbitMQ queue as a source: one split, one reader, acknowledged only after the epoch that holds the messages is durable.

Built by user code; read by the subtask runner, which also drives the reader's part in each epoch. Transactional reading: the ids taken are in the snapshot, so
a message delivered again after a crash is known and acknowledged, not emitted. What must never happen here: an acknowledgement before the
epoch is durable; a message emitted twice within one attempt because a connection was lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from millstream_schema.connectors import Committable, ConnectorContext, Json, PoisonPolicy, Read, SourceCapability, Split
from millstream_schema.errors import SourceError
from millstream_tasks.sources.broker_urls import BrokerUrl
from millstream_tasks.sources.memory import qualified_name
from millstream_tasks.sources.outage import Outage, negative_problems
from millstream_tasks.sources.poison import PoisonTally, policy_problem
from millstream_tasks.sources.rabbitmq_connection import Lost, QueueConnection
from millstream_tasks.sources.rabbitmq_ledger import Ledger

SCHEMES = ("amqp", "amqps")
EXAMPLE = "amqp://user:password@host:5672/vhost"
FORMATS = ("json", "text", "bytes")
POLL_SECONDS = 0.008
DRAIN_SECONDS = 0.002
MAX_PREFETCH = 65_535


class RabbitQueueSource:
    """Messages of ``queue`` (which must exist) as ``{"id": str, "body": …}``.

    - ``id_header``: where the id is: the property ``message_id`` or ``correlation_id``, else a header of that name. Ids must be unique
      per record: a second message with an id seen less than ``dedup_retention`` seconds after its epoch became durable is acknowledged
      and dropped. So the guarantee is bounded by ``dedup_retention``; the ids of that time are kept in state.
    - ``format``: how the body decodes: ``json``, ``text`` (UTF-8) or ``bytes``; ``parse`` is called with what came out.
    - ``prefetch``: messages taken per epoch at most; a full window is an idle source that asks for an epoch.
    - ``poison``: for a body that cannot be decoded and for a message without an id. The latter cannot be known again: it may be reported
      twice after a crash.
    - ``heartbeat`` and ``give_up`` in seconds. Epochs must be closer together than the broker's ``consumer_timeout`` (30 min).
    """

    kind = "rabbitmq-queue"
    version = 1
    bounded = False
    capability = SourceCapability.TRANSACTIONAL_READ

    def __init__(
        self,
        url: str,
        queue: str,
        *,
        id_header: str = "message_id",
        dedup_retention: float = 3600.0,
        prefetch: int = 1000,
        format: str = "json",
        parse: Callable[[Any], Any] | None = None,
        poison: PoisonPolicy | str = PoisonPolicy.FAIL,
        heartbeat: int = 10,
        give_up: float = 30.0,
    ) -> None:
        self._url = BrokerUrl(url, SCHEMES, EXAMPLE)
        self._queue = queue
        self._id_header = id_header
        self._retention = dedup_retention
        self._prefetch = prefetch
        self._format = format
        self._parse = parse
        self._poison = str(poison)
        self._heartbeat = heartbeat
        self._give_up = give_up

    def config(self) -> dict[str, Json]:
        return {
            "broker": self._url.redacted(),
            "queue": self._queue,
            "id_header": self._id_header,
            "dedup_retention": self._retention,
            "prefetch": self._prefetch,
            "format": self._format,
            "parse": None if self._parse is None else qualified_name(self._parse),
            "poison": self._poison,
        }

    def problems(self) -> list[str]:
        found = policy_problem(self._poison) + self._url.problems()
        if not self._queue or not self._id_header:
            found.append("queue and id_header must not be empty")
        if type(self._prefetch) is not int or not 1 <= self._prefetch <= MAX_PREFETCH:
            found.append(f"prefetch must be an integer from 1 to {MAX_PREFETCH}, not {self._prefetch!r}")
        if self._format not in FORMATS:
            found.append(f"format={self._format!r} is unknown; write one of {', '.join(map(repr, FORMATS))}")
        if not self._retention > 0:
            found.append(f"dedup_retention must be above 0 s, not {self._retention!r}")
        if type(self._heartbeat) is not int or self._heartbeat < 2:
            found.append(f"heartbeat must be an integer of at least 2 s, not {self._heartbeat!r}")
        return found + negative_problems(give_up=self._give_up)

    def discover(self, known: frozenset[str]) -> list[Split]:
        return [] if "0" in known else [Split("0")]

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> RabbitQueueReader:
        url = self._url.parts()
        what = f"queue {self._queue} at {self._url.redacted()}"

        def connect(on_message: Callable[[Any], None]) -> QueueConnection:
            return QueueConnection(url, self._queue, self._prefetch, self._heartbeat, on_message)

        return RabbitQueueReader(
            connect,
            self._queue,
            Ledger(round(self._retention * 1000)),
            context.now_ms,
            id_header=self._id_header,
            prefetch=self._prefetch,
            decode=_decoder(self._format, self._parse),
            tally=PoisonTally(PoisonPolicy(self._poison), what),
            outage=Outage(what, self._give_up),
        )


class RabbitQueueReader:
    """Consumes the queue and takes part in epochs. The position is in the participant's state; the cursor is always None."""

    def __init__(
        self,
        connect: Callable[[Callable[[Any], None]], QueueConnection],
        queue: str,
        ledger: Ledger,
        now_ms: Callable[[], int],
        *,
        id_header: str,
        prefetch: int,
        decode: Callable[[bytes], Any],
        tally: PoisonTally,
        outage: Outage,
    ) -> None:
        self._connect = connect
        self._queue = queue
        self._ledger = ledger
        self._now_ms = now_ms
        self._id_header = id_header
        self._prefetch = prefetch
        self._decode = decode
        self._tally = tally
        self._outage = outage
        self._connection: QueueConnection | None = None
        self._pending: deque[tuple[int, str | None, bytes]] = deque()

    @property
    def wants_epoch(self) -> bool:
        """Whether the prefetch window is full of messages that only a durable epoch can acknowledge."""
        return not self._pending and self._ledger.unacked >= self._prefetch and self._ledger.wants_epoch

    def poll(self, limit: int) -> Read:
        self._receive(limit)
        values: list[Any] = []
        while self._pending and len(values) < limit:
            tag, message_id, body = self._pending[0]
            try:
                if message_id is None:
                    raise ValueError(f"the message has no id in {self._id_header!r}")
                values.append({"id": message_id, "body": self._decode(body)})
            except Exception as error:  # the poison policy decides
                if self._tally.fails and values:
                    break
                self._tally.record(f"{self._queue} message {message_id or tag}", body, f"{type(error).__name__}: {error}")
            self._pending.popleft()
            if message_id is None:
                self._ledger.discarded(tag)
            else:
                self._ledger.emitted(message_id)
        dead, skipped = self._tally.drain()
        return Read(values, None, False, dead, skipped)

    def cursor(self) -> Json:
        return None

    def close(self) -> None:
        """What was not acknowledged goes back to the queue."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def save_state(self, epoch: int) -> Json:
        return self._ledger.save(epoch, self._now_ms())

    def prepare_commit(self, epoch: int) -> list[Committable]:
        return []

    def finish_commit(self, epoch: int, success: bool) -> None:
        if success:
            self._ledger.durable(epoch, self._now_ms())
            self._acknowledge()

    def restore_from_epoch(self, epoch: int, state: Json) -> None:
        if self._connection is not None:
            raise SourceError(f"queue {self._queue}: state must be restored before the first poll")
        self._ledger.restore(epoch, state, self._now_ms())

    def _receive(self, limit: int) -> None:
        """Take in messages until ``limit`` are pending, the window is full, none comes, or the time of a poll is over."""
        if self._connection is None and not self._reconnect():
            return
        connection = self._connection
        assert connection is not None
        end = time.monotonic() + POLL_SECONDS
        wait = DRAIN_SECONDS
        try:
            connection.tick()
            # A message that is known is not pending: without the clock a long run of them would hold up a barrier.
            while len(self._pending) < limit and connection.drain(wait) and time.monotonic() < end:
                wait = 0.0
        except Lost as error:
            self._lost(error)
            return
        self._acknowledge()

    def _reconnect(self) -> bool:
        if not self._outage.may_try():
            return False
        try:
            self._connection = self._connect(self._on_message)
        except Lost as error:
            self._lost(error)
            return False
        self._outage.over()
        return True

    def _lost(self, error: Lost) -> None:
        self.close()
        self._ledger.connection_lost()
        self._pending.clear()
        self._outage.failed(error)

    def _acknowledge(self) -> None:
        if self._connection is None:
            return  # delivered again after the next connect, and acknowledged then
        try:
            self._connection.acknowledge(self._ledger.take_due())
        except Lost as error:
            self._lost(error)

    def _on_message(self, message: Any) -> None:
        tag = message.delivery_tag
        message_id = _message_id(message, self._id_header)
        if self._ledger.delivered(tag, message_id):
            body = message.body
            self._pending.append((tag, message_id, body if isinstance(body, bytes) else str(body).encode()))


def _message_id(message: Any, name: str) -> str | None:
    properties: dict[str, Any] = message.properties
    found = properties.get(name) if name in ("message_id", "correlation_id") else (message.headers or {}).get(name)
    if isinstance(found, bytes):
        found = found.hex()
    return str(found) if found not in (None, "") else None


def _decoder(format: str, parse: Callable[[Any], Any] | None) -> Callable[[bytes], Any]:
    decoders: dict[str, Callable[[bytes], Any]] = {"json": msgspec.json.decode, "text": bytes.decode, "bytes": bytes}
    decode = decoders[format]
    if parse is None:
        return decode
    return lambda body: parse(decode(body))
