"""``Handlers``: the durable tasks of a user's program.

::

    handlers = Handlers()

    @handlers.task(effects="idempotent", attempts=5)
    def send_invoice(number: int) -> str: ...

Made when the user's module is imported, given to clients and workers. What must never happen here: an option that is taken and not honoured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Unpack, overload

from millstream_schema.durable.records import Receipt
from millstream_schema.durable.requests import NAME, Options
from millstream_schema.errors import ConfigurationError
from millstream_tasks.durable.answers import Reconcile
from millstream_tasks.durable.handlers import Errors, Handler, HandlerRegistry, Source

from .celery_options import CALLS, translated, undeclared
from .declarations import Declared, classes
from .results import TaskResult
from .schedule_terms import Terms, When, declaration


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

    def result(self, task: str | Receipt) -> TaskResult: ...


class DurableHandler(Handler):
    """A registered function with Celery's calling conventions. Calling it calls the function."""

    def __init__(self, function: Callable[..., Any], name: str, given: Declared, home: Handlers) -> None:
        super().__init__(
            function, given.spec(name), retry_on=classes(given.retry_on), no_retry_on=classes(given.no_retry_on), reconcile=given.reconcile
        )
        self._home = home

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            raise AttributeError(f"a durable task has no {name}: use instead: {CALLS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def delay(self, *args: Any, **kwargs: Any) -> TaskResult:
        """Submit by the client the handlers are bound to. Raises TaskInvalid, StoreUnavailable, ConfigurationError (no client is bound)."""
        client = self._home.client
        return client.result(client.submit_with(self, args, kwargs))

    def apply_async(self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any) -> TaskResult:
        """Likewise, with Celery's options: ``countdown``, ``eta``, ``expires``, ``task_id`` (the key), ``queue``, ``priority``, and ``key``, ``business_key``, ``deadline``.

        Raises TaskInvalid naming each option that cannot be honoured (``link``, ``link_error``, ``chord`` …) and what to use instead; TaskConflict.
        """
        found, client = translated(options), self._home.client
        return client.result(client.submit_with(self, tuple(args or ()), kwargs, key=found.key, options=found.options))


class Handlers:
    """Registers functions as handlers of durable tasks.

    ``databases``: those of your own that handlers use by ``ctx.transaction(name)``: name → SQLAlchemy URL, or a function that gives it when it is first needed. Each needs the
    marker table: ``millstream markers init``. Raises ConfigurationError.
    """

    def __init__(self, *, databases: Mapping[str, Source] | None = None) -> None:
        wrong = [
            name for name, source in (databases or {}).items() if not NAME.match(name) or not (isinstance(source, str) or callable(source))
        ]
        if wrong:
            raise ConfigurationError(
                f"databases: {', '.join(map(repr, wrong))}: names must match {NAME.pattern}, and stand for a URL or a function that gives it"
            )
        self.registry = HandlerRegistry(databases)
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
        jitter: float = 0.2,
        permit: str = "",
        capacity: int = 1,
        ordered: bool = False,
        run: float = 0.0,
        grace: float = 5.0,
        heartbeat: float = 30.0,
        start_by: float = 0.0,
        deadline: float = 0.0,
        crashes: int = 3,
        losses: int = 20,
        snoozes: int = 1_000,
        intents_only: bool = False,
        reconcile: Reconcile | None = None,
        retry_on: type[BaseException] | Errors = (),
        no_retry_on: type[BaseException] | Errors = (),
        option_names: bool = False,
    ) -> Callable[[Callable[..., Any]], DurableHandler]: ...

    def task(
        self, function: Callable[..., Any] | None = None, **declared: Any
    ) -> DurableHandler | Callable[[Callable[..., Any]], DurableHandler]:
        """Register a function; used with or without options. Times in seconds.

        ``effects``: what repeating it would do: ``idempotent`` | ``transactional`` | ``external`` (the default: it is never repeated by itself).

        Trying again: ``attempts``: how often it may raise (5; 1 for external, unless ``intents_only``). ``delay``, ``max_delay``: before the second attempt, doubled for each
        further one up to the limit; ``jitter``: the part of it that chance takes off. ``retry_on``, ``no_retry_on``: exception classes that are, or are not, tried again.
        ``snoozes``: how often it may put itself off; ``crashes``, ``losses``: how often it may take its process along, or lose its worker, before a person is asked.
        ``intents_only``: all its effects go through ``ctx.external``, so that an end without an open call leaves nothing unknown.
        ``reconcile``: a function that is asked, with an :class:`Intent`, what became of a call that was begun and whose outcome is not known: it gives ``Done(result)``,
        ``NotDone()`` or ``OutcomeUnknown(reason)``. Without one a person decides.

        Limits: ``run``: of one attempt, after which it is told (``ctx.cancelled``, ``ctx.time_left``), and killed ``grace`` later (0: none; threads are told only).
        ``heartbeat``: how long its process may be silent. ``start_by``, ``deadline``: as in ``Tasks.submit``, for submissions that name none.

        Places: ``queue``; ``permit``: a resource that at most ``capacity`` tasks use at once, e.g. ``"account:{number}"`` with places for arguments; ``ordered``:
        a task that is tried again keeps its place.

        ``option_names``: it has parameters named like options of ``submit`` (``key``, ``delay``, …) and is submitted by
        ``submit_with(handler, args, kwargs, key=…, options=…)`` alone. Raises ConfigurationError.
        """
        problems = undeclared(declared, Declared.__struct_fields__)
        if problems:
            raise ConfigurationError(f"@handlers.task: {problems}")
        if function is not None and not callable(function):
            raise ConfigurationError(f"@handlers.task takes a function, and its options by name: write name={function!r:.80}")
        given = Declared(**declared)
        if function is None:
            return lambda f: self._register(f, given)
        return self._register(function, given)

    def _register(self, function: Callable[..., Any], given: Declared) -> DurableHandler:
        name = given.name or f"{function.__module__}.{function.__qualname__}"
        problems = given.problems(function, name)
        if problems:
            raise ConfigurationError(f"handler {name!r}: " + "; ".join(problems))
        handler = DurableHandler(function, name, given, self)
        if handler.taken_names and not given.option_names:
            raise ConfigurationError(
                f"handler {name!r}: submit() would take its parameters {', '.join(handler.taken_names)} for options of its own: name them otherwise, or declare "
                "option_names=True and submit with submit_with(handler, args, kwargs, key=..., options=Options(...))"
            )
        self.registry.add(handler)
        return handler

    def schedule(
        self,
        name: str,
        handler: str | Handler,
        when: When,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Options | None = None,
        **terms: Unpack[Terms],
    ) -> None:
        """Declare a schedule beside its handler: workers that start, and ``millstream schedules sync``, publish it where it has changed.

        ``when``: a cron expression, a timedelta, an aware datetime. ``terms``: see :class:`~millstream.schedule_terms.Terms`. Raises ScheduleInvalid, TaskInvalid.
        """
        known = handler.spec.name if isinstance(handler, Handler) else handler
        self.registry.declare(declaration(name, known, when, args, kwargs, options, terms))
