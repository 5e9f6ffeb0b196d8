"""What people are shown: durations with the figures that count, reasons on one line."""

from __future__ import annotations

import pytest

from millstream.formatting import brief, milliseconds, pairs
from millstream_schema.reasons import one_line

CARET = """OperatorError: operator 'm' failed: UndefinedTable: relation "nowhere" does not exist
LINE 1: select nothing from nowhere
                            ^"""
GOES_ON = """ConfigurationError: relation "nowhere" does not exist
LINE 1: SELECT "a" FROM "nowhere"
                        ^; create it before the job starts"""


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"), (0.0, "0"), (0.004, "0.004"), (0.125, "0.125"), (0.49, "0.490"), (1.0, "1.00"), (3.456, "3.46"), (38.249, "38.2"), (100.4, "100"),
        (3421.7, "3422"), (1e7, "10000000"),
    ],
)  # fmt: skip
def test_a_duration_has_three_figures_and_is_never_rounded_to_nothing(value: float | None, shown: str) -> None:
    """Down to the microsecond it was measured in; 0 only where it is 0."""
    assert str(milliseconds(value)) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (CARET, "OperatorError: operator 'm' failed: UndefinedTable: relation \"nowhere\" does not exist"),
        (GOES_ON, 'ConfigurationError: relation "nowhere" does not exist; create it before the job starts'),
        ("the job is invalid:\n  - a\n  - b\n", "the job is invalid: - a - b"),
        ("LINE 1 of the file is empty", "LINE 1 of the file is empty"),
        ("a\r\n\tb", "a b"),
        ("", ""),
    ],
)
def test_a_reason_is_one_line_that_lost_nothing_but_the_drawing(text: str, shown: str) -> None:
    """psycopg repeats the statement and draws a caret under it; the words around stay."""
    assert one_line(text) == shown


def test_a_cell_is_one_line_of_bounded_length() -> None:
    """Also for a text of many lines."""
    assert brief("x\n" * 500) == ("x " * 80)


def test_what_is_known_of_one_thing_is_written_for_people() -> None:
    """Instants as such, in UTC; nothing of what is empty."""
    found = {
        "id": "t-1",
        "created_us": 1_796_067_740_098_756,
        "settled_us": 0,
        "reason": "",
        "states": ["A", "B"],
        "deliveries": {"DUE": 2},
        "attempts": [1],
        "fence": 0,
    }
    assert pairs(found, without=("attempts",)).splitlines() == [
        "id             t-1",
        "created        2026-11-30 19:42:20 UTC",
        "states         A, B",
        "deliveries     2 DUE",
        "fence          0",
    ]
