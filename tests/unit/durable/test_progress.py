"""What a running attempt says: sent once a second, the last word at its end, bounded and storable."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_schema.durable.progress import FIELDS, NOTES, TEXT, Note, Progress, ProgressRow, Told, later, note_of, progress_of, told
from millstream_tasks.durable.progress import EVERY, Coalescing, Gathered


def row(done: float, total: float | None = None, message: str = "") -> ProgressRow:
    return ProgressRow(task="t", fence=1, number=1, done=done, total=total, message=message, at_us=0)


@given(st.lists(st.floats(0.0, 0.7), min_size=1, max_size=60))
def test_a_message_a_second_and_the_last_word_is_not_lost(pauses: list[float]) -> None:
    """However the calls fall: two messages are a second apart, they only grow, and the rest is what was said last."""
    c, now, sent = Coalescing(), 100.0, list[tuple[float, Told]]()
    for i, pause in enumerate(pauses):
        now += pause
        c.progress(i, None, "")
        told_now = c.due(now)
        if told_now is not None:
            sent.append((now, told_now))
    assert len(sent) >= 1 + int((now - sent[0][0]) / (EVERY + 0.7))
    assert all(b[0] - a[0] >= EVERY for a, b in itertools.pairwise(sent))
    rest = c.rest(now)
    last = rest or sent[-1][1]
    assert last.progress == Progress(len(pauses), len(pauses) - 1, None, "") and c.rest(now) is None
    numbers = [t.progress.number for _, t in sent if t.progress]
    assert numbers == sorted(set(numbers))


def test_each_note_is_sent_once_and_the_first_hundred_are_kept() -> None:
    """Numbered from 1; those beyond are answered with False."""
    c = Coalescing()
    kept = [c.note(f"n{i}", {}) for i in range(NOTES + 3)]
    assert kept == [True] * NOTES + [False] * 3
    first = c.due(1.0)
    assert first is not None and [n.number for n in first.notes] == list(range(1, NOTES + 1)) and first.progress is None
    assert c.due(9.0) is None


class Sullen:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_whatever_is_noted_can_be_stored() -> None:
    """Cut off, written out, never refused."""
    note = note_of(1, "x" * 9_000, {"n": 7, "half": math.nan, "who": Sullen(), "nul": "a\x00b", **{f"f{i}": i for i in range(50)}})
    assert len(note.text) == TEXT and note.fields.count(":") == FIELDS
    assert '"n":7' in note.fields and '"half":"nan"' in note.fields and "cannot be had" in note.fields and "\x00" not in note.fields
    assert note_of(2, "plain", {}) == Note(2, "plain", "")


@pytest.mark.parametrize(("done", "total"), [(math.nan, None), (1, math.inf), ("x", 1), (None, 1)])
def test_progress_is_told_in_finite_numbers(done: Any, total: Any) -> None:
    """The handler's mistake is the handler's exception."""
    with pytest.raises((ValueError, TypeError)):
        progress_of(1, done, total, "")


def test_it_is_told_in_one_line() -> None:
    """Whole numbers without a point."""
    assert told(row(40, 100, "two\nlines")) == "40 of 100 done (two lines)"
    assert told(row(0.25)) == "0.25 done"


def test_what_is_said_while_it_is_written_is_written_again() -> None:
    """Nothing is forgotten but what was written as it is."""
    g = Gathered()
    g.add("a", 1, Told(Progress(1, 1, None, ""), (Note(1, "x", ""),)))
    g.add("b", 1, Told(None, (Note(1, "y", ""),)))
    said = g.all()
    g.add("a", 1, Told(Progress(2, 2, None, "")))
    g.written(said)
    assert g.all() == {("a", 1): Told(Progress(2, 2, None, ""), (Note(1, "x", ""),))}
    assert later(Told(Progress(1, 1, None, "")), Told()).progress == Progress(1, 1, None, "")
