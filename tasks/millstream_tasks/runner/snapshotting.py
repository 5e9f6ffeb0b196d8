"""Snapshots of a subtask's keyed state: a short cut on the subtask's thread, encoding and storing in the background, increments in between.

Increments are relative to the last epoch known DURABLE: what an epoch that was aborted had cut is carried into the next. What must never happen here: a
segment that is a view of running state, an increment on top of something that was never durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_schema.connectors import Handle, SnapshotStorage
from millstream_schema.settings import StreamSettings
from millstream_schema.values import TypeRegistry

from ..operators.base import Operator
from ..segments import SegmentWriter
from ..state import TableCut
from .environment import Environment

DELTA_LIMIT = 4
"""A full snapshot is due when increments together hold this many times the state's entries."""


@dataclass
class Capture:
    """What was cut for one epoch."""

    epoch: int
    full: bool
    cuts: list[tuple[str, TableCut]]
    base: list[Handle]
    writer: SegmentWriter
    later: list[tuple[str, TableCut]] = field(default_factory=list)
    entries: int = 0


class Snapshotter:
    """Cuts and stores. ``key`` of a segment: ``{job}/e{epoch}/{vertex}-{subtask}``: epoch ids never repeat."""

    def __init__(
        self,
        operators: list[Operator],
        environment: Environment,
        registry: TypeRegistry,
        settings: StreamSettings,
        shards: range,
        shard_count: int,
        prefix: str,
        name: str,
    ) -> None:
        self._operators = operators
        self._storage: SnapshotStorage = environment.storage
        self._yield = environment.yield_thread
        self._registry = registry
        self._settings = settings
        self._shards = shards
        self._shard_count = shard_count
        self._prefix = prefix
        self._name = name
        self._base: list[Handle] = []
        self._base_entries = 0
        self._undurable: dict[int, tuple[Capture, list[Handle]]] = {}
        self.size = 0

    def restored(self, segments: list[Handle]) -> None:
        """Increments may build on these: they hold exactly this subtask's state."""
        self._base = list(segments)
        self._base_entries = 0

    def cut(self, epoch: int) -> Capture:
        """On the subtask's thread: take what changed (or everything). Mutable values are encoded here, immutable ones later."""
        live = sum(t.size() for o in self._operators for t in o.tables.values())
        older = [c for _, (c, _) in sorted(self._undurable.items())]
        full = (
            not self._settings.incremental
            or any(c.full for c in older)  # an increment on top of it would not know what it removed
            or not self._base
            or max(len(self._base), len(older)) >= self._settings.max_segments
            or self._base_entries > DELTA_LIMIT * max(live, 1)
        )
        cuts = [(o.id, self._merged(o.id, t.cut(full), older)) for o in self._operators for t in o.tables.values()]
        writer = SegmentWriter(self._registry, self._shards, self._shard_count, full, self._yield)
        capture = Capture(epoch, full, cuts, [] if full else list(self._base), writer)
        for operator, cut in cuts:
            capture.entries += cut.entries() + len(cut.dropped)
            if cut.shareable():
                capture.later.append((operator, cut))
            else:
                writer.table(operator, cut)
        if full:
            self._undurable.clear()  # nothing will build on them, or on what was durable before
        self._undurable[epoch] = (capture, [])
        return capture

    def _merged(self, operator: str, cut: TableCut, older: list[Capture]) -> TableCut:
        """An increment with those of older epochs that did not become durable underneath."""
        if cut.full:
            return cut
        under: TableCut | None = None
        for capture in older:
            for name, part in capture.cuts:
                if name == operator and part.name == cut.name:
                    under = part if under is None else part.after(under)
        return cut if under is None else cut.after(under)

    def store(self, capture: Capture) -> list[Handle]:
        """On the background thread: encode and write; handles of all segments of the epoch. Raises StorageError."""
        if not capture.entries:
            return capture.base
        for operator, cut in capture.later:
            capture.writer.table(operator, cut)
        handle = self._storage.put(f"{self._prefix}/e{capture.epoch}/{self._name}", capture.writer.finish())
        return [*capture.base, handle]

    def stored(self, capture: Capture, handles: list[Handle]) -> None:
        if capture.epoch in self._undurable:
            self._undurable[capture.epoch] = (capture, handles)
        self.size = sum(h.size for h in handles)

    def durable(self, epoch: int) -> None:
        """Everything up to ``epoch`` is in its segments.

        When a newer epoch was cut before this was heard, the base stays: that epoch's manifest does not list this one's segments, so once it is durable and this
        one's manifest is collected they may be deleted under whatever was built on them.
        """
        entry = self._undurable.get(epoch)
        if entry is None or any(e > epoch for e in self._undurable):
            return
        capture, handles = entry
        self._base = handles
        self._base_entries = capture.entries if capture.full else self._base_entries + capture.entries
        if capture.full:
            self._base_entries = 0
        self._undurable.clear()
