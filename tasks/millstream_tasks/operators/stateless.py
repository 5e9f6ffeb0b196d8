"""map, filter, flat_map, union and the assignment of event time.

Driven by the chain. What must never happen here: a record that loses its timestamp or gets another's, a watermark that goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, compress, repeat
from typing import Any

from millstream_schema.connectors import Json
from millstream_schema.errors import OperatorError
from millstream_schema.model import OperatorSpec

from .base import MAX_WATERMARK, MIN_WATERMARK, Batch, Operator, highest_time, restored_watermark


class Map(Operator):
    """One record in, one out; keeps its timestamp."""

    def __init__(self, spec: OperatorSpec, function: Callable[[Any], Any]) -> None:
        super().__init__(spec)
        self.function = function

    def process(self, batch: Batch) -> Batch:
        return Batch(list(map(self.function, batch.values)), batch.timestamps)


class Filter(Operator):
    """Keeps records for which the function is true."""

    def __init__(self, spec: OperatorSpec, function: Callable[[Any], Any]) -> None:
        super().__init__(spec)
        self.function = function

    def process(self, batch: Batch) -> Batch:
        if batch.timestamps is None:
            return Batch(list(filter(self.function, batch.values)))
        keep = list(map(self.function, batch.values))
        return Batch(list(compress(batch.values, keep)), list(compress(batch.timestamps, keep)))


class FlatMap(Operator):
    """One record in, any number out, each with the timestamp of the one it came from."""

    def __init__(self, spec: OperatorSpec, function: Callable[[Any], Any]) -> None:
        super().__init__(spec)
        self.function = function

    def process(self, batch: Batch) -> Batch:
        if batch.timestamps is None:
            return Batch(list(chain.from_iterable(map(self.function, batch.values))))
        parts = [list(part) for part in map(self.function, batch.values)]
        times = chain.from_iterable(map(repeat, batch.timestamps, map(len, parts)))
        return Batch(list(chain.from_iterable(parts)), list(times))


class Union(Operator):
    """Several inputs as one; the runner has merged them already."""

    def process(self, batch: Batch) -> Batch:
        return batch


class AssignTimestamps(Operator):
    """Gives each record its event time (by ``function``, or the source's own) and makes watermarks that trail the highest seen by a bound.

    One tracker per split, the watermark is their minimum, so that splits read in turn do not make each other late. ``current`` never goes back, across recovery too.
    """

    def __init__(self, spec: OperatorSpec, function: Callable[[Any], int] | None) -> None:
        super().__init__(spec)
        self.function = function
        self.bound = int(spec.config.get("out_of_orderness_ms", 0))  # type: ignore[arg-type]
        self.idle_ms = spec.config.get("idle_ms")
        self.current = MIN_WATERMARK
        self._highest: dict[str, int] = {}
        self._split = ""

    def select(self, split: str) -> None:
        """The records that follow come from ``split``."""
        self._split = split

    def begin(self, splits: list[str]) -> None:
        """These splits are read now: none of them may be overtaken before its first record came."""
        for split in splits:
            self._highest.setdefault(split, MIN_WATERMARK)

    def finish(self, split: str) -> None:
        """``split`` has ended and holds the watermark back no longer."""
        self._highest.pop(split, None)

    def process(self, batch: Batch) -> Batch:
        times = batch.timestamps  # the source's were checked when they were read
        if self.function is not None:
            times = list(map(self.function, batch.values))
        if times is None:
            raise OperatorError(f"operator {self.id!r}: its source gives no timestamps: pass a function to assign_timestamps")
        if times:
            highest = max(times) if self.function is None else highest_time(times, f"operator {self.id!r}: its function")
            if highest > self._highest.get(self._split, MIN_WATERMARK):
                self._highest[self._split] = highest
        return Batch(batch.values, times)

    def watermark(self) -> int:
        """The watermark that may be sent now: everything that comes later is expected to be above it."""
        if self._highest:
            candidate = min(self._highest.values()) - self.bound - 1
            if candidate > self.current:
                self.current = candidate
        return self.current

    def on_watermark(self, watermark: int) -> Batch | None:
        if watermark >= MAX_WATERMARK:
            self._highest.clear()
        return None

    def meta(self) -> dict[str, Json]:
        return {"watermark": self.current}

    def restore_meta(self, metas: list[dict[str, Json]], index: int, parallelism: int) -> None:
        self.current = restored_watermark(metas)
