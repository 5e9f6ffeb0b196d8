"""Leave to begin: of two sides that reach for it, one gets it."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Iterator

import pytest

from millstream_tasks.durable.leave import Granter, Taker


@pytest.fixture
def granter() -> Iterator[Granter]:
    made = Granter()
    yield made
    made.close()


def test_what_was_taken_back_does_not_begin_and_what_comes_after_it_does(granter: Granter) -> None:
    """Though the process looks at it only later, when there is leave for others again."""
    taker = Taker(granter.reading)
    first = [granter.grant() for _ in range(3)]
    assert taker.take(first[0])
    assert granter.take_back() == 2
    later = [granter.grant() for _ in range(2)]
    assert [taker.take(number) for number in (*first[1:], *later)] == [False, False, True, True]
    assert granter.take_back() == 0 and not taker.take(later[1])


def test_nothing_begins_when_whoever_gives_leave_is_gone() -> None:
    """Its end of the pipe is closed: that is no number."""
    granter = Granter()
    taker = Taker(os.dup(granter.reading))
    number = granter.grant()
    granter.close()
    assert taker.take(number) and not taker.take(number)


@pytest.mark.parametrize("seed", range(5))
def test_each_attempt_begins_or_is_taken_back_and_never_both(granter: Granter, seed: int) -> None:
    """One side hands over and takes back as it likes, the other one begins what it may, at the same time. The last ones handed over are those that go back."""
    rng, orders, begun = random.Random(seed), queue.SimpleQueue[tuple[int, int] | None](), []
    taker = Taker(os.dup(granter.reading))

    def run() -> None:
        while (order := orders.get()) is not None:
            if taker.take(order[1]):
                begun.append(order[0])

    process = threading.Thread(target=run)
    process.start()
    line: list[int] = []
    back: list[int] = []
    for attempt in range(3000):
        line.append(attempt)
        orders.put((attempt, granter.grant()))
        if rng.random() < 0.1:
            count = granter.take_back()
            back += line[len(line) - count :]
            del line[len(line) - count :]
    orders.put(None)
    process.join()
    count = granter.take_back()
    assert count == 0, "what may begin has begun"
    assert begun == line and sorted(begun + back) == list(range(3000)) and back
