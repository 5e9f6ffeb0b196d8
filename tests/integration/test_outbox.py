"""An outbox as users have it: their own database, a relay beside a worker, the command line."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from structlog.testing import capture_logs
from tests.support.command_line import plain_environment
from typer.testing import CliRunner

from millstream import Handlers, Installation, Outbox, OutboxRelay, TaskConflict, TaskInvalid, TaskWorker, UnknownHandler
from millstream.cli import main
from millstream_schema.durable.outbox import EntryState
from millstream_schema.errors import ConfigurationError, SchemaMismatch
from millstream_schema.ports import SystemClock

SECONDS = 20
handlers = Handlers()


@handlers.task(name="confirm", effects="idempotent")
def confirm(order: int) -> int:
    return order * 2


class Shop:
    """A user's database beside an installation whose tasks a worker runs."""

    def __init__(self, directory: Path, worker: TaskWorker, installation: Installation) -> None:
        self.directory = directory
        self.worker = worker
        self.installation = installation
        self.path = directory / "shop.db"
        self.url = f"sqlite:///{self.path}"
        Outbox.create(self.url)
        Outbox.create(self.url)
        self.outbox = Outbox(handlers, target=worker.tasks.installation_id, actor="shop")

    def relay(self) -> OutboxRelay:
        return OutboxRelay(self.installation, self.url, tasks=self.worker.tasks)

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Exit code and what ``millstream outbox …`` says, on one line."""
        given = [*arguments, "--local", str(self.directory)]
        result = CliRunner().invoke(main, ["outbox", *given, *([] if "--outbox-url" in given else ["--outbox-url", self.url])])
        assert "Traceback" not in result.stderr
        return result.exit_code, " ".join((result.stdout + result.stderr).split())

    def data(self, *arguments: str) -> Any:
        code, out = self(*arguments, "--json")
        assert code == 0, out
        return json.loads(out)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    plain_environment(monkeypatch)
    installation = Installation.local(tmp_path)
    with TaskWorker(installation, handlers) as worker:
        yield Shop(tmp_path, worker, installation)


def test_a_request_of_another_database_is_run_once_it_is_committed(shop: Shop) -> None:
    """By a relay on a thread that is woken after the commit; by SQLAlchemy and by the driver."""
    engine = sa.create_engine(shop.url)
    with shop.relay() as relay:
        outbox = Outbox(handlers, target=relay.target, wake=relay.wake)
        with Session(engine) as session:
            undone = outbox.submit(session, confirm, 1, key="undone")
            session.rollback()
            receipt = outbox.submit(session, "confirm", 4, key="order-4")
            assert (receipt.state, receipt.task, receipt.replayed) == (EntryState.WAITING, "", False)
            session.commit()
        raw = sqlite3.connect(shop.path)
        other = outbox.submit(raw, confirm, 5, key="order-5", delay=0.01)
        raw.commit()
        raw.close()
        assert shop.worker.tasks.wait(wait_for(shop, receipt.entry), SECONDS) == 8
        assert shop.worker.tasks.wait(wait_for(shop, other.entry), SECONDS) == 10
    with Session(engine) as session:
        again = outbox.submit(session, confirm, 4, key="order-4")
        assert (again.entry, again.replayed, again.state, again.task) == (receipt.entry, True, EntryState.SENT, receipt.entry)
    assert {r.key for r in shop.worker.tasks.list()} == {"order-4", "order-5"}
    assert shop(*("show", undone.entry))[0] == 3
    engine.dispose()


def wait_for(shop: Shop, task: str) -> str:
    """The task once a relay has brought it in: it has the entry's id."""
    clock, event = SystemClock(), threading.Event()
    began = clock.monotonic()
    while task not in {r.id for r in shop.worker.tasks.list()}:
        assert clock.monotonic() - began < SECONDS
        event.wait(0.02)
    return task


def test_a_relay_goes_on_after_whatever_a_turn_raises(shop: Shop) -> None:
    """Its thread has no successor: an error that is none of ours is logged with its cause, and the next turn sends."""
    with shop.relay() as relay, capture_logs() as logs:
        step, raised = relay._core.step, threading.Event()

        def fails() -> int:
            if raised.is_set():
                return step()
            raised.set()
            raise OverflowError("a driver's own")

        relay._core.step = fails  # type: ignore[method-assign]
        relay.wake()
        assert raised.wait(SECONDS)
        raw = sqlite3.connect(shop.path)
        receipt = shop.outbox.submit(raw, confirm, 4, key="order-5")
        raw.commit()
        raw.close()
        relay.wake()
        assert shop.worker.tasks.wait(wait_for(shop, receipt.entry), SECONDS) == 8
    assert [entry["event"] for entry in logs if entry.get("exc_info")] == ["a turn of the outbox's relay failed; it goes on"]


def test_what_is_wrong_is_refused_at_once_and_nothing_is_kept(shop: Shop) -> None:
    """Arguments, handler, key, a table that is missing, a target that is missing."""
    engine = sa.create_engine(shop.url)
    with Session(engine) as session:
        with pytest.raises(TaskInvalid):
            shop.outbox.submit(session, confirm, "four")
        with pytest.raises(UnknownHandler):
            shop.outbox.submit(session, "confrim", 4)
        shop.outbox.submit(session, confirm, 4, key="k")
        with pytest.raises(TaskConflict, match="in the outbox with other content"):
            shop.outbox.submit(session, confirm, 5, key="k")
        session.commit()
    with pytest.raises(ConfigurationError, match="target is missing"):
        Outbox(handlers, target="")
    with pytest.raises(ConfigurationError, match="outbox init"):
        OutboxRelay(shop.installation, shop.installation.database, prefix="nowhere")
    with pytest.raises(SchemaMismatch, match=r"no database file .* run `millstream outbox init` first"):
        OutboxRelay(shop.installation, "sqlite:///not-there.db")
    engine.dispose()


def test_the_commands(shop: Shop) -> None:
    """init, status, relay, show, retry: as a person uses them."""
    code, said = shop("init")
    assert code == 0 and shop.worker.tasks.installation_id in said
    assert shop.data("init") == {"table": "millstream_outbox", "target": shop.worker.tasks.installation_id}
    assert shop("status")[1] == "the outbox is empty"
    shop.worker.tasks.submit(confirm, 1, key="taken")
    engine = sa.create_engine(shop.url)
    with Session(engine) as session:
        good = shop.outbox.submit(session, confirm, 2, key="good")
        bad = shop.outbox.submit(session, confirm, 3, key="taken")
        session.commit()
    assert [c["entries"] for c in shop.data("status")["counts"]] == [2]
    assert shop("relay")[0] == 2 and shop("relay", "--once", "--forever")[0] == 2
    assert shop("relay", "--once")[1].startswith("1 accepted")
    assert shop("relay", "--once") == (0, "0 accepted")
    found = shop.data("status")
    assert {(c["state"], c["cause"], c["entries"]) for c in found["counts"]} == {("SENT", "", 1), ("PARKED", "conflict", 1)}
    assert [e["id"] for e in found["parked"]] == [bad.entry] and "request" not in found["parked"][0]
    assert "is parked (conflict)" in shop("status")[1]
    assert shop.data("show", good.entry)["task"] == good.entry and "PARKED" in shop("show", bad.entry)[1]
    code, said = shop("retry", bad.entry, "--reason", "please")
    assert code == 4 and "would be refused again" in said
    with engine.begin() as c:
        c.execute(sa.text("UPDATE millstream_outbox SET cause = 'sends' WHERE key = 'taken'"))
        c.execute(sa.text("UPDATE millstream_outbox SET digest = 'x' WHERE key = 'taken'"))
    assert shop("retry", bad.entry, "--reason", " ")[0] == 2
    assert shop("retry", bad.entry, "--reason", "the network is back") == (0, f"{bad.entry} is sent again")
    assert shop("relay", "--once")[1].startswith("0 accepted")
    assert shop.data("show", bad.entry)["cause"] == "invalid", "somebody changed it"
    assert shop("show", "nobody")[0] == 3 and shop("retry", "nobody", "--reason", "x")[0] == 3
    assert shop("status", "--outbox-url", shop.installation.database)[0] == 2
    engine.dispose()
