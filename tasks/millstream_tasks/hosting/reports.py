"""Reports of a node's subtasks on their way to the rows: what each message writes, and the queue of writes that the database has not taken yet.

Called by the node. What must never happen here: a report dropped because the database was away, one job's reports held up by a refused one of another, the
coordinator hinted before the rows say so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog

from millstream_schema.control import (
    Ack,
    ChannelsDeleted,
    CommitPending,
    Committed,
    Declined,
    Deployment,
    Discovered,
    Exhausted,
    Ready,
    SubtaskMessage,
    WantsEpoch,
)
from millstream_schema.errors import CommitUnknown, StoreUnavailable
from millstream_schema.hints import Hints, JobHint
from millstream_schema.store import epochs, jobs, registry
from millstream_schema.store.database import Database, Transaction

log = structlog.get_logger(__name__)
Write = Callable[[Transaction], object]


class Reports:
    """Writes reports in order, in one transaction; kept and tried again while the database is away."""

    def __init__(self, database: Database, hints: Hints) -> None:
        self._db = database
        self._hints = hints
        self._waiting: deque[tuple[str, Write]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: str, write: Write) -> None:
        self._waiting.append((job, write))

    def clear(self) -> None:
        """The lease has passed: what these attempts had to say counts no more."""
        self._waiting.clear()

    def flush(self) -> dict[str, str]:
        """Write all; job → why, of those with a report that is refused for good. What is still here afterwards waits for the database."""
        if not self._waiting:
            return {}
        batch = list(self._waiting)
        try:
            self._write([write for _, write in batch])
        except (StoreUnavailable, CommitUnknown) as exc:
            self._kept(exc)
        except Exception as exc:  # one of them is refused for good: it must not hold up those of other jobs
            log.warning("reports refused; they are written one by one", count=len(batch), error=str(exc))
            return self._flush_singly()
        else:
            self._wrote(len(batch))
        return {}

    def _flush_singly(self) -> dict[str, str]:
        refused: dict[str, str] = {}
        while self._waiting:
            job, write = self._waiting[0]
            try:
                self._write([write])
            except (StoreUnavailable, CommitUnknown) as exc:
                self._kept(exc)
                break
            except Exception as exc:
                refused[job] = f"a report was refused: {type(exc).__name__}: {exc}"
            self._wrote(1)
        return refused

    def _write(self, writes: list[Write]) -> None:
        def work(tx: Transaction) -> None:
            for write in writes:
                write(tx)

        try:
            self._db.run(work)
        except CommitUnknown:
            self._db.run(work)

    def _kept(self, exc: Exception) -> None:
        log.warning("reports kept, not written yet", count=len(self._waiting), error=str(exc))

    def _wrote(self, count: int) -> None:
        done = [self._waiting.popleft() for _ in range(count)]
        for job in sorted({job for job, _ in done}):
            self._hints.to_coordinator(JobHint(job))


def write_of(d: Deployment, message: SubtaskMessage) -> Write | None:
    """What a message of an attempt writes to the rows, under its fence; None for one that writes nothing by itself."""
    who = (d.job, d.generation, d.subtask, d.attempt)
    match message:
        case Ready(committed=committed):
            return lambda tx: registry.ready_assignment(tx, *who, committed)
        case Ack(epoch=epoch, snapshot=snapshot):
            return lambda tx: epochs.acknowledge(tx, d.job, epoch, d.generation, d.subtask, d.attempt, snapshot, "")
        case Declined(epoch=epoch, reason=reason):
            why = reason or "declined"
            return lambda tx: epochs.acknowledge(tx, d.job, epoch, d.generation, d.subtask, d.attempt, None, why)
        case Committed(epoch=epoch):
            return lambda tx: registry.committed_assignment(tx, *who, epoch)
        case CommitPending(epoch=epoch, result=result, detail=detail):
            return lambda tx: registry.note_commit(tx, *who, f"epoch {epoch}: {result}: {detail}")
        case Discovered(operator=operator, splits=found, complete=complete):
            return lambda tx: epochs.discover(tx, d.job, d.generation, operator, found, complete)
        case Exhausted():
            return lambda tx: registry.exhausted_assignment(tx, *who)
        case WantsEpoch():
            return lambda tx: jobs.want_epoch(tx, d.job, d.generation)
        case ChannelsDeleted():
            return lambda tx: epochs.forget_channels(tx, d.job, d.generation)
    return None
