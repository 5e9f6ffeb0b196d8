"""``Tasks``: what users do with durable tasks from Python.

Called by user code and by the CLI. Each operation is one guarded transaction, repeated as it was when the answer to its COMMIT is lost. What must never happen here: half an
operation.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millstream_schema import given
from millstream_schema.durable.bulk import Act, OperationRow, compensation, linked_retry
from millstream_schema.durable.effects import IntentRow
from millstream_schema.durable.explaining import why
from millstream_schema.durable.finding import TaskFilter
from millstream_schema.durable.progress import NoteRow, ProgressRow
from millstream_schema.durable.records import AttemptRow, NewTask, Receipt, TaskRow
from millstream_schema.durable.requests import Options, encode_result, require_options
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import (
    ConfigurationError,
    QuotaExceeded,
    ReviewConflict,
    TaskConflict,
    TaskInvalid,
    TaskNotFound,
    UnknownHandler,
)
from millstream_schema.ports import Clock, Ids, SystemIds
from millstream_schema.reasons import storable
from millstream_schema.store import explaining, intents, progress, settling, tasks
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.intents import Call
from millstream_tasks.durable.handlers import Form, Handler, HandlerRegistry

from .admission import Admission
from .bulk_acts import BulkActs, Plan
from .catalogue import Catalogue, require_options_apart
from .handlers import Handlers
from .installation import Installation
from .joining import Joining, TaskReceipt, hinting, woken
from .keeping import Keeping
from .opened import OpenedNamespace, acting
from .results import Hear, Rhythm, TaskResult
from .task_search import Page, TaskSearch

_CURSOR = given.whole_text(4_000)


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One request of :meth:`Tasks.submit_many`; the fields as in :meth:`Tasks.submit`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    key: str = ""
    options: Options = Options()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of :meth:`Tasks.accept`: whom it is for, and by whom and in which way it came."""

    handler: str | Handler
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    key: str = ""
    options: Options = Options()
    origin: str = "direct"
    actor: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """Why one item of many was not accepted. ``retry_after``: seconds after which it may be; 0: not as it is."""

    reason: str
    retry_after: float = 0.0


def _calls(value: object) -> str:
    """Outcomes of calls, by name or by name and key."""
    if value is None:
        return ""
    if not isinstance(value, Mapping):
        return f"must be a dict, not {given.shown(value)}"
    fit = all(given.is_text(c) or (isinstance(c, tuple) and len(c) == 2 and all(given.is_text(part) for part in c)) for c in value)
    return "" if fit else f"must hold outcomes by name or (name, key), not {given.shown(value)}"


class Tasks(OpenedNamespace):
    """The durable tasks of one namespace of an installation. Also a context manager; :meth:`close` gives its connections back.

    ``handlers``: what they do not hold is submitted by name, checked against what workers told of themselves. ``actor``: who acts, kept with what is done.
    ``changed``: set by who knows that a task moved; waiting then looks at once. ``wake``: told of the queue after each submission; it may neither wait nor fail.
    ``closing``: called by :meth:`close`.
    ``sessions``: gives the transaction that a submission joins which names none, or None. ``hear``: has ends of tasks told while one is waited for.
    Raises SchemaMismatch (run ``millstream up``), StoreUnavailable.
    """

    def __init__(
        self,
        installation: Installation,
        handlers: Handlers | HandlerRegistry | None = None,
        namespace: str = "default",
        *,
        actor: str = "",
        clock: Clock | None = None,
        ids: Ids | None = None,
        database: Database | None = None,
        changed: threading.Event | None = None,
        wake: Callable[[str], None] | None = None,
        closing: Callable[[], None] | None = None,
        sessions: Callable[[], Any] | None = None,
        hear: Hear | None = None,
    ) -> None:
        self._closing = closing
        super().__init__(installation, namespace, clock=clock, database=database, actor=actor)
        self._registry = handlers.registry if isinstance(handlers, Handlers) else handlers or HandlerRegistry()
        self._ids = ids or SystemIds()
        self._catalogue = Catalogue(self.database, self._clock, self._registry)
        self._search = TaskSearch(self.database, namespace)
        self._admission = Admission(self.database, self._clock)
        self.retention = Keeping(self.database, self._run, namespace, self._actor)
        self._bulk = BulkActs(self.database, self._run, self._ids, namespace, self._actor, wake)
        self._changed = changed or threading.Event()
        self._result_timeout = installation.result_timeout_ms / 1000
        self._wake = wake
        self._joining = Joining(self.database, self._clock, wake, sessions)
        self._rhythm = Rhythm(self._clock, self._changed, hear)

    def close(self) -> None:
        """Give the connections back."""
        if self._closing is not None:
            self._closing()
        super().close()

    # -- submitting

    def submit(
        self,
        handler: str | Handler,
        /,
        *args: Any,
        key: str = "",
        business_key: str = "",
        delay: float = 0.0,
        due_at: dt.datetime | None = None,
        start_by: float = 0.0,
        deadline: float = 0.0,
        priority: int = 0,
        queue: str = "",
        permit: str = "",
        session: Any = None,
        **kwargs: Any,
    ) -> TaskReceipt:
        """Accept a task; its receipt. With the same ``key`` and content: the first receipt, ``replayed``.

        ``delay``: seconds by the database's clock, or ``due_at``, an aware datetime. ``start_by``: seconds after that within which it must start; ``deadline``: seconds
        from now within which it must end. ``priority``: each unit is worth a second of waiting. Raises TaskInvalid, UnknownHandler, TaskConflict (the key is known
        with other content), QuotaExceeded (``retry_after``), StoreUnavailable.

        ``session``: an SQLAlchemy Session or Connection, ``django.db.connection``, or a connection of psycopg, PyMySQL or sqlite3, to the installation's own database. The task
        then is there when the caller's transaction commits, and never was when it rolls back. Further raises ForeignSession (another database: use an Outbox) and
        RetryTransaction (run the whole transaction again).
        """
        form = self._catalogue.form(handler)
        require_options_apart(form, "submit()")
        options = Options(
            queue=queue, priority=priority, delay_s=delay, due_at=due_at, start_by_s=start_by, deadline_s=deadline, business_key=business_key,
            permit=permit,
        )  # fmt: skip
        return self.submit_with(handler, args, kwargs, key=key, options=options, session=session)

    def submit_with(
        self,
        handler: str | Handler,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: str = "",
        options: Options | None = None,
        session: Any = None,
    ) -> TaskReceipt:
        """As :meth:`submit`, arguments and options kept apart: for handlers whose parameters are named like options, and for callers that pass on what they were given."""
        new = self._request(handler, args, kwargs, key, options)
        transaction = self._joining.transaction(session, self._run)
        self._require_room(new)
        (receipt,) = transaction.run(lambda tx: self._stored(tx, [new]))
        if receipt.conflict:
            raise TaskConflict(_conflict(new, receipt))
        self._rhythm.fresh = "" if receipt.replayed else receipt.task
        transaction.told([new.queue])
        return hinting(receipt, new.queue, self._wake)

    @given.checked(items=given.several(given.a(Item)))
    def submit_many(self, handler: str | Handler, items: Sequence[Item], *, session: Any = None) -> list[Receipt | Refusal]:
        """Accept many in one transaction; an answer for each, in the order given. What is refused holds up no other. ``session``, errors: as in :meth:`submit`."""
        self._catalogue.form(handler)
        return self.accept(
            [Request(handler=handler, args=i.args, kwargs=i.kwargs, key=i.key, options=i.options, origin="batch") for i in items],
            session=session,
        )

    @given.checked(requests=given.several(given.a(Request)))
    def accept(self, requests: Sequence[Request], *, session: Any = None) -> list[Receipt | Refusal]:
        """Accept requests of any handlers in one transaction; an answer for each, in the order given. Raises StoreUnavailable."""
        answers: dict[int, Receipt | Refusal] = {}
        news: dict[int, NewTask] = {}
        for at, request in enumerate(requests):
            try:
                news[at] = self._form(request.handler, request.options).request(
                    self.namespace,
                    self._ids.new("task", 10),
                    request.key,
                    request.args,
                    request.kwargs,
                    request.options,
                    actor=acting(request.actor) or self._actor,
                    origin=request.origin,
                )
            except (TaskInvalid, UnknownHandler) as exc:
                answers[at] = Refusal(str(exc))
        transaction = self._joining.transaction(session, self._run)
        refused = self._admission.refused(list(news.values()))
        for at, new in list(news.items()):
            if new.id in refused:
                answers[at] = Refusal(refused[new.id].why, refused[new.id].retry_after)
                del news[at]
        receipts = transaction.run(lambda tx: self._stored(tx, list(news.values())))
        for at, receipt in zip(news, receipts, strict=True):
            conflict = Refusal(_conflict(news[at], receipt)) if receipt.conflict else None
            answers[at] = conflict or hinting(receipt, news[at].queue, self._wake)
        transaction.told(sorted({n.queue for n in news.values()}))
        return [answers[at] for at in range(len(requests))]

    @given.checked(new=given.a(NewTask))
    def forward(self, new: NewTask) -> Receipt:
        """Accept a request that was made complete elsewhere, as it is: what a relay of an :class:`millstream.Outbox` does. Raises TaskConflict, QuotaExceeded, StoreUnavailable."""
        self._require_room(new)
        (receipt,) = self._run(lambda tx: self._stored(tx, [new]))
        if receipt.conflict:
            raise TaskConflict(_conflict(new, receipt))
        woken(self._wake, [new.queue])
        return receipt

    @property
    def installation_id(self) -> str:
        """What tells this installation from every other: the ``target`` of an :class:`millstream.Outbox`."""
        return self._joining.home.uid

    def _require_room(self, new: NewTask) -> None:
        """Raises QuotaExceeded."""
        refused = self._admission.refused([new])
        if refused:
            raise QuotaExceeded(refused[new.id].why, refused[new.id].retry_after)

    def _stored(self, tx: Transaction, news: Sequence[NewTask]) -> Sequence[Receipt]:
        """Within a transaction of ours or of the caller's."""
        receipts = tasks.submit_many(tx, news) if len(news) != 1 else [tasks.submit(tx, news[0])]
        self._admission.note(tx, news, [r.task for r in receipts if not (r.replayed or r.conflict)])
        return receipts

    def _request(
        self, handler: str | Handler, args: Sequence[Any], kwargs: Mapping[str, Any] | None, key: str, options: Options | None
    ) -> NewTask:
        """One request, complete. Raises TaskInvalid, UnknownHandler, UnknownQueue."""
        return self._form(handler, options).request(
            self.namespace,
            self._ids.new("task", 10),
            key,
            args,
            {} if kwargs is None else kwargs,
            Options() if options is None else options,
            actor=self._actor,
            origin="direct",
        )

    def _form(self, handler: str | Handler, options: Options | None) -> Form:
        """What the request must look like. Raises UnknownHandler, UnknownQueue."""
        if options is not None:
            require_options(options)
            self._catalogue.require_queue(options.queue)
        return self._catalogue.form(handler)

    # -- looking

    @given.checked(state=given.a(TaskState, optional=True), limit=given.whole(1, given.MOST_ROWS))
    def list(
        self, *, state: TaskState | None = None, handler: str = "", queue: str = "", business_key: str = "", limit: int = 50
    ) -> list[TaskRow]:
        """The newest tasks that match, at most ``limit``, however far back they lie. Those in review: ``state=TaskState.UNKNOWN``. :meth:`find` looks in bounded pages."""
        states = () if state is None else (state,)
        return self._search.newest(TaskFilter(states=states, handler=handler, queue=queue, business_key=business_key), limit)

    @given.checked(where=given.a(TaskFilter, optional=True), cursor=_CURSOR)
    def find(self, where: TaskFilter | None = None, *, limit: int = 50, cursor: str = "") -> Page:
        """A page of the tasks that match, newest first; its ``cursor`` gives the next one, for the same filter and namespace alone.

        Tasks that come in meanwhile change no later page. Raises TokenRefused for a cursor that is not of this installation, namespace and filter, ConfigurationError.
        """
        return self._search.page(where or TaskFilter(), limit, cursor)

    @given.checked(task=given.text)
    def get(self, task: str) -> TaskRow:
        """A task as it is now. Raises TaskNotFound."""
        row = self.database.read(lambda tx: tasks.read_task(tx, task))
        if row is None or row.namespace != self.namespace:
            raise TaskNotFound(f"there is no task {task!r} in namespace {self.namespace!r}")
        return row

    @given.checked(handler=given.text, key=given.text)
    def of_key(self, handler: str, key: str) -> TaskRow:
        """The task that was accepted under this key: for a plain Celery message, its id. Raises TaskNotFound."""
        row = self.database.read(lambda tx: tasks.task_of_key(tx, self.namespace, handler, key))
        if row is None:
            raise TaskNotFound(f"there is no task of handler {handler!r} with key {key!r} in namespace {self.namespace!r}")
        return row

    def attempts(self, task: str) -> Sequence[AttemptRow]:
        """Its ended attempts and what was reported too late, oldest first. Raises TaskNotFound."""
        self.get(task)
        return self.database.read(lambda tx: tasks.attempts(tx, task))

    def progress(self, task: str) -> Sequence[ProgressRow]:
        """How far each of its attempts has come, as it told by ``ctx.progress``, oldest first; one that told nothing has none. Raises TaskNotFound."""
        self.get(task)
        return self.database.read(lambda tx: progress.of_task(tx, task))

    def notes(self, task: str) -> Sequence[NoteRow]:
        """What its attempts have kept by ``ctx.note``, oldest first. Raises TaskNotFound."""
        self.get(task)
        return self.database.read(lambda tx: progress.notes_of_task(tx, task))

    @given.checked(task=given.text)
    def intents(self, task: str) -> Sequence[IntentRow]:
        """What is known of the calls it made by ``ctx.external``, and those it is a retry of, or that are of it. Raises TaskNotFound."""
        root = self.get(task).root
        return self.database.read(lambda tx: intents.of_root(tx, root))

    @given.checked(task=given.either(given.a(Receipt), given.text))
    def result(self, task: str | Receipt) -> TaskResult:
        """The result of a task, by the names Celery's AsyncResult has. An id nobody knows is told when it is asked: TaskNotFound, never pending."""
        receipt = task if isinstance(task, Receipt) else None
        return TaskResult(self, task.task if isinstance(task, Receipt) else task, self._rhythm, self._result_timeout, receipt)

    @given.checked(task=given.either(given.a(Receipt), given.text))
    def wait(self, task: str | Receipt, timeout: float | None = None, *, follow: bool = False) -> Any:
        """Wait until it ended; its result, as :meth:`TaskResult.get`. Raises TaskFailed (also for one in review), TimeoutError, TaskNotFound."""
        return self.result(task).get(timeout, follow=follow)

    def why(self, task: str) -> str:
        """One line: why it is not running."""
        row = self.get(task)
        return why(row, self.database.read(lambda tx: explaining.facts(tx, row)))

    # -- acting

    def cancel(self, task: str) -> TaskState:
        """Ask for its end; its state afterwards. One that runs is told; its first end wins. Raises TaskNotFound."""
        self.get(task)
        state = self._run(lambda tx: settling.cancel(tx, task))
        if state is None:
            raise TaskNotFound(f"there is no task {task!r} in namespace {self.namespace!r}")
        return state

    @given.checked(task=given.text, reason=given.words)
    def retry(self, task: str, *, reason: str) -> Receipt:
        """Do a task again that FAILED, was CANCELLED or EXPIRED: by a new task linked to it (``retry_of``, the same root). Say in ``reason`` why that is safe.

        Asked again, it answers with the same one. Raises ReviewConflict for one in another state, TaskNotFound.
        """
        receipt = self._bulk.retry(task, reason)
        woken(self._wake, [self.get(receipt.task).queue])
        return receipt

    @given.checked(where=given.a(TaskFilter, optional=True))
    def plan(self, act: Act | str, where: TaskFilter | None = None) -> Plan:
        """Count what ``cancel``, ``retry`` or ``purge`` would reach now: a dry run. Its token, given to :meth:`carry_out`, acts on those of these that still match then."""
        if not isinstance(act, str) or act not in set(Act):
            raise ConfigurationError(f"there is no act {given.shown(act)}: use {', '.join(Act)}")
        return self._bulk.plan(Act(act), where or TaskFilter())

    @given.checked(token=_CURSOR, reason=given.words, act=given.a(Act, optional=True), progress=given.function)
    def carry_out(
        self, token: str, *, reason: str = "", act: Act | None = None, progress: Callable[[OperationRow], None] = lambda _: None
    ) -> OperationRow:
        """Do what was planned, in parts; a retry needs a ``reason``. Interrupted, the same token goes on; over, it answers with what was done.

        ``act``: refuse a token of another one; ``progress``: told after each part. Raises TokenRefused for a token of elsewhere, or too old to begin.
        """
        return self._bulk.carry_out(token, reason, act, progress)

    @given.checked(limit=given.ROWS)
    def operations(self, limit: int = 50) -> Sequence[OperationRow]:
        """The newest retries by hand and acts on many: who, why, how far."""
        return self._bulk.operations(limit)

    @given.checked(task=given.a(TaskRow), reason=given.reason)
    def review_done(self, task: TaskRow, *, result: Any = None, reason: str) -> None:
        """Decide a review: what it was to do has been done. ``task``: as it was read; raises ReviewConflict when it has changed since, TaskNotFound for one of elsewhere."""
        self._decide(task, reason, done=True, result=encode_result(result))

    @given.checked(task=given.a(TaskRow), reason=given.reason)
    def review_failed(self, task: TaskRow, *, reason: str) -> None:
        """Decide a review: it has not been done, and will not be."""
        self._decide(task, reason)

    @given.checked(task=given.a(TaskRow), reason=given.reason, calls=_calls)
    def review_retry(self, task: TaskRow, *, reason: str, calls: Mapping[str | Call, Any] | None = None) -> Receipt:
        """Decide a review: it has not been done, a new linked task does it. Say in ``reason`` why it is safe.

        Its open calls by ``ctx.external`` count as not made, and are made again; but for ``calls``, by name or (name, key): these were made, with the outcome given.
        Raises TaskInvalid for one that cannot be stored, ReviewConflict also for one it has not.
        """
        again = linked_retry(task, self._ids.new("task", 10), origin="review", actor=self._actor)
        return self._succeeded(
            task, again, reason, {(c, "") if isinstance(c, str) else c: encode_result(v) for c, v in (calls or {}).items()}
        )

    @given.checked(task=given.a(TaskRow), reason=given.reason)
    def review_compensate(
        self,
        task: TaskRow,
        handler: str | Handler,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        reason: str,
        options: Options | None = None,
    ) -> Receipt:
        """Decide a review: whatever it did is made up for by a task of ``handler``, submitted with the decision and found under the same business key.

        The task is FAILED and names it in ``superseded_by``; who follows the result gets the failure, not what made up for it. Raises as :meth:`submit`, and ReviewConflict.
        """
        return self._succeeded(task, compensation(task, self._request(handler, args, kwargs, "", options)), reason)

    def _succeeded(self, task: TaskRow, successor: NewTask, reason: str, known: Mapping[Call, str] | None = None) -> Receipt:
        receipt = self._decide(task, reason, successor=successor, known=known)
        assert receipt is not None
        woken(self._wake, [successor.queue])
        return receipt

    def _decide(
        self,
        task: TaskRow,
        reason: str,
        *,
        done: bool = False,
        result: str = "",
        successor: NewTask | None = None,
        known: Mapping[Call, str] | None = None,
    ) -> Receipt | None:
        if task.namespace != self.namespace:
            raise TaskNotFound(f"there is no task {task.id!r} in namespace {self.namespace!r}")
        answer = self._run(
            lambda tx: settling.review(
                tx,
                task.id,
                task.rev,
                done=done,
                result=result,
                reason=storable(reason),
                actor=self._actor or "unnamed",
                successor=successor,
                known=known or {},
            )
        )
        if isinstance(answer, settling.ReviewRefused):
            raise ReviewConflict(f"task {task.id}: {answer}")
        return answer


def _conflict(new: NewTask, receipt: Receipt) -> str:
    return (
        f"key {new.key!r} of handler {new.handler!r} is known with other content: task {receipt.task} has digest {receipt.conflict}, "
        f"this request {new.digest}. Use another key for another request"
    )
