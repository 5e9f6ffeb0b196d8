"""Pages of tasks: a filter, a place to go on from, and text that carries the place to the next request.

Used by :class:`millstream.tasks.Tasks`. What must never happen here: a page without a bound; a cursor believed that this installation did not give for this very question.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from millstream_schema import given
from millstream_schema.durable.finding import LARGEST_PAGE, TaskFilter, cursor, place_of
from millstream_schema.durable.records import TaskRow
from millstream_schema.durable.tokens import Seal
from millstream_schema.errors import ConfigurationError
from millstream_schema.store import finding
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.migrate import installation_secret


class Page(msgspec.Struct, frozen=True):
    """Tasks that match, newest first. ``cursor``: for the next page; empty: this was the last.

    A page may hold fewer than asked for, even none, and have a next one: how much one walks is bounded.
    """

    tasks: list[TaskRow]
    cursor: str


class TaskSearch:
    """Of one namespace."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    @cached_property
    def _seal(self) -> Seal:
        return Seal(self._db.read(installation_secret), "cursor")

    def page(self, where: TaskFilter, limit: int, text: str) -> Page:
        """Raises ConfigurationError, TokenRefused, StoreUnavailable."""
        said = given.whole(1, LARGEST_PAGE)(limit)
        if said:
            raise ConfigurationError(f"limit {said}: ask for the next page with the cursor")
        after = place_of(self._seal, self._namespace, where, text) if text else None

        def read(tx: Transaction) -> tuple[finding.Found, list[TaskRow]]:
            found = finding.page(tx, self._namespace, where, after, limit)
            return found, finding.rows_of(tx, found.ids)

        found, rows = self._db.read(read)
        return Page(rows, "" if found.place is None else cursor(self._seal, self._namespace, where, found.place))

    def newest(self, where: TaskFilter, count: int) -> list[TaskRow]:
        """So many, or all there are, however far back they lie."""
        rows: list[TaskRow] = []
        text = ""
        while True:
            page = self.page(where, min(count - len(rows), LARGEST_PAGE), text)
            rows += page.tasks
            text = page.cursor
            if not text or len(rows) >= count:
                return rows
