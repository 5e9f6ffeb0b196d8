"""``Inbox``: in a consumer's own database, which deliveries its effects are in; so that a delivery that comes again does nothing again.

::

    inbox = Inbox()
    inbox.create(session)  # once
    if inbox.accept(session, delivery):
        ...  # the effects, in the same transaction
    session.commit()
    subscriptions.acknowledge(delivery)

The marker commits with the effects, or neither does. What must never happen here: a marker that goes while its delivery can still be sent; a commit.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from millstream_schema import given
from millstream_schema.errors import ConfigurationError
from millstream_schema.ports import SystemClock
from millstream_schema.store import inboxes
from millstream_schema.store.callers import caller_of, joined

from .subscriptions import Delivery, Subscriptions

LEAST_AGE = dt.timedelta(days=1)
_PAGE = 500


class Inbox:
    """``table``: its name in the consumer's database. One inbox serves any number of subscriptions. ``wait``: seconds a statement may wait for another consumer's transaction.

    A session is an SQLAlchemy Session or Connection, ``django.db.connection``, or a connection of psycopg, PyMySQL or sqlite3, in a transaction. All calls raise ConfigurationError
    for another, or where there is no inbox; StoreUnavailable; and RetryTransaction when the whole transaction has to be run again.
    """

    def __init__(self, table: str = "millstream_inbox", *, wait: float = 10.0) -> None:
        given.require("wait", wait, given.seconds(3600))
        self._home = inboxes.home(table)
        self._table = table
        self._wait_ms = int(wait * 1000)
        self._clock = SystemClock()

    def create(self, session: Any) -> None:
        """Make the table unless it is there; commit afterwards."""
        inboxes.create(caller_of(session), self._table)

    def accept(self, session: Any, delivery: Delivery) -> bool:
        """Whether this delivery's effects are to be done now, in the transaction of ``session``; False: they are in already. A repeat at the same moment waits for the other
        to end."""
        caller = caller_of(session)
        given.require("delivery", delivery, given.a(Delivery))
        with joined(caller, self._home, self._wait_ms, self._clock) as tx:
            return inboxes.accept(tx, self._table, delivery.subscription, delivery.event)

    def purge(
        self, session: Any, subscriptions: Subscriptions, *, older_than: dt.timedelta = dt.timedelta(days=30), limit: int = 10_000
    ) -> int:
        """Remove up to ``limit`` markers that are older and whose delivery is gone from the installation, so that it can never be sent again; how many.

        ``older_than``: longer than any consumer may stand still with a delivery in its hands; at least a day. Acknowledged deliveries go with the installation's retention.
        """
        given.require("subscriptions", subscriptions, given.a(Subscriptions))
        given.require("older_than", older_than, given.a(dt.timedelta))
        given.require("limit", limit, given.whole(1, 1_000_000))
        if older_than < LEAST_AGE:
            raise ConfigurationError(
                f"older_than must be at least {LEAST_AGE}, not {older_than}: a consumer may still have the delivery in its hands"
            )
        age = older_than // dt.timedelta(microseconds=1)
        gone, after = 0, ""
        with joined(caller_of(session), self._home, self._wait_ms, self._clock) as tx:
            while gone < limit:
                pairs = inboxes.page(tx, self._table, age, after, min(_PAGE, limit - gone))
                if not pairs:
                    break
                after = inboxes.marker(*pairs[-1])
                alive = subscriptions.existing(pairs)
                over = [pair for pair in pairs if pair not in alive]
                if over:
                    gone += inboxes.forget(tx, self._table, over)
        return gone
