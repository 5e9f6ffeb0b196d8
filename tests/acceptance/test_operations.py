"""What operators do with jobs on Celery workers: shut workers down, watch attempts, drain, suspend, rescale, restore; and what poison does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.pipelines import ROLLING, Rows, differences, sink_directory_rows
from tests.acceptance.traffic import Traffic, make_tables, read_rows, sink_url
from tests.support.celery_cluster import ROOT, CeleryCluster, eventually, settings
from tests.support.processes import PortLease

from millstream import RestartPolicy, RestoreRefused

pytestmark = [pytest.mark.processes, pytest.mark.postgres, pytest.mark.redis]


def test_warm_shutdown_hands_back_without_using_the_restart_budget(redis_cluster: CeleryCluster) -> None:
    """T-50, SIGTERM to a worker with subtasks: it ends by itself, the others go on, and the hand-back is no failure."""
    job = Traffic(redis_cluster, count=None).submit()
    epoch = job.running()
    row = redis_cluster.row(job.id)
    assert redis_cluster.shut_down(redis_cluster.running_workers()[0]) == 0
    redis_cluster.durable(job.id, epoch + 1)
    try:
        eventually("the job was handed back", lambda: "handback" in redis_cluster.jobs.status(job.id)["causes"])
    except TimeoutError as exc:
        raise AssertionError(f"{exc}\n{redis_cluster.diagnosis(job.id)}") from exc
    after, causes = redis_cluster.row(job.id), redis_cluster.jobs.status(job.id)["causes"]
    failures = sum(n for cause, n in causes.items() if cause != "handback")
    assert after.failures - row.failures <= failures, f"the hand-back was counted as a failure: {causes}"
    job.drain()
    job.check(job.ends())


def test_long_subtasks_outlive_the_visibility_timeout_and_show_in_flower(redis_cluster: CeleryCluster, tmp_path: Path) -> None:
    """T-50: the broker redelivers what is unacknowledged for 2 s; a subtask that runs for longer keeps one owner. Flower shows each attempt once, started and then succeeded."""
    with _flower(redis_cluster, tmp_path) as tasks:
        job = Traffic(redis_cluster, count=1600).submit()  # more than two visibility timeouts
        eventually("attempts are shown as running", lambda: any(t["state"] == "STARTED" for t in tasks(job.id)))
        redis_cluster.finished(job.id)
        last = eventually("attempts are shown as over", lambda: [t for t in tasks(job.id) if t["state"] == "SUCCESS"])
        shown = Counter(t["args"] for t in tasks(job.id))
    assert {t["name"] for t in last} == {"millstream.subtask"}
    assert set(shown.values()) == {1}, f"a subtask of one generation had two attempts: {shown}"
    job.check()


@contextmanager
def _flower(cluster: CeleryCluster, home: Path) -> Iterator[Any]:
    """Flower beside the cluster; gives a function: the attempts it shows of a job."""
    lease = PortLease()
    command = [sys.executable, "-m", "celery", "-A", cluster.application, "flower", "--address=127.0.0.1", f"--port={lease.port}"]
    environment = {**cluster.variables(), "FLOWER_UNAUTHENTICATED_API": "true"}
    with (home / "flower.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, cwd=ROOT)

    def tasks(job: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{lease.port}/api/tasks?taskname=millstream.subtask&limit=1000", timeout=5) as answer:
            found: dict[str, dict[str, Any]] = json.load(answer)
        return [t for t in found.values() if job in (t["args"] or "")]

    try:
        eventually("Flower answers", lambda: tasks("") == [] or True)
        yield tasks
    except TimeoutError as exc:
        raise TimeoutError(f"{exc}\n{(home / 'flower.log').read_text()[-3000:]}") from None
    finally:
        process.kill()
        process.wait(10)
        lease.release()


def test_poison_fails_skips_or_goes_to_dead_letters(redis_cluster: CeleryCluster, tmp_path: Path) -> None:
    """T-59, a line that cannot be decoded: ``fail`` ends the job naming the place once its budget is used up, ``skip`` and ``dead-letter`` go on with exact results."""
    source = tmp_path / "in"
    _write_lines(source / "a.jsonl", 0, 50, poison_at=20)
    letters = tmp_path / "letters"
    budget = RestartPolicy(kind="fixed", delay_ms=50, failures=2)
    names = {}
    for policy in ("fail", "skip", "dead-letter"):
        suffix = f"_{policy.replace('-', '_')}"
        make_tables(redis_cluster.database_url, suffix)
        config: dict[str, Any] = {"path": str(source), "poison": policy, "target": sink_url(redis_cluster.database_url), "suffix": suffix}
        config |= {"dead": str(letters)} if policy == "dead-letter" else {}
        names[policy] = redis_cluster.jobs.submit(
            "lines", name=policy, config=config, settings=settings(restart=budget if policy == "fail" else settings().restart)
        ).id
    redis_cluster.finished(names["fail"], state="FAILED")
    said = [h["detail"] for h in redis_cluster.jobs.status(names["fail"])["history"]]
    assert any("a.jsonl" in detail and "Mend the record" in detail for detail in said), said
    assert read_rows(redis_cluster.database_url, "rolling_fail", ROLLING) == []
    for policy in ("skip", "dead-letter"):
        redis_cluster.finished(names[policy])
        suffix = policy.replace("-", "_")
        assert not differences(read_rows(redis_cluster.database_url, f"rolling_{suffix}", ROLLING), _sums(range(50)))
    (letter,) = [json.loads(line) for line in sink_directory_rows(letters)]
    assert letter["raw"].startswith("{poison") and "a.jsonl" in letter["position"]


def test_drain_then_resume_with_new_input_continues_the_sums(redis_cluster: CeleryCluster, tmp_path: Path) -> None:
    """A drained job that is resumed with more files goes on where it ended: nothing is read or written twice."""
    source, target = tmp_path / "in", redis_cluster.database_url
    make_tables(target, "_resumed")
    _write_lines(source / "a.jsonl", 0, 40)
    config: dict[str, Any] = {"path": str(source), "watch": True, "target": sink_url(target), "suffix": "_resumed"}
    job = redis_cluster.jobs.submit("lines", name="resumed", config=config, settings=settings()).id
    eventually("the first file is committed", lambda: len(read_rows(target, "rolling_resumed", ROLLING)) == 40)
    redis_cluster.jobs.drain(job)
    redis_cluster.finished(job)
    _write_lines(source / "b.jsonl", 40, 100)
    redis_cluster.jobs.resume(job)
    eventually("the second file is committed", lambda: len(read_rows(target, "rolling_resumed", ROLLING)) >= 100)
    redis_cluster.jobs.drain(job)
    redis_cluster.finished(job)
    assert not differences(read_rows(target, "rolling_resumed", ROLLING), _sums(range(100)))


def test_suspend_then_resume_with_another_parallelism_is_exact(redis_cluster: CeleryCluster) -> None:
    """Suspended with two subtasks an operator, resumed with three: keyed state and splits move, windows and sums stay exact."""
    job = Traffic(redis_cluster, count=None).submit()
    job.running()
    redis_cluster.jobs.suspend(job.id)
    redis_cluster.finished(job.id, state="STOPPED")
    redis_cluster.jobs.resume(job.id, parallelism=3)
    redis_cluster.durable(job.id, redis_cluster.row(job.id).newest_durable + 1)
    assert len(redis_cluster.jobs.status(job.id)["subtasks"]) == 9
    job.drain()
    job.check(job.ends())


def test_new_job_from_a_savepoint_continues_and_an_old_savepoint_is_refused(redis_cluster: CeleryCluster) -> None:
    """A job suspended with a savepoint goes on as another job; restoring a savepoint behind committed effects is refused."""
    job = Traffic(redis_cluster, count=None).submit()
    job.running()
    early = redis_cluster.jobs.savepoint(job.id)
    redis_cluster.jobs.wait_savepoint(job.id, early, timeout=60)
    job.running()
    last = redis_cluster.jobs.suspend(job.id)
    redis_cluster.finished(job.id, state="STOPPED")
    redis_cluster.jobs.wait_savepoint(job.id, last, timeout=60)
    with pytest.raises(RestoreRefused, match="repeat"):
        job.submit(savepoint=early, name="too-early")
    job.submit(savepoint=last, name="successor")
    redis_cluster.durable(job.id, redis_cluster.row(job.id).newest_durable)
    job.drain()
    job.check(job.ends())


def _write_lines(path: Path, start: int, end: int, poison_at: int | None = None) -> None:
    """Lines of one input file, which comes by rename."""
    path.parent.mkdir(exist_ok=True)
    rows = [json.dumps({"key": f"k{n % 7}", "value": n}) for n in range(start, end)]
    if poison_at is not None:
        rows.insert(poison_at, "{poison")
    partial = path.with_name(path.name + ".tmp")
    partial.write_text("\n".join(rows) + "\n")
    os.rename(partial, path)


def _sums(numbers: range) -> Rows:
    running: dict[str, list[int]] = {}
    rows: Rows = []
    for n in numbers:
        sums = running.setdefault(f"k{n % 7}", [0, 0])
        sums[0] += 1
        sums[1] += n
        rows.append((0, f"k{n % 7}", *sums))
    return rows
