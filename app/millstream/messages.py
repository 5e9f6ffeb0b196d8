"""Hints and task events over the broker Celery uses: one door to kombu, for one node process.

Publishing and consuming have a thread and a connection each; callers only put into a bounded queue. What must never happen here: a caller that waits for the broker, or a hint
that anything depends on. When the broker is away hints are dropped, rows go on telling the truth.
"""

from __future__ import annotations

import gc
import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from celery import Celery
from kombu import Connection, Consumer, Exchange, Message, Producer, Queue

from millstream_schema.control import Deployment
from millstream_schema.hints import JobHint, NodeHint
from millstream_schema.ports import SystemClock

log = structlog.get_logger(__name__)
OUTBOX = 1000
EXPIRES = 60
FIRST_PAUSE, LAST_PAUSE = 0.25, 5.0
QUEUE_EXPIRES = 3600.0
TICK, ADVANCE, SUBTASK = "millstream.tick", "millstream.advance", "millstream.subtask"


def coordinator_queue(prefix: str) -> str:
    return f"{prefix}.coordinator"


def control_queue(prefix: str, node: str) -> str:
    return f"{prefix}.{node}.control"


class CeleryMessages:
    """The carrier of one node process. ``app`` names the broker; ``prefix`` starts every queue name; ``hostname`` is the worker whose attempts are shown."""

    def __init__(self, app: Celery, prefix: str, hostname: str) -> None:
        self._app = app
        self._prefix = prefix
        self._hostname = hostname
        self._outbox: deque[tuple[str, Any]] = deque(maxlen=OUTBOX)
        self._ready = threading.Event()
        self._closed = False
        self._stopping = threading.Event()
        self._clock = SystemClock()
        self._threads: list[threading.Thread] = []
        self.dropped = 0

    # -- sending: called from the node's and the coordinator's threads

    @property
    def hints(self) -> CeleryMessages:
        return self

    @property
    def events(self) -> CeleryMessages:
        return self

    def to_node(self, hint: NodeHint) -> None:
        self._put("node", hint)

    def to_coordinator(self, hint: JobHint) -> None:
        if hint.job:
            self._put("job", hint)

    def attempt(self, state: str, job: str, deployment: Deployment, detail: str) -> None:
        """A subtask's attempt as a task event, as Flower and ``celery events`` show them."""
        self._put("event", (state, job, deployment, detail))

    def _put(self, kind: str, item: Any) -> None:
        if len(self._outbox) == OUTBOX:
            self.dropped += 1
        self._outbox.append((kind, item))
        self._ready.set()

    # -- threads

    def start(
        self, node_name: str, to_node: Callable[[NodeHint], None], to_coordinator: Callable[[JobHint], None], node_id: Callable[[], str]
    ) -> None:
        """Begin to send and to deliver. ``node_id``: the node's present id, new after each registration; its queue follows."""
        self._spawn("send", self._send_all)
        self._spawn("receive", lambda: self._receive_all(to_node, to_coordinator, node_id))

    def _spawn(self, name: str, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._forever, args=(name, loop), name=f"millstream-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _forever(self, name: str, loop: Callable[[], None]) -> None:
        """Run a loop, again with a pause after the broker failed it."""
        pause = FIRST_PAUSE
        while not self._closed:
            began = self._clock.monotonic()
            try:
                loop()
            except Exception as exc:  # whatever kombu's transports raise: hints may be lost, the loop may not
                if not self._closed:
                    log.warning(
                        "the Celery broker cannot be reached; hints pause, jobs go on by rows",
                        broker=self._app.connection_for_write().as_uri(),  # without its password
                        thread=name,
                        error=f"{type(exc).__name__}: {exc}",
                    )
                    gc.collect()  # kombu's Redis transport keeps an epoll descriptor in a reference cycle for each failed try
                    pause = FIRST_PAUSE if self._clock.monotonic() - began > LAST_PAUSE else min(pause * 2, LAST_PAUSE)
                    self._stopping.wait(pause)

    def _connection(self) -> Connection:
        return self._app.connection_for_write(connect_timeout=5)

    def _send_all(self) -> None:
        with self._connection() as connection, connection.channel() as channel:
            producer = Producer(channel, serializer="json")
            dispatcher = self._app.events.Dispatcher(
                connection, channel=channel, hostname=self._hostname, enabled=True, buffer_while_offline=False
            )
            while not self._closed:
                self._ready.wait(1.0)
                self._ready.clear()
                while self._outbox:
                    kind, item = self._outbox.popleft()  # lost when sending fails: a hint
                    self._send(producer, dispatcher, kind, item)

    def _send(self, producer: Producer, dispatcher: Any, kind: str, item: Any) -> None:
        if kind == "node":
            body = msgspec.to_builtins(item)
            producer.publish(body, exchange="", routing_key=control_queue(self._prefix, item.node), expiration=EXPIRES, retry=False)
        elif kind == "job":
            self._app.send_task(
                ADVANCE,
                args=[item.job],
                queue=coordinator_queue(self._prefix),
                expires=EXPIRES,
                ignore_result=True,
                producer=producer,
                retry=False,
            )
        else:
            self._event(dispatcher, *item)

    def _event(self, dispatcher: Any, state: str, job: str, d: Deployment, detail: str) -> None:
        """A task's life: received and started at once, then one end."""
        uuid = d.attempt
        if state == "started":
            arguments = repr((job, d.subtask, d.generation))
            dispatcher.send("task-received", uuid=uuid, name=SUBTASK, args=arguments, kwargs="{}", retries=0)
            dispatcher.send("task-started", uuid=uuid)
        elif state == "succeeded":
            dispatcher.send("task-succeeded", uuid=uuid, result="finished", runtime=0.0)
        elif state == "revoked":
            dispatcher.send("task-revoked", uuid=uuid, terminated=True, signum=9, expired=False)
        else:
            dispatcher.send("task-failed", uuid=uuid, exception=detail[:500], traceback="")

    def _receive_all(
        self, to_node: Callable[[NodeHint], None], to_coordinator: Callable[[JobHint], None], node_id: Callable[[], str]
    ) -> None:
        def on_control(body: Any, _message: Message) -> None:
            hint = _node_hint(body)
            if hint is not None:
                to_node(hint)

        def on_coordinator(_body: Any, message: Message) -> None:
            name = message.headers.get("task")
            if name == TICK:
                to_coordinator(JobHint(""))
            elif name == ADVANCE:
                job = _first_argument(message)
                if job:
                    to_coordinator(JobHint(job))

        exchange = Exchange("", type="direct")
        with self._connection() as connection, connection.channel() as channel:
            shared = Queue(coordinator_queue(self._prefix), exchange, coordinator_queue(self._prefix), durable=True)
            with Consumer(channel, queues=[shared], callbacks=[on_coordinator], accept=["json"], no_ack=True):
                mine = ""
                consumer: Consumer | None = None
                while not self._closed:
                    if node_id() != mine:
                        if consumer is not None:
                            consumer.cancel()
                        mine = node_id()
                        name = control_queue(self._prefix, mine)
                        queue = Queue(name, exchange, name, durable=False, auto_delete=False, expires=QUEUE_EXPIRES)
                        consumer = Consumer(channel, queues=[queue], callbacks=[on_control], accept=["json"], no_ack=True)
                        consumer.consume()
                    try:
                        connection.drain_events(timeout=1.0)
                    except TimeoutError:
                        connection.heartbeat_check()

    def close(self) -> None:
        self._closed = True
        self._stopping.set()
        self._ready.set()
        for thread in self._threads:
            thread.join(3)


def _node_hint(body: Any) -> NodeHint | None:
    """A control message; one that is malformed is passed over: it is a hint."""
    try:
        return msgspec.convert(body, NodeHint)
    except msgspec.ValidationError:
        log.warning("malformed control message passed over")
        return None


def _first_argument(message: Message) -> str:
    """The job in an ``advance`` task message (Celery's protocol 2: a body of [args, kwargs, embed])."""
    try:
        body = message.payload if not isinstance(message.payload, str) else json.loads(message.payload)
        return str(body[0][0])
    except (ValueError, LookupError, TypeError):
        log.warning("malformed task message passed over")
        return ""


__all__ = ["ADVANCE", "TICK", "CeleryMessages", "control_queue", "coordinator_queue"]
