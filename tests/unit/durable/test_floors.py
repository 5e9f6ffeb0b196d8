"""From which rank on claims look while looking from the start is slow: never for longer than a bounded time, and not at all while they are quick."""

from __future__ import annotations

import msgspec
from tests.unit.durable.rows import task_row

from millstream_schema.durable.records import TaskRow
from millstream_tasks.durable.floors import BELOW_US, FOR, PART, SLOW, SLOW_FOR_ALL, Floors

QUICK = SLOW / 10


def found(**ranks: int) -> list[TaskRow]:
    """A task of each queue, with its rank."""
    return [msgspec.structs.replace(task_row(), rank=rank, queue=queue) for queue, rank in ranks.items()]


def lane(queue: str) -> str:
    return found(**{queue: 0})[0].lane


def learnt(floors: Floors, now: float, took: float, rows: list[TaskRow]) -> None:
    """A claim at this time that took so long."""
    floors.at(now)
    floors.learn(now, took, rows)


def test_quick_claims_look_from_the_start() -> None:
    """The usual case: nothing is passed over; nor where the machine is slow with everything."""
    floors = Floors()
    learnt(floors, 1.0, QUICK, found(a=5))
    assert floors.at(1.0) == {}
    busy = Floors()
    for at in range(3):
        learnt(busy, 1.0 + at * FOR, SLOW_FOR_ALL * 0.9, found(a=5))
    assert busy.at(1.0 + 3 * FOR) == {}


def test_after_a_slow_claim_the_next_ones_begin_a_little_below_what_it_found_and_for_a_second_at_most() -> None:
    """Of each lane by itself; what is found meanwhile raises it and does not prolong it, and a freed permit ends it."""
    floors = Floors()
    learnt(floors, 0.0, QUICK, found(a=1))
    learnt(floors, 1.0, SLOW, found(a=50, b=90))
    assert floors.at(1.0) == {lane("a"): 50 - BELOW_US, lane("b"): 90 - BELOW_US}
    learnt(floors, 1.9, QUICK, found(a=10_000))
    assert floors.at(1.0 + FOR - 0.01) == {lane("a"): 10_000 - BELOW_US, lane("b"): 90 - BELOW_US}
    assert floors.at(1.0 + FOR) == {}
    learnt(floors, 3.0, SLOW, found(a=50))
    floors.forget()
    assert floors.at(3.0) == {}


def test_while_a_little_below_is_slow_too_they_begin_where_the_last_one_found_something() -> None:
    """A claim is then as quick as on an empty table, however much is in front; the lower ranks are seen again after a time that grows with what seeing them costs."""
    floors = Floors()
    learnt(floors, 0.0, QUICK, found(a=1))
    learnt(floors, 1.0, 1.0, found(a=50))
    learnt(floors, 2.0, SLOW * 2, found(a=60))
    assert floors.at(2.1) == {lane("a"): 60}
    learnt(floors, 2.1, QUICK, found(a=70))
    assert floors.at(2.2) == {lane("a"): 70}
    assert floors.at(2.0 + FOR) == {lane("a"): 70 - BELOW_US}
    assert floors.at(1.0 + PART) == {}


def test_a_worker_that_begins_beside_an_old_snapshot_knows_a_slow_claim() -> None:
    """It has seen no quick one yet."""
    floors = Floors()
    learnt(floors, 1.0, SLOW_FOR_ALL, found(a=50))
    assert floors.at(1.0) == {lane("a"): 50 - BELOW_US}


def test_a_claim_that_found_nothing_says_nothing() -> None:
    """Neither about what is quick nor about where to begin."""
    floors = Floors()
    learnt(floors, 0.0, QUICK / 100, [])
    learnt(floors, 0.1, QUICK, found(a=1))
    learnt(floors, 1.0, SLOW, [])
    assert floors.at(1.0) == {}
