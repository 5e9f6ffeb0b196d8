"""``millstream.django``: submissions belong to Django's open transaction, nested ones too; wake-ups are among its ``on_commit`` callbacks, in their order."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
import pytest
import sqlalchemy as sa
from django.apps import apps
from django.conf import settings
from django.core.handlers.base import BaseHandler
from django.core.management import call_command, get_commands
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse

from millstream import ForeignSession, Handlers, Installation, RetryTransaction, Tasks, enlist
from millstream.django import tasks as project_tasks
from millstream.django import transactions
from millstream.django.management.commands.millstream import Command
from millstream_schema.errors import ConfigurationError

KINDS = [pytest.param("sqlite", id="sqlite"), pytest.param("postgres", id="postgres", marks=pytest.mark.postgres)]
handlers = Handlers()


@handlers.task(effects="idempotent")
def confirm(order: int) -> int:
    return order


class Oops(Exception):
    """The user's own error."""


if not settings.configured:
    settings.configure(
        INSTALLED_APPS=["millstream.django"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        MILLSTREAM={"HANDLERS": handlers, "ALIAS": "shop", "LEASE_MS": 4000},
    )
    django.setup()


@pytest.fixture(scope="module", params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The alias ``shop`` on a database with the schema, made by ``manage.py millstream up``; its SQLAlchemy URL."""
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("django") / "shop.db"
        url, given = f"sqlite:///{path}", {"ENGINE": "django.db.backends.sqlite3", "NAME": path}
    else:
        url = request.getfixturevalue("postgres_url")
        at = sa.make_url(url)
        given = {
            "ENGINE": "django.db.backends.postgresql", "NAME": at.database, "HOST": at.host or "", "USER": at.username or "",
            "PASSWORD": at.password or "", "PORT": str(at.port or ""),
        }  # fmt: skip
    connections.settings = connections.configure_settings({**settings.DATABASES, "shop": given})
    with pytest.raises(SystemExit) as ended:
        Command().run_from_argv(["manage.py", "millstream", "up"])
    assert ended.value.code == 0
    with connections["shop"].cursor() as cursor:
        cursor.execute("CREATE TABLE shop_order (id INTEGER PRIMARY KEY)")
    yield url
    apps.get_app_config("millstream").tasks.close()
    connections["shop"].close()
    del connections["shop"]


@pytest.fixture
def shop(database: str) -> Iterator[Shop]:
    with Tasks(
        apps.get_app_config("millstream").installation(),
        handlers,
        wake=lambda _: seen.happened.append("woken"),
        sessions=transactions("shop"),
    ) as t:
        seen = Shop(t, database)
        with connections["shop"].cursor() as cursor:
            cursor.execute("DELETE FROM shop_order")
            cursor.execute("DELETE FROM millstream_task")
        yield seen
    connections["shop"].close()


class Shop:
    """A project: its rows, its tasks, what happened after commits."""

    def __init__(self, tasks: Tasks, url: str) -> None:
        self.tasks = tasks
        self.url = url
        self.happened: list[str] = []

    def order(self, number: int) -> None:
        """A row and a task for it."""
        with connections["shop"].cursor() as cursor:
            cursor.execute("INSERT INTO shop_order (id) VALUES (%s)", [number])
        self.tasks.submit(confirm, number, key=f"{number}")

    def there(self) -> tuple[list[int], list[str]]:
        """What another connection sees: orders, keys of tasks."""
        engine = sa.create_engine(self.url)
        with engine.connect() as c:
            orders = [int(r[0]) for r in c.exec_driver_sql("SELECT id FROM shop_order ORDER BY id")]
            keys = [str(r[0]) for r in c.exec_driver_sql("SELECT key FROM millstream_task ORDER BY key")]
        engine.dispose()
        return orders, keys

    def say(self, what: str) -> None:
        transaction.on_commit(lambda: self.happened.append(what), using="shop")


def test_an_atomic_block_takes_its_tasks_along(shop: Shop) -> None:
    """Committed with it, undone with it; before its end nobody else sees them."""
    with transaction.atomic(using="shop"):
        shop.order(1)
        shop.order(2)
        assert shop.there() == ([], []) and shop.happened == []
    assert shop.there() == ([1, 2], ["1", "2"]) and shop.happened == ["woken", "woken"]
    with pytest.raises(Oops), transaction.atomic(using="shop"):
        shop.order(3)
        raise Oops
    assert shop.there() == ([1, 2], ["1", "2"]) and shop.happened == ["woken", "woken"]


def test_blocks_within_blocks(shop: Shop) -> None:
    """An inner block that is undone takes its own tasks along and no others; one that is done waits for the outermost."""
    with transaction.atomic(using="shop"):
        shop.order(1)
        with pytest.raises(Oops), transaction.atomic(using="shop"):
            shop.order(2)
            raise Oops
        with transaction.atomic(using="shop"):
            shop.order(3)
        assert shop.happened == []
    assert shop.there() == ([1, 3], ["1", "3"]) and shop.happened == ["woken", "woken"]


def test_wake_ups_have_their_place_among_the_callbacks(shop: Shop) -> None:
    """In the order in which they were asked for, after the commit."""
    with transaction.atomic(using="shop"):
        shop.say("before")
        shop.order(1)
        shop.say("after")
    assert shop.happened == ["before", "woken", "after"]


def test_without_an_open_block_a_submission_commits_by_itself(shop: Shop) -> None:
    """Also in a block of another database, and in one that was left by name."""
    shop.tasks.submit(confirm, 1, key="1")
    with transaction.atomic(using="default"):
        shop.tasks.submit(confirm, 2, key="2")
    if shop.url.startswith("postgresql"):  # SQLite has one writer
        with pytest.raises(Oops), transaction.atomic(using="shop"):
            shop.order(3)
            with enlist(None):
                shop.tasks.submit(confirm, 4, key="4")
            raise Oops
        assert shop.there()[1] == ["1", "2", "4"]
    assert {"1", "2"} <= set(shop.there()[1]) and "3" not in shop.there()[1]


def test_a_transaction_begun_by_hand_is_joined(shop: Shop) -> None:
    """Autocommit turned off: committed and undone by whoever turned it off."""
    transaction.set_autocommit(False, using="shop")
    try:
        shop.order(1)
        transaction.rollback(using="shop")
        shop.order(2)
        assert shop.there() == ([], [])
        transaction.commit(using="shop")
    finally:
        transaction.set_autocommit(True, using="shop")
    assert shop.there() == ([2], ["2"])


@pytest.mark.parametrize("fails", [False, True], ids=["answers", "raises"])
def test_a_request_that_is_one_transaction(shop: Shop, fails: bool) -> None:
    """``ATOMIC_REQUESTS``: a view's tasks are there if the view answered; the project's own client, by ``.delay()``."""

    def view(request: HttpRequest) -> HttpResponse:
        shop.order(7)
        confirm.delay(8)
        if fails:
            raise Oops
        return HttpResponse()

    connections["shop"].settings_dict["ATOMIC_REQUESTS"] = True
    try:
        atomic = BaseHandler().make_view_atomic(view)
        if fails:
            with pytest.raises(Oops):
                atomic(HttpRequest())
        else:
            atomic(HttpRequest())
    finally:
        connections["shop"].settings_dict["ATOMIC_REQUESTS"] = False
    orders, keys = shop.there()
    assert (orders, len(keys)) == (([], 0) if fails else ([7], 2))
    assert len(project_tasks().list()) == len(keys)


def test_a_connection_that_is_named_is_joined(shop: Shop) -> None:
    """``session=connections[alias]``, with a client that knows nothing of Django."""
    with Tasks(apps.get_app_config("millstream").installation(), handlers) as plain:
        with pytest.raises(Oops), transaction.atomic(using="shop"):
            plain.submit(confirm, 1, key="1", session=connections["shop"])
            raise Oops
        with transaction.atomic(using="shop"):
            plain.submit(confirm, 2, key="2", session=connections["shop"])
        with pytest.raises(ConfigurationError, match="begin a transaction"):
            plain.submit(confirm, 3, key="3", session=connections["shop"])
    assert shop.there()[1] == ["2"]


def test_an_error_of_ours_in_a_block_lets_it_be_committed_by_nobody(shop: Shop, tmp_path: Path) -> None:
    """The caller is told to run the block again; one who goes on as if nothing had happened gets nothing kept."""
    if not shop.url.startswith("sqlite"):
        return  # the servers' own rules are the contract suite's matter
    blocker = sqlite3.connect(shop.url.removeprefix("sqlite:///"), isolation_level=None)
    with transaction.atomic(using="shop"):
        with connections["shop"].cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM shop_order")
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(RetryTransaction):
            shop.tasks.submit(confirm, 1)
        blocker.execute("ROLLBACK")
        assert connections["shop"].needs_rollback
    blocker.close()
    assert shop.there() == ([], [])


def test_a_block_of_a_database_that_is_not_the_installations_is_refused(shop: Shop, tmp_path: Path) -> None:
    """A client joined to the wrong alias."""
    other = Installation.local(tmp_path, lease_ms=4000)
    from millstream.task_worker import TaskWorker

    with (
        TaskWorker(other, handlers),
        Tasks(other, handlers, sessions=transactions("shop")) as wrong,
        pytest.raises(ForeignSession),
        transaction.atomic(using="shop"),
    ):
        wrong.submit(confirm, 1)
    assert shop.there() == ([], [])


def test_settings_that_do_not_exist_are_refused() -> None:
    """With those that do."""
    config: Any = apps.get_app_config("millstream")
    given = dict(settings.MILLSTREAM)
    settings.MILLSTREAM["ALAIS"] = "x"
    try:
        with pytest.raises(ConfigurationError, match=r"ALAIS: known are ALIAS"):
            config.ready()
    finally:
        settings.MILLSTREAM.clear()
        settings.MILLSTREAM.update(given)


def test_the_command_is_one_of_djangos(database: str) -> None:
    """``manage.py millstream`` is found by its name."""
    assert get_commands()["millstream"] == "millstream.django"
    assert callable(call_command)
