"""What every operator is: a function over batches, keyed tables, and hooks for time.

Called by :class:`millstream_tasks.chain.Chain` on the subtask's thread. What must never happen here: I/O, locks, clocks that are not passed in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from millstream_schema.canonical import canonical
from millstream_schema.connectors import Json
from millstream_schema.errors import OperatorError
from millstream_schema.model import OperatorSpec

from ..state import KeyedTable

MAX_WATERMARK = (1 << 62) - 1
"""+∞: the input has ended. A signal, never state."""
MIN_WATERMARK = -(1 << 62)
TIME_LIMIT = 1 << 60
"""Event times lie within ± this: far beyond any calendar, and far enough from ±∞ for a window's end or a bound to be added."""


def restored_watermark(metas: list[dict[str, Json]]) -> int:
    """The lowest watermark that the old subtasks' metas hold: what none of them had passed. Never +∞, which is no state."""
    marks = [mark for meta in metas if isinstance(mark := meta.get("watermark", MIN_WATERMARK), int)]
    return max(MIN_WATERMARK, min(min(marks, default=MIN_WATERMARK), MAX_WATERMARK - 1))


def check_times(times: Sequence[Any], who: str) -> None:
    """Raise :class:`OperatorError` that names ``who`` and the value unless every event time is an int within ±``TIME_LIMIT``.

    A time that is none would not fail: it would pick windows that never fire, or raise the watermark over everything that follows.
    """
    if set(map(type, times)) <= {int} and (not times or (min(times) >= -TIME_LIMIT and max(times) <= TIME_LIMIT)):
        return
    bad = next(t for t in times if type(t) is not int or not -TIME_LIMIT <= t <= TIME_LIMIT)
    raise OperatorError(
        f"{who} gave the event time {bad!r} ({type(bad).__qualname__}): give an int of UTC milliseconds within ±2^60 "
        "(int(moment.timestamp() * 1000) for a datetime)"
    )


def highest_time(times: Sequence[int], who: str) -> int:
    """The highest of some event times, checked as by :func:`check_times`: for little more than the maximum costs.

    Records are close in time as a rule. Then their sum alone says that all are numbers, and that none lies so far below the highest that
    it could be a bool or out of range. Where it does not say so, each is looked at.
    """
    try:
        highest, total = max(times), sum(times)
        if type(total) is int and type(highest) is int and highest <= TIME_LIMIT and total - (len(times) - 1) * highest > 1:
            return highest
    except TypeError:
        pass  # said below with the value
    check_times(times, who)
    return max(times)


def refuse_unhashable(key: Any) -> None:
    """Raise :class:`KeyRefused` for a key that cannot be hashed; called when a lookup by it raised TypeError."""
    try:
        hash(key)
    except TypeError:
        canonical(key)


class Batch:
    """Records that travel together. ``timestamps`` (UTC ms) is None until something assigns them."""

    __slots__ = ("timestamps", "values")

    def __init__(self, values: list[Any], timestamps: list[int] | None = None) -> None:
        self.values = values
        self.timestamps = timestamps


class Operator:
    """Base of all operators.

    ``tables`` holds every keyed state by name; ``sides`` collects side outputs of the current call: tag → (values, timestamps).
    """

    def __init__(self, spec: OperatorSpec) -> None:
        self.id = spec.id
        self.spec = spec
        self.tables: dict[str, KeyedTable] = {}
        self.sides: dict[str, Batch] = {}
        self.late = 0

    def table(self, name: str) -> KeyedTable:
        return self.tables.setdefault(name, KeyedTable(name))

    def side(self, tag: str, values: list[Any], timestamps: list[int] | None) -> None:
        """Put records out on the side output ``tag``."""
        held = self.sides.get(tag)
        if held is None:
            self.sides[tag] = Batch(list(values), None if timestamps is None else list(timestamps))
            return
        held.values.extend(values)
        if held.timestamps is not None and timestamps is not None:
            held.timestamps.extend(timestamps)

    @abstractmethod
    def process(self, batch: Batch) -> Batch | None:
        """Take a batch, give what goes on."""
        raise NotImplementedError

    def on_watermark(self, watermark: int) -> Batch | None:
        """The watermark has risen to ``watermark``; called before it is passed on. Not called by CANCEL or SUSPEND."""
        return None

    def on_time(self, now_ms: int) -> Batch | None:
        """Processing time has reached ``next_time()``."""
        return None

    def next_time(self) -> int | None:
        """When :meth:`on_time` wants to be called next, in ms of the node's clock."""
        return None

    def meta(self) -> dict[str, Json]:
        """State that has no key (operator list state, watermarks); small."""
        return {}

    def restore_meta(self, metas: list[dict[str, Json]], index: int, parallelism: int) -> None:
        """Nothing to restore, unless overridden: given the metas of all old subtasks in order; called once, after the tables were loaded."""

    def close(self) -> None:
        """Nothing is held, unless overridden."""


class Keyed(Operator):
    """An operator whose records have a key, by the key function of the edge that leads to it."""

    def __init__(self, spec: OperatorSpec, key: Callable[[Any], Any]) -> None:
        super().__init__(spec)
        self.key = key
