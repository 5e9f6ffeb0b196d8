"""Clicks in event time: windows, sessions that merge, a side output for what comes late, a timer."""

import itertools
from typing import Any, ClassVar

from millstream import (
    CollectSink,
    CollectTarget,
    Context,
    EmbeddedCluster,
    GeneratorSource,
    JobBuilder,
    Pipelines,
    ProcessFunction,
    ValueState,
    Window,
)

SECOND = 1000
Click = tuple[str, int]  # who, when (UTC ms)
CLICKS = [("ann", 1_000), ("ann", 4_000), ("ben", 21_000), ("ann", 2_000), ("ben", 45_000), ("ann", 60_000), ("ben", 61_000)]
turns = itertools.count()
seen = CollectTarget()
pipelines = Pipelines()


def read(split: int, position: int, limit: int) -> list[Click] | None:
    """One click at a time, and nothing in between, so that a watermark follows each."""
    if position == len(CLICKS):
        return None
    return CLICKS[position : position + 1] if next(turns) % 2 else []


class Once(ProcessFunction):
    """Lets one click of a person through, then none for 30 s of event time."""

    states: ClassVar = {"quiet": ValueState(default=False)}

    def process(self, value: Click, ctx: Context) -> None:
        if not ctx.value("quiet").get():
            ctx.value("quiet").set(True)
            ctx.timers.event(value[1] + 30 * SECOND)
            ctx.emit(value)

    def on_timer(self, timestamp: int, ctx: Context) -> None:
        ctx.value("quiet").clear()


def when(click: Click) -> int:
    return click[1]


def visit(who: str, window: Window, count: int) -> tuple[str, int, int, int]:
    return who, window.start, window.end, count


@pipelines.define("clicks")
def clicks(job: JobBuilder, config: dict[str, Any]) -> None:
    timed = job.source(GeneratorSource(read), uid="read").assign_timestamps(when, out_of_orderness_ms=5 * SECOND, uid="when")
    by_person = timed.key_by(lambda click: click[0])

    tens = by_person.tumbling(10 * SECOND, late_tag="late").aggregate(int, lambda n, _: n + 1, visit, uid="tens")
    tens.sink_to(CollectSink("tens", seen), uid="tens-out")
    tens.side_output("late").sink_to(CollectSink("late", seen), uid="late-out")

    visits = by_person.session(10 * SECOND).aggregate(int, lambda n, _: n + 1, visit, merge=int.__add__, uid="visits")
    visits.sink_to(CollectSink("visits", seen), uid="visits-out")

    by_person.process(Once, uid="once").sink_to(CollectSink("once", seen), uid="once-out")


if __name__ == "__main__":
    with EmbeddedCluster(pipelines) as cluster:
        cluster.run("clicks", timeout=60)
    for name in ("tens", "late", "visits", "once"):
        print(name, sorted(seen.values(name)))
