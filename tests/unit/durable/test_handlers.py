"""Handlers: arguments checked against annotations when submitted, names that are taken, permits filled in from arguments."""

from __future__ import annotations

import datetime as dt
import enum
import functools
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

import pydantic
import pytest
from typing_extensions import TypedDict

from millstream.handlers import Handlers
from millstream_schema.durable.records import NewTask, Policy
from millstream_schema.durable.requests import HandlerSpec, Options, decode_arguments
from millstream_schema.durable.states import Effects
from millstream_schema.errors import ConfigurationError, TaskInvalid, UnknownHandler
from millstream_tasks.durable.answers import NotDone
from millstream_tasks.durable.handlers import Handler, HandlerRegistry


class Line(pydantic.BaseModel):
    article: str
    count: int = pydantic.Field(gt=0)


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    number: int


@dataclass
class Address:
    town: str
    code: int = 0


class Choice(TypedDict):
    name: str


def handler(function: Any, **declared: Any) -> Handler:
    return Handler(function, HandlerSpec(name=declared.pop("name", "work"), **declared))


def request(of: Handler, *args: Any, options: Options | None = None, **kwargs: Any) -> NewTask:
    return of.request("default", "task-1", "key", args, kwargs, options or Options(), actor="", origin="direct")


def stored(of: Handler, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """What a submission writes."""
    return decode_arguments(request(of, *args, **kwargs).args)


def run(of: Handler, *args: Any, **kwargs: Any) -> Any:
    """What the function returns for what a submission wrote."""
    positional, named = of.decode(*stored(of, *args, **kwargs))
    return of.function(*positional, **named)


# -- annotations


def test_what_fits_its_annotation_comes_to_the_function_as_that_type() -> None:
    """Models and dataclasses are stored as plain values and made again."""

    def work(number: int, price: Decimal, at: dt.datetime, line: Line, lines: list[Line], home: Address, choice: Choice) -> Any:
        return number, price, at, line, lines, home, choice

    one = handler(work)
    at = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    given = (10**30, Decimal("1.10"), at, Line(article="a", count=2), [Line(article="b", count=1)], Address("Ulm", 7), {"name": "n"})
    assert run(one, *given) == given
    args, _ = stored(one, *given)
    assert args[3:6] == [{"article": "a", "count": 2}, [{"article": "b", "count": 1}], {"town": "Ulm", "code": 7}]
    assert type(args[1]) is Decimal and type(args[2]) is dt.datetime


def test_every_argument_that_does_not_fit_is_named_at_once() -> None:
    """With why, and without its value, which may be secret."""

    def work(number: int, kind: Literal["a", "b"], line: Line, share: Annotated[float, pydantic.Field(le=1)]) -> None: ...

    with pytest.raises(TaskInvalid) as caught:
        request(handler(work), "s3cret", "s3cret", {"article": "s3cret", "count": -5}, share=7)
    said = str(caught.value)
    assert "'work'" in said and "s3cret" not in said and "-5" not in said
    for name in ("number", "kind", "line", "share"):
        assert f"{name}: " in said


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [((), {}, "missing"), ((1, 2, 3), {}, "too many"), ((1,), {"unknown": 2}, "unexpected"), ((1,), {"a": 1}, "multiple values")],
)
def test_arguments_that_no_call_could_have_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any], said: str) -> None:
    """As Python would refuse the call, but when it is submitted."""

    def work(a: int, b: int = 0) -> None: ...

    with pytest.raises(TaskInvalid, match=said):
        request(handler(work), *args, **kwargs)


def test_a_models_own_configuration_is_kept() -> None:
    """Strict stays strict."""

    def work(one: Strict) -> int:
        return one.number

    assert run(handler(work), {"number": 1}) == 1
    for wrong in ({"number": "1"}, {"number": 1, "more": 2}):
        with pytest.raises(TaskInvalid, match="one: "):
            request(handler(work), wrong)


def test_what_has_no_annotation_is_taken_as_it_is() -> None:
    """With its exact type."""

    def work(a, *rest, b=None, **more):  # type: ignore[no-untyped-def]
        return a, rest, b, more

    assert run(handler(work), (1,), {2}, b=b"x", c=Decimal(1)) == ((1,), ({2},), b"x", {"c": Decimal(1)})


def test_a_default_is_the_functions_own_when_it_runs() -> None:
    """It is not written into the request: a new default holds for tasks that wait, and is not in the digest."""

    def work(a: int, b: int = 1) -> int:
        return a + b

    assert stored(handler(work), 1) == ([1], {})
    assert run(handler(work), 1) == 2
    assert request(handler(work), 1).digest != request(handler(work), 1, 1).digest


def test_one_argument_by_name_or_by_place_is_one_request() -> None:
    """The digest is of what arrives."""

    def work(a: int, b: int) -> None: ...

    one = handler(work)
    assert request(one, 1, 2).digest == request(one, 1, b=2).digest == request(one, b=2, a=1).digest == request(one, "1", 2.0).digest


def test_a_function_that_has_changed_says_so() -> None:
    """What was submitted for the old one is refused in a sentence, by its type or by its place."""

    def before(a: int, b: int) -> None: ...

    def fewer(a: int) -> None: ...

    def other(a: int, b: Line) -> None: ...

    for after in (fewer, other):
        with pytest.raises(TaskInvalid, match="does not take the arguments it was submitted with"):
            handler(after).decode(*stored(handler(before), 1, 2))


def test_an_annotation_that_cannot_be_resolved_is_refused_when_it_is_registered() -> None:
    """Not when the first task comes."""

    def work(a: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigurationError, match="NoSuchType"):
        handler(work)


# -- the context


def test_the_context_is_no_argument() -> None:
    """A first parameter called ctx is filled by the worker, and by nobody else."""

    def work(ctx: Any, a: int) -> None: ...

    def plain(a: int, ctx: int) -> None: ...

    one = handler(work)
    assert one.wants_context and not handler(plain).wants_context
    assert stored(one, 5) == ([5], {}) and one.decode([5], {}) == ((5,), {})
    assert stored(handler(plain), 5, ctx=6) == ([5, 6], {})
    with pytest.raises(TaskInvalid):
        request(one, 5, ctx=1)


def test_a_registered_function_can_still_be_called() -> None:
    """As if it were not."""

    def double(a: int) -> int:
        return 2 * a

    assert Handlers().task(name="double")(double)(4) == 8


# -- permits


def test_a_permit_is_filled_in_from_the_arguments() -> None:
    """By place or by name; what is given in the options wins."""

    def work(account: int, town: str = "") -> None: ...

    one = handler(work, permit="account:{account}", ordered=True)
    assert request(one, 7).permit == request(one, account=7).permit == "account:7"
    assert request(one, 7).ordered
    assert request(one, 7, options=Options(permit="mine")).permit == "mine"


@pytest.mark.parametrize("template", ["{account.x}", "{account[0]}", "{account:%Q}", "{town}"])
def test_a_permit_that_cannot_be_filled_in_is_refused(template: str) -> None:
    """A task without the permit that its author asked for must not come in."""

    def work(account: int, town: str = "") -> None: ...

    with pytest.raises(TaskInvalid, match="permit"):
        request(handler(work, permit=template), 7)


@pytest.mark.parametrize("template", ["{nobody}", "{}", "{0}", "{ctx}", "{", "account:{account}/{nobody.x}"])
def test_a_permit_that_no_submission_could_fill_in_is_refused_when_it_is_registered(template: str) -> None:
    """Not with the first task, in production."""

    def work(ctx: Any, account: int) -> None: ...

    with pytest.raises(ConfigurationError, match="permit"):
        Handlers().task(name="w", permit=template)(work)


def test_a_permit_that_grows_too_long_is_named() -> None:
    """It is part of a key."""

    def work(name: str) -> None: ...

    with pytest.raises(TaskInvalid, match="permit must"):
        request(handler(work, permit="{name}"), "x" * 201)


# -- names


def test_a_name_is_taken_by_one_function() -> None:
    """The same function may come again, as when a module is imported twice by one object; another may not."""
    registry = HandlerRegistry()

    def one() -> None: ...

    def two() -> None: ...

    registry.add(handler(one, name="a"))
    registry.add(handler(one, name="a"))
    with pytest.raises(ConfigurationError, match="two handlers are named 'a'"):
        registry.add(handler(two, name="a"))
    registry.add(handler(two, name="b"))
    assert registry.names() == ("a", "b") and registry.get("a").function is one


def test_an_unknown_name_says_which_are_known() -> None:
    """And nothing is looked up outside the registry."""
    registry = HandlerRegistry()
    with pytest.raises(UnknownHandler, match="registered: none"):
        registry.get("os.system")
    registry.add(handler(print, name="shown"))
    with pytest.raises(UnknownHandler, match="registered: shown"):
        registry.get("os.system")


def test_undeclared_effects_are_external_with_one_attempt() -> None:
    """What nobody has thought about is not repeated."""
    handlers = Handlers()

    def work() -> None: ...

    undeclared = handlers.task(name="undeclared")(work)
    declared = handlers.task(name="declared", effects="idempotent")(work)

    assert (undeclared.spec.effects, undeclared.spec.policy.attempts) == (Effects.EXTERNAL, 1)
    assert (declared.spec.effects, declared.spec.policy.attempts) == (Effects.IDEMPOTENT, 5)
    assert handlers.registry.names() == ("declared", "undeclared")


def test_a_function_without_a_name_of_its_own_is_asked_for_one() -> None:
    """Its module and qualified name are its name, if a table can hold them; a local function's cannot."""
    handlers = Handlers()
    assert handlers.task(Address).spec.name.endswith(".Address")
    with pytest.raises(ConfigurationError, match="give name="):
        handlers.task(lambda: None)


def test_an_annotation_that_cannot_be_checked_is_refused_when_it_is_registered() -> None:
    """By the handler's name."""

    class Connection:
        """Nothing that could be sent."""

    def work(a: Connection) -> None: ...

    def plain(a: Annotated[Line, "noted"]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'work'.*Connection"):
        handler(work)
    assert stored(handler(plain), Line(article="a", count=1)) == ([{"article": "a", "count": 1}], {})


async def asks_later(intent: Any) -> None:
    """Nobody would await it."""


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("name", {"name": "a b"}), ("queue", {"queue": "a/b"}), ("effects", {"effects": "none"}), ("attempts", {"attempts": 0}), ("attempts", {"attempts": 2.5}),
        ("capacity", {"capacity": 1.5}), ("capacity", {"capacity": 2**31}), ("attempts", {"attempts": 10**9}),
        ("delay", {"delay": -1}), ("delay", {"delay": 10, "max_delay": 5}), ("max_delay", {"max_delay": 10**9}), ("delay", {"delay": float("nan")}),
        ("capacity", {"capacity": 0}), ("ordered", {"ordered": True}), ("jitter", {"jitter": 1.5}), ("run", {"run": -1}), ("run", {"run": float("inf")}),
        ("grace", {"grace": -1}), ("heartbeat", {"heartbeat": 1}), ("start_by", {"start_by": "1"}), ("deadline", {"deadline": -5}), ("crashes", {"crashes": 0}),
        ("losses", {"losses": True}), ("snoozes", {"snoozes": -1}), ("intents_only", {"intents_only": True, "effects": "idempotent"}),
        ("reconcile", {"reconcile": "charge"}), ("reconcile", {"reconcile": asks_later}),
        ("retry_on", {"retry_on": "ValueError"}), ("no_retry_on", {"no_retry_on": (ValueError, int)}),
    ],
)  # fmt: skip
def test_a_bad_declaration_is_named(said: str, options: dict[str, Any]) -> None:
    """When the module is imported."""
    handlers = Handlers()

    def work() -> None: ...

    with pytest.raises(ConfigurationError, match=said):
        handlers.task(**options)(work)
    assert handlers.registry.names() == ()


def test_an_option_that_does_not_exist_is_refused() -> None:
    """A slip of the pen is not a limit that does not hold."""
    options: dict[str, Any] = {"retries": 3}
    with pytest.raises(ConfigurationError, match="retries is not an option of a handler"):
        Handlers().task(**options)


def test_celerys_options_and_calls_are_refused_with_what_to_write_instead() -> None:
    """Whoever brings a task over brings its decorator along, and the places that call it."""
    wrong: Any = Handlers().task
    with pytest.raises(ConfigurationError, match=r"bind: use instead: .* ctx.*; max_retries: use instead: attempts="):
        wrong(bind=True, max_retries=3)
    with pytest.raises(ConfigurationError, match=r"name='shop\.pay'"):
        wrong("shop.pay")
    with pytest.raises(AttributeError, match=r"no si: use instead: .*ctx\.submit"):
        _ = Handlers().task(name="w")(lambda: None).si
    assert not hasattr(Handlers().task(name="w")(lambda: None), "no_such_thing")


def test_limits_go_with_each_task_and_a_submission_may_set_its_own_times() -> None:
    """As they were when it was submitted; what the handler says of times holds where the submission says nothing."""
    handlers = Handlers()

    @handlers.task(
        name="w",
        run=1.5,
        grace=2,
        heartbeat=4,
        crashes=5,
        losses=6,
        snoozes=0,
        jitter=0.5,
        intents_only=True,
        reconcile=lambda intent: NotDone(),
        start_by=60,
        deadline=3600,
        retry_on=OSError,
    )
    def work() -> None: ...

    new = request(work)
    assert new.policy == Policy(
        attempts=5, run_ms=1500, grace_ms=2000, heartbeat_ms=4000, crashes=5, losses=6, snoozes=0, jitter=0.5, start_by_ms=60_000, deadline_ms=3_600_000,
        intents_only=True, reconciles=True,
    )  # fmt: skip
    assert (new.start_by_us, new.deadline_us) == (60_000_000, 3_600_000_000)
    own = request(work, options=Options(start_by_s=1, deadline_s=2))
    assert (own.start_by_us, own.deadline_us) == (1_000_000, 2_000_000)
    by = request(work, options=Options(expires_at=dt.datetime(2030, 1, 1, tzinfo=dt.UTC)))
    assert (by.start_by_us, by.expires_us > 0) == (0, True)
    assert new.digest == request(work).digest, "defaults are no part of it"
    assert work.retries(ConnectionError()) and not work.retries(ValueError())


@pytest.mark.parametrize("databases", [{"a b": "sqlite:///x"}, {"orders": 7}, {"": "sqlite:///x"}], ids=["name", "source", "empty"])
def test_a_database_needs_a_name_and_a_source(databases: dict[str, Any]) -> None:
    """When the module is imported."""
    with pytest.raises(ConfigurationError, match="databases"):
        Handlers(databases=databases)


def test_celerys_options_given_to_submit_are_named_by_what_they_are_here() -> None:
    """``submit`` hands on to the function what it does not know."""
    with pytest.raises(TaskInvalid, match=r"unexpected keyword argument 'countdown'; delay= of submit is what Celery calls countdown"):
        request(handler(lambda number: None), 7, countdown=5)


def test_a_function_that_cannot_be_run_as_it_is_is_refused() -> None:
    """A generator would succeed without a line of it run; a method has no object, and Celery's bound task is no argument."""

    def lines(number: int) -> Any:
        yield number

    def bound(self: Any, number: int) -> None: ...

    for function, said in ((lines, "generator"), (bound, "name it ctx")):
        with pytest.raises(ConfigurationError, match=said):
            Handlers().task(name="w")(function)


def test_a_wrapped_function_keeps_its_signature() -> None:
    """A decorator of the user's own does not hide the arguments."""

    def loud(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    @loud
    def work(a: int) -> int:
        return a

    assert run(handler(work), "3") == 3
    with pytest.raises(TaskInvalid):
        request(handler(work), 1, 2)


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    ONE = 1


class Paint(pydantic.BaseModel):
    colour: Colour


def asked(function: Any, *args: Any) -> NewTask:
    return handler(function).request("default", "t", "k", args, {}, Options(), actor="", origin="direct")


def test_a_member_of_an_enum_is_the_same_argument_as_its_value() -> None:
    """One digest, whichever is given, also within lists and models; the handler gets the member."""

    def paint(colour: Colour, sizes: list[Size], by: dict[Size, tuple[Colour, int]], paint: Paint) -> None: ...

    members = asked(paint, Colour.RED, [Size.ONE], {Size.ONE: (Colour.RED, 1)}, Paint(colour=Colour.RED))
    values = asked(paint, "red", [1], {1: ("red", 1)}, {"colour": "red"})
    assert (members.args, members.digest) == (values.args, values.digest)
    got, _ = handler(paint).decode(*decode_arguments(members.args))
    assert got == (Colour.RED, [Size.ONE], {Size.ONE: (Colour.RED, 1)}, Paint(colour=Colour.RED)) and type(got[1][0]) is Size


def test_a_member_of_an_enum_that_would_not_come_back_as_one_is_refused() -> None:
    """Where the annotation does not say that it is one."""

    def anything(value: Any) -> None: ...

    def either(value: Colour | str) -> None: ...

    for function, value in ((anything, Colour.RED), (anything, [Size.ONE]), (either, Colour.RED)):
        with pytest.raises(TaskInvalid, match="cannot be stored"):
            asked(function, value)
