"""The inputs that Millstream and its peers are given alike. Standard library only: peers import it in environments of their own."""

from __future__ import annotations

import random

Record = tuple[str, int, int]
START = 1_704_067_200_000
"""2024-01-01T00:00:00Z in UTC ms: a multiple of the window size."""
WINDOW = 10_000
DISORDER = 2_000


def words(n: int) -> list[str]:
    """``n`` words of 1,000 different ones, seed 7."""
    chance = random.Random(7)
    vocabulary = [f"word{i}" for i in range(1000)]
    return [vocabulary[chance.randrange(1000)] for _ in range(n)]


def running_counts(items: list[str]) -> list[tuple[str, int]]:
    """What a word count must give, record by record."""
    counts: dict[str, int] = {}
    expected = []
    for word in items:
        counts[word] = count = counts.get(word, 0) + 1
        expected.append((word, count))
    return expected


def records(n: int, per_second: int) -> list[Record]:
    """(key, UTC ms, 1): 1,000 keys, ``per_second`` records per second of event time, up to 2 s out of order, seed 7."""
    chance = random.Random(7)
    return [(f"k{chance.randrange(1000)}", START + int(i * 1000 / per_second - chance.random() * DISORDER), 1) for i in range(n)]


def sums(items: list[Record]) -> dict[tuple[str, int], int]:
    """What tumbling windows over ``records`` must give: (key, start of window) → sum."""
    expected: dict[tuple[str, int], int] = {}
    for key, at, value in items:
        cell = (key, at - at % WINDOW)
        expected[cell] = expected.get(cell, 0) + value
    return expected
