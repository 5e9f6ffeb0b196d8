"""Filters say what they mean; cursors are ours, of one question, whole."""

from __future__ import annotations

import base64
import datetime as dt
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.durable.rows import NOW, SECOND, task_row

from millstream_schema.durable import finding
from millstream_schema.durable.finding import Place, TaskFilter, Walk, cursor, matching, place_of, walk_of
from millstream_schema.durable.states import TaskState
from millstream_schema.durable.tokens import Seal
from millstream_schema.errors import ConfigurationError, TokenRefused

T = TaskState
SEAL = Seal("secret-1", "cursor")
FILTER = TaskFilter(states=(T.FAILED, T.UNKNOWN), handler="work", error_class="ValueError")
PLACE = Place(NOW, "task-7")


def moment(us: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=us)


@pytest.mark.parametrize(
    ("f", "changes", "matches"),
    [
        (TaskFilter(), {}, True),
        (TaskFilter(states=(T.FAILED, T.RUNNING)), {}, True),
        (TaskFilter(states=(T.FAILED,)), {}, False),
        (TaskFilter(handler="work", queue="default", business_key="b"), {"business_key": "b"}, True),
        (TaskFilter(business_key="b"), {}, False),
        (TaskFilter(created_from=moment(NOW)), {}, True),
        (TaskFilter(created_from=moment(NOW + 1)), {}, False),
        (TaskFilter(created_until=moment(NOW)), {}, False),
        (TaskFilter(settled_until=moment(NOW + SECOND)), {}, False),
        (TaskFilter(settled_until=moment(NOW + SECOND)), {"settled_us": NOW + 1}, True),
        (TaskFilter(settled_from=moment(NOW + 2)), {"settled_us": NOW + 1}, False),
        (TaskFilter(error_class="ValueError"), {"error_class": "ValueError"}, True),
        (TaskFilter(retry_of="task-0"), {"retry_of": "task-0"}, True),
        (TaskFilter(origin="schedule"), {"origin": "schedule:nightly:3:auto"}, True),
        (TaskFilter(origin="schedule:nightly"), {"origin": "schedule:nightly:3:auto"}, True),
        (TaskFilter(origin="schedule:nightly:"), {"origin": "schedule:nightly"}, True),
        (TaskFilter(origin="schedule:night"), {"origin": "schedule:nightly:3:auto"}, False),
        (TaskFilter(origin="task:a"), {"origin": "task:ab"}, False),
    ],
)  # fmt: skip
def test_a_filter_lets_through_what_has_all_of_it(f: TaskFilter, changes: dict[str, Any], matches: bool) -> None:
    """Ranges are half open; an origin is given by its first parts."""
    assert matching(f)(msgspec.structs.asdict(task_row(T.RUNNING, **changes))) is matches


def test_the_narrowest_index_is_walked() -> None:
    """What is rare has an index of its own."""
    assert walk_of(TaskFilter()) is walk_of(TaskFilter(states=(T.FAILED, T.READY))) is Walk.CREATED
    assert walk_of(TaskFilter(states=(T.FAILED, T.UNKNOWN))) is Walk.AMISS
    assert walk_of(TaskFilter(states=(T.RUNNING,))) is Walk.HELD and Walk.HELD.few
    assert walk_of(TaskFilter(states=(T.FAILED,), business_key="b")) is Walk.BUSINESS
    assert walk_of(TaskFilter(states=(T.FAILED,), business_key="b", retry_of="r")) is Walk.RETRIES


@pytest.mark.parametrize(
    "wrong",
    [
        {"states": ("LOST",)}, {"created_from": dt.datetime(2026, 1, 1)}, {"settled_until": "yesterday"}, {"handler": "x" * 201}, {"queue": "a\x00"},
        {"origin": 5},
    ],
    ids=lambda w: next(iter(w)),
)  # fmt: skip
def test_a_filter_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigurationError, match=next(iter(wrong)) if "states" not in wrong else "no state"):
        TaskFilter(**wrong)


def test_a_cursor_goes_on_for_its_own_question() -> None:
    """The order of states and the zone an instant is given in are no other question."""
    other = dt.timezone(dt.timedelta(hours=2))
    f, same = (
        TaskFilter(states=s, created_from=moment(NOW).astimezone(z))
        for s, z in (((T.FAILED, T.UNKNOWN), dt.UTC), ((T.UNKNOWN, T.FAILED), other))
    )
    assert place_of(SEAL, "default", same, cursor(SEAL, "default", f, PLACE)) == PLACE


@pytest.mark.parametrize(
    "changes",
    [
        {"states": (T.FAILED,)}, {"handler": "other"}, {"queue": "q"}, {"business_key": "b"}, {"created_from": moment(1)}, {"created_until": moment(1)},
        {"settled_from": moment(1)}, {"settled_until": moment(1)}, {"origin": "direct"}, {"error_class": ""}, {"retry_of": "t"},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_a_cursor_is_bound_to_every_filter(changes: dict[str, Any]) -> None:
    """Given with another filter it is refused, whichever differs."""
    with pytest.raises(TokenRefused, match="other filters"):
        place_of(SEAL, "default", msgspec.structs.replace(FILTER, **changes), cursor(SEAL, "default", FILTER, PLACE))


def test_the_parameters_above_name_every_filter() -> None:
    """A new one joins the cursor."""
    assert len(TaskFilter.__struct_fields__) == 11


def test_a_cursor_of_another_namespace_or_installation_is_refused() -> None:
    """So is a token of another purpose."""
    text = cursor(SEAL, "default", FILTER, PLACE)
    with pytest.raises(TokenRefused, match="another namespace"):
        place_of(SEAL, "other", FILTER, text)
    for stranger in (Seal("secret-2", "cursor"), Seal("secret-1", "token")):
        with pytest.raises(TokenRefused, match=r"no (cursor|token) of this installation"):
            place_of(stranger, "default", FILTER, text)
    assert "default" not in base64.urlsafe_b64decode(text + "==").decode("latin-1")


def test_versions_of_cursors() -> None:
    """Version 1 knew fewer filters and goes on where no other is used; older and newer ones are refused by name."""
    plain = TaskFilter(states=(T.FAILED,), handler="work")
    assert place_of(SEAL, "default", plain, cursor(SEAL, "default", plain, PLACE, version=1)) == PLACE
    with pytest.raises(TokenRefused, match=r"version 1.*error_class"):
        place_of(SEAL, "default", FILTER, cursor(SEAL, "default", FILTER, PLACE, version=1))
    with pytest.raises(TokenRefused, match="other filters"):
        place_of(SEAL, "default", TaskFilter(handler="other"), cursor(SEAL, "default", plain, PLACE, version=1))
    for version, said in ((0, "the oldest that is taken is 1"), (3, "upgrade Millstream")):
        text = SEAL.close(finding._Cursor(version, "", "", 1, "x"))
        with pytest.raises(TokenRefused, match=said):
            place_of(SEAL, "default", plain, text)


TEXT = cursor(SEAL, "default", FILTER, PLACE)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@given(st.integers(0, len(TEXT) - 1), st.sampled_from(ALPHABET + "=+/. é\x00"))
def test_any_single_change_of_a_cursor_is_refused(at: int, new: str) -> None:
    """Also one that would decode to the same bytes."""
    changed = TEXT[:at] + new + TEXT[at + 1 :]
    if changed == TEXT:
        return
    with pytest.raises(TokenRefused):
        place_of(SEAL, "default", FILTER, changed)


def test_every_change_of_the_last_character_is_refused() -> None:
    """Its lower bits belong to no byte."""
    for new in set(ALPHABET) - {TEXT[-1]}:
        with pytest.raises(TokenRefused):
            place_of(SEAL, "default", FILTER, TEXT[:-1] + new)


@given(
    st.one_of(
        st.text(max_size=200), st.integers(1, len(TEXT) - 1).map(lambda n: TEXT[:n]), st.text(max_size=3).map(lambda s: TEXT + (s or "A"))
    )
)
def test_anything_else_is_no_cursor(text: str) -> None:
    """Cut, lengthened, or invented."""
    with pytest.raises(TokenRefused):
        place_of(SEAL, "default", FILTER, text)


def test_a_sealed_value_of_another_shape_is_another_versions() -> None:
    """Signed by us and not readable: a message, no crash."""
    with pytest.raises(TokenRefused, match="another version"):
        SEAL.open(SEAL.close(PLACE), finding._Cursor)
