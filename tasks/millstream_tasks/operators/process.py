"""``process``: user code with keyed state, timers and side outputs.

Driven by the chain. What must never happen here: a timer fired by CANCEL or SUSPEND, state reached under another key than the one in
hand, a snapshot that lacks something the function keeps through its context.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from millstream_schema.canonical import canonical
from millstream_schema.connectors import Json
from millstream_schema.errors import ConfigurationError, OperatorError
from millstream_schema.model import NAME, OperatorSpec

from .base import MAX_WATERMARK, MIN_WATERMARK, Batch, Keyed, check_times, restored_watermark
from .deadlines import Deadlines
from .keyed_state import (
    NO_KEY,
    AggregatingHandle,
    AggregatingState,
    Cell,
    CheckpointedOperatorList,
    Handle,
    ListHandle,
    ListState,
    MapHandle,
    MapState,
    OperatorListState,
    ReducingHandle,
    ReducingState,
    StateSpec,
    ValueHandle,
    ValueState,
    sweep,
)
from .timers import Timers, TimerTable

_MAX_TIMERS_AT_END = 1000
"""For each timer that is set when the input ends, how many may fire in its wake before that counts as endless."""
_MAX_KNOWN_KEYS = 1 << 16

_H = TypeVar("_H", bound=Handle)


class ProcessFunction:
    """Base of user functions. One instance per subtask; it must keep nothing that matters outside the state of its context."""

    states: ClassVar[dict[str, StateSpec | OperatorListState]] = {}
    """Every state it uses, by name: the plan and the snapshots know no others."""

    def open(self, ctx: Context) -> None:
        """Nothing, unless overridden. Called once, after a restore and before anything else. There is no key."""

    @abstractmethod
    def process(self, value: Any, ctx: Context) -> None:
        """Called with each record."""
        raise NotImplementedError

    def on_timer(self, timestamp: int, ctx: Context) -> None:
        """Nothing, unless overridden. Called with each timer, in the order of their moments. ``ctx.time_domain`` says which kind."""

    def close(self) -> None:
        """Nothing, unless overridden. Called when the subtask ends, however it ends."""


class Context:
    """What a process function works with; valid during a call. ``watermark`` at +∞ (``MAX_WATERMARK``) means that the input has ended."""

    def __init__(self, operator: Process) -> None:
        self._operator = operator
        self.key: Any = NO_KEY
        self.timestamp: int | None = None
        """Event time of the record or of the event timer, UTC ms; None when there is none."""
        self.time_domain: str | None = None
        """``event`` or ``processing`` in ``on_timer``, else None."""
        self.watermark = MIN_WATERMARK
        self.timers = Timers(operator.event_timers, operator.processing_timers, self)

    def processing_time(self) -> int:
        """The node's clock, UTC ms."""
        now_ms = self._operator.now_ms
        if now_ms is None:
            raise ConfigurationError(f"operator {self._operator.id!r} was given no clock: set now_ms before use")
        return now_ms()

    def emit(self, value: Any, timestamp: int | None = None) -> None:
        """Send a record on; with the timestamp of the record or timer in hand when none is given."""
        if timestamp is not None:
            check_times((timestamp,), f"operator {self._operator.id!r}: emit")
        self._operator.collect(None, value, self.timestamp if timestamp is None else timestamp)

    def side(self, tag: str, value: Any) -> None:
        """Send a record to the side output ``tag``."""
        self._operator.collect(tag, value, self.timestamp)

    def value(self, name: str) -> ValueHandle:
        return self._operator.handle(name, ValueState, ValueHandle)

    def list(self, name: str) -> ListHandle:
        return self._operator.handle(name, ListState, ListHandle)

    def map(self, name: str) -> MapHandle:
        return self._operator.handle(name, MapState, MapHandle)

    def reducing(self, name: str, function: Callable[[Any, Any], Any]) -> ReducingHandle:
        """``function(held, value) -> held``."""
        handle = self._operator.handle(name, ReducingState, ReducingHandle)
        handle.function = function
        return handle

    def aggregating(
        self, name: str, create: Callable[[], Any], add: Callable[[Any, Any], Any], result: Callable[[Any], Any] | None = None
    ) -> AggregatingHandle:
        """``create() -> acc``, ``add(acc, value) -> acc``, ``result(acc) -> what get() gives``."""
        handle = self._operator.handle(name, AggregatingState, AggregatingHandle)
        handle.create, handle.add_function, handle.result = create, add, result
        return handle

    def operator_list(self, name: str, redistribution: str | None = None) -> CheckpointedOperatorList:
        """State of the subtask. ``redistribution``, when given, must be the declared one."""
        return self._operator.operator_list(name, redistribution)


class Process(Keyed):
    """Runs a :class:`ProcessFunction`.

    Tables: ``state.{name}``, ``timers.event``, ``timers.processing``. ``now_ms`` is set by the chain. +∞ fires all timers that remain,
    those of processing time too.
    """

    now_ms: Callable[[], int] | None = None

    def __init__(self, spec: OperatorSpec, key: Callable[[Any], Any], function: ProcessFunction) -> None:
        super().__init__(spec, key)
        self.function = function
        self.event_timers = TimerTable(self.table("timers.event"))
        self.processing_timers = TimerTable(self.table("timers.processing"))
        self._context = Context(self)
        self._expiry = Deadlines()
        self._cells: dict[str, Cell] = {}
        self._handles: dict[str, Handle] = {}
        self._lists: dict[str, CheckpointedOperatorList] = {}
        for name, declared in function.states.items():
            self._declare(name, declared)
        self._finite = MIN_WATERMARK
        self._opened = False
        self._known: set[Any] = set()
        self._out: dict[str | None, tuple[list[Any], list[int | None]]] = {}

    # -- state

    def _declare(self, name: str, declared: StateSpec | OperatorListState) -> None:
        if not NAME.match(name):
            raise ConfigurationError(f"operator {self.id!r}: state name {name!r} must match {NAME.pattern}")
        if isinstance(declared, OperatorListState):
            self._lists[name] = CheckpointedOperatorList(declared.redistribution)
            return
        cell = Cell(name, self.table(f"state.{name}"), declared.ttl_ms, self._context, self._expiry)
        self._cells[name] = cell
        match declared:
            case ValueState():
                self._handles[name] = ValueHandle(cell, declared.default)
            case ListState():
                self._handles[name] = ListHandle(cell)
            case MapState():
                self._handles[name] = MapHandle(cell)
            case ReducingState():
                self._handles[name] = ReducingHandle(cell)
            case AggregatingState():
                self._handles[name] = AggregatingHandle(cell)
            case _:
                raise ConfigurationError(f"operator {self.id!r}: state {name!r} is declared as {declared!r}, which is no kind of state")

    def handle(self, name: str, declared: type[StateSpec], kind: type[_H]) -> _H:
        """The handle of a declared state. Raises :class:`OperatorError` when it is not declared so."""
        handle = self._handles.get(name)
        if type(handle) is not kind:
            wanted = f"declare it as {declared.__name__} in states"
            raise OperatorError(f"operator {self.id!r} uses the {declared.kind} state {name!r}: {wanted}")
        return handle

    def operator_list(self, name: str, redistribution: str | None) -> CheckpointedOperatorList:
        """A declared operator list. Raises :class:`OperatorError` when it is not declared so."""
        held = self._lists.get(name)
        if held is None or redistribution not in (None, held.redistribution):
            raise OperatorError(
                f"operator {self.id!r} uses the operator list {name!r}: "
                f"declare it in states as OperatorListState({redistribution or 'split'!r})"
            )
        return held

    # -- output

    def collect(self, tag: str | None, value: Any, timestamp: int | None) -> None:
        """Take what the function sends; ``tag`` None is the main output."""
        out = self._out.get(tag)
        if out is None:
            out = self._out[tag] = ([], [])
        out[0].append(value)
        out[1].append(timestamp)

    def _flush(self) -> Batch | None:
        """What was sent during this call. Records without event time among others that have one get the watermark's: it makes them late
        nowhere.
        """
        held, self._out = self._out, {}
        main: Batch | None = None
        for tag, (values, given) in held.items():
            times = None if all(t is None for t in given) else [self._finite if t is None else t for t in given]
            if tag is None:
                main = Batch(values, times)
            else:
                self.side(tag, values, times)
        return main

    # -- records and time

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._context.key = NO_KEY
            self._context.timestamp = self._context.time_domain = None
            self.function.open(self._context)

    def process(self, batch: Batch) -> Batch | None:
        self._open()
        context, function = self._context, self.function.process
        context.time_domain = None
        times = batch.timestamps
        for i, (key, value) in enumerate(zip(map(self.key, batch.values), batch.values)):
            self._check_key(key)
            context.key = key
            context.timestamp = None if times is None else times[i]
            function(value, context)
        context.key = NO_KEY
        return self._flush()

    def _check_key(self, key: Any) -> None:
        """Refuse what cannot be a key. The keys remembered are a cache and bounded."""
        try:
            if key in self._known:
                return
        except TypeError:  # not hashable: canonical says so by name
            pass
        canonical(key)
        if len(self._known) >= _MAX_KNOWN_KEYS:
            self._known.clear()
        self._known.add(key)

    def on_watermark(self, watermark: int) -> Batch | None:
        self._open()
        context = self._context
        ended = context.watermark >= MAX_WATERMARK
        context.watermark = max(context.watermark, min(watermark, MAX_WATERMARK))
        if context.watermark < MAX_WATERMARK:
            self._finite = context.watermark
            while (due := self.event_timers.take(context.watermark)) is not None:
                self._fire(due, "event")
        elif not ended:
            self._fire_rest()
        return self._flush()

    def _fire_rest(self) -> None:
        """The input has ended. Timers of processing time that are set meanwhile wait for the clock: a heartbeat would never end."""
        self._fire_events_after_end()
        for time, key in self.processing_timers.all():
            if self.processing_timers.remove(key, time):
                self._fire((time, key), "processing")
        self._fire_events_after_end()

    def _fire_events_after_end(self) -> None:
        """No watermark comes any more: every event timer is due, those set meanwhile too."""
        allowed = (len(self.event_timers.all()) + 1) * _MAX_TIMERS_AT_END
        while (due := self.event_timers.take(MAX_WATERMARK)) is not None:
            if allowed == 0:
                raise OperatorError(
                    f"operator {self.id!r}: on_timer goes on setting event timers after the end of the input; "
                    "set none when ctx.watermark is MAX_WATERMARK"
                )
            allowed -= 1
            self._fire(due, "event")

    def _fire(self, due: tuple[int, Any], domain: str) -> None:
        context = self._context
        time, context.key = due
        context.timestamp = time if domain == "event" else None
        context.time_domain = domain
        self.function.on_timer(time, context)
        context.key = NO_KEY

    def on_time(self, now_ms: int) -> Batch | None:
        self._open()
        while (due := self.processing_timers.take(now_ms)) is not None:
            self._fire(due, "processing")
        if self._context.watermark >= MAX_WATERMARK:
            self._fire_events_after_end()
        sweep(self._cells, self._expiry, now_ms)
        return self._flush()

    def next_time(self) -> int | None:
        timer, expiry = self.processing_timers.next(), self._expiry.next()
        if timer is None or expiry is None:
            return expiry if timer is None else timer
        return min(timer, expiry)

    def close(self) -> None:
        self.function.close()

    # -- snapshots

    def meta(self) -> dict[str, Json]:
        return {"watermark": self._finite, "lists": {name: held.get() for name, held in self._lists.items()}}

    def restore_meta(self, metas: list[dict[str, Json]], index: int, parallelism: int) -> None:
        self._finite = self._context.watermark = restored_watermark(metas)
        for name, held in self._lists.items():
            old = [items for m in metas if isinstance(lists := m.get("lists"), dict) and isinstance(items := lists.get(name), list)]
            held.redistribute(old, index, parallelism)
        self.event_timers.rebuild()
        self.processing_timers.rebuild()
        self._expiry = Deadlines()
        for name, cell in self._cells.items():
            cell.expiry = self._expiry
            if cell.ttl is not None:
                for key, (expires, _) in cell.table.panes.get(None, {}).items():
                    self._expiry.set((name, key), expires)
