"""Schedules on real worker processes of which one after the other is killed: SQLite, no broker."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
from celery import Celery
from tests.integration.test_task_process import Rig, until

from millstream.messages import CeleryMessages, TaskMessages
from millstream.node_process import NodeProcess
from millstream.schedules import Schedules
from millstream.tasks import Tasks
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


def test_what_handlers_declare_is_scheduled_in_the_namespace_of_their_worker(rig: Rig) -> None:
    """And nowhere else: it is published there, fires there, and its task is of that namespace."""
    with (rig.path / "proj_tasks.py").open("a") as module:
        module.write("\nhandlers.schedule('s', add, __import__('datetime').timedelta(seconds=1), (1, 2))\n")
    with Schedules(rig.installation, namespace="team") as schedules, Tasks(rig.installation, namespace="team") as tasks:
        rig.worker(1, namespace="team")
        until(lambda: any(t.state is TaskState.SUCCEEDED for t in tasks.list()), "a fire's end")
        assert [s.name for s in schedules.list()] == ["s"]
    with Schedules(rig.installation) as schedules:
        assert schedules.list() == [] and rig.tasks.list() == []


def test_a_fire_of_a_nodes_coordinator_wakes_workers_over_the_broker(rig: Rig) -> None:
    """As a submission does: no worker has to look by itself."""
    app, prefix, woken = Celery("hinted", broker="memory://"), rig.installation.prefix, Event()
    listening = TaskMessages(app, prefix)
    listening.listen(("default",), woken.set)
    node = NodeProcess(rig.installation, "", name="n", slots=1, spares=0, messages=CeleryMessages(app, prefix, "n"))
    thread = Thread(target=node.run)
    try:
        with Schedules(rig.installation, rig.tasks._registry) as schedules:
            schedules.publish("s", "add", dt.timedelta(seconds=1), (1, 2))
            thread.start()
            assert woken.wait(20)
            assert schedules.fires("s")
    finally:
        node.stop()
        thread.join(20)
        listening.close()
    assert not thread.is_alive()
