"""The one transaction of an attempt: the handler's statements and the end of its task commit together, or neither does.

Used by :class:`.context.TaskContext`. The end is written fenced, as the last statement before COMMIT, so that an attempt that is not the valid one any more undoes all it did.
What must never happen here: a COMMIT whose answer was lost taken for done or for not done; an effect without its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from millstream_schema.durable.outcomes import Succeeded, Unfit
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import CommitUnknown, Fenced, StoreError, StoreUnavailable, TaskInvalid, TransactionRefused
from millstream_schema.store import settling, tasks
from millstream_schema.store.database import Transaction
from millstream_schema.store.handler_transactions import HandlerTransaction
from millstream_schema.store.settling import Answer, Settlement

from .surroundings import Surroundings

log = structlog.get_logger(__name__)
PAUSES = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each look at what became of a COMMIT whose answer was lost."""


class AttemptTransaction:
    """``ctx.transaction()`` of one attempt."""

    def __init__(self, task: TaskRow, around: Surroundings, submits: Sequence[NewTask]) -> None:
        self._task = task
        self._around = around
        self._submits = submits
        self._used = False
        self.committed = False

    @contextmanager
    def open(self) -> Iterator[HandlerTransaction]:
        """The block. Raises Fenced, CommitUnknown, StoreUnavailable, TransactionRefused, TaskInvalid; nothing was done then, but where CommitUnknown says so."""
        if self._used:
            raise TransactionRefused("an attempt has one ctx.transaction(): do all of it in one block")
        self._used = True
        tx = HandlerTransaction(self._around.databases.held())
        try:
            yield tx
        except BaseException as exc:
            tx.abandon(exc)
            raise
        if tx.value is None:
            tx.abandon(None)
            raise TransactionRefused(
                "ctx.transaction() was left without tx.result(value), so everything in it was undone: call tx.result() in the block, it is the attempt's success"
            )
        self._commit(tx, tx.value)

    def _commit(self, tx: HandlerTransaction, value: str) -> None:
        task = self._task
        end = Settlement(task=task.id, fence=task.fence, token=task.token, outcome=Succeeded(value), submits=tuple(self._submits))

        def last(t: Transaction) -> None:
            answer = settling.settle_success(t, end)
            if isinstance(answer, Unfit):
                raise TaskInvalid(answer.message)
            if answer is not Answer.APPLIED:
                raise Fenced(f"task {task.id}: this attempt is not the valid one any more ({answer}); nothing of its transaction was done")

        try:
            tx.commit(last)
        except CommitUnknown as exc:
            self._resolve(exc)
        self.committed = True
        self._around.committed()

    def _resolve(self, unknown: CommitUnknown) -> None:
        """Whether a COMMIT whose answer was lost came about: its session holds the task's row until it is over, so locking the row waits for it.

        Raises StoreUnavailable or Fenced when it did not; CommitUnknown when nobody can tell: what the attempt then reports is judged under the same lock.
        """
        task = self._task
        for pause in PAUSES:
            self._around.wait(pause)
            try:
                row = self._around.databases.short().run(lambda tx: tasks.lock_task(tx, task.id))
            except StoreError as exc:
                log.warning("the database cannot say yet whether a transaction committed", task=task.id, error=str(exc))
                continue
            if row is None or (row.fence, row.token) != (task.fence, task.token):
                raise Fenced(
                    f"task {task.id}: this attempt is not the valid one any more; nothing of its transaction was done"
                ) from unknown
            if row.state is not TaskState.SUCCEEDED:
                raise StoreUnavailable(
                    f"task {task.id}: the connection was lost at COMMIT; nothing of its transaction was done"
                ) from unknown
            return
        raise unknown
