"""What a Celery application has set, as the checks of its traps read it.

Used by ``doctor --celery``. What must never happen here: a connection to a broker, a setting changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class PlainTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task of the application that Millstream does not run."""

    name: str
    acks_late: bool = False
    reject_on_worker_lost: bool = False
    time_limit: float | None = None
    soft_time_limit: float | None = None
    serializer: str = "json"


class CeleryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``transport``: redis, amqp, …; ``conf``: settings by name as Celery resolves them; ``longest_s``: countdown or eta of beat's entries, the longest."""

    transport: str
    backend: str
    conf: Mapping[str, Any]
    tasks: Sequence[PlainTask]
    longest_s: float = 0.0

    def get(self, name: str) -> Any:
        return self.conf.get(name)

    def option(self, name: str) -> Any:
        return (self.conf.get("broker_transport_options") or {}).get(name)

    @property
    def late(self) -> list[PlainTask]:
        return [t for t in self.tasks if t.acks_late]


def facts_of(app: Any) -> CeleryFacts:
    """What an application has set, with its modules loaded as a worker would."""
    app.loader.import_default_modules()
    app.finalize()
    conf = app.conf
    plain = [t for name, t in app.tasks.items() if not name.startswith(("celery.", "millstream.")) and not hasattr(t, "handler")]
    tasks = [
        PlainTask(
            name=t.name,
            acks_late=bool(t.acks_late),
            reject_on_worker_lost=bool(t.reject_on_worker_lost),
            time_limit=t.time_limit,
            soft_time_limit=t.soft_time_limit,
            serializer=str(t.serializer or conf.task_serializer),
        )
        for t in sorted(plain, key=lambda t: str(t.name))
    ]
    entries = (e.get("options") or {} for e in (conf.beat_schedule or {}).values() if isinstance(e, Mapping))
    longest = max((float(o["countdown"]) for o in entries if isinstance(o.get("countdown"), int | float)), default=0.0)
    url = str(conf.broker_url or app.connection_for_write().as_uri())
    return CeleryFacts(
        transport=url.partition(":")[0],
        backend=str(conf.result_backend or ""),
        conf={n: conf.get(n) for n in SETTINGS},
        tasks=tasks,
        longest_s=longest,
    )


SETTINGS = (
    "broker_transport_options",
    "result_backend_transport_options",
    "task_time_limit",
    "task_soft_time_limit",
    "worker_cancel_long_running_tasks_on_connection_loss",
    "task_publish_retry",
    "task_publish_retry_policy",
    "broker_pool_limit",
    "worker_prefetch_multiplier",
    "worker_deduplicate_successful_tasks",
    "task_default_queue_type",
    "task_queues",
    "worker_detect_quorum_queues",
    "worker_eta_task_limit",
    "task_serializer",
    "result_serializer",
    "event_serializer",
    "accept_content",
    "result_accept_content",
    "result_expires",
    "task_track_started",
    "worker_max_tasks_per_child",
    "worker_max_memory_per_child",
    "worker_state_db",
    "task_always_eager",
    "enable_utc",
)
"""Those that a trap looks at."""
