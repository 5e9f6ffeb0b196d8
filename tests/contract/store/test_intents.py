"""``ctx.external`` on three databases: one call as far as anybody can know, and a person where nobody can."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from itertools import cycle
from typing import Any

import msgspec
import pytest
from tests.contract.store.handler_rig import Rig, Strike
from tests.contract.store.stores import Opened, together
from tests.contract.store.task_rows import HOUR, POLICY, begin, ending, evidence, new, read, settle, submit, taken

from millstream import Cancel, Done, Fail, Intent, NotDone, OutcomeUnknown, Retry, Snooze
from millstream_schema.durable import outcomes as o
from millstream_schema.durable.bulk import linked_retry
from millstream_schema.durable.effects import IntentId, IntentRow, IntentState
from millstream_schema.durable.records import NewTask, Receipt, TaskRow
from millstream_schema.durable.requests import decode_result
from millstream_schema.durable.states import Cause, Effects, TaskState
from millstream_schema.errors import StoreUnavailable
from millstream_schema.store import claims, intents, retention, settling
from millstream_schema.store.intents import Attempt
from millstream_schema.store.settling import Answer, ReviewRefused
from millstream_tasks.durable.answers import Reconcile

T, S = TaskState, IntentState
ONLY = msgspec.structs.replace(POLICY, intents_only=True)
ASKS = msgspec.structs.replace(ONLY, reconciles=True)


class Receiver:
    """Somebody outside who counts what reaches it, by idempotency key, and does not look whether it is a repeat."""

    def __init__(self) -> None:
        self.got: list[str] = []

    def __call__(self, key: str) -> dict[str, int]:
        self.got.append(key)
        return {"number": len(self.got)}

    def reconcile(self, intent: Intent) -> Done | NotDone:
        return Done({"number": self.got.index(intent.idempotency_key) + 1}) if intent.idempotency_key in self.got else NotDone()


class Calling(Rig):
    """A handler that calls ``receiver`` and gives back what it got."""

    def __init__(
        self,
        store: Opened,
        receiver: Callable[[str], Any],
        reconcile: Reconcile | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(store, function or (lambda ctx: ctx.external("charge", receiver)), reconcile=reconcile)
        self.asks = reconcile is not None

    def put(self, **changes: Any) -> NewTask:
        return self.submit(**{"effects": Effects.EXTERNAL, "policy": ASKS if self.asks else ONLY, **changes})

    def known(self, root: str = "") -> list[IntentRow]:
        return self.db.read(lambda tx: intents.of_root(tx, root or self.task().root))

    def decide(self, task: TaskRow, *, retry: bool = True, **given: Any) -> Receipt | ReviewRefused | None:
        again = linked_retry(task, f"{task.id}-again", origin="review", actor="me") if retry else None
        values: dict[str, Any] = {"done": False, "result": "", "reason": "I looked", "actor": "me", "successor": again, **given}
        return self.db.run(lambda tx: settling.review(tx, task.id, task.rev, **values))


def unsure(_intent: Intent) -> OutcomeUnknown:
    return OutcomeUnknown("it does not answer")


class Away:
    """The database is reached for one COMMIT."""

    def __init__(self) -> None:
        self.count = 0

    def before_commit(self) -> None:
        self.count += 1
        if self.count > 1:
            raise StoreUnavailable("injected")

    def after_commit(self) -> None:
        """The first one was."""


# -- crashes

STRIKES = [(at, how) for at in (1, 2) for how in ("dies before", "dies after", "answer lost", "refused")]
"""At the COMMIT before the call, and at the one after it."""


@pytest.mark.parametrize("hook", ["none", "truthful", "unsure"])
def test_a_call_is_made_once_or_a_person_is_asked_wherever_its_process_dies(store: Opened, hook: str) -> None:
    """Between intent and outcome nobody knows: the hook is asked, and without an answer nothing is repeated."""
    for at, how in STRIKES:
        key, receiver = f"{at} {how}", Receiver()
        rig = Calling(store, receiver, {"none": None, "truthful": receiver.reconcile, "unsure": unsure}[hook])
        rig.put(key=key)
        rig.whole(short=Strike(at, how))
        if rig.task(key).state is T.READY:
            rig.whole()
        task = rig.task(key)
        (row,) = rig.known(task.root)
        doubt = (at, how) in ((1, "dies after"), (2, "dies before")) and hook != "truthful"
        assert task.state is (T.UNKNOWN if doubt else T.SUCCEEDED), (at, how, task.reason)
        assert row.state is (S.OPEN if doubt else S.DONE)
        assert len(receiver.got) == (0 if (at, how) == (1, "dies after") and doubt else 1), (at, how)
        assert task.open_intents == int(doubt)
        assert doubt or (task.result == row.result and row.idempotency_key == receiver.got[0])
        assert not doubt or task.cause is Cause.INTENT


def test_an_attempt_that_is_not_the_valid_one_does_not_call(store: Opened) -> None:
    """Its lease ran out before: Fenced, and nothing is written."""
    receiver = Receiver()
    rig = Calling(store, receiver)
    rig.put()
    row = rig.claim()
    rig.lose(row.session)
    assert rig.task().state is T.READY, "no call was begun, so that its policy may try again"
    run = rig.run(row)
    assert isinstance(run.outcome, o.Raised) and run.outcome.error == "Fenced"
    assert (receiver.got, rig.known()) == ([], [])


def test_the_outcome_of_a_zombie_is_recorded_and_decides_nothing(store: Opened) -> None:
    """What reached the outside is a fact: the task stays in review, and the one that does it again gets that outcome without calling."""
    receiver = Receiver()

    def slow(key: str) -> Any:
        rig.lose(row.session)
        assert rig.task().state is T.UNKNOWN
        return receiver(key)

    rig = Calling(store, slow)
    rig.put()
    row = rig.claim()
    rig.report(row, rig.run(row))
    task, (known,) = rig.task(), rig.known()
    assert (task.state, task.open_intents, known.state, known.closed_by) == (T.UNKNOWN, 0, S.DONE, f"attempt 1 of {task.id}")
    assert evidence(store.db, task.id) == [(1, "Lost", 0), (1, "Succeeded", 1)]
    receipt = rig.decide(task)
    assert isinstance(receipt, Receipt)
    rig.whole()
    assert (read(store.db, receipt.task).state, read(store.db, receipt.task).result, len(receiver.got)) == (T.SUCCEEDED, known.result, 1)


def test_what_a_zombie_got_is_taken_over_from_its_successor_and_not_written_over(store: Opened) -> None:
    """The first recorded outcome stays, the other one is evidence; that the zombie's call did not happen says nothing about its successor's."""
    rig = Calling(store, Receiver())
    first = taken(store.db, new("k", id="one", effects=Effects.EXTERNAL, policy=ASKS))[0]
    assert begin(store.db, first)
    it, who = IntentId("one", "charge"), Attempt("one", first.fence, first.token)
    assert store.db.run(lambda tx: intents.open_intent(tx, who, it, "first"))
    rig.lose(first.session)
    second = rig.claim()
    later = Attempt("one", second.fence, second.token)
    assert store.db.run(lambda tx: intents.open_intent(tx, who, it, "zombie")) is None
    assert store.db.run(lambda tx: intents.deny(tx, it, "first", "", "r", who)) is None, "only a valid attempt may ask"
    assert store.db.run(lambda tx: intents.deny(tx, it, "first", "", "r", later)).state is S.NOT_DONE  # type: ignore[union-attr]
    assert store.db.run(lambda tx: intents.open_intent(tx, later, it, "second")).calls == 2  # type: ignore[union-attr]
    assert store.db.run(lambda tx: intents.deny(tx, it, "first", "", "zombie")).state is S.OPEN  # type: ignore[union-attr]
    assert store.db.run(lambda tx: intents.record(tx, it, "[1]", "", "zombie")).result == "[1]"  # type: ignore[union-attr]
    for _ in range(2):
        row = store.db.run(lambda tx: intents.record(tx, it, "[2]", "", "second"))
        assert row is not None and (row.result, row.detail) == ("[1]", "second reported another outcome: [2]")
    assert read(store.db, "one").open_intents == 0
    assert settle(store.db, ending(second)) == [Answer.APPLIED]


# -- exceptions


def raised(error: BaseException) -> Any:
    raise error


SWALLOWING: dict[str, Callable[[], Any]] = {
    "returns": lambda: "fine", "Retry": lambda: raised(Retry(after=0)), "Fail": lambda: raised(Fail("no")), "Cancel": lambda: raised(Cancel()),
    "Snooze": lambda: raised(Snooze(1)), "another": lambda: raised(ValueError("x")),
}  # fmt: skip


def stubborn(error: BaseException, goes_on: Callable[[], Any], receiver: Receiver) -> Callable[..., Any]:
    """A handler that catches everything and goes on."""

    def work(ctx: Any) -> Any:
        try:
            ctx.external("charge", lambda _key: raised(error))
        except BaseException:
            with pytest.raises(BaseException, match="nobody knows whether 'charge' was called"):
                ctx.external("mail", receiver)
            with pytest.raises(BaseException, match="nobody knows whether 'charge' was called"):
                ctx.transaction()
            return goes_on()

    return work


def test_an_exception_out_of_the_call_is_a_doubt_whatever_its_handler_makes_of_it(store: Opened) -> None:
    """It is never tried again, and no end the handler chooses counts: nothing more is called, no transaction is begun."""
    errors = cycle([TimeoutError("read timed out"), Retry(after=1), SystemExit(3), OutcomeUnknown("504")])
    for (key, goes_on), error in zip(SWALLOWING.items(), errors, strict=False):
        receiver = Receiver()
        rig = Calling(store, receiver, function=stubborn(error, goes_on, receiver))
        rig.put(key=key)
        rig.whole()
        task = rig.task(key)
        (row,) = rig.known(task.root)
        assert (task.state, task.cause, task.open_intents, receiver.got) == (T.UNKNOWN, Cause.INTENT, 1, [])
        assert row.open and type(error).__name__ in row.detail and str(error) in task.reason


def test_a_call_that_says_that_it_did_not_happen_goes_by_policy(store: Opened) -> None:
    """Raised or given back; its handler may catch it, and try again at once."""
    said: list[Any] = []

    def refuses(key: str) -> Any:
        said.append(key)
        if len(said) == 1:
            raise NotDone("connection refused")
        return NotDone if len(said) == 2 else Done(7)

    def work(ctx: Any) -> Any:
        try:
            return ctx.external("charge", refuses, key="ä/1")
        except NotDone:
            return ctx.external("charge", refuses, key="ä/1") if len(said) == 2 else raised(Retry(after=0))

    rig = Calling(store, refuses, function=work)
    rig.put()
    rig.whole()
    assert [(r.state, r.detail, r.calls) for r in rig.known()] == [(S.NOT_DONE, "connection refused", 1)]
    rig.db.run(lambda tx: claims.wake_due(tx, 10))
    rig.whole()
    task, (row,) = rig.task(), rig.known()
    assert (task.state, decode_result(task.result), task.failures) == (T.SUCCEEDED, 7, 1)
    assert (row.state, row.calls, len(set(said))) == (S.DONE, 3, 1)


def test_an_exception_with_a_hook_is_asked_about_at_once(store: Opened) -> None:
    """Done: the outcome is that of the call. Not done: the exception goes on, by policy. Anything else it gives or raises: a person."""
    asked: list[Intent] = []
    answers: list[Any] = [Done((1, "x")), NotDone, OutcomeUnknown(), None, True, ValueError("hook broke"), NotDone("raised")]
    for n, answer in enumerate(answers):

        def hook(intent: Intent, answer: Any = answer) -> Any:
            asked.append(intent)
            return raised(answer) if isinstance(answer, Exception) and str(answer) else answer

        rig = Calling(store, lambda key: raised(TimeoutError("late")), hook)
        rig.put(key=str(n))
        rig.whole()
        task = rig.task(str(n))
        (row,) = rig.known(task.root)
        match answer:
            case Done():
                assert (task.state, row.state, task.result == row.result) == (T.SUCCEEDED, S.DONE, True)
            case _ if answer is NotDone or isinstance(answer, NotDone):
                assert (task.state, task.failures, row.state) == (T.RETRY_WAIT, 1, S.NOT_DONE) and "late" in task.reason
            case _:
                assert (task.state, task.cause, row.open) == (T.UNKNOWN, Cause.INTENT, True)
    it = asked[0]
    assert (it.name, it.key, it.args, it.kwargs, it.calls) == ("charge", "", [], {}, 1)
    assert "late" in it.detail and it.opened_at.utcoffset() == dt.timedelta(0)


# -- ends

CHOSEN: list[o.AnyOutcome] = [
    o.Succeeded("[1]"), o.GaveUp("no"), o.Raised("E", "x"), o.Raised("E", "x", retryable=False), o.RetryAsked(0), o.Snoozed(0), o.CancelledItself(),
    o.Unfit("x"), o.Overran(), o.InDoubt("x"), o.Crashed(), o.Lost(), o.Killed("limit"), o.Killed("drain"),
]  # fmt: skip


def in_call(store: Opened, key: str, **changes: Any) -> TaskRow:
    """A running attempt with an open intent."""
    row = taken(store.db, new(key, **{"policy": ONLY, "effects": Effects.EXTERNAL, **changes}), who=f"s-{key}")[0]
    begin(store.db, row)
    assert store.db.run(lambda tx: intents.open_intent(tx, Attempt(row.id, row.fence, row.token), IntentId(row.root, "charge"), "o"))
    return read(store.db, row.id)


def test_no_end_is_written_over_an_open_intent(store: Opened) -> None:
    """Chosen or not, by whatever declaration: the task is in review, its counters move, what the handler returned is evidence."""
    for n, outcome in enumerate(CHOSEN):
        row = in_call(store, f"k{n}", effects=list(Effects)[n % 3], permit="p")
        settle(store.db, ending(row, outcome, submits=(new(f"next-{n}"),)))
        task = read(store.db, row.id)
        assert (task.state, task.open_intents, task.result) == (T.UNKNOWN, 1, ""), outcome
        assert evidence(store.db, row.id) == [(1, type(outcome).__name__, 0)]
        assert settle(store.db, ending(row, outcome)) == [Answer.DUPLICATE]
    success = o.Succeeded("[1]")
    row = in_call(store, "in a transaction")
    assert isinstance(store.db.run(lambda tx: settling.settle_success(tx, ending(row, success))), o.Unfit)


def test_one_that_waits_to_ask_its_hook_neither_expires_nor_is_cancelled(store: Opened) -> None:
    """It goes to a person: nobody knows what to undo."""
    rows = [in_call(store, k, policy=ASKS, deadline_us=HOUR) for k in ("cancelled", "late", "given back", "asked")]
    for row in rows:
        settle(store.db, ending(row, o.Killed("drain")))
        assert read(store.db, row.id).state is T.READY
    t = store.db.tables.task
    store.db.run(lambda tx: tx.update(t, t.c.key == "late", limit_us=1, deadline_us=1))
    store.db.run(lambda tx: claims.expire_late(tx, 10))
    assert store.db.run(lambda tx: settling.cancel(tx, rows[0].id)) is T.UNKNOWN
    assert [read(store.db, r.id).state for r in rows] == [T.UNKNOWN, T.UNKNOWN, T.READY, T.READY]
    assert read(store.db, rows[2].id).open_intents == 1


# -- reviews


def test_a_person_decides_what_was_called(store: Opened) -> None:
    """Not done: called again, by the same key. Done with an outcome: given to the task that goes on. A decision closes what was open; an unknown call is refused."""
    receiver = Receiver()
    rig = Calling(store, receiver, function=lambda ctx: [ctx.external("charge", receiver), ctx.external("mail", receiver)])
    for key, known, calls in (("a", {}, 3), ("b", {("charge", ""): '[["l"],["s","by hand"]]'}, 2)):
        receiver.got.clear()
        rig.put(key=key)
        rig.whole(short=Strike(2, "dies before"))
        task = rig.task(key)
        if key == "b":
            assert rig.decide(task, known={("refund", ""): "[1]"}) is ReviewRefused.NO_CALL
        assert isinstance(rig.decide(task, known=known), Receipt)
        assert (read(store.db, task.id).state, read(store.db, task.id).open_intents) == (T.FAILED, 0)
        assert rig.known(task.root)[0].state is (S.DONE if known else S.NOT_DONE)
        rig.whole()
        assert rig.task(f"{task.id}/retry").state is T.SUCCEEDED
        assert len(receiver.got) == calls and len(set(receiver.got)) == 2
    for done, state in ((True, S.DONE), (False, S.NOT_DONE)):
        row = in_call(store, f"done-{done}")
        settle(store.db, ending(row, o.Crashed()))
        assert rig.decide(read(store.db, row.id), retry=False, done=done, result="[1]" if done else "") is None
        assert [(k.state, k.closed_by) for k in rig.known(row.root)] == [(state, "review: me")]
        assert read(store.db, row.id).open_intents == 0
    row = in_call(store, "compensated")
    settle(store.db, ending(row, o.Crashed()))
    assert isinstance(rig.decide(read(store.db, row.id), retry=False, successor=new("made up", id="other")), Receipt)
    assert [(k.state, k.detail) for k in rig.known(row.root)] == [(S.NOT_DONE, "made up for by other")]


# -- bad input, limits


def test_what_cannot_be_a_call_is_refused_before_anything_is_called(store: Opened) -> None:
    """By name, at once, without another attempt; the same call twice, too: it would get the first one's outcome."""
    receiver = Receiver()

    def in_transaction(ctx: Any) -> None:
        with ctx.transaction() as tx:
            ctx.external("charge", receiver)
            tx.result()

    def after(ctx: Any) -> Any:
        with ctx.transaction() as tx:
            tx.result("fine")
        with pytest.raises(Exception, match="has succeeded with its"):
            ctx.external("charge", receiver)

    refused: list[tuple[Callable[[Any], Any], str]] = [
        (lambda ctx: ctx.external("", receiver), "name must match"), (lambda ctx: ctx.external("a b", receiver), "name must match"),
        (lambda ctx: ctx.external(7, receiver), "name must match"), (lambda ctx: ctx.external("x" * 64, receiver), "name must match"),
        (lambda ctx: ctx.external("a", receiver, key="x" * 201), "at most 200"), (lambda ctx: ctx.external("a", receiver, key="\x00"), "without NUL"),
        (lambda ctx: ctx.external("a", receiver, key=7), "must be text"), (lambda ctx: ctx.external("a", "curl"), "must be a function"),
        (in_transaction, "make it before the block"),
    ]  # fmt: skip
    for n, (work, why) in enumerate(refused):
        rig = Calling(store, receiver, function=work)
        rig.put(key=str(n))
        rig.whole()
        task = rig.task(str(n))
        assert (task.state, task.error_class) == (T.FAILED, "ExternalRefused") and why in task.reason, task
    assert receiver.got == []
    rig = Calling(store, receiver, function=lambda ctx: [ctx.external("a", receiver), ctx.external("a", receiver)])
    rig.put(key="twice")
    rig.whole()
    assert (rig.task("twice").state, len(receiver.got)) == (T.FAILED, 1) and "give each call a key=" in rig.task("twice").reason
    rig = Calling(store, receiver, function=after)
    rig.put(key="after")
    rig.whole()
    assert rig.task("after").state is T.SUCCEEDED


def giving(value: Any, got: list[str]) -> Callable[[str], Any]:
    def call(key: str) -> Any:
        got.append(key)
        return value

    return call


def test_an_outcome_that_cannot_be_stored_has_happened_all_the_same(store: Opened) -> None:
    """The task has failed for its result and is not tried again; one that does it again does not call."""
    for key, value in (("large", "x" * 300_000), ("odd", object())):
        got: list[str] = []
        rig = Calling(store, giving(value, got))
        rig.put(key=key)
        rig.whole()
        task = rig.task(key)
        (row,) = rig.known(task.root)
        assert (task.state, task.cause, row.state, row.result) == (T.FAILED, Cause.RESULT, S.DONE, None) and row.detail
        submit(store.db, linked_retry(task, f"{task.id}-again", origin="retry", actor=""))
        rig.whole()
        assert (rig.task(f"{task.id}/retry").state, len(got)) == (T.FAILED, 1)


def test_identities_are_told_apart_byte_by_byte(store: Opened) -> None:
    """Case, accents, blanks, Unicode forms."""
    keys = ["", "a", "A", "a ", " a", "á", "a\u0301", "ａ"]
    rig = Calling(store, Receiver(), function=lambda ctx: [ctx.external("charge", lambda sent: sent, key=k) for k in keys])
    rig.put()
    rig.whole()
    assert rig.task().state is T.SUCCEEDED
    assert sorted(r.key for r in rig.known()) == sorted(keys) and len({r.idempotency_key for r in rig.known()}) == len(keys)


# -- many at once, forgetting


def test_outcome_denial_end_and_take_back_at_once_leave_one_story(store: Opened) -> None:
    """Reported by several at one moment, while the task is ended and cancelled: the outcome is recorded, no end is written over an open call, nobody hangs."""
    for n in range(3):
        row = in_call(store, f"k{n}")
        it = IntentId(row.root, "charge")
        two = [store.open() for _ in range(5)]
        answers = together(
            lambda db=two[0], it=it: db.run(lambda tx: intents.record(tx, it, "[1]", "", "one")),  # type: ignore[misc]
            lambda db=two[1], it=it: db.run(lambda tx: intents.record(tx, it, "[1]", "", "two")),  # type: ignore[misc]
            lambda db=two[2], it=it: db.run(lambda tx: intents.deny(tx, it, "o", "", "three")),  # type: ignore[misc]
            lambda db=two[3], row=row: db.run(lambda tx: settling.settle(tx, [ending(row, o.Succeeded("[9]"))])),  # type: ignore[misc]
            lambda db=two[4], row=row: db.run(lambda tx: settling.cancel(tx, row.id)),  # type: ignore[misc]
        )
        store.close_others()
        assert not [a for a in answers if isinstance(a, BaseException)], "the database's refusals are tried again within"
        (known,) = store.db.read(lambda tx, row=row: intents.of_root(tx, row.root))  # type: ignore[misc]
        task = read(store.db, row.id)
        assert (known.state, known.result, task.open_intents) == (S.DONE, "[1]", 0)
        assert task.state in (T.SUCCEEDED, T.UNKNOWN)


def test_intents_go_with_the_last_task_of_their_root(store: Opened) -> None:
    """A task that does it again keeps them, though the first one is over for long."""
    rig = Calling(store, Receiver())
    rig.put()
    rig.whole(short=Strike(2, "dies before"))
    task = rig.task()
    receipt = rig.decide(task)
    assert isinstance(receipt, Receipt)
    assert store.db.run(lambda tx: retention.purge(tx, "default", [task.id])) == 0
    rig.whole()
    assert store.db.run(lambda tx: retention.purge(tx, "default", [receipt.task])) == 1
    assert len(rig.known(task.root)) == 1
    assert store.db.run(lambda tx: retention.purge(tx, "default", [task.id])) == 1
    assert rig.known(task.root) == []
    assert store.db.run(lambda tx: intents.record(tx, IntentId(task.root, "charge"), "[1]", "", "late")) is None


def test_a_database_that_stays_away_after_the_call_leaves_a_doubt_until_its_worker_has_written_it(store: Opened) -> None:
    """What became of it could not be written down: by itself the attempt ends in review, and says so. Its worker was told before, and can."""
    for key, kept in (("dropped", False), ("kept", True)):
        receiver = Receiver()
        rig = Calling(store, receiver)
        rig.put(key=key)
        row = rig.claim()
        run = rig.run(row, short=Away())
        ((intent, call),) = run.known
        assert isinstance(run.outcome, o.InDoubt) and call is not None and "could not be written down" in run.outcome.message
        if kept:
            rig.db.run(lambda tx, i=intent, c=call: intents.write_known(tx, i, c))  # type: ignore[misc]
        rig.report(row, run)
        task = rig.task(key)
        assert (task.state, task.cause, len(receiver.got)) == (T.READY if kept else T.UNKNOWN, Cause.INTENT, 1)
        if kept:
            rig.whole()
            assert decode_result(rig.task(key).result) == {"number": 1} and len(receiver.got) == 1


def test_a_denial_that_could_not_be_written_is_written_by_its_worker_and_the_call_made_again(store: Opened) -> None:
    """It certainly did not happen: nobody is asked."""
    answers: list[Any] = [NotDone("busy"), 5]

    def receiver(_key: str) -> Any:
        return answers.pop(0)

    rig = Calling(store, receiver)
    rig.put()
    row = rig.claim()
    run = rig.run(row, short=Away())
    ((intent, call),) = run.known
    assert call is not None and not call.happened
    for _ in range(2):  # its answer may be lost
        rig.db.run(lambda tx: intents.write_known(tx, intent, call))
    assert rig.known()[0].state is S.NOT_DONE
    rig.report(row, run)
    rig.whole()
    assert (rig.task().state, decode_result(rig.task().result), answers) == (T.SUCCEEDED, 5, [])
