"""``doctor``: each known trap of a Celery application is found where it is and nowhere else; an installation's state is judged from facts."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from celery import Celery

from millstream import celery_traps
from millstream.celery_facts import SETTINGS, CeleryFacts, PlainTask, facts_of
from millstream.celery_traps import celery_findings
from millstream.diagnosis import Gravity, installation_findings
from millstream_schema.durable.catalogue import Served
from millstream_schema.store.health import Health

SOUND: dict[str, Any] = {
    "broker_transport_options": {"confirm_publish": True, "socket_timeout": 30, "visibility_timeout": 7200},
    "result_backend_transport_options": {"visibility_timeout": 7200}, "task_time_limit": 300, "task_soft_time_limit": 240, "task_publish_retry": True,
    "task_publish_retry_policy": {"max_retries": 3}, "broker_pool_limit": 10, "worker_prefetch_multiplier": 1, "task_default_queue_type": "classic",
    "worker_detect_quorum_queues": True, "worker_eta_task_limit": 1000, "task_serializer": "json", "result_serializer": "json", "event_serializer": "json",
    "accept_content": ["json"], "result_expires": dt.timedelta(days=1), "task_track_started": True, "worker_max_memory_per_child": 200_000,
    "worker_state_db": "/var/state", "enable_utc": True,
}  # fmt: skip
PLAIN = PlainTask(name="shop.plain")
LATE = PlainTask(name="shop.late", acks_late=True)
LOOPS = PlainTask(name="shop.loops", acks_late=True, reject_on_worker_lost=True)


def facts(
    transport: str = "redis", tasks: tuple[PlainTask, ...] = (PLAIN,), backend: str = "redis://r", longest_s: float = 0.0, **conf: Any
) -> CeleryFacts:
    return CeleryFacts(transport=transport, backend=backend, conf={**SOUND, **conf}, tasks=tasks, longest_s=longest_s)


@pytest.mark.parametrize("transport", ["redis", "amqp"])
def test_a_sound_application_has_no_trap(transport: str) -> None:
    """One fine finding says that it was looked at."""
    (found,) = celery_findings(facts(transport))
    assert found.gravity is Gravity.FINE


W, D = Gravity.WRONG, Gravity.DOUBTFUL
TRAPS: list[tuple[str, Gravity, CeleryFacts]] = [
    ("visibility_timeout", W, facts(tasks=(msgspec.structs.replace(LOOPS, time_limit=8000),))),
    ("visibility_timeout", W, facts(longest_s=8000)),
    ("visibility_timeout", D, facts(tasks=(LOOPS,), task_time_limit=None, task_soft_time_limit=None)),
    ("mixed visibility timeouts", D, facts(result_backend_transport_options={})),
    ("acks_late without reject_on_worker_lost", W, facts(tasks=(LATE,))),
    ("reject_on_worker_lost without acks_late", D, facts(tasks=(PlainTask(name="t", reject_on_worker_lost=True),))),
    ("reject_on_worker_lost", D, facts(tasks=(LOOPS,))),
    ("worker_cancel_long_running_tasks_on_connection_loss", W, facts(worker_cancel_long_running_tasks_on_connection_loss=True)),
    ("acks_late and a broker's blip", D, facts("amqp", tasks=(LATE,))),
    ("consumer_timeout", D, facts("amqp", tasks=(msgspec.structs.replace(LOOPS, time_limit=3600),))),
    ("consumer_timeout", W, facts("amqp", longest_s=3600)),
    ("confirm_publish", W, facts("amqp", broker_transport_options={})),
    ("task_publish_retry_policy", W, facts(task_publish_retry_policy={"max_retries": None})),
    ("broker_pool_limit", D, facts(broker_pool_limit=0)),
    ("socket_timeout", D, facts(broker_transport_options={"visibility_timeout": 7200})),
    ("worker_prefetch_multiplier", W, facts(worker_prefetch_multiplier=0)),
    ("worker_prefetch_multiplier", D, facts(tasks=(LOOPS,), worker_prefetch_multiplier=4)),
    ("worker_deduplicate_successful_tasks", D, facts(worker_deduplicate_successful_tasks=True)),
    ("native delayed delivery", D, facts("amqp", task_default_queue_type="quorum")),
    ("native delayed delivery", D, facts("amqp", task_queues=(SimpleNamespace(queue_arguments={"x-queue-type": "quorum"}),))),
    ("quorum queues", W, facts("amqp", task_default_queue_type="quorum", worker_detect_quorum_queues=False)),
    ("worker_eta_task_limit", D, facts(worker_eta_task_limit=None)),
    ("pickle", W, facts(accept_content=["json", "application/x-python-serialize"])),
    ("pickle", W, facts(task_serializer="pickle")),
    ("pickle", W, facts(tasks=(PlainTask(name="t", serializer="pickle"),))),
    ("result_expires", D, facts(result_expires=None)),
    ("result_expires", D, facts(result_expires=60)),
    ("result_backend", D, facts(backend="rpc://")),
    ("task_track_started", D, facts(task_track_started=False)),
    ("time limits", D, facts(task_time_limit=None, task_soft_time_limit=None)),
    ("worker_max_memory_per_child", D, facts(worker_max_memory_per_child=None)),
    ("revokes", D, facts(worker_state_db=None)),
    ("task_always_eager", W, facts(task_always_eager=True)),
    ("enable_utc", D, facts(enable_utc=False)),
]


@pytest.mark.parametrize("at", range(len(TRAPS)), ids=lambda at: f"{TRAPS[at][0]}-{at}")
def test_each_trap_is_found_with_its_reason_and_cure(at: int) -> None:
    """As grave as it is."""
    about, gravity, f = TRAPS[at]
    (found,) = [x for x in celery_findings(f) if x.about == about]
    assert found.gravity is gravity and found.found and found.reason and found.cure


def test_every_check_has_a_case() -> None:
    """And every setting that is read is read from the application."""
    covered = {trap for trap in celery_traps.TRAPS for _, _, f in TRAPS if list(trap(f))}
    assert covered == set(celery_traps.TRAPS)
    assert {n for _, _, f in TRAPS for n in f.conf} <= set(SETTINGS)


def test_a_real_application_is_read_as_celery_resolves_it() -> None:
    """Defaults, per-task options, beat; what is ours and Celery's own is left out."""
    app = Celery("shop", broker="redis://nobody", set_as_current=False)
    app.conf.update(task_acks_late=True, accept_content=["json", "pickle"])
    app.conf.beat_schedule = {"nightly": {"task": "shop.pay", "schedule": 10, "options": {"countdown": 7200}}}

    @app.task(name="shop.pay", time_limit=10)  # type: ignore[untyped-decorator]  # Celery has no types
    def pay() -> None: ...

    found = facts_of(app)
    assert (found.transport, found.longest_s, found.backend) == ("redis", 7200.0, "")
    assert found.tasks == [PlainTask(name="shop.pay", acks_late=True, time_limit=10)]
    abouts = {f.about for f in celery_findings(found) if f.gravity is Gravity.WRONG}
    assert abouts == {"visibility_timeout", "acks_late without reject_on_worker_lost", "pickle"}


# -- the installation

NOW = 1_800_000_000_000_000
LEASE = 10_000_000
HEALTHY = Health(
    now_us=NOW, sessions={"s": Served(("default",), {"work": "1"})}, waiting={"default/default": {"work": 3}}, in_review={}, oldest_review_us=0, expired=0,
    swept_us=NOW, ticked_us=NOW, late_schedules={}, parked_deliveries={}, unfinished=0,
    settings={"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"},
)  # fmt: skip


def findings(here_us: int = NOW, dialect: str = "postgresql", **changes: Any) -> dict[str, Gravity]:
    found = installation_findings(msgspec.structs.replace(HEALTHY, **changes), dialect, here_us, LEASE)
    assert all(f.gravity is Gravity.FINE or (f.reason and f.cure) for f in found)
    return {f.about: f.gravity for f in found if f.gravity is not Gravity.FINE}


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"waiting": {"default/slow": {"work": 1}}}, {"queues without workers": W}),
        ({"waiting": {"default/default": {"other": 1}}}, {"handlers without workers": W}),
        ({"sessions": {}}, {"queues without workers": W}),
        ({"expired": 2}, {"lost workers": D}),
        ({"swept_us": NOW - 120_000_000, "ticked_us": 0}, {"coordinator": W}),
        ({"swept_us": 0, "ticked_us": 0}, {"coordinator": W}),
        ({"in_review": {"default": 3}, "oldest_review_us": NOW}, {"reviews": D}),
        ({"late_schedules": {"default/nightly": 90_000_000}}, {"schedules": W}),
        ({"parked_deliveries": {"default/mail": 3}}, {"deliveries": D}),
        ({"unfinished": 1}, {"operations": D}),
        ({"here_us": NOW + 2_000_000}, {"clocks": D}),
        ({"here_us": NOW - 60_000_000}, {"clocks": W}),
        ({"settings": {"fsync": "off", "full_page_writes": "on", "synchronous_commit": "on"}}, {"durability": W}),
        ({"dialect": "mysql", "settings": {"innodb_flush_log_at_trx_commit": "2", "sync_binlog": "0", "log_bin": "0"}}, {"durability": W}),
        ({"dialect": "mysql", "settings": {"innodb_flush_log_at_trx_commit": "1", "sync_binlog": "0", "log_bin": "1"}}, {"durability": W}),
        ({"dialect": "mysql", "settings": {"innodb_flush_log_at_trx_commit": "1", "sync_binlog": "0", "log_bin": "0"}}, {}),
        (
            {"dialect": "sqlite", "settings": {"journal_mode": "wal", "synchronous": "2"}, "sessions": dict.fromkeys("ab", HEALTHY.sessions["s"])},
            {"sqlite": D},
        ),
        ({}, {}),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_installation_is_said(changes: dict[str, Any], about: dict[str, Gravity]) -> None:
    """And nothing else is."""
    assert findings(**changes) == about
