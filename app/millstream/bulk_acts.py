"""Acts on many tasks: a dry run that counts and gives a token, and carrying it out in parts that can be interrupted and gone on with.

Used by :class:`millstream.tasks.Tasks`. What must never happen here: an act without its dry run; a part whose repetition acts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec

from millstream_schema.durable.bulk import TOKEN_US, Act, OperationRow, dry_of, dry_token, reached
from millstream_schema.durable.finding import Place, TaskFilter, matching
from millstream_schema.durable.records import Receipt
from millstream_schema.durable.tokens import Seal
from millstream_schema.errors import ConfigurationError, ReviewConflict, TaskNotFound, TokenRefused
from millstream_schema.ports import Ids
from millstream_schema.reasons import storable
from millstream_schema.store import finding, operations
from millstream_schema.store.database import Database, Transaction
from millstream_schema.store.migrate import installation_secret
from millstream_schema.store.tasks import TEXT_KEPT

from .joining import Wake, woken

T = TypeVar("T")


class Runs(Protocol):
    """A transaction, repeated when its answer is lost."""

    def __call__(self, work: Callable[[Transaction], T], /) -> T: ...


PART = 100
"""Tasks that one transaction acts on."""
COUNTED = 1_000
"""Tasks that one read of a dry run counts."""


class Plan(msgspec.Struct, frozen=True):
    """What an act would reach now. ``token`` carries it out on exactly those of these that still match then; it can begin for a day."""

    token: str
    act: Act
    count: int


class BulkActs:
    """Of one namespace."""

    def __init__(self, database: Database, run: Runs, ids: Ids, namespace: str, actor: str, wake: Wake | None) -> None:
        self._db = database
        self._run = run
        self._ids = ids
        self._namespace = namespace
        self._actor = actor
        self._wake = wake

    @cached_property
    def _seal(self) -> Seal:
        return Seal(self._db.read(installation_secret), "bulk token")

    def plan(self, act: Act, where: TaskFilter) -> Plan:
        """Count; nothing is changed."""
        where = reached(act, where)
        instant = self._db.read(lambda tx: tx.now_us())
        count, after = 0, None
        while True:
            found = self._db.read(lambda tx, a=after: finding.page(tx, self._namespace, where, a, COUNTED, instant))  # type: ignore[misc]
            count += len(found.ids)
            after = found.place
            if after is None:
                token = dry_token(self._seal, self._ids.new("operation", 10), self._namespace, act, where, instant, count)
                return Plan(token, act, count)

    def carry_out(self, token: str, reason: str, act: Act | None, progress: Callable[[OperationRow], None]) -> OperationRow:
        """Act in parts until all is done; again with the same token it goes on where it stopped, or answers with what was done."""
        dry, where = dry_of(self._seal, self._namespace, token)
        if act is not None and dry.act is not act:
            raise TokenRefused(f"the token is of a dry run of {dry.act}, not of {act}")
        if dry.act is Act.RETRY and not reason.strip():
            raise ConfigurationError("a retry needs a reason that says why it is safe to do these again: it is kept with the operation")
        operation = self._begun(dry.id, dry.act, where, dry.instant_us, dry.expected, reason)
        fits, queues = matching(where), set[str]()

        def matches(row: Mapping[str, Any]) -> bool:
            if fits(row):
                queues.add(row["queue"])
                return True
            return False

        while not operation.over:
            queues.clear()
            after = Place(operation.after_us, operation.after_id) if operation.after_id else None
            found = self._db.read(lambda tx, a=after: finding.page(tx, self._namespace, where, a, PART, dry.instant_us))  # type: ignore[misc]
            operation = self._run(
                lambda tx, o=operation, f=found: operations.part(tx, o, f.ids, f.place, matches, lambda: self._ids.new("task", 10))  # type: ignore[misc]
            )
            if dry.act is Act.RETRY:
                woken(self._wake, sorted(queues))
            progress(operation)
        return operation

    def _begun(self, operation: str, act: Act, where: TaskFilter, instant_us: int, expected: int, reason: str) -> OperationRow:
        def begin(tx: Transaction) -> OperationRow:
            known = operations.read(tx, operation)
            if known is None and tx.now_us() > instant_us + TOKEN_US:
                raise TokenRefused("the dry run is more than a day old: make a new one")
            return known or operations.begin(
                tx,
                {
                    "id": operation, "namespace": self._namespace, "act": act, "filter": msgspec.json.encode(where).decode(), "instant_us": instant_us,
                    "expected": expected, "reason": storable(reason)[:TEXT_KEPT], "actor": self._actor,
                },
            )  # fmt: skip

        return self._run(begin)

    def retry(self, task: str, reason: str) -> Receipt:
        """One task by hand."""
        if not reason.strip():
            raise ConfigurationError("a retry needs a reason that says why it is safe to do it again: it is kept with the operation")
        values = {
            "id": self._ids.new("operation", 10),
            "namespace": self._namespace,
            "act": Act.RETRY,
            "reason": storable(reason)[:TEXT_KEPT],
            "actor": self._actor,
        }
        task_id = self._ids.new("task", 10)
        answer = self._run(lambda tx: operations.retry(tx, self._namespace, task, values, task_id))
        if answer is None:
            raise TaskNotFound(f"there is no task {task!r} in namespace {self._namespace!r}")
        if not isinstance(answer, Receipt):
            how = "decide its review" if answer.state == "UNKNOWN" else "only a task that FAILED, was CANCELLED or EXPIRED is retried"
            raise ReviewConflict(f"task {task} is {answer.state}: {how}")
        return answer

    def operations(self, limit: int) -> list[OperationRow]:
        """The newest acts."""
        return self._db.read(lambda tx: operations.listed(tx, self._namespace, limit))
