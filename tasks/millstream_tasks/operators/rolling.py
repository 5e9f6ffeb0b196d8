"""Rolling keyed reduce and aggregate: each record updates its key's state and the new value goes on.

Driven by the chain. What must never happen here: a change that is not in the delta, a value that cannot be a key taken for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream_schema.canonical import canonical
from millstream_schema.model import OperatorSpec

from .base import Batch, Keyed, refuse_unhashable


class Reduce(Keyed):
    """``function(old, record) -> new``; the first record of a key is its first value. Emits the new value."""

    def __init__(self, spec: OperatorSpec, key: Callable[[Any], Any], function: Callable[[Any, Any], Any]) -> None:
        super().__init__(spec, key)
        self.function = function
        self._table = self.table("value")
        self._table.lasting = True

    def process(self, batch: Batch) -> Batch:
        live, delta = self._table.pane()
        function = self.function
        out: list[Any] = []
        append = out.append
        for key, value in zip(map(self.key, batch.values), batch.values):
            try:
                value = function(live[key], value)
            except KeyError:
                if key in live:
                    raise
                canonical(key)
            except TypeError:
                refuse_unhashable(key)
                raise
            live[key] = delta[key] = value
            append(value)
        self._table.note(out)
        return Batch(out, batch.timestamps)


class Aggregate(Keyed):
    """``create() -> acc``, ``add(acc, record) -> acc``, ``result(key, acc) -> output``. Emits the result after each record."""

    def __init__(
        self,
        spec: OperatorSpec,
        key: Callable[[Any], Any],
        create: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        result: Callable[[Any, Any], Any] | None,
    ) -> None:
        super().__init__(spec, key)
        self.create = create
        self.add = add
        self.result = result
        self._table = self.table("value")
        self._table.lasting = True

    def process(self, batch: Batch) -> Batch:
        live, delta = self._table.pane()
        get = live.get
        add, create, result = self.add, self.create, self.result
        keys = list(map(self.key, batch.values))
        accs: list[Any] = []
        out: list[Any] = []
        keep, emit = accs.append, out.append
        missing = _MISSING
        for key, value in zip(keys, batch.values):
            try:
                acc = get(key, missing)
            except TypeError:
                refuse_unhashable(key)
                raise
            if acc is missing:
                canonical(key)
                acc = create()
            live[key] = delta[key] = acc = add(acc, value)
            keep(acc)
            if result is not None:
                emit(result(key, acc))
        self._table.note(accs)
        return Batch(list(zip(keys, accs)) if result is None else out, batch.timestamps)


_MISSING = object()
