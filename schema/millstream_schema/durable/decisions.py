"""What becomes of a task: pure functions of its row, what happened, and the database's time.

Called by the statements that settle, take back and cancel, under the task's row lock, and by whoever wants to know beforehand. What must never happen here: a clock, chance, SQL;
a guess about an effect that may have happened.
"""

from __future__ import annotations

import msgspec

from . import outcomes as o
from .records import Policy, TaskRow
from .states import AMISS, Cause, Effects, TaskState

LONGEST_SNOOZE_US = 30 * 24 * 3600 * 1_000_000
LONGEST_RETRY_US = 10 * 365 * 24 * 3600 * 1_000_000
"""A longer pause that a handler asks for is cut to this: an instant has to fit its column."""
RANK_STEP_US = 1_000_000
"""How much earlier one unit of priority lets a task be taken. Rank is an instant: what waits long enough overtakes everything, so nothing starves."""


_NOT_BEGUN = (o.Unstarted, o.Absent, o.Unreached)
"""Ends of attempts whose handler's code did not run."""
SOONEST_ASK_US, LATEST_ASK_US = 5 * 1_000_000, 600 * 1_000_000
"""Pause before another database that could not be reached is asked again: a tenth of the task's age, within these bounds."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to write. ``wake_us``: when it is due again; counters are added. ``ending``: the end it comes to unless the marker has a result, encoded; kept until then."""

    state: TaskState
    cause: Cause = Cause.NONE
    reason: str = ""
    wake_us: int | None = None
    failures: int = 0
    crashes: int = 0
    losses: int = 0
    snoozes: int = 0
    keeps_permit: bool = False
    ending: str | None = None


def rank(available_us: int, priority: int) -> int:
    """Position in the queue: lower is taken first."""
    return available_us - priority * RANK_STEP_US


def on_end(task: TaskRow, policy: Policy, outcome: o.AnyOutcome, now: int, chance: float) -> Decision:
    """What becomes of a held task whose attempt has ended. ``chance`` in [0, 1) decides the jitter of a back-off."""
    begun = not (isinstance(outcome, _NOT_BEGUN) or (isinstance(outcome, o.Lost) and not outcome.started))
    asks = policy.reconciles and isinstance(outcome, o.UNCHOSEN) if begun else True
    if task.ending is not None:
        return doubted(task, _resolved(task, outcome, now), asks=True)
    return parked(task, doubted(task, _ended(task, policy, outcome, now, chance), asks=asks))


def _ended(task: TaskRow, policy: Policy, outcome: o.AnyOutcome, now: int, chance: float) -> Decision:
    match outcome:
        case o.Succeeded():
            return Decision(state=TaskState.SUCCEEDED)
        case o.Unstarted() | o.Absent():
            return _given_back(task, now, Cause.GIVEN_BACK)
        case o.Unreached(message=message):
            return _unreached(task, now, message)
        case o.GaveUp(message=message):
            return Decision(state=TaskState.FAILED, cause=Cause.HANDLER, reason=message, failures=1)
        case o.Overran(message=message):
            return _again(task, policy, now, chance, Cause.LIMIT, message)
        case o.CancelledItself(message=message):
            return Decision(state=TaskState.CANCELLED, cause=Cause.CANCELLED if task.cancel else Cause.HANDLER, reason=message)
        case o.AskedForReview(message=message):
            return Decision(state=TaskState.UNKNOWN, cause=Cause.HANDLER, reason=message)
        case o.InDoubt(message=message):
            if policy.intents_only and not task.open_intents:
                return _unchosen(task, policy, o.Killed(Cause.INTENT, message), now, chance)  # its worker has written down what it came to
            return Decision(state=TaskState.UNKNOWN, cause=Cause.INTENT, reason=message)
        case o.Unfit(message=message):
            return Decision(state=TaskState.FAILED, cause=Cause.RESULT, reason=message, failures=1)
        case o.Snoozed(for_us=for_us):
            return _snoozed(task, policy, for_us, now)
        case o.RetryAsked(after_us=after_us, message=message):
            return _again(task, policy, now, chance, Cause.HANDLER, message, after_us=after_us)
        case o.Raised():
            return _raised(task, policy, outcome, now, chance)
        case o.Lost() | o.Crashed() | o.Killed():
            return _unchosen(task, policy, outcome, now, chance)


def doubted(task: TaskRow, decision: Decision, *, asks: bool) -> Decision:
    """A decision about a task that has open intents: nobody knows whether those calls happened, so it neither ends nor goes on by itself, whatever its handler chose.

    ``asks``: it may go on, because what is known of them is asked for before its code runs.
    """
    goes_on = asks and not decision.state.settled
    if not task.open_intents or decision.state is TaskState.UNKNOWN or goes_on:
        return decision
    calls = "a call" if task.open_intents == 1 else f"{task.open_intents} calls"
    said = f" ({decision.cause})" if decision.cause else ""
    because = f": {decision.reason}" if decision.reason else ""
    reason = f"the outcome of {calls} by ctx.external is not known; without that it would be {decision.state}{said}{because}"
    return msgspec.structs.replace(
        decision, state=TaskState.UNKNOWN, cause=Cause.INTENT, reason=reason, wake_us=None, keeps_permit=False, ending=None
    )


def parked(task: TaskRow, decision: Decision) -> Decision:
    """A decision about a task one of whose attempts went to another database: that attempt may commit there at any time until the marker's fence is raised.

    So no end but the one its marker tells is written before a worker has raised it: the end is kept, and the task is claimed once more, for that alone.
    """
    if not task.marker or decision.state not in AMISS:
        return decision
    ending = msgspec.structs.replace(decision, failures=0, crashes=0, losses=0, snoozes=0)
    return msgspec.structs.replace(
        decision, state=TaskState.READY, wake_us=None, keeps_permit=False, ending=msgspec.json.encode(ending).decode()
    )


def _resolved(task: TaskRow, outcome: o.AnyOutcome, now: int) -> Decision:
    """What the worker found that was to raise the marker's fence: the result of an attempt that committed, or none, so that the kept end is the end."""
    assert task.ending is not None
    match outcome:
        case o.Succeeded():
            return Decision(state=TaskState.SUCCEEDED)
        case o.Absent():
            return msgspec.json.decode(task.ending, type=Decision)
        case o.Unstarted() | o.Lost():
            return Decision(state=TaskState.READY, cause=task.cause, reason=task.reason, ending=task.ending)
        case _:
            why = getattr(outcome, "message", "") or type(outcome).__name__
            wake = now + _ask_again_us(task, now)
            return Decision(
                state=TaskState.RETRY_WAIT, cause=Cause.MARKER, reason=f"{task.marker}: {why}", wake_us=wake, ending=task.ending
            )


def _unreached(task: TaskRow, now: int, message: str) -> Decision:
    """Its own code has not run: no attempt counts."""
    if task.cancel:
        return Decision(state=TaskState.CANCELLED, cause=Cause.CANCELLED)
    late = expired(task, now)
    if late:
        return Decision(state=TaskState.EXPIRED, cause=late)
    wake = now + _ask_again_us(task, now)
    reason = f"{task.marker}: {message}"
    return Decision(state=TaskState.RETRY_WAIT, cause=Cause.MARKER, reason=reason, wake_us=wake, keeps_permit=bool(task.ordered))


def _ask_again_us(task: TaskRow, now: int) -> int:
    return max(SOONEST_ASK_US, min((now - task.created_us) // 10, LATEST_ASK_US))


def _given_back(task: TaskRow, now: int, cause: Cause) -> Decision:
    """It never began: as if it had not been claimed.

    Whether it was lost before is kept: such a task's start is committed before its code runs, so that one that takes its machine along is counted the next time (:func:`careful`).
    """
    if task.cancel:
        return Decision(state=TaskState.CANCELLED, cause=Cause.CANCELLED)
    late = expired(task, now)
    if late:
        return Decision(state=TaskState.EXPIRED, cause=late)
    return Decision(state=TaskState.READY, cause=Cause.LOST if task.cause is Cause.LOST else cause)


def careful(task: TaskRow) -> bool:
    """Whether a claimed attempt's start is to be committed before its code runs: nobody may guess whether it began."""
    return task.effects is Effects.EXTERNAL or task.cause is Cause.LOST


def expired(task: TaskRow, now: int) -> Cause:
    """Why a task that does not run is not to start any more; NONE: it may."""
    if task.deadline_us and now >= task.deadline_us:
        return Cause.DEADLINE
    if task.start_by_us and not task.starts and now >= task.start_by_us:
        return Cause.START_BY
    return Cause.NONE


def limit_of(task: TaskRow, starts: int) -> int | None:
    """Until when a task that has been started so often has to start again; None: no limit, or it has an end and waits for its marker."""
    if task.ending is not None:
        return None
    return min((at for at in (task.deadline_us, 0 if starts else task.start_by_us) if at), default=None)


def on_limit(task: TaskRow, now: int) -> Decision | None:
    """A waiting task's last instant to start may have passed."""
    late = expired(task, now)
    if not late or task.state.held or task.ending is not None:
        return None
    return parked(task, doubted(task, Decision(state=TaskState.EXPIRED, cause=late), asks=False))


def _snoozed(task: TaskRow, policy: Policy, for_us: int, now: int) -> Decision:
    if task.cancel:
        return Decision(state=TaskState.CANCELLED, cause=Cause.CANCELLED)
    if task.snoozes >= policy.snoozes:
        return Decision(state=TaskState.FAILED, cause=Cause.SNOOZED, reason=f"put off {task.snoozes} times, {policy.snoozes} are allowed")
    wake = now + max(0, min(for_us, LONGEST_SNOOZE_US))
    return Decision(state=TaskState.RETRY_WAIT, cause=Cause.HANDLER, wake_us=wake, snoozes=1, keeps_permit=bool(task.ordered))


def _raised(task: TaskRow, policy: Policy, outcome: o.Raised, now: int, chance: float) -> Decision:
    why = f"{outcome.error}: {outcome.message}" if outcome.message else outcome.error
    if not outcome.retryable:
        return Decision(state=TaskState.FAILED, cause=Cause.ERROR, reason=why, failures=1)
    return _again(task, policy, now, chance, Cause.ERROR, why)


def _again(task: TaskRow, policy: Policy, now: int, chance: float, cause: Cause, why: str, *, after_us: int | None = None) -> Decision:
    """Another attempt after a failure, if one is left and there is time for it."""
    if task.cancel:
        return Decision(state=TaskState.CANCELLED, cause=Cause.CANCELLED, reason=why, failures=1)
    if task.failures + 1 >= policy.attempts:
        return Decision(state=TaskState.FAILED, cause=Cause.ATTEMPTS, reason=why, failures=1)
    delay = backoff_us(policy, task.failures, chance) if after_us is None else max(0, min(after_us, LONGEST_RETRY_US))
    if task.deadline_us and now + delay >= task.deadline_us:
        return Decision(state=TaskState.FAILED, cause=Cause.DEADLINE, reason=why, failures=1)
    return Decision(state=TaskState.RETRY_WAIT, cause=cause, reason=why, wake_us=now + delay, failures=1, keeps_permit=bool(task.ordered))


def backoff_us(policy: Policy, failures: int, chance: float) -> int:
    """Pause after failure number ``failures`` + 1. Never overflows: the exponent is capped."""
    delay = min(policy.delay_ms << min(failures, 30), policy.max_delay_ms) * 1000
    return int(delay * (1.0 - policy.jitter * chance))


def _unchosen(task: TaskRow, policy: Policy, outcome: o.Lost | o.Crashed | o.Killed, now: int, chance: float) -> Decision:
    """An end the handler did not choose: by what its author declared of its effects."""
    crashes, losses = int(isinstance(outcome, o.Crashed)), int(isinstance(outcome, o.Lost))
    if isinstance(outcome, o.Lost) and not outcome.started:
        return _given_back(task, now, Cause.LOST)
    cause, why = _named(outcome)
    if task.effects is Effects.EXTERNAL and not policy.intents_only:
        return Decision(state=TaskState.UNKNOWN, cause=cause, reason=why, crashes=crashes, losses=losses)
    if (crashes and task.crashes + 1 >= policy.crashes) or (losses and task.losses + 1 >= policy.losses):
        return _poison(task, why, crashes, losses)
    if task.cancel:
        return Decision(state=TaskState.CANCELLED, cause=Cause.CANCELLED, reason=why, crashes=crashes, losses=losses)
    if cause is Cause.LIMIT:
        return _again(task, policy, now, chance, cause, why)
    late = bool(task.deadline_us) and now >= task.deadline_us
    if late:
        return Decision(state=TaskState.FAILED, cause=Cause.DEADLINE, reason=why, crashes=crashes, losses=losses)
    if crashes:
        wake = now + backoff_us(policy, task.crashes, chance)
        return Decision(state=TaskState.RETRY_WAIT, cause=cause, reason=why, wake_us=wake, keeps_permit=bool(task.ordered), crashes=crashes)
    return Decision(state=TaskState.READY, cause=cause, reason=why, keeps_permit=bool(task.ordered), crashes=crashes, losses=losses)


def _named(outcome: o.Lost | o.Crashed | o.Killed) -> tuple[Cause, str]:
    match outcome:
        case o.Lost():
            return Cause.LOST, "the lease of its worker ran out"
        case o.Crashed(message=message):
            return Cause.CRASH, message or "its process died"
        case o.Killed(why=why, message=message):
            return Cause(why), message or f"killed: {why}"


def _poison(task: TaskRow, why: str, crashes: int, losses: int) -> Decision:
    reason = f"{why}; {task.crashes} crashes and {task.losses} lost workers before this: a person has to look at it"
    return Decision(state=TaskState.UNKNOWN, cause=Cause.POISON, reason=reason, crashes=crashes, losses=losses)


def on_cancel(task: TaskRow) -> Decision | None:
    """A request to cancel: at once before it is known to run (its worker finds out when it starts or ends it); None: only the flag is set, and the first settled end wins."""
    if task.ending is None and task.state in (TaskState.SCHEDULED, TaskState.READY, TaskState.DISPATCHED, TaskState.RETRY_WAIT):
        return parked(task, doubted(task, Decision(state=TaskState.CANCELLED, cause=Cause.CANCELLED), asks=False))
    return None


def on_due(task: TaskRow, now: int) -> Decision:
    """A waiting task's instant has come."""
    late = on_limit(task, now)
    return late or Decision(
        state=TaskState.READY, cause=task.cause, reason=task.reason, keeps_permit=bool(task.permit_held), ending=task.ending
    )
