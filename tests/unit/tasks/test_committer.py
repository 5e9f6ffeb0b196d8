"""Commits of one subtask: only what is durable, in order, one at a time, until each is known to be committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.tasks.parts import HandLanes, context

from millstream_schema.connectors import CommitAnswer, CommitResult, Committable
from millstream_schema.errors import CommitUnknown, Fenced, SinkError, StoreUnavailable
from millstream_tasks.runner.committing import FIRST_RETRY, LAST_RETRY, Committer
from millstream_tasks.runner.environment import LeaseExpired
from millstream_tasks.sinks.memory import CollectSink, CollectTarget

R = CommitResult


def committable(epoch: int, operator: str = "out", subtask: int = 0) -> Committable:
    return Committable(f"j:{operator}:{subtask}:{epoch}", operator, subtask, epoch, 1, "c", {})


class Writer:
    """A sink's writer whose answers the test chooses; remembers what it was asked."""

    def __init__(self, *answers: CommitAnswer | BaseException) -> None:
        self.answers = list(answers)
        self.asked: list[list[int]] = []

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        self.asked.append([c.epoch for c in committables])
        answer = self.answers.pop(0) if self.answers else CommitAnswer(R.COMMITTED)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        raise AssertionError("nothing is written here")

    def flush(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""

    def prepare_commit(self, epoch: int) -> list[Committable]:
        return []

    def clean(self, keep: Sequence[Committable]) -> None:
        """Nothing is staged."""


class Rig:
    """A committer with its lanes; ``step`` lets one commit happen and be taken note of."""

    def __init__(self, **writers: Writer) -> None:
        self.lanes = HandLanes()
        self.outcomes: list[tuple[int, CommitResult]] = []
        self._completions: list[Any] = []
        self.committer = Committer(dict(writers), self.lanes, self._completions.append, lambda e, a: self.outcomes.append((e, a.result)))

    def step(self) -> None:
        self.lanes.run()
        while self._completions:
            self._completions.pop(0)()


def test_nothing_is_committed_before_its_epoch_is_durable() -> None:
    """Invariant 5: sealed output waits for the word."""
    writer = Writer()
    rig = Rig(out=writer)
    rig.committer.add([committable(1), committable(2)])
    assert not rig.lanes.waiting
    rig.committer.durable(1)
    rig.step()
    assert writer.asked == [[1]] and rig.outcomes == [(1, R.COMMITTED)]
    assert [c.epoch for c in rig.committer.pending()] == [2]
    assert rig.committer.settled and rig.committer.committed == 1


def test_t02_a_durable_epoch_subsumes_those_below_it_in_order() -> None:
    """Epoch 1 was aborted and its output kept: both are committed with epoch 2, the older first, whatever order they came in."""
    writer = Writer()
    rig = Rig(out=writer)
    rig.committer.add([committable(2), committable(1), committable(3)])
    rig.committer.durable(2)
    rig.step()
    assert writer.asked == [[1, 2]]
    assert [c.epoch for c in rig.committer.pending()] == [3]


def test_t26_late_and_repeated_notices_do_nothing() -> None:
    """5 before 4, then 5 again: one commit."""
    writer = Writer()
    rig = Rig(out=writer)
    rig.committer.add([committable(4), committable(5)])
    rig.committer.durable(5)
    rig.step()
    rig.committer.durable(4)
    rig.committer.durable(5)
    assert writer.asked == [[4, 5]] and not rig.lanes.waiting
    assert rig.committer.committed == 5


def test_an_epoch_without_output_is_committed_at_once() -> None:
    """Nothing to do is said, too: the coordinator waits for every committer."""
    rig = Rig(out=Writer())
    rig.committer.durable(3)
    assert rig.outcomes == [(3, R.ALREADY_COMMITTED)] and rig.committer.settled


def test_f2_two_commits_never_run_at_once() -> None:
    """A newer epoch becomes durable while an older is being committed: it waits, then everything that is due goes together."""
    writer = Writer()
    rig = Rig(out=writer)
    rig.committer.add([committable(1)])
    rig.committer.durable(1)
    rig.committer.add([committable(2), committable(3)])
    rig.committer.durable(2)
    rig.committer.durable(3)
    assert len(rig.lanes.waiting) == 1 and not rig.committer.settled
    rig.step()
    assert len(rig.lanes.waiting) == 1
    rig.step()
    assert writer.asked == [[1], [2, 3]] and rig.outcomes == [(1, R.COMMITTED), (3, R.COMMITTED)]


def retried(rig: Rig, now: float) -> float:
    """The runner's part: ask for a retry, wait as long as it says; how long that was."""
    rig.committer.retry_later(now)
    wait = rig.committer.tick(now)
    assert wait is not None and not rig.lanes.waiting
    assert rig.committer.tick(now + wait + 1e-6) is None
    assert len(rig.lanes.waiting) == 1
    return wait


@pytest.mark.parametrize(
    ("failure", "result"),
    [
        (CommitAnswer(R.RETRY, "busy"), R.RETRY),
        (CommitAnswer(R.UNKNOWN, "lost"), R.UNKNOWN),
        (StoreUnavailable("away"), R.UNKNOWN),
        (CommitUnknown("lost"), R.UNKNOWN),
        (SinkError("odd"), R.RETRY),
        (OSError("broken pipe"), R.RETRY),
    ],
    ids=str,
)
def test_t01_t31_a_commit_that_failed_is_tried_again_before_the_next_epoch(failure: Any, result: CommitResult) -> None:
    """Nothing is forgotten, nothing overtakes: the retry carries the failed one first, together with what became durable meanwhile."""
    writer = Writer(failure)
    rig = Rig(out=writer)
    rig.committer.add([committable(3), committable(4)])
    rig.committer.durable(3)
    rig.step()
    assert rig.outcomes == [(3, result)] and rig.committer.committed == 0
    assert [c.epoch for c in rig.committer.pending()] == [3, 4]
    rig.committer.retry_later(10.0)
    rig.committer.durable(4)
    assert not rig.lanes.waiting, "a new notice must not jump the pause"
    assert rig.committer.tick(10.0 + FIRST_RETRY + 1e-6) is None
    rig.step()
    assert writer.asked == [[3], [3, 4]] and rig.outcomes[1:] == [(4, R.COMMITTED)]
    assert rig.committer.pending() == []


def test_pauses_between_tries_grow_to_a_bound_and_start_anew_after_success() -> None:
    """0.1 s doubling to 5 s."""
    writer = Writer(*[CommitAnswer(R.RETRY)] * 10)
    rig = Rig(out=writer)
    rig.committer.add([committable(1), committable(2)])
    rig.committer.durable(1)
    rig.step()
    waits = []
    for n in range(9):
        waits.append(retried(rig, float(n)))
        rig.step()
    assert waits == pytest.approx([min(FIRST_RETRY * 2**n, LAST_RETRY) for n in range(9)])
    retried(rig, 100.0)
    rig.step()
    assert rig.outcomes[-1] == (1, R.COMMITTED)
    writer.answers.append(CommitAnswer(R.RETRY))
    rig.committer.durable(2)
    rig.step()
    assert retried(rig, 200.0) == pytest.approx(FIRST_RETRY)


def test_t30_what_failed_for_good_is_said_and_kept() -> None:
    """FAILED is an outcome of its own: the runner fails the attempt; the committable stays pending."""
    rig = Rig(out=Writer(CommitAnswer(R.FAILED, "expired")))
    rig.committer.add([committable(1)])
    rig.committer.durable(1)
    rig.step()
    assert rig.outcomes == [(1, R.FAILED)]
    assert len(rig.committer.pending()) == 1 and not rig.committer.settled


def test_two_sinks_commit_one_after_the_other_and_the_first_failure_stops() -> None:
    """The second sink is not asked when the first failed; on the retry the first, which committed before, is asked again and says so."""
    one, two = Writer(), Writer(CommitAnswer(R.RETRY))
    rig = Rig(one=one, two=two)
    rig.committer.add([committable(1, "two"), committable(1, "one")])
    rig.committer.durable(1)
    rig.step()
    assert (one.asked, two.asked) == ([[1]], [[1]]) and rig.committer.committed == 0
    one.answers.append(CommitAnswer(R.RETRY))
    retried(rig, 0.0)
    rig.step()
    assert (one.asked, two.asked) == ([[1], [1]], [[1]])
    one.answers.append(CommitAnswer(R.ALREADY_COMMITTED))
    retried(rig, 1.0)
    rig.step()
    assert rig.committer.committed == 1 and rig.committer.pending() == []


@pytest.mark.parametrize("error", [Fenced("stale"), LeaseExpired(), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_t41_a_fenced_or_expired_commit_ends_the_attempt(error: BaseException) -> None:
    """It is not tried again: someone else owns the output now."""
    rig = Rig(out=Writer(error))
    rig.committer.add([committable(1)])
    rig.committer.durable(1)
    with pytest.raises(type(error)):
        rig.step()
    assert rig.outcomes == []


def test_t29_restored_committables_of_several_old_subtasks_are_each_committed() -> None:
    """Two of one epoch, with identities of their own: F4, the epoch alone is no key."""
    target = CollectTarget()
    sink = CollectSink("c", target)
    sealed = []
    for old in (0, 2):
        writer = sink.open(context(old, 3, generation=1))
        writer.write([old], None)
        sealed += writer.prepare_commit(4)
    new = sink.open(context(0, 1, generation=2))
    lanes, done = HandLanes(), []
    committer = Committer({"out": new}, lanes, lambda work: work(), lambda e, a: done.append((e, a.result)))
    committer.add(sealed)
    committer.durable(4)
    lanes.run()
    assert done == [(4, R.COMMITTED)] and sorted(target.values("c")) == [0, 2]
    assert sorted(target.committed()) == ["j:out:0:4", "j:out:2:4"]
