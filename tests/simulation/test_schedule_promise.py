"""The promise of schedules under faults: each fire has one task, no instant is passed over, nothing is early, policies hold; whoever fires, dies, sleeps or has a wrong clock.

Each run draws schedules of every kind and a mix of faults from its seed; a failing one prints the seed and replays by ``pytest -k "[seed]"``.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from itertools import takewhile

import pytest

from millstream.testing.schedule_simulation import ScheduleSimulation, SimScheduler
from millstream.testing.task_simulation import Script
from millstream.testing.world import EPOCH_0, Faults
from millstream_schema.durable.recurrence import SECOND, Cron, Interval, OneOff, instants
from millstream_schema.durable.schedules import Definition, FireKind, FireRow, FireState, Misfire, Overlap, ScheduleState, jitter

SEEDS = int(os.environ.get("MILLSTREAM_SIM_SEEDS") or 8)
UNTIL = 30.0
F, S = FireState, ScheduleState
TOLERANCE = 2 * SECOND


def every(seconds: int) -> Interval:
    return Interval(every_us=seconds * SECOND)


def drawn(sim: ScheduleSimulation) -> dict[str, Definition]:
    """Schedules of every kind."""
    quick = Script(seconds=0.1)
    return {
        "once": sim.definition(every(1), quick, tolerance_us=TOLERANCE),
        "skip": sim.definition(Cron(expression="*/2 * * * * *", zone="Europe/Berlin"), quick, misfire=Misfire.SKIP, tolerance_us=TOLERANCE),
        "catch-up": sim.definition(every(1), quick, misfire=Misfire.CATCH_UP, limit=3, window_us=6 * SECOND, tolerance_us=SECOND),
        "jitter": sim.definition(every(5), quick, jitter_us=3 * SECOND, misfire=Misfire.CATCH_UP, limit=1000),
        "alone": sim.definition(every(2), Script(seconds=3.0), overlap=Overlap.SKIP, tolerance_us=TOLERANCE),
        "queued": sim.definition(every(3), Script(seconds=4.0), overlap=Overlap.QUEUE_ONE),
        "newest": sim.definition(every(2), Script(seconds=2.5), overlap=Overlap.CANCEL_PREVIOUS),
        "one-off": sim.definition(OneOff(at_us=EPOCH_0 + 9 * SECOND), quick),
        "changed": sim.definition(every(2), quick, tolerance_us=TOLERANCE),
        "paused": sim.definition(every(1), quick),
    }


def run(seed: int, faults: Faults) -> ScheduleSimulation:
    """One run past the end of its faults, until everything that came has been decided."""
    sim = ScheduleSimulation(seed, faults, schedulers=3, workers=2)
    w, planner = sim.world, sim.planner
    for name, definition in drawn(sim).items():
        w.at(w.rng.random(), lambda n=name, d=definition: planner.publish(n, d))  # type: ignore[misc]
    changed = [
        sim.definition(spec, Script(seconds=0.1), tolerance_us=TOLERANCE) for spec in (every(3), Cron(expression="*/4 * * * * *"), every(1))
    ]
    for i, definition in enumerate(changed):
        w.at(6 + 6 * i + 4 * w.rng.random(), lambda d=definition: planner.publish("changed", d))  # type: ignore[misc]
    for i in range(6):
        name, at = w.rng.choice(["once", "alone", "queued", "newest", "paused"]), 4 + 20 * w.rng.random()
        for again in (0.0, 0.05, 3.0):
            w.at(at + again, lambda n=name, r=f"r{i}": planner.trigger(n, r))  # type: ignore[misc]
    w.at(8.0, lambda: planner.pause("paused", 8.0))

    def over() -> bool:
        now, rows = sim.database_time(), sim.schedules()
        decided = all(r.due_us is None or r.due_us > now - SECOND for r in rows.values())
        return w.now > UNTIL + 12 and len(rows) == 10 and decided and rows["paused"].state is S.ACTIVE

    assert sim.run(UNTIL + 120, over), f"seed {seed}: what came is not decided: {sim.schedules()}"
    judge(sim)
    return sim


def judge(sim: ScheduleSimulation) -> None:
    """What must hold at the end, from what the rows say."""
    tasks = {t.id: t for t in sim.rows().values() if t.origin.startswith("schedule:")}
    fired = [f for name in sim.schedules() for f in sim.fires(name) if f.state is F.FIRED]
    assert sorted(f.task for f in fired) == sorted(tasks), f"seed {sim.world.seed}: fires and tasks are not one to one"
    for f in fired:
        assert tasks[f.task].key == f"schedule/{f.schedule}/{f.kind}/{f.request}/{f.slot}"
    for name, row in sim.schedules().items():
        auto = [f for f in sim.fires(name) if f.kind is FireKind.AUTO]
        say = f"seed {sim.world.seed}: {name} {row} {auto}"
        versions = sim.versions(name)
        assert covered(sim, auto, row.last_us) if name != "paused" else nothing_in_the_pause(sim, auto), say
        for f in auto:
            rules = versions[f.version - 1][1].rules
            put_off = jitter("default", name, f.instant_us, rules.jitter_us)
            late = f.recorded_us - f.instant_us > rules.tolerance_us + rules.jitter_us
            assert f.recorded_us >= f.instant_us + put_off, f"early; {say}"
            if f.state is F.MISSED:
                assert f.recorded_us - f.until_us > rules.tolerance_us, f"missed though it was in time; {say}"
            elif rules.misfire is Misfire.SKIP and rules.overlap is Overlap.ALLOW:
                assert not late, f"run though it was late; {say}"
        many = Counter(f.recorded_us for f in auto if f.late and f.state is F.FIRED)
        limit = {Misfire.SKIP: 0, Misfire.ONCE: 1, Misfire.CATCH_UP: versions[0][1].rules.limit}[versions[0][1].rules.misfire]
        assert max(many.values(), default=0) <= limit, say
        assert row.state is (S.ENDED if name == "one-off" else S.ACTIVE), say
    manual = Counter((f.schedule, f.request) for name in sim.schedules() for f in sim.fires(name) if f.kind is FireKind.MANUAL)
    assert set(manual) == set(sim.planner.triggered) and set(manual.values()) <= {1}


def covered(sim: ScheduleSimulation, auto: list[FireRow], last_us: int) -> bool:
    """Whether each instant of each version, from its publication to the next one's, is in exactly one row."""
    versions = sim.versions(auto[0].schedule) if auto else []
    expected: list[int] = []
    for at, (published, definition) in enumerate(versions):
        ends = versions[at + 1][0] if at + 1 < len(versions) else last_us
        begins = max(published, expected[-1] if expected else 0)
        expected += takewhile(lambda i: i <= min(ends, last_us), instants(definition.spec, begins))  # noqa: B023
    found: list[int] = []
    for f in auto:
        part = [i for i in expected if f.instant_us <= i <= f.until_us]
        if len(part) != f.times:
            return False
        found += part
    return found == expected and bool(found)


def nothing_in_the_pause(sim: ScheduleSimulation, auto: list[FireRow]) -> bool:
    """From when the pause was answered until its end was asked for nothing fired."""
    ((begin, end),) = sim.planner.pauses
    inside = [f for f in auto if EPOCH_0 + begin * SECOND < f.recorded_us < EPOCH_0 + end * SECOND]
    return not inside and len({f.slot for f in auto}) == len(auto)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_fire_has_one_task_and_no_instant_is_passed_over(seed: int) -> None:
    """Coordinators crash, sleep, fire together with clocks a minute off; answers are lost, the database goes away: the policies tell what became of each instant."""
    run(seed, Faults.drawn(seed, UNTIL))


def test_without_faults_every_fire_is_in_time() -> None:
    """None is missed; each is there within milliseconds of its instant, though the coordinators look once a second."""
    sim = run(1_000, Faults(until=UNTIL))
    for name in ("once", "skip", "catch-up", "one-off", "jitter"):
        rules = sim.versions(name)[0][1].rules
        for f in sim.fires(name):
            due = f.instant_us + (jitter("default", name, f.instant_us, rules.jitter_us) if f.kind is FireKind.AUTO else 0)
            assert f.state is F.FIRED and f.recorded_us - due < 0.05 * SECOND, f
    assert {f.state for f in sim.fires("alone")} == {F.FIRED, F.SKIPPED} and F.QUEUED not in [f.state for f in sim.fires("queued")][:-1]


@pytest.mark.parametrize("skew", [60_000, -60_000, -3_600_000], ids=["minute-forward", "minute-back", "hour-back"])
def test_a_database_clock_that_is_set_repeats_no_fire(skew: int) -> None:
    """Forward: what lies between is a misfire; back: nothing fires until the time is reached again. Either way each instant is in one row."""
    sim = ScheduleSimulation(7, Faults(), schedulers=2, workers=1)
    sim.planner.publish("once", sim.definition(every(1), Script(seconds=0.1), tolerance_us=TOLERANCE))
    sim.world.at(10.0, lambda: sim.set_database_clock(skew))
    sim.run(40.0, lambda: False)
    before = sim.fires("once")
    if skew < 0:
        assert max(f.instant_us for f in before) <= EPOCH_0 + 10 * SECOND
    sim.world.at(1.0, lambda: sim.set_database_clock(0 if skew < 0 else skew))
    sim.run(30.0, lambda: False)
    found = sim.fires("once")
    assert covered(sim, found, sim.schedules()["once"].last_us) and len(found) > len(before)
    missed = sum(f.times for f in found if f.state is F.MISSED)
    assert 50 < missed < 62 if skew > 0 else 20 < missed < 32


REACHED = (
    "store: commit unknown", "store: crash before commit", "store: crash after commit", "crash: scheduler", "pause: scheduler", "schedules: sweep met an outage",
    "nap: after a transaction", "nap: before a transaction", "nap: after rows were read",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_every_interesting_situation_is_reached() -> None:
    """Runs with strong faults, until each listed situation has come up; those that never did are named."""
    met: Counter[str] = Counter()
    for seed in range(5000, 5015):
        if all(met[probe] for probe in REACHED):
            return
        met += run(seed, Faults.drawn(seed, UNTIL, 2.0)).world.probes
    assert [probe for probe in REACHED if not met[probe]] == []


# -- celery's complaints


@pytest.mark.parametrize("trouble", ["none", "one killed", "one asleep", "two asleep in turn", "outage", "all killed"])
def test_celery_t38_however_many_fire_and_whatever_befalls_them_each_fire_is_one_run(trouble: str) -> None:
    """Three that all fire, doubled as beats are, or stopped as beats do: exactly one run a fire, and none is lost for longer than the trouble lasts."""
    sim = ScheduleSimulation(11, Faults(skew_ms=60_000), schedulers=3, workers=2)
    catching_up = {"misfire": Misfire.CATCH_UP, "limit": 1000, "tolerance_us": SECOND}
    sim.planner.publish("s", sim.definition(every(1), Script(seconds=0.1), **catching_up))
    a, b, c = sim.schedulers
    match trouble:
        case "one killed":
            sim.world.at(5.0, a.crash)
        case "one asleep":
            sim.world.at(5.0, lambda: setattr(a, "paused", True))
        case "two asleep in turn":
            for i, one in enumerate(itertools.islice(itertools.cycle((a, b)), 8)):
                sim.world.at(3.0 + i, lambda o=one: setattr(o, "paused", not o.paused))  # type: ignore[misc]
        case "outage":
            sim.world.at(5.0, lambda: sim.world.away.update(store=sim.world.now + 6.0))
        case "all killed":
            for one in (a, b, c):
                sim.world.at(5.0, one.crash)
    sim.run(25.0, lambda: False)
    found = [f for f in sim.fires("s") if f.instant_us < EPOCH_0 + 24 * SECOND]
    first = found[0].instant_us
    assert [(f.instant_us, f.state) for f in found] == [(first + i * SECOND, F.FIRED) for i in range(len(found))] and len(found) >= 23
    longest = {"outage": 7.5, "all killed": 6.0}.get(trouble, 0.1)
    assert max(f.recorded_us - f.instant_us for f in found) <= longest * SECOND
    ran = Counter(r.task for r in sim.ran)
    assert {ran[f.task] for f in found} == {1} or trouble == "outage"


def test_celery_t38_a_standby_fires_nothing_that_was_fired_before_it_came() -> None:
    """It starts long after, knows nothing, and finds the next fire in the row."""
    sim = ScheduleSimulation(12, Faults(), schedulers=1, workers=1)
    sim.planner.publish("s", sim.definition(every(1), Script(seconds=0.1)))
    sim.run(15.0, lambda: False)
    sim.schedulers[0].sweep = None
    before = len(sim.fires("s"))
    sim.schedulers.append(SimScheduler(sim, -60_000))
    sim.run(5.0, lambda: False)
    found = sim.fires("s")
    assert before + 4 <= len(found) <= before + 6 and {f.state for f in found} == {F.FIRED}
    assert len({f.instant_us for f in found}) == len(found)
