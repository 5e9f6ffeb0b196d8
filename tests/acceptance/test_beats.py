"""Schedules of durable tasks on real Celery workers, beside beats that die or are two, all by clocks that are wrong."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import re
from pathlib import Path

import pytest
from tests.acceptance.task_application import handlers
from tests.acceptance.traffic import fresh_database
from tests.chaos.task_faults import TaskCluster, task_cluster
from tests.support.celery_cluster import ROOT, eventually
from tests.support.instances import PostgresInstance, RedisInstance

from millstream import TaskState
from millstream.schedules import Schedules
from millstream.tasks import Tasks
from millstream_schema.durable.schedules import FireState

pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.redis]
FAST = {"w0": 60, "w1": -60, "beat": -60, "beat2": 60}
"""Seconds by which the wall clocks of a program's processes are fast."""
SHIFTED = ROOT / "tests" / "support" / "shifted"


def shifted(seconds: int) -> tuple[list[str], dict[str, str]]:
    return [], {"MILLSTREAM_TEST_CLOCK": str(seconds), "PYTHONPATH": os.pathsep.join([str(SHIFTED), str(ROOT)])}


def wrong_by(cluster: TaskCluster, name: str) -> float:
    """Seconds between what the clock of a program's process said when it first wrote into its log, and ours now."""
    found = re.search(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", cluster.programs[name].log.read_text())
    assert found is not None
    return (dt.datetime.fromisoformat(found.group(1)) - dt.datetime.now()).total_seconds()


def leading(cluster: TaskCluster) -> str:
    """The worker one of whose processes holds the coordinator's lease, and so fires."""

    def look() -> str | None:
        holder = cluster.coordinator()["holder"]
        up = [n for n in cluster.worker_names if not cluster.programs[n].down]
        return next((n for n in up if any(holder.endswith(f"-{p.pid}") for p in cluster.tree(n))), None)

    found: str = eventually("a worker holds the coordinator's lease", look)
    return found


def test_celery_t38_beats_dead_and_doubled_and_clocks_a_minute_off_lose_and_repeat_no_fire(
    tmp_path: Path, own_postgres: PostgresInstance, own_redis: RedisInstance
) -> None:
    """Two beats, then none, then two again and the worker that fires killed: each second is one fire and one task, by the database's clock alone."""
    with (
        task_cluster(
            tmp_path, own_redis, fresh_database(own_postgres), beats=("beat", "beat2"), places={n: shifted(s) for n, s in FAST.items()},
            environment={"MILLSTREAM_CHAOS_PIPELINES": "tests.acceptance.pipelines:pipelines"},
        ) as cluster,
        Schedules(cluster.installation, handlers) as schedules,
        Tasks(cluster.installation, handlers) as tasks,
    ):  # fmt: skip

        def goes_on(when: str) -> None:
            before = schedules.get("s").fired
            eventually(f"it fires with {when}", lambda: schedules.get("s").fired >= before + 2)

        schedules.publish("s", "quick", dt.timedelta(seconds=1), (1,), misfire="catch_up", limit=100)
        for beat in cluster.beats:
            eventually(f"{beat} ticks", lambda b=beat: "millstream-tick" in cluster.programs[b].log.read_text())  # type: ignore[misc]
        for fast, slow in (("w0", "w1"), ("beat2", "beat")):
            assert wrong_by(cluster, fast) - wrong_by(cluster, slow) > 60, "their clocks are not wrong"
        goes_on("two beats")
        for beat in cluster.beats:
            cluster.off(beat)
        goes_on("no beat")
        for beat in cluster.beats:
            cluster.up(beat)
        gone = leading(cluster)
        cluster.off(gone)
        goes_on("two beats and the other worker")
        assert leading(cluster) != gone and FAST[leading(cluster)] == -FAST[gone]
        schedules.pause("s")
        fires = sorted(schedules.fires("s", 200), key=lambda f: f.instant_us)
        assert {f.state for f in fires} == {FireState.FIRED} and len({f.task for f in fires}) == len(fires)
        assert {b.instant_us - a.instant_us for a, b in itertools.pairwise(fires)} == {1_000_000}
        rows = eventually("their tasks are over", lambda: [tasks.get(f.task) for f in fires if tasks.wait(f.task, 20)])
    assert {r.state for r in rows} == {TaskState.SUCCEEDED} and len(rows) == len(fires)
    for fire, row in zip(fires, rows, strict=True):
        assert 0 <= fire.recorded_us - fire.instant_us < 30_000_000, "fired by a wrong clock"
        assert row.started_us >= fire.instant_us
