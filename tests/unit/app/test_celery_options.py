"""Celery's calling options and messages, as a durable task takes them: honoured, or refused by name; a malformed message is refused, never an exception of another kind."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import Handlers, TaskInvalid
from millstream.celery_options import HARMLESS, REFUSED, translated
from millstream.celery_tasks import arrived_from
from millstream_schema.durable.requests import Options, decode_arguments
from millstream_schema.errors import ConfigurationError

UTC = dt.UTC
WHEN = dt.datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_option_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    """With what to use instead; and only when it is given."""
    with pytest.raises(TaskInvalid, match=f"^{name}: use instead: "):
        translated({name: "something"})
    assert translated({name: None}).options == Options()


def test_options_that_are_honoured() -> None:
    """Seconds from now until it must have started count from when it is due here."""
    assert translated({"countdown": 10, "expires": 25, "task_id": "k", "queue": "q", "priority": 3}) == translated(
        {"countdown": 10, "expires": 25, "key": "k", "queue": "q", "priority": 3}
    )
    assert translated({"countdown": 10, "expires": 25}).options == Options(delay_s=10, start_by_s=15)
    assert translated({"eta": WHEN, "expires": WHEN}).options == Options(due_at=WHEN, expires_at=WHEN)
    assert translated(dict.fromkeys(HARMLESS, "x")).options == Options()


@pytest.mark.parametrize(
    "wrong",
    [
        {"unheard_of": 1}, {"serializer": "pickle"}, {"task_id": "a", "key": "b"}, {"countdown": 10, "expires": 5}, {"eta": WHEN, "expires": 5},
        {"link": [1], "chord": 2},
    ],
    ids=lambda w: "-".join(w),
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    """All that is wrong is named."""
    with pytest.raises(TaskInvalid) as caught:
        translated(wrong)
    assert all(name in str(caught.value) for name in wrong if name not in ("countdown", "task_id"))


def test_a_handler_without_a_client_says_what_to_do() -> None:
    """Nothing is lost silently."""
    handlers = Handlers()

    @handlers.task(name="h")
    def h() -> None: ...

    with pytest.raises(ConfigurationError, match="bind"):
        h.delay()


HEADERS = {"id": "m1", "task": "add", "origin": "gen7@host"}


def body(*args: Any, embed: dict[str, Any] | None = None, **kwargs: Any) -> bytes:
    return json.dumps([list(args), kwargs, embed or {}]).encode()


def test_a_message_keeps_its_id_arguments_and_times() -> None:
    """Numbers keep exactness: an integer of any size."""
    found = arrived_from(
        {**HEADERS, "eta": "2030-01-01T00:00:00", "expires": "2030-01-01T01:00:00+01:00"}, "application/json", body(10**40, x=1.5)
    )
    assert (found.id, found.handler, found.actor) == ("m1", "add", "celery gen7@host")
    assert decode_arguments(found.arguments) == ([10**40], {"x": 1.5})
    assert found.options == Options(due_at=WHEN, expires_at=WHEN)


@pytest.mark.parametrize("part", ["callbacks", "errbacks", "chain", "chord"])
def test_a_message_that_asks_for_more_is_refused(part: str) -> None:
    """What a durable task cannot continue is not dropped."""
    with pytest.raises(TaskInvalid, match="use instead"):
        arrived_from(HEADERS, "application/json", body(embed={part: [{"task": "x"}]}))


@given(
    headers=st.dictionaries(st.sampled_from(["id", "task", "eta", "expires", "group", "origin"]), st.one_of(st.none(), st.text(), st.integers(), st.lists(st.integers()))),
    content=st.sampled_from(["application/json", "application/x-python-serialize", ""]),
    data=st.one_of(st.binary(), st.text(), st.just(b"[[], {}, {}]"), st.just(b'[{}, [], null]'), st.just(b"[1]"), st.just(b'[["\\ud800"], {}, {}]')),
)  # fmt: skip
def test_a_malformed_message_is_refused_and_nothing_else(headers: dict[str, Any], content: str, data: bytes | str) -> None:
    """Whatever it holds: either it is a request, or TaskInvalid says why not."""
    try:
        found = arrived_from(headers, content, data)
    except TaskInvalid as exc:
        assert str(exc)
    else:
        assert found.id == headers["id"]
