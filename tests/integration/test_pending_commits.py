"""A job that has ended with commits pending is no success, for whoever waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream import CollectionSource, CollectSink, CollectTarget, EmbeddedCluster, JobBuilder, Pipelines
from millstream_schema.connectors import CommitAnswer, CommitResult, Committable
from millstream_schema.errors import JobFailed
from millstream_schema.settings import StreamSettings
from millstream_schema.states import JobState
from millstream_tasks.sinks.memory import CollectWriter


def test_a_finished_job_with_output_that_was_not_committed_fails_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names sink, epoch and the command; who waits for the state itself gets the row."""
    target = CollectTarget()
    pipelines = Pipelines()

    @pipelines.define("numbers")
    def numbers(job: JobBuilder, _config: dict[str, Any]) -> None:
        job.source(CollectionSource([1, 2, 3]), uid="in").sink_to(CollectSink("out", target), uid="out")

    def refused(_writer: CollectWriter, _due: list[Committable]) -> CommitAnswer:
        return CommitAnswer(CommitResult.RETRY, "the target is full")

    monkeypatch.setattr(CollectWriter, "commit", refused)
    settings = msgspec.structs.replace(StreamSettings(), epoch_interval_ms=30, commit_deadline_ms=300)
    with EmbeddedCluster(pipelines, directory=tmp_path) as cluster:
        with pytest.raises(JobFailed, match=r"FINISHED, but commits are pending: out of epoch \d+ \(3 rows\).*jobs commit numbers"):
            cluster.run("numbers", timeout=30, settings=settings)
        assert cluster.jobs.wait("numbers", [JobState.FINISHED]).pending_commits != "[]"
    assert target.values("out") == []
