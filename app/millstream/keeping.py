"""How long settled tasks are kept: the settings, for a namespace or for all of an installation.

Used by :class:`millstream.tasks.Tasks` and by the command line. What must never happen here: a time so short that a worker may still report about what is gone.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from millstream_schema import given
from millstream_schema.durable.requests import HANDLER, NAME
from millstream_schema.durable.retention import SHORTEST_US, RetentionRule, Scope
from millstream_schema.errors import ConfigurationError
from millstream_schema.store import retention
from millstream_schema.store.database import Database

from .bulk_acts import Runs

_QUEUE, _HANDLER = given.named(NAME, optional=True), given.named(HANDLER, optional=True)
LONGEST = dt.timedelta(days=36_500)


class Keeping:
    """Of one namespace; ``everywhere``: of every namespace that has no setting of its own."""

    def __init__(self, database: Database, run: Runs, namespace: str, actor: str) -> None:
        self._db = database
        self._run = run
        self._namespace = namespace
        self._actor = actor

    def rules(self) -> Sequence[RetentionRule]:
        """Those that this namespace has or shares. Without any, tasks are kept for 30 days after their end."""
        return [r for r in self._db.read(retention.rules) if r.namespace in ("", self._namespace)]

    @given.checked(time=given.a(dt.timedelta, optional=True), queue=_QUEUE, handler=_HANDLER, everywhere=given.flag)
    def keep(self, time: dt.timedelta | None, *, queue: str = "", handler: str = "", everywhere: bool = False) -> None:
        """Keep the settled tasks of a queue, of a handler or (without either) all of them for this long; None: for ever. The narrowest setting counts."""
        shortest = dt.timedelta(microseconds=SHORTEST_US)
        if time is not None and not shortest <= time <= LONGEST:
            raise ConfigurationError(f"the time must be between {shortest} and {LONGEST.days} days, not {time}; None keeps for ever")
        scope, name = _place(queue, handler)
        keep_us = 0 if time is None else time // dt.timedelta(microseconds=1)
        rule = RetentionRule(namespace="" if everywhere else self._namespace, scope=scope, name=name, keep_us=keep_us)
        self._run(lambda tx: retention.set_rule(tx, rule, self._actor))

    @given.checked(queue=_QUEUE, handler=_HANDLER, everywhere=given.flag)
    def drop(self, *, queue: str = "", handler: str = "", everywhere: bool = False) -> bool:
        """Back to the wider setting; whether there was one."""
        scope, name = _place(queue, handler)
        return self._run(lambda tx: retention.drop_rule(tx, "" if everywhere else self._namespace, scope, name))


def _place(queue: str, handler: str) -> tuple[Scope, str]:
    if queue and handler:
        raise ConfigurationError("give a queue or a handler, not both")
    return (Scope.QUEUE, queue) if queue else (Scope.HANDLER, handler) if handler else (Scope.ALL, "")
