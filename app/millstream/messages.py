"""Hints and task events over the broker Celery uses: one door to kombu.

Publishing and consuming have a thread and a connection each; callers only put into a bounded queue. What must never happen here: a caller that waits for the broker, or a hint
that anything depends on. When the broker is away hints are dropped, rows go on telling the truth.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import structlog
from celery import Celery
from kombu import Connection, Consumer, Exchange, Message, Producer, Queue

from millstream_schema.control import Deployment
from millstream_schema.hints import JobHint, NodeHint
from millstream_schema.ports import SystemClock, SystemIds

log = structlog.get_logger(__name__)
OUTBOX = 1000
EXPIRES = 60
WAKE_UPS = 100
"""Wake-ups a queue of the broker holds; more tell nothing new."""
ENDS_KEPT, ENDS_AT_ONCE = 5_000, 500
"""Ends that wait to be told, and those that one message tells; what is beyond is found by looking."""
COUNTED_EVERY = 0.2
"""Seconds between two looks at how many there are, where the broker does not bound them itself."""
FIRST_PAUSE, LAST_PAUSE = 0.25, 5.0
QUEUE_EXPIRES = 3600.0
TICK, ADVANCE, SUBTASK = "millstream.tick", "millstream.advance", "millstream.subtask"


def coordinator_queue(prefix: str) -> str:
    return f"{prefix}.coordinator"


def wake_queue(prefix: str, queue: str) -> str:
    return f"{prefix}.tasks.{queue}"


def ends_exchange(prefix: str) -> Exchange:
    """Where ends of tasks are told, to whoever listens at the time."""
    return Exchange(f"{prefix}.ends", type="fanout", durable=False, delivery_mode=1)


def control_queue(prefix: str, node: str) -> str:
    return f"{prefix}.{node}.control"


class Carrier:
    """Sends and receives over the broker of a Celery application, with a thread and a connection for each. ``prefix`` starts every queue name."""

    def __init__(self, app: Celery, prefix: str) -> None:
        self._app = app
        self._prefix = prefix
        self._outbox: deque[tuple[str, Any]] = deque(maxlen=OUTBOX)
        self._ready = threading.Event()
        self._closed = False
        self._stopping = threading.Event()
        self._clock = SystemClock()
        self._threads: list[threading.Thread] = []
        self.dropped = 0

    def _put(self, kind: str, item: Any) -> None:
        if len(self._outbox) == OUTBOX:
            self.dropped += 1
        self._outbox.append((kind, item))
        self._ready.set()

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
                        broker=self._address(),
                        thread=name,
                        error=f"{type(exc).__name__}: {exc}",
                    )
                    gc.collect()  # kombu's Redis transport keeps an epoll descriptor in a reference cycle for each failed try
                    pause = FIRST_PAUSE if self._clock.monotonic() - began > LAST_PAUSE else min(pause * 2, LAST_PAUSE)
                    self._stopping.wait(pause)

    def _address(self) -> str:
        """The broker, without its password; empty where kombu cannot even load its transport."""
        try:
            return str(self._app.connection_for_write().as_uri())
        except Exception:  # what has just been told of: a driver that is not installed, a scheme kombu does not know
            return ""

    def _connection(self) -> Connection:
        return self._app.connection_for_write(connect_timeout=5)

    def _drain_outbox(self, send: Callable[[str, Any], None]) -> None:
        """Send what is put in, until closed. What was taken out when sending fails is lost: a hint."""
        while not self._closed:
            self._ready.wait(1.0)
            self._ready.clear()
            while self._outbox:
                kind, item = self._outbox.popleft()
                send(kind, item)

    def close(self) -> None:
        self._closed = True
        self._stopping.set()
        self._ready.set()
        for thread in self._threads:
            thread.join(3)


class CeleryMessages(Carrier):
    """The carrier of one node process. ``hostname`` is the worker whose attempts are shown."""

    def __init__(self, app: Celery, prefix: str, hostname: str) -> None:
        super().__init__(app, prefix)
        self._hostname = hostname
        self._wakes = TaskMessages(app, prefix)

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

    def wake(self, queue: str) -> None:
        """A schedule's fire became a task of this queue."""
        self._wakes.wake(queue)

    def close(self) -> None:
        self._wakes.close()
        super().close()

    def attempt(self, state: str, job: str, deployment: Deployment, detail: str) -> None:
        """A subtask's attempt as a task event, as Flower and ``celery events`` show them."""
        self._put("event", (state, job, deployment, detail))

    # -- threads

    def start(
        self, node_name: str, to_node: Callable[[NodeHint], None], to_coordinator: Callable[[JobHint], None], node_id: Callable[[], str]
    ) -> None:
        """Begin to send and to deliver. ``node_id``: the node's present id, new after each registration; its queue follows."""
        self._spawn("send", self._send_all)
        self._spawn("receive", lambda: self._receive_all(to_node, to_coordinator, node_id))

    def _send_all(self) -> None:
        with self._connection() as connection, connection.channel() as channel:
            producer = Producer(channel, serializer="json")
            dispatcher = self._app.events.Dispatcher(
                connection, channel=channel, hostname=self._hostname, enabled=True, buffer_while_offline=False
            )
            self._drain_outbox(lambda kind, item: self._send(producer, dispatcher, kind, item))

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


class TaskMessages(Carrier):
    """Wake-ups for durable tasks: that a queue may hold something, and that tasks have ended. Coalesced where they are sent, acknowledged on receipt, bounded in the broker.

    Used by a worker's task process, which listens for the first kind and tells the second, by clients, which do the opposite, and by node processes, which only send. Its threads
    start with the first use, in whatever process that is: a client made before a fork serves both.
    """

    def __init__(self, app: Celery, prefix: str) -> None:
        super().__init__(app, prefix)
        self._sending = 0
        self._hearing = 0
        self._waiting: set[str] = set()
        self._ends: set[str] = set()
        self._lock = threading.Lock()
        self._name = SystemIds().new("ends", 16)
        _MADE.add(self)

    def in_child(self) -> None:
        """In a forked child: another thread of the parent's may have held the lock."""
        self._lock = threading.Lock()
        self._waiting, self._ends = set(), set()

    def wake(self, queue: str) -> None:
        """Say that there may be work; never waits, never fails."""
        with self._lock:
            self._send_from_here()
            if queue in self._waiting:
                return
            self._waiting.add(queue)
        self._put("wake", queue)

    def ended(self, tasks: Collection[str]) -> None:
        """Say that these have ended; never waits, never fails."""
        with self._lock:
            self._send_from_here()
            known = len(self._ends)
            if known + len(tasks) > ENDS_KEPT:
                self.dropped += len(tasks)
                return
            self._ends.update(tasks)
            if known:
                return
        self._put("ends", "")

    def hear(self, told: Callable[[frozenset[str] | None], None]) -> None:
        """Call ``told`` with the tasks that end, from a thread of its own: once, however often this is called. With None when it begins to: what has ended before is not told."""
        with self._lock:
            if self._hearing == os.getpid():
                return
            self._hearing = os.getpid()
        self._spawn("ends", lambda: self._hear_all(told))

    def _send_from_here(self) -> None:
        if self._sending != os.getpid():
            self._sending = os.getpid()
            self._ready = threading.Event()
            self._spawn("wake", self._send_all)

    def listen(self, queues: tuple[str, ...], woken: Callable[[], None]) -> None:
        """Call ``woken`` for each wake-up of these queues, from a thread of its own."""
        self._spawn("woken", lambda: self._receive_all(queues, woken))

    def _queue(self, name: str) -> Queue:
        full = wake_queue(self._prefix, name)
        arguments = {"x-max-length": WAKE_UPS}
        return Queue(
            full, Exchange("", type="direct"), full, durable=False, auto_delete=False, expires=QUEUE_EXPIRES, queue_arguments=arguments
        )

    def _send_all(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._ends.clear()
        with self._connection() as connection, connection.channel() as channel:
            producer = Producer(channel, serializer="json")
            declared: dict[str, float] = {}
            unbounded = connection.transport.driver_type == "redis"  # knows no x-max-length

            ends = ends_exchange(self._prefix)(channel)
            ends.declare()

            def send(kind: str, queue: str) -> None:
                if kind == "ends":
                    self._send_ends(producer, ends)
                    return
                with self._lock:
                    self._waiting.discard(queue)
                if queue not in declared:
                    self._queue(queue)(channel).declare()
                    declared[queue] = 0.0
                if unbounded and self._clock.monotonic() >= declared[queue]:
                    declared[queue] = self._clock.monotonic() + COUNTED_EVERY
                    if self._queue(queue)(channel).queue_declare().message_count >= WAKE_UPS:
                        declared[queue] = 0.0
                        return  # nobody listens: more would tell nothing new
                producer.publish(
                    "", exchange="", routing_key=wake_queue(self._prefix, queue), expiration=EXPIRES, retry=False, delivery_mode=1
                )

            self._drain_outbox(send)

    def _send_ends(self, producer: Producer, exchange: Exchange) -> None:
        with self._lock:
            told, self._ends = sorted(self._ends), set()
        for at in range(0, len(told), ENDS_AT_ONCE):
            producer.publish(told[at : at + ENDS_AT_ONCE], exchange=exchange, routing_key="", retry=False, expiration=EXPIRES)

    def _hear_all(self, told: Callable[[frozenset[str] | None], None]) -> None:
        def on_ends(body: Any, _message: Message) -> None:
            if isinstance(body, list):
                told(frozenset(task for task in body if isinstance(task, str)))

        with self._connection() as connection, connection.channel() as channel:
            mine = Queue(
                f"{self._prefix}.ends.{self._name}.{os.getpid()}",
                ends_exchange(self._prefix),
                durable=False,
                exclusive=True,
                auto_delete=True,
            )(channel)
            with Consumer(channel, queues=[mine], callbacks=[on_ends], accept=["json"], no_ack=True):
                begun = False
                while not self._closed:
                    try:
                        connection.drain_events(timeout=1.0 if begun else 0.01)  # kombu subscribes with Redis when it waits first
                    except TimeoutError:
                        connection.heartbeat_check()
                    if not begun:
                        begun = True
                        told(None)
            mine.delete()

    def _receive_all(self, queues: tuple[str, ...], woken: Callable[[], None]) -> None:
        with self._connection() as connection, connection.channel() as channel:
            listened = [self._queue(q) for q in queues]
            with Consumer(channel, queues=listened, callbacks=[lambda _body, _message: woken()], accept=["json"], no_ack=True):
                while not self._closed:
                    try:
                        connection.drain_events(timeout=1.0)
                    except TimeoutError:
                        connection.heartbeat_check()


_MADE: weakref.WeakSet[TaskMessages] = weakref.WeakSet()


def _in_child() -> None:
    for messages in _MADE:
        messages.in_child()


os.register_at_fork(after_in_child=_in_child)


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


__all__ = ["ADVANCE", "TICK", "CeleryMessages", "TaskMessages", "control_queue", "coordinator_queue", "wake_queue"]
