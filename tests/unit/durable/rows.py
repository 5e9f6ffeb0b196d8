"""Rows, policies and outcomes of durable tasks for tests of what is decided about them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from millstream_schema.durable import outcomes as o
from millstream_schema.durable.records import Policy, TaskRow
from millstream_schema.durable.states import HELD, Effects, TaskState

NOW = 1_800_000_000_000_000
SECOND = 1_000_000


def task_row(state: TaskState = TaskState.RUNNING, **changes: Any) -> TaskRow:
    """A plain task that has begun once; ``changes`` by column."""
    values: dict[str, Any] = {
        "id": "task-1", "namespace": "default", "handler": "work", "key": "k", "digest": "1:d", "queue": "default", "business_key": "", "state": state,
        "cause": "", "reason": "", "effects": Effects.IDEMPOTENT, "policy": "{}", "args": "[]", "priority": 0, "fence": 1, "token": "t", "session": "s",
        "claim": "c", "failures": 0, "crashes": 0, "losses": 0, "snoozes": 0, "starts": 1, "cancel": 0, "permit": "", "ordered": 0, "permit_held": 0,
        "permit_seq": 0, "blocked_by": None, "ready_lane": None, "rank": NOW, "wake_us": None, "due_us": NOW, "start_by_us": 0, "deadline_us": 0,
        "claimed_us": NOW, "started_us": NOW, "settled_us": 0, "created_us": NOW, "changed_us": NOW, "result": "", "error": "", "origin": "",
        "root": "task-1", "retry_of": "", "superseded_by": "", "actor": "", "rev": 1,
    }  # fmt: skip
    return TaskRow(**{**values, **changes})


COUNTS = st.integers(0, 6)
TIMES = st.sampled_from([0, NOW - 10 * SECOND, NOW, NOW + 1, NOW + 10 * SECOND, NOW + 10**9 * SECOND])
TEXTS = st.sampled_from(["", "why", "\x00\ud800 long " * 9])
UNCHOSEN = st.one_of(
    st.builds(o.Lost, st.booleans()),
    st.builds(o.Crashed, TEXTS),
    st.builds(o.Killed, st.sampled_from(["limit", "cancelled", "drain"]), TEXTS),
)
CHOSEN = st.one_of(
    st.builds(o.Succeeded, TEXTS),
    st.builds(o.GaveUp, TEXTS),
    st.builds(o.CancelledItself, TEXTS),
    st.builds(o.AskedForReview, TEXTS),
    st.builds(o.InDoubt, TEXTS),
    st.builds(o.Unfit, TEXTS),
    st.builds(o.Raised, TEXTS, TEXTS, st.booleans()),
    st.builds(o.Overran, TEXTS),
    st.builds(o.Unreached, TEXTS),
    st.just(o.Absent()),
    st.builds(o.RetryAsked, st.none() | st.integers(-(10**30), 10**30), TEXTS),
    st.builds(o.Snoozed, st.integers(-(10**30), 10**30)),
    st.just(o.Unstarted()),
)
OUTCOMES = st.one_of(CHOSEN, UNCHOSEN)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    delay = draw(st.integers(0, 10**10))
    return Policy(
        attempts=draw(st.integers(1, 6)), delay_ms=delay, max_delay_ms=delay + draw(st.integers(0, 10**10)), jitter=draw(st.floats(0, 1)),
        crashes=draw(st.integers(1, 5)), losses=draw(st.integers(1, 5)), snoozes=draw(st.integers(0, 5)), intents_only=draw(st.booleans()), reconciles=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def held_tasks(draw: st.DrawFn) -> TaskRow:
    return task_row(
        draw(st.sampled_from(sorted(HELD))), effects=draw(st.sampled_from(Effects)), failures=draw(COUNTS), crashes=draw(COUNTS), losses=draw(COUNTS),
        snoozes=draw(COUNTS), starts=draw(st.integers(0, 3)), cancel=draw(st.integers(0, 1)), ordered=draw(st.integers(0, 1)),
        permit_held=draw(st.integers(0, 1)), start_by_us=draw(TIMES), deadline_us=draw(TIMES), priority=draw(st.integers(-1000, 1000)),
    )  # fmt: skip
