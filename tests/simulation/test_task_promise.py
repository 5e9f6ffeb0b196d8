"""The promise of durable tasks under faults: nothing accepted is lost, one attempt is valid, permits hold, nothing is guessed.

Each run draws tasks of every kind and a mix of faults from its seed; a failing one prints the seed and replays by ``pytest -k "[seed]"``.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from millstream.testing.outside_calls import CALLS, Calls
from millstream.testing.task_simulation import Script, TaskSimulation
from millstream.testing.world import Faults
from millstream_schema.durable.effects import IntentState
from millstream_schema.durable.records import NewTask, Policy, TaskRow
from millstream_schema.durable.requests import decode_result
from millstream_schema.durable.states import Cause, Effects, TaskState

SEEDS = int(os.environ.get("MILLSTREAM_SIM_SEEDS") or 30)
TASKS = 60
T = TaskState
PROBES: Counter[str] = Counter()


def drawn(sim: TaskSimulation) -> list[NewTask]:
    """Tasks of every kind."""
    rng = sim.world.rng
    found = []
    for i in range(TASKS):
        kind = rng.choice(
            [
                "plain",
                "plain",
                "retried",
                "external",
                "permit",
                "ordered",
                "delayed",
                "snoozes",
                "doomed",
                "crashes",
                "deadline",
                "calls",
                "calls",
            ]
        )
        key = f"{kind}-{i}"
        queue = rng.choice(["default", "default", "other"])
        match kind:
            case "retried":
                new = sim.task(key, Script(fails=rng.randint(1, 4)), queue=queue)
            case "external":
                new = sim.task(key, Script(seconds=0.5), queue=queue, effects=Effects.EXTERNAL, policy=Policy())
            case "calls":
                hook = rng.choice(["", "truthful", "truthful", "unsure"])
                policy = Policy(attempts=5, delay_ms=100, losses=200, crashes=20, intents_only=True, reconciles=bool(hook))
                new = sim.task(key, Script(seconds=0.3, calls=Calls(hook=hook)), queue=queue, effects=Effects.EXTERNAL, policy=policy)
            case "permit":
                policy = Policy(attempts=5, delay_ms=100, permit_capacity=2, losses=200)
                new = sim.task(key, Script(seconds=0.4), queue=queue, permit="printer", policy=policy)
            case "ordered":
                new = sim.task(key, Script(seconds=0.2, fails=rng.choice([0, 0, 1])), queue=queue, permit="account", ordered=True)
            case "delayed":
                new = sim.task(key, Script(), queue=queue, delay_us=rng.randint(1, 8_000_000))
            case "snoozes":
                new = sim.task(key, Script(snoozes=2), queue=queue)
            case "doomed":
                new = sim.task(key, Script(end=rng.choice(["raise", "fail"])), queue=queue)
            case "crashes":
                new = sim.task(key, Script(crash=0.5), queue=queue)
            case "deadline":
                new = sim.task(key, Script(seconds=0.5), queue=queue, start_by_us=20_000_000)
            case _:
                new = sim.task(key, Script(seconds=rng.choice([0.05, 0.3, 2.0])), queue=queue)
        found.append(new)
    return found


def allowed(task: TaskRow) -> set[TaskState]:
    """How a task of this kind may end, whatever happens."""
    kind = task.key.partition("-")[0]
    ends = {
        "external": {T.SUCCEEDED, T.UNKNOWN},
        "doomed": {T.FAILED},
        "crashes": {T.SUCCEEDED, T.UNKNOWN},
        "deadline": {T.SUCCEEDED, T.EXPIRED},
        "calls": {T.SUCCEEDED, T.UNKNOWN, T.FAILED},
    }.get(kind, {T.SUCCEEDED})
    return ends | {T.CANCELLED} if task.cancel or task.cause is Cause.CANCELLED else ends


def run(seed: int, faults: Faults) -> TaskSimulation:
    """One run to its end, with what must hold at every moment looked at on the way."""
    sim = TaskSimulation(seed, faults)
    wanted = drawn(sim)
    cancelled: set[str] = set()
    for new in wanted:
        sim.world.at(sim.world.rng.random() * 10, lambda n=new: sim.caller.submit(n))  # type: ignore[misc]
        if sim.world.rng.random() < 0.1:
            cancelled.add(new.key)
            sim.world.at(sim.world.rng.random() * 14, lambda n=new: cancel(sim, n.key))  # type: ignore[misc]

    def over() -> bool:
        rows = sim.rows()
        return len(rows) == len(wanted) and all(t.state.settled or t.state is T.UNKNOWN for t in rows.values())

    ended = sim.run(300.0, over)
    rows = sim.rows()
    left = {k: (t.state, t.cause, t.blocked_by) for k, t in rows.items() if not t.state.settled and t.state is not T.UNKNOWN}
    assert ended, f"seed {seed}: accepted tasks do not end: {left}, missing {len(wanted) - len(rows)}"
    judge(sim, rows, cancelled)
    return sim


def cancel(sim: TaskSimulation, key: str) -> None:
    receipt = sim.caller.receipts.get(key)
    if receipt is not None:
        sim.caller.cancel(receipt.task)


def judge(sim: TaskSimulation, rows: dict[str, TaskRow], cancelled: set[str]) -> None:
    """What must hold at the end, from what the world saw and the rows say."""
    by_task = defaultdict(list)
    for ran in sim.ran:
        by_task[ran.task].append(ran)
    assert set(sim.caller.receipts) == set(rows), "what was accepted is there, and nothing else"
    for task in rows.values():
        runs = by_task[task.id]
        say = f"seed {sim.world.seed}: {task.key} is {task.state} ({task.cause}: {task.reason}), ran {runs}"
        assert task.state in allowed(task), say
        assert task.state is not T.CANCELLED or task.key in cancelled, say
        assert not task.permit_held and not task.session, say
        assert len({r.fence for r in runs}) == len(runs), f"one attempt ran twice; {say}"
        if task.key.startswith("calls"):
            continue  # their effects are judged by what really happened
        if task.state is T.SUCCEEDED:
            assert task.result == f'["{task.id}",{task.fence}]', f"another attempt's result; {say}"
            assert any(r.fence == task.fence and r.reported == "Succeeded" for r in runs), say
        if task.effects is Effects.EXTERNAL and len(runs) > 1:
            raise AssertionError(f"an external attempt that had begun was repeated; {say}")
        if task.effects is Effects.EXTERNAL and runs and task.state is not T.SUCCEEDED:
            assert task.state is T.UNKNOWN or task.cause is Cause.CANCELLED, f"its effect was guessed at; {say}"
    in_order(sim, rows)
    nothing_guessed(sim, rows)


def nothing_guessed(sim: TaskSimulation, rows: dict[str, TaskRow]) -> None:
    """Each call had its effect at most once. What is recorded happened, with that outcome; what is said not to have happened did not; where nobody knows, a person is asked."""
    known = defaultdict(list)
    for row in sim.intents():
        known[row.root].append(row)
        happened = sim.outside.effects[row.idempotency_key]
        say = f"seed {sim.world.seed}: {row}, and {happened} happened"
        assert len(happened) <= 1, say
        assert row.state is not IntentState.DONE or [decode_result(row.result or "")] == happened, say
        assert row.state is not IntentState.NOT_DONE or not happened, say
        sim.world.probes[f"call at last {row.state}, happened {len(happened)}"] += 1
    for task in rows.values():
        calls = known[task.root]
        say = f"seed {sim.world.seed}: {task.key} is {task.state} ({task.cause}: {task.reason}), known is {calls}"
        assert task.open_intents == sum(row.open for row in calls), say
        assert (task.state is T.UNKNOWN) or not task.open_intents, say
        if task.key.startswith("calls") and task.state is T.SUCCEEDED:
            outcomes = [decode_result(row.result or "") for row in sorted(calls, key=lambda r: r.opened_us)]
            assert decode_result(task.result) == outcomes and len(outcomes) == len(CALLS), say


def in_order(sim: TaskSimulation, rows: dict[str, TaskRow]) -> None:
    """Grants of a permit have sequence numbers that only grow with time; those of ``ordered`` tasks follow their rank."""
    names = {t.id: t for t in rows.values()}
    granted = sorted((r for r in sim.ran if r.permit_seq), key=lambda r: r.permit_seq)
    by_permit = defaultdict(list)
    for ran in granted:
        by_permit[names[ran.task].permit].append(ran)
    for permit, runs in by_permit.items():
        assert len({r.permit_seq for r in runs}) == len(runs), f"seed {sim.world.seed}: {permit}: a sequence number was given twice"
    first: dict[str, int] = {}
    for ran in by_permit["account"]:
        first.setdefault(ran.task, ran.permit_seq)
    done = [names[t] for t in sorted(first, key=lambda t: first[t])]
    for earlier, later in pairwise(done):
        overtaken = (later.rank, later.id) < (earlier.rank, earlier.id)
        if overtaken:  # it may only be passed by what was granted before it existed
            began = next(r.began for r in sim.ran if r.task == earlier.id)
            assert began * 1e6 + 1_700_000_000_000_000 < later.created_us, (
                f"seed {sim.world.seed}: {later.key} was overtaken by {earlier.key}"
            )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_accepted_task_ends_as_it_may_and_once(seed: int) -> None:
    """Crashes at every transaction, lost answers, stopped and lost workers, outages: the rows tell one story, and it is the world's."""
    sim = run(seed, Faults.drawn(seed, 30.0))
    PROBES.update(sim.world.probes)


def test_without_faults_every_task_ends_as_its_script_says() -> None:
    """Nothing is in review but what took its process along three times; nothing runs twice that need not."""
    sim = run(1_004, Faults())
    for task in sim.rows().values():
        if task.effects is Effects.EXTERNAL and task.cause is not Cause.CANCELLED and not task.key.startswith("calls"):
            assert task.state is T.SUCCEEDED
        assert task.losses == 0
    for reached in ("call refused", "reconcile: truthful", "call at last OPEN, happened 0", "call at last OPEN, happened 1"):
        assert sim.world.probes[reached], f"{reached} was not met: draw another seed"
