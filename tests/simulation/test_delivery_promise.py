"""The promise of subscriptions under faults: every end that comes after a subscription has its effects at an inbox's consumer exactly once, and they are those of the task's row.

Each run draws tasks and a mix of faults from its seed; a failing one prints the seed and replays by ``pytest -k "[seed]"``.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from millstream.testing.delivery_simulation import DeliverySimulation
from millstream.testing.task_simulation import Script, TaskSimulation
from millstream.testing.world import EPOCH_0, Faults
from millstream_schema.durable.deliveries import DeliveryState
from millstream_schema.durable.records import TaskRow
from millstream_schema.durable.states import Effects, TaskState
from millstream_schema.store import deliveries

SEEDS = int(os.environ.get("MILLSTREAM_SIM_SEEDS") or 8)
TASKS = 30
T = TaskState
PROBES: Counter[str] = Counter()
KINDS: dict[str, dict[str, Any]] = {
    "pulled": {},
    "published": {"publish_to": "published"},
    "others": {"queue": "other", "publish_to": "others"},
    "failures": {"states": ["FAILED", "CANCELLED"]},
}


def wanted(name: str, task: TaskRow) -> bool:
    return {"others": task.queue == "other", "failures": task.state in (T.FAILED, T.CANCELLED)}.get(name, True)


def run(seed: int, faults: Faults) -> DeliverySimulation:
    sim = TaskSimulation(seed, faults)
    found = DeliverySimulation(sim)
    rng = sim.world.rng
    for name, definition in KINDS.items():
        sim.world.at(rng.random() * 8, lambda n=name, d=definition: found.subscribe(n, **d))  # type: ignore[misc]
    for i in range(TASKS):
        end = rng.choice(["return", "return", "raise", "fail"])
        effects = Effects.EXTERNAL if rng.random() < 0.1 else Effects.IDEMPOTENT
        new = sim.task(f"k{i}", Script(seconds=0.3, end=end), queue=rng.choice(["default", "other"]), effects=effects)
        sim.world.at(rng.random() * 12, lambda n=new: sim.caller.submit(n))  # type: ignore[misc]
        if rng.random() < 0.15:
            sim.world.at(rng.random() * 14, lambda n=new: cancel(sim, n.key))  # type: ignore[misc]

    def over() -> bool:
        rows = sim.rows()
        return len(rows) == TASKS and all(t.state.settled or t.state is T.UNKNOWN for t in rows.values()) and not missing(found, rows)

    assert sim.run(400.0, over), f"seed {seed}: ends that never came: {missing(found, sim.rows())}"
    sim.run(10.0, lambda: False)
    judge(found)
    return found


def cancel(sim: TaskSimulation, key: str) -> None:
    if key in sim.caller.receipts:
        sim.caller.cancel(sim.caller.receipts[key].task)


def missing(found: DeliverySimulation, rows: dict[str, TaskRow]) -> dict[str, list[str]]:
    """Ends after each subscription's commit that have had no effect."""
    if set(found.consumers) != set(KINDS):
        return {"not subscribed": [n for n in KINDS if n not in found.consumers]}
    left = {}
    for name, consumer in found.consumers.items():
        after = [t for t in rows.values() if t.state.settled and (t.settled_us - EPOCH_0) / 1e6 > found.made[name]]
        left[name] = [t.key for t in after if wanted(name, t) and not consumer.effects[t.id]]
    return {name: tasks for name, tasks in left.items() if tasks}


def judge(found: DeliverySimulation) -> None:
    """Once each, what the row says, nothing that was not asked for; and at last everything is acknowledged."""
    rows = {t.id: t for t in found.sim.rows().values()}
    for name, consumer in found.consumers.items():
        say = f"seed {found.sim.world.seed}: {name}"
        assert set(consumer.effects.values()) <= {1}, f"{say}: {consumer.effects}"
        for task, said in consumer.said.items():
            assert said == (rows[task].state.value, rows[task].result), f"{say}: {task} was told as {said}"
            assert wanted(name, rows[task]), f"{say}: {task} was not asked for"
        created = found.sim._read(lambda tx, n=name: tx.row(tx.t.subscription.select().where(tx.t.subscription.c.name == n)))  # type: ignore[misc]
        for task in consumer.effects:
            assert rows[task].settled_us >= created["created_us"], f"{say}: {task} had ended before"
        states = found.sim._read(lambda tx, n=name: deliveries.counts(tx, found.client._found(tx, n)))  # type: ignore[misc]
        assert set(states) <= {DeliveryState.ACKNOWLEDGED}, f"{say}: {states}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_end_after_a_subscription_has_its_effects_once(seed: int) -> None:
    """Consumers that die between doing and saying so, leases that end meanwhile, lost, late and doubled messages, a broker that is flushed, sweeps that crash at every
    transaction."""
    found = run(seed, Faults.drawn(seed, 30.0))
    PROBES.update(found.sim.world.probes)


def test_without_faults_nothing_is_repeated() -> None:
    """Every delivery is done at its first attempt."""
    found = run(1_000, Faults())
    assert not found.sim.world.probes["a repeat recognised"]
    assert {r["attempts"] for r in found.sim._read(lambda tx: tx.rows(tx.t.delivery.select()))} == {1}


def test_the_faults_of_interest_are_met() -> None:
    """Run after run with strong faults until each has struck: a consumer that dies in each place, repeats that are recognised, every fate of a message."""
    met: Counter[str] = Counter()
    expected = (
        "consumer died before it did anything", "consumer died before its commit", "consumer died before it acknowledged", "a repeat recognised",
        "an old message passed over", "message lost", "message twice", "message late", "message not taken", "broker flushed", "away: broker", "delivery refused",
        "nap: before it acknowledges",
    )  # fmt: skip
    for seed in range(2_000, 2_040):
        met += run(seed, Faults(until=25.0, store=0.01, hint=0.2, nap=0.004, away=0.05, crash=0.03)).sim.world.probes
        if all(met[probe] for probe in expected):
            return
    raise AssertionError([probe for probe in expected if not met[probe]])
