"""A job is suspended with a savepoint, goes on with more subtasks, and is drained."""

import tempfile
from typing import Any

from millstream import (
    CollectSink,
    CollectTarget,
    EmbeddedCluster,
    GeneratorSource,
    Installation,
    JobBuilder,
    Jobs,
    JobState,
    Pipelines,
    StreamSettings,
)

numbers_out = CollectTarget()
pipelines = Pipelines()


def read(split: int, position: int, limit: int) -> list[int]:
    return list(range(position, position + limit))


@pipelines.define("numbers")
def numbers(job: JobBuilder, config: dict[str, Any]) -> None:
    source = job.source(GeneratorSource(read, rate=2_000, bounded=False), uid="read", parallelism=1)
    per_key = source.key_by(lambda n: n % 10).aggregate(int, lambda count, _: count + 1, uid="count")
    per_key.sink_to(CollectSink("counts", numbers_out), uid="out")


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedCluster(pipelines, directory=directory),
        Jobs(Installation.local(directory), pipelines) as jobs,
    ):
        jobs.submit("numbers", settings=StreamSettings(epoch_interval_ms=100))
        jobs.wait("numbers", [JobState.RUNNING], timeout=60)

        savepoint = jobs.suspend("numbers")  # durable, copied, nothing fired
        stopped = jobs.wait("numbers", timeout=60)
        print(stopped.state, [s["state"] for s in jobs.savepoints("numbers") if s["id"] == savepoint])

        jobs.resume("numbers", parallelism=3)  # keyed state goes to its new owners
        jobs.wait("numbers", [JobState.RUNNING], timeout=60)

        jobs.drain("numbers")  # the source ends here; everything it gave is processed and committed
        drained = jobs.wait("numbers", timeout=60)
        print(drained.state, drained.reason)

    counts = numbers_out.values("counts")
    assert sorted(counts) == sorted((key, n + 1) for key in range(10) for n in range(sum(k == key for k, _ in counts)))
