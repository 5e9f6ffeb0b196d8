"""Handlers and queues as a client knows them: those registered here by object, those that workers told of by name.

Used by :class:`millstream.tasks.Tasks`. What must never happen here: a look into the database for a handler that is registered here and its own queue; a request accepted for a
handler or queue nobody has heard of.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from millstream_schema.durable.catalogue import current
from millstream_schema.durable.requests import NAME
from millstream_schema.errors import TaskInvalid, UnknownHandler, UnknownQueue
from millstream_schema.ports import Clock
from millstream_schema.store import catalogue
from millstream_schema.store.database import Database
from millstream_tasks.durable.handlers import Form, Handler, HandlerRegistry, form_of, require_name

KEPT = 5.0
"""Seconds for which what was read is good enough. What is not found is looked for again at once."""
NAMES = 2_000
"""Known handlers that are compared with a mistyped one, at most."""


class Catalogue:
    """Safe to use from several threads: each reads for itself what it misses."""

    def __init__(self, database: Database, clock: Clock, registry: HandlerRegistry) -> None:
        self._db = database
        self._clock = clock
        self._registry = registry
        self._forms: dict[str, tuple[float, Form]] = {}
        self._queues: tuple[float, frozenset[str]] = (0.0, frozenset())

    def form(self, handler: str | Handler) -> Form:
        """What a request for a handler must look like; as it is registered here, else in the version that counts among the workers'. Raises UnknownHandler."""
        if isinstance(handler, Handler):
            return handler
        require_name(handler)
        here = self._registry.find(handler)
        if here is not None:
            return here
        until, form = self._forms.get(handler, (0.0, None))
        now = self._clock.monotonic()
        if form is None or now >= until:
            form = self._told(handler)
            self._forms[handler] = (now + KEPT, form)
        return form

    def _told(self, name: str) -> Form:
        versions, live = self._db.read(lambda tx: (catalogue.versions(tx, name), catalogue.live_sessions(tx)))
        chosen = current(versions, live.values())
        if chosen is not None:
            return form_of(chosen)
        known = {*self._registry.names(), *self._db.read(lambda tx: catalogue.names(tx, NAMES))}
        raise UnknownHandler(
            f"no handler named {name!r} is registered here or served by a worker ({_nearby(name, known)}): "
            "import the module that defines it, or start a worker that has it"
        )

    def require_queue(self, queue: str) -> None:
        """Raises UnknownQueue for one that no handler declares and no worker session serves."""
        if not queue or not isinstance(queue, str) or queue in self._registry.queues() or not NAME.match(queue):
            return  # what cannot be a name is refused with the other options
        until, known = self._queues
        now = self._clock.monotonic()
        if queue not in known or now >= until:
            declared, live = self._db.read(lambda tx: (catalogue.queues(tx), catalogue.live_sessions(tx)))
            known = frozenset(declared.union(*[s.queues for s in live.values()]))
            self._queues = (now + KEPT, known)
        if queue not in known:
            raise UnknownQueue(
                f"queue {queue!r} is declared by no handler and served by no worker ({_nearby(queue, {*known, *self._registry.queues()})})"
            )


def require_options_apart(form: Form, how: str) -> None:
    """Raises TaskInvalid for a handler whose parameters are named like options, where the two are given together."""
    if form.taken_names:
        raise TaskInvalid(
            f"handler {form.spec.name!r}: {how} would take its parameters {', '.join(form.taken_names)} for options: "
            "use submit_with(handler, args, kwargs, key=..., options=Options(...))"
        )


def _nearby(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, 3, 0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    return f"known: {shown or 'none'}"
