"""``ctx.external``: one call to the outside, made at most once as far as anybody can know.

An intent is written and committed before the call, its outcome after it. A recorded outcome is given back without calling. What is open when an attempt meets it is asked of
the handler's reconcile hook; where nobody can say, the attempt ends and a person decides: whatever the handler makes of that is no end.
What must never happen here: a call without a committed intent; a second call while nobody knows of the first; an outcome made up.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import structlog

from millstream_schema.durable.effects import IntentId, IntentRow, IntentState, KnownCall, identified
from millstream_schema.durable.records import TaskRow
from millstream_schema.durable.requests import decode_arguments, decode_result, encode_result
from millstream_schema.errors import CommitUnknown, ExternalRefused, Fenced, StoreError, StoreUnavailable, TaskInvalid
from millstream_schema.store import intents
from millstream_schema.store.database import Transaction
from millstream_schema.store.intents import Attempt

from .answers import Answer, Done, Intent, NotDone, OutcomeUnknown, Reconcile
from .surroundings import Surroundings
from .texts import text_of

T = TypeVar("T")
log = structlog.get_logger(__name__)
PAUSES = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each try to write what is known of a call; past them the call is in doubt."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class InDoubt(BaseException):
    """Nobody knows whether a call happened. Leaves the handler's code; where that holds it up, it changes nothing: the attempt is over and its task goes into review."""


class ExternalCalls:
    """Those of one attempt. ``doubt``: why it is over without an end."""

    def __init__(self, task: TaskRow, around: Surroundings, reconcile: Reconcile | None) -> None:
        self._task = task
        self._around = around
        self._reconcile = reconcile
        self._attempt = Attempt(task.id, task.fence, task.token)
        self._lock = threading.Lock()
        self._used: set[IntentId] = set()
        self.doubt: InDoubt | None = None

    def settle_doubts(self) -> None:
        """Ask about every call of earlier attempts that is open, before the handler's code runs. Raises InDoubt, Fenced, StoreError, TaskInvalid."""
        if not self._task.open_intents:
            return
        for row in self._written(lambda tx: intents.of_root(tx, self._task.root)):
            if row.open:
                self._asked(row)

    def run(self, name: str, call: Callable[[str], Any], key: str) -> Any:
        """As :meth:`.context.TaskContext.external`."""
        if self.doubt is not None:
            raise self.doubt
        intent = identified(self._task.root, name, key)
        if not callable(call):
            raise ExternalRefused(f"ctx.external({name!r}): call must be a function of the idempotency key, not {text_of(call):.80}")
        with self._lock:
            if intent in self._used:
                raise ExternalRefused(
                    f"ctx.external: this attempt has used {str(intent)!r} already, and would be given that outcome again: give each call a key= of its own"
                )
            self._used.add(intent)
        try:
            return self._once(intent, call)
        except BaseException:
            with self._lock:
                self._used.discard(intent)  # it is known not to have happened, or never will be here: its handler may try again
            raise

    # -- one call

    def _once(self, intent: IntentId, call: Callable[[str], Any]) -> Any:
        while True:
            opening = self._around.ids.new("intent", 10)
            row = self._opened(intent, opening)
            if row.state is IntentState.DONE:
                return self._outcome(row)
            if row.opening == opening:
                return self._called(row, call)
            self._asked(row)

    def _opened(self, intent: IntentId, opening: str) -> IntentRow:
        row = self._written(lambda tx: intents.open_intent(tx, self._attempt, intent, opening))
        if row is None:
            raise Fenced(f"task {self._task.id}: this attempt is not the valid one any more; {str(intent)!r} was not called")
        return row

    def _called(self, row: IntentRow, call: Callable[[str], Any]) -> Any:
        """The call itself. From here on only its outcome, or that it did not happen, closes the intent."""
        try:
            value = call(row.idempotency_key)
        except NotDone as exc:
            raise self._denied(row, exc) from exc
        except BaseException as exc:
            return self._failed(row, exc)
        value = _instance(value)
        if isinstance(value, NotDone):
            raise self._denied(row, value)
        if isinstance(value, OutcomeUnknown):
            return self._failed(row, value)
        return self._outcome(self._recorded(row, value.result if isinstance(value, Done) else value, str(self._attempt)))

    def _denied(self, row: IntentRow, said: NotDone) -> NotDone:
        """It certainly did not happen: the intent is closed, and the handler decides how to go on."""
        self._handed(row, KnownCall(row.opening, False, None, text_of(said), str(self._attempt)))
        return said

    def _failed(self, row: IntentRow, error: BaseException) -> Any:
        """An exception out of the call says nothing about whether it happened: the hook is asked, or it stays in doubt."""
        why = f"{type(error).__name__}: {text_of(error)}"
        log.warning(
            "a call by ctx.external ended by an exception: whether it happened is not known",
            task=self._task.id,
            intent=str(row.id),
            error=why,
        )
        try:
            self._written(lambda tx: intents.note(tx, row.id, row.opening, why))
        except (StoreError, CommitUnknown):
            pass  # evidence that is lost changes nothing: the intent is open
        known = self._asked(row, why)
        if known.state is IntentState.DONE:
            return self._outcome(known)
        raise error

    # -- what became of it

    def _asked(self, row: IntentRow, why: str = "") -> IntentRow:
        """What the reconcile hook says of an open call, written down. Raises InDoubt when nobody can say."""
        answer = self._answer(row, why)
        who = f"reconcile, {self._attempt}"
        if isinstance(answer, Done):
            return self._recorded(row, answer.result, who)
        if isinstance(answer, OutcomeUnknown):
            self._in_doubt(row, "; ".join(t for t in (why or row.detail, text_of(answer)) if t))
        said = text_of(answer)
        after = self._closed(row, lambda tx: intents.deny(tx, row.id, row.opening, said, who, self._attempt))
        if after is None:
            raise Fenced(f"task {self._task.id}: this attempt is not the valid one any more")
        return after

    def _answer(self, row: IntentRow, why: str) -> Answer:
        if self._reconcile is None:
            return OutcomeUnknown("its handler has no reconcile hook")
        args, kwargs = decode_arguments(self._task.args)
        intent = Intent(
            name=row.name, key=row.key, idempotency_key=row.idempotency_key, task_id=self._task.id, args=args, kwargs=kwargs, calls=row.calls,
            opened_at=_EPOCH + dt.timedelta(microseconds=row.opened_us), detail=why or row.detail,
        )  # fmt: skip
        try:
            answer = _instance(self._reconcile(intent))
        except (NotDone, OutcomeUnknown) as exc:
            return exc
        except BaseException as exc:
            return OutcomeUnknown(f"its reconcile hook raised {type(exc).__name__}: {text_of(exc)}")
        if isinstance(answer, Done | NotDone | OutcomeUnknown):
            return answer
        return OutcomeUnknown(f"its reconcile hook gave {type(answer).__name__}, not Done, NotDone or OutcomeUnknown")

    def _recorded(self, row: IntentRow, value: Any, who: str) -> IntentRow:
        """Write an outcome down, also one that cannot be stored: the call happened all the same."""
        result: str | None
        try:
            result, detail = encode_result(value), ""
        except TaskInvalid as exc:
            result, detail = None, text_of(exc)
        after = self._handed(row, KnownCall(row.opening, True, result, detail, who))
        if after is None:
            raise Fenced(f"task {self._task.id} is over and forgotten")
        return after

    def _outcome(self, row: IntentRow) -> Any:
        if row.result is None:
            raise TaskInvalid(
                f"ctx.external: {str(row.id)!r} has been called, and its outcome is not stored: {row.detail or row.closed_by}"
            )
        return decode_result(row.result)

    def _handed(self, row: IntentRow, call: KnownCall) -> IntentRow | None:
        """Write what is known of a call. Its worker has it before: it writes it where this process cannot any more."""
        self._around.known(row.id, call)
        after = self._closed(row, lambda tx: intents.write_known(tx, row.id, call))
        self._around.known(row.id, None)
        return after

    def _closed(self, row: IntentRow, work: Callable[[Transaction], IntentRow | None]) -> IntentRow | None:
        """Write what is known; where the database does not take it, nobody will know."""
        try:
            return self._written(work)
        except StoreError as exc:
            self._in_doubt(row, f"what became of it could not be written down: {text_of(exc)}")

    def _in_doubt(self, row: IntentRow, why: str) -> NoReturn:
        self.doubt = InDoubt(f"nobody knows whether {str(row.id)!r} was called: {why}")
        log.warning("a call by ctx.external is in doubt: its task goes into review", task=self._task.id, intent=str(row.id), why=why)
        raise self.doubt

    def _written(self, work: Callable[[Transaction], T]) -> T:
        """A guarded transaction of ours, again while the database cannot be reached or its answer is lost. Raises StoreError."""
        last: StoreError = StoreUnavailable("the database cannot be reached")
        for pause in PAUSES:
            self._around.wait(pause)
            try:
                return self._around.databases.short().run(work)
            except (CommitUnknown, StoreUnavailable) as exc:
                last = exc
        raise StoreUnavailable(f"tried {len(PAUSES)} times: {last}") from last


def _instance(answer: Any) -> Any:
    """A class that was given back where its instance is meant."""
    return answer() if isinstance(answer, type) and issubclass(answer, Done | NotDone | OutcomeUnknown) else answer
