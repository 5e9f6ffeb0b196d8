"""A word count that fails once in the middle: whoever reads its results cannot tell."""

from typing import Any

from millstream import CollectSink, CollectTarget, EmbeddedCluster, GeneratorSource, JobBuilder, Pipelines, StreamSettings

WORDS = ("to", "be", "or", "not", "to", "be") * 2_000
outside = CollectTarget()  # what a reader outside the job can see
crashes: list[int] = []
pipelines = Pipelines()


def read(split: int, position: int, limit: int) -> list[tuple[int, str]] | None:
    if position >= 6_000 and not outside.committed():
        return []  # nothing more until the first results are out, so that the failure comes behind them
    return list(enumerate(WORDS))[position : position + limit] or None


def fragile(record: tuple[int, str]) -> str:
    number, word = record
    if number == 8_000 and not crashes:
        crashes.append(number)
        raise RuntimeError("fails once")
    return word


@pipelines.define("wordcount")  # STRICT_EXACTLY_ONCE unless told otherwise
def wordcount(job: JobBuilder, config: dict[str, Any]) -> None:
    words = job.source(GeneratorSource(read), uid="read").map(fragile, uid="fragile")
    counts = words.key_by(str).aggregate(int, lambda count, _: count + 1, uid="count", parallelism=2)
    counts.sink_to(CollectSink("counts", outside), uid="counts")


if __name__ == "__main__":
    with EmbeddedCluster(pipelines) as cluster:
        job = cluster.run("wordcount", settings=StreamSettings(epoch_interval_ms=100), timeout=60)

    expected = [(word, n + 1) for word in set(WORDS) for n in range(WORDS.count(word))]
    assert sorted(outside.values("counts")) == sorted(expected)
    assert crashes and job.restarts == 1 and job.restore_epoch > 0
    print(f"failed once, went on from a durable epoch: {len(expected)} results, each exactly once")
