"""``Outbox``: submissions in transactions of users' other databases; ``OutboxRelay`` brings them to the installation.

::

    outbox = Outbox(handlers, target="installation-…")           # shown by `millstream outbox init --outbox-url …`
    with Session(shop_engine) as session:
        session.add(Order(...))
        outbox.submit(session, confirm, 7, key="order-7")        # there with the order, or not at all
        session.commit()

    with OutboxRelay(installation, "postgresql+psycopg://…/shop"):
        ...

The request is kept complete, as it would have been sent; a relay sends it under its own key until it is accepted or a person must look. What must never happen here: a credential
kept; a request that changes between its submission and its acceptance.
"""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog

from millstream_coordinator.outbox_relay import OutboxCore
from millstream_schema import given
from millstream_schema.durable.outbox import EntryRow, EntryState, Limits, retried
from millstream_schema.durable.requests import NAME, Options
from millstream_schema.errors import (
    ConfigurationError,
    MillstreamError,
    ReviewConflict,
    TaskConflict,
    TaskNotFound,
)
from millstream_schema.ports import SystemChance, SystemClock, SystemIds
from millstream_schema.reasons import storable
from millstream_schema.store import outboxes
from millstream_schema.store.callers import caller_of, joined
from millstream_schema.store.database import Database
from millstream_schema.store.tables import tables
from millstream_tasks.durable.handlers import Handler, HandlerRegistry

from .catalogue import require_options_apart
from .handlers import Handlers
from .installation import Installation
from .opened import acting, reachable, repeated, require_file
from .tasks import Tasks

log = structlog.get_logger(__name__)
_LONGEST_WAIT = 1.0
_LAST_PAUSE = 10.0
"""Longest pause after failures that follow each other, in seconds."""
_PREFIX = given.named(re.compile(r"[a-z][a-z0-9_]{0,15}\Z"))


class OutboxReceipt(msgspec.Struct, frozen=True):
    """Answer to :meth:`Outbox.submit`. ``task``: empty until a relay has brought it in. ``replayed``: the key was known with the same content."""

    entry: str
    key: str
    digest: str
    state: EntryState
    task: str = ""
    replayed: bool = False


class Outbox:
    """Requests to the installation ``target``, kept in a user's own database in the table ``{prefix}_outbox``.

    ``handlers``: whose tasks are submitted; requests are checked and completed here. ``wait``: seconds that a submission waits for another of the same key. ``wake``: told after
    the commit, where the session tells of it: a relay's :meth:`OutboxRelay.wake`.
    """

    def __init__(
        self,
        handlers: Handlers | HandlerRegistry,
        *,
        target: str,
        namespace: str = "default",
        prefix: str = "millstream",
        actor: str = "",
        wait: float = 2.5,
        wake: Callable[[], None] | None = None,
    ) -> None:
        if not target or not given.is_text(target):
            raise ConfigurationError("target is missing: it is the installation's id, which `millstream outbox init` shows")
        self._registry = handlers.registry if isinstance(handlers, Handlers) else handlers
        self._target = target
        given.require("namespace", namespace, given.named(NAME))
        self._namespace = namespace
        given.require("prefix", prefix, _PREFIX)
        self._home = outboxes.home(tables(f"{prefix}_"))
        self._actor = acting(actor)
        given.require("wait", wait, given.seconds(3600))
        self._wait_ms = int(wait * 1000)
        self._wake = wake
        self._clock = SystemClock()
        self._ids = SystemIds()

    @staticmethod
    def create(url: str, *, prefix: str = "millstream") -> None:
        """Make the table in a user's database unless it is there. Raises ConfigurationError, StoreUnavailable."""
        given.require("url", url, given.a(str))
        given.require("prefix", prefix, _PREFIX)
        with _opened(url, prefix) as database, reachable(database.url):
            database.run(outboxes.create)

    def submit(
        self,
        session: Any,
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
        **kwargs: Any,
    ) -> OutboxReceipt:
        """Keep a request in the transaction of ``session`` (as for ``Tasks.submit(session=)``); options likewise. ``delay``, ``start_by``, ``deadline`` count from when the
        installation accepts it. Raises TaskInvalid, UnknownHandler, TaskConflict (the key is kept with other content), RetryTransaction, ConfigurationError."""
        found = handler if isinstance(handler, Handler) else self._registry.get(handler)
        require_options_apart(found, "submit()")
        options = Options(
            queue=queue, priority=priority, delay_s=delay, due_at=due_at, start_by_s=start_by, deadline_s=deadline, business_key=business_key,
            permit=permit,
        )  # fmt: skip
        return self.submit_with(session, found, args, kwargs, key=key, options=options)

    def submit_with(
        self,
        session: Any,
        handler: str | Handler,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: str = "",
        options: Options | None = None,
    ) -> OutboxReceipt:
        """As :meth:`submit`, arguments and options kept apart."""
        found = handler if isinstance(handler, Handler) else self._registry.get(handler)
        task = self._ids.new("task", 10)
        new = found.request(
            self._namespace,
            task,
            key,
            args,
            {} if kwargs is None else kwargs,
            Options() if options is None else options,
            actor=self._actor,
            origin="outbox",
        )
        caller = caller_of(session)
        with joined(caller, self._home, self._wait_ms, self._clock) as tx:
            put = outboxes.put(tx, self._target, new)
        if put.conflict:
            raise TaskConflict(
                f"key {new.key!r} of handler {new.handler!r} is in the outbox with other content: entry {put.entry} has digest {put.conflict}, "
                f"this request {new.digest}. Use another key for another request"
            )
        if self._wake is not None:
            caller.after_commit(self._wake)
        return OutboxReceipt(put.entry, new.key, new.digest, put.state, put.task, put.replayed)


class _opened:
    """A user's database for a moment. Raises StoreUnavailable with a text that says what to do."""

    def __init__(self, url: str, prefix: str) -> None:
        self._database = Database(url, SystemClock(), prefix=f"{prefix}_")

    def __enter__(self) -> Database:
        return self._database

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._database.close()


class OutboxRelay:
    """Brings the entries of one outbox to the installation. Any number may run; a context manager runs one on a thread.

    ``outbox``: SQLAlchemy URL of the user's database. ``limits``: pauses, how often, up to which age.
    Raises SchemaMismatch, StoreUnavailable, ConfigurationError (no outbox there).
    """

    def __init__(
        self,
        installation: Installation,
        outbox: str,
        *,
        prefix: str = "millstream",
        limits: Limits | None = None,
        tasks: Tasks | None = None,
    ) -> None:
        clock, ids = SystemClock(), SystemIds()
        self._shared = tasks is not None
        with ExitStack() as undone:
            self.database = Database(outbox, clock, prefix=f"{prefix}_")
            undone.callback(self.database.close)
            _require_outbox(self.database)
            self.tasks = tasks or Tasks(installation)
            if not self._shared:
                undone.callback(self.tasks.close)
            self.target = self.tasks.installation_id
            undone.pop_all()
        self._core = OutboxCore(self.database, self.tasks, self.target, ids.new("relay"), clock, ids, SystemChance(), limits or Limits())
        self._event = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.run, name="millstream-outbox", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self.database.close()
        if not self._shared:
            self.tasks.close()

    def wake(self) -> None:
        """There may be an entry."""
        self._event.set()

    def stop(self) -> None:
        """End :meth:`run` after the entries it has taken. Thread-safe."""
        self._stop = True
        self._event.set()

    def once(self) -> int:
        """Send all that is due; how many entries were accepted. Raises StoreError when the outbox's database is away."""
        before = self._core.sent
        while not self._stop and self._core.step():
            continue
        return self._core.sent - before

    def run(self) -> None:
        """Send what is due, until :meth:`stop`. A database that is away is waited for; whatever fails is logged and tried again, with pauses that grow."""
        pause = 0.0
        while not self._stop:
            self._event.clear()
            try:
                self.once()
                left = self._core.wait()
                pause, wait = 0.0, _LONGEST_WAIT if left is None else min(max(left, 0.001), _LONGEST_WAIT)
            except Exception as exc:  # also what a driver raises that nobody expected: this thread has no successor
                if isinstance(exc, MillstreamError):
                    log.warning("the outbox cannot be read; trying again", error=str(exc))
                else:
                    log.exception("a turn of the outbox's relay failed; it goes on")
                wait = pause = min(max(2 * pause, _LONGEST_WAIT), _LAST_PAUSE)
            if not self._stop:
                self._event.wait(wait)


class OutboxDesk:
    """What people do with an outbox: look, and have a parked entry sent again. Used by ``millstream outbox``."""

    def __init__(self, url: str, *, prefix: str = "millstream") -> None:
        self._database = Database(url, SystemClock(), prefix=f"{prefix}_")
        try:
            _require_outbox(self._database)
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._database.close()

    def counts(self) -> list[dict[str, Any]]:
        """Entries by state and cause, with the age of the oldest."""
        return self._database.read(outboxes.counts)

    def parked(self, limit: int) -> list[EntryRow]:
        """The oldest that a person must look at."""
        return self._database.read(lambda tx: outboxes.find(tx, EntryState.PARKED, limit))

    def get(self, entry: str) -> EntryRow:
        """Raises TaskNotFound."""
        row = self._database.read(lambda tx: outboxes.read(tx, entry))
        if row is None:
            raise TaskNotFound(f"there is no entry {entry!r} in this outbox")
        return row

    def retry(self, entry: str, reason: str) -> None:
        """Have a parked entry sent again, under its own key. Raises TaskNotFound, ReviewConflict (it may not, and why)."""
        given.require("reason", reason, given.reason)
        refused = repeated(self._database, lambda tx, _again: outboxes.retry(tx, entry, storable(reason), retried))
        if refused is None:
            raise TaskNotFound(f"there is no entry {entry!r} in this outbox")
        if refused:
            raise ReviewConflict(f"entry {entry} is not sent again: {refused}")


def _require_outbox(database: Database) -> None:
    """Raises ConfigurationError, StoreUnavailable."""
    with reachable(database.url):
        require_file(database, "millstream outbox init")
        if not database.read(outboxes.exists):
            raise ConfigurationError("there is no outbox in that database: `millstream outbox init --outbox-url …` makes one")
