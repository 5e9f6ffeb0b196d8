"""From which rank on claims look while looking from the start is slow: never for longer than a second, and not at all while they are quick."""

from __future__ import annotations

import msgspec
from tests.unit.durable.rows import task_row

from millstream_tasks.durable.floors import BELOW_US, FOR, SLOW, Floors


def test_quick_claims_look_from_the_start() -> None:
    """The usual case: nothing is passed over."""
    floors = Floors()
    floors.learn(1.0, SLOW / 2, [task_row()])
    assert floors.at(1.0) == {}


def test_after_a_slow_claim_the_next_ones_begin_a_little_below_what_it_found_and_for_a_second_at_most() -> None:
    """Of each lane by itself; a slow one meanwhile does not prolong it, and a freed permit ends it."""
    rows = [msgspec.structs.replace(task_row(), rank=rank, queue=queue) for rank, queue in ((70, "a"), (50, "a"), (90, "b"))]
    floors = Floors()
    floors.learn(1.0, SLOW, rows)
    assert floors.at(1.0) == {rows[0].lane: 50 - BELOW_US, rows[2].lane: 90 - BELOW_US}
    floors.learn(1.9, SLOW, [msgspec.structs.replace(rows[0], rank=10_000)])
    assert floors.at(1.0 + FOR - 0.01)
    assert floors.at(1.0 + FOR) == {}
    floors.learn(3.0, SLOW, rows)
    floors.forget()
    assert floors.at(3.0) == {}
