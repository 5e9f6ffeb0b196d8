"""``Handlers``: the durable tasks of a user's program.

::

    handlers = Handlers()

    @handlers.task(effects="idempotent", attempts=5)
    def send_invoice(number: int) -> str: ...

Made when the user's module is imported, given to clients and workers. What must never happen here: an option that is taken and not honoured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, overload

from millstream_schema.durable.records import Policy, Receipt
from millstream_schema.durable.requests import HANDLER, NAME, HandlerSpec, Options
from millstream_schema.durable.states import Effects
from millstream_schema.errors import ConfigurationError
from millstream_tasks.durable.handlers import Handler, HandlerRegistry

from .celery_options import translated


class Submitter(Protocol):
    """The client that ``.delay()`` and ``.apply_async()`` submit by: :class:`millstream.Tasks`."""

    def submit_with(
        self,
        handler: str | Handler,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: str = "",
        options: Options | None = None,
    ) -> Receipt: ...


DEFAULT_ATTEMPTS = {Effects.IDEMPOTENT: 5, Effects.TRANSACTIONAL: 5, Effects.EXTERNAL: 1}


class DurableHandler(Handler):
    """A registered function with Celery's calling conventions. Calling it calls the function."""

    def __init__(self, function: Callable[..., Any], spec: HandlerSpec, home: Handlers) -> None:
        super().__init__(function, spec)
        self._home = home

    def delay(self, *args: Any, **kwargs: Any) -> Receipt:
        """Submit by the client the handlers are bound to. Raises TaskInvalid, StoreUnavailable, ConfigurationError (no client is bound)."""
        return self._home.client.submit_with(self, args, kwargs)

    def apply_async(self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any) -> Receipt:
        """Likewise, with Celery's options: ``countdown``, ``eta``, ``expires``, ``task_id`` (the key), ``queue``, ``priority``, and ``key``, ``business_key``, ``deadline``.

        Raises TaskInvalid naming each option that cannot be honoured (``link``, ``link_error``, ``chord`` …) and what to use instead; TaskConflict.
        """
        found = translated(options)
        return self._home.client.submit_with(self, tuple(args or ()), kwargs, key=found.key, options=found.options)


class Handlers:
    """Registers functions as handlers of durable tasks."""

    def __init__(self) -> None:
        self.registry = HandlerRegistry()
        self._client: Submitter | None = None

    def bind(self, client: Submitter) -> None:
        """Have ``.delay()`` and ``.apply_async()`` of these handlers submit by ``client``. :meth:`millstream.Millstream.tasks` does it."""
        self._client = client

    @property
    def client(self) -> Submitter:
        """Raises ConfigurationError when none is bound."""
        if self._client is None:
            raise ConfigurationError(
                "these handlers have no client to submit by: call millstream.tasks(handlers), or handlers.bind(Tasks(...))"
            )
        return self._client

    @overload
    def task(self, function: Callable[..., Any], /) -> DurableHandler: ...

    @overload
    def task(
        self,
        *,
        name: str = "",
        queue: str = "default",
        effects: str = "external",
        attempts: int | None = None,
        delay: float = 1.0,
        max_delay: float = 600.0,
        permit: str = "",
        capacity: int = 1,
        ordered: bool = False,
        option_names: bool = False,
    ) -> Callable[[Callable[..., Any]], DurableHandler]: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str = "",
        queue: str = "default",
        effects: str = "external",
        attempts: int | None = None,
        delay: float = 1.0,
        max_delay: float = 600.0,
        permit: str = "",
        capacity: int = 1,
        ordered: bool = False,
        option_names: bool = False,
    ) -> DurableHandler | Callable[[Callable[..., Any]], DurableHandler]:
        """Register a function; used with or without options.

        ``effects``: what repeating it would do: ``idempotent`` | ``transactional`` | ``external`` (the default: it is never repeated by itself).
        ``attempts``: how often it may raise (5; 1 for external). ``delay``, ``max_delay``: seconds before the second attempt, doubled for each further one up
        to the limit. ``permit``: a resource that at most ``capacity`` tasks use at once, e.g. ``"account:{number}"`` with places for arguments; ``ordered``:
        a task that is tried again keeps its place. ``option_names``: it has parameters named like options of ``submit`` (``key``, ``delay``, …) and is submitted by
        ``submit_with(handler, args, kwargs, key=…, options=…)`` alone. Raises ConfigurationError.
        """
        if function is None:
            given = (name, queue, effects, attempts, delay, max_delay, permit, capacity, ordered, option_names)
            return lambda f: self._register(f, *given)
        return self._register(function, name, queue, effects, attempts, delay, max_delay, permit, capacity, ordered, option_names)

    def _register(
        self,
        function: Callable[..., Any],
        name: str,
        queue: str,
        effects: str,
        attempts: int | None,
        delay: float,
        max_delay: float,
        permit: str,
        capacity: int,
        ordered: bool,
        option_names: bool,
    ) -> DurableHandler:
        own = name or f"{function.__module__}.{function.__qualname__}"
        problems = _problems(function, own, queue, effects, attempts, delay, max_delay, capacity)
        if ordered and not permit:
            problems.append("ordered needs a permit: the order is that of the tasks that want the same one")
        if problems:
            raise ConfigurationError(f"handler {own!r}: " + "; ".join(problems))
        kind = Effects(effects)
        policy = Policy(
            attempts=DEFAULT_ATTEMPTS[kind] if attempts is None else attempts, delay_ms=int(delay * 1000), max_delay_ms=int(max_delay * 1000), permit_capacity=capacity,
        )  # fmt: skip
        handler = DurableHandler(
            function, HandlerSpec(name=own, queue=queue, effects=kind, policy=policy, permit=permit, ordered=ordered), self
        )
        if handler.taken_names and not option_names:
            raise ConfigurationError(
                f"handler {own!r}: submit() would take its parameters {', '.join(handler.taken_names)} for options of its own: name them otherwise, or declare "
                "option_names=True and submit with submit_with(handler, args, kwargs, key=..., options=Options(...))"
            )
        self.registry.add(handler)
        return handler


def _problems(
    function: Callable[..., Any], name: str, queue: str, effects: str, attempts: int | None, delay: float, max_delay: float, capacity: int
) -> list[str]:
    found = []
    if inspect.iscoroutinefunction(function):
        found.append("coroutine functions are not supported yet: register a plain function")
    if not HANDLER.match(name):
        found.append(f"its name must match {HANDLER.pattern}: give name=")
    if not NAME.match(queue):
        found.append(f"queue {queue!r} must match {NAME.pattern}")
    if effects not in set(Effects):
        found.append(f"effects must be one of {', '.join(Effects)}, not {effects!r}")
    if attempts is not None and (type(attempts) is not int or not 1 <= attempts <= 1_000_000):
        found.append(f"attempts must be a whole number between 1 and 1000000, not {attempts!r}")
    if not 0 <= delay <= max_delay <= 30 * 86_400:
        found.append(f"delay and max_delay must be seconds with 0 <= delay <= max_delay <= {30 * 86_400}, not {delay} and {max_delay}")
    if type(capacity) is not int or not 1 <= capacity <= 1_000_000:
        found.append(f"capacity must be a whole number between 1 and 1000000, not {capacity!r}")
    return found
