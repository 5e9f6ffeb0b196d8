from millstream import CollectSink, CollectTarget, EmbeddedCluster, GeneratorSource, Pipelines, StreamSettings

WORDS = ("to", "be", "or", "not", "to", "be") * 2_000
outside = CollectTarget()  # what a reader outside the job can see
crashes = []


def read(split, position, limit):
    return list(enumerate(WORDS))[position : position + limit] or None


def fragile(record):
    number, word = record
    if number == 8_000 and not crashes:
        crashes.append(number)
        raise ConnectionError("the network went away")
    return word


pipelines = Pipelines()


@pipelines.define("wordcount")  # STRICT_EXACTLY_ONCE unless told otherwise
def wordcount(job, config):
    words = job.source(GeneratorSource(read, rate=12_000), uid="read").map(fragile, uid="fragile")
    counts = words.key_by(str).aggregate(int, lambda count, _: count + 1, uid="count", parallelism=2)
    counts.sink_to(CollectSink("counts", outside), uid="counts")


if __name__ == "__main__":
    with EmbeddedCluster(pipelines) as cluster:
        job = cluster.run("wordcount", settings=StreamSettings(epoch_interval_ms=100), timeout=60)

    expected = [(word, n + 1) for word in set(WORDS) for n in range(WORDS.count(word))]
    assert sorted(outside.values("counts")) == sorted(expected)
    assert crashes and job.restarts == 1 and job.restore_epoch > 0
    print(f"failed once, went on from epoch {job.restore_epoch}: {len(expected)} results, each exactly once")
