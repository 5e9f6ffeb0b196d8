"""Why an attempt ended, in one word: for metrics and for the restart budgets.

Called by the runner and by whoever makes it, when they fail. What must never happen here: an error of user code taken for one of the transport or the storage.
"""

from __future__ import annotations

from millstream_schema.errors import (
    ChannelError,
    CodecError,
    ConfigurationError,
    Fenced,
    FingerprintMismatch,
    JobInvalid,
    OperatorError,
    RecordError,
    RestoreRefused,
    SnapshotMissing,
    SnapshotUnreadable,
    SourceError,
    StorageError,
    StoreError,
    UnknownFactory,
)

CAUSES: tuple[tuple[type[Exception], str], ...] = (
    (Fenced, "fenced"),
    (FingerprintMismatch, "fingerprint"),
    (UnknownFactory, "factory"),
    (JobInvalid, "invalid"),
    (ConfigurationError, "invalid"),
    (RestoreRefused, "restore"),
    (SnapshotMissing, "unreadable"),
    (SnapshotUnreadable, "unreadable"),
    (RecordError, "record"),
    (SourceError, "source"),
    (ChannelError, "channel"),
    (CodecError, "codec"),
    (StorageError, "storage"),
    (StoreError, "target"),
    (OperatorError, "operator"),
)
"""The first that fits: an error stands before those it is a kind of."""


def cause_of(error: BaseException) -> str:
    """One word; ``error`` for a defect, ours or a connector's."""
    return next((cause for kind, cause in CAUSES if isinstance(error, kind)), "error")
