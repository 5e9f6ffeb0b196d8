"""``OpenedNamespace``: a namespace of an installation with its database open, and ``repeated``: a transaction that is done again when the answer to its COMMIT is lost.

What every client (:class:`~millstream.tasks.Tasks`, :class:`~millstream.schedules.Schedules`, ...) is built on. What must never happen here: a database that is created by being
looked at; a repetition that its work is not told of and that does something twice; connections left open by a constructor that fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, TypeVar

import sqlalchemy as sa

from millstream_schema.durable.requests import NAME
from millstream_schema.errors import CommitUnknown, ConfigurationError, SchemaMismatch, StoreError, StoreUnavailable
from millstream_schema.ports import Clock, SystemClock
from millstream_schema.reasons import storable
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.migrate import check_schema

from .installation import Installation

T = TypeVar("T")
_DENIED = re.compile(r"permission denied|command denied", re.IGNORECASE)
_GRANT = (
    "the database lets this user in and not do this: its owner can GRANT SELECT, INSERT, UPDATE, DELETE on Millstream's tables; "
    "`millstream up` needs the right to create tables, too, or is run as the owner"
)
REPEATS = 5
"""How often a transaction whose answer was lost is executed again."""
LONGEST_ACTOR = 128


class OpenedNamespace:
    """Base of the clients. Also a context manager; :meth:`close` gives its connections back.

    ``actor``: who acts, kept with what is done. ``database``: one that is open already, and stays its owner's to close. Raises ConfigurationError, SchemaMismatch (run
    ``millstream up``), StoreUnavailable.
    """

    _NAMESPACES: ClassVar[re.Pattern[str]] = NAME

    def __init__(
        self, installation: Installation, namespace: str, *, clock: Clock | None = None, database: Database | None = None, actor: str = ""
    ) -> None:
        if not isinstance(namespace, str) or not self._NAMESPACES.match(namespace):
            raise ConfigurationError(f"namespace {namespace!r:.80} must match {self._NAMESPACES.pattern}: use letters, digits, - and _")
        self.namespace = namespace
        self._actor = acting(actor)
        self._clock = clock or SystemClock()
        self._shared = database is not None
        self.database = database or Database(
            installation.database, self._clock, prefix=installation.table_prefix, timeout_ms=installation.idle_in_transaction_ms
        )
        try:
            with reachable(self.database.url):
                require_file(self.database)
                check_schema(self.database)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the connections back."""
        if not self._shared:
            self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, work: Callable[[Transaction], T]) -> T:
        """A transaction, repeated as it was: every one of ours is guarded or keyed."""
        return repeated(self.database, lambda tx, _again: work(tx))

    def _repeated(self, work: Callable[[Transaction, bool], T]) -> T:
        """Likewise; the second argument tells it that it may have been done already."""
        return repeated(self.database, work)


def repeated(database: Database, work: Callable[[Transaction, bool], T]) -> T:
    """A transaction; when the answer to its COMMIT is lost, the same again, told so. Raises StoreUnavailable when every answer was."""
    for turn in range(REPEATS):
        try:
            return database.run(lambda tx, again=turn > 0: work(tx, again))  # type: ignore[misc]
        except CommitUnknown:
            continue
    raise StoreUnavailable(f"the answer to COMMIT was lost {REPEATS} times: ask again, with the same key or request where there is one")


def acting(actor: str) -> str:
    """Who acts, as it is kept. Raises ConfigurationError."""
    if not isinstance(actor, str):
        raise ConfigurationError(f"actor must be text that says who acts, not {actor!r:.80}")
    return storable(actor)[:LONGEST_ACTOR]


@contextmanager
def reachable(url: sa.URL) -> Iterator[None]:
    """Say what to do when the database cannot be reached, also where a driver's error comes through."""
    shown = url.render_as_string(hide_password=True)
    advice = f"nothing was done. Check that the database {shown} runs, is reached from here and lets this user in; then try again"
    try:
        yield
    except StoreUnavailable as exc:
        raise StoreUnavailable(f"{exc}; {advice}") from exc
    except StoreError as exc:
        if type(exc) is StoreError and _DENIED.search(str(exc)):
            raise StoreError(f"{exc}; {_GRANT}") from exc
        raise
    except sa.exc.DBAPIError as exc:
        first = (str(exc.orig).splitlines() or [""])[0]
        if _DENIED.search(first):
            raise StoreError(f"{type(exc.orig).__name__}: {first}; {_GRANT}") from exc
        raise StoreUnavailable(f"{type(exc.orig).__name__}: {first}; {advice}") from exc


def require_file(database: Database, first: str = "millstream up") -> None:
    """Looking at an SQLite database must not create it. ``first``: the command that makes it. Raises SchemaMismatch."""
    name = database.url.database
    if database.dialect == "sqlite" and name and name != ":memory:" and not Path(name).exists():
        raise SchemaMismatch(f"there is no database file {name}: run `{first}` first, or correct the URL")
