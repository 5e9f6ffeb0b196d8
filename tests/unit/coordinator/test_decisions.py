"""``next_step``: one decision for every situation a job can be in, from rows alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.coordinator.rows import (
    COMMITTERS,
    LOOSE,
    NOW,
    PLAN,
    SECOND,
    SOURCES,
    SUBTASKS,
    ack,
    assignment,
    assignments,
    epoch_row,
    job_row,
    split_row,
    view,
)

from millstream_coordinator import decisions as d
from millstream_schema.control import EpochKind
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import AssignmentState, Desired, EpochState, JobState, SplitOwner

J, A = JobState, AssignmentState
BEFORE_DEPLOY = [J.PENDING, J.WAITING_FOR_RESOURCES, J.RESTARTING]


def step(job: Any, **changes: Any) -> d.Step:
    return d.next_step(view(job, **changes))


def tuned(**changes: Any) -> StreamSettings:
    return msgspec.structs.replace(StreamSettings(), **changes)


# -- before a deployment


@pytest.mark.parametrize("state", [J.STOPPED, J.FINISHED, J.FAILED])
@pytest.mark.parametrize("desired", list(Desired))
def test_an_ended_job_is_left_alone(state: JobState, desired: Desired) -> None:
    """Whatever is wanted of it: only an operation brings it back."""
    assert step(job_row(state, desired=desired)) == d.Wait()


@pytest.mark.parametrize("state", BEFORE_DEPLOY)
def test_a_job_is_deployed_when_it_is_due_and_not_before(state: JobState) -> None:
    """The delay of a restart is kept to the microsecond."""
    assert step(job_row(state)) == d.Deploy()
    assert step(job_row(state, due_us=NOW + 1)) == d.Wait(NOW + 1)
    assert step(job_row(state, due_us=NOW)) == d.Deploy()


@pytest.mark.parametrize("state", [*BEFORE_DEPLOY, J.DEPLOYING, J.RUNNING])
def test_cancel_ends_at_once_unless_a_sink_may_hold_output(state: JobState) -> None:
    """Before its first generation, or without committing sinks, nothing is left to commit; else the ending carries out commits first."""
    never = job_row(state, desired=Desired.CANCEL, generation=0)
    assert step(never) == d.End(J.STOPPED, "cancelled")
    assert step(job_row(state, desired=Desired.CANCEL)) == d.Finalize(J.STOPPED, "cancelled")
    assert d.next_step(view(job_row(state, desired=Desired.CANCEL), LOOSE)) == d.End(J.STOPPED, "cancelled")


def test_t96_cancel_goes_before_a_failure() -> None:
    """A cancelled job whose subtask has just failed is stopped, not restarted and not failed."""
    rows = [assignment(SUBTASKS[0], A.FAILED, cause="operator"), *assignments()[1:]]
    assert step(job_row(desired=Desired.CANCEL), assignments=rows) == d.Finalize(J.STOPPED, "cancelled")


# -- deploying


def test_all_ready_and_discovered_is_running() -> None:
    """READY of every subtask, discovery of every source and an owner for every split."""
    assert step(job_row(J.DEPLOYING)) == d.BecomeRunning()


@pytest.mark.parametrize("late", [A.ASSIGNED, A.STARTED])
def test_one_subtask_that_is_not_ready_holds_the_start(late: AssignmentState) -> None:
    """Sources read only when everyone can take what they send."""
    rows = [*assignments()[:-1], assignment(SUBTASKS[-1], late)]
    limit = NOW + StreamSettings().start_limit_ms * 1000
    assert step(job_row(J.DEPLOYING), assignments=rows) == d.Wait(limit)


def test_a_source_that_has_not_reported_holds_the_start() -> None:
    """A job without its splits would end at once as "all input processed"."""
    assert isinstance(step(job_row(J.DEPLOYING), discovered={}), d.Wait)
    assert step(job_row(J.DEPLOYING), discovered={"in": False}) == d.BecomeRunning()


def test_splits_are_owned_before_anything_runs() -> None:
    """Unassigned splits go to the reader with the fewest, in a stable order."""
    splits = [split_row("a", SplitOwner.ASSIGNED, 1), split_row("b"), split_row("c"), split_row("d"), split_row("z", SplitOwner.FINISHED)]
    assert step(job_row(J.DEPLOYING), splits=splits) == d.OwnSplits([("in", "b", 0), ("in", "c", 0), ("in", "d", 1)])


def test_t64_more_readers_than_splits_is_no_hindrance() -> None:
    """A reader without a split is READY all the same."""
    assert step(job_row(J.DEPLOYING), splits=[split_row("a", SplitOwner.ASSIGNED, 0)]) == d.BecomeRunning()
    assert step(job_row(J.DEPLOYING), splits=[]) == d.BecomeRunning()


def test_splits_of_an_operator_that_is_gone_are_passed_over() -> None:
    """After a lenient upgrade rows of a dropped source stay behind; they belong to nobody and stop nothing."""
    splits = [split_row("old", operator="gone"), split_row("a")]
    assert step(job_row(J.DEPLOYING), splits=splits) == d.OwnSplits([("in", "a", 0)])


def test_c7_a_deploy_that_nobody_carries_out_is_noticed_by_the_start_limit() -> None:
    """An assignment lost on its way costs the start limit, then a restart that names who was late."""
    rows = [*assignments()[:-1], assignment(SUBTASKS[-1], A.ASSIGNED)]
    job = job_row(J.DEPLOYING, deployed_us=NOW - StreamSettings().start_limit_ms * 1000)
    found = step(job, assignments=rows)
    assert isinstance(found, d.Restart)
    assert found.cause == "start" and SUBTASKS[-1] in found.detail and SUBTASKS[0] not in found.detail


def test_a_start_that_waits_for_splits_only_says_which_source_did_not_report_them() -> None:
    """Every subtask is READY; without the source's name the text would end in nothing."""
    job = job_row(J.DEPLOYING, deployed_us=NOW - StreamSettings().start_limit_ms * 1000)
    found = step(job, discovered={})
    assert isinstance(found, d.Restart) and found.cause == "start"
    assert found.detail.endswith("ms: in (its splits were not reported)")
    assert step(job, discovered={"in": True}) == d.BecomeRunning()


# -- failures and budgets


@pytest.mark.parametrize("state", [J.DEPLOYING, J.RUNNING])
def test_a_failed_subtask_restarts_the_whole_job(state: JobState) -> None:
    """Recovery is global, with the cause of the one that failed first."""
    rows = [
        assignment("in:0", A.FAILED, cause="channel", detail="later", changed_us=NOW + 5),
        assignment("in:1", A.FAILED, cause="operator", detail="first", changed_us=NOW + 1),
        *assignments()[2:],
    ]
    assert step(job_row(state), assignments=rows) == d.Restart("operator", "in:1: first", False, False, 200_000)


def test_an_expired_lease_restarts_and_a_finished_subtask_needs_no_node() -> None:
    """C1, T-10: only nodes that live by the database's clock count; what is over needs nobody."""
    rows = [assignment(SUBTASKS[0], node="node-b"), *assignments()[1:]]
    found = step(job_row(), assignments=rows)
    assert isinstance(found, d.Restart) and found.cause == "node" and "node-b" in found.detail
    rows = [assignment(SUBTASKS[0], A.FINISHED, node="node-b"), *assignments()[1:]]
    assert not isinstance(step(job_row(), assignments=rows), d.Restart)


@pytest.mark.parametrize("cause", sorted(d.PERMANENT))
def test_what_a_restart_cannot_mend_fails_at_once(cause: str) -> None:
    """T-09: a wrong plan, an unreadable snapshot or a refused restore is FAILED with its cause, before any budget is spent."""
    rows = [
        assignment(SUBTASKS[0], A.FAILED, cause="channel"),
        assignment(SUBTASKS[1], A.FAILED, cause=cause, detail="why"),
        *assignments()[2:],
    ]
    reason = f"{cause}: {SUBTASKS[1]}: why"
    cannot_start = cause in d.CANNOT_START  # a finalising deployment would not start either: what is uncommitted is listed
    assert step(job_row(), assignments=rows) == (d.End(J.FAILED, reason, pending=True) if cannot_start else d.Finalize(J.FAILED, reason))
    assert d.next_step(view(job_row(), LOOSE, assignments=rows)) == d.End(J.FAILED, reason, pending=cannot_start)


def test_the_failure_budget_ends_in_failed_with_the_cause() -> None:
    """The last failure within the budget restarts; the next one does not."""
    rows = [assignment(SUBTASKS[0], A.FAILED, cause="operator", detail="boom"), *assignments()[1:]]
    assert isinstance(step(job_row(failures=2), assignments=rows), d.Restart)
    ended = step(job_row(failures=3), assignments=rows)
    assert isinstance(ended, d.Finalize) and ended.target is J.FAILED
    assert "budget of 3" in ended.reason and "boom" in ended.reason


def test_c8_stalls_and_failures_have_budgets_of_their_own() -> None:
    """A job that used up one budget still has the other."""
    stalled = view(job_row(failures=3, stalls=0))
    assert isinstance(d.on_failure(stalled, "stall", "", stall=True), d.Restart)
    failing = view(job_row(failures=0, stalls=3))
    assert isinstance(d.on_failure(failing, "operator", ""), d.Restart)
    assert isinstance(d.on_failure(view(job_row(stalls=3)), "stall", "", stall=True), d.Finalize)


def test_a_hand_back_is_free() -> None:
    """A worker that shuts down costs no budget and no delay, however often."""
    rows = [assignment(SUBTASKS[0], A.FAILED, cause="handback"), *assignments()[1:]]
    assert step(job_row(failures=99, stalls=99), assignments=rows) == d.Restart("handback", f"{SUBTASKS[0]}: ", False, True, 0)


@pytest.mark.parametrize("kind", ["fixed", "exponential", "rate"])
def test_rc5_delays_never_overflow_and_never_shrink(kind: str) -> None:
    """However many restarts there were, the delay lies between 0 and the longest, and does not go down."""
    policy = RestartPolicy(kind=kind, delay_ms=100, max_delay_ms=10_000)
    delays = [d.restart_delay_us(policy, used) for used in [*range(70), 10**6, 10**18]]
    assert all(0 <= delay <= 10_000_000 for delay in delays)
    assert delays == sorted(delays)
    assert delays[0] == 100_000


def test_exponential_delays_double_up_to_the_longest() -> None:
    """200 ms, 400 ms, … 10 s."""
    policy = RestartPolicy()
    assert [d.restart_delay_us(policy, n) // 1000 for n in range(7)] == [200, 400, 800, 1600, 3200, 6400, 10_000]
    assert d.restart_delay_us(RestartPolicy(delay_ms=0), 5) == 0


# -- epochs


def test_an_epoch_is_triggered_when_the_interval_is_over() -> None:
    """T-102: one per interval, never a burst for what was missed; the minimum pause is kept."""
    due = NOW + 1000 * 1000
    assert step(job_row()) == d.Wait(due)
    assert step(job_row(epoch_us=NOW - SECOND)) == d.TriggerEpoch(EpochKind.CHECKPOINT)
    assert step(job_row(epoch_us=NOW - 60 * SECOND)) == d.TriggerEpoch(EpochKind.CHECKPOINT)
    paused = tuned(min_pause_ms=5000)
    assert step(job_row(epoch_us=NOW - SECOND), settings=paused) == d.Wait(NOW + 4 * SECOND)


def test_a_source_whose_window_is_full_gets_its_epoch_early() -> None:
    """Only the minimum pause holds it up."""
    assert step(job_row(wants_epoch=1)) == d.TriggerEpoch(EpochKind.CHECKPOINT)
    assert step(job_row(wants_epoch=1), settings=tuned(min_pause_ms=10)) == d.Wait(NOW + 10_000)


def test_t20_exhausted_sources_get_their_final_epoch_at_once() -> None:
    """All readers exhausted: the last data is committed by a final epoch; one that goes on holds it back."""
    over = [assignment(s, exhausted=int(s in SOURCES)) for s in SUBTASKS]
    assert step(job_row(), assignments=over) == d.TriggerEpoch(EpochKind.FINAL)
    half = [assignment(s, exhausted=int(s == SOURCES[0])) for s in SUBTASKS]
    assert not isinstance(step(job_row(), assignments=half), d.TriggerEpoch)


@pytest.mark.parametrize(("desired", "kind", "name"), [(Desired.DRAIN, EpochKind.DRAIN, ""), (Desired.SUSPEND, EpochKind.SUSPEND, "sp")])
def test_drain_and_suspend_trigger_their_terminal_epoch(desired: Desired, kind: EpochKind, name: str) -> None:
    """At once, again after an abort, also when commits are behind: no terminal epoch, no end."""
    assert step(job_row(desired=desired, wanted_savepoint="sp"), uncommitted=99) == d.TriggerEpoch(kind, name)


def test_a_savepoint_is_the_next_epoch() -> None:
    """It waits for no interval."""
    assert step(job_row(wanted_savepoint="sp")) == d.TriggerEpoch(EpochKind.SAVEPOINT, "sp")


def test_too_many_uncommitted_epochs_hold_back_new_ones() -> None:
    """Ten durable epochs wait for a target: no new one is triggered until it moves."""
    assert isinstance(step(job_row(epoch_us=0), uncommitted=9), d.TriggerEpoch)
    assert isinstance(step(job_row(epoch_us=0), uncommitted=10), d.Wait)


def test_splits_found_later_are_handed_out_but_never_while_an_epoch_is_in_flight() -> None:
    """T-61: triggering freezes hand-out, so that no split lies between the copied rows and a reader's cut."""
    splits = [split_row("new")]
    assert step(job_row(), splits=splits) == d.OwnSplits([("in", "new", 0)])
    busy = step(job_row(in_flight=7), splits=splits, epoch=epoch_row())
    assert isinstance(busy, d.Wait)


def acked(state: EpochState = EpochState.TRIGGERED, subtasks: list[str] = SUBTASKS, **changes: Any) -> d.Step:
    return step(job_row(in_flight=7), epoch=epoch_row(state=state), acks=[ack(s) for s in subtasks], **changes)


def test_an_epoch_becomes_durable_by_way_of_precommitted_when_all_have_acknowledged() -> None:
    """TRIGGERED → PRECOMMITTED → DURABLE, and only with every subtask of the plan."""
    assert acked() == d.Precommit()
    assert acked(EpochState.PRECOMMITTED) == d.MakeDurable()
    for missing in SUBTASKS:
        assert isinstance(acked(subtasks=[s for s in SUBTASKS if s != missing]), d.Wait)


def test_e5_an_acknowledgement_counts_once_and_of_this_generation_only() -> None:
    """Twice the same subtask is one; T-42: what an older generation acknowledged is not counted."""
    twice = [ack(SUBTASKS[0]), ack(SUBTASKS[0]), *[ack(s) for s in SUBTASKS[2:]]]
    assert isinstance(step(job_row(in_flight=7), epoch=epoch_row(), acks=twice), d.Wait)
    old = [ack(SUBTASKS[0], generation=2), *[ack(s) for s in SUBTASKS[1:]]]
    assert isinstance(step(job_row(in_flight=7), epoch=epoch_row(), acks=old), d.Wait)


def test_t16_a_declined_epoch_is_aborted_at_once() -> None:
    """Not by its timeout; the reason says who and why."""
    found = step(job_row(in_flight=7), epoch=epoch_row(), acks=[ack(SUBTASKS[1], "disk full")])
    assert found == d.AbortEpoch(f"declined by {SUBTASKS[1]}: disk full")


def test_the_epoch_timeout_only_aborts() -> None:
    """Absolute and long; subtasks that make progress all the while are named, not failed."""
    old = epoch_row(triggered_us=NOW - 600 * SECOND)
    found = step(job_row(in_flight=7), epoch=old, acks=[ack(s) for s in SUBTASKS[1:]])
    assert isinstance(found, d.AbortEpoch) and SUBTASKS[0] in found.reason


def test_t12_no_progress_of_those_that_are_awaited_is_a_stall() -> None:
    """Silence for the alignment limit restarts from the stall budget; progress of one that is awaited, however slow, does not."""
    old = epoch_row(triggered_us=NOW - 31 * SECOND)
    silent = [assignment(s, progressed_us=NOW - 30 * SECOND) for s in SUBTASKS]
    found = step(job_row(in_flight=7), epoch=old, assignments=silent, acks=[ack(SOURCES[0])])
    assert isinstance(found, d.Restart) and found.stall and SOURCES[0] not in found.detail
    slow = [*silent[:-1], assignment(SUBTASKS[-1], progressed_us=NOW - 1)]
    assert isinstance(step(job_row(in_flight=7), epoch=old, assignments=slow, acks=[]), d.Wait)


def test_c6_progress_before_the_trigger_does_not_count_against_a_subtask() -> None:
    """A job that was quiet for an hour has the whole limit from the trigger on."""
    quiet = [assignment(s, progressed_us=NOW - 3600 * SECOND) for s in SUBTASKS]
    assert isinstance(step(job_row(in_flight=7), epoch=epoch_row(triggered_us=NOW - SECOND), assignments=quiet), d.Wait)


def test_too_many_aborts_in_a_row_recover() -> None:
    """Three are borne, the fourth is a failure with the last reason."""
    assert not isinstance(step(job_row(aborts=3, reason="declined")), d.Restart)
    found = step(job_row(aborts=4, reason="declined"))
    assert isinstance(found, d.Restart) and found.cause == "aborts" and "declined" in found.detail


# -- commits and endings


def test_an_epoch_is_committed_when_every_committer_has_confirmed() -> None:
    """T-35: the least of all committers counts, and never more than is durable."""
    rows = [assignment(s, committed=7 if s != COMMITTERS[0] else 5) for s in SUBTASKS]
    assert step(job_row(newest_durable=7), assignments=rows) == d.MarkCommitted(5)
    assert not isinstance(step(job_row(newest_durable=7, newest_committed=5), assignments=rows), d.MarkCommitted)
    ahead = [assignment(s, committed=9) for s in SUBTASKS]
    assert step(job_row(newest_durable=7), assignments=ahead) == d.MarkCommitted(7)


def test_without_committing_sinks_durable_is_committed() -> None:
    """Nobody has anything to make visible."""
    assert d.next_step(view(job_row(newest_durable=7), LOOSE)) == d.MarkCommitted(7)


@pytest.mark.parametrize(
    ("kind", "state", "reason"),
    [("final", J.FINISHED, "all input processed"), ("drain", J.FINISHED, "drained"), ("suspend", J.STOPPED, "suspended at savepoint sp")],
)
def test_a_terminal_epoch_ends_the_job_once_it_is_committed_and_everyone_has_finished(kind: str, state: JobState, reason: str) -> None:
    """T-93: until then it waits, to a deadline; past it the ending says whether commits are pending."""
    last = epoch_row(7, EpochState.DURABLE, kind=kind, savepoint="sp", durable_us=NOW)
    late = msgspec.structs.replace(last, durable_us=NOW - 30 * SECOND)
    done = job_row(newest_durable=7, newest_committed=7)
    assert step(done, newest=last, assignments=assignments(A.FINISHED)) == d.End(state, reason)
    assert step(done, newest=last) == d.Wait(NOW + 30 * SECOND)
    assert step(done, newest=late) == d.End(state, reason)
    waiting = job_row(newest_durable=7)
    assert step(waiting, newest=last) == d.Wait(NOW + 30 * SECOND)
    assert step(waiting, newest=late) == d.End(state, reason, pending=True)


@pytest.mark.parametrize(("kind", "target"), [("final", J.FINISHED), ("drain", J.FINISHED), ("suspend", J.STOPPED)])
def test_a_failure_behind_the_durable_terminal_epoch_restarts_nothing(kind: str, target: JobState) -> None:
    """Only its commits are left to do: a restart would process more than the last epoch holds."""
    last = epoch_row(7, EpochState.DURABLE, kind=kind, savepoint="sp", durable_us=NOW)
    rows = [assignment(SUBTASKS[0], A.FAILED, cause="channel"), *assignments()[1:]]
    found = step(job_row(newest_durable=7), newest=last, assignments=rows)
    assert isinstance(found, d.Finalize) and found.target is target
    loose = d.next_step(view(job_row(newest_durable=7), LOOSE, newest=last, assignments=rows))
    assert isinstance(loose, d.End) and loose.state is target


def test_a_terminal_epoch_of_an_older_generation_ends_nothing() -> None:
    """A resumed job starts from its drain's epoch and goes on."""
    old = epoch_row(7, EpochState.COMMITTED, kind="drain", generation=2, durable_us=NOW)
    assert not isinstance(step(job_row(newest_durable=7, newest_committed=7), newest=old), d.End)


def test_suspend_waits_for_its_savepoint_until_the_commit_deadline() -> None:
    """STOPPED means that the savepoint lies in its own namespace, or says that it does not: storage that stays away does not keep a job from ending."""
    limit = StreamSettings().commit_deadline_ms * 1000
    last = epoch_row(7, EpochState.COMMITTED, kind="suspend", savepoint="sp", durable_us=NOW)
    done = {"newest": last, "assignments": assignments(A.FINISHED)}
    job = job_row(newest_durable=7, newest_committed=7)
    assert step(job, **done, savepoint_copying=True) == d.Wait(NOW + limit)
    late = step(job, **done, savepoint_copying=True, now=NOW + limit)
    assert isinstance(late, d.End) and late.state is J.STOPPED and not late.pending
    assert late.reason.startswith("suspended at savepoint sp; savepoint sp is not copied: the coordinator goes on trying")
    assert step(job, **done) == d.End(J.STOPPED, "suspended at savepoint sp")


def test_a_failure_behind_a_suspend_that_is_not_copied_ends_at_the_deadline_too() -> None:
    """With sinks that commit nothing there is nothing to finalise: only the copy is waited for."""
    limit = StreamSettings().commit_deadline_ms * 1000
    last = epoch_row(7, EpochState.COMMITTED, kind="suspend", savepoint="sp", durable_us=NOW)
    rows = [assignment(s.id, A.FAILED, cause="operator") for s in LOOSE.subtasks()]
    job = job_row(newest_durable=7, newest_committed=7)
    assert d.next_step(view(job, LOOSE, newest=last, assignments=rows, savepoint_copying=True)) == d.Wait(NOW + limit)
    late = d.next_step(view(job, LOOSE, newest=last, assignments=rows, savepoint_copying=True, now=NOW + limit))
    assert isinstance(late, d.End) and "savepoint sp is not copied" in late.reason


# -- stopping


def stopping(**changes: Any) -> Any:
    return job_row(J.STOPPING, target="STOPPED", mode="finalize", reason="cancelled", **changes)


def test_stopping_deploys_its_finalizer_and_ends_when_it_is_done() -> None:
    """The commits of the newest durable epoch come before the end."""
    assert step(stopping(deployed_us=0), assignments=[]) == d.Deploy(finalize=True)
    working = assignments(A.STARTED)
    assert step(stopping(), assignments=working) == d.Wait(NOW + 30 * SECOND)
    assert step(stopping(), assignments=assignments(A.FINISHED)) == d.End(J.STOPPED, "cancelled")


def test_a_finalizer_that_failed_or_whose_node_died_is_tried_again_to_the_deadline() -> None:
    """A second apart; past the deadline what could not be committed is listed, never rolled back."""
    failed = [assignment(COMMITTERS[0], A.FAILED, cause="target")]
    assert step(stopping(), assignments=failed) == d.Wait(NOW + SECOND)
    assert step(stopping(deployed_us=NOW - SECOND), assignments=failed) == d.Deploy(finalize=True)
    dead = [assignment(COMMITTERS[0], A.STARTED, node="node-b")]
    assert step(stopping(deployed_us=NOW - SECOND), assignments=dead) == d.Deploy(finalize=True)
    assert step(stopping(stopping_us=NOW - 30 * SECOND), assignments=failed) == d.End(J.STOPPED, "cancelled", pending=True)


def test_a_finalizer_that_keeps_failing_is_tried_ever_less_often() -> None:
    """Half the time it has been stopping at the last try, a minute at most: a target that stays away is not flooded, the deadline still ends it."""
    failed = [assignment(COMMITTERS[0], A.FAILED, cause="target")]
    ten = stopping(stopping_us=NOW - 10 * SECOND, deployed_us=NOW)
    assert step(ten, assignments=failed) == d.Wait(NOW + 5 * SECOND)
    assert d.finalize_pause_us(stopping(stopping_us=0, deployed_us=3600 * SECOND)) == d.MAX_RETRY_FINALIZE_US
    assert d.finalize_pause_us(stopping(stopping_us=NOW, deployed_us=NOW)) == d.RETRY_FINALIZE_US


def test_stopping_ends_in_the_target_state_and_failures_cost_no_budget() -> None:
    """A failing job stays FAILED with its own reason whatever becomes of the finalizer."""
    job = job_row(J.STOPPING, target="FAILED", mode="finalize", reason="operator: boom", stopping_us=NOW - 31 * SECOND, failures=3)
    assert step(job, assignments=[assignment(COMMITTERS[0], A.FAILED)]) == d.End(J.FAILED, "operator: boom", pending=True)


def test_the_plan_of_these_tests_has_committers_and_sources() -> None:
    """Else half of what is above would hold of nothing."""
    assert SOURCES == ["in:0", "in:1"] and COMMITTERS == ["count:0", "count:1"] and LOOSE.committers == []
    assert [s.id for s in PLAN.subtasks()] == SUBTASKS


def test_a_budget_by_rate_counts_restarts_within_its_interval() -> None:
    """Old restarts do not count; at most ``failures`` within ``interval_ms``."""
    by_rate = tuned(restart=RestartPolicy(kind="rate", failures=2, interval_ms=10_000))
    rows = [assignment(SUBTASKS[0], A.FAILED, cause="operator", detail="boom"), *assignments()[1:]]
    long_ago, lately = NOW - 20_000_000, NOW - 1_000_000
    within = view(job_row(failures=9, recent_restarts=f"[{long_ago},{long_ago},{lately}]"), assignments=rows, settings=by_rate)
    assert isinstance(d.next_step(within), d.Restart)
    spent = view(job_row(recent_restarts=f"[{lately},{lately}]"), assignments=rows, settings=by_rate)
    assert isinstance(d.next_step(spent), d.Finalize)


def test_a_budget_by_rate_is_spent_by_restarts_of_its_kind() -> None:
    """Stalls do not use up what is meant for failures, nor the other way round."""
    by_rate = tuned(restart=RestartPolicy(kind="rate", failures=2, stalls=1, interval_ms=10_000))
    lately = NOW - 1_000_000
    stalled = view(job_row(recent_restarts=f'[[{lately},"stall"],[{lately},"stall"],[{lately},"failure"]]'), settings=by_rate)
    assert isinstance(d.on_failure(stalled, "operator", "boom"), d.Restart)
    assert isinstance(d.on_failure(stalled, "stall", "stuck", stall=True), d.Finalize)
    failed = view(job_row(recent_restarts=f'[{lately},[{lately},"failure"]]'), settings=by_rate)
    assert isinstance(d.on_failure(failed, "operator", "boom"), d.Finalize)
    assert isinstance(d.on_failure(failed, "stall", "stuck", stall=True), d.Restart)


@pytest.mark.parametrize("budget", [2, 150])
def test_a_budget_by_rate_ends_whatever_its_size(budget: int) -> None:
    """Restart after restart within the interval: after as many as the budget allows, the job fails; free ones do not count."""
    by_rate = tuned(restart=RestartPolicy(kind="rate", failures=budget, interval_ms=10_000))
    job, restarts = job_row(), 0
    while isinstance(found := d.on_failure(view(job, settings=by_rate), "operator", "boom"), d.Restart):
        restarts += 1
        job = msgspec.structs.replace(job, recent_restarts=d.with_restart(view(job, settings=by_rate), found))
        job = msgspec.structs.replace(
            job, recent_restarts=d.with_restart(view(job, settings=by_rate), msgspec.structs.replace(found, free=True))
        )
    assert isinstance(found, d.Finalize) and restarts == budget
    later = view(job, settings=by_rate, now=NOW + 10_000_000)
    assert d.with_restart(later, d.Restart("operator", "boom", False, False, 0)) == f'[[{NOW + 10_000_000},"failure"]]', (
        "what is over is forgotten"
    )
