"""What running attempts say, as it is kept: beside heartbeats and ends, only for the newest attempt, until its task is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import ending, read, settle, take, taken
from tests.contract.store.task_rows import new as request

from millstream import Handlers, Installation, Tasks
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.progress import Note, Told, progress_of
from millstream_schema.durable.records import TaskRow
from millstream_schema.store import progress, retention

INSTALLATION = Installation(database="sqlite:///unused", transport="unix://", checkpoints="file:///tmp")


def said(number: int, done: float, *notes: str, first: int = 1) -> Told:
    kept = tuple(Note(first + i, text, '{"n":1}') for i, text in enumerate(notes))
    return Told(progress_of(number, done, 10, "é\U0001f600"), kept)


@pytest.fixture
def client(store: Opened) -> Iterator[Tasks]:
    with Tasks(INSTALLATION, Handlers(), database=store.db) as found:
        yield found


def write(store: Opened, row: TaskRow, told: Told) -> int:
    return store.db.run(lambda tx: progress.write(tx, {(row.id, row.fence): told}))


def test_the_last_progress_of_each_attempt_and_all_its_notes_are_kept(store: Opened, client: Tasks) -> None:
    """Repeats and what comes late change nothing; no row of a task is touched; it is told by ``why``, running and in review; it goes with its task."""
    (row,) = taken(store.db, request("k"))
    before = read(store.db, row.id)
    for told in (said(2, 4, "a", "b"), said(2, 4, "a", "b"), said(1, 3, "a")):
        assert write(store, row, told) == 1
    assert read(store.db, row.id) == before
    (kept,) = client.progress(row.id)
    assert (kept.fence, kept.number, kept.done, kept.total, kept.message, kept.at_us > 0) == (row.fence, 2, 4.0, 10.0, "é\U0001f600", True)
    assert [(n.number, n.text, n.fields) for n in client.notes(row.id)] == [(1, "a", '{"n":1}'), (2, "b", '{"n":1}')]
    assert "; 4 of 10 done (é\U0001f600), told " in client.why(row.id)
    settle(store.db, ending(row, o.AskedForReview("was it?")))
    assert client.why(row.id).partition("was it?")[2].startswith("; 4 of 10 done")
    write(store, row, said(3, 5))
    assert client.progress(row.id)[0].done == 5, "its last words may come after its end"
    client.review_done(client.get(row.id), reason="it was")
    assert store.db.run(lambda tx: retention.purge(tx, "default", [row.id])) == 1
    assert store.db.read(lambda tx: [tx.rows(tx.t.progress.select()), tx.rows(tx.t.note.select())]) == [[], []]


def test_an_attempt_that_lost_its_task_says_nothing_any_more(store: Opened, client: Tasks) -> None:
    """What it said before stays its own, beside its successor's; of a task that is gone nothing is kept."""
    (old,) = taken(store.db, request("k"))
    write(store, old, said(1, 1, "old"))
    settle(store.db, ending(old, o.Unstarted()))
    (fresh,) = take(store.db)
    write(store, fresh, said(1, 7, "fresh"))
    gone = store.db.run(lambda tx: progress.write(tx, {(old.id, old.fence): said(9, 9, "late", first=2), ("nobody", 1): said(1, 1, "x")}))
    assert gone == 0
    assert [(p.fence, p.done) for p in client.progress(old.id)] == [(old.fence, 1), (fresh.fence, 7)]
    assert [n.text for n in client.notes(old.id)] == ["old", "fresh"]
