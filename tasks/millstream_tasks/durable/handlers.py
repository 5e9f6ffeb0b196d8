"""Handlers of durable tasks: user functions under their names, with what their authors declare, and their arguments checked against annotations.

Filled when a user's module is imported, passed down from there. What must never happen here: a function found by a name that came with data and was not registered.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_origin, get_type_hints

import pydantic

from millstream_schema import given
from millstream_schema.durable.catalogue import HandlerEntry, Parameter, entry
from millstream_schema.durable.records import NewTask
from millstream_schema.durable.requests import (
    HANDLER,
    OPTION_NAMES,
    HandlerSpec,
    Options,
    encode_arguments,
    new_task,
    plain_call,
    require_options,
)
from millstream_schema.durable.schedules import Declaration
from millstream_schema.errors import ConfigurationError, TaskInvalid, UnknownHandler

from .answers import Reconcile
from .shapes import Check, check_of, described

Errors = tuple[type[BaseException], ...]
Source = str | Callable[[], str]
"""A database's URL, or what gives it when it is first needed."""
CONTEXT = "ctx"
CELERYS = {"countdown": "delay", "eta": "due_at", "expires": "start_by", "task_id": "key"}
"""A first parameter of this name gets the attempt's context."""


class Form:
    """What a request for one handler must look like. By object it comes from the function, by name from what workers told of it."""

    def __init__(self, spec: HandlerSpec, signature: inspect.Signature, checks: Mapping[str, Check]) -> None:
        self.spec = spec
        self._signature = signature
        self._checks = checks

    @property
    def taken_names(self) -> tuple[str, ...]:
        """Parameters that ``submit`` would take for options of its own."""
        alone = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return tuple(p.name for p in self._signature.parameters.values() if p.name in OPTION_NAMES and p.kind not in alone)

    def request(
        self,
        namespace: str,
        task_id: str,
        key: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        actor: str,
        origin: str,
    ) -> NewTask:
        """A complete request for this handler. Raises TaskInvalid naming everything that does not fit."""
        require_options(options)
        bound = self._checked(*plain_call(args, kwargs))
        permit = ""
        if self.spec.permit and not options.permit:
            try:
                permit = self.spec.permit.format_map(bound.arguments)
            except (KeyError, IndexError, AttributeError, TypeError, ValueError) as exc:
                raise TaskInvalid(f"handler {self.spec.name!r}: its permit {self.spec.permit!r} cannot be filled in: {exc!r}") from exc
        arguments = encode_arguments(bound.args, bound.kwargs)
        return new_task(self.spec, namespace, task_id, key, arguments, options, permit=permit, actor=actor, origin=origin)

    def _checked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Arguments as the annotations want them, in plain values."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            hints = [f"{CELERYS[name]}= of submit is what Celery calls {name}" for name in kwargs if name in CELERYS]
            raise TaskInvalid("; ".join([f"handler {self.spec.name!r}: {exc}", *hints])) from exc
        problems = []
        for name, value in bound.arguments.items():
            check = self._checks.get(name)
            if check is not None and self._plain(name):
                try:
                    bound.arguments[name] = check(value)
                except pydantic.ValidationError as exc:
                    problems += [f"{name}: {e['msg']}" for e in exc.errors(include_input=False, include_url=False)]
        if problems:
            raise TaskInvalid(f"handler {self.spec.name!r}: " + "; ".join(problems))
        return bound

    def _plain(self, name: str) -> bool:
        kind = self._signature.parameters[name].kind
        return kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Handler(Form):
    """One registered function. Calling it calls the function, as if it were not registered.

    ``retry_on``: of its errors, those that are tried again (all, if none are named); ``no_retry_on``: those of them that are not. ``reconcile``: tells what became of its calls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: HandlerSpec,
        *,
        retry_on: Errors = (),
        no_retry_on: Errors = (),
        reconcile: Reconcile | None = None,
    ) -> None:
        self.function = function
        self.is_coroutine = inspect.iscoroutinefunction(function)
        self.reconcile = reconcile
        self._retry_on = retry_on
        self._no_retry_on = no_retry_on
        parameters = list(inspect.signature(function).parameters.values())
        self.wants_context = bool(parameters) and parameters[0].name == CONTEXT
        signature = inspect.signature(function).replace(parameters=parameters[1:] if self.wants_context else parameters)
        try:
            hints = get_type_hints(function, include_extras=True)
        except (NameError, TypeError) as exc:
            raise ConfigurationError(f"handler {spec.name!r}: an annotation cannot be resolved: {exc}") from exc
        config = pydantic.ConfigDict(hide_input_in_errors=True)
        try:
            self._adapters = {
                name: pydantic.TypeAdapter(hints[name], config=None if _has_config(hints[name]) else config)
                for name in signature.parameters
                if name in hints
            }
        except pydantic.PydanticUserError as exc:
            raise ConfigurationError(f"handler {spec.name!r}: an annotation cannot be checked: {exc.message}") from exc
        super().__init__(spec, signature, {name: _check(adapter) for name, adapter in self._adapters.items()})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def run(self, context: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call it for one attempt, with the context if it wants one. A coroutine function has an event loop of its own; nothing it began goes on after its end."""
        given = (context, *args) if self.wants_context else args
        value = self.function(*given, **kwargs)
        return asyncio.run(value) if self.is_coroutine else value

    def retries(self, error: BaseException) -> bool:
        """Whether its policy may try again after this error."""
        return (not self._retry_on or isinstance(error, self._retry_on)) and not isinstance(error, self._no_retry_on)

    def entry(self) -> HandlerEntry:
        """What a worker tells of it."""
        empty = inspect.Parameter.empty
        return entry(
            self.spec,
            [
                Parameter(
                    name=p.name,
                    kind=p.kind.name,
                    required=p.default is empty and self._plain(p.name),
                    schema=described(self._adapters[p.name]) if p.name in self._adapters else {},
                )
                for p in self._signature.parameters.values()
            ],
        )

    def decode(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Stored arguments as the function's annotations want them. Raises TaskInvalid when the function has changed meanwhile."""
        try:
            bound = self._signature.bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                adapter = self._adapters.get(name)
                if adapter is not None and self._plain(name):
                    bound.arguments[name] = adapter.validate_python(value)
        except (TypeError, pydantic.ValidationError) as exc:
            raise TaskInvalid(f"handler {self.spec.name!r} does not take the arguments it was submitted with: {exc}") from exc
        return bound.args, bound.kwargs


def _check(adapter: pydantic.TypeAdapter[Any]) -> Check:
    def check(value: Any) -> Any:
        meant = adapter.validate_python(value)
        dumped = adapter.dump_python(meant)
        plain = _valued(dumped)
        restored = plain is dumped or _same(adapter.dump_python(adapter.validate_python(plain)), dumped)
        return plain if restored else dumped  # a member that would not come back as one is refused where it is encoded

    return check


def _valued(value: Any) -> Any:
    """With members of enums as their values, which is how they are given by name; the same object where there are none."""
    if isinstance(value, enum.Enum):
        return value.value
    if type(value) in (list, tuple):
        parts = [_valued(v) for v in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    if type(value) is dict:
        pairs = {_valued(k): _valued(v) for k, v in value.items()}
        return value if all(a is b for a, b in zip((*pairs, *pairs.values()), (*value, *value.values()), strict=True)) else pairs
    return value


def _same(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return _same(list(one.items()), list(other.items()))
    return bool(one == other)


def form_of(told: HandlerEntry) -> Form:
    """The form of a handler whose code is not here."""
    parameters = [
        inspect.Parameter(
            p.name, inspect._ParameterKind[p.kind], default=inspect.Parameter.empty if p.required or p.kind.startswith("VAR_") else None
        )
        for p in told.shape()
    ]
    checks = {p.name: check for p in told.shape() if (check := check_of(p.schema)) is not None}
    return Form(told.spec(), inspect.Signature(parameters), checks)


def _has_config(kind: Any) -> bool:
    """Whether a type brings a pydantic configuration of its own, to which an adapter may not add one."""
    if get_origin(kind) is Annotated:
        kind = kind.__origin__
    return (isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)) or hasattr(kind, "__pydantic_config__") or _dataclass(kind)


def _dataclass(kind: Any) -> bool:
    return hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__total__")


def require_name(handler: object) -> None:
    """Raises UnknownHandler for what can be no handler's name."""
    given.require("handler", handler, given.named(HANDLER), UnknownHandler)


class HandlerRegistry:
    """Handlers by name, and the schedules declared beside them. ``databases``: their users' own, for ``ctx.transaction(name)``."""

    def __init__(self, databases: Mapping[str, Source] | None = None) -> None:
        self.databases = dict(databases or {})
        self._handlers: dict[str, Handler] = {}
        self._declared: dict[str, Declaration] = {}

    def add(self, handler: Handler) -> None:
        """Raises ConfigurationError for a name that is taken by another function."""
        name = handler.spec.name
        known = self._handlers.get(name)
        if known is not None and known.function is not handler.function:
            raise ConfigurationError(f"two handlers are named {name!r}: give one of them another name")
        self._handlers[name] = handler

    def find(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def get(self, name: str) -> Handler:
        """Raises UnknownHandler."""
        require_name(name)
        found = self._handlers.get(name)
        if found is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise UnknownHandler(f"no handler named {name!r} is registered here (registered: {known}): import the module that defines it")
        return found

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._handlers))

    def queues(self) -> tuple[str, ...]:
        """Queues that handlers declare."""
        return tuple(sorted({h.spec.queue for h in self._handlers.values()}))

    def declare(self, schedule: Declaration) -> None:
        """Raises ConfigurationError for a name that is taken by another schedule."""
        if self._declared.setdefault(schedule.name, schedule) != schedule:
            raise ConfigurationError(f"two schedules are named {schedule.name!r}: give one of them another name")

    def declared(self) -> tuple[Declaration, ...]:
        """Schedules declared beside the handlers, by name."""
        return tuple(self._declared[name] for name in sorted(self._declared))

    def entries(self) -> tuple[HandlerEntry, ...]:
        """What a worker tells of them."""
        return tuple(self._handlers[name].entry() for name in self.names())
