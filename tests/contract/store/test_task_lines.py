"""Lines of tasks that wait for a permit: parked in bulk, so that what is free behind them is claimed by the same call, and moved up when their turn comes."""

from __future__ import annotations

import msgspec
import pytest
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import LANE, POLICY, asked, consistent, ending, every, new, permit, session, settle, submit, take

from millstream_coordinator import task_sweep
from millstream_coordinator.task_sweep import TaskSweep
from millstream_schema.durable.states import TaskState
from millstream_schema.ports import SystemChance, SystemClock
from millstream_schema.store import claims, selection, settling, tasks

T = TaskState


def line(store: Opened, count: int, *, permits: int = 1, priority: int = 5, **changes: object) -> None:
    """So many tasks of some permits, in front of everything without priority."""
    news = [new(f"{changes.get('queue', 'default')}-{i:05}", permit=f"p{i % permits}", priority=priority, **changes) for i in range(count)]
    store.db.run(lambda tx: tasks.submit_many(tx, news))


@pytest.mark.parametrize(("permits", "ordered"), [(1, False), (1, True), (40, False)], ids=["one permit", "ordered", "many permits"])
def test_what_is_free_behind_hundreds_that_wait_is_claimed_by_the_same_call(store: Opened, permits: int, ordered: bool) -> None:
    """All that was looked at is parked under its permit, whoever of its holders has the slot; one call, not hundreds."""
    line(store, 900, permits=permits, ordered=ordered)
    submit(store.db, *[new(f"free-{i}") for i in range(3)])
    session(store.db)
    claimed = store.db.run(lambda tx: asked(tx, "s", permits + 3))
    assert claimed is not None
    assert sorted(r.key for r in claimed.tasks if not r.permit) == ["free-0", "free-1", "free-2"]
    assert len(claimed.tasks) == permits + 3 and not claimed.more
    rows = every(store.db)
    assert sum(r.blocked_by == f"permit:default/{r.permit}" for r in rows.values()) == 900 - permits
    consistent(store.db)


def test_a_claim_that_could_not_look_behind_all_that_waits_says_so(store: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has an end; the next one goes on where it stopped, and so to the free task."""
    monkeypatch.setattr(selection, "ROUNDS", 2)
    line(store, 2 * selection.PARKED_AT_ONCE + 500)
    submit(store.db, new("free"))
    session(store.db)
    found, calls, more = [r.key for r in take(store.db, count=1)], 0, True
    while more:
        claimed = store.db.run(lambda tx: asked(tx, "s", 1))
        assert claimed is not None and calls < 10
        found += [r.key for r in claimed.tasks]
        more, calls = claimed.more, calls + 1
    assert found == ["default-00000", "free"] and calls <= 3
    consistent(store.db)


def test_room_that_one_lane_does_not_fill_goes_to_another(store: Opened) -> None:
    """Its share was for what it had; slots do not stay empty for it."""
    submit(store.db, new("a", queue="slow"), *[new(f"b{i}") for i in range(9)])
    session(store.db)
    claimed = store.db.run(lambda tx: asked(tx, "s", 4, lanes=[LANE, "default/slow"]))
    assert claimed is not None and len(claimed.tasks) == 8 and len({r.id for r in claimed.tasks}) == 8


@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
def test_a_line_runs_to_its_end_one_by_one(store: Opened, ordered: bool) -> None:
    """Parked in bulk, in two queues, and each has its turn by rank; two claim at once."""
    for queue in ("default", "slow"):
        line(store, 30, queue=queue, ordered=ordered)
    lanes = [LANE, "default/slow"]
    for who in ("s", "t"):
        session(store.db, who)
    done: list[str] = []
    while len(done) < 60:
        other = store.open()
        found = together(lambda: take(store.db, "s", 3, lanes=lanes), lambda other=other: take(other, "t", 3, lanes=lanes))  # type: ignore[misc]
        rows = [r for part in found for r in part]  # type: ignore[union-attr]
        assert len(rows) == 1, found
        done += [r.key for r in rows]
        settle(store.db, ending(rows[0]))
        store.close_others()
    expected = [r.key for r in sorted(every(store.db).values(), key=lambda r: (r.rank, r.id))]
    assert sorted(done) == sorted(expected) and (done == expected or not ordered)
    assert permit(store.db, "default/p0").seq == 60
    consistent(store.db)


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_the_next_of_an_ordered_line_moves_up_when_the_first_is_gone(store: Opened, end: str) -> None:
    """Nobody served the first one's queue; the others were parked behind it and are not when it is over."""
    submit(store.db, new("first", permit="p", ordered=True, queue="slow", deadline_us=300_000 if end == "expired" else 0))
    submit(store.db, *[new(f"k{i}", permit="p", ordered=True) for i in range(3)])
    session(store.db)
    assert take(store.db) == [] == take(store.db)
    if end == "cancelled":
        first = every(store.db)["first"].id
        store.db.run(lambda tx: settling.cancel(tx, first))
    else:
        store.db.run(lambda tx: tx.update(tx.t.task, tx.t.task.c.key == "first", deadline_us=1))
        assert take(store.db, lanes=["default/slow"]) == []
    assert [r.key for r in take(store.db)] == ["k0"]


def test_the_sweep_looks_at_so_many_blockers_and_goes_on_with_the_others(store: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many permits block tasks: each sweep is bounded, and none is passed over for ever."""
    monkeypatch.setattr(task_sweep, "BLOCKERS", 4)
    policy = msgspec.structs.replace(POLICY, permit_capacity=1)
    submit(store.db, *[new(f"k{i}-{n}", permit=f"p{i}", policy=policy) for i in range(10) for n in range(2)])
    session(store.db)
    assert len(take(store.db, count=20)) == 10
    p = store.db.tables.permit
    store.db.run(lambda tx: tx.update(p, p.c.held == 1, capacity=2))
    sweep = TaskSweep(store.db, SystemClock(), SystemChance(), 60_000, 0)
    seen = []
    for _ in range(4):
        sweep.sweep()
        seen.append(sum(r.ready_lane is not None for r in every(store.db).values()))
    assert seen == [4, 8, 10, 10]
    assert store.db.read(lambda tx: claims.ready_lanes(tx, ["default"])) == [LANE]
