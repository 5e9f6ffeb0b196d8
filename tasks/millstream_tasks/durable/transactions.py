"""The one transaction of an attempt: the handler's statements and the end of its task commit together, or neither does.

Used by :class:`.context.TaskContext`. In our own database the end is written fenced, as the last statement before COMMIT; in a user's it is the marker's result, and settled from
there. An attempt that is not the valid one any more undoes all it did.
What must never happen here: a COMMIT whose answer was lost taken for done or for not done; an effect without its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from millstream_schema.durable.outcomes import Succeeded, Unfit
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import CommitUnknown, Fenced, StoreError, StoreUnavailable, TaskInvalid, TransactionRefused
from millstream_schema.store import markers, settling, tasks
from millstream_schema.store.database import Transaction
from millstream_schema.store.handler_transactions import HandlerTransaction
from millstream_schema.store.settling import Answer, Settlement

from .surroundings import Surroundings

log = structlog.get_logger(__name__)
PAUSES = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each look at what became of a COMMIT whose answer was lost."""


class MarkerSays(BaseException):
    """An earlier attempt has committed, so that this one has nothing to do. Leaves the handler's code, unless that holds it up, which changes nothing."""


class AttemptTransaction:
    """``ctx.transaction()`` of one attempt. ``committed``: it has settled the task. ``sealed``: the result its marker has. ``unknown``: nobody could tell whether it committed.
    ``open_now``: its block is being run."""

    def __init__(self, task: TaskRow, around: Surroundings, submits: Sequence[NewTask]) -> None:
        self._task = task
        self._around = around
        self._submits = submits
        self._used = False
        self.open_now = False
        self.committed = False
        self.sealed: Succeeded | None = None
        self.sealed_submits: tuple[NewTask, ...] = ()
        self.unknown: CommitUnknown | None = None

    @contextmanager
    def open(self, database: str) -> Iterator[HandlerTransaction]:
        """The block. Raises Fenced, CommitUnknown, StoreUnavailable, TransactionRefused, TaskInvalid; nothing was done then, but where CommitUnknown says so."""
        if self._used:
            raise TransactionRefused("an attempt has one ctx.transaction(): do all of it in one block")
        self._used = True
        if database:
            self._enter(database)
        tx = HandlerTransaction(self._around.databases.held(database))
        self.open_now = True
        try:
            yield tx
        except BaseException as exc:
            tx.abandon(exc)
            raise
        finally:
            self.open_now = False
        if tx.value is None:
            tx.abandon(None)
            raise TransactionRefused(
                "ctx.transaction() was left without tx.result(value), so everything in it was undone: call tx.result() in the block, it is the attempt's success"
            )
        if database:
            self._seal(tx, database, tx.value)
        else:
            self._settle(tx, tx.value)

    # -- in our own database

    def _settle(self, tx: HandlerTransaction, value: str) -> None:
        task = self._task
        end = Settlement(task=task.id, fence=task.fence, token=task.token, outcome=Succeeded(value), submits=tuple(self._submits))

        def last(t: Transaction) -> None:
            answer = settling.settle_success(t, end)
            if isinstance(answer, Unfit):
                raise TaskInvalid(answer.message)
            if answer is not Answer.APPLIED:
                raise self._stale()

        try:
            tx.commit(last)
        except CommitUnknown as exc:
            self._resolve(exc, self._settled)
        self.committed = True
        self._around.telling.close()  # what it has said so far, before its end is known
        self._around.committed()

    def _settled(self) -> bool:
        task = self._task
        row = self._around.databases.short().run(lambda tx: tasks.lock_task(tx, task.id))
        if row is None or (row.fence, row.token) != (task.fence, task.token):
            raise self._stale()
        return row.state is TaskState.SUCCEEDED

    # -- in a user's database

    def _enter(self, database: str) -> None:
        """Record in our row that this attempt goes there, then raise the marker to its fence: from now on no earlier one commits."""
        task = self._task
        held = self._around.databases.held(database)
        short = self._around.databases.short()
        answer = self._again(lambda: short.run(lambda tx: settling.mark(tx, task.id, task.fence, task.token, database)))
        if answer is False:
            raise self._stale()
        if answer is not True:
            raise TransactionRefused(
                f"an attempt of this task has gone to database {answer!r} before: it cannot go to {database!r} as well"
            )
        found = markers.in_short(held, lambda tx: markers.raise_fence(tx, task.id, task.fence))
        if found.result is not None:
            self._keep(found.result, found.submits)
            raise MarkerSays

    def _seal(self, tx: HandlerTransaction, database: str, value: str) -> None:
        task, submits = self._task, tuple(self._submits)

        def last(t: Transaction) -> None:
            if not markers.seal(t, task.id, task.fence, value, submits):
                raise self._stale()

        try:
            tx.commit(last)
        except CommitUnknown as exc:
            held = self._around.databases.held(database)
            self._resolve(exc, lambda: self._is_sealed(markers.in_short(held, lambda t: markers.read(t, task.id))))
        self._keep(value, submits)

    def _is_sealed(self, found: markers.Marker) -> bool:
        if found.fence != self._task.fence:
            raise self._stale()
        return found.result is not None

    def _keep(self, result: str, submits: tuple[NewTask, ...]) -> None:
        self.sealed, self.sealed_submits = Succeeded(result), submits

    # -- what became of a COMMIT

    def _resolve(self, unknown: CommitUnknown, came_about: Callable[[], bool]) -> None:
        """Whether a COMMIT whose answer was lost came about: its session holds the row that decides until it is over, so locking the row waits for it.

        Raises StoreUnavailable or Fenced when it did not; CommitUnknown when nobody can tell: what the attempt then reports is judged under the same lock.
        """
        for pause in PAUSES:
            self._around.wait(pause)
            try:
                done = came_about()
            except StoreError as exc:
                log.warning("the database cannot say yet whether a transaction committed", task=self._task.id, error=str(exc))
                continue
            if not done:
                raise StoreUnavailable("the connection was lost at COMMIT; nothing of the transaction was done") from unknown
            return
        self.unknown = unknown
        raise unknown

    def _again(self, work: Callable[[], bool | str]) -> bool | str:
        """A guarded write, executed again when its answer is lost."""
        for _ in range(markers.REPEATS):
            try:
                return work()
            except CommitUnknown:
                continue
        raise StoreUnavailable("the answer to COMMIT was lost again and again: the database cannot be used")

    def _stale(self) -> Fenced:
        return Fenced(f"task {self._task.id}: this attempt is not the valid one any more; nothing of its transaction was done")


def before(task: TaskRow, around: Surroundings) -> tuple[Succeeded | None, tuple[NewTask, ...]]:
    """Raise the marker of a task that went to another database before, ahead of anything else: the result of the attempt that committed, if one did. Raises Fenced, StoreError."""
    held = around.databases.held(task.marker)
    found = markers.in_short(held, lambda tx: markers.raise_fence(tx, task.id, task.fence))
    return (None, ()) if found.result is None else (Succeeded(found.result), found.submits)
