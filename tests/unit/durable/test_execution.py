"""One attempt: every way a handler can end becomes an outcome that can be written, and nothing gets past."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pydantic
import pytest
from tests.unit.durable.rows import task_row

from millstream.testing.world import Faults, SimClock, SimIds, World
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.decisions import LONGEST_RETRY_US
from millstream_schema.durable.progress import Told
from millstream_schema.durable.records import NewTask, Policy, TaskRow
from millstream_schema.durable.requests import HandlerSpec, Options, decode_arguments, decode_result, encode_arguments
from millstream_schema.errors import TaskInvalid, UnknownHandler
from millstream_schema.ports import Clock, SystemClock
from millstream_tasks.durable.context import TaskContext
from millstream_tasks.durable.databases import HandlerDatabases
from millstream_tasks.durable.execution import execute
from millstream_tasks.durable.handlers import Handler, HandlerRegistry
from millstream_tasks.durable.progress import Telling
from millstream_tasks.durable.surroundings import Surroundings
from millstream_tasks.durable.threads import ThreadPool
from millstream_tasks.durable.verbs import Cancel, Fail, NeedsReview, Retry, Snooze


def ids() -> SimIds:
    return SimIds(World(0, Faults()))


def around(told: Callable[[], bool] = lambda: False, clock: Clock | None = None) -> Surroundings:
    return Surroundings(
        ids=ids(), clock=clock or SystemClock(), told=told, databases=no_databases(), committed=lambda: None, wait=lambda _: None,
        telling=Telling(SystemClock(), lambda _: None), raised=lambda _: None, known=lambda _intent, _call: None,
    )  # fmt: skip


def no_databases() -> HandlerDatabases:
    return HandlerDatabases("sqlite://", "millstream_", 1000, SystemClock(), {})


def registry(function: Callable[..., Any] | None = None, **others: Callable[..., Any]) -> HandlerRegistry:
    found = HandlerRegistry()
    own = {"work": function} if function else {}
    for name, one in {**own, **others}.items():
        found.add(Handler(one, HandlerSpec(name=name)))
    return found


def attempt(*args: Any, **changes: Any) -> TaskRow:
    return task_row(args=encode_arguments(args, {}), **changes)


def ended(function: Callable[..., Any], *args: Any, **changes: Any) -> o.Reported:
    outcome, submits = execute(attempt(*args, **changes), registry(function), around())
    assert submits == ()
    writable(outcome)
    return outcome


def writable(outcome: o.Reported) -> None:
    """It crosses a pipe and fits a text column of every database."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=o.Reported) == outcome
    for value in msgspec.structs.asdict(outcome).values():
        if isinstance(value, str):
            assert "\x00" not in value and value.encode().decode() == value and len(value) <= 300_000


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


# -- verbs


VERBS: list[tuple[BaseException, o.Reported]] = [
    (Retry("later", after=1.5), o.RetryAsked(1_500_000, "later")),
    (Retry(), o.RetryAsked(None, "")),
    (Retry(after=0), o.RetryAsked(0, "")),
    (Snooze(2.5), o.Snoozed(2_500_000)),
    (Fail("no such account"), o.GaveUp("no such account")),
    (Cancel("not wanted any more"), o.CancelledItself("not wanted any more")),
    (NeedsReview("two invoices"), o.AskedForReview("two invoices")),
    (NeedsReview("two invoices", {"of": 7}), o.AskedForReview("two invoices: {'of': 7}")),
]


@pytest.mark.parametrize(("error", "outcome"), VERBS, ids=lambda v: type(v).__name__)
def test_each_verb_is_its_outcome(error: BaseException, outcome: o.Reported) -> None:
    """With what was said."""
    assert ended(raising(error)) == outcome


def test_what_is_returned_is_the_result() -> None:
    """With its exact type; nothing is a result, too."""
    found = ended(lambda a: (a, {b"x"}), 10**30)
    assert isinstance(found, o.Succeeded) and decode_result(found.result) == (10**30, {b"x"})
    nothing = ended(lambda: None)
    assert isinstance(nothing, o.Succeeded) and decode_result(nothing.result) is None


@pytest.mark.parametrize(
    "error",
    [
        Retry(after=math.nan), Retry(after=math.inf), Retry(after=-math.inf), Retry(after="5"), Retry(after=object()),  # type: ignore[arg-type]
        Snooze(math.nan), Snooze(math.inf), Snooze("5"), Snooze(None),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_verb_that_says_no_number_is_an_error_of_the_handler(error: BaseException) -> None:
    """A named one, by policy; it does not end the thread that runs handlers."""
    found = ended(raising(error))
    assert isinstance(found, o.Raised) and type(error).__name__ in found.message


def test_an_absurd_pause_is_still_an_outcome() -> None:
    """Cut to what can be sent and stored."""
    assert ended(raising(Retry(after=1e300))) == o.RetryAsked(LONGEST_RETRY_US)
    assert ended(raising(Snooze(10**40))) == o.Snoozed(LONGEST_RETRY_US)
    below = ended(raising(Snooze(-1e300)))
    assert isinstance(below, o.Snoozed) and below.for_us <= 0


# -- exceptions


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no")


ERRORS = [
    ValueError("wrong"), KeyError("k"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(), MemoryError(), RecursionError("deep"),
    BaseExceptionGroup("many", [ValueError("a"), SystemExit()]), AssertionError(), Unspeakable(), ValueError("nul \x00 in it"), OSError("file \udc80.txt"),
    ValueError("x" * 10_000_000), UnknownHandler("of another"), TimeoutError(),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_whatever_is_raised_is_an_outcome_that_can_be_written(error: BaseException) -> None:
    """Of the error's own name; no text of it can hold up the writing of other ends."""
    found = ended(raising(error))
    assert isinstance(found, o.Raised) and found.error == type(error).__name__
    assert found.retryable
    assert "work" in found.message, "it says where"


@pytest.mark.parametrize("verb", [Fail, Cancel, NeedsReview, Retry])
@pytest.mark.parametrize("text", ["nul \x00", "half \ud800", "x" * 10_000_000], ids=["nul", "half", "long"])
def test_whatever_a_verb_says_can_be_written(verb: type[Exception], text: str) -> None:
    """As with any exception."""
    assert type(ended(raising(verb(text)))) is type(ended(raising(verb("plain"))))


def test_an_error_says_where_it_was_raised() -> None:
    """In the handler's own code, at its line."""

    def deeper() -> None:
        raise ValueError("here")

    def work() -> None:
        deeper()

    found = ended(work)
    assert (
        isinstance(found, o.Raised)
        and found.message == f"here (at deeper, durable/test_execution.py line {deeper.__code__.co_firstlineno + 1})"
    )


def test_an_error_out_of_a_library_says_who_called_it_too_and_its_traceback_is_told() -> None:
    """``raw_decode, line 353`` alone helps nobody; a verb is no error."""

    def work() -> None:
        json.loads("{")

    heard: list[BaseException] = []
    raised, gave_up = (
        execute(attempt(), registry(function), dataclasses.replace(around(), raised=heard.append))[0]
        for function in (work, raising(Fail("no")))
    )
    assert isinstance(raised, o.Raised) and isinstance(gave_up, o.GaveUp)
    assert (
        f"called by work, durable/test_execution.py line {work.__code__.co_firstlineno + 1})" in raised.message
        and "json/decoder.py line" in raised.message
    )
    assert [type(e) for e in heard] == [json.JSONDecodeError]


# -- what cannot run or cannot be stored


def test_an_unknown_handler_is_unstarted() -> None:
    """Nothing was done: somebody else may know it."""
    assert execute(attempt(), registry(other=print), around()) == (o.Unstarted(), ())


@pytest.mark.parametrize("args", ["", "[]", "nonsense", '[[],[["l"],["r",0]]]', '[["gone"],[["l"],["k"]]]', encode_arguments((1, 2), {})])
def test_arguments_that_cannot_be_read_or_taken_end_it_for_good(args: str) -> None:
    """The same at every attempt, so there is only one."""
    called = []
    outcome, _ = execute(task_row(args=args), registry(lambda a: called.append(a)), around())
    assert isinstance(outcome, o.GaveUp) and outcome.message and not called


def broken(_value: Any) -> Any:
    raise RuntimeError("the validator's own")


def test_a_validator_of_the_users_that_breaks_is_an_error_of_the_handler() -> None:
    """It is user code like the handler."""

    def work(one: Annotated[int, pydantic.AfterValidator(broken)]) -> None: ...

    found = ended(work, 1)
    assert isinstance(found, o.Raised) and (found.error, "the validator's own" in found.message) == ("RuntimeError", True)


@pytest.mark.parametrize(
    "value", [object(), iter(()), "x" * 300_000, type("T", (), {})()], ids=["object", "iterator", "large", "own class"]
)
def test_a_result_that_cannot_be_stored_is_unfit(value: Any) -> None:
    """The work is done, and doing it again would give the same: never tried again, and nothing it submitted comes in."""

    def work(ctx: TaskContext) -> Any:
        ctx.submit("next")
        return value

    outcome, submits = execute(attempt(), registry(work, next=print), around())
    assert isinstance(outcome, o.Unfit) and "result" in outcome.message and submits == ()
    writable(outcome)


@pytest.mark.parametrize("handler, argument, said", [("next", object(), "builtins.object"), ("nxet", 1, "nxet")])
def test_what_it_submits_and_cannot_be_stored_ends_it_for_good(handler: str, argument: object, said: str) -> None:
    """It would be the same at every attempt: FAILED with cause ``result``, not tried again."""

    def work(ctx: TaskContext) -> None:
        ctx.submit(handler, argument)

    outcome, submits = execute(attempt(), registry(work, next=lambda a: a), around())
    assert isinstance(outcome, o.Unfit) and said in outcome.message and submits == ()


# -- what its author declared


class Fatal(ValueError):
    """A kind of its own."""


@pytest.mark.parametrize(
    ("declared", "error", "retryable"),
    [
        ({}, ValueError(), True),
        ({"retry_on": (OSError, ValueError)}, ValueError(), True),
        ({"retry_on": (OSError,)}, ValueError(), False),
        ({"no_retry_on": (ValueError,)}, ValueError(), False),
        ({"no_retry_on": (Fatal,)}, ValueError(), True),
        ({"retry_on": (ValueError,), "no_retry_on": (Fatal,)}, Fatal(), False),
        ({"retry_on": (ValueError,)}, SystemExit(), False),
    ],
    ids=["all", "named", "not named", "excluded", "another excluded", "excluded of named", "exit"],
)
def test_which_errors_are_tried_again(declared: dict[str, Any], error: BaseException, retryable: bool) -> None:
    """By their class, subclasses with it; the verbs are not concerned."""

    def of(raised: BaseException) -> o.Reported:
        found = HandlerRegistry()
        found.add(Handler(raising(raised), HandlerSpec(name="work"), **declared))
        return execute(attempt(), found, around())[0]

    outcome = of(error)
    assert isinstance(outcome, o.Raised) and outcome.retryable is retryable
    assert isinstance(of(Retry()), o.RetryAsked)


def limited(run_ms: int, work: Callable[..., Any], told: bool = False) -> tuple[o.Reported, World]:
    world = World(0, Faults())
    found = registry(work)
    policy = msgspec.json.encode(Policy(run_ms=run_ms)).decode()

    def tick() -> bool:
        world.now += 1.0  # each look takes a second
        return told

    return execute(attempt(policy=policy), found, around(tick, SimClock(world)))[0], world


def test_an_attempt_is_told_when_its_time_is_over() -> None:
    """``ctx.time_left`` counts down, ``ctx.cancelled`` says so from then on; obeying it is a failed attempt, not the wish of somebody who cancels."""
    seen: list[tuple[bool, float | None]] = []

    def work(ctx: TaskContext) -> None:
        while not ctx.cancelled:
            seen.append((ctx.overdue, ctx.time_left))
        seen.append((ctx.overdue, ctx.time_left))
        raise Cancel("in time")

    assert limited(2500, work)[0] == o.Overran("in time")
    assert seen == [(False, 1.5), (False, 0.5), (True, 0.0)]
    assert limited(2500, work, told=True)[0] == o.CancelledItself("in time")


def test_without_a_limit_there_is_no_end_of_time() -> None:
    """None, and not told."""

    def work(ctx: TaskContext) -> list[Any]:
        return [ctx.time_left, ctx.overdue, ctx.cancelled]

    assert decode_result(limited(0, work)[0].result) == [None, False, False]  # type: ignore[union-attr]


# -- the context


def test_the_context_tells_of_the_attempt() -> None:
    """Which start it is, under which fence and sequence, and whether its end is asked for."""
    seen: list[Any] = []

    def work(ctx: TaskContext, a: int) -> None:
        seen.append((ctx.task_id, ctx.key, ctx.attempt, ctx.fence, ctx.permit_seq, ctx.cancelled, a))

    asked = threading.Event()
    asked.set()
    row = attempt(7, starts=3, fence=5, permit_seq=9)
    assert execute(row, registry(work), around(asked.is_set))[0] == o.Succeeded(ended(lambda: None).result)  # type: ignore[union-attr]
    execute(row, registry(work), around())
    assert seen == [("task-1", "k", 3, 5, 9, True, 7), ("task-1", "k", 3, 5, 9, False, 7)]


def test_what_a_handler_submits_comes_with_its_success() -> None:
    """Complete requests under keys of their own, which a repeated attempt makes again."""

    def work(ctx: TaskContext) -> str:
        first = ctx.submit("next", 1)
        ctx.submit("next", 2, options=Options(priority=3))
        ctx.submit("next", a=3, key="own")
        return first

    row = attempt(namespace="shop", actor="me")

    def once() -> tuple[NewTask, ...]:
        outcome, submits = execute(row, registry(work, next=lambda a: a), around())
        assert isinstance(outcome, o.Succeeded) and decode_result(outcome.result) == submits[0].id
        return submits

    submits = once()
    assert [s.key for s in submits] == ["task-1/0", "task-1/1", "own"] == [s.key for s in once()]
    assert [decode_arguments(s.args) for s in submits] == [([1], {}), ([2], {}), ([3], {})]
    assert {(s.namespace, s.actor, s.origin) for s in submits} == {("shop", "me", "task:task-1")}
    assert submits[1].priority == 3


@pytest.mark.parametrize("error", [ValueError("x"), Retry(), Snooze(1), Fail(), Cancel(), NeedsReview(), SystemExit()])
def test_what_a_handler_submitted_before_it_failed_does_not_come(error: BaseException) -> None:
    """It comes in with the success and not otherwise."""

    def work(ctx: TaskContext) -> None:
        ctx.submit("next", 1)
        raise error

    assert execute(attempt(), registry(work, next=lambda a: a), around())[1] == ()


def test_a_submission_that_does_not_fit_is_refused_in_the_handler() -> None:
    """Where it can still be mended."""
    said = []

    def work(ctx: TaskContext) -> None:
        for name, args in (("nobody", ()), ("next", (object(),)), ("next", (1, 2))):
            with pytest.raises((UnknownHandler, TaskInvalid)) as caught:
                ctx.submit(name, *args)
            said.append(str(caught.value))

    outcome, submits = execute(attempt(), registry(work, next=lambda a: a), around())
    assert isinstance(outcome, o.Succeeded) and submits == ()
    assert len(said) == 3 and "nobody" in said[0]


@pytest.mark.parametrize(("count", "size"), [(1_001, 0), (17, 255 * 1024)], ids=["too many", "too large"])
def test_more_submissions_than_an_end_can_carry_fail_the_task_with_what_to_do(count: int, size: int) -> None:
    """At every attempt the same: it is not tried again, and nothing of it comes in. One fewer comes in whole."""

    def work(ctx: TaskContext, so_many: int) -> None:
        for _ in range(so_many):
            ctx.submit("next", "x" * size)

    there = registry(work, next=lambda a: a)
    outcome, submits = execute(attempt(count), there, around())
    assert isinstance(outcome, o.Unfit) and submits == () and "submit a few tasks that each submit a part" in outcome.message
    outcome, submits = execute(attempt(count - 1), there, around())
    assert isinstance(outcome, o.Succeeded) and len(submits) == count - 1


# -- threads


ENDS: list[BaseException] = [*ERRORS[:12], Retry(after=math.nan), Retry(), Fail("\x00"), Snooze(math.inf)]


class Reports:
    """What a pool reported, and a place to wait for it."""

    def __init__(self, slots: int) -> None:
        self.free = threading.Semaphore(slots)
        self.kinds: dict[str, str] = {}
        self.came = threading.Condition()

    def __call__(self, task: str, _fence: int, outcome: o.Reported, _submits: tuple[NewTask, ...], _seconds: float) -> None:
        with self.came:
            self.kinds[task] = type(outcome).__name__
            self.came.notify_all()
        self.free.release()

    def wait(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.kinds) == count, 20), self.kinds


def test_a_thread_pool_reports_every_end_and_keeps_its_slots() -> None:
    """Whatever is raised: as many slots are free afterwards as before."""
    errors = {f"t{i}": e for i, e in enumerate(ENDS)}

    def work(ctx: TaskContext) -> None:
        raise errors[ctx.task_id]

    clock, reports = SystemClock(), Reports(2)
    pool = ThreadPool(registry(work), clock, ids(), 2, reports, no_databases(), lambda *_: None, lambda *_: None)
    pool.lease(clock.monotonic() + 60)
    for name in errors:
        assert reports.free.acquire(timeout=20), reports.kinds
        assert pool.free() > 0
        pool.start(attempt(id=name))
    reports.wait(len(errors))
    assert set(reports.kinds.values()) == {"Raised", "RetryAsked", "GaveUp"}
    assert pool.free() == 2
    pool.close()


def test_what_a_quiet_handler_said_last_is_sent_by_its_pool() -> None:
    """A second after its last message, while it still runs; the rest with its end."""
    world = World(0, Faults())
    clock, reports, heard = SimClock(world), Reports(1), list[float]()
    said, go_on = threading.Event(), threading.Event()

    def work(ctx: TaskContext) -> None:
        for done in (1, 2):
            ctx.progress(done, 4)
        said.set()
        assert go_on.wait(20)
        ctx.progress(3, 4)

    def tell(_task: str, _fence: int, told: Told) -> None:
        assert told.progress is not None
        heard.append(told.progress.done)

    pool = ThreadPool(registry(work), clock, ids(), 1, reports, no_databases(), tell, lambda *_: None)
    pool.lease(clock.monotonic() + 60)
    pool.start(attempt(id="t"))
    assert said.wait(20)
    pool.tick()
    assert heard == [1.0]
    world.now += 1.0
    pool.tick()
    assert heard == [1.0, 2.0]
    go_on.set()
    reports.wait(1)
    assert heard == [1.0, 2.0, 3.0] and reports.kinds == {"t": "Succeeded"}
    pool.close()


def test_a_thread_begins_nothing_past_the_lease() -> None:
    """It is given back as never begun."""
    called: list[int] = []
    clock, reports = SystemClock(), Reports(1)
    pool = ThreadPool(registry(lambda: called.append(1)), clock, ids(), 1, reports, no_databases(), lambda *_: None, lambda *_: None)
    pool.lease(clock.monotonic() - 1)
    pool.start(attempt(id="t"))
    reports.wait(1)
    assert reports.kinds == {"t": "Unstarted"} and not called
    pool.close()


def test_a_thread_is_told_when_its_end_is_asked_for() -> None:
    """``ctx.cancelled`` says so to the attempt that is meant, and to no other."""
    begun, told = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work(ctx: TaskContext) -> None:
        if ctx.task_id == "meant":
            begun.set()
            told.wait(20)
        seen.append(ctx.cancelled)

    clock, reports = SystemClock(), Reports(1)
    pool = ThreadPool(registry(work), clock, ids(), 1, reports, no_databases(), lambda *_: None, lambda *_: None)
    pool.lease(clock.monotonic() + 60)
    pool.start(attempt(id="meant", fence=2))
    assert begun.wait(20)
    pool.cancel("meant", 1)
    pool.cancel("meant", 2)
    told.set()
    reports.wait(1)
    pool.start(attempt(id="other", fence=2))
    reports.wait(2)
    assert seen == [True, False]
    pool.close()


def test_a_coroutine_function_runs_to_its_end_and_leaves_nothing_behind() -> None:
    """With what every handler has: arguments, its context, verbs and errors. What it has begun and not awaited is cancelled with its attempt."""
    seen: list[str] = []

    async def beside() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("ended")

    async def work(ctx: TaskContext, how: str) -> str:
        loose.append(asyncio.create_task(beside()))
        await asyncio.sleep(0)
        if how == "fail":
            raise Fail("for good")
        ctx.submit("work", "x")
        return f"{how} {ctx.task_id}"

    loose: list[asyncio.Task[None]] = []
    known = registry(work)
    outcome, submits = execute(attempt("fine", id="t1"), known, around())
    assert isinstance(outcome, o.Succeeded) and decode_result(outcome.result) == "fine t1" and len(submits) == 1
    assert execute(attempt("fail"), known, around())[0] == o.GaveUp("for good")
    assert seen == ["ended", "ended"]
