"""The workloads: each a pipeline, its batch reference and what an outside reader may see at any moment.

Run by ``test_promise.py`` and ``replay.py``. What must never happen here: a reference that is computed by the code under test.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, ClassVar

import msgspec
from tests.simulation.base import LIVE, Workload, counting, whole

from millstream.builder import JobBuilder
from millstream.testing.simulation import UpsertSink, UpsertTarget, World
from millstream_schema.connectors import Split
from millstream_schema.errors import JobConflict
from millstream_schema.model import Guarantee
from millstream_schema.settings import StreamSettings
from millstream_schema.states import Desired, JobState
from millstream_schema.store import epochs
from millstream_tasks.operators.keyed_state import MapState, ValueState
from millstream_tasks.operators.process import Context, ProcessFunction
from millstream_tasks.sinks.memory import CollectSink
from millstream_tasks.sources.memory import GeneratorSource


def visible_is_part_of(workload: Workload, reference: Counter[Any], sink: str = "out") -> None:
    """What is visible is a part of the reference: nothing twice, nothing wrong."""
    extra = Counter(workload.target.values(sink)) - reference
    assert not extra, f"seed {workload.seed}: visible and not in the reference, or too often: {sorted(extra.items())[:10]}"


def visible_is(workload: Workload, reference: Counter[Any], sink: str = "out") -> None:
    visible_is_part_of(workload, reference, sink)
    missing = reference - Counter(workload.target.values(sink))
    assert not missing, f"seed {workload.seed}: missing at the end: {sorted(missing.items())[:10]}"


class Rolling(Workload):
    """A keyed rolling count over three splits at parallelism two: per key exactly 1..n."""

    name = "rolling"
    seeds = 36
    splits: ClassVar[int] = 3
    per_split: ClassVar[int] = 300
    rate: ClassVar[float] = 20.0
    keys: ClassVar[int] = 7

    def value(self, split: int, position: int) -> tuple[str, int]:
        return f"k{(position * 5 + split) % self.keys}", position

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(self.splits, self.per_split, self.rate, self.value), uid="records")
        records.key_by(lambda r: r[0]).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(CollectSink("out", self.target), uid="out")

    @property
    def totals(self) -> Counter[str]:
        return Counter(r[0] for r in whole(self.splits, self.per_split, self.value))

    def prepare(self) -> None:
        self.reference: Counter[Any] = self.counts({str(s): self.per_split for s in range(self.splits)})

    def counts(self, cursors: dict[str, Any]) -> Counter[Any]:
        """What the records before these offsets give."""
        totals = Counter(self.value(int(split), i)[0] for split, cursor in cursors.items() for i in range(int(cursor or 0)))
        return Counter((key, n) for key, total in totals.items() for n in range(1, total + 1))

    def verify(self) -> None:
        visible_is_part_of(self, self.reference)

    def final(self) -> None:
        visible_is(self, self.reference)


class Timed(Workload):
    """What workloads on event time share: splits whose records are out of order within a bound."""

    splits: ClassVar[int] = 3
    per_split: ClassVar[int] = 240
    rate: ClassVar[float] = 16.0
    bound: ClassVar[int] = 300

    def value(self, split: int, position: int) -> tuple[str, int, int]:
        """(key, event time, amount): event time may be negative, is out of order by less than the bound, and has gaps."""
        jitter = (position * 7919 + split * 104729 + self.seed * 31) % self.bound
        time = position * 50 - 2000 + jitter + (4000 if position > 150 else 0)
        return f"k{(position * 3 + split) % 5}", time, 1 + position % 3

    def records(self) -> list[tuple[str, int, int]]:
        return whole(self.splits, self.per_split, self.value)

    def source(self, job: JobBuilder) -> Any:
        stream = job.source(counting(self.splits, self.per_split, self.rate, self.value), uid="records")
        return stream.assign_timestamps(lambda r: r[1], out_of_orderness_ms=self.bound, uid="times")


class Windows(Timed):
    """Tumbling windows over several splits, out of order within the bound: exact results, nothing late."""

    name = "windows"
    seeds = 30

    def define(self, job: JobBuilder) -> None:
        windows = self.source(job).key_by(lambda r: r[0]).tumbling(1000, offset_ms=250, late_tag="late")
        sums = windows.aggregate(int, lambda n, r: n + r[2], uid="sums")
        sums.sink_to(CollectSink("out", self.target), uid="out")
        sums.side_output("late").sink_to(CollectSink("late", self.target), uid="late")

    def prepare(self) -> None:
        sums: dict[tuple[str, int], int] = defaultdict(int)
        for key, time, amount in self.records():
            sums[key, (time - 250) // 1000 * 1000 + 250] += amount
        self.reference: Counter[Any] = Counter((k, start, start + 1000, n) for (k, start), n in sums.items())

    def verify(self) -> None:
        assert not self.target.values("late"), f"seed {self.seed}: late: {self.target.values('late')[:5]}"
        visible_is_part_of(self, self.reference)

    def final(self) -> None:
        visible_is(self, self.reference)


class ByHand(ProcessFunction):
    """Tumbling sums made by hand of a map state and event timers; and one record per key by a timer of processing time."""

    states: ClassVar = {"sums": MapState(), "known": ValueState()}

    def process(self, value: Any, ctx: Context) -> None:
        _, time, amount = value
        if ctx.value("known").get() is None:
            ctx.value("known").set(True)
            ctx.timers.processing(ctx.processing_time() + 3000)
        end = time // 700 * 700 + 700
        sums = ctx.map("sums")
        sums.put(end, (sums.get(end) or 0) + amount)
        ctx.timers.event(end - 1)

    def on_timer(self, timestamp: int, ctx: Context) -> None:
        if ctx.time_domain == "processing":
            ctx.emit((ctx.key, "met"))
            return
        sums = ctx.map("sums")
        ctx.emit((ctx.key, timestamp + 1, sums.get(timestamp + 1)))
        sums.remove(timestamp + 1)


class Sessions(Timed):
    """Sliding and session windows, and a process function with both kinds of timers, from one source."""

    name = "sessions"
    seeds = 22
    gap: ClassVar[int] = 260

    def define(self, job: JobBuilder) -> None:
        keyed = self.source(job).key_by(lambda r: r[0])
        keyed.sliding(1500, 500).aggregate(int, lambda n, r: n + r[2], uid="sliding").sink_to(CollectSink("sliding", self.target), uid="o1")
        sessions = keyed.session(self.gap).aggregate(int, lambda n, r: n + r[2], merge=lambda a, b: a + b, uid="sessions")
        sessions.sink_to(CollectSink("sessions", self.target), uid="o2")
        keyed.process(ByHand, uid="byhand").sink_to(CollectSink("byhand", self.target), uid="o3")

    def prepare(self) -> None:
        sliding: dict[tuple[str, int], int] = defaultdict(int)
        byhand: dict[tuple[str, int], int] = defaultdict(int)
        by_key: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for key, time, amount in self.records():
            for back in range(3):
                sliding[key, time // 500 * 500 - 500 * back] += amount
            byhand[key, time // 700 * 700 + 700] += amount
            by_key[key].append((time, amount))
        sessions: Counter[Any] = Counter()
        for key, found in by_key.items():
            found.sort()
            start, end, total = found[0][0], found[0][0] + self.gap, found[0][1]
            for time, amount in found[1:]:
                if time <= end:
                    end, total = max(end, time + self.gap), total + amount
                else:
                    sessions[key, start, end, total] += 1
                    start, end, total = time, time + self.gap, amount
            sessions[key, start, end, total] += 1
        self.references: dict[str, Counter[Any]] = {
            "sliding": Counter((k, s, s + 1500, n) for (k, s), n in sliding.items()),
            "sessions": sessions,
            "byhand": Counter([*((k, e, n) for (k, e), n in byhand.items()), *((k, "met") for k in by_key)]),
        }

    def verify(self) -> None:
        for sink, reference in self.references.items():
            visible_is_part_of(self, reference, sink)

    def final(self) -> None:
        for sink, reference in self.references.items():
            visible_is(self, reference, sink)


class Sorting(ProcessFunction):
    """Odd records to the side, even ones on."""

    def process(self, value: Any, ctx: Context) -> None:
        if value[2] % 2:
            ctx.side("odd", value)
        else:
            ctx.emit(value)


class Drained(Workload):
    """A bounded and an unbounded source as one, broadcast, dealt and sorted with side outputs; drained in the middle."""

    name = "drained"
    least_under_faults = 2
    seeds = 28
    bounded: ClassVar[int] = 80

    def define(self, job: JobBuilder) -> None:
        ended = job.source(counting(2, self.bounded, 10.0, lambda s, i: ("a", s, i), name="ended"), uid="ended")
        endless = job.source(counting(3, 10**9, 10.0, lambda s, i: ("b", s, i), bounded=False, name="endless"), uid="endless")
        both = ended.union(endless, uid="both")
        both.broadcast().map(lambda r: r, uid="copies").sink_to(CollectSink("copies", self.target), uid="o1")
        both.rebalance().map(lambda r: r, uid="dealt", parallelism=3).sink_to(CollectSink("dealt", self.target), uid="o2", parallelism=3)
        sorted_ = both.key_by(lambda r: r[2] % 11).process(Sorting, uid="sorting")
        sorted_.sink_to(CollectSink("even", self.target), uid="o3")
        sorted_.side_output("odd").sink_to(CollectSink("odd", self.target), uid="o4")

    def prepare(self) -> None:
        self.drains = [6.0 + self.rng.random() * 8, 15.0]

    def verify(self) -> None:
        """While it runs nothing is there twice (or, broadcast, more often than there are subtasks)."""
        for sink, times in (("copies", 2), ("dealt", 1), ("even", 1), ("odd", 1)):
            top = Counter(self.target.values(sink)).most_common(1)
            assert not top or top[0][1] <= times, f"seed {self.seed}: {top} in {sink}"

    def live(self) -> None:
        self.start()
        for life, moment in enumerate(self.drains):
            if life:
                self.sim.resume(self.job, self.submission())
            at = max(moment, self.sim.world.now + 2)
            self.pass_time(at, "the moment to drain")
            if life:
                self.sim.run_until(lambda: any(r[0] == "b" for r in self.target.values("dealt")), 60, "something of the endless source")
            self.stop(Desired.DRAIN)
            self.finish()

    def final(self) -> None:
        """Everything before the offsets of the terminal epoch, and nothing behind them."""
        row = self.sim.job(self.job)
        manifest = self.sim.database.read(lambda tx: epochs.read_manifest(tx, self.job, row.newest_durable))
        assert manifest.kind == "drain"
        taken = [
            ("a" if s.operator == "ended" else "b", int(s.split_id), i)
            for s in manifest.splits
            for i in range(int(s.cursor or 0))  # type: ignore[arg-type]
        ]
        assert sum(r[0] == "a" for r in taken) <= 2 * self.bounded
        assert any(r[0] == "b" for r in taken)
        once = Counter(taken)
        visible_is(self, Counter(dict.fromkeys(once, 2)), "copies")
        visible_is(self, once, "dealt")
        visible_is(self, Counter(r for r in taken if r[2] % 2 == 0), "even")
        visible_is(self, Counter(r for r in taken if r[2] % 2), "odd")


ENDINGS = ("suspend", "cancel", "move", "drain", "export")


class Lives(Rolling):
    """One result over several lives: the job is ended in all ways at any moment and goes on with another parallelism, as itself or as a new job of its savepoint."""

    name = "lives"
    seeds = 34
    nodes = 3
    per_split = 340
    parallelism = 1

    def live(self) -> None:
        world, parallelism = self.sim.world, [1, 3, 2, 5]
        self.start(parallelism=parallelism[0])
        for life in range(self.rng.randint(1, 3)):
            then = world.now + 1 + self.rng.random() * 5
            self.pass_time(then, "the next ending")
            if self.sim.state(self.job).ended:
                break
            self.end(ENDINGS[(self.seed + 2 * life) % len(ENDINGS)], f"sp-{self.seed}-{life}", parallelism[life + 1])
        self.finish()

    def end(self, how: str, savepoint: str, parallelism: int) -> None:
        """End this life in one of the ways and begin the next."""
        self.sim.world.probes[f"ending: {how}"] += 1
        if how == "export":
            self.sim.operations.savepoint(self.job, savepoint)
            return
        desired = {"cancel": Desired.CANCEL, "drain": Desired.DRAIN}.get(how, Desired.SUSPEND)
        self.stop(desired, savepoint if desired is Desired.SUSPEND else "")
        if desired is not Desired.CANCEL and self.rng.random() < 0.2:
            self.sim.run_for(self.rng.random())
            try:
                self.stop(Desired.CANCEL)
                how = "cancel"
            except JobConflict:
                self.sim.world.probes["cancel after the end"] += 1
        state = self.sim.run_to_end(self.job, check=self.check)
        row = self.sim.job(self.job)
        expected = {"cancel": {JobState.STOPPED, JobState.FINISHED}, "drain": {JobState.FINISHED}}.get(
            how, {JobState.STOPPED, JobState.FINISHED}
        )
        assert state in expected, f"seed {self.seed}: {how} ended in {state}: {row.reason}"
        self.settled()
        if how == "move" and state is JobState.STOPPED and row.newest_durable == row.newest_committed:
            self._move(savepoint, parallelism)
        else:
            self.sim.resume(self.job, self.submission(parallelism=parallelism))

    def settled(self) -> None:
        """Ended with nothing pending: what is visible is exactly what the records before the newest durable offsets give."""
        super().settled()
        row = self.sim.job(self.job)
        if row.newest_durable and row.newest_committed == row.newest_durable:
            manifest = self.sim.database.read(lambda tx: epochs.read_manifest(tx, self.job, row.newest_durable))
            visible_is(self, self.counts({s.split_id: s.cursor for s in manifest.splits}))

    def _move(self, savepoint: str, parallelism: int) -> None:
        """A new job of the savepoint."""
        assert self.sim.database.read(lambda tx: epochs.read_savepoint(tx, savepoint))["state"] == "COMPLETE"  # type: ignore[index]
        self.job = f"{self.job}-next"
        self._seen = (0, 0, 0, 0)
        self.start(savepoint=savepoint, parallelism=parallelism)


class AtLeastOnce(Workload):
    """AT_LEAST_ONCE: every record arrives, however often."""

    name = "at-least-once"
    guarantee = Guarantee.AT_LEAST_ONCE
    seeds = 14

    def value(self, split: int, position: int) -> tuple[int, int]:
        return split, position

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(3, 240, 16.0, self.value), uid="records")
        records.rebalance().map(lambda r: r, uid="same").sink_to(CollectSink("out", self.target), uid="out")

    def prepare(self) -> None:
        self.reference = set(whole(3, 240, self.value))

    def verify(self) -> None:
        assert set(self.target.values("out")) <= self.reference

    def final(self) -> None:
        missing = self.reference - set(self.target.values("out"))
        assert not missing, f"seed {self.seed}: lost: {sorted(missing)[:10]}"


class Upserts(Rolling):
    """EFFECTIVELY_ONCE: counts upserted by key are exact at the end, and never above the truth."""

    name = "upserts"
    guarantee = Guarantee.EFFECTIVELY_ONCE
    seeds = 20

    def prepare(self) -> None:
        self.rows = UpsertTarget(self.sim.world)

    def define(self, job: JobBuilder) -> None:
        records = job.source(counting(self.splits, self.per_split, self.rate, self.value), uid="records")
        records.key_by(lambda r: r[0]).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(UpsertSink(self.rows), uid="out")

    def verify(self) -> None:
        above = {k: n for k, n in self.rows.rows.items() if n > self.totals[k]}
        assert not above, f"seed {self.seed}: counted more than there is: {above}"

    def final(self) -> None:
        assert self.rows.rows == dict(self.totals), f"seed {self.seed}: {self.rows.rows} is not {dict(self.totals)}"


class Growing(GeneratorSource):
    """A source that finds one split more every second, up to ``most``, each of ``size`` records of its own key."""

    kind = "growing"

    def __init__(self, world: World, most: int, size: int, rate: float) -> None:
        super().__init__(lambda s, i, n: [(f"k{s}", i + j) for j in range(min(n, size - i))], most, "growing", bounded=False, rate=rate)
        self._world = world
        self._most = most

    def discover(self, known: frozenset[str]) -> list[Split]:
        return [Split(str(i), {"index": i}) for i in range(min(self._most, 1 + int(self._world.now))) if str(i) not in known]


class Discovered(Workload):
    """Splits that appear while the job runs and fails: each is read once; drained when all is there."""

    name = "discovered"
    seeds = 16
    most: ClassVar[int] = 10

    def define(self, job: JobBuilder) -> None:
        records = job.source(Growing(self.sim.world, self.most, 60, rate=12.0), uid="records")
        records.key_by(lambda r: r[0]).aggregate(int, lambda n, _: n + 1, uid="count").sink_to(CollectSink("out", self.target), uid="out")

    def tuned(self, settings: StreamSettings) -> StreamSettings:
        return msgspec.structs.replace(super().tuned(settings), discovery_interval_ms=400)

    def prepare(self) -> None:
        self.reference = Counter((f"k{s}", n) for s in range(self.most) for n in range(1, 61))

    def verify(self) -> None:
        visible_is_part_of(self, self.reference)

    def live(self) -> None:
        self.start()
        self.sim.run_until(lambda: self.now_and(self.target.values("out")), 120, "all records of all splits")
        self.stop(Desired.DRAIN)
        self.finish()

    def now_and(self, values: list[Any]) -> bool:
        self.check()
        return self.sim.world.now > LIVE and len(values) == self.reference.total()

    def final(self) -> None:
        visible_is(self, self.reference)


WORKLOADS: dict[str, type[Workload]] = {w.name: w for w in (Rolling, Windows, Sessions, Drained, Lives, Discovered, AtLeastOnce, Upserts)}
