"""Known traps of fencing, zombies, clocks and coordinator fail-over, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.simulation.scene import Scene

from millstream.testing.actors import LEASE_MS, SimCoordinator, SimNode
from millstream.testing.simulation import Faults
from millstream_coordinator.decisions import MakeDurable
from millstream_schema.states import EpochState, JobState
from millstream_schema.store import epochs, registry
from millstream_schema.store.database import Transaction
from millstream_tasks.sinks.segments import Segment

Make = Callable[..., Scene]


class Long(Scene):
    per_split = 260


def pause(job: Scene, actor: SimNode | SimCoordinator, seconds: float) -> None:
    """Between two of its steps."""
    actor.paused = True
    job.sim.world.at(seconds, lambda: setattr(actor, "paused", False))


def node_with(job: Scene, vertex: str) -> SimNode:
    return job.children(vertex)[0].node


def owners(job: Scene) -> dict[str, int]:
    """Subtask → how many living processes of the present generation run it."""
    found: dict[str, int] = {}
    for child in job.children():
        found[child.runner.subtask.id] = found.get(child.runner.subtask.id, 0) + 1
    return found


def test_t06_a_coordinator_restart_replaces_no_token(scene: Make) -> None:
    """All coordinators are new: the generation given to workers stays, a full epoch succeeds, and a wrong generation is rejected."""
    job = scene(Long)
    job.until_committed(1)
    generation, term = job.row.generation, job.sim.term()
    for coordinator in job.sim.coordinators:
        coordinator.crash()
    job.until(lambda: job.sim.term() > term, "a take-over")
    job.until_durable(job.row.next_epoch)
    assert job.row.generation == generation
    job.until(lambda: job.row.in_flight > 0, "an epoch in flight")
    flying, snapshot = job.row.in_flight, job.manifest().subtasks[0]
    wrong = job.sim.database.run(lambda tx: epochs.acknowledge(tx, job.job, flying, generation + 1, "count:0", "x", snapshot, ""))
    assert not wrong
    job.complete()


def zombie(job: Scene, where: str) -> dict[str, Any]:
    """The first stage or commit of subtask count:0 after now stands still until its node has lost the lease and a new generation runs, then goes on."""
    seen: dict[str, Any] = {}
    target, world = job.target, job.sim.world
    original: Any = getattr(target, where)

    def asleep(*args: Any) -> Any:
        if not seen and world.current is not None:
            actor: Any = world.current
            seen["generation"] = actor.runner.deployment.generation
            node = actor.node
            node.paused = True
            world.nap(9.0)
            node.paused = False
            seen["now"] = job.row.generation
            seen["staged"] = dict(target.staged())
            seen["values"] = target.values("out")
            try:
                return original(*args)
            except BaseException as exc:
                seen["error"] = type(exc).__name__
                raise
            finally:
                seen["same"] = (seen["staged"], seen["values"]) == (dict(target.staged()), target.values("out"))
        return original(*args)

    setattr(target, where, asleep)
    return seen


@pytest.mark.parametrize("where", ["stage", "commit"])
def test_t41_a_woken_zombie_is_fenced_at_the_target(scene: Make, where: str) -> None:
    """A subtask stopped right before it stages or commits, past its lease, knocks under its old generation: refused, without any effect."""
    job = scene()
    job.until_committed(1)
    seen = zombie(job, where)
    job.complete()
    assert seen["now"] > seen["generation"]
    assert seen["error"] == "Fenced"
    assert seen["same"]


def test_t41_a_woken_zombie_sends_nothing_and_stops_itself(scene: Make) -> None:
    """A node paused past its lease: its subtasks exit by themselves when woken, and no envelope or acknowledgement of theirs counts."""
    job = scene()
    job.until_committed(1)
    node = node_with(job, "records")
    old = list(node.children)
    generation = job.row.generation
    pause(job, node, 9.0)
    job.until(lambda: job.row.state is JobState.RUNNING and job.row.generation > generation, "a new generation runs")
    job.until(lambda: not node.paused, "woken")
    job.until(lambda: all(c.dead for c in old), "the zombies have stopped", 3)
    job.complete()


def test_t41_a_stale_snapshot_upload_and_acknowledgement_count_for_nothing(scene: Make) -> None:
    """A snapshot that is stored after the lease, and acknowledged: the epoch it belongs to stays aborted, and its blob is in no manifest."""
    job = scene()
    job.until_durable(1)
    storage, world = job.sim.storage, job.sim.world
    put = storage.put
    seen: list[tuple[str, int]] = []

    def asleep(key: str, data: bytes) -> Any:
        actor: Any = world.current
        if not seen and "count" in key:
            seen.append((key, int(key.split("/")[1][1:])))
            actor.node.paused = True
            world.nap(9.0)
            actor.node.paused = False
        return put(key, data)

    storage.put = asleep  # type: ignore[method-assign]
    job.until(lambda: bool(seen), "a snapshot")
    key, epoch = seen[0]
    job.complete()
    assert next(e for e in job.epoch_rows() if e.epoch == epoch).state is EpochState.ABORTED
    assert key not in {h.key for h in job.manifest().handles()}


def test_t43_only_one_of_two_coordinators_makes_an_epoch_durable(scene: Make) -> None:
    """A coordinator that stood still right before its transaction finds the epoch made durable by another: one manifest, no second decision."""
    job = scene()
    job.until_durable(1)
    world, made = job.sim.world, []
    slept: set[int] = set()
    overtaken: list[bool] = []

    def complete() -> int:
        """The epoch in flight, once everyone has acknowledged it."""
        flying = job.row.in_flight
        acks = job.sim.database.read(lambda tx: epochs.ack_marks(tx, job.job, flying)) if flying else []
        return flying if len(acks) == 4 else 0

    for coordinator in job.sim.coordinators:
        assert coordinator.coordinator is not None
        reconciler = coordinator.coordinator._reconciler
        apply, advance = reconciler._apply, reconciler.advance

        def late(job_id: str, advance: Any = advance, actor: SimCoordinator = coordinator) -> Any:
            current, world.current = world.current, None
            flying = complete()
            if flying and flying not in slept and not world._asleep:
                slept.add(flying)
                actor.paused = True
                world.nap(0.4)
                actor.paused = False
                overtaken.append(job.row.newest_durable >= flying)
            world.current = current
            return advance(job_id)

        reconciler.advance = late  # type: ignore[method-assign]

        def noting(tx: Transaction, view: Any, step: Any, outbox: Any, apply: Any = apply, who: str = coordinator.name) -> Any:
            answer = apply(tx, view, step, outbox)
            if isinstance(step, MakeDurable):
                made.append((who, view.epoch.epoch))
            return answer

        reconciler._apply = noting  # type: ignore[method-assign]

    def everyone_looks() -> None:
        for coordinator in job.sim.coordinators:
            coordinator.look(job.job)
        world.at(0.05, everyone_looks)

    everyone_looks()
    job.finish()
    job.final()
    ids = [epoch for _, epoch in made]
    assert ids == sorted(set(ids))
    assert {who for who, _ in made} == {"coordinator0", "coordinator1"}
    assert overtaken and all(overtaken)


def test_t44_an_old_coordinators_cleaning_deletes_nothing_that_counts(scene: Make) -> None:
    """A coordinator stands still between deciding what to delete and deleting it, over a take-over and new epochs: nothing referenced is lost."""
    job = scene(Long, retained=1, max_segments=2)
    storage, world = job.sim.storage, job.sim.world
    delete = storage.delete
    naps: list[bool] = []

    def asleep(keys: Sequence[str]) -> None:
        actor: Any = world.current
        leads = isinstance(actor, SimCoordinator) and actor.coordinator is not None and actor.coordinator.leading
        if leads and keys and len(naps) < 2 and not world._asleep:
            term, newest = job.sim.term(), job.sim.job(job.job).newest_durable
            actor.paused = True
            world.nap(5.0)
            actor.paused = False
            naps.append(job.sim.term() > term and job.sim.job(job.job).newest_durable > newest)
        delete(keys)

    storage.delete = asleep  # type: ignore[method-assign]
    job.until(lambda: bool(naps), "something to collect")
    assert all(naps), "nobody took over meanwhile: nothing is shown"
    job.check()
    for node in job.sim.nodes:
        if node.node is not None:
            node.crash()
    job.complete()


def test_t46_losing_the_database_for_less_than_the_lease_changes_nothing(scene: Make) -> None:
    """The database is away for half a lease: same generation, same nodes, same term's worth of epochs after."""
    job = scene()
    job.until_committed(1)
    generation, nodes = job.row.generation, [n.node.id for n in job.sim.nodes if n.node is not None]
    job.sim.world.away["store"] = job.sim.world.now + LEASE_MS / 2000
    job.until_committed(job.row.next_epoch)
    assert job.row.generation == generation
    assert [n.node.id for n in job.sim.nodes if n.node is not None] == nodes
    job.complete()


def test_t46_losing_the_database_for_longer_than_the_lease_ends_every_subtask(scene: Make) -> None:
    """Every node stops its subtasks before the database could give their work away, and comes back under a new id; the result is whole."""
    job = scene()
    job.until_committed(1)
    old = job.children()
    generation, nodes = job.row.generation, [n.node.id for n in job.sim.nodes if n.node is not None]
    job.sim.world.away["store"] = job.sim.world.now + 2 * LEASE_MS / 1000
    job.sim.run_for(LEASE_MS / 1000 + 0.6)
    assert all(c.dead for c in old)
    job.until(lambda: job.row.generation > generation, "a new generation")
    assert not set(nodes) & {n.node.id for n in job.sim.nodes if n.node is not None}
    job.complete()


def test_t48_clocks_that_are_a_minute_off_give_nothing_to_two_owners(scene: Make) -> None:
    """Wall clocks differ by two minutes and are set now and then: no lease is lost, no subtask runs twice, the result is whole."""
    job = scene(faults=Faults(skew_ms=60_000))
    job.sim.nodes[0].clock.skew_ms, job.sim.nodes[1].clock.skew_ms = -60_000, 60_000
    job.until_committed(1)
    generation = job.row.generation

    def alone() -> bool:
        assert all(n == 1 for n in owners(job).values())
        return job.row.state.ended

    job.until(alone, "the end")
    history = [h["event"] for h in job.sim.operations.status(job.job)["history"]]
    assert "restart" not in history
    assert job.row.generation == generation + 1  # the end is a generation of its own: it fences whoever is left
    job.final()


def test_t48_a_subtask_never_has_two_owners_of_one_generation(scene: Make) -> None:
    """The guarded start refuses a second copy, whoever asks."""
    job = scene()
    job.until(lambda: len(job.children()) == 4, "all subtasks")
    child = job.children("count")[0]
    d = child.runner.deployment
    again = job.sim.database.run(lambda tx: registry.start_assignment(tx, job.job, d.generation, d.subtask, child.node.node.id, "second"))  # type: ignore[union-attr]
    assert not again
    job.complete()


def test_t102_ticks_twice_late_and_missed_make_no_burst_of_epochs(scene: Make) -> None:
    """Coordinators are poked wildly, then not at all for a while: at most one epoch in flight, never two within the minimum pause."""
    job = scene(min_pause_ms=400, epoch_interval_ms=500)
    job.until_durable(1)

    def poke() -> None:
        for coordinator in job.sim.coordinators:
            coordinator.look(job.job)
            coordinator.look(job.job)
        if job.sim.world.now < 3:
            job.sim.world.at(0.01, poke)

    poke()
    for coordinator in job.sim.coordinators:
        job.sim.world.at(3.0, lambda c=coordinator: pause(job, c, 2.5))  # type: ignore[misc]

    def single() -> bool:
        flying = [e for e in job.epoch_rows() if e.state in (EpochState.TRIGGERED, EpochState.PRECOMMITTED)]
        assert len(flying) <= 1
        return job.row.state.ended

    job.until(single, "the end")
    job.final()
    times = [e.triggered_us for e in job.epoch_rows() if e.kind == "checkpoint"]
    assert all(b - a >= 400_000 for a, b in pairwise(times))


def test_staging_of_a_zombie_is_named_by_its_own_generation() -> None:
    """Two generations of one subtask never stage into the same place."""
    assert Segment("j", "o", 0, 1, 1) != Segment("j", "o", 0, 2, 1)
