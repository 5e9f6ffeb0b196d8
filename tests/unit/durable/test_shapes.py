"""Handlers by name: from what a worker tells, the same request is built as from the function itself, with the same digest."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import inspect
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

import millstream.tasks
from millstream.handlers import Handlers
from millstream_schema.durable.catalogue import HandlerEntry, Served, current
from millstream_schema.durable.records import NewTask
from millstream_schema.durable.requests import OPTION_NAMES, HandlerSpec, Options
from millstream_schema.durable.states import Effects
from millstream_schema.errors import ConfigurationError, TaskInvalid
from millstream_tasks.durable.context import TaskContext
from millstream_tasks.durable.handlers import Form, Handler, form_of
from millstream_tasks.durable.shapes import OPAQUE


class Line(pydantic.BaseModel):
    article: str
    count: int = pydantic.Field(1, gt=0)
    when: dt.datetime = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    note: str | None = None


class Shadowing(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    f0: int
    lines: list[Line] = []


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(alias="no")


class Computed(pydantic.BaseModel):
    a: int

    @pydantic.computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def twice(self) -> int:
        return self.a * 2


class Made(pydantic.BaseModel):
    items: list[int] = pydantic.Field(default_factory=lambda: [7])


class Tree(pydantic.BaseModel):
    name: str
    below: list[Tree] = []


@dataclass
class Address:
    town: str
    code: int = 0
    tags: set[str] = field(default_factory=set)


@dataclass
class Point:
    x: float
    y: float = 1


class Colour(enum.Enum):
    RED = "red"


def upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def made(annotation: Any) -> Handler:
    def work(value: Any) -> None: ...

    work.__annotations__["value"] = annotation
    return Handler(work, HandlerSpec(name="work"))


def by_name(of: Handler) -> Form:
    """As a client makes it that read the row a worker wrote."""
    return form_of(msgspec.json.decode(msgspec.json.encode(of.entry()), type=HandlerEntry))


def request(of: Form, *args: Any, **kwargs: Any) -> NewTask | str:
    try:
        return of.request("default", "task-1", "key", args, kwargs, Options(), actor="", origin="direct")
    except TaskInvalid as exc:
        return str(exc)


UUID = "12345678-1234-5678-1234-567812345678"
ALIKE: dict[str, tuple[Any, list[Any]]] = {
    "int": (int, [5, "5", 5.0, True, 2**80, "x", None, 5.5]),
    "bounded": (Annotated[int, pydantic.Field(gt=3, le=9, multiple_of=2)], [4, 3, 10, 5]),
    "strict": (Annotated[int, pydantic.Field(strict=True)], [5, "5"]),
    "float": (float, [1, "1.5", float("inf"), "x"]),
    "bool": (bool, ["yes", 1, 5]),
    "str": (Annotated[str, pydantic.Field(pattern="^a+$", max_length=3)], ["aa", "b", "aaaa", 1]),
    "bytes": (bytes, ["aé", b"\x00"]),
    "decimal": (decimal.Decimal, ["1.50", 3, 2.5, decimal.Decimal("0.1"), "NaN"]),
    "datetime": (dt.datetime, ["2026-01-01T00:00:00Z", 4, dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "x"]),
    "aware": (pydantic.AwareDatetime, ["2026-01-01T00:00:00", "2026-01-01T00:00:00+02:00"]),
    "date": (dt.date, ["2026-01-01", "x"]),
    "timedelta": (dt.timedelta, [5, "PT3S"]),
    "uuid": (uuid.UUID, [UUID, uuid.UUID(UUID), "x"]),
    "literal": (Literal[1, "a"], [1, "a", 2]),
    "optional": (int | None, ["5", None, "x"]),
    "union": (int | str, ["5", 5, 5.5]),
    "list": (Annotated[list[int], pydantic.Field(min_length=2)], [[1], ["1", 2], (1, 2)]),
    "set": (set[int], [["1", 1], {2, 3}]),
    "pair": (tuple[int, str], [[1, "x"], [1], ("2", "y")]),
    "many": (tuple[int, ...], [[1, "2"], []]),
    "dict": (dict[int, list[dt.date]], [{"1": ["2026-01-01"]}, {"x": []}]),
    "model": (Line, [{"article": "a"}, {"article": "a", "count": 0}, {"article": "a", "count": "2", "more": 1}, {"count": 1}]),
    "nested": (Shadowing, [{"f0": "4"}, {"f0": 1, "zz": 1}, {"f0": 1, "lines": [{"article": "a"}]}]),
    "dataclass": (Point, [{"x": 1}, {"x": 1, "y": 2}, {"y": 2}]),
    "either": (Point | Line, [{"article": "a"}, {"x": 1}, {}]),
    "anything": (Any, [1, "x", [1, {"a": None}]]),
    "optional model": (Line | None, [{"article": "a"}, None]),
}


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_a_request_by_name_is_the_one_by_object(name: str) -> None:
    """Same stored arguments, same digest; what is refused is refused with the same words."""
    annotation, values = ALIKE[name]
    here = made(annotation)
    there = by_name(here)
    assert OPAQUE not in here.entry().parameters
    for value in values:
        assert request(there, value) == request(here, value), value


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        pytest.param(Annotated[str, pydantic.BeforeValidator(upper)], "x", id="validator"),
        pytest.param(Aliased, {"no": 1}, id="alias"),
        pytest.param(Computed, {"a": 1}, id="computed"),
        pytest.param(Made, {}, id="factory"),
        pytest.param(Address, {"town": "t"}, id="dataclass factory"),
        pytest.param(Colour, "red", id="enum"),
        pytest.param(Callable[[], None], "x", id="no schema"),
    ],
)
def test_what_runs_code_of_its_own_is_taken_as_given(annotation: Any, value: Any) -> None:
    """The worker checks it when the task runs: a client without the code cannot."""
    there = by_name(made(annotation))
    plain = by_name(made(Any))
    taken, same = request(there, value), request(plain, value)
    assert isinstance(taken, NewTask) and isinstance(same, NewTask) and taken.args == same.args


def test_a_type_that_holds_itself_is_checked_once_and_taken_as_given_below() -> None:
    """Nothing loops."""
    there = by_name(made(Tree))
    assert isinstance(request(there, {"name": "a", "below": [{"name": "b"}]}), NewTask)
    assert "name" in str(request(there, {"below": []})) or "required" in str(request(there, {"below": []}))


def test_the_signature_comes_along() -> None:
    """Positional, named, defaults, rests, and the permit's places."""

    def work(a: int, /, b: str, *more: int, c: float = 1.0, **rest: str) -> None: ...

    here = Handler(work, HandlerSpec(name="work", queue="q", effects=Effects.IDEMPOTENT, permit="{b}"))
    there = by_name(here)
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((1, "x"), {}), ((1,), {"b": "x"}), ((), {"a": 1, "b": "x"}), ((1, "x", 2, 3), {"c": "2", "z": "w"}), ((1,), {}), ((), {}),
    ]  # fmt: skip
    for args, kwargs in given:
        assert request(there, *args, **kwargs) == request(here, *args, **kwargs)
    assert there.spec == here.spec


def test_an_entrys_version_changes_with_all_that_is_declared_and_with_nothing_else() -> None:
    """Two workers of one program tell the same."""
    versions = [
        Handler(lambda a: a, HandlerSpec(name="work")).entry().version,
        Handler(lambda a, b=1: a, HandlerSpec(name="work")).entry().version,
        Handler(lambda a: a, HandlerSpec(name="work", queue="q")).entry().version,
        Handler(lambda a: a, HandlerSpec(name="work", permit="p")).entry().version,
        made(int).entry().version,
    ]
    assert len(set(versions)) == len(versions)
    assert made(Line).entry() == made(Line).entry()


def told(version: str, since: int, seen: int) -> HandlerEntry:
    return msgspec.structs.replace(made(int).entry(), version=version, since_us=since, seen_us=seen)


def test_of_two_versions_the_newest_that_is_served_counts() -> None:
    """Also after a roll-back, when nobody serves the newest any more; and of what nobody serves the one seen last."""
    old, new = told("old", 1, 10), told("new", 2, 5)
    serving_old, serving_new = Served(("q",), {"work": "old"}), Served(("q",), {"work": "new"})
    assert current([old, new], [serving_old, serving_new]) == new
    assert current([old, new], [serving_old]) == old
    assert current([old, new], [Served(("q",), {"other": "new"})]) == old
    assert current([], [serving_new]) is None


def test_a_parameter_named_like_an_option_is_refused_at_registration() -> None:
    """It would be swallowed by submit(); who declares it submits with arguments and options apart. A positional-only one cannot be meant."""
    handlers = Handlers()

    with pytest.raises(ConfigurationError, match=r"key, queue.*option_names=True.*submit_with"):

        @handlers.task(name="one")
        def one(key: str, queue: str) -> None: ...

    @handlers.task(name="two", option_names=True)
    def two(key: str) -> None: ...

    @handlers.task(name="three")
    def three(key: str, /) -> None: ...

    assert two.taken_names == ("key",) and three.taken_names == () and by_name(two).taken_names == ("key",)
    assert handlers.registry.names() == ("three", "two")


@pytest.mark.parametrize(
    "function",
    [millstream.tasks.Tasks.submit, millstream.tasks.Tasks.submit_with, TaskContext.submit],
    ids=["submit", "submit_with", "ctx"],
)
def test_every_option_of_submit_is_a_name_that_is_watched(function: Any) -> None:
    """A further option that is not in the list would swallow an argument."""
    named = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert {p.name for p in named} <= OPTION_NAMES
