"""The ports a stream job meets the world by: sources, sinks, and the participants of its epochs.

Implemented by the connectors that ship and by users' own (see ``docs/how-to/custom-connectors.md``); called by the
subtask runner on the subtask's own thread, except :meth:`CommittingWriter.commit`, which runs on the subtask's background thread.
What must never happen here: a connector that claims a capability it cannot keep. The job's guarantee is checked against the claim when
the job is compiled and again on the node.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

Json = None | bool | int | float | str | list[Any] | dict[str, Any]

LOCK_TIMEOUT: Final = 3.0
"""Seconds for a lock or an idle transaction at a target where nothing else is said: below a third of the default lease (10 s)."""


class SourceCapability(enum.StrEnum):
    """What a source can promise."""

    REPLAYABLE = "REPLAYABLE"
    TRANSACTIONAL_READ = "TRANSACTIONAL_READ"
    NONE = "NONE"


class SinkCapability(enum.StrEnum):
    """What a sink can promise."""

    TWO_PHASE_COMMIT = "TWO_PHASE_COMMIT"
    STAGED_ATOMIC_COMMIT = "STAGED_ATOMIC_COMMIT"
    OUTBOX_EPOCH_LOG = "OUTBOX_EPOCH_LOG"
    IDEMPOTENT = "IDEMPOTENT"
    UPSERT_BY_KEY = "UPSERT_BY_KEY"
    NONE = "NONE"


class PoisonPolicy(enum.StrEnum):
    """What becomes of a record that cannot be decoded."""

    FAIL = "fail"
    SKIP = "skip"
    DEAD_LETTER = "dead-letter"


class Split(msgspec.Struct, frozen=True):
    """A part of a source that one reader owns. ``split_id`` is unique within the source; ``body`` is the source's own."""

    split_id: str
    body: Json = None


class Read(NamedTuple):
    """What one poll of a split brought.

    ``values`` and ``timestamps`` (UTC milliseconds since the epoch, or None when the source has no event time) are of one length.
    ``exhausted`` says that this split will never bring more; it may come with the last values.
    ``dead`` lists undecodable records as (position, raw bytes, reason), only under ``dead-letter``; ``skipped`` counts those passed over.
    """

    values: list[Any]
    timestamps: list[int] | None = None
    exhausted: bool = False
    dead: Sequence[tuple[str, bytes, str]] = ()
    skipped: int = 0


class ConnectorContext(msgspec.Struct, frozen=True):
    """Who a connector works for.

    ``guard`` is called right before each visible or staging write: it raises when this subtask's lease has passed.
    ``now_ms`` is the node's clock in UTC milliseconds. ``generation`` fences the target. ``lock_timeout`` (seconds, below a third of the
    lease) bounds every wait for a lock and every idle transaction at a database, so that a stopped process keeps no row for longer.
    """

    job: str
    operator: str
    subtask: int
    parallelism: int
    generation: int
    guard: Callable[[], None]
    now_ms: Callable[[], int]
    lock_timeout: float = LOCK_TIMEOUT


class SplitReader(Protocol):
    """Reads one split. Not shared between threads."""

    def poll(self, limit: int) -> Read:
        """Up to ``limit`` records that are there now. Returns within about 10 ms, empty when there are none. Connection errors are
        retried inside with back-off (return empty meanwhile), then raised. An undecodable record raises :class:`RecordError`
        under the FAIL policy."""
        ...

    def cursor(self) -> Json:
        """Position of the next record to return (exclusive of all returned). Taken between two polls."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Source(Protocol):
    """A source, as the builder takes it: configuration only, nothing is opened before :meth:`open`."""

    kind: str
    version: int
    bounded: bool

    @property
    def capability(self) -> SourceCapability: ...

    def config(self) -> dict[str, Json]:
        """What identifies this source; goes into the model and its fingerprint. No secrets."""
        ...

    def problems(self) -> list[str]:
        """Everything wrong with the configuration, one sentence each; empty when it can run."""
        ...

    def discover(self, known: frozenset[str]) -> list[Split]:
        """Splits that are not in ``known``. Runs on a node; again every ``discovery_interval`` seconds for unbounded sources.

        Raises :class:`SourceUnavailable` when its system cannot be reached: it is asked again with back-off, for ``give_up`` seconds if the
        source has such an attribute (else 30), then the subtask fails. Any other error fails it at once.
        """
        ...

    def open(self, split: Split, cursor: Json, context: ConnectorContext) -> SplitReader:
        """A reader that starts at ``cursor`` (None: at the split's beginning)."""
        ...


@runtime_checkable
class Truncatable(Protocol):
    """A reader that can be told to end at what it has taken: ``DRAIN`` calls it. Readers without it are simply no longer polled."""

    def truncate_for_drain(self) -> None: ...


@runtime_checkable
class CheckpointParticipant(Protocol):
    """A reader, or a sink's writer, that takes part in an epoch with something outside the operators' state; queue sources do.

    What makes output visible is a :class:`CommittingWriter`; one that has these methods as well also saves state and hears of each epoch's
    end. Order within one subtask: source → sink for :meth:`save_state` and :meth:`prepare_commit` (once, whichever of the two asks), sink
    → source for :meth:`finish_commit`; all on the subtask's own thread, a writer's :meth:`SinkWriter.flush` before.
    """

    def save_state(self, epoch: int) -> Json:
        """State that belongs in the snapshot of ``epoch``."""
        ...

    def prepare_commit(self, epoch: int) -> list[Committable]:
        """Seal what came before the barrier of ``epoch``; after return it survives a crash. Committables only from a
        :class:`CommittingWriter`, else an empty list."""
        ...

    def finish_commit(self, epoch: int, success: bool) -> None:
        """``epoch``, and all before it, is durable and its commits are done (True; may come again, after a restore too), or it was aborted
        (False: keep what was prepared, a later epoch subsumes it)."""
        ...

    def restore_from_epoch(self, epoch: int, state: Json) -> None:
        """Called before the first record, with what :meth:`save_state` returned for ``epoch``: once, or for a writer of fewer subtasks than
        there were once for each of those that are its own now (j mod the new parallelism). Writers are restored for the last commits of a
        job that ends, too, without any record."""
        ...


class Committable(msgspec.Struct, frozen=True):
    """Sealed output of one sink subtask for one epoch. ``id`` is ``{job}:{operator}:{subtask}:{epoch}``, stored and never computed again."""

    id: str
    operator: str
    subtask: int
    epoch: int
    rows: int
    checksum: str
    body: dict[str, Json] = {}


class CommitResult(enum.StrEnum):
    """How a commit ended."""

    COMMITTED = "COMMITTED"
    ALREADY_COMMITTED = "ALREADY_COMMITTED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"
    RETRY = "RETRY"


class CommitAnswer(NamedTuple):
    result: CommitResult
    detail: str = ""


class SinkWriter(Protocol):
    """Writes the records of one subtask. Not shared between threads, but see :class:`CommittingWriter`."""

    def write(self, values: list[Any], timestamps: list[int] | None) -> None:
        """Take a batch; may buffer. Calls ``context.guard()`` before anything leaves the process."""
        ...

    def flush(self) -> None:
        """Send what is buffered. Called at each barrier, at linger, and at the end."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class CommittingWriter(Protocol):
    """A writer whose output becomes visible only when an epoch commits (TWO_PHASE_COMMIT, STAGED_ATOMIC_COMMIT)."""

    def write(self, values: list[Any], timestamps: list[int] | None) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def prepare_commit(self, epoch: int) -> list[Committable]:
        """Seal everything written since the last call (none: an empty list) so that it survives a crash of process and target."""
        ...

    def commit(self, committables: Sequence[Committable]) -> CommitAnswer:
        """Make them visible, in the order given, each exactly once whatever was tried before; runs on the background thread with a
        connection of its own. Raises :class:`Fenced` when the target's fence is higher than this generation."""
        ...

    def clean(self, keep: Sequence[Committable]) -> None:
        """Delete staging of *older* generations of this (job, operator) that ``keep`` does not name, for the original subtasks j with
        ``j % parallelism == subtask``. Called once, before READY, after the restored committables were committed."""
        ...


@runtime_checkable
class Sink(Protocol):
    """A sink, as the builder takes it: configuration only."""

    kind: str
    version: int

    @property
    def capability(self) -> SinkCapability: ...

    def config(self) -> dict[str, Json]: ...

    def problems(self) -> list[str]: ...

    def open(self, context: ConnectorContext) -> SinkWriter:
        """Connect, create what the sink needs (tolerant of races), and raise the target's fence to ``context.generation`` where the target
        has one. Raises :class:`Fenced` when it is already higher."""
        ...


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """Where a blob of checkpoint storage lies."""

    key: str
    size: int
    checksum: str


PROOF = "proofs"
"""Prefix of the blob by which the coordinator shows which storage it uses (``proofs/{job}``): nodes refuse to start on another."""


class SnapshotStorage(Protocol):
    """Checkpoint storage: whole blobs under slash-separated keys, written once, durable when :meth:`put` returns."""

    @property
    def url(self) -> str: ...

    def put(self, key: str, data: bytes) -> Handle:
        """Write atomically and flush to the device. A repeat with the same content is harmless. Raises :class:`StorageUnavailable`."""
        ...

    def get(self, handle: Handle) -> bytes:
        """Read and verify. Raises :class:`SnapshotMissing` or :class:`SnapshotUnreadable`, naming the key."""
        ...

    def copy(self, handle: Handle, key: str) -> Handle:
        """The same blob under another key (a savepoint's protected namespace)."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete; those that do not exist are passed over."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with ``prefix``, sorted."""
        ...
