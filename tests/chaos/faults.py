"""The faults: one function each, and the recovery that must follow. Called by the chaos tests, their short version, and nothing else.

What must never happen here: a signal to a process or server that the test did not start.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tests.acceptance.traffic import Broker, Traffic
from tests.support.celery_cluster import CeleryCluster, eventually
from tests.support.instances import PostgresInstance

Servers = dict[str, Broker | PostgresInstance]


def _busy(cluster: CeleryCluster, chance: random.Random) -> str:
    """A worker with subtasks, while there is one; else any."""
    return chance.choice(cluster.running_workers() or cluster.worker_names)


def _stop_tree(cluster: CeleryCluster, chance: random.Random) -> None:
    """A whole worker stopped past its lease, then woken."""
    with cluster.stopped(cluster.tree(_busy(cluster, chance))):
        time.sleep(cluster.lease_ms / 1000 * chance.uniform(1.2, 2.0))


def _stop_subtask(cluster: CeleryCluster, chance: random.Random) -> None:
    """One subtask stopped, for longer or shorter than its node's patience."""
    running = cluster.subtasks(_busy(cluster, chance))
    with cluster.stopped(running[:1]):
        time.sleep(cluster.lease_ms / 1000 * chance.uniform(0.2, 1.4))


def _kill_subtask(cluster: CeleryCluster, chance: random.Random) -> None:
    for process in cluster.subtasks(_busy(cluster, chance))[:1]:
        cluster.kill(process)


FAULTS: dict[str, Callable[[CeleryCluster, Servers, random.Random], None]] = {
    "kill-worker": lambda c, s, r: c.kill(c.main(_busy(c, r))),
    "kill-node": lambda c, s, r: c.kill(c.node(_busy(c, r))),
    "kill-subtask": lambda c, s, r: _kill_subtask(c, r),
    "kill-coordinator": lambda c, s, r: c.kill(c.node(c.leader())),
    "kill-beat": lambda c, s, r: c.kill(c.main("beat")),
    "stop-worker": lambda c, s, r: _stop_tree(c, r),
    "stop-subtask": lambda c, s, r: _stop_subtask(c, r),
    "restart-broker": lambda c, s, r: s["broker"].restart(),
    "kill-broker": lambda c, s, r: (s["broker"].kill(), s["broker"].start())[0],
    "restart-database": lambda c, s, r: s["database"].restart(),
    "kill-database": lambda c, s, r: (s["database"].kill(), s["database"].start())[0],
}


@contextlib.contextmanager
def _collected(errors: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        errors.append(exc)


def break_and_recover(
    cluster: CeleryCluster, servers: Servers, job: Traffic, kinds: Sequence[str], epoch: int, chance: random.Random
) -> int:
    """Inject ``kinds`` at once; returns the newest durable epoch when the job has made one that was triggered afterwards, and everything runs again."""
    errors: list[BaseException] = []

    def inject(kind: str, seed: float) -> None:
        with _collected(errors):
            FAULTS[kind](cluster, servers, random.Random(seed))

    threads = [threading.Thread(target=inject, args=(kind, chance.random()), name=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, f"{kinds}: {errors}"
    triggered = cluster.row(job.id).next_epoch  # an epoch of this number or above began after the faults
    newest = cluster.durable(job.id, max(epoch, triggered - 1), timeout=120)
    assert not cluster.row(job.id).state.ended, f"the job ended after {kinds}:\n{cluster.diagnosis(job.id)}"
    eventually("every worker is back", lambda: len(cluster.node_ids()) >= cluster.workers)
    return newest


def drawn(chance: random.Random, count: int, doubles: int = 0) -> list[tuple[str, ...]]:
    """``count`` single faults, each kind once before any comes again, then ``doubles`` pairs that break different things at once."""
    kinds = sorted(FAULTS)
    singles: list[tuple[str, ...]] = []
    while len(singles) < count:
        singles += [(kind,) for kind in chance.sample(kinds, len(kinds))]
    pairs: list[tuple[str, ...]] = []
    while len(pairs) < doubles:
        first, second = chance.sample(kinds, 2)
        if first.partition("-")[2] != second.partition("-")[2]:
            pairs.append((first, second))
    return singles[:count] + pairs


def survive(cluster: CeleryCluster, servers: Servers, job: Traffic, faults: Sequence[tuple[str, ...]], seed: int) -> None:
    """Inject them one after the other, each when the last one's recovery has made an epoch durable; nothing may ever be visible twice."""
    chance = random.Random(seed)
    epoch = job.running()
    for number, kinds in enumerate(faults, 1):
        began = time.monotonic()
        epoch = break_and_recover(cluster, servers, job, kinds, epoch, chance)
        print(
            f"{number:3d}/{len(faults)} {' + '.join(kinds):<36} epoch {epoch:5d} durable after {time.monotonic() - began:5.1f} s",
            flush=True,
        )
        repeated = job.repeated()
        assert not repeated, f"after fault {number} ({kinds}) of seed {seed} these are visible twice: {repeated[:10]}"
