"""Why a task is not running, in one line that names no other tenant."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.durable.rows import NOW, SECOND, task_row

from millstream_schema.durable.explaining import Holder, WhyFacts, why
from millstream_schema.durable.gates import Gate, GateKind
from millstream_schema.durable.progress import ProgressRow
from millstream_schema.durable.records import PermitRow
from millstream_schema.durable.states import TaskState

T = TaskState
BUSY = PermitRow(id="default/acct:7", namespace="default", key="acct:7", capacity=2, held=2, seq=9, paused=0, rev=1)
SHUT = Gate(
    id="queue:default/default", namespace="default", kind=GateKind.QUEUE, name="default", paused=1, paused_by="me", paused_why="moving house",
    paused_us=1_700_000_000_000_000,
)  # fmt: skip
DRY = Gate(
    id="permit:default/p", namespace="default", kind=GateKind.PERMIT, name="p", rate=2, per_us=60_000_000, burst=1, level=0, level_us=NOW,
)  # fmt: skip
TOLD = ProgressRow(task="t", fence=1, number=7, done=3, total=4, message="rows", at_us=NOW - 2_000_000)
PAUSED = PermitRow(id="default/acct:7", namespace="default", key="acct:7", capacity=2, held=0, seq=9, paused=1, rev=1)
LIVE = Holder(name="worker-1", expires_us=NOW + 4 * SECOND, gone=False)
LATE = Holder(name="worker-1", expires_us=NOW - SECOND, gone=False)
PARKED = {"blocked_by": "permit:default/acct:7", "permit": "acct:7"}

LINES: dict[str, tuple[TaskState, dict[str, Any], dict[str, Any], str]] = {
    "due later": (T.SCHEDULED, {"wake_us": NOW + 90 * SECOND}, {}, "it is due at 2027-01-15 08:01:30 UTC, in 90.0 s"),
    "due tomorrow": (T.SCHEDULED, {"wake_us": NOW + 86_400 * SECOND}, {}, "in 1 day, 0:00:00"),
    "due already": (T.SCHEDULED, {"wake_us": NOW - SECOND}, {}, "is a worker running?"),
    "again": (T.RETRY_WAIT, {"wake_us": NOW + SECOND, "reason": "ValueError: no\nsuch"}, {}, "in 1.0 s: attempt 2 follows after ValueError: no such"),
    "permit": (T.READY, PARKED, {"permit": BUSY}, "it waits for permit 'acct:7': 2 of 2 are held"),
    "permit paused": (T.READY, PARKED, {"permit": PAUSED}, "permit 'acct:7' is paused"),
    "permit unknown": (T.READY, PARKED, {}, "it waits for permit 'acct:7'"),
    "queue paused": (
        T.READY, {}, {"gate": SHUT, "able": 1, "serving": 1}, "queue 'default' is paused by me since 2023-11-14 22:13:20 UTC: moving house",
    ),
    "handler paused": (
        T.READY, {"blocked_by": "pause:handler:default/work"}, {"gate": msgspec.structs.replace(SHUT, kind=GateKind.HANDLER, name="work")},
        "handler 'work' is paused by me since 2023-11-14 22:13:20 UTC: moving house",
    ),
    "rate": (
        T.READY, {"blocked_by": "rate:permit:default/p"}, {"gate": DRY}, "permit 'p' starts 2/m: the next token is there in 30.0 s",
    ),
    "rate over": (
        T.READY, {"blocked_by": "rate:permit:default/p"}, {}, "what kept it is over (rate of permit:p): the next sweep moves it up",
    ),
    "no worker": (T.READY, {}, {}, "no live worker serves queue 'default'"),
    "other queues": (T.READY, {}, {"elsewhere": 2}, "no live worker serves queue 'default'; of other queues 2 live workers serve handler 'work'"),
    "no handler": (T.READY, {}, {"serving": 1}, "1 live worker serves queue 'default', and none has handler 'work'"),
    "its turn": (T.READY, {}, {"serving": 3, "able": 2}, "it waits for its turn since 2027-01-15 08:00:00 UTC: 2 live workers serve its queue and handler"),
    "behind": (T.READY, {}, {"serving": 3, "able": 2, "ahead": 7}, "its queue and handler, ahead of it in its queue: 7"),
    "claimed": (T.DISPATCHED, {}, {"holder": LIVE}, "it was claimed at 2027-01-15 08:00:00 UTC and has not begun at worker-1 (session s), whose lease holds for 4.0 s"),
    "running": (T.RUNNING, {"cancel": 1}, {"holder": LIVE}, "it runs since 2027-01-15 08:00:00 UTC at worker-1 (session s), whose lease holds for 4.0 s; its end is asked for"),
    "told": (T.RUNNING, {}, {"holder": LIVE, "progress": TOLD}, "whose lease holds for 4.0 s; 3 of 4 done (rows), told 2.0 s ago"),
    "late": (T.RUNNING, {}, {"holder": LATE}, "whose lease ran out at 2027-01-15 07:59:59 UTC: the sweep takes it back"),
    "forgotten": (T.RUNNING, {}, {}, "its session s is unknown"),
    "review": (T.UNKNOWN, {"cause": "lost", "reason": "the lease of its worker ran out"}, {}, "since 2027-01-15 08:00:00 UTC (lost): the lease of its worker ran out"),
    "in doubt": (T.UNKNOWN, {"cause": "intent"}, {"open_calls": ("charge", "mail/7")}, "(intent); not known is whether these were called: charge, mail/7"),
    "waits to ask": (T.RETRY_WAIT, {"wake_us": NOW + SECOND}, {"open_calls": ("charge",)}, "; not known is whether these were called: charge"),
    "over": (T.FAILED, {"cause": "attempts", "settled_us": NOW, "superseded_by": "task-9"}, {}, "since 2027-01-15 08:00:00 UTC: FAILED (attempts); task task-9 followed it"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LINES))
def test_the_line_says_what_the_facts_say(name: str) -> None:
    """One line, and never the namespace it is parked under."""
    state, changes, facts, said = LINES[name]
    line = why(task_row(state, **changes), WhyFacts(now_us=NOW, **facts))
    assert said in line and "\n" not in line and "default/" not in line


def test_every_state_has_a_line() -> None:
    """Without any fact."""
    assert {s for s, *_ in LINES.values()} | {T.SUCCEEDED, T.CANCELLED, T.EXPIRED} == set(T)
    for state in T:
        assert why(task_row(state), WhyFacts(now_us=NOW))
