"""Known traps in a Celery application's settings: each a pure check of what is set, with its reason and its cure.

Used by ``doctor --celery``. Durable tasks fall into none of them; the application's plain tasks do. What must never happen here: a broker asked, a setting changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .celery_facts import CeleryFacts, PlainTask
from .diagnosis import Finding, Gravity

HOUR = 3600.0
REDIS_TIMEOUT = HOUR
"""Redis's visibility timeout unless it is set."""
CONSUMER_TIMEOUT = 1800.0
"""RabbitMQ's, unless its operator changed it."""
NAMES_SHOWN = 5


Trap = Callable[[CeleryFacts], Iterator[Finding]]


def celery_findings(facts: CeleryFacts) -> list[Finding]:
    """Everything that is wrong or doubtful, the wrong first; one fine finding when there is nothing."""
    found = [f for trap in TRAPS for f in trap(facts)]
    found.sort(key=lambda f: f.gravity is not Gravity.WRONG)
    return found or [Finding(about="celery", gravity=Gravity.FINE, found=f"no known trap in the settings, {len(facts.tasks)} plain tasks")]


def _trap(about: str, found: str, reason: str, cure: str, *, wrong: bool = False) -> Finding:
    return Finding(about=about, gravity=Gravity.WRONG if wrong else Gravity.DOUBTFUL, found=found, reason=reason, cure=cure)


def _names(tasks: Sequence[PlainTask]) -> str:
    shown = ", ".join(t.name for t in tasks[:NAMES_SHOWN])
    return shown + (f" and {len(tasks) - NAMES_SHOWN} more" if len(tasks) > NAMES_SHOWN else "")


def _limit(task: PlainTask, facts: CeleryFacts) -> float | None:
    limit = task.time_limit or facts.get("task_time_limit") or task.soft_time_limit or facts.get("task_soft_time_limit")
    return None if limit is None else float(limit)


def _redis(facts: CeleryFacts) -> bool:
    return facts.transport in ("redis", "rediss", "sentinel")


def _amqp(facts: CeleryFacts) -> bool:
    return facts.transport in ("amqp", "amqps", "pyamqp", "confirm")


def visibility_timeout(facts: CeleryFacts) -> Iterator[Finding]:
    """T01, T13."""
    if not _redis(facts):
        return
    timeout = float(facts.option("visibility_timeout") or REDIS_TIMEOUT)
    over = [t for t in facts.late if (_limit(t, facts) or 0) > timeout]
    endless = [t for t in facts.late if _limit(t, facts) is None]
    if over or facts.longest_s > timeout:
        what = _names(over) or f"a countdown or eta of {facts.longest_s:.0f} s"
        yield _trap(
            "visibility_timeout",
            f"{timeout:.0f} s, and longer lasts: {what}",
            "Redis gives out again what is not acknowledged in this time: it runs twice, and again each time",
            "raise broker_transport_options['visibility_timeout'] above the longest task and eta, or make them durable tasks",
            wrong=True,
        )
    elif endless:
        yield _trap(
            "visibility_timeout",
            f"{timeout:.0f} s; without a time limit and acks_late: {_names(endless)}",
            "what runs longer is given out again and runs twice",
            "give them a time_limit below it, or make them durable tasks",
        )


def mixed_visibility_timeouts(facts: CeleryFacts) -> Iterator[Finding]:
    """T13."""
    broker, back_end = facts.option("visibility_timeout"), (facts.get("result_backend_transport_options") or {}).get("visibility_timeout")
    if _redis(facts) and facts.backend.startswith("redis") and (broker or back_end) and broker != back_end:
        yield _trap(
            "mixed visibility timeouts",
            f"broker {broker or 'default'}, result back end {back_end or 'default'}",
            "in one Redis the shortest one counts for all, also for other applications",
            "set the same visibility_timeout in broker_transport_options and result_backend_transport_options of every application on that Redis",
        )


def lost_workers(facts: CeleryFacts) -> Iterator[Finding]:
    """T05."""
    lost = [t for t in facts.late if not t.reject_on_worker_lost]
    if lost:
        yield _trap(
            "acks_late without reject_on_worker_lost",
            _names(lost),
            "a worker process that is killed (out of memory) acknowledges all the same: the task is lost",
            "set task_reject_on_worker_lost, and expect a poisonous task to come back for ever; or make them durable tasks",
            wrong=True,
        )
    useless = [t for t in facts.tasks if t.reject_on_worker_lost and not t.acks_late]
    if useless:
        yield _trap(
            "reject_on_worker_lost without acks_late",
            _names(useless),
            "without acks_late it does nothing: the message is gone when the task begins",
            "set acks_late, too, or make them durable tasks",
        )
    looping = [t for t in facts.late if t.reject_on_worker_lost]
    if looping:
        yield _trap(
            "reject_on_worker_lost",
            _names(looping),
            "a task that kills its process is redelivered for ever: nothing counts its crashes",
            "make them durable tasks: after some crashes a person is asked",
        )


def late_on_a_blip(facts: CeleryFacts) -> Iterator[Finding]:
    """T03, T19."""
    if facts.get("worker_cancel_long_running_tasks_on_connection_loss"):
        yield _trap(
            "worker_cancel_long_running_tasks_on_connection_loss",
            "on",
            "each loss of the broker's connection kills running tasks, and has crashed the worker's main process",
            "leave it off; tasks that must not run twice are durable tasks, whose lease does not hang on a channel",
            wrong=True,
        )
    elif facts.late and _amqp(facts):
        yield _trap(
            "acks_late and a broker's blip",
            _names(facts.late),
            "when the connection breaks, what runs is delivered again while it runs",
            "make tasks whose effect must happen once durable",
        )


def consumer_timeout(facts: CeleryFacts) -> Iterator[Finding]:
    """T12."""
    if not _amqp(facts):
        return
    over = [t for t in facts.late if (_limit(t, facts) or CONSUMER_TIMEOUT + 1) > CONSUMER_TIMEOUT]
    if over or facts.longest_s > CONSUMER_TIMEOUT:
        what = _names(over) or f"a countdown or eta of {facts.longest_s:.0f} s"
        yield _trap(
            "consumer_timeout",
            f"may be unacknowledged for more than {CONSUMER_TIMEOUT / 60:.0f} min: {what}",
            "RabbitMQ then closes the channel: all that this worker had is delivered again",
            "raise consumer_timeout in RabbitMQ above the longest task and eta, give the tasks time limits, or make them durable",
            wrong=facts.longest_s > CONSUMER_TIMEOUT,
        )


def confirms(facts: CeleryFacts) -> Iterator[Finding]:
    """T10."""
    if _amqp(facts) and not facts.option("confirm_publish"):
        yield _trap(
            "confirm_publish",
            "off",
            "a message published on a channel that closes is lost without a word",
            "broker_transport_options = {'confirm_publish': True}",
            wrong=True,
        )


def endless_publishing(facts: CeleryFacts) -> Iterator[Finding]:
    """T20."""
    policy = facts.get("task_publish_retry_policy") or {}
    if facts.get("task_publish_retry") and policy.get("max_retries", 3) is None:
        yield _trap(
            "task_publish_retry_policy",
            "max_retries is None",
            "delay() in a web request waits for ever when the broker is away",
            "give max_retries and a socket_timeout in broker_transport_options",
            wrong=True,
        )
    if facts.get("broker_pool_limit") == 0:
        yield _trap(
            "broker_pool_limit",
            "0",
            "a connection is opened and closed for each message",
            "leave it at 10, or set it to the number of threads that publish",
        )
    if _redis(facts) and not facts.option("socket_timeout"):
        yield _trap(
            "socket_timeout",
            "not set for the broker",
            "a Redis that vanished without a word is waited for for ever: workers look alive and do nothing",
            "broker_transport_options = {'socket_timeout': 30, 'socket_keepalive': True, 'health_check_interval': 15}",
        )


def prefetching(facts: CeleryFacts) -> Iterator[Finding]:
    """T25."""
    multiplier = facts.get("worker_prefetch_multiplier")
    slow = [t for t in facts.tasks if (_limit(t, facts) or 0) > 60]
    if multiplier == 0:
        yield _trap(
            "worker_prefetch_multiplier",
            "0",
            "a worker takes every message there is: others stand idle, memory grows",
            "set it to 1, or to a few for short tasks",
            wrong=True,
        )
    elif (multiplier or 4) > 1 and (facts.late or slow):
        yield _trap(
            "worker_prefetch_multiplier",
            str(multiplier or 4),
            "short tasks wait behind long ones that a busy worker holds, while others are idle",
            "worker_prefetch_multiplier = 1 where tasks are long or acks_late",
        )


def deduplication(facts: CeleryFacts) -> Iterator[Finding]:
    """T32."""
    if facts.get("worker_deduplicate_successful_tasks"):
        yield _trap(
            "worker_deduplicate_successful_tasks",
            "on",
            "it knows only redelivered tasks whose result is still in the back end, and used to stop chains: a duplicate's next step never came",
            "do not rely on it: give durable tasks a key",
            wrong=False,
        )


def delayed_delivery(facts: CeleryFacts) -> Iterator[Finding]:
    """T11, T24."""
    quorum = facts.get("task_default_queue_type") == "quorum" or any(
        (getattr(q, "queue_arguments", None) or {}).get("x-queue-type") == "quorum" for q in facts.get("task_queues") or ()
    )
    if quorum and facts.get("worker_detect_quorum_queues"):
        yield _trap(
            "native delayed delivery",
            "quorum queues: countdown and eta go through celery_delayed_* queues",
            "messages have been stuck there, and their topology has to be there before the first one",
            "keep countdown and eta out of the broker: durable tasks wait in the database",
        )
    if quorum and not facts.get("worker_detect_quorum_queues"):
        yield _trap(
            "quorum queues",
            "worker_detect_quorum_queues is off",
            "global QoS does not work on quorum queues: workers prefetch without a bound or fail to start",
            "worker_detect_quorum_queues = True",
            wrong=True,
        )
    if not facts.get("worker_eta_task_limit"):
        yield _trap(
            "worker_eta_task_limit",
            "not set",
            "a worker loads every future task into memory; the next one inherits them when it dies",
            "set worker_eta_task_limit, or submit future work as durable tasks",
        )


def serializers(facts: CeleryFacts) -> Iterator[Finding]:
    names = ("task_serializer", "result_serializer", "event_serializer")
    used = [f"{n} = pickle" for n in names if facts.get(n) == "pickle"]
    used += [f"{n} has pickle" for n in ("accept_content", "result_accept_content") if _pickles(facts.get(n))]
    used += [f"{t.name}.serializer = pickle" for t in facts.tasks if t.serializer == "pickle"]
    if used:
        yield _trap(
            "pickle",
            ", ".join(used[:NAMES_SHOWN]),
            "whoever can write to the broker runs code in the workers",
            "use json and keep accept_content = ['json']",
            wrong=True,
        )


def _pickles(accepted: Any) -> bool:
    return any(str(kind).rpartition("/")[2] in ("pickle", "x-python-serialize") for kind in accepted or ())


def results(facts: CeleryFacts) -> Iterator[Finding]:
    """T33, T35."""
    expires = facts.get("result_expires")
    seconds = expires.total_seconds() if hasattr(expires, "total_seconds") else expires
    if facts.backend and not facts.backend.startswith("disabled"):
        if not seconds:
            yield _trap(
                "result_expires",
                "never",
                "results fill the back end for ever",
                "set result_expires to what somebody still asks for (a day)",
            )
        elif seconds < 600:
            yield _trap(
                "result_expires",
                f"{seconds:.0f} s",
                "a result may be gone before it is asked for: get() then waits for ever",
                "set it to at least an hour; give get() a timeout",
            )
        if facts.backend.startswith("rpc"):
            yield _trap(
                "result_backend",
                "rpc://",
                "results live in a queue of one client: another process cannot read them, a restart loses them, chords do not work",
                "use Redis or a database; durable tasks keep theirs in SQL",
            )
    if not facts.get("task_track_started"):
        yield _trap(
            "task_track_started",
            "off",
            "a running task looks like one that was never taken: PENDING says nothing",
            "task_track_started = True",
        )


def limits(facts: CeleryFacts) -> Iterator[Finding]:
    """T17, T23, T36."""
    endless = [t for t in facts.tasks if _limit(t, facts) is None]
    if endless:
        yield _trap(
            "time limits",
            f"none for {_names(endless)}",
            "a task that hangs holds its slot for ever",
            "set task_soft_time_limit and task_time_limit",
        )
    if not facts.get("worker_max_tasks_per_child") and not facts.get("worker_max_memory_per_child"):
        yield _trap(
            "worker_max_memory_per_child",
            "not set, nor worker_max_tasks_per_child",
            "what leaks in a worker process stays until it is killed",
            "set one of them",
        )
    if not facts.get("worker_state_db"):
        yield _trap(
            "revokes",
            "worker_state_db is not set",
            "a revoke is a broadcast kept in memory: lost when no worker is up, forgotten at a restart",
            "start workers with --statedb; the cancel of a durable task is a row",
        )


def eagerness(facts: CeleryFacts) -> Iterator[Finding]:
    if facts.get("task_always_eager"):
        yield _trap(
            "task_always_eager", "on", "tasks run inside the caller: nothing is queued, nothing is tried again", "only in tests", wrong=True
        )
    if facts.get("enable_utc") is False:
        yield _trap(
            "enable_utc",
            "off",
            "eta and beat count in local time: at a change of the clock things run twice or not at all",
            "enable_utc = True, and give schedules a zone",
        )


TRAPS: tuple[Trap, ...] = (
    visibility_timeout,
    mixed_visibility_timeouts,
    lost_workers,
    late_on_a_blip,
    consumer_timeout,
    confirms,
    endless_publishing,
    prefetching,
    deduplication,
    delayed_delivery,
    serializers,
    results,
    limits,
    eagerness,
)
