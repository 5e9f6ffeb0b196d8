"""Who may pass, as a pure function: buckets by exact whole numbers, permits, pauses, ordered lines."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from tests.unit.durable.rows import NOW, SECOND, task_row

from millstream_schema.durable.gates import (
    PERIODS,
    STAYS,
    Gate,
    Gatekeeper,
    GateKind,
    available_us,
    filled,
    gate_id,
    given_back,
    less,
    rate_of,
    rate_text,
    rated,
    tokens,
)
from millstream_schema.durable.records import PermitRow, TaskRow
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ConfigurationError

K = GateKind


def gate(kind: GateKind = K.HANDLER, name: str = "work", **changes: Any) -> Gate:
    base = Gate(id=gate_id(kind, "default", name), namespace="default", kind=kind, name=name)
    return msgspec.structs.replace(base, **changes)


def bucket(rate: int, per_us: int, burst: int, **changes: Any) -> Gate:
    return rated(gate(**changes), rate, per_us, burst, NOW)


def task(key: str, **changes: Any) -> TaskRow:
    return task_row(TaskState.READY, **{"id": key, "key": key, "rank": NOW, "handler": "work", "queue": "default", **changes})


def permit(capacity: int = 1, **changes: Any) -> PermitRow:
    return PermitRow(
        **{
            "id": "default/p",
            "namespace": "default",
            "key": "p",
            "capacity": capacity,
            "held": 0,
            "seq": 0,
            "paused": 0,
            "rev": 0,
            **changes,
        }
    )


# -- buckets


@pytest.mark.parametrize("seed", range(20))
def test_no_window_has_more_starts_than_burst_and_rate_allow(seed: int) -> None:
    """Drawn rates, pauses between looks, starts that come back: exact in whole numbers, whatever does not divide."""
    rng = random.Random(seed)
    rate, per, burst = rng.choice([1, 3, 7, 100]), rng.choice(list(PERIODS.values())), rng.choice([1, 2, 7])
    held, now, out, starts = bucket(rate, per, burst), NOW, list[int](), list[int]()
    for _ in range(400):
        now += rng.choice([0, 1, per // rate // 3, per // rate, per])
        held = filled(held, now)
        while tokens(held) and rng.random() < 0.8:
            held = less(held, 1)
            (out if rng.random() < 0.3 else starts).append(now)
        while out and rng.random() < 0.5:
            held = given_back(held, out.pop())
        assert 0 <= held.level <= held.burst * held.per_us
    for i, first in enumerate(starts):
        for j in range(i, len(starts)):
            assert (j - i + 1 - burst) * per <= (starts[j] - first) * rate, (i, j)
    assert len(starts) > 10


def test_the_next_token_is_there_when_it_is_said_to_be() -> None:
    """Neither a microsecond sooner nor later."""
    for rate, per in ((7, SECOND), (1, 3600 * SECOND), (1000, SECOND), (3, 60 * SECOND)):
        empty = less(bucket(rate, per, 5), 5)
        for count in (1, 2, 5):
            at = available_us(empty, count)
            assert tokens(filled(empty, at)) == count and tokens(filled(empty, at - 1)) == count - 1
        assert available_us(empty, 6) > NOW, "more than it ever holds"


def test_a_clock_that_is_set_back_gives_nothing_and_takes_nothing() -> None:
    """Nor does it give twice what was given before."""
    empty = less(bucket(1, SECOND, 3), 3)
    later = filled(empty, NOW + SECOND)
    assert (tokens(later), tokens(filled(later, NOW)), tokens(filled(filled(later, NOW), NOW + SECOND))) == (1, 1, 1)


def test_a_changed_rate_keeps_what_is_in_the_bucket() -> None:
    """Setting it again gives no second burst; a smaller bucket holds less."""
    half = less(bucket(10, SECOND, 10), 6)
    assert tokens(rated(half, 20, SECOND, 10, NOW)) == 4
    assert tokens(rated(half, 10, SECOND, 2, NOW)) == 2
    assert not rated(half, 0, 0, 0, NOW).limits


@pytest.mark.parametrize("text", ["", "10", "10/d", "0/s", "-1/s", "1.5/s", "10 / s", "1000000/s", "10/s\n"])
def test_a_rate_that_cannot_be_read_is_refused(text: str) -> None:
    """With what to write instead."""
    with pytest.raises(ConfigurationError, match="10/s, 100/m or 5/h"):
        rate_of(text)


def test_rates_are_read_and_written_the_same() -> None:
    """Whole numbers per second, minute or hour."""
    for text in ("1/s", "100/m", "5/h"):
        assert rate_text(bucket(*rate_of(text), 1)) == text
    assert rate_text(gate()) == ""


# -- who may pass


def judged(
    tasks: list[TaskRow], gates: list[Gate] | None = None, permits: list[PermitRow] | None = None, lines: dict[str, list[str]] | None = None
) -> Any:
    keeper = Gatekeeper({g.id: g for g in gates or []}, {p.id: p for p in permits or []}, lines or {})
    verdict = keeper.judge(tasks)
    return [t.id for t, _ in verdict.granted], verdict.parked, verdict.passed


def test_the_best_rank_gets_what_there_is() -> None:
    """Whatever order they are given in."""
    some = [task("c", rank=3), task("a", rank=1), task("b", rank=2)]
    assert judged(some, [bucket(1, SECOND, 2)]) == (["a", "b"], {"c": "rate:handler:default/work"}, [])
    wanting = [msgspec.structs.replace(t, permit="p") for t in some]
    assert judged(wanting, permits=[permit(2)]) == (["a", "b"], {"c": "permit:default/p"}, [])


@pytest.mark.parametrize(
    ("kind", "blocker"), [(K.QUEUE, STAYS), (K.HANDLER, "pause:handler:default/work"), (K.PERMIT, "permit:default/p")], ids=lambda v: str(v)
)
def test_what_is_paused_is_parked_under_the_pause_before_anything_is_taken(kind: GateKind, blocker: str) -> None:
    """No token, no permit; a whole lane stays where it is."""
    names = {K.QUEUE: "default", K.HANDLER: "work", K.PERMIT: "p"}
    shut = gate(kind, names[kind], paused=1)
    granted, parked, passed = judged([task("a", permit="p")], [shut], [permit()])
    assert granted == [] and (passed == ["a"] if blocker == STAYS else parked == {"a": blocker})


def test_an_ordered_line_is_passed_by_nobody() -> None:
    """When its first may not start, for whatever reason, those behind it wait though there is room; also when it is not looked at."""
    two = [task("a", rank=1, permit="p", ordered=1, handler="slow"), task("b", rank=2, permit="p", ordered=1)]
    shut = gate(K.HANDLER, "slow", paused=1)
    expected = {"a": "pause:handler:default/slow", "b": "permit:default/p"}
    assert judged(two, [shut], [permit(2)], {"default/p": ["a", "b"]}) == ([], expected, [])
    assert judged(two[1:], [], [permit(2)], {"default/p": ["a", "b"]}) == ([], {"b": "permit:default/p"}, [])
    assert judged(two, [], [permit(2)], {"default/p": ["a", "b"]}) == (["a", "b"], {}, [])


def test_who_holds_a_permit_needs_no_room_but_waits_for_a_pause() -> None:
    """Under the pause itself, not in the line of the permit."""
    kept = task("a", permit="p", permit_held=1, ordered=1)
    assert judged([kept], [], [permit(1, held=1)]) == (["a"], {}, [])
    shut = gate(K.PERMIT, "p", paused=1)
    assert judged([kept], [shut], [permit(1, held=1, paused=1)]) == ([], {"a": "pause:permit:default/p"}, [])


def test_a_permit_somebody_else_decides_about_is_passed_over() -> None:
    """Neither given nor parked: nobody may park what he has not locked the reason of."""
    assert judged([task("a", permit="p"), task("b")]) == (["b"], {}, ["a"])
