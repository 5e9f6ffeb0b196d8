"""A consumer's inbox: a delivery's effects are in its database once, however often the delivery comes; in whatever way the consumer reaches it."""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from tests.contract.store.delivery_rows import pulled, subscribed
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import ending, new, settle, taken

from millstream.inbox import Inbox
from millstream.installation import Installation
from millstream.subscriptions import Delivery, Subscriptions
from millstream_schema.errors import ConfigurationError, RetryTransaction
from millstream_schema.store import deliveries

WAYS = ["session", "connection", "driver"]
LEVELS = ["READ COMMITTED", "REPEATABLE READ"]


class Consumer:
    """A consumer's database: its own table and an inbox, reached in one of the ways."""

    def __init__(self, store: Opened, way: str, level: str = "") -> None:
        self.store = store
        self.way = way
        self.level = level
        self.inbox = Inbox("consumer_inbox")
        options: dict[str, Any] = {"isolation_level": level} if level and store.kind != "sqlite" else {}
        self.engine = sa.create_engine(store.url, **options)
        with self.opened() as given:
            self.inbox.create(given)
            self.inbox.create(given)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS consumer_effect (event VARCHAR(64))")
            connection.exec_driver_sql("DELETE FROM consumer_effect")
            connection.exec_driver_sql("DELETE FROM consumer_inbox")

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        """A transaction of the consumer's, committed at the end."""
        if self.way == "session":
            with Session(self.engine) as session, session.begin():
                yield session
        elif self.way == "connection":
            with self.engine.connect() as connection:
                yield connection
                connection.commit()
        else:
            raw = self.driver()
            try:
                yield raw
                raw.commit()
            finally:
                raw.close()

    def driver(self, **options: Any) -> Any:
        url = sa.make_url(self.store.url)
        if self.store.kind == "postgres":
            return psycopg.connect(
                host=url.host, port=url.port or 5432, user=url.username, password=url.password, dbname=url.database, **options
            )
        if self.store.kind == "mariadb":
            return pymysql.connect(
                host=url.host or "",
                port=url.port or 3306,
                user=url.username or "",
                password=url.password or "",
                database=url.database,
                **options,
            )
        if options:
            return sqlite3.connect(str(url.database), timeout=20, isolation_level=None)
        return sqlite3.connect(str(url.database), timeout=20)

    def does(self, given: Any, delivery: Delivery) -> bool:
        """The effect, if it is not in."""
        if not self.inbox.accept(given, delivery):
            return False
        statement = f"INSERT INTO consumer_effect (event) VALUES ('{delivery.event}')"
        if self.way == "driver":
            given.cursor().execute(statement)
        else:
            given.execute(sa.text(statement))
        return True

    def effects(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(r[0] for r in connection.exec_driver_sql("SELECT event FROM consumer_effect"))

    def close(self) -> None:
        with self.engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE consumer_inbox")
            connection.exec_driver_sql("DROP TABLE consumer_effect")
        self.engine.dispose()


@pytest.fixture
def client(store: Opened) -> Iterator[Subscriptions]:
    with Subscriptions(Installation(database=store.url, transport="unix://", checkpoints="file:///"), database=store.db) as found:
        yield found


@pytest.fixture
def consumer(store: Opened) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(way: str = "session", level: str = "") -> Consumer:
        made.append(Consumer(store, way, level))
        return made[-1]

    yield make
    for one in made:
        one.close()


def handed(store: Opened, client: Subscriptions, *names: str) -> list[Delivery]:
    """Deliveries of tasks that have ended."""
    subscribed(store.db, "s", attempts=20)
    settle(store.db, *[ending(r) for r in taken(store.db, *[new(n) for n in names])])
    return list(client.pull("s", 100))


@pytest.mark.parametrize("way", WAYS)
def test_a_delivery_is_accepted_once_in_each_way_of_reaching_a_database(
    store: Opened, client: Subscriptions, consumer: Callable[..., Consumer], way: str
) -> None:
    """A repeat is an answer and ends no transaction; what is rolled back was not accepted; two deliveries are two."""
    a, b = handed(store, client, "a", "b")
    mine = consumer(way)
    with contextlib.suppress(ZeroDivisionError), mine.opened() as given:
        assert mine.does(given, a)
        raise ZeroDivisionError
    assert mine.effects() == []
    with mine.opened() as given:
        assert mine.does(given, a) and not mine.does(given, a) and mine.does(given, b)
    with mine.opened() as given:
        assert not mine.does(given, a) and not mine.does(given, b)
    assert mine.effects() == sorted([a.event, b.event])


@pytest.mark.parametrize("level", LEVELS)
def test_of_two_consumers_with_one_delivery_the_later_waits_for_the_first(
    store: Opened, client: Subscriptions, consumer: Callable[..., Consumer], level: str
) -> None:
    """One of them does it, whichever; at a snapshot's level the database may refuse the later one, which does nothing."""
    (a,) = handed(store, client, "a")
    mine = consumer("connection", level)

    def consumes() -> bool:
        with mine.opened() as given:
            done = mine.does(given, a)
            threading.Event().wait(0.05)
            return done

    found = together(consumes, consumes, consumes)
    refused = [f for f in found if isinstance(f, RetryTransaction)]
    assert found.count(True) == 1 and found.count(False) + len(refused) == 2, found
    assert level != "READ COMMITTED" or not refused
    assert mine.effects() == [a.event]


def test_a_connection_that_commits_each_statement_by_itself_is_refused(
    store: Opened, client: Subscriptions, consumer: Callable[..., Consumer]
) -> None:
    """The marker would be there without the effects. One that has begun a transaction is taken."""
    (a,) = handed(store, client, "a")
    mine = consumer("driver")
    raw = mine.driver(autocommit=True)
    try:
        with pytest.raises(ConfigurationError, match="commits each statement by itself"):
            mine.inbox.accept(raw, a)
        raw.cursor().execute("BEGIN")
        assert mine.inbox.accept(raw, a)
        raw.cursor().execute("ROLLBACK")
    finally:
        raw.close()
    engine = sa.create_engine(store.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="commits each statement by itself"):
        mine.inbox.accept(connection, a)
    engine.dispose()
    with mine.opened() as given:
        assert mine.inbox.accept(given, a), "nothing was left behind"


def test_a_database_without_an_inbox_is_told_from_a_repeat(store: Opened, client: Subscriptions) -> None:
    """Nothing is done, and it is said how to make one."""
    (a,) = handed(store, client, "a")
    with (
        store.db.engine.begin() as connection,
        pytest.raises(ConfigurationError, match=r"no table nowhere: create it once with Inbox\.create"),
    ):
        Inbox("nowhere").accept(connection, a)


def test_what_is_no_session_and_no_table_is_refused(client: Subscriptions) -> None:
    """At once, saying what to give."""

    class AsyncSession:
        """Looks like SQLAlchemy's."""

        sync_session = None

    delivery: Any = None
    with pytest.raises(ConfigurationError, match="run_sync"):
        Inbox().accept(AsyncSession(), delivery)
    for wrong in (object(), "postgresql://", None):
        with pytest.raises(ConfigurationError, match="pass an SQLAlchemy Session or Connection"):
            Inbox().accept(wrong, delivery)
    for name in ("a b", 'x"; DROP TABLE y', "", "a.b", "x" * 64):
        with pytest.raises(ConfigurationError, match="must match"):
            Inbox(name)


def test_a_marker_outlives_every_delivery_that_can_still_be_sent(
    store: Opened, client: Subscriptions, consumer: Callable[..., Consumer]
) -> None:
    """However old: those of parked, pending and acknowledged deliveries stay, for all of them can come again; only when the delivery is gone the marker goes."""
    given = handed(store, client, *[f"k{i}" for i in range(8)])
    mine = consumer()
    with mine.opened() as session:
        assert all(mine.inbox.accept(session, d) for d in given)
    month = 31 * 86_400 * 1_000_000
    with mine.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE consumer_inbox SET accepted_us = accepted_us - {month}")
    client.acknowledge(*given[:5])
    with mine.opened() as session:
        assert mine.inbox.purge(session, client) == 0
    late = store.db.read(lambda tx: tx.now_us()) + 1
    client.redeliver("s", given[0].event)
    store.db.run(lambda tx: deliveries.purge(tx, late, 100))
    with mine.opened() as session:
        assert mine.inbox.purge(session, client, limit=3) == 3
        assert mine.inbox.purge(session, client) == 1 and mine.inbox.purge(session, client) == 0
    (again,) = pulled(store.db, client.get("s"))
    assert again.event.id == given[0].event
    with mine.opened() as session:
        assert not mine.inbox.accept(session, given[0])
        with pytest.raises(ConfigurationError, match="at least 1 day"):
            mine.inbox.purge(session, client, older_than=dt.timedelta(hours=1))


def test_a_young_marker_stays_though_its_delivery_is_gone(store: Opened, client: Subscriptions, consumer: Callable[..., Consumer]) -> None:
    """A consumer may have stood still with it in its hands."""
    given = handed(store, client, "a")
    mine = consumer()
    with mine.opened() as session:
        mine.inbox.accept(session, given[0])
    client.delete("s")
    with mine.opened() as session:
        assert mine.inbox.purge(session, client) == 0
        assert not mine.inbox.accept(session, given[0])
