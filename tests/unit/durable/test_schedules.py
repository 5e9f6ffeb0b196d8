"""What becomes of instants that have come: every one is run or missed, exactly by the policy, however many there are and however often one looks."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.store.schedule_rows import definition

from millstream_schema.durable.recurrence import SECOND, Cron, Interval, OneOff, Spec, instants
from millstream_schema.durable.schedules import (
    EXAMINED,
    FIRE_TRANSITIONS,
    FIRES,
    SCHEDULE_TRANSITIONS,
    Begin,
    Due,
    Entry,
    FireState,
    Misfire,
    Overlap,
    Rules,
    Running,
    ScheduleRow,
    ScheduleState,
    check_definition,
    due,
    due_us,
    jitter,
    on_overlap,
)
from millstream_schema.durable.states import TaskState
from millstream_schema.errors import ScheduleInvalid

DAY = 86_400 * SECOND
NOW = 20_000 * DAY + 7 * SECOND


def row(next_us: int | None, **changes: Any) -> ScheduleRow:
    values: dict[str, Any] = {
        "namespace": "default", "name": "s", "state": ScheduleState.ACTIVE, "reason": "", "version": 1, "digest": "", "next_us": next_us, "due_us": next_us, "last_us": 0,
        "tolerance_us": 0, "waiting": None, "tail_us": 0, "tail_state": "", "fired": 0, "skipped": 0, "missed": 0, "late": 0, "actor": "", "created_us": 0,
        "changed_us": 0, "rev": 0,
    }  # fmt: skip
    return ScheduleRow(**{**values, **changes})


def all_due(spec: Spec, first: int, now: int, **rules: Any) -> tuple[list[int], list[int], int | None]:
    """Decisions until nothing is due any more: instants that run, those that are missed, the next one."""
    runs: list[int] = []
    missed: list[int] = []
    following: int | None = first
    given = definition(spec, **rules)
    while (decided := due(row(following), given, now)) is not None:
        assert decided.missed is not None or decided.runs, "a decision about nothing"
        assert len(decided.runs) <= FIRES
        if decided.missed is not None:
            part = [decided.missed.first, *instants_until(spec, decided.missed.first, decided.missed.last)]
            assert len(part) == decided.missed.count and part[-1] == decided.missed.last
            missed += part
        runs += decided.runs
        assert decided.next_us is None or decided.next_us > max([*runs, *missed])
        following = decided.next_us
    return runs, missed, following


def instants_until(spec: Spec, after: int, last: int) -> list[int]:
    return list(takewhile(lambda i: i <= last, instants(spec, after)))


@given(
    st.sampled_from([Interval(every_us=SECOND), Interval(every_us=7 * SECOND), Cron(expression="*/3 * * * * *"), Cron(expression="* * * * *")]),
    st.integers(0, 5_000),
    st.sampled_from(list(Misfire)),
    st.integers(1, 300),
    st.integers(1, 4_000),
    st.integers(1, 400),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_every_instant_that_has_come_is_run_or_missed_by_the_policy(
    spec: Spec, behind: int, misfire: Misfire, limit: int, window: int, tolerance: int
) -> None:
    """Against the policy written down plainly."""
    first = instants_until(spec, NOW - behind * SECOND, NOW + DAY)[0]
    come = [i for i in [first, *instants_until(spec, first, NOW)] if i <= NOW]
    rules = {"misfire": misfire, "limit": limit, "window_us": window * SECOND, "tolerance_us": tolerance * SECOND}
    late = [i for i in come if NOW - i > tolerance * SECOND]
    in_time = come[len(late) :]
    allowed = {
        Misfire.SKIP: [],
        Misfire.ONCE: [] if in_time else late[-1:],
        Misfire.CATCH_UP: [i for i in late if NOW - i <= window * SECOND][-limit:],
    }[misfire]
    runs, missed, following = all_due(spec, first, NOW, **rules)
    assert runs == allowed + in_time
    assert missed == [i for i in come if i not in set(runs)]
    assert following is not None and following > NOW and following == instants_until(spec, NOW, NOW + DAY)[0]


@pytest.mark.parametrize("misfire", list(Misfire))
@pytest.mark.parametrize("behind", [EXAMINED - 1, EXAMINED, EXAMINED + 1, 3 * EXAMINED + 17])
def test_very_many_are_decided_in_parts_as_they_would_be_together(misfire: Misfire, behind: int) -> None:
    """The newest run, wherever the parts end."""
    spec, first = Interval(every_us=SECOND), NOW - behind * SECOND
    runs, missed, _ = all_due(spec, first, NOW, misfire=misfire, limit=1000, window_us=300 * DAY, tolerance_us=5 * SECOND)
    newest = {Misfire.SKIP: 6, Misfire.ONCE: 6, Misfire.CATCH_UP: 1006}[misfire]
    assert runs == [NOW - i * SECOND for i in range(newest)][::-1]
    assert len(missed) == behind + 1 - newest


def test_what_has_not_come_is_not_decided() -> None:
    """Nor what has no next."""
    spec = definition(Interval(every_us=SECOND))
    assert due(row(NOW + 1), spec, NOW) is None and due(row(None), spec, NOW) is None
    once = definition(OneOff(at_us=NOW))
    assert due(row(NOW), once, NOW) == Due(missed=None, runs=(NOW,), next_us=None)


def test_jitter_is_the_same_for_the_same_fire_and_spreads_others() -> None:
    """It lies between nothing and its most; a fire is due when it is over."""
    found = [jitter("default", f"s{i}", NOW, 30 * SECOND) for i in range(300)]
    assert found == [jitter("default", f"s{i}", NOW, 30 * SECOND) for i in range(300)]
    assert 0 <= min(found) < 3 * SECOND and 27 * SECOND < max(found) <= 30 * SECOND and len(set(found)) > 290
    assert jitter("default", "s", NOW, 0) == 0
    rules = Rules(jitter_us=30 * SECOND)
    at = due_us("default", "s1", NOW, rules)
    assert at == NOW + found[1] and due_us("default", "s1", None, rules) is None
    given = definition(Interval(every_us=DAY), jitter_us=30 * SECOND)
    assert due(row(NOW, name="s1"), given, at - 1) is None and due(row(NOW, name="s1"), given, at) is not None


RUNS = [Running("t1", TaskState.UNKNOWN), Running("t2", TaskState.RUNNING)]


@pytest.mark.parametrize(
    ("overlap", "running", "waits", "expected"),
    [
        pytest.param(Overlap.ALLOW, RUNS, True, (Begin.START, False), id="allow"),
        pytest.param(Overlap.SKIP, RUNS, False, (Begin.SKIP, False), id="skip"),
        pytest.param(Overlap.SKIP, [], False, (Begin.START, False), id="skip-free"),
        pytest.param(Overlap.QUEUE_ONE, RUNS, False, (Begin.QUEUE, False), id="queue"),
        pytest.param(Overlap.QUEUE_ONE, RUNS, True, (Begin.SKIP, False), id="queue-full"),
        pytest.param(Overlap.CANCEL_PREVIOUS, RUNS, False, (Begin.QUEUE, False), id="cancel"),
        pytest.param(Overlap.CANCEL_PREVIOUS, RUNS, True, (Begin.QUEUE, True), id="cancel-newer"),
        pytest.param(Overlap.CANCEL_PREVIOUS, [], True, (Begin.START, True), id="cancel-free"),
    ],
)
def test_what_a_fire_does_about_those_before_it(
    overlap: Overlap, running: list[Running], waits: bool, expected: tuple[Begin, bool]
) -> None:
    """The reason names a task; a fire that waits is replaced by a newer one only where earlier ones are cancelled."""
    found: Entry = on_overlap(Rules(overlap=overlap), running, waits)
    assert (found.begin, found.replaces) == expected
    assert ("t1" in found.reason) == (found.begin is not Begin.START)


@pytest.mark.parametrize(
    ("name", "spec", "rules", "text"),
    [
        ("s", Interval(every_us=SECOND), Rules(jitter_us=SECOND), "shorter than the interval"),
        ("s", Interval(every_us=DAY), Rules(jitter_us=DAY + 1), "jitter"),
        ("s", Interval(every_us=DAY), Rules(tolerance_us=0), "tolerance"),
        ("s", Interval(every_us=DAY), Rules(limit=0), "limit"),
        ("s", Interval(every_us=DAY), Rules(limit=100_000), "limit"),
        ("s", Interval(every_us=DAY), Rules(window_us=0), "window"),
        ("with blank", Interval(every_us=DAY), Rules(), "name"),
        ("", Interval(every_us=DAY), Rules(), "name"),
        ("s/t", Interval(every_us=DAY), Rules(), "name"),
        ("x" * 64, Interval(every_us=DAY), Rules(), "name"),
        ("s", Interval(every_us=1), Rules(), "interval"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "-",
)
def test_rules_out_of_bounds_are_refused(name: str, spec: Spec, rules: Rules, text: str) -> None:
    """With a text that says which."""
    with pytest.raises(ScheduleInvalid, match=text):
        check_definition(name, spec, rules)


def test_the_tables_of_transitions_name_every_state() -> None:
    """And nothing leaves the end of a fire."""
    assert set(SCHEDULE_TRANSITIONS) == set(ScheduleState) and set(FIRE_TRANSITIONS) == set(FireState)
    assert {s for s, after in FIRE_TRANSITIONS.items() if after} == {FireState.QUEUED}
    assert all(state not in after for state, after in SCHEDULE_TRANSITIONS.items())
