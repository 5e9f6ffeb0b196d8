"""Committables of one subtask: sealed at barriers, kept until they are known to be committed, committed in order.

The runner adds them and says which epoch is durable; commits run on the background lane. What must never happen here: a commit before its epoch is durable,
two commits at once, a committable forgotten on anything but a confirmed commit.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream_schema.connectors import CommitAnswer, CommitResult, Committable, CommittingWriter
from millstream_schema.errors import Fenced, StoreError

from .environment import Background

FIRST_RETRY = 0.1
LAST_RETRY = 5.0


class Committer:
    """Carries out the commits of one subtask's sinks. ``outcome`` is called on the subtask's thread."""

    def __init__(
        self,
        writers: dict[str, CommittingWriter],
        background: Background,
        complete: Callable[[Callable[[], None]], None],
        outcome: Callable[[int, CommitAnswer], None],
    ) -> None:
        self._writers = writers
        self._background = background
        self._complete = complete
        self._outcome = outcome
        self._pending: list[Committable] = []
        self._wanted = 0
        self.committed = 0
        self._busy = False
        self._retry_at: float | None = None
        self._delay = FIRST_RETRY

    def add(self, committables: list[Committable]) -> None:
        self._pending.extend(committables)

    def pending(self) -> list[Committable]:
        """All that are not known to be committed, oldest first."""
        return list(self._pending)

    def durable(self, epoch: int) -> None:
        """Every committable of an epoch ≤ ``epoch`` may and must be committed (subsuming)."""
        self._wanted = max(self._wanted, epoch)
        self._start()

    @property
    def settled(self) -> bool:
        """Whether everything wanted is committed."""
        return self.committed >= self._wanted

    def tick(self, now: float) -> float | None:
        """Try again when it is time; seconds until then, or None."""
        if self._retry_at is None:
            return None
        if now >= self._retry_at:
            self._retry_at = None
            self._start()
            return None
        return self._retry_at - now

    def _start(self) -> None:
        if self._busy or self._retry_at is not None or self.settled:
            return
        epoch = self._wanted
        due = sorted((c for c in self._pending if c.epoch <= epoch), key=lambda c: c.epoch)
        if not due:
            self.committed = epoch
            self._outcome(epoch, CommitAnswer(CommitResult.ALREADY_COMMITTED))
            return
        self._busy = True

        def work() -> CommitAnswer:
            return self._commit(due)

        def done(answer: CommitAnswer | None, error: BaseException | None) -> None:
            self._complete(lambda: self._finish(epoch, due, answer, error))

        self._background.submit("commit", work, done)

    def _commit(self, due: list[Committable]) -> CommitAnswer:
        """On the background thread: operator by operator, stopping at the first that does not succeed."""
        answer = CommitAnswer(CommitResult.COMMITTED)
        for operator, writer in self._writers.items():
            mine = [c for c in due if c.operator == operator]
            if mine:
                answer = writer.commit(mine)
                if answer.result not in (CommitResult.COMMITTED, CommitResult.ALREADY_COMMITTED):
                    return answer
        return answer

    def _finish(self, epoch: int, due: list[Committable], answer: CommitAnswer | None, error: BaseException | None) -> None:
        self._busy = False
        if isinstance(error, Fenced) or (error is not None and not isinstance(error, Exception)):
            raise error
        if error is not None:
            result = CommitResult.UNKNOWN if isinstance(error, StoreError) else CommitResult.RETRY
            answer = CommitAnswer(result, f"{type(error).__name__}: {error}")
        assert answer is not None
        if answer.result in (CommitResult.COMMITTED, CommitResult.ALREADY_COMMITTED):
            gone = {c.id for c in due}
            self._pending = [c for c in self._pending if c.id not in gone]
            self.committed = epoch
            self._delay = FIRST_RETRY
            self._outcome(epoch, answer)
            self._start()
            return
        self._outcome(epoch, answer)

    def retry_later(self, now: float) -> None:
        """Called by the runner after an outcome that is to be tried again."""
        self._retry_at = now + self._delay
        self._delay = min(self._delay * 2, LAST_RETRY)
