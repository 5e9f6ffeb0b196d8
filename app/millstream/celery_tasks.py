"""Durable tasks as Celery tasks: each handler is registered in the application under its name, so that ``send_task``, ``celery call``, signatures and chains reach it.

Where a process knows the handler, Celery's own calls submit at once. A message that is published all the same is taken by :func:`strategy`, which hands it over to be submitted
under the message's id and acknowledges it after the commit. What must never happen here: user code in Celery's pool; a message acknowledged before its row is committed.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import celery
from celery import Celery
from kombu.utils.json import loads

from millstream_schema.durable.requests import encode_arguments
from millstream_schema.errors import ConfigurationError, MillstreamError, TaskInvalid
from millstream_tasks.durable.handlers import HandlerRegistry

from .celery_options import REFUSED, translated
from .handlers import DurableHandler
from .intake import Arrived, IntakeLink, SelfPipe

if TYPE_CHECKING:
    from .worker import Millstream

log = logging.getLogger(__name__)  # Celery's own set-up shows it: this runs inside the worker
AT_ONCE = 1.0
"""Seconds a consumer without an event loop waits for an answer, which is there in a few ms: its acknowledgements go out between two messages only."""


class DurableTask(celery.Task):  # type: ignore[misc]  # Celery has no types
    """A handler as Celery sees it. ``delay`` and ``apply_async`` submit; a message is taken by :func:`strategy`."""

    Strategy = "millstream.celery_tasks:strategy"
    ignore_result = True
    rate_limit = None

    def __init__(self, handler: DurableHandler, installed: Millstream) -> None:
        self.name = handler.spec.name
        self.handler = handler
        self.installed = installed

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Called directly, it is the plain function, as with any Celery task."""
        return self.handler(*args, **kwargs)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Submit. Raises TaskInvalid for options that cannot be honoured, by name."""
        return self.handler.apply_async(args, kwargs, **options)


def register(app: Celery, registry: HandlerRegistry, installed: Millstream) -> None:
    """Each handler as a task of the application. Raises ConfigurationError when a plain task has its name."""
    for name in registry.names():
        known, handler = app.tasks.get(name), registry.get(name)
        if isinstance(known, DurableTask) or not isinstance(handler, DurableHandler):
            continue
        if known is not None:
            raise ConfigurationError(
                f"{name!r} is both a plain Celery task and a durable handler: give one of them another name, or drop @app.task"
            )
        app.register_task(DurableTask(handler, installed))


def strategy(task: DurableTask, app: Celery, consumer: Any, **_options: Any) -> Callable[..., None]:
    """What Celery's consumer calls for each message of this task. Built anew after each connection to the broker."""
    link = task.installed.intake
    hub, errors = consumer.hub, consumer.connection_errors
    if hub is not None:
        pipe = task.installed.intake_pipe(SelfPipe)
        link.notify = pipe.wake
        hub.add_reader(pipe.descriptor, _deliver, link, pipe)
    else:
        link.notify = lambda: consumer.call_soon(link.deliver)

    def on_message(message: Any, body: Any, ack: Callable[..., None], reject: Callable[..., None], callbacks: Any, **_: Any) -> None:
        def refuse(message_id: str, problem: str) -> None:
            _refused(task, message_id, problem)
            reject(log, errors, False)

        try:
            arrived = arrived_from(message.headers, message.content_type, message.body)
        except TaskInvalid as exc:
            refuse(str(message.headers.get("id", "")), str(exc))
            return

        def done(problem: str) -> None:
            if problem:
                refuse(arrived.id, problem)
            else:
                log.info("Task %s[%s] is accepted as a durable task", task.name, arrived.id)
                ack(log, errors)

        answered = link.send(arrived, done)
        if hub is None and answered.wait(AT_ONCE):
            link.deliver()

    return on_message


def _deliver(link: IntakeLink, pipe: SelfPipe) -> None:
    pipe.drain()
    link.deliver()


def _refused(task: DurableTask, message_id: str, problem: str) -> None:
    """It will never be accepted: whoever waits for it by its id is told, if there is a result back end; the broker may keep it as a dead letter."""
    log.error("Message %s for durable task %s is refused: %s", message_id, task.name, problem)
    try:
        task.backend.mark_as_failure(message_id, TaskInvalid(problem), store_result=True)
    except Exception as exc:  # whatever the back end raises; it may be the broker that is away
        log.warning("The sender of message %s cannot be told: %s", message_id, exc)


def arrived_from(headers: Mapping[str, Any], content_type: str, body: Any) -> Arrived:
    """A message of Celery's protocol 2. Raises TaskInvalid."""
    message_id = headers.get("id")
    if not isinstance(message_id, str) or not message_id or not isinstance(headers.get("task"), str):
        raise TaskInvalid("it has no id or no task name: send it with Celery's protocol 2 (task_protocol = 2)")
    if content_type != "application/json":
        raise TaskInvalid(f"its content is {content_type}: durable tasks take JSON only (task_serializer = 'json')")
    try:
        args, kwargs, embedded = loads(body)
        given = {name: value for name, value in {**embedded, "group_id": headers.get("group")}.items() if value}
    except Exception as exc:  # whatever a malformed body makes the decoder raise
        raise TaskInvalid(f"its body cannot be read: {type(exc).__name__}") from exc
    wanted = {_EMBEDDED.get(name, name): value for name, value in given.items()}
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise TaskInvalid("its body does not hold a list of arguments and a mapping of named ones")
    options = translated(
        {
            **{name: value for name, value in wanted.items() if name in REFUSED},
            "eta": _moment(headers.get("eta")),
            "expires": _moment(headers.get("expires")),
            "task_id": message_id,
        }
    )
    try:
        arguments = encode_arguments(tuple(args), kwargs)
    except MillstreamError as exc:
        raise TaskInvalid(str(exc)) from exc
    origin = headers.get("origin")
    return Arrived(message_id, str(headers["task"]), arguments, options.options, actor=f"celery {origin}" if origin else "celery")


_EMBEDDED = {"callbacks": "link", "errbacks": "link_error"}
"""Names of options inside a message's body."""


def _moment(text: Any) -> dt.datetime | None:
    """An instant of a header: ISO 8601; without a zone it is UTC, as Celery sends it."""
    if text is None:
        return None
    try:
        found = dt.datetime.fromisoformat(text)
    except (TypeError, ValueError) as exc:
        raise TaskInvalid(f"{text!r} is no instant in ISO 8601") from exc
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)
