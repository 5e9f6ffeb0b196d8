"""Known complaints about Celery, one by one, as scenarios of durable tasks in the simulated world. ``celery_tNN`` is the trap's number in the list of such complaints."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from millstream.testing.task_simulation import LEASE_MS, Ran, Script, SimWorker, TaskSimulation
from millstream.testing.world import Faults
from millstream_schema.durable.records import NewTask, Policy
from millstream_schema.durable.states import Cause, Effects, TaskState
from millstream_schema.store import tasks

T = TaskState
QUIET = Faults()
LEASE = LEASE_MS / 1000


def simulation(seed: int = 0, **parts: int) -> TaskSimulation:
    return TaskSimulation(seed, QUIET, **parts)


def over(sim: TaskSimulation, *keys: str) -> bool:
    """Whether these, or all, are settled or in review."""
    rows = sim.rows()
    return all((k in rows and (rows[k].state.settled or rows[k].state is T.UNKNOWN)) for k in keys or rows)


def runs(sim: TaskSimulation, key: str) -> list[Ran]:
    task = sim.rows()[key].id
    return [r for r in sim.ran if r.task == task]


def submit(sim: TaskSimulation, key: str, script: Script | None = None, **changes: Any) -> NewTask:
    new = sim.task(key, script or Script(), **changes)
    sim.caller.submit(new)
    return new


def until(sim: TaskSimulation, seconds: float) -> None:
    sim.run(seconds, lambda: False)


def at(sim: TaskSimulation, delay: float, work: Callable[..., object], *args: Any) -> None:
    """Do this then."""

    def event() -> None:
        work(*args)

    sim.world.at(delay, event)


def told(worker: SimWorker) -> None:
    """There may be work, it is said."""
    if worker.host is not None:
        worker.host.wake()
        worker.poke()


def cancel(sim: TaskSimulation, key: str) -> None:
    if key in sim.caller.receipts:
        sim.caller.cancel(sim.caller.receipts[key].task)


def holder(sim: TaskSimulation, key: str) -> SimWorker:
    """The worker that runs it now."""
    row = sim.rows()[key]
    return next(w for w in sim.workers if w.host is not None and w.host.session == row.session)


def once_each(sim: TaskSimulation) -> None:
    """Every task succeeded in exactly one run."""
    for row in sim.rows().values():
        mine = [r for r in sim.ran if r.task == row.id]
        assert (row.state, len(mine)) == (T.SUCCEEDED, 1), (row.key, row.state, row.reason, mine)


# -- duplicates and losses


def test_celery_t01_a_task_that_is_due_long_after_any_timeout_runs_once_and_not_before() -> None:
    """Twenty leases later, with eight workers that come and go meanwhile: nobody holds it until it is due."""
    sim = simulation(workers=8)
    submit(sim, "late", delay_us=int(20 * LEASE * 1e6))
    for i in range(8):
        at(sim, 6.0 * i, sim.workers[i].crash)
    assert sim.run(30 * LEASE, lambda: len(sim.rows()) == 1 and over(sim))
    once_each(sim)
    assert runs(sim, "late")[0].began >= 20 * LEASE


def test_celery_t02_however_often_workers_are_told_a_task_runs_once() -> None:
    """Fifty wake-ups of every worker for one task, before, while and after it runs."""
    sim = simulation(workers=8)
    submit(sim, "one", Script(seconds=2.0))
    for i in range(50):
        for worker in sim.workers:
            at(sim, i * 0.1, told, worker)
    assert sim.run(20, lambda: over(sim, "one"))
    until(sim, 3)
    once_each(sim)


@pytest.mark.parametrize("stop", [0.3, 0.8, 1.4])
def test_celery_t03_a_worker_that_was_away_while_its_task_ran_elsewhere_cannot_undo_it(stop: float) -> None:
    """Stopped past its lease in the middle of a run; the winner's result stays, what the loser still says is no end of the task."""
    sim = simulation(workers=2, slots=1)
    submit(sim, "one", Script(seconds=2.0))
    assert sim.run(10, lambda: sim.rows()["one"].state is T.RUNNING)
    loser = holder(sim, "one")
    until(sim, stop)
    loser.paused = True
    assert sim.run(30, lambda: over(sim, "one"))
    settled = sim.rows()["one"]
    loser.goes_on()
    until(sim, 5)
    assert sim.rows()["one"] == settled
    assert (settled.state, settled.result, settled.losses) == (T.SUCCEEDED, f'["{settled.id}",{settled.fence}]', 1)
    assert [r.session for r in runs(sim, "one") if r.fence == settled.fence] != [runs(sim, "one")[0].session]


@pytest.mark.parametrize("moment", [i * 0.05 for i in range(16)])
def test_celery_t04_what_ended_before_or_during_a_shut_down_is_not_run_again(moment: float) -> None:
    """SIGTERM at any moment of a run and of its settling: a reported success is a success; what was killed runs again elsewhere."""
    sim = simulation(workers=2, slots=1)
    submit(sim, "one", Script(seconds=0.4))
    assert sim.run(5, lambda: bool(sim.ran))
    at(sim, moment, holder(sim, "one").shut_down)
    assert sim.run(30, lambda: over(sim, "one"))
    until(sim, 3)
    row, mine = sim.rows()["one"], runs(sim, "one")
    assert [r.reported for r in mine][-1:] == ["Succeeded"] and [r.reported for r in mine[:-1]] == [""] * (len(mine) - 1)
    assert (row.state, row.crashes, row.losses, row.failures) == (T.SUCCEEDED, 0, 0, 0)


def test_celery_t05_a_task_that_kills_its_process_is_neither_lost_nor_tried_for_ever() -> None:
    """Three runs, then a person; its neighbours on the same worker are charged nothing."""
    sim = simulation(workers=1)
    submit(sim, "bad", Script(crash=1.0))
    for i in range(20):
        submit(sim, f"good-{i}", Script(seconds=0.3))
    assert sim.run(60, lambda: len(sim.rows()) == 21 and over(sim))
    rows = sim.rows()
    bad = rows.pop("bad")
    assert (bad.state, bad.cause, bad.crashes, len(runs(sim, "bad"))) == (T.UNKNOWN, Cause.POISON, 3, 3)
    assert {(r.state, r.crashes, r.losses) for r in rows.values()} == {(T.SUCCEEDED, 0, 0)}


def test_celery_t05_a_worker_that_is_killed_with_what_it_runs_loses_nothing() -> None:
    """kill -9 again and again: idempotent tasks end well, external ones that had begun are with a person and not done twice."""
    sim = simulation(3, workers=2)
    for i in range(12):
        submit(sim, f"idempotent-{i}", Script(seconds=1.0))
        submit(sim, f"external-{i}", Script(seconds=1.0), effects=Effects.EXTERNAL, policy=Policy())
    for i in range(6):
        at(sim, 0.7 + i * 1.5, sim.workers[i % 2].crash)
    assert sim.run(120, lambda: len(sim.rows()) == 24 and over(sim))
    states: defaultdict[str, Counter[TaskState]] = defaultdict(Counter)
    for key, row in sim.rows().items():
        kind = key.partition("-")[0]
        states[kind][row.state] += 1
        assert kind == "idempotent" or len(runs(sim, key)) <= 1
    assert states["idempotent"] == {T.SUCCEEDED: 12}
    assert set(states["external"]) <= {T.SUCCEEDED, T.UNKNOWN} and states["external"][T.UNKNOWN] > 0


def test_celery_t07_t09_no_message_is_needed_for_anything() -> None:
    """Nobody is ever told: immediate, delayed, retried, parked tasks are all found by looking."""
    sim = simulation(workers=2)
    for i in range(6):
        submit(sim, f"plain-{i}")
        submit(sim, f"delayed-{i}", delay_us=i * 700_000)
        submit(sim, f"retried-{i}", Script(fails=1))
        submit(sim, f"parked-{i}", permit="p")
    assert sim.run(60, lambda: len(sim.rows()) == 24 and over(sim))
    assert {r.state for r in sim.rows().values()} == {T.SUCCEEDED}
    assert {len(runs(sim, k)) for k in sim.rows()} == {1, 2}


# -- workers that look alive


def test_celery_t15_workers_go_on_after_each_of_several_short_outages() -> None:
    """The database is away three times for less than a lease: everything ends, no session was judged by it, nothing ran twice."""
    sim = simulation(workers=2)
    for i in range(60):
        at(sim, i * 0.15, submit, sim, f"k{i}", Script(seconds=0.2))
    for i in range(3):
        sim.world.at(1.0 + 3 * i, lambda: sim.world.away.update(store=sim.world.now + 1.0))
    assert sim.run(60, lambda: len(sim.rows()) == 60 and over(sim))
    once_each(sim)
    assert {r.losses for r in sim.rows().values()} == {0}
    assert not sim.world.probes["session lost"]


def test_celery_t15_an_outage_longer_than_a_lease_is_no_crash_of_anybody() -> None:
    """Nothing is expired right after it; what was cut off runs again and is charged no crash."""
    sim = simulation(workers=2)
    until(sim, LEASE + 2)  # the first sweep of all closes the guard, too
    sim.world.probes["guard closed"] = 0
    for i in range(6):
        submit(sim, f"k{i}", Script(seconds=2.0))
    assert sim.run(10, lambda: sum(r.state is T.RUNNING for r in sim.rows().values()) >= 4)
    sim.world.away["store"] = sim.world.now + 4 * LEASE
    until(sim, 4 * LEASE)
    assert sim.world.probes["guard closed"] == 0
    until(sim, LEASE / 2)
    assert sim.world.probes["guard closed"] > 0, "the sweep noticed the gap"
    assert {r.losses for r in sim.rows().values()} == {0}, "nothing was taken back yet"
    assert sim.run(60, lambda: over(sim))
    assert {(r.state, r.crashes) for r in sim.rows().values()} == {(T.SUCCEEDED, 0)}


def test_celery_t18_workers_claim_on_after_very_many_cancels() -> None:
    """Cancels of what waits, runs and is over; afterwards every slot is free and works."""
    sim = simulation(5, workers=2)
    keys = [f"k{i}" for i in range(120)]
    for i, key in enumerate(keys):
        at(sim, i * 0.05, submit, sim, key, Script(seconds=0.4))
        for _ in range(4):
            at(sim, i * 0.05 + sim.world.rng.random() * 3, cancel, sim, key)
    assert sim.run(60, lambda: len(sim.rows()) == len(keys) and over(sim))
    assert {r.state for r in sim.rows().values()} == {T.SUCCEEDED, T.CANCELLED}
    assert sum(n for probe, n in sim.world.probes.items() if probe.startswith("cancel asked")) >= 300
    for i in range(12):
        submit(sim, f"after-{i}", Script(seconds=0.2))
    assert sim.run(10, lambda: len(sim.rows()) == len(keys) + 12 and over(sim))
    assert {sim.rows()[f"after-{i}"].state for i in range(12)} == {T.SUCCEEDED}
    assert all(w.pool.free() == w.slots for w in sim.workers)


def test_celery_t21_a_worker_that_drains_keeps_its_lease_until_the_last_task_is_over() -> None:
    """Five leases long: the task ends where it began, once."""
    sim = simulation(workers=1, slots=1)
    submit(sim, "long", Script(seconds=5 * LEASE))
    assert sim.run(5, lambda: bool(sim.ran))
    host = sim.workers[0].host
    assert host is not None
    host.drain()
    assert sim.run(60, lambda: over(sim, "long"))
    once_each(sim)
    assert host.holding == 0 and not sim.world.probes["session lost"]
    submit(sim, "next")
    until(sim, 5)
    assert sim.rows()["next"].state is T.READY, "a draining worker takes nothing"


def test_celery_t22_what_a_draining_worker_has_not_begun_starts_elsewhere_at_once() -> None:
    """No attempt is used up, and nobody waits for a lease."""
    sim = simulation(workers=1, slots=1)
    for i in range(3):
        submit(sim, f"k{i}", Script(seconds=4.0))
    assert sim.run(5, lambda: len(sim.ran) == 1 and sim.workers[0].host is not None and sim.workers[0].host.holding > 1)
    host = sim.workers[0].host
    assert host is not None
    host.drain()
    sim.workers.append(SimWorker(sim, "other", 3))
    assert sim.run(LEASE, lambda: len(sim.ran) == 3)
    assert sim.run(30, lambda: over(sim))
    once_each(sim)
    assert {(r.starts, r.losses) for r in sim.rows().values()} == {(1, 0)}


# -- memory, captivity


def test_celery_t24_t25_future_tasks_are_with_nobody_and_are_taken_by_whoever_is_free() -> None:
    """Hundreds of them cost a worker nothing; a worker that comes when they are due takes its part."""
    sim = simulation(workers=1)
    news = [sim.task(f"k{i}", Script(seconds=0.3), id=f"t{i}", delay_us=10_000_000) for i in range(120)]
    sim.database.run(lambda tx: tasks.submit_many(tx, news))
    for _ in range(9):
        until(sim, 1.0)
        assert sim.workers[0].host is not None and sim.workers[0].host.holding == 0
    sim.workers.append(SimWorker(sim, "newcomer", 3))
    assert sim.run(60, lambda: over(sim))
    once_each(sim)
    assert min(r.began for r in sim.ran) >= 10.0
    shares = Counter(r.session for r in sim.ran)
    assert len(shares) == 2 and min(shares.values()) >= 30, shares


# -- control, time


def test_celery_t36_a_cancel_holds_though_no_worker_was_there() -> None:
    """Asked for with zero workers and long ago; the workers that come then never run it."""
    sim = simulation(workers=0)
    submit(sim, "unwanted")
    submit(sim, "wanted")
    submit(sim, "scheduled", delay_us=60_000_000)
    for key in ("unwanted", "scheduled"):
        cancel(sim, key)
    until(sim, 70.0)
    sim.workers.append(SimWorker(sim, "late", 2))
    assert sim.run(30, lambda: over(sim, "wanted"))
    until(sim, 5)
    assert {k: r.state for k, r in sim.rows().items()} == {"unwanted": T.CANCELLED, "wanted": T.SUCCEEDED, "scheduled": T.CANCELLED}
    assert [r.task for r in sim.ran] == [sim.rows()["wanted"].id]


@pytest.mark.parametrize("step", range(14))
def test_celery_t36_a_cancel_and_an_end_at_any_moment_give_one_story(step: int) -> None:
    """Cancelled means that it did not succeed, success that the cancel came too late: never both, at whatever moment it is asked for."""
    sim = simulation(step, workers=1)
    submit(sim, "one", Script(seconds=0.3, fails=1))
    at(sim, step * 0.1, cancel, sim, "one")
    assert sim.run(20, lambda: over(sim, "one"))
    row = sim.rows()["one"]
    succeeded = [r for r in runs(sim, "one") if r.reported == "Succeeded"]
    assert (row.state is T.SUCCEEDED) == bool(succeeded), (row.state, sim.ran)
    assert row.state in (T.SUCCEEDED, T.CANCELLED)


@pytest.mark.parametrize("sweepers", [0, 2])
def test_celery_t38_due_work_starts_once_with_no_ticker_or_with_two(sweepers: int) -> None:
    """Workers look themselves: a ticker that died, stands still or is doubled neither loses nor repeats anything."""
    sim = simulation(7, workers=2, sweepers=sweepers)
    for i in range(30):
        submit(sim, f"k{i}", Script(seconds=0.1), delay_us=i * 200_000)
    if sweepers:
        sim.world.at(1.0, lambda: setattr(sim.sweepers[0], "paused", True))
        sim.world.at(4.0, lambda: setattr(sim.sweepers[0], "paused", False))
    assert sim.run(30, lambda: len(sim.rows()) == 30 and over(sim))
    once_each(sim)
    for i in range(30):
        late = runs(sim, f"k{i}")[0].began - i * 0.2
        assert 0 <= late < 2.0, "not before it is due, and soon after"


def test_celery_t40_a_permit_holds_across_eight_workers_and_delays_nobody_else() -> None:
    """At most three at once, whoever runs them; all get their turn; tasks without the permit are not held up by those that wait for it."""
    sim = simulation(workers=8)
    policy = Policy(attempts=5, permit_capacity=3)
    for i in range(30):
        submit(sim, f"limited-{i}", Script(seconds=1.0), permit="printer", policy=policy)
    for i in range(30):
        submit(sim, f"free-{i}", Script(seconds=0.2))
    most = [0]

    def inside() -> bool:
        mine = {r.id for k, r in sim.rows().items() if k.startswith("limited")}
        most[0] = max(most[0], sum(r.task in mine and r.ended is None for r in sim.ran))
        return len(sim.rows()) == 60 and over(sim)

    assert sim.run(60, inside)
    once_each(sim)
    assert most[0] == 3
    free = max(r.ended or 1e9 for k in sim.rows() if k.startswith("free") for r in runs(sim, k))
    limited = max(r.ended or 1e9 for k in sim.rows() if k.startswith("limited") for r in runs(sim, k))
    assert free < limited / 2
