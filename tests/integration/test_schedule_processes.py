"""Schedules on real worker processes of which one after the other is killed: SQLite, no broker."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.test_task_process import Rig, until

from millstream.schedules import Schedules
from millstream_schema.durable.schedules import FireState
from millstream_schema.durable.states import TaskState

pytestmark = pytest.mark.processes


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path)
    yield found
    found.close()


@pytest.mark.timeout(180)
def test_celery_t38_workers_that_are_killed_one_after_the_other_lose_and_repeat_no_fire(rig: Rig) -> None:
    """Two workers look after an every-second schedule; whoever fires is killed, and again: each instant is one fire and one task, which ends well."""
    with Schedules(rig.installation, namespace="default") as schedules:
        workers = [rig.worker(), rig.worker()]
        until(lambda: len(rig.tasks.database.read(lambda tx: tx.rows(tx.t.handler.select()))) > 0, "a worker's start")
        schedules.publish("s", "add", dt.timedelta(seconds=1), (1, 2), misfire="catch_up", limit=100)
        for victim in (0, 1):
            before = schedules.get("s").fired
            until(lambda n=before: schedules.get("s").fired >= n + 3, "fires")  # type: ignore[misc]
            workers[victim].kill()
            workers.append(rig.worker())
        before = schedules.get("s").fired
        until(lambda: schedules.get("s").fired >= before + 3, "fires after both are gone")
        schedules.pause("s")
        found = sorted(schedules.fires("s", 200), key=lambda f: f.instant_us)
        assert {f.state for f in found} == {FireState.FIRED} and schedules.late() == []
        assert {b.instant_us - a.instant_us for a, b in itertools.pairwise(found)} == {1_000_000}
        assert max(f.recorded_us - f.instant_us for f in found) < 20_000_000
        until(lambda: all(rig.tasks.get(f.task).state is TaskState.SUCCEEDED for f in found), "the ends of all")
        assert len({f.task for f in found}) == len(found)
