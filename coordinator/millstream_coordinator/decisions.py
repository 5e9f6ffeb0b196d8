"""What is to be done about one job next: a pure function of its rows and the database's time.

Called by :mod:`millstream_coordinator.reconciler` under the job's row lock, again and again until it answers :class:`Wait`. What must never happen here: a clock, a
database, a message. Everything is decided from rows, so any coordinator that holds the lock decides the same.
"""

from __future__ import annotations

import msgspec

from millstream_schema.control import EpochKind
from millstream_schema.plan import PartitionedPlan
from millstream_schema.settings import RestartPolicy, StreamSettings
from millstream_schema.states import AssignmentState, Desired, EpochState, JobState, SplitOwner
from millstream_schema.store.rows import AckMark, AssignmentRow, EpochRow, JobRow, SplitRow

PERMANENT = frozenset({"fingerprint", "factory", "restore", "unreadable", "invalid"})
"""Causes that a restart cannot mend: the job fails at once."""
CANNOT_START = frozenset({"fingerprint", "factory", "invalid"})
"""Of these, the ones that would keep a finalising deployment from starting, too: what is uncommitted is listed and waits for a resume."""
FREE = frozenset({"handback"})
"""Causes that cost no budget: a worker that shuts down hands its lease back."""
STALL, FAILURE = "stall", "failure"
"""Kinds of recent restarts: each has a budget of its own."""
RETRY_FINALIZE_US = 1_000_000
MAX_RETRY_FINALIZE_US = 60_000_000


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a decision may look at."""

    now: int
    job: JobRow
    plan: PartitionedPlan
    settings: StreamSettings
    assignments: list[AssignmentRow]
    live_nodes: frozenset[str]
    epoch: EpochRow | None
    """The one in flight."""
    acks: list[AckMark]
    newest: EpochRow | None
    """The newest durable one."""
    uncommitted: int
    splits: list[SplitRow]
    discovered: dict[str, bool]
    savepoint_copying: bool = False


# steps


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do before ``until`` (µs; 0: until something happens)."""

    until: int = 0


class Deploy(msgspec.Struct, frozen=True, tag=True):
    """Take slots for a new generation, or wait for resources."""

    finalize: bool = False


class BecomeRunning(msgspec.Struct, frozen=True, tag=True):
    """All subtasks are READY."""


class Restart(msgspec.Struct, frozen=True, tag=True):
    """Fence the generation and try again after ``delay_us``."""

    cause: str
    detail: str
    stall: bool
    free: bool
    delay_us: int


class Finalize(msgspec.Struct, frozen=True, tag=True):
    """Fence the generation; commit the newest durable epoch and roll back what is above, then end in ``target``."""

    target: JobState
    reason: str


class End(msgspec.Struct, frozen=True, tag=True):
    """The job is over. ``pending``: commits that could not be finished are listed, never rolled back."""

    state: JobState
    reason: str
    pending: bool = False


class TriggerEpoch(msgspec.Struct, frozen=True, tag=True):
    kind: EpochKind
    savepoint: str = ""


class AbortEpoch(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Precommit(msgspec.Struct, frozen=True, tag=True):
    """Every subtask has acknowledged: no acknowledgement is taken any more."""


class MakeDurable(msgspec.Struct, frozen=True, tag=True):
    """All acknowledgements are in: write the manifest."""


class MarkCommitted(msgspec.Struct, frozen=True, tag=True):
    epoch: int


class OwnSplits(msgspec.Struct, frozen=True, tag=True):
    """(operator, split) → subtask index."""

    owners: list[tuple[str, str, int]]


Step = (
    Wait
    | Deploy
    | BecomeRunning
    | Restart
    | Finalize
    | End
    | TriggerEpoch
    | AbortEpoch
    | Precommit
    | MakeDurable
    | MarkCommitted
    | OwnSplits
)


def next_step(view: JobView) -> Step:
    """The one thing to do next."""
    job = view.job
    if job.state.ended:
        return Wait()
    if job.state in (JobState.PENDING, JobState.WAITING_FOR_RESOURCES, JobState.RESTARTING):
        return _before_deploy(view)
    if job.state is JobState.STOPPING:
        return _stopping(view)
    if job.desired is Desired.CANCEL:
        return _cancel(view)
    failed = failure(view)
    if failed is not None:
        return _last_epoch_done(view) or on_failure(view, *failed)
    return _deploying(view) if job.state is JobState.DEPLOYING else _running(view)


def _cancel(view: JobView) -> Step:
    if needs_finalizing(view):
        return Finalize(JobState.STOPPED, "cancelled")
    return End(JobState.STOPPED, "cancelled")


def needs_finalizing(view: JobView) -> bool:
    """Whether some sink may hold sealed or open output of this job."""
    return bool(view.plan.committers) and view.job.generation > 0


def _before_deploy(view: JobView) -> Step:
    job = view.job
    if job.desired is Desired.CANCEL:
        return _cancel(view)
    if view.now < job.due_us:
        return Wait(job.due_us)
    return Deploy()


def _stopping(view: JobView) -> Step:
    """The commits of the newest durable epoch are being carried out by a finalising deployment."""
    job = view.job
    deadline = job.stopping_us + view.settings.commit_deadline_ms * 1000
    target = JobState(job.target)
    if view.assignments and all(a.state is AssignmentState.FINISHED for a in view.assignments):
        return Wait(deadline) if view.savepoint_copying and view.now < deadline else End(target, _with_savepoint(view, job.reason))
    if view.now >= deadline:
        return End(target, _with_savepoint(view, job.reason), pending=True)
    lost = [a for a in view.assignments if a.state is AssignmentState.FAILED or a.node not in view.live_nodes]
    lost = [a for a in lost if a.state is not AssignmentState.FINISHED]
    if job.mode != "finalize" or lost or not view.assignments:
        retry_at = job.deployed_us + finalize_pause_us(job) if job.deployed_us else 0
        return Deploy(finalize=True) if view.now >= retry_at else Wait(min(retry_at, deadline))
    return Wait(deadline)


def finalize_pause_us(job: JobRow) -> int:
    """Pause before a finalising deployment is tried again: half the time the job has been stopping at the last try, so that tries thin out."""
    return min(MAX_RETRY_FINALIZE_US, max(RETRY_FINALIZE_US, (job.deployed_us - job.stopping_us) // 2))


def failure(view: JobView) -> tuple[str, str] | None:
    """(cause, detail) of the first thing that ends this generation; permanent causes first."""
    failed = [a for a in view.assignments if a.state is AssignmentState.FAILED]
    failed.sort(key=lambda a: (a.cause not in PERMANENT, a.changed_us, a.subtask))
    if failed:
        return failed[0].cause or "error", f"{failed[0].subtask}: {failed[0].detail}"
    for a in view.assignments:
        if a.state is not AssignmentState.FINISHED and a.node not in view.live_nodes:
            return "node", f"{a.subtask}: the lease of node {a.node} has expired"
    return None


def on_failure(view: JobView, cause: str, detail: str, *, stall: bool = False) -> Step:
    """Restart within budget, else fail with the causes."""
    if cause in CANNOT_START:
        return End(JobState.FAILED, f"{cause}: {detail}", pending=True)
    if cause in PERMANENT:
        return _fail(view, f"{cause}: {detail}")
    policy = view.settings.restart
    if cause in FREE:
        return Restart(cause, detail, False, True, 0)
    used = view.job.stalls if stall else view.job.failures
    if policy.kind == "rate":
        used = sum(was_stall is stall for _, was_stall in recent_restarts(view))
    budget = policy.stalls if stall else policy.failures
    if used >= budget:
        kind = "stall" if stall else "restart"
        return _fail(view, f"the {kind} budget of {budget} is used up; last cause {cause}: {detail}")
    return Restart(cause, detail, stall, False, restart_delay_us(policy, used))


def recent_restarts(view: JobView) -> list[tuple[int, bool]]:
    """(time in µs, whether it was a stall) of the restarts that a budget by rate counts: those within the interval. A time alone is an older row's: a failure."""
    kept = msgspec.json.decode(view.job.recent_restarts, type=list[int | tuple[int, str]])
    found = [(r, False) if isinstance(r, int) else (r[0], r[1] == STALL) for r in kept]
    return [r for r in found if r[0] > view.now - view.settings.restart.interval_ms * 1000]


def with_restart(view: JobView, step: Restart) -> str:
    """The column of recent restarts after this one: what the interval still holds. Kept for a budget by rate only, which bounds it."""
    counted = [*recent_restarts(view), *([] if step.free else [(view.now, step.stall)])]
    if view.settings.restart.kind != "rate":
        counted = []
    return msgspec.json.encode([(at, STALL if stall else FAILURE) for at, stall in counted]).decode()


def _fail(view: JobView, reason: str) -> Step:
    return Finalize(JobState.FAILED, reason) if needs_finalizing(view) else End(JobState.FAILED, reason)


def restart_delay_us(policy: RestartPolicy, used: int) -> int:
    """Delay before restart number ``used`` + 1, without jitter. Never overflows: the exponent is capped."""
    if policy.kind == "exponential":
        return min(policy.delay_ms << min(used, 20), policy.max_delay_ms) * 1000
    return policy.delay_ms * 1000


def _deploying(view: JobView) -> Step:
    limit = view.job.deployed_us + view.settings.start_limit_ms * 1000
    if view.assignments and all(a.state is AssignmentState.READY for a in view.assignments):
        missing = [v for v in view.plan.sources if v not in view.discovered]
        if not missing:
            owners = unowned(view)
            return OwnSplits(owners) if owners else BecomeRunning()
    if view.now >= limit:
        late = [a.subtask for a in view.assignments if a.state is not AssignmentState.READY]
        late = late or [f"{v} (its splits were not reported)" for v in view.plan.sources if v not in view.discovered]
        return on_failure(view, "start", f"not READY within {view.settings.start_limit_ms} ms: {', '.join(late[:10])}")
    return Wait(limit)


def unowned(view: JobView) -> list[tuple[str, str, int]]:
    """Hand unassigned splits to the reader that has the fewest; a stable order makes it deterministic."""
    known = {o for v in view.plan.vertices for o in v.operators}  # rows of a source that a lenient upgrade dropped stay behind
    free = [s for s in view.splits if s.state is SplitOwner.UNASSIGNED and s.operator in known]
    owners: list[tuple[str, str, int]] = []
    for operator in sorted({s.operator for s in free}):
        parallelism = view.plan.vertex_of(operator).parallelism
        load = [0] * parallelism
        for s in view.splits:
            if s.operator == operator and s.state is SplitOwner.ASSIGNED and 0 <= s.owner < parallelism:
                load[s.owner] += 1
        for s in free:
            if s.operator == operator:
                index = load.index(min(load))
                load[index] += 1
                owners.append((operator, s.split, index))
    return owners


def _running(view: JobView) -> Step:
    job = view.job
    settings = view.settings
    committed = min((a.committed for a in view.assignments if a.subtask in set(view.plan.committers)), default=job.newest_durable)
    committed = min(committed, job.newest_durable)
    if committed > job.newest_committed:
        return MarkCommitted(committed)
    terminal = _terminal(view)
    if terminal is not None:
        return terminal
    if view.epoch is not None:
        return _in_flight(view, view.epoch)
    if job.aborts > settings.max_aborts:
        return on_failure(view, "aborts", f"{job.aborts} epochs in a row were aborted; last: {job.reason}")
    owners = unowned(view)
    if owners:
        return OwnSplits(owners)
    return _trigger(view)


def _terminal(view: JobView) -> Step | None:
    """The newest durable epoch of this generation was the last one: end once it is committed and its savepoint copied, or at the deadline."""
    newest, job = view.newest, view.job
    if newest is None or newest.generation != job.generation or not EpochKind(newest.kind).terminal:
        return None
    state, reason = _outcome(newest)
    committed = job.newest_committed >= job.newest_durable
    if committed and not view.savepoint_copying and all(a.state is AssignmentState.FINISHED for a in view.assignments):
        return End(state, reason)  # not before: a queue source acknowledges its last messages after the epoch is durable
    deadline = newest.durable_us + view.settings.commit_deadline_ms * 1000
    return End(state, _with_savepoint(view, reason), pending=not committed) if view.now >= deadline else Wait(deadline)


def _with_savepoint(view: JobView, reason: str) -> str:
    """The reason of an ending that its savepoint's copy does not hold up any longer."""
    if not view.savepoint_copying or view.newest is None:
        return reason
    return f"{reason}; savepoint {view.newest.savepoint} is not copied: the coordinator goes on trying, it cannot be used before it is COMPLETE"


def _outcome(terminal: EpochRow) -> tuple[JobState, str]:
    """How a job ends whose last epoch this was."""
    if EpochKind(terminal.kind) is EpochKind.SUSPEND:
        return JobState.STOPPED, f"suspended at savepoint {terminal.savepoint}"
    return JobState.FINISHED, "drained" if EpochKind(terminal.kind) is EpochKind.DRAIN else "all input processed"


def _last_epoch_done(view: JobView) -> Step | None:
    """A failure behind the durable terminal epoch: only its commits are left. A restart would process more, and leave the savepoint behind what is committed."""
    newest = view.newest
    if newest is None or newest.generation != view.job.generation or not EpochKind(newest.kind).terminal:
        return None
    state, reason = _outcome(newest)
    if needs_finalizing(view):
        return Finalize(state, reason)
    deadline = newest.durable_us + view.settings.commit_deadline_ms * 1000
    return Wait(deadline) if view.savepoint_copying and view.now < deadline else End(state, _with_savepoint(view, reason))


def _in_flight(view: JobView, epoch: EpochRow) -> Step:
    settings = view.settings
    acked = {a.subtask for a in view.acks if not a.declined and a.generation == view.job.generation}
    wanted = {s.id for s in view.plan.subtasks()}
    if acked >= wanted:
        return MakeDurable() if epoch.state is EpochState.PRECOMMITTED else Precommit()
    declined = [a for a in view.acks if a.declined]
    if declined:
        return AbortEpoch(f"declined by {declined[0].subtask}: {declined[0].declined}")
    timeout = epoch.triggered_us + settings.epoch_timeout_ms * 1000
    if view.now >= timeout:
        return AbortEpoch(f"not acknowledged within {settings.epoch_timeout_ms} ms by {', '.join(sorted(wanted - acked)[:10])}")
    waiting = [a for a in view.assignments if a.subtask not in acked]
    progressed = max([epoch.triggered_us, *(a.progressed_us for a in waiting)])
    stalled = progressed + settings.alignment_ms * 1000
    if view.now >= stalled:
        who = ", ".join(a.subtask for a in waiting[:10])
        return on_failure(view, "stall", f"epoch {epoch.epoch}: no progress of {who} for {settings.alignment_ms} ms", stall=True)
    return Wait(min(timeout, stalled))


def _trigger(view: JobView) -> Step:
    """Which epoch to trigger, and when."""
    job, settings = view.job, view.settings
    sources = [a for a in view.assignments if a.subtask.rpartition(":")[0] in view.plan.sources]
    if job.desired is Desired.DRAIN:
        return TriggerEpoch(EpochKind.DRAIN)
    if job.desired is Desired.SUSPEND:
        return TriggerEpoch(EpochKind.SUSPEND, job.wanted_savepoint)
    if sources and all(a.exhausted for a in sources):
        return TriggerEpoch(EpochKind.FINAL)
    if view.uncommitted >= settings.max_uncommitted:
        return Wait(view.now + settings.epoch_interval_ms * 1000)
    if job.wanted_savepoint:
        return TriggerEpoch(EpochKind.SAVEPOINT, job.wanted_savepoint)
    if settings.epoch_interval_ms == 0:
        return Wait()
    pause = job.epoch_us + settings.min_pause_ms * 1000
    due = pause if job.wants_epoch else max(pause, job.epoch_us + settings.epoch_interval_ms * 1000)
    return TriggerEpoch(EpochKind.CHECKPOINT) if view.now >= due else Wait(due)
