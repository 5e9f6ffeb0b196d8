"""Every error Millstream raises on purpose, as one tree.

Raised by all four rooms; caught by users as ``MillstreamError``. Never raised from here: control-flow
signals (they derive from ``BaseException`` and live beside their single catcher).

::

    MillstreamError
    ├── ConfigurationError        a setting or argument is wrong; says which, and what to write instead
    │   └── ForeignSession        session= is one of another database; names the way to submit from there
    ├── JobInvalid                a job's model is wrong; ``problems`` lists everything wrong at once
    ├── UnknownFactory            no factory of that name is registered here
    ├── JobNotFound
    ├── JobConflict               the operation does not fit the job's present state
    ├── JobFailed                 a job that was waited for ended as FAILED
    ├── TaskInvalid               a durable task's arguments or options are wrong; nothing was stored
    │   └── UnknownQueue          no handler declares the queue and no worker serves it
    ├── TaskConflict              the key is known with other content; names both digests
    ├── PermitNotFound
    ├── QuotaExceeded             a queue or a namespace takes no more tasks just now; ``retry_after`` seconds
    ├── TaskNotFound
    ├── TaskFailed                a task that was waited for did not succeed; ``state`` and ``cause`` say how
    ├── UnknownHandler            no handler of that name is registered here, nor told of by a worker
    ├── TokenRefused              a cursor or a bulk act's token was changed, or is for something else
    ├── ScheduleInvalid           a schedule cannot be followed, never fires, or what it is to run is wrong; nothing was stored
    ├── ScheduleNotFound
    ├── ReviewConflict            a review's decision does not fit the task's present state
    ├── SubscriptionNotFound      no subscription of that name in this namespace
    ├── SubscriptionConflict      the name is another subscription's; names what differs
    ├── DeliveryNotFound          the subscription has no delivery of that task's end (any more)
    ├── TransactionRefused        what a handler does in ctx.transaction() cannot be; says what to do instead
    ├── ExternalRefused           what a handler asks of ctx.external() cannot be; says what to do instead; nothing was called
    ├── TransactionTooLong        ctx.transaction() held SQLite's write lock for too long
    ├── FingerprintMismatch       a node rebuilt another plan than was submitted
    ├── CodecError
    │   ├── UnknownFormat         kind, version or value type this build does not know
    │   └── KeyRefused            a value that cannot be a key
    ├── RecordError               a record that a source cannot decode (the poison policy decides)
    ├── OperatorError             user code failed; names the operator
    ├── ChannelError
    │   ├── ChannelMissing        publishing to a channel that does not exist
    │   ├── ChannelLost           the connection is gone
    │   └── ChannelBroken         a gap, a reorder, data after END
    ├── StorageError              checkpoint storage
    │   ├── SnapshotMissing       there is none
    │   ├── SnapshotUnreadable    there is one and it cannot be read
    │   └── StorageUnavailable    cannot be reached, full, not shared
    ├── StoreError                the SQL store
    │   ├── StoreUnavailable      cannot be reached; safe to try again
    │   ├── CommitUnknown         COMMIT was sent and its answer lost; execute the guarded statement again
    │   ├── RetryTransaction      a caller's transaction met another one; roll it back and run the whole of it again
    │   └── SchemaMismatch        the database's schema is newer, older or half migrated
    ├── Fenced                    a newer generation exists; the caller is stale and must stop
    ├── RestoreRefused            a snapshot does not fit the job; ``differences`` lists why
    ├── SourceError               what a source reads changed, was lost, or is not what its cursor points into
    │   └── SourceUnavailable     a source's system cannot be reached; a restart may help
    └── SinkError                 a sink's target refused for good
"""

from __future__ import annotations

from collections.abc import Sequence


class MillstreamError(Exception):
    """Root of every error raised on purpose."""


class ConfigurationError(MillstreamError):
    """A setting or argument is wrong."""


class ForeignSession(ConfigurationError):
    """A session that is to be joined belongs to another database than the installation's. Nothing was written."""


class JobInvalid(MillstreamError):
    """A job's model cannot run. ``problems`` holds one sentence per thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))  # two checks may find the same
        super().__init__("the job is invalid:\n" + "\n".join(f"  - {p}" for p in self.problems))


class UnknownFactory(MillstreamError):
    """No pipeline factory of that name is registered in this process."""


class JobNotFound(MillstreamError):
    """There is no such job in this namespace."""


class JobConflict(MillstreamError):
    """The operation does not fit the job's present state."""


class JobFailed(MillstreamError):
    """A job that was waited for ended as FAILED; the message holds the causes."""


class TaskInvalid(MillstreamError):
    """A durable task's arguments or options are wrong. Nothing was stored."""


class UnknownQueue(TaskInvalid):
    """No handler declares this queue and no worker session serves it; the message names what is known nearby. Nothing was stored."""


class TaskConflict(MillstreamError):
    """The key is known with other arguments or options; the message holds both digests."""


class PermitNotFound(MillstreamError):
    """There is no such permit in this namespace."""


class QuotaExceeded(MillstreamError):
    """A queue or a namespace takes no more tasks just now: too many that are not over, too many accepted within its window, or it is closed. Nothing was stored.

    ``retry_after``: seconds after which it is worth trying again, with the same key.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(f"{message}; try again in {retry_after:.1f} s")


class TaskNotFound(MillstreamError):
    """There is no such task in this namespace."""


class TaskFailed(MillstreamError):
    """A task that was waited for did not succeed: it failed, was cancelled, expired, or is in review. ``task``: its id; ``state``, ``cause``, ``reason``: of its row."""

    def __init__(self, task: str, state: str, cause: str, reason: str) -> None:
        self.task = task
        self.state = state
        self.cause = cause
        self.reason = reason
        super().__init__(f"task {task} is {state}" + (f" ({cause})" if cause else "") + (f": {reason}" if reason else ""))


class UnknownHandler(MillstreamError):
    """No handler of that name is registered in this process or, where that is looked at, told of by a worker."""


class TokenRefused(MillstreamError):
    """A cursor or a bulk act's token that this installation did not give, or gave for another question; the message says which. Ask anew without it."""


class ScheduleInvalid(MillstreamError):
    """A schedule cannot be followed, never fires, or what it is to run is wrong. Nothing was stored."""


class ScheduleNotFound(MillstreamError):
    """There is no such schedule in this namespace."""


class ReviewConflict(MillstreamError):
    """A review's decision does not fit the task's present state: read it again and decide anew."""


class SubscriptionNotFound(MillstreamError):
    """There is no subscription of that name in this namespace."""


class SubscriptionConflict(MillstreamError):
    """The name is that of a subscription with another definition."""


class DeliveryNotFound(MillstreamError):
    """The subscription has no delivery of that task's end: it never had one, or it was acknowledged and removed since."""


class TransactionRefused(MillstreamError):
    """What a handler does in ``ctx.transaction()`` cannot be. Nothing of it was done; trying again does not help."""


class TransactionTooLong(MillstreamError):
    """``ctx.transaction()`` held SQLite's write lock for too long. Nothing of it was done."""


class ExternalRefused(MillstreamError):
    """What a handler asks of ``ctx.external()`` cannot be. Nothing was called; trying again does not help."""


class FingerprintMismatch(MillstreamError):
    """A node rebuilt a plan that differs from the submitted one."""


class CodecError(MillstreamError):
    """A value or frame cannot be encoded or decoded."""


class UnknownFormat(CodecError):
    """A kind, version or value type this build does not know."""


class KeyRefused(CodecError):
    """A value that cannot be a key (NaN, naive datetime, unsupported type)."""


class RecordError(MillstreamError):
    """A record a source cannot decode; ``position`` says where, ``raw`` holds its bytes."""

    def __init__(self, message: str, *, position: str = "", raw: bytes = b"") -> None:
        self.position = position
        self.raw = raw
        super().__init__(message)


class OperatorError(MillstreamError):
    """User code failed inside the operator named in the message."""


class ChannelError(MillstreamError):
    """A data channel failed; the subtask fails and the job recovers."""


class ChannelMissing(ChannelError):
    """Publishing to a channel that does not exist."""


class ChannelLost(ChannelError):
    """The connection behind a channel is gone."""


class ChannelBroken(ChannelError):
    """A gap, a reorder, or data after END."""


class StorageError(MillstreamError):
    """Checkpoint storage failed."""


class SnapshotMissing(StorageError):
    """There is no such snapshot."""


class SnapshotUnreadable(StorageError):
    """There is a snapshot and it cannot be read."""


class StorageUnavailable(StorageError):
    """Checkpoint storage cannot be reached, is full, or is not shared."""


class StoreError(MillstreamError):
    """The SQL store failed."""


class StoreUnavailable(StoreError):
    """The database cannot be reached; nothing was done, it is safe to try again."""


class CommitUnknown(StoreError):
    """COMMIT was sent and its answer lost; execute the same guarded statement again."""


class RetryTransaction(StoreError):
    """A deadlock, a serialisation failure or a lock that was not granted in time, met by a statement of ours in a caller's transaction.

    The caller rolls the transaction back and runs the whole of it again; what has been done in it is not to be committed.
    """


class SchemaMismatch(StoreError):
    """The database's schema is newer, older or half migrated."""


class Fenced(MillstreamError):
    """A newer generation exists: the caller is stale and must stop."""


class RestoreRefused(MillstreamError):
    """A snapshot does not fit the job; ``differences`` lists why."""

    def __init__(self, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        super().__init__("the snapshot does not fit this job:\n" + "\n".join(f"  - {d}" for d in self.differences))


class SinkError(MillstreamError):
    """A sink's target refused for good."""


class SourceError(MillstreamError):
    """What a source reads changed, was lost, or is not what its cursor points into; a restart alone does not help."""


class SourceUnavailable(SourceError):
    """The system a source reads from could not be reached for as long as the source tries; a restart may help."""
