"""What is told of a database that is there and cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from millstream import Handlers, Installation, OutboxRelay, Pipelines, TaskWorker
from millstream.embedded import EmbeddedCluster
from millstream.node_process import NodeProcess
from millstream.opened import reachable
from millstream.outbox import OutboxDesk
from millstream.task_process import TaskProcess
from millstream.tasks import Tasks
from millstream_schema.errors import MillstreamError, SchemaMismatch, StoreError, StoreUnavailable
from millstream_schema.store.database import Database

URL = sa.make_url("postgresql+psycopg://ann:secret@db/shop")
ADVICE = "its owner can GRANT"


@pytest.mark.parametrize(
    "said", ["InsufficientPrivilege: permission denied for table x", "OperationalError: (1142, \"SELECT command denied to user 'ann'\")"]
)
def test_a_missing_permission_says_what_the_owner_has_to_grant(said: str) -> None:
    """The first thing that happens on a server whose schema belongs to somebody else."""
    with pytest.raises(StoreError, match=ADVICE) as told, reachable(URL):
        raise StoreError(said)
    assert not isinstance(told.value, StoreUnavailable) and "secret" not in str(told.value)
    with pytest.raises(StoreError, match=ADVICE), reachable(URL):
        raise sa.exc.ProgrammingError("CREATE TABLE x", {}, Exception(said))


def _task_worker(i: Installation, handlers: Handlers) -> None:
    TaskWorker(i, handlers).__enter__()


def _task_process(i: Installation, handlers: Handlers) -> None:
    TaskProcess(i, handlers.registry, handlers="", celery="", name="n", processes=1, queues=())


OPENS: dict[str, Callable[[Installation, Handlers], Any]] = {
    "client": Tasks,
    "task worker": _task_worker,
    "task process": _task_process,
    "node process": lambda i, _: NodeProcess(i, "", name="n", slots=1, spares=0),
    "embedded": lambda i, _: EmbeddedCluster(Pipelines(), database=i.database).__enter__(),
    "relay": lambda i, _: OutboxRelay(i, i.database),
    "desk": lambda i, _: OutboxDesk(i.database),
}


@pytest.mark.parametrize("what", list(OPENS))
def test_what_cannot_be_opened_leaves_no_database_open(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no schema is there, nor can one be made. Who tries again and again would otherwise keep a connection for each try."""
    installation, handlers = Installation.local(tmp_path), Handlers()
    handlers.task(name="work", effects="idempotent")(lambda: None)
    opened: list[Database] = []
    closed: list[Database] = []
    made, close = Database.__init__, Database.close

    def opening(self: Database, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        opened.append(self)

    def closing(self: Database) -> None:
        closed.append(self)
        close(self)

    def refuse(_database: Database) -> None:
        raise SchemaMismatch("refused")

    monkeypatch.setattr(Database, "__init__", opening)
    monkeypatch.setattr(Database, "close", closing)
    for module in ("task_worker", "embedded"):
        monkeypatch.setattr(f"millstream.{module}.create_schema", refuse)
    with pytest.raises((MillstreamError, sa.exc.DBAPIError)):
        OPENS[what](installation, handlers)
    assert opened and {id(d) for d in opened} == {id(d) for d in closed}
