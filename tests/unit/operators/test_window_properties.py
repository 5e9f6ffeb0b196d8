"""Windows against naive models: whatever the order, the batches, the watermarks and the restores, the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operators.driving import Driver, restored, spec
from tests.unit.operators.references import END, Model, Record, sessions, sessions_at_once, sized, windows_at_once

from millstream_schema.connectors import Json
from millstream_tasks.operators.base import MAX_WATERMARK
from millstream_tasks.operators.session import SessionWindow
from millstream_tasks.operators.window_base import Window
from millstream_tasks.operators.windows import SlidingWindow, TumblingWindow

BOUND = 12
STYLES = ("aggregate", "in_place", "function")


def _in_place(acc: list[int], record: Record) -> list[int]:
    acc.append(record[1])
    return acc


def functions(style: str) -> dict[str, Any]:
    """Three ways to (key, start, end, sum, count): immutable accumulators, accumulators changed in place, all values at once."""
    if style == "aggregate":
        return {
            "create": lambda: (0, 0),
            "add": lambda acc, r: (acc[0] + r[1], acc[1] + 1),
            "merge": lambda a, b: (a[0] + b[0], a[1] + b[1]),
            "result": lambda key, w, acc: (key, *w, *acc),
        }
    if style == "in_place":
        return {
            "create": list,
            "add": _in_place,
            "merge": lambda a, b: a + b,
            "result": lambda key, w, acc: (key, *w, sum(acc), len(acc)),
        }

    def whole(key: str, window: Window, values: list[Record]) -> Any:
        return (key, *window, sum(v for _, v, _ in values), len(values))

    return {"function": whole}


records = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 5), st.integers(-60, 60)), max_size=40)
steps = st.lists(st.sampled_from(["", "", "", "full", "delta"]), min_size=40, max_size=40)
geometry = st.tuples(st.integers(1, 25), st.integers(1, 25), st.integers(-30, 30))


def window_kinds(size: int, slide: int, offset: int) -> list[tuple[str, dict[str, Json], Callable[[Model, Record], Any], Any]]:
    """(kind, config, model's placing, reference of a finished input)."""
    return [
        ("tumbling", {"size": size, "offset": offset}, sized(size, size, offset), lambda rs: windows_at_once(rs, size, size, offset)),
        (
            "sliding",
            {"size": size, "slide": slide, "offset": offset},
            sized(size, slide, offset),
            lambda rs: windows_at_once(rs, size, slide, offset),
        ),
        ("session", {"gap": size}, sessions(size), lambda rs: sessions_at_once(rs, size)),
    ]


CLASSES: dict[str, Any] = {"tumbling": TumblingWindow, "sliding": SlidingWindow, "session": SessionWindow}


def driver(kind: str, config: dict[str, Json], style: str) -> Driver:
    return Driver(lambda: CLASSES[kind](spec(f"{kind}_window", **config), itemgetter(0), **functions(style)))


def run(d: Driver, batch: list[Record]) -> None:
    if batch:
        d.send(list(batch), [t for _, _, t in batch])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["tumbling", "sliding", "session"])
@settings(max_examples=120, deadline=None)
@given(data=st.data(), given_records=records, plan=steps, shape=geometry, style=st.sampled_from(STYLES))
def test_t82_results_do_not_depend_on_order_batches_watermarks_or_restores(
    which: int, data: st.DataObject, given_records: list[Record], plan: list[str], shape: tuple[int, int, int], style: str
) -> None:
    """Any arrival within the bound gives exactly the windows of the finished input, each once, none late (T-82, RA1, RA3, G1, RC14)."""
    jitter = data.draw(st.lists(st.integers(0, BOUND), min_size=len(given_records), max_size=len(given_records)))
    arrival = [r for _, r in sorted(zip(jitter, given_records, strict=True), key=lambda p: p[0] + p[1][2])]
    kind, config, _, at_once = window_kinds(*shape)[which]
    d = driver(kind, config, style)
    batch: list[Record] = []
    highest = -(10**6)
    for record, step in zip(arrival, plan, strict=False):
        batch.append(record)
        highest = max(highest, record[2])
        if not data.draw(st.booleans()):
            continue
        run(d, batch)
        batch = []
        if data.draw(st.booleans()):
            d.watermark(highest - BOUND - 1)
        if step:
            d.snapshot(step == "full")
            if data.draw(st.booleans()):
                d.restore()
    run(d, batch)
    d.watermark(MAX_WATERMARK)
    d.watermark(MAX_WATERMARK)
    assert sorted(d.out) == at_once(given_records)
    assert (d.operator.late, sum(d.content().values())) == (0, 0)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["tumbling", "sliding", "session"])
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(), given_records=records, plan=steps, shape=geometry, style=st.sampled_from(STYLES), lateness=st.sampled_from([0, 3, 20])
)
def test_t80_late_records_update_or_go_aside_exactly_as_the_model_says(
    which: int, data: st.DataObject, given_records: list[Record], plan: list[str], shape: tuple[int, int, int], style: str, lateness: int
) -> None:
    """In any order, with any watermarks: the same results, the same updates, the same late records, across restores (T-80, G3, G7)."""
    kind, config, place, _ = window_kinds(*shape)[which]
    d = driver(kind, {**config, "lateness_ms": lateness, "late_tag": "late"}, style)
    model = Model(lateness, place)
    batch: list[Record] = []
    for record, step in zip(given_records, plan, strict=False):
        batch.append(record)
        model.send(record)
        if not data.draw(st.booleans()):
            continue
        run(d, batch)
        batch = []
        mark = data.draw(st.none() | st.integers(-70, 70))
        if mark is not None:
            d.watermark(mark)
            model.watermark(mark)
        if step:
            d.snapshot(step == "full")
            if data.draw(st.booleans()):
                d.restore()
    run(d, batch)
    d.watermark(MAX_WATERMARK)
    model.watermark(END)
    assert sorted(d.out) == sorted(model.out)
    assert d.sides.get("late", []) == model.late
    assert d.late + d.operator.late == len(model.late)
    assert sum(d.content().values()) == 0


@pytest.mark.parametrize("which", [0, 1, 2], ids=["tumbling", "sliding", "session"])
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(records, min_size=4, max_size=4), shape=geometry, style=st.sampled_from(STYLES), cuts=st.lists(st.booleans(), min_size=4)
)
def test_t84_results_do_not_depend_on_the_parallelism(
    which: int, parts: list[list[Record]], shape: tuple[int, int, int], style: str, cuts: list[bool]
) -> None:
    """Rescaled 1 → 3 → 2 → 5 between parts of the input, which come later and later: the windows of the finished input (T-82, T-84)."""
    kind, config, _, at_once = window_kinds(*shape)[which]
    moved = [[(k, v, t + 100 * i) for k, v, t in part] for i, part in enumerate(parts)]
    drivers = [driver(kind, config, style)]
    out: list[tuple[Any, int | None]] = []
    for i, (part, parallelism) in enumerate(zip(moved, (3, 2, 5, 1), strict=True)):
        width = len(drivers)
        for index, d in enumerate(drivers):
            run(d, [r for r in part if ord(r[0]) % width == index])
            d.watermark(100 * i - 61 + 100)
            d.snapshot(full=cuts[i])
            out += d.out
        fresh = [driver(kind, config, style) for _ in range(parallelism)]
        operators = restored(drivers, drivers[0].make, parallelism, lambda key, n=parallelism: ord(key) % n)  # type: ignore[misc]
        for d, operator in zip(fresh, operators, strict=True):
            d.operator = operator
        drivers = fresh
    drivers[0].watermark(MAX_WATERMARK)
    out += drivers[0].out
    assert sorted(out) == at_once([r for part in moved for r in part])
    assert drivers[0].operator.late == 0
