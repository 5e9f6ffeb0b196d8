"""Markers in a user's own database: what tells, beside the effect, which attempt of a task has had it.

A row for each task that works there: ``fence`` of the newest attempt, ``result`` and ``continuations`` of the one that committed. An attempt raises it to its own fence before
its code runs; its transaction ends with a write that holds only while the fence is still its own.
What must never happen here: an effect committed under a fence that was passed; a result that is written over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import msgspec
import sqlalchemy as sa

from ..durable.records import NewTask
from ..errors import CommitUnknown, ConfigurationError, Fenced, StoreError, StoreUnavailable
from ..ports import SystemClock
from .columns import big, ident, long_text
from .database import Database, Transaction
from .handler_transactions import HeldDatabase

T = TypeVar("T")
REPEATS = 5
"""How often a write whose answer was lost is executed again."""


class Marker(msgspec.Struct, frozen=True):
    """What the marker of a task says. ``result``: encoded; None: no attempt has committed."""

    fence: int
    result: str | None = None
    submits: tuple[NewTask, ...] = ()


@cache
def table(prefix: str) -> sa.Table:
    """The marker table of an installation, in whatever database."""
    return sa.Table(
        f"{prefix}marker", sa.MetaData(), sa.Column("task", ident(64), primary_key=True), big("fence"), sa.Column("result", long_text()),
        sa.Column("continuations", long_text()), big("changed_us"),
    )  # fmt: skip


def create(url: str, prefix: str) -> None:
    """Make the marker table in a user's database, unless it is there. Raises StoreUnavailable, StoreError, ConfigurationError."""
    database = HeldDatabase(url, SystemClock(), prefix=prefix)
    try:
        database.run(lambda tx: tx.create_table(table(prefix)))
    finally:
        database.close()


def in_short(database: Database, work: Callable[[Transaction], T]) -> T:
    """A short transaction of ours in a user's database, with short limits; again when its answer is lost: each is guarded."""

    def tight(tx: Transaction) -> T:
        database.tighten(tx)
        return work(tx)

    for _ in range(REPEATS):
        try:
            return database.run(tight)
        except CommitUnknown:
            continue
        except (StoreUnavailable, ConfigurationError):
            raise
        except StoreError as exc:
            if "marker" in str(exc):
                raise StoreError(f"{exc}: is the marker table there? Run `millstream markers init`") from exc
            raise
    raise StoreUnavailable(f"the answer to COMMIT was lost {REPEATS} times")


def raise_fence(tx: Transaction, task: str, fence: int) -> Marker:
    """Have the marker say that no attempt before ``fence`` commits any more; what it says then. Raises Fenced when a later one was here."""
    t, now = table(tx.t.prefix), tx.now_us()
    if not tx.insert_or_nothing(t, task=task, fence=fence, result=None, continuations=None, changed_us=now):
        tx.update(t, t.c.task == task, t.c.fence < fence, t.c.result.is_(None), fence=fence, changed_us=now)
    found = read(tx, task)
    if found.result is None and found.fence != fence:
        raise Fenced(f"task {task}: a later attempt (fence {found.fence}) works in this database; nothing was done")
    return found


def seal(tx: Transaction, task: str, fence: int, result: str, submits: Sequence[NewTask]) -> bool:
    """Write the result beside the effect, as the last statement of the handler's transaction; False: the fence is not its own any more, and it must not commit."""
    t = table(tx.t.prefix)
    values = {"result": result, "continuations": msgspec.json.encode(submits).decode(), "changed_us": tx.now_us()}
    return tx.update(t, t.c.task == task, t.c.fence == fence, t.c.result.is_(None), **values) == 1


def read(tx: Transaction, task: str) -> Marker:
    """What the marker says, its row locked: a transaction that is about to seal it is waited for."""
    t = table(tx.t.prefix)
    row = tx.row(sa.select(t).where(t.c.task == task).with_for_update())
    if row is None:
        return Marker(-1)
    submits = msgspec.json.decode(row["continuations"], type=tuple[NewTask, ...]) if row["continuations"] else ()
    return Marker(int(row["fence"]), row["result"], submits)
