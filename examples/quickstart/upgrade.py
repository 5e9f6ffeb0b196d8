"""An operator is renamed between two runs of a job: refused without a mapping, and with one its state goes on."""

import pathlib
from typing import Any

from millstream import CollectSink, CollectTarget, EmbeddedCluster, FileSource, Installation, JobBuilder, Jobs, Pipelines, RestoreRefused

counted = CollectTarget()


def one_more(count: int, line: str) -> int:
    return count + 1


def release(version: int, uid: str) -> Pipelines:
    pipelines = Pipelines()

    @pipelines.define("lines", version=version)
    def lines(job: JobBuilder, config: dict[str, Any]) -> None:
        read = job.source(FileSource("in", "text"), uid="read")
        read.key_by(str.strip).aggregate(int, one_more, uid=uid).sink_to(CollectSink("counts", counted), uid="out")

    return pipelines


if __name__ == "__main__":
    installation = Installation.local("state")
    pathlib.Path("in").mkdir()
    pathlib.Path("in/a.txt").write_text("tea\ntea\n")
    with EmbeddedCluster(release(1, "count"), directory="state") as cluster:
        cluster.run("lines", timeout=60)

    pathlib.Path("in/b.txt").write_text("tea\ncake\n")
    second = release(2, "how-many")
    with EmbeddedCluster(second, directory="state"), Jobs(installation, second) as jobs:
        try:
            jobs.resume("lines")
        except RestoreRefused as refused:
            print(*refused.differences, sep="\n")
        jobs.resume("lines", renames={"count": "how-many"})
        jobs.wait("lines", timeout=60)
    print(sorted(counted.values("counts")))
