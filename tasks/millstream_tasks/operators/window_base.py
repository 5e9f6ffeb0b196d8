"""What tumbling, sliding and session windows share: their functions, their clock, the judgement of what is late.

Subclassed in :mod:`windows` and :mod:`session`; driven by the chain. What must never happen here: a watermark that goes back, +∞ kept as
state, an accumulator that two keys or a sent result and the state share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, NamedTuple

from millstream_schema.connectors import Json
from millstream_schema.errors import ConfigurationError, OperatorError
from millstream_schema.model import OperatorSpec

from .base import MAX_WATERMARK, MIN_WATERMARK, Batch, Keyed, restored_watermark
from .ownership import own


class Window(NamedTuple):
    """``[start, end)`` in UTC ms."""

    start: int
    end: int


class Fold:
    """How the records of one (key, window) become an accumulator, and that a result. ``result`` None: ``(key, start, end,
    accumulator)``.
    """

    __slots__ = ("add", "first", "merge", "result")

    def __init__(
        self,
        first: Callable[[Any], Any],
        add: Callable[[Any, Any], Any],
        merge: Callable[[Any, Any], Any] | None,
        result: Callable[[Any, Window, Any], Any] | None,
    ) -> None:
        self.first = first
        self.add = add
        self.merge = merge
        self.result = result


def fold(
    create: Callable[[], Any] | None = None,
    add: Callable[[Any, Any], Any] | None = None,
    result: Callable[[Any, Window, Any], Any] | None = None,
    merge: Callable[[Any, Any], Any] | None = None,
    reduce: Callable[[Any, Any], Any] | None = None,
    function: Callable[[Any, Window, list[Any]], Any] | None = None,
) -> Fold:
    """The fold of exactly one of: ``create`` + ``add`` (+ ``result``, ``merge``), ``reduce`` (+ ``result``), ``function`` over all values.

    Raises :class:`ConfigurationError` for any other combination.
    """
    given = [name for name, f in (("create", create), ("reduce", reduce), ("function", function)) if f is not None]
    if len(given) != 1 or (create is None) != (add is None):
        raise ConfigurationError(f"a window needs exactly one of create + add, reduce, function; it has {', '.join(given) or 'none'}")
    if function is not None:
        if result is not None:
            raise ConfigurationError("a window with a whole-window function takes no result function: return the result from function")
        return Fold(_alone, _append, _concatenate, function)
    if reduce is not None:
        # The first record may be in other windows or branches too; a reduce that works in place must not change those.
        return Fold(own, reduce, reduce, result)
    assert create is not None and add is not None
    return Fold(_first_of(create, add), add, merge, result)


def _first_of(create: Callable[[], Any], add: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda value: add(create(), value)


def _alone(value: Any) -> list[Any]:
    return [value]


def _append(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def _concatenate(left: list[Any], right: list[Any]) -> list[Any]:
    return left + right


def millis(spec: OperatorSpec, name: str, minimum: int | None, default: int | None = None) -> int:
    """An integer setting of a window in ms. Raises :class:`ConfigurationError` when missing, no integer or below ``minimum``."""
    value = spec.config.get(name, default)
    if type(value) is not int:
        raise ConfigurationError(f"operator {spec.id!r}: {name} must be an integer number of milliseconds, not {value!r}")
    if minimum is not None and value < minimum:
        raise ConfigurationError(f"operator {spec.id!r}: {name} must be at least {minimum} ms, not {value}")
    return value


class Windowed(Keyed):
    """Base of the window operators.

    Config: ``lateness_ms`` (0), ``late_tag`` (None), ``time``: ``event`` (default) or ``processing``. ``now_ms`` is set by the chain.
    Processing time runs through the same code as event time: the clock at ``now`` is the watermark ``now - 1``.
    """

    now_ms: Callable[[], int] | None = None

    def __init__(self, spec: OperatorSpec, key: Callable[[Any], Any], functions: Fold) -> None:
        super().__init__(spec, key)
        self.fold = functions
        self.lateness = millis(spec, "lateness_ms", 0, 0)
        tag = spec.config.get("late_tag")
        if tag is not None and not isinstance(tag, str):
            raise ConfigurationError(f"operator {spec.id!r}: late_tag must be the name of a side output, not {tag!r}")
        self.late_tag = tag
        time = spec.config.get("time", "event")
        if time not in ("event", "processing"):
            raise ConfigurationError(f"operator {spec.id!r}: time must be 'event' or 'processing', not {time!r}")
        self.processing = time == "processing"
        if self.processing and (self.lateness or tag is not None):
            raise ConfigurationError(f"operator {spec.id!r}: nothing is late in processing time; leave lateness_ms and late_tag out")
        self.watermark = MIN_WATERMARK
        self._finite = MIN_WATERMARK
        self._clock = MIN_WATERMARK

    # -- what subclasses give

    @abstractmethod
    def _advance(self, to: int) -> Batch | None:
        """Fire every window whose last moment is ≤ ``to``, free what is past its lateness."""
        raise NotImplementedError

    @abstractmethod
    def _rebuild(self) -> None:
        """Make the firing order anew from the tables."""
        raise NotImplementedError

    @abstractmethod
    def _next_end(self) -> int | None:
        """Earliest end of a window that has not fired."""
        raise NotImplementedError

    # -- time

    def _times(self, batch: Batch) -> Iterable[int]:
        if self.processing:
            if self.now_ms is None:
                raise ConfigurationError(f"operator {self.id!r} works on processing time and was given no clock: set now_ms before use")
            # A clock that is set back must not reopen a window that has fired.
            self._clock = max(self._clock, self.now_ms())
            return repeat(self._clock)
        if batch.timestamps is None:
            raise OperatorError(
                f"operator {self.id!r} works on event time and got records without timestamps: add .assign_timestamps(...) before"
            )
        return batch.timestamps

    def on_watermark(self, watermark: int) -> Batch | None:
        """Fires what is complete; +∞ fires all that remains, in processing time too."""
        if self.processing:
            return self._advance(MAX_WATERMARK) if watermark >= MAX_WATERMARK else None
        if watermark <= self.watermark:
            return None
        self.watermark = min(watermark, MAX_WATERMARK)
        if watermark < MAX_WATERMARK:
            self._finite = watermark
        return self._advance(self.watermark)

    def on_time(self, now_ms: int) -> Batch | None:
        if not self.processing:
            return None
        self._clock = max(self._clock, now_ms)
        return self._advance(self._clock - 1)

    def next_time(self) -> int | None:
        return self._next_end() if self.processing else None

    def _past(self, end: int, at: int) -> bool:
        """Whether a window is past its lateness at the watermark ``at``; +∞ is past every lateness."""
        return at >= MAX_WATERMARK or end - 1 + self.lateness <= at

    # -- records

    def _too_late(self, value: Any, timestamp: int) -> None:
        self.late += 1
        if self.late_tag is not None:
            self.side(self.late_tag, [value], [timestamp])

    def _result(self, key: Any, window: Window, acc: Any, kept: bool) -> Any:
        """The output of one (key, window). ``kept``: the state lives on, so what is sent must not share it."""
        if kept:
            acc = own(acc)
        result = self.fold.result
        return (key, window.start, window.end, acc) if result is None else result(key, window, acc)

    # -- snapshots

    def meta(self) -> dict[str, Json]:
        return {} if self.processing else {"watermark": self._finite}

    def restore_meta(self, metas: list[dict[str, Json]], index: int, parallelism: int) -> None:
        self.watermark = self._finite = restored_watermark(metas)
        self._rebuild()
