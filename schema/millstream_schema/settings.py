"""Settings of the stream runtime: one frozen, validated value per installation and per job.

Every field has unit, default and reason. A wrong combination names both fields. msgspec rather than pydantic, because the same value travels to subtask
processes, which import nothing heavy. What must never happen here: a field that nothing reads, a wrong value that is passed over.
"""

from __future__ import annotations

import msgspec

from .errors import ConfigurationError

UNITS = {
    "retained": "epochs",
    "max_uncommitted": "epochs",
    "max_aborts": "epochs",
    "source_batch": "records",
    "max_segments": "segments",
    "failures": "restarts",
    "stalls": "restarts",
}
"""Units of the whole numbers here; names that end in ``_ms`` are milliseconds."""
LONGEST_MS = 31 * 24 * 3600 * 1000
MOST = (1 << 31) - 1
"""Above what anybody means, and far below where sums of them leave the 64 bits of rows and messages."""


def shown(value: int) -> str:
    """For messages: Python refuses to write out a number of thousands of digits."""
    return str(value) if value < 1 << 64 else f"a number of {value.bit_length()} bits"


def _too_much(of: msgspec.Struct, prefix: str = "") -> list[str]:
    """Whole numbers above their bound."""
    found = []
    for name in of.__struct_fields__:
        value = getattr(of, name)
        most, unit = (LONGEST_MS, "ms (31 days)") if name.endswith("_ms") else (MOST, UNITS.get(name, ""))
        if type(value) is int and value > most:
            found.append(f"{prefix}{name} must be at most {most} {unit}, not {shown(value)}")
    return found


class RestartPolicy(msgspec.Struct, frozen=True):
    """When a job that fails is started again.

    ``kind``: ``fixed`` (``delay_ms``), ``exponential`` (from ``delay_ms`` doubling to ``max_delay_ms``, with jitter) or ``rate`` (at most ``failures`` within
    ``interval_ms``). ``failures`` and ``stalls`` are separate budgets: a stall must not use up what is meant for failures. A budget is refilled by a durable epoch
    made ``interval_ms`` after the last restart.
    """

    kind: str = "exponential"
    delay_ms: int = 200
    max_delay_ms: int = 10_000
    failures: int = 3
    stalls: int = 3
    interval_ms: int = 60_000


class StreamSettings(msgspec.Struct, frozen=True):
    """Settings of one job.

    Durations are milliseconds. What depends on the lease belongs to the installation. ``alignment_ms``: time without any progress of a subtask that has not
    acknowledged. ``epoch_interval_ms``: 0 turns periodic epochs off, under BEST_EFFORT only. ``epoch_timeout_ms``: absolute, long, only aborts.
    ``retained``: checkpoints kept per job.
    """

    epoch_interval_ms: int = 1000
    min_pause_ms: int = 0
    alignment_ms: int = 30_000
    epoch_timeout_ms: int = 600_000
    start_limit_ms: int = 30_000
    commit_deadline_ms: int = 30_000
    retained: int = 5
    max_uncommitted: int = 10
    max_aborts: int = 3
    watermark_interval_ms: int = 50
    source_batch: int = 1000
    discovery_interval_ms: int = 1000
    incremental: bool = True
    max_segments: int = 16
    restart: RestartPolicy = RestartPolicy()
    checkpoints: str = ""
    """URL of checkpoint storage: ``file:///...`` or a database URL. Empty: the installation's default."""

    def problems(self) -> list[str]:
        """Everything wrong, one sentence each."""
        found = [
            f"{name} must be positive, not {value}"
            for name in self.__struct_fields__
            if isinstance(value := getattr(self, name), int)
            and not isinstance(value, bool)
            and value <= 0
            and name not in ("min_pause_ms", "epoch_interval_ms")
        ]
        rules = (
            (self.alignment_ms < self.epoch_timeout_ms, "alignment_ms must be below epoch_timeout_ms"),
            (self.epoch_timeout_ms < 3_600_000, "epoch_timeout_ms must be below one hour"),
            (self.min_pause_ms >= 0, "min_pause_ms must not be negative"),
            (self.epoch_interval_ms >= 0, "epoch_interval_ms must not be negative; 0 turns epochs off (BEST_EFFORT only)"),
            (
                self.restart.kind in ("fixed", "exponential", "rate"),
                f"unknown restart kind {self.restart.kind!r}; known: fixed, exponential, rate",
            ),
            (min(self.restart.failures, self.restart.stalls) >= 0, "restart budgets must not be negative"),
            (self.restart.interval_ms >= 0, "restart interval_ms must not be negative"),
            (0 <= self.restart.delay_ms <= self.restart.max_delay_ms, "restart delay_ms must be between 0 and max_delay_ms"),
        )
        found += _too_much(self) + _too_much(self.restart, "restart.")
        return found + [text for ok, text in rules if not ok]

    def checked(self) -> StreamSettings:
        """Self, or ConfigurationError listing everything wrong."""
        found = self.problems()
        if found:
            raise ConfigurationError("stream settings are invalid:\n" + "\n".join(f"  - {p}" for p in found))
        return self
