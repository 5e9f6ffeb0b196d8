"""Drives an operator as the chain does, with snapshots and restores in between, for the tests beside it.

What must never happen here: a snapshot that shares anything with the running operator. A cut is encoded at once, here by a deep copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from millstream_schema.connectors import Json
from millstream_schema.model import OperatorSpec
from millstream_tasks.operators.base import Batch, Operator
from millstream_tasks.state import GONE, TableCut


def spec(kind: str, **config: Json) -> OperatorSpec:
    return OperatorSpec(id="op", kind=kind, uid=True, config=config)


def encoded(cut: TableCut) -> TableCut:
    panes = {ns: {k: v if v is GONE else copy.deepcopy(v) for k, v in pane.items()} for ns, pane in cut.panes.items()}
    return TableCut(cut.name, panes, set(cut.dropped), cut.full)


def records(batch: Batch) -> list[tuple[Any, int | None]]:
    """(value, timestamp) of every record; the two lists must be of one length."""
    if batch.timestamps is None:
        return [(value, None) for value in batch.values]
    return list(zip(batch.values, batch.timestamps, strict=True))


class Driver:
    """One operator subtask over its lives. ``out``: (value, timestamp) of everything it sent; ``sides``: the same by tag."""

    def __init__(self, make: Callable[[], Operator]) -> None:
        self.make = make
        self.operator = make()
        self.out: list[tuple[Any, int | None]] = []
        self.sides: dict[str, list[tuple[Any, int | None]]] = {}
        self.late = 0
        self._cuts: dict[str, TableCut] = {}
        self._meta: dict[str, Json] = {}

    def _take(self, batch: Batch | None) -> list[Any]:
        for tag, held in self.operator.sides.items():
            self.sides.setdefault(tag, []).extend(records(held))
        self.operator.sides.clear()
        if batch is None:
            return []
        self.out.extend(records(batch))
        return batch.values

    def send(self, values: list[Any], timestamps: list[int] | None = None) -> list[Any]:
        return self._take(self.operator.process(Batch(values, timestamps)))

    def watermark(self, watermark: int) -> list[Any]:
        return self._take(self.operator.on_watermark(watermark))

    def time(self, now_ms: int) -> list[Any]:
        return self._take(self.operator.on_time(now_ms))

    def snapshot(self, full: bool) -> None:
        """Cut all tables; an incremental cut goes on top of the one before, as the segments of a checkpoint do."""
        for name, table in self.operator.tables.items():
            older = self._cuts.get(name)
            cut = encoded(table.cut(full or older is None))
            self._cuts[name] = cut if cut.full or older is None else cut.after(older)
        self._meta = copy.deepcopy(self.operator.meta())

    def restore(self) -> None:
        """Go on as a fresh operator from the last snapshot, which must be of this moment."""
        self.late += self.operator.late
        self.operator = restored([self], self.make)[0]

    def content(self) -> dict[str, int]:
        return {name: table.size() for name, table in self.operator.tables.items()}


def restored(
    old: list[Driver], make: Callable[[], Operator], parallelism: int = 1, owner: Callable[[Any], int] = lambda key: 0
) -> list[Operator]:
    """Fresh subtasks from the snapshots of all old ones, keys going to ``owner(key)``."""
    new = [make() for _ in range(parallelism)]
    for driver in old:
        for name, cut in driver._cuts.items():
            for ns, pane in cut.panes.items():
                for key, value in pane.items():
                    if value is not GONE:
                        new[owner(key)].table(name).load(ns, [key], [copy.deepcopy(value)])
    for index, operator in enumerate(new):
        operator.restore_meta(copy.deepcopy([driver._meta for driver in old]), index, parallelism)
    return new
