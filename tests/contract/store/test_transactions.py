"""Transactions: the clock inside them, locks that are waited for, holders that stand still, and COMMITs whose answer is lost."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import sqlalchemy as sa
from tests.contract.store.stores import PLAN, Opened, insert_job, read_job, snapshot, table_rows, together

from millstream_coordinator.reconciler import Reconciler
from millstream_schema.connectors import Split
from millstream_schema.errors import CommitUnknown, ConfigurationError, StoreError, StoreUnavailable
from millstream_schema.hints import JobHint, NodeHint, NoHints
from millstream_schema.ports import SystemChance, SystemClock
from millstream_schema.settings import StreamSettings
from millstream_schema.states import AssignmentState, JobState
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.migrate import create_schema
from millstream_schema.store.single_rows import lock_single

T = TypeVar("T")
LEASE = 60_000_000


class Postgres(Exception):
    """As psycopg's: a lock that was not granted in time."""

    sqlstate = "55P03"


_LOCKED: dict[str, Exception] = {
    "sqlite": sqlite3.OperationalError("database is locked"),
    "postgres": Postgres("canceling statement due to lock timeout"),
    "mariadb": Exception(1205, "Lock wait timeout exceeded"),
}


# -- the clock


def test_the_clock_is_the_time_now_also_late_in_a_transaction(store: Opened) -> None:
    """Not that of its first statement: a lease is judged after the wait for its row."""
    pause = threading.Event()
    with store.db.transaction() as tx:
        first = tx.now_us()
        before = time.monotonic()
        pause.wait(0.02)
        waited = time.monotonic() - before
        second = tx.now_us()
    assert second - first >= waited * 1e6 * 0.9
    assert abs(second / 1e6 - time.time()) < 60, "the clock is not in UTC"


def test_a_lease_that_expires_while_its_row_is_waited_for_is_expired(store: Opened) -> None:
    """The row is locked first, then the clock is read."""
    store.db.run(lambda tx: registry.take_lease(tx, "a", 150_000))
    locked, other = threading.Event(), store.open()

    def hold() -> None:
        with other.transaction() as tx:
            lock_single(tx, registry.COORDINATOR)
            locked.set()
            threading.Event().wait(0.2)

    def take() -> Any:
        locked.wait(10)
        return store.db.run(lambda tx: registry.take_lease(tx, "b", LEASE))[:2]

    assert together(hold, take)[1] == (2, True)


# -- waiting and retrying


def test_a_deadlock_is_executed_again(store: Opened) -> None:
    """Two transactions lock two rows in opposite orders: both are carried out, one of them twice."""
    for name in ("a", "b"):
        insert_job(store.db, name)
    both = threading.Barrier(2)
    tries: Counter[str] = Counter()

    def lock(db: Database, first: str, second: str) -> None:
        def work(tx: Transaction) -> None:
            tries[first] += 1
            row = jobs.lock_job(tx, first)
            if tries[first] == 1 and store.kind != "sqlite":
                both.wait(10)
            other = jobs.lock_job(tx, second)
            assert row is not None and other is not None
            jobs.update_job(tx, row, restarts=row.restarts + 1)
            jobs.update_job(tx, other, restarts=other.restarts + 1)

        db.run(work)

    assert together(lambda: lock(store.db, "a", "b"), lambda: lock(store.open(), "b", "a")) == [None, None]
    assert [read_job(store.db, n).restarts for n in ("a", "b")] == [2, 2]
    assert sum(tries.values()) == (2 if store.kind == "sqlite" else 3)


def test_a_lock_that_is_held_for_longer_than_the_timeout_is_waited_for_again(store: Opened) -> None:
    """The wait is bounded and repeated; what was refused left nothing behind."""
    insert_job(store.db)
    held, tried = threading.Event(), threading.Event()
    waiting = store.open(timeout_ms=100 if store.kind != "mariadb" else 1000)

    def hold() -> None:
        with store.db.transaction() as tx:
            jobs.lock_job(tx, "job-1")
            held.set()
            tried.wait(20)

    def work(tx: Transaction) -> None:
        attempts.append(1)
        if len(attempts) > 1:
            tried.set()
        row = jobs.lock_job(tx, "job-1")
        assert row is not None
        jobs.update_job(tx, row, restarts=row.restarts + 1)

    attempts: list[int] = []

    def knock() -> None:
        held.wait(10)
        if store.kind == "sqlite":  # there the wait is for BEGIN, before any work
            threading.Timer(0.4, tried.set).start()
        waiting.run(work)

    assert together(hold, knock) == [None, None]
    assert read_job(store.db).restarts == 1


def test_a_database_that_keeps_refusing_is_unavailable_not_silent(store: Opened) -> None:
    """After some attempts the caller hears of it; nothing was done."""
    insert_job(store.db)
    calls = []

    def work(tx: Transaction) -> None:
        calls.append(1)
        row = jobs.lock_job(tx, "job-1")
        assert row is not None
        jobs.update_job(tx, row, restarts=99)
        if store.kind == "mariadb":
            tx.execute(sa.text("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO=1213"))
        elif store.kind == "postgres":
            tx.execute(sa.text("DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$"))
        else:
            raise sa.exc.OperationalError("UPDATE", {}, sqlite3.OperationalError("database is locked"))

    with pytest.raises(StoreUnavailable, match="kept refusing"):
        store.db.run(work)
    assert len(calls) > 3
    assert read_job(store.db).restarts == 0


def test_a_read_that_meets_a_lock_is_repeated_and_no_internal_signal_escapes(store: Opened) -> None:
    """What is only a lock in the way is no error of the caller's, and what stays one has a type he can catch."""
    tries = 0

    def locked_once(tx: Transaction) -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise sa.exc.OperationalError("SELECT 1", {}, _LOCKED[store.kind])
        return tries

    assert store.db.read(locked_once) == 2

    def locked(_tx: Transaction) -> None:
        raise sa.exc.OperationalError("SELECT 1", {}, _LOCKED[store.kind])

    with pytest.raises(StoreUnavailable, match="kept refusing"):
        store.db.read(locked)


@pytest.mark.parametrize("wrong", ["SELECT no_such_column FROM {t}", "SELECT 1 FROM no_such_table", "SELEC 1"])
def test_a_defect_of_ours_is_not_taken_for_a_database_that_is_away(store: Opened, wrong: str) -> None:
    """Else it would be tried again for ever, under a wrong name."""
    with pytest.raises(StoreError) as caught:
        store.db.read(lambda tx: tx.execute(sa.text(wrong.format(t=tx.t.job.name))))
    assert not isinstance(caught.value, StoreUnavailable)


def test_a_broken_check_is_not_taken_for_a_database_that_is_away(store: Opened) -> None:
    """MariaDB reports it as an operational error."""
    with pytest.raises(StoreError) as caught:
        store.db.run(lambda tx: registry.register_node(tx, "n", "n", -1, LEASE, "{}"))
    assert not isinstance(caught.value, StoreUnavailable)


_TAKES_NO_WRITES = {
    "sqlite": "PRAGMA query_only = 1",
    "postgres": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "mariadb": "SET SESSION TRANSACTION READ ONLY",
}


def test_a_database_that_takes_no_writes_for_now_is_unavailable(store: Opened) -> None:
    """As a standby after a failover is, or a server closed to writes: nothing is wrong with what is written, and waiting mends it."""
    other = store.open()
    other.run(lambda tx: tx.execute(sa.text(_TAKES_NO_WRITES[store.kind])))
    with pytest.raises(StoreUnavailable):
        other.run(lambda tx: registry.take_lease(tx, "a", LEASE))
    other.engine.dispose()
    assert other.run(lambda tx: registry.take_lease(tx, "a", LEASE)) is not None


def test_a_client_whose_connections_are_all_in_use_is_told_in_words_of_ours(store: Opened) -> None:
    """No error of the library below comes through, and the next one that is free serves."""
    other = store.open()
    pool: Any = other.engine.pool
    pool._timeout = 0.01
    with ExitStack() as busy:
        for _ in range(pool.size() + pool._max_overflow):
            busy.enter_context(other.engine.connect())
        with pytest.raises(StoreUnavailable, match="there is no connection"):
            other.read(lambda tx: tx.now_us())
    assert other.read(lambda tx: tx.now_us()) > 0


def test_sqlite_files_opened_for_the_first_time_by_many_at_once_all_open(tmp_path: Path) -> None:
    """Going over to write-ahead mode does not wait for others by itself."""
    for turn in range(20):
        url = f"sqlite:///{tmp_path}/{turn}.db"
        opened = [Database(url, SystemClock(), timeout_ms=3000) for _ in range(4)]
        answers = together(*(lambda db=db: db.run(lambda tx: tx.has_table("nothing")) for db in opened))
        for db in opened:
            db.close()
        assert answers == [False] * 4


@pytest.mark.parametrize("kind", [pytest.param(k, marks=getattr(pytest.mark, k)) for k in ("postgres", "mariadb")])
def test_a_holder_that_stands_still_loses_the_row_within_the_idle_limit(kind: str, request: pytest.FixtureRequest) -> None:
    """SIGSTOP between lock and commit: the server ends the session, another goes on, and the woken holder has done nothing."""
    url = request.getfixturevalue(f"{kind}_url")
    from_settings = 300 if kind == "postgres" else 1000
    holder, other = Database(url, SystemClock(), timeout_ms=from_settings), Database(url, SystemClock(), timeout_ms=from_settings)
    create_schema(other)
    name = f"idle-{kind}"
    insert_job(other, name)
    began = time.monotonic()
    with pytest.raises(StoreError), holder.transaction() as tx:
        row = jobs.lock_job(tx, name)
        assert row is not None
        jobs.update_job(tx, row, reason="zombie")
        other.run(lambda tx: jobs.update_job(tx, jobs.lock_job(tx, name), reason="successor"))  # type: ignore[arg-type]
        assert time.monotonic() - began < 3 * from_settings / 1000 + 2
        jobs.add_history(tx, name, "zombie", "woken")
    assert read_job(other, name).reason == "successor"
    assert other.read(lambda tx: jobs.history(tx, name)) == []
    assert holder.run(lambda tx: jobs.lock_job(tx, name)) is not None
    for db in (holder, other):
        db.close()


def test_a_read_sees_no_half_of_a_write(store: Opened) -> None:
    """What is not committed is not there; an error in the middle leaves nothing."""
    insert_job(store.db)
    other = store.open()

    class Oops(Exception):
        """The work's own error: it comes out as it is."""

    def work(tx: Transaction) -> None:
        row = jobs.lock_job(tx, "job-1")
        assert row is not None
        jobs.update_job(tx, row, reason="half")
        assert other.read(lambda t: jobs.read_job(t, "job-1")).reason == ""  # type: ignore[union-attr]
        raise Oops

    with pytest.raises(Oops):
        store.db.run(work)
    assert read_job(store.db).reason == ""


def test_a_wrong_url_says_what_to_write() -> None:
    """Before anything is opened; a password is not shown."""
    for url in ("nonsense", "oracle://x/y", "postgresql+nodriver://x/y", ""):
        with pytest.raises(ConfigurationError):
            Database(url, SystemClock())


@pytest.mark.parametrize(
    "url", ["postgresql+psycopg://u:secret@127.0.0.1:1/x", "mysql+pymysql://u:secret@127.0.0.1:1/x", "sqlite:////no/such/dir/x.db"]
)
def test_t101_a_database_that_cannot_be_reached_is_unavailable_and_named_without_its_password(url: str) -> None:
    """Nothing was done; it is safe to try again."""
    db = Database(url, SystemClock())
    with pytest.raises(StoreUnavailable) as caught:
        db.run(lambda tx: tx.now_us())
    assert "secret" not in str(caught.value) and db.url.database is not None and db.url.database in str(caught.value)
    db.close()


def test_durable_commits_are_checked(store: Opened) -> None:
    """A server that may lose a commit with the power is refused; these are fine."""
    store.db.check_durability()
    if store.kind == "sqlite":
        assert store.db.read(lambda tx: tx.execute(sa.text("PRAGMA synchronous")).scalar()) == 2
    elif store.kind == "postgres":
        assert store.db.read(lambda tx: tx.execute(sa.text("SHOW synchronous_commit")).scalar()) == "on"


# -- many at once


def test_concurrent_deploys_never_exceed_the_slots(store: Opened) -> None:
    """Six jobs of four subtasks on twelve slots: three run, three wait for resources, none has half of its subtasks (C15)."""
    names = [f"j{i}" for i in range(6)]
    for name in names:
        insert_job(store.db, name, JobState.PENDING, generation=0)
    for node in ("n1", "n2"):
        store.db.run(lambda tx, n=node: registry.register_node(tx, n, n, 6, LEASE, "{}"))  # type: ignore[misc]
    workers = [Reconciler(store.db if i == 0 else store.open(), NoHints(), SystemChance()) for i in range(3)]

    def advance(worker: Reconciler, mine: list[str]) -> None:
        for name in mine:
            worker.advance(name)

    found = together(*[lambda w=w, i=i: advance(w, names[i::3] + names[i + 1 :: 3]) for i, w in enumerate(workers)])
    assert found == [None] * 3
    states = Counter(read_job(store.db, n).state for n in names)
    assert states == {JobState.DEPLOYING: 3, JobState.WAITING_FOR_RESOURCES: 3}
    assert store.db.read(registry.used_slots) == {"n1": 6, "n2": 6}
    assert sorted(Counter(a["job"] for a in table_rows(store.db, "assignment")).values()) == [4, 4, 4]
    assert {read_job(store.db, n).generation for n in names} == {0, 1}


def test_b15_many_coordinators_on_one_job_deploy_it_once(store: Opened) -> None:
    """All look at the same moment: one generation, one set of assignments."""
    insert_job(store.db, "j", JobState.PENDING, generation=0)
    store.db.run(lambda tx: registry.register_node(tx, "n1", "n1", 8, LEASE, "{}"))
    workers = [Reconciler(store.open(), NoHints(), SystemChance()) for _ in range(4)]
    answers = together(*[lambda w=w: w.advance("j") for w in workers])
    assert not [a for a in answers if isinstance(a, BaseException)], answers
    assert read_job(store.db, "j").generation == 1
    assert len(table_rows(store.db, "assignment")) == len(PLAN.subtasks())


class Said:
    """Hints, noted."""

    def __init__(self) -> None:
        self.whats: list[str] = []

    def to_node(self, hint: NodeHint) -> None:
        self.whats.append(hint.what)

    def to_coordinator(self, hint: JobHint) -> None:
        raise AssertionError(hint)


def at_work(store: Opened) -> list[str]:
    """The subtasks of job "j", each ready on node "n1"."""
    store.db.run(lambda tx: registry.register_node(tx, "n1", "n1", 8, LEASE, "{}"))
    subtasks = [s.id for s in PLAN.subtasks()]
    store.db.run(lambda tx: registry.assign(tx, "j", 1, dict.fromkeys(subtasks, "n1"), 0))
    for s in subtasks:
        store.db.run(lambda tx, s=s: registry.start_assignment(tx, "j", 1, s, "n1", f"t-{s}"))  # type: ignore[misc]
        store.db.run(lambda tx, s=s: registry.ready_assignment(tx, "j", 1, s, f"t-{s}", 0))  # type: ignore[misc]
    return subtasks


def test_t43_many_coordinators_make_an_epoch_durable_once(store: Opened) -> None:
    """All find the last acknowledgement at the same moment, again and again: one manifest an epoch, and one of them says so."""
    asked_for_alone = msgspec.json.encode(StreamSettings(epoch_interval_ms=3_600_000)).decode()
    insert_job(
        store.db,
        "j",
        JobState.RUNNING,
        generation=1,
        next_epoch=1,
        in_flight=0,
        newest_durable=0,
        newest_committed=0,
        settings=asked_for_alone,
    )
    subtasks = at_work(store)
    workers = [(Reconciler(store.open(), said, SystemChance()), said) for said in (Said(), Said(), Said())]
    for epoch in range(1, 7):
        store.db.run(lambda tx: jobs.want_epoch(tx, "j", 1))
        workers[0][0].advance("j")
        assert read_job(store.db, "j").in_flight == epoch
        for s in subtasks:
            taken = snapshot(s)
            store.db.run(lambda tx, s=s, t=taken, e=epoch: epochs.acknowledge(tx, "j", e, 1, s, f"t-{s}", t, ""))  # type: ignore[misc]
        answers = together(*[lambda w=w: w.advance("j") for w, _ in workers])
        assert not [a for a in answers if isinstance(a, BaseException)], answers
        row = read_job(store.db, "j")
        assert (row.newest_durable, row.in_flight) == (epoch, 0)
        assert sorted(m["epoch"] for m in table_rows(store.db, "manifest")) == list(range(1, epoch + 1))
        assert [what for _, said in workers for what in said.whats].count("durable") == epoch


def test_t50_a_node_that_hands_back_while_it_is_looked_at_is_no_lost_node(store: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits between the statement that reads its subtasks and the one that reads its lease: a hand-back, which costs no restart."""
    if store.kind == "sqlite":
        pytest.skip("one writer at a time: nothing comes between two statements")
    insert_job(store.db, "j", JobState.RUNNING, generation=1, next_epoch=1, in_flight=0, newest_durable=0, newest_committed=0)
    subtasks = at_work(store)
    look, leaving = registry.live_node_ids, store.open()

    def left(tx: Transaction) -> None:
        registry.drain_node(tx, "n1")
        for s in subtasks:
            registry.end_assignment(tx, "j", 1, s, f"t-{s}", AssignmentState.FAILED, "handback", "the worker shuts down")
        registry.leave_node(tx, "n1")

    def between(tx: Transaction, ids: set[str]) -> set[str]:
        leaving.run(left)
        return look(tx, ids)

    monkeypatch.setattr(registry, "live_node_ids", between)
    Reconciler(store.db, NoHints(), SystemChance()).advance("j")
    row = read_job(store.db, "j")
    assert (msgspec.json.decode(row.causes), row.failures) == ({"handback": 1}, 0)


# -- COMMITs whose answer is lost


class Lost:
    """Loses the answer to commit number ``at``, or fails before it."""

    def __init__(self, at: int, *, before: bool = False) -> None:
        self.count = 0
        self._at = at
        self._before = before
        self.struck = False

    def before_commit(self) -> None:
        self.count += 1
        if self._before and self.count == self._at:
            self.struck = True
            raise StoreUnavailable("injected")

    def after_commit(self) -> None:
        if not self._before and self.count == self._at:
            self.struck = True
            raise CommitUnknown("injected")


def again(work: Callable[[], T]) -> T:
    """What every caller does: the same guarded statement once more."""
    for _ in range(5):
        try:
            return work()
        except (CommitUnknown, StoreUnavailable):
            continue
    raise AssertionError("it never came through")


def life(db: Database) -> None:
    """A job's whole life by rows: deploy, run, one epoch, commit, final epoch, end."""
    reconciler = Reconciler(db, NoHints(), SystemChance())

    def run(statement: Callable[[Transaction], object]) -> None:
        again(lambda: db.run(statement))

    def look() -> None:
        again(lambda: reconciler.advance("j"))

    run(lambda tx: registry.register_node(tx, "n1", "n1", 8, LEASE, "{}"))
    look()
    subtasks = [s.id for s in PLAN.subtasks()]
    for s in subtasks:
        run(lambda tx, s=s: registry.start_assignment(tx, "j", 1, s, "n1", f"t-{s}"))  # type: ignore[misc]
        run(lambda tx, s=s: registry.ready_assignment(tx, "j", 1, s, f"t-{s}", 0))  # type: ignore[misc]
    run(lambda tx: epochs.discover(tx, "j", 1, "in", [Split("a"), Split("b")], True))
    look()
    assert read_job(db, "j").state is JobState.RUNNING
    run(lambda tx: jobs.want_epoch(tx, "j", 1))
    for final in (False, True):
        if final:
            for s in [x.id for x in PLAN.subtasks() if x.vertex in PLAN.sources]:
                run(lambda tx, s=s: registry.exhausted_assignment(tx, "j", 1, s, f"t-{s}"))  # type: ignore[misc]
        look()
        epoch = read_job(db, "j").in_flight
        assert epoch
        for s in subtasks:
            run(lambda tx, s=s, e=epoch: epochs.acknowledge(tx, "j", e, 1, s, f"t-{s}", snapshot(s), ""))  # type: ignore[misc]
        look()
        assert read_job(db, "j").newest_durable == epoch
        for s in PLAN.committers:
            run(lambda tx, s=s, e=epoch: registry.committed_assignment(tx, "j", 1, s, f"t-{s}", e))  # type: ignore[misc]
    for s in subtasks:
        run(lambda tx, s=s: registry.end_assignment(tx, "j", 1, s, f"t-{s}", AssignmentState.FINISHED))  # type: ignore[misc]
    look()


def summary(db: Database) -> Any:
    """All that an outside reader can tell of a life."""
    row = read_job(db, "j")
    return [
        (row.state, row.reason, row.generation, row.newest_durable, row.newest_committed, row.in_flight, row.restarts, row.next_epoch, row.aborts, row.pending_commits),
        table_rows(db, "assignment"),
        [{k: v for k, v in e.items() if k != "splits"} for e in table_rows(db, "epoch")],
        [(m["epoch"], m["kind"]) for m in table_rows(db, "manifest")],
        table_rows(db, "ack"),
        table_rows(db, "split"),
        [h["event"] for h in db.read(lambda tx: jobs.history(tx, "j"))],
    ]  # fmt: skip


def lived(store: Opened, faults: Lost) -> Any:
    store.empty()
    settings = msgspec.json.encode(StreamSettings(epoch_interval_ms=3_000_000)).decode()
    insert_job(store.db, "j", JobState.PENDING, generation=0, next_epoch=1, settings=settings)
    db = store.open(faults=faults)
    life(db)
    found = summary(store.db)
    store.close_others()
    return found


def test_t39_losing_the_answer_to_any_commit_changes_nothing(store: Opened) -> None:
    """Each commit of a job's life in turn: the statement is executed again, and the life is the same to the last row."""
    counted = Lost(0)
    reference = lived(store, counted)
    assert reference[0][0] is JobState.FINISHED and reference[0][3:5] == (2, 2)
    assert counted.count > 25
    for at in range(1, counted.count + 1, 2 if store.kind == "sqlite" else 4):
        faults = Lost(at)
        assert lived(store, faults) == reference, f"commit {at}"
        assert faults.struck


def test_failing_before_any_commit_changes_nothing(store: Opened) -> None:
    """Nothing was done, so that trying again is safe."""
    counted = Lost(0)
    reference = lived(store, counted)
    for at in range(2, counted.count + 1, 5 if store.kind == "sqlite" else 12):
        faults = Lost(at, before=True)
        assert lived(store, faults) == reference, f"commit {at}"
        assert faults.struck


def test_a_commit_that_is_not_answered_names_what_the_driver_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: "the answer was lost" alone would send the operator looking in the wrong place."""
    db = Database(f"sqlite:///{tmp_path / 'm.db'}", SystemClock())
    create_schema(db)
    full = sa.exc.OperationalError("COMMIT", {}, sqlite3.OperationalError("database or disk is full"))

    def commit(_connection: sa.Connection) -> None:
        raise full

    monkeypatch.setattr(sa.Connection, "commit", commit)
    with pytest.raises(CommitUnknown, match="database or disk is full"):
        db.run(lambda tx: tx.now_us())
    db.close()


def test_a_forked_child_opens_connections_of_its_own(opened: Opened) -> None:
    """Celery's prefork pool and preloading web servers fork what has connections open: the parent's stay the parent's."""
    if opened.kind == "sqlite":
        pytest.skip("a SQLite file has no session to share")
    session = {"postgres": "SELECT pg_backend_pid()", "mariadb": "SELECT connection_id()"}[opened.kind]

    db = opened.open()

    def which() -> int:
        return int(db.read(lambda tx: tx.execute(sa.text(session)).scalar_one()))

    mine = which()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(which()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    assert theirs != mine
    assert which() == mine
