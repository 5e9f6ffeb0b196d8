"""``Inbox``: in a consumer's own database, which deliveries its effects are in; so that a delivery that comes again does nothing again.

::

    inbox = Inbox()
    inbox.create(connection)  # once
    if inbox.accept(session, delivery):
        ...  # the effects, in the same transaction
    session.commit()
    subscriptions.acknowledge(delivery)

The marker commits with the effects, or neither does. What must never happen here: a marker that goes while its delivery can still be sent; a commit.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from millstream_schema.errors import ConfigurationError
from millstream_schema.target import inbox_statements
from millstream_schema.target.dialects import checked_name

from .callers_connections import CallersConnection
from .subscriptions import Delivery, Subscriptions

LEAST_AGE = dt.timedelta(days=1)
_PAGE = 500


class Inbox:
    """``table``: its name in the consumer's database, with a schema if need be. One inbox serves any number of subscriptions."""

    def __init__(self, table: str = "millstream_inbox") -> None:
        for part in table.split("."):
            checked_name(part, "inbox table")
        if table.count(".") > 1:
            raise ConfigurationError(f"inbox table {table!r} is refused: write table or schema.table")
        self._table = table

    def create(self, session: Any) -> None:
        """Make the table unless it is there. ``session``: an SQLAlchemy Session or Connection, or a DB-API connection; commit afterwards."""
        connection = CallersConnection(session)
        for statement in inbox_statements.create_table(connection.dialect, self._table):
            connection.execute(statement)

    def accept(self, session: Any, delivery: Delivery) -> bool:
        """Whether this delivery's effects are to be done now, in the transaction of ``session``; False: they are in already.

        A repeat at the same moment waits for the other to end. At SERIALIZABLE the database may refuse one of the two, as it does with any two writers: do that one again.
        """
        connection = CallersConnection(session)
        counted, _ = connection.execute(inbox_statements.accept(connection.dialect, self._table), (delivery.subscription, delivery.event))
        return counted == 1

    def purge(
        self, session: Any, subscriptions: Subscriptions, *, older_than: dt.timedelta = dt.timedelta(days=30), limit: int = 10_000
    ) -> int:
        """Remove up to ``limit`` markers that are older and whose delivery is gone from the installation, so that it can never be sent again; how many.

        ``older_than``: longer than any consumer may stand still with a delivery in its hands; at least a day. Acknowledged deliveries go with the installation's retention.
        """
        if older_than < LEAST_AGE:
            raise ConfigurationError(
                f"older_than must be at least {LEAST_AGE}, not {older_than}: a consumer may still have the delivery in its hands"
            )
        connection = CallersConnection(session)
        age = older_than // dt.timedelta(microseconds=1)
        gone = kept = 0
        while gone < limit:
            _, rows = connection.execute(inbox_statements.oldest(connection.dialect, self._table), (age, min(_PAGE, limit - gone), kept))
            pairs = [(str(subscription), str(event)) for subscription, event in rows]
            if not pairs:
                break
            alive = subscriptions.existing(pairs)
            for pair in pairs:
                if pair not in alive:
                    gone += connection.execute(inbox_statements.forget(connection.dialect, self._table), pair)[0]
            kept += len(alive)
        return gone
