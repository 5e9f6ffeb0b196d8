"""The relay of an outbox: takes entries under a lease, hands each to the installation under the key it came with, writes what became of it.

Run beside a worker or by ``millstream outbox relay``; any number at once. One step is three: take, send, write; a crash between any two leaves an entry that another relay, or this
one, sends again, and the installation answers with the first receipt. What must never happen here: a request changed on the way; a network call in a transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
import structlog

from millstream_schema.durable.outbox import Accepted, AnySending, EntryCause, EntryRow, Failed, Limits, Refused, on_claim, on_sent
from millstream_schema.durable.records import NewTask, Receipt
from millstream_schema.errors import CommitUnknown, MillstreamError, SchemaMismatch, StoreUnavailable, TaskConflict, TaskInvalid
from millstream_schema.ports import Chance, Clock, Ids
from millstream_schema.store import outboxes
from millstream_schema.store.database import Database, Transaction

log = structlog.get_logger(__name__)
T = TypeVar("T")
REPEATS = 5
"""How often a transaction whose answer was lost is executed again."""
KEPT_US = 30 * 86_400 * 1_000_000
PURGE_EVERY = 3_600.0
PURGED = 500


class Platform(Protocol):
    """The installation, as the relay needs it."""

    def forward(self, new: NewTask) -> Receipt:
        """Accept a complete request as it is. Raises TaskConflict, TaskInvalid, StoreUnavailable, CommitUnknown, StoreError."""
        ...


class OutboxCore:
    """``target``: the installation's id; entries for others are left to their relays. ``batch``: how many are taken together."""

    def __init__(
        self,
        outbox: Database,
        platform: Platform,
        target: str,
        owner: str,
        clock: Clock,
        ids: Ids,
        chance: Chance,
        limits: Limits,
        batch: int = 50,
    ) -> None:
        self._db = outbox
        self._platform = platform
        self._target = target
        self._owner = owner
        self._clock = clock
        self._ids = ids
        self._chance = chance
        self._limits = limits
        self._batch = batch
        self._claim = ""
        self._purged = clock.monotonic()
        self.sent = 0
        self.late = 0

    def step(self) -> int:
        """Take what is due, send it, write what became of it; how many. Raises StoreError when the outbox's own database is away: the next call goes on."""
        self._claim = self._claim or self._ids.new("claim")
        began = self._clock.monotonic()
        entries = self._sure(
            lambda tx: outboxes.claim(
                tx,
                self._target,
                self._owner,
                self._claim,
                self._batch,
                self._limits.lease_ms * 1000,
                lambda e, now: on_claim(e, self._limits, now),
            )
        )
        self._claim = ""
        stopped: Failed | None = None
        for entry in entries:
            if stopped is None and (self._clock.monotonic() - began) * 2000 > self._limits.lease_ms:
                stopped = Failed(
                    EntryCause.AWAY, "the installation answers slowly: half the lease of what was taken together was over before its turn"
                )
            sending = stopped or self._send(entry)
            self._write(entry, sending)
            if isinstance(sending, Failed) and sending.cause is not EntryCause.REFUSED:
                stopped = sending  # what is away for one is away for the others
        if self._clock.monotonic() - self._purged > PURGE_EVERY:
            self._purged = self._clock.monotonic()
            self._sure(lambda tx: outboxes.forget_sent(tx, self._target, KEPT_US, PURGED))
        return len(entries)

    def wait(self) -> float | None:
        """Seconds until something is due; None: nothing waits."""
        left = self._db.read(lambda tx: outboxes.next_due(tx, self._target))
        return None if left is None else left / 1e6

    def _send(self, entry: EntryRow) -> AnySending:
        """Hand it over. An answer that is lost is no failure of the request: it is sent again as it was."""
        try:
            new = msgspec.json.decode(entry.request, type=NewTask)
        except msgspec.DecodeError as exc:
            return Refused(EntryCause.INVALID, f"what is kept is no request: {exc}")
        if (new.namespace, new.handler, new.key, new.digest) != (entry.namespace, entry.handler, entry.key, entry.digest):
            return Refused(EntryCause.INVALID, "what is kept is another request than its columns say: somebody changed it")
        try:
            receipt = self._platform.forward(new)
        except TaskConflict as exc:
            return Refused(EntryCause.CONFLICT, str(exc))
        except TaskInvalid as exc:
            return Refused(EntryCause.INVALID, str(exc))
        except (StoreUnavailable, CommitUnknown, SchemaMismatch) as exc:
            return Failed(EntryCause.AWAY, str(exc))
        except MillstreamError as exc:
            after = getattr(exc, "retry_after", None)  # it takes no more at the moment
            return Refused(EntryCause.REFUSED, str(exc)) if after is None else Failed(EntryCause.THROTTLED, str(exc), int(after * 1e6))
        except Exception as exc:  # nobody knows what it is about: this entry is tried again, and holds up no other
            log.exception("an outbox entry could not be sent; it is tried again", entry=entry.id, handler=entry.handler)
            return Failed(EntryCause.REFUSED, f"{type(exc).__name__}: {exc}")
        return Accepted(receipt.task)

    def _write(self, entry: EntryRow, sending: AnySending) -> None:
        chance = self._chance.uniform(0.0, 1.0)
        if self._sure(lambda tx: outboxes.settle(tx, entry, lambda at, now: on_sent(at, self._limits, sending, now, chance))):
            self.sent += isinstance(sending, Accepted)
        else:
            self.late += 1
            log.info("an outbox entry was answered after its lease; whoever has it now asks again", entry=entry.id)
        if isinstance(sending, Refused):
            log.warning(
                "an outbox entry is parked", entry=entry.id, handler=entry.handler, cause=sending.cause.value, reason=sending.message
            )

    def _sure(self, work: Callable[[Transaction], T]) -> T:
        """A transaction on the outbox; when the answer to its COMMIT is lost, the same again."""
        for _ in range(REPEATS):
            try:
                return self._db.run(work)
            except CommitUnknown:
                continue
        raise StoreUnavailable(f"the answer to COMMIT was lost {REPEATS} times")
