"""Submissions in a transaction of the caller's: ``tasks.submit(…, session=…)`` and ``with enlist(session):``.

Used by ``Tasks``. A submission that joins is committed, or rolled back, with the caller's own rows; workers are woken after the outermost commit, or find it by polling. What must
never happen here: a transaction joined that nobody named; a wake-up that blocks or fails a submission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from millstream_schema.durable.records import Receipt
from millstream_schema.ports import Clock
from millstream_schema.store.callers import Caller, Home, caller_of, installation_home, joined
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.migrate import installation_id

T = TypeVar("T")
Wake = Callable[[str], None]
_enlisted: ContextVar[tuple[Any] | None] = ContextVar("millstream_enlisted", default=None)


@contextmanager
def enlist(session: Any) -> Iterator[None]:
    """Submissions in this block that name no session join this one's transaction: an SQLAlchemy Session or Connection, ``django.db.connection``, a DB-API connection.

    ``None``: they join none, whatever a block around says. Holds for this thread and the asyncio tasks begun in it.
    """
    token = _enlisted.set((session,))
    try:
        yield
    finally:
        _enlisted.reset(token)


class TaskReceipt(Receipt, frozen=True):
    """A receipt that can wake the workers: after the commit of a transaction that tells nobody (plain DB-API)."""

    queue: str = ""
    wake: Wake | None = None

    def hint(self) -> None:
        """There is work now. Without this the poll finds it."""
        if self.wake is not None:
            self.wake(self.queue)


def hinting(receipt: Receipt, queue: str, wake: Wake | None) -> TaskReceipt:
    return TaskReceipt(receipt.task, receipt.state, receipt.digest, receipt.replayed, receipt.conflict, queue, wake)


def woken(wake: Wake | None, queues: Sequence[str]) -> None:
    if wake is not None:
        for queue in queues:
            wake(queue)


class OwnTransaction:
    """A submission in a transaction of ours."""

    def __init__(self, run: Callable[[Callable[[Transaction], Any]], Any], wake: Wake | None) -> None:
        self._run = run
        self._wake = wake

    def run(self, work: Callable[[Transaction], T]) -> T:
        found: T = self._run(work)
        return found

    def told(self, queues: Sequence[str]) -> None:
        """It is committed: wake the workers."""
        woken(self._wake, queues)


class JoinedTransaction:
    """A submission in the caller's."""

    def __init__(self, caller: Caller, joining: Joining, wake: Wake | None) -> None:
        self._caller = caller
        self._joining = joining
        self._wake = wake

    def run(self, work: Callable[[Transaction], T]) -> T:
        with joined(self._caller, self._joining.home, self._joining.database.lock_timeout_ms, self._joining.clock) as tx:
            return work(tx)

    def told(self, queues: Sequence[str]) -> None:
        """Wake them once it is committed."""
        if self._wake is not None:
            self._caller.after_commit(lambda: woken(self._wake, queues))


class Joining:
    """How submissions of one ``Tasks`` find the transaction they belong to. ``sessions``: asked when a call names none and none is enlisted; None: one of our own."""

    def __init__(self, database: Database, clock: Clock, wake: Wake | None, sessions: Callable[[], Any] | None) -> None:
        self.database = database
        self.clock = clock
        self._wake = wake
        self._sessions = sessions
        self._home: Home | None = None

    @property
    def home(self) -> Home:
        """The installation's own database; what tells it from every other never changes."""
        if self._home is None:
            self._home = installation_home(self.database.tables, self.database.dialect, self.database.read(installation_id))
        return self._home

    def transaction(self, session: Any, run: Callable[[Callable[[Transaction], Any]], Any]) -> OwnTransaction | JoinedTransaction:
        """The one that is named, enlisted, or open; else one of ours, by ``run``."""
        if session is None:
            enlisted = _enlisted.get()
            if enlisted is not None:
                session = enlisted[0]
            elif self._sessions is not None:
                session = self._sessions()
        if session is None:
            return OwnTransaction(run, self._wake)
        return JoinedTransaction(caller_of(session), self, self._wake)
