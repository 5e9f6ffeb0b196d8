"""Lines that are no JSON go to a dead-letter file with their position and reason; the rest goes on."""

import pathlib
from typing import Any

from millstream import EmbeddedCluster, FileSink, FileSource, JobBuilder, Pipelines

pipelines = Pipelines()


@pipelines.define("import")
def import_(job: JobBuilder, config: dict[str, Any]) -> None:
    read = job.source(FileSource("in.jsonl", "jsonl", poison="dead-letter"), uid="read")
    read.sink_to(FileSink("good"), uid="good")
    dead = read.side_output("dead-letter").map(lambda d: {**d, "raw": d["raw"].decode(errors="replace")}, uid="readable")
    dead.sink_to(FileSink("dead"), uid="dead")


def lines(directory: str) -> list[str]:
    return [line for part in sorted(pathlib.Path(directory).glob("part-*")) for line in part.read_text().splitlines()]


if __name__ == "__main__":
    pathlib.Path("in.jsonl").write_text('{"id": 1}\n{"id": \n{"id": 3}\n')
    with EmbeddedCluster(pipelines) as cluster:
        cluster.run("import", timeout=60)
    print(lines("good"), lines("dead"))
