"""What a reader does with a record that cannot be decoded.

Called by every source that decodes bytes (files, Redis streams, queues). What must never happen here: a poison record that vanishes
uncounted, or an error raised in front of good records that were already taken from the input.
"""

from __future__ import annotations

from millstream_schema.connectors import PoisonPolicy
from millstream_schema.errors import RecordError

Dead = tuple[str, bytes, str]


class PoisonTally:
    """Applies one :class:`PoisonPolicy` and keeps what the next :class:`Read` must report."""

    def __init__(self, policy: PoisonPolicy, what: str) -> None:
        self.policy = policy
        self._what = what
        self._dead: list[Dead] = []
        self._skipped = 0

    @property
    def fails(self) -> bool:
        """Whether the policy is FAIL: hand out the records before the poison first, then call :meth:`record`."""
        return self.policy is PoisonPolicy.FAIL

    def record(self, position: str, raw: bytes, reason: str) -> None:
        """Take note of one poison record. Raises :class:`RecordError` under FAIL, before anything is counted."""
        if self.policy is PoisonPolicy.FAIL:
            raise RecordError(
                f"{self._what} cannot decode the record at {position}: {reason}. Mend the record, "
                "or give the source poison='skip' or 'dead-letter'.",
                position=position,
                raw=raw,
            )
        if self.policy is PoisonPolicy.SKIP:
            self._skipped += 1
        else:
            self._dead.append((position, raw, reason))

    def drain(self) -> tuple[list[Dead], int]:
        """Dead letters and skips since the last call."""
        dead, skipped = self._dead, self._skipped
        self._dead, self._skipped = [], 0
        return dead, skipped


def policy_problem(poison: str) -> list[str]:
    """One sentence when ``poison`` is no policy, else nothing."""
    if poison in {p.value for p in PoisonPolicy}:
        return []
    return [f"poison={poison!r} is no policy; write one of {', '.join(repr(p.value) for p in PoisonPolicy)}"]
