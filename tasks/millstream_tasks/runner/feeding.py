"""The source of a subtask in turn: records into the chain, and what it means when there are none.

Called by the runner on the source's own reading thread, between two records. What must never happen here: a read behind a terminal barrier, a watermark that
passes a split nobody has read from.
"""

from __future__ import annotations

from collections.abc import Iterable

from millstream_schema.connectors import Read
from millstream_schema.control import Exhausted, WantsEpoch
from millstream_schema.errors import OperatorError
from millstream_schema.manifest import SplitState
from millstream_schema.settings import StreamSettings

from ..chain import Chain
from ..operators.base import MAX_WATERMARK, Batch, check_times
from .discovery import Discovery
from .environment import Environment
from .outputs import Outputs
from .reading import SourceDriver, dead_letters


class SourceFeed:
    """Feeds the chain from the splits that ``driver`` reads. ``discovery``: on the source's first subtask."""

    def __init__(
        self,
        driver: SourceDriver,
        discovery: Discovery | None,
        chain: Chain,
        outputs: Outputs,
        environment: Environment,
        settings: StreamSettings,
        counters: dict[str, int],
    ) -> None:
        self.driver = driver
        self.exhausted = False
        """The end of the source was reported, and +∞ went through the chain."""
        self.lag_ms: int | None = None
        """How old the newest record read was when it was read; None before the first one, and without event times."""
        self._discovery = discovery
        self._chain = chain
        self._outputs = outputs
        self._env = environment
        self._settings = settings
        self._counters = counters
        self._last_data = 0.0
        self._watermark_at = 0
        self._wanted_epoch = False

    def take_splits(self, splits: Iterable[SplitState], complete: bool) -> None:
        """These are this subtask's; nothing is taken any more once the source is drained: what comes then is for whoever resumes."""
        if self.driver.truncated:
            return
        new = self.driver.assign(splits, complete)
        if self._chain.assigner is not None:
            self._chain.assigner.begin(new)

    def start(self, splits: Iterable[SplitState]) -> None:
        """Open the restored splits; the first subtask looks for others."""
        self.take_splits(splits, False)
        if self._discovery is not None:
            self._discovery.look()

    def run(self) -> None:
        """The job runs: idleness counts from now."""
        self._last_data = self._env.clock.monotonic()

    def turn(self, now: float) -> bool:
        """Read once; whether there was anything."""
        if self._discovery is not None:
            self._discovery.turn(now)
        found = self.driver.poll(self._settings.source_batch)
        if found is None:
            self._nothing_to_read(now)
            return False
        self._take(*found, now)
        return True

    def _take(self, split: str, read: Read, now: float) -> None:
        """What one poll of ``split`` brought, into the chain."""
        if read.values or read.dead:
            self._last_data = now
            self._outputs.emit_status(False)
        if read.values:
            self._counters["records_in"] += len(read.values)
            if read.timestamps is not None:
                self._check_times(read)
            if read.timestamps:
                self.lag_ms = self._env.clock.now_ms() - read.timestamps[-1]
            if self._chain.assigner is not None:
                self._chain.assigner.select(split)
            self._chain.push(Batch(read.values, read.timestamps))
        if read.dead:
            self._outputs.emit_side(self.driver.id, "dead-letter", Batch(dead_letters(read.dead)))
        if read.exhausted and self._chain.assigner is not None:
            self._chain.assigner.finish(split)
        self._assign_watermark()

    def _check_times(self, read: Read) -> None:
        """The source's own event times, before anything relies on them."""
        times, values = read.timestamps, read.values
        assert times is not None
        check_times(times, f"source {self.driver.id!r}")
        if len(times) != len(values):
            raise OperatorError(f"source {self.driver.id!r} gave {len(times)} event times for {len(values)} records; give one for each")

    def drain(self) -> bool | None:
        """Towards the end that DRAIN sets: None once it is reached, before that whether there was anything to read."""
        now = self._env.clock.monotonic()
        if not self.driver.exhausted:
            self.driver.truncate()
            if not self.driver.exhausted:
                found = self.driver.poll(self._settings.source_batch)
                if found is not None:
                    self._take(*found, now)
                return found is not None
        self._nothing_to_read(now)
        return None

    def durable(self, epoch: int) -> None:
        self.driver.durable(epoch)
        self._wanted_epoch = False

    def _nothing_to_read(self, now: float) -> None:
        driver, assigner = self.driver, self._chain.assigner
        if driver.exhausted:
            if not self.exhausted:
                self.exhausted = True
                self._outputs.emit_status(False)
                self._chain.advance(MAX_WATERMARK)
                self._env.report(Exhausted())
            return
        if assigner is not None:
            self._watermark_at = 0
            self._assign_watermark()
        if driver.wants_epoch and not self._wanted_epoch:
            self._wanted_epoch = True
            self._env.report(WantsEpoch())
        idle_ms = assigner.idle_ms if assigner is not None else None
        if not driver.active() or (isinstance(idle_ms, int) and (now - self._last_data) * 1000 >= idle_ms):
            self._outputs.emit_status(True)

    def _assign_watermark(self) -> None:
        now_ms = self._env.clock.now_ms()
        if self._chain.assigner is not None and not 0 <= now_ms - self._watermark_at < self._settings.watermark_interval_ms:
            self._watermark_at = now_ms
            self._chain.assign_watermark()
