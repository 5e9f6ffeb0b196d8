"""``TaskResult``: the result of one task, by the names Celery's ``AsyncResult`` has. Each of those names is honoured, or refused with the reason.

Given by :meth:`Tasks.result`. Every answer is read from the task's row: a wake-up only hastens it, and a poll with back-off is the net. What must never happen here: waiting
without an end;
an id nobody knows taken for a task that is pending.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from millstream_schema import given
from millstream_schema.durable.records import Receipt, TaskRow
from millstream_schema.durable.requests import decode_arguments, decode_result
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError, StoreUnavailable, TaskFailed, TaskNotFound
from millstream_schema.ports import Clock

_QUICKEST_POLL, _SLOWEST_POLL = 0.0005, 1.0
_POLL_PART = 0.1
"""Seconds between two looks while waiting: this part of the time waited so far, within the bounds."""
_SHORT, _NEWEST_PART = 0.05, 0.2
"""Waits up to so many seconds are a measure of the next one, the newest by this part: before that time a task is hardly over, and looking would only hold up whoever runs it."""
CELERY_STATES = {
    TaskState.SCHEDULED: "PENDING",
    TaskState.READY: "PENDING",
    TaskState.DISPATCHED: "PENDING",
    TaskState.RUNNING: "STARTED",
    TaskState.RETRY_WAIT: "RETRY",
    TaskState.UNKNOWN: "UNKNOWN",
    TaskState.SUCCEEDED: "SUCCESS",
    TaskState.FAILED: "FAILURE",
    TaskState.CANCELLED: "REVOKED",
    TaskState.EXPIRED: "REVOKED",
}
"""What Celery calls them. UNKNOWN is ours alone: in review, neither over nor going on."""
_SECONDS, _INTERVAL = given.seconds(optional=True), given.seconds(above=True, optional=True)
_NO_TREE = "a durable task keeps no tree of results: what it submitted has it as `origin`, a retry as `retry_of`"
REFUSED = {
    "then": "no callback outlives this process: subscribe to the end of the task (millstream.Subscriptions)",
    "on_ready": "no callback outlives this process: subscribe to the end of the task (millstream.Subscriptions)",
    "forget": "a result is kept with its task until retention removes both: nothing has to be forgotten by hand",
    "revoke_by_stamped_headers": "durable tasks have no stamps: cancel each by its id",
    "collect": _NO_TREE,
    "iterdeps": _NO_TREE,
    "get_leaf": _NO_TREE,
    "build_graph": _NO_TREE,
    "graph": _NO_TREE,
    "children": _NO_TREE,
    "parent": _NO_TREE,
    "as_tuple": _NO_TREE,
    "as_list": _NO_TREE,
    "backend": "no result back end is used: the result is in the task's row",
    "supports_native_join": "no result back end is used: the result is in the task's row",
    "app": "a durable task belongs to an installation, not to a Celery application",
    "ignored": "a durable task's result is always kept",
    "throw": "use maybe_throw(), which raises what the task failed with",
    "worker": "workers come and go: millstream tasks show lists the sessions of its attempts",
}
_REFUSED_OPTIONS = {
    "callback": REFUSED["then"],
    "on_message": "no message brings a result",
    "on_interval": "a wait is ended by its timeout",
    "no_ack": "no message brings a result",
    "follow_parents": _NO_TREE,
    "EXCEPTION_STATES": "states of durable tasks are fixed",
    "PROPAGATE_STATES": "states of durable tasks are fixed",
}


Hear = Callable[[Callable[[frozenset[str] | None], None]], None]
"""Has the ends of tasks told, by their ids; None: some may have ended that were not told."""


class Looks(Protocol):
    """What it is read through: :class:`millstream.Tasks`."""

    def get(self, task: str) -> TaskRow: ...

    def why(self, task: str) -> str: ...

    def cancel(self, task: str) -> TaskState: ...


class Rhythm:
    """When it is worth looking whether a task is over: learnt from those before, shared by all waits of a client. ``fresh``: the task that was submitted just now.

    ``hear``: has ends told to whoever asks for it; asked when a wait is not a short one.
    """

    def __init__(self, clock: Clock, changed: threading.Event, hear: Hear | None = None) -> None:
        self._clock = clock
        self._changed = changed
        self._hear = hear
        self._awaited: list[set[str]] = []
        self._usual = 0.0
        self.fresh = ""

    def began(self, task: str, limit: float) -> float:
        """A wait begins; the time now. For one submitted just now a look would only hold up whoever runs it."""
        now = self._clock.monotonic()
        fresh, self.fresh = task == self.fresh, ""
        if fresh and not self._changed.is_set():
            self._changed.wait(min(self._usual, limit))
        return now

    @contextmanager
    def awaiting(self, task: str) -> Iterator[set[str]]:
        """As long as a wait lasts: the tasks whose end would be its own, to be added to."""
        names = {task}
        self._awaited.append(names)
        try:
            yield names
        finally:
            self._awaited = [other for other in self._awaited if other is not names]

    def _told(self, ended: frozenset[str] | None) -> None:
        """These have ended; None: perhaps some have. From the listener's thread."""
        if ended is None or any(not names.isdisjoint(ended) for names in list(self._awaited)):
            self._changed.set()

    def looks(self, began: float) -> float:
        """A look begins: what is told from now on is told of what comes after it. Seconds waited so far."""
        self._changed.clear()
        return self._clock.monotonic() - began

    def over(self, row: TaskRow, waited: float) -> None:
        """It is over: a measure of the next one."""
        took = min(waited, (row.settled_us - row.created_us) / 1e6, _SHORT)
        self._usual += (took - self._usual) * _NEWEST_PART

    def rest(self, waited: float, most: float) -> None:
        """Until it is worth looking again, or somebody tells."""
        hardly = self._usual - waited
        if self._hear is not None and waited > _SHORT:
            self._hear(self._told)
        pause = hardly if hardly > _QUICKEST_POLL else min(max(waited * _POLL_PART, _QUICKEST_POLL), _SLOWEST_POLL)
        self._changed.wait(min(pause, most))


class TaskResult:
    """One task's result. Everything but :attr:`id` asks the database and raises TaskNotFound when there is no such task in the namespace, StoreUnavailable."""

    def __init__(self, tasks: Looks, task: str, rhythm: Rhythm, timeout: float, receipt: Receipt | None = None) -> None:
        self.receipt = receipt
        """What the submission was answered with, if this is its result."""
        self._tasks = tasks
        self._rhythm = rhythm
        self._timeout = timeout
        self.id = self.task_id = task

    def __repr__(self) -> str:
        return f"<TaskResult: {self.id}>"

    def __str__(self) -> str:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskResult) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise AttributeError(f"TaskResult does not offer {name}: {REFUSED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _row(self) -> TaskRow:
        return self._tasks.get(self.id)

    TimeoutError = TimeoutError
    """What :meth:`get` raises."""

    # -- waiting

    @given.checked(timeout=_SECONDS, interval=_INTERVAL)
    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        interval: float | None = None,
        *,
        follow: bool = False,
        disable_sync_subtasks: bool = True,
        **options: Any,
    ) -> Any:
        """Wait until the task has ended; what its handler returned.

        ``timeout``: seconds; the installation's ``result_timeout_ms`` if not given: no wait is without an end. ``propagate`` off: the TaskFailed is returned, not raised.
        ``interval``: seconds between two looks, at most. ``follow``: where a review has another task do it, wait for that one; and wait while a review is open.
        ``disable_sync_subtasks`` may be given and changes nothing: a handler that waits for another task holds its own slot, no more.

        Raises TaskFailed (also at once for one in review: no wait ends that), TimeoutError, TaskNotFound, StoreUnavailable when the database is away at the end of the time.
        """
        for name in options:
            raise ConfigurationError(f"get() does not take {name}: {_REFUSED_OPTIONS.get(name, 'it means nothing here')}")
        limit = self._timeout if timeout is None else timeout
        with self._rhythm.awaiting(self.id) as awaited:
            return self._awaited(awaited, limit, interval or _SLOWEST_POLL, propagate=propagate, follow=follow)

    def _awaited(self, awaited: set[str], limit: float, interval: float, *, propagate: bool, follow: bool) -> Any:
        task, rhythm = self.id, self._rhythm
        began = rhythm.began(task, limit)
        while True:
            waited = rhythm.looks(began)
            row = self._looked(task, away=waited < limit)
            if row is not None and follow and row.superseded_by:
                successor = self._looked(row.superseded_by, away=waited < limit)
                if successor is None:
                    row = None  # whether it does the task again is asked once more
                elif successor.retry_of == row.id:
                    task = successor.id
                    awaited.add(task)
                    continue  # one that makes up for it instead has another result
            if row is not None and (row.state.settled or (row.state is TaskState.UNKNOWN and not follow)):
                if row.state.settled:
                    rhythm.over(row, waited)
                return self._ended(row, propagate)
            if waited >= limit:
                raise TimeoutError(f"task {task} is {'not known' if row is None else row.state} after {limit} s: {self._tasks.why(task)}")
            rhythm.rest(waited, min(limit - waited, interval))

    def wait(self, timeout: float | None = None, propagate: bool = True, interval: float | None = None, **options: Any) -> Any:
        """Another name of :meth:`get`."""
        return self.get(timeout, propagate, interval, **options)

    def _looked(self, task: str, *, away: bool) -> TaskRow | None:
        """Its row. ``away``: a database that cannot be reached for the moment is waited for."""
        try:
            return self._tasks.get(task)
        except StoreUnavailable:
            if not away:
                raise
            return None

    def _ended(self, row: TaskRow, propagate: bool) -> Any:
        if row.state is TaskState.SUCCEEDED:
            return decode_result(row.result)
        failure = _failure(row)
        if propagate or row.state is TaskState.UNKNOWN:
            raise failure
        return failure

    # -- looking

    @property
    def task_state(self) -> TaskState:
        """Its state, by our names."""
        return self._row().state

    @property
    def state(self) -> str:
        """Its state, by Celery's names; UNKNOWN for one in review."""
        return CELERY_STATES[self._row().state]

    status = state

    def ready(self) -> bool:
        """Whether it is over; one in review is not."""
        return self._row().state.settled

    def exists(self) -> bool:
        """Whether there is such a task."""
        try:
            self._row()
        except TaskNotFound:
            return False
        return True

    def successful(self) -> bool:
        """Whether it has succeeded. Raises ValueError before it is over, as Celery does."""
        state = self._row().state
        if not state.settled:
            raise ValueError(f"task {self.id} is not over: it is {state}")
        return state is TaskState.SUCCEEDED

    def failed(self) -> bool:
        """Whether it has failed; cancelled or expired is not that."""
        return self._row().state is TaskState.FAILED

    @property
    def result(self) -> Any:
        """What it returned; the TaskFailed it ended as; None as long as it is not over."""
        row = self._row()
        if row.state is TaskState.SUCCEEDED:
            return decode_result(row.result)
        return _failure(row) if row.state.settled else None

    info = result

    @property
    def traceback(self) -> str | None:
        """What is kept of the error it ended with: its class, its text, where it was raised."""
        return self._row().error or None

    @property
    def date_done(self) -> dt.datetime | None:
        """When it ended, UTC."""
        row = self._row()
        return dt.datetime.fromtimestamp(row.settled_us / 1e6, dt.UTC) if row.settled_us else None

    @property
    def name(self) -> str:
        """Its handler's name."""
        return self._row().handler

    @property
    def args(self) -> list[Any]:
        return decode_arguments(self._row().args)[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        return decode_arguments(self._row().args)[1]

    @property
    def retries(self) -> int:
        """How often its handler has raised."""
        return self._row().failures

    @property
    def queue(self) -> str:
        return self._row().queue

    # -- acting

    def maybe_throw(self, propagate: bool = True) -> Any:
        """Raise what it failed with, if it has ended so; its result otherwise."""
        row = self._row()
        return self._ended(row, propagate) if row.state.settled else None

    maybe_reraise = maybe_throw

    def revoke(
        self, connection: Any = None, terminate: bool = False, signal: str | None = None, wait: bool = False, timeout: float | None = None
    ) -> TaskState:
        """Ask for its end: durable when this returns, whether a worker is up or not; its state then. At once before it runs, else its handler is told and its first end wins.

        ``wait`` and ``timeout`` may be given: there is no answer of workers to wait for. ``connection``, ``terminate``, ``signal`` are refused.
        """
        if connection is not None or terminate or signal is not None:
            raise ConfigurationError(
                "revoke() does not take connection, terminate or signal: no message is sent, and a handler that does not obey is ended by its task's own limits"
            )
        return self._tasks.cancel(self.id)


def _failure(row: TaskRow) -> TaskFailed:
    return TaskFailed(row.id, row.state, row.cause, row.reason)
