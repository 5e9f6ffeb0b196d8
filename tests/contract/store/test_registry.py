"""Leases, nodes and assignments: every write is guarded by its from-state and its fence, and every answer is true when it comes twice."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.store.stores import insert_job, table_rows, together

from millstream_schema.states import AssignmentState, JobState, NodeState
from millstream_schema.store import registry
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.rows import AssignmentRow, NodeRow, to

LEASE = 60_000_000
GONE = -1
"""A lease that has expired when it is given."""


def take(db: Database, holder: str, lease: int = LEASE) -> tuple[int, bool]:
    return db.run(lambda tx: registry.take_lease(tx, holder, lease))[:2]


# -- the coordinator's lease


def test_a_lease_is_taken_renewed_and_never_taken_from_its_holder(db: Database) -> None:
    """The first taker has term 1; renewing keeps it; another is told who is in force."""
    assert db.read(registry.read_term) == 0
    assert take(db, "a") == (1, True)
    assert take(db, "a") == (1, True)
    assert take(db, "b") == (1, False)
    assert db.read(registry.read_term) == 1


def test_b18_only_an_expired_lease_is_taken_over_and_the_term_only_grows(db: Database) -> None:
    """Each take-over raises the term; also the old holder's own, once it let the lease expire."""
    assert take(db, "a", GONE) == (1, True)
    assert take(db, "b", GONE) == (2, True)
    assert take(db, "b") == (3, True)
    assert take(db, "a") == (3, False)


def test_b7_a_released_lease_keeps_its_term(db: Database) -> None:
    """Giving it back does not start counting anew; only the holder can."""
    take(db, "a")
    assert not db.run(lambda tx: registry.release_lease(tx, "b"))
    assert db.run(lambda tx: registry.release_lease(tx, "a"))
    assert not db.run(lambda tx: registry.release_lease(tx, "a"))
    assert take(db, "b") == (2, True)


def test_t43_two_takers_of_an_expired_lease_get_one_term(db: Database) -> None:
    """Whoever comes second at the same moment is refused: exactly one holder in each of many races."""
    for n in range(10):
        term = take(db, "old", GONE)[0]
        answers: list[Any] = together(*[lambda who=f"c{n}-{i}": take(db, who) for i in range(2)])
        assert sorted(answers) == [(term + 1, False), (term + 1, True)], answers
        db.run(lambda tx: tx.update(tx.t.coordinator, tx.t.coordinator.c.id == registry.COORDINATOR, expires_us=0))


def test_two_first_takers_of_a_fresh_database_get_one_term(store: Any) -> None:
    """Also the insert of the very first row is raced for."""
    for _ in range(5):
        store.empty()
        answers: list[Any] = together(lambda: take(store.db, "a"), lambda: take(store.db, "b"))
        assert sorted(answers) == [(1, False), (1, True)], answers


def test_t102_ticks_closer_than_the_interval_are_one(db: Database) -> None:
    """Beat fires twice: the second tick finds the first and does nothing."""
    take(db, "a")
    assert db.run(lambda tx: registry.mark_tick(tx, LEASE))
    assert not db.run(lambda tx: registry.mark_tick(tx, LEASE))
    assert db.run(lambda tx: registry.mark_tick(tx, 0))


# -- nodes


def node_row(db: Database, node: str) -> NodeRow | None:
    found = db.read(lambda tx: tx.row(tx.t.node.select().where(tx.t.node.c.id == node)))
    return None if found is None else to(NodeRow, found)


def register(db: Database, node: str, slots: int = 4, lease: int = LEASE) -> None:
    db.run(lambda tx: registry.register_node(tx, node, f"host-{node}", slots, lease, "{}"))


def test_c1_a_node_is_active_while_its_lease_holds(db: Database) -> None:
    """T-10: by the database's clock; one that let it expire cannot renew and is not among the living."""
    register(db, "n1")
    register(db, "n2", lease=GONE)
    assert [n.id for n in db.read(registry.active_nodes)] == ["n1"]
    assert db.read(lambda tx: registry.live_node_ids(tx, {"n1", "n2", "n3"})) == {"n1"}
    assert db.read(lambda tx: registry.live_node_ids(tx, set())) == set()
    assert db.run(lambda tx: registry.renew_node(tx, "n1", LEASE))
    assert not db.run(lambda tx: registry.renew_node(tx, "n2", LEASE))
    assert not db.run(lambda tx: registry.renew_node(tx, "n3", LEASE))


def test_c2_registering_twice_changes_nothing(db: Database) -> None:
    """A repeat after an unknown outcome finds its own row, with whatever happened to it since."""
    register(db, "n1")
    db.run(lambda tx: registry.drain_node(tx, "n1"))
    register(db, "n1", slots=99)
    row = node_row(db, "n1")
    assert row is not None and (row.slots, row.state) == (4, NodeState.DRAINING)


def test_t10_a_draining_node_gets_no_work_and_keeps_its_lease(db: Database) -> None:
    """What it runs goes on until it has left; a repeat of either answers no."""
    register(db, "n1")
    assert db.run(lambda tx: registry.drain_node(tx, "n1"))
    assert not db.run(lambda tx: registry.drain_node(tx, "n1"))
    assert db.read(registry.active_nodes) == []
    assert db.read(lambda tx: registry.live_node_ids(tx, {"n1"})) == {"n1"}
    assert db.run(lambda tx: registry.renew_node(tx, "n1", LEASE))
    assert db.run(lambda tx: registry.leave_node(tx, "n1"))
    assert not db.run(lambda tx: registry.leave_node(tx, "n1"))
    assert not db.run(lambda tx: registry.renew_node(tx, "n1", LEASE))
    assert db.read(lambda tx: registry.live_node_ids(tx, {"n1"})) == set()
    assert not db.run(lambda tx: registry.drain_node(tx, "n1"))
    assert node_row(db, "n1").state is NodeState.GONE  # type: ignore[union-attr]


def test_c3_nodes_gone_for_long_are_forgotten(db: Database) -> None:
    """The registry does not grow for ever; the living stay."""
    register(db, "n1")
    register(db, "n2", lease=GONE)
    assert db.run(lambda tx: registry.forget_nodes(tx, tx.now_us())) == 1
    assert node_row(db, "n2") is None
    assert node_row(db, "n1") is not None


# -- assignments

WHO = ("job-1", 3, "in:0", "t1")


def assigned(db: Database, generation: int = 3) -> None:
    db.run(lambda tx: registry.assign(tx, "job-1", generation, {"in:0": "n1", "in:1": "n2"}, 5))


def row(db: Database, subtask: str = "in:0", generation: int = 3) -> AssignmentRow:
    return next(a for a in db.read(lambda tx: registry.assignments(tx, "job-1", generation)) if a.subtask == subtask)


def start(db: Database, attempt: str = "t1", node: str = "n1", generation: int = 3) -> bool:
    return db.run(lambda tx: registry.start_assignment(tx, "job-1", generation, "in:0", node, attempt))


def ready(db: Database, attempt: str = "t1", committed: int = 6) -> bool:
    return db.run(lambda tx: registry.ready_assignment(tx, "job-1", 3, "in:0", attempt, committed))


def end(db: Database, state: AssignmentState, attempt: str = "t1", cause: str = "") -> bool:
    return db.run(lambda tx: registry.end_assignment(tx, "job-1", 3, "in:0", attempt, state, cause, "why"))


def test_a_subtask_is_started_once(db: Database) -> None:
    """A second copy, another node and another generation are refused; a repeat by the same attempt is granted."""
    assigned(db)
    assert not start(db, node="n2")
    assert not start(db, generation=4)
    assert start(db)
    assert start(db)
    assert not start(db, "t2")
    assert (row(db).state, row(db).attempt) == (AssignmentState.STARTED, "t1")


def test_c16_two_copies_started_at_one_moment_are_one(db: Database) -> None:
    """Exactly one of two attempts gets the row, in each of several races."""
    for generation in range(10, 16):
        assigned(db, generation)
        found = together(*[lambda a=a, g=generation: start(db, a, generation=g) for a in ("t1", "t2")])
        assert sorted(map(str, found)) == ["False", "True"]


def test_ready_comes_once_after_started_and_by_its_attempt_only(db: Database) -> None:
    """ASSIGNED → READY is refused, a repeat answers no, a stale attempt answers no."""
    assigned(db)
    assert not ready(db, "")
    start(db)
    assert not ready(db, "t2")
    assert ready(db)
    assert not ready(db)
    assert (row(db).state, row(db).committed) == (AssignmentState.READY, 6)
    assert not start(db)


def test_what_was_never_started_fails_but_does_not_finish(db: Database) -> None:
    """As the table of transitions says."""
    assigned(db)
    assert not end(db, AssignmentState.FINISHED, "")
    assert end(db, AssignmentState.FAILED, "", "handback")
    assert row(db).state is AssignmentState.FAILED


@pytest.mark.parametrize("state", [AssignmentState.FINISHED, AssignmentState.FAILED])
def test_t19_the_first_end_wins(db: Database, state: AssignmentState) -> None:
    """What ended is neither ended again, nor READY, nor started; a stale attempt ends nothing (T-45)."""
    assigned(db)
    start(db)
    assert not end(db, state, "t2")
    assert end(db, state, cause="first")
    for other in (AssignmentState.FINISHED, AssignmentState.FAILED):
        assert not end(db, other, cause="second")
    assert not ready(db)
    assert not start(db)
    assert (row(db).state, row(db).cause, row(db).detail) == (state, "first", "why")


def test_rc8_committed_never_goes_back(db: Database) -> None:
    """T-26: a late notice is a no-op; a stale attempt's, too; it clears what was said of waiting."""
    assigned(db)
    start(db)

    def committed(epoch: int, attempt: str = "t1") -> bool:
        return db.run(lambda tx: registry.committed_assignment(tx, "job-1", 3, "in:0", attempt, epoch))

    assert db.run(lambda tx: registry.note_commit(tx, *WHO, "epoch 9: RETRY"))
    assert not db.run(lambda tx: registry.note_commit(tx, *WHO[:3], "t2", "epoch 9: stale"))
    assert row(db).commit_detail == "epoch 9: RETRY"
    assert not committed(9, "t2")
    assert committed(9)
    assert not committed(9)
    assert not committed(8)
    assert (row(db).committed, row(db).commit_detail) == (9, "")


def test_c4_progress_is_max_merged_and_moves_time_only_forward(db: Database) -> None:
    """An older value changes neither amount nor time; a newer one moves both; a stale attempt nothing."""
    assigned(db)
    start(db)

    def write(n: int, attempt: str = "t1") -> None:
        db.run(lambda tx: registry.progress_assignment(tx, "job-1", 3, "in:0", attempt, n, f'{{"n":{n}}}'))

    write(5)
    at = row(db).progressed_us
    write(5)
    write(3)
    assert (row(db).progress, row(db).progressed_us, row(db).stats) == (5, at, '{"n":3}')
    write(7, "t2")
    assert row(db).progress == 5
    write(6)
    assert row(db).progress == 6 and row(db).progressed_us >= at


def test_exhausted_is_said_once(db: Database) -> None:
    """And only by the attempt that runs."""
    assigned(db)
    start(db)
    assert not db.run(lambda tx: registry.exhausted_assignment(tx, "job-1", 3, "in:0", "t2"))
    assert db.run(lambda tx: registry.exhausted_assignment(tx, *WHO))
    assert not db.run(lambda tx: registry.exhausted_assignment(tx, *WHO))
    assert row(db).exhausted == 1


def test_a_node_hears_of_its_own_work_of_the_present_generation_only(db: Database) -> None:
    """What is over, an older generation and an ended job are nobody's work and take no slot (C15)."""
    insert_job(db, "job-1", generation=3)
    insert_job(db, "job-2", JobState.FAILED, generation=1)
    assigned(db, 2)
    assigned(db, 3)
    db.run(lambda tx: registry.assign(tx, "job-2", 1, {"x:0": "n1"}, 0))

    def mine(tx: Transaction, node: str) -> list[tuple[str, int, str]]:
        return [(a.job, a.generation, a.subtask) for a in registry.current_assignments(tx, node)]

    assert db.read(lambda tx: mine(tx, "n1")) == [("job-1", 3, "in:0")]
    assert db.read(registry.used_slots) == {"n1": 1, "n2": 1}
    start(db)
    assert db.read(registry.used_slots) == {"n1": 1, "n2": 1}
    end(db, AssignmentState.FINISHED)
    assert db.read(lambda tx: mine(tx, "n1")) == []
    assert db.read(registry.used_slots) == {"n2": 1}


def test_old_generations_are_forgotten(db: Database) -> None:
    """The present one stays."""
    for generation in (1, 2, 3):
        assigned(db, generation)
    assert db.run(lambda tx: registry.delete_assignments(tx, "job-1", 3)) == 4
    assert {a["generation"] for a in table_rows(db, "assignment")} == {3}


def test_a_generation_is_assigned_once(db: Database) -> None:
    """A second assignment of one generation is an error of the caller, not a second copy."""
    assigned(db)
    with pytest.raises(Exception, match=r"(?i)duplicate|unique"):
        assigned(db)


def test_lock_capacity_serialises(db: Database) -> None:
    """Whoever decides over free slots sees what the one before has written."""

    def add(tx: Transaction) -> None:
        registry.lock_capacity(tx)
        n = tx.row(tx.t.node.select().where(tx.t.node.c.id == "counter"))
        assert n is not None
        tx.update(tx.t.node, tx.t.node.c.id == "counter", slots=n["slots"] + 1)

    register(db, "counter", 0)
    assert together(*[lambda: [db.run(add) for _ in range(5)] for _ in range(4)]) == [[None] * 5] * 4
    counter = node_row(db, "counter")
    assert counter is not None and counter.slots == 20
