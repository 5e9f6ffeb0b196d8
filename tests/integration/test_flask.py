"""``millstream.flask``: submissions belong to Flask-SQLAlchemy's session; what nobody commits is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
import structlog
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from millstream import ForeignSession, Handlers, Installation, TaskWorker
from millstream.flask import MillstreamFlask
from millstream_schema.errors import ConfigurationError
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

KINDS = [
    pytest.param("sqlite", id="sqlite"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgres),
    pytest.param("mariadb", id="mariadb", marks=pytest.mark.mariadb),
]


class Shop:
    """An application with a table of orders, and a handler that confirms them."""

    def __init__(self, url: str, **config: object) -> None:
        self.handlers = Handlers()

        @self.handlers.task(name="confirm", effects="idempotent")
        def confirm(order: int) -> int:
            return order

        self.confirm = confirm
        self.app = Flask("shop")
        self.app.config.update(SQLALCHEMY_DATABASE_URI=url, **config)
        self.db = SQLAlchemy(self.app)
        self.millstream = MillstreamFlask(self.app, self.handlers)

        @self.app.post("/orders/<int:number>/<how>")
        def order(number: int, how: str) -> str:
            self.db.session.execute(sa.text("INSERT INTO shop_order (id) VALUES (:n)"), {"n": number})
            confirm.delay(number)
            if how == "commit":
                self.db.session.commit()
            if how == "raise":
                raise ValueError("the user's own")
            return "ok"

    def there(self) -> tuple[list[int], int]:
        """Orders, and how many tasks."""
        with self.app.app_context():
            orders = [int(r[0]) for r in self.db.session.execute(sa.text("SELECT id FROM shop_order ORDER BY id"))]
            return orders, len(self.millstream.tasks.list())

    def close(self) -> None:
        self.millstream.close()
        with self.app.app_context():
            self.db.session.remove()
            self.db.engine.dispose()


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'shop.db'}" if request.param == "sqlite" else request.getfixturevalue(f"{request.param}_url")
    database = Database(url, SystemClock())
    create_schema(database)
    database.run(lambda tx: tx.execute(sa.text("CREATE TABLE IF NOT EXISTS shop_order (id INTEGER PRIMARY KEY)")))
    database.run(lambda tx: (tx.execute(sa.text("DELETE FROM shop_order")), tx.delete(tx.t.task)))
    database.close()
    return url


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    yield shop
    shop.close()


def test_a_request_takes_its_tasks_along(shop: Shop) -> None:
    """There with the rows it commits; not there when it raises."""
    client = shop.app.test_client()
    assert client.post("/orders/1/commit").status_code == 200
    assert shop.there() == ([1], 1)
    assert client.post("/orders/2/raise").status_code == 500
    assert shop.there() == ([1], 1)


def test_a_session_that_nobody_commits_is_told(shop: Shop) -> None:
    """The request ended well and its tasks are lost with its rows: a warning; none where all went as it should, or the request failed."""
    client = shop.app.test_client()
    with structlog.testing.capture_logs() as logs:
        client.post("/orders/1/commit")
        client.post("/orders/2/raise")
    assert logs == []
    with structlog.testing.capture_logs() as logs:
        client.post("/orders/3/forget")
    assert [e["log_level"] for e in logs] == ["warning"] and "db.session.commit()" in logs[0]["event"]
    assert shop.there() == ([1], 1)


def test_without_a_context_or_by_the_settings_a_submission_commits_by_itself(shop: Shop, url: str) -> None:
    """A script; ``MILLSTREAM_ENLIST = False``."""
    shop.millstream.tasks.submit(shop.confirm, 1)
    assert shop.there() == ([], 1)
    apart = Shop(url, MILLSTREAM_ENLIST=False)
    with apart.app.app_context():
        apart.confirm.delay(2)
    assert apart.there() == ([], 2)
    apart.close()


def test_a_session_of_another_database_is_refused(shop: Shop, url: str, tmp_path: Path) -> None:
    """The installation is elsewhere: the error names the outbox."""
    other = Installation.local(tmp_path / "other")
    (tmp_path / "other").mkdir()
    handlers = Handlers()
    handlers.task(effects="idempotent")(print_nothing)
    with TaskWorker(other, handlers):
        apart = Shop(url, MILLSTREAM_DATABASE=other.database)
        with apart.app.app_context(), pytest.raises(ForeignSession, match="Outbox"):
            apart.confirm.delay(2)
        apart.close()


def print_nothing() -> None:
    print(end="")


def test_settings_that_are_wrong_are_refused(tmp_path: Path) -> None:
    """One that does not exist; no database at all; no application."""
    app = Flask("x")
    app.config["MILLSTREAM_DATABAES"] = "x"
    with pytest.raises(ConfigurationError, match="MILLSTREAM_DATABAES"):
        MillstreamFlask(app)
    with pytest.raises(ConfigurationError, match="init_app"):
        _ = MillstreamFlask().tasks
    with pytest.raises(ConfigurationError, match="MILLSTREAM_DATABASE"):
        _ = MillstreamFlask(Flask("y")).tasks
