"""What every sink that commits by epoch keeps, over every target: each row exactly once, whatever is repeated, late, stale or lost."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import msgspec
import pytest
from tests.contract.sinks.worlds import records

from millstream_schema.connectors import CommitResult, Committable, Sink, SinkCapability
from millstream_schema.errors import Fenced

COMMITTED, ALREADY, FAILED = CommitResult.COMMITTED, CommitResult.ALREADY_COMMITTED, CommitResult.FAILED


def test_nothing_is_visible_before_the_commit_and_everything_after(world: Any, sealed: Any) -> None:
    """Neither written nor sealed records are visible; committed ones are, once."""
    writer = world.open()
    writer.write(records(1, 2), None)
    writer.flush()
    assert world.visible() == []
    committables = writer.prepare_commit(1)
    assert [(c.id, c.rows, c.epoch, c.subtask, c.operator) for c in committables] == [(f"{world.job}:sink:0:1", 2, 1, 0, "sink")]
    assert world.visible() == []
    assert writer.commit(committables).result is COMMITTED
    assert world.visible() == [1, 2]
    assert world.staged() == 0


def test_a_sink_describes_itself_without_secrets_and_has_no_problems(world: Any) -> None:
    """Kind, version, capability and JSON configuration are there."""
    sink = world.sink()
    assert isinstance(sink, Sink)
    assert sink.problems() == []
    assert sink.capability in (SinkCapability.TWO_PHASE_COMMIT, SinkCapability.STAGED_ATOMIC_COMMIT)
    assert msgspec.json.decode(msgspec.json.encode(sink.config())) == sink.config()


def test_an_epoch_without_records_has_no_committable(world: Any, sealed: Any) -> None:
    """Empty epochs cost nothing, and committing nothing is done already."""
    writer = world.open()
    assert writer.prepare_commit(1) == []
    writer.write([], None)
    assert writer.prepare_commit(2) == []
    assert writer.commit([]).result is ALREADY


def test_repeating_a_commit_any_number_of_times_changes_nothing(world: Any, sealed: Any) -> None:
    """T-28: a crash after the commit and before it was recorded makes recovery commit again."""
    writer = world.open()
    committables = sealed(writer, 1, 1, 2, 3)
    assert [writer.commit(committables).result for _ in range(3)] == [COMMITTED, ALREADY, ALREADY]
    again = world.open(generation=2)
    assert again.commit(committables).result is ALREADY
    assert world.visible() == [1, 2, 3]


def test_aborted_epochs_are_subsumed_by_the_next_in_order(world: Any, sealed: Any) -> None:
    """T-02: prepare 1, abort 1, prepare 2, commit 2: both transactions, once each."""
    writer = world.open()
    first, second = sealed(writer, 1, 1, 2), sealed(writer, 2, 3)
    assert writer.commit(first + second).result is COMMITTED
    assert writer.commit(first + second).result is ALREADY
    assert world.visible() == [1, 2, 3]


def test_a_later_epoch_committed_first_does_not_swallow_the_earlier(world: Any, sealed: Any) -> None:
    """T-26: notices out of order: 5 before 4, and 4 again: both once."""
    writer = world.open()
    four, five = sealed(writer, 4, 4), sealed(writer, 5, 5)
    assert writer.commit(five).result is COMMITTED
    assert writer.commit(four).result is COMMITTED
    assert writer.commit(four).result is ALREADY
    assert world.visible() == [4, 5]


def test_parallel_subtasks_of_one_epoch_all_become_visible(world: Any, sealed: Any) -> None:
    """F4: the identity is not the epoch alone; F5: nor do subtasks share a name. Two operators too."""
    writers = [world.open(subtask=n, parallelism=3) for n in range(3)] + [world.open(operator="other")]
    everything = [sealed(writer, 1, number) for number, writer in enumerate(writers)]
    for writer, committables in zip(writers, everything):
        assert writer.commit(committables).result is COMMITTED
    assert world.visible() == [0, 1, 2, 3]


def test_committables_of_several_old_subtasks_are_committed_by_one_after_rescaling(world: Any, sealed: Any) -> None:
    """T-29: two committables of one epoch restored into one subtask do not collide."""
    old = [world.open(subtask=n, parallelism=2) for n in range(2)]
    committables = [c for number, writer in enumerate(old) for c in sealed(writer, 1, number)]
    new = world.open(generation=2)
    assert new.commit(committables).result is COMMITTED
    new.clean(committables)
    assert new.commit(committables).result is ALREADY
    assert world.visible() == [0, 1]


def test_a_restored_committable_is_committed_by_its_stored_identity(world: Any, sealed: Any) -> None:
    """Sealed by generation 1 of one job; committed by another job's sink, whose own data lies elsewhere (T-38: not twice)."""
    committables = sealed(world.open(), 1, 1, 2)
    original, world.job = world.job, f"{world.job}-copy"
    copy = world.open(generation=5)
    assert copy.commit(committables).result is COMMITTED
    assert copy.commit(committables).result is ALREADY
    world.job = original
    assert world.open(generation=2).commit(committables).result is ALREADY
    assert world.visible() == [1, 2]


def test_a_committable_whose_staging_is_gone_fails_with_a_message_or_warns(world: Any, sealed: Any) -> None:
    """T-30: never an endless restart without a word; ``missing='warn'`` goes on and says what was lost."""
    writer = world.open()
    committables = sealed(writer, 1, 1)
    world.lose_staging()
    answer = writer.commit(committables)
    assert answer.result is FAILED
    assert committables[0].id in answer.detail and "missing='warn'" in answer.detail
    lenient = world.open(world.sink(missing="warn"), generation=2)
    answer = lenient.commit(committables)
    assert answer.result is ALREADY
    assert committables[0].id in answer.detail
    assert world.visible() == []


def test_a_group_stops_at_the_first_that_fails(world: Any, sealed: Any) -> None:
    """T-31: order is kept: what comes behind a failure waits for it."""
    writer = world.open()
    lost = sealed(writer, 1, 1)
    world.lose_staging()
    good = sealed(writer, 2, 2)
    assert writer.commit(lost + good).result is FAILED
    assert world.visible() == []
    assert writer.commit(good).result is COMMITTED


def test_a_committable_that_does_not_match_what_was_staged_is_refused(world: Any, sealed: Any) -> None:
    """Counts must match: nothing of it becomes visible."""
    writer = world.open()
    (committable,) = sealed(writer, 1, 1, 2)
    wrong = msgspec.structs.replace(committable, rows=3, checksum="0" * 32)
    assert writer.commit([wrong]).result is FAILED
    assert world.visible() == []
    assert writer.commit([committable]).result is COMMITTED


def test_an_epoch_id_issued_twice_is_refused_and_not_taken_for_a_repeat(world: Any, sealed: Any) -> None:
    """T-36: another content under a committed id is no "already committed"."""
    writer = world.open()
    assert writer.commit(sealed(writer, 1, 1)).result is COMMITTED
    answer = writer.commit(sealed(writer, 1, 7, 8))
    assert answer.result is FAILED
    assert "another content" in answer.detail
    assert world.visible() == [1]


def test_an_older_generation_can_neither_open_stage_seal_nor_commit(world: Any, sealed: Any) -> None:
    """T-41: a zombie that wakes up is refused at each of its next steps."""
    zombie, other = world.open(), world.open(operator="other")
    committables = sealed(zombie, 1, 1)
    zombie.write(records(2), None)
    world.open(generation=8)
    with pytest.raises(Fenced):
        zombie.commit(committables)
    with pytest.raises(Fenced):
        zombie.write(records(3), None)
        zombie.flush()
    with pytest.raises(Fenced):
        zombie.clean([])
    with pytest.raises(Fenced):
        world.open(generation=7)
    assert world.visible() == []
    assert other.commit(sealed(other, 1, 9)).result is COMMITTED
    assert world.visible() == [9]


@pytest.mark.parametrize("held", ["buffered", "staged", "sealed"])
def test_t49_a_fenced_writer_closes_quietly_and_leaves_nothing_that_counts(world: Any, sealed: Any, held: str) -> None:
    """Whatever it held when a newer generation came in: closing raises nothing, twice neither; its successor cleans up and goes on."""
    zombie = world.open()
    zombie.write(records(1), None)
    if held != "buffered":
        zombie.flush()
    if held == "sealed":
        zombie.prepare_commit(1)
        zombie.write(records(2), None)
    successor = world.open(generation=2)
    zombie.close()
    zombie.close()
    assert world.visible() == []
    successor.clean([])
    assert world.staged() == 0
    assert successor.commit(sealed(successor, 2, 7)).result is COMMITTED
    assert world.visible() == [7]


def test_opening_the_same_generation_again_or_from_many_subtasks_is_no_conflict(world: Any) -> None:
    """The fence shuts out older generations, not fellow subtasks; all may open at once."""
    sink, failures = world.sink(), []

    def start(number: int) -> None:
        try:
            sink.open(world.context(generation=3, subtask=number, parallelism=4)).close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_clean_deletes_older_staging_that_is_not_kept_and_nothing_else(world: Any, sealed: Any) -> None:
    """Restored committables stay; other jobs, operators, subtasks and the present generation are not touched."""
    old = [world.open(subtask=n, parallelism=3) for n in range(3)]
    (kept,) = sealed(old[0], 1, 1)
    sealed(old[0], 2, 2)
    (others,) = sealed(old[1], 1, 3)
    sealed(old[2], 1, 4)
    old[0].write(records(5), None)
    old[0].flush()
    stranger = world.open(operator="other", generation=1)
    (strange,) = sealed(stranger, 1, 6)
    new = world.open(generation=2, subtask=0, parallelism=2)
    new.write(records(7), None)
    new.flush()
    assert world.staged() == 7
    new.clean([kept])
    assert world.staged() == 4
    assert new.commit([kept, *new.prepare_commit(3)]).result is COMMITTED
    assert world.open(generation=2, subtask=1, parallelism=2).commit([others]).result is COMMITTED
    assert stranger.commit([strange]).result is COMMITTED
    assert world.visible() == [1, 3, 6, 7]


def test_what_was_written_after_a_seal_belongs_to_the_next(world: Any, sealed: Any) -> None:
    """Commits of epoch N overlap epoch N+1's writing, on another thread."""
    writer = world.open()
    first = sealed(writer, 1, 1)
    writer.write(records(2), None)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(writer.commit(first)))
    thread.start()
    thread.join()
    assert answers[0].result is COMMITTED
    assert world.visible() == [1]
    assert writer.commit(writer.prepare_commit(2)).result is COMMITTED
    assert world.visible() == [1, 2]


def test_a_passed_lease_stops_a_writer_before_anything_leaves_it(world: Any, sealed: Any) -> None:
    """``guard`` is asked before each staging write and each commit."""

    class LeasePassed(BaseException):
        pass

    passed = False

    def guard() -> None:
        if passed:
            raise LeasePassed

    writer = world.open(guard=guard)
    committables = sealed(writer, 1, 1)
    passed = True
    with pytest.raises(LeasePassed):
        writer.commit(committables)
    with pytest.raises(LeasePassed):
        writer.write(records(2), None)
        writer.flush()
    assert world.visible() == []
    passed = False
    assert writer.commit(committables).result is COMMITTED
    assert world.visible() == [1]


def test_any_interleaving_of_generations_shows_each_durable_row_once(world: Any, sealed: Any) -> None:
    """Three generations, each sealing two epochs and committing what its predecessors left, in every order of commit."""
    expected: list[int] = []
    pending: list[Committable] = []
    epochs = itertools.count(1)
    for generation in (1, 2, 3):
        writer = world.open(generation=generation)
        if pending:
            writer.commit(list(pending))
            writer.clean(pending)
        for _ in range(2):
            epoch = next(epochs)
            pending += sealed(writer, epoch, 10 * epoch, 10 * epoch + 1)
            expected += [10 * epoch, 10 * epoch + 1]
        writer.commit(pending[-1:])
        writer.commit(list(pending))
    assert world.visible() == expected
    assert world.staged() == 0
