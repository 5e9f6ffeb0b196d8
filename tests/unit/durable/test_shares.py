"""How many tasks of each lane a claim takes: fair by weight, over what is already held, never from a paused lane."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_tasks.durable.shares import Fairness, shares

LANES = st.lists(st.sampled_from(["a/x", "a/y", "b/x", "c/z"]), unique=True)
HELD = st.dictionaries(st.sampled_from(["a/x", "a/y", "b/x", "other/x"]), st.integers(0, 50))
SETTINGS = st.dictionaries(st.sampled_from(["a/x", "a/y", "b/x", "c/z"]), st.tuples(st.integers(1, 20), st.booleans()))
ROOM = st.integers(-2, 60)


def test_equal_lanes_get_equal_parts() -> None:
    """A lane with a million tasks gets no more than one with ten."""
    assert shares(["a", "b", "c"], {}, {}, 9) == {"a": 3, "b": 3, "c": 3}


def test_parts_go_by_weight() -> None:
    """Weight 3 gets three of four."""
    assert shares(["a", "b"], {}, {"a": (3, False)}, 8) == {"a": 6, "b": 2}


def test_who_holds_much_already_waits() -> None:
    """What is running counts like what is taken."""
    assert shares(["a", "b"], {"a": 5}, {}, 4) == {"b": 4}
    assert shares(["a", "b"], {"a": 2}, {}, 4) == {"a": 1, "b": 3}
    assert shares(["a", "b"], {"a": 6}, {"a": (3, False)}, 4) == {"a": 1, "b": 3}


def test_a_paused_lane_gets_nothing() -> None:
    """Even when it is the only one."""
    assert shares(["a", "b"], {}, {"a": (100, True)}, 4) == {"b": 4}
    assert shares(["a"], {}, {"a": (1, True)}, 4) == {}


def test_nothing_is_shared_out_where_there_is_nothing() -> None:
    """No lanes, no room."""
    assert shares([], {}, {}, 4) == {} == shares(["a"], {}, {}, 0) == shares(["a"], {}, {}, -1)


@given(LANES, HELD, SETTINGS, ROOM)
def test_all_room_goes_to_lanes_that_go(lanes: list[str], held: dict[str, int], settings: dict[str, tuple[int, bool]], room: int) -> None:
    """To those that were found, and to no others."""
    found = shares(lanes, held, settings, room)
    going = {lane for lane in lanes if not settings.get(lane, (1, False))[1]}
    assert set(found) <= going and all(n > 0 for n in found.values())
    assert sum(found.values()) == (max(0, room) if going else 0)


@given(LANES, HELD, SETTINGS, ROOM)
def test_nobody_would_be_better_off_with_anothers_last_task(
    lanes: list[str], held: dict[str, int], settings: dict[str, tuple[int, bool]], room: int
) -> None:
    """Max-min fairness: whoever took one had, before it, no larger load by weight than anybody has now."""
    found = shares(lanes, held, settings, room)
    weight = {lane: settings.get(lane, (1, False))[0] for lane in lanes}
    load = {lane: (held.get(lane, 0) + found.get(lane, 0)) / weight[lane] for lane in lanes}
    going = [lane for lane in lanes if not settings.get(lane, (1, False))[1]]
    for taker, n in found.items():
        before = (held.get(taker, 0) + n - 1) / weight[taker]
        assert all(before <= load[other] + 1e-9 for other in going)


@given(SETTINGS.filter(lambda s: not any(p for _, p in s.values())), st.lists(st.integers(1, 7), min_size=60, max_size=60))
def test_over_many_claims_each_lane_gets_its_weight(settings: dict[str, tuple[int, bool]], rooms: list[int]) -> None:
    """Nobody starves, however small the claims are: the load that is remembered evens it out."""
    lanes = ["a/x", "a/y", "b/x"]
    held: Counter[str] = Counter()
    for room in rooms:
        held.update(shares(lanes, held, settings, room))
    weights = {lane: settings.get(lane, (1, False))[0] for lane in lanes}
    per_weight = [held[lane] / weights[lane] for lane in lanes]
    assert max(per_weight) - min(per_weight) <= 1.0


# -- over time


def served(fair: Fairness, lanes: dict[str, int], slots: int, ends: int, seed: int = 0, every: int = 10) -> Counter[str]:
    """What one session with so many slots serves of lanes that are never empty; each turn one of the running ones ends, now and then a survey counts anew."""
    rng = random.Random(seed)
    settings = {lane: (weight, False) for lane, weight in lanes.items()}
    running: list[str] = []
    done: Counter[str] = Counter()
    for turn in range(ends):
        if turn % every == 0:
            fair.surveyed({}, Counter(running), settings, list(lanes))
        for lane, count in fair.split(slots - len(running)).items():
            for _ in range(count):
                fair.took(lane)
                running.append(lane)
        over = running.pop(rng.randrange(len(running)))
        fair.ended(over)
        done[over] += 1
    return done


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8, 50])
@pytest.mark.parametrize("every", [1, 7, 1000])
def test_two_applications_in_one_queue_are_served_alike(slots: int, every: int) -> None:
    """Neither starves, however few slots there are and however old the last survey is."""
    done = served(Fairness(), {"a/q": 1, "b/q": 1}, slots, 2_000, every=every)
    assert abs(done["a/q"] - done["b/q"]) <= 2_000 * 0.06, done


@pytest.mark.parametrize("slots", [1, 4, 8, 40])
def test_weight_three_is_served_three_times_as_often(slots: int) -> None:
    """About, under saturation."""
    done = served(Fairness(), {"a/q": 3, "b/q": 1}, slots, 4_000)
    assert 2.5 < done["a/q"] / done["b/q"] < 3.5, done


def test_a_lane_that_comes_back_takes_its_turn_and_no_more() -> None:
    """It does not make up for the time it was empty."""
    fair = Fairness()
    served(fair, {"a/q": 1}, 1, 500)
    done = served(fair, {"a/q": 1, "b/q": 1}, 1, 20)
    assert abs(done["a/q"] - done["b/q"]) <= 2, done
