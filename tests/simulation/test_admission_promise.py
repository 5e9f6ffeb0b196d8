"""Admission under faults: while somebody pauses, resumes, limits and widens, nothing accepted is lost, no limit is exceeded, and all goes on when it is resumed.

Tasks of every kind, as in the promise of durable tasks, and metered ones; the operator dies at any of his transactions. A failing run prints the seed and replays by
``pytest -k "[seed]"``.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict

import pytest
from tests.simulation.test_task_promise import drawn, judge

from millstream.testing.task_operator import Operator
from millstream.testing.task_simulation import QUEUES, Script, TaskSimulation
from millstream.testing.world import Faults
from millstream_schema.durable.gates import GateKind
from millstream_schema.durable.records import NewTask, Policy, TaskRow
from millstream_schema.durable.states import TaskState
from millstream_schema.store import blockers

SEEDS = int(os.environ.get("MILLSTREAM_SIM_SEEDS") or 12)
SECOND = 1_000_000
K = GateKind
T = TaskState
METERED = {"metered": (4, SECOND, 2), "slowly": (30, 60 * SECOND, 1)}
"""Permit keys with a rate from the first moment to the last: number, time, burst."""
HANDLER_RATE = (15, SECOND, 4)
PROBES: Counter[str] = Counter()


def metered(sim: TaskSimulation) -> list[NewTask]:
    """Tasks whose permit's starts are counted."""
    found = []
    policy = Policy(attempts=5, delay_ms=100, max_delay_ms=500, permit_capacity=3, losses=200)
    for i in range(14):
        key = sim.world.rng.choice(["metered", "metered", "slowly"])
        script = Script(seconds=sim.world.rng.choice([0.05, 0.4]), fails=sim.world.rng.choice([0, 0, 1]))
        found.append(sim.task(f"{key}-{i}", script, permit=key, policy=policy, queue=sim.world.rng.choice(QUEUES)))
    return found


def run(seed: int, faults: Faults, acts: int) -> tuple[TaskSimulation, Operator]:
    """One run to its end."""
    sim = TaskSimulation(seed, faults)
    rng, operator = sim.world.rng, Operator(sim)
    for key, (number, per, burst) in METERED.items():
        operator.rate(K.PERMIT, key, number, per, burst)
    whole = rng.random() < 0.5
    if whole:
        operator.rate(K.HANDLER, "work", *HANDLER_RATE)
    wanted = [*drawn(sim), *metered(sim)]
    for new in wanted:
        sim.world.at(2.0 + rng.random() * 10, lambda n=new: sim.caller.submit(n))  # type: ignore[misc]
    for _ in range(acts):
        sim.world.at(2.0 + rng.random() * 16, act(sim, operator))

    def over() -> bool:
        rows = sim.rows()
        return len(rows) == len(wanted) and all(t.state.settled or t.state is T.UNKNOWN for t in rows.values())

    ended = sim.run(400.0, over)
    rows = sim.rows()
    left = {k: (t.state, t.cause, t.blocked_by) for k, t in rows.items() if not t.state.settled and t.state is not T.UNKNOWN}
    assert ended, f"seed {seed}: accepted tasks do not end: {left}, missing {len(wanted) - len(rows)}, pauses {operator.pauses}"
    judge(sim, rows, set())
    kept_limits(sim, rows, whole)
    kept_pauses(sim, rows, operator)
    assert sim.database.read(lambda tx: blockers.following(tx, "")) is None
    return sim, operator


def act(sim: TaskSimulation, operator: Operator):  # type: ignore[no-untyped-def]  # a thunk for the world's events
    rng = sim.world.rng
    seconds = 0.2 + rng.random() * 6
    match rng.choice(["queue", "handler", "permit", "permit", "capacity", "rate"]):
        case "queue":
            queue = rng.choice(QUEUES)
            return lambda: operator.pause(K.QUEUE, queue, seconds)
        case "handler":
            return lambda: operator.pause(K.HANDLER, "work", seconds)
        case "permit":
            key = rng.choice(["printer", "account", "metered"])
            return lambda: operator.pause(K.PERMIT, key, seconds)
        case "capacity":
            key, count = rng.choice(["printer", "metered", "slowly"]), rng.randint(1, 4)
            return lambda: operator.capacity(key, count)
        case _:
            queue, number = rng.choice(QUEUES), rng.choice([0, 3, 20])
            return lambda: operator.rate(K.QUEUE, queue, number, SECOND, 2 if number else 0)


def kept_limits(sim: TaskSimulation, rows: dict[str, TaskRow], whole: bool) -> None:
    """Never more than burst + rate × t starts in any window, from when each rate was set."""
    names = {t.id: t for t in rows.values()}
    starts = defaultdict(list)
    for ran in sim.ran:
        starts[names[ran.task].permit].append(ran.claimed_us)
        if whole:
            starts["everything"].append(ran.claimed_us)
    for key, (number, per, burst) in {**METERED, "everything": HANDLER_RATE}.items():
        at = sorted(starts[key])
        for i in range(len(at)):
            for j in range(i, len(at)):
                assert (j - i + 1 - burst) * per <= (at[j] - at[i]) * number, (
                    f"seed {sim.world.seed}: {key}: {j - i + 1} in {at[j] - at[i]} µs"
                )


def kept_pauses(sim: TaskSimulation, rows: dict[str, TaskRow], operator: Operator) -> None:
    """Nothing is claimed from the moment a pause is stored until its end is asked for."""
    names = {t.id: t for t in rows.values()}
    for pause in operator.pauses:
        until = pause.until_us or 2**62
        for ran in sim.ran:
            task = names[ran.task]
            mine = {K.QUEUE: task.queue, K.HANDLER: task.handler, K.PERMIT: task.permit}[pause.kind] == pause.name
            assert not (mine and pause.from_us < ran.claimed_us < until), f"seed {sim.world.seed}: {task.key} was claimed in {pause}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_limits_hold_and_everything_goes_on_after_a_pause(seed: int) -> None:
    """Crashes at every transaction of workers, sweeps and of the operator; pauses, rates and capacities that change meanwhile."""
    sim, _ = run(seed, Faults.drawn(seed, 30.0), acts=8)
    PROBES.update(sim.world.probes)


def test_without_faults_pauses_only_delay() -> None:
    """Every task ends as its script says."""
    sim, operator = run(2_000, Faults(), acts=14)
    assert {p.kind for p in operator.pauses} == set(K)
    for task in sim.rows().values():
        assert task.losses == 0 and (
            task.state is T.SUCCEEDED or task.key.partition("-")[0] in ("doomed", "crashes", "deadline", "calls")
        ), task
