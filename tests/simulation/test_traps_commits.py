"""Known traps of commit, abort and recovered committables, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulation.base import counting
from tests.simulation.scene import Scene

from millstream.builder import JobBuilder
from millstream_schema.connectors import CommitAnswer, Committable, ConnectorContext
from millstream_schema.control import Abort, Durable
from millstream_schema.errors import CommitUnknown, JobConflict, StoreUnavailable
from millstream_schema.settings import RestartPolicy
from millstream_schema.states import Desired, EpochState, JobState
from millstream_schema.store import epochs, registry
from millstream_schema.store.database import Transaction
from millstream_tasks.sinks.memory import CollectSink
from millstream_tasks.sinks.segments import Missing, Segment

Make = Callable[..., Scene]
Refuse = Callable[[Committable], bool]


def refuse(scene: Scene, when: Refuse, after: bool = False) -> list[bool]:
    """Commits for which ``when`` holds fail while the list that is given back holds True; ``after``: only their answer is lost."""
    on = [True]
    target = scene.target
    commit = target.commit

    def commit_or_not(name: str, committable: Committable, context: ConnectorContext, missing: Missing) -> CommitAnswer:
        strikes = on[0] and when(committable)
        if strikes and not after:
            raise StoreUnavailable("the target is away")
        answer = commit(name, committable, context, missing)
        if strikes:
            raise CommitUnknown("the answer was lost")
        return answer

    target.commit = commit_or_not  # type: ignore[method-assign]
    return on


def epoch_of(committable_id: str) -> int:
    return int(committable_id.rsplit(":", 1)[1])


def test_t01_a_commit_that_fails_is_retried_before_later_epochs_and_never_reported(scene: Make) -> None:
    """While the commit of epoch 3 fails the job reports no epoch from 3 on as committed and says why; then all follow, in order."""
    job = scene()
    on = refuse(job, lambda c: c.epoch >= 3)
    job.until_durable(5)
    assert job.row.newest_committed <= 2
    assert all(epoch_of(i) <= 2 for i in job.target.committed())
    assert "the target is away" in str(job.sim.operations.status(job.job)["commits_waiting_for"])
    on[0] = False
    job.complete()
    order = [epoch_of(i) for i in job.target.committed() if ":out:0:" in i]
    assert order == sorted(order)


def test_t01_durable_epochs_that_are_not_committed_are_bounded(scene: Make) -> None:
    """A target that stays away stops new epochs at the bound; nothing is lost when it comes back."""
    job = scene(max_uncommitted=3)
    on = refuse(job, lambda c: True)
    job.sim.run_for(12)
    waiting = [e for e in job.epoch_rows() if e.state is EpochState.DURABLE]
    assert 1 <= len(waiting) <= 4
    on[0] = False
    job.complete()


def test_t02_what_an_aborted_epoch_prepared_is_committed_with_the_next(scene: Make) -> None:
    """An epoch is sealed and then aborted; with the next durable one both committables become visible, once each, in order."""
    job = scene()
    job.until_committed(1)
    job.until(lambda: job.row.in_flight >= 2, "an epoch in flight")
    job.sim.world.away["storage"] = job.sim.world.now + 1.5
    job.until(lambda: any(e.state is EpochState.ABORTED for e in job.epoch_rows()), "an aborted epoch")
    job.until_durable(job.row.next_epoch)
    aborted = {e.epoch for e in job.epoch_rows() if e.state is EpochState.ABORTED}
    assert aborted
    job.complete()
    for subtask in ("0", "1"):
        mine = [epoch_of(i) for i in job.target.committed() if f":out:{subtask}:" in i]
        assert mine == sorted(set(mine))
        assert aborted & set(mine), "the aborted epoch's output is visible under its own identity"


def test_t26_a_late_completion_notice_is_a_no_op(scene: Make) -> None:
    """Epoch 5 is announced before 4: both are committed once, the late notice changes nothing."""
    job = scene(epoch_interval_ms=400)
    job.until_durable(1)
    for child in job.children():
        send = child.send
        held: list[Any] = []

        def send_reversed(message: Any, send: Any = send, held: list[Any] = held) -> None:
            if isinstance(message, Durable):
                held.append(message)
                if len(held) == 2:
                    send(held[1])
                    send(held[0])
                    send(held[1])
                    held.clear()
                return
            send(message)

        child.send = send_reversed  # type: ignore[method-assign]
    job.until_committed(5)
    assert len(job.target.committed()) == len(set(job.target.committed()))
    assert all(c.runner._durable >= 4 for c in job.children())
    for node in job.sim.nodes:  # the last notice must come: undo the reversal by a new generation
        node.crash()
    job.complete()


def test_t27_a_crash_right_after_the_manifest_is_durable_commits(scene: Make) -> None:
    """Everything dies between the durable manifest and any notice: recovery commits that epoch, and aborts what was not durable."""
    job = scene()
    on = refuse(job, lambda c: c.epoch == 3)
    job.until_durable(3)
    listed = {c.id for c in job.manifest(3).committables() if c.epoch == 3}
    assert listed
    for node in job.sim.nodes:
        node.crash()
    on[0] = False
    assert not listed & set(job.target.committed())
    job.until(lambda: listed <= set(job.target.committed()), "epoch 3 committed by recovery")
    job.complete()


def test_t27_a_crash_before_the_epoch_is_durable_aborts_it(scene: Make) -> None:
    """What was sealed for an epoch that never became durable never becomes visible under it."""
    job = scene()
    job.until_durable(2)
    job.sim.world.away["storage"] = job.sim.world.now + 3
    job.until(lambda: job.row.in_flight > 2 and len(job.target.staged()) > 0, "epoch 3 in flight")
    doomed = job.row.in_flight
    for node in job.sim.nodes:
        node.crash()
    job.until_durable(doomed + 1)
    assert not [i for i in job.target.committed() if epoch_of(i) == doomed]
    assert next(e for e in job.epoch_rows() if e.epoch == doomed).state is EpochState.ABORTED
    job.complete()


def test_t28_a_crash_after_the_external_commit_is_seen_as_committed(scene: Make) -> None:
    """The commit took effect, its answer and the node are lost: recovery commits again and nothing is there twice."""
    job = scene()
    refuse(job, lambda c: c.epoch == 3, after=True)
    job.until(lambda: any(epoch_of(i) == 3 for i in job.target.committed()), "epoch 3 visible")
    assert job.row.newest_committed < 3
    for node in job.sim.nodes:
        node.crash()
    job.until(lambda: job.sim.world.probes["commit repeated"] > 0, "the commit repeated", 90)
    job.verify()


def losing(job: Scene) -> Counter[Any]:
    """Epoch 3 is durable, and what was staged for it is gone before it is committed; what was lost."""
    lost: Counter[Any] = Counter()
    on = refuse(job, lambda c: c.epoch >= 3)
    job.until_durable(3)
    for committable in job.manifest(3).committables():
        if committable.epoch == 3:
            lost.update(job.target._staging.pop(Segment.of(committable)))
    on[0] = False
    return lost


def test_t30_a_committable_that_is_unknown_to_its_target_fails_the_job_by_name(scene: Make) -> None:
    """Staging that is gone can be committed by no restart: the budget ends, FAILED names the committable and what to do; nothing else becomes visible."""
    job = scene(restart=RestartPolicy(failures=3, delay_ms=50))
    assert losing(job)
    assert job.sim.run_to_end(job.job) is JobState.FAILED
    assert ":out:" in job.row.reason and "missing='warn'" in job.row.reason
    assert not job.visible() - job.reference
    assert all(epoch_of(i) < 3 for i in job.target.committed())


class Warned(Scene):
    """A sink that goes on without what its target has lost."""

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(self.splits, self.per_split, self.rate, self.value), uid="records")
        counts = records.key_by(lambda r: r[0]).aggregate(int, lambda n, _: n + 1, uid="count")
        counts.sink_to(CollectSink("out", self.target, missing="warn"), uid="out")


def test_t30_a_sink_that_may_go_on_says_what_was_lost(scene: Make) -> None:
    """With ``missing='warn'`` the job finishes without what was lost, and with everything else once."""
    job = scene(Warned)
    lost = losing(job)
    assert job.sim.run_to_end(job.job) is JobState.FINISHED
    assert lost
    assert job.visible() == job.reference - lost
    assert not job.target.staged()


def test_t34_a_restored_subtask_ignores_notices_of_epochs_before_its_start(scene: Make) -> None:
    """A completion or abort notice of an older epoch moves nothing in a subtask restored from a newer one: no commit, no report, the same base of its increments."""
    job = scene()
    job.until_committed(3)
    for node in job.sim.nodes:
        node.crash()
    job.until(lambda: job.row.state is JobState.RUNNING and job.row.restore_epoch >= 3, "restored")
    job.until(lambda: job.row.in_flight > 0, "an epoch in flight")
    asked: list[int] = []

    def note(committable: Committable) -> bool:
        asked.append(committable.epoch)
        return False

    refuse(job, note)

    def state() -> list[Any]:
        runners = [(c.runner, len(c._outbox)) for c in job.children()]
        return [(r.committer.committed, r.committer.pending(), r.snapshotter._base, r.alignment.done, reports) for r, reports in runners]

    before = state()
    for child in job.children():
        for message in (Durable(1), Abort(1), Durable(job.row.restore_epoch), Abort(job.row.restore_epoch)):
            child.runner._handle(message)
    assert state() == before
    assert asked == []
    job.complete()
    assert asked


def test_t35_an_epoch_is_committed_when_all_sink_subtasks_have_confirmed(scene: Make) -> None:
    """One of two sink subtasks cannot commit: its epoch counts as not committed although the other's output is visible."""
    job = scene()
    on = refuse(job, lambda c: c.subtask == 1 and c.epoch >= 2)
    job.until(lambda: any(i.endswith(":0:3") for i in job.target.committed()), "subtask 0 committed epoch 3")
    job.sim.run_for(1)
    assert job.row.newest_committed <= 1
    assert not any(e.state is EpochState.COMMITTED and e.epoch >= 2 for e in job.epoch_rows())
    on[0] = False
    job.complete()


def test_t39_an_unknown_outcome_of_the_durable_write_is_decided_once(scene: Make) -> None:
    """The answer to the COMMIT that made an epoch durable is lost: the guarded write is made again, never both durable and aborted."""
    job = scene()
    lost = 0
    write = job.sim.database.faults
    assert write is not None
    after = write.after_commit

    def after_commit() -> None:
        nonlocal lost
        current, job.sim.world.current = job.sim.world.current, None
        newest = job.row.newest_durable
        job.sim.world.current = current
        if current is not None and newest > lost:
            lost = newest
            raise CommitUnknown("simulated")
        after()

    write.after_commit = after_commit  # type: ignore[method-assign]
    job.complete()
    assert lost >= 3
    durable = [e.epoch for e in job.epoch_rows() if e.state in (EpochState.DURABLE, EpochState.COMMITTED)]
    assert lost in durable


def test_t60_a_sink_acknowledges_the_barrier_without_waiting_for_the_commit(scene: Make) -> None:
    """The target's commits hang: epochs go on becoming durable, so nobody waits in a circle."""
    job = scene()
    on = refuse(job, lambda c: True)
    job.until_durable(4)
    assert job.row.newest_committed == 0
    on[0] = False
    job.complete()


def test_t93_a_commit_that_fails_while_suspending_is_listed_and_finished_by_resume(scene: Make) -> None:
    """The savepoint is durable, its commit cannot be carried out: the job is STOPPED with its pending commits listed, and resume finishes them."""
    job = scene(commit_deadline_ms=4000)
    job.until_committed(1)
    on = refuse(job, lambda c: c.epoch > 1)
    job.stop(Desired.SUSPEND, "sp")
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    manifest = job.manifest()
    pending = {c["id"] for c in job.sim.operations.status(job.job)["pending_commits"]}
    assert pending == {c.id for c in manifest.committables()} != set()
    assert not pending & set(job.target.committed())
    on[0] = False
    job.sim.resume(job.job, job.submission())
    job.until(lambda: pending <= set(job.target.committed()), "pending commits finished")
    job.complete()


def test_t93_pending_commits_of_a_cancelled_job_are_listed_and_finished_by_commit(scene: Make) -> None:
    """After CANCEL with the target away, ``commit`` alone makes the newest durable epoch visible, and the job stays as it ended."""
    job = scene(commit_deadline_ms=3000)
    job.until_committed(1)
    on = refuse(job, lambda c: c.epoch > 1)
    job.until_durable(3)
    job.stop(Desired.CANCEL)
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    manifest = job.manifest()
    listed = {c["id"] for c in job.sim.operations.status(job.job)["pending_commits"]}
    assert listed == {c.id for c in manifest.committables()} != set()
    on[0] = False
    job.sim.operations.commit(job.job)
    assert job.sim.run_to_end(job.job) is JobState.STOPPED
    assert listed <= set(job.target.committed())
    assert job.visible() == job.before(manifest)
    assert job.sim.operations.status(job.job)["pending_commits"] == []


def test_t42_a_late_acknowledgement_changes_and_frees_nothing(scene: Make) -> None:
    """An acknowledgement of an aborted epoch of an old generation is refused; the newest durable epoch and its segments stay."""
    job = scene()
    job.until_durable(2)
    job.until(lambda: job.row.in_flight > 2, "an epoch in flight")
    late, generation = job.row.in_flight, job.row.generation
    snapshot = job.manifest().subtasks[0]
    subtasks = [c.runner.subtask.id for c in job.children()]
    for node in job.sim.nodes:
        node.crash()
    job.until(lambda: job.row.generation > generation, "a new generation")
    newest = job.row.newest_durable

    def acknowledge(tx: Transaction) -> list[bool]:
        return [epochs.acknowledge(tx, job.job, late, generation, s, "old", snapshot, "") for s in subtasks]

    assert not any(job.sim.database.run(acknowledge))
    assert job.row.newest_durable == newest
    assert all(h.key in job.sim.storage.blobs for h in job.manifest(newest).handles())
    job.complete()


def test_t45_messages_of_an_old_attempt_do_not_touch_the_new_one(scene: Make) -> None:
    """A failure, a decline or READY of a superseded attempt is refused; the present attempts go on."""
    job = scene()
    job.until_durable(1)
    old = {c.runner.subtask.id: c.runner.deployment.attempt for c in job.children()}
    generation = job.row.generation
    for node in job.sim.nodes:
        node.crash()
    job.until(lambda: job.row.state is JobState.RUNNING and job.row.generation > generation, "a new generation runs")
    now = job.row.generation
    for subtask, attempt in old.items():
        for g in (generation, now):
            ended = job.sim.database.run(
                lambda tx, s=subtask, a=attempt, g=g: registry.end_assignment(tx, job.job, g, s, a, "FAILED", "error", "late")  # type: ignore[arg-type,misc]
            )
            assert not (ended and g == now)
    job.until(lambda: job.row.in_flight > 0, "an epoch in flight")
    flying = job.row.in_flight
    declined = job.sim.database.run(
        lambda tx: epochs.acknowledge(tx, job.job, flying, generation, "count:0", old["count:0"], None, "late decline")
    )
    assert not declined
    assert job.row.generation == now
    job.until_durable(flying)
    job.complete()


def test_a_second_savepoint_is_refused_while_one_is_taken(scene: Make) -> None:
    """Two names for one epoch would leave one of them without a savepoint."""
    job = scene()
    job.until_durable(1)
    job.sim.operations.savepoint(job.job, "one")
    try:
        job.sim.operations.savepoint(job.job, "two")
    except JobConflict as exc:
        assert "one" in str(exc)
    else:
        raise AssertionError("the second savepoint was taken")
    job.complete()
