"""What becomes of a task: each end of an attempt by each declaration of effects, counters, time, and what holds whatever is drawn."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.durable.rows import NOW, OUTCOMES, SECOND, UNCHOSEN, held_tasks, policies, task_row

from millstream_schema.durable import outcomes as o
from millstream_schema.durable.decisions import (
    LONGEST_RETRY_US,
    LONGEST_SNOOZE_US,
    Decision,
    backoff_us,
    careful,
    expired,
    limit_of,
    on_cancel,
    on_due,
    on_end,
    on_limit,
    rank,
)
from millstream_schema.durable.records import Policy, TaskRow
from millstream_schema.durable.states import AMISS, HELD, SETTLED, TASK_TRANSITIONS, WAITING, Cause, Effects, TaskState, may_become

T, C, E = TaskState, Cause, Effects
POLICY = Policy(attempts=3, crashes=3, losses=3, snoozes=2, delay_ms=1000, max_delay_ms=60_000, jitter=0.5)
BOUND = 2**63 - 1
"""What a BIGINT holds."""
COUNTERS = ("failures", "crashes", "losses", "snoozes")
BOTH = (E.IDEMPOTENT, E.TRANSACTIONAL)


def end(outcome: o.AnyOutcome, policy: Policy = POLICY, chance: float = 0.0, **changes: object) -> Decision:
    return on_end(task_row(**changes), policy, outcome, NOW, chance)  # type: ignore[arg-type]


# -- the table


ENDS: list[tuple[o.AnyOutcome, tuple[Effects, ...], TaskState, Cause, str]] = [
    (o.Succeeded("[1]"), tuple(E), T.SUCCEEDED, C.NONE, ""),
    (o.Raised("ValueError", "no"), tuple(E), T.RETRY_WAIT, C.ERROR, "failures"),
    (o.Raised("ValueError", "no", retryable=False), tuple(E), T.FAILED, C.ERROR, "failures"),
    (o.RetryAsked(5 * SECOND, "later"), tuple(E), T.RETRY_WAIT, C.HANDLER, "failures"),
    (o.RetryAsked(), tuple(E), T.RETRY_WAIT, C.HANDLER, "failures"),
    (o.Snoozed(5 * SECOND), tuple(E), T.RETRY_WAIT, C.HANDLER, "snoozes"),
    (o.GaveUp("no"), tuple(E), T.FAILED, C.HANDLER, "failures"),
    (o.CancelledItself("no"), tuple(E), T.CANCELLED, C.HANDLER, ""),
    (o.Overran("as told"), tuple(E), T.RETRY_WAIT, C.LIMIT, "failures"),
    (o.AskedForReview("look"), tuple(E), T.UNKNOWN, C.HANDLER, ""),
    (o.InDoubt("timed out"), tuple(E), T.UNKNOWN, C.INTENT, ""),
    (o.Unstarted(), tuple(E), T.READY, C.GIVEN_BACK, ""),
    (o.Unfit("too large"), tuple(E), T.FAILED, C.RESULT, "failures"),
    (o.Absent(), tuple(E), T.READY, C.GIVEN_BACK, ""),
    (o.Unreached("away"), tuple(E), T.RETRY_WAIT, C.MARKER, ""),
    (o.Lost(started=False), tuple(E), T.READY, C.LOST, ""),
    (o.Lost(), BOTH, T.READY, C.LOST, "losses"),
    (o.Lost(), (E.EXTERNAL,), T.UNKNOWN, C.LOST, "losses"),
    (o.Crashed("-11"), BOTH, T.RETRY_WAIT, C.CRASH, "crashes"),
    (o.Crashed("-11"), (E.EXTERNAL,), T.UNKNOWN, C.CRASH, "crashes"),
    (o.Killed("limit"), BOTH, T.RETRY_WAIT, C.LIMIT, "failures"),
    (o.Killed("limit"), (E.EXTERNAL,), T.UNKNOWN, C.LIMIT, ""),
    (o.Killed("drain"), BOTH, T.READY, C.DRAIN, ""),
    (o.Killed("drain"), (E.EXTERNAL,), T.UNKNOWN, C.DRAIN, ""),
]


@pytest.mark.parametrize(
    ("outcome", "effects", "state", "cause", "counted"),
    [(outcome, e, *rest) for outcome, effects, *rest in ENDS for e in effects],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_each_end_by_each_declaration(outcome: o.AnyOutcome, effects: Effects, state: TaskState, cause: Cause, counted: str) -> None:
    """State, cause and the one counter that moves."""
    found = end(outcome, effects=effects)
    assert (found.state, found.cause) == (state, cause)
    counts = {name: getattr(found, name) for name in COUNTERS}
    assert counts == {name: int(name == counted) for name in counts}
    assert (found.wake_us is not None) == (state is T.RETRY_WAIT)


def test_the_table_of_ends_names_every_outcome() -> None:
    """So that a new one cannot be forgotten above."""
    assert {type(e[0]) for e in ENDS} == set(o.AnyOutcome.__args__)
    assert set(o.UNCHOSEN) < {type(e[0]) for e in ENDS}


CANCELLED_ENDS = [
    (o.Succeeded("[1]"), tuple(E), T.SUCCEEDED),
    (o.GaveUp("no"), tuple(E), T.FAILED),
    (o.Raised("ValueError", "", retryable=False), tuple(E), T.FAILED),
    (o.Unfit("large"), tuple(E), T.FAILED),
    (o.AskedForReview("look"), tuple(E), T.UNKNOWN),
    (o.Raised("ValueError", ""), tuple(E), T.CANCELLED),
    (o.RetryAsked(1), tuple(E), T.CANCELLED),
    (o.Snoozed(1), tuple(E), T.CANCELLED),
    (o.CancelledItself(), tuple(E), T.CANCELLED),
    (o.Unstarted(), tuple(E), T.CANCELLED),
    (o.Lost(started=False), tuple(E), T.CANCELLED),
    (o.Lost(), BOTH, T.CANCELLED),
    (o.Lost(), (E.EXTERNAL,), T.UNKNOWN),
    (o.Crashed(), BOTH, T.CANCELLED),
    (o.Crashed(), (E.EXTERNAL,), T.UNKNOWN),
    (o.Killed("cancelled"), BOTH, T.CANCELLED),
    (o.Killed("cancelled"), (E.EXTERNAL,), T.UNKNOWN),
    (o.Killed("limit"), BOTH, T.CANCELLED),
    (o.Killed("drain"), (E.EXTERNAL,), T.UNKNOWN),
]


@pytest.mark.parametrize(
    ("outcome", "effects", "state"),
    [(outcome, e, state) for outcome, effects, state in CANCELLED_ENDS for e in effects],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_an_end_after_cancel_was_asked_for(outcome: o.AnyOutcome, effects: Effects, state: TaskState) -> None:
    """What is settled wins; what would be tried again is cancelled; an effect that may have happened is never called cancelled."""
    found = end(outcome, effects=effects, cancel=1)
    assert found.state is state
    assert found.state is not T.CANCELLED or found.cause is C.CANCELLED
    assert found.wake_us is None


def test_a_handler_that_obeys_a_cancel_is_told_apart_from_one_that_cancels_itself() -> None:
    """By the cause."""
    assert end(o.CancelledItself(), cancel=1).cause is C.CANCELLED
    assert end(o.CancelledItself("I will not")).cause is C.HANDLER
    assert end(o.CancelledItself("I will not")).reason == "I will not"


# -- effects in another database


ANY_END = [
    (outcome, changes)
    for outcome, changes in [
        (o.Raised("ValueError", "no", retryable=False), {}), (o.GaveUp("no"), {}), (o.Unfit("large"), {}), (o.AskedForReview("look"), {}), (o.CancelledItself(), {}),
        (o.Raised("ValueError", "no"), {"failures": 2}), (o.RetryAsked(1), {"cancel": 1}), (o.Lost(), {"losses": 2}), (o.Lost(), {"deadline_us": NOW}),
        (o.Lost(), {"effects": E.EXTERNAL}), (o.Crashed(), {"crashes": 2}), (o.Killed("limit"), {"failures": 2}), (o.Killed("cancelled"), {"cancel": 1}),
        (o.Snoozed(1), {"snoozes": 2}), (o.Unstarted(), {"cancel": 1}), (o.Lost(started=False), {"deadline_us": NOW}), (o.Unreached("away"), {"cancel": 1}),
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "changes"), ANY_END, ids=lambda v: type(v).__name__ if not isinstance(v, dict) else "-".join(v) or "plain"
)
def test_no_end_is_written_before_the_marker_was_asked(outcome: o.AnyOutcome, changes: dict[str, Any]) -> None:
    """An attempt went to another database: the end is kept, the task ready for whoever raises the fence there; then it is the end that it would have been."""
    plain = end(outcome, **changes)
    assert plain.state in AMISS
    found = end(outcome, marker="orders", **changes)
    assert (found.state, found.wake_us, found.keeps_permit, found.ending is not None) == (T.READY, None, False, True)
    counts = ("failures", "crashes", "losses", "snoozes")
    assert [getattr(found, n) for n in counts] == [getattr(plain, n) for n in counts]
    held = msgspec.structs.replace(after(task_row(marker="orders", **changes), found), ending=found.ending)
    last = on_end(held, POLICY, o.Absent(), NOW, 0.5)
    assert (last.state, last.cause, last.reason) == (plain.state, plain.cause, plain.reason)
    assert [getattr(last, n) for n in counts] == [0] * 4 and last.ending is None, "each is counted once"
    assert on_end(held, POLICY, o.Succeeded("[1]"), NOW, 0.5) == Decision(state=T.SUCCEEDED), "the marker had a result"


@pytest.mark.parametrize(
    "outcome", [o.Unstarted(), o.Lost(), o.Lost(started=False), o.Crashed(), o.Killed("limit"), o.Raised("E", "no"), o.Unreached("away")]
)
def test_a_kept_end_outlives_whoever_was_to_find_out(outcome: o.AnyOutcome) -> None:
    """Lost, killed, or the database could not be reached: asked again, nothing counted, nothing decided otherwise."""
    task = task_row(
        marker="orders",
        ending="{}",
        effects=E.EXTERNAL,
        crashes=9,
        losses=9,
        failures=9,
        deadline_us=1,
        cancel=1,
        created_us=NOW - 100 * SECOND,
    )
    found = on_end(task, POLICY, outcome, NOW, 0.5)
    assert found.state in (T.READY, T.RETRY_WAIT) and found.ending == "{}"
    assert (found.failures, found.crashes, found.losses) == (0, 0, 0)
    assert found.wake_us is None or found.wake_us == NOW + 10 * SECOND
    waiting = msgspec.structs.replace(task, state=T.RETRY_WAIT)
    assert on_due(waiting, NOW).state is T.READY and on_due(waiting, NOW).ending == "{}"
    for state in (T.READY, T.RETRY_WAIT):
        assert on_cancel(task_row(state, marker="orders", ending="{}")) is None
        assert on_limit(task_row(state, marker="orders", ending="{}", deadline_us=1), NOW) is None
    assert limit_of(task, 1) is None


def test_what_waits_is_cancelled_or_expires_by_way_of_the_marker_too() -> None:
    """Once an attempt has gone there."""
    for state in (T.READY, T.RETRY_WAIT, T.DISPATCHED):
        found = on_cancel(task_row(state, marker="orders"))
        assert found is not None and found.state is T.READY and found.ending is not None and '"CANCELLED"' in found.ending
    found = on_limit(task_row(T.READY, marker="orders", deadline_us=NOW), NOW)
    assert found is not None and found.state is T.READY and found.ending is not None and '"EXPIRED"' in found.ending
    assert on_due(task_row(T.RETRY_WAIT, marker="orders", deadline_us=NOW), NOW) == found


def test_another_attempt_needs_no_such_detour() -> None:
    """It raises the fence itself, before its code runs."""
    for outcome, state in (
        (o.Raised("E", "no"), T.RETRY_WAIT),
        (o.Lost(), T.READY),
        (o.Succeeded(), T.SUCCEEDED),
        (o.Snoozed(1), T.RETRY_WAIT),
    ):
        found = end(outcome, marker="orders")
        assert (found.state, found.ending) == (state, None)


# -- counters and limits


def after(task: TaskRow, decision: Decision) -> TaskRow:
    """The row once the decision is written and the task is claimed again."""
    counts = {n: getattr(task, n) + getattr(decision, n) for n in ("failures", "crashes", "losses", "snoozes")}
    return msgspec.structs.replace(task, fence=task.fence + 1, starts=task.starts + 1, **counts)


def until_over(outcome: o.AnyOutcome, policy: Policy = POLICY, **changes: object) -> tuple[int, TaskRow, Decision]:
    """How many attempts that all end so there are, and how it ends."""
    task = task_row(**changes)  # type: ignore[arg-type]
    for n in range(1, 100):
        decision = on_end(task, policy, outcome, NOW, 0.5)
        task = after(task, decision)
        if decision.state in SETTLED or decision.state is T.UNKNOWN:
            return n, task, decision
    raise AssertionError("it never ends")


def test_a_handler_that_always_raises_is_tried_as_often_as_its_policy_says() -> None:
    """Three attempts are three runs."""
    runs, task, last = until_over(o.Raised("ValueError", "never"))
    assert (runs, task.failures) == (3, 3)
    assert (last.state, last.cause, last.reason) == (T.FAILED, C.ATTEMPTS, "ValueError: never")


def test_a_handler_that_asks_for_retries_uses_up_its_attempts() -> None:
    """``raise Retry`` is a failed attempt."""
    runs, _, last = until_over(o.RetryAsked(1, "later"))
    assert (runs, last.state, last.cause) == (3, T.FAILED, C.ATTEMPTS)


def test_one_attempt_means_no_second_one() -> None:
    """The default of what is undeclared."""
    runs, _, last = until_over(o.Raised("ValueError", ""), Policy(), effects=E.EXTERNAL)
    assert (runs, last.state) == (1, T.FAILED)


def test_celery_t05_a_task_that_takes_its_process_along_goes_to_a_person_after_the_allowed_number() -> None:
    """Never lost, never a hot loop: N crashes, all counted, then UNKNOWN with cause poison."""
    runs, task, last = until_over(o.Crashed("exit code -9"))
    assert (runs, task.crashes, task.losses, task.failures) == (3, 3, 0, 0)
    assert (last.state, last.cause) == (T.UNKNOWN, C.POISON)
    assert "exit code -9" in last.reason and "2 crashes" in last.reason


def test_a_task_whose_worker_is_lost_again_and_again_goes_to_a_person() -> None:
    """Losses are counted apart from crashes."""
    runs, task, last = until_over(o.Lost())
    assert (runs, task.crashes, task.losses) == (3, 0, 3)
    assert (last.state, last.cause) == (T.UNKNOWN, C.POISON)


def test_a_loss_is_no_crash_whatever_was_counted_before() -> None:
    """One short of the limit of crashes, a last allowed loss leaves the crashes alone."""
    found = end(o.Lost(), crashes=2, losses=2)
    assert (found.state, found.crashes, found.losses) == (T.UNKNOWN, 0, 1)


def test_drains_are_no_crashes() -> None:
    """A deploy every hour for a month sends nothing to a person."""
    task = task_row()
    for _ in range(1000):
        decision = on_end(task, POLICY, o.Killed("drain", "shut down"), NOW, 0.5)
        task = after(task, decision)
        assert decision.state is T.READY
    assert (task.failures, task.crashes, task.losses) == (0, 0, 0)


def test_what_never_began_uses_up_no_attempt() -> None:
    """Given back a thousand times, it is as it was."""
    task = task_row(T.DISPATCHED, starts=0)
    for _ in range(1000):
        decision = on_end(task, POLICY, o.Unstarted(), NOW, 0.5)
        task = msgspec.structs.replace(after(task, decision), starts=0)
        assert decision.state is T.READY
    assert (task.failures, task.crashes, task.losses) == (0, 0, 0)


@pytest.mark.parametrize("effects", list(E))
def test_what_was_lost_before_it_began_is_not_counted_and_its_next_start_is_known(effects: Effects) -> None:
    """However often; what may have run without a word and taken its machine along starts by a commit of its own from then on, which a give-back does not undo."""
    task = task_row(T.DISPATCHED, starts=0, effects=effects)
    assert careful(task) is (effects is E.EXTERNAL)
    for outcome in (o.Lost(started=False), o.Unstarted(), o.Lost(started=False)):
        decision = on_end(task, POLICY, outcome, NOW, 0.5)
        assert decision.state is T.READY
        task = msgspec.structs.replace(after(task, decision), starts=0, cause=decision.cause)
        assert careful(task)
    assert (task.failures, task.crashes, task.losses) == (0, 0, 0)


def test_snoozes_are_bounded_in_number_and_length() -> None:
    """No attempt counts, and nobody puts himself off for ever."""
    runs, task, last = until_over(o.Snoozed(SECOND))
    assert (runs, task.snoozes, task.failures, last.state, last.cause) == (3, 2, 0, T.FAILED, C.SNOOZED)
    assert "put off 2 times" in last.reason
    assert end(o.Snoozed(10**30)).wake_us == NOW + LONGEST_SNOOZE_US
    assert end(o.Snoozed(-5)).wake_us == NOW


def test_a_pause_that_a_handler_asks_for_fits_its_column() -> None:
    """An absurd one is cut; a negative one is none. It may be longer than the policy's own pauses."""
    assert end(o.RetryAsked(3600 * SECOND)).wake_us == NOW + 3600 * SECOND
    assert end(o.RetryAsked(10**30)).wake_us == NOW + LONGEST_RETRY_US < BOUND
    assert end(o.RetryAsked(-(10**30))).wake_us == NOW


def test_an_external_task_whose_effects_all_go_through_intents_follows_the_policy() -> None:
    """It had no open intent, so that nothing about it is unknown."""
    policy = msgspec.structs.replace(POLICY, intents_only=True)
    for outcome, state in (
        (o.Lost(), T.READY),
        (o.Crashed(), T.RETRY_WAIT),
        (o.Killed("limit"), T.RETRY_WAIT),
        (o.Killed("drain"), T.READY),
    ):
        assert end(outcome, policy, effects=E.EXTERNAL).state is state


@given(held_tasks(), policies(), OUTCOMES, st.floats(0, 1, exclude_max=True))
def test_nothing_is_guessed_about_an_open_call(task: TaskRow, policy: Policy, outcome: o.AnyOutcome, chance: float) -> None:
    """It neither ends nor is cancelled nor expires, and goes on only where its code did not run, or where the next attempt asks before its code runs. Counters move as without."""
    doubted = msgspec.structs.replace(task, open_intents=2)
    plain, found = on_end(task, policy, outcome, NOW, chance), on_end(doubted, policy, outcome, NOW, chance)
    never_began = isinstance(outcome, o.Unstarted | o.Absent | o.Unreached) or outcome == o.Lost(started=False)
    asks = policy.reconciles and isinstance(outcome, o.UNCHOSEN)
    if plain.state is T.UNKNOWN or (plain.state in (T.READY, T.RETRY_WAIT) and (never_began or asks)):
        assert found == plain
    else:
        assert (found.state, found.cause, found.wake_us, found.keeps_permit) == (T.UNKNOWN, C.INTENT, None, False)
        if isinstance(outcome, o.InDoubt):
            assert found.reason == outcome.message, "its attempt has said why"
        else:
            assert "2 calls" in found.reason and plain.state in found.reason
    assert [getattr(found, n) for n in COUNTERS] == [getattr(plain, n) for n in COUNTERS]


def test_one_that_waits_with_an_open_call_goes_to_a_person_before_it_ends() -> None:
    """Cancelled or too late to start; due, it goes on."""
    waits = task_row(T.RETRY_WAIT, session="", wake_us=NOW, open_intents=1, deadline_us=NOW)
    for decision in (on_cancel(waits), on_limit(waits, NOW), on_due(waits, NOW)):
        assert decision is not None and (decision.state, decision.cause) == (T.UNKNOWN, C.INTENT)
    assert on_due(msgspec.structs.replace(waits, deadline_us=0), NOW).state is T.READY
    marked = on_cancel(msgspec.structs.replace(waits, marker="orders"))
    assert marked is not None and marked.state is T.READY and '"UNKNOWN"' in (marked.ending or "")
    ending = msgspec.structs.replace(waits, state=T.RUNNING, session="s", marker="orders", ending=marked.ending)
    assert on_end(ending, POLICY, o.Absent(), NOW, 0.5).state is T.UNKNOWN
    assert on_end(ending, POLICY, o.Succeeded("[1]"), NOW, 0.5).state is T.UNKNOWN


# -- time


def test_there_is_no_further_attempt_past_the_deadline() -> None:
    """A pause that would end at the deadline or later is not begun."""
    assert end(o.RetryAsked(10 * SECOND), deadline_us=NOW + 10 * SECOND).cause is C.DEADLINE
    assert end(o.RetryAsked(10 * SECOND), deadline_us=NOW + 10 * SECOND).state is T.FAILED
    assert end(o.RetryAsked(10 * SECOND), deadline_us=NOW + 10 * SECOND + 1).state is T.RETRY_WAIT
    assert end(o.Lost(), deadline_us=NOW).state is T.FAILED
    assert end(o.Unstarted(), starts=0, deadline_us=NOW).state is T.EXPIRED
    assert end(o.Succeeded(), deadline_us=NOW - SECOND).state is T.SUCCEEDED, "what is done is done"


def test_start_by_is_over_once_it_has_started() -> None:
    """It limits the first start, not the retries."""
    assert expired(task_row(T.READY, starts=0, start_by_us=NOW), NOW) is C.START_BY
    assert expired(task_row(T.READY, starts=0, start_by_us=NOW), NOW - 1) is C.NONE
    assert expired(task_row(T.READY, starts=1, start_by_us=NOW), NOW) is C.NONE
    assert on_due(task_row(T.RETRY_WAIT, starts=1, start_by_us=NOW - 1), NOW).state is T.READY
    assert on_due(task_row(T.SCHEDULED, starts=0, start_by_us=NOW), NOW) == Decision(state=T.EXPIRED, cause=C.START_BY)


def test_on_due_keeps_why_it_waited_and_the_permit_it_holds() -> None:
    """The reason outlives the pause."""
    task = task_row(T.RETRY_WAIT, cause=C.ERROR, reason="ValueError: no", permit_held=1, ordered=1)
    assert on_due(task, NOW) == Decision(state=T.READY, cause=C.ERROR, reason="ValueError: no", keeps_permit=True)


def test_back_off_doubles_up_to_its_limit() -> None:
    """1, 2, 4 … 60 s, and less by the part chance decides."""
    assert [backoff_us(POLICY, n, 0.0) // SECOND for n in (0, 1, 2, 5, 6, 10**9)] == [1, 2, 4, 32, 60, 60]
    assert backoff_us(POLICY, 0, 1.0) == SECOND // 2


def test_rank_is_an_instant_so_that_waiting_overtakes_priority() -> None:
    """One unit of priority is worth a second."""
    assert rank(NOW, 5) == rank(NOW - 5 * SECOND, 0)
    assert rank(NOW, 1000) > rank(NOW - 1001 * SECOND, 0)


# -- cancel


@pytest.mark.parametrize("state", list(T))
def test_cancel_by_state(state: TaskState) -> None:
    """At once where it does not run; a flag where a worker holds it; nothing where it is over or in review."""
    found = on_cancel(task_row(state))
    at_once = state in (T.SCHEDULED, T.READY, T.DISPATCHED, T.RETRY_WAIT)
    assert found == (Decision(state=T.CANCELLED, cause=C.CANCELLED) if at_once else None)


# -- whatever is drawn


def test_the_table_is_closed() -> None:
    """Every state has a row; what is settled goes nowhere; a review ends a task only by success or failure."""
    assert set(TASK_TRANSITIONS) == set(T)
    assert all(not TASK_TRANSITIONS[s] for s in SETTLED)
    assert TASK_TRANSITIONS[T.UNKNOWN] == {T.SUCCEEDED, T.FAILED}
    assert {s for s in T if s.held} == HELD and {s for s in T if s.waiting} == WAITING and {s for s in T if s.settled} == SETTLED


@given(held_tasks(), policies(), OUTCOMES, st.floats(0, 1, exclude_max=True))
def test_a_decision_is_always_in_the_table_and_can_be_stored(task: TaskRow, policy: Policy, outcome: o.AnyOutcome, chance: float) -> None:
    """It waits exactly in the states that wait, for a time that is not past and fits its column; counters never go down."""
    found = on_end(task, policy, outcome, NOW, chance)
    assert may_become(task.state, found.state)
    assert (found.wake_us is not None) == (found.state in WAITING)
    assert found.wake_us is None or NOW <= found.wake_us <= BOUND - 1000 * SECOND
    assert all(getattr(found, n) in (0, 1) for n in ("failures", "crashes", "losses", "snoozes"))
    assert not found.keeps_permit or task.ordered
    assert found.state is T.SUCCEEDED or isinstance(outcome, o.Unstarted) or found.cause


@given(held_tasks(), policies(), UNCHOSEN, st.floats(0, 1, exclude_max=True))
def test_an_effect_that_may_have_happened_is_never_repeated_by_itself(
    task: TaskRow, policy: Policy, outcome: o.AnyOutcome, chance: float
) -> None:
    """A started external attempt whose end was not chosen goes to a person, cancel or not, unless all its effects are intents."""
    found = on_end(task, policy, outcome, NOW, chance)
    if task.effects is E.EXTERNAL and not policy.intents_only and outcome != o.Lost(started=False):
        assert found.state is T.UNKNOWN


@given(held_tasks(), policies(), OUTCOMES, st.floats(0, 1, exclude_max=True))
def test_a_cancel_stops_what_would_go_on_and_changes_no_end_that_was_reached(
    task: TaskRow, policy: Policy, outcome: o.AnyOutcome, chance: float
) -> None:
    """Settled or in review without the flag: the same with it."""
    plain = on_end(msgspec.structs.replace(task, cancel=0), policy, outcome, NOW, chance)
    asked = on_end(msgspec.structs.replace(task, cancel=1), policy, outcome, NOW, chance)
    assert asked.state not in (T.READY, T.RETRY_WAIT)
    if isinstance(outcome, o.Succeeded | o.GaveUp | o.Unfit | o.AskedForReview) or plain.state is T.UNKNOWN:
        assert asked.state is plain.state
    if plain.state is T.CANCELLED:
        assert isinstance(outcome, o.CancelledItself), "nobody asked for it"


@given(policies(), st.integers(0, 10**12), st.floats(0, 1, exclude_max=True))
def test_back_off_is_bounded_whatever_the_policy(policy: Policy, failures: int, chance: float) -> None:
    """Between nothing and the limit; it never overflows."""
    assert 0 <= backoff_us(policy, failures, chance) <= policy.max_delay_ms * 1000


@given(held_tasks(), policies(), st.lists(OUTCOMES, min_size=1), st.floats(0, 1, exclude_max=True))
def test_nothing_goes_on_for_ever_but_what_never_ran_or_was_put_off_by_others(
    task: TaskRow, policy: Policy, outcomes: list[o.AnyOutcome], chance: float
) -> None:
    """Any mix of ends repeated: each round uses up a budget, or is a give-back or a drain."""
    task = msgspec.structs.replace(task, start_by_us=0, deadline_us=0)
    budget = policy.attempts + policy.crashes + policy.losses + policy.snoozes + 4
    for _ in range(budget):
        counted = False
        for outcome in outcomes:
            decision = on_end(task, policy, outcome, NOW, chance)
            if decision.state in SETTLED or decision.state is T.UNKNOWN:
                return
            counted |= any((decision.failures, decision.crashes, decision.losses, decision.snoozes))
            task = after(task, decision)
        if not counted:
            assert all(isinstance(x, o.Unstarted | o.Killed | o.Absent | o.Unreached) or x == o.Lost(started=False) for x in outcomes)
            return
    raise AssertionError("it never ends")
