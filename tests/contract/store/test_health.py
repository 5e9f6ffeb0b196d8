"""The facts doctor judges, on three databases."""

from __future__ import annotations

from tests.contract.store.stores import Opened
from tests.contract.store.task_rows import LEASE, ending, new, session, settle, submit, taken

from millstream.diagnosis import Gravity, installation_findings
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.catalogue import Served
from millstream_schema.store import catalogue, registry, sweeps
from millstream_schema.store.health import health


def test_an_empty_installation_has_nobody(store: Opened) -> None:
    """No coordinator was ever seen; commits are kept."""
    found = store.db.read(health)
    assert (found.sessions, found.waiting, found.in_review, found.expired, found.swept_us, found.ticked_us, found.unfinished) == (
        {},
        {},
        {},
        0,
        0,
        0,
        0,
    )
    judged = {f.about: f.gravity for f in installation_findings(found, store.db.dialect, found.now_us, LEASE)}
    assert judged["coordinator"] is Gravity.WRONG and judged["durability"] is Gravity.FINE


def test_what_waits_what_is_in_review_and_who_is_lost_are_counted(store: Opened) -> None:
    """By lane, namespace and session."""
    review, _ = taken(store.db, new("review"), new("held"))
    settle(store.db, ending(review, o.AskedForReview("?")))
    submit(store.db, new("a"), new("b", handler="other"), new("c", queue="slow"), new("d", namespace="other"), new("later", delay_us=LEASE))
    store.db.run(lambda tx: catalogue.enter(tx, "s2", "s2", LEASE, Served(("default",), {"work": ""}), ()))
    store.db.run(lambda tx: registry.leave_node(tx, "s"))
    session(store.db, "idle")
    store.db.run(lambda tx: registry.leave_node(tx, "idle"))
    store.db.run(lambda tx: sweeps.mark_sweep(tx, LEASE, distrust=False))
    found = store.db.read(health)
    assert found.waiting == {"default/default": {"work": 1, "other": 1}, "default/slow": {"work": 1}, "other/default": {"work": 1}}
    assert found.in_review == {"default": 1} and found.oldest_review_us > 0 and found.expired == 1 and found.swept_us > 0
    assert set(found.sessions) == {"s2"}
    judged = {f.about for f in installation_findings(found, store.db.dialect, found.now_us, LEASE) if f.gravity is Gravity.WRONG}
    assert judged == {"queues without workers", "handlers without workers"}
