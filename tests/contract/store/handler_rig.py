"""What the tests of handlers' effects share: attempts run by the product's own pipe on a store, with faults in the databases they open, and a table of the user's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import POLICY, consistent, ending, fresh, new, read, session, settle, submit, take

from millstream.testing.world import Faults as NoFaults
from millstream.testing.world import SimIds, World
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.effects import IntentId, KnownCall
from millstream_schema.durable.records import NewTask, TaskRow
from millstream_schema.durable.requests import HandlerSpec, encode_arguments
from millstream_schema.durable.states import Effects
from millstream_schema.errors import CommitUnknown, StoreUnavailable
from millstream_schema.ports import SystemClock
from millstream_schema.store import claims, settling
from millstream_schema.store.database import Database, Faults
from millstream_tasks.durable.databases import HandlerDatabases
from millstream_tasks.durable.execution import execute
from millstream_tasks.durable.handlers import Handler, HandlerRegistry
from millstream_tasks.durable.progress import Telling
from millstream_tasks.durable.surroundings import Surroundings

EFFECTS = sa.Table("user_effect", sa.MetaData(), sa.Column("word", sa.String(60), primary_key=True), sa.Column("n", sa.Integer, default=0))


class Died(BaseException):
    """The process that ran the handler is gone."""


class Strike:
    """Stands in the way of COMMIT number ``at`` of a database, as ``how`` says."""

    def __init__(self, at: int, how: str) -> None:
        self.at = at
        self.how = how
        self.count = 0

    def before_commit(self) -> None:
        self.count += 1
        if self.count == self.at and self.how == "refused":
            raise StoreUnavailable("injected")
        if self.count == self.at and self.how == "dies before":
            raise Died

    def after_commit(self) -> None:
        if self.count == self.at and self.how == "answer lost":
            raise CommitUnknown("injected")
        if self.count == self.at and self.how == "dies after":
            raise Died


class Databases(HandlerDatabases):
    """The handler's databases, with faults."""

    def __init__(
        self, store: Opened, others: dict[str, str], *, held: Faults | None = None, short: Faults | None = None, orders: Faults | None = None,
        timeout_ms: int = 3000,
    ) -> None:  # fmt: skip
        super().__init__(store.url, "millstream_", timeout_ms, SystemClock(), others)
        self._faults = {"": held, "short": short, "orders": orders}

    def held(self, name: str) -> Database:
        found = super().held(name)
        found.faults = self._faults.get(name)
        return found

    def short(self) -> Database:
        found = super().short()
        found.faults = self._faults["short"]
        return found


class Run:
    """One attempt: what came of it, and how often it said that it had committed."""

    def __init__(self) -> None:
        self.outcome: o.Reported | None = None
        self.submits: tuple[NewTask, ...] = ()
        self.commits = 0
        self.known: list[tuple[IntentId, KnownCall | None]] = []


class Rig:
    """Attempts of one handler on one store."""

    def __init__(self, store: Opened, function: Callable[..., Any], **options: Any) -> None:
        self.store = store
        self.db = store.db
        self.others: dict[str, str] = {}
        self.databases = Databases(store, {})
        self.registry = HandlerRegistry()
        for name, one in {"work": function, "next": lambda *args: None}.items():
            self.registry.add(Handler(one, HandlerSpec(name=name), **options))
        EFFECTS.metadata.create_all(store.db.engine)
        with store.db.engine.begin() as connection:
            connection.execute(EFFECTS.delete())

    def submit(self, key: str = "k", *args: Any, **changes: Any) -> NewTask:
        one = new(key, **{"effects": Effects.TRANSACTIONAL, "policy": POLICY, "args": encode_arguments(args, {}), **changes})
        submit(self.db, one)
        return one

    def claim(self, who: str = "", **options: Any) -> TaskRow:
        """The next task, for a session of its own."""
        (row,) = take(self.db, session(self.db, who or fresh("s")), 1, **options)
        if row.effects is Effects.EXTERNAL:
            assert self.db.run(lambda tx: claims.begin(tx, row.session, row.id, row.fence, row.token))
        return row

    def run(self, row: TaskRow, **faults: Any) -> Run:
        """The attempt as its process runs it. Raises Died when that dies of a fault."""
        databases = self.databases = Databases(self.store, self.others, **faults)
        found = Run()

        def commits() -> None:
            found.commits += 1

        around = Surroundings(
            ids=SimIds(World(0, NoFaults())),
            clock=SystemClock(),
            told=lambda: False,
            databases=databases,
            committed=commits,
            wait=lambda _: None,
            telling=Telling(SystemClock(), lambda _: None),
            raised=lambda _: None,
            known=lambda intent, call: found.known.append((intent, call)),
        )
        died: list[Died] = []

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    return function(*args, **kwargs)
                except Died as exc:  # nothing of the process is left that could report
                    died.append(exc)
                    raise

            return call

        handler = self.registry.get("work")
        original, handler.function = handler.function, watched(handler.function)
        try:
            found.outcome, found.submits = execute(row, self.registry, around)
        finally:
            handler.function = original
            databases.close()
        if died:
            raise died[0]
        return found

    def report(self, row: TaskRow, run: Run) -> Any:
        """What the worker makes of it."""
        if isinstance(run.outcome, o.Committed):
            return None
        assert run.outcome is not None
        (answer,) = settle(self.db, ending(row, run.outcome, submits=run.submits))
        return answer

    def whole(self, **faults: Any) -> Run:
        """Claim, run and report one attempt; a process that dies is taken back with its session."""
        row = self.claim()
        try:
            run = self.run(row, **faults)
        except Died:
            self.lose(row.session)
            return Run()
        self.report(row, run)
        return run

    def lose(self, who: str) -> None:
        """The lease of a session is over."""
        n = self.db.tables.node
        self.db.run(lambda tx: tx.update(n, n.c.id == who, expires_us=1))
        assert self.db.run(lambda tx: settling.expire_session(tx, who, 0))
        self.db.run(lambda tx: settling.take_back(tx, who, lambda: 0.5, 1000))
        self.db.run(lambda tx: claims.wake_due(tx, 100))

    def effects(self) -> dict[str, int]:
        with self.db.engine.begin() as connection:
            return {str(word): int(n) for word, n in connection.execute(sa.select(EFFECTS))}

    def task(self, key: str = "k") -> TaskRow:
        consistent(self.db)
        rows = self.db.read(lambda tx: tx.rows(tx.t.task.select().where(tx.t.task.c.key == key)))
        return read(self.db, rows[0]["id"])


def in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run it on a thread; calling what comes back waits for its end."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()

    def ended() -> Any:
        thread.join(30)
        assert found, "it did not end"
        return found[0]

    return ended
