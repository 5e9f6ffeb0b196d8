"""The page for teams that come from Celery is complete and true: every option of a call is in it, every test it names is there, and no call waits for a broker."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from millstream import Handlers, Installation, Millstream, TaskState
from millstream.celery_options import HARMLESS, REFUSED
from millstream_schema.ports import SystemClock
from millstream_schema.store.database import Database
from millstream_schema.store.migrate import create_schema

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming-from-celery.md").read_text()
HONOURED = {"countdown", "eta", "expires", "task_id", "queue", "priority", "serializer"}
TESTS = {
    name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", path.read_text(), re.M)
}


def test_the_page_says_of_each_option_of_a_call_what_becomes_of_it() -> None:
    """Honoured, harmless or refused: whoever looks for one finds it."""
    calling = PAGE[PAGE.index("### Calling") : PAGE.index("### Declaring")]
    words = set(re.findall(r"`(\w+)=?`", calling))
    assert (HONOURED | HARMLESS | set(REFUSED)) - words == set()


@pytest.mark.parametrize("document", ["README.md", "docs/coming-from-celery.md", "docs/guarantees.md"])
def test_every_test_that_a_page_names_is_there(document: str) -> None:
    """A promise points to what shows it; a renamed test does not leave it pointing nowhere."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / document).read_text()))
    assert named - TESTS == set()


def test_every_complaint_that_has_a_test_is_on_the_page() -> None:
    """Tests named after Celery's complaints: one of each number at least."""
    numbers = {number for name in TESTS if name.startswith("test_celery_t") for number in re.findall(r"_t(\d\d)", name)}
    told = {number for name in re.findall(r"`(test_celery_t\w+)`", PAGE) for number in re.findall(r"_t(\d\d)", name)}
    assert numbers - told == set()


@pytest.fixture
def silent_broker() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"


def test_celery_t20_a_call_waits_for_no_broker(silent_broker: str, tmp_path: Path) -> None:
    """Celery's own task is the control: its call does not come back. A durable one is a row, and each of many calls is as quick as the database."""
    app = Celery("shop", broker=silent_broker)
    app.conf.broker_transport_options = {"socket_timeout": None}

    @app.task(name="shop.plain", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def plain() -> None: ...

    back = threading.Event()

    def call() -> None:
        with contextlib.suppress(Exception):  # whatever Celery raises when the silent one is gone at last
            plain.delay()
        back.set()

    handlers = Handlers()

    @handlers.task(name="durable", effects="idempotent")
    def durable(number: int) -> None: ...

    installation = Installation.local(tmp_path)
    database = Database(installation.database, SystemClock())
    create_schema(database)
    database.close()
    millstream = Millstream(app, installation, celery_app="shop:app", handlers="shop:handlers")
    threading.Thread(target=call, daemon=True).start()
    with millstream.tasks(handlers):
        took = []
        for number in range(20):
            began = time.monotonic()
            assert durable.delay(number).task_state is TaskState.READY
            took.append(time.monotonic() - began)
    assert not back.is_set()
    assert sorted(took)[10] < 0.5
