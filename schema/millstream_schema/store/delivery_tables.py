"""Finished tasks as events, subscriptions to them, their deliveries.

An event is as long as its task's end: its key is the task. What has nothing more to be done has no entry in the index that work is found by: events whose deliveries are made
have no
``pending``, deliveries that are acknowledged or parked no ``due_us``.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Index, Integer, MetaData, Table, UniqueConstraint

from ..durable.deliveries import CatchUp, DeliveryState, Mode, SubscriptionState
from .columns import big, ident, long_text, one_of, some


def delivery_tables(m: MetaData, p: str) -> dict[str, Table]:
    """By field name of :class:`~millstream_schema.store.tables.Tables`."""
    return {
        "subscription": Table(
            f"{p}subscription",
            m,
            Column("id", ident(64), primary_key=True),
            Column("namespace", ident(64), nullable=False),
            Column("name", ident(64), nullable=False),
            Column("live_name", ident(160), nullable=True),
            big("seq"),
            Column("state", ident(16), nullable=False),
            Column("mode", ident(16), nullable=False),
            Column("target", ident(200), nullable=False, default=""),
            Column("celery_task", ident(200), nullable=False, default=""),
            Column("handler", ident(200), nullable=False, default=""),
            Column("queue", ident(64), nullable=False, default=""),
            Column("business_key", ident(200), nullable=False, default=""),
            Column("states", ident(64), nullable=False, default=""),
            Column("attempts", Integer, nullable=False),
            big("delay_ms"),
            big("max_delay_ms"),
            big("lease_ms"),
            big("since_us"),
            Column("catch_up", ident(16), nullable=False),
            big("from_us"),
            big("until_us"),
            big("ready_us"),
            big("cursor_us"),
            Column("cursor_id", ident(64), nullable=False, default=""),
            big("longest_us"),
            big("created_us"),
            big("changed_us"),
            Column("actor", ident(128), nullable=False, default=""),
            big("rev"),
            UniqueConstraint("live_name", name=f"{p}subscription_name"),
            UniqueConstraint("seq", name=f"{p}subscription_seq"),
            one_of("state", SubscriptionState, f"{p}subscription_state"),
            one_of("mode", Mode, f"{p}subscription_mode"),
            one_of("catch_up", CatchUp, f"{p}subscription_catch_up"),
            CheckConstraint("(live_name IS NULL) = (state = 'DELETED')", name=f"{p}subscription_live"),
            CheckConstraint("attempts >= 1", name=f"{p}subscription_attempts"),
            Index(f"{p}subscription_seq_i", "namespace", "seq"),
        ),
        "event": Table(
            f"{p}event",
            m,
            Column("id", ident(64), primary_key=True),
            Column("namespace", ident(64), nullable=False),
            Column("handler", ident(200), nullable=False),
            Column("key", ident(200), nullable=False),
            Column("queue", ident(64), nullable=False),
            Column("business_key", ident(200), nullable=False, default=""),
            Column("state", ident(16), nullable=False),
            Column("cause", ident(16), nullable=False, default=""),
            Column("reason", long_text(), nullable=False),
            Column("result", long_text(), nullable=False),
            Column("error", long_text(), nullable=False),
            Column("origin", ident(200), nullable=False, default=""),
            Column("root", ident(64), nullable=False),
            Column("retry_of", ident(64), nullable=False, default=""),
            Column("superseded_by", ident(64), nullable=False, default=""),
            big("created_us"),
            big("settled_us"),
            big("seen"),
            Column("pending", Integer, nullable=True),
            some(f"{p}event_pending_i", "pending IS NOT NULL", "pending", "settled_us"),
            Index(f"{p}event_settled_i", "settled_us"),
        ),
        "delivery": Table(
            f"{p}delivery",
            m,
            Column("subscription", ident(64), primary_key=True),
            Column("event", ident(64), primary_key=True),
            Column("state", ident(16), nullable=False),
            Column("attempts", Integer, nullable=False, default=0),
            big("due_us", null=True),
            Column("lease", ident(64), nullable=False, default=""),
            Column("reason", long_text(), nullable=False),
            Column("actor", ident(128), nullable=False, default=""),
            big("created_us"),
            big("changed_us"),
            big("rev"),
            one_of("state", DeliveryState, f"{p}delivery_state"),
            CheckConstraint("(due_us IS NOT NULL) = (state IN ('PENDING', 'LEASED'))", name=f"{p}delivery_due"),
            CheckConstraint("(lease <> '') = (state = 'LEASED')", name=f"{p}delivery_lease"),
            some(f"{p}delivery_due_i", "due_us IS NOT NULL", "subscription", "due_us", "event"),
            some(f"{p}delivery_lease_i", "lease <> ''", "lease"),
            Index(f"{p}delivery_state_i", "subscription", "state", "changed_us"),
            Index(f"{p}delivery_event_i", "event"),
        ),
    }
