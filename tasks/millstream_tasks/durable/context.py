"""What a handler may know of its attempt and ask of it: the parameter ``ctx``.

Made by :mod:`.execution` for each attempt, used by user code on its thread. What must never happen here: an effect that is not fenced by the attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from millstream_schema.durable.records import NewTask, Policy, TaskRow
from millstream_schema.durable.requests import Options
from millstream_schema.errors import ExternalRefused, TaskInvalid, TransactionRefused, UnknownHandler
from millstream_schema.store.handler_transactions import HandlerTransaction

from .external import ExternalCalls
from .handlers import Handler, HandlerRegistry
from .surroundings import Surroundings
from .transactions import AttemptTransaction

MOST_SUBMITS, LARGEST_SUBMITS = 1_000, 4 << 20
"""Tasks that one attempt may submit, and bytes that their arguments may take together: they come in by the transaction that ends it."""


class TaskContext:
    """One attempt, as its handler sees it. ``permit_seq``: hand it to the guarded resource, which refuses smaller ones."""

    def __init__(self, task: TaskRow, registry: HandlerRegistry, around: Surroundings) -> None:
        self._task = task
        self._around = around
        self._registry = registry
        run_ms = msgspec.json.decode(task.policy, type=Policy).run_ms
        self._ends_at = around.clock.monotonic() + run_ms / 1000 if run_ms else None
        self.submits: list[NewTask] = []
        self._submitted_bytes = 0
        self._transaction = AttemptTransaction(task, around, self.submits)
        handler = registry.find(task.handler)
        self._calls = ExternalCalls(task, around, None if handler is None else handler.reconcile)

    @property
    def task_id(self) -> str:
        return self._task.id

    @property
    def key(self) -> str:
        return self._task.key

    @property
    def attempt(self) -> int:
        """Number of this start, from 1."""
        return max(1, self._task.starts)

    @property
    def fence(self) -> int:
        """Only grows: a later attempt's is larger."""
        return self._task.fence

    @property
    def cancelled(self) -> bool:
        """Whether this attempt's end is asked for: by a cancel, by its worker, or because its time is over. ``raise Cancel`` obeys."""
        return self._around.told() or self.overdue

    @property
    def time_left(self) -> float | None:
        """Seconds until its handler's ``run`` is over, 0 past it; None: there is no limit."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._around.clock.monotonic())

    @property
    def overdue(self) -> bool:
        """Whether its handler's ``run`` is over: it is killed after ``grace``, where it can be."""
        return self._ends_at is not None and self._around.clock.monotonic() >= self._ends_at

    @property
    def permit_seq(self) -> int:
        return self._task.permit_seq

    @property
    def settled(self) -> bool:
        """Whether its transaction has committed: the task has succeeded, whatever its handler still does."""
        return self._transaction.committed or self._transaction.sealed is not None

    @property
    def work(self) -> AttemptTransaction:
        """What became of its transaction."""
        return self._transaction

    @property
    def calls(self) -> ExternalCalls:
        """What became of its calls to the outside."""
        return self._calls

    def external(self, name: str, call: Callable[[str], Any], *, key: str = "") -> Any:
        """Make a call to the outside once: ``call(idempotency_key)``; what it gave, also to the next attempts, without calling again.

        It is known by ``name`` and ``key`` within this task and those that do it again; ``key`` is for names that are used more than once in an attempt. That it is about to be
        made is committed before, its outcome after it: plain values, at most 256 KiB, which come back as they are stored. All attempts have the same idempotency key: send it.

        ``raise NotDone`` in it says that it certainly did not happen: the intent is closed and the exception goes on. Any other exception says nothing: the handler's ``reconcile``
        hook is asked; where it cannot say, or there is none, the handler is left, and the task is in review. An attempt whose outcome is not known has no other end.

        Raises ExternalRefused (nothing was called), Fenced, StoreUnavailable (not called), TaskInvalid (called, and its outcome cannot be stored).
        """
        if self.settled:
            raise ExternalRefused("the task has succeeded with its ctx.transaction(): make the call before that")
        if self._transaction.open_now:
            raise ExternalRefused(
                "ctx.external() within ctx.transaction(): a call to the outside would hold its locks; make it before the block"
            )
        return self._calls.run(name, call, key)

    def transaction(self, database: str = "") -> AbstractContextManager[HandlerTransaction]:
        """``with ctx.transaction() as tx``: what is done through ``tx.execute``, ``tx.session`` or ``tx.connection`` commits together with the end of this task, or not at all.

        Leaving the block after ``tx.result(value)`` is the success; leaving it by an exception undoes everything. ``database``: one of ``Handlers(databases=…)``, which has the
        marker table (``millstream markers init``); Millstream's own, if none is named.

        Once in an attempt. Its submissions so far come in with it. Raises Fenced when this attempt is not the valid one any more, StoreUnavailable, TransactionRefused.
        """
        if self._calls.doubt is not None:
            raise self._calls.doubt
        return self._transaction.open(database)

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """So much is done, of ``total`` if that is known: shown by ``millstream tasks show`` and ``why``, kept with the attempt.

        Call it as often as you like: it is sent once a second, and what was said last is not lost. Raises ValueError for what is no finite number."""
        self._around.telling.progress(done, total, message)

    def note(self, text: str = "", /, **fields: object) -> bool:
        """Keep a remark with this attempt, for whoever looks or reviews; whether it was kept: the first 100 are.

        Text beyond 2,000 characters, a field's value beyond 500, and fields beyond 20 are cut off."""
        return self._around.telling.note(text, fields)

    def submit(self, handler: str | Handler, /, *args: Any, key: str = "", options: Options | None = None, **kwargs: Any) -> str:
        """Another task, which comes in when this attempt succeeds and not otherwise; its id. Without ``key`` it is this task's key and a number.

        At most 1,000 in an attempt, with 4 MiB of arguments together: more is TaskInvalid, and the task has failed (cause ``result``), unless the handler holds that up."""
        if self.settled:
            raise TransactionRefused("the task has succeeded with its ctx.transaction(): submit before its block is left")
        try:
            found = handler if isinstance(handler, Handler) else self._registry.get(handler)
        except UnknownHandler as exc:  # of this process: the same at every attempt
            raise TaskInvalid(str(exc)) from exc
        task_id = self._around.ids.new("task", 10)
        own = key or f"{self._task.id}/{len(self.submits)}"
        origin = f"task:{self._task.id}"
        new = found.request(self._task.namespace, task_id, own, args, kwargs, options or Options(), actor=self._task.actor, origin=origin)
        size = self._submitted_bytes + len(new.args.encode())
        if len(self.submits) >= MOST_SUBMITS or size > LARGEST_SUBMITS:
            raise TaskInvalid(
                f"an attempt may submit {MOST_SUBMITS} tasks with {LARGEST_SUBMITS} bytes of arguments together, this would be {len(self.submits) + 1} with {size}: "
                "submit a few tasks that each submit a part, and pass addresses instead of data"
            )
        self.submits.append(new)
        self._submitted_bytes = size
        return task_id
