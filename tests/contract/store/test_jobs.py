"""Jobs, their history and their identity: names compare byte by byte, writes are guarded, long texts fit."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from tests.contract.store.stores import Opened, insert_job, job_values, read_job, together
from tests.unit.coordinator.rows import model

from millstream_coordinator.operations import Operations, Submission
from millstream_schema.connectors import Split
from millstream_schema.errors import JobConflict, StoreError
from millstream_schema.pipeline import Pipeline
from millstream_schema.states import Desired, JobState
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Database
from millstream_schema.values import TypeRegistry

PAIRS = [
    ("Job", "job"),
    ("cafe", "café"),
    ("name", "name "),
    (" name", "name"),
    ("caf\u00e9", "cafe\u0301"),
    ("straße", "strasse"),
    ("\u212b", "\u00c5"),
    ("a\u200b", "a"),
    ("ﬁ", "fi"),
    ("😀", "😁"),
]
"""Pairs that a forgiving collation holds for equal."""


def test_a_job_is_inserted_once(db: Database) -> None:
    """A repeat changes nothing and says so."""
    assert db.run(lambda tx: jobs.insert_job(tx, **job_values("a")))
    assert not db.run(lambda tx: jobs.insert_job(tx, **job_values("a", reason="other")))
    assert read_job(db, "a").reason == ""


def test_only_one_live_job_has_a_name(db: Database) -> None:
    """The database refuses the second one itself; an ended job leaves the name free."""
    insert_job(db, "a", live_name="ns/x")
    assert not db.run(lambda tx: jobs.insert_job(tx, **job_values("b", live_name="ns/x")))
    insert_job(db, "c", JobState.STOPPED, live_name=None)
    insert_job(db, "d", JobState.FAILED, live_name=None)
    assert db.read(lambda tx: jobs.live_job(tx, "ns/x")) == "a"
    assert db.read(jobs.live_job_ids) == ["a"]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda s: s.encode("unicode_escape").decode())
def test_ids_compare_byte_by_byte(db: Database, one: str, other: str) -> None:
    """Case, accents, trailing blanks and Unicode forms make different jobs, names, splits and subtasks."""
    insert_job(db, one, live_name=f"ns/{one}")
    assert db.read(lambda tx: jobs.read_job(tx, other)) is None
    insert_job(db, other, live_name=f"ns/{other}")
    for name in (one, other):
        found = db.read(lambda tx, n=name: (jobs.live_job(tx, f"ns/{n}"), jobs.find_job(tx, "default", n)))  # type: ignore[misc]
        assert found[0] == name and found[1] is not None and found[1].id == name
    assert db.run(lambda tx: epochs.discover(tx, one, 3, "in", [Split(one), Split(other)], True))
    assert {s.split for s in db.read(lambda tx: epochs.splits(tx, one))} == {one, other}
    assert db.read(lambda tx: epochs.splits(tx, other)) == []
    db.run(lambda tx: epochs.own_splits(tx, one, {("in", one): 1}))
    assert {s.split: s.owner for s in db.read(lambda tx: epochs.splits(tx, one))} == {one: 1, other: -1}
    db.run(lambda tx: registry.assign(tx, one, 3, {one: "n", other: "N"}, 0))
    assert [a.subtask for a in db.read(lambda tx: registry.current_assignments(tx, "n"))] == [one]


def test_ids_are_ordered_by_bytes(db: Database) -> None:
    """Every database lists in the same order, so that what is decided from a list is the same."""
    names = ["a", "B", "b", "A", "ä", "Z", "z", "a-b", "a_b", "a b"]
    for name in names:
        insert_job(db, name)
    assert db.read(jobs.live_job_ids) == sorted(names, key=str.encode)


@pytest.mark.parametrize("column", ["name", "id", "factory"])
def test_what_is_too_long_is_never_cut_off(store: Opened, column: str) -> None:
    """Two long ids that differ at the end are two, or both are refused: never one."""
    ids = ["x" * 300 + c for c in "ab"]
    for value in ids:
        values = {**job_values(value if column == "id" else value[-1]), "live_name": value[-1], column: value}
        try:
            store.db.run(lambda tx, v=values: jobs.insert_job(tx, **v))  # type: ignore[misc]
        except StoreError:
            continue
    found = [getattr(r, column) for r in store.db.read(lambda tx: jobs.list_jobs(tx, "default"))]
    assert sorted(found) == (ids if store.kind == "sqlite" else [])


def test_a_split_id_that_is_too_long_is_never_cut_off(store: Opened) -> None:
    """A cut-off id would be another split's, which would then never be read."""
    insert_job(store.db)
    ids = ["/data/" + "d" * 300 + c for c in "ab"]
    try:
        store.db.run(lambda tx: epochs.discover(tx, "job-1", 3, "in", [Split(i) for i in ids], True))
    except StoreError:
        assert store.kind != "sqlite"
        ids = []
    assert [s.split for s in store.db.read(lambda tx: epochs.splits(tx, "job-1"))] == ids


def test_a_state_the_table_does_not_know_is_refused_by_the_database(db: Database) -> None:
    """The invariant is in the database, too: states, and no commit above the durable epoch."""
    with pytest.raises(StoreError):
        db.run(lambda tx: jobs.insert_job(tx, **{**job_values("a"), "state": "FLYING"}))
    with pytest.raises(StoreError):
        db.run(lambda tx: jobs.insert_job(tx, **job_values("a", newest_durable=1, newest_committed=2)))
    row = insert_job(db, "a", newest_durable=1)
    with pytest.raises(StoreError):
        db.run(lambda tx: jobs.update_job(tx, row, newest_committed=2))
    assert read_job(db, "a") == row


def test_c12_d21_an_update_from_a_row_that_has_changed_is_refused(db: Database) -> None:
    """Guarded by revision and generation: whoever read earlier writes nothing."""
    row = insert_job(db, "a")
    assert db.run(lambda tx: jobs.update_job(tx, row, reason="one"))
    assert not db.run(lambda tx: jobs.update_job(tx, row, reason="two"))
    now = read_job(db, "a")
    assert (now.reason, now.rev) == ("one", row.rev + 1)
    assert not db.run(lambda tx: jobs.update_job(tx, msgspec.structs.replace(now, generation=now.generation - 1), reason="two"))
    assert now.changed_us >= row.changed_us


def test_an_epoch_is_wanted_by_the_running_generation_only(db: Database) -> None:
    """A stale subtask's wish and one of a job that does not run change nothing."""
    insert_job(db, "a", generation=3)
    assert not db.run(lambda tx: jobs.want_epoch(tx, "a", 2))
    assert db.run(lambda tx: jobs.want_epoch(tx, "a", 3))
    assert read_job(db, "a").wants_epoch == 1
    insert_job(db, "b", JobState.DEPLOYING, generation=3)
    assert not db.run(lambda tx: jobs.want_epoch(tx, "b", 3))


def test_find_gives_the_newest_of_a_name_and_namespaces_do_not_meet(db: Database) -> None:
    """An older job of the same name is found by its id."""
    insert_job(db, "old", JobState.FINISHED, name="x")
    insert_job(db, "new", name="x")
    insert_job(db, "else", name="x", namespace="other")
    found = db.read(lambda tx: (jobs.find_job(tx, "default", "x"), jobs.find_job(tx, "other", "x"), jobs.find_job(tx, "none", "x")))
    assert [r.id if r else None for r in found] == ["new", "else", None]
    assert [r.id for r in db.read(lambda tx: jobs.list_jobs(tx, "default"))] == ["old", "new"]


def test_history_is_kept_in_order_and_bounded(db: Database) -> None:
    """The last entries stay, newest first; another job's are not touched; a long detail is shortened, not refused."""
    insert_job(db, "a")
    insert_job(db, "b")
    db.run(lambda tx: jobs.add_history(tx, "b", "e", "kept"))

    def many(tx: Any) -> None:
        for i in range(jobs.HISTORY_KEPT + 5):
            jobs.add_history(tx, "a", "e", str(i))

    db.run(many)
    rows = db.read(lambda tx: jobs.history(tx, "a", 1000))
    assert [r["detail"] for r in rows] == [str(i) for i in reversed(range(5, jobs.HISTORY_KEPT + 5))]
    db.run(lambda tx: jobs.add_history(tx, "a", "e", "x" * 1_000_000))
    assert len(db.read(lambda tx: jobs.history(tx, "a", 1))[0]["detail"]) == 20_000
    assert [r["detail"] for r in db.read(lambda tx: jobs.history(tx, "b"))] == ["kept"]


def test_any_text_survives(db: Database) -> None:
    """Four-byte characters, quotes, backslashes, percent signs and line ends come back as they went."""
    nasty = "😀 \\ ' \" % %s {} \r\n\t \u2028 é ﬁ \x7f"
    insert_job(db, "a", reason=nasty, config=nasty)
    assert (read_job(db, "a").reason, read_job(db, "a").config) == (nasty, nasty)


# -- operations that race


def pipeline() -> Pipeline:
    return Pipeline(model(), {}, {}, {}, TypeRegistry())


def submission(job: str, name: str = "x") -> Submission:
    return Submission(job=job, name=name, factory="f")


def _look_together(store: Opened, monkeypatch: pytest.MonkeyPatch, parties: int) -> None:
    """Nobody writes before all have looked; SQLite lets only one look at a time anyway."""
    if store.kind == "sqlite":
        return
    both, look = threading.Barrier(parties), jobs.live_job
    first = threading.local()

    def looked(tx: Any, name: str) -> str | None:
        found = look(tx, name)
        if not getattr(first, "over", False):
            first.over = True
            both.wait(10)
        return found

    monkeypatch.setattr(jobs, "live_job", looked)


def test_t97_two_submits_of_one_name_give_one_job_and_one_conflict(store: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when both looked before either wrote."""
    _look_together(store, monkeypatch, 2)
    two = [Operations(store.db), Operations(store.open())]
    found = together(*[lambda o=o, i=i: o.submit(submission(f"j-{i}"), pipeline()) for i, o in enumerate(two)])
    assert sorted(type(f).__name__ for f in found) == ["JobConflict", "JobRow"], found
    assert len(store.db.read(lambda tx: jobs.list_jobs(tx, "default"))) == 1


def test_a_submit_repeated_with_its_id_is_one_job(store: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same moment and later: RF7, a second copy is never made."""
    _look_together(store, monkeypatch, 2)
    operations = [Operations(store.db), Operations(store.open())]
    found: list[Any] = together(*[lambda o=o: o.submit(submission("j"), pipeline()) for o in operations])
    assert [f.id for f in found] == ["j", "j"], found
    assert operations[0].submit(submission("j"), pipeline()).rev == found[0].rev
    assert len(store.db.read(lambda tx: jobs.history(tx, "j"))) == 1


def test_cancel_overtakes_what_else_was_asked_and_nothing_overtakes_cancel(store: Opened) -> None:
    """RF6: what is wanted has a column of its own; two at one moment end as one of the two orders."""
    operations = Operations(store.db)
    operations.submit(submission("j"), pipeline())
    together(lambda: operations.stop("j", Desired.DRAIN), lambda: Operations(store.open()).stop("j", Desired.CANCEL))
    assert read_job(store.db, "j").desired is Desired.CANCEL
    with pytest.raises(JobConflict):
        operations.stop("j", Desired.SUSPEND, "sp")
    assert operations.stop("j", Desired.CANCEL).desired is Desired.CANCEL
